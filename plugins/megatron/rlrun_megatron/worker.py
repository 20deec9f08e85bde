"""One rank's part of one role's model, in Megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlrun.batch import Atom, Batch, to_device
from rlrun.memory import empty_cache
from rlrun.metrics import Value
from rlrun.models.attention import Packed
from rlrun.models.folder import load_config
from rlrun.models.images import has_images
from rlrun.workers.protocol import Kind, Layout, Loss, RoleSpec
from rlrun.workers.schedule import lr_factor
from rlrun.workers.training import Terms, agreed_micro_batches, guarded_step
from rlrun_megatron.checkpoint import load_initial
from rlrun_megatron.families import bridged
from rlrun_megatron.groups import arrange
from rlrun_megatron.layers import Row
from rlrun_megatron.model import Head, Stage, init_value_head, transformer_config
from rlrun_megatron.offload import Host, storages
from rlrun_megatron.optimizer import buffers, grad_square, grads, make_optimizer, tensors, wrap
from rlrun_megatron.plugin import MegatronConfig
from rlrun_megatron.weights import Stream, load


class MegatronWorker:
    """A GPT model of Megatron's, cut over ranks as the configuration says.

    Parameters are kept in model.dtype; of those that train and are below float32, the optimizer has a copy in float32.
    """

    def __init__(self, spec: RoleSpec, layout: Layout) -> None:
        self.spec, self.layout = spec, layout
        self.config = spec.config.section("megatron", MegatronConfig)
        self.dtype: torch.dtype = getattr(torch, spec.config.model.dtype)
        self.master = torch.promote_types(self.dtype, torch.float32)
        path, head, trains = spec.request.path, spec.request.head, spec.request.trainable
        assert path is not None
        self.hf = load_config(path)
        with self.on_device():
            arrange(self.config, spec.config.run.seed if self.config.seed is None else self.config.seed)
            fused, recompute = spec.device.type == "cuda", trains and spec.config.model.gradient_checkpointing
            self.row: type[Row] = Row
            if bridged(self.hf):
                self._bridge(path, head, recompute, fused)
            else:
                self.transformer = transformer_config(self.hf, self.config, self.dtype, recompute, fused)
                self._build(path, head)
            self.model: list[Any] = [stage.requires_grad_(trains) for stage in self.stages]
            self.optimizer = self._make_optimizer() if trains else None
        self.updates = 0
        """Optimizer steps taken in this stage: what the learning-rate schedule counts."""
        self.host = {"model": Host(), "gradients": Host(), "optimizer": Host()}

    def _build(self, path: str, head: Head) -> None:
        """Our own model, with its initial weights."""
        spec, pieces = self.spec, self.config.virtual_pipeline_model_parallel_size
        self.stages = [Stage(self.hf, self.transformer, head, self.master, number)
                       for number in (range(pieces) if pieces else [None])]
        if self.config.dist_checkpointing_path is not None and path == spec.config.model.path:
            whole = load_initial(self.stages, self.hf, head, self.config.dist_checkpointing_path)
        else:
            stored = self.dtype if spec.request.trainable else getattr(torch, spec.request.dtype)
            whole = load(self.stages, self.hf, head, path, stored)
        if not whole and self.stages[-1].post_process:
            init_value_head(self.stages[-1], spec.config.run.seed)
        self.stream: Callable[[], Iterator[tuple[str, Tensor]]] = Stream(self.stages, self.hf, head, self.dtype, spec.device)

    def _bridge(self, path: str, head: Head, recompute: bool, fused: bool) -> None:
        """A model of Megatron-Bridge's, with its initial weights."""
        from rlrun_megatron.bridge import Bridged, EngineRow

        if self.config.use_dist_checkpointing:
            raise ValueError(f"megatron.use_dist_checkpointing is not supported for {self.hf.model_type} models")
        found = Bridged(path, self.hf, head, self.config, self.dtype, recompute, fused)
        self.row, self.transformer, self.stages, self.stream = EngineRow, found.transformer, found.stages, found.weights

    def on_device(self) -> AbstractContextManager[None]:
        """Where calls of Megatron find what they ask of a GPU."""
        if self.spec.device.type == "cuda":
            return nullcontext()
        from rlrun_megatron.cpu import emulated

        return emulated()

    def _make_optimizer(self) -> ChainedOptimizer:
        """Wrap the model for data parallelism, and make what updates it."""
        self.optim = self.spec.request.optim or self.spec.config.actor.optim
        distributed = self.config.use_distributed_optimizer and self.optim.name == "adamw"  # SGD has no state that could be cut
        self.model = wrap(self.stages, self.transformer, distributed, self.config.override_ddp_config)
        return make_optimizer(self.model, self.optim, self.dtype, distributed, self.spec.device.type == "cuda")

    def forward(self, batch: Batch, want: AbstractSet[str], temperature: float) -> dict[str, Tensor]:
        """See `Worker.forward`. Columns are on the CPU."""
        plain = Batch(batch.cu_seqlens, {name: batch.tokens[name] for name in ("ids", "loss_mask")}, {}, batch.ragged)
        parts = self._micro_batches(plain, "sequence")
        with torch.no_grad():
            outputs = self._run([plain.select(rows) for rows in parts], frozenset(want), temperature, _keep_outputs, True)
        return self._columns(batch, parts, outputs, want)

    def update(
        self, batch: Batch, loss: Loss, denominators: Mapping[str, float], temperature: float, atom: Atom = "sequence",
        keep: dict[str, Tensor] | None = None,
    ) -> dict[str, Value]:
        """See `Worker.update`."""
        assert self.optimizer is not None, f"{self.spec.role} is frozen"
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self._micro_batches(batch, atom)
        terms = Terms(denominators)
        measured = partial(_losses, loss, terms, self.spec.device)
        outputs = self._run([batch.select(rows) for rows in parts], self.spec.want, temperature, measured, False)
        if keep is not None:
            keep.update(self._columns(batch, parts, outputs, self.spec.want))
        return self._step() | self._reduced(terms)

    def _columns(self, batch: Batch, parts: list[list[int]], outputs: list[dict[str, Tensor]],
                 want: AbstractSet[str]) -> dict[str, Tensor]:
        """Columns [T] in the batch's order, on the CPU of every rank, from those of micro-batches on the last stage."""
        pipeline, names = parallel_state.get_pipeline_model_parallel_group(), sorted(want)
        columns = torch.zeros(len(names), batch.num_tokens, dtype=self.master, device=self.spec.device)
        if not batch.num_tokens:
            return dict(zip(names, columns.cpu()))
        if outputs:
            places = Batch(batch.cu_seqlens, {"index": torch.arange(batch.num_tokens)})
            index = torch.cat([places.select(rows).tokens["index"] for rows in parts])
            done = [torch.stack([one[name] for name in names]) for one, rows in zip(outputs, parts) if rows]
            columns[:, to_device(index, self.spec.device)] = torch.cat(done, 1)
        if pipeline.size() > 1:
            dist.broadcast(columns, group_src=pipeline.size() - 1, group=pipeline)
        return dict(zip(names, columns.cpu()))

    def _run(self, micros: list[Batch], want: frozenset[str], temperature: float,
             loss: Callable[[Batch, dict[str, Tensor]], tuple[Tensor, Tensor, dict[str, Tensor]]],
             forward_only: bool) -> list[dict[str, Tensor]]:
        """Each micro-batch through the pipeline. Returns what `loss` returns of each."""

        multiple = self.config.context_parallel_size * (
            self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1)
        if self.config.virtual_pipeline_model_parallel_size:  # all of one length
            multiple *= -(-max(max(micro.num_tokens for micro in micros), 2) // multiple)

        def step(batches: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Any]]:
            micro = next(batches)
            row = self._row(micro, multiple, want, temperature)
            output = model(row.ids[None], row.position_ids[None], None, packed_seq_params=row)
            return output, partial(loss, micro)

        with self.on_device():
            results: list[dict[str, Tensor]] = get_forward_backward_func()(
                forward_step_func=step, data_iterator=[iter(micros) for _ in self.model], model=self.model,
                num_microbatches=len(micros), seq_length=multiple, micro_batch_size=1, forward_only=forward_only)
        return results

    def _row(self, micro: Batch, multiple: int, want: frozenset[str], temperature: float) -> Row:
        """This rank's part of a micro-batch, the same on tensor-parallel ranks, filled up to a multiple; of an empty one, tokens
        that nothing is computed of, so that all ranks do the same."""
        device, ids, mask, positions = self.spec.device, micro.tokens["ids"], micro.tokens["loss_mask"], micro.position_ids
        cu_seqlens = micro.cu_seqlens
        if micro.num_tokens == 0:
            ids, positions, cu_seqlens = torch.zeros(2, dtype=torch.int64), torch.arange(2), torch.tensor([0, 2])
            mask = ids > 0
        # Hidden state p predicts token p + 1. The shift is done on the whole row, before it is cut over ranks.
        cp, rank, padding = self.config.context_parallel_size, parallel_state.get_context_parallel_rank(), -len(ids) % multiple
        columns = (torch.nn.functional.pad(x, (0, padding)) for x in (ids, positions, ids.roll(-1), mask.roll(-1)))
        local, positions, targets, predicted = (x.chunk(cp)[rank] for x in columns)
        chosen, there = predicted.nonzero()[:, 0], to_device(positions, device)
        return self.row(to_device(local, device), there, to_device(chosen, device), to_device(targets[chosen], device),
                   *self.stages[0].angles(there), Packed.of(cu_seqlens, device, multiple), len(ids), want, temperature)

    def _micro_batches(self, batch: Batch, atom: Atom) -> list[list[int]]:
        if has_images(batch.ragged):
            raise ValueError("the batch has images, which the megatron backend does not read: take fsdp")
        together = self.config.pipeline_model_parallel_size if self.config.virtual_pipeline_model_parallel_size else 1
        return agreed_micro_batches(batch, self.spec.config.actor.tokens_per_micro_batch, atom, self.spec.device, together)

    @torch.no_grad()
    def _step(self) -> dict[str, Value]:
        optimizer = self.optimizer
        assert optimizer is not None
        lr = self.optim.lr * lr_factor(self.updates, self.optim, self.spec.total_updates)
        with self.on_device():
            optimizer.prepare_grads()
            metrics = guarded_step(optimizer, optimizer.step_with_ready_grads, lambda: grads(optimizer),
                                   grad_square(optimizer, self.spec.device), lr, self.optim.clip_grad)
        self.updates += not metrics["skipped"].total
        return metrics

    def _reduced(self, terms: Terms) -> dict[str, Value]:
        everyones: list[dict[tuple[str, Kind], float] | None] = [terms.numbers()] * self.layout.ranks
        if self.layout.ranks > 1:
            dist.all_gather_object(everyones, everyones[0] if self._reports() else None)
        return terms.values([part for part in everyones if part is not None])

    def _reports(self) -> bool:
        """Whether this rank speaks for its shard: one of those that compute its loss."""
        first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
        return first and parallel_state.is_pipeline_last_stage()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under save_pretrained's names, in model.dtype, on this rank's device."""
        return self.stream()

    def onload(self, model: bool = True, optimizer: bool = True) -> None:
        """See `Worker.onload`; gradients come back with the optimizer."""
        for name, wanted in (("model", model), ("gradients", optimizer), ("optimizer", optimizer)):
            if wanted:
                self.host[name].give_back()

    def offload(self, model: bool = True, optimizer: bool = True) -> None:
        """See `Worker.offload`; what the configuration leaves on the device stays there."""
        config, parameters = self.config, [p for stage in self.stages for p in stage.parameters()]
        if optimizer and self.optimizer is not None:
            if config.optimizer_offload:  # without float32 copies, it updates the model's own parameters
                own = storages(parameters)
                self.host["optimizer"].take(x for x in tensors(self.optimizer) if x.untyped_storage()._cdata not in own)
            if config.grad_offload:  # an update begins with zeros
                self.host["gradients"].take((buffer.grad_data for buffer in buffers(self.model)), keep=False)
        if model and config.param_offload:
            self.host["model"].take(parameters)
        if config.param_offload or config.grad_offload or config.optimizer_offload:
            empty_cache(self.spec.device)


def _keep_outputs(micro: Batch, outputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    first = next(iter(outputs.values()))
    return first.new_zeros(()), torch.zeros((), dtype=torch.int), outputs


def _losses(loss: Loss, terms: Terms, device: torch.device, micro: Batch,
            outputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A micro-batch's part of the global loss, which no schedule divides where it comes with a number of tokens."""
    total = terms.loss(outputs, loss(outputs, micro.to(device)) if len(micro) else {})
    return total, torch.zeros((), dtype=torch.int, device=device), {name: x.detach() for name, x in outputs.items()}

"""The plainest backend: every rank has the whole model, and gradients are added over ranks. With it a plugin is tested without
any other plugin, and a backend compared. It is a plugin in a file: list `plain.__file__` and take `actor.backend` "plain"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rlrun.batch import Atom, Batch, inverse
from rlrun.config.schema import Config
from rlrun.hookspecs import API_VERSION, PluginInfo, hookimpl
from rlrun.metrics import Value
from rlrun.models.loading import load_policy, saved_weights
from rlrun.workers.protocol import Layout, Loss, RoleSpec
from rlrun.workers.schedule import lr_factor
from rlrun.workers.training import Terms, agreed_micro_batches, guarded_step


@hookimpl
def plugin_info() -> PluginInfo:
    return PluginInfo("plain", API_VERSION, provides={"backend": {"plain": "plain:Plain"}})


@hookimpl
def make_worker(spec: RoleSpec, layout: Layout) -> PlainWorker:
    return PlainWorker(spec, layout)


class Plain:
    """Ranks of one shard of data are neighbours."""

    @staticmethod
    def layout(config: Config, ranks: int, sp: int) -> Layout:
        """`ranks` / `sp` data-parallel shards. Raises ValueError where `sp` does not divide `ranks`."""
        if ranks % sp:
            raise ValueError(f"{ranks} training ranks are no multiple of the sequence-parallel size {sp}")
        return Layout(ranks // sp, tuple(rank // sp for rank in range(ranks)), tuple(range(0, ranks, sp)))

    @staticmethod
    def memory_bytes(config: Config, parameters: int, layout: Layout, trainable: bool) -> int:
        """Parameters in float64, and where they train gradients and AdamW's two moments."""
        return 8 * parameters * (4 if trainable else 1)


class PlainWorker:
    """A PolicyModel in `model.dtype`, on the CPU. No checkpoints."""

    def __init__(self, spec: RoleSpec, layout: Layout) -> None:
        assert spec.request.path is not None
        self.spec, self.layout, self.updates = spec, layout, 0
        self.optim = spec.request.optim or spec.config.actor.optim
        mesh = init_device_mesh("cpu", (layout.dp, layout.ranks // layout.dp), mesh_dim_names=("dp", "sp"))
        self.model = load_policy(spec.request.path, spec.request.head, getattr(torch, spec.request.dtype), spec.config.run.seed)
        self.model.requires_grad_(spec.request.trainable)
        if spec.request.trainable and spec.config.model.gradient_checkpointing:
            self.model.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        self.model.sequence_parallel = spec.plugins.patch_attention(model=self.model.model, spec=spec, mesh=mesh)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        adamw: dict[str, Any] = {"betas": tuple(self.optim.betas), "eps": self.optim.eps, "weight_decay": self.optim.weight_decay}
        self.optimizer = (None if not self.parameters else torch.optim.SGD(self.parameters) if self.optim.name == "sgd" else
                          torch.optim.AdamW(self.parameters, **adamw))

    def forward(self, batch: Batch, want: AbstractSet[str], temperature: float) -> dict[str, Tensor]:
        """See `Worker.forward`."""
        columns = {name: torch.zeros(batch.num_tokens, dtype=self.model.model.dtype) for name in want}
        parts = self._micro_batches(batch, "sequence")
        with torch.no_grad():
            done = [Batch(micro.cu_seqlens, self._outputs(micro, want, temperature)) for micro in map(batch.select, parts)]
        return columns | (Batch.concat(done).select(inverse(parts)).tokens if done else {})

    def update(self, batch: Batch, loss: Loss, denominators: Mapping[str, float], temperature: float, atom: Atom = "sequence",
               keep: dict[str, Tensor] | None = None) -> dict[str, Value]:
        """See `Worker.update`."""
        assert self.optimizer is not None, f"{self.spec.role} is frozen"
        self.optimizer.zero_grad()
        terms, parts = Terms(denominators), self._micro_batches(batch, atom)
        done: list[Batch] = []
        for micro in map(batch.select, parts):
            outputs = self._outputs(micro, self.spec.want, temperature)
            done.append(Batch(micro.cu_seqlens, {name: column.detach() for name, column in outputs.items()}))
            terms.loss(outputs, loss(outputs, micro)).backward()
        if keep is not None and done:
            keep.update(Batch.concat(done).select(inverse(parts)).tokens)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for p, grad in zip(self.parameters, grads):
            dist.all_reduce(grad)
            p.grad = grad
        square = float(torch.stack([grad.double().square().sum() for grad in grads]).sum())
        lr = self.optim.lr * lr_factor(self.updates, self.optim, self.spec.total_updates)
        metrics = guarded_step(self.optimizer, self.optimizer.step, lambda: grads, square, lr, self.optim.clip_grad)
        self.updates += not metrics["skipped"].total
        numbers: list[Any] = [None] * self.layout.ranks
        dist.all_gather_object(numbers, terms.numbers())
        return metrics | terms.values([numbers[rank] for rank in self.layout.result_ranks])

    def _micro_batches(self, batch: Batch, atom: Atom) -> list[list[int]]:
        parts = agreed_micro_batches(batch, self.spec.config.actor.tokens_per_micro_batch, atom, self.spec.device)
        return [rows for rows in parts if rows]  # ranks meet in what a sequence-parallel group shares, and after the last

    def _outputs(self, micro: Batch, want: AbstractSet[str], temperature: float) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self.model(
            self.model.row(micro.tokens["ids"], micro.cu_seqlens, micro.position_ids, micro.tokens["loss_mask"],
                           ragged=micro.ragged), want, temperature)
        return outputs

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Worker.weights`."""
        return saved_weights(self.model, lambda tensors: (x.detach() for x in tensors))

    def onload(self, model: bool = True, optimizer: bool = True) -> None:
        """Nothing is ever away."""

    def offload(self, model: bool = True, optimizer: bool = True) -> None:
        """Nothing to give back."""

"""One rank's part of one role's model, sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from rlrun.batch import Atom, Batch, inverse
from rlrun.memory import empty_cache
from rlrun.metrics import Value
from rlrun.models.loading import saved_weights
from rlrun.workers.protocol import Kind, Layout, Loss, RoleSpec
from rlrun.workers.schedule import lr_factor
from rlrun.workers.training import Terms, agreed_micro_batches, guarded_step
from rlrun_fsdp.checkpoint import Staging, save
from rlrun_fsdp.lora import adapters, add_adapters, switched_off
from rlrun_fsdp.plugin import FsdpConfig
from rlrun_fsdp.sharding import fill, gather, load_first, materialize, tensors_of

_GATHERED_SHARE = 0.25
"""Of a device's memory: what the whole model and its gradients may take for `keep_gathered`."""


class FsdpWorker:
    """A PolicyModel whose decoder layers and root are sharded over all ranks, or over the ranks of one replica.

    Parameters that train are kept in float32 (float64 where model.dtype is) and cast to model.dtype for each use;
    gradients are reduced in the parameters' dtype. Frozen models are stored in their own dtype and computed with like
    the actor, so that equal weights give equal log-probabilities.

    What a subclass may rely on: `optimizer` (None where frozen; stepped once an update, after clipping, and not where the
    update is skipped, so that its step hooks are the place to change gradients or look at steps), `parameters` (those that
    train: DTensors), `updates` (steps taken in this stage, as a checkpoint has it), `spec` and `model`.
    """

    def __init__(self, spec: RoleSpec, layout: Layout) -> None:
        self.spec = spec
        self.config = spec.config.section("fsdp", FsdpConfig)
        self.dtype: torch.dtype = getattr(torch, spec.config.model.dtype)
        self.master = torch.promote_types(self.dtype, torch.float32)
        self.mesh = init_device_mesh(
            spec.device.type, (layout.dp, layout.ranks // layout.dp), mesh_dim_names=("dp", "sp"))
        trains, lora = spec.request.trainable, self.config.lora if spec.request.head == "lm" else None
        self.adapted = bool(trains and lora and lora.rank)
        stored = self.master if trains and not self.adapted else getattr(torch, spec.request.dtype)
        self.model = load_first(spec, stored)
        self.model.requires_grad_(trains)
        if lora and self.adapted:
            add_adapters(self.model, lora, self.master, spec.config.run.seed)
        if trains and spec.config.model.gradient_checkpointing:
            self.model.model.gradient_checkpointing_enable({"use_reentrant": False})
            for number, layer in enumerate(self.model.layers):
                setattr(layer, "gradient_checkpointing", number % self.config.checkpoint_every == 0)  # noqa: B010
            self.model.train()  # checkpointing happens in this mode only; there is no dropout that it could switch on
        self.model.sequence_parallel = spec.plugins.patch_attention(model=self.model.model, spec=spec, mesh=self.mesh)
        if self.config.compile if self.config.compile is not None else spec.device.type == "cuda":
            self.model.compile_layers()
        shards = self.config.shard_size or layout.ranks
        self.keep_gathered = self._fits_gathered(shards)
        """Parameters stay whole from one micro-batch to the next, and gradients are reduced once, after the last."""
        whole = init_device_mesh(spec.device.type, (layout.ranks // shards, shards), mesh_dim_names=("replicate", "shard"))
        self.shard_group = whole.get_group("shard")
        loaded = tensors_of(self.model) if layout.ranks > 1 else {}
        self._shard(whole if shards < layout.ranks else whole["shard"], stored)
        if layout.ranks > 1:
            fill(self.model, loaded, spec.device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self._make_optimizer() if spec.request.trainable else None
        self.updates = 0
        """Optimizer steps taken in this stage: what the learning-rate schedule counts."""
        self.staging = Staging(spec.device)
        if trains and spec.device.type == "cuda" and spec.config.checkpoint.async_save:
            save(self, Path(), spec.config.checkpoint.save_contents)  # the memory for copies is taken now: that takes long

    def _fits_gathered(self, shards: int) -> bool:
        if self.config.reshard_after_forward is not None:
            return not self.config.reshard_after_forward
        if self.spec.device.type != "cuda":
            return shards == 1
        width = self.dtype.itemsize + (self.master.itemsize if self.spec.request.trainable else 0)
        whole = width * sum(p.numel() for p in self.model.parameters())
        return whole <= _GATHERED_SHARE * torch.cuda.get_device_properties(self.spec.device).total_memory

    def _shard(self, mesh: DeviceMesh, stored: torch.dtype) -> None:
        offload = CPUOffloadPolicy(pin_memory=self.spec.device.type == "cuda") if self.config.cpu_offload else None
        options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload or OffloadPolicy(),
                                   "reshard_after_forward": not self.keep_gathered}
        if self.model.head == "value":
            materialize(self.model.value_head, self.spec.device)
            fully_shard(self.model.value_head, **options)  # a group of its own: computed in the parameters' dtype
        if self.dtype != stored or self.adapted:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=self.master)
        for layer in self._wrapped():
            materialize(layer, self.spec.device)  # one at a time
            fully_shard(layer, **options)
        materialize(self.model, self.spec.device)
        # The root's parameters (embeddings, output layer) are needed at both ends of forward and backward.
        fully_shard(self.model, **(options | {"reshard_after_forward": False}))
        # To the compiler, integers of FSDP's modules are variables. Where the heads' size is one, rotary embeddings take 15 times
        # as long; inside of a layer there is nothing else that it need know of FSDP.
        for module in (module for layer in self.model.layers for module in layer.modules()):
            module._is_fsdp_managed_module = False  # type: ignore[assignment]

    def _wrapped(self) -> list[nn.Module]:
        """Modules that are gathered one at a time: those of the classes that the user named, or the decoder layers."""
        policy, modules = self.config.wrap_policy, list(self.model.model.modules())
        if unknown := set(policy.layer_classes) - {type(m).__name__ for m in modules}:
            raise ValueError(f"fsdp.wrap_policy.layer_classes: {type(self.model.model).__name__} has no "
                             f"{', '.join(sorted(unknown))}; its decoder layers are {type(self.model.layers[0]).__name__}")
        chosen = [m for m in modules if type(m).__name__ in policy.layer_classes] or self.model.layers
        return [m for m in chosen if sum(p.numel() for p in m.parameters()) >= policy.min_num_params]

    def _make_optimizer(self) -> torch.optim.Optimizer:
        self.optim = self.spec.request.optim or self.spec.config.actor.optim
        if self.optim.name == "sgd":
            return torch.optim.SGD(self.parameters, lr=self.optim.lr, foreach=True)
        fused = self.parameters[0].is_cuda
        optimizer = torch.optim.AdamW(
            self.parameters, lr=self.optim.lr, betas=(self.optim.betas[0], self.optim.betas[1]), eps=self.optim.eps,
            weight_decay=self.optim.weight_decay, fused=fused, foreach=not fused)
        for p in self.parameters:  # state from the start, so that saving before the first step neither fails nor steps
            step = torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu")
            optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return optimizer

    def forward(self, batch: Batch, want: AbstractSet[str], temperature: float) -> dict[str, Tensor]:
        """See `Worker.forward`. Columns are on the CPU."""
        plain = Batch(batch.cu_seqlens, {name: batch.tokens[name] for name in ("ids", "loss_mask")}, ragged=batch.ragged)
        plain.tokens["index"] = torch.arange(batch.num_tokens)
        columns = {name: torch.zeros(batch.num_tokens, dtype=self.master) for name in want}
        done: list[tuple[Tensor, dict[str, Tensor]]] = []
        with torch.no_grad():
            for rows in self._micro_batches(plain, "sequence"):
                micro = plain.select(rows)  # while the device works on the one before
                outputs = self._outputs(micro, want, temperature)
                if micro.num_tokens:
                    done.append((micro.tokens["index"], outputs))
        if done:  # only here, with all work queued, does this process wait for the device
            index = torch.cat([indices for indices, _ in done])
            for name in want:
                column = torch.cat([outputs[name] for _, outputs in done]).cpu()
                columns[name] = column.new_zeros(batch.num_tokens).index_put_((index,), column)
        self._reshard()
        return columns

    def update(
        self, batch: Batch, loss: Loss, denominators: Mapping[str, float], temperature: float, atom: Atom = "sequence",
        keep: dict[str, Tensor] | None = None,
    ) -> dict[str, Value]:
        """See `Worker.update`."""
        assert self.optimizer is not None, f"{self.spec.role} is frozen"
        self.optimizer.zero_grad()
        terms = Terms(denominators)
        parts = self._micro_batches(batch, atom)
        kept: list[Batch] = []
        for number, rows in enumerate(parts, 1):
            micro = batch.select(rows)
            if self.keep_gathered:
                assert isinstance(self.model, FSDPModule)
                self.model.set_requires_gradient_sync(number == len(parts))
                self.model.set_reshard_after_backward(number == len(parts))
            there = micro.to(self.spec.device)
            outputs = self._outputs(micro, self.spec.want, temperature)
            if keep is not None and len(micro):
                kept.append(Batch(micro.cu_seqlens, {name: column.detach() for name, column in outputs.items()}))
            # FSDP averages gradients over ranks, but local sums must be added.
            terms.loss(outputs, loss(outputs, there) if len(micro) else {}, dist.get_world_size()).backward()
        if keep is not None and kept:
            keep.update(Batch.concat([part.to("cpu") for part in kept]).select(inverse(parts)).tokens)
        return self._step() | self._reduced(terms)

    def _step(self) -> dict[str, Value]:
        assert self.optimizer is not None
        lr = self.optim.lr * lr_factor(self.updates, self.optim, self.spec.total_updates)
        grads = [p.grad.to_local() for p in self.parameters if isinstance(p.grad, DTensor)]
        square = get_total_norm(grads).double().square()
        dist.all_reduce(square, group=self.shard_group)
        metrics = guarded_step(self.optimizer, self.optimizer.step, lambda: grads, float(square), lr, self.optim.clip_grad)
        self.updates += not metrics["skipped"].total
        self.optimizer.zero_grad()
        return metrics

    def _reduced(self, terms: Terms) -> dict[str, Value]:
        group = self.mesh.get_group("dp")
        shards: list[dict[tuple[str, Kind], float]] = [terms.numbers()] * dist.get_world_size(group)
        if len(shards) > 1:
            dist.all_gather_object(shards, shards[0], group=group)
        return terms.values(shards)

    def _micro_batches(self, batch: Batch, atom: Atom) -> list[list[int]]:
        return agreed_micro_batches(batch, self.spec.config.actor.tokens_per_micro_batch, atom, self.spec.device)

    def _outputs(self, micro: Batch, want: AbstractSet[str], temperature: float) -> dict[str, Tensor]:
        if micro.num_tokens == 0:  # tokens that nothing is computed of: collectives match those of the other ranks
            zeros = torch.zeros(2, dtype=torch.int64)
            row = self.model.row(zeros, torch.tensor([0, 2]), zeros, zeros > 0, self.spec.device,
                                 {name: [None] for name in micro.ragged})
        else:
            row = self.model.row(micro.tokens["ids"], micro.cu_seqlens, micro.position_ids, micro.tokens["loss_mask"],
                                 self.spec.device, micro.ragged)
        return self.model(row, want, temperature)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under save_pretrained's names, in model.dtype, on this rank's device; adapters are merged."""
        return saved_weights(self.model, self._whole)

    def _whole(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        if not self.adapted:
            yield from gather(tensors, self.dtype, self.spec.device, self.shard_group)
            return
        known = adapters(self.model)
        flat = [part for x in tensors for part in ((x, known[id(x)].down, known[id(x)].up) if id(x) in known else (x,))]
        parts = gather(flat, self.master, self.spec.device, self.shard_group)
        for x in tensors:
            whole = next(parts)
            if id(x) in known:
                down, up = next(parts), next(parts)
                whole = whole + known[id(x)].scaling * up @ down
            yield whole.to(self.dtype) if whole.is_floating_point() else whole

    def _reshard(self) -> None:
        """Free gathered parameters that a forward without backward left, so that nobody sees stale ones."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def onload(self, model: bool = True, optimizer: bool = True) -> None:
        """See `Worker.onload`."""
        self._move(self.spec.device, model, optimizer)

    def offload(self, model: bool = True, optimizer: bool = True) -> None:
        """See `Worker.offload`; what the configuration leaves on the device stays there."""
        self._move(torch.device("cpu"), model and self.config.offload_params, optimizer and self.config.offload_optimizer)
        if self.config.offload_params or self.config.offload_optimizer:
            empty_cache(self.spec.device)

    def _move(self, device: torch.device, model: bool, optimizer: bool) -> None:
        if self.spec.device.type == "cpu" or self.config.cpu_offload:
            return
        if model and next(self.model.parameters()).device.type != device.type:
            self.model.to(device)
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                state.update({name: x.to(device) for name, x in state.items()})


class Base(FsdpWorker):
    """An actor's model without its adapters: the reference, and no second copy of anything."""

    def __init__(self, spec: RoleSpec, actor: FsdpWorker) -> None:
        self.__dict__.update(actor.__dict__)
        self.spec, self.actor, self.optimizer = spec, actor, None

    def forward(self, batch: Batch, want: AbstractSet[str], temperature: float) -> dict[str, Tensor]:
        """See `Worker.forward`."""
        with switched_off(self.model):
            return super().forward(batch, want, temperature)


_adapted: WeakSet[FsdpWorker] = WeakSet()
"""This process's actor, where it has adapters."""


def make(spec: RoleSpec, layout: Layout, kind: type[FsdpWorker] = FsdpWorker) -> FsdpWorker:
    """The worker of a role, of your own `kind` where you extend it; of a frozen model that an actor with adapters holds already,
    that one's."""
    request = spec.request
    for actor in _adapted:
        theirs = actor.spec.request
        if not request.trainable and (request.path, request.dtype, request.head) == (theirs.path, theirs.dtype, theirs.head):
            base: FsdpWorker = type("Base", (Base, kind), {})(spec, actor)
            return base
    worker = kind(spec, layout)
    if worker.adapted and spec.role == "actor":
        _adapted.clear()
        _adapted.add(worker)
    return worker

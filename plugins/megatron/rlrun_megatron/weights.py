"""Weights between Hugging Face's names and Megatron's parameters, both ways, one tensor or one bucket at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor

from rlrun.models.loading import VALUE_HEAD
from rlrun.workers.channel import BUCKET_BYTES, buckets
from rlrun_megatron.families import family_of, head_size
from rlrun_megatron.model import Head, Stage

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Rule:
    """What one Megatron parameter is made of."""

    names: tuple[str, ...]
    """Tensors of the file."""
    shapes: tuple[tuple[int, ...], ...]
    """Of these, whole."""
    dim: int | None = None
    """Where each is cut over tensor-parallel ranks, in equal parts, of which the last may be filled up."""
    group: tuple[int, ...] = ()
    """Rows of each tensor that stand together, group by group; default: one tensor behind the other."""
    expert: int | None = None
    """Of which expert; None: of no one."""

    @property
    def ranks(self) -> dist.ProcessGroup:
        """Those that it is cut over."""
        if self.expert is None:
            return parallel_state.get_tensor_model_parallel_group()
        return parallel_state.get_expert_tensor_parallel_group()

    def part(self, shape: Sequence[int], rank: int, ranks: int) -> tuple[slice, ...]:
        """Where a rank's part of a tensor of this shape lies."""
        if self.dim is None:
            return tuple(slice(None) for _ in shape)
        size = -(-shape[self.dim] // ranks)
        own = slice(min(rank * size, shape[self.dim]), min((rank + 1) * size, shape[self.dim]))
        return tuple(own if d == self.dim else slice(None) for d in range(len(shape)))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The parameter of a rank's parts."""
        if not self.group:
            return torch.cat(list(parts))
        return torch.cat([x.unflatten(0, (-1, rows)) for x, rows in zip(parts, self.group)], 1).flatten(0, 1)

    def cut(self, parameter: Tensor) -> list[Tensor]:
        """The inverse of `join`."""
        if not self.group:
            return list(parameter.chunk(len(self.names)))
        grouped = parameter.unflatten(0, (-1, sum(self.group)))
        return [x.flatten(0, 1) for x in grouped.split(self.group, 1)]


def rules(hf: PretrainedConfig, head: Head) -> dict[str, Rule]:
    """By Megatron's names, with layers counted over all stages, in the order of the weight stream."""
    family, hidden, size = family_of(hf), hf.hidden_size, head_size(hf)
    queries, keys = hf.num_attention_heads * size, hf.num_key_value_heads * size
    group = (queries // hf.num_key_value_heads, size, size)
    prefix = "" if head == "value" else "model."
    found = {"embedding.word_embeddings.weight": Rule((f"{prefix}embed_tokens.weight",), ((hf.vocab_size, hidden),), 0)}
    for i in range(hf.num_hidden_layers):
        here, there = f"decoder.layers.{i}.", f"{prefix}layers.{i}."
        attention = there + "self_attn."
        qkv = tuple(f"{attention}{x}_proj." for x in "qkv")
        found[here + "self_attention.linear_qkv.weight"] = Rule(
            tuple(x + "weight" for x in qkv), ((queries, hidden), (keys, hidden), (keys, hidden)), 0, group)
        if family.qkv_bias:
            found[here + "self_attention.linear_qkv.bias"] = Rule(
                tuple(x + "bias" for x in qkv), ((queries,), (keys,), (keys,)), 0, group)
        if family.qk_norm:
            for x in "qk":
                found[f"{here}self_attention.{x}_layernorm.weight"] = Rule((f"{attention}{x}_norm.weight",), ((size,),))
        found[here + "self_attention.linear_proj.weight"] = Rule((attention + "o_proj.weight",), ((hidden, queries),), 1)
        if family.experts:
            found[here + "mlp.router.weight"] = Rule((there + "mlp.gate.weight",), ((hf.num_experts, hidden),))
            for expert in range(hf.num_experts):
                inner = f"mlp.experts.{expert}."
                found |= _mlp(f"{here}{inner}", f"{there}{inner}", hidden, hf.moe_intermediate_size, expert)
        else:
            found |= _mlp(f"{here}mlp.", f"{there}mlp.", hidden, hf.intermediate_size)
        found[here + "input_layernorm.weight"] = Rule((there + "input_layernorm.weight",), ((hidden,),))
        found[here + "pre_mlp_layernorm.weight"] = Rule((there + "post_attention_layernorm.weight",), ((hidden,),))
    found["decoder.final_layernorm.weight"] = Rule((f"{prefix}norm.weight",), ((hidden,),))
    if head == "value":
        found["output_layer.weight"] = Rule(("value_head.weight",), ((1, hidden),))
        found["output_layer.bias"] = Rule(("value_head.bias",), ((1,),))
    elif head == "score":
        found["output_layer.weight"] = Rule(("score.weight",), ((1, hidden),))
    elif not hf.tie_word_embeddings:
        found["output_layer.weight"] = Rule(("lm_head.weight",), ((hf.vocab_size, hidden),), 0)
    return found


def _mlp(here: str, there: str, hidden: int, size: int, expert: int | None = None) -> dict[str, Rule]:
    return {
        here + "linear_fc1.weight": Rule(
            (there + "gate_proj.weight", there + "up_proj.weight"), ((size, hidden),) * 2, 0, expert=expert),
        here + "linear_fc2.weight": Rule((there + "down_proj.weight",), ((hidden, size),), 1, expert=expert),
    }


def local_parameters(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """This rank's parameters under names with layers and experts counted over all ranks."""
    found: dict[str, Tensor] = {}
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if name.startswith("decoder.layers."):
                number, rest = name.removeprefix("decoder.layers.").split(".", 1)
                layer = stage.decoder.layers[int(number)]
                if rest.startswith("mlp.experts.local_experts."):
                    local, inner = rest.removeprefix("mlp.experts.local_experts.").split(".", 1)
                    rest = f"mlp.experts.{expert_rank * layer.mlp.num_local_experts + int(local)}.{inner}"
                name = f"decoder.layers.{layer.layer_number - 1}.{rest}"
            found[name] = parameter
    return found


class Files:
    """A folder's safetensors, of which single slices are read."""

    def __init__(self, path: str, closing: ExitStack) -> None:
        folder = Path(path)
        index = folder / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        self.path = path
        self.tensors: dict[str, Any] = {}
        for name in sorted(names) + ([VALUE_HEAD] if (folder / VALUE_HEAD).is_file() else []):
            if not (folder / name).is_file():
                raise ValueError(f"{path} has no {name}: the megatron backend reads weights from safetensors")
            file = closing.enter_context(safe_open(folder / name, framework="pt"))
            prefix = "value_head." if name == VALUE_HEAD else ""
            self.tensors |= {prefix + key: (file, key) for key in file.keys()}  # noqa: SIM118 - no mapping

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
        """A part of a tensor. Raises ValueError where it is missing or of another shape."""
        if name not in self.tensors:
            raise ValueError(f"{self.path}: weights missing: {name}")
        file, key = self.tensors[name]
        slices = file.get_slice(key)
        if tuple(slices.get_shape()) != shape:
            raise ValueError(f"{self.path}: {name} is of shape {slices.get_shape()}, not {list(shape)}")
        return slices[part]


def place_of(stages: Sequence[Stage], hf: PretrainedConfig, head: Head) -> dict[str, tuple[Tensor, Rule]]:
    """This rank's parameters by name, each with its rule, and marked as Megatron marks what it initialises itself: without the
    mark, the gradient's norm would count one rank's part alone."""
    wanted, found = rules(hf, head), {}
    for name, parameter in local_parameters(stages).items():
        rule = wanted["embedding.word_embeddings.weight" if name == "output_layer.weight" and name not in wanted else name]
        parameter.tensor_model_parallel = rule.dim is not None  # type: ignore[attr-defined]
        found[name] = parameter, rule
    return found


@torch.no_grad()
def load(stages: Sequence[Stage], hf: PretrainedConfig, head: Head, path: str, stored: torch.dtype) -> bool:
    """Fill this rank's parameters from a folder, rounded to `stored`; whether a value head was among them.

    Raises ValueError for tensors that are missing, of another shape, or of no use to the model.
    """
    with ExitStack() as closing:
        files = Files(path, closing)
        wanted, renamed = rules(hf, head), {}
        if head == "value" and any(name.startswith("model.") for name in files.tensors):  # a language model's folder
            renamed = {name: "model." + name for rule in wanted.values() for name in rule.names if "value_head" not in name}
        known = {renamed.get(name, name) for rule in wanted.values() for name in rule.names}
        ignored = {"lm_head.weight"} if head != "lm" or hf.tie_word_embeddings else set()
        if strange := sorted(name for name in set(files.tensors) - known - ignored if not name.endswith("rotary_emb.inv_freq")):
            raise ValueError(f"{path}: weights that the megatron backend has no place for: {strange[:5]}")
        fresh = head == "value" and "value_head.weight" not in files.tensors
        for name, (parameter, rule) in place_of(stages, hf, head).items():
            if fresh and name.startswith("output_layer."):
                continue
            parts = [files.read(renamed.get(n, n), shape, rule.part(shape, rule.ranks.rank(), rule.ranks.size()))
                     for n, shape in zip(rule.names, rule.shapes)]
            whole = rule.join(parts).to(stored)
            parameter[:len(whole)] = whole
            parameter[len(whole):] = 0  # what fills up the vocabulary
        return not fresh


class Stream:
    """All weights of a model, from whichever ranks hold them, as save_pretrained names and shapes them."""

    def __init__(self, stages: Sequence[Stage], hf: PretrainedConfig, head: Head, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.stages, self.dtype, self.device = stages, dtype, device
        self.rules = rules(hf, head)
        self.pipeline = parallel_state.get_pipeline_model_parallel_group()
        self.experts = parallel_state.get_expert_model_parallel_group()
        self.shapes: dict[str, torch.Size] = {}
        """Of each parameter's part on a rank."""
        self.owners: dict[str, tuple[int, int]] = {}
        """Pipeline stage of each parameter, and the expert-parallel rank, which is 0 for what is no expert's."""
        place = self.pipeline.rank(), self.experts.rank()
        mine = {name: (place if self.rules[name].expert is not None else (place[0], 0), x.shape)
                for name, x in local_parameters(stages).items() if name in self.rules}
        for part in _gathered(_merged(_gathered(mine, self.pipeline)), self.experts):
            for name, (owner, shape) in part.items():
                self.owners[name], self.shapes[name] = owner, shape
        missing = set(self.rules) - set(self.owners)
        assert not missing, f"no rank holds {missing}"

    @torch.no_grad()
    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        """In the same order on every rank; collective."""
        parameters = local_parameters(self.stages)
        names = sorted(self.rules, key=self._place)  # stable: the order of rules within a place
        for (owner, expert), alike in groupby(names, key=self._place):
            for bucket in buckets(alike, self._bytes, BUCKET_BYTES):
                yield from self._whole(bucket, owner, expert, parameters)

    def _place(self, name: str) -> tuple[tuple[int, int], bool]:
        return self.owners[name], self.rules[name].expert is not None

    def _bytes(self, name: str) -> int:
        return self.shapes[name].numel() * self.rules[name].ranks.size() * self.dtype.itemsize

    def _whole(self, names: Sequence[str], owner: tuple[int, int], expert: bool,
               parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        ranks, sizes = self.rules[names[0]].ranks, [self.shapes[name].numel() for name in names]
        flat = torch.empty(ranks.size(), sum(sizes), dtype=self.dtype, device=self.device)
        stage, expert_rank = owner
        beside = expert and expert_rank != self.experts.rank()
        if stage == self.pipeline.rank() and not beside:
            mine = torch.cat([parameters[name].detach().to(self.dtype).flatten() for name in names])
            if ranks.size() > 1:
                dist.all_gather(list(flat.unbind()), mine, group=ranks)
            else:
                flat[0] = mine
        if self.pipeline.size() > 1 and not beside:
            dist.broadcast(flat, group_src=stage, group=self.pipeline)
        if self.experts.size() > 1 and expert:
            dist.broadcast(flat, group_src=expert_rank, group=self.experts)
        for name, parts in zip(names, flat.split(sizes, 1)):
            rule = self.rules[name]
            pieces = zip(*(rule.cut(part.view(self.shapes[name])) for part in parts))
            for key, whole, piece in zip(rule.names, rule.shapes, pieces):
                tensor = piece[0] if rule.dim is None else torch.cat(piece, rule.dim)
                yield key, tensor[:whole[0]].contiguous()


Held = dict[str, tuple[tuple[int, int], torch.Size]]


def _gathered(held: Held, group: dist.ProcessGroup) -> list[Held]:
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, held, group=group)
    return everyones


def _merged(parts: Sequence[Held]) -> Held:
    return {name: entry for part in parts for name, entry in part.items()}

"""Weights between Hugging Face's names and Megatron's parameters, both ways, one tensor or one bucket at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor

from rlrun.models.loading import VALUE_HEAD
from rlrun.workers.channel import BUCKET_BYTES, buckets
from rlrun_megatron.model import Head, Stage, family_of, head_size

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
    queries, keys, mlp = hf.num_attention_heads * size, hf.num_key_value_heads * size, hf.intermediate_size
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
        found[here + "mlp.linear_fc1.weight"] = Rule(
            (there + "mlp.gate_proj.weight", there + "mlp.up_proj.weight"), ((mlp, hidden),) * 2, 0)
        found[here + "mlp.linear_fc2.weight"] = Rule((there + "mlp.down_proj.weight",), ((hidden, mlp),), 1)
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


def local_parameters(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """This rank's parameters under names with layers counted over all stages."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if name.startswith("decoder.layers."):
                number, rest = name.removeprefix("decoder.layers.").split(".", 1)
                name = f"decoder.layers.{stage.decoder.layers[int(number)].layer_number - 1}.{rest}"
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


@torch.no_grad()
def load(stages: Sequence[Stage], hf: PretrainedConfig, head: Head, path: str, stored: torch.dtype) -> bool:
    """Fill this rank's parameters from a folder, rounded to `stored`; whether a value head was among them.

    Raises ValueError for tensors that are missing, of another shape, or of no use to the model.
    """
    tp = parallel_state.get_tensor_model_parallel_group()
    parameters = local_parameters(stages)
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
        for name, parameter in parameters.items():
            source = "embedding.word_embeddings.weight" if name == "output_layer.weight" and name not in wanted else name
            rule = wanted[source]
            # Megatron marks what it initialises itself; without the mark the gradient's norm would count one rank's part alone.
            parameter.tensor_model_parallel = rule.dim is not None  # type: ignore[attr-defined]
            if fresh and name.startswith("output_layer."):
                continue
            parts = [files.read(renamed.get(n, n), shape, rule.part(shape, tp.rank(), tp.size()))
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
        mine = {name: tuple(x.shape) for name, x in local_parameters(stages).items() if name in self.rules}
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        everyones: list[Any] = [None] * pipeline.size()
        dist.all_gather_object(everyones, mine, group=pipeline)
        self.owners = {name: (rank, shapes[name]) for rank, shapes in enumerate(everyones) for name in shapes}
        missing = set(self.rules) - set(self.owners)
        assert not missing, f"no rank holds {missing}"

    @torch.no_grad()
    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        parameters: Mapping[str, Tensor] = local_parameters(self.stages)
        size = parallel_state.get_tensor_model_parallel_world_size() * self.dtype.itemsize
        names = sorted(self.rules, key=lambda name: self.owners[name][0])  # stable: the order of rules within a stage
        for bucket in buckets(names, lambda name: torch.Size(self.owners[name][1]).numel() * size, BUCKET_BYTES):
            yield from self._whole(bucket, parameters)

    def _whole(self, names: Sequence[str], parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        tp = parallel_state.get_tensor_model_parallel_group()
        shapes = [torch.Size(self.owners[name][1]) for name in names]
        flat = torch.empty(tp.size(), sum(x.numel() for x in shapes), dtype=self.dtype, device=self.device)
        own = flat[tp.rank()].split([x.numel() for x in shapes])
        for name, place in zip(names, own):
            place.copy_(parameters[name].flatten())
        if tp.size() > 1:
            dist.all_gather(list(flat.unbind()), flat[tp.rank()].clone(), group=tp)
        for name, shape, parts in zip(names, shapes, flat.split([x.numel() for x in shapes], 1)):
            rule = self.rules[name]
            pieces = zip(*(rule.cut(part.view(shape)) for part in parts))
            for key, whole, piece in zip(rule.names, rule.shapes, pieces):
                tensor = piece[0] if rule.dim is None else torch.cat(piece, rule.dim)
                yield key, tensor[:whole[0]].contiguous()

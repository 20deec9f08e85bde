"""PolicyModel: the root module of every role. Packed ids in; log-probabilities, entropies and values out."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlrun.batch import to_device
from rlrun.models.attention import Packed, enable_packed_attention
from rlrun.models.images import Images, embed, has_images, images_of
from rlrun.models.log_probs import chosen_log_probs
from rlrun.workers.protocol import SequenceParallel

OUTPUTS = {"lm": frozenset({"log_probs", "entropy"}), "value": frozenset({"values"}), "score": frozenset({"values"})}
"""What a model with each kind of head computes."""


@dataclass(frozen=True)
class Row:
    """A packed row, or a rank's part of one, on the device. No tuple or tensor: FSDP would move its parts."""

    ids: Tensor
    position_ids: Tensor  # [T], or [3, T] where there are images
    chosen: Tensor  # where there is something to predict: indices into `ids`
    targets: Tensor  # the tokens that follow there
    packed: Packed
    total: int  # tokens of the whole row
    images: Images | None = None


class PolicyModel(nn.Module):
    """A causal language model with its own head ("lm"), its backbone with a scalar head ("value"), or a sequence classifier
    with one output ("score").

    The step from hidden states to log-probabilities is inside, because the weights of a sharded output layer exist only
    during this module's forward."""

    def __init__(self, model: PreTrainedModel, head: Literal["lm", "value", "score"]) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.sequence_parallel: SequenceParallel | None = None  # set by the backend where `patch_attention` answered
        self.config = model.config.get_text_config()
        self.scale, self.softcap = logit_transform(self.config)
        self.compiled = False
        if head == "score" and getattr(getattr(model, "score", None), "out_features", None) != 1:
            raise ValueError(f"{type(model).__name__} has no layer `score` with one output")
        if head == "value":
            self.value_head = nn.Linear(self.config.hidden_size, 1, device=model.device, dtype=model.dtype)
        enable_packed_attention(model)

    def init_value_head(self, seed: int) -> None:
        """Fresh, small weights, the same on every rank: values start near 0."""
        std = 1 / (self.config.hidden_size + 1)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(self.value_head.weight.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            self.value_head.weight.copy_(drawn * std)
            self.value_head.bias.zero_()

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, without those of a vision tower."""
        return [module for module in self.model.get_decoder().modules() if isinstance(module, GradientCheckpointingLayer)]

    def compile_layers(self) -> None:
        """Compile each decoder layer, once for rows of any length, and what turns logits into log-probabilities."""
        for layer in self.layers:  # forward alone: hooks around it, such as FSDP's, stay outside of the graph
            layer.forward = torch.compile(layer.forward, dynamic=True)
        self.compiled = True

    def row(self, ids: Tensor, cu_seqlens: Tensor, position_ids: Tensor, loss_mask: Tensor,
            device: torch.device | str = "cpu", ragged: Mapping[str, list[Any]] | None = None) -> Row:
        """This rank's part of a packed row [T] of sequences that end at `cu_seqlens` [S+1], for `forward` on `device`; images
        in `ragged` columns (`rlrun.models.images`) bring position ids of their own.

        Made on the CPU, from tensors there: what depends on lengths and masks would make this process wait for the device."""
        sp, images = self.sequence_parallel, None
        if ragged and has_images(ragged):
            images, position_ids = images_of(self.model, ids, cu_seqlens, ragged, sp, device)
        # Hidden state p predicts token p + 1. The shift is done on the whole row, before it is cut over ranks.
        whole = (ids, position_ids, ids.roll(-1), loss_mask.roll(-1))
        local, positions, targets, mask = whole if sp is None else map(sp.shard, whole)
        chosen = mask.nonzero()[:, 0]
        return Row(to_device(local, device), to_device(positions, device), to_device(chosen, device),
                   to_device(targets[chosen], device), Packed.of(cu_seqlens, device, sp.size if sp else 1), ids.shape[0],
                   images)

    def forward(self, row: Row, want: AbstractSet[str], temperature: float = 1.0) -> dict[str, Tensor]:
        """Columns [T] of a packed row: `log_probs` and `entropy` of ids[t] given ids[<t] at `temperature`, `values` of
        the state before token t. They are computed where the row's loss_mask [T] is set and 0 elsewhere.

        Raises ValueError for an output that this head does not have."""
        if not want <= OUTPUTS[self.head]:
            raise ValueError(f"head {self.head!r} computes {sorted(OUTPUTS[self.head])}; asked for: {sorted(want)}")
        tokens = ({"input_ids": row.ids[None]} if row.images is None else
                  {"inputs_embeds": embed(self.model, row.ids, row.images)[None]})
        hidden = self.model.base_model(
            **tokens, position_ids=row.position_ids.unsqueeze(-2), use_cache=False, packed=row.packed,
        ).last_hidden_state[0]
        outputs = {}
        for name, values in self._head(hidden.index_select(0, row.chosen), row.targets, want, temperature).items():
            column = values.new_zeros(row.ids.shape[0]).index_put((row.chosen,), values)
            column = column if self.sequence_parallel is None else self.sequence_parallel.gather(column, row.total)
            outputs[name] = column.roll(1)
        return outputs

    def _head(self, hidden: Tensor, targets: Tensor, want: AbstractSet[str], temperature: float) -> dict[str, Tensor]:
        if self.head != "lm":
            layer = self.value_head if self.head == "value" else self.model.score
            return {"values": layer(hidden.to(layer.weight.dtype))[:, 0]}
        layer = self.model.get_output_embeddings()
        log_probs, entropy = chosen_log_probs(hidden, layer.weight, layer.bias, targets, temperature, self.scale,
                                              self.softcap, entropy="entropy" in want, compiled=self.compiled)
        outputs = {"log_probs": log_probs, "entropy": entropy}
        return {name: x for name, x in outputs.items() if name in want and x is not None}


def logit_transform(config: Any) -> tuple[float, float | None]:
    """Factor and soft cap that a model's own forward applies to its logits (cohere, granite, gemma2, ...)."""
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0)
    return float(scale), getattr(config, "final_logit_softcapping", None)


@torch.no_grad()
def check_logits(policy: PolicyModel) -> None:
    """Compare the log-probabilities of two short sequences in one row with the model's own logits, and with one another.

    Raises ValueError where the model does something between hidden states and logits that PolicyModel does not know, or lets
    one sequence of a row see another (by a state or convolution that runs along the row)."""
    device = policy.model.device
    ids, rows = torch.tensor([0, 1, 0, 1], device=device), torch.tensor([0, 2, 4], device=device)  # ids equal positions
    seen: list[Tensor] = []
    hook = policy.model.base_model.register_forward_hook(lambda *call: seen.append(call[2].last_hidden_state[0]))
    try:
        own = policy.model(input_ids=ids[None], position_ids=ids[None], use_cache=False, packed=Packed.of(rows)).logits[0]
    finally:
        hook.remove()
    wide = torch.promote_types(own.dtype, torch.float32)
    expected = own.to(wide).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    found = policy._head(seen[0], ids, {"log_probs"}, 1.0)["log_probs"]
    tolerance = 1e-4 if own.dtype in (torch.float32, torch.float64) else 5e-2
    if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
        raise ValueError(
            f"{type(policy.model).__name__} computes logits in a way that is not supported: log-probabilities of "
            f"tokens are {expected.tolist()}, but {found.tolist()} from its hidden states and output layer")
    first, second = seen[0].double().split(2)
    if (first - second).norm() > tolerance / 100 * first.norm():  # the same numbers in the same order
        raise ValueError(f"{type(policy.model).__name__} lets the sequences of a packed row see one another: something "
                         "besides attention runs along the row, which is not supported")

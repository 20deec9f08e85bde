"""Log-probabilities and entropies of chosen tokens from hidden states, without ever holding all logits."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def chosen_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float = 1.0, scale: float = 1.0,
    softcap: float | None = None, entropy: bool = False, chunk: int | None = None, compiled: bool = False,
    group: dist.ProcessGroup | None = None, first: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and the entropy, of softmax(logits / temperature); with gradient.

    `hidden` [N, h], `weight` [V, h] and `bias` [V] of the output layer, `targets` [N] token ids. The model's own logits
    are softcap * tanh(scale * (hidden @ weight.T + bias) / softcap), without the tanh where there is no softcap.
    Returns ([N], [N] or None) in the input's dtype or float32, whichever is wider. Logits exist for `chunk` tokens at a
    time and are computed again in the backward pass; `compiled`, they are read once or twice there instead of at each of
    the steps below.

    With a `group`, the vocabulary is cut over its ranks: `weight` holds this one's rows, from token id `first` on. Results are
    whole on all of them; the gradient of `hidden` is this rank's part, which the caller adds over the group."""
    chunk = chunk or max(64, (2**27 if hidden.is_cuda else 2**21) // weight.shape[0])
    log_probs, entropies = _ChosenLogProbs.apply(
        hidden, weight, bias, targets - first, (temperature, scale, softcap), entropy, chunk, compiled, group)
    return log_probs, entropies if entropy else None


Transform = tuple[float, float, float | None]  # temperature, scale, soft cap


def _tempered(raw: Tensor, transform: Transform) -> Tensor:
    """Tempered logits, in at least fp32."""
    temperature, scale, softcap = transform
    wide = raw.to(torch.promote_types(raw.dtype, torch.float32))
    if softcap is None:
        return wide * (scale / temperature)
    return torch.tanh(wide * (scale / softcap)) * (softcap / temperature)


def _outputs(raw: Tensor, targets: Tensor, transform: Transform, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, norms and entropies [n] of raw logits [n, V]."""
    logits = _tempered(raw, transform)
    norms = logits.logsumexp(-1)
    log_probs = _tempered(raw.gather(1, targets[:, None]), transform)[:, 0] - norms
    if not entropy:
        return log_probs, norms, norms
    return log_probs, norms, norms - (logits * (logits - norms[:, None]).exp()).sum(-1)


def _whole(log_probs: Tensor, norms: Tensor, entropies: Tensor, held: Tensor,
           group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs [N] over the whole vocabulary, from those over this rank's part, which has the targets that are `held`."""
    chosen = torch.where(held, log_probs + norms, 0.0)
    mine = torch.stack([norms, norms - entropies, chosen])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    all_norms, expected, logits = torch.stack(parts, 1)
    norms = all_norms.logsumexp(0)
    return logits.sum(0) - norms, norms, norms - ((all_norms - norms).exp() * expected).sum(0)


def _gradient(raw: Tensor, targets: Tensor, norms: Tensor, entropies: Tensor, d_log_probs: Tensor, d_entropies: Tensor,
              transform: Transform, entropy: bool) -> Tensor:
    """Gradient of the raw logits [n, V], in their place."""
    temperature, scale, softcap = transform
    logits = _tempered(raw, transform)
    all_log_probs = logits - norms[:, None]
    d_chosen = d_log_probs[:, None]
    factor = d_chosen
    if entropy:
        factor = factor + (all_log_probs + entropies[:, None]) * d_entropies[:, None]
    chosen = torch.arange(raw.shape[1], device=raw.device) == targets[:, None]
    d_logits = torch.where(chosen, d_chosen, 0.0) - all_log_probs.exp() * factor
    if softcap is not None:
        d_logits = d_logits * (1 - (logits * (temperature / softcap)).square())
    return raw.copy_(d_logits * (scale / temperature))


@cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


class _ChosenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, transform: Transform,
                entropy: bool, chunk: int, compiled: bool, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        outputs = _fused(_outputs) if compiled else _outputs
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        norms, log_probs, entropies = (hidden.new_zeros(hidden.shape[0], dtype=dtype) for _ in range(3))
        held = targets if group is None else targets.clamp(0, weight.shape[0] - 1)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            raw = F.linear(hidden[part], weight, bias)
            log_probs[part], norms[part], entropies[part] = outputs(raw, held[part], transform, entropy)
        if group is not None:
            log_probs, norms, entropies = _whole(log_probs, norms, entropies, held == targets, group)
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropies)
        ctx.arguments = transform, entropy, chunk, compiled
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_probs: Tensor, d_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norms, entropies = ctx.saved_tensors
        transform, entropy, chunk, compiled = ctx.arguments
        gradient = _fused(_gradient) if compiled else _gradient
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=norms.dtype)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=norms.dtype)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            raw = F.linear(hidden[part], weight, bias)
            d_raw = gradient(raw, targets[part], norms[part], entropies[part], d_log_probs[part], d_entropies[part],
                             transform, entropy)
            d_hidden[part] = d_raw @ weight
            _add_product(d_weight, d_raw.T, hidden[part])
            if d_bias is not None:
                d_bias += d_raw.sum(0)
            del raw, d_raw
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight.to(weight.dtype), d_bias, None, None, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the dtype of `total`."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right

"""Log-probabilities and entropies of chosen tokens from hidden states, without ever holding all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def chosen_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and the entropy, of softmax(logits / temperature); with gradient.

    `hidden` [N, h], `weight` [V, h] and `bias` [V] of the output layer, `targets` [N] token ids. The model's own logits
    are softcap * tanh(scale * (hidden @ weight.T + bias) / softcap), without the tanh where there is no softcap.
    Returns ([N], [N] or None) in the input's dtype or float32, whichever is wider. Logits exist for `chunk` tokens at a
    time and are computed again in the backward pass.
    """
    chunk = chunk or max(64, (2**26 if hidden.is_cuda else 2**23) // weight.shape[0])
    log_probs, entropies = _ChosenLogProbs.apply(
        hidden, weight, bias, targets, temperature, scale, softcap, entropy, chunk)
    return log_probs, entropies if entropy else None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, scale: float,
            softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Tempered logits in at least fp32, and with a soft cap the tanh that its derivative needs."""
    raw = F.linear(hidden, weight, bias)
    logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
    if softcap is None:
        return (logits if scale == temperature else logits.mul_(scale / temperature)), None
    capped = logits.mul_(scale / softcap).tanh_()
    return capped * (softcap / temperature), capped


class _ChosenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
                temperature: float, scale: float, softcap: float | None, entropy: bool,
                chunk: int) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        norms, log_probs, entropies = (hidden.new_zeros(hidden.shape[0], dtype=dtype) for _ in range(3))
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits, _ = _logits(hidden[part], weight, bias, temperature, scale, softcap)
            norms[part] = norm = logits.logsumexp(-1)
            log_probs[part] = logits.gather(1, targets[part, None])[:, 0] - norm
            if entropy:
                probs = (logits - norm[:, None]).exp_()
                entropies[part] = norm - logits.mul_(probs).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropies)
        ctx.arguments = temperature, scale, softcap
        ctx.entropy, ctx.chunk = entropy, chunk
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_probs: Tensor, d_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norms, entropies = ctx.saved_tensors
        temperature, scale, softcap = ctx.arguments
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=norms.dtype)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=norms.dtype)
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits, capped = _logits(hidden[part], weight, bias, temperature, scale, softcap)
            all_log_probs = logits.sub_(norms[part, None])
            d_chosen = d_log_probs[part, None]
            if ctx.entropy:
                factor = (all_log_probs + entropies[part, None]).mul_(d_entropies[part, None]).add_(d_chosen)
                d_logits = all_log_probs.exp_().mul_(factor).neg_()
            else:
                d_logits = all_log_probs.exp_().mul_(-d_chosen)
            d_logits.scatter_add_(1, targets[part, None], d_chosen)
            if capped is not None:
                d_logits.mul_(1 - capped.square())
            d_raw = d_logits.mul_(scale / temperature).to(hidden.dtype)
            d_hidden[part] = d_raw @ weight
            d_weight += d_raw.T @ hidden[part]
            if d_bias is not None:
                d_bias += d_raw.sum(0)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight.to(weight.dtype), d_bias, None, None, None, None, None, None

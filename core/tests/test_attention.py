"""Packed attention against one masked softmax over the whole row."""

from __future__ import annotations

import pytest
import torch

from rlrun.models.attention import Packed, attend, packed_attention

LENGTHS = [3, 3, 7, 1, 5, 5, 5]
SINKS = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)


def reference(q, k, v, lengths, scale=None, window=None, softcap=None, sinks=None):
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    position = torch.cat([torch.arange(n) for n in lengths])
    seen = (sequence[:, None] == sequence) & (position[:, None] >= position)
    if window is not None:
        seen &= position[:, None] - position < window
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks.exp()[:, None, None])
    return torch.einsum("hqk,khd->qhd", weights / total, v)


def inputs(seed=0, total=sum(LENGTHS)):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(total, heads, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("options", [
    {}, {"scale": 0.3}, {"window": 1}, {"window": 3}, {"window": 100}, {"softcap": 1.5},
    {"softcap": 1.5, "window": 3, "scale": 2.0}, {"sinks": SINKS}, {"sinks": SINKS, "window": 3, "softcap": 1.5},
])
def test_equals_masked_softmax(options):
    """Values and gradients, grouped queries, windows, soft caps and sinks."""
    packed = Packed.of(torch.tensor([0, *LENGTHS]).cumsum(0))
    weight = torch.randn(sum(LENGTHS), 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for function in (lambda *x: attend(*x, packed, **options), lambda *x: reference(*x, LENGTHS, **options)):
        tensors = inputs()
        SINKS.grad = None
        output = function(*tensors)
        (output * weight).sum().backward()
        results.append([output, *(x.grad for x in tensors), SINKS.grad if "sinks" in options else output])
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_boundaries():
    """Empty sequences are left out; runs of equal neighbours are found; a row of another length is refused."""
    packed = Packed.of(torch.tensor([0, 3, 6, 6, 8]))
    assert packed.runs == ((2, 3), (1, 2))
    assert packed.cu_seqlens.tolist() == [0, 3, 6, 8]
    assert packed.max_length == 3
    filled = Packed.of(torch.tensor([0, 3, 5]), multiple_of=4)
    assert (filled.total, filled.cu_seqlens.tolist()) == (8, [0, 3, 5, 8])
    assert Packed.of(torch.tensor([0, 8]), multiple_of=4).total == 8
    with pytest.raises(ValueError, match="key-value cache"):
        attend(*inputs(total=9), packed)


@pytest.mark.parametrize("arguments, message", [
    ({"packed": None}, "needs packed="), ({"attention_mask": torch.ones(1)}, "mask"), ({"dropout": 0.1}, "dropout"),
])
def test_refused(arguments, message):
    """What packed attention cannot do is an error, never ignored."""
    q, k, v = (x.transpose(0, 1)[None] for x in inputs())
    packed = Packed.of(torch.tensor([0, *LENGTHS]).cumsum(0))
    with pytest.raises(ValueError, match=message):
        packed_attention(torch.nn.Module(), q, k, v, **({"attention_mask": None, "packed": packed} | arguments))


@pytest.mark.gpu
def test_kernels_on_cuda():
    """The half-precision kernel agrees with the segments in float64, window included; sinks are never left out."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    packed = Packed.of(torch.tensor([0, *LENGTHS]).cumsum(0), "cuda")
    sinks = SINKS.detach().cuda()
    for options in ({}, {"window": 3}, {"scale": 0.3}, {"sinks": sinks}, {"sinks": sinks, "window": 3}):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(sum(LENGTHS), h, 64, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
        half = [x.cuda().bfloat16().requires_grad_() for x in (q, k, v)]
        output = attend(*half, packed, **options)
        output.sum().backward()
        wide = [x.detach().cpu().double().requires_grad_() for x in half]
        expected = reference(*wide, LENGTHS, **{k: v.cpu() if k == "sinks" else v for k, v in options.items()})
        expected.sum().backward()
        torch.testing.assert_close(output.cpu().double(), expected, rtol=2e-2, atol=2e-2)
        for a, b in zip(half, wide):
            torch.testing.assert_close(a.grad.cpu().double(), b.grad, rtol=5e-2, atol=5e-2)

"""Chunked log-probabilities and entropies against plain log_softmax."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rlrun.models.log_probs import chosen_log_probs


@pytest.mark.parametrize("temperature, entropy, log_prob", [
    (0.5, 0.1069, -0.0206), (1.0, 0.5243, -0.1698), (1.5, 0.7804, -0.3357),
])
def test_known_values(temperature, entropy, log_prob):
    """Case 93: one temperature for log-probability and entropy."""
    logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
    weight, target = torch.eye(3, dtype=torch.float64), torch.tensor([0])
    got = chosen_log_probs(logits, weight, None, target, temperature, entropy=True)
    assert [round(float(x), 4) for x in got] == [log_prob, entropy]


def plain(hidden, weight, bias, targets, temperature, scale, softcap):
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("scale, softcap, bias", [(1.0, None, False), (0.25, None, True), (0.5, 2.0, True)])
@pytest.mark.parametrize("entropy", [False, True])
def test_equals_plain(scale, softcap, bias, entropy):
    """Float64 stays float64: values and gradients to 1e-12, over several chunks with a short last one."""
    results = []
    for ours in (True, False):
        generator = torch.Generator().manual_seed(0)
        hidden, weight, offset = (torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
                                  for shape in ((11, 6), (17, 6), (17,)))
        targets = torch.randint(0, 17, (11,), generator=generator)
        factors = torch.randn(2, 11, generator=generator, dtype=torch.float64)
        if ours:
            log_probs, entropies = chosen_log_probs(
                hidden, weight, offset if bias else None, targets, 0.7, scale, softcap, entropy, chunk=4)
        else:
            log_probs, entropies = plain(hidden, weight, offset if bias else None, targets, 0.7, scale, softcap)
        total = (log_probs * factors[0]).sum() + ((entropies * factors[1]).sum() if entropy else 0.0)
        total.backward()
        assert log_probs.dtype == torch.float64
        results.append([log_probs, hidden.grad, weight.grad])
        results[-1] += ([offset.grad] if bias else []) + ([entropies] if entropy else [])
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_half_precision_is_summed_in_float32():
    """bf16 inputs: float32 results, gradients in bf16, close to the float64 truth."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((8, 16), (300, 16)))
    hidden.requires_grad_()
    log_probs, _ = chosen_log_probs(hidden, weight, None, torch.arange(8))
    log_probs.sum().backward()
    logits, identity = (hidden @ weight.T).double(), torch.eye(300, dtype=torch.float64)
    truth, _ = plain(logits, identity, None, torch.arange(8), 1.0, 1.0, None)
    assert log_probs.dtype == torch.float32
    assert hidden.grad.dtype == torch.bfloat16
    torch.testing.assert_close(log_probs.double(), truth, rtol=1e-5, atol=1e-5)


def test_no_tokens():
    """An empty selection gives zero gradients, not an error: other ranks wait for this backward."""
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    log_probs, _ = chosen_log_probs(hidden, weight, None, torch.zeros(0, dtype=torch.int64))
    log_probs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(9, 4))


SCRIPT = """
import resource, sys, torch
from rlrun.models.log_probs import chosen_log_probs
torch.set_num_threads(1)
V, N, H = 50_000, 512, 32
hidden, weight = torch.randn(N, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
targets = torch.randint(0, V, (N,))
chosen_log_probs(hidden[:8], weight, None, targets[:8], entropy=True)[0].sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
got = chosen_log_probs(hidden, weight, None, targets, 0.7, entropy=True)
(got[0].sum() + got[1].sum()).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
logits = (hidden @ weight.T / 0.7).log_softmax(-1)
assert torch.allclose(got[0], logits.gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=1e-5)
"""


def test_memory():
    """Case 120: 512 tokens of 50,000 words have 100 MB of logits; with the backward pass it takes no more than those
    and a chunk's temporaries (plain: four times the logits)."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 220, done.stdout

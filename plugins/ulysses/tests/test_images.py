"""Sequences with images over ranks: language layers in parts, the vision tower whole."""

from __future__ import annotations

import pytest
import torch

from rlrun.models.images import KINDS
from rlrun.testing.images import IMAGE_TOKEN, image_batch, own_log_probs, save_tiny_vlm

MIXED = ([3, (1, 4, 4), 4, (1, 2, 6), 3], [7], [1, (1, 6, 4), 5], [3, (1, 4, 6), 2], [2])


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save_tiny_vlm(path, request.param)
    return path


def make_batch(*sequences):
    batch, generator = image_batch(*sequences), torch.Generator().manual_seed(1)
    noise = torch.randn(2, batch.num_tokens, generator=generator, dtype=torch.float64)
    batch.tokens |= {"log_probs": noise[0] - 5.5, "advantages": noise[1]}
    return batch


def both(pools, tools, path, batch, size, **sections):
    """The same update of one rank and of all ranks of the last pool, in groups of `size`."""
    expected = tools.update(pools[0], tools.make_config(path, 1, "float32"), batch)
    assert float(expected.gradients["visual.patch_embed.proj.weight"].norm()) > 0
    got = tools.update(pools[-1], tools.make_config(path, size, "float32", **sections), batch)
    tools.assert_same(got, expected, tolerance=2e-5, columns=1e-5)
    return got


def cuts(batch, size):
    """The tokens before and behind each cut of the whole batch as one row, which is sorted by length."""
    ids = batch.select(batch.lengths.argsort(stable=True)).tokens["ids"]
    part = -(-len(ids) // size)
    return [(int(ids[t - 1]), int(ids[t])) for t in range(part, len(ids), part)]


def test_two_ranks(folder, ranks1, ranks2, tools):
    """Case 55: log-probabilities, metrics and all gradients of an update, the vision tower's too, are those of one rank, and the
    model's own without packing; an image lies across the cut. The stream of weights has the names of save_pretrained."""
    from safetensors import safe_open
    from transformers import AutoModelForImageTextToText

    batch = make_batch(*MIXED)
    assert cuts(batch, 2) == [(IMAGE_TOKEN, IMAGE_TOKEN)]
    got = both((ranks1, ranks2), tools, folder, batch, 2)
    own = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = own_log_probs(own, batch, 0.7)
    mask = batch.tokens["loss_mask"]
    torch.testing.assert_close(got.columns["log_probs"][mask], expected[mask], rtol=1e-5, atol=1e-5)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == got.gradients.keys()


def test_a_shard_without_images(folder, ranks1, ranks2, tools):
    """Two data-parallel ranks, one with text alone and an empty micro-batch, wait for nothing and learn as one rank does."""
    batch = make_batch([2, (1, 4, 4), 3], [2, (1, 2, 4), 4], [16])
    both((ranks1, ranks2), tools, folder, batch, 1, actor={"tokens_per_micro_batch": 16})


@pytest.mark.slow
@pytest.mark.parametrize("size, sections", [
    (4, {}), (2, {"actor": {"tokens_per_micro_batch": 18}}), (4, {"model": {"gradient_checkpointing": True}}),
])
def test_four_ranks(folder, ranks1, ranks4, tools, size, sections):
    """Case 55: groups of 4 and of 2 ranks, in micro-batches, recomputed."""
    batch = make_batch(*MIXED)
    assert (IMAGE_TOKEN, IMAGE_TOKEN) in cuts(batch, size)
    both((ranks1, ranks4), tools, folder, batch, size, **sections)

"""Models that read images: a packed row against their own forward, one sequence at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlrun.batch import Batch
from rlrun.models import loading
from rlrun.models.images import COLUMNS, KINDS
from rlrun.rollout.hf import HfRollout
from rlrun.testing.images import IMAGE_TOKEN, image_batch, own_log_probs, save_tiny_vlm
from rlrun.testing.tiny import save_tiny

MIXED = ([3, (1, 4, 4), 4, (1, 2, 6), 3], [7], [1, (1, 6, 2), 5], [4, (1, 4, 6), 2], [2])


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save_tiny_vlm(path, request.param)
    return path


def packed_row(policy, batch):
    tokens = batch.tokens
    return policy.row(tokens["ids"], batch.cu_seqlens, batch.position_ids, tokens["loss_mask"], ragged=batch.ragged)


def test_equals_the_model_alone(folder):
    """Log-probabilities and the gradient of every parameter, the vision tower's too, are those of transformers without packing,
    with images in some sequences and not in others."""
    batch = image_batch(*MIXED)
    mask, weights = batch.tokens["loss_mask"], torch.linspace(-1, 1, batch.num_tokens, dtype=torch.float64)
    kind = loading.auto_class("lm", loading.load_config(str(folder)))
    own = kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    expected = own_log_probs(own, batch, 0.7)
    (expected * weights)[mask].sum().backward()
    policy = loading.load_policy(str(folder), "lm", torch.float64)
    got = policy(packed_row(policy, batch), {"log_probs"}, 0.7)["log_probs"]
    (got * weights)[mask].sum().backward()
    tolerance = 5e-6  # norms and rotary embeddings are in float32 always
    torch.testing.assert_close(got[mask], expected[mask], rtol=tolerance, atol=tolerance)
    gradients = dict(policy.model.named_parameters())
    norm = max(float(p.grad.norm()) for p in own.parameters())
    for name, p in own.named_parameters():
        assert p.grad.norm() > 0, name
        assert (gradients[name].grad - p.grad).norm() < tolerance * max(p.grad.norm(), 1e-2 * norm), name


def test_rows_without_images(folder):
    """Text alone has the numbers it has without the columns of images; the vision tower still has a gradient, of zeros."""
    batch = image_batch([5], [3])
    policy = loading.load_policy(str(folder), "lm", torch.float64)
    got = policy(packed_row(policy, batch), {"log_probs"})["log_probs"]
    got.sum().backward()
    assert all(float(p.grad.abs().max()) == 0.0 for p in policy.model.base_model.visual.parameters())
    batch.ragged = {}
    torch.testing.assert_close(got, policy(packed_row(policy, batch), {"log_probs"})["log_probs"], rtol=1e-12, atol=1e-12)


def test_a_critic_sees_images(folder):
    """Values depend on an image's pixels, of tokens behind it alone."""
    policy = loading.load_policy(str(folder), "value", torch.float64)
    batch = image_batch(*MIXED)
    values = []
    for _ in range(2):
        values.append(policy(packed_row(policy, batch), {"values"})["values"])
        batch.ragged["pixel_values"][2] += 1.0
    start, end = batch.cu_seqlens[2:4].tolist()
    changed = (values[0] != values[1]).nonzero()[:, 0].tolist()
    assert changed == [t for t in range(start, end) if t > start + 3 and batch.tokens["loss_mask"][t]]


def test_refusals(folder, tmp_path):
    """Images that a model does not read, and sequences whose tokens are not those of their images, are errors."""
    batch = image_batch(*MIXED)
    policy = loading.load_policy(str(folder), "lm", torch.float32)
    batch.tokens["ids"][-1] = IMAGE_TOKEN
    with pytest.raises(ValueError, match="sequence 4 has 1 image tokens and 0 patches, but image_grid_thw makes 0 and 0"):
        packed_row(policy, batch)
    batch = image_batch([(1, 4, 4)], [(1, 2, 6)])
    batch.ragged["pixel_values"].reverse()
    with pytest.raises(ValueError, match="sequence 0 has 4 image tokens and 12 patches, but image_grid_thw makes 4 and 16"):
        packed_row(policy, batch)
    for other in ({"pixel_values": [None]}, {name: [None] for name in (*COLUMNS, "pixel_values_videos")}):
        with pytest.raises(ValueError, match="ragged columns pixel_values and image_grid_thw, videos not at all"):
            policy.row(torch.arange(2), torch.tensor([0, 2]), torch.arange(2), torch.arange(2) > 0, ragged=other)
    save_tiny(tmp_path, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    with pytest.raises(ValueError, match="images, which LlamaForCausalLM does not read"):
        packed_row(loading.load_policy(str(tmp_path), "lm", torch.float32), batch)
    config = SimpleNamespace(model=SimpleNamespace(path=str(folder), tokenizer=None), rollout=SimpleNamespace(engine_args={}))
    with pytest.raises(ValueError, match="rollouts with images are not supported"):
        HfRollout(config, torch.device("cpu"), 0)
    with pytest.raises(ValueError, match="differ in columns"):
        Batch.concat([batch, Batch(batch.cu_seqlens, batch.tokens, batch.sequences)])

"""Tiny models that read images, and batches with images for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlrun.batch import Batch
from rlrun.models.loading import auto_class
from rlrun.testing.tiny import build_tokenizer, tiny_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMAGE_TOKEN = 257
_PATCHES = {"patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2}
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 8,
                   "fullatt_block_indexes": [1]},
}


def save_tiny_vlm(directory: str | Path, kind: str, seed: int = 0) -> PreTrainedModel:
    """Write a tiny random model (`kind` "qwen2_vl" or "qwen2_5_vl") to `directory`; returns the float32 model."""
    from transformers import AutoConfig

    text = tiny_config("qwen2", 258, hidden_size=32, intermediate_size=48, num_hidden_layers=2).to_dict()
    text = {name: value for name, value in text.items() if name not in ("model_type", "transformers_version", "head_dim")}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 100.0}
    vision = {"depth": 2, "num_heads": 2, **_PATCHES, **_VISION[kind]}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, image_token_id=IMAGE_TOKEN, video_token_id=256,
                                  vision_start_token_id=254, vision_end_token_id=255, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto_class("lm", config).from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # so that images matter
            torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return model


def image_batch(*sequences: Sequence[int | tuple[int, int, int]], seed: int = 0) -> Batch:
    """A batch of `ids`, `loss_mask` (all text but the first token) and images. Each sequence is a list of numbers of text
    tokens and of grids of images (time, height, width in patches; height and width even)."""
    generator = torch.Generator().manual_seed(seed)
    rows, pixels, grids = [], [], []
    for sequence in sequences:
        ids: list[int] = []
        mine = [part for part in sequence if isinstance(part, tuple)]
        for part in sequence:
            ids += ([IMAGE_TOKEN] * (part[0] * part[1] * part[2] // 4) if isinstance(part, tuple) else
                    torch.randint(2, 254, (part,), generator=generator).tolist())
        rows.append({"ids": ids, "loss_mask": [t > 0 and token != IMAGE_TOKEN for t, token in enumerate(ids)]})
        grids.append(torch.tensor(mine) if mine else None)
        patches = sum(t * h * w for t, h, w in mine)
        pixels.append(torch.randn(patches, 3 * 2 * 2 * 2, generator=generator) if mine else None)
    batch = Batch.from_sequences(rows, {"group": torch.arange(len(rows))})
    batch.ragged = {"pixel_values": pixels, "image_grid_thw": grids}
    return batch


def own_log_probs(model: PreTrainedModel, batch: Batch, temperature: float) -> Tensor:
    """[T] log-probabilities by the model's own forward, one sequence at a time, without packing; 0 at first tokens."""
    columns = []
    for row in range(len(batch)):
        ids = batch.select([row]).tokens["ids"][None]
        pixels, grid = batch.ragged["pixel_values"][row], batch.ragged["image_grid_thw"][row]
        logits = model(input_ids=ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=(ids == IMAGE_TOKEN).int(),
                       use_cache=False).logits[0, :-1]
        chosen = (logits / temperature).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        columns.append(torch.cat([chosen.new_zeros(1), chosen]))
    return torch.cat(columns)

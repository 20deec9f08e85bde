"""Images in a packed row, as Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923) read them.

A batch brings them in ragged columns, one entry a sequence, None for one without images: `pixel_values` [patches, C] and
`image_grid_thw` [images, 3], as the model's processor makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlrun.batch import to_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from rlrun.workers.protocol import SequenceParallel

KINDS = ("qwen2_vl", "qwen2_5_vl")
COLUMNS = ("pixel_values", "image_grid_thw")
_VIDEOS = ("pixel_values_videos", "video_grid_thw")


@dataclass(frozen=True)
class Images:
    """All images of a packed row, end to end, and where a rank's part of the row has tokens of them."""

    pixels: Tensor  # [patches, C]
    grid: Tensor  # [images, 3]: patches in time, height and width
    slots: Tensor  # image tokens: indices into the part's `ids`
    sources: Tensor  # which of all images' features stands there


def reads_images(config: PretrainedConfig) -> bool:
    """Whether a model of this config has a vision tower that is supported."""
    return config.model_type in KINDS


def has_images(ragged: Mapping[str, list[Any]]) -> bool:
    """Whether there are columns of images, also where no sequence has one. Raises ValueError for half of them, and for videos."""
    known = [name for name in (*COLUMNS, *_VIDEOS) if name in ragged]
    if known and known != [*COLUMNS]:
        raise ValueError(f"images come in the ragged columns {' and '.join(COLUMNS)}, videos not at all; there is "
                         f"{', '.join(known)}")
    return bool(known)


def images_of(model: PreTrainedModel, ids: Tensor, cu_seqlens: Tensor, ragged: Mapping[str, list[Any]],
              sp: SequenceParallel | None, device: torch.device | str) -> tuple[Images, Tensor]:
    """The images of a row [T], and position ids [3, T] of all its tokens by the model's own rule, one sequence at a time.

    A row without any gets a blank one that stands nowhere: every rank then runs the vision tower, forwards and backwards.
    Raises ValueError for a model that reads no images, and where image tokens and images do not match."""
    if not reads_images(model.config):
        raise ValueError(f"the batch has images, which {type(model).__name__} does not read; models that do: {', '.join(KINDS)}")
    pixels, grids = (ragged[name] for name in COLUMNS)
    is_image, merge = ids == model.config.image_token_id, model.config.vision_config.spatial_merge_size
    parts = (x.split(cu_seqlens.diff().tolist()) for x in (ids, is_image))
    positions = []
    for number, (own, marked, patches, grid) in enumerate(zip(*parts, pixels, grids)):
        expected = 0 if grid is None else int(grid.prod(-1).sum())
        found = int(marked.sum()), 0 if patches is None else len(patches)
        if found != (expected // merge**2, expected):
            raise ValueError(f"sequence {number} has {found[0]} image tokens and {found[1]} patches, but image_grid_thw makes "
                             f"{expected // merge**2} and {expected}")
        positions.append(model.base_model.get_rope_index(own[None], marked[None].int(), image_grid_thw=grid)[0][:, 0])
    pixels, grids = ([x for x in column if x is not None] for column in (pixels, grids))
    if not grids:
        patch = model.base_model.visual.patch_embed.proj.weight.shape[1:].numel()
        pixels, grids = [torch.zeros(merge**2, patch)], [torch.tensor([[1, merge, merge]])]
    local, sources = is_image, is_image.cumsum(0) - 1
    if sp is not None:
        local, sources = sp.shard(local), sp.shard(sources)
    slots = local.nonzero()[:, 0]
    images = Images(*(to_device(x, device) for x in (torch.cat(pixels), torch.cat(grids), slots, sources[slots])))
    return images, torch.cat(positions, 1)


def embed(model: PreTrainedModel, ids: Tensor, images: Images) -> Tensor:
    """Embeddings [T, hidden] of tokens, those of images from the vision tower, which runs whole."""
    embeds = model.get_input_embeddings()(ids)
    features = model.base_model.get_image_features(images.pixels, images.grid, return_dict=True).pooler_output
    placed = torch.cat(list(features)).to(embeds.dtype).index_select(0, images.sources)
    return embeds.index_copy(0, images.slots, placed)

"""What a completion's length does to its reward, and samples that are left out of the losses."""

from __future__ import annotations

from torch import Tensor

from rlrun.batch import Batch


def overlong(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """[S] soft overlong punishment (DAPO, arXiv 2503.14476, equation 13) of completions of `lengths` [S] tokens.

    0 up to `longest - buffer`, then falling evenly to -1 at `longest`.
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1, 0)


def mask_out(batch: Batch, dropped: Tensor) -> None:
    """Take the samples `dropped` [S] out of `loss_mask` and `gap_mask`: they count in no loss and no denominator.

    Column `response_mask` keeps the whole completions, for metrics.
    """
    tokens, keep = batch.tokens, ~dropped[batch.sequence_ids]
    tokens.setdefault("response_mask", tokens["loss_mask"])
    for name in {"loss_mask", "gap_mask"} & tokens.keys():
        tokens[name] = tokens[name] & keep

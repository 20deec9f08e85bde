"""A batch and a loss for tests of what training backends compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlrun.batch import Batch
from rlrun.workers.protocol import Kind, Term


def random_batch(lengths: Sequence[int], prompt: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """Random sequences of given lengths with `prompt` tokens outside the loss, in groups of two."""
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    total = int(cu_seqlens[-1])
    batch = Batch(cu_seqlens, {"ids": torch.randint(2, 258, (total,), generator=generator)})
    batch.tokens["loss_mask"] = batch.position_ids >= prompt
    for name in ("log_probs", "advantages"):
        batch.tokens[name] = torch.randn(total, generator=generator, dtype=dtype)
    batch.tokens["log_probs"] -= 5.5
    batch.sequences["group"] = torch.arange(len(lengths)) // 2
    return batch


@dataclass
class TokenLoss:
    """A policy gradient with entropy, or a squared error of values; masked slots never read."""

    kind: Kind = "tokens"

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Term]:
        mask = batch.tokens["loss_mask"]
        advantages = batch.tokens["advantages"][mask]
        if "values" in outputs:
            return {"loss": Term(((outputs["values"][mask] - advantages) ** 2).sum(), self.kind, 1.0)}
        ratio = (outputs["log_probs"][mask] - batch.tokens["log_probs"][mask]).exp()
        return {"loss": Term(-(ratio * advantages).sum(), self.kind, 1.0),
                "entropy": Term(outputs["entropy"][mask].sum(), "tokens", -0.1),
                "ratio_max": Term(ratio.detach().max() if len(ratio) else ratio.detach().new_tensor(0.0), "max")}

"""Direct preference optimization: a preferred and a rejected answer of each prompt, no reward and no generation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlrun.algorithms.base import Algorithm
from rlrun.batch import Batch
from rlrun.data.sample import Sample
from rlrun.metrics import Value
from rlrun.workers.protocol import Loss, RoleRequest, Term


class Dpo(Algorithm):
    """DPO (Rafailov et al. 2023, arXiv 2305.18290). A row's answer is preferred to what its column `rejected` holds.

    The reference is the policy as the stage begins, or `ref.path`."""

    online = False
    atom = "pair"

    def roles(self) -> dict[str, RoleRequest]:
        return {"ref": RoleRequest(trainable=False, path=self.config.ref.path, dtype=self.config.model.dtype)}

    def completions(self, sample: Sample) -> list[Any]:
        if sample.extra.get("rejected") is None:
            raise ValueError("no column 'rejected', which dpo needs beside the preferred answer; "
                             f"there is {', '.join(sample.extra) or 'no further column'}")
        return [sample.answer, sample.extra["rejected"]]

    def losses(self, step: int) -> Mapping[str, Loss]:
        return {"actor": DpoLoss(self.options.kl_coef)}

    def evaluate(self, batch: Batch) -> dict[str, Value]:
        terms = DpoLoss(self.options.kl_coef)(batch.tokens, batch)
        pairs = batch.denominators()["groups"]
        return {name.removeprefix("dpo/"): Value(float(term.sum), pairs) for name, term in terms.items()}


@dataclass(frozen=True)
class DpoLoss:
    """Mean over pairs of -log sigmoid(margin), arXiv 2305.18290 equation 7. The margin is the preferred answer's reward
    less the rejected one's, and an answer's reward is beta * log(policy / reference) of its whole text.

    Reads `ref_log_probs`, and of sequences `pair` and `preference` (0: preferred, 1: rejected). Pairs must be whole."""

    beta: float

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> dict[str, Term]:
        mask = batch.tokens["loss_mask"]
        log_ratios = torch.zeros_like(outputs["log_probs"])
        log_ratios[mask] = outputs["log_probs"][mask] - batch.tokens["ref_log_probs"][mask]
        rewards = self.beta * batch.sums(log_ratios)
        preferred = batch.sequences["preference"] == 0
        pairs, pair = batch.sequences["pair"].unique(return_inverse=True)
        assert len(batch) == 2 * len(pairs) == 2 * int(preferred.sum()), "a pair was cut"
        margins = torch.zeros_like(rewards[preferred]).index_add(0, pair, torch.where(preferred, rewards, -rewards))
        known = rewards.detach()
        return {
            "dpo/loss": Term(-logsigmoid(margins).sum(), "groups", 1.0),
            "dpo/accuracy": Term((margins.detach() > 0).sum().to(known.dtype), "groups"),
            "dpo/margin": Term(margins.detach().sum(), "groups"),
            "dpo/chosen_reward": Term(known[preferred].sum(), "groups"),
            "dpo/rejected_reward": Term(known[~preferred].sum(), "groups"),
        }

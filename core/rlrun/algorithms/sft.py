"""Supervised fine-tuning on the samples' reference answers: a warm start for RL, or a run of its own."""

from collections.abc import Mapping

from rlrun.algorithms.base import Algorithm
from rlrun.algorithms.losses import SftLoss
from rlrun.batch import Batch
from rlrun.metrics import Value
from rlrun.workers.protocol import Loss


class Sft(Algorithm):
    """Maximum likelihood of the answers, given the prompts."""

    online = False

    def losses(self, step: int) -> Mapping[str, Loss]:
        return {"actor": SftLoss(self.options.loss_aggregation)}

    def evaluate(self, batch: Batch) -> dict[str, Value]:
        """Negative log-likelihood of a token, in nats."""
        mask = batch.tokens["loss_mask"]
        return {"nll": Value(-float(batch.tokens["log_probs"][mask].double().sum()), float(mask.sum()))}

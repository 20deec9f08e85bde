"""Weights of the KL to the reference and of the entropy bonus: fixed, or moved towards a target."""

from dataclasses import dataclass


@dataclass
class KlCoefficient:
    """The KL's weight: fixed, or moved towards a target (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)."""

    value: float
    target: float | None = None
    horizon: int = 10000

    def update(self, kl: float, sequences: int) -> None:
        """After a step of so many sequences with mean KL `kl` per token."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * sequences / self.horizon


@dataclass
class EntropyCoefficient:
    """Fixed; or, with a target (nats per token), moved by `STEP` after each step, up while the entropy is below the target and
    down while it is above, and applied only while it is not above (adaptive entropy control of Skywork-OR1, arXiv 2505.22312)."""

    STEP = 0.005
    raw: float
    target: float | None = None
    needed: bool = True  # whether the entropy was at or below the target after the last step

    @property
    def value(self) -> float:
        return self.raw if self.needed else 0.0

    def update(self, entropy: float) -> None:
        """After a step with mean entropy `entropy` per token."""
        if self.target is not None:
            self.needed = entropy <= self.target
            self.raw = max(0.0, self.raw + (self.STEP if entropy < self.target else -self.STEP))

"""Low-rank adapters (arXiv 2106.09685) of language models, through peft: only they train; weights leave merged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rlrun.models.policy import PolicyModel
    from rlrun_fsdp.plugin import LoraConfig


class Adapter(NamedTuple):
    """W + scaling * up @ down."""

    down: Tensor
    up: Tensor
    scaling: float


def add_adapters(policy: PolicyModel, config: LoraConfig, master: torch.dtype, seed: int) -> None:
    """Put adapters, in `master`, on the modules that `config` names; everything else is frozen.

    Raises ValueError where peft is not installed, no module has such a name, or weights are kept transposed.
    """
    try:
        import peft
    except ImportError as error:
        raise ValueError("fsdp.lora needs peft: pip install 'rlrun-fsdp[lora]'") from error
    policy.requires_grad_(False)
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=_targets(config), lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, policy.model)
    if any(getattr(m, "fan_in_fan_out", False) for m in policy.modules()):
        raise ValueError(f"fsdp.lora: {type(policy.model).__name__} keeps its weights transposed, which cannot be merged")
    for name, p in policy.named_parameters():
        p.requires_grad_("lora_" in name)
        if "lora_" in name:
            p.data = p.data.to(master)


def _targets(config: LoraConfig) -> str | list[str]:
    return config.target_modules[0] if config.target_modules == ["all-linear"] else list(config.target_modules)


def adapters(model: nn.Module) -> dict[int, Adapter]:
    """Adapters by the id of the weight that each belongs to."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "lora_A")]
    return {id(m.base_layer.weight): Adapter(m.lora_A["default"].weight, m.lora_B["default"].weight, m.scaling["default"])
            for m in layers}


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Compute with the base model alone."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False

"""Device memory between phases: the only place that empties the allocator's cache."""

import torch


def empty_cache(device: torch.device) -> None:
    """Give cached, unused memory of `device` back to the driver, so that others can take it."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()

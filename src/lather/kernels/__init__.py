"""Triton kernels. Nothing here imports Triton until a kernel is launched."""

import importlib.util
from functools import lru_cache

import torch


def has_kernels(device: torch.device) -> bool:
    """Whether our kernels run: they need Triton and an NVIDIA GPU, Ampere or later. A GPU that is not in use, as on paper, counts
    as one with Triton."""
    if device.type != "cuda" or torch.version.hip:
        return False
    used = torch.cuda.is_initialized() and (device.index or 0) < torch.cuda.device_count()  # type: ignore[no-untyped-call]
    return not used or (_has_triton() and torch.cuda.get_device_capability(device) >= (8, 0))


@lru_cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None

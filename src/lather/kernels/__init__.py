"""Triton kernels. Nothing here imports Triton until a kernel is launched."""

import importlib.util
from functools import lru_cache

import torch

ENOUGH = 160 << 10  # bytes of shared memory for three stages, which take 128 KiB on an A100 and 192 KiB on an H200


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


@lru_cache
def stages(device: torch.device) -> int:
    """How far ahead a kernel with products loads its tiles: two stages, or three where there is enough shared memory."""
    if device.type != "cuda":
        return 2
    memory = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return 3 if memory >= ENOUGH else 2


@lru_cache
def registers(device: torch.device) -> int | None:
    """Of a thread, at most, in a kernel of 8 warps: then two programs run side by side. GPUs other than Hopper's and the Blackwell
    of data centres need more for their products."""
    return 128 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10) else None

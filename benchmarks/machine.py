"""The machine: which device, how long, how much memory, which versions. The experiments use it too."""

from __future__ import annotations

import gc
import platform
import time

import torch

import lather

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MIB = 2**20


def now() -> float:
    """Milliseconds, with nothing left to do on the device."""
    if CUDA:
        torch.cuda.synchronize()
    return 1e3 * time.perf_counter()


class Memory:
    """MiB above what was allocated at the start; None where torch does not count."""

    def __init__(self) -> None:
        if CUDA:
            gc.collect()
            torch.cuda.empty_cache()
        self._base = torch.cuda.memory_allocated() if CUDA else 0
        self.peak()

    def held(self) -> float | None:
        return (torch.cuda.memory_allocated() - self._base) / MIB if CUDA else None

    def peak(self) -> float | None:
        """The most since the last call."""
        if not CUDA:
            return None
        most = torch.cuda.max_memory_allocated() - self._base
        torch.cuda.reset_peak_memory_stats()
        return most / MIB


def state_mib(opt: torch.optim.Optimizer) -> float:
    tensors = [x for entry in opt.state.values() for x in entry.values() if isinstance(x, torch.Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors) / MIB


def solvers(*optimizers: torch.optim.Optimizer) -> list[str]:
    """The root solvers that lather used."""
    shampoos = [opt for opt in optimizers if isinstance(opt, lather.Shampoo)]
    return sorted({solver for opt in shampoos for row in opt.plan().banks for solver in row.solvers})


def device() -> str:
    return torch.cuda.get_device_name() if CUDA else f"CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        "lather": lather.__version__,
    }


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__

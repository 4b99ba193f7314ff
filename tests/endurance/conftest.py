"""The pools of processes."""

from distributed.conftest import pools

__all__ = ["pools"]

"""Carries a bank's gradients from where they are stored to the owner, and its directions back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .plan import Move


class Exchange:
    """The moves of one bank. What a rank sends to itself is already in place, so one process has nothing to do."""

    def __init__(self, inbound: Sequence[Move], outbound: Sequence[Move]) -> None:
        remote = [move for move in (*inbound, *outbound) if move.src != move.dst]
        if remote:
            raise NotImplementedError(f"moves between ranks are not supported by this version, such as {remote[0]}")

    def inbound(self, grads: Tensor) -> Tensor:
        """Stored pieces of gradients to owned blocks."""
        return grads

    def outbound(self, directions: Tensor) -> Tensor:
        """Owned directions to stored pieces."""
        return directions

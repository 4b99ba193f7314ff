"""What every transform of a stack is given: the stack's description, and the numbers of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import options
from ..linalg import from_host

State = dict[str, Tensor]


@dataclass(frozen=True)
class Stack:
    """``n`` blocks of one shape; state is kept in ``dtype``, arithmetic done in ``compute``."""

    n: int
    shape: tuple[int, ...]
    modes: tuple[str, ...]
    dtype: torch.dtype
    compute: torch.dtype
    device: torch.device

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(self.n, *shape, dtype=dtype or self.dtype, device=self.device)


@dataclass(frozen=True)
class Context:
    """The numbers of one step for one stack.

    ``group`` holds the options as they are now, ``steps`` the step of each slot's parameter, ``alive [n]`` is 1 for a slot
    that takes part in the step and 0 for one that must keep its state.
    """

    group: Mapping[str, Any]
    steps: Sequence[int]
    alive: Tensor
    bc2: Tensor | None = None  # the correction of factors, where it is on the device already

    @cached_property
    def uniform(self) -> bool:
        """Whether all slots are at the same step, as they nearly always are."""
        return self.steps.count(self.steps[0]) == len(self.steps)

    def weight(self, beta: float) -> Tensor:
        """``1 - beta`` for the slots that take part, 0 for the others: ``[n]``."""
        return self.alive * (1 - beta)

    def correction(self, of_step: Callable[[int], float]) -> float | Tensor:
        """A number that depends on the step: one for all slots, or ``[n]`` where their parameters' steps differ."""
        if self.uniform:
            return of_step(self.steps[0])
        return from_host([of_step(t) for t in self.steps], self.alive, self.alive.dtype)

    def factor_correction(self) -> float | Tensor:
        """``bc2 = 1 - beta2^t``; 1 for the sum and without bias correction."""
        if self.bc2 is not None:
            return self.bc2
        beta2 = self.group["betas"][1]
        if beta2 == 1 or not self.group["bias_correction"]:
            return 1.0
        return self.correction(lambda t: 1 - beta2**t)

    def exponent(self, order: int) -> float:
        return options.exponent(self.group, order)


class Due(NamedTuple):
    """Slots of a stack whose turn it is."""

    state: State
    slots: Sequence[int]
    ctx: Context


class Batch(ABC):
    """Work on some slots of some stacks; ``reads`` is memory that it needs."""

    reads: list[Tensor]

    @abstractmethod
    def __call__(self) -> list[tuple[int, Sequence[int], Tensor]]:
        """The number of each stack, its slots, and ``[len(slots)]``, False where that failed."""


class Transform(ABC):
    """A method on stacks: accumulates statistics on every step, and applies them on every step.

    State is a dict of tensors ``[n, ...]`` under short role names that are unique within a bank. A subclass is final, a
    frozen dataclass whose fields are its options.
    """

    @abstractmethod
    def init(self, stack: Stack, group: Mapping[str, Any]) -> State:
        """Fresh state."""

    @abstractmethod
    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> None:
        """Take in a gradient ``[n, ...]``, in place. Slots that are not alive have a zero gradient and keep their bits."""

    @abstractmethod
    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        """The direction for a filtered gradient ``u [n, ...]``; pure."""


class Preconditioner(Transform):
    """A transform with a part that is refreshed only now and then."""

    begins_at_once: ClassVar[bool] = False  # whether it can be applied before the first refresh

    def follow(self, state: State, grad: Tensor, ctx: Context) -> None:
        """Take in a gradient after the refresh of the step, in place, as :meth:`accumulate` does before it; if need be."""

    @abstractmethod
    def apply(self, state: State, u: Tensor, ctx: Context, out: Tensor | None = None) -> Tensor:
        """As every transform's; into ``out`` if that is given."""

    @abstractmethod
    def batches(self, due: Sequence[Due], exact: bool = False) -> Iterator[Batch]:
        """Recompute what is amortised for some slots of some stacks: in parts, each of which has what it needs when it is
        handed out and can be done later, once.

        A slot that is not alive sits this out too: it keeps what it has, and that is no failure. ``exact``: by the slowest
        and surest way, for slots that failed before.
        """

    @abstractmethod
    def publish(self, state: State, slots: Sequence[int]) -> None:
        """With ``refresh_delay``, put what was refreshed so many steps ago to use."""

    @abstractmethod
    def is_capturable(self, due: Sequence[Due]) -> bool:
        """Whether that refresh is the same operations every time, and the host never waits for their results."""

    @abstractmethod
    def ready(self, state: State) -> Tensor:
        """``[n]`` bool: the slots that have been refreshed with success, and can be applied."""

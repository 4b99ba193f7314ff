"""What a method is: it takes in the gradients of a stack of blocks and gives out directions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..roots.directions import Sizes

State = dict[str, Tensor]
FULL = "full"  # a mode with a whole factor; the other kind keeps its factor's diagonal only


@dataclass(frozen=True)
class Hyper:
    """The options that methods read, checked and resolved."""

    beta1: float
    beta2: float
    beta3: float
    bias_correction: bool
    eps: float
    relative_damping: bool
    exponent: float | tuple[tuple[int, float], ...] | None
    exponent_multiplier: float
    root: str
    root_device: str | None
    refresh_delay: int
    packed: bool | None  # None: it depends on the device, and a bank knows
    state_dtype: torch.dtype
    root_dtype: torch.dtype
    filter_dtype: torch.dtype
    compute_dtype: torch.dtype
    polar: str
    polar_scale: str | None
    graft_beta2: float
    graft_eps: float

    @property
    def looks_ahead(self) -> bool:
        """Whether the filtered gradient differs from what the filter remembers, which may be rounded."""
        return self.beta1 > 0 and (self.beta3 != self.beta1 or self.filter_dtype != self.compute_dtype)


@dataclass(frozen=True)
class Stack:
    """``n`` blocks of one shape. State is kept in ``dtype``; arithmetic is done in ``compute``."""

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

    ``steps`` has the step of every slot. ``alive [n]`` is 1 for a slot that takes part in the step, and 0 for one that keeps
    its state. ``bc2`` is the bias correction of factors where that is already on the device. If there are ``sizes``,
    products may be in halves: a method that does so writes there what its direction has to be multiplied by.
    """

    hyper: Hyper
    steps: Sequence[int]
    alive: Tensor
    bc2: Tensor | None = None
    sizes: Sizes | None = None


class Transform(ABC):
    """Takes in a gradient on every step, and gives out a direction on every step.

    State is a dict of tensors ``[n, ...]``. Role names are short and unique within a bank.
    """

    roles: ClassVar[Mapping[str, str]] = {}  # first letter of a role in the state -> what reports call it
    sums: ClassVar[str] = ""  # first letters of roles that start as zeros and take in gradients

    @abstractmethod
    def init(self, stack: Stack, hyper: Hyper) -> State:
        """Fresh state."""

    @abstractmethod
    def accumulate(self, state: State, grad: Tensor, ctx: Context) -> Tensor | None:
        """Take in a gradient ``[n, ...]``, in place. A slot that is not alive has a zero gradient and keeps its bits.

        A method that ``judges`` returns ``[n]`` bool: the slots that may take part in the step. Others keep their bits too.
        """

    @abstractmethod
    def apply(self, state: State, u: Tensor, ctx: Context) -> Tensor:
        """The direction for a filtered gradient ``u [n, ...]``. Pure."""


class Method(Transform):
    """A way to precondition blocks, with everything that the rest of the library has to know about it.

    A subclass is final and registered (``lather.methods.register``). Its class variables are its facts.
    """

    name: ClassVar[str]  # the value of the option `preconditioner`
    text: ClassVar[str]  # what it does, for the table of options
    aliases: ClassVar[tuple[str, ...]] = ()  # what other libraries call it
    default_eps: ClassVar[Mapping[str, float]] = {"relative": 1e-4, "absolute": 1e-12}  # by kind of damping
    reads: ClassVar[frozenset[str]] = frozenset()  # options that mean something to some methods only, this one among them
    elementwise: ClassVar[str | None] = None  # the graft of parameters without factors, where the user set none
    refreshes: ClassVar[bool] = False  # whether a part of it is recomputed only now and then: those made of Kronecker factors
    waits: ClassVar[bool] = False  # whether it can be applied only after its first refresh
    judges: ClassVar[bool] = False  # whether it may refuse a gradient that is finite
    follows: ClassVar[bool] = False  # whether it takes the gradient in again after a refresh
    kernels: ClassVar[str] = "none"  # what kernels do of it: "none"; "graft", all but its mathematics; "factors" too
    linear: ClassVar[bool] = True  # whether a filtered gradient twice as large has a direction twice as large
    squares: ClassVar[bool] = False  # whether the diagonals of its factors are averages of squares of gradients
    in_parts: ClassVar[bool] = False  # whether its products take so long that parts of a stack should overlap

    @abstractmethod
    def apply(self, state: State, u: Tensor, ctx: Context, out: Tensor | None = None) -> Tensor:
        """As every transform's. A method that kernels know writes into ``out`` if that is given."""

    def is_capturable(self, hyper: Hyper) -> bool:
        """Whether a CUDA graph can hold :meth:`apply`."""
        return True

    def follow(self, state: State, grad: Tensor, ctx: Context) -> None:
        """Take in a gradient after the refresh of the step, in place."""

    def publish(self, state: State, slots: Sequence[int], hyper: Hyper) -> None:
        """With ``refresh_delay``: put to use what was refreshed some steps ago."""

    def ready(self, state: State) -> Tensor:
        """``[n]`` bool: the slots that can be applied. Only asked of a method that waits."""
        raise NotImplementedError

    def check(self, hyper: Hyper) -> None:
        """Raise ValueError for options that this method cannot have."""

    def idle(self, options: Mapping[str, Any]) -> dict[str, str]:
        """More options that do nothing with this method, and why. ``options`` is a param group."""
        return {}

    def step_flops(self, shape: Sequence[int], modes: Sequence[str], hyper: Hyper) -> float:
        """Operations of the matrix products of a step, for one block."""
        return 0.0

    def refresh_flops(self, shape: Sequence[int], modes: Sequence[str], hyper: Hyper, device: str) -> float:
        """Operations of a refresh, for one block."""
        return 0.0

    def solvers(self, shape: Sequence[int], modes: Sequence[str], hyper: Hyper, device: str) -> tuple[str, ...]:
        """What computes the matrices of a block, for reports: one name for each mode."""
        return ()

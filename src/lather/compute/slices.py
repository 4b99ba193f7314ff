"""Which banks go through kernels together: slices of banks, where their blocks lie, and the buffers that they need.

A *slice* is a range of slots of one bank. Kernels update factors from gradients in *halves* (see :mod:`lather.kernels.schema`),
for blocks ``[rows, columns]`` and for blocks ``[rows, columns, third]`` with a *thin* third mode of at most 16 elements, such as
the 3 x 3 of a convolution. All other factors are updated by torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..kernels import has_kernels
from ..kernels.schema import Alignment
from ..methods import Method, State
from ..planning.blocks import Block
from ..planning.plan import BankKey
from ..settings import Settings
from ..storage.grids import join_dims
from .bank import Bank

SIDE, DEPTH = 128, 64  # side of a tile of a factor, and elements of its sum that are loaded at a time
THIN_SIDE = 16  # largest third mode whose factor kernels update
LARGEST = 1 << 25  # elements that are computed together, unless one block has more; buffers are as large

SliceId = tuple[BankKey, int]  # the bank, and the first slot


def suits(device: str, dtype: str, settings: Settings) -> bool:
    """Whether kernels cover parameters of this dtype with these options. Other banks are computed by torch, one by one."""
    single = settings.hyper.state_dtype == torch.float32 and dtype in ("float32", "bfloat16", "float16")
    return single and has_kernels(torch.device(device))


def moves_in_place(device: str, dtype: str, settings: Settings) -> bool:
    """Whether a kernel moves such parameters by directions that have arrived. Otherwise torch does, in buffers."""
    return suits(device, dtype, settings) and settings.averaging is None and not settings.rate_on_device


# Where blocks lie in tensors.


@dataclass(frozen=True)
class Window:
    """A strided window of a tensor: its offset in elements, and one to three sizes and strides, outermost first."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def in_three_dims(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides of the same window in three dimensions."""
        missing = 3 - len(self.sizes)
        return (1,) * missing + self.sizes, (0,) * missing + self.strides

    def alignment(self) -> Alignment:
        """Whether the window can be read in vectors of eight elements, as one piece or row by row."""
        numbers = self.offset, math.prod(self.sizes), self.sizes[-1], *self.strides[:-1]
        if self.strides[-1] != 1 or any(x % 8 for x in numbers):
            return Alignment.SCATTERED
        return Alignment.CONTIGUOUS if len(self.sizes) == 1 else Alignment.ROWS


def find_window(start: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> Window | None:
    """The window of a box that begins at ``start`` in a tensor with these strides, in as few dimensions as possible.

    None if it takes more than three, which kernels cannot read.

    >>> find_window((4, 0), (2, 8), strides=(8, 1))
    Window(offset=32, sizes=(16,), strides=(1,))
    """
    dims = join_dims(zip(shape, strides, strict=True)) or [(1, 1)]
    offset = sum(a * b for a, b in zip(start, strides, strict=True))
    return Window(offset, *zip(*dims, strict=True)) if len(dims) <= 3 else None


# Which banks go together.


@dataclass(frozen=True)
class BankSlice:
    """Slots ``start`` to ``stop`` of a bank. ``shape``, ``numel`` and ``half_shape`` are of one block.

    ``custom_factors``: the method updates its factors by a rule of its own, which kernels do not know.
    """

    key: BankKey
    start: int
    stop: int
    custom_factors: bool = field(default=False, kw_only=True)

    @cached_property
    def id(self) -> SliceId:
        return self.key, self.start

    def bound(self, bank: Bank, tensor_indices: Sequence[int] = (), windows: Sequence[Window] = ()) -> BoundSlice:
        return BoundSlice(self.key, self.start, self.stop, bank, tensor_indices, windows, custom_factors=self.custom_factors)

    @property
    def n(self) -> int:
        return self.stop - self.start

    @property
    def shape(self) -> tuple[int, ...]:
        return self.key.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def flops(self) -> int:
        """Cost of multiplying all blocks with their roots."""
        return 2 * self.n * self.numel * sum(self.shape)

    @property
    def flat_numel(self) -> int:
        """Elements of the slice in a flat buffer, rounded up so that the next slice is aligned."""
        return -(-self.n * self.numel // 16) * 16

    @property
    def third_size(self) -> int:
        """Elements of the third mode; 1 for a matrix."""
        return self.shape[2] if len(self.shape) == 3 else 1

    @property
    def kernel_factors(self) -> bool:
        """Whether kernels update the factors."""
        full = self.key.modes in (("full",) * 2, ("full",) * 3) and len(self.shape) == len(self.key.modes)
        return full and self.third_size <= THIN_SIDE and not self.custom_factors

    @property
    def half_shape(self) -> tuple[int, int, int]:
        """``[rows, third, columns]`` in halves, padded because products read whole tiles."""
        rows, columns = (-(-d // DEPTH) * DEPTH for d in self.shape[:2])
        return rows, self.third_size, columns

    @property
    def half_numel(self) -> int:
        """Elements of the slice in the buffer of high halves."""
        return self.n * math.prod(self.half_shape) if self.kernel_factors else 0


def divide_banks(banks: Iterable[tuple[BankKey, int]], settings: Sequence[Settings]) -> list[list[BankSlice]]:
    """Slices that are computed together, for banks given by their keys and numbers of slots.

    They have the same param group, dtype, graft and filter, and together at most ``LARGEST`` elements: a large bank is cut into
    several slices. Banks that kernels do not cover are left out, as those of four modes or more whose graft reads the factors.
    """
    done: list[list[BankSlice]] = []
    open_: dict[Any, list[BankSlice]] = {}
    for key, n in banks:
        mine = settings[key.group]
        method = mine.method_of(key.kind)
        factors = bool(key.modes) and method is not None and bool(method.sums)
        if len(key.shape) > 3 and mine.graft_of(key.kind).of_factors:
            continue
        if (method and method.kernels == "none") or not (_fits(key, factors) and suits(key.device, key.dtype, mine)):
            continue
        kind = key.group, key.device, key.dtype, mine.graft_of(key.kind), mine.hyper_of(key.kind).beta3
        most = max(1, LARGEST // math.prod(key.shape))
        custom = method is not None and method.kernels != "factors"
        for start in range(0, n, most):
            piece = BankSlice(key, start, min(start + most, n), custom_factors=custom)
            if kind in open_ and sum(other.flat_numel for other in open_[kind]) + piece.flat_numel > LARGEST:
                done.append(open_.pop(kind))
            open_.setdefault(kind, []).append(piece)
    return [*done, *open_.values()]


def _fits(key: BankKey, factors: bool) -> bool:
    """Whether kernels, which count in 32 bits, can count the elements of a block, and of its factors if it has some."""
    tiled = math.prod(-(-d // SIDE) * SIDE for d in key.shape[:2]) * math.prod(key.shape[2:])
    return tiled < 1 << 31 and (not factors or max(key.shape) < 1 << 15)


def scratch_sizes(slices: Sequence[BankSlice], settings: Settings) -> dict[str, tuple[torch.dtype, int]]:
    """Dtype and elements of the buffers of slices that are computed together: gradients in halves and later, in the same memory,
    directions (``flat``), gradients (``plain``) if there is no filter to remember them or if torch updates a factor, and
    ``filtered`` gradients if they are not what the filter remembers."""
    flat = sum(piece.flat_numel for piece in slices)
    needs = {"flat": (torch.float32, max(flat, half_plane(slices)))}  # two planes of halves take as much as one of float32
    if settings.hyper.beta1 == 0 or torch_takes_in(slices, settings.method):
        needs["plain"] = torch.float32, flat
    if settings.hyper_of(slices[0].key.kind).looks_ahead:
        needs["filtered"] = torch.float32, flat
    return needs


def torch_takes_in(slices: Sequence[BankSlice], method: Method | None) -> bool:
    """Whether torch updates state of the method from gradients."""
    if method is None or not method.sums:
        return False
    return any(piece.key.modes and (method.follows or not piece.kernel_factors) for piece in slices)


def half_plane(slices: Sequence[BankSlice]) -> int:
    """Elements from a high half to its low half: all high halves, and a margin, because tiles may read past the last row."""
    widest = max((math.prod(piece.half_shape[1:]) for piece in slices if piece.kernel_factors), default=0)
    return sum(piece.half_numel for piece in slices) + SIDE * widest


@dataclass(frozen=True)
class BoundSlice(BankSlice):
    """A slice with its bank. For kernels, its slot ``i`` lies in ``windows[i]`` of the tensor number ``tensor_indices[i]``."""

    bank: Bank
    tensor_indices: Sequence[int] = ()
    windows: Sequence[Window] = ()

    @property
    def blocks(self) -> Sequence[Block]:
        return self.bank.blocks[self.start : self.stop]

    @cached_property
    def numbers(self) -> Sequence[int]:
        return self.bank.numbers[self.start : self.stop]

    @cached_property
    def state(self) -> State:
        return {role: tensor[self.start : self.stop] for role, tensor in self.bank.state.items()}

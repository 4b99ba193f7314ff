"""Which banks go through kernels together, and the tables in which kernels look up where everything is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .. import options
from ..linalg import from_host
from ..methods import State
from ..planning.blocks import Block
from ..planning.plan import BankKey
from ..roots import has_kernels
from .background import side_by_side
from .bank import Bank

BLOCK = 4096  # elements of a tile
REDUCE = 128  # tiles of a slot that are added up at a time
SIDE, DEPTH = 128, 64  # tiles of a product, and how much of the sum they take at a time
THIN = 16  # elements of a last mode, at most, of which kernels keep the factor
CHUNK = 4096  # elements of a thin mode that are summed by one program
LARGEST = 1 << 25  # elements of a fleet, unless one block has more; its buffers are as large

Group = Mapping[str, Any]


def suits(device: str, dtype: str, group: Group) -> bool:
    """Whether the kernels cover parameters of this dtype with these options; the others go bank by bank."""
    filtered = group["beta3"] is None or group["beta3"] == group["betas"][0]
    single = options.state_dtype(group) == torch.float32 and dtype in ("float32", "bfloat16", "float16")
    return filtered and single and has_kernels(torch.device(device))


@dataclass(frozen=True)
class Place:
    """Where a block lies in a tensor: elements from its start, and up to three sizes and strides, outermost first."""

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def place(start: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> Place | None:
    """A box of a strided tensor in as few dimensions as can be; None if that is more than three.

    >>> place((4, 0), (2, 8), strides=(8, 1))
    Place(base=32, sizes=(16,), strides=(1,))
    """
    sizes: list[int] = []
    steps: list[int] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if sizes and steps[-1] == size * stride:
            sizes[-1], steps[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            steps.append(stride)
    base = sum(a * b for a, b in zip(start, strides, strict=True))
    return Place(base, tuple(sizes) or (1,), tuple(steps) or (1,)) if len(sizes) <= 3 else None


@dataclass(frozen=True)
class Share:
    """Slots ``start`` to ``stop`` of a bank. ``by_torch``: kernels do not know what its factors take in."""

    key: BankKey
    start: int
    stop: int
    by_torch: bool = field(default=False, kw_only=True)

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
        """Of products with its roots."""
        return 2 * self.n * self.numel * sum(self.shape)

    @property
    def padded(self) -> int:
        """Elements of flat buffers that it takes, so that the next share is aligned."""
        return -(-self.n * self.numel // 16) * 16

    @property
    def thin(self) -> int:
        """Elements of the third mode, such as the 3 x 3 of a convolution; 1 for a matrix."""
        return self.shape[2] if len(self.shape) == 3 else 1

    @property
    def boxed(self) -> bool:
        """Whether kernels keep the factors: matrices, or thin boxes, with full ones, as nearly all are."""
        full = self.key.modes in (("full",) * 2, ("full",) * 3) and len(self.shape) == len(self.key.modes)
        return full and self.thin <= THIN and not self.by_torch

    @property
    def half_shape(self) -> tuple[int, int, int]:
        """What a block takes in halves, as ``[rows, thin, columns]``: products read whole tiles."""
        rows, columns = (-(-d // DEPTH) * DEPTH for d in self.shape[:2])
        return rows, self.thin, columns

    @property
    def half_numel(self) -> int:
        return self.n * math.prod(self.half_shape) if self.boxed else 0


def divide(banks: Iterable[tuple[BankKey, int]], groups: Sequence[Group]) -> list[list[Share]]:
    """Fleets for banks of so many slots: those that the kernels cover, by param group and dtype, of bounded size. A bank may
    be divided."""
    done: list[list[Share]] = []
    open_: dict[Any, list[Share]] = {}
    for key, n in banks:
        tiled = math.prod(-(-d // SIDE) * SIDE for d in key.shape[:2]) * math.prod(key.shape[2:])
        fits = tiled < 1 << 31 and (not key.modes or max(key.shape) < 1 << 15)  # counted in 32 bits
        group = groups[key.group]
        method = group["preconditioner"] if key.modes else None
        if method == "spectral" or not (fits and suits(key.device, key.dtype, group)):
            continue
        graft = group["graft"] if key.modes else options.elementwise(group)  # a fleet has one
        alike = key.group, key.device, key.dtype, key.method == "adagrad", graft
        most = max(1, LARGEST // math.prod(key.shape))
        for start in range(0, n, most):
            share = Share(key, start, min(start + most, n), by_torch=method in ("kl", "soap"))
            if alike in open_ and sum(s.padded for s in open_[alike]) + share.padded > LARGEST:
                done.append(open_.pop(alike))
            open_.setdefault(alike, []).append(share)
    return [*done, *open_.values()]


def scratch(shares: Sequence[Share], group: Group) -> dict[str, tuple[torch.dtype, int]]:
    """Buffers of a fleet, by role: directions, gradients that are needed as they are, and gradients in halves."""
    flat = sum(share.padded for share in shares)
    needs = {"flat": (torch.float32, flat), "halves": (torch.float16, 2 * plane_of(shares))}
    return needs | ({"plain": (torch.float32, flat)} if _keeps_plain(shares, group) else {})


def _keeps_plain(shares: Iterable[Share], group: Group) -> bool:
    """Without a filter nothing else remembers gradients; and other factors than of boxes go through torch."""
    return group["betas"][0] == 0 or any(share.key.modes and not share.boxed for share in shares)


def plane_of(shares: Sequence[Share]) -> int:
    """Elements of the high halves; the low ones follow. Tiles of products may read past the last row."""
    widest = max((math.prod(share.half_shape[1:]) for share in shares if share.boxed), default=0)
    return sum(share.half_numel for share in shares) + SIDE * widest


@dataclass(frozen=True)
class Part(Share):
    """A share with its bank, and where its blocks lie: in which of a list of tensors, and where there."""

    bank: Bank
    tensors: Sequence[int]
    places: Sequence[Place]

    @property
    def blocks(self) -> Sequence[Block]:
        return self.bank.blocks[self.start : self.stop]

    @cached_property
    def numbers(self) -> Sequence[int]:
        return self.bank.numbers[self.start : self.stop]

    @cached_property
    def state(self) -> State:
        return {role: tensor[self.start : self.stop] for role, tensor in self.bank.state.items()}


class Tables:
    """What kernels look up on the device: where everything is. Made once; see :mod:`lather.kernels` for the columns.

    ``halves`` is the buffer for gradients in halves. ``jobs`` are the tiles of all factors, those of thin modes apart,
    ``slots`` say which tiles are a slot's and where its root is, ``partial`` and ``own`` hold sums over tiles, ``skipped`` where
    a slot's gradients that are not finite are counted.
    """

    def __init__(self, parts: Sequence[Part], halves: Tensor) -> None:
        device = halves.device
        lines, aligned = _slot_rows(parts, halves)
        order = sorted(range(len(lines)), key=lambda slot: -aligned[slot])  # stable
        table = torch.tensor([lines[slot] for slot in order], dtype=torch.int64, device="cpu")
        counts = -(-table[:, 3] // BLOCK)
        firsts = counts.cumsum(0) - counts
        tiles = table.repeat_interleave(counts, 0)
        tiles[:, 2] = BLOCK * (torch.arange(len(tiles), device="cpu") - firsts.repeat_interleave(counts))
        slots = torch.empty(3, len(lines), dtype=torch.int64, device="cpu")
        slots[:2, order] = torch.stack([firsts, counts])
        self._one = torch.ones((), dtype=torch.float32, device=device)
        slots[2] = torch.tensor([address for part in parts for address in _roots(part, self._one)], device="cpu")
        skipped = [part.bank.counts[0, i].data_ptr() for part in parts for i in range(part.start, part.stop)]
        self.slots, self.skipped = slots.to(device), from_host(skipped, halves, torch.int64)
        self.partial, self.own = torch.zeros(2, len(tiles), dtype=torch.float32, device=device).unbind()
        ends = starts(aligned.count(level) for level in LEVELS)
        bounds, tiles = [int(counts[:end].sum()) for end in ends], tiles.to(device)
        self._ranges = [
            (tiles[a:b], {"partial": self.partial[a:b], "own": self.own[a:b]}, level)
            for (a, b), level in zip(pairwise(bounds), LEVELS, strict=True)
            if b > a
        ]
        kinds = [(by_rows, even) for by_rows in (True, False) for even in (True, False)]
        found = [(_jobs(parts, halves, rows, even), rows, even) for rows, even in kinds]
        found.sort(key=lambda jobs: len(jobs[0]))  # at the same time, few fit in before many but not after
        self.jobs = [(_table(jobs, device), rows, even) for jobs, rows, even in found if jobs]
        chunks, thin = _thin_jobs(parts, halves)
        sums = torch.zeros(len(chunks), THIN, THIN, dtype=torch.float32, device=device)
        self.thin = (_table(chunks, device), _table(thin, device), sums) if thin else None

    def launch(self, kernel: Any, sums: str | None, arguments: Mapping[str, Any]) -> None:
        """Over all tiles, by how they are aligned. ``sums`` names where sums over tiles go."""
        side_by_side([partial(self._launch, kernel, sums, arguments, *tiles) for tiles in self._ranges])

    def _launch(
        self,
        kernel: Any,
        sums: str | None,
        arguments: Mapping[str, Any],
        tiles: Tensor,
        to: Mapping[str, Tensor],
        aligned: int,
    ) -> None:
        more = {} if sums is None else {"partial": to[sums]}
        kernel[tiles.shape[0],](tiles=tiles, **more, **arguments, ALIGNED=aligned, BLOCK=BLOCK, num_warps=8)


def _roots(part: Part, one: Tensor) -> list[int]:
    """Where each slot's first root is; 0 if there is none. SOAP has none to wait for: a ``one`` stands for it."""
    root = part.state.get("X0")
    if root is None:
        return [one.data_ptr() if part.key.modes else 0] * part.n
    return [x.data_ptr() for x in root.unbind()]


def _table(rows: list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(rows, device="cpu").to(device)


def _slot_rows(parts: Sequence[Part], halves: Tensor) -> tuple[list[list[int]], list[int]]:
    """A row for every slot, in the columns of the kernels' tables, and how it is aligned."""
    rows: list[list[int]] = []
    aligned = []
    flats, half_starts = starts(part.padded for part in parts), starts(part.half_numel for part in parts)
    for part, flat, half in zip(parts, flats, half_starts, strict=False):
        m, v = (part.state[role].data_ptr() if role in part.state else 0 for role in ("m", "v"))
        cols, ld, thin = (part.shape[1], part.half_shape[2], part.thin) if part.boxed else (1, 1, 1)
        for i, (tensor, at) in enumerate(zip(part.tensors, part.places, strict=True)):
            fill = 3 - len(at.sizes)
            sizes, strides = (1,) * fill + at.sizes, (0,) * fill + at.strides
            begin = i * part.numel
            address = halves.data_ptr() + 2 * (half + i * math.prod(part.half_shape)) if part.boxed else 0
            where = (tensor, 0, part.numel, at.base, sizes[1], sizes[2], *strides)
            state = (m and m + 4 * begin, v and v + 4 * begin)
            rows.append([len(rows), *where, flat + begin, *state, address, cols, ld, thin])
            aligned.append(_alignment(at, part.numel))
    return rows, aligned


LEVELS = WHOLE, ROWS, LOOSE = 2, 1, 0


def _alignment(at: Place, numel: int) -> int:
    """Whether a block lies in one piece that can be read in whole vectors, or in rows that can, or neither."""
    if at.strides[-1] != 1 or any(x % 8 for x in (at.base, numel, at.sizes[-1], *at.strides[:-1])):
        return LOOSE
    return WHOLE if len(at.sizes) == 1 else ROWS


def _jobs(parts: Sequence[Part], halves: Tensor, by_rows: bool, even: bool) -> list[list[int]]:
    """Tiles of the lower triangles of all factors of one side, ``even``: whose rows are aligned."""
    found = []
    firsts, half_starts = starts(part.n for part in parts), starts(part.half_numel for part in parts)
    for part, first, half in zip(parts, firsts, half_starts, strict=False):
        if part.boxed:
            rows, thin, ld = part.half_shape
            factor = part.state["L0" if by_rows else "L1"]
            side, depth = (part.shape[0], thin * ld) if by_rows else (part.shape[1], rows * thin)
            if (side % 16 == 0) != even:
                continue
            tiles = [(i, j) for i in range(-(-side // SIDE)) for j in range(i + 1)]
            for slot in range(part.n):
                source = halves.data_ptr() + 2 * (half + slot * rows * thin * ld)
                target = factor.data_ptr() + 4 * slot * factor.stride(0)
                between = thin * ld if by_rows else ld
                found += [[first + slot, source, between, depth, target, side, i, j] for i, j in tiles]
    return found


def _thin_jobs(parts: Sequence[Part], halves: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Factors of thin modes: the chunks of gradients they are summed from, and for every slot which chunks are its own."""
    chunks: list[list[int]] = []
    slots = []
    firsts, half_starts = starts(part.n for part in parts), starts(part.half_numel for part in parts)
    for part, first, half in zip(parts, firsts, half_starts, strict=False):
        if part.boxed and len(part.shape) == 3:
            rows, thin, ld = part.half_shape
            factor, most = part.state["L2"], max(1, CHUNK // ld)
            for slot in range(part.n):
                begin, source = len(chunks), halves.data_ptr() + 2 * (half + slot * rows * thin * ld)
                chunks += [
                    [source + 2 * row * thin * ld, min(most, rows - row), thin, ld] for row in range(0, rows, most)
                ]
                target = factor.data_ptr() + 4 * slot * factor.stride(0)
                slots.append([first + slot, begin, len(chunks) - begin, target, thin])
    return chunks, slots


def starts(sizes: Iterable[int]) -> list[int]:
    """Running totals, from 0 to the total."""
    return list(accumulate(sizes, initial=0))

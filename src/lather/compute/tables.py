"""The tables in which kernels look up where everything is.

One launch handles blocks of many shapes, from many banks. Kernels find them through tables of numbers on the device. The
columns are named in :mod:`lather.kernels.schema`. This file fills them in for slices of banks that are computed together.
Those slices number their slots from 0, slice after slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.schema import Alignment, FactorJob, SlotTable, ThinChunk, ThinFactor, Tile, position
from ..linalg import from_host
from .graphs import side_by_side
from .slices import SIDE, THIN_SIDE, BoundSlice

BLOCK = 4096  # elements of a tile
REDUCE = 128  # tiles of a slot that are added up at a time
CHUNK = 4096  # rows times columns of a ThinChunk
FLOAT, HALF = 4, 2  # bytes
ORDER = Alignment.CONTIGUOUS, Alignment.ROWS, Alignment.SCATTERED  # of tiles in their table


class FactorLaunch(NamedTuple):
    """Factors that one launch updates: of rows or of columns, with rows that are aligned or not."""

    jobs: Tensor  # rows of FactorJob
    by_rows: bool
    aligned: bool


class ThinLaunch(NamedTuple):
    """Factors of third modes, which are updated by two launches: sums over chunks of gradients, then the factors."""

    chunks: Tensor  # rows of ThinChunk
    factors: Tensor  # rows of ThinFactor
    sums: Tensor  # [chunks, THIN_SIDE, THIN_SIDE]


class TileRange(NamedTuple):
    """Consecutive tiles whose blocks have the same alignment."""

    first: int
    tiles: Tensor  # rows of Tile
    alignment: Alignment


class Tables:
    """The tables of slices that are computed together, on their device. Made once.

    ``halves`` is the buffer for gradients in halves; its address is part of the tables.

    - ``ranges``: all tiles, in at most one range for each alignment. See :meth:`launch`.
    - ``slots``: rows of :class:`~lather.kernels.schema.SlotTable`.
    - ``skip_counters [n]``: addresses of the counters of gradients that are not finite.
    - ``tile_sums``, ``graft_sums``: buffers for sums over each tile; the second is kept for the norm of the graft's direction.
    - ``factors``, ``thin``: factors that kernels update.
    """

    def __init__(self, parts: Sequence[BoundSlice], halves: Tensor) -> None:
        device = halves.device
        self._one = torch.ones((), dtype=torch.float32, device=device)
        cut = _cut(_block_rows(parts, halves), [window.alignment() for part in parts for window in part.windows])
        tiles = cut.tiles.to(device)
        self.ranges = [
            TileRange(a, tiles[a:b], alignment) for (a, b), alignment in zip(pairwise(cut.bounds), ORDER, strict=True) if b > a
        ]
        roots = torch.tensor([address for part in parts for address in _roots(part, self._one)], device="cpu")
        slots = SlotTable(first_tile=cut.first_tile, num_tiles=cut.num_tiles, root_address=roots)
        self.slots = torch.stack(slots).to(device)
        counters = [part.bank.skipped[i].data_ptr() for part in parts for i in range(part.start, part.stop)]
        self.skip_counters = from_host(counters, halves, torch.int64)
        self.tile_sums, self.graft_sums = torch.zeros(2, len(tiles), dtype=torch.float32, device=device).unbind()
        self.factors = _factor_launches(parts, halves)
        self.thin = _thin_launch(parts, halves)

    def launch(self, kernel: Any, arguments: Mapping[str, Any], sums: Tensor | None = None) -> None:
        """Launch an elementwise kernel over all tiles, once for each alignment. ``sums`` has one entry per tile."""
        side_by_side([partial(self._launch, kernel, arguments, sums, tiles) for tiles in self.ranges])

    def _launch(self, kernel: Any, arguments: Mapping[str, Any], sums: Tensor | None, found: TileRange) -> None:
        tiles, n = found.tiles, len(found.tiles)
        more = {} if sums is None else {"partial": sums[found.first : found.first + n]}
        kernel[n,](tiles=tiles, **more, **arguments, ALIGNED=int(found.alignment), BLOCK=BLOCK, num_warps=8)


class _Cut(NamedTuple):
    """Blocks that are cut into tiles."""

    tiles: Tensor  # rows of Tile, sorted by alignment
    bounds: list[int]  # of each alignment, in the order of ORDER
    first_tile: Tensor  # [n], of every slot
    num_tiles: Tensor  # [n]


def _cut(blocks: Sequence[Tile], alignments: Sequence[Alignment]) -> _Cut:
    """Cut blocks into tiles. A block is given by its first tile."""
    order = sorted(range(len(blocks)), key=lambda slot: ORDER.index(alignments[slot]))  # stable
    table = _table([blocks[slot] for slot in order])
    counts = -(-_column(table, Tile, "numel") // BLOCK)
    firsts = counts.cumsum(0) - counts
    tiles = table.repeat_interleave(counts, 0)
    number_in_block = torch.arange(len(tiles), device="cpu") - firsts.repeat_interleave(counts)
    _column(tiles, Tile, "start").copy_(BLOCK * number_in_block)
    ends = running_totals(alignments.count(alignment) for alignment in ORDER)
    bounds = [int(counts[:end].sum()) for end in ends]
    row_of_slot = torch.tensor(order, device="cpu").argsort()
    return _Cut(tiles, bounds, firsts[row_of_slot], counts[row_of_slot])


def _column(table: Tensor, kind: type[NamedTuple], name: str) -> Tensor:
    return table[:, position(kind, name)]


def _table(rows: Sequence[tuple[int, ...]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def _roots(part: BoundSlice, one: Tensor) -> list[int]:
    """The address of each slot's first root; 0 for blocks without factors. A method with factors but no roots
    does not wait for any: ``one`` stands for a root that has been computed."""
    root = part.state.get("X0")
    if root is None:
        return [one.data_ptr() if part.key.modes else 0] * part.n
    return [x.data_ptr() for x in root.unbind()]


class _Beginning(NamedTuple):
    """Where a slice begins: its first slot, and its first block in buffers."""

    part: BoundSlice
    first_slot: int
    flat_offset: int
    half_address: int

    def halves_of(self, i: int) -> int:
        """The address of a block in halves."""
        return self.half_address + HALF * i * math.prod(self.part.half_shape)


def _beginnings(parts: Sequence[BoundSlice], halves: Tensor) -> Iterator[_Beginning]:
    slots = running_totals(part.n for part in parts)
    flats = running_totals(part.flat_numel for part in parts)
    half_offsets = running_totals(part.half_numel for part in parts)
    for part, slot, flat, offset in zip(parts, slots, flats, half_offsets, strict=False):
        yield _Beginning(part, slot, flat, halves.data_ptr() + HALF * offset)


def _block_rows(parts: Sequence[BoundSlice], halves: Tensor) -> list[Tile]:
    """For every slot, its first tile."""
    rows = []
    for begin in _beginnings(parts, halves):
        part = begin.part
        filter_, moment = (part.state[role].data_ptr() if role in part.state else 0 for role in ("m", "v"))
        columns, padded, third = (part.shape[1], part.half_shape[2], part.third_size) if part.kernel_factors else (1, 1, 1)
        for i, (tensor, window) in enumerate(zip(part.tensor_indices, part.windows, strict=True)):
            (_, middle_size, inner_size), (outer_stride, middle_stride, inner_stride) = window.in_three_dims()
            rows.append(
                Tile(
                    slot=begin.first_slot + i,
                    tensor=tensor,
                    start=0,
                    numel=part.numel,
                    window_offset=window.offset,
                    middle_size=middle_size,
                    inner_size=inner_size,
                    outer_stride=outer_stride,
                    middle_stride=middle_stride,
                    inner_stride=inner_stride,
                    flat_offset=begin.flat_offset + i * part.numel,
                    filter_address=filter_ and filter_ + FLOAT * i * part.numel,
                    moment_address=moment and moment + FLOAT * i * part.numel,
                    half_address=begin.halves_of(i) if part.kernel_factors else 0,
                    columns=columns,
                    padded_columns=padded,
                    third_size=third,
                )
            )
    return rows


def _factor_launches(parts: Sequence[BoundSlice], halves: Tensor) -> list[FactorLaunch]:
    kinds = [(by_rows, aligned) for by_rows in (True, False) for aligned in (True, False)]
    found = [(_factor_jobs(parts, halves, *kind), kind) for kind in kinds]
    found.sort(key=lambda launch: len(launch[0]))  # they overlap, and short ones fit in before long ones, not after
    return [FactorLaunch(_table(jobs).to(halves.device), *kind) for jobs, kind in found if jobs]


def _factor_jobs(parts: Sequence[BoundSlice], halves: Tensor, by_rows: bool, aligned: bool) -> list[FactorJob]:
    """Tiles of the factors of rows or columns, for sides that are aligned or not."""
    jobs: list[FactorJob] = []
    mode = 0 if by_rows else 1
    for begin in _beginnings(parts, halves):
        part = begin.part
        if not part.kernel_factors or (part.shape[mode] % 16 == 0) != aligned:
            continue
        rows, third, columns = part.half_shape
        num_tiles = -(-part.shape[mode] // SIDE)
        for slot, factor in enumerate(part.state[f"L{mode}"].unbind()):
            first = FactorJob(
                slot=begin.first_slot + slot,
                half_address=begin.halves_of(slot),
                row_stride=third * columns if by_rows else columns,
                depth=third * columns if by_rows else rows * third,
                factor_address=factor.data_ptr(),
                side=part.shape[mode],
                tile_row=0,
                tile_column=0,
            )
            jobs += [first._replace(tile_row=i, tile_column=j) for i in range(num_tiles) for j in range(i + 1)]
    return jobs


def _thin_launch(parts: Sequence[BoundSlice], halves: Tensor) -> ThinLaunch | None:
    """Factors of third modes, and the chunks of gradients that they are summed from."""
    chunks: list[ThinChunk] = []
    factors: list[ThinFactor] = []
    for begin in _beginnings(parts, halves):
        part = begin.part
        if not part.kernel_factors or len(part.shape) != 3:
            continue
        rows, third, columns = part.half_shape
        most = max(1, CHUNK // columns)
        for slot, factor in enumerate(part.state["L2"].unbind()):
            first = len(chunks)
            for row in range(0, rows, most):
                chunks.append(
                    ThinChunk(
                        half_address=begin.halves_of(slot) + HALF * row * third * columns,
                        num_rows=min(most, rows - row),
                        third_size=third,
                        padded_columns=columns,
                    )
                )
            factors.append(
                ThinFactor(
                    slot=begin.first_slot + slot,
                    first_chunk=first,
                    num_chunks=len(chunks) - first,
                    factor_address=factor.data_ptr(),
                    side=third,
                )
            )
    if not factors:
        return None
    sums = torch.zeros(len(chunks), THIN_SIDE, THIN_SIDE, dtype=torch.float32, device=halves.device)
    return ThinLaunch(_table(chunks).to(halves.device), _table(factors).to(halves.device), sums)


def running_totals(sizes: Iterable[int]) -> list[int]:
    """From 0 to the total.

    >>> running_totals([3, 4])
    [0, 3, 7]
    """
    return list(accumulate(sizes, initial=0))

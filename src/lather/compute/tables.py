"""The tables in which kernels look up where everything is.

One launch handles blocks of many shapes, from many banks. Kernels find them through tables of numbers on the device. The
columns are named in :mod:`lather.kernels.schema`. This file fills them in for slices of banks that are computed together.
Those slices number their slots from 0, slice after slice.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..kernels.schema import Alignment, FactorJob, RankOne, SlotTable, ThinChunk, ThinFactor, Tile, position
from ..linalg import from_host, is_packed, side_of
from .graphs import side_by_side
from .slices import SIDE, THIN_SIDE, BoundSlice, Window

BLOCK = 4096  # elements of a tile
REDUCE = 128  # tiles of a slot that are added up at a time
CHUNK = 4096  # rows times columns of a ThinChunk
HALF = 2  # bytes
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


class RankOneLaunch(NamedTuple):
    """Second moments that are made of the diagonals of factors."""

    jobs: Tensor  # rows of RankOne
    addresses: list[int]  # of the moments' vectors
    vectors: Tensor  # their memory


class TileRange(NamedTuple):
    """Consecutive tiles whose blocks have the same alignment."""

    first: int
    tiles: Tensor  # rows of Tile
    alignment: Alignment


@final
class Tables:
    """The tables of slices that are computed together, on their device. Made once.

    ``halves`` is the buffer for gradients in halves. Its address is part of the tables.

    - ``ranges``: all tiles, in at most one range for each alignment. See :meth:`launch`.
    - ``slots``: rows of :class:`~lather.kernels.schema.SlotTable`.
    - ``skip_counters [n]``: addresses of the counters of gradients that are not finite.
    - ``tile_sums``, ``graft_sums``: buffers for sums over each tile, or norms of it; the second is for the graft's direction.
    - ``factors``, ``thin``: factors that kernels update.
    - ``rank_one``: second moments of the graft, if they are ``of_factors``.
    """

    def __init__(self, parts: Sequence[BoundSlice], halves: Tensor, of_factors: bool) -> None:
        device, begins = halves.device, _starts(parts, halves)
        self.rank_one = _rank_one_launch(parts, device) if of_factors else None
        self._one = torch.ones((), dtype=torch.float32, device=device)
        alignments = [_alignment(part, window, of_factors) for part in parts for window in part.windows]
        moments = self.rank_one.addresses if self.rank_one else [0] * begins[-1].end
        blocks = [row for begin in begins for row in _blocks(begin, moments[begin.first_slot : begin.end])]
        tiles, bounds, first_tile, num_tiles = _cut(blocks, alignments)
        tiles, ranges = tiles.to(device), zip(pairwise(bounds), ORDER, strict=True)
        self.ranges = [TileRange(a, tiles[a:b], alignment) for (a, b), alignment in ranges if b > a]
        roots = torch.tensor([address for part in parts for address in _roots(part, self._one)], device="cpu")
        counted = [(part.bank, i) for part in parts for i in range(part.start, part.stop)]
        skipped, broken = [bank.skipped[i].data_ptr() for bank, i in counted], [bank.broken[i].data_ptr() for bank, i in counted]
        marks = torch.tensor(broken, device="cpu")
        numels = torch.tensor([part.numel for part in parts for _ in range(part.n)], device="cpu")
        slots = SlotTable(first_tile, num_tiles, numel=numels, root_address=roots, broken_address=marks)
        self.slots = torch.stack(slots).to(device)
        self.skip_counters = from_host(skipped, halves, torch.int64)
        self.tile_sums, self.graft_sums = torch.zeros(2, len(tiles), dtype=torch.float32, device=device).unbind()
        by_kernels = [begin for begin in begins if begin.part.kernel_factors]
        self.factors = _factor_launches(by_kernels, device)
        self.thin = _thin_launch(by_kernels, device)

    def launch(self, kernel: Any, arguments: Mapping[str, Any], **by_tile: Tensor | None) -> None:
        """Launch an elementwise kernel over all tiles, once for each alignment. ``by_tile`` are vectors with one entry per tile."""
        works = []
        for first, tiles, alignment in self.ranges:
            more = {name: None if x is None else x[first : first + len(tiles)] for name, x in by_tile.items()}
            fixed = {"ALIGNED": int(alignment), "BLOCK": BLOCK, "num_warps": 8}
            works.append(partial(kernel[len(tiles),], tiles=tiles, **more, **arguments, **fixed))
        side_by_side(works)


def _cut(blocks: Sequence[Tile], alignments: Sequence[Alignment]) -> tuple[Tensor, list[int], Tensor, Tensor]:
    """Cut blocks into tiles. A block is given by its first tile.

    Returns the tiles sorted by alignment, where each alignment begins and ends, and every slot's first tile and number of tiles.
    """
    order = sorted(range(len(blocks)), key=lambda slot: ORDER.index(alignments[slot]))  # stable
    table = torch.tensor([blocks[slot] for slot in order], dtype=torch.int64, device="cpu")
    counts = -(-table[:, position(Tile, "numel")] // BLOCK)
    firsts = counts.cumsum(0) - counts
    tiles = table.repeat_interleave(counts, 0)
    number_in_block = torch.arange(len(tiles), device="cpu") - firsts.repeat_interleave(counts)
    tiles[:, position(Tile, "start")] = BLOCK * number_in_block
    ends = running_totals(alignments.count(alignment) for alignment in ORDER)
    row_of_slot = torch.tensor(order, device="cpu").argsort()
    return tiles, [int(counts[:end].sum()) for end in ends], firsts[row_of_slot], counts[row_of_slot]


def _roots(part: BoundSlice, one: Tensor) -> list[int]:
    """The address of each slot's first root; 0 for blocks without factors. A method with factors but no roots does not wait for
    any: ``one`` stands for a root that has been computed."""
    if "X0" in part.state:
        return [root.data_ptr() for root in part.state["X0"].unbind()]
    return [one.data_ptr() if part.key.modes else 0] * part.n


class _SliceStart(NamedTuple):
    """Where a slice begins: its first slot, and its first block in buffers."""

    part: BoundSlice
    first_slot: int
    flat_offset: int
    half_address: int

    @property
    def end(self) -> int:
        """The first slot after it."""
        return self.first_slot + self.part.n

    def halves_of(self, i: int) -> int:
        """The address of a block in halves."""
        return self.half_address + HALF * i * math.prod(self.part.half_shape)


def _starts(parts: Sequence[BoundSlice], halves: Tensor) -> list[_SliceStart]:
    slots = running_totals(part.n for part in parts)
    flats = running_totals(part.flat_numel for part in parts)
    addresses = [halves.data_ptr() + HALF * offset for offset in running_totals(part.half_numel for part in parts)]
    return list(map(_SliceStart, parts, slots, flats, addresses))


def _blocks(begin: _SliceStart, moments: Sequence[int]) -> Iterator[Tile]:
    """The first tile of every slot. ``moments`` are the addresses of second moments that are not in the state, or 0."""
    part = begin.part
    addresses = [[each.data_ptr() for each in part.state[role]] if role in part.state else [0] * part.n for role in ("m", "v")]
    columns, padded, third = (part.shape[1], part.half_shape[2], part.third_size) if part.kernel_factors else (1, 1, 1)
    for i, (tensor, window, filter_, moment) in enumerate(zip(part.tensor_indices, part.windows, *addresses, strict=True)):
        (_, middle_size, inner_size), (outer_stride, middle_stride, inner_stride) = window.in_three_dims()
        yield Tile(
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
            filter_address=filter_,
            moment_address=moment or moments[i],
            row_size=math.prod(part.shape[1:]),
            half_address=begin.halves_of(i) if part.kernel_factors else 0,
            columns=columns,
            padded_columns=padded,
            third_size=third,
        )


def _factor_launches(begins: Sequence[_SliceStart], device: torch.device) -> list[FactorLaunch]:
    """Factors of rows and of columns. Launches overlap, and short ones fit in before long ones, not after."""
    found: dict[tuple[bool, bool], list[FactorJob]]
    found = {(by_rows, aligned): [] for by_rows in (True, False) for aligned in (True, False)}
    for begin in begins:
        rows, third, columns = begin.part.half_shape
        for mode, (stride, depth) in enumerate([(third * columns, third * columns), (columns, rows * third)]):
            side = begin.part.shape[mode]
            tiles = [(i, j) for i in range(-(-side // SIDE)) for j in range(i + 1)]
            found[mode == 0, side % 16 == 0] += [
                FactorJob(
                    slot=begin.first_slot + slot,
                    half_address=begin.halves_of(slot),
                    row_stride=stride,
                    depth=depth,
                    factor_address=factor.data_ptr(),
                    side=side,
                    tile_row=i,
                    tile_column=j,
                )
                for slot, factor in enumerate(begin.part.state[f"L{mode}"].unbind())
                for i, j in tiles
            ]
    launches = sorted(found.items(), key=lambda launch: len(launch[1]))
    return [FactorLaunch(torch.tensor(jobs, device=device), *kind) for kind, jobs in launches if jobs]


def _thin_launch(begins: Sequence[_SliceStart], device: torch.device) -> ThinLaunch | None:
    """Factors of third modes, and the chunks of gradients that they are summed from."""
    chunks: list[ThinChunk] = []
    factors: list[ThinFactor] = []
    for begin in begins:
        rows, third, columns = begin.part.half_shape
        most = max(1, CHUNK // columns)
        for slot, factor in enumerate(begin.part.state["L2"].unbind() if len(begin.part.shape) == 3 else ()):
            first = len(chunks)
            for row in range(0, rows, most):
                address = begin.halves_of(slot) + HALF * row * third * columns
                num_rows = min(most, rows - row)
                chunks.append(ThinChunk(half_address=address, num_rows=num_rows, third_size=third, padded_columns=columns))
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
    sums = torch.zeros(len(chunks), THIN_SIDE, THIN_SIDE, dtype=torch.float32, device=device)
    return ThinLaunch(torch.tensor(chunks, device=device), torch.tensor(factors, device=device), sums)


def _alignment(part: BoundSlice, window: Window, of_factors: bool) -> Alignment:
    """How a block is read. Vectors of elements may not cross the ends of rows if a second moment has an entry for each row."""
    return Alignment.SCATTERED if of_factors and math.prod(part.shape[1:]) % 8 else window.alignment()


def _rank_one_launch(parts: Sequence[BoundSlice], device: torch.device) -> RankOneLaunch:
    """The second moments of rank one of all slots."""
    sizes = [part.shape[0] + math.prod(part.shape[1:]) for part in parts for _ in range(part.n)]
    offsets = running_totals(-(-size // 16) * 16 for size in sizes)
    vectors = torch.zeros(offsets[-1], dtype=torch.float32, device=device)
    jobs: list[RankOne] = []
    for part in parts:
        absent = RankOne(0, 0, 0, 0, 1, 1, 1, 0, 0, 0)
        factors = {nth: part.state[f"L{mode}"] for mode, nth in enumerate(("first", "second", "third")[: len(part.shape)])}
        for i in range(part.n):
            there = {"address": vectors[offsets[len(jobs)] :].data_ptr()}
            for nth, factor in factors.items():
                stride = 0 if is_packed(factor) else factor.shape[-1] + 1 if factor.dim() == 3 else 1
                there |= {f"{nth}_address": factor[i].data_ptr(), f"{nth}_side": side_of(factor), f"{nth}_stride": stride}
            jobs.append(absent._replace(**there))
    return RankOneLaunch(torch.tensor(jobs, device=device), [job.address for job in jobs], vectors)


def running_totals(sizes: Iterable[int]) -> list[int]:
    """From 0 to the total.

    >>> running_totals([3, 4])
    [0, 3, 7]
    """
    return list(accumulate(sizes, initial=0))

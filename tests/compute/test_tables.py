"""The tables that kernels read."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

import lather
from lather.compute import slices, tables
from lather.compute.slices import Window, scratch_sizes
from lather.compute.tables import Tables, running_totals
from lather.kernels import schema
from lather.kernels.schema import Alignment, FactorJob, RankOne, SlotTable, TensorAddresses, ThinChunk, ThinFactor, Tile

KERNELS = [Path(schema.__file__).with_name(f"{name}.py") for name in ("copies", "step", "dense", "tiles")]


def addends(node):
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*addends(node.left), *addends(node.right)]
    return [node]


def test_kernels_find_every_column_by_its_name():
    """All names of the schema are used, and kernels have no other way to find a column."""
    nodes = [node for path in KERNELS for node in ast.walk(ast.parse(path.read_text()))]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    found = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("columns("):
            (constants,), (table, *names) = node.targets, node.value.args
            for constant, name in zip(constants.elts, names, strict=True):
                assert constant.id in used and name.value in constant.id.lower()
                found.setdefault(table.id, []).append(name.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
            assert not any(isinstance(part, ast.Constant) for part in addends(node.args[0])), ast.unparse(node)
    by_torch = {"Numbers": {"factor_correction"}, "Corrections": {"factor"}}
    expected = {
        name: sorted(set(kind._fields) - by_torch.get(name, set()))
        for name, kind in vars(schema).items()
        if hasattr(kind, "_fields") and kind is not TensorAddresses  # whose rows are arguments of kernels
    }
    assert {table: sorted(names) for table, names in found.items()} == expected


def made_for(shapes, monkeypatch, **options):
    """A run on the CPU, the executor of slices that kernels would compute together, their tables, and the buffer of halves.

    With Nesterov's filter, or by default another graft, matrices and vectors would have executors of their own."""
    monkeypatch.setattr(slices, "suits", lambda *_: True)
    opt = lather.Shampoo([torch.nn.Parameter(torch.randn(shape)) for shape in shapes], **{"beta3": None, "graft": "adam"} | options)
    run = opt._session.prepare(opt.param_groups, opt.state)
    (found,) = run.units[0].executors
    dtype, numel = scratch_sizes(found.slices, opt._session.settings[0])["flat"]
    halves = torch.zeros(numel, dtype=dtype).view(torch.float16)
    return run, found, Tables(found.slices, halves, found.graft.of_factors), halves


def rows_of(table, kind):
    """The rows of a table by the names of their columns."""
    return [kind(*row) for row in table.tolist()]


def small(monkeypatch):
    monkeypatch.setattr(tables, "BLOCK", 256)
    for module in (slices, tables):
        monkeypatch.setattr(module, "SIDE", 16)
    monkeypatch.setattr(slices, "DEPTH", 16)


def test_every_column_of_a_known_block(monkeypatch):
    """The right half of a matrix of 44 columns, which has two tiles."""
    small(monkeypatch)
    run, found, made, halves = made_for([(5,), (17, 44)], monkeypatch, max_preconditioner_dim=24, betas=(0.9, 0.99))
    blocks = [block for part in found.slices for block in part.blocks]
    slot = next(i for i, block in enumerate(blocks) if block.region.start == (0, 22))
    block, numel = blocks[slot], 17 * 22
    (bank,) = [bank for bank in run.banks if block in bank.blocks]
    state = {role: tensor[bank.blocks.index(block)] for role, tensor in bank.state.items()}
    half_address = halves.data_ptr() + 2 * 32 * 32  # the other half of the matrix comes first
    flat_offset = found._starts[next(i for i, part in enumerate(found.slices) if block in part.blocks)] + numel
    tile = Tile(
        slot=slot,
        tensor=found._members.index(1),
        start=0,
        numel=numel,
        window_offset=22,
        middle_size=17,
        inner_size=22,
        outer_stride=0,
        middle_stride=44,
        inner_stride=1,
        flat_offset=flat_offset,
        filter_address=state["m"].data_ptr(),
        moment_address=state["v"].data_ptr(),
        row_size=22,
        half_address=half_address,
        columns=22,
        padded_columns=32,
        third_size=1,
    )
    first, count, numel, root, broken = SlotTable(*made.slots[:, slot].tolist())
    assert numel == math.prod(block.shape)
    tiles = [row for found in made.ranges for row in rows_of(found.tiles, Tile)]
    assert tiles[first : first + count] == [tile, tile._replace(start=256)] and root == state["X0"].data_ptr()
    assert broken == bank.broken[bank.blocks.index(block)].data_ptr()
    jobs = [job for launch in made.factors for job in rows_of(launch.jobs, FactorJob) if job.slot == slot]
    rows, columns = (
        FactorJob(
            slot=slot,
            half_address=half_address,
            row_stride=32,
            depth=32,
            factor_address=state[f"L{mode}"].data_ptr(),
            side=side,
            tile_row=1,
            tile_column=0,
        )
        for mode, side in enumerate((17, 22))
    )
    assert len(jobs) == 6 and rows in jobs and columns in jobs
    assert made.rank_one is None


def second_moments(shapes, monkeypatch, **options):
    """Tables of blocks whose second moments are of rank one: for each slot its state, its row, and its first tile."""
    _, found, made, _ = made_for(shapes, monkeypatch, graft="adafactor", merge_dims=False, **options)
    states = [{role: x[i] for role, x in part.state.items()} for part in found.slices for i in range(part.n)]
    tiles = {row.slot: row for each in made.ranges for row in rows_of(each.tiles, Tile) if row.start == 0}
    return made, states, rows_of(made.rank_one.jobs, RankOne), [tiles[slot] for slot in range(len(states))]


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((5, 16), {}, {"first": (5, 6), "second": (16, 17)}),
        ((5, 16), {"factors": "packed"}, {"first": (5, 0), "second": (16, 0)}),
        ((5, 16), {"large_dim": "diagonal", "max_preconditioner_dim": 8}, {"first": (5, 6), "second": (16, 1)}),
        ((5, 4, 6), {}, {"first": (5, 6), "second": (4, 5), "third": (6, 7)}),
        ((5,), {"precondition_1d": True}, {"first": (5, 6)}),
    ],
    ids=str,
)
def test_second_moments_of_rank_one(shape, options, expected, monkeypatch):
    """Sides and strides of the diagonals of a block's factors; 0 says that these are packed."""
    made, states, jobs, tiles = second_moments([shape] * 2, monkeypatch, **options)
    assert len(states) == len(jobs) == 2
    row_size, begin = math.prod(shape[1:]), made.rank_one.vectors.data_ptr()
    for i, (state, job, tile) in enumerate(zip(states, jobs, tiles, strict=True)):
        assert "v" not in state
        known = {"address": begin + 4 * i * (-(-(shape[0] + row_size) // 16) * 16)}  # each begins where a vector may be read
        for mode, nth in enumerate(("first", "second", "third")):
            side, stride = expected.get(nth, (1, 0))
            address = state[f"L{mode}"].data_ptr() if nth in expected else 0
            known |= {f"{nth}_address": address, f"{nth}_side": side, f"{nth}_stride": stride}
        assert job == RankOne(**known)
        assert (tile.moment_address, tile.row_size) == (job.address, row_size)
    assert made.rank_one.vectors.numel() * 4 >= jobs[-1].address - begin + 4 * (shape[0] + row_size)


def test_elements_are_read_one_by_one_if_vectors_of_them_would_cross_rows(monkeypatch):
    """All of these could be read eight at a time, but not with a second moment that has an entry for each row."""
    shapes = [(8, 16), (16, 12), (8, 4, 4), (8, 4, 3), (6, 4)]
    apart = {16: Alignment.CONTIGUOUS, 12: Alignment.SCATTERED, 4: Alignment.SCATTERED}
    made, _, _, tiles = second_moments(shapes, monkeypatch)
    assert sorted(tile.row_size for tile in tiles) == [4, 12, 12, 16, 16]
    for each in made.ranges:
        assert {apart[tile.row_size] for tile in rows_of(each.tiles, Tile)} == {each.alignment}
    _, _, plain, _ = made_for(shapes, monkeypatch, merge_dims=False)
    assert [each.alignment for each in plain.ranges] == [Alignment.CONTIGUOUS]


def test_tables(monkeypatch):
    small(monkeypatch)
    shapes = [(24, 16), (24, 16), (17, 35), (33,), ()]
    run, found, made, halves = made_for(shapes, monkeypatch, max_preconditioner_dim=24)
    blocks = [block for part in found.slices for block in part.blocks]
    rows = [row for found in made.ranges for row in rows_of(found.tiles, Tile)]
    assert [found.alignment for found in made.ranges] == [Alignment.CONTIGUOUS, Alignment.SCATTERED]
    assert {row.slot for row in rows_of(made.ranges[0].tiles, Tile)} == {
        i for i, block in enumerate(blocks) if block.param in (0, 1)
    }

    slots = SlotTable(*made.slots.tolist())
    for slot, block in enumerate(blocks):
        mine = rows[slots.first_tile[slot] :][: slots.num_tiles[slot]]
        numel = block.region.numel
        assert {(row.slot, row.numel, found._members[row.tensor]) for row in mine} == {(slot, numel, block.param)}
        assert [row.start for row in mine] == list(range(0, numel, 256))
        bank, i = next((bank, bank.blocks.index(block)) for bank in run.banks if block in bank.blocks)
        assert made.skip_counters[slot] == bank.counts[0, i].data_ptr()
        assert mine[0].filter_address == bank.state["m"][i].data_ptr()
        assert slots.root_address[slot] == (bank.state["X0"][i].data_ptr() if "X0" in bank.state else 0)
    assert sum(slots.num_tiles) == len(rows) == len(made.tile_sums) == len(made.graft_sums)

    jobs = {(launch.by_rows, launch.aligned): rows_of(launch.jobs, FactorJob) for launch in made.factors}
    sides = {kind: sorted({job.side for job in mine}) for kind, mine in jobs.items()}
    assert sides == {(True, False): [17, 24], (False, True): [16], (False, False): [17, 18]}
    high_halves = range(0, 2 * sum(part.half_numel for part in found.slices), 2)
    assert all(job.half_address - halves.data_ptr() in high_halves for mine in jobs.values() for job in mine)
    tall = [(job.tile_row, job.tile_column) for job in jobs[True, False] if job.side == 24]
    assert sorted(tall) == sorted(2 * [(0, 0), (1, 0), (1, 1)])


@pytest.mark.parametrize(
    ("window", "alignment"),
    [
        (Window(8, (32,), (1,)), Alignment.CONTIGUOUS),
        (Window(16, (4, 8), (24, 1)), Alignment.ROWS),
        (Window(0, (2, 2, 8), (48, 24, 1)), Alignment.ROWS),
        (Window(4, (32,), (1,)), Alignment.SCATTERED),
        (Window(0, (36,), (1,)), Alignment.SCATTERED),
        (Window(0, (8, 4), (24, 1)), Alignment.SCATTERED),
        (Window(0, (4, 8), (20, 1)), Alignment.SCATTERED),
        (Window(0, (4, 8), (8, 2)), Alignment.SCATTERED),
    ],
)
def test_alignment(window, alignment):
    assert window.alignment() == alignment


def test_thin_modes_are_summed_in_chunks_of_rows(monkeypatch):
    monkeypatch.setattr(tables, "CHUNK", 1280)  # ten rows of 128 columns
    options = {"max_preconditioner_dim": 100, "merge_dims": False}
    _, found, made, _ = made_for([(4, 30), (20, 70, 9), (20, 70, 9)], monkeypatch, **options)
    (part,) = [part for part in found.slices if part.third_size > 1]
    chunks, factors = rows_of(made.thin.chunks, ThinChunk), rows_of(made.thin.factors, ThinFactor)
    assert made.thin.sums.shape == (14, 16, 16)
    start = chunks[0].half_address
    assert chunks == [
        ThinChunk(
            half_address=start + 2 * (64 * block + row) * 9 * 128, num_rows=min(10, 64 - row), third_size=9, padded_columns=128
        )
        for block in range(2)
        for row in range(0, 64, 10)
    ]
    first = found.firsts[found.slices.index(part)]
    blocks = [row for found in made.ranges for row in rows_of(found.tiles, Tile) if row.slot == first]
    assert blocks[0].half_address == start and (blocks[0].columns, blocks[0].padded_columns) == (70, 128)
    assert factors == [
        ThinFactor(slot=first + i, first_chunk=7 * i, num_chunks=7, factor_address=part.state["L2"][i].data_ptr(), side=9)
        for i in range(2)
    ]


def test_launch_goes_over_all_tiles(monkeypatch):
    _, _, made, _ = made_for([(24, 16), (9,)], monkeypatch)
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda **arguments: calls.append((grid, arguments))

    made.launch(Kernel(), {"flat": 1}, partial=made.tile_sums)
    made.launch(Kernel(), {"flat": 1})
    assert [(grid, arguments["ALIGNED"]) for grid, arguments in calls] == 2 * [
        ((1,), Alignment.CONTIGUOUS),
        ((1,), Alignment.SCATTERED),
    ]
    assert calls[0][1]["partial"].data_ptr() == made.tile_sums.data_ptr() and "partial" not in calls[2][1]
    assert calls[1][1]["partial"].data_ptr() == made.tile_sums[1:].data_ptr()


def test_running_totals():
    assert running_totals([3, 0, 4]) == [0, 3, 3, 7] and running_totals([]) == [0]

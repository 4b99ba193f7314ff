"""Tables and buffers that kernels read, and the bookkeeping of CUDA graphs, without a GPU."""

from __future__ import annotations

import ast
import math
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lather
from lather import roots
from lather.compute import background as aside
from lather.compute import kernel_executor as fleet
from lather.compute import slices, tables
from lather.compute.kernel_executor import Buffers, Call, Graphs
from lather.compute.slices import BankSlice, Window, divide_banks, find_window, scratch_sizes
from lather.compute.tables import Tables, running_totals
from lather.kernels import schema
from lather.kernels.schema import (
    Alignment,
    Corrections,
    FactorJob,
    Numbers,
    SlotTable,
    TensorAddresses,
    ThinChunk,
    ThinFactor,
    Tile,
    position,
)
from lather.planning.plan import BankKey, Route

CPU = torch.device("cpu")
GROUP = lather.Shampoo([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]


def key(shape, modes=("full", "full"), group=0, dtype="float32", method="kronecker"):
    return BankKey(group=group, route=Route(0), dtype=dtype, method=method, shape=shape, modes=modes, device="cpu")


# Where a block lies.


@st.composite
def boxes(draw):
    """A tensor of some memory format, and a box in it."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(shape))))
    x = torch.arange(math.prod(shape)).view([shape[i] for i in order])
    x = x.permute([order.index(i) for i in range(len(shape))])
    start = [draw(st.integers(0, d - 1)) for d in shape]
    return x, start, [draw(st.integers(1, d - a)) for a, d in zip(start, shape, strict=True)]


@given(boxes())
def test_a_window_has_the_elements_of_a_box_in_their_order(box):
    x, start, shape = box
    window = find_window(start, shape, x.stride())
    inside = x[tuple(slice(a, a + d) for a, d in zip(start, shape, strict=True))]
    if window is None:
        assert inside.dim() > 3
    else:
        memory = torch.arange(x.numel())
        for sizes, strides in ((window.sizes, window.strides), window.in_three_dims()):
            assert torch.equal(memory.as_strided(sizes, strides, window.offset).flatten(), inside.flatten())


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), Window(0, (1,), (1,))),
        ((4, 6), (6, 1), Window(0, (24,), (1,))),
        ((4, 3), (6, 1), Window(0, (4, 3), (6, 1))),  # columns of a wider matrix
        ((4, 6), (1, 4), Window(0, (4, 6), (1, 4))),
        ((8, 4, 3, 3), (36, 1, 12, 4), Window(0, (8, 4, 9), (36, 1, 4))),  # channels last
        ((2, 3, 4, 5), (1, 2, 6, 24), None),
    ],
)
def test_windows(shape, strides, expected):
    assert find_window((0,) * len(shape), shape, strides) == expected


# Slices.


def test_a_slice():
    matrices = BankSlice(key((24, 40)), 2, 5)
    assert (matrices.n, matrices.numel, matrices.flat_numel) == (3, 960, 2880)
    assert matrices.kernel_factors and matrices.half_shape == (64, 1, 64) and matrices.half_numel == 3 * 64 * 64
    vectors = BankSlice(key((33,), ()), 0, 3)
    assert vectors.flat_numel == 112 and not vectors.kernel_factors and vectors.half_numel == 0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30), st.integers(0, 1)), max_size=6),
    st.integers(1, 400),
)
def test_every_slot_is_computed_once_and_sizes_are_bounded(banks, largest):
    banks = [(key((d, d + i), group=group), n) for i, (d, n, group) in enumerate(banks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "LARGEST", largest)
        patch.setattr(slices, "suits", lambda *_: True)
        together = divide_banks(banks, [GROUP, GROUP])
    found = sorted(
        (piece.key.shape, slot) for found in together for piece in found for slot in range(piece.start, piece.stop)
    )
    assert found == sorted((key.shape, slot) for key, n in banks for slot in range(n))
    for mine in together:
        assert len({piece.key.group for piece in mine}) == 1
        assert len(mine) == 1 or sum(piece.flat_numel for piece in mine) <= largest
        assert all(piece.n == 1 or piece.n * piece.numel <= largest for piece in mine)


def test_slices_that_go_together_are_of_one_kind(monkeypatch):
    monkeypatch.setattr(slices, "suits", lambda device, dtype, group: dtype != "float64")
    kinds = [
        key((8, 8)),
        key((8, 9)),
        key((8, 8), dtype="bfloat16"),
        key((8, 8), dtype="float64"),
        key((8,), (), method="adagrad"),
    ]
    together = divide_banks([(kind, 2) for kind in kinds], [GROUP])
    assert [[kinds.index(piece.key) for piece in found] for found in together] == [[0, 1], [2], [4]]


@pytest.mark.parametrize(
    ("method", "graft", "expected"),
    [
        ("shampoo", None, [[((8, 8), False), ((8,), False)]]),
        ("spectral", "adam", [[((8,), False)]]),
        ("kl", None, [[((8, 8), True), ((8,), False)]]),
        ("soap", "adam", [[((8, 8), True), ((8,), False)]]),
        ("soap", None, [[((8, 8), True)], [((8,), False)]]),
    ],
)
def test_methods_that_update_factors_in_their_own_way(method, graft, expected, monkeypatch):
    """A polar factor has no kernels; vectors of SOAP without a graft are Adam's, so they go apart."""
    monkeypatch.setattr(slices, "suits", lambda *_: True)
    group = GROUP | {"preconditioner": method, "graft": graft}
    banks = [(key((8, 8)), 2), (key((8,), (), method="graft"), 2)]
    together = divide_banks(banks, [group])
    assert [[(piece.shape, piece.custom_factors) for piece in found] for found in together] == expected
    assert [piece.kernel_factors for found in together for piece in found] == [
        shape == (8, 8) and not custom for found in expected for shape, custom in found
    ]


def test_only_cuda_has_kernels(monkeypatch):
    monkeypatch.setattr(slices, "has_kernels", lambda device: device.type == "cuda")
    group = GROUP | {"betas": (0.9, 0.999)}
    assert not slices.suits("cpu", "float32", group)
    assert slices.suits("cuda", "float32", group) and slices.suits("cuda:1", "bfloat16", group | {"beta3": 0.9})
    assert not slices.suits("cuda", "float64", group)
    assert not slices.suits("cuda", "float32", group | {"beta3": 0.5})
    assert not slices.suits("cuda", "float32", group | {"state_dtype": "bfloat16"})
    monkeypatch.setattr(slices, "has_kernels", lambda device: False)
    assert not slices.suits("cuda", "float32", group)


def test_gpus_that_kernels_are_made_for(monkeypatch):
    ask, gpu = roots.has_kernels, torch.device("cuda:0")
    monkeypatch.setattr(roots.products, "_has_triton", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert ask(gpu) and not ask(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert ask(torch.device("cuda:1"))  # which is not there
    for capability, able in (((7, 5), False), ((8, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert ask(gpu) is able
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not ask(gpu)
    for memory, stages in (
        ({"shared_memory_per_block_optin": 232448}, 3),
        ({"shared_memory_per_block_optin": 101376}, 2),
        ({}, 2),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=memory: SimpleNamespace(**found))
        assert roots.stages.__wrapped__(gpu) == stages


def test_scratch():
    matrices, thin, thick, vectors = (
        BankSlice(key((24, 40)), 0, 3),
        BankSlice(key((4, 70, 9), ("full",) * 3), 0, 2),
        BankSlice(key((4, 3, 17), ("full",) * 3), 0, 2),
        BankSlice(key((33,), ()), 0, 1),
    )
    plane = 3 * 64 * 64 + slices.SIDE * 64
    assert scratch_sizes([matrices, vectors], GROUP) == {
        "flat": (torch.float32, 2880 + 48),
        "halves": (torch.float16, 2 * plane),
    }
    plane = 2 * 64 * 9 * 128 + slices.SIDE * 9 * 128
    assert scratch_sizes([thin], GROUP) == {"flat": (torch.float32, 2 * 2520), "halves": (torch.float16, 2 * plane)}
    assert scratch_sizes([matrices, thick], GROUP)["plain"] == (torch.float32, 2880 + 416)
    assert "plain" in scratch_sizes([matrices], GROUP | {"betas": (0.0, 0.999)})
    assert scratch_sizes([vectors], GROUP)["halves"] == (torch.float16, 0)


def test_running_totals():
    assert running_totals([3, 0, 4]) == [0, 3, 3, 7] and running_totals([]) == [0]


# Tables.


KERNELS = [Path(schema.__file__).with_name(f"{name}.py") for name in ("step", "dense", "tiles")]


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
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("column("):
            (constant,), (table, name) = node.targets, node.value.args
            assert constant.id in used
            found.setdefault(table.id, []).append(name.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
            assert not any(isinstance(part, ast.Constant) for part in addends(node.args[0])), ast.unparse(node)
    by_torch = {"Numbers": {"factor_correction"}, "Corrections": {"factors"}}
    expected = {
        name: sorted(set(kind._fields) - by_torch.get(name, set()))
        for name, kind in vars(schema).items()
        if hasattr(kind, "_fields") and kind is not TensorAddresses  # whose rows are arguments of kernels
    }
    assert {table: sorted(names) for table, names in found.items()} == expected


def made_for(shapes, monkeypatch, **options):
    """An optimizer on the CPU, the slices that kernels would compute together, their tables, and the buffer of halves."""
    monkeypatch.setattr(slices, "suits", lambda *_: True)
    opt = lather.Shampoo([torch.nn.Parameter(torch.randn(shape)) for shape in shapes], **options)
    with torch.no_grad():
        opt._prepare_together()
    (found,) = opt._units[0].fleets
    dtype, numel = scratch_sizes(found.parts, opt.param_groups[0])["halves"]
    halves = torch.zeros(numel, dtype=dtype)
    return opt, found, Tables(found.parts, halves), halves


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
    options = {"max_preconditioner_dim": 24, "betas": (0.9, 0.99), "graft": "adam"}
    opt, found, made, halves = made_for([(5,), (17, 44)], monkeypatch, **options)
    blocks = [block for part in found.parts for block in part.blocks]
    slot = next(i for i, block in enumerate(blocks) if block.region.start == (0, 22))
    block, numel = blocks[slot], 17 * 22
    (bank,) = [bank for bank in opt._banks if block in bank.blocks]
    state = {role: tensor[bank.blocks.index(block)] for role, tensor in bank.state.items()}
    half_address = halves.data_ptr() + 2 * 32 * 32  # the other half of the matrix comes first
    flat_offset = found.starts[next(i for i, part in enumerate(found.parts) if block in part.blocks)] + numel
    tile = Tile(
        slot=slot,
        tensor=found.members.index(1),
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
        half_address=half_address,
        columns=22,
        padded_columns=32,
        third_size=1,
    )
    first, count, root = SlotTable(*made.slots[:, slot].tolist())
    tiles = [row for found in made.ranges for row in rows_of(found.tiles, Tile)]
    assert tiles[first : first + count] == [tile, tile._replace(start=256)] and root == state["X0"].data_ptr()
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


def test_tables(monkeypatch):
    small(monkeypatch)
    shapes = [(24, 16), (24, 16), (17, 35), (33,), ()]
    opt, found, made, halves = made_for(shapes, monkeypatch, max_preconditioner_dim=24)
    blocks = [block for part in found.parts for block in part.blocks]
    rows = [row for found in made.ranges for row in rows_of(found.tiles, Tile)]
    assert [found.alignment for found in made.ranges] == [Alignment.CONTIGUOUS, Alignment.SCATTERED]
    assert {row.slot for row in rows_of(made.ranges[0].tiles, Tile)} == {
        i for i, block in enumerate(blocks) if block.param in (0, 1)
    }

    slots = SlotTable(*made.slots.tolist())
    for slot, block in enumerate(blocks):
        mine = rows[slots.first_tile[slot] :][: slots.num_tiles[slot]]
        numel = block.region.numel
        assert {(row.slot, row.numel, found.members[row.tensor]) for row in mine} == {(slot, numel, block.param)}
        assert [row.start for row in mine] == list(range(0, numel, 256))
        bank, i = next((bank, bank.blocks.index(block)) for bank in opt._banks if block in bank.blocks)
        assert made.skip_counters[slot] == bank.counts[0, i].data_ptr()
        assert mine[0].filter_address == bank.state["m"][i].data_ptr()
        assert slots.root_address[slot] == (bank.state["X0"][i].data_ptr() if "X0" in bank.state else 0)
    assert sum(slots.num_tiles) == len(rows) == len(made.tile_sums) == len(made.graft_sums)

    jobs = {(launch.by_rows, launch.aligned): rows_of(launch.jobs, FactorJob) for launch in made.factors}
    sides = {kind: sorted({job.side for job in mine}) for kind, mine in jobs.items()}
    assert sides == {(True, False): [17, 24], (False, True): [16], (False, False): [17, 18]}
    high_halves = range(0, 2 * sum(part.half_numel for part in found.parts), 2)
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
    (part,) = [part for part in found.parts if part.third_size > 1]
    chunks, factors = rows_of(made.thin.chunks, ThinChunk), rows_of(made.thin.factors, ThinFactor)
    assert made.thin.sums.shape == (14, 16, 16)
    start = chunks[0].half_address
    assert chunks == [
        ThinChunk(
            half_address=start + 2 * (64 * block + row) * 9 * 128,
            num_rows=min(10, 64 - row),
            third_size=9,
            padded_columns=128,
        )
        for block in range(2)
        for row in range(0, 64, 10)
    ]
    first = found.firsts[found.parts.index(part)]
    blocks = [row for found in made.ranges for row in rows_of(found.tiles, Tile) if row.slot == first]
    assert blocks[0].half_address == start and (blocks[0].columns, blocks[0].padded_columns) == (70, 128)
    assert factors == [
        ThinFactor(
            slot=first + i, first_chunk=7 * i, num_chunks=7, factor_address=part.state["L2"][i].data_ptr(), side=9
        )
        for i in range(2)
    ]


def test_launch_goes_over_all_tiles(monkeypatch):
    _, _, made, _ = made_for([(24, 16), (9,)], monkeypatch)
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda **arguments: calls.append((grid, arguments))

    made.launch(Kernel(), {"flat": 1}, made.tile_sums)
    made.launch(Kernel(), {"flat": 1})
    assert [(grid, arguments["ALIGNED"]) for grid, arguments in calls] == 2 * [
        ((1,), Alignment.CONTIGUOUS),
        ((1,), Alignment.SCATTERED),
    ]
    assert calls[0][1]["partial"].data_ptr() == made.tile_sums.data_ptr() and "partial" not in calls[2][1]
    assert calls[1][1]["partial"].data_ptr() == made.tile_sums[1:].data_ptr()


# Buffers.


def call_with(sources, params=(), momenta=(), active=(True, True)):
    addresses = [source.data_ptr() for source in sources]
    return Call(GROUP, [1] * len(active), list(active), None, {}, sources, addresses, torch.float32, params, momenta)


NUMBERS = Numbers(*[0.0] * len(Numbers._fields))


def where(buffers):
    return TensorAddresses(*(row.tolist() for row in buffers.addresses))


def test_buffers_hold_numbers_and_addresses():
    buffers, x = Buffers(2, 3, CPU), torch.randn(3, 4).unbind()
    params, momenta = torch.randn(3, 4).unbind(), torch.randn(3, 4).unbind()
    buffers.load(NUMBERS._replace(lr=0.1, factor_correction=0.5), call_with(x, params, momenta))
    assert buffers.numbers[position(Numbers, "lr")] == 0.1 and buffers.bc2 == 0.5 and buffers.numbers.sum() == 0.6
    assert where(buffers) == TensorAddresses(
        *([tensor.data_ptr() for tensor in tensors] for tensors in (x, params, momenta))
    )
    y = torch.randn(3, 4).unbind()
    buffers.load(NUMBERS._replace(lr=0.2, decay=torch.tensor(0.3)), call_with(y, params, momenta))
    assert where(buffers).gradients == [tensor.data_ptr() for tensor in y]
    assert where(buffers).parameters == [tensor.data_ptr() for tensor in params]
    assert buffers.numbers[position(Numbers, "decay")] == torch.tensor(0.3).double()
    moved = [p.clone() for p in params]
    buffers.load(NUMBERS, call_with(y, moved))
    assert where(buffers).parameters == [p.data_ptr() for p in moved] and where(buffers).momenta == [0, 0, 0]


def test_buffers_know_who_is_active():
    buffers, x = Buffers(2, 1, CPU), [torch.randn(4)]
    for active in ((True, True), (True, False), (False, True), (True, True)):
        buffers.load(NUMBERS, call_with(x, active=active))
        assert buffers.active.tolist() == list(active)


def test_buffers_correct_and_divide():
    buffers = Buffers(3, 1, CPU)
    buffers.correct(
        Corrections(filter=torch.tensor([0.1, 0.2, 0.3]), moment=0.5, factors=torch.tensor([1.0, 2.0, 3.0]))
    )
    assert torch.equal(buffers.corrections, torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.5, 0.5], [1.0, 2.0, 3.0]]))
    assert [x.tolist() for x in buffers.bc2_of([0, 2, 3], uniform=False)] == [[1.0, 2.0], [3.0]]
    buffers.bc2.fill_(0.75)
    assert [(x.item(), x.dtype) for x in buffers.bc2_of([0, 2, 3], uniform=True)] == [(0.75, torch.float32)] * 2
    first, second = buffers.alive_of([0, 2, 3])
    assert (len(first), len(second)) == (2, 1) and first.data_ptr() == buffers.alive.data_ptr()
    assert buffers.alive_of([0, 2, 3])[0] is first


# Graphs.


@pytest.fixture
def cuda(monkeypatch):
    """A device that writes down what is done with it."""
    log = []
    state = SimpleNamespace(log=log, capturing=False)

    class Graph:
        def capture_begin(self, **options):
            state.capturing = True
            log.append("begin")

        def capture_end(self):
            state.capturing = False
            log.append("end")

        def replay(self):
            log.append("replay")

    class Stream:
        def wait_stream(self, other):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    fakes = {
        "CUDAGraph": Graph, "Stream": Stream, "current_stream": Stream, "graph_pool_handle": lambda: (0, 1),
        "stream": lambda stream: stream, "is_current_stream_capturing": lambda: state.capturing, "is_available": lambda: True,
        "current_device": lambda: 0,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(fleet, "stream_of", lambda device, number: Stream())
    return state


def test_what_comes_twice_is_captured_and_replayed_from_then_on(cuda):
    graphs, out = Graphs(), torch.ones(1)

    def launch():
        cuda.log.append("launch")
        return out

    results = [graphs.run("a", launch) for _ in range(4)]
    assert cuda.log == ["launch", "begin", "launch", "end", "replay", "replay", "replay"]
    assert all(result is out for result in results)
    cuda.log.clear()
    graphs.run("b", launch)
    graphs.run("a", launch)
    assert cuda.log == ["launch", "replay"]


def test_too_many_keys_are_launched(cuda, monkeypatch):
    monkeypatch.setattr(Graphs, "MOST", 3)
    graphs = Graphs()
    launch = lambda: cuda.log.append("launch")  # noqa: E731
    graphs.run("early", launch)
    graphs.run("early", launch)
    for i in range(8):
        graphs.run(i, launch)
        graphs.run(i, launch)
    assert 1 <= cuda.log.count("begin") <= 4
    cuda.log.clear()
    graphs.run("early", launch)
    graphs.run(7, launch)
    assert cuda.log == ["replay", "launch"]


def test_a_capture_of_the_user_takes_launches(cuda):
    graphs = Graphs()
    launch = lambda: cuda.log.append("launch")  # noqa: E731
    graphs.run("a", launch)
    cuda.capturing = True
    graphs.run("a", launch)
    assert cuda.log == ["launch", "launch"]


def test_a_capture_that_fails_is_the_last(cuda):
    graphs = Graphs()

    def launch():
        cuda.log.append("launch")
        if cuda.capturing:
            raise RuntimeError("no memory")

    graphs.run("a", launch)
    with pytest.warns(UserWarning, match="no memory"):
        graphs.run("a", launch)
    assert not cuda.capturing and cuda.log == ["launch", "begin", "launch", "end", "launch"]
    cuda.log.clear()
    graphs.run("a", launch)
    graphs.run("b", launch)
    graphs.run("b", launch)
    assert cuda.log == 3 * ["launch"]


def test_branches_are_the_thread_s_own():
    """A thread that works aside must not launch into the capture of another."""
    seen = []
    with aside.branching(["a", "b"]):
        thread = threading.Thread(target=lambda: seen.append(aside._capture.streams))
        thread.start()
        thread.join()
        assert list(aside._capture.streams) == ["a", "b"]
    assert seen == [()] and aside._capture.streams == ()


@pytest.mark.parametrize("capturing", [False, True])
def test_side_by_side_does_everything_once(cuda, capturing):
    cuda.capturing, done, numbers = capturing, [], list(range(2 * fleet.BRANCHES + 1))
    aside.side_by_side([partial(done.append, i) for i in numbers])
    assert done == numbers
    aside.side_by_side([])

"""Tables and buffers of fleets, and the bookkeeping of CUDA graphs, without a GPU."""

from __future__ import annotations

import math
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lather
from lather import roots
from lather.compute import background as aside
from lather.compute import kernel_executor as fleet
from lather.compute import tables
from lather.compute.kernel_executor import NAMES, Buffers, Call, Graphs
from lather.compute.tables import Place, Share, Tables, divide, place, scratch, starts
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
def test_place_finds_the_elements_of_a_box_in_their_order(box):
    x, start, shape = box
    at = place(start, shape, x.stride())
    inside = x[tuple(slice(a, a + d) for a, d in zip(start, shape, strict=True))]
    if at is None:
        assert inside.dim() > 3
    else:
        memory = torch.arange(x.numel())
        assert torch.equal(memory.as_strided(at.sizes, at.strides, at.base).flatten(), inside.flatten())


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), Place(0, (1,), (1,))),
        ((4, 6), (6, 1), Place(0, (24,), (1,))),
        ((4, 3), (6, 1), Place(0, (4, 3), (6, 1))),  # columns of a wider matrix
        ((4, 6), (1, 4), Place(0, (4, 6), (1, 4))),
        ((8, 4, 3, 3), (36, 1, 12, 4), Place(0, (8, 4, 9), (36, 1, 4))),  # channels last
        ((2, 3, 4, 5), (1, 2, 6, 24), None),
    ],
)
def test_places(shape, strides, expected):
    assert place((0,) * len(shape), shape, strides) == expected


# Shares.


def test_a_share():
    share = Share(key((24, 40)), 2, 5)
    assert (share.n, share.numel, share.padded) == (3, 960, 2880)
    assert share.boxed and share.half_shape == (64, 1, 64) and share.half_numel == 3 * 64 * 64
    vector = Share(key((33,), ()), 0, 3)
    assert vector.padded == 112 and not vector.boxed and vector.half_numel == 0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30), st.integers(0, 1)), max_size=6),
    st.integers(1, 400),
)
def test_fleets_hold_every_slot_once_and_are_bounded(banks, largest):
    banks = [(key((d, d + i), group=group), n) for i, (d, n, group) in enumerate(banks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "LARGEST", largest)
        patch.setattr(tables, "suits", lambda *_: True)
        fleets = divide(banks, [GROUP, GROUP])
    found = sorted(
        (share.key.shape, slot) for shares in fleets for share in shares for slot in range(share.start, share.stop)
    )
    assert found == sorted((key.shape, slot) for key, n in banks for slot in range(n))
    for shares in fleets:
        assert len({share.key.group for share in shares}) == 1
        assert len(shares) == 1 or sum(share.padded for share in shares) <= largest
        assert all(share.n == 1 or share.n * share.numel <= largest for share in shares)


def test_fleets_are_of_one_kind(monkeypatch):
    monkeypatch.setattr(tables, "suits", lambda device, dtype, group: dtype != "float64")
    kinds = [
        key((8, 8)),
        key((8, 9)),
        key((8, 8), dtype="bfloat16"),
        key((8, 8), dtype="float64"),
        key((8,), (), method="adagrad"),
    ]
    fleets = divide([(kind, 2) for kind in kinds], [GROUP])
    assert [[kinds.index(share.key) for share in shares] for shares in fleets] == [[0, 1], [2], [4]]


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
def test_methods_by_kernels_and_by_torch(method, graft, expected, monkeypatch):
    """A polar factor has no kernels; vectors of SOAP without a graft are Adam's, so they go apart."""
    monkeypatch.setattr(tables, "suits", lambda *_: True)
    group = GROUP | {"preconditioner": method, "graft": graft}
    banks = [(key((8, 8)), 2), (key((8,), (), method="graft"), 2)]
    fleets = divide(banks, [group])
    assert [[(share.shape, share.by_torch) for share in shares] for shares in fleets] == expected
    assert [share.boxed for shares in fleets for share in shares] == [
        shape == (8, 8) and not by_torch for shares in expected for shape, by_torch in shares
    ]


def test_only_cuda_has_fleets(monkeypatch):
    monkeypatch.setattr(tables, "has_kernels", lambda device: device.type == "cuda")
    group = GROUP | {"betas": (0.9, 0.999)}
    assert not tables.suits("cpu", "float32", group)
    assert tables.suits("cuda", "float32", group) and tables.suits("cuda:1", "bfloat16", group | {"beta3": 0.9})
    assert not tables.suits("cuda", "float64", group)
    assert not tables.suits("cuda", "float32", group | {"beta3": 0.5})
    assert not tables.suits("cuda", "float32", group | {"state_dtype": "bfloat16"})
    monkeypatch.setattr(tables, "has_kernels", lambda device: False)
    assert not tables.suits("cuda", "float32", group)


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
        Share(key((24, 40)), 0, 3),
        Share(key((4, 70, 9), ("full",) * 3), 0, 2),
        Share(key((4, 3, 17), ("full",) * 3), 0, 2),
        Share(key((33,), ()), 0, 1),
    )
    plane = 3 * 64 * 64 + tables.SIDE * 64
    assert scratch([matrices, vectors], GROUP) == {
        "flat": (torch.float32, 2880 + 48),
        "halves": (torch.float16, 2 * plane),
    }
    plane = 2 * 64 * 9 * 128 + tables.SIDE * 9 * 128
    assert scratch([thin], GROUP) == {"flat": (torch.float32, 2 * 2520), "halves": (torch.float16, 2 * plane)}
    assert scratch([matrices, thick], GROUP)["plain"] == (torch.float32, 2880 + 416)
    assert "plain" in scratch([matrices], GROUP | {"betas": (0.0, 0.999)})
    assert scratch([vectors], GROUP)["halves"] == (torch.float16, 0)


def test_starts():
    assert starts([3, 0, 4]) == [0, 3, 3, 7] and starts([]) == [0]


# Tables.


def fleet_of(shapes, monkeypatch, **options):
    """A fleet on the CPU, which is good for looking at its tables."""
    monkeypatch.setattr(tables, "suits", lambda *_: True)
    opt = lather.Shampoo([torch.nn.Parameter(torch.randn(shape)) for shape in shapes], **options)
    with torch.no_grad():
        opt._prepare_together()
    (found,) = opt._units[0].fleets
    return opt, found


def test_tables(monkeypatch):
    monkeypatch.setattr(tables, "BLOCK", 256)
    for name, value in {"SIDE": 16, "DEPTH": 16}.items():
        monkeypatch.setattr(tables, name, value)
    opt, found = fleet_of([(24, 16), (24, 16), (17, 35), (33,), ()], monkeypatch, max_preconditioner_dim=24)
    (dtype, numel) = scratch(found.parts, opt.param_groups[0])["halves"]
    halves = torch.zeros(numel, dtype=dtype)
    made = Tables(found.parts, halves)
    blocks = [block for part in found.parts for block in part.blocks]
    rows = torch.cat([tiles for tiles, *_ in made._ranges])
    assert [level for *_, level in made._ranges] == [tables.WHOLE, tables.LOOSE]
    assert sorted(set(made._ranges[0][0][:, 0].tolist())) == [
        i for i, block in enumerate(blocks) if block.param in (0, 1)
    ]

    firsts, counts, roots = made.slots
    for slot, block in enumerate(blocks):
        mine = rows[firsts[slot] : firsts[slot] + counts[slot]]
        numel = block.region.numel
        assert mine[:, 0].eq(slot).all() and mine[:, 3].eq(numel).all()
        assert mine[:, 2].tolist() == list(range(0, numel, 256))
        assert [found.members[i] for i in mine[:, 1]] == [block.param] * len(mine)
        address = made.skipped[slot].item()
        bank, i = next((bank, bank.blocks.index(block)) for bank in opt._banks if block in bank.blocks)
        assert address == bank.counts[0, i].data_ptr() and mine[0, 11] == bank.state["m"][i].data_ptr()
        assert roots[slot] == (bank.state["X0"][i].data_ptr() if "X0" in bank.state else 0)
    assert counts.sum() == len(rows) == len(made.partial) == len(made.own)

    jobs = {(by_rows, even): table for table, by_rows, even in made.jobs}
    sides = {kind: sorted(set(table[:, 5].tolist())) for kind, table in jobs.items()}
    assert sides == {(True, False): [17, 24], (False, True): [16], (False, False): [17, 18]}
    for table in jobs.values():
        at = (table[:, 1] - halves.data_ptr()) // 2
        assert at.min() >= 0 and at.max() < sum(part.half_numel for part in found.parts)
    tall = jobs[True, False][jobs[True, False][:, 5] == 24]
    assert sorted(map(tuple, tall[:, 6:].tolist())) == sorted(2 * [(0, 0), (1, 0), (1, 1)])


@pytest.mark.parametrize(
    ("at", "numel", "level"),
    [
        (Place(8, (32,), (1,)), 32, tables.WHOLE),
        (Place(16, (4, 8), (24, 1)), 32, tables.ROWS),
        (Place(0, (2, 2, 8), (48, 24, 1)), 32, tables.ROWS),
        (Place(4, (32,), (1,)), 32, tables.LOOSE),
        (Place(0, (36,), (1,)), 36, tables.LOOSE),
        (Place(0, (8, 4), (24, 1)), 32, tables.LOOSE),
        (Place(0, (4, 8), (20, 1)), 32, tables.LOOSE),
        (Place(0, (4, 8), (8, 2)), 32, tables.LOOSE),
    ],
)
def test_alignment(at, numel, level):
    assert tables._alignment(at, numel) == level


def test_thin_modes_are_summed_in_chunks_of_rows(monkeypatch):
    monkeypatch.setattr(tables, "CHUNK", 1280)  # ten rows of 128 columns
    options = {"max_preconditioner_dim": 100, "merge_dims": False}
    opt, found = fleet_of([(4, 30), (20, 70, 9), (20, 70, 9)], monkeypatch, **options)
    halves = torch.zeros(scratch(found.parts, opt.param_groups[0])["halves"][1], dtype=torch.float16)
    made = Tables(found.parts, halves)
    chunks, slots, sums = made.thin
    (part,) = [part for part in found.parts if part.thin > 1]
    assert chunks[:, 1:].tolist() == 2 * [*6 * [[10, 9, 128]], [4, 9, 128]] and sums.shape == (14, 16, 16)
    assert (chunks[1:7, 0] - chunks[:6, 0]).eq(2 * 10 * 9 * 128).all() and chunks[7, 0] - chunks[
        0, 0
    ] == 2 * 64 * 9 * 128
    first = found.firsts[found.parts.index(part)]
    assert slots[:, :3].tolist() == [[first, 0, 7], [first + 1, 7, 7]]
    assert slots[:, 3].tolist() == [part.state["L2"][i].data_ptr() for i in range(2)]


def test_launch_goes_over_all_tiles(monkeypatch):
    opt, found = fleet_of([(24, 16), (9,)], monkeypatch)
    made = Tables(found.parts, torch.zeros(scratch(found.parts, opt.param_groups[0])["halves"][1], dtype=torch.float16))
    calls = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda **arguments: calls.append((grid, arguments))

    made.launch(Kernel(), "partial", {"flat": 1})
    made.launch(Kernel(), None, {"flat": 1})
    assert [(grid, arguments["ALIGNED"]) for grid, arguments in calls] == 2 * [
        ((1,), tables.WHOLE),
        ((1,), tables.LOOSE),
    ]
    assert calls[0][1]["partial"].data_ptr() == made.partial.data_ptr() and "partial" not in calls[2][1]


# Buffers.


def call_with(sources, params=(), momenta=(), active=(True, True)):
    addresses = [source.data_ptr() for source in sources]
    return Call(GROUP, [1] * len(active), list(active), None, {}, sources, addresses, torch.float32, params, momenta)


def test_buffers_hold_numbers_and_addresses():
    buffers, x = Buffers(2, 3, CPU), torch.randn(3, 4).unbind()
    params, momenta = torch.randn(3, 4).unbind(), torch.randn(3, 4).unbind()
    buffers.load({"lr": 0.1, "bc2": 0.5}, {}, call_with(x, params, momenta))
    assert buffers.numbers[NAMES.index("lr")] == 0.1 and buffers.bc2 == 0.5 and buffers.numbers.sum() == 0.6
    for row, tensors in ((buffers.sources, x), (buffers.weights, params), (buffers.momenta, momenta)):
        assert row.tolist() == [tensor.data_ptr() for tensor in tensors]
    y = torch.randn(3, 4).unbind()
    buffers.load({"lr": 0.2}, {"decay": torch.tensor(0.3)}, call_with(y, params, momenta))
    assert buffers.sources.tolist() == [tensor.data_ptr() for tensor in y]
    assert buffers.weights.tolist() == [tensor.data_ptr() for tensor in params]
    assert buffers.numbers[NAMES.index("decay")] == torch.tensor(0.3).double()
    moved = [p.clone() for p in params]
    buffers.load({}, {}, call_with(y, moved))
    assert buffers.weights.tolist() == [p.data_ptr() for p in moved] and not buffers.momenta.any()


def test_buffers_know_who_is_active():
    buffers, x = Buffers(2, 1, CPU), [torch.randn(4)]
    for active in ((True, True), (True, False), (False, True), (True, True)):
        buffers.load({}, {}, call_with(x, active=active))
        assert buffers.active.tolist() == list(active)


def test_buffers_correct_and_divide():
    buffers = Buffers(3, 1, CPU)
    buffers.correct(torch.tensor([0.1, 0.2, 0.3]), 0.5, torch.tensor([1.0, 2.0, 3.0]))
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

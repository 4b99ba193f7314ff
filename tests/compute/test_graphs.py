"""The bookkeeping of CUDA graphs, without a GPU."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lather.compute import graphs as module
from lather.compute.graphs import BRANCHES, Graphs, Turns, side_by_side


@pytest.fixture
def cuda(monkeypatch):
    """A device that writes down what is done with it. As in CUDA, only the thread that captures is told so."""
    log = []
    state = SimpleNamespace(log=log, capturing=False, thread=threading.get_ident(), branches=0)

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
        device = torch.device("cuda", 0)

        def wait_stream(self, other):
            pass

        def __enter__(self):
            state.branches += 1
            return self

        def __exit__(self, *_):
            pass

    fakes = {
        "CUDAGraph": Graph, "Stream": Stream, "current_stream": Stream, "graph_pool_handle": lambda: (0, 1),
        "stream": lambda stream: stream, "is_available": lambda: True, "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: state.capturing and threading.get_ident() == state.thread,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(module, "stream_of", lambda device, number: Stream())
    state.compiled = []  # each call ends with None
    monkeypatch.setattr(module, "compile_kernels", lambda *launches: state.compiled.extend([*launches, None]))
    return state


def test_what_comes_twice_is_captured_and_replayed_from_then_on(cuda):
    graphs = Graphs()
    launch = lambda: cuda.log.append("launch")  # noqa: E731
    for _ in range(4):
        graphs.run("a", launch)
    assert cuda.log == ["launch", "begin", "launch", "end", "replay", "replay", "replay"]
    cuda.log.clear()
    graphs.run("b", launch)
    graphs.run("a", launch)
    assert cuda.log == ["launch", "replay"] and cuda.compiled == [launch, None] * 2


def test_launches_are_compiled_together_and_once(cuda):
    graphs, launches = Graphs(), {key: partial(cuda.log.append, key) for key in "abc"}
    graphs.compile({key: launches[key] for key in "ab"})
    assert cuda.log == [] and cuda.compiled == [launches["a"], launches["b"], None]
    assert [key for key in "abc" if graphs.is_new(key)] == ["c"]
    for key in "abc":
        graphs.run(key, launches[key])
    assert cuda.log == ["a", "b", "c"] and cuda.compiled[3:] == [launches["c"], None]


def test_only_the_first_keys_are_compiled_ahead(cuda):
    """Where something changes on every step, every key is new, and going through a launch once more costs time."""
    graphs = Graphs()
    for key in range(2 * graphs.AHEAD):
        graphs.run(key, lambda: cuda.log.append("launch"))
    assert len(cuda.log) == 2 * graphs.AHEAD and len(cuda.compiled) == 2 * graphs.AHEAD and not graphs.is_new(-1)


def test_what_raised_is_launched_before_it_is_captured(cuda):
    graphs = Graphs()

    def fails():
        raise MemoryError

    with pytest.raises(MemoryError):
        graphs.run("a", fails)
    launch = partial(cuda.log.append, "launch")
    graphs.run("a", launch)
    assert cuda.log == ["launch"]
    graphs.run("a", launch)
    assert cuda.log == ["launch", "begin", "launch", "end", "replay"]


def test_nothing_is_compiled_ahead_within_a_capture(cuda):
    cuda.capturing = True
    Graphs().run("a", lambda: cuda.log.append("launch"))
    assert cuda.log == ["launch"] and cuda.compiled == []


def test_replays_on_two_streams_take_turns(cuda, monkeypatch):
    """Those on one stream are in order anyway."""

    class Stream:
        def __init__(self):
            self.waited = []

        def wait_stream(self, other):
            self.waited.append(other)

    first, second, turns = Stream(), Stream(), Turns()
    for stream in (first, first, second, second, first):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda stream=stream: stream)
        turns.replay(torch.cuda.CUDAGraph())
    assert (first.waited, second.waited) == ([second], [first])


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


@pytest.mark.parametrize("other_thread", [False, True])
def test_branches_belong_to_the_thread_that_captures(cuda, other_thread):
    """A thread in the background must not launch into the capture of another one."""
    cuda.capturing, done = True, []
    work = partial(side_by_side, [partial(done.append, i) for i in range(3)])
    if other_thread:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        work()
    assert done == [0, 1, 2] and cuda.branches == (0 if other_thread else 3)


@pytest.mark.parametrize("capturing", [False, True])
def test_side_by_side_does_everything_once(cuda, capturing):
    cuda.capturing, done, numbers = capturing, [], list(range(2 * BRANCHES + 1))
    side_by_side([partial(done.append, i) for i in numbers])
    assert done == numbers
    side_by_side([])
    assert done == numbers


def test_branches_of_branches_have_streams_of_their_own(cuda, monkeypatch):
    """Otherwise a branch would wait for what another one does there."""
    used, now, make = [], [], module.stream_of

    def stream_of(device, number):
        now.append(number)
        return make(device, number)

    def branch():
        now.clear()
        side_by_side([lambda: None] * 3)
        used.append(set(now))

    monkeypatch.setattr(module, "stream_of", stream_of)
    cuda.capturing = True
    side_by_side([branch] * 2, branches=2)
    assert [len(some) for some in used] == [2, 2] and not used[0] & used[1]
    used.clear()
    side_by_side([branch] * 4)  # there are no more
    assert used == [set()] * 4

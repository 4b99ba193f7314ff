"""`root="auto"`: measured once on the device, the same for everyone, never in a plan. The device here is a CPU in disguise."""

from __future__ import annotations

import json
import math
from unittest import mock

import pytest
import torch

import lather
from lather.planning.plan import WORTHWHILE, Spec, make_plan
from lather.roots import Eigh, Minimax, Newton, auto, resolve

CPU = torch.device("cpu")
TIMES = {"minimax": 1.0, "newton": 8.0, "eigh": 64.0}


class Clock:
    """Stands for the device's: milliseconds by name, or by name and size; counts what it is asked."""

    def __init__(self, times):
        self.times, self.asked = times, []

    def __call__(self, solver, task, device):
        self.asked.append((solver.name, task))
        return self.times.get((solver.name, task.d), self.times.get(solver.name, math.inf))


@pytest.fixture(autouse=True)
def _fresh():
    auto._measured.clear()
    yield
    auto._measured.clear()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(dict(TIMES))
    monkeypatch.setattr(auto, "_time", clock)
    monkeypatch.setattr(auto, "_is_measurable", lambda device: True)
    return clock


def choose(d=64, e=0.25, count=5):
    return auto.decide(auto.measure({(CPU, d, e): count}))[d, e]


def train(steps=3, shapes=((40, 36), (40, 36), (8, 36)), **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    opt = lather.Shampoo(params, **{"precondition_frequency": 2, "eps": 1e-3, **options})
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()
    return opt


def solvers_used(monkeypatch):
    """Records the solver and size of every call of a solver."""
    used, call = set(), lather.roots.solve
    monkeypatch.setattr(
        lather.roots, "solve", lambda solver, a, *args: used.add((solver.name, a.shape[-1])) or call(solver, a, *args)
    )
    return used


# --- choices


def test_the_fastest_is_taken(clock):
    assert choose() == auto.Choice(Minimax(), {"minimax": 1.0, "eigh": 64.0})
    auto._measured.clear()
    clock.times["eigh"] = 0.1
    assert choose().solver == Eigh()


def test_one_that_fails_is_not_taken(clock):
    clock.times["minimax"] = math.inf
    assert choose() == auto.Choice(Newton(), {"minimax": math.inf, "newton": 8.0, "eigh": 64.0})
    auto._measured.clear()
    clock.times.clear()
    assert choose().solver == Eigh() and choose().cost == math.inf


def test_the_hopeless_are_not_measured(clock):
    """Of two solvers that are made of products, the one with six times as many."""
    assert Newton().flops(64) > auto.HOPELESS * Minimax().flops(64)
    choose()
    assert [name for name, _ in clock.asked] == ["minimax", "eigh"]


@pytest.mark.parametrize(("ms", "solver"), [(0.9, Minimax()), (0.7, Eigh())])
def test_noise_does_not_decide(clock, ms, solver):
    clock.times["eigh"] = ms
    assert choose().solver == solver


@pytest.mark.parametrize(("d", "e"), [(31, 0.455), (64, 0.455)])
def test_where_only_eigh_is_able_its_cost_is_measured(clock, d, e):
    assert choose(d, e) == auto.Choice(Eigh(), {"eigh": 64.0})


def test_measured_once_for_a_size_an_exponent_and_about_as_many(clock):
    first = choose(count=5)
    assert all(choose(count=n) == first for n in (5, 6, 8)) and len(clock.asked) == 2
    assert {task for _, task in clock.asked} == {auto.Task(64, 0.25, 8)}
    for other in ({"count": 9}, {"count": 4}, {"d": 65}, {"e": 0.5}):
        before = len(clock.asked)
        choose(**other)
        assert len(clock.asked) == before + 2
    auto._measured.clear()
    before = len(clock.asked)
    choose()
    assert len(clock.asked) == before + 2


def test_the_largest_stack_counts(clock):
    times = {(auto.Task(64, 0.25, n), name): ms for n, name, ms in [(1, "eigh", 1.0), (1, "minimax", 9.0)]}
    times |= {(auto.Task(64, 0.25, 16), name): ms for name, ms in [("eigh", 9.0), ("minimax", 1.0)]}
    assert auto.decide(times)[64, 0.25].solver == Minimax()
    assert auto.decide(dict(reversed(times.items()))) == auto.decide(times)


def test_the_slowest_of_several_devices_counts(clock, monkeypatch):
    monkeypatch.setattr(auto, "_kind", str)
    monkeypatch.setattr(auto, "_time", lambda solver, task, device: TIMES[solver.name] + 100 * (device.index or 0))
    stacks = {(torch.device("cuda", i), 64, 0.25): 1 for i in (0, 1)}
    assert auto.decide(auto.measure(stacks))[64, 0.25].milliseconds == {"minimax": 101.0, "eigh": 164.0}


def test_cost_is_coarse():
    costs = [auto.Choice(Eigh(), {"eigh": ms}).cost for ms in (1.0, 1.04, 0.97, 1.5, 3.0, 0.011)]
    assert costs[:5] == [1.0, 1.0, 1.0, 1.5, 3.0] and abs(costs[5] / 0.011 - 1) < 0.2


# --- measuring


def test_a_cpu_is_not_measured():
    with mock.patch.object(auto, "_time", side_effect=AssertionError):
        assert auto.measure({(CPU, 64, 0.25): 8}) == {}
        opt = train()
    assert all(row.solvers == ("eigh", "eigh") and not any(row.milliseconds) for row in opt.plan().banks)
    choices = {(64, 0.25): auto.Choice(Newton(), {})}
    assert resolve(choices, 64, "cpu", 0.25) == Eigh() and resolve(choices, 64, "cuda", 0.25) == Newton()
    assert resolve(choices, 65, "cuda", 0.455) == Eigh()


@pytest.mark.parametrize("e", [0.25, 0.5, 1 / 6])
@pytest.mark.parametrize("d", [32, 70])
def test_all_candidates_work_on_the_synthetic_stack(d, e):
    before = torch.get_rng_state()
    a = auto._synthetic(auto.Task(d, e, 2), CPU)
    assert torch.equal(torch.get_rng_state(), before) and a.shape == (auto.MANY, d, d) and torch.equal(a, a.mT)
    for solver in auto.candidates(e):
        assert solver.init(1, d, a.dtype, CPU) == {}, "its state would be in checkpoints"
        assert solver(a, e, 1e-12, {}).ok.all()


def test_the_stack_is_bounded():
    sizes = {(32, 4): auto.MANY, (32, 256): 256, (1024, 64): auto.NUMEL // 1024**2}
    assert all(len(auto._synthetic(auto.Task(d, 0.25, n), CPU)) == size for (d, n), size in sizes.items())


def test_slow_candidates_are_timed_on_fewer_matrices(monkeypatch):
    sizes = []
    monkeypatch.setattr(auto, "_clock", lambda solver, a, e, repeats: sizes.append(len(a)) or 11.0 * len(a))
    task = auto.Task(32, 0.25, 16)
    assert auto._time(Eigh(), task, CPU) == 11.0 and sizes == [1, 2]
    monkeypatch.setattr(auto, "_clock", lambda solver, a, e, repeats: 50.0)
    assert auto._time(Eigh(), task, CPU) == 50.0
    monkeypatch.setattr(auto, "_clock", lambda solver, a, e, repeats: 0.5)
    assert auto._time(Eigh(), task, CPU) == 0.5 / 60  # what the budget allows


def test_a_candidate_that_is_not_ok_or_raises_cannot_be_used(monkeypatch):
    task = auto.Task(48, 0.25, 2)
    assert auto._time(Newton(iterations=1), task, CPU) == math.inf
    with mock.patch.object(Minimax, "_root", side_effect=RuntimeError("no compiler")):
        assert auto._time(Minimax(), task, CPU) == math.inf


def test_the_clock_takes_the_median_after_a_call_to_warm_up(monkeypatch):
    calls, readings = [], iter([7.0, 1.0, 3.0])
    event = mock.Mock(elapsed_time=lambda other: next(readings))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Eigh, "__call__", lambda self, *args: calls.append(self) or mock.Mock(ok=torch.tensor([True])))
    assert auto._clock(Eigh(), torch.eye(2)[None], 0.25, repeats=3) == 3.0 and len(calls) == 4


# --- in the optimizer


def test_roots_are_computed_by_the_choice(clock, monkeypatch):
    used = solvers_used(monkeypatch)
    clock.times["eigh", 40] = 0.1
    train()
    assert used == {("eigh", 40), ("minimax", 36), ("minimax", 8)}


def test_a_solver_that_is_named_overrides(clock, monkeypatch):
    used = solvers_used(monkeypatch)
    opt = train(root="newton")
    assert {name for name, _ in used} == {"newton"} and not clock.asked
    assert opt.plan().banks[0].solvers == ("newton", "newton")


def test_float64_goes_by_the_rule(clock):
    train(state_dtype="float64")
    assert not clock.asked


def test_param_groups_stay_plain(clock):
    opt = train()
    assert opt.param_groups[0]["root"] == "auto" and opt.state_dict()["param_groups"][0]["root"] == "auto"
    assert not any(key.startswith("Q") for state in opt.state.values() for key in state)


def test_measured_before_the_first_refresh_and_not_again(clock):
    opt = train(steps=1)
    asked = len(clock.asked)
    assert asked == 6  # two for each of 40, 36 and 8
    for _ in range(4):
        opt.step()
    opt.load_state_dict(opt.state_dict())
    opt.step()
    train()
    assert len(clock.asked) == asked


def test_how_many_are_refreshed_at_once(clock):
    train(shapes=[(40, 36)] * 7, steps=1)
    train(shapes=[(40, 36)] * 7, steps=1, refresh="staggered", precondition_frequency=4)
    assert {task for _, task in clock.asked} == {auto.Task(d, 0.25, n) for d in (40, 36) for n in (8, 2)}
    clock.asked.clear()
    train(shapes=[(50, 50), (50, 50), (64, 50)], steps=1)  # those of one size are solved together
    assert {task for _, task in clock.asked} == {auto.Task(50, 0.25, 8), auto.Task(64, 0.25, 1)}


def test_no_exponent_no_measurement(clock):
    train(exponent=0.0)
    train(large_dim="diagonal", max_preconditioner_dim=1, merge_dims=False)
    assert not clock.asked


def test_the_plan_does_not_change(clock):
    opt = train(steps=1)
    measured, opt._choices = opt._choices, {}
    before = opt.plan().to_dict()
    opt._choices = measured
    after = opt.plan().to_dict()
    assert after["banks"] != before["banks"] and {**after, "banks": None} == {**before, "banks": None}
    fresh = opt._make_plan(opt._trainable(), opt.param_groups)
    assert (fresh.blocks, fresh.owners, fresh.keys) == (opt._plan.blocks, opt._plan.owners, opt._plan.keys)


def test_the_report_shows_what_was_measured(clock):
    clock.times["minimax", 40] = math.inf
    assert not any(train(steps=0).plan().banks[0].milliseconds)
    report = train().plan()
    assert report.banks[0].solvers == ("newton", "minimax")
    assert "newton 8 ms (minimax fails, eigh 64), minimax 1 ms (eigh 64)" in str(report)
    assert "minimax 1 ms (eigh 64)  " in str(report)
    data = json.loads(json.dumps(report.to_dict()["banks"][0]))
    assert data["milliseconds"] == [{"minimax": None, "newton": 8.0, "eigh": 64.0}, {"minimax": 1.0, "eigh": 64.0}]


def test_the_report_of_a_device_where_nothing_works(clock):
    clock.times.clear()
    assert "eigh fails (minimax fails, newton fails)" in str(train().plan())


# --- staggered refreshes


def staggered(choices, root="auto", frequency=2):
    options = {name: option.default for name, option in lather.options.OPTIONS.items()}
    options |= {"refresh": "staggered", "precondition_frequency": frequency, "root": root}
    specs = [Spec(f"p{i}", (d, d), 0) for i, d in enumerate((64, 48, 48, 48))]
    return list(make_plan(specs, [options]).offsets(0, choices).values())


def test_refreshes_are_balanced_by_what_was_measured(clock):
    choices = {(d, 0.25): auto.Choice(Minimax(), {"minimax": ms}) for d, ms in ((64, 1.0), (48, 1.0))}
    assert staggered({}) == [1, 0, 0, 0]  # by operations, of which the first has more than two of the others
    assert sorted(staggered(choices)) == [0, 0, 1, 1]
    choices[64, 0.25] = auto.Choice(Minimax(), {"minimax": 3.1})
    assert staggered(choices) == [1, 0, 0, 0]
    choices[64, 0.25] = auto.Choice(Minimax(), {"minimax": 0.4})
    assert staggered(choices) == [1, 0, 0, 1]
    assert staggered(choices, "eigh") == staggered({}, "eigh")
    del choices[48, 0.25]
    assert staggered(choices) == staggered({})


@pytest.mark.parametrize(("part", "steps"), [(0.01, {0}), (1 / 4, {0, 4}), (1 / 2, {0, 2, 4, 6})])
def test_little_work_is_done_in_few_steps(clock, part, steps):
    """Of four blocks with two factors each, which take a part of what a step is worth."""
    choices = {(d, 0.25): auto.Choice(Minimax(), {"minimax": part * WORTHWHILE}) for d in (64, 48)}
    assert set(staggered(choices, frequency=8)) == steps


def test_a_mode_that_is_left_alone_costs_nothing(clock):
    options = {name: option.default for name, option in lather.options.OPTIONS.items()}
    options |= {"refresh": "staggered", "precondition_frequency": 8, "exponent": ((3, 0.0),), "merge_dims": False}
    specs = [Spec("conv", (8, 8, 3), 0), Spec("a", (64, 64), 0), Spec("b", (64, 64), 0)]
    choices = {(64, 0.25): auto.Choice(Minimax(), {"minimax": 0.01})}
    assert set(make_plan(specs, [options]).offsets(0, choices).values()) == {0}


def test_a_schedule_stays(clock):
    opt = train(refresh="staggered")
    (key, *_) = [bank.key for bank in opt._banks]
    before = dict(opt._offsets(key))
    auto._measured.clear()
    clock.times |= {("minimax", 40): 90.0, "eigh": 100.0}
    opt.load_state_dict(opt.state_dict())
    opt.step()
    assert opt._offsets(key) == before

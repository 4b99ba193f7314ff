"""The executor by kernels: against the textbook twin in float64, option by option; against the executor by torch; and what it
must leave alone."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from paper import PAPER
from reference import Reference
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

import lather
from lather import linalg
from lather.compute import kernel_executor, slices, tables
from lather.compute.ahead import _NothingChanges
from lather.compute.kernel_executor import KernelExecutor
from lather.compute.slices import Window, scratch_sizes
from lather.compute.torch_executor import TorchExecutor
from lather.presets.from_torch import SMALL
from lather.roots import directions, polar
from lather.storage.buffers import Scratch
from lather.storage.step import Stored
from lather.storage.update import rate_of

# Blocks that are aligned or not, of one tile or several, cut by columns, of two modes, three, one, none and four; the last
# one lies in aligned rows.
SHAPES = [(24, 8), (24, 8), (7, 31), (6, 4, 3, 3), (9,), (), (2, 3, 4, 3, 2), (8, 32)]
FEW = SHAPES[:5]
FEWER = [(24, 8), (7, 31), (9,)]
WHOLE = [(20, 12), (20, 12), (5, 9), (9,)]  # each is one block
# Statistics of few steps are rank deficient: eps is large, or rounding would decide.
GIVEN = PAPER | {"lr": 0.05, "eps": 0.3, "max_preconditioner_dim": 24, "precondition_frequency": 2}
AHEAD, MUON = {"beta3": "nesterov"}, {"preconditioner": "spectral", "damping": "relative"}
NOW = AHEAD | {
    "betas": (0.95, 0.95),
    "exponent": 0.5,
    "damping": "relative",
    "refresh_warmup": 0.1,
    "block_multiple": 16,
    "graft": "auto",
}
CASES = {
    "packed": {"factors": "packed", "damping": "relative"},
    "plain": {},
    "momentum": {"graft": "sgd", "momentum": 0.9, "nesterov": True, "betas": (0.0, 1.0)},
    "no graft": {"graft": None},
    "constant size": AHEAD | {"graft": "constant", "start_preconditioning_step": 3, "weight_decay": 0.1},
    "diagonal": {"large_dim": "diagonal", "weight_decay": 0.1},
    "staggered": {"refresh": "staggered", "weight_decay": 0.1, "weight_decay_mode": "corrected"},
    "l2": {
        "weight_decay": 0.1, "weight_decay_mode": "l2", "maximize": True, "graft": "adagrad", "momentum": 0.5,
        "dampening": 0.1,
    },
    "late": {"graft": "rmsprop", "large_dim": "adagrad", "start_preconditioning_step": 3},
    "elementwise": {"preconditioner": None, "weight_decay": 0.1},
    "schedule free": {"averaging": "schedule_free", "weight_decay": 0.1, "weight_decay_mode": "corrected"},
    "gpa": {"averaging": "gpa", "averaging_beta": 0.3, "averaging_decay": 0.8, "betas": (0.0, 0.99)},
    "kl": {"preconditioner": "kl", "weight_decay": 0.1},
    "kl, no graft": {"preconditioner": "kl", "graft": None, "betas": (0.0, 0.9), "large_dim": "diagonal"},
    "kl, packed": {"preconditioner": "kl", "factors": "packed", "refresh": "staggered", "momentum": 0.5},
    "uncorrected": {"bias_correction": False, "betas": (0.9, 0.95), "weight_decay": 0.1},
    "by default": NOW,
    "by default, adam": NOW | {"graft": "adam"},
    "nesterov, no graft": AHEAD | {"graft": None, "weight_decay": 0.1, "weight_decay_mode": "l2", "maximize": True},
    "nesterov, sum": AHEAD | {"betas": (0.9, 1.0), "graft": "adagrad", "momentum": 0.5, "refresh": "staggered"},
    "nesterov, uncorrected": AHEAD | {"bias_correction": False, "large_dim": "diagonal", "averaging": "gpa"},
    "nesterov, kl": NOW | {"preconditioner": "kl", "exponent": None},
    "adafactor": {"graft": "adafactor", "factors": "packed", "refresh": "staggered", "weight_decay": 0.1},
    "adafactor, late": AHEAD | {"graft": "adafactor", "large_dim": "diagonal", "start_preconditioning_step": 3},
    "adafactor, sum": {"graft": "adafactor", "betas": (0.0, 1.0), "merge_dims": False, "momentum": 0.5, "maximize": True},
    "beta3": {"beta3": 0.5, "graft": "rmsprop", "factors": "packed"},
    "spectral": MUON,
    "spectral, no graft": MUON | AHEAD | {"graft": None, "polar_scale": "original"},
}  # fmt: skip


def parameters(shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(step, shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def take(opt, params, grads):
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    opt.step()
    assert by_kernels(opt) and not by_torch(opt)


def by_kernels(opt):
    return [executor for executor in opt._session.run.units[0].executors if isinstance(executor, KernelExecutor)]


def by_torch(opt):
    return [executor for executor in opt._session.run.units[0].executors if isinstance(executor, TorchExecutor)]


def prepared(opt):
    return opt._session.prepare(opt.param_groups, opt.state)


def run(params, first, last, shapes=SHAPES, **options):
    opt = lather.Shampoo(params, **GIVEN | options)
    for step in range(first, last):
        take(opt, params, gradients(step, shapes, params[0].dtype))
    return opt


def offsets_of(opt):
    """When blocks are refreshed, as the twin wants to know it."""
    if opt.param_groups[0]["refresh"] != "staggered":
        return None
    made = prepared(opt)
    blocks, offsets = made.plan.blocks, made.offsets(0, opt._session.settings[0])
    return {(blocks[i].param, blocks[i].index): offset for i, offset in offsets.items()}


def pair(params, **options):
    """An optimizer and its twin."""
    given = GIVEN | options
    opt = lather.Shampoo(params, **given)
    return opt, Reference([p.detach().float() for p in params], offsets=offsets_of(opt), **given)


def assert_close(got, expected, tolerance=1e-6):
    for p, q in zip(got, expected, strict=True):
        assert torch.linalg.vector_norm(p.detach().double() - q) <= tolerance * torch.linalg.vector_norm(q)


def snapshot(opt):
    return [(bank, {role: tensor.clone() for role, tensor in bank.state.items()}) for bank in opt._session.run.banks]


EVERYWHERE = ("plain", "packed", "diagonal", "elementwise", "kl", "by default", "nesterov, uncorrected", "adafactor, late")


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_twin(name):
    """With every shape those that treat shapes differently."""
    shapes = SHAPES if name in EVERYWHERE else FEWER
    params = parameters(shapes)
    opt, twin = pair(params, **CASES[name])
    for step in range(1, 4):
        take(opt, params, gradients(step, shapes))
        twin.step(gradients(step, shapes))
    assert_close(params, twin.params)


@pytest.mark.parametrize(
    "name", ["packed", "momentum", "kl", "by default", "nesterov, sum", "nesterov, kl", "beta3", "spectral", "spectral, no graft"]
)
def test_agrees_with_torch(name, monkeypatch):
    """Both executors give the same parameters and the same state, up to rounding. A parameter sits one step out."""
    ours, theirs = parameters(WHOLE), parameters(WHOLE)
    kernels = lather.Shampoo(ours, **GIVEN | CASES[name])
    prepared(kernels)
    monkeypatch.setattr(slices, "suits", lambda *_: False)
    plain = lather.Shampoo(theirs, **GIVEN | CASES[name])
    for step in range(1, 4):
        grads = [None if (i, step) == (1, 2) else grad for i, grad in enumerate(gradients(step, WHOLE))]
        kernels.arm()
        plain.arm()
        take(kernels, ours, grads)
        for q, grad in zip(theirs, grads, strict=True):
            q.grad = grad
        plain.step()
    assert by_torch(plain) and not by_kernels(plain)
    for p, q in zip(ours, theirs, strict=True):
        assert_close([p], [q.detach().double()])
        mine, other = kernels.state[p], plain.state[q]
        assert mine.keys() == other.keys()
        assert_close(mine.values(), [value.double() for value in other.values()], 1e-5)  # roots by eigh in float32
    torch.testing.assert_close(kernels.metrics(), plain.metrics(), rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", ["l2", "by default", "schedule free"])
def test_an_armed_step_moves_parameters_as_any_other(name):
    ours, theirs = parameters(FEWER), parameters(FEWER)
    watched, plain = (lather.Shampoo(params, **GIVEN | CASES[name]) for params in (ours, theirs))
    for step in range(1, 4):
        watched.arm()
        take(watched, ours, gradients(step, FEWER))
        take(plain, theirs, gradients(step, FEWER))
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("method", "default"), [("shampoo", torch.bfloat16), ("kl", torch.float32), ("kl", torch.bfloat16), ("soap", torch.float64)]
)
def test_late_roots_and_the_default_dtype(method, default):
    """Roots are published before anything is taken in, as factors of KL-Shampoo see them; the default dtype has no say."""
    shapes = [(8, 8), (8, 8), (6, 4, 3)]
    params = parameters(shapes)
    given = {"preconditioner": method, "eps": 1e-3, "precondition_frequency": 4, "refresh_delay": 1}
    opt, twin = pair(params, **given)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        for step in range(1, 11):
            grads = [grad.float() for grad in gradients(step, shapes)]
            take(opt, params, grads)
            twin.step(grads)
    finally:
        torch.set_default_dtype(before)
    assert_close(params, twin.params, tolerance=2e-5)


@pytest.mark.parametrize("options", [{"split": 3}, {"split": (2, 1, 9), "split_dim": 1}], ids=["rows", "columns"])
def test_split(options):
    shapes = [(27, 12), (6, 12, 3), (27, 12)]
    params = parameters(shapes)
    opt, twin = pair(params, momentum=0.5, **options)
    for step in range(1, 4):
        take(opt, params, gradients(step, shapes))
        twin.step(gradients(step, shapes))
    assert_close(params, twin.params)


def test_a_third_mode_of_one_element_has_a_factor_too():
    """Blocks of two elements of a mode of three leave a box of depth one."""
    shapes = [(4, 4, 3)]
    params = parameters(shapes)
    opt, twin = pair(params, graft=None, merge_dims=False, max_preconditioner_dim=2)
    for step in range(1, 4):
        take(opt, params, gradients(step, shapes))
        twin.step(gradients(step, shapes))
    assert_close(params, twin.params)


SGD = {"graft": "sgd", "betas": (0.0, 0.99)}  # nothing but the factors' correction depends on the step


@pytest.mark.parametrize(
    "options",
    [CASES["l2"] | {"betas": (0.9, 0.99)}, CASES["momentum"], SGD, CASES["schedule free"]],
    ids=["l2", "momentum", "sgd", "averaged"],
)
def test_missing_gradients_and_memory_in_any_order(options):
    params = parameters(FEW)
    params[2] = torch.nn.Parameter(params[2].detach().t().contiguous().t())
    params[3] = torch.nn.Parameter(params[3].detach().to(memory_format=torch.channels_last))
    opt, twin = pair(params, **options)
    for step in range(1, 5):
        grads = gradients(step, FEW)
        if step % 2:
            grads[3] = grads[3].to(memory_format=torch.channels_last)
        if step in (2, 3):
            grads[step - 1] = grads[4] = None
        take(opt, params, grads)
        twin.step(grads)
    assert_close(params, twin.params)


FILTERS = {2: {"beta3": 0.5}, 4: {"beta3": "nesterov"}, 5: {"betas": (0.8, 0.9)}, 6: {"beta3": None}}
FILTERS |= {7: {"beta3": "nesterov"}, 8: {"betas": (0.0, 0.9)}}  # the last forgets what was filtered


@pytest.mark.parametrize("options", [{}, {"graft": None, "bias_correction": False}], ids=["grafted", "ungrafted"])
def test_the_filter_changes_between_steps(options):
    """Looking ahead is switched on and off, also for matrices alone. Kernels go on with it; a parameter sits some steps out."""
    params = parameters(WHOLE)
    opt, twin = pair(params, **options)
    executors = []
    for step in range(1, 9):
        opt.param_groups[0].update(FILTERS.get(step, {}))
        twin.options.update(FILTERS.get(step, {}))
        grads = [None if i == 1 and step in (3, 4) else grad for i, grad in enumerate(gradients(step, WHOLE))]
        take(opt, params, grads)
        twin.step(grads)
        executors.append(len(by_kernels(opt)))
    assert executors == [1, 1, 1, 2, 2, 1, 2, 1]  # matrices and vectors go apart where only the former look ahead
    assert_close(params, twin.params)


@pytest.mark.parametrize("size", [1e-12, 1e8, 1e16])
def test_tiny_and_huge_gradients_move_parameters(size):
    """Where the norm of a direction overflows or vanishes, the graft's own is taken."""
    shapes = [(8, 6), (6, 5, 4)]
    params = parameters(shapes)
    opt = lather.Shampoo(params, **NOW | {"lr": 1.0, "graft_eps": 1e-30, "merge_dims": False})
    for step in range(1, 5):
        before = [p.detach().clone() for p in params]
        take(opt, params, [size * grad for grad in gradients(step, shapes)])
        assert all(0.1 < (p - old).square().mean().sqrt() < 10 for p, old in zip(params, before, strict=True))


def test_an_element_without_a_finite_direction_stays():
    """As where directions travel: a root that overflows on a gradient does not spoil the weights."""
    params = parameters([(8, 8)])
    opt = run(params, 1, 5, [(8, 8)], graft=None, betas=(0.0, 0.99))
    with torch.no_grad():
        opt._session.run.banks[0].state["X0"][0, 0].fill_(3e38)
        opt._session.run.banks[0].state["X1"].mul_(1e3)
    with pytest.warns(lather.NumericalWarning, match="starts anew"):
        take(opt, params, gradients(5, [(8, 8)]))
    assert params[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "bad", "roles"),
    [
        ("by default", torch.inf, ("m", "X1", "L0")),
        ("by default, adam", torch.inf, ("m", "v", "X1", "L0")),
        ("no graft", torch.nan, ("m", "X1", "L0")),
        ("momentum", torch.inf, ("momentum", "X1")),
        ("schedule free", torch.nan, ("z", "v")),
        ("kl", torch.inf, ("X1", "L0")),
    ],
)
def test_state_that_is_not_finite_is_treated_as_by_torch(name, bad, roles, monkeypatch):
    """Its blocks are marked and start anew; momentum starts anew where it is not finite."""
    shapes = [(8, 8), (7, 31)]
    for role in roles:
        results = []
        for suits in (slices.suits, lambda *_: False):
            params = parameters(shapes)
            monkeypatch.setattr(slices, "suits", suits)
            opt = lather.Shampoo(params, **GIVEN | CASES[name])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", lather.NumericalWarning)
                for step in range(1, 5):
                    if step == 3:  # after a refresh
                        found = [key for key in opt.state[params[1]] if key.partition(".")[0] == role and not key.endswith(".0")]
                        assert found
                        for key in found:
                            opt.state[params[1]][key].flatten()[-1] = bad
                    for p, grad in zip(params, gradients(step, shapes), strict=True):
                        p.grad = grad
                    opt.step()
            results.append((params, opt.health(), [str(w.message) for w in caught]))
        (ours, health, told), (theirs, expected, told_too) = results
        assert health == expected and told == told_too, role
        assert all(p.isfinite().all() for p in ours)
        assert_close(ours, [p.detach().double() for p in theirs], tolerance=2e-5)


def test_kl_leaves_out_what_overflows():
    params = parameters(WHOLE)
    opt = run(params, 1, 1, WHOLE, preconditioner="kl", eps=1e-20, precondition_frequency=1)
    for step in range(1, 6):
        take(opt, params, [1e-20 * grad for grad in gradients(step, WHOLE)])
    state, weight = snapshot(opt), params[0].detach().clone()
    grads = gradients(6, WHOLE)
    grads[0] = 1e16 * grads[0]
    with pytest.warns(lather.NumericalWarning, match=r"params'\]\[0\] had a gradient"):
        take(opt, params, grads)
    assert torch.equal(params[0], weight) and not torch.equal(params[1], weight)
    for bank, before in state:
        for slot, block in enumerate(bank.blocks):
            if block.param == 0:
                assert all(torch.equal(bank.state[role][slot], before[role][slot]) for role in before)
    assert [found["skipped"] for found in opt.health().values()] == [1]


def test_a_parameter_is_given_another_memory_format():
    shapes = [(8, 16), (6, 4, 3, 3)]
    params = parameters(shapes)
    opt, twin = pair(params, momentum=0.9)
    for step in range(1, 5):
        if step == 3:
            params[1].data = params[1].data.to(memory_format=torch.channels_last)
        take(opt, params, gradients(step, shapes))
        twin.step(gradients(step, shapes))
    assert_close(params, twin.params)


def gap(w):
    return torch.cat([w, torch.zeros_like(w)], 1)[:, : w.shape[1]]


def odd(w):
    return torch.cat([w.new_zeros(1), w.flatten()])[1:].view_as(w)


@pytest.mark.parametrize("move", [gap, odd])
def test_parameters_that_kernels_cannot_write_go_alone(move):
    """One with gaps in memory, and one that does not start at a multiple of 16 bytes."""
    shapes = [(8, 16), (6, 20)]
    params = parameters(shapes)
    params[0] = torch.nn.Parameter(move(params[0].detach()))
    opt, twin = pair(params, momentum=0.9)
    for step in range(1, 5):
        for p, grad in zip(params, gradients(step, shapes), strict=True):
            p.grad = grad
        opt.step()
        twin.step(gradients(step, shapes))
    assert by_kernels(opt) and by_torch(opt)
    assert_close(params, twin.params)


UNGRAFTED = MUON | AHEAD | {"graft": None, "weight_decay": 0.1}
SPECTRAL = {
    "grafted": MUON,
    "late": MUON | {"start_preconditioning_step": 3, "graft": "constant"},
    "ungrafted": UNGRAFTED | {"momentum": 0.9, "polar_scale": "match_rms_adamw"},
    "a least norm": UNGRAFTED | {"polar": "newton_schulz(eps=4.0)", "polar_scale": "original"},
    "uncorrected": UNGRAFTED | {"bias_correction": False, "polar": "polar_express"},
    "no filter": UNGRAFTED | {"betas": (0.0, 0.9), "beta3": None, "polar": "svd"},
    "averaged": UNGRAFTED | {"averaging": "gpa"},
}


@pytest.mark.parametrize("name", SPECTRAL)
def test_spectral(name):
    """A parameter sits some steps out: corrections then differ by slot. Matrices of four modes count as their first against the
    rest."""
    params = parameters(SHAPES)
    opt, twin = pair(params, **SPECTRAL[name])
    for step in range(1, 5):
        grads = [None if i == 1 and step in (2, 3) else grad for i, grad in enumerate(gradients(step, SHAPES))]
        take(opt, params, grads)
        twin.step(grads)
    assert_close(params, twin.params, tolerance=1e-5)


def test_spectral_options_change_between_steps():
    params = parameters(WHOLE)
    opt, twin = pair(params, **UNGRAFTED)
    live = {2: {"polar": "svd"}, 3: {"polar": "polar_express(steps=6)", "polar_scale": "original"}, 4: {"bias_correction": False}}
    for step in range(1, 6):
        opt.param_groups[0].update(live.get(step, {}))
        twin.options.update(live.get(step, {}))
        take(opt, params, gradients(step, WHOLE))
        twin.step(gradients(step, WHOLE))
    assert_close(params, twin.params, tolerance=1e-5)


class Captured:
    """Launches as graphs are: a key that comes again is the same launch."""

    def __init__(self):
        self.keys = []

    def is_new(self, key):
        return False

    def run(self, key, launch):
        self.keys.append(key[1][0])
        launch()


def counted(n, monkeypatch, **options):
    """Stacks that are made orthogonal in a step for n matrices of one shape, and what is captured."""
    shapes, sizes, way = [(8, 16)] * n, [], lather.NewtonSchulz.__call__
    params = parameters(shapes)
    opt = lather.Shampoo(params, **GIVEN | UNGRAFTED | options)
    take(opt, params, gradients(1, shapes))
    (executor,) = by_kernels(opt)
    executor._graphs = Captured()
    with monkeypatch.context() as patch:
        patch.setattr(lather.NewtonSchulz, "__call__", lambda self, g, *rest: sizes.append(len(g)) or way(self, g, *rest))
        take(opt, params, gradients(2, shapes))
    return params, sizes, executor._graphs.keys


def test_parts_of_stacks_run_side_by_side(monkeypatch):
    """As many as there are branches of a graph, however many matrices there are; and the same bits as in one stack."""
    for n, expected in ((1, [1]), (3, [1, 1, 1]), (8, [2] * 4), (13, [4, 4, 4, 1])):
        params, sizes, keys = counted(n, monkeypatch)
        assert sizes == expected and keys == ["in", "out"]
        others = parameters([(8, 16)] * n)
        run(others, 1, 3, [(8, 16)] * n, **UNGRAFTED)
        assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


@pytest.mark.parametrize(
    "changed", [{"polar": "polar_express"}, {"polar_scale": "original"}, {"bias_correction": False}, {"lr": 0.1}], ids=str
)
def test_what_graphs_hold_is_in_their_keys(changed):
    """Or an option would change nothing once a graph is replayed."""
    params, keys = parameters([(8, 16)]), set()
    opt = lather.Shampoo(params, **GIVEN | UNGRAFTED)
    for step in (1, 2):
        take(opt, params, gradients(step, [(8, 16)]))
        (executor,) = by_kernels(opt)
        executor._graphs = SimpleNamespace(is_new=lambda key: False, run=lambda key, launch: keys.add(key[1]) or launch())
    assert len(keys) == 2  # what comes in, and what goes out
    opt.param_groups[0].update(changed)
    take(opt, params, gradients(3, [(8, 16)]))
    assert by_kernels(opt) == [executor]
    assert len(keys) == (2 if "lr" in changed else 4)


def test_what_graphs_cannot_hold_is_launched(monkeypatch):
    assert counted(2, monkeypatch, polar="svd")[2] == ["in"]


@pytest.mark.parametrize("options", [MUON, UNGRAFTED], ids=["grafted", "ungrafted"])
def test_spectral_in_halves(options, monkeypatch):
    """As on a GPU. Directions are rounded to 11 bits, and no more."""
    monkeypatch.setattr(polar, "fits_halves", lambda x: x.dtype == torch.float32)
    params = parameters(FEW)
    opt, twin = pair(params, **options)
    for step in range(1, 4):
        take(opt, params, gradients(step, FEW))
        twin.step(gradients(step, FEW))
    assert_close(params, twin.params, tolerance=3e-3)
    with pytest.raises(AssertionError):
        assert_close(params, twin.params, tolerance=1e-6)


OF_SOAP = {"preconditioner": "soap", "eps": 1e-3, "precondition_frequency": 5}
SOAP = {
    "grafted": {"start_preconditioning_step": 7, "betas": (0.0, 0.9)},
    "diagonal": {"graft": None, "large_dim": "diagonal", "refresh": "staggered", "merge_dims": False},
    "sums": {"graft": "sgd", "betas": (0.9, 1.0), "momentum": 0.5, "factors": "packed"},
    "averaged": {"graft": None, "averaging": "gpa", "bias_correction": False, "weight_decay": 0.1},
    "nesterov": AHEAD | {"graft": None, "damping": "relative"},
}


@pytest.mark.parametrize("options", SOAP.values(), ids=SOAP)
def test_soap(options):
    """Bases of few gradients are vague, so they are refreshed when factors are of full rank. A parameter sits some steps out:
    corrections then differ by slot. Vectors of SOAP without a graft are Adam's."""
    params = parameters(FEW)
    opt, twin = pair(params, **OF_SOAP | options)
    for step in range(1, 9):
        grads = [None if i == 1 and step in (2, 6) else grad for i, grad in enumerate(gradients(step, FEW))]
        take(opt, params, grads)
        twin.step(grads)
    assert_close(params, twin.params, tolerance=2e-5)


@pytest.mark.parametrize("bad", [torch.nan, 1e25])
def test_a_gradient_that_is_not_finite_is_left_out(bad):
    """Nor one whose square is not: its block keeps its bits and is counted, the others go on."""
    params = parameters()
    opt = run(params, 1, 3, momentum=0.9)
    weights, state = [p.detach().clone() for p in params], snapshot(opt)
    memory = opt.state[params[2]]["momentum"].clone()
    grads = gradients(3)
    grads[2][3, 20] = bad  # in the second block, of columns from 16 on
    with pytest.warns(lather.NumericalWarning, match=r"params'\]\[2\]"):
        take(opt, params, grads)
    assert torch.equal(params[2][:, 16:], weights[2][:, 16:])
    assert torch.equal(opt.state[params[2]]["momentum"][:, 16:], memory[:, 16:])
    assert not any(torch.equal(p, q) for p, q in zip(params, weights, strict=True))
    for bank, before in state:
        for slot, block in enumerate(bank.blocks):
            hit = block.param == 2 and block.region.start == (0, 16)
            assert bank.counts[0, slot] == hit
            assert torch.equal(bank.state["m"][slot], before["m"][slot]) == hit
            assert all(torch.equal(bank.state[role][slot], before[role][slot]) for role in before) == hit
    assert [found["skipped"] for found in opt.health().values()] == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_half_the_size(dtype):
    """State is float32 whatever they are; they themselves are rounded once a step, by the interpreter to either side."""
    params = parameters(dtype=dtype)
    for step in range(1, 3):
        before = [p.detach().clone() for p in params]
        if step == 1:
            opt, twin = pair(params, weight_decay=0.1, momentum=0.9)
        for p, q in zip(twin.params, before, strict=True):
            p.copy_(q)
        take(opt, params, gradients(step, dtype=dtype))
        twin.step(gradients(step, dtype=dtype))
        for p, q in zip(params, twin.params, strict=True):
            torch.testing.assert_close(p.detach().double(), q, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert all(t.dtype == torch.float32 for bank in opt._session.run.banks for t in bank.state.values() if t.is_floating_point())


@pytest.mark.parametrize(
    "options", [{"weight_decay": 0.1}, AHEAD | SMALL, AHEAD | SMALL | {"graft": "auto"}, {"preconditioner": None}], ids=str
)
def test_a_filter_of_half_the_size(options):
    """It is rounded once a step. Directions are made of what it was before that, also of vectors that do not look ahead."""
    params = parameters(WHOLE)
    opt, twin = pair(params, **options | {"filter_dtype": "bfloat16", "root_dtype": None})
    for step in range(1, 4):
        take(opt, params, gradients(step, WHOLE))
        twin.step(gradients(step, WHOLE))
        assert_close(params, twin.params, 1e-6 if step == 1 else 1e-2)
        for p, blocks in zip(params, twin.blocks, strict=True):
            m, expected = opt.state[p]["m.0"], blocks[0].m.view(opt.state[p]["m.0"].shape)
            assert m.dtype == torch.bfloat16
            torch.testing.assert_close(m.double(), expected.double(), rtol=step * torch.finfo(m.dtype).eps, atol=step * 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_of_banks_in_parts(dtype, monkeypatch):
    """Torch applies what kernels give out: with slices of banks too, and the same bits."""
    whole, parts = parameters(FEW, dtype), parameters(FEW, dtype)
    one = run(whole, 1, 3, FEW, averaging="schedule_free", weight_decay=0.1)
    assert not any(executor.moves_parameters for executor in by_kernels(one))
    monkeypatch.setattr(slices, "LARGEST", 200)
    many = run(parts, 1, 3, FEW, averaging="schedule_free", weight_decay=0.1)
    assert len(many._session.run.units[0].writes) > len(one._session.run.units[0].writes)
    for mode in ("train", "eval"):
        assert all(torch.equal(p, q) for p, q in zip(whole, parts, strict=True)), mode
        one.eval()
        many.eval()


def test_learning_rate_on_the_device():
    number, tensor = parameters(WHOLE), parameters(WHOLE)
    options = {"weight_decay": 0.1, "weight_decay_mode": "corrected"}
    run(number, 1, 3, WHOLE, lr=0.03, **options)
    run(tensor, 1, 3, WHOLE, lr=torch.tensor(0.03, dtype=torch.float64), **options)
    assert all(torch.equal(p, q) for p, q in zip(number, tensor, strict=True))


def test_a_wrong_learning_rate_on_the_device_is_left_out(monkeypatch):
    """The host does not know it. All blocks keep their bits and are counted; it is said once."""
    for module in ("settings", "storage.update"):
        monkeypatch.setattr(f"lather.{module}.is_on_host", lambda tensor: False)
    params, lr = parameters(WHOLE), torch.tensor(0.05)
    opt = run(params, 1, 4, WHOLE, lr=lr, momentum=0.9, weight_decay=0.1, weight_decay_mode="corrected")
    weights, memory = ([x.detach().clone() for x in some] for some in (params, [opt.state[p]["momentum"] for p in params]))
    factors = {p: opt.state[p]["L0.0"].clone() for p in params[:-1]}
    for skipped, bad in enumerate((torch.nan, torch.inf, -1.0), 1):
        lr.fill_(bad)
        with pytest.warns(lather.NumericalWarning, match="learning rate") if skipped == 1 else nullcontext():
            take(opt, params, gradients(4, WHOLE))
        for p, w, m in zip(params, weights, memory, strict=True):
            assert torch.equal(p, w) and torch.equal(opt.state[p]["momentum"], m)
        assert all(torch.equal(opt.state[p]["L0.0"], old) for p, old in factors.items())
        assert [found["skipped"] for found in opt.health().values()] == [skipped] * len(params)
    lr.fill_(0.05)
    take(opt, params, gradients(5, WHOLE))
    assert all(p.isfinite().all() and not torch.equal(p, q) for p, q in zip(params, weights, strict=True))


def test_numbers_change_between_steps():
    params = parameters()
    opt, twin = pair(params, momentum=0.5, weight_decay=0.1)
    for step in range(1, 4):
        changed = {"lr": 0.05 / step, "weight_decay": 0.1 * step, "momentum": 0.5 / step, "graft_eps": 1e-8 * step}
        opt.param_groups[0].update(changed)
        twin.options.update(changed)
        take(opt, params, gradients(step))
        twin.step(gradients(step))
    assert_close(params, twin.params)


@pytest.mark.parametrize(("beta3", "number"), [(None, 1), ("nesterov", 2)])
def test_slices_of_banks_give_the_same_bits(beta3, number, monkeypatch):
    whole, parts = parameters(FEW), parameters(FEW)
    assert len(by_kernels(run(whole, 1, 3, FEW, beta3=beta3))) == number
    monkeypatch.setattr(slices, "LARGEST", 200)
    opt = run(parts, 1, 3, FEW, beta3=beta3)
    executors, slots = by_kernels(opt), sum(len(bank.blocks) for bank in opt._session.run.banks)
    assert len(executors) > 3 and max(executor.n for executor in executors) < slots
    assert any(piece.n < len(piece.bank.blocks) for executor in executors for piece in executor.slices)
    assert all(torch.equal(p, q) for p, q in zip(whole, parts, strict=True))


@pytest.mark.parametrize(("factors", "precision", "error"), [("full", "float32", 1e-6), ("packed", "fast", 1e-3)])
def test_tiles_as_large_as_on_a_gpu(factors, precision, error, monkeypatch):
    """Several tiles of a factor, the last ones not whole. A tile takes its columns in a quarter at a time."""
    for module in (slices, tables, kernel_executor):
        for name, size in {"SIDE": 128, "DEPTH": 64}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, size)
    shapes = [(200, 140)]
    opt = run(parameters(shapes), 1, 2, shapes, factors=factors, precision=precision, max_preconditioner_dim=1024)
    (g,), (state,) = gradients(1, shapes), opt.state.values()
    for role, wanted in (("L0.0", g @ g.T), ("L1.0", g.T @ g)):
        found = linalg.unpack(state[role][None])[0]
        assert_close([found], [0.05 * wanted.double()], error)


class Rehearsals:
    """Stands in for graphs. Goes through what is to be compiled as on a GPU: no kernel is launched."""

    def __init__(self, monkeypatch):
        self.known, self.late, self.count, self.monkeypatch = set(), [], 0, monkeypatch

    def is_new(self, key):
        return key not in self.known

    def compile(self, launches):
        self.known |= launches.keys()
        self.count += 1
        with self.monkeypatch.context() as patch, _NothingChanges():
            patch.setattr(InterpretedFunction, "run", lambda *args, **given: None)
            for launch in launches.values():
                launch()

    def run(self, key, launch):
        self.late += [] if key in self.known else [key[1][0]]
        launch()


@pytest.mark.parametrize("case", ["by default", "adafactor", "kl, no graft", "late", "spectral", "soap", "packed", "l2"])
def test_kernels_of_all_parts_of_a_step_are_compiled_together(case, monkeypatch):
    """Once for each executor, if the first step refreshes roots. That changes no bit, and no state of the host's."""
    monkeypatch.setattr(kernel_executor, "is_capturable", lambda due: True)
    options = GIVEN | (NOW | {"preconditioner": "soap", "graft": None, "exponent": None} if case == "soap" else CASES[case])
    (params, opt), (others, plain) = ((p, lather.Shampoo(p, **options)) for p in (parameters(FEW), parameters(FEW)))
    prepared(opt)
    rehearsals = Rehearsals(monkeypatch)
    for executor in by_kernels(opt):
        executor._graphs = rehearsals
    for step in range(1, 5):
        for one, its in ((opt, params), (plain, others)):
            take(one, its, gradients(step, FEW))
        assert all(map(torch.equal, params, others))
    for (bank, state), (_, other) in zip(snapshot(opt), snapshot(plain), strict=True):
        assert all(torch.equal(state[role], other[role]) for role in state) and bank.failed.eq(0).all()
    if options.get("refresh_warmup"):
        assert rehearsals.late == [] and rehearsals.count == len(by_kernels(opt))
    assert {"in", "follow"}.isdisjoint(rehearsals.late)


def travelling(opt, reads_gradients):
    """The executor of an optimizer, for directions that leave; and for gradients in stacks unless it ``reads_gradients``."""
    (executor,) = by_kernels(opt)
    found = [
        piece
        if reads_gradients
        else replace(
            piece, tensor_indices=[i] * piece.n, windows=[Window(k * piece.numel, (piece.numel,), (1,)) for k in range(piece.n)]
        )
        for i, piece in enumerate(executor.slices)
    ]
    settings, scratch = opt._session.settings[0], Scratch({"cpu": torch.device("cpu")})
    for role, (dtype, numel) in scratch_sizes(found, settings).items():
        scratch.reserve((role, "cpu", dtype), numel)
    return KernelExecutor(found, settings, scratch, reads_gradients=reads_gradients, moves_parameters=False)


@pytest.mark.parametrize(
    ("reads_gradients", "betas", "beta3"),
    [(True, (0.0, 0.999), None), (False, (0.9, 0.999), None), (False, (0.9, 0.999), 0.81)],
    ids=["out", "in and out", "ahead"],
)
def test_gradients_from_stacks_and_directions_that_leave(reads_gradients, betas, beta3):
    """The directions move the parameters as an executor does that moves them itself. A slot that sits out is NaN."""
    params, others = parameters(WHOLE), parameters(WHOLE)
    direct, opt = (lather.Shampoo(p, **GIVEN | {"betas": betas, "beta3": beta3}) for p in (params, others))
    made = prepared(opt)
    executor, settings = travelling(opt, reads_gradients), opt._session.settings
    stored = Stored({i: p.detach() for i, p in enumerate(others)}, {}, {})
    rates = [rate_of(opt.param_groups[0], settings[0])]
    for step in range(1, 4):
        grads = gradients(step, WHOLE)
        if step == 2:
            grads[1] = None
        take(direct, params, grads)
        there = {i: grad for i, grad in enumerate(grads) if grad is not None}
        begun = made.begin(there, settings, rates, opt.param_groups)
        job = executor.job(replace(begun, stored=stored))
        stacks = [
            torch.stack([there.get(block.param, torch.zeros(block.shape)) for block in piece.blocks]) for piece in executor.slices
        ]
        with torch.no_grad():
            directions = executor.update(job, [None] * len(stacks) if reads_gradients else stacks)
            for piece, stack in zip(executor.slices, directions, strict=True):
                for block, direction in zip(piece.blocks, stack, strict=True):
                    assert direction.isnan().all() == direction.isnan().any() == (grads[block.param] is None)
                    others[block.param].sub_(GIVEN["lr"] * direction.nan_to_num())
        made.end(begun)
    assert_close(others, [p.detach().double() for p in params], 2e-7)


@pytest.fixture
def _inexact():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


class Tape(TorchDispatchMode):
    """What a graph would hold of a launch: kernels and operations, with the memory that they read and write."""

    def __init__(self):
        super().__init__()
        self.entries = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)  # the host would wait
        call, infos = partial(func, *args, **(kwargs or {})), [each.alias_info for each in func._schema.returns]
        made = call()
        if not all(info and not info.is_write for info in infos):  # not a view
            self.entries.append((call, () if any(infos) else made))
        return made

    def replay(self):
        for call, before in self.entries:
            now = call()
            for old, new in zip(*(x if isinstance(x, tuple) else (x,) for x in (before, now)), strict=False):
                old.copy_(new)


class Replays:
    """Stands in for graphs: what comes a third time under a key is what was launched the second time, in the same memory."""

    def __init__(self, monkeypatch):
        self.seen, self.tapes, self.count, self.monkeypatch = set(), {}, 0, monkeypatch

    def is_new(self, key):
        return False

    def run(self, key, launch):
        if key in self.tapes:
            self.tapes[key].replay()
            self.count += 1
            return
        if key not in self.seen:
            self.seen.add(key)
            launch()
            return
        tape, run = Tape(), InterpretedFunction.run

        def recorded(*args, **given):
            with _disable_current_modes():
                run(*args, **given)
            tape.entries.append((partial(run, *args, **given), ()))

        self.tapes[key] = tape
        with self.monkeypatch.context() as patch, tape:
            patch.setattr(InterpretedFunction, "run", recorded)
            launch()


@pytest.mark.usefixtures("_inexact")
@pytest.mark.parametrize("options", [*CASES.values(), *(OF_SOAP | options for options in SOAP.values())], ids=[*CASES, *SOAP])
def test_a_launch_does_the_same_when_it_is_replayed(options, monkeypatch):
    """All that changes from step to step is in memory that stays where it is."""
    (params, opt), (others, plain) = ((p, lather.Shampoo(p, **GIVEN | options)) for p in (parameters(FEWER), parameters(FEWER)))
    prepared(opt)
    replays = Replays(monkeypatch)
    for executor in by_kernels(opt):
        executor._graphs = replays
    for step in range(1, 9):
        grads = gradients(step, FEWER)
        grads[1] = None if step == 6 else grads[1]
        for one, its in ((opt, params), (plain, others)):
            one.param_groups[0]["lr"] = 0.05 / step
            take(one, its, grads)
        assert all(map(torch.equal, params, others))
    for (_, state), (_, other) in zip(snapshot(opt), snapshot(plain), strict=True):
        assert all(torch.equal(state[role], other[role]) for role in state)
    assert replays.count > 4


WHOLE_VECTORS = [(24, 8), (24, 8), (16, 24), (16, 8, 3, 3), (5, 9), (9,)]  # the first three are multiplied in halves


@pytest.fixture
def halved(monkeypatch):
    """How many slots are multiplied in halves, call by call."""
    made, found = directions.precondition, []
    monkeypatch.setattr(directions, "precondition", lambda u, *rest: (found.append(len(u)), made(u, *rest))[1])
    return found


@pytest.mark.usefixtures("_inexact")
@pytest.mark.parametrize(
    "options",
    [
        {"factors": "packed"},
        {"graft": None},
        {"graft": None, "beta3": "nesterov", "weight_decay": 0.1, "factors": "packed"},
        {"graft": "constant", "root_dtype": "bfloat16", "factors": "packed"},
        {"graft": "constant", "root_dtype": "bfloat16"},
        {"preconditioner": "kl", "graft": None, "factors": "packed"},
        {"averaging": "gpa", "graft": None},
    ],
    ids=str,
)
def test_directions_in_halves(options, halved):
    """As TF32 does, they agree with the twin to 11 bits. Only the size of what is multiplied differs, and no one notices."""
    params = parameters(WHOLE_VECTORS)
    opt, twin = pair(params, **options)
    for step in range(1, 5):
        grads, before = gradients(step, WHOLE_VECTORS), sum(halved)
        take(opt, params, grads)
        twin.step(grads)
        assert sum(halved) == before + (3 if step > 1 else 0)
    for p, q in zip(params, twin.params, strict=True):
        assert torch.linalg.vector_norm(p.detach() - q) <= 2e-3 * torch.linalg.vector_norm(q)


def test_precision_may_change(halved):
    """What directions in halves were multiplied by is forgotten when they are exact."""
    params = parameters(WHOLE_VECTORS)
    opt, twin = pair(params, graft=None, precondition_frequency=1)
    for step, precision in enumerate(("fast", "float32", "fast"), 1):
        opt.param_groups[0]["precision"] = precision
        grads = gradients(step, WHOLE_VECTORS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lather.compute.kernel_executor.are_products_exact", lambda precision=precision: precision != "fast")
            take(opt, params, grads)
        twin.step(grads)
        for p, q in zip(params, twin.params, strict=True):
            assert torch.linalg.vector_norm(p.detach() - q) <= 2e-3 * torch.linalg.vector_norm(q)
    assert sum(halved) == 6


@pytest.mark.usefixtures("_inexact")
@pytest.mark.parametrize("graft", [None, "adam"])
def test_a_root_that_is_broken_is_found_in_halves(graft):
    params = parameters(WHOLE_VECTORS)
    opt = run(params, 1, 3, WHOLE_VECTORS, graft=graft)
    bank = next(bank for bank in opt._session.run.banks if bank.key.shape == (16, 24))
    bank.state["X1"][0, 3, 5] = torch.nan
    with pytest.warns(lather.NumericalWarning, match="starts anew"):
        take(opt, params, gradients(3, WHOLE_VECTORS))
    assert all(p.isfinite().all() for p in params)


HALVES, ONE = ("highest", 0, 1e-6), ("high", 1e-5, 1e-3)


@pytest.mark.parametrize(("size", "precision", "low", "high"), [(1e-15, *HALVES), (1e15, *HALVES), (1.0, *HALVES), (1e15, *ONE)])
def test_factors(size, precision, low, high):
    """Products of gradients in two halves are as good as float32, in one as TF32; neither depends on the scale."""
    shapes = [(40, 24), (16, 32), (7, 20), (10, 12, 3, 3)]
    params, grads = parameters(shapes), [size * grad for grad in gradients(1, shapes)]
    given = {"max_preconditioner_dim": 64, "precondition_frequency": 9, "betas": (0.9, 0.75)}
    opt = lather.Shampoo(params, **GIVEN | given)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        take(opt, params, grads)
    finally:
        torch.set_float32_matmul_precision(before)
    for bank in opt._session.run.banks:
        for slot, block in enumerate(bank.blocks):
            g = grads[block.param].double().view(bank.key.shape)
            for mode in range(g.dim()):
                unfolded = g.movedim(mode, 0).flatten(1)
                factor, exact = bank.state[f"L{mode}"][slot], unfolded @ unfolded.mT * 0.25
                torch.testing.assert_close(factor, factor.mT, rtol=1e-5, atol=0.1 * high * factor.abs().max().item())
                error = torch.linalg.vector_norm(factor - exact) / torch.linalg.vector_norm(exact)
                assert low <= error <= high

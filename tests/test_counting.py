"""What can be counted: operations and host reads of a step, and how far a reader has to follow it through the package."""

from __future__ import annotations

import math
import pathlib
import sys
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lather
import lather.options
from lather import linalg

HOST_READS = ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default", "aten.item.default")


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counted_steps(n, shape, steps=7, armed=None, watch=None, **options):
    """Operations of each step for n same-shaped parameters; refreshes at multiples of 4. One step may be armed."""
    linalg._positions.cache_clear()  # an index is made once in a process, whatever test comes first
    params = [torch.nn.Parameter(torch.randn(shape)) for _ in range(n)]
    opt = lather.Shampoo(params, **{"precondition_frequency": 4, "refresh_warmup": 0.0} | options)
    if watch:
        watch(opt)
    counts = []
    for t in range(1, steps + 1):
        grads = [torch.randn(shape) for _ in params]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        with Count() as counter:
            if t == armed:
                opt.arm()
            opt.step()
            if t == armed:
                opt.metrics()
        counts.append(counter.ops)
        for p, grad in zip(params, grads, strict=True):
            assert torch.equal(p.grad, grad), "p.grad was written"
    return counts


OPTIONS = [
    {},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "graft": "sgd"},
    {"weight_decay": 0.1, "weight_decay_mode": "l2", "betas": (0.9, 1.0)},
    {"start_preconditioning_step": float("inf")},
    {"large_dim": "diagonal", "max_preconditioner_dim": 20},
    {"refresh": "staggered"},
    {"preconditioner": "kl"},
    {"preconditioner": "soap", "graft": None},
    {"preconditioner": "soap", "large_dim": "diagonal", "max_preconditioner_dim": 20},
    {"averaging": "schedule_free"},
    {"averaging": "gpa", "averaging_beta": 0.2},
    {"preconditioner": "spectral", "graft": None, "polar_scale": "original"},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(24, 16), (8, 6, 3), (40,)])
def test_plain_step_does_not_grow_with_the_number_of_parameters(shape, options):
    few, many = counted_steps(2, shape, **options), counted_steps(12, shape, **options)
    for t in (2, 3, 6, 7) if options.get("refresh") != "staggered" else (2, 3):
        assert sum(many[t - 1].values()) == sum(few[t - 1].values()), many[t - 1] - few[t - 1]


@pytest.mark.parametrize(("options", "views"), [({}, 2), ({"momentum": 0.9}, 3)])
@pytest.mark.parametrize(("limit", "runs"), [(8, 1), (7, 2)])
def test_cut_parameters_cost_a_view_per_tensor_and_run(limit, runs, options, views):
    """24 x 16 cut at 8 is one regular grid of blocks; at 7 the second dimension has pieces of two sizes."""
    few, many = (counted_steps(n, (24, 16), max_preconditioner_dim=limit, **options) for n in (2, 12))
    assert sum(many[5].values()) - sum(few[5].values()) == 10 * runs * views


@pytest.mark.parametrize("options", OPTIONS)
def test_plain_step_reads_nothing_from_the_device(options):
    for t, ops in enumerate(counted_steps(3, (24, 16), **options), start=1):
        if t % 4 and options.get("refresh") != "staggered":
            assert not [name for name in HOST_READS if ops[name]], (t, ops)


def test_lr_tensor_on_the_host_is_no_device_read():
    assert not [n for n in HOST_READS if counted_steps(2, (4, 4), lr=torch.tensor(0.1))[5][n]]


def test_an_lr_tensor_is_checked_when_it_is_new():
    """Not again when another option changes."""
    p = torch.nn.Parameter(torch.randn(4, 4))
    opt = lather.Shampoo([p], lr=torch.tensor(0.1), start_preconditioning_step=math.inf)
    for eps in (1e-3, 1e-4):
        p.grad = torch.randn(4, 4)
        opt.param_groups[0]["eps"] = eps
        with Count() as counter:
            opt.step()
    assert not [name for name in HOST_READS if counter.ops[name]]
    opt.param_groups[0]["lr"] = torch.tensor(-0.1)
    with pytest.raises(ValueError, match=r"lr=.*is not valid"):
        opt.step()


def test_the_count_sees_host_reads():
    with Count() as counter:
        torch.ones(1).item()
    assert counter.ops["aten._local_scalar_dense.default"] == 1


SOAP = {"preconditioner": "soap", "graft": None}
ROOTS = [{"root": "newton"}, {"root": "higher_order"}, {"root": "track"}, {"root": "eigh"}]
ROOTS += [SOAP | {"root": root} for root in ("eigh", "track")]


@pytest.mark.parametrize("options", ROOTS)
def test_refresh_does_not_grow_with_the_number_of_parameters(options):
    few, many = counted_steps(2, (24, 16), **options), counted_steps(12, (24, 16), **options)
    assert sum(many[3].values()) == sum(few[3].values())


def test_soap_by_track_reads_nothing_even_when_it_refreshes():
    """A CPU looks once whether a solver failed."""
    ops = counted_steps(3, (24, 16), root="track", **SOAP)[3]
    assert sum(ops[name] for name in HOST_READS) == 2  # sizes 24 and 16


# Metrics.

WATCHED = [{}, SOAP, {"preconditioner": "kl", "refresh": "staggered"}, {"averaging": "schedule_free"}]


@pytest.mark.parametrize("options", WATCHED)
def test_metrics_read_nothing(options):
    plain, armed = counted_steps(3, (24, 16), **options), counted_steps(3, (24, 16), armed=6, **options)
    assert sum(armed[5].values()) > sum(plain[5].values())
    assert not [name for name in HOST_READS if armed[5][name] > plain[5][name]]


@pytest.mark.parametrize("options", WATCHED)
def test_an_armed_step_does_not_grow_with_the_number_of_parameters(options):
    few, many = (counted_steps(n, (24, 16), armed=3, **options)[2] for n in (2, 12))
    assert not (many - few).keys() - {"aten.view.default", "aten.slice.Tensor"}  # views of the gradients that are read


@pytest.mark.parametrize("options", WATCHED)
def test_a_monitor_costs_nothing_in_other_steps(options):
    plain = counted_steps(3, (24, 16), **options)
    watched = counted_steps(3, (24, 16), watch=lambda opt: lather.Monitor(opt, every=5, to=lambda record: None), **options)
    assert [one != other for one, other in zip(watched, plain, strict=True)] == [t in (1, 4) for t in range(1, 8)]


# The way of a step through the package.

ROOT = pathlib.Path(lather.__file__).parent
WALKED = {
    "lr": 1e-3,
    "betas": (0.95, 0.95),
    "beta3": "nesterov",
    "eps": 1e-4,
    "damping": "relative",
    "weight_decay": 0.1,
    "weight_decay_mode": "decoupled",
    "momentum": 0.0,
    "dampening": 0.0,
    "nesterov": False,
    "averaging": None,
    "averaging_beta": None,
    "averaging_decay": None,
    "averaging_powers": (2.0, 0.0),
    "maximize": False,
    "bias_correction": True,
    "preconditioner": "shampoo",
    "exponent": "auto",
    "exponent_multiplier": 1.0,
    "root": "auto",
    "polar": "newton_schulz",
    "polar_scale": None,
    "graft": "auto",
    "graft_beta2": None,
    "graft_eps": 1e-8,
    "max_preconditioner_dim": 1024,
    "block_multiple": 16,
    "merge_dims": True,
    "large_dim": "block",
    "batch_dims": 0,
    "split": None,
    "split_dim": 0,
    "precondition_1d": False,
    "precondition_frequency": 10,
    "start_preconditioning_step": None,
    "refresh_warmup": 0.1,
    "refresh": "together",
    "refresh_delay": 0,
    "root_device": None,
    "on_nonfinite": "skip",
    "max_failed_refreshes": 3,
    "communication_dtype": None,
    "blocks": "global",
    "precision": None,
    "master_weights": False,
    "state_dtype": "float32",
    "root_dtype": None,
    "filter_dtype": None,
    "factors": "auto",
}


def walked_step(opt):
    """``(file, function)`` of every call inside the package. Comprehensions, lambdas and ``linalg`` are not counted."""
    calls = []

    def see(frame, event, _):
        code = frame.f_code
        path = pathlib.Path(code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and not code.co_name.startswith("<") and path.stem != "linalg":
            calls.append((str(path.relative_to(ROOT)), getattr(code, "co_qualname", (code.co_name, code.co_firstlineno))))

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        opt.step()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize(
    ("step", "most"),
    [
        pytest.param(21, {"calls": 200, "files": 14, "changes of file": 110, "functions": 65}, id="plain"),
        pytest.param(20, {"calls": 400, "files": 18, "changes of file": 200}, id="refresh"),
    ],
)
def test_a_step_is_short_to_read(step, most):
    """Five tensors, one process, CPU, every option given. These are the limits of the design.

    With the default warm-up, the first step without a refresh is step 21.
    """
    assert WALKED.keys() == lather.options.OPTIONS.keys(), "give the new option here too"
    usual = {name: option.default for name, option in lather.options.OPTIONS.items()}
    assert {name for name in WALKED if WALKED[name] != usual[name]} == {"eps", "weight_decay"}
    nn = torch.nn
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = lather.Shampoo(model.parameters(), **WALKED)
    for t in range(1, step + 1):
        opt.zero_grad()
        model(torch.randint(0, 50, (8,))).square().mean().backward()
        if t < step:
            opt.step()
    before = [state["X0.0"].clone() for state in opt.state.values() if "X0.0" in state]
    calls = walked_step(opt)
    after = [state["X0.0"] for state in opt.state.values() if "X0.0" in state]
    assert all(torch.equal(*pair) == (step == 21) for pair in zip(before, after, strict=True))
    changes = sum(one[0] != other[0] for one, other in pairwise(calls))
    found = {"calls": len(calls), "files": len({file for file, _ in calls}), "changes of file": changes}
    found["functions"] = len(set(calls))
    assert calls and all(found[what] <= limit for what, limit in most.items()), found

"""What can be counted: operations dispatched per step, host reads, and what is left alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lather

HOST_READS = ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default", "aten.item.default")


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counted_steps(n, shape, steps=7, **options):
    """Operations of each step for n same-shaped parameters; refreshes at multiples of 4."""
    params = [torch.nn.Parameter(torch.randn(shape)) for _ in range(n)]
    opt = lather.Shampoo(params, precondition_frequency=4, **options)
    counts = []
    for _ in range(steps):
        grads = [torch.randn(shape) for _ in params]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        with Count() as counter:
            opt.step()
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


def test_the_count_sees_host_reads():
    with Count() as counter:
        torch.ones(1).item()
    assert counter.ops["aten._local_scalar_dense.default"] == 1


SOAP = {"preconditioner": "soap", "graft": None}
ROOTS = [{"root": "newton"}, {"root": "higher_order"}, {"root": "qr"}, {"root": "eigh"}]
ROOTS += [SOAP | {"root": root} for root in ("eigh", "qr", "track")]


@pytest.mark.parametrize("options", ROOTS)
def test_refresh_does_not_grow_with_the_number_of_parameters(options):
    few, many = counted_steps(2, (24, 16), **options), counted_steps(12, (24, 16), **options)
    assert sum(many[3].values()) == sum(few[3].values())


def test_soap_by_track_reads_nothing_even_when_it_refreshes():
    """Nor on a CPU, where what failed is asked for: but for that one look."""
    ops = counted_steps(3, (24, 16), root="track", **SOAP)[3]
    assert {name: ops[name] for name in HOST_READS if ops[name]} == {"aten.nonzero.default": 2}  # sizes 24 and 16

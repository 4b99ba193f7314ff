"""`root="auto"` is a rule of device and exponent: the same on paper, in the optimizer and in every step."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lather
from lather import kernels
from lather.options import OPTIONS
from lather.planning.plan import Spec, make_plan
from lather.roots import Eigh, Minimax, Newton, choose, resolve
from lather.settings import resolve as settle

SHAPES = {"a": (40, 36), "b": (40, 36), "conv": (16, 8, 5), "bias": (9,)}
PRODUCTS = (1 / 2, 1 / 4, 1 / 6, 3 / 8, 1.0)  # exponents that iterations of products can do
OTHERS = (1.82 / 4, 0.3333, 9 / 32, 1 / 64)
# What is known of a GPU, and the solver for it. One without a capability is not in use.
GPUS = [
    ({}, Minimax()),
    ({"capability": (8, 0)}, Minimax()),
    ({"capability": (9, 0)}, Minimax()),
    ({"capability": (7, 5)}, Newton()),
    ({"capability": (9, 0), "triton": False}, Newton()),
    ({"capability": (9, 0), "hip": "6.2"}, Newton()),
    ({"triton": False}, Minimax()),
]


@pytest.fixture
def gpu(request, monkeypatch):
    """As if there were such a GPU."""
    capability = request.param.get("capability")
    monkeypatch.setattr(kernels, "_has_triton", lambda: request.param.get("triton", True))
    monkeypatch.setattr(torch.version, "hip", request.param.get("hip"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


# --- the rule


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu", "meta"])
@pytest.mark.parametrize("e", [*PRODUCTS, *OTHERS])
def test_eigh_where_there_is_no_cuda(device, e):
    assert choose(device, e) == Eigh()


@pytest.mark.parametrize(("gpu", "solver"), GPUS, indirect=["gpu"], ids=str)
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0)], ids=repr)
def test_products_on_cuda_for_the_exponents_that_they_can_do(gpu, solver, device):
    assert all(choose(device, e) == solver for e in PRODUCTS)
    assert all(choose(device, e) == Eigh() for e in OTHERS)


@pytest.mark.parametrize("e", [*PRODUCTS, *OTHERS])
@pytest.mark.parametrize(("gpu", "solver"), GPUS, indirect=["gpu"], ids=str)
def test_the_choice_can_do_the_exponent_and_keeps_no_state(gpu, solver, e):
    """So that checkpoints do not depend on it."""
    for device in ("cpu", "cuda"):
        chosen = choose(device, e)
        chosen.check(e)
        assert chosen.init(1, 4, torch.float32, "cpu") == {}


def test_only_auto_goes_by_the_rule():
    for device in ("cpu", "cuda"):
        assert resolve("auto", device, 1 / 4) == choose(device, 1 / 4)
        assert resolve("newton(iterations=30)", device, 0.455) == Newton(iterations=30)
        assert resolve(Newton(), device, 1 / 4) == Newton()


# --- plans


def solvers_of(report):
    return [(row.shape, row.modes, row.solvers) for row in report.banks]


@pytest.mark.parametrize(("gpu", "solver"), GPUS, indirect=["gpu"], ids=str)
@pytest.mark.parametrize("root", ["auto", "newton"])
def test_the_plan_on_paper_and_that_of_the_optimizer_agree(gpu, solver, root):
    """The tensors are fake, so this needs no GPU."""
    with FakeTensorMode():
        params = [(name, torch.nn.Parameter(torch.empty(s, device="cuda"))) for name, s in SHAPES.items()]
        opt = lather.Shampoo(params, root=root)
    paper = lather.plan(SHAPES, device="cuda", root=root)
    assert solvers_of(opt.plan()) == solvers_of(paper)
    assert {name for row in paper.banks for name in row.solvers} == {solver.name if root == "auto" else root}


def offsets(root, device):
    options = {name: option.default for name, option in OPTIONS.items()}
    settings = settle(options | {"refresh": "staggered", "precondition_frequency": 2, "root": root})
    specs = [Spec(f"p{i}", (d, d), 0, device) for i, d in enumerate((64, 48, 48, 48))]
    return list(make_plan(specs, [settings]).offsets(0, settings).values())


def test_staggered_refreshes_go_by_operations():
    assert offsets("auto", "cpu") == [1, 0, 0, 0]  # the first has more work than two of the others
    assert all(offsets("auto", device) == offsets(choose(device, 1 / 2), device) for device in ("cpu", "cuda"))


# --- training


def train(**options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES.values()]
    opt = lather.Shampoo(params, precondition_frequency=2, eps=1e-3, **options)
    for _ in range(5):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()
    return opt, params


@pytest.mark.parametrize("refresh", ["together", "staggered"])
@pytest.mark.parametrize("kind", ["shampoo", "kl", "soap"])
def test_training_is_that_of_the_solver_by_name(refresh, kind):
    (auto, ours), (_, theirs) = (train(root=r, refresh=refresh, preconditioner=kind) for r in ("auto", "eigh"))
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert auto.param_groups[0]["root"] == "auto" == auto.state_dict()["param_groups"][0]["root"]


def test_the_choice_is_what_computes_roots(monkeypatch):
    """In the plan and in every step, for each block by its exponent."""
    used, solve = set(), lather.roots.solve
    monkeypatch.setattr(lather.roots, "solve", lambda solver, *args: used.add(solver.name) or solve(solver, *args))
    monkeypatch.setattr(lather.roots.spec, "choose", lambda device, e: Minimax() if e == 1 / 4 else Newton())
    opt, _ = train(merge_dims=False, exponent="paper")
    rows = {len(row.shape): set(row.solvers) for row in opt.plan().banks}
    assert rows == {2: {"minimax"}, 3: {"newton"}, 1: set()} and used == {"minimax", "newton"}

"""On a GPU: what makes a step slow, counted instead of timed, and that what makes it fast changes nothing.

python -m pytest tests/gpu/test_speed.py
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from paper import PAPER, TODAY

import lather
from lather.compute import refresh, slices
from lather.compute.kernel_executor import KernelExecutor
from lather.kernels import has_kernels
from lather.runtime import unit_plan

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or not has_kernels(torch.device("cuda")), reason="needs a GPU that kernels are made for"
    ),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

PERIOD = 4
SHAPES = [(64, 48), (64, 48), (48, 48), (40, 70), (16, 8, 3, 3), (33,), ()]
GIVEN = PAPER | {"lr": 0.05, "eps": 1e-3, "max_preconditioner_dim": 64, "precondition_frequency": PERIOD}
WARM, WARM_TODAY = 4 * PERIOD, 28 * PERIOD  # steps; refreshes warm up until step 40, of a parameter that sits out steps until 80


def parameters(shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).cuda()) for shape in shapes]


def gradients(step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).cuda() for shape in shapes]


def make(shapes=SHAPES, **options):
    params = parameters(shapes)
    return lather.Shampoo(params, **GIVEN | options), params


def take(opt, params, grads):
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    opt.step()


def run(opt, params, first, last):
    shapes = [p.shape for p in params]
    for step in range(first, last):
        take(opt, params, gradients(step, shapes))


def by_kernels(opt):
    executors = (executor for unit in opt._session.run.units for executor in unit.executors)
    return [executor for executor in executors if isinstance(executor, KernelExecutor)]


def graphs_of(opt):
    """All that is captured, of all units."""
    found = {id(each._graphs): each._graphs for each in by_kernels(opt) if each._graphs is not None}
    return [key for graphs in found.values() for key in graphs._graphs]


def compiled():
    """Variants of our kernels that Triton has compiled, by kernel. Its cache in memory is by device; the first entry of what
    it keeps for one is what it has compiled."""
    from triton.runtime.jit import JITFunction

    from lather.kernels import dense, step

    both = vars(dense) | vars(step)
    found = {name: kernel for name, kernel in both.items() if isinstance(kernel, JITFunction)}
    return Counter({name: sum(len(kept[0]) for kept in kernel.device_caches.values()) for name, kernel in found.items()})


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_equal(params, others):
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)


# Nothing is compiled or captured once warm.


def some_missing(step, shapes=SHAPES):
    """No gradient for the second parameter in two steps of every period."""
    return [None if i == 1 and step % PERIOD < 2 else grad for i, grad in enumerate(gradients(step, shapes))]


@pytest.mark.parametrize(("options", "warm"), [({}, WARM), (TODAY, WARM_TODAY)], ids=["first defaults", "today"])
@pytest.mark.parametrize("given", [gradients, some_missing])
@pytest.mark.parametrize("refresh", ["together", "staggered"])
def test_nothing_is_compiled_or_captured_once_warm(given, refresh, options, warm):
    import torch._dynamo

    opt, params = make(**options, refresh=refresh, momentum=0.9, weight_decay=0.1)
    for step in range(1, warm + 1):
        take(opt, params, given(step))
    kernels, graphs, programs = compiled(), graphs_of(opt), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert sum(kernels.values()) > 0 and graphs
    for step in range(warm + 1, warm + 4 * PERIOD + 1):
        x = 1 / step
        changed = {"lr": 0.05 * x, "betas": (0.9 + 0.01 * x, 0.99 + 0.001 * x), "eps": 1e-3 * (1 + x), "weight_decay": x}
        opt.param_groups[0].update(changed | {"graft_eps": 1e-8 * x, "momentum": 0.9 - 0.1 * x, "dampening": 0.1 * x})
        take(opt, params, given(step))
    assert compiled() == kernels
    assert graphs_of(opt) == graphs
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == programs


def test_a_learning_rate_on_the_device_is_no_reason_to_compile():
    lr = torch.tensor(0.05, device="cuda")
    opt, params = make(lr=lr)
    run(opt, params, 1, 3 * PERIOD + 1)
    kernels, graphs = compiled(), graphs_of(opt)
    for step in range(3 * PERIOD + 1, 5 * PERIOD + 1):
        lr.mul_(0.9)
        take(opt, params, gradients(step))
    assert compiled() == kernels and graphs_of(opt) == graphs


# The host does not wait.


@pytest.mark.parametrize(
    "options",
    [{}, {"refresh": "staggered"}, {"momentum": 0.9, "betas": (0.0, 1.0)}, {"large_dim": "diagonal"}, TODAY],
    ids=["together", "staggered", "momentum", "diagonal", "today"],
)
@pytest.mark.parametrize("given", [gradients, some_missing])
def test_periods_with_refreshes_do_not_synchronise(options, given):
    opt, params = make(**options)
    warm = WARM_TODAY if options is TODAY else WARM
    for step in range(1, warm + 1):
        take(opt, params, given(step))
    grads = {step: given(step) for step in range(warm + 1, warm + 2 * PERIOD + 1)}
    with no_waiting():
        for mine in grads.values():
            take(opt, params, mine)
    assert opt.state[params[0]]["step"] == warm + 2 * PERIOD and all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("refresh", ["together", "staggered"])
def test_large_factors_do_not_synchronise(refresh):
    opt, params = make([(512, 256), (512, 256), (256, 512)], max_preconditioner_dim=512, refresh=refresh)
    run(opt, params, 1, 4 * PERIOD + 1)
    grads = [gradients(step, [p.shape for p in params]) for step in range(4 * PERIOD + 1, 6 * PERIOD + 1)]
    with no_waiting():
        for mine in grads:
            take(opt, params, mine)
    assert opt.state[params[0]]["step"] == 6 * PERIOD and all(p.isfinite().all() for p in params)


# Launches.


def launches(n, graphs, monkeypatch, vectors=0, warm=2 * PERIOD, **options):
    """What the host launches in a plain step for n matrices of one shape, and what the device then runs. Vectors have a param
    group of their own, as ``lather.route`` makes it."""
    with monkeypatch.context() as patch:
        if not graphs:
            patch.setattr(unit_plan, "FEW", 0)
        params = parameters([(64, 48)] * n + [(33,)] * vectors)
        groups = [{"params": some} for some in (params[:n], params[n:]) if some]
        opt = lather.Shampoo(groups, **GIVEN | options)
        run(opt, params, 1, warm + 2)  # the next step is not a multiple of the period
        grads = gradients(0, [p.shape for p in params])
        torch.cuda.synchronize()
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            take(opt, params, grads)
            torch.cuda.synchronize()
    events = profile.events()
    host = Counter(e.name for e in events if e.name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy")))
    device = Counter(e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA)
    return host, device


MUON = {"preconditioner": "spectral", "graft": None, "damping": "relative", "beta3": "nesterov"}


@pytest.mark.filterwarnings("ignore")  # of the profiler
@pytest.mark.parametrize("options", [{}, MUON], ids=["shampoo", "muon"])
@pytest.mark.parametrize("graphs", [True, False])
def test_launches_do_not_grow_with_the_number_of_matrices(graphs, options, monkeypatch):
    launches(4, graphs, monkeypatch, **options)  # compiles, and warms up the profiler
    (few, few_run), (many, many_run) = (launches(n, graphs, monkeypatch, **options) for n in (4, 40))
    more = 0 if graphs else 2  # a library may take another way for larger stacks
    assert sum(few.values()) > 0 and sum(many.values()) <= sum(few.values()) + more, many - few
    assert sum(few_run.values()) > 0 and sum(many_run.values()) <= sum(few_run.values()) + 2, many_run - few_run
    assert (few["cudaGraphLaunch"] > 0) == graphs


@pytest.mark.filterwarnings("ignore")  # of the profiler
@pytest.mark.parametrize("vectors", [0, 3])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_plain_step_of_today_launches_what_one_without_nesterov_does(graphs, vectors, monkeypatch):
    given = {"vectors": vectors, "warm": WARM_TODAY, **TODAY}
    launches(4, graphs, monkeypatch, **given)  # compiles, and warms up the profiler
    (host, device), (plain_host, plain_device) = (
        launches(4, graphs, monkeypatch, **given | {"beta3": beta3}) for beta3 in ("nesterov", None)
    )
    assert sum(plain_host.values()) > 0 and sum(host.values()) <= sum(plain_host.values()) + 1, host - plain_host
    assert sum(plain_device.values()) > 0 and sum(device.values()) <= sum(plain_device.values()) + 1, device - plain_device
    assert (host["cudaGraphLaunch"] > 0) == graphs


@pytest.mark.parametrize("beta3", ["nesterov", None, 0.5])
def test_a_plain_step_of_today_does_not_synchronise(beta3):
    opt, params = make(**TODAY | {"beta3": beta3})
    run(opt, params, 1, WARM_TODAY + 1)
    roots = [{k: v.clone() for k, v in opt.state[p].items() if k.startswith("X")} for p in params]
    rows = [gradients(step) for step in range(WARM_TODAY + 1, WARM_TODAY + PERIOD)]
    with no_waiting():
        for row in rows:
            take(opt, params, row)
    same = [torch.equal(opt.state[p][k], v) for p, mine in zip(params, roots, strict=True) for k, v in mine.items()]
    assert same and all(same)  # no refresh
    assert by_kernels(opt) and all(p.isfinite().all() for p in params)


# Replaying and fusing change nothing.

KINDS = [
    {},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"betas": (0.0, 1.0), "graft": "sgd"},
    {"refresh": "staggered", "root": "minimax"},
    {"large_dim": "diagonal", "max_preconditioner_dim": 48},
    TODAY,
    TODAY | {"momentum": 0.9, "weight_decay": 0.1, "refresh": "staggered"},
]


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("given", [gradients, some_missing])
def test_graphs_give_the_same_bits(options, given, monkeypatch):
    def train():
        opt, params = make(**options)
        for step in range(1, 12 * PERIOD):  # refreshes of today warm up until step 40
            take(opt, params, given(step))
        return opt, params

    opt, params = train()
    monkeypatch.setattr(unit_plan, "FEW", 0)
    eager, others = train()
    assert graphs_of(opt) and not graphs_of(eager)
    assert_equal(params, others)


@pytest.mark.parametrize("options", KINDS)
def test_kernels_are_as_good_as_torch(options, monkeypatch):
    def train():
        opt, params = make(**options | {"root": "eigh"})
        run(opt, params, 1, 4 * PERIOD)
        return opt, params

    opt, params = train()
    monkeypatch.setattr(slices, "suits", lambda *_: False)
    plain, others = train()
    assert by_kernels(opt) and not by_kernels(plain)
    tolerance = 5e-5 if options.get("refresh_warmup") else 1e-5  # roots of the first few gradients amplify what is rounded
    for p, q in zip(params, others, strict=True):
        assert torch.linalg.vector_norm(p - q) <= tolerance * torch.linalg.vector_norm(q)


def test_resume_is_bitwise_with_graphs():
    """From a checkpoint in the middle of a period, by an optimizer that has captured nothing yet."""
    opt, params = make(momentum=0.9, root="minimax")
    run(opt, params, 1, 3 * PERIOD + 3)
    assert graphs_of(opt)
    saved, weights = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in params]
    run(opt, params, 3 * PERIOD + 3, 6 * PERIOD)
    fresh, others = make(momentum=0.9, root="minimax")
    with torch.no_grad():
        for p, w in zip(others, weights, strict=True):
            p.copy_(w)
    fresh.load_state_dict(saved)
    run(fresh, others, 3 * PERIOD + 3, 6 * PERIOD)
    assert_equal(params, others)


def test_loading_into_an_optimizer_that_has_graphs():
    opt, params = make(momentum=0.9, root="minimax")
    run(opt, params, 1, 3 * PERIOD + 3)
    saved, weights = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in params]
    run(opt, params, 3 * PERIOD + 3, 6 * PERIOD)
    end = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p, w in zip(params, weights, strict=True):
            p.copy_(w)
    opt.load_state_dict(saved)
    run(opt, params, 3 * PERIOD + 3, 6 * PERIOD)
    assert_equal(params, end)


# Memory.


def peak_of_refresh(n, monkeypatch):
    """Memory that a step with a refresh takes beyond what is there anyhow."""
    with monkeypatch.context() as patch:
        patch.setattr(slices, "LARGEST", 4 * 256 * 256)
        patch.setattr(refresh, "LARGEST", 8 * 256 * 256)
        opt, params = make([(256, 256)] * n, max_preconditioner_dim=256, root="minimax")
        run(opt, params, 1, PERIOD)  # the first refresh is next, and runs without a graph
        grads = gradients(PERIOD, [p.shape for p in params])
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        opt.step()
        return torch.cuda.max_memory_allocated() - before


def test_memory_of_a_refresh_does_not_grow_with_the_number_of_blocks(monkeypatch):
    peak_of_refresh(8, monkeypatch)
    few, many = peak_of_refresh(8, monkeypatch), peak_of_refresh(40, monkeypatch)
    assert 0 < many <= 1.1 * few + (1 << 20)


def test_memory_of_graphs_is_bounded(monkeypatch):
    """Once everything is captured, nothing more is held."""
    monkeypatch.setattr(slices, "LARGEST", 4 * 256 * 256)
    monkeypatch.setattr(refresh, "LARGEST", 8 * 256 * 256)
    opt, params = make([(256, 256)] * 16, max_preconditioner_dim=256, root="minimax")
    run(opt, params, 1, 4 * PERIOD)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    run(opt, params, 4 * PERIOD, 8 * PERIOD)
    assert graphs_of(opt) and torch.cuda.memory_reserved() <= before + (8 << 20)


# Whatever streams and memory are used.


def test_two_optimizers_on_two_streams():
    expected = []
    for seed in (0, 100):
        opt, params = make(root="minimax")
        run(opt, params, 1 + seed, 4 * PERIOD + seed)
        expected.append([p.detach().clone() for p in params])
    pairs = [make(root="minimax"), make(root="minimax")]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    grads = [[gradients(step + seed) for step in range(1, 4 * PERIOD)] for seed in (0, 100)]
    torch.cuda.synchronize()
    for stream in streams:  # the host runs ahead, so that both have work at the same time
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1 << 30)
    for i in range(4 * PERIOD - 1):
        for (opt, params), stream, mine in zip(pairs, streams, grads, strict=True):
            with torch.cuda.stream(stream):
                take(opt, params, mine[i])
    torch.cuda.synchronize()
    for (_, params), others in zip(pairs, expected, strict=True):
        assert_equal(params, others)


def test_gradients_may_move_and_so_may_parameters():
    """Gradients lie elsewhere on every step, in any stride; parameters get new storage now and then."""
    opt, params = make(momentum=0.9, root="minimax")
    moved, others = make(momentum=0.9, root="minimax")
    run(opt, params, 1, 6 * PERIOD)
    held, addresses = [], set()
    for step in range(1, 6 * PERIOD):
        grads = gradients(step)
        grads[0] = torch.cat([torch.zeros(step, device="cuda"), grads[0].flatten()])[step:].view(SHAPES[0])
        grads[4] = grads[4].to(memory_format=torch.channels_last)
        held.append(grads)  # so that nothing is allocated in the same place again
        addresses.add(grads[2].data_ptr())
        if step % 5 == 0:
            for p in others:
                held.append(p.data)
                p.data = p.data.clone()
        take(moved, others, grads)
    assert len(addresses) == 6 * PERIOD - 1 and graphs_of(moved)
    assert_equal(params, others)


@pytest.mark.parametrize("offset", [4, 1])
def test_parameters_that_are_views_of_one_buffer(offset):
    """As of a flattened model: they need not begin where whole vectors do."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    flat = torch.zeros(offset + sum(sizes), device="cuda")
    opt, params = make(momentum=0.9, root="newton")
    views = []
    for p, piece in zip(params, flat[offset:].split(sizes), strict=True):
        views.append(torch.nn.Parameter(piece.view(p.shape)))
        views[-1].data.copy_(p.detach())
    other = lather.Shampoo(views, **GIVEN | {"momentum": 0.9, "root": "newton"})
    run(opt, params, 1, 2 * PERIOD + 2)
    run(other, views, 1, 2 * PERIOD + 2)
    torch.cuda.synchronize()
    for p, q in zip(params, views, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)

"""The exchange on NCCL. One device makes a world of one, so its blocks are made to travel to itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from paper import PAPER, TODAY

import lather
from lather.planning.plan import Spec, Transport
from lather.runtime.ranks import Comm, Peers, difference, is_trouble
from lather.runtime.unit_plan import make_units
from lather.settings import Settings

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs a CUDA device and NCCL"
)
SHAPES = [(40, 24), (40, 24), (7, 130), (16, 3, 3, 3), (33,), ()]


@pytest.fixture(autouse=True)
def _world(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(transport: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
    with monkeypatch.context() as patch:
        if transport:
            patch.setattr("lather.planning.plan._transport", transport)
            patch.setattr("lather.runtime.run.make_units", _checked)
            patch.setattr("lather.planning.messages._is_uneven", lambda *_: transport is in_two_hops)
            patch.setattr("lather.planning.messages.ROUND", 1 << 10)
        # Roots in halves would make of a last bit what rounds to another number on the wire.
        usual = PAPER | {"precondition_frequency": 4, "max_preconditioner_dim": 32, "momentum": 0.9, "root": "newton"}
        opt = lather.Shampoo(params, **usual | options)
        for _ in range(10):
            for p in params:
                p.grad = torch.randn_like(p)
            opt.step()
    return [p.detach() for p in params]


def _checked(*args: Any) -> Any:
    """Make sure that everything travels."""
    units = make_units(*args)
    assert all(unit.outbound for unit in units)
    return units


def gathered(spec: Spec, settings: Settings) -> Transport:
    return Transport(spec.team, outbound=settings.wire_dtype, gather=True, device=spec.device)


def in_two_hops(spec: Spec, settings: Settings) -> Transport:
    """With ``train``, which makes the plan believe that owners have unequal amounts to send."""
    return gathered(spec, settings)


def swapped(spec: Spec, settings: Settings) -> Transport:
    return Transport(spec.team, "float32", settings.wire_dtype, device=spec.device)


@pytest.mark.parametrize("wire", [None, "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("transport", [gathered, in_two_hops, swapped])
@pytest.mark.parametrize("stages", [1, 3])
def test_travelling_changes_nothing(transport, wire, stages, monkeypatch):
    options = {"communication_dtype": wire, "weight_decay": 0.1, "stages": stages}
    there = train(transport, monkeypatch, **options)
    here = train(None, monkeypatch, **options)
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("transport", [gathered, in_two_hops, swapped])
@pytest.mark.parametrize("stages", [1, 3])
def test_travelling_changes_nothing_by_default(transport, stages, monkeypatch):
    """Not rounded: early roots of exponent 1/2 make of a last bit what can round to another bfloat16."""
    there = train(transport, monkeypatch, stages=stages, **TODAY)
    here = train(None, monkeypatch, stages=stages, **TODAY)
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def take(opt, params, may_wait):
    """A step, which is an error if the host waits for the device and may not."""
    for p in params:
        p.grad = torch.randn_like(p)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("default" if may_wait else "error")
    try:
        opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_does_not_make_the_host_wait(monkeypatch):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
    monkeypatch.setattr("lather.planning.plan._transport", swapped)
    usual = PAPER | {"precondition_frequency": 100, "max_preconditioner_dim": 32}
    opt = lather.Shampoo(params, **usual, communication_dtype="int8")
    for step in range(6):
        take(opt, params, may_wait=step < 3)
    assert all(unit.inbound and unit.outbound for unit in opt._session.run.units)
    assert all(p.isfinite().all() for p in params)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_directions_travel_while_the_next_stage_is_computed(monkeypatch, tmp_path):
    """In a trace: what NCCL copies runs beside kernels. NCCL's stream is the one that has no kernels."""
    monkeypatch.setattr("lather.planning.plan._transport", gathered)
    params = [torch.nn.Parameter(torch.randn(4096, 1024, device="cuda")) for _ in range(16)]
    opt = lather.Shampoo(params, stages=4, precondition_frequency=100, refresh_warmup=0.0)
    for _ in range(4):
        take(opt, params, may_wait=True)
    for p in params:
        p.grad = torch.randn_like(p)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        torch.cuda._sleep(1 << 28)  # so that the host, which is slower here than the device, has launched the step before it runs
        opt.step()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels, copies = ([e for e in events if e.get("cat") == kind] for kind in ("kernel", "gpu_memcpy"))
    busy = {e["args"]["stream"] for e in kernels}
    travelling = [e for e in copies if e["args"]["stream"] not in busy and e["args"]["bytes"] >= 1 << 22]
    beside = [e for e in travelling if any(k["ts"] < e["ts"] + e["dur"] and e["ts"] < k["ts"] + k["dur"] for k in kernels)]
    assert len(travelling) == 4 and len(beside) >= 3


def test_small_things():
    comm = Comm((0,), torch.device("cuda", 0))
    assert comm.largest([3, -1]) == [3, -1]
    assert comm.collect({"a": 1}) == [{"a": 1}]
    assert difference(comm, {(0,): {"a": "b"}}) is None
    peers = Peers([comm], (0,))
    assert peers.any(True) and not peers.any(False)
    assert peers.tell("a word") == "a word" and peers.tell(None) is None
    assert not is_trouble(peers.vote([5], None, False).tolist())
    assert is_trouble(peers.vote([5], torch.tensor(True, device="cuda"), False).tolist())
    assert peers.vote([5], None, True).tolist() == [5, -5, 0, 1]
    comm.check_alive()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_votes_do_not_make_the_host_wait(monkeypatch):
    """One rank votes with itself. Twelve steps, because the tenth looks at failures."""
    peers = Peers([Comm((0,), torch.device("cuda", 0))], (0,))
    monkeypatch.setattr("lather.runtime.agreement.find_peers", lambda *_: peers)
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
    opt = lather.Shampoo(params, **PAPER | {"precondition_frequency": 100, "max_preconditioner_dim": 32})
    votes, reduce = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda x, **options: (votes.append(x.numel()), reduce(x, **options))[1])
    for step in range(12):
        votes.clear()
        take(opt, params, may_wait=step < 3)
        assert step == 0 or votes == [4]
    assert opt._session._agreement._answer is not None


def test_sharded_parameters(monkeypatch):
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cuda", (1,))
    torch.manual_seed(0)
    plain = torch.nn.Parameter(torch.randn(40, 24, device="cuda"))
    sharded = torch.nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
    opts = [lather.Shampoo([p], precondition_frequency=4, momentum=0.9) for p in (plain, sharded)]
    for _ in range(6):
        grad = torch.randn(40, 24, device="cuda")
        plain.grad, sharded.grad = grad, distribute_tensor(grad, mesh, [Shard(0)])
        for opt in opts:
            opt.step()
    assert torch.equal(plain, sharded.full_tensor())

"""Kernels where gradients or directions travel between ranks."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from distributed.harness import Pool
from reference import Reference
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import lather
from conftest import interpret
from lather.compute import slices
from lather.compute.kernel_executor import KernelExecutor
from lather.linalg import from_host
from lather.runtime.run import in_turn
from lather.runtime.unit import Unit
from lather.storage import copies
from lather.storage.copies import KernelCopies
from lather.storage.tensors import local

SHAPES = [*8 * [(8, 16)], (12, 4, 3, 3), (9,)]
GIVEN = {"lr": 0.05, "eps": 0.3, "max_preconditioner_dim": 16, "precondition_frequency": 2, "weight_decay": 0.1}
STEPS, RANKS = 3, 2


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(sharded, method):
    """Whole parameters after some steps, of plain tensors or of DTensors."""
    interpret(setattr)
    slices.LARGEST = 150  # so that banks are divided
    mesh = init_device_mesh("cpu", (RANKS,)) if sharded else None
    stored = (lambda x: distribute_tensor(x, mesh, [Shard(0)])) if sharded else (lambda x: x)
    params = [torch.nn.Parameter(stored(x)) for x in drawn(0)]
    opt = lather.Shampoo(params, preconditioner=method, **GIVEN)
    for step in range(1, 1 + STEPS):
        for p, grad in zip(params, drawn(step), strict=True):
            p.grad = None if step == 2 and grad.dim() == 1 else stored(grad)
        versions = [local(p)._version for p in params]
        with np.errstate(all="ignore"):
            opt.step()
        assert all(local(p)._version > before for p, before in zip(params, versions, strict=True)), "autograd is not told"
    (unit,) = [unit for unit in opt._session.run.units if unit.executors]
    assert all(isinstance(executor, KernelExecutor) for executor in unit.executors)
    assert bool(unit.inbound) == sharded and unit.outbound
    assert any(part.n < len(part.bank.blocks) for executor in unit.executors for part in executor.slices)
    return [p.full_tensor() if sharded else p.detach() for p in params]


@pytest.fixture(scope="module")
def pool():
    pool = Pool(RANKS)
    yield pool
    pool.close()


@pytest.mark.parametrize(("sharded", "method"), [(False, "shampoo"), (True, "shampoo"), (True, "kl"), (True, "spectral")])
def test_ranks_agree_with_the_twin(sharded, method, pool):
    twin = Reference(drawn(0), preconditioner=method, **GIVEN)
    for step in range(1, 1 + STEPS):
        twin.step([None if step == 2 and grad.dim() == 1 else grad for grad in drawn(step)])
    for params in pool.run(train, sharded, method):
        for p, q in zip(params, twin.params, strict=True):
            assert torch.linalg.vector_norm(p.double() - q) <= (1e-5 if method == "spectral" else 1e-6) * torch.linalg.vector_norm(
                q
            )


def launches(n, wire):
    """Copies of a step by kernels, with n tensors that are each cut into four blocks, and their phases."""
    interpret(setattr)
    slices.LARGEST = 1 << 20
    counts, phases, launch = Counter(), [], KernelCopies._launch
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(16, 16, generator=generator) for _ in range(n)]
    params = [torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in whole]
    opt = lather.Shampoo(params, communication_dtype=wire, **GIVEN | {"max_preconditioner_dim": 8, "momentum": 0.9})

    def see(self, *args, **fixed):
        counts[phases[-1]] += len(self._launches)
        launch(self, *args, **fixed)

    def named(name):
        phase = getattr(Unit, name)
        return lambda unit, step: (phases.append(name), phase(unit, step))

    def upload(*args):
        counts[f"{phases[-1]}, addresses"] += 1
        return from_host(*args)

    before = []  # gradients that still exist, so that the next ones are elsewhere
    for step in range(1, 4):
        for p, x in zip(params, whole, strict=True):
            before.append(p.grad)
            p.grad = distribute_tensor(x, mesh, [Shard(0)])
        if step < 3:
            opt.step()
    replaced = {name: named(name) for name in ("send", "compute", "apply")}
    watched = mock.patch.object(KernelCopies, "_launch", see), mock.patch.object(copies, "from_host", upload)
    with np.errstate(all="ignore"), watched[0], watched[1], mock.patch.multiple(Unit, **replaced):
        opt._session.run.phases = in_turn(opt._session.run.units)
        opt.step()
    blocks = sum(len(bank.blocks) for bank in opt._session.run.banks)
    return dict(counts), blocks


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_copies_do_not_grow_with_pieces(wire, pool):
    """Phase 1: gradients into messages. They have moved, so the device is told where they are. 2: those that arrive into stacks,
    directions into messages, with their scales. 3: directions with scales into a flat buffer, from where they move parameters and
    momenta. Without scales, they are used where they arrive."""
    scales = wire == "int8"
    for n in (2, 4) if scales else (4,):
        for counts, blocks in pool.run(launches, n, wire):
            assert blocks == 2 * n
            assert counts.pop("compute, addresses", 0) <= (wire != "float32") + scales  # what is rounded is made in every step
            assert counts == {"send": 1, "send, addresses": 1, "compute": 2 + scales, "apply": 1 + 2 * scales}

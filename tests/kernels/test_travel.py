"""Kernels where gradients or directions travel between ranks."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from reference import Reference
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import lather
from conftest import interpret
from lather.compute import slices
from lather.compute.kernel_executor import KernelExecutor

SHAPES = [*8 * [(8, 16)], (12, 4, 3, 3), (9,)]
GIVEN = {"lr": 0.05, "eps": 0.3, "max_preconditioner_dim": 16, "precondition_frequency": 2, "weight_decay": 0.1}
STEPS, RANKS = 3, 2
WAYS = [(sharded, method) for sharded in (False, True) for method in ("shampoo", "kl")]


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def work(rank, path):
    interpret(setattr)
    slices.LARGEST = 150  # so that banks are divided
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=RANKS)
    for sharded, method in WAYS:
        torch.save(train(sharded, method), f"{path}/{rank}-{sharded}-{method}.pt")
    dist.barrier()
    os._exit(0)  # Python's own end may abort while gloo's threads drop their tensors (pytorch#190489)


def train(sharded, method):
    """Whole parameters after some steps, of plain tensors or of DTensors."""
    mesh = init_device_mesh("cpu", (RANKS,)) if sharded else None
    stored = (lambda x: distribute_tensor(x, mesh, [Shard(0)])) if sharded else (lambda x: x)
    params = [torch.nn.Parameter(stored(x)) for x in drawn(0)]
    opt = lather.Shampoo(params, preconditioner=method, **GIVEN)
    for step in range(1, 1 + STEPS):
        for p, grad in zip(params, drawn(step), strict=True):
            p.grad = None if step == 2 and grad.dim() == 1 else stored(grad)
        with np.errstate(all="ignore"):
            opt.step()
    (unit,) = [unit for unit in opt._session.run.units if unit.executors]
    assert all(isinstance(executor, KernelExecutor) for executor in unit.executors)
    assert bool(unit.inbound) == sharded and unit.outbound
    assert any(part.n < len(part.bank.blocks) for executor in unit.executors for part in executor.slices)
    return [p.full_tensor() if sharded else p.detach() for p in params]


def test_ranks_agree_with_the_twin(tmp_path):
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=RANKS)
    twins = {method: Reference(drawn(0), preconditioner=method, **GIVEN) for method in ("shampoo", "kl")}
    for step in range(1, 1 + STEPS):
        for twin in twins.values():
            twin.step([None if step == 2 and grad.dim() == 1 else grad for grad in drawn(step)])
    for rank in range(RANKS):
        for sharded, method in WAYS:
            params = torch.load(tmp_path / f"{rank}-{sharded}-{method}.pt")
            for p, q in zip(params, twins[method].params, strict=True):
                assert torch.linalg.vector_norm(p.double() - q) <= 1e-6 * torch.linalg.vector_norm(q)

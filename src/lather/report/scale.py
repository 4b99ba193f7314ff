"""What a plan asks of its ranks: memory, traffic and work, and how evenly. From the plan alone, for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..compute.bank import block_state
from ..planning.owners import imbalance
from ..planning.plan import BankKey, Plan, mean_flops
from ..runtime.unit_plan import UnitPlan
from ..storage.averaging import state_of
from ..storage.buffers import ScratchKey


@dataclass(frozen=True)
class RankReport:
    """What a team of ``trainers`` ranks, which share the work, needs.

    Bytes are per rank. Buffers, scratch memory and what a step receives from other ranks (gradients inbound, directions
    outbound) are those of ``place``: this rank's own or, on paper, the one with the most state. ``padding`` is the fraction of
    what is received that only evens out the messages of all-gathers. Work is in FLOP per step, with refreshes spread over
    their period. ``imbalance`` is the largest work over the mean, C(N). ``law_bytes`` is the paper's ``(4 P / N + P) C(N)`` in
    float32.
    """

    trainers: int
    place: int
    state_bytes: int
    state_bytes_max: int
    state_bytes_mean: float
    buffer_bytes: int
    scratch_bytes: int
    inbound_bytes: int
    outbound_bytes: int
    padding: float
    work_max: float
    work_mean: float
    imbalance: float
    law_bytes: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rank_report(plan: Plan, team: int, place: int | None) -> RankReport:
    """Of one team, as seen from a place; by default the place that has the most state."""
    state, work = place_totals(plan, team)
    place = max(range(len(state)), key=lambda p: (state[p], -p)) if place is None else place
    units = [UnitPlan(plan, transport, place) for transport in plan.transports if transport.team == team]
    received = {"inbound": 0, "outbound": 0}
    for unit in units:
        for way, size in unit.received_bytes().items():
            received[way] += size
    numel = sum(math.prod(spec.shape) for spec in plan.specs if spec.team == team)
    trainers, c = len(state), imbalance(work)
    return RankReport(
        trainers=trainers,
        place=place,
        state_bytes=state[place],
        state_bytes_max=max(state),
        state_bytes_mean=sum(state) / trainers,
        buffer_bytes=sum(unit.buffer_bytes() for unit in units),
        scratch_bytes=scratch_bytes(units),
        inbound_bytes=received["inbound"],
        outbound_bytes=received["outbound"],
        padding=sum(unit.padding_bytes() for unit in units) / max(1, sum(received.values())),
        work_max=max(work),
        work_mean=sum(work) / trainers,
        imbalance=c,
        law_bytes=(4 * numel / trainers + numel) * c * 4,
    )


def scratch_bytes(units: Sequence[UnitPlan]) -> int:
    """What the units of a rank keep besides state and messages: buffers that they share, and tables of indices."""
    needs: dict[ScratchKey, int] = {}
    for unit in units:
        for key, numel in unit.scratch():
            needs[key] = max(numel, needs.get(key, 0))
    shared = sum(numel * dtype.itemsize for (_, _, dtype), numel in needs.items())
    return shared + index_bytes(units)


def index_bytes(units: Iterable[UnitPlan]) -> int:
    """Tables of where the elements of packed factors are, one pair for each size and device. Kernels pack without one."""
    numels: dict[tuple[str, str, int], int] = {}
    for unit in units:
        by_kernels = {part.key for parts in unit.by_kernels for part in parts if part.kernel_factors}
        for key in unit.banks:
            packed = unit.plan.settings[key.group].hyper.packed
            for d, mode in zip(key.shape, key.modes, strict=False):
                if packed and mode == "full":
                    numels["unpack", key.device, d] = d * d
                    if key not in by_kernels:
                        numels["pack", key.device, d] = d * (d + 1) // 2
    return sum(numel * (4 if d * d < 1 << 31 else 8) for (_, _, d), numel in numels.items())


def place_totals(plan: Plan, team: int) -> tuple[list[int], list[float]]:
    """State bytes and FLOPs per step, root work spread over the period, of every place of a team."""
    places = len(plan.teams[team])
    state, work = [0] * places, [0.0] * places
    known: dict[BankKey, tuple[int, float]] = {}
    for block, owner, key in zip(plan.blocks, plan.owners, plan.keys, strict=True):
        if key.transport.team == team:
            if key not in known:
                flops = mean_flops(block, plan.settings[key.group], key.device)
                known[key] = block_bytes(plan, key), flops
            state[owner] += known[key][0]
            work[owner] += known[key][1]
    for spec in (spec for spec in plan.specs if spec.team == team):
        dtypes = state_of(getattr(torch, spec.dtype), plan.settings[spec.group]).values()
        size = sum(dtype.itemsize for dtype in dtypes)
        for place in range(places if size else 0):
            state[place] += spec.layout.region(spec.shape, place).numel * size
    return state, work


def block_bytes(plan: Plan, key: BankKey) -> int:
    """State of one block of a bank."""
    return sum(like.nbytes for like in block_state(plan, key).values())

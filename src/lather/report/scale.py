"""What a plan asks of its ranks: memory, traffic and work, and how evenly. From the plan alone, for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..planning import owners as assign
from ..planning.blocks import Axis, Layout
from ..planning.plan import BankKey, Plan, refresh_cost, step_cost
from ..runtime.checkpoint import block_state
from ..runtime.unit import Draft
from ..storage.buffers import ArenaKey
from ..storage.update import state_of

SHARDINGS = "ddp, fsdp, hsdp=K or tp=K"


@dataclass(frozen=True)
class RankReport:
    """The ranks that share the work: so many ``trainers``.

    Bytes are per rank. Buffers, scratch and what a step receives from other ranks (gradients inbound, directions outbound)
    are those of ``place``: this rank's own or, on paper, the one with the most state. ``padding`` is the share of what is
    received that only evens out the messages of all-gathers; work is in FLOP per step, refreshes spread over their period;
    ``imbalance`` is its largest over its mean, C(N); ``law_bytes`` is the paper's ``(4 P / N + P) C(N)`` in float32.
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
    """Of one team, as seen from a place; without one, from the place that has the most state."""
    state, work = place_totals(plan, team)
    place = max(range(len(state)), key=lambda p: (state[p], -p)) if place is None else place
    drafts = [Draft(plan, route, place) for route in plan.routes if route.team == team]
    received = {"inbound": 0, "outbound": 0}
    for draft in drafts:
        for way, size in draft.received_bytes().items():
            received[way] += size
    numel = sum(math.prod(spec.shape) for spec in plan.specs if spec.team == team)
    trainers, c = len(state), assign.imbalance(work)
    return RankReport(
        trainers=trainers,
        place=place,
        state_bytes=state[place],
        state_bytes_max=max(state),
        state_bytes_mean=sum(state) / trainers,
        buffer_bytes=sum(draft.buffer_bytes() for draft in drafts),
        scratch_bytes=scratch_bytes(drafts),
        inbound_bytes=received["inbound"],
        outbound_bytes=received["outbound"],
        padding=sum(draft.padding_bytes() for draft in drafts) / max(1, sum(received.values())),
        work_max=max(work),
        work_mean=sum(work) / trainers,
        imbalance=c,
        law_bytes=(4 * numel / trainers + numel) * c * 4,
    )


def scratch_bytes(drafts: Sequence[Draft]) -> int:
    """What the units of a rank keep beside state and messages: buffers that they share, and tables of indices."""
    needs: dict[ArenaKey, int] = {}
    for draft in drafts:
        for key, numel in draft.scratch():
            needs[key] = max(numel, needs.get(key, 0))
    shared = sum(numel * dtype.itemsize for (_, _, dtype), numel in needs.items())
    return shared + index_bytes(drafts)


def index_bytes(drafts: Iterable[Draft]) -> int:
    """Tables that tell the places of packed factors, one pair for each size and device. Kernels pack without one."""
    numels: dict[tuple[str, str, int], int] = {}
    for draft in drafts:
        by_kernels = {share.key for fleet in draft.fleets for share in fleet if share.boxed}
        for key in draft.banks:
            packed = draft.plan.groups[key.group]["factors"] == "packed"
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
        if key.route.team == team:
            if key not in known:
                group = plan.groups[key.group]
                refresh = refresh_cost(block, group, key.device) / group["precondition_frequency"]
                known[key] = block_bytes(plan, key), refresh + step_cost(block, group)
            state[owner] += known[key][0]
            work[owner] += known[key][1]
    for spec in (spec for spec in plan.specs if spec.team == team):
        dtypes = state_of(getattr(torch, spec.dtype), plan.groups[spec.group]).values()
        size = sum(dtype.itemsize for dtype in dtypes)
        for place in range(places if size else 0):
            state[place] += spec.layout.region(spec.shape, place).numel * size
    return state, work


def block_bytes(plan: Plan, key: BankKey) -> int:
    """State of one block of a bank."""
    return sum(like.nbytes for like in block_state(plan, key).values())


def layout_named(name: str, ranks: int, order: int) -> Layout:
    """The layout of a tensor of this order over so many ranks: ``ddp``, ``fsdp``, ``hsdp=K`` or ``tp=K``.

    ``hsdp=K`` shards over K ranks and repeats that; ``tp=K`` splits the second dimension over K ranks and the first
    over the others.

    >>> layout_named("hsdp=4", 8, order=2)
    Layout(axes=(Axis(size=2, dim=None), Axis(size=4, dim=0)), order=(), cells=())
    """
    kind, _, count = name.partition("=")
    first, second = (0 if order else None), (1 if order > 1 else None)
    if kind in ("ddp", "fsdp") and not count:
        return Layout((Axis(ranks, first if kind == "fsdp" else None),))
    if kind not in ("hsdp", "tp") or not count.isdecimal() or int(count) == 0:
        raise ValueError(f"shard={name!r} is not valid: it must be {SHARDINGS}")
    if ranks % int(count):
        raise ValueError(f"shard={name!r} does not divide {ranks} ranks")
    outer, inner = ranks // int(count), int(count)
    return Layout((Axis(outer), Axis(inner, first)) if kind == "hsdp" else (Axis(outer, first), Axis(inner, second)))

"""The plan as a report: what is preconditioned and how, and the memory, traffic and work that it takes. On paper."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from .. import presets
from ..compute.bank import block_state
from ..linalg import packs_by_kernels
from ..methods import FILTER_ROLES, FULL
from ..optimizer import Shampoo
from ..options import OPTIONS, dtype_name, hint, whole
from ..planning.blocks import Block, Shape
from ..planning.layouts import Layout, layout_named, team_of
from ..planning.owners import imbalance
from ..planning.plan import BankKey, Plan, Spec, make_plan, mean_flops, refresh_flops, step_flops
from ..runtime.parameters import grad_dtype, name_of, stored_items
from ..runtime.unit_plan import UnitPlan, plan_units
from ..settings import Settings, dtype_text, idle_on, resolve
from ..storage.averaging import state_of
from ..storage.buffers import ScratchKey

Sizes = Mapping[BankKey, Counter[str]]  # bytes of one block of a bank, by kind
MOST_RANKS = 1 << 14  # of a team; the report looks at each of them


@dataclass(frozen=True)
class ParamRow:
    name: str
    shape: tuple[int, ...]
    method: str
    blocks: int
    block_shapes: tuple[tuple[int, ...], ...]
    reason: str
    rule: str = ""  # of lather.route


@dataclass(frozen=True)
class BankRow:
    group: int
    method: str
    slots: int
    shape: tuple[int, ...]
    modes: tuple[str, ...]
    solvers: tuple[str, ...]
    state_bytes: int


@dataclass(frozen=True)
class RankReport:
    """What each rank of a team needs. The ``trainers`` of a team share the work.

    Bytes are those of the rank ``place``: the one that asks or, without processes, the one with the most state. A step receives
    gradients (inbound) and directions (outbound). ``padding`` is the fraction of these that only makes messages equally long.
    Work is in FLOP per step, with refreshes spread over their period. ``imbalance`` is the largest work over the mean, C(N).
    ``law_bytes`` is the paper's ``(4 P / N + P) C(N)`` in float32.
    """

    trainers: int
    place: int
    stages: int
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


@dataclass(init=False, repr=False, eq=False)
class PlanReport:
    """Print it, or read its attributes; ``to_dict()`` gives plain data.

    >>> import lather
    >>> report = lather.plan({"weight": (64, 32), "bias": (64,)})
    >>> [(row.name, row.blocks, row.reason) for row in report.params]
    [('weight', 1, ''), ('bias', 1, '1-D')]
    >>> report.memory["factors"], report.memory["roots"]
    (20480, 20480)
    """

    params: list[ParamRow]
    banks: list[BankRow]
    memory: dict[str, int]  # bytes of the whole state, by kind
    scratch_bytes: int
    teams: list[RankReport]
    step_flops: float
    refresh_flops: float
    notes: list[str]  # options without effect on the devices of the parameters

    def __init__(self, plan: Plan, places: Sequence[int] | None = None, rules: Sequence[str] = ()) -> None:
        """``places``: of this rank, by team; by default those with the most state. ``rules``: what made each param group."""
        banks = [(key, len(ns), plan.blocks[ns[0]], plan.settings[key.group]) for key, ns in plan.all_banks().items()]
        sizes = {key: _block_bytes(plan, key) for key, *_ in banks}
        work = {key: mean_flops(block, settings, key.device) for key, _, block, settings in banks}
        totals = [_place_totals(plan, team, sizes, work) for team in range(len(plan.teams))]
        places = places or [state.index(max(state)) for state, _ in totals]
        units = plan_units(plan, places)
        devices = dict.fromkeys((spec.group, spec.device) for spec in plan.specs)
        self.params = _param_rows(plan, rules)
        self.banks = _bank_rows(plan, sizes)
        self.memory = _memory(plan, sizes)
        self.scratch_bytes = _scratch_bytes(units)
        self.teams = [_rank_report(plan, team, places[team], units, *each) for team, each in enumerate(totals)]
        self.step_flops = sum(n * step_flops(block, settings) for _, n, block, settings in banks)
        self.refresh_flops = sum(n * refresh_flops(block, settings, key.device) for key, n, block, settings in banks)
        self.notes = list(dict.fromkeys(note for g, device in devices for note in idle_on(device, plan.settings[g].given)))

    @property
    def state_bytes(self) -> int:
        return self.memory["total"]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        params = [("parameter", "shape", "method", "blocks", "why", "routed by" if any(row.rule for row in self.params) else "")]
        for row in self.params:
            blocks = f"{row.blocks} of " + ", ".join(map(_times, row.block_shapes)) if row.blocks else "-"
            params.append((row.name, _times(row.shape), row.method, blocks, row.reason, row.rule))
        banks = [("bank", "slots", "block", "solver", "state")]
        for bank in self.banks:
            solver, size = ", ".join(dict.fromkeys(bank.solvers)) or "-", bytes_text(bank.state_bytes)
            banks.append((f"{bank.group}:{bank.method}", str(bank.slots), _times(bank.shape), solver, size))
        lines = [*table(params), "", *table(banks), ""]
        lines += ["state: " + ", ".join(f"{kind} {bytes_text(size)}" for kind, size in self.memory.items())]
        lines += [f"scratch: {bytes_text(self.scratch_bytes)} kept between steps, shared by all banks"]
        lines += [f"work: {flops_text(self.step_flops)} per step, {flops_text(self.refresh_flops)} per refresh of all roots"]
        if shared := [team for team in self.teams if team.trainers > 1]:
            lines += ["", scale_table([team.trainers for team in shared], shared)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def plan(
    model: nn.Module | Mapping[str, Sequence[int]],
    *,
    device: str | None = None,
    dtype: str | None = None,
    ranks: int = 1,
    shard: str = "ddp",
    num_trainers_per_group: int | None = None,
    stages: int | None = None,
    preset: str = "Shampoo",
    **given: Any,
) -> PlanReport:
    """The report for a model, or for shapes ``{name: shape}``, and options of ``Shampoo`` or a preset. Needs no memory.

    A model is routed as the optimizer would. It may be on the meta device. All shapes are treated the same. ``device`` and
    ``dtype`` replace those of the parameters; without a model the defaults are ``"cpu"`` and ``"float32"``.

    For several ``ranks``, ``shard`` says how they store the parameters: ``"ddp"``, ``"fsdp"``, ``"hsdp=K"`` (sharded over K ranks)
    or ``"tp=K"`` (the second dimension sharded over K ranks, the first over the others).

    >>> plan({"weight": (3000, 8)}, max_preconditioner_dim=1024).params[0].block_shapes
    ((1000, 8),)
    >>> plan(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4)), ranks=3, preset="from_sgd").params[1].method
    'sgd'
    """
    made, rules = on_paper(model, device, dtype, ranks, shard, num_trainers_per_group, stages, preset, **given)
    return PlanReport(made, None, rules)


def on_paper(
    model: nn.Module | Mapping[str, Sequence[int]],
    device: str | None = None,
    dtype: str | None = None,
    ranks: int = 1,
    shard: str = "ddp",
    num_trainers_per_group: int | None = None,
    stages: int | None = None,
    preset: str = "Shampoo",
    **given: Any,
) -> tuple[Plan, Sequence[str]]:
    """The plan that :func:`plan` reports on, for its arguments, and what made each param group."""
    opt = make_optimizer(model, preset, given)
    dtype = dtype and dtype_name("dtype", dtype)
    try:
        torch.device(device or "cpu")
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device that torch knows: {error}") from error
    ranks, stages = whole("ranks", ranks), None if stages is None else whole("stages", stages)
    trainers = ranks if num_trainers_per_group is None else whole("num_trainers_per_group", num_trainers_per_group)
    if trainers > MOST_RANKS:
        raise ValueError(
            f"ranks={ranks}: a plan shares the work among at most {MOST_RANKS} ranks; let groups of fewer ranks repeat the work "
            "(num_trainers_per_group, --group)"
        )
    layouts: dict[int, Layout] = {}  # by the number of dimensions
    specs = []
    for g, i, p in stored_items(opt.param_groups):
        if p.requires_grad:
            name, own = name_of(opt.param_groups[g], g, i), "cpu" if p.is_meta else p.device.type
            if p.dim() not in layouts:
                layouts[p.dim()] = team_of(range(ranks), layout_named(shard, ranks, p.dim()), trainers, 0, name)[1]
            kinds = dtype or dtype_text(p.dtype), 0, layouts[p.dim()], dtype or grad_dtype(p)
            specs.append(Spec(name, tuple(p.shape), g, device or own, *kinds))
    rules = opt._made() if isinstance(model, nn.Module) else ()
    return make_plan(specs, [resolve(group) for group in opt.param_groups], [range(trainers)], stages), rules


def make_optimizer(model: nn.Module | Mapping[str, Sequence[int]], preset: str, given: Mapping[str, Any]) -> Shampoo:
    """The optimizer of a model, or of parameters of these shapes on the meta device. Allocates nothing, and changes nothing."""
    make = presets.find(preset)
    for name in given if preset == "Shampoo" else ():  # presets have more arguments, and refuse others themselves
        if name not in OPTIONS:
            raise ValueError(f"unknown option {name!r}{hint(name)}")
    if isinstance(model, nn.Module):
        return make(model, **given)
    if not isinstance(model, Mapping):
        raise ValueError(f"shapes must map names to shapes, such as {{'weight': (64, 32)}}, not {type(model).__name__}")
    for name, shape in model.items():
        if not isinstance(shape, Sequence) or any(not isinstance(d, int) or d < 0 for d in shape):
            raise ValueError(f"the shape of {name!r} is {shape!r}; it must be a tuple of whole numbers of at least 0")
    try:
        params = [(name, nn.Parameter(torch.empty(tuple(shape), device="meta"))) for name, shape in model.items()]
    except (RuntimeError, OverflowError) as error:
        raise ValueError(f"torch has no tensor of such a shape: {error}") from error
    return make([{"params": params, "rule": "shapes"}], **given)


def _param_rows(plan: Plan, rules: Sequence[str]) -> list[ParamRow]:
    blocks: list[list[Block]] = [[] for _ in plan.specs]
    for block in plan.blocks:
        blocks[block.param].append(block)
    rows = []
    for spec, own in zip(plan.specs, blocks, strict=True):
        method = _method_name(plan.settings[spec.group], own[0].kind) if own else "nothing"
        shapes = tuple(dict.fromkeys(block.shape for block in own))
        rule = rules[spec.group] if spec.group < len(rules) else ""
        rows.append(ParamRow(spec.name, spec.shape, method, len(own), shapes, own[0].reason if own else "empty", rule))
    return rows


def _bank_rows(plan: Plan, sizes: Sizes) -> list[BankRow]:
    """A row for all banks that differ in their ranks and transports only."""
    found: dict[tuple[Any, ...], list[BankKey]] = {}
    for key in plan.keys:
        found.setdefault((key.group, key.device, key.kind, key.shape, key.modes), []).append(key)
    rows = []
    for (group, device, kind, shape, modes), keys in found.items():
        settings = plan.settings[group]
        method, size = settings.method_of(kind), len(keys) * sizes[keys[0]].total()
        solvers = method.solvers(shape, modes, settings.hyper, device) if method else ()
        rows.append(BankRow(group, _method_name(settings, kind), len(keys), shape, modes, solvers, size))
    return rows


def _method_name(settings: Settings, kind: str) -> str:
    if method := settings.method_of(kind):
        return method.name
    return "adagrad" if kind == "adagrad" else settings.elementwise


def _block_bytes(plan: Plan, key: BankKey) -> Counter[str]:
    """State of one block of a bank, by kind."""
    settings, sizes = plan.settings[key.group], Counter[str]()
    method, graft = settings.method_of(key.kind), settings.graft_of(key.kind)
    kinds = {**(method.roles if method else {}), **FILTER_ROLES, **graft.roles}
    for role, like in block_state(plan, key).items():
        sizes[kinds.get(role[0], "other")] += like.nbytes
    return sizes


ELEMENTWISE = {"momentum": "momentum", "master": "master weights"}  # names for reports of state that is shaped like a parameter


def _element_bytes(plan: Plan, spec: Spec) -> Counter[str]:
    """State per element of a parameter, stored like the parameter itself, by kind."""
    sizes = Counter[str]()
    for role, dtype in state_of(getattr(torch, spec.dtype), plan.settings[spec.group]).items():
        sizes[ELEMENTWISE.get(role, "averaging")] += dtype.itemsize
    return sizes


def _memory(plan: Plan, sizes: Sizes) -> dict[str, int]:
    memory = Counter[str]()
    for key, numbers in plan.all_banks().items():
        memory.update({kind: len(numbers) * size for kind, size in sizes[key].items()})
    for spec in plan.specs:
        memory.update({kind: math.prod(spec.shape) * size for kind, size in _element_bytes(plan, spec).items()})
    return {kind: size for kind, size in memory.items() if size} | {"total": memory.total()}


def _place_totals(plan: Plan, team: int, sizes: Sizes, work: Mapping[BankKey, float]) -> tuple[list[int], list[float]]:
    """State bytes and FLOP per step of every place of a team."""
    banks = [plan.banks(team, place).items() for place in range(len(plan.teams[team]))]
    state = [sum(len(numbers) * sizes[key].total() for key, numbers in own) for own in banks]
    flops = [sum((len(numbers) * work[key] for key, numbers in own), 0.0) for own in banks]
    alike = Counter[tuple[Layout, Shape]]()  # bytes per element, of all parameters with this layout and shape
    for spec in (spec for spec in plan.specs if spec.team == team):
        alike[spec.layout, spec.shape] += _element_bytes(plan, spec).total()
    for (layout, shape), size in alike.items():
        if size:
            for place in range(len(state)):
                state[place] += layout.region(shape, place).numel * size
    return state, flops


def _rank_report(
    plan: Plan, team: int, place: int, units: Sequence[UnitPlan], state: Sequence[int], work: Sequence[float]
) -> RankReport:
    units = [unit for unit in units if unit.transport.team == team]
    received = Counter[str]()
    for unit in units:
        received.update(unit.received_bytes())
    numel = sum(math.prod(spec.shape) for spec in plan.specs if spec.team == team)
    trainers, uneven = len(state), imbalance(work)
    return RankReport(
        trainers=trainers,
        place=place,
        stages=1 + max((unit.transport.stage for unit in units), default=0),
        state_bytes=state[place],
        state_bytes_max=max(state),
        state_bytes_mean=sum(state) / trainers,
        buffer_bytes=_buffer_bytes(units),
        scratch_bytes=_scratch_bytes(units),
        inbound_bytes=received["inbound"],
        outbound_bytes=received["outbound"],
        padding=sum(unit.padding_bytes() for unit in units) / max(1, received.total()),
        work_max=max(work),
        work_mean=sum(work) / trainers,
        imbalance=uneven,
        law_bytes=(4 * numel / trainers + numel) * uneven * 4,
    )


def _buffer_bytes(units: Sequence[UnitPlan]) -> int:
    """Buffers of messages, with which the units of each team take turns."""
    shared: dict[ScratchKey, int] = {}
    for unit in units:
        shared[unit.message_key] = max(unit.message_bytes, shared.get(unit.message_key, 0))
    return sum(shared.values())


def _scratch_bytes(units: Sequence[UnitPlan]) -> int:
    """What a rank keeps in addition to state and messages: buffers that its units share, and index tables of packed factors."""
    shared: dict[ScratchKey, int] = {}
    tables: dict[tuple[str, int], int] = {}
    for unit in units:
        for buffer, numel in unit.scratch():
            if buffer != unit.message_key:
                shared[buffer] = max(numel, shared.get(buffer, 0))
        for key in (key for key in unit.banks if unit.plan.settings[key.group].packs(key.device)):
            for d in (d for d, mode in zip(key.shape, key.modes, strict=False) if mode == FULL):
                if not packs_by_kernels(d, torch.device(key.device)):
                    tables[key.device, d] = d * d + d * (d + 1) // 2  # to unpack, and to pack
    indices = sum(numel * (4 if d * d < 1 << 31 else 8) for (_, d), numel in tables.items())
    return indices + sum(numel * dtype.itemsize for (_, _, dtype), numel in shared.items())


def scale_table(ranks: Sequence[int], teams: Sequence[RankReport]) -> str:
    """One line for each number of ranks; memory and traffic are those of the rank with the most state."""
    head = ("ranks", "share", "state/rank", "mean", "buffers", "scratch", "in/step", "out/step", "padding", "work/rank", "C(N)")
    rows: list[tuple[str, ...]] = [(*head, "(4P/N + P) C(N)")]
    for n, team in zip(ranks, teams, strict=True):
        memory = team.state_bytes, team.state_bytes_mean, team.buffer_bytes, team.scratch_bytes
        sizes = map(bytes_text, (*memory, team.inbound_bytes, team.outbound_bytes))
        work = f"{team.padding:.1%}", flops_text(team.work_max), f"{team.imbalance:.3f}", bytes_text(team.law_bytes)
        rows.append((str(n), str(team.trainers), *sizes, *work))
    return "\n".join(table(rows))


def table(rows: Sequence[Sequence[str]], align: str = "<") -> list[str]:
    """Rows as lines. The first column is aligned left, the others left (``"<"``) or right (``">"``)."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{'<' if i == 0 else align}{width}" for i, width in enumerate(widths)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def bytes_text(size: float) -> str:
    return _text(size, 1024, ["B", "KiB", "MiB", "GiB"], ".0f" if size < 1024 else ".1f")


def flops_text(count: float) -> str:
    return _text(count, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"], ".3g")


def _text(value: float, step: int, units: list[str], digits: str) -> str:
    while value >= step and len(units) > 1:
        value, units = value / step, units[1:]
    return f"{value:{digits}} {units[0]}"

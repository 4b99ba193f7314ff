"""The plan as a report: what is preconditioned and how, memory by kind, work per step. From shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..compute.bank import block_state
from ..methods import FILTER_ROLES
from ..options import OPTIONS, dtype_name, hint, whole
from ..planning.blocks import Block
from ..planning.layouts import layout_named, team_of
from ..planning.plan import BankKey, Plan, Spec, make_plan, refresh_flops, step_flops
from ..runtime.unit_plan import plan_units
from ..settings import Settings, check_options, idle_on
from ..storage.averaging import state_of
from .scale import RankReport, block_bytes, rank_report, scratch_bytes

WASTE = 0.2  # padding above which to say what helps


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


class PlanReport:
    """Print it, or read its attributes; ``to_dict()`` gives plain data.

    >>> import lather
    >>> report = lather.plan({"weight": (64, 32), "bias": (64,)})
    >>> [(row.name, row.method, row.blocks) for row in report.params]
    [('weight', 'shampoo', 1), ('bias', 'adam', 1)]
    >>> report.memory["factors"], report.memory["roots"]
    (20480, 20480)
    """

    def __init__(self, plan: Plan, places: Sequence[int] | None = None, rules: Sequence[str] = ()) -> None:
        """``places`` are those of the rank that asks; by default the most loaded one of every team. ``rules`` made the groups."""
        blocks: list[list[Block]] = [[] for _ in plan.specs]
        for block in plan.blocks:
            blocks[block.param].append(block)
        self.params = [_param_row(plan, *item, rules) for item in zip(plan.specs, blocks, strict=True)]
        self.banks = _bank_rows(plan)
        self.notes = _notes(plan)
        self.memory = _memory(plan)
        self.teams = [rank_report(plan, team, places[team] if places else None) for team in range(len(plan.teams))]
        drafts = plan_units(plan, [team.place for team in self.teams]) if len(self.teams) > 1 else []
        self.scratch_bytes = scratch_bytes(drafts) if drafts else self.teams[0].scratch_bytes
        banks = [(len(ns), plan.blocks[ns[0]], plan.settings[k.group], k.device) for k, ns in plan.all_banks().items()]
        self.step_flops = sum(n * step_flops(block, settings) for n, block, settings, _ in banks)
        self.refresh_flops = sum(n * refresh_flops(block, settings, device) for n, block, settings, device in banks)

    @property
    def state_bytes(self) -> int:
        return self.memory["total"]

    def to_dict(self) -> dict[str, Any]:
        return {
            "params": [asdict(row) for row in self.params],
            "banks": [asdict(row) for row in self.banks],
            "memory": dict(self.memory),
            "scratch_bytes": self.scratch_bytes,
            "teams": [team.to_dict() for team in self.teams],
            "step_flops": self.step_flops,
            "refresh_flops": self.refresh_flops,
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        head, cells = ["parameter", "shape", "method", "blocks", "why"], [_param_cells(row) for row in self.params]
        if any(row.rule for row in self.params):
            head, cells = [*head, "routed by"], [(*row, p.rule) for row, p in zip(cells, self.params, strict=True)]
        lines = [*table(head, cells), ""]
        lines += [*table(("bank", "slots", "block", "solver", "state"), map(_bank_cells, self.banks)), ""]
        lines += ["state: " + ", ".join(f"{kind} {bytes_text(size)}" for kind, size in self.memory.items())]
        lines += [f"scratch: {bytes_text(self.scratch_bytes)} kept between steps, shared by all banks"]
        lines += [f"work: {flops_text(self.step_flops)} per step, {flops_text(self.refresh_flops)} per refresh of all roots"]
        lines += [_team_line(team) for team in self.teams if team.trainers > 1]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def plan(
    shapes: Mapping[str, Sequence[int]],
    *,
    device: str = "cpu",
    dtype: str = "float32",
    ranks: int = 1,
    shard: str = "ddp",
    num_trainers_per_group: int | None = None,
    stages: int = 1,
    **given: Any,
) -> PlanReport:
    """The report for parameters of these shapes, without tensors: ``{name: shape}`` and the options of ``Shampoo``.

    For several ``ranks``, ``shard`` says how parameters lie over them: ``"ddp"``, ``"fsdp"``, ``"hsdp=K"`` (sharded over K ranks)
    or ``"tp=K"`` (the second dimension split over K ranks, the first over the others).

    >>> plan({"weight": (3000, 8)}, max_preconditioner_dim=1024).params[0].block_shapes
    ((1000, 8),)
    >>> plan({"weight": (3000, 1000)}, ranks=3).teams[0].imbalance
    1.0
    """
    if not isinstance(shapes, Mapping):
        raise ValueError(f"shapes must map names to shapes, such as {{'weight': (64, 32)}}, not {type(shapes).__name__}")
    for name, shape in shapes.items():
        if not isinstance(shape, Sequence) or any(not isinstance(d, int) or d < 0 for d in shape):
            raise ValueError(f"the shape of {name!r} is {shape!r}; it must be a tuple of whole numbers of at least 0")
    group = {name: option.default for name, option in OPTIONS.items()}
    for name in given:
        if name not in group:
            raise ValueError(f"unknown option {name!r}{hint(name)}")
    settings = check_options(group | given)
    dtype = dtype_name("dtype", dtype)
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is none that torch knows: {error}") from error
    ranks, stages = whole("ranks", ranks), whole("stages", stages)
    trainers = ranks if num_trainers_per_group is None else whole("num_trainers_per_group", num_trainers_per_group)
    specs = []
    for name, shape in shapes.items():
        _, layout = team_of(range(ranks), layout_named(shard, ranks, len(shape)), trainers, 0, name)
        specs.append(Spec(name, tuple(shape), 0, device, dtype, 0, layout))
    return PlanReport(make_plan(specs, [settings], [range(trainers)], stages))


def _notes(plan: Plan) -> list[str]:
    """What a user might not expect: options without effect where the parameters are."""
    used = dict.fromkeys((spec.group, spec.device) for spec in plan.specs)
    return list(dict.fromkeys(note for g, device in used for note in idle_on(device, plan.settings[g].given)))


def _memory(plan: Plan) -> dict[str, int]:
    """Bytes of the whole state, by kind."""
    memory: dict[str, int] = {}
    for key, numbers in plan.all_banks().items():
        settings = plan.settings[key.group]
        method = settings.method_of(key.kind)
        kinds = {**(method.roles if method else {}), **FILTER_ROLES, **settings.graft_of(key.kind).roles}
        for role, like in block_state(plan, key).items():
            kind = kinds.get(role[0], "other")
            memory[kind] = memory.get(kind, 0) + len(numbers) * like.nbytes
    for spec in plan.specs:
        for role, dtype in state_of(getattr(torch, spec.dtype), plan.settings[spec.group]).items():
            kind = "momentum" if role == "momentum" else "averaging"
            memory[kind] = memory.get(kind, 0) + math.prod(spec.shape) * dtype.itemsize
    memory = {kind: size for kind, size in memory.items() if size}
    return memory | {"total": sum(memory.values())}


def _method_name(settings: Settings, kind: str) -> str:
    method = settings.method_of(kind)
    return method.name if method else "adagrad" if kind == "adagrad" else settings.elementwise


def _param_row(plan: Plan, spec: Spec, blocks: Sequence[Block], rules: Sequence[str]) -> ParamRow:
    rule = rules[spec.group] if spec.group < len(rules) else ""
    if not blocks:
        return ParamRow(spec.name, spec.shape, "nothing", 0, (), "empty", rule)
    method = _method_name(plan.settings[spec.group], blocks[0].kind)
    shapes = tuple(dict.fromkeys(block.shape for block in blocks))
    return ParamRow(spec.name, spec.shape, method, len(blocks), shapes, blocks[0].reason, rule)


def _bank_rows(plan: Plan) -> list[BankRow]:
    """Banks of all ranks and transports that do the same."""
    found: dict[tuple[Any, ...], list[BankKey]] = {}
    for key in plan.keys:
        found.setdefault((key.group, key.device, key.kind, key.shape, key.modes), []).append(key)
    rows = []
    for keys in found.values():
        key, settings = keys[0], plan.settings[keys[0].group]
        method = settings.method_of(key.kind)
        solvers = method.solvers(key.shape, key.modes, settings.hyper, key.device) if method else ()
        size, name = len(keys) * block_bytes(plan, key), _method_name(settings, key.kind)
        rows.append(BankRow(key.group, name, len(keys), key.shape, key.modes, solvers, size))
    return rows


def table(head: Sequence[str], rows: Any) -> list[str]:
    cells = [tuple(head), *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _param_cells(row: ParamRow) -> tuple[str, ...]:
    blocks = f"{row.blocks} of " + ", ".join(map(_times, row.block_shapes)) if row.blocks else "-"
    return row.name, _times(row.shape), row.method, blocks, row.reason


def _bank_cells(row: BankRow) -> tuple[str, ...]:
    solver = ", ".join(dict.fromkeys(row.solvers)) or "-"
    return f"{row.group}:{row.method}", str(row.slots), _times(row.shape), solver, bytes_text(row.state_bytes)


def scale_table(rows: Mapping[int, RankReport]) -> str:
    """One line for each number of ranks; memory and traffic are those of the rank with the most state."""
    head: tuple[str, ...] = ("ranks", "share", "state/rank", "mean", "buffers", "scratch", "in/step", "out/step")
    head += ("padding", "work/rank", "C(N)", "(4P/N + P) C(N)")
    cells = [
        (
            str(ranks),
            str(row.trainers),
            *map(bytes_text, (row.state_bytes, row.state_bytes_mean, row.buffer_bytes, row.scratch_bytes)),
            *map(bytes_text, (row.inbound_bytes, row.outbound_bytes)),
            f"{row.padding:.1%}",
            flops_text(row.work_max),
            f"{row.imbalance:.3f}",
            bytes_text(row.law_bytes),
        )
        for ranks, row in rows.items()
    ]
    lines = table(head, cells)
    if any(row.padding > WASTE for row in rows.values()):
        lines += ["", "Much of this is padding: let fewer ranks share the work (--group, num_trainers_per_group)."]
    return "\n".join(lines)


def _team_line(team: RankReport) -> str:
    return (
        f"rank {team.place} of {team.trainers} that share this: state {bytes_text(team.state_bytes)}, buffers "
        f"{bytes_text(team.buffer_bytes)}; received per step: gradients {bytes_text(team.inbound_bytes)}, directions "
        f"{bytes_text(team.outbound_bytes)}; imbalance {team.imbalance:.3f}"
    )


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def bytes_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def flops_text(count: float) -> str:
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TFLOP"

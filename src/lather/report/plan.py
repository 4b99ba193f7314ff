"""The plan as a report: what is preconditioned and how, memory by kind, work per step. From shapes alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .. import options
from ..planning.blocks import Block
from ..planning.plan import BankKey, Plan, Spec, make_plan, refresh_cost, step_cost
from ..roots import NO_CHOICES, Choices, chosen, spell
from ..runtime.checkpoint import block_state
from ..runtime.unit import make_drafts
from ..storage.tensors import team_of
from ..storage.update import state_of
from .scale import RankReport, block_bytes, layout_named, rank_report, scratch_bytes

WASTE = 0.2  # padding above which to say what helps
KINDS = {
    "L": "factors",
    "X": "roots",
    "Y": "roots to come",
    "Q": "basis",
    "w": "moment in the basis",
    "m": "filtered gradient",
    "v": "graft moment",
}


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
    milliseconds: tuple[dict[str, float | None], ...]  # per matrix, of each side's candidates; None: it fails


class PlanReport:
    """Print it, or read its attributes; ``to_dict()`` gives plain data.

    >>> import lather
    >>> report = lather.plan({"weight": (64, 32), "bias": (64,)})
    >>> [(row.name, row.method, row.blocks) for row in report.params]
    [('weight', 'shampoo', 1), ('bias', 'adam', 1)]
    >>> report.memory["factors"], report.memory["roots"]
    (20480, 20480)
    """

    def __init__(
        self, plan: Plan, places: Sequence[int] | None = None, choices: Choices = NO_CHOICES, rules: Sequence[str] = ()
    ) -> None:
        """``places``: those of the rank that asks; without, the most loaded one of every team. ``choices``: measured. ``rules``:
        of the param groups."""
        blocks: list[list[Block]] = [[] for _ in plan.specs]
        for block in plan.blocks:
            blocks[block.param].append(block)
        self.params = [_param_row(plan, *item, rules) for item in zip(plan.specs, blocks, strict=True)]
        self.banks = _bank_rows(plan, choices)
        self.notes = _notes(plan)
        self.memory = _memory(plan)
        self.teams = [rank_report(plan, team, places[team] if places else None) for team in range(len(plan.teams))]
        drafts = make_drafts(plan, [team.place for team in self.teams]) if len(self.teams) > 1 else []
        self.scratch_bytes = scratch_bytes(drafts) if drafts else self.teams[0].scratch_bytes
        self.step_flops = sum(step_cost(block, plan.groups[plan.specs[block.param].group]) for block in plan.blocks)
        self.refresh_flops = sum(
            len(numbers) * refresh_cost(plan.blocks[numbers[0]], plan.groups[key.group], key.device)
            for key, numbers in plan.all_banks().items()
        )

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
        lines += [
            f"work: {flops_text(self.step_flops)} per step, {flops_text(self.refresh_flops)} per refresh of all roots"
        ]
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
        raise ValueError(
            f"shapes must map names to shapes, such as {{'weight': (64, 32)}}, not {type(shapes).__name__}"
        )
    for name, shape in shapes.items():
        if not isinstance(shape, Sequence) or any(not isinstance(d, int) or d < 0 for d in shape):
            raise ValueError(f"the shape of {name!r} is {shape!r}; it must be a tuple of whole numbers of at least 0")
    group = {name: option.default for name, option in options.OPTIONS.items()}
    for name in given:
        if name not in group:
            raise ValueError(f"unknown option {name!r}{options.hint(name)}")
    group |= given
    options.check_options(group)
    dtype = options.dtype_name("dtype", dtype)
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is none that torch knows: {error}") from error
    ranks, stages = options.whole("ranks", ranks), options.whole("stages", stages)
    trainers = (
        ranks if num_trainers_per_group is None else options.whole("num_trainers_per_group", num_trainers_per_group)
    )
    specs = []
    for name, shape in shapes.items():
        _, layout = team_of(range(ranks), layout_named(shard, ranks, len(shape)), trainers, 0, name)
        specs.append(Spec(name, tuple(shape), 0, device, dtype, 0, layout))
    return PlanReport(make_plan(specs, [group], [range(trainers)], stages))


def check_memory(plan: Plan, places: Sequence[int], devices: Mapping[str, torch.device]) -> None:
    """Refuse, before anything is allocated, state of a rank that cannot fit on its device; ``devices`` by the plan's names."""
    totals: dict[str, int] = {}
    for key, numbers in plan.banks_of(places).items():
        totals[key.device] = totals.get(key.device, 0) + len(numbers) * block_bytes(plan, key)
    for device, total in totals.items():
        limit = _device_memory(devices[device])
        if limit is not None and total > limit:
            spec, side = _largest_factor(plan, device)
            raise ValueError(
                f"the optimizer state would take {bytes_text(total)} but {device} has {bytes_text(limit)}; the largest factor is "
                f"of side {side}, for parameter {spec.name} of shape {spec.shape}. Lower max_preconditioner_dim (now "
                f"{plan.groups[spec.group]['max_preconditioner_dim']}) or set large_dim='diagonal'"
            )


def _notes(plan: Plan) -> list[str]:
    """What a user might not expect: options without effect where the parameters are."""
    used = dict.fromkeys((spec.group, spec.device) for spec in plan.specs)
    return list(dict.fromkeys(note for g, device in used for note in options.idle_on(device, plan.groups[g])))


def _memory(plan: Plan) -> dict[str, int]:
    """Bytes of the whole state, by kind."""
    memory = dict.fromkeys((*KINDS.values(), "momentum", "averaging"), 0)
    for key, numbers in plan.all_banks().items():
        for role, like in block_state(plan, key).items():
            memory[KINDS[role[0]]] += len(numbers) * like.nbytes
    for spec in plan.specs:
        for role, dtype in state_of(getattr(torch, spec.dtype), plan.groups[spec.group]).items():
            memory["momentum" if role == "momentum" else "averaging"] += math.prod(spec.shape) * dtype.itemsize
    memory = {kind: size for kind, size in memory.items() if size}
    return memory | {"total": sum(memory.values())}


def _param_row(plan: Plan, spec: Spec, blocks: Sequence[Block], rules: Sequence[str]) -> ParamRow:
    rule = rules[spec.group] if spec.group < len(rules) else ""
    if not blocks:
        return ParamRow(spec.name, spec.shape, "nothing", 0, (), "empty", rule)
    group, first = plan.groups[spec.group], blocks[0]
    names = {"kronecker": group["preconditioner"], "graft": options.elementwise(group) or "sgd"}
    method = names.get(first.method, first.method)
    shapes = tuple(dict.fromkeys(block.shape for block in blocks))
    return ParamRow(spec.name, spec.shape, method, len(blocks), shapes, first.reason, rule)


def _bank_rows(plan: Plan, choices: Choices) -> list[BankRow]:
    """Banks of all ranks and routes that do the same."""
    slots: dict[tuple[Any, ...], int] = {}
    for key in plan.keys:
        alike = key.group, key.device, key.method, key.shape, key.modes
        slots[alike] = slots.get(alike, 0) + 1
    example = {(key.group, key.device, key.method, key.shape, key.modes): key for key in plan.keys}
    rows = []
    for alike, count in slots.items():
        key = example[alike]
        size = count * block_bytes(plan, key)
        solvers, times = _solvers(key, options.with_choices(plan.groups[key.group], choices))
        rows.append(BankRow(key.group, key.method, count, key.shape, key.modes, solvers, size, times))
    return rows


def _solvers(key: BankKey, group: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[dict[str, float | None], ...]]:
    """The solver of each side, and what the candidates take if that was measured; without roots, the way to the polar factor."""
    if options.is_spectral(group):
        return ((group["polar"],), ({},)) if key.modes else ((), ())
    e, solvers, times = options.exponent(group, len(key.shape)), list[str](), list[dict[str, float | None]]()
    device, other = group["root_device"] or key.device, "identity" if options.is_soap(group) else "diagonal"
    for d, mode in zip(key.shape, key.modes, strict=False):
        choice = chosen(group["root"], d, device, e) if isinstance(group["root"], Mapping) else None
        ms = choice.milliseconds if choice and mode == "full" else {}
        solvers.append(spell(options.solver(group, d, device, len(key.shape))) if mode == "full" else other)
        times.append({name: t if t < math.inf else None for name, t in ms.items()})
    return tuple(solvers), tuple(times)


def _largest_factor(plan: Plan, device: str) -> tuple[Spec, int]:
    sides = [
        (d, block.param)
        for block in plan.blocks
        if plan.specs[block.param].device == device
        for d, mode in zip(block.shape, block.modes or ("none",), strict=False)
        if mode == "full"
    ]
    side, param = max(sides, default=(1, 0))
    return plan.specs[param], side


def _device_memory(device: torch.device) -> int | None:
    """Bytes that the device has in all, if that can be known."""
    kind = device.type
    if kind == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if kind == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def table(head: Sequence[str], rows: Any) -> list[str]:
    cells = [tuple(head), *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _param_cells(row: ParamRow) -> tuple[str, ...]:
    blocks = f"{row.blocks} of " + ", ".join(map(_times, row.block_shapes)) if row.blocks else "-"
    return row.name, _times(row.shape), row.method, blocks, row.reason


def _bank_cells(row: BankRow) -> tuple[str, ...]:
    solver = ", ".join(dict.fromkeys(map(_solver_text, row.solvers, row.milliseconds))) or "-"
    return f"{row.group}:{row.method}", str(row.slots), _times(row.shape), solver, bytes_text(row.state_bytes)


def _solver_text(solver: str, times: Mapping[str, float | None]) -> str:
    """Such as ``minimax 0.31 ms (newton 1.8, eigh fails)``."""
    if not times:
        return solver
    text = {name: "fails" if ms is None else f"{ms:.2g}" for name, ms in times.items()}
    own = text.pop(solver, "fails")
    others = ", ".join(f"{name} {ms}" for name, ms in text.items())
    return f"{solver} {own}{'' if own == 'fails' else ' ms'}" + (f" ({others})" if others else "")


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
        lines += [
            "",
            "Much of this is padding: let fewer ranks share the work (--group, num_trainers_per_group).",
        ]
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

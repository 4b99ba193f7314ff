"""The plan as a report: what is preconditioned and how, memory by kind, work per step. From shapes alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import assign, options
from .bank import initial_state, make_stack
from .blocks import Block
from .plan import BankKey, Plan, Spec, make_plan, refresh_cost
from .roots import resolve, spell

KINDS = {"L": "factors", "X": "roots", "Q": "basis", "m": "filtered gradient", "v": "graft moment"}


@dataclass(frozen=True)
class ParamRow:
    name: str
    shape: tuple[int, ...]
    method: str
    blocks: int
    block_shapes: tuple[tuple[int, ...], ...]
    reason: str


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

    def __init__(self, plan: Plan, places: Sequence[int]) -> None:
        blocks: list[list[Block]] = [[] for _ in plan.specs]
        for block in plan.blocks:
            blocks[block.param].append(block)
        self.params = [_param_row(plan, *item) for item in zip(plan.specs, blocks, strict=True)]
        sizes = bank_bytes(plan)
        self.banks = [_bank_row(plan, key, numbers, sizes[key]) for key, numbers in plan.all_banks().items()]
        self.memory = _memory(plan, sizes)
        self.scratch_bytes = max((_scratch(plan, key, numbers) for key, numbers in plan.all_banks().items()), default=0)
        self.step_flops = sum(map(assign.step_flops, plan.blocks))
        self.refresh_flops = sum(
            refresh_cost(b, plan.groups[plan.specs[b.param].group], plan.specs[b.param].device) for b in plan.blocks
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
            "step_flops": self.step_flops,
            "refresh_flops": self.refresh_flops,
        }

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [*_table(("parameter", "shape", "method", "blocks", "why"), map(_param_cells, self.params)), ""]
        lines += [*_table(("bank", "slots", "block", "solver", "state"), map(_bank_cells, self.banks)), ""]
        lines += ["state: " + ", ".join(f"{kind} {_bytes(size)}" for kind, size in self.memory.items())]
        lines += [f"scratch: {_bytes(self.scratch_bytes)} kept between steps, for the stacks of the largest bank"]
        lines += [f"work: {_flops(self.step_flops)} per step, {_flops(self.refresh_flops)} per refresh of all roots"]
        return "\n".join(lines)


def plan(
    shapes: Mapping[str, Sequence[int]], *, device: str = "cpu", dtype: str = "float32", **given: Any
) -> PlanReport:
    """The report for parameters of these shapes, without tensors: ``{name: shape}`` and the options of ``Shampoo``.

    >>> plan({"weight": (3000, 8)}, max_preconditioner_dim=1024).params[0].block_shapes
    ((1000, 8),)
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
            guess = options.closest(name)
            raise ValueError(f"unknown option {name!r}" + (f"; did you mean {guess!r}?" if guess else ""))
    group |= given
    options.check_options(group)
    specs = [Spec(name, tuple(shape), 0, device, dtype) for name, shape in shapes.items()]
    return PlanReport(make_plan(specs, [group]), [0])


def check_memory(plan: Plan, places: Sequence[int]) -> None:
    """Refuse, before anything is allocated, state that cannot fit on its device."""
    totals: dict[str, int] = {}
    for key, roles in bank_bytes(plan).items():
        totals[key.device] = totals.get(key.device, 0) + sum(roles.values())
    for device, total in totals.items():
        limit = _device_memory(device)
        if limit is not None and total > limit:
            spec, side = _largest_factor(plan, device)
            raise ValueError(
                f"the optimizer state would take {_bytes(total)} but {device} has {_bytes(limit)}; the largest factor is of side "
                f"{side}, for parameter {spec.name} of shape {spec.shape}. Lower max_preconditioner_dim (now "
                f"{plan.groups[spec.group]['max_preconditioner_dim']}) or set large_dim='diagonal'"
            )


def bank_bytes(plan: Plan) -> dict[BankKey, dict[str, int]]:
    """Bytes of state by bank and role."""
    sizes = {}
    for key, numbers in plan.all_banks().items():
        group = plan.groups[key.group]
        state = initial_state(key, make_stack(key, len(numbers), group, torch.device("meta")), group)
        sizes[key] = {role: tensor.numel() * tensor.element_size() for role, tensor in state.items()}
    return sizes


def _memory(plan: Plan, sizes: Mapping[BankKey, Mapping[str, int]]) -> dict[str, int]:
    memory = dict.fromkeys((*KINDS.values(), "momentum"), 0)
    for roles in sizes.values():
        for role, size in roles.items():
            memory[KINDS[role[0]]] += size
    for spec in plan.specs:
        group = plan.groups[spec.group]
        if group["momentum"] > 0:
            memory["momentum"] += math.prod(spec.shape) * options.state_dtype(group).itemsize
    memory = {kind: size for kind, size in memory.items() if size}
    return memory | {"total": sum(memory.values())}


def _scratch(plan: Plan, key: BankKey, numbers: Sequence[int]) -> int:
    """Stacks of gradients, parameters and, if there is momentum, momenta."""
    group = plan.groups[key.group]
    own = torch.float64 if any(plan.specs[plan.blocks[i].param].dtype == "float64" for i in numbers) else torch.float32
    compute = options.compute_dtype(group)
    sizes = [compute.itemsize, torch.promote_types(own, compute).itemsize]
    if group["momentum"] > 0:
        sizes.append(compute.itemsize)
    return len(numbers) * math.prod(key.shape) * sum(sizes)


def _param_row(plan: Plan, spec: Spec, blocks: Sequence[Block]) -> ParamRow:
    if not blocks:
        return ParamRow(spec.name, spec.shape, "nothing", 0, (), "empty")
    group, first = plan.groups[spec.group], blocks[0]
    method = {"kronecker": group["preconditioner"], "graft": group["graft"] or "sgd"}.get(first.method, first.method)
    shapes = tuple(dict.fromkeys(block.shape for block in blocks))
    return ParamRow(spec.name, spec.shape, method, len(blocks), shapes, first.reason)


def _bank_row(plan: Plan, key: BankKey, numbers: Sequence[int], roles: Mapping[str, int]) -> BankRow:
    group = plan.groups[key.group]
    root, e = group["root"], options.exponent(group, len(key.shape))
    sides = zip(key.shape, key.modes, strict=False)
    solvers = tuple(spell(resolve(root, d, key.device, e)) if mode == "full" else "diagonal" for d, mode in sides)
    return BankRow(key.group, key.method, len(numbers), key.shape, key.modes, solvers, sum(roles.values()))


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


def _device_memory(device: str) -> int | None:
    """Bytes that the device has in all, if that can be known."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if kind == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _table(head: Sequence[str], rows: Any) -> list[str]:
    cells = [tuple(head), *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _param_cells(row: ParamRow) -> tuple[str, ...]:
    blocks = f"{row.blocks} of " + ", ".join(map(_times, row.block_shapes)) if row.blocks else "-"
    return row.name, _times(row.shape), row.method, blocks, row.reason


def _bank_cells(row: BankRow) -> tuple[str, ...]:
    solver = ", ".join(dict.fromkeys(row.solvers)) or "-"
    return f"{row.group}:{row.method}", str(row.slots), _times(row.shape), solver, _bytes(row.state_bytes)


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _flops(count: float) -> str:
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TFLOP"

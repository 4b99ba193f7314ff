"""What a step did, in numbers. An armed step is recorded after it is computed, so recording changes nothing.

Every block adds a row of sums and maxima to the record, and so does what is stored of every parameter. Rows are added up by
parameter or by kind, on one rank or on all, and become metrics at the end.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..compute.executor import Job
from ..compute.slices import BoundSlice
from ..linalg import at_least, exact_dtype, from_host, norms, per_slot, unpack
from ..methods import Context, Kronecker, refiltered
from ..methods.shampoo import elements_of, factor_correction, factors_of, modes_of, refreshed
from ..planning.plan import Spec
from ..planning.schedule import age, started_slots
from .ranks import Peers

ELEMENTS = 1 << 24  # of factors that are looked at together
METRICS = {
    "condition": "largest condition number of a damped factor",
    "rank": "effective rank of factors, as a part of their size",
    "residual": "largest distance of a root from the inverse root of today's factor",
    "age": "steps since the oldest root was refreshed",
    "graft_ratio": "norm of the preconditioned gradient, over that of the graft's direction",
    "cosine": "between direction and gradient",
    "update": "root mean square of the update, over that of the weights",
    "skipped": "gradients skipped because they were not finite",
    "failed": "refreshes that failed in a row",
}
ALWAYS = ("cosine", "update", "skipped")  # also of blocks that are not preconditioned
OF_FACTORS = ("condition", "rank", "residual", "age", "failed")


class Row(NamedTuple):
    """What a block adds to the record: squared norms and other sums, then maxima. ``-inf`` is a maximum of nothing."""

    graft: Any = 0.0  # the graft's direction, where there is a preconditioned one
    preconditioned: Any = 0.0
    inner: Any = 0.0  # inner product of direction and gradient
    direction: Any = 0.0
    gradient: Any = 0.0
    update: Any = 0.0
    moved: Any = 0.0  # elements that are updated
    weight: Any = 0.0
    stored: Any = 0.0  # elements of the weight
    rank: Any = 0.0
    factors: Any = 0.0  # how many
    condition: Any = -math.inf
    residual: Any = -math.inf
    age: Any = -math.inf
    skipped: Any = -math.inf
    failed: Any = -math.inf


SUMS = Row._fields.index("condition")
Names = Sequence[str]  # of metrics
Table = dict[str, tuple[Names, Sequence[float]]]  # by parameter or kind: the metrics that it has, and its row


@final
class Record:
    """The rows of one step, on the device. ``stored`` is what this rank stores of parameters, and ``rules`` says what made each
    param group."""

    def __init__(self, stored: Mapping[int, Tensor], specs: Sequence[Spec], rules: Sequence[str]) -> None:
        self._names = [spec.name for spec in specs]
        self._kinds = [_kind_of(rules[spec.group], spec.group) for spec in specs]
        self._rows: list[tuple[Sequence[int], Tensor]] = []  # parameters, and a row for each
        self._metrics: list[set[str]] = [set() for _ in specs]  # those that a parameter has
        alike: dict[Any, list[int]] = {}
        for i, param in stored.items():
            alike.setdefault((param.device, param.dtype), []).append(i)
        for (device, dtype), members in alike.items():
            parts = [stored[i] for i in members]
            sizes = torch._foreach_norm(parts, 2, torch.promote_types(dtype, torch.float32))
            squares = torch.stack(list(sizes)).to(exact_dtype(device)).square()
            self._add(members, squares, Row(weight=squares, stored=from_host([x.numel() for x in parts], squares)))

    def look(self, part: BoundSlice, job: Job, slots: slice, grads: Tensor) -> None:
        """Add the blocks of a slice, after their step. ``slots`` is their place in the job's lists."""
        settings, kind, state = job.settings, part.key.kind, part.state
        method, graft = settings.method_of(kind), settings.graft_of(kind)
        steps, active = job.steps[slots], from_host(job.active[slots], grads)
        alive = norms(grads).isfinite() & active  # blocks that skip the step add nothing
        grads = torch.where(per_slot(alive, grads), grads, 0)
        ctx = Context(settings.hyper_of(kind), steps, alive.to(grads.dtype))
        u = refiltered(state, grads, ctx)
        direction = own = torch.where(per_slot(alive, u), graft.apply(state, u, ctx), 0)
        row, names = Row(), set(ALWAYS)
        if method:
            names.add("graft_ratio")
            ready = alive & from_host(started_slots(steps, settings), grads)
            if method.waits:
                ready = ready & part.bank.begun & method.ready(state)
            direction = torch.where(per_slot(ready, own), method.apply(state, u, ctx), own)
        for x in (own, direction):  # nor do those whose sizes overflow, and those that are about to start anew
            alive = alive & _square(x).isfinite()
        grads, own, direction = (torch.where(per_slot(alive, x), x, 0) for x in (grads, own, direction))
        if method:
            ready = ready & alive
            row = row._replace(graft=_square(own) * ready, preconditioned=_square(direction) * ready)
        if isinstance(method, Kronecker):
            names |= set(OF_FACTORS)
            offsets = job.step.offsets.get(part.key.group, {})
            ages = [age(t, settings, offsets.get(i, 0) if offsets else None) for t, i in zip(steps, part.numbers, strict=True)]
            row = _with_factors(row, part, method, ctx, ready)._replace(age=torch.where(ready, from_host(ages, grads), -math.inf))
        skipped, failed, _ = part.bank.counts[:, part.start : part.stop]
        lr = job.step.rates[part.key.group].lr
        length = _square(own if settings.grafted else direction)
        row = row._replace(
            inner=(direction * grads).flatten(1).sum(1),
            direction=_square(direction),
            gradient=_square(grads),
            update=length * lr * lr,
            moved=alive * float(part.numel),
            skipped=torch.where(active, skipped, -math.inf),
            failed=torch.where(active, failed, -math.inf) if "failed" in names else -math.inf,
        )
        members = [block.param for block in part.blocks]
        self._add(members, length, row)
        for i in set(members):
            self._metrics[i] |= names

    def _add(self, members: Sequence[int], like: Tensor, row: Row) -> None:
        values = [x.to(like) if isinstance(x, Tensor) else torch.full_like(like, x) for x in row]
        self._rows.append((members, torch.stack(values, 1)))

    def metrics(self, by: str) -> dict[str, dict[str, Tensor]]:
        """What this rank owns, as 0-d tensors. The host does not wait for CUDA."""
        keys, names, table = self._reduced(by)
        return _derived(keys, names, table)

    def gathered(self, by: str, peers: Peers) -> dict[str, dict[str, float]]:
        """What all ranks own, as numbers. A collective."""
        keys, names, table = self._reduced(by)
        mine: Table = {key: (sorted(names[key]), row) for key, row in zip(keys, table.tolist(), strict=True)}
        tables = peers.collect(mine)
        labels = [key for theirs in tables for key in theirs]
        rows = torch.tensor([row for theirs in tables for _, row in theirs.values()], dtype=torch.float64, device="cpu")
        keys, table = _summed(labels, rows.view(-1, len(Row._fields)))
        has = {key: {name for theirs in tables if key in theirs for name in theirs[key][0]} for key in keys}
        found = _derived(keys, has, table)
        return {key: {name: float(value) for name, value in values.items()} for key, values in found.items()}

    def _reduced(self, by: str) -> tuple[list[str], dict[str, set[str]], Tensor]:
        if by not in ("parameter", "kind"):
            raise ValueError(f"by is {by!r}; it must be 'parameter' or 'kind'")
        labels = self._names if by == "parameter" else self._kinds
        device = next((rows.device for _, rows in self._rows if rows.is_cuda), torch.device("cpu"))
        rows = [rows.to(device, non_blocking=rows.is_cpu) for _, rows in self._rows]
        empty = torch.empty(0, len(Row._fields), dtype=exact_dtype(device), device=device)
        keys, table = _summed([labels[i] for members, _ in self._rows for i in members], torch.cat([empty, *rows]))
        names: dict[str, set[str]] = {key: set() for key in keys}
        for label, mine in zip(labels, self._metrics, strict=True):
            names[label] |= mine
        return keys, names, table


def _kind_of(rule: str, number: int) -> str:
    """What metrics call the parameters of a param group."""
    if not rule:
        return f"param group {number}"
    return "weights" if rule == "no rule" else rule.removeprefix("kind: ")


def _with_factors(row: Row, part: BoundSlice, method: Kronecker, ctx: Context, ready: Tensor) -> Row:
    """Add what the factors of a slice, and the roots or bases made of them, tell."""
    state, bc2 = part.state, factor_correction(ctx)
    most: dict[str, list[Tensor]] = {"condition": [], "residual": []}
    ranks: list[Tensor] = []
    for mode in modes_of(state):
        made = refreshed(state, mode)
        size = max(1, ELEMENTS // elements_of(state, mode))
        found = []
        for index in (slice(start, start + size) for start in range(0, part.n, size)):
            a = factors_of(state, mode, index)
            a = a / per_slot(bc2[index] if isinstance(bc2, Tensor) and bc2.dim() else bc2, a)
            found.append((effective_rank(a), *method.fit(a, unpack(made[index]), part.bank.exponent, ctx.hyper)))
        rank, condition, residual = map(torch.cat, zip(*found, strict=True))
        ranks.append(rank * ready)
        most["condition"].append(torch.where(ready, condition, -math.inf))
        most["residual"].append(torch.where(ready, residual, -math.inf))
    if not ranks:
        return row
    worst = {name: torch.stack(values).amax(0) for name, values in most.items()}
    return row._replace(rank=torch.stack(ranks).sum(0), factors=ready * float(len(ranks)), **worst)


def effective_rank(a: Tensor) -> Tensor:
    """``[n]``: ``tr(A)^2 / (||A||_F^2 d)``, which is 1 if all eigenvalues are equal, and ``1 / d`` if only one is not zero.

    >>> effective_rank(torch.eye(4)[None] / 3), effective_rank(torch.tensor([[5.0, 0.0, 0.0, 0.0]]))
    (tensor([1.]), tensor([0.2500]))
    """
    trace = a.diagonal(dim1=1, dim2=2).sum(1) if a.dim() == 3 else a.sum(1)
    share = trace / at_least(norms(a), torch.finfo(a.dtype).tiny)
    return share.square() / a.shape[-1]


def _summed(labels: Sequence[str], rows: Tensor) -> tuple[list[str], Tensor]:
    """The different labels, and for each the sums and maxima of its rows."""
    keys = list(dict.fromkeys(labels))
    places = {key: i for i, key in enumerate(keys)}
    order = sorted(range(len(labels)), key=lambda row: places[labels[row]])
    lengths = from_host(list(Counter(labels).values()), rows, torch.int64)  # in the order of the keys
    rows = rows[from_host(order, rows, torch.int64)]

    def reduce(how: str, columns: Tensor) -> Tensor:
        return torch.segment_reduce(columns.contiguous(), how, lengths=lengths, axis=0, unsafe=True)

    return keys, torch.cat([reduce("sum", rows[:, :SUMS]), reduce("max", rows[:, SUMS:])], 1)


def _derived(keys: Iterable[str], names: Mapping[str, set[str]], table: Tensor) -> dict[str, dict[str, Tensor]]:
    """The metrics of every key that has some. Those of nothing are NaN, such as the age of roots that there are not yet."""
    row = Row(*(torch.where(column == -math.inf, math.nan, column) for column in table.unbind(1)))
    columns = {
        "condition": row.condition,
        "rank": row.rank / row.factors,
        "residual": row.residual,
        "age": row.age,
        "graft_ratio": (row.preconditioned / row.graft).sqrt(),
        "cosine": row.inner / (row.direction * row.gradient).sqrt(),
        "update": (row.update / row.moved).sqrt() / (row.weight / row.stored).sqrt(),
        "skipped": row.skipped,
        "failed": row.failed,
    }
    values = {name: column.unbind() for name, column in columns.items()}
    return {key: {name: values[name][i] for name in METRICS if name in names[key]} for i, key in enumerate(keys) if names[key]}


def _square(x: Tensor) -> Tensor:
    return norms(x).to(exact_dtype(x.device)).square()

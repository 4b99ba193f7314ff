"""Many banks in a few kernels: the step of :class:`~lather.bank.Bank` on a GPU, for blocks of all shapes at once.

A bank is run as a sequence of operations on its stack. That is bound by launches where a model has many shapes, and
passes over memory once per operation. A *fleet* is banks of one param group, or parts of large ones, that go through the
same pipeline together, by the kernels of :mod:`lather.kernels`, straight from gradients to parameters. Products with roots
and the refresh stay with the bank's method, a bank at a time.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from . import options, rules
from .bank import Bank, due_slots, graft_of, preconditioner_of, refresh, started_slots
from .blocks import Block
from .linalg import from_host
from .plan import BankKey
from .transforms import Context, State, filter_correction

BLOCK = 4096  # elements of a tile
REDUCE = 128  # tiles of a slot that are added up at a time
SIDE, DEPTH = 128, 64  # tiles of a product, and how much of the sum they take at a time
LARGEST = 1 << 26  # elements of a fleet, unless one block has more; its buffers are as large

Group = Mapping[str, Any]


@lru_cache
def available() -> bool:
    """Whether there is a compiler for the kernels."""
    return importlib.util.find_spec("triton") is not None


def suits(device: str, dtype: str, group: Group) -> bool:
    """Whether the kernels cover parameters of this dtype with these options; the others go bank by bank."""
    filtered = group["beta3"] is None or group["beta3"] == group["betas"][0]
    single = options.state_dtype(group) == torch.float32 and dtype in ("float32", "bfloat16", "float16")
    return torch.device(device).type == "cuda" and filtered and single and available()


@dataclass(frozen=True)
class Place:
    """Where a block lies in a tensor: elements from its start, and up to three sizes and strides, outermost first."""

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def place(start: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> Place | None:
    """A box of a strided tensor in as few dimensions as can be; None if that is more than three.

    >>> place((4, 0), (2, 8), strides=(8, 1))
    Place(base=32, sizes=(16,), strides=(1,))
    """
    sizes: list[int] = []
    steps: list[int] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if sizes and steps[-1] == size * stride:
            sizes[-1], steps[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            steps.append(stride)
    base = sum(a * b for a, b in zip(start, strides, strict=True))
    return Place(base, tuple(sizes) or (1,), tuple(steps) or (1,)) if len(sizes) <= 3 else None


@dataclass(frozen=True)
class Share:
    """Slots ``start`` to ``stop`` of a bank."""

    key: BankKey
    start: int
    stop: int

    @property
    def n(self) -> int:
        return self.stop - self.start

    @property
    def shape(self) -> tuple[int, ...]:
        return self.key.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def padded(self) -> int:
        """Elements of flat buffers that it takes, so that the next share is aligned."""
        return -(-self.n * self.numel // 16) * 16

    @property
    def two_sided(self) -> bool:
        """Matrices with two full factors, as nearly all are."""
        return self.key.modes == ("full", "full")

    @property
    def half_shape(self) -> tuple[int, int]:
        """Rows and columns that a matrix takes in halves: products read whole tiles."""
        rows, columns = (-(-d // DEPTH) * DEPTH for d in self.shape)
        return rows, columns

    @property
    def half_numel(self) -> int:
        return self.n * math.prod(self.half_shape) if self.two_sided else 0


def divide(banks: Iterable[tuple[BankKey, int]], groups: Sequence[Group], cut: bool) -> list[list[Share]]:
    """Fleets for banks of so many slots: those that the kernels cover, by param group and dtype, of bounded size.

    ``cut``: a bank may be divided.
    """
    done: list[list[Share]] = []
    open_: dict[Any, list[Share]] = {}
    for key, n in banks:
        if not suits(key.device, key.dtype, groups[key.group]):
            continue
        alike, most = (key.group, key.device, key.dtype, key.method == "adagrad"), n
        if cut:
            most = max(1, LARGEST // math.prod(key.shape))
        for start in range(0, n, most):
            share = Share(key, start, min(start + most, n))
            if alike in open_ and sum(s.padded for s in open_[alike]) + share.padded > LARGEST:
                done.append(open_.pop(alike))
            open_.setdefault(alike, []).append(share)
    return [*done, *open_.values()]


def scratch(shares: Sequence[Share], group: Group) -> dict[str, tuple[torch.dtype, int]]:
    """Buffers of a fleet, by role: directions, gradients that are needed as they are, and gradients in halves."""
    flat = sum(share.padded for share in shares)
    needs = {"flat": (torch.float32, flat), "halves": (torch.float16, 2 * _plane(shares))}
    return needs | ({"plain": (torch.float32, flat)} if _keeps_plain(shares, group) else {})


def _keeps_plain(shares: Iterable[Share], group: Group) -> bool:
    """Without a filter nothing else remembers gradients; and products of three or more modes go through torch."""
    return group["betas"][0] == 0 or any(share.key.modes and not share.two_sided for share in shares)


def _plane(shares: Sequence[Share]) -> int:
    """Elements of the high halves; the low ones follow. Tiles of products may read past the last row."""
    widest = max((share.half_shape[1] for share in shares if share.two_sided), default=0)
    return sum(share.half_numel for share in shares) + SIDE * widest


@dataclass(frozen=True)
class Part(Share):
    """A share with its bank, and where its blocks lie: in which of a list of tensors, and where there."""

    bank: Bank
    tensors: Sequence[int]
    places: Sequence[Place]

    @property
    def blocks(self) -> Sequence[Block]:
        return self.bank.blocks[self.start : self.stop]

    @cached_property
    def numbers(self) -> Sequence[int]:
        return self.bank.numbers[self.start : self.stop]

    @cached_property
    def state(self) -> State:
        return {role: tensor[self.start : self.stop] for role, tensor in self.bank.state.items()}


class Fleet:
    """Parts of banks that share a param group and dtypes.

    ``raw``: places lie in the gradients and parameters themselves; otherwise in stacks of gradients that are ready for use.
    ``lands``: directions go straight into the parameters; otherwise they are returned.
    """

    def __init__(self, parts: Sequence[Part], raw: bool, lands: bool) -> None:
        bank = parts[0].bank
        self.parts, self.raw, self.lands = tuple(parts), raw, lands
        self.key, self.device = bank.key, bank.stack.device
        self.params = tuple(block.param for part in parts for block in part.blocks)
        self.n = len(self.params)
        self.firsts = _starts(part.n for part in parts)  # number of each part's first slot
        self.starts = _starts(part.padded for part in parts)  # of each part in flat buffers
        self.half_starts = _starts(part.half_numel for part in parts)
        self.plane = _plane(parts)
        self._is_padded = any(part.half_shape != part.shape for part in parts if part.two_sided)
        self._made: Tables | None = None
        self._seen: Any = None  # what `ready` was made from
        self._ready = torch.zeros(self.n, dtype=torch.uint8, device=self.device)

    # The step.

    def update(self, call: Call) -> Tensor | None:
        """As :meth:`Bank.update`, for all parts: takes in gradients, and moves the parameters or returns directions."""
        from . import kernels

        tables, group, flat, plain = (
            self._tables(call.scratch),
            call.group,
            call.scratch["flat"],
            call.scratch.get("plain"),
        )
        alive, scale, gain = torch.empty(3, self.n, device=self.device).unbind()
        on = tables.everywhere if all(call.active) else from_host(call.active, alive, torch.uint8)
        reading = self._reading(call)
        tables.launch(kernels.size_of_gradients, "partial", reading)
        kernels.look_at_gradients[self.n,](
            tables.slots, tables.partial, on, tables.skipped, alive, scale, self.n, BLOCK=REDUCE, num_warps=1
        )
        ctx = Context(group, call.steps, alive)
        numbers = self._numbers(ctx)
        if self._is_padded:
            call.scratch["halves"].zero_()
        halves = 2 if exact_products() else 1
        taking = {"alive": alive, "scale": scale, "flat": plain, "plane": self.plane, "HALVES": halves}
        tables.launch(kernels.average, "own", {**reading, **numbers, **self._averaging(group), **taking})
        contexts = [
            Context(group, call.steps[a : a + part.n], alive[a : a + part.n])
            for part, a in zip(self.parts, self.firsts, strict=False)
        ]
        self._accumulate(call, contexts, tables, alive, scale, halves)
        self._refresh(call, contexts)
        if self._precondition(call, contexts):
            tables.launch(kernels.size_of_directions, "partial", {"flat": flat})
        kernels.choose[self.n,](
            tables.slots, tables.own, tables.partial, alive, self._ready, gain,
            *(numbers[name] for name in ("corrections", "n", "first")),
            GRAFT=group["graft"] is not None, UNIFORM=numbers["UNIFORM"], BLOCK=REDUCE, num_warps=1,
        )  # fmt: skip
        out = None if self.lands else torch.empty(self.starts[-1], device=self.device)
        giving = {"flat": flat, "plain": plain, "directions": out, "gain": gain, "OUT": not self.lands}
        tables.launch(kernels.apply, None, {**self._writing(call, reading["weights"]), **numbers, **giving})
        return out

    def _reading(self, call: Call) -> dict[str, Any]:
        """Arguments of kernels that read gradients."""
        group, grads = call.group, addresses(call.sources, self._ready)
        return {
            "grads": grads,
            "weights": addresses(call.params, self._ready) if call.params else grads,
            "sign": -1.0 if self.raw and group["maximize"] else 1.0,
            "decay": float(group["weight_decay"]),
            "COUPLED": self.raw and group["weight_decay_mode"] == "l2" and group["weight_decay"] != 0,
            "GRAD": _dtype(call.sources[0]),
            "PARAM": _dtype(call.params[0] if call.params else call.sources[0]),
        }

    def _averaging(self, group: Group) -> dict[str, Any]:
        keep, weight = graft_of(self.key, group).rates(group) or (0.0, 0.0)
        plain = _keeps_plain(self.parts, group)
        return {"beta1": group["betas"][0], "keep2": keep, "weight2": weight, "FLAT_G": plain}

    def _numbers(self, ctx: Context) -> dict[str, Any]:
        """What depends on the slots' steps: one number for all, or one for each."""
        graft, group = graft_of(self.key, ctx.group), ctx.group
        first, second = filter_correction(ctx), graft.correction(ctx)
        each = isinstance(first, Tensor) or isinstance(second, Tensor)
        table = None
        if each:
            both = (x if isinstance(x, Tensor) else torch.full_like(ctx.alive, x) for x in (first, second))
            first, second, table = 1.0, 1.0, torch.stack(list(both))
        return {
            "first": first,
            "second": second,
            "corrections": table,
            "n": self.n,
            "eps": group["graft_eps"],
            "UNIFORM": not each,
            "FILTER": group["betas"][0] > 0,
            "SECOND": graft.rates(group) is not None,
        }

    def _writing(self, call: Call, weights: Tensor) -> dict[str, Any]:
        """Arguments of the kernel that moves parameters."""
        group = call.group
        lr, decay, both = rules.number(group["lr"]), rules.decay(group), None
        if isinstance(lr, Tensor) or isinstance(decay, Tensor):
            both = torch.stack([torch.as_tensor(x, dtype=torch.float32, device=self.device) for x in (lr, decay)])
            lr, decay = 0.0, 0.0
        return {
            "weights": weights,
            "momenta": addresses(call.momenta, self._ready) if call.momenta else None,
            "lr": lr,
            "decay": decay,
            "both": both,
            "momentum": group["momentum"],
            "dampening": group["dampening"],
            "MOMENTUM": bool(call.momenta),
            "NESTEROV": group["nesterov"],
            "TENSOR": both is not None,
            "PARAM": _dtype(call.params[0] if call.params else call.sources[0]),
        }

    def stack(self, flat: Tensor, i: int) -> Tensor:
        """A part's share of a flat buffer."""
        part, start = self.parts[i], self.starts[i]
        return flat[start : start + part.n * part.numel].view(part.n, *part.shape)

    def _accumulate(
        self, call: Call, contexts: Sequence[Context], tables: Tables, alive: Tensor, scale: Tensor, halves: int
    ) -> None:
        from . import kernels

        beta2 = call.group["betas"][1]
        keep, weight = (1.0, 1.0) if beta2 == 1 else (beta2, 1 - beta2)
        for jobs, rows in tables.jobs:
            kernels.gram[jobs.shape[0],](
                jobs, alive, scale, self.plane, weight, keep,
                HALVES=halves, ROWS=rows, SIDE=SIDE, DEPTH=DEPTH, num_warps=8, num_stages=3,
            )  # fmt: skip
        for i, (part, ctx) in enumerate(zip(self.parts, contexts, strict=True)):
            method = preconditioner_of(part.key, call.group)
            if method and not part.two_sided:
                method.accumulate(part.state, self.stack(call.scratch["plain"], i), ctx)

    def _refresh(self, call: Call, contexts: Sequence[Context]) -> None:
        for part, first, ctx in zip(self.parts, self.firsts, contexts, strict=False):
            method = preconditioner_of(part.key, call.group)
            if not method:
                continue
            if due := due_slots(part.numbers, ctx, call.active[first : first + part.n], call.offsets):
                failing = {slot - part.start for slot in part.bank.failing}
                refresh(method, part.state, due, ctx, part.bank.counts[1, part.start : part.stop], failing)
                part.bank.refreshed()

    def _precondition(self, call: Call, contexts: Sequence[Context]) -> bool:
        """Preconditioned directions into their buffer, if there are any. Also brings ``ready`` up to date."""
        started = [started_slots(ctx) for ctx in contexts]
        seen = started, [part.bank.changes for part in self.parts]
        found = False
        for i, (part, first, ctx) in enumerate(zip(self.parts, self.firsts, contexts, strict=False)):
            method = preconditioner_of(part.key, call.group)
            if not method:
                continue
            if seen != self._seen:
                ready = method.ready(part.state)
                self._ready[first : first + part.n] = ready & from_host(started[i], ready)
            if part.bank.begun and any(started[i]):
                u = part.state["m"] if call.group["betas"][0] > 0 else self.stack(call.scratch["plain"], i)
                method.apply(part.state, u, ctx, self.stack(call.scratch["flat"], i))
                found = True
        self._seen = seen
        return found

    def _tables(self, scratch: Mapping[str, Tensor]) -> Tables:
        if self._made is None:
            self._made = Tables(self, scratch["halves"])
        return self._made


@dataclass(frozen=True)
class Call:
    """One step of a fleet. ``steps`` and ``active`` are per slot; ``sources`` are the tensors that places refer to, gradients
    or stacks; ``params`` and ``momenta`` lie beside them, where they are needed."""

    group: Group
    steps: Sequence[int]
    active: Sequence[bool]
    offsets: Mapping[int, int] | None
    scratch: Mapping[str, Tensor]
    sources: Sequence[Tensor]
    params: Sequence[Tensor] = ()
    momenta: Sequence[Tensor] = ()


class Tables:
    """What kernels look up on the device: where everything is. Made once; see :mod:`lather.kernels` for the columns."""

    def __init__(self, fleet: Fleet, halves: Tensor) -> None:
        like = fleet._ready
        rows, aligned = _slot_rows(fleet, halves)
        order = sorted(range(fleet.n), key=lambda slot: not aligned[slot])  # stable: aligned slots come first
        table = torch.tensor([rows[slot] for slot in order], dtype=torch.int64, device="cpu")
        counts = -(-table[:, 3] // BLOCK)
        firsts = counts.cumsum(0) - counts
        tiles = table.repeat_interleave(counts, 0)
        tiles[:, 2] = BLOCK * (torch.arange(len(tiles)) - firsts.repeat_interleave(counts))
        slots = torch.empty(2, fleet.n, dtype=torch.int64, device="cpu")
        slots[:, order] = torch.stack([firsts, counts])
        self.slots, tiles = slots.to(like.device), tiles.to(like.device)
        self.partial, self.own = torch.zeros(2, len(tiles), device=like.device).unbind()
        split = int(counts[: sum(aligned)].sum())
        self._ranges = [
            (tiles[a:b], {"partial": self.partial[a:b], "own": self.own[a:b]}, whole)
            for a, b, whole in ((0, split, True), (split, len(tiles), False))
            if b > a
        ]
        self.everywhere = torch.ones_like(like)
        skipped = [part.bank.counts[0, i].data_ptr() for part in fleet.parts for i in range(part.start, part.stop)]
        self.skipped = from_host(skipped, like, torch.int64)
        found = [(_jobs(fleet, halves, by_rows), by_rows) for by_rows in (True, False)]
        self.jobs = [(torch.tensor(jobs, device="cpu").to(like.device), by_rows) for jobs, by_rows in found if jobs]

    def launch(self, kernel: Any, partial: str | None, arguments: Mapping[str, Any]) -> None:
        """Over all tiles: those of aligned slots, and the others. ``partial`` names where sums over tiles go."""
        for tiles, sums, aligned in self._ranges:
            more = {} if partial is None else {"partial": sums[partial]}
            kernel[tiles.shape[0],](tiles=tiles, **more, **arguments, ALIGNED=aligned, BLOCK=BLOCK, num_warps=8)


def _slot_rows(fleet: Fleet, halves: Tensor) -> tuple[list[list[int]], list[bool]]:
    """A row for every slot, in the columns of the kernels' tables, and whether the slot can be read in whole vectors."""
    rows, aligned = [], []
    for part, first, flat, half in zip(fleet.parts, fleet.firsts, fleet.starts, fleet.half_starts, strict=False):
        m, v = (part.state[role].data_ptr() if role in part.state else 0 for role in ("m", "v"))
        cols, ld = (part.shape[1], part.half_shape[1]) if part.two_sided else (1, 1)
        for i, (tensor, at) in enumerate(zip(part.tensors, part.places, strict=True)):
            sizes, strides = ((1,) * (3 - len(at.sizes)) + at.sizes, (0,) * (3 - len(at.sizes)) + at.strides)
            begin = i * part.numel
            address = halves.data_ptr() + 2 * (half + i * math.prod(part.half_shape)) if part.two_sided else 0
            where = (tensor, 0, part.numel, at.base, sizes[1], sizes[2], *strides)
            rows.append([first + i, *where, flat + begin, m and m + 4 * begin, v and v + 4 * begin, address, cols, ld])
            aligned.append(
                at.sizes == (part.numel,) and at.strides == (1,) and at.base % 8 == 0 and part.numel % 8 == 0
            )
    return rows, aligned


def _jobs(fleet: Fleet, halves: Tensor, by_rows: bool) -> list[list[int]]:
    """Tiles of the lower triangles of all factors of one side."""
    found = []
    for part, first, half in zip(fleet.parts, fleet.firsts, fleet.half_starts, strict=False):
        if part.two_sided:
            rows, ld = part.half_shape
            factor = part.state["L0" if by_rows else "L1"]
            side, depth = (part.shape[0], ld) if by_rows else (part.shape[1], rows)
            tiles = [(i, j) for i in range(-(-side // SIDE)) for j in range(i + 1)]
            for slot in range(part.n):
                source = halves.data_ptr() + 2 * (half + slot * rows * ld)
                target = factor.data_ptr() + 4 * slot * side * side
                found += [[first + slot, source, ld, depth, target, side, i, j] for i, j in tiles]
    return found


def addresses(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return from_host([tensor.data_ptr() for tensor in tensors], like, torch.int64)


def exact_products() -> bool:
    """Whether the user wants float32 products to be float32."""
    return torch.get_float32_matmul_precision() == "highest"


def _starts(sizes: Iterable[int]) -> list[int]:
    """Running totals, from 0 to the total."""
    return list(accumulate(sizes, initial=0))


@lru_cache
def _names() -> dict[torch.dtype, Any]:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _dtype(tensor: Tensor) -> Any:
    return _names()[tensor.dtype]


def alike(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor]:
    """Gradients with the strides of their parameters, of one dtype, aligned; something to point at where there is none."""
    dtype = next(grad.dtype for grad in grads if grad is not None)
    found = []
    for grad, param in zip(grads, params, strict=True):
        if grad is None:
            grad = param if param.dtype.itemsize >= dtype.itemsize else torch.empty_like(param, dtype=dtype)
        elif grad.dtype != dtype or grad.stride() != param.stride() or grad.data_ptr() % 16:
            grad = torch.empty_like(param, dtype=dtype).copy_(grad)
        found.append(grad)
    return found

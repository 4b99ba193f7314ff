"""Many banks in a few kernels: the step of :class:`~lather.bank.Bank` on a GPU, for blocks of all shapes at once.

A bank is run as a sequence of operations on its stack. That is bound by launches where a model has many shapes, and
passes over memory once per operation. A *fleet* is banks of one param group, or parts of large ones, that go through the
same pipeline together, by the kernels of :mod:`lather.kernels`, straight from gradients to parameters. What changes from
step to step lies in buffers on the device, so that the launches, always the same, are replayed as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rules
from .bank import Refresh, due_slots, graft_of, preconditioner_of, refresh, started_slots
from .linalg import from_host
from .tables import DEPTH, REDUCE, SIDE, Group, Part, Tables, keeps_plain, plane_of, starts
from .transforms import Context, filter_correction

NUMBERS = 16  # places for numbers of a step; kernels.NAMES says which


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


class Kind(NamedTuple):
    """What kernels are compiled for."""

    filtered: bool
    second: bool
    coupled: bool
    graft: bool
    momentum: bool
    nesterov: bool
    uniform: bool
    halves: int
    plain: bool
    grad: torch.dtype
    param: torch.dtype
    more: Hashable  # what operations of torch, which graphs hold too, depend on


class Fleet:
    """Parts of banks that share a param group and dtypes.

    ``raw``: places lie in the gradients and parameters themselves; otherwise in stacks of gradients that are ready for use.
    ``lands``: directions go straight into the parameters; otherwise they are returned.
    """

    def __init__(self, parts: Sequence[Part], raw: bool, lands: bool, graphs: Graphs | None = None) -> None:
        bank = parts[0].bank
        self.parts, self.raw, self.lands, self.key, self.device = tuple(parts), raw, lands, bank.key, bank.stack.device
        self.params = tuple(block.param for part in parts for block in part.blocks)
        self.n = len(self.params)
        self.firsts = starts(part.n for part in parts)  # number of each part's first slot
        self.starts = starts(part.padded for part in parts)  # of each part in flat buffers
        self._plane = plane_of(parts)
        self._is_padded = any(part.half_shape != part.shape for part in parts if part.two_sided)
        self._graphs = graphs
        self._tables: Tables | None = None
        self._buffers = Buffers(self.n, 1 + max(i for part in parts for i in part.tensors), self.device)
        self._seen: Any = None  # what `ready` was made from

    def update(self, call: Call) -> Tensor | None:
        """As :meth:`Bank.update`, for all parts: takes in gradients, and moves the parameters or returns directions."""
        if self._tables is None:
            self._tables = Tables(self.parts, call.scratch["halves"])
        tables, ctx = self._tables, Context(call.group, call.steps, self._buffers.alive)
        kind = self._load(call, ctx)
        contexts = self._contexts(call, ctx)
        self._replay(("in", kind), lambda: self._take_in(kind, tables, call, contexts))
        self._refresh(call, ctx, contexts)
        go = self._bring_up_to_date(call, ctx, contexts)
        return self._replay(("out", kind, go), lambda: self._give_out(kind, tables, call, contexts, go))

    def _replay(self, key: Hashable, launch: Callable[[], Tensor | None]) -> Tensor | None:
        return launch() if self._graphs is None else self._graphs.run((id(self), key), launch)

    def _contexts(self, call: Call, ctx: Context) -> list[Context]:
        """The context of every part."""
        alive = self._buffers.alive_of(self.firsts)
        return [
            Context(call.group, call.steps[a : a + part.n], mine)
            for part, a, mine in zip(self.parts, self.firsts, alive, strict=False)
        ]

    def stack(self, flat: Tensor, i: int) -> Tensor:
        """A part's share of a flat buffer."""
        part, start = self.parts[i], self.starts[i]
        return flat[start : start + part.n * part.numel].view(part.n, *part.shape)

    # What changes from step to step, on its way to the device.

    def _load(self, call: Call, ctx: Context) -> Kind:
        group, buffers = call.group, self._buffers
        graft = graft_of(self.key, group)
        first, second = filter_correction(ctx), graft.correction(ctx)
        uniform = not isinstance(first, Tensor) and not isinstance(second, Tensor)
        if not uniform:
            buffers.correct(first, second)
        numbers, tensors = self._numbers(group)
        if not isinstance(first, Tensor) and not isinstance(second, Tensor):
            numbers |= {"first": first, "second": second}
        buffers.load(numbers, tensors, call)
        return Kind(
            filtered=group["betas"][0] > 0,
            second=graft.rates(group) is not None,
            coupled=self.raw and group["weight_decay_mode"] == "l2" and group["weight_decay"] != 0,
            graft=group["graft"] is not None,
            momentum=bool(call.momenta),
            nesterov=group["nesterov"],
            uniform=uniform,
            halves=2 if exact_products() else 1,
            plain=keeps_plain(self.parts, group),
            grad=call.sources[0].dtype,
            param=call.params[0].dtype if call.params else call.sources[0].dtype,
            more=(group["betas"][1], group["exponent"]) if any(not part.two_sided for part in self.parts) else None,
        )

    def _numbers(self, group: Group) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Numbers by name; those that are on a device already, such as a learning rate, apart."""
        keep2, take2 = graft_of(self.key, group).rates(group) or (0.0, 0.0)
        beta1, beta2 = group["betas"]
        numbers: dict[str, Any] = {
            "sign": -1.0 if self.raw and group["maximize"] else 1.0,
            "coupled": group["weight_decay"],
            "take1": 1 - beta1,
            "keep2": keep2,
            "take2": take2,
            "eps": group["graft_eps"],
            "keep": beta2,
            "take": 1.0 if beta2 == 1 else 1 - beta2,
            "lr": rules.number(group["lr"]),
            "decay": rules.decay(group),
            "momentum": group["momentum"],
            "damp": 1 - group["dampening"],
        }
        tensors = {name: x for name, x in numbers.items() if isinstance(x, Tensor)}
        return {name: x for name, x in numbers.items() if name not in tensors}, tensors

    # Launches.

    def _take_in(self, kind: Kind, tables: Tables, call: Call, contexts: Sequence[Context]) -> None:
        """Gradients into averages and factors."""
        from . import kernels

        b, types = self._buffers, {"GRAD": _type(kind.grad), "PARAM": _type(kind.param)}
        reading = {"grads": b.sources, "weights": b.weights, "numbers": b.numbers, "COUPLED": kind.coupled, **types}
        tables.launch(kernels.size_of_gradients, "partial", reading)
        kernels.look_at_gradients[self.n,](
            tables.slots, tables.partial, b.active, tables.skipped, b.alive, b.scale, self.n, BLOCK=REDUCE, num_warps=1
        )
        if self._is_padded:
            call.scratch["halves"].zero_()
        slots = {"alive": b.alive, "scale": b.scale, "corrections": b.corrections, "n": self.n, "UNIFORM": kind.uniform}
        copies = {"flat": call.scratch.get("plain"), "plane": self._plane, "FLAT_G": kind.plain, "HALVES": kind.halves}
        made = {"FILTER": kind.filtered, "SECOND": kind.second}
        tables.launch(kernels.average, "own", {**reading, **slots, **copies, **made})
        for jobs, rows, even in tables.jobs:
            kernels.gram[jobs.shape[0],](
                jobs, b.alive, b.scale, self._plane, b.numbers,
                HALVES=kind.halves, ROWS=rows, EVEN=even, SIDE=SIDE, DEPTH=DEPTH, num_warps=8, num_stages=3,
            )  # fmt: skip
        for i, (part, ctx) in enumerate(zip(self.parts, contexts, strict=True)):
            method = preconditioner_of(part.key, call.group)
            if method and not part.two_sided:
                method.accumulate(part.state, self.stack(call.scratch["plain"], i), ctx)

    def _give_out(
        self, kind: Kind, tables: Tables, call: Call, contexts: Sequence[Context], go: Sequence[bool]
    ) -> Tensor | None:
        """Averages and roots into directions, and those into parameters."""
        from . import kernels

        b, flat, plain = self._buffers, call.scratch["flat"], call.scratch.get("plain")
        for i, (part, ctx) in enumerate(zip(self.parts, contexts, strict=True)):
            method = preconditioner_of(part.key, call.group)
            if method and go[i]:
                u = part.state["m"] if kind.filtered else self.stack(call.scratch["plain"], i)
                method.apply(part.state, u, ctx, self.stack(flat, i))
        if any(go):
            tables.launch(kernels.size_of_directions, "partial", {"flat": flat})
        kernels.choose[self.n,](
            tables.slots, tables.own, tables.partial, b.alive, b.ready, b.gain, b.corrections, self.n, b.numbers,
            GRAFT=kind.graft, UNIFORM=kind.uniform, BLOCK=REDUCE, num_warps=1,
        )  # fmt: skip
        out = None if self.lands else torch.empty(self.starts[-1], device=self.device)
        buffers = {"flat": flat, "plain": plain, "directions": out, "weights": b.weights, "momenta": b.momenta}
        slots = {
            "gain": b.gain,
            "corrections": b.corrections,
            "n": self.n,
            "numbers": b.numbers,
            "UNIFORM": kind.uniform,
        }
        made = {"FILTER": kind.filtered, "SECOND": kind.second, "MOMENTUM": kind.momentum, "NESTEROV": kind.nesterov}
        types = {"OUT": not self.lands, "PARAM": _type(kind.param)}
        tables.launch(kernels.apply, None, {**buffers, **slots, **made, **types})
        return out

    # Roots.

    def _refresh(self, call: Call, ctx: Context, contexts: Sequence[Context]) -> None:
        """Refresh what is due, in all parts at once."""
        due, method = [], None
        for part, first, mine in zip(self.parts, self.firsts, contexts, strict=False):
            if not part.key.modes:
                continue
            if slots := due_slots(part.numbers, mine, call.active[first : first + part.n], call.offsets):
                method = preconditioner_of(part.key, call.group)
                failing = [slot - part.start for slot in part.bank.failing]
                due.append(Refresh(part.state, slots, mine, part.bank.counts[1, part.start : part.stop], failing))
                part.bank.refreshed()
        if method:
            refresh(method, due)

    def _bring_up_to_date(self, call: Call, ctx: Context, contexts: Sequence[Context]) -> tuple[bool, ...]:
        """Which parts are preconditioned; and ``ready``, where that has changed."""
        started = [
            started_slots(mine) if part.key.modes else [] for part, mine in zip(self.parts, contexts, strict=True)
        ]
        seen = started, [part.bank.changes for part in self.parts]
        if seen != self._seen:
            for part, first, slots in zip(self.parts, self.firsts, started, strict=False):
                if method := preconditioner_of(part.key, call.group):
                    ready = method.ready(part.state)
                    self._buffers.ready[first : first + part.n] = ready & from_host(slots, ready)
            self._seen = seen
        return tuple(part.bank.begun and any(slots) for part, slots in zip(self.parts, started, strict=True))


class Buffers:
    """Memory of a fleet on the device that stays where it is: numbers and addresses of a step, and a value per slot."""

    def __init__(self, n: int, tensors: int, device: torch.device) -> None:
        self._size = tensors
        self._words = torch.zeros(NUMBERS + 3 * tensors, dtype=torch.int64, device=device)
        self.numbers = self._words[:NUMBERS].view(torch.float64)
        self.sources, self.weights, self.momenta = self._words[NUMBERS:].view(3, tensors).unbind()
        self.alive, self.scale, self.gain = torch.ones(3, n, device=device).unbind()
        self.corrections = torch.ones(2, n, device=device)
        self.active, self.ready = (
            torch.ones(n, dtype=torch.uint8, device=device),
            torch.zeros(n, dtype=torch.uint8, device=device),
        )
        self._all_active = True
        self._parts: list[Tensor] | None = None

    def load(self, numbers: Mapping[str, float], tensors: Mapping[str, Tensor], call: Call) -> None:
        from .kernels import NAMES

        values = torch.tensor([numbers.get(name, 0.0) for name in NAMES], dtype=torch.float64, device="cpu")
        addresses = [tensor.data_ptr() for tensor in call.sources]
        for more in (call.params, call.momenta):
            addresses += [tensor.data_ptr() for tensor in more] if more else [0] * self._size
        words = torch.empty(len(self._words), dtype=torch.int64, device="cpu")
        words[: len(NAMES)] = values.view(torch.int64)
        words[NUMBERS:] = torch.tensor(addresses, device="cpu")
        self._words.copy_(words, non_blocking=True)
        for name, value in tensors.items():
            self.numbers[NAMES.index(name)] = value
        if not (self._all_active and all(call.active)):
            self.active.copy_(torch.tensor(call.active, device="cpu"), non_blocking=True)
            self._all_active = all(call.active)

    def correct(self, *corrections: float | Tensor) -> None:
        """A correction for each slot, where they differ."""
        for row, value in zip(self.corrections, corrections, strict=True):
            row.copy_(value) if isinstance(value, Tensor) else row.fill_(value)

    def alive_of(self, firsts: Sequence[int]) -> Sequence[Tensor]:
        if self._parts is None:
            self._parts = [self.alive[a:b] for a, b in pairwise(firsts)]
        return self._parts


class Graphs:
    """CUDA graphs by key. What is launched the third time under the same key is captured, then and later replayed."""

    MOST = 32  # keys; beyond that, something changes on every step

    def __init__(self) -> None:
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, tuple[Any, Tensor | None]] = {}
        self._pool: Any = None

    def run(self, key: Hashable, launch: Callable[[], Tensor | None]) -> Tensor | None:
        if key in self._graphs:
            graph, out = self._graphs[key]
            graph.replay()
            return out
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] < 3 or len(self._calls) > self.MOST or torch.cuda.is_current_stream_capturing():
            return launch()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = launch()
        self._graphs[key] = graph, out
        graph.replay()
        return out


def exact_products() -> bool:
    """Whether the user wants float32 products to be float32."""
    return torch.get_float32_matmul_precision() == "highest"


@lru_cache
def _types() -> dict[torch.dtype, Any]:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _type(dtype: torch.dtype) -> Any:
    return _types()[dtype]


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

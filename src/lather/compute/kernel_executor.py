"""Many banks in a few kernels: the step of :class:`~lather.bank.Bank` on a GPU, for blocks of all shapes at once.

A bank is run as a sequence of operations on its stack. That is bound by launches where a model has many shapes, and
passes over memory once per operation. A *fleet* is banks of one param group, or parts of large ones, that go through the
same pipeline together, by the kernels of :mod:`lather.kernels`, straight from gradients to parameters. What changes from
step to step lies in buffers on the device, so that the launches, always the same, are replayed as a CUDA graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..linalg import from_host, holding
from ..methods import Context, filter_correction
from ..options import root_dtype
from ..planning.schedule import is_due
from ..roots import are_products_exact, stages
from ..storage import update as rules
from ..storage.buffers import Arena
from .background import branching, side_by_side, stream_of
from .bank import Refresh, amortised_of, due_slots, graft_of, is_alone, late_slots, refresh, started_slots
from .tables import DEPTH, REDUCE, SIDE, THIN, Group, Part, Tables, plane_of, scratch, starts

# Numbers of a step that may change without a new kernel or graph, as kernels know them.
NAMES = (
    "sign", "coupled", "take1", "keep2", "take2", "first", "second", "eps", "keep", "take", "lr", "decay", "momentum",
    "damp", "bc2",
)  # fmt: skip

BRANCHES = 4  # of a graph, at most: libraries keep 32 MiB for every stream


@dataclass(frozen=True)
class Call:
    """One step of a fleet. ``steps`` and ``active`` are per slot; ``sources`` are the tensors that places refer to, gradients
    or stacks; ``params`` and ``momenta`` lie beside them, where they are needed. ``soiled``: others have used the scratch."""

    group: Group
    steps: Sequence[int]
    active: Sequence[bool]
    offsets: Mapping[int, int] | None
    scratch: Mapping[str, Tensor]
    sources: Sequence[Tensor]
    addresses: Sequence[int]
    grad_dtype: torch.dtype
    params: Sequence[Tensor] = ()
    momenta: Sequence[Tensor] = ()
    soiled: bool = True


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
    clear: bool
    grad: torch.dtype
    param: torch.dtype
    root: torch.dtype
    more: Hashable  # what operations of torch, which graphs hold too, depend on


class Fleet:
    """Parts of banks that share a param group and dtypes.

    ``raw``: places lie in the gradients and parameters themselves; otherwise in stacks of gradients that are ready for use.
    ``lands``: directions go straight into the parameters; otherwise they are returned, in scratch.
    """

    def __init__(self, parts: Sequence[Part], raw: bool, lands: bool, graphs: Graphs | None = None) -> None:
        bank = parts[0].bank
        self.parts, self.raw, self.lands, self.key, self.device = tuple(parts), raw, lands, bank.key, bank.stack.device
        self.params = tuple(block.param for part in parts for block in part.blocks)
        self.n, self.members = len(self.params), tuple(dict.fromkeys(self.params))
        self._bound: tuple[Any, list[tuple[int, ...]], list[Tensor], list[Tensor]] | None = None
        self._scratch: dict[bool, dict[str, Tensor]] = {}
        self._is_odd = any(part.key.modes and not part.boxed for part in parts)
        self.firsts = starts(part.n for part in parts)  # number of each part's first slot
        self.starts = starts(part.padded for part in parts)  # of each part in flat buffers
        self._plane = plane_of(parts)
        self._is_padded = any(
            (rows, columns) != part.shape[:2] for part in parts if part.boxed for rows, _, columns in [part.half_shape]
        )
        self._graphs = graphs
        self._tables: Tables | None = None
        self._buffers = Buffers(self.n, 1 + max(i for part in parts for i in part.tensors), self.device)
        self._at_once: list[bool] | None = None  # which parts wait for no root; and whether for no step either
        self._is_alone = False
        self._go: tuple[bool, ...] = ()  # which parts may be preconditioned,
        self._seen: Any = None  # and what that was made from

    def scratch(self, arena: Arena, group: Group) -> dict[str, Tensor]:
        """Its share of the buffers that all fleets use one after the other."""
        unfiltered = group["betas"][0] == 0
        if unfiltered not in self._scratch:
            self._scratch[unfiltered] = {
                role: arena.take((role, self.key.device, dtype), numel)
                for role, (dtype, numel) in scratch(self.parts, group).items()
            }
        return self._scratch[unfiltered]

    def bind(
        self, grads: Mapping[int, Tensor], params: Mapping[int, Tensor], momenta: Mapping[int, Tensor]
    ) -> dict[str, Any]:
        """What a call needs of gradients, parameters and momenta, in the order of places: the same lists for the same mapping
        of parameters. Gradients come with the strides of their parameters, of one dtype, aligned; something to point at
        where there is none.
        """
        if self._bound is None or self._bound[0] is not params:
            mine = [params[i] for i in self.members]
            strides = list(map(Tensor.stride, mine))
            self._bound = params, strides, mine, [momenta[i] for i in self.members if i in momenta]
        _, strides, mine, memory = self._bound
        dtype = next(grads[i].dtype for i in self.members if i in grads)
        dtype = dtype if dtype in DTYPES else torch.float32
        sources = [
            grads[i] if i in grads else _something(param, dtype) for i, param in zip(self.members, mine, strict=True)
        ]
        if not _are_ready(sources, dtype, strides):
            sources = [
                grad if _are_ready([grad], dtype, [stride]) else torch.empty_like(param, dtype=dtype).copy_(grad)
                for grad, param, stride in zip(sources, mine, strides, strict=True)
            ]
        addresses = list(map(Tensor.data_ptr, sources))
        return {
            "sources": sources, "addresses": addresses, "grad_dtype": dtype, "params": mine, "momenta": memory,
        }  # fmt: skip

    def update(self, call: Call) -> Tensor | None:
        """As :meth:`Bank.update`, for all parts: takes in gradients, and moves the parameters or returns directions."""
        if self._tables is None:
            self._tables = Tables(self.parts, call.scratch["halves"])
        tables, ctx = self._tables, Context(call.group, call.steps, self._buffers.alive)
        kind = self._load(call, ctx)
        contexts = partial(self._contexts, call)  # needed to make graphs and for late roots
        if call.group["refresh_delay"]:
            self._publish(call, contexts())  # first of all: factors of KL-Shampoo see the roots
        self._replay(("in", kind), lambda: self._take_in(kind, tables, call, contexts()))
        if not self._is_idle(ctx, call):
            self._refresh(kind, call, contexts())
        go = self._going(ctx)
        return self._replay(("out", kind, go), lambda: self._give_out(kind, tables, call, contexts(), go))

    def _is_idle(self, ctx: Context, call: Call) -> bool:
        """Whether it is plain to see that no root is due."""
        if not ctx.uniform or call.offsets is not None or call.group["refresh_delay"]:
            return False
        return not is_due(ctx.steps[0], call.group, None)

    def _replay(self, key: Hashable, launch: Callable[[], Tensor | None]) -> Tensor | None:
        return launch() if self._graphs is None else self._graphs.run((id(self), key), launch)

    def _contexts(self, call: Call) -> list[Context]:
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
        numbers, tensors = self._numbers(group)
        if ctx.uniform:
            numbers |= {"first": float(first), "second": float(second), "bc2": float(ctx.factor_correction())}
        else:
            buffers.correct(first, second, ctx.factor_correction())
        buffers.load(numbers, tensors, call)
        return Kind(
            filtered=group["betas"][0] > 0,
            second=graft.rates(group) is not None,
            coupled=self.raw and group["weight_decay_mode"] == "l2" and group["weight_decay"] != 0,
            graft=group["graft"] is not None,
            momentum=bool(call.momenta),
            nesterov=group["nesterov"],
            uniform=ctx.uniform,
            halves=2 if are_products_exact() else 1,
            plain=self._is_odd or group["betas"][0] == 0,
            clear=call.soiled and self._is_padded,
            grad=call.grad_dtype,
            param=call.params[0].dtype if call.params else torch.float32,
            root=root_dtype(group),
            more=(group["betas"][1], group["eps"]) if self._is_odd else None,
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
        from ..kernels import step as kernels

        b, types = self._buffers, {"GRAD": _type(kind.grad), "PARAM": _type(kind.param)}
        reading = {"grads": b.sources, "weights": b.weights, "numbers": b.numbers, "COUPLED": kind.coupled, **types}
        tables.launch(kernels.size_of_gradients, "partial", reading)
        kernels.look_at_gradients[self.n,](
            tables.slots, tables.partial, b.active, tables.skipped, b.alive, b.scale, self.n, BLOCK=REDUCE, num_warps=1
        )
        if kind.clear:
            call.scratch["halves"].zero_()
        slots = {"alive": b.alive, "scale": b.scale, "corrections": b.corrections, "n": self.n, "UNIFORM": kind.uniform}
        copies = {"flat": call.scratch.get("plain"), "plane": self._plane, "FLAT_G": kind.plain, "HALVES": kind.halves}
        made = {"FILTER": kind.filtered, "SECOND": kind.second}
        tables.launch(kernels.average, "own", {**reading, **slots, **copies, **made})
        packed = call.group["factors"] == "packed"
        works: list[Callable[[], object]] = [
            partial(
                kernels.gram[jobs.shape[0],], jobs, b.alive, b.scale, self._plane, b.numbers, HALVES=kind.halves, ROWS=rows,
                EVEN=even, PACKED=packed, SIDE=SIDE, DEPTH=DEPTH, num_warps=8, num_stages=stages(self.device),
            )
            for jobs, rows, even in tables.jobs
        ]  # fmt: skip
        if tables.thin:  # first, as it takes long and needs little
            works.insert(0, partial(self._take_in_thin, kind, *tables.thin, packed))
        for i, (part, ctx) in enumerate(zip(self.parts, contexts, strict=True)):
            method = amortised_of(part.key, call.group)
            if method and not part.boxed:
                works.append(partial(method.accumulate, part.state, self.stack(call.scratch["plain"], i), ctx))
        side_by_side(works)

    def _take_in_thin(self, kind: Kind, chunks: Tensor, ends: Tensor, sums: Tensor, packed: bool) -> None:
        from ..kernels import step as kernels

        b = self._buffers
        kernels.thin_products[chunks.shape[0],](
            chunks, sums, self._plane, HALVES=kind.halves, SIDE=THIN, DEPTH=DEPTH, num_warps=1
        )
        kernels.thin_factors[ends.shape[0],](
            ends, sums, b.alive, b.scale, b.numbers, PACKED=packed, SIDE=THIN, num_warps=4
        )

    def _give_out(
        self, kind: Kind, tables: Tables, call: Call, contexts: Sequence[Context], go: Sequence[bool]
    ) -> Tensor | None:
        """Averages and roots into directions, and those into parameters."""
        from ..kernels import step as kernels

        b, flat, plain = self._buffers, call.scratch["flat"], call.scratch.get("plain")
        bc2 = b.bc2_of(self.firsts, kind.uniform)
        works = []
        for i in sorted(range(len(self.parts)), key=lambda i: -self.parts[i].flops):  # what takes long comes first
            part, method, ctx = self.parts[i], amortised_of(self.parts[i].key, call.group), contexts[i]
            if method:
                steps = list[Callable[[], object]]()
                if part.by_torch:
                    ctx = replace(ctx, bc2=bc2[i])
                    steps.append(partial(method.follow, part.state, self.stack(call.scratch["plain"], i), ctx))
                if go[i]:
                    u = part.state["m"] if kind.filtered else self.stack(call.scratch["plain"], i)
                    steps.append(partial(method.apply, part.state, u, ctx, self.stack(flat, i)))
                works.append(partial(_one_by_one, steps))
        side_by_side(works)
        if any(go):
            tables.launch(kernels.size_of_directions, "partial", {"flat": flat})
        kernels.choose[self.n,](
            tables.slots, tables.own, tables.partial, b.alive, b.started, b.gain, b.corrections, self.n, b.numbers,
            GRAFT=kind.graft, UNIFORM=kind.uniform, ROOT=_type(kind.root), BLOCK=REDUCE, num_warps=1,
        )  # fmt: skip
        buffers = {"flat": flat, "plain": plain, "weights": b.weights, "momenta": b.momenta}
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
        return None if self.lands else flat

    # Roots.

    def _refresh(self, kind: Kind, call: Call, contexts: Sequence[Context]) -> None:
        """Refresh what is due, in all parts at once."""
        due: dict[int, list[int]] = {}
        for i, (part, first, ctx) in enumerate(zip(self.parts, self.firsts, contexts, strict=False)):
            if part.key.modes:
                slots = due_slots(part.numbers, ctx, call.active[first : first + part.n], call.offsets)
                due |= {i: slots} if slots else {}
        if not due:
            return
        jobs = []
        for i, slots in due.items():
            part = self.parts[i]
            mine = replace(contexts[i], bc2=self._buffers.bc2) if kind.uniform else contexts[i]
            failing = [slot - part.start for slot in part.bank.failing if part.start <= slot < part.stop]
            jobs.append(Refresh(part.state, slots, mine, part.bank.counts[1, part.start : part.stop], failing))
            part.bank.begun = True
        method = amortised_of(self.parts[next(iter(due))].key, call.group)
        assert method is not None
        if kind.uniform and not any(job.failing for job in jobs) and method.is_capturable([job.due for job in jobs]):
            numbers = call.group["eps"], call.group["damping"]  # other options that matter here make a new fleet
            key = ("refresh", tuple((i, tuple(slots)) for i, slots in due.items()), numbers)
            self._replay(key, lambda: refresh(method, jobs))
        else:
            refresh(method, jobs, self.parts[0].bank.aside if call.group["refresh_delay"] else None)

    def _publish(self, call: Call, contexts: Sequence[Context]) -> None:
        """Put roots to use that were refreshed a while ago."""
        for part, first, ctx in zip(self.parts, self.firsts, contexts, strict=False):
            method = amortised_of(part.key, call.group)
            if method and (late := late_slots(part.numbers, ctx, call.active[first : first + part.n], call.offsets)):
                self.parts[0].bank.aside.finish()
                method.publish(part.state, late)
                part.bank.begun = True

    def _going(self, ctx: Context) -> tuple[bool, ...]:
        """Which parts may be preconditioned. The device is told which slots have started, and sees which have roots."""
        started = started_slots(replace(ctx, steps=ctx.steps[:1])) * self.n if ctx.uniform else started_slots(ctx)
        if self._at_once is None:
            methods = [amortised_of(part.key, ctx.group) for part in self.parts]
            self._at_once = [method is not None and method.begins_at_once for method in methods]
            self._is_alone = any(is_alone(method, ctx.group) for method in methods)
        started = [True] * self.n if self._is_alone else started
        seen = started, [part.bank.begun or now for part, now in zip(self.parts, self._at_once, strict=True)]
        if seen != self._seen:
            self._buffers.started.copy_(from_host(started, self._buffers.started))
            self._go = tuple(
                begun and any(started[a:b]) for begun, (a, b) in zip(seen[1], pairwise(self.firsts), strict=True)
            )
            self._seen = seen
        return self._go


def _one_by_one(works: Sequence[Callable[[], object]]) -> None:
    for work in works:
        work()


def _are_ready(grads: Sequence[Tensor], dtype: torch.dtype, strides: list[tuple[int, ...]]) -> bool:
    """Whether kernels can read gradients where they are. Every step asks, so the loops are in C."""
    return (
        {grad.dtype for grad in grads} == {dtype}
        and list(map(Tensor.stride, grads)) == strides
        and not any(address & 15 for address in map(Tensor.data_ptr, grads))
        and not any(map(Tensor.is_neg, grads))
    )


def _something(param: Tensor, dtype: torch.dtype) -> Tensor:
    """To point at, of a dtype, where there is no gradient."""
    return param if param.dtype is dtype else torch.empty_like(param, dtype=dtype)


class Buffers:
    """Memory of a fleet on the device that stays where it is: numbers and addresses of a step, and a value per slot."""

    def __init__(self, n: int, tensors: int, device: torch.device) -> None:
        self._size = tensors
        self._words = torch.zeros(len(NAMES) + 3 * tensors, dtype=torch.int64, device=device)
        self.numbers = self._words[: len(NAMES)].view(torch.float64)
        self.bc2 = self.numbers[NAMES.index("bc2")]
        self.sources, self.weights, self.momenta = self._words[len(NAMES) :].view(3, tensors).unbind()
        self.alive, self.scale, self.gain = torch.ones(3, n, dtype=torch.float32, device=device).unbind()
        # Corrections are those of the filter, of the graft's moment, and of factors.
        self.corrections = torch.ones(3, n, dtype=torch.float32, device=device)
        self.active, self.started = (
            torch.ones(n, dtype=torch.uint8, device=device),
            torch.zeros(n, dtype=torch.uint8, device=device),
        )
        self._all_active = True
        self._parts: list[Tensor] | None = None
        self._params: Sequence[Tensor] | None = None  # whose addresses are there

    def load(self, numbers: Mapping[str, float], tensors: Mapping[str, Tensor], call: Call) -> None:
        values = torch.tensor([numbers.get(name, 0.0) for name in NAMES], dtype=torch.float64, device="cpu")
        addresses = list(call.addresses)
        if call.params is not self._params:  # which seldom move
            for more in (call.params, call.momenta):
                addresses += [tensor.data_ptr() for tensor in more] if more else [0] * self._size
            self._params = call.params
        words = torch.cat([values.view(torch.int64), torch.tensor(addresses, device="cpu")])
        self._words[: len(words)].copy_(words, non_blocking=True)
        for name, value in tensors.items():
            self.numbers[NAMES.index(name)] = value
        if not (self._all_active and all(call.active)):
            self.active.copy_(torch.tensor(call.active, device="cpu"), non_blocking=True)
            self._all_active = all(call.active)

    def correct(self, *corrections: float | Tensor) -> None:
        """A correction for each slot, where they differ."""
        for row, value in zip(self.corrections, corrections, strict=True):
            row.copy_(value) if isinstance(value, Tensor) else row.fill_(value)

    def bc2_of(self, firsts: Sequence[int], uniform: bool) -> Sequence[Tensor]:
        """The correction of factors for every part: one for all slots, or ``[n]``."""
        if uniform:
            return [self.bc2.float()] * (len(firsts) - 1)
        return [self.corrections[2, a:b] for a, b in pairwise(firsts)]

    def alive_of(self, firsts: Sequence[int]) -> Sequence[Tensor]:
        if self._parts is None:
            self._parts = [self.alive[a:b] for a, b in pairwise(firsts)]
        return self._parts


class Graphs:
    """CUDA graphs by key. What is launched the second time under the same key is captured, then and later replayed.

    Always on the same streams: memory of a graph is reused by those that were captured on the same stream only.
    """

    MOST = 1024  # keys; beyond that, something changes on every step

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[Any, Tensor | None, list[Tensor]]] = {}
        self._pool: Any = None
        self._streams: list[Any] = []
        self._enabled = True

    def run(self, key: Hashable, launch: Callable[[], Tensor | None]) -> Tensor | None:
        if key not in self._graphs:
            if key not in self._seen:
                if len(self._seen) < self.MOST:
                    self._seen.add(key)
                return launch()
            if not self._enabled or torch.cuda.is_current_stream_capturing():
                return launch()
            try:
                self._graphs[key] = self._capture(launch)
            except RuntimeError as error:  # nothing was launched yet
                self._enabled = False
                warnings.warn(f"CUDA graphs are not used, for a capture failed: {error}", stacklevel=2)
                return launch()
        graph, out, _ = self._graphs[key]
        graph.replay()
        return out

    def _capture(self, launch: Callable[[], Tensor | None]) -> tuple[Any, Tensor | None, list[Tensor]]:
        """A graph, what it returns, and what else it needs. Not by ``torch.cuda.graph``, which collects garbage and empties
        the cache of memory first."""
        if not self._streams:
            self._pool = torch.cuda.graph_pool_handle()
            device = torch.device("cuda", torch.cuda.current_device())
            self._streams = [stream_of(device, number) for number in range(1, 2 + BRANCHES)]
        graph, stream, needed = torch.cuda.CUDAGraph(), self._streams[0], list[Tensor]()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), holding(needed), branching(self._streams[1:]):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out = launch()
            except BaseException:
                with suppress(RuntimeError):  # it is the first error that tells
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph, out, needed


DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def _type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, DTYPES[dtype])

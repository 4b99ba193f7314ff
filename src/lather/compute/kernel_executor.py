"""The executor of many banks by a few kernels: blocks of all shapes at once, on a GPU.

Operations on one stack after the other are bound by launches where a model has many shapes, and pass over memory once per
operation. Here slices of banks of one param group go through the kernels of :mod:`lather.kernels` together, straight from
gradients to parameters. What changes from step to step lies in buffers on the device. So the launches are always the same,
and are replayed as CUDA graphs.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..kernels import registers, stages
from ..kernels.schema import Corrections, Moment, Numbers, TensorAddresses, position
from ..linalg import are_products_exact, from_host, per_slot
from ..methods import Context, Hyper, Kronecker, filter_correction
from ..methods.shampoo import factor_correction
from ..planning.schedule import started_slots
from ..roots.directions import Sizes
from ..settings import Settings
from ..storage.buffers import Scratch
from ..storage.step import Step, Stored
from .executor import Executor, Job
from .graphs import BRANCHES, Graphs, side_by_side
from .refresh import Due, is_capturable, refresh
from .slices import DEPTH, SIDE, THIN_SIDE, BoundSlice, half_plane, scratch_sizes, torch_takes_in
from .tables import REDUCE, Tables, ThinLaunch, running_totals

DIAGONAL = 1024  # entries of a diagonal that a kernel takes at a time
Launch = tuple[Hashable | None, Callable[[], None]]  # with its key among graphs
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Variant(NamedTuple):
    """What kernels are compiled for, and graphs captured for."""

    filtered: bool
    looks_ahead: bool  # whether the filtered gradient differs from the filter's memory, at least before that is rounded
    moment: Moment  # where the graft's second moment is
    coupled: bool  # whether decay is part of the gradient
    graft: bool
    momentum: bool
    nesterov: bool
    uniform: bool  # whether all slots are at the same step
    halves: int  # 16-bit numbers for each float32 number in products
    plain: bool  # whether gradients are needed as they are
    grad: torch.dtype
    param: torch.dtype
    root: torch.dtype
    kept: torch.dtype  # of the filter's memory
    numbers: Hashable  # of torch's operations, which graphs hold too

    @property
    def filtered_in(self) -> str:
        """Where the filtered gradient is: in the filter's memory ``m``, or in a buffer."""
        return "plain" if not self.filtered else "filtered" if self.looks_ahead else "m"


class Sources(NamedTuple):
    """The tensors that windows refer to: gradients, or stacks of them; parameters and momenta where kernels need them."""

    grads: Sequence[Tensor]
    dtype: torch.dtype  # of the gradients
    params: Sequence[Tensor] = ()
    momenta: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Seen:
    variant: Variant
    hyper: Hyper
    steps: Sequence[int]  # of every slot
    firsts: Sequence[int]  # the first slot of every slice
    alive: Sequence[Tensor]  # of every slice

    @cached_property
    def contexts(self) -> list[Context]:
        """Of every slice. A step that only replays graphs needs none."""
        ends = zip(pairwise(self.firsts), self.alive, strict=True)
        return [Context(self.hyper, self.steps[a:b], alive) for (a, b), alive in ends]


@final
class KernelExecutor(Executor[Seen]):
    """Slices of banks that share a param group and dtypes.

    ``reads_gradients``: windows lie in the gradients and parameters themselves; otherwise in stacks that are given.
    ``moves_parameters``: directions go straight into the parameters; otherwise they are returned, in scratch memory.
    """

    def __init__(
        self,
        slices: Sequence[BoundSlice],
        settings: Settings,
        scratch: Scratch,
        *,
        reads_gradients: bool,
        moves_parameters: bool,
        graphs: Graphs | None = None,
    ) -> None:
        super().__init__(slices, settings)
        self.moves_parameters = moves_parameters
        self._reads_gradients, self._scratch, self._graphs = reads_gradients, scratch, graphs
        self._needs = scratch_sizes(slices, settings)
        self._packed = settings.packs(self.key.device)
        self._members = tuple(dict.fromkeys(self.param_numbers))
        self._starts = running_totals(part.flat_numel for part in slices)  # of each slice in flat buffers
        self._plane = half_plane(slices)
        self._torch_takes_in = torch_takes_in(slices, self.method)
        self._is_padded = any(part.kernel_factors and (part.half_shape[0], part.half_shape[2]) != part.shape[:2] for part in slices)
        self._buffers = Buffers(self.n, 1 + max(i for part in slices for i in part.tensor_indices), self.device)
        self._alive = [self._buffers.alive[a:b] for a, b in pairwise(self.firsts)]
        self._bound: tuple[Stored, list[tuple[int, ...]], Sources] | None = None
        self._going: tuple[Any, tuple[bool, ...]] = None, ()  # see _who_goes

    @cached_property
    def _memory(self) -> dict[str, Tensor]:
        """Its share of the buffers that all executors use one after the other."""
        device = self.key.device
        return {role: self._scratch.take((role, device, dtype), numel) for role, (dtype, numel) in self._needs.items()}

    @property
    def _halves(self) -> Tensor:
        """Gradients in halves. Directions take their place."""
        return self._memory["flat"].view(torch.float16)

    @cached_property
    def _tables(self) -> Tables:
        return Tables(self.slices, self._halves, self.graft.of_factors)

    # The parts of a step.

    def publish(self, job: Job) -> None:
        assert self.method is not None
        self.slices[0].bank.background.finish()
        for i, slots in self._by_slice(job.to_publish):
            self.method.publish(self.slices[i].state, slots, job.settings.hyper)
            self.slices[i].bank.begun = True

    def take_in(self, job: Job, stacks: Sequence[Tensor | None]) -> Seen:
        given = [stack for stack in stacks if stack is not None]
        sources = self._sources(job.step) if self._reads_gradients else Sources(given, given[0].dtype)
        variant = self._load(job, sources)
        seen = Seen(variant, job.settings.hyper_of(self.key.kind), job.steps, self.firsts, self._alive)
        key, launch = self._in(seen)
        if self._graphs and self._graphs.is_new((id(self), key)):
            self._graphs.compile({(id(self), key): launch for key, launch in self._parts(job, seen) if key})
        self._replay(key, launch)
        return seen

    def refresh(self, job: Job, seen: Seen) -> None:
        """All slices at once."""
        for i, _ in self._by_slice(job.due):
            self.slices[i].bank.begun = True
        self._replay(*self._roots(job, seen))

    def follow(self, job: Job, seen: Seen) -> None:
        if self.method and self.method.follows:
            self._replay(*self._basis(seen))

    def give_out(self, job: Job, seen: Seen) -> Sequence[Tensor]:
        self._replay(*self._out(seen, self._who_goes(job)))
        if self.moves_parameters:  # kernels write behind autograd's back
            step = job.step
            torch.autograd.graph.increment_version([step.stored.params[i] for i in self._members if i in step.grads])
            return []
        return [self._stack("flat", i) for i in range(len(self.slices))]

    # Each part as a launch, and its key among graphs; None if no graph can hold it.

    def _in(self, seen: Seen) -> Launch:
        return ("in", seen.variant), partial(self._launch_in, seen)

    def _roots(self, job: Job, seen: Seen) -> Launch:
        method, due = self.method, self._by_slice(job.due)
        assert isinstance(method, Kronecker)
        jobs = []
        for i, slots in due:
            part, ctx = self.slices[i], seen.contexts[i]
            if seen.variant.uniform:
                ctx = replace(ctx, bc2=self._buffers.bc2)
            failing = [slot - part.start for slot in part.bank.failing if part.start <= slot < part.stop]
            bank, failed = part.bank, part.bank.failed[part.start : part.stop]
            assert bank.solver
            jobs.append(Due(part.state, slots, ctx, failed, failing, bank.exponent, bank.solver))
        hyper, same = job.settings.hyper, seen.variant.uniform and not any(job.failing for job in jobs)
        if same and is_capturable(jobs):  # other options that matter here make a new executor
            key = "refresh", tuple((i, tuple(slots)) for i, slots in due), hyper.eps, hyper.relative_damping
            return key, partial(refresh, method, jobs)
        return None, partial(refresh, method, jobs, self.slices[0].bank.background if hyper.refresh_delay else None)

    def _basis(self, seen: Seen) -> Launch:
        return ("follow", seen.variant), partial(self._launch_follow, seen)

    def _out(self, seen: Seen, goes: tuple[bool, ...]) -> Launch:
        key = ("out", seen.variant, goes) if self.method is None or self.method.is_capturable(seen.hyper) else None
        return key, partial(self._launch_out, seen, goes)

    def _parts(self, job: Job, seen: Seen) -> Iterator[Launch]:
        """All launches of a step, if all slices have roots by the end of it."""
        yield self._in(seen)
        if job.due:
            yield self._roots(job, seen)
        if self.method and self.method.follows:
            yield self._basis(seen)
        yield self._out(seen, tuple(bool(part.key.modes) for part in self.slices))

    def _replay(self, key: Hashable | None, launch: Callable[[], None]) -> None:
        if self._graphs is None or key is None:
            launch()
        else:
            self._graphs.run((id(self), key), launch)

    # What changes from step to step, on its way to the device.

    def _sources(self, step: Step) -> Sources:
        """Gradients with the strides of their parameters, of one dtype, aligned; a stand-in where one is missing."""
        grads, stored = step.grads, step.stored
        if self._bound is None or self._bound[0] is not stored:
            params = [stored.params[i] for i in self._members]
            momenta = [stored.kept[i] for i in self._members if i in stored.kept] if self.moves_parameters else []
            self._bound = stored, list(map(Tensor.stride, params)), Sources((), torch.float32, params, momenta)
        _, strides, bound = self._bound
        dtype = next(grads[i].dtype for i in self._members if i in grads)
        dtype = dtype if dtype in DTYPES else torch.float32
        found = [grads[i] if i in grads else _something(param, dtype) for i, param in zip(self._members, bound.params, strict=True)]
        if not _are_ready(found, dtype, strides):
            found = [
                grad if _are_ready([grad], dtype, [stride]) else torch.empty_like(param, dtype=dtype).copy_(grad)
                for grad, param, stride in zip(found, bound.params, strides, strict=True)
            ]
        return bound._replace(grads=found, dtype=dtype)

    def _load(self, job: Job, sources: Sources) -> Variant:
        settings, hyper, buffers = job.settings, job.settings.hyper_of(self.key.kind), self._buffers
        ctx = Context(hyper, job.steps, buffers.alive)
        uniform = job.steps.count(job.steps[0]) == self.n
        corrections = Corrections(filter=filter_correction(ctx), moment=self.graft.correction(ctx), factor=factor_correction(ctx))
        if not uniform:
            buffers.correct(corrections)
        numbers = self._numbers(job, corrections if uniform else Corrections(0.0, 0.0, 0.0))
        buffers.load(numbers, sources, job.active)
        return Variant(
            filtered=hyper.beta1 > 0,
            looks_ahead="filtered" in self._needs,
            moment=Moment.RANK_ONE if self.graft.of_factors else Moment.STORED if self.graft.rates(hyper) else Moment.NONE,
            coupled=self._reads_gradients and settings.decay_mode == "l2" and settings.weight_decay != 0,
            graft=settings.grafted,
            momentum=bool(sources.momenta),
            nesterov=settings.nesterov,
            uniform=uniform,
            halves=2 if are_products_exact() else 1,
            plain="plain" in self._needs,
            grad=sources.dtype,
            param=sources.params[0].dtype if sources.params else torch.float32,
            root=hyper.root_dtype,
            kept=hyper.filter_dtype,
            numbers=(hyper.beta2, hyper.eps, hyper.relative_damping)
            if self._torch_takes_in
            else (hyper.polar, hyper.polar_scale, hyper.bias_correction),
        )

    def _numbers(self, job: Job, corrections: Corrections) -> Numbers:
        """The numbers of a step. Some are tensors if they are on a device already, such as a learning rate."""
        settings, hyper, rate = job.settings, job.settings.hyper_of(self.key.kind), job.step.rates[self.key.group]
        moment_keep, moment_take = self.graft.rates(hyper) or (0.0, 0.0)
        return Numbers(
            gradient_sign=-1.0 if self._reads_gradients and settings.maximize else 1.0,
            coupled_decay=settings.weight_decay,
            filter_take=1 - hyper.beta1,
            direction_take=1 - hyper.beta3,
            moment_keep=moment_keep,
            moment_take=moment_take,
            filter_correction=float(corrections.filter),
            moment_correction=float(corrections.moment),
            graft_eps=hyper.graft_eps,
            factor_keep=hyper.beta2,
            factor_take=1.0 if hyper.beta2 == 1 else 1 - hyper.beta2,
            lr=rate.lr,
            decay=rate.decay,
            momentum_keep=settings.momentum,
            momentum_take=1 - settings.dampening,
            factor_correction=float(corrections.factor),
        )

    def _who_goes(self, job: Job) -> tuple[bool, ...]:
        """Which slices may be preconditioned. The device is told which slots have started, and sees which have roots."""
        started = (
            started_slots(job.steps[:1], job.settings) * self.n if job.step.common_step else started_slots(job.steps, job.settings)
        )
        at_once = self.method is not None and not self.method.waits
        begun = [bool(part.key.modes) and (part.bank.begun or at_once) for part in self.slices]
        last, goes = self._going
        if (started, begun) != last:
            self._buffers.started.copy_(from_host(started, self._buffers.started))
            goes = tuple(b and any(started[x:y]) for b, (x, y) in zip(begun, pairwise(self.firsts), strict=True))
            self._going = (started, begun), goes
        return goes

    def _by_slice(self, slots: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Slots counted over all slices, as slots of each slice that has some."""
        found = [(i, [slot - a for slot in slots if a <= slot < b]) for i, (a, b) in enumerate(pairwise(self.firsts))]
        return [(i, mine) for i, mine in found if mine]

    def _stack(self, role: str, i: int) -> Tensor:
        """A slice's share of a flat buffer."""
        part, start = self.slices[i], self._starts[i]
        return self._memory[role][start : start + part.n * part.numel].view(part.n, *part.shape)

    # Launches.

    def _launch_in(self, seen: Seen) -> None:
        """Gradients into averages and factors."""
        from ..kernels import step as kernels

        b, v, tables = self._buffers, seen.variant, self._tables
        reading = {"grads": b.addresses.gradients, "weights": b.addresses.parameters, "numbers": b.numbers}
        reading |= {"COUPLED": v.coupled, "GRAD": _type(v.grad), "PARAM": _type(v.param)}
        tables.launch(kernels.size_of_gradients, reading, partial=tables.tile_sums)
        kernels.look_at_gradients[self.n,](
            tables.slots, tables.tile_sums, b.active, tables.skip_counters, b.alive, b.scale, self.n, b.numbers,
            BLOCK=REDUCE, num_warps=1,
        )  # fmt: skip
        if self._is_padded:
            self._halves[: v.halves * self._plane].zero_()
        slots = {"alive": b.alive, "scale": b.scale, "corrections": b.corrections, "n": self.n, "UNIFORM": v.uniform}
        flat = self._memory["flat"]  # stands in for what is not there: for None Triton would build another launcher
        copies = {"plain": self._memory.get("plain", flat), "filtered": self._memory.get("filtered", flat), "plane": self._plane}
        made = {"FILTER": v.filtered, "LOOKS_AHEAD": v.looks_ahead, "PLAIN": v.plain, "HALVES": v.halves}
        made["SECOND"] = v.moment is Moment.STORED
        made |= {"KEPT": _type(v.kept)}
        if self.method and self.method.judges:  # it needs the gradients as they are, before anything is averaged
            only = made | {"FILTER": False, "LOOKS_AHEAD": False, "SECOND": False}
            tables.launch(kernels.average, {**reading, **slots, **copies, **only}, partial=tables.graft_sums, norms=None)
            side_by_side([partial(self._judge, seen, i, part) for i, part in self._costly_first()])
        norms = tables.tile_sums if self._halves_directions(v) else None
        tables.launch(kernels.average, {**reading, **slots, **copies, **made}, partial=tables.graft_sums, norms=norms)
        limit = registers(self.device)
        # Two sums take more registers than most GPUs have, unless tiles are half as deep. Triton needs 16.
        depth = DEPTH if v.halves == 1 or limit else max(16, DEPTH // 2)
        works: list[Callable[[], object]] = [
            partial(
                kernels.gram[len(found.jobs),], found.jobs, b.alive, b.scale, self._plane, b.numbers, HALVES=v.halves,
                ROWS=found.by_rows, EVEN=found.aligned, PACKED=self._packed, SIDE=SIDE, DEPTH=depth, num_warps=8,
                num_stages=stages(self.device), maxnreg=limit if v.halves == 1 else None,
            )
            for found in tables.factors
        ]  # fmt: skip
        if tables.thin:  # first, as it takes long and needs little
            works.insert(0, partial(self._launch_thin, v, tables.thin))
        if norms is not None:
            works.append(partial(kernels.norms_of_slots[self.n,], tables.slots, norms, b.norms, self.n, BLOCK=REDUCE, num_warps=1))
        for i, part in enumerate(self.slices):
            if self.method and self._torch_takes_in and part.key.modes and not part.kernel_factors and not self.method.judges:
                works.append(partial(self.method.accumulate, part.state, self._stack("plain", i), seen.contexts[i]))
        side_by_side(works)

    def _judge(self, seen: Seen, i: int, part: BoundSlice) -> None:
        """Gradients into factors, and slots that cannot take theirs in out of the step."""
        assert self.method is not None
        takes, alive = self.method.accumulate(part.state, self._stack("plain", i), seen.contexts[i]), seen.alive[i]
        assert takes is not None
        part.bank.skipped[part.start : part.stop] += (alive > 0) & takes.logical_not()
        alive *= takes

    def _launch_thin(self, v: Variant, thin: ThinLaunch) -> None:
        from ..kernels import step as kernels

        b = self._buffers
        kernels.thin_products[len(thin.chunks),](
            thin.chunks, thin.sums, self._plane, HALVES=v.halves, SIDE=THIN_SIDE, DEPTH=DEPTH, num_warps=1
        )
        kernels.thin_factors[len(thin.factors),](
            thin.factors, thin.sums, b.alive, b.scale, b.numbers, PACKED=self._packed, SIDE=THIN_SIDE, num_warps=4
        )

    def _launch_follow(self, seen: Seen) -> None:
        assert self.method is not None
        works = [
            partial(self.method.follow, part.state, self._stack("plain", i), seen.contexts[i]) for i, part in self._costly_first()
        ]
        side_by_side(works)

    def _launch_out(self, seen: Seen, goes: Sequence[bool]) -> None:
        """Averages and roots into directions, and those into parameters."""
        from ..kernels import step as kernels

        b, v, tables, flat = self._buffers, seen.variant, self._tables, self._memory["flat"]
        works: list[Callable[[], object]] = [
            partial(self._apply, seen, i, part, slots)
            for i, part in self._costly_first()
            if goes[i]
            for slots in self._shares(part.n)
        ]
        if tables.rank_one:
            works.append(
                partial(kernels.rank_one_moments[len(tables.rank_one.jobs),], tables.rank_one.jobs, BLOCK=DIAGONAL, num_warps=4)
            )
        side_by_side(works)
        buffers: dict[str, Any] = {"flat": flat, "filtered": self._memory.get(v.filtered_in, flat)}
        buffers |= {"corrections": b.corrections, "n": self.n, "numbers": b.numbers}
        kinds = {"MOMENT": int(v.moment), "IN_STATE": v.filtered_in == "m", "UNIFORM": v.uniform}
        if any(goes) and v.graft:
            tables.launch(kernels.size_of_directions, buffers | kinds, partial=tables.tile_sums, own=tables.graft_sums)
        kernels.choose[self.n,](
            tables.slots, tables.graft_sums, tables.tile_sums, b.alive, b.started, b.back, b.gain, b.corrections, self.n,
            b.numbers, GRAFT=v.graft, HALVED=self._halves_directions(v), RMS=self.graft.rms,
            LINEAR=self.method is None or self.method.linear, UNIFORM=v.uniform, ROOT=_type(v.root), BLOCK=REDUCE, num_warps=1,
        )  # fmt: skip
        buffers |= {"weights": b.addresses.parameters, "momenta": b.addresses.momenta}
        slots = {"slots": tables.slots, "alive": b.alive, "gain": b.gain}
        kinds |= {"MOMENTUM": v.momentum, "NESTEROV": v.nesterov, "OUT": not self.moves_parameters, "PARAM": _type(v.param)}
        tables.launch(kernels.apply, {**buffers, **slots, **kinds})

    def _apply(self, seen: Seen, i: int, part: BoundSlice, slots: slice) -> None:
        """Directions of some slots of a slice, by torch."""
        assert self.method is not None
        ctx, corrections, role = seen.contexts[i], self._buffers.correction, seen.variant.filtered_in
        ctx = replace(ctx, steps=ctx.steps[slots], alive=ctx.alive[slots])
        first, last = (self.firsts[i] + slot for slot in (slots.start, slots.stop))
        if self._torch_takes_in and (self.method.follows or part.custom_factors):
            ctx = replace(ctx, bc2=corrections("factor", first, last, seen.variant.uniform))
        if self._halves_directions(seen.variant):
            ctx = replace(ctx, sizes=Sizes(self._buffers.norms[first:last], self._buffers.back[first:last]))
        u = (part.state["m"] if role == "m" else self._stack(role, i))[slots]
        if not self.method.linear and seen.hyper.bias_correction and seen.variant.filtered:
            u = u / per_slot(corrections("filter", first, last, seen.variant.uniform), u)
        state = {name: tensor[slots] for name, tensor in part.state.items()}
        self.method.apply(state, u, ctx, self._stack("flat", i)[slots])

    def _halves_directions(self, v: Variant) -> bool:
        """Whether products with roots may be in halves."""
        return v.halves == 1 and self.method is not None

    def _shares(self, n: int) -> list[slice]:
        """Slots that are computed together. Parts of a stack are branches of a graph: none waits for the last tiles of another."""
        in_parts = self.method is not None and self.method.in_parts and self._graphs is not None
        size = -(-n // max(1, BRANCHES // len(self.slices))) if in_parts else n
        return [slice(start, min(start + size, n)) for start in range(0, n, size)]

    def _costly_first(self) -> list[tuple[int, BoundSlice]]:
        """The slices that are preconditioned. What takes long comes first."""
        return sorted(((i, part) for i, part in enumerate(self.slices) if part.key.modes), key=lambda item: -item[1].flops)


def _are_ready(grads: Sequence[Tensor], dtype: torch.dtype, strides: list[tuple[int, ...]]) -> bool:
    """Whether kernels can read gradients where they are. Every step asks, so the loops are in C."""
    return (
        {grad.dtype for grad in grads} == {dtype}
        and list(map(Tensor.stride, grads)) == strides
        and not any(address & 15 for address in map(Tensor.data_ptr, grads))
        and not any(map(Tensor.is_neg, grads))
    )


def _something(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Something to point at, of this dtype, where there is no gradient."""
    return param if param.dtype is dtype else torch.empty_like(param, dtype=dtype)


@final
class Buffers:
    """Memory on the device that stays where it is: numbers and addresses of a step, and a value for each slot."""

    def __init__(self, n: int, tensors: int, device: torch.device) -> None:
        self._size = tensors
        numbers, rows = len(Numbers._fields), len(TensorAddresses._fields)
        self._words = torch.zeros(numbers + rows * tensors, dtype=torch.int64, device=device)
        self.numbers = self._words[:numbers].view(torch.float64)
        self.bc2 = self.numbers[position(Numbers, "factor_correction")]  # a view, because graphs of refreshes keep its address
        self.addresses = TensorAddresses(*self._words[numbers:].view(rows, tensors).unbind())
        self.alive, self.scale, self.gain, self.norms, self.back = torch.ones(5, n, dtype=torch.float32, device=device).unbind()
        self.corrections = torch.ones(len(Corrections._fields), n, dtype=torch.float32, device=device)
        self.active = torch.ones(n, dtype=torch.uint8, device=device)
        self.started = torch.zeros(n, dtype=torch.uint8, device=device)
        self._all_active = True
        self._params: Sequence[Tensor] | None = None  # whose addresses are there

    def load(self, numbers: Numbers, sources: Sources, active: Sequence[bool]) -> None:
        """Copy what changes from step to step to the device, in one part. Numbers that are tensors there follow."""
        values = [0.0 if isinstance(x, Tensor) else x for x in numbers]
        rows = [list(map(Tensor.data_ptr, sources.grads))]
        if sources.params is not self._params:  # which seldom move
            parameters, momenta = (
                list(map(Tensor.data_ptr, some)) or [0] * self._size for some in (sources.params, sources.momenta)
            )
            rows = list(TensorAddresses(gradients=rows[0], parameters=parameters, momenta=momenta))
            self._params = sources.params
        addresses = [address for row in rows for address in row]
        words = torch.tensor(values, dtype=torch.float64, device="cpu").view(torch.int64)
        words = torch.cat([words, torch.tensor(addresses, device="cpu")])
        self._words[: len(words)].copy_(words, non_blocking=True)
        for i, value in enumerate(numbers):
            if isinstance(value, Tensor):
                self.numbers[i] = value
        if not (self._all_active and all(active)):
            self.active.copy_(torch.tensor(active, device="cpu"), non_blocking=True)
            self._all_active = all(active)

    def correct(self, corrections: Corrections) -> None:
        """A correction for each slot, where they differ."""
        for row, value in zip(self.corrections, corrections, strict=True):
            row.copy_(value) if isinstance(value, Tensor) else row.fill_(value)

    def correction(self, name: str, first: int, last: int, uniform: bool) -> Tensor:
        """One of the corrections: a number for all slots, or one for each of some."""
        if not uniform:
            return self.corrections[position(Corrections, name), first:last]
        return self.numbers[position(Numbers, f"{name}_correction")].float()


def _type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, DTYPES[dtype])

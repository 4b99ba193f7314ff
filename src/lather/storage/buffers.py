"""Flat buffers: pieces of parameters and gradients, laid end to end, so that one operation works on all of them."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..kernels import has_kernels
from ..linalg import exact_dtype, from_host
from ..planning.blocks import Region
from ..planning.messages import SCALE, Item
from ..planning.plan import Plan
from . import averaging
from .copies import KernelCopies, Located, Moving
from .grids import Grid, coalesce
from .step import Number, Step
from .update import prepare_gradient, update_

ScratchKey = tuple[str, str, torch.dtype]  # role, device as the plan names it, dtype
LARGEST = 1 << 24  # elements of a span that needs buffers, unless one piece has more


@final
class Scratch:
    """Memory that units use one after the other. It is as large as the unit with the largest need."""

    def __init__(self, devices: Mapping[str, torch.device]) -> None:
        self.devices = devices
        self._sizes: dict[ScratchKey, int] = {}
        self._flat: dict[ScratchKey, Tensor] = {}

    def reserve(self, key: ScratchKey, numel: int) -> None:
        self._sizes[key] = max(numel, self._sizes.get(key, 0))

    def take(self, key: ScratchKey, *shape: int, start: int = 0) -> Tensor:
        if key not in self._flat:
            _, device, dtype = key
            self._flat[key] = torch.zeros(self._sizes[key], dtype=dtype, device=self.devices[device])
        return self._flat[key][start : start + math.prod(shape)].view(*shape)


class SpanKey(NamedTuple):
    """What the parameters of a span have in common."""

    group: int
    device: str
    dtype: str


@dataclass
class Span:
    """Where pieces of parameters of one param group and dtype lie in a flat buffer, and in a buffer of messages."""

    key: SpanKey
    numel: int = 0
    grids: list[Grid] = field(default_factory=list)
    travelling: list[Grid] = field(default_factory=list)  # the same, in the buffer of messages
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # offset here, offset in the messages, elements
    scales: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, param: int, region: Region, item: Item | None = None) -> None:
        """Append a region of what is stored of a parameter. ``item`` is the message that it travels in, if any."""
        if item is not None:
            self.travelling.append(Grid(param, item.offset, region.start, region.shape))
            _extend(self.parts, self.numel, item.offset, region.numel)
            if item.scale is not None:
                _extend(self.scales, SCALE * len(self.grids), item.scale, SCALE)
        self.grids.append(Grid(param, self.numel, region.start, region.shape))
        self.numel += region.numel


def _extend(parts: list[tuple[int, int, int]], here: int, there: int, size: int) -> None:
    """Add a part, or lengthen the last one if this continues it."""
    if parts and (parts[-1][0] + parts[-1][2], parts[-1][1] + parts[-1][2]) == (here, there):
        parts[-1] = (parts[-1][0], parts[-1][1], parts[-1][2] + size)
    else:
        parts.append((here, there, size))


def spans(plan: Plan, me: int, items: Iterable[Item], buffers: Callable[[SpanKey], Collection[Any]]) -> list[Span]:
    """The pieces of a buffer of messages that this place stores, by param group and dtype. ``buffers`` has those that a span needs.
    A span that needs some has at most ``LARGEST`` elements, unless one piece has more."""
    done: list[Span] = []
    open_: dict[SpanKey, Span] = {}
    for item in items:
        param, region = plan.blocks[item.move.block].param, item.move.region
        spec = plan.specs[param]
        key = SpanKey(spec.group, spec.device, spec.dtype)
        if key in open_ and open_[key].numel + region.numel > LARGEST and buffers(key):
            done.append(open_.pop(key))
        open_.setdefault(key, Span(key)).add(param, plan.local(param, region, me), item)
    return [*done, *open_.values()]


@final
class FlatBuffer:
    """A flat buffer, and where the tensors that it is copied from and to lie in it.

    Tensors are given when they are loaded or bound. ``tensors`` are those that stay where they are for good.
    """

    def __init__(self, grids: Sequence[Grid], flat: Tensor, tensors: Mapping[Any, Tensor] | None = None) -> None:
        self.flat, self._grids = flat, grids
        self.keys = tuple(dict.fromkeys(grid.key for grid in grids))
        self._bound: Mapping[Any, Tensor] = Located(tensors or {})
        self._stay = tensors is not None
        self._views: list[Tensor | None] = []  # of the tensors that are bound, one for each slot
        self._are_whole = False  # whether the views are the tensors themselves
        by_kernel = has_kernels(flat.device)
        self._into = KernelCopies(grids, flat, self.keys, into_flat=True) if by_kernel else None
        self._out = KernelCopies(grids, flat, self.keys, into_flat=False) if by_kernel else None

    @cached_property
    def _slots(self) -> list[Tensor]:
        return [grid.of_flat(self.flat) for grid in self._grids]

    def load(self, tensors: Mapping[Any, Tensor] | None = None) -> Tensor:
        """Fill in tensors, or those that are bound. Slots of missing tensors become zero."""
        if not self._grids:
            return self.flat
        if self._into and self._into.run(self._bound if tensors is None else tensors):
            return self.flat
        views = self._views_of(tensors) if tensors is not None else self._views or self._look_up()
        there = [(slot, view) for slot, view in zip(self._slots, views, strict=True) if view is not None]
        if there:
            torch._foreach_copy_([slot for slot, _ in there], [view for _, view in there])
        if len(there) < len(views):
            for slot, view in zip(self._slots, views, strict=True):
                if view is None:
                    slot.zero_()
        return self.flat

    def bind(self, tensors: Mapping[Any, Tensor]) -> Tensor:
        """As :meth:`load`, for tensors that :meth:`save` writes back to. They stay where they are until then."""
        if self._bound is not tensors:
            self._bound, self._views = tensors, []
        return self.load()

    def save(self, only: Collection[int] | None = None) -> None:
        """Write back to the tensors that are bound, or to some of them."""
        if not (self._out and self._out.run(self._bound, only)):
            pairs = zip(self._views or self._look_up(), self._slots, self._grids, strict=True)
            some = [(view, slot) for view, slot, grid in pairs if view is not None and (only is None or grid.key in only)]
            if some:
                torch._foreach_copy_([view for view, _ in some], [slot for _, slot in some])
        if not (self._stay or self._are_whole):  # a view keeps memory alive that the user may want to free between steps
            self._bound, self._views = {}, []

    def _look_up(self) -> list[Tensor | None]:
        """Views of the tensors that are bound."""
        self._views = self._views_of(self._bound)
        pairs = zip(self._views, self._grids, strict=True)
        self._are_whole = all(view is self._bound.get(grid.key) for view, grid in pairs)
        return self._views

    def _views_of(self, tensors: Mapping[Any, Tensor]) -> list[Tensor | None]:
        """One for each slot; None if the tensor is missing."""
        found = [(tensors.get(grid.key), grid, slot) for grid, slot in zip(self._grids, self._slots, strict=True)]
        return [x if x is None or x.shape == slot.shape else grid.of_tensor(x) for x, grid, slot in found]


@final
class Pieces:
    """A span with its buffers: gradients are read into it, parameters are moved in it."""

    def __init__(self, span: Span, keys: Mapping[str, ScratchKey], scratch: Scratch, messages: Tensor | None) -> None:
        self.group = span.key.group
        self.members = tuple(dict.fromkeys(grid.key for grid in span.grids))
        self._keys, self._scratch, self._messages, self._span = keys, scratch, messages, span

    @cached_property
    def _buffers(self) -> dict[str, FlatBuffer]:
        """By role. They are allocated when first needed, because kernels do without them."""
        grids = coalesce(self._span.grids)
        keys = ((role, key) for role, key in self._keys.items() if role != "directions")  # those come from messages
        return {role: FlatBuffer(grids, self._scratch.take(key, self._span.numel)) for role, key in keys}

    def read(self, step: Step) -> Tensor:
        """The gradients as the mathematics sees them: flat, in the order of the span."""
        settings, buffers = step.settings[self.group], self._buffers
        w = buffers["params"].load(step.stored.params) if "params" in buffers else None
        return prepare_gradient(buffers["grads"].load(step.grads), w, settings)

    def post(self, step: Step) -> None:
        """Copy gradients into the messages that carry them away."""
        if self._keys:
            self.read(step)
            self._posted.save()
        else:
            self._straight.load(step.grads)

    def receive(self, step: Step) -> None:
        """Let the directions that messages brought move the parameters. The kernel leaves averages, and rates on the device, to
        torch."""
        settings, rate = step.settings[self.group], step.rates[self.group]
        if self._mover and settings.averaging is None and not (isinstance(rate.lr, Tensor) or isinstance(rate.decay, Tensor)):
            if self._span.scales:
                self.directions()
            numbers = Moving(rate.lr, rate.decay, settings.momentum, 1 - settings.dampening, settings.nesterov)
            if self._mover.move(step.stored.params, step.stored.kept if settings.momentum > 0 else None, numbers):
                return
        self.write(self.directions(), step)

    def directions(self) -> Tensor:
        """The directions that messages brought: flat, in the order of the span."""
        flat = self._directions
        if flat is self._brought.flat:
            self._brought.load()
        if self._span.scales:
            scales, (_, lengths) = self._scales.load().view(torch.float32).to(flat.dtype), self._elements
            flat.mul_(torch.repeat_interleave(scales, lengths, output_size=self._span.numel))
        return flat

    @cached_property
    def _directions(self) -> Tensor:
        """Where directions are: in the messages, if they lie there as they should, else in a buffer."""
        span, flat, messages = self._span, self._brought.flat, self._messages
        assert messages is not None
        if len(span.parts) == 1 and messages.dtype == flat.dtype:
            _, start, size = span.parts[0]
            return messages[start : start + size]
        return flat

    # Messages and buffers stay where they are.

    @cached_property
    def _straight(self) -> FlatBuffer:
        assert self._messages is not None
        return FlatBuffer(coalesce(self._span.travelling), self._messages)

    @cached_property
    def _mover(self) -> KernelCopies | None:
        """Moves parameters from where directions have arrived or, if they have scales, from a buffer."""
        assert self._messages is not None
        if not has_kernels(self._messages.device):
            return None
        at, flat = (self._span.grids, self._brought.flat) if self._span.scales else (self._span.travelling, self._messages)
        return KernelCopies(coalesce(at), flat, self.members, into_flat=False)

    @cached_property
    def _posted(self) -> FlatBuffer:
        return self._in_messages(self._buffers["grads"].flat, self._span.parts)

    @cached_property
    def _brought(self) -> FlatBuffer:
        return self._in_messages(self._scratch.take(self._keys["directions"], self._span.numel), self._span.parts)

    @cached_property
    def _scales(self) -> FlatBuffer:
        """Bytes, because messages are not aligned for numbers of four bytes."""
        raw = torch.empty(SCALE * len(self._span.grids), dtype=torch.int8, device=self._brought.flat.device)
        return self._in_messages(raw, self._span.scales)

    def _in_messages(self, flat: Tensor, parts: Sequence[tuple[int, int, int]]) -> FlatBuffer:
        """A flat buffer whose parts are also in the messages."""
        assert self._messages is not None
        grids = [Grid("messages", here, (there,), (size,)) for here, there, size in parts]
        return FlatBuffer(grids, flat, {"messages": self._messages})

    def write(self, p: Tensor, step: Step, only: Collection[int] | None = None) -> None:
        """Apply directions to the parameters, or to some of them: decay, momentum or averaging, learning rate."""
        settings, rate, buffers = step.settings[self.group], step.rates[self.group], self._buffers
        w, kept, exact = buffers["params"], buffers.get("kept"), buffers.get("exact")
        flat = w.bind(step.stored.params)
        other = kept.bind(step.stored.kept) if kept else None
        if settings.averaging is None:
            update_(flat, p, other, settings, rate)
        else:
            assert other is not None
            y = averaging.unrounded_(exact.bind(step.stored.exact), flat, getattr(torch, self._span.key.dtype)) if exact else flat
            averaging.average_(y, other, p, settings, rate, self._share(step.shares))
            if exact:
                flat.copy_(y)
                exact.save(only)
        if kept:
            kept.save(only)
        w.save(only)

    def _share(self, shares: Mapping[int, Number]) -> Number:
        """One number if all parameters have the same, else one for every element."""
        found: list[Any] = [shares[i] for i in self.members]
        flat = self._buffers["params"].flat
        if any(isinstance(x, Tensor) for x in found):
            values = torch.stack(found).to(flat.device)
        elif found.count(found[0]) == len(found):
            return found[0]  # type: ignore[no-any-return]
        else:
            values = from_host(found, flat, exact_dtype(flat.device))
        positions, lengths = self._elements
        return torch.repeat_interleave(values[positions], lengths, output_size=self._span.numel)

    @cached_property
    def _elements(self) -> tuple[Tensor, Tensor]:
        """For every piece, its parameter's position among the members, and its number of elements."""
        like, grids = torch.empty(0, device=self._scratch.devices[self._span.key.device]), self._span.grids
        positions, lengths = [self.members.index(grid.key) for grid in grids], [grid.numel for grid in grids]
        return from_host(positions, like, torch.int64), from_host(lengths, like, torch.int64)

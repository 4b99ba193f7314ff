"""Flat buffers: pieces of parameters and gradients, laid end to end, so that one operation works on all of them."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from ..linalg import from_host
from ..planning.blocks import Region
from ..planning.messages import SCALE, Item
from ..planning.plan import Plan
from . import averaging
from .grids import Grid, coalesce
from .step import Number, Step, Tensors
from .update import prepare_gradient, update_

ScratchKey = tuple[str, str, torch.dtype]  # role, device as the plan names it, dtype
LARGEST = 1 << 24  # elements of a span, unless one piece has more


@final
class Scratch:
    """Memory that units use one after the other. It is as large as the unit with the largest need."""

    def __init__(self, devices: Mapping[str, torch.device]) -> None:
        self.devices = devices
        self._sizes: dict[ScratchKey, int] = {}
        self._flat: dict[ScratchKey, Tensor] = {}
        self._user = 0  # an id: with a reference there would be a circle, which only the garbage collector frees

    def passes_to(self, user: object) -> bool:
        """Whether someone else has used it since this user did."""
        last, self._user = self._user, id(user)
        return last != id(user)

    def reserve(self, key: ScratchKey, numel: int) -> None:
        self._sizes[key] = max(numel, self._sizes.get(key, 0))

    def take(self, key: ScratchKey, *shape: int, start: int = 0) -> Tensor:
        if key not in self._flat:
            _, device, dtype = key
            self._flat[key] = torch.zeros(self._sizes[key], dtype=dtype, device=self.devices[device])
        return self._flat[key][start : start + math.prod(shape)].view(*shape)


@dataclass
class Span:
    """Where pieces of parameters of one param group and dtype lie in a flat buffer, and in a buffer of messages."""

    group: int
    device: str
    dtype: str  # of the parameters
    numel: int = 0
    grids: list[Grid] = field(default_factory=list)
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # offset here, offset in the messages, elements
    scales: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, param: int, region: Region, item: Item | None = None) -> None:
        """Append a region of what is stored of a parameter. ``item`` is the message that it travels in, if any."""
        if item is not None:
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


def spans(plan: Plan, me: int, items: Iterable[Item]) -> list[Span]:
    """The pieces of a buffer of messages that this place stores, by param group and dtype."""
    done: list[Span] = []
    open_: dict[tuple[int, str, str], Span] = {}
    for item in items:
        param, region = plan.blocks[item.move.block].param, item.move.region
        spec = plan.specs[param]
        key = spec.group, spec.device, spec.dtype
        if key in open_ and open_[key].numel + region.numel > LARGEST:
            done.append(open_.pop(key))
        open_.setdefault(key, Span(*key)).add(param, plan.local(param, region, me), item)
    return [*done, *open_.values()]


def copy_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first."""
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])


@final
class FlatBuffer:
    """A flat buffer, and where the tensors that it is copied from and to lie in it."""

    def __init__(self, grids: Sequence[Grid], flat: Tensor) -> None:
        self.flat = flat
        self._slots = [(grid, grid.of_flat(flat)) for grid in grids]
        self._bound: Tensors | None = None
        self._views: list[Tensor] = []  # of the tensors that are bound, one for each slot
        self._are_whole = True  # whether the views are the tensors themselves

    def load(self, tensors: Tensors) -> Tensor:
        """Fill in the tensors that there are. Slots of missing tensors keep what they held."""
        there = [(grid, slot) for grid, slot in self._slots if grid.key in tensors]
        if there:
            torch._foreach_copy_([slot for _, slot in there], _views_of(there, tensors))
        return self.flat

    def clear(self, tensors: Tensors) -> None:
        """Zero the slots of missing tensors."""
        for grid, slot in self._slots:
            if grid.key not in tensors:
                slot.zero_()

    def bind(self, tensors: Tensors) -> Tensor:
        """As :meth:`load`, for tensors that :meth:`save` writes back to. They stay where they are until then."""
        if self._bound is not tensors:
            self._bound, self._views = tensors, _views_of(self._slots, tensors)
            pairs = zip(self._views, self._slots, strict=True)
            self._are_whole = all(view is tensors[grid.key] for view, (grid, _) in pairs)
        torch._foreach_copy_([slot for _, slot in self._slots], self._views)
        return self.flat

    def save(self, only: Collection[int] | None) -> None:
        """Write back to the tensors that are bound, or to some of them."""
        pairs = zip(self._views, self._slots, strict=True)
        copy_pairs([(view, slot) for view, (grid, slot) in pairs if only is None or grid.key in only])
        if not self._are_whole:  # a view keeps memory alive that the user may want to free between steps
            self._bound, self._views = None, []


def _views_of(slots: Sequence[tuple[Grid, Tensor]], tensors: Tensors) -> list[Tensor]:
    found = [tensors[grid.key] for grid, _ in slots]
    return [x if x.shape == slot.shape else grid.of_tensor(x) for x, (grid, slot) in zip(found, slots, strict=True)]


@final
class Pieces:
    """A span with its buffers: gradients are read into it, parameters are moved in it."""

    def __init__(self, span: Span, keys: Mapping[str, ScratchKey], scratch: Scratch, messages: Tensor | None) -> None:
        self.group = span.group
        self.members = tuple(dict.fromkeys(grid.key for grid in span.grids))
        self._keys, self._scratch, self._messages, self._span = keys, scratch, messages, span

    @cached_property
    def _buffers(self) -> dict[str, FlatBuffer]:
        """By role. They are allocated when first needed, because kernels do without them."""
        grids = coalesce(self._span.grids)
        return {role: FlatBuffer(grids, self._scratch.take(key, self._span.numel)) for role, key in self._keys.items()}

    def read(self, step: Step) -> Tensor:
        """The gradients as the mathematics sees them: flat, in the order of the span."""
        settings, grads, buffers = step.settings[self.group], step.grads, self._buffers
        w = buffers["params"].load(step.stored.params) if settings.decay_mode == "l2" and "params" in buffers else None
        flat = buffers["grads"].load(grads)
        if self._messages is not None and not step.common_step:
            buffers["grads"].clear(grads)
        return prepare_gradient(flat, w, settings)

    def post(self, step: Step) -> None:
        """Copy gradients into the messages that carry them away."""
        self.read(step)
        copy_pairs(self._posted)

    def directions(self) -> Tensor:
        """The directions that messages brought: flat, in the order of the span."""
        span, flat = self._span, self._buffers["directions"].flat
        if len(self._brought) == 1 and self._brought[0][1].dtype == flat.dtype:
            return self._brought[0][1]
        copy_pairs(self._brought)
        if span.scales:  # bytes are copied first, because messages are not aligned for numbers of four bytes
            raw = torch.empty(SCALE * len(span.grids), dtype=torch.int8, device=flat.device)
            copy_pairs(self._parts(raw, span.scales))
            scales, (_, lengths) = raw.view(torch.float32).to(flat.dtype), self._elements
            flat.mul_(torch.repeat_interleave(scales, lengths, output_size=span.numel))
        return flat

    # Messages and buffers stay where they are, so what is copied between them is looked up once.

    @cached_property
    def _posted(self) -> list[tuple[Tensor, Tensor]]:
        return [(there, here) for here, there in self._parts(self._buffers["grads"].flat, self._span.parts)]

    @cached_property
    def _brought(self) -> list[tuple[Tensor, Tensor]]:
        return self._parts(self._buffers["directions"].flat, self._span.parts)

    def _parts(self, flat: Tensor, parts: Sequence[tuple[int, int, int]]) -> list[tuple[Tensor, Tensor]]:
        """Parts of a flat buffer, each with the messages that it belongs to."""
        messages = self._messages
        assert messages is not None
        return [(flat[here : here + size], messages[there : there + size]) for here, there, size in parts]

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
            y = averaging.unrounded_(exact.bind(step.stored.exact), flat, getattr(torch, self._span.dtype)) if exact else flat
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
            values = from_host(found, flat, averaging.exact_dtype(flat.device))
        positions, lengths = self._elements
        return torch.repeat_interleave(values[positions], lengths, output_size=self._span.numel)

    @cached_property
    def _elements(self) -> tuple[Tensor, Tensor]:
        """For every piece, its parameter's position among the members, and its number of elements."""
        flat, grids = self._buffers["params"].flat, self._span.grids
        positions, lengths = [self.members.index(grid.key) for grid in grids], [grid.numel for grid in grids]
        return from_host(positions, flat, torch.int64), from_host(lengths, flat, torch.int64)

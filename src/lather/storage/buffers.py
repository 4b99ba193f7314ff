"""The stored side: pieces of parameters, laid end to end in flat buffers where rules work on them all at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..linalg import from_host
from ..planning.plan import Plan
from ..runtime.exchange import SCALE, Item
from . import averaging
from . import update as rules
from .grids import Run, coalesce

ArenaKey = tuple[str, str, torch.dtype]  # role, device as the plan names it
LARGEST = 1 << 26  # elements of a chunk, unless one message has more


class Arena:
    """Scratch memory that all chunks and banks share, one after the other: as large as the largest of them needs."""

    def __init__(self, devices: Mapping[str, torch.device]) -> None:
        self.devices = devices
        self._sizes: dict[ArenaKey, int] = {}
        self._flat: dict[ArenaKey, Tensor] = {}
        self._user: object = None

    def passes_to(self, user: object) -> bool:
        """Whether someone else has used it since."""
        last, self._user = self._user, user
        return last is not user

    def reserve(self, key: ArenaKey, numel: int) -> None:
        self._sizes[key] = max(numel, self._sizes.get(key, 0))

    def take(self, key: ArenaKey, *shape: int, start: int = 0) -> Tensor:
        if key not in self._flat:
            _, device, dtype = key
            self._flat[key] = torch.zeros(self._sizes[key], dtype=dtype, device=self.devices[device])
        return self._flat[key][start : start + math.prod(shape)].view(*shape)


@dataclass
class Span:
    """Where pieces of alike parameters of one param group lie in a flat buffer, and parts of that in a buffer of messages."""

    group: int
    device: str
    dtype: str  # of the parameters
    numel: int = 0
    runs: list[Run] = field(default_factory=list)
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # offset here, offset there, elements
    scales: list[tuple[int, int, int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # elements under each scale

    def add(self, param: int, start: Sequence[int], shape: Sequence[int]) -> None:
        self.runs.append(Run(param, self.numel, tuple(start), tuple(shape)))
        self.numel += math.prod(shape)

    def add_item(self, param: int, start: Sequence[int], item: Item) -> None:
        numel = item.move.region.numel
        _extend(self.parts, self.numel, item.offset, numel)
        if item.scale is not None:
            _extend(self.scales, SCALE * len(self.lengths), item.scale, SCALE)
            self.lengths.append(numel)
        self.add(param, start, item.move.region.shape)


def _extend(parts: list[tuple[int, int, int]], here: int, there: int, size: int) -> None:
    """Add a part, or lengthen the last one if it goes on from there."""
    if parts and (parts[-1][0] + parts[-1][2], parts[-1][1] + parts[-1][2]) == (here, there):
        parts[-1] = (parts[-1][0], parts[-1][1], parts[-1][2] + size)
    else:
        parts.append((here, there, size))


def spans(plan: Plan, me: int, items: Iterable[Item]) -> list[Span]:
    """The pieces of a buffer of messages that this place stores, by param group and dtype."""
    done: list[Span] = []
    open_: dict[tuple[int, str, str], Span] = {}
    for item in items:
        param = plan.blocks[item.move.block].param
        spec = plan.specs[param]
        key = spec.group, spec.device, spec.dtype
        if key in open_ and open_[key].numel + item.move.region.numel > LARGEST:
            done.append(open_.pop(key))
        origin = plan.stored(param, me).start
        open_.setdefault(key, Span(*key)).add_item(param, item.move.region.moved(-a for a in origin).start, item)
    return [*done, *open_.values()]


class Mirror:
    """A flat buffer, and the places in it of the tensors it is copied from and to."""

    def __init__(self, runs: Sequence[Run], flat: Tensor) -> None:
        self.flat = flat
        self._slots = [(run, run.of_flat(flat)) for run in runs]
        self._loaded: list[tuple[Tensor, Tensor]] = []

    def load(self, tensors: Mapping[Any, Tensor], *, keep: bool = False) -> Tensor:
        """Fill the places of the tensors there are; the others hold whatever they held. ``keep`` is for a :meth:`save`."""
        pairs = [(slot, run.of_tensor(tensors[run.key])) for run, slot in self._slots if run.key in tensors]
        copy_pairs(pairs)
        self._loaded = pairs if keep else []
        return self.flat

    def clear(self, tensors: Mapping[Any, Tensor]) -> None:
        """Zero the places of tensors that are not there."""
        for run, slot in self._slots:
            if run.key not in tensors:
                slot.zero_()

    def save(self) -> None:
        """Write back to where it was loaded from, and let go of that."""
        copy_pairs([(view, slot) for slot, view in self._loaded])
        self._loaded = []


def copy_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first."""
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])


class Stored(NamedTuple):
    """Tensors as this rank stores them, by number of the parameter; the roles of mirrors of the same name."""

    params: Mapping[int, Tensor]
    kept: Mapping[int, Tensor]  # momentum, or what averaging keeps
    exact: Mapping[int, Tensor]  # parameters that averaging keeps unrounded

    def of(self, numbers: Sequence[int]) -> Stored:
        params, kept, exact = self
        return Stored(_some(params, numbers), _some(kept, numbers), _some(exact, numbers))


def _some(tensors: Mapping[int, Tensor], numbers: Sequence[int]) -> Mapping[int, Tensor]:
    return {i: tensors[i] for i in numbers if i in tensors} if tensors else tensors


class Chunk:
    """A span with its buffers: gradients are read into it, parameters moved in it."""

    def __init__(self, span: Span, keys: Mapping[str, ArenaKey], arena: Arena, messages: Tensor | None) -> None:
        self.group = span.group
        self._dtype: torch.dtype = getattr(torch, span.dtype)
        self.members = tuple(dict.fromkeys(run.key for run in span.runs))
        self._keys, self._arena, self._messages, self._span = keys, arena, messages, span
        self._lengths = from_host(span.lengths, messages, torch.int64) if messages is not None else None

    @cached_property
    def _mirrors(self) -> dict[str, Mirror]:
        """Buffers of tensors by role, taken when they are first needed: a fleet does without them."""
        runs = coalesce(self._span.runs)
        keys = {role: key for role, key in self._keys.items() if role != "directions"}
        return {role: Mirror(runs, self._arena.take(key, self._span.numel)) for role, key in keys.items()}

    @cached_property
    def _flat(self) -> Tensor:
        return self._arena.take(self._keys["directions"], self._span.numel)

    def read(self, grads: Mapping[int, Tensor], params: Mapping[int, Tensor], group: Mapping[str, Any]) -> Tensor:
        """The gradients as the mathematics sees them: flat, in the order of the span."""
        coupled = "params" in self._mirrors and group["weight_decay_mode"] == "l2"
        w = self._mirrors["params"].load({i: params[i] for i in self.members}) if coupled else None
        flat = self._mirrors["grads"].load(grads)
        if self._messages is not None and any(i not in grads for i in self.members):
            self._mirrors["grads"].clear(grads)
        return rules.prepare_gradient(flat, w, group)

    def post(self, flat: Tensor) -> None:
        """Copy gradients into the messages that carry them away."""
        copy_pairs([(self._message(there, size), flat[here : here + size]) for here, there, size in self._span.parts])

    def directions(self) -> Tensor:
        """The directions that messages brought: flat, in the order of the span."""
        assert self._messages is not None and self._lengths is not None
        parts = self._span.parts
        if len(parts) == 1 and self._messages.dtype == self._flat.dtype:
            return self._message(parts[0][1], parts[0][2])
        copy_pairs([(self._flat[here : here + size], self._message(there, size)) for here, there, size in parts])
        if self._span.scales:
            self._flat.mul_(torch.repeat_interleave(self._scales(), self._lengths, output_size=self._span.numel))
        return self._flat

    def _scales(self) -> Tensor:
        """Bytes are copied first: messages are not aligned for numbers of four bytes."""
        assert self._messages is not None
        raw = torch.empty(SCALE * len(self._span.lengths), dtype=torch.int8, device=self._messages.device)
        copy_pairs([(raw[here : here + size], self._message(there, size)) for here, there, size in self._span.scales])
        return raw.view(torch.float32).to(self._flat.dtype)

    def _message(self, start: int, size: int) -> Tensor:
        assert self._messages is not None
        return self._messages[start : start + size]

    def write(self, p: Tensor, stored: Stored, shares: averaging.Shares, group: Mapping[str, Any]) -> None:
        """Apply directions to the parameters there are: decay, momentum or averaging, learning rate."""
        w, m, exact = self._mirrors["params"], self._mirrors.get("kept"), self._mirrors.get("exact")
        flat = w.load(stored.params, keep=True)
        y = averaging.unrounded_(exact.load(stored.exact, keep=True), flat, self._dtype) if exact else flat
        share = self._share(shares) if shares else None
        rules.update_(y, p, m.load(stored.kept, keep=True) if m else None, group, share)
        if exact:
            flat.copy_(y)
            exact.save()
        if m:
            m.save()
        w.save()

    def _share(self, shares: averaging.Shares) -> float | Tensor | None:
        """A number if all parameters have the same, else one for every element; None if nothing is averaged."""
        if self.members[0] not in shares:
            return None
        found = [shares[i] for i in self.members]
        flat = self._mirrors["params"].flat
        if tensors := [x for x in found if isinstance(x, Tensor)]:
            values = torch.stack(tensors).to(flat.device)
        elif found.count(found[0]) == len(found):
            return found[0]
        else:
            values = from_host(found, flat, averaging.exact_dtype(flat.device))  # type: ignore[arg-type]
        at, lengths = self._elements
        return torch.repeat_interleave(values[at], lengths, output_size=self._span.numel)

    @cached_property
    def _elements(self) -> tuple[Tensor, Tensor]:
        """The member that every run is of, and how many elements it has."""
        flat, runs = self._mirrors["params"].flat, self._span.runs
        at = [self.members.index(run.key) for run in runs]
        lengths = [math.prod(run.shape) for run in runs]
        return from_host(at, flat, torch.int64), from_host(lengths, flat, torch.int64)

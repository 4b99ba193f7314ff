"""Numerical failure is data: banks count it, the host reads the counts without making the device wait."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..compute.bank import Bank
from ..methods.shampoo import factors_of, modes_of, refreshed
from ..settings import Settings
from .ranks import Peers
from .run import Run

ALARM = 10  # steps between looks at the failures of all ranks; the same whatever options a rank knows of


class NumericalWarning(RuntimeWarning):
    """A gradient was not finite, or a root could not be refreshed. Training goes on without it."""


class Health:
    """Reads the banks' counts and reports them by parameter name."""

    def __init__(self) -> None:
        self._alarm, self._calls = Alarm(), 0
        self._arriving: dict[Bank, tuple[Tensor, Any]] = {}  # counts on their way from the device
        self._reported: set[str] = set()

    def keep(self, banks: Iterable[Bank]) -> None:
        """Let go of banks that are no more."""
        self._alarm = Alarm()
        live = set(banks)
        self._arriving = {bank: counts for bank, counts in self._arriving.items() if bank in live}

    def report(self, run: Run, settings: Sequence[Settings], peers: Peers) -> None:
        """Report failures after a step: every time where reading is free, now and then where it is not.

        On CUDA the counts are under way for a while, and are read once they have arrived.
        """
        for bank in run.banks:
            if bank.background.error:
                self._tell_lost(bank.background.error)
            counts: Sequence[Sequence[int]] | None
            if bank.counts.is_cpu:
                counts = bank.counts.tolist()
            elif run.steps[bank.blocks[0].param] % settings[bank.key.group].frequency == 0:
                counts = self._read(bank)
            else:
                continue
            if counts is not None:
                bank.failing = frozenset(slot for slot, failed in enumerate(counts[1]) if failed)
                if any(map(any, counts)):
                    self._tell(bank, counts, run, settings[bank.key.group], alone=not peers.comms)
        self._calls += 1
        if peers.comms and self._calls % ALARM == 0 and self._alarm.rings(run.banks, settings, peers):
            raise RuntimeError(peers.tell(failures(run.banks, settings, run.name_of)))

    def _tell_lost(self, error: str) -> None:
        message = f"roots could not be computed in the background ({error}); the last ones are kept"
        self._warn(message, once=error.partition(":")[0])

    def _tell(self, bank: Bank, counts: Sequence[Sequence[int]], run: Run, settings: Settings, alone: bool) -> None:
        """A rank that is not ``alone`` does not raise: all do, together, when the :class:`Alarm` says so."""
        for slot, (skipped, failed) in enumerate(zip(*counts, strict=True)):
            block = bank.blocks[slot]
            name = run.name_of(block.param)
            if alone and failed > settings.max_failed_refreshes:
                raise RuntimeError(_failure(bank, slot, name, failed, settings, lost(run.banks)))
            if failed:
                self._warn(f"the root of block {block.index} of parameter {name} could not be refreshed; its last one is kept")
            if skipped:
                self._warn(f"parameter {name} had a gradient with NaN or Inf; the blocks concerned were not updated")

    def _warn(self, message: str, once: str | None = None) -> None:
        """Only the first time for each message, or for what is to be told ``once``."""
        if (once or message) not in self._reported:
            self._reported.add(once or message)
            warnings.warn(message, NumericalWarning, stacklevel=7)  # the line that called opt.step()

    def _read(self, bank: Bank) -> Sequence[Sequence[int]] | None:
        arrived = None
        if bank in self._arriving and self._arriving[bank][1].query():
            arrived = cast("list[list[int]]", self._arriving.pop(bank)[0].tolist())
        if bank not in self._arriving:
            self._arriving[bank] = _to_host(bank.counts)
        return arrived


class Alarm:
    """Tells all ranks that a root failed too often on one of them, so that they stop together.

    To be called at steps that all ranks share. On CUDA an answer is read when it is called next, so nobody waits.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, Any] | None = None

    def rings(self, banks: Sequence[Bank], settings: Sequence[Settings], peers: Peers) -> bool:
        flag = torch.zeros((), dtype=torch.int32, device=peers.device)
        for bank in banks:
            flag = flag.maximum(too_many(bank, settings[bank.key.group]).any().to(flag.device, torch.int32))
        flag = peers.reduce_max(flag)
        if flag.device.type != "cuda":
            return bool(flag.item())
        before, self._last = self._last, _to_host(flag)
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0].item())


def too_many(bank: Bank, settings: Settings) -> Tensor:
    """``[n]`` bool: the slots whose root failed more often in a row than is allowed."""
    return bank.failed > settings.max_failed_refreshes


def failures(banks: Sequence[Bank], settings: Sequence[Settings], name_of: Callable[[int], str]) -> str | None:
    """What to say about the first block that failed too often, if there is one."""
    for bank in banks:
        mine = settings[bank.key.group]
        for slot in too_many(bank, mine).nonzero().flatten().tolist()[:1]:
            name = name_of(bank.blocks[slot].param)
            return _failure(bank, slot, name, int(bank.failed[slot]), mine, lost(banks))
    return None


def _to_host(tensor: Tensor) -> tuple[Tensor, Any]:
    """A copy under way to pinned memory, and the event that it has arrived with."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host, torch.cuda.current_stream(tensor.device).record_event()


def nonfinite(grads: Mapping[int, Tensor]) -> list[int]:
    """The keys of gradients with NaN or Inf. Waits for the device."""
    keys = [i for i, grad in grads.items() if grad.numel()]
    if not keys:
        return []
    sizes = torch._foreach_norm([grads[i] for i in keys], float("inf"))
    finite = torch.stack([size.float().to(sizes[0].device) for size in sizes]).isfinite().tolist()
    return [i for i, fine in zip(keys, finite, strict=True) if not fine]


def refuse_nonfinite(grads: Mapping[int, Tensor], run: Run, settings: Sequence[Settings], peers: Peers) -> None:
    """Under ``on_nonfinite="raise"``, raise on all ranks if a gradient has NaN or Inf."""
    strict = [settings[spec.group].raise_on_nonfinite for spec in run.plan.specs]
    bad = nonfinite({i: grad for i, grad in grads.items() if strict[i]})
    message = peers.tell(
        f"parameter {run.name_of(bad[0])} has NaN or Inf in its gradient at step {run.steps[bad[0]] + 1}; nothing was "
        "updated (on_nonfinite='raise')"
        if bad
        else None
    )
    if message is not None:
        raise FloatingPointError(message)


def tally(banks: Iterable[Bank], name_of: Callable[[int], str]) -> dict[str, dict[str, int]]:
    """For each parameter with any, the most that one of its blocks has: gradients skipped, refreshes failed in a row."""
    found: dict[str, dict[str, int]] = {}
    for bank in banks:
        for block, skipped, failed in zip(bank.blocks, *bank.counts.tolist(), strict=True):
            if skipped or failed:
                seen = found.setdefault(name_of(block.param), {"skipped": 0, "failed": 0})
                seen["skipped"], seen["failed"] = max(seen["skipped"], skipped), max(seen["failed"], failed)
    return found


def _failure(bank: Bank, slot: int, name: str, failed: int, settings: Settings, error: str | None) -> str:
    eps = settings.hyper.eps
    one, state = slice(slot, slot + 1), bank.state
    factors = [factors_of(state, i, one, refreshed(state, i))[0] for i in modes_of(state)]
    conditions = ", ".join(_condition(factor, eps) for factor in factors)
    cause = f". The last error was {error}" if error else ""
    return (
        f"the root of block {bank.blocks[slot].index} of parameter {name} (shape {bank.key.shape}) failed to refresh "
        f"{failed} times in a row, more than max_failed_refreshes={settings.max_failed_refreshes}; condition numbers of "
        f"its factors: {conditions}{cause}. Raise eps (now {eps:g}), lower the learning rate, or choose another root solver"
    )


def lost(banks: Iterable[Bank]) -> str | None:
    """Why a refresh in the background came to nothing, if the last one of some bank has."""
    return next((bank.background.error for bank in banks if bank.background.error), None)


def _condition(factor: Tensor, eps: float) -> str:
    if not factor.isfinite().all():
        return "not finite"
    values = torch.linalg.eigvalsh(factor.double().cpu()) if factor.dim() == 2 else factor.double()
    return f"{float((values.max() + eps) / (values.min().clamp_min(0) + eps)):.1e}"

"""Numerical failure is data: banks count it, and the host reads the counts without making the device wait."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from ..compute.bank import Bank
from ..methods.shampoo import factors_of, modes_of
from ..settings import Settings
from ..storage.tensors import local
from .ranks import Peers
from .run import Run

_ANEW = "NaN or Inf in the state or the direction of parameter {}; the state of the affected blocks starts anew"
PATIENCE = 2  # failures in a row before a warning, on a device: once the host knows of them, the next refresh is by eigh
Counts = Sequence[Sequence[int]]  # gradients skipped, refreshes failed in a row, and whether the direction broke, by slot


class NumericalWarning(RuntimeWarning):
    """A gradient or a state was not finite, or a root could not be refreshed. Training continues without it."""


@final
class Health:
    """Reads the banks' counts and reports them by parameter name."""

    def __init__(self) -> None:
        self._arriving: dict[Bank, tuple[Tensor, Any]] = {}  # counts on their way from the device
        self._reported: set[str] = set()

    def keep(self, banks: Iterable[Bank]) -> None:
        """Forget banks that no longer exist."""
        live = set(banks)
        self._arriving = {bank: counts for bank, counts in self._arriving.items() if bank in live}

    def report(self, run: Run, settings: Sequence[Settings], *, alone: bool) -> None:
        """Report failures after a step. On CUDA counts are read once per period, and arrive a while later."""
        for bank in run.banks:
            mine = settings[bank.key.group]
            counts: Counts | None = None
            if bank.background.error:
                self._tell_lost(bank.background.error)
            if bank.counts.is_cpu:
                counts = bank.counts.tolist()
            elif run.steps[bank.blocks[0].param] % mine.frequency == 0:
                counts = self._read(bank)
            if counts is not None:
                bank.failing = frozenset(slot for slot, failed in enumerate(counts[1]) if failed)
                if any(map(any, counts)):
                    self._tell(bank, counts, run, mine, alone)

    def check(self, run: Run, settings: Sequence[Settings]) -> None:
        """After a checkpoint was loaded: start state anew that is not finite, and say so."""
        self._arriving.clear()  # what was counted before
        found = set[int]()
        for bank in run.banks:
            if slots := bank.not_finite(range(len(bank.blocks))):
                bank.restart(slots, settings[bank.key.group])
                found.update(bank.blocks[slot].param for slot in slots)
        for i, views in enumerate(run.views):  # what is shaped like a parameter starts anew in the next step
            if not all(local(view).isfinite().all() for key, view in views.items() if "." not in key):
                found.add(i)
        for i in sorted(found):
            self._warn(f"the checkpoint has {_ANEW.format(run.name_of(i))}", stacklevel=6)

    def _tell_lost(self, error: str) -> None:
        self._warn(f"roots could not be computed in the background ({error}); the last ones are kept", error.partition(":")[0])

    def _tell(self, bank: Bank, counts: Counts, run: Run, settings: Settings, alone: bool) -> None:
        """A rank that is not ``alone`` does not raise. All ranks do so together, before a later step."""
        known, anew = bank.skips, _to_restart(bank, counts)
        if anew:
            run.finish()  # a refresh in the background would write into them
            bank.restart(sorted(anew), settings)
            self._arriving.pop(bank, None)  # counts from before
        for slot, (skipped, failed, _) in enumerate(zip(*counts, strict=True)):
            block = bank.blocks[slot]
            name = run.name_of(block.param)
            if slot in anew:
                self._warn(f"a step found {_ANEW.format(name)}")
                continue
            if alone and failed > settings.max_failed_refreshes:
                raise RuntimeError(_failure(run, bank, slot, failed, settings))
            if failed > (0 if bank.counts.is_cpu else PATIENCE):
                self._warn(f"the root of block {block.index} of parameter {name} could not be refreshed; its last one is kept")
            if skipped != known[slot]:
                rate = ", or a learning rate that is NaN, infinite or negative" if settings.rate_on_device else ""
                cause = f"a gradient with NaN or Inf, or too large to be squared{rate}"
                self._warn(f"parameter {name} had {cause}; its affected blocks were not updated")

    def _warn(self, message: str, once: str | None = None, stacklevel: int = 10) -> None:
        """Only the first time for each message, or for each ``once``. By default for the line that called opt.step()."""
        if (once or message) not in self._reported:
            self._reported.add(once or message)
            warnings.warn(message, NumericalWarning, stacklevel=stacklevel)

    def _read(self, bank: Bank) -> Counts | None:
        """Counts that have arrived since they were asked for. Asks for new ones."""
        if not bank.counts.is_cuda:
            return bank.counts.tolist()
        arrived = None
        if bank in self._arriving and self._arriving[bank][1].query():
            arrived = self._arriving.pop(bank)[0].tolist()
        if bank not in self._arriving:
            self._arriving[bank] = to_host(bank.counts)
        return arrived


def too_many(banks: Iterable[Bank], settings: Sequence[Settings]) -> Tensor | None:
    """Whether a root failed too often. The host does not wait. None if there are no roots."""
    flags = [(bank.failed > settings[bank.key.group].max_failed_refreshes).any() for bank in banks]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any() if flags else None


def failures(run: Run, settings: Sequence[Settings]) -> str | None:
    """The error message for the first block that failed too often, if there is one."""
    for bank in run.banks:
        mine = settings[bank.key.group]
        for slot in (bank.failed > mine.max_failed_refreshes).nonzero().flatten().tolist()[:1]:
            return _failure(run, bank, slot, int(bank.failed[slot]), mine)
    return None


def to_host(tensor: Tensor) -> tuple[Tensor, Any]:
    """A copy on its way to pinned memory, and the event that tells that it has arrived."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host, torch.cuda.current_stream(tensor.device).record_event()


def refuse_nonfinite(grads: Mapping[int, Tensor], run: Run, settings: Sequence[Settings], peers: Peers) -> None:
    """Under ``on_nonfinite="raise"``, raise on all ranks if a gradient has NaN or Inf. The host waits."""
    strict = [settings[spec.group].raise_on_nonfinite for spec in run.plan.specs]
    mine, message = [i for i, grad in grads.items() if strict[i] and grad.numel()], None
    if mine:
        sizes = torch._foreach_norm([grads[i] for i in mine], float("inf"))
        finite = torch.stack([size.float().to(sizes[0].device) for size in sizes]).isfinite().tolist()
        if bad := [i for i, fine in zip(mine, finite, strict=True) if not fine]:
            name, step = run.name_of(bad[0]), run.steps[bad[0]] + 1
            message = f"parameter {name} has NaN or Inf in its gradient at step {step}; nothing was updated (on_nonfinite='raise')"
    message = peers.tell(message)
    if message is not None:
        raise FloatingPointError(message)


def tally(run: Run) -> dict[str, dict[str, int]]:
    """By parameter with failures: the most gradients skipped, refreshes failed in a row, and restarts, of any of its blocks."""
    found: dict[str, dict[str, int]] = {}
    for bank in run.banks:
        for block, restarts, skipped, failed, broken in zip(bank.blocks, bank.restarts, *bank.counts.tolist(), strict=True):
            mine = {"skipped": skipped, "failed": failed, "restarted": restarts + broken}
            if any(mine.values()):
                name = run.name_of(block.param)
                seen = found.get(name, mine)
                found[name] = {key: max(count, seen[key]) for key, count in mine.items()}
    return found


def _to_restart(bank: Bank, counts: Counts) -> set[int]:
    """The slots that have broken, and those that skipped or failed because their state is not finite."""
    skipped, failed, broken = counts
    slots = {slot for slot, was in enumerate(broken) if was}
    doubtful = [slot for slot, times in enumerate(failed) if times or skipped[slot] != bank.skips[slot]]
    bank.skips = list(skipped)
    return slots | {*bank.not_finite(doubtful)} if doubtful else slots


def _failure(run: Run, bank: Bank, slot: int, failed: int, settings: Settings) -> str:
    block, eps, one, state = bank.blocks[slot], settings.hyper.eps, slice(slot, slot + 1), bank.state
    factors = [factors_of(state, i, one)[0] for i in modes_of(state)]
    conditions = ", ".join(_condition(factor, eps) for factor in factors)
    errors = [other.background.error for other in run.banks if other.background.error]
    cause = f". The last error was {errors[0]}" if errors else ""
    remedy = f"Raise eps (now {eps:g}; factor_eps in from_adam and from_adamw), lower the learning rate, or take another solver"
    if settings.hyper.root_dtype == torch.float16:
        remedy = "float16 is too short for large roots: use root_dtype='bfloat16'"
    return (
        f"the root of block {block.index} of parameter {run.name_of(block.param)} (shape {bank.key.shape}) failed to refresh "
        f"{failed} times in a row, more than max_failed_refreshes={settings.max_failed_refreshes}; condition numbers of "
        f"its factors: {conditions}{cause}. {remedy}"
    )


def _condition(factor: Tensor, eps: float) -> str:
    if not factor.isfinite().all():
        return "not finite"
    factor = factor.cpu().double()
    values = torch.linalg.eigvalsh(factor) if factor.dim() == 2 else factor
    return f"{float((values.max() + eps) / (values.min().clamp_min(0) + eps)):.1e}"

"""A view into a run: metrics of a step every so often, written where the user wants them."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, final

from torch import Tensor

from .optimizer import Shampoo
from .options import whole
from .runtime.session import my_rank

Record = dict[str, Any]  # step, time, lr, what was noted, and the metrics
OWN = ("step", "time", "metrics")  # names that a note cannot have
BEGINNING = b'{"step": '  # of every line
Writer = Callable[[Record], object]


@final
class Monitor:
    """Writes the metrics of an optimizer's first step, and then of one in ``every`` steps: 99, 199, 299 and so on for 100.

    Those come right before a refresh, so they show roots when they are oldest.

    ``to`` is the path of a file of JSON lines (``lather view`` makes a page of it), a TensorBoard ``SummaryWriter``, a run of
    Weights & Biases, or a function that is called with each record; or a list of these. ``by`` is ``"kind"`` or ``"parameter"``.

    With several ranks, make it on all of them, not on rank 0 alone: metrics are gathered from all ranks, and rank 0 writes. A
    step that is recorded takes longer, and all ranks wait for each other. Other steps are as without a monitor.

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.Shampoo(model, lr=1e-2)
    >>> monitor = lather.Monitor(opt, every=100, to=lambda record: print(record["step"], list(record["metrics"])))
    >>> loss = model(torch.randn(16, 8)).square().mean()
    >>> loss.backward()
    >>> monitor.note(loss=loss)
    >>> opt.step()
    1 ['weights', 'bias']
    """

    def __init__(self, opt: Any, every: int = 100, to: Any = "run.jsonl", by: str = "kind") -> None:
        opt = unwrapped(opt)
        if not isinstance(opt, Shampoo):
            raise TypeError(f"a Monitor needs an optimizer of lather's, not {type(opt).__name__}")
        if by not in ("parameter", "kind"):
            raise ValueError(f"by is {by!r}; it must be 'parameter' or 'kind'")
        self.record: Record | None = None  # the last one, on every rank
        self._opt, self._every, self._by = opt, whole("every", every), by
        self._noted: dict[str, Any] = {}
        self._began = time.monotonic()
        self._due = False  # whether this step is written
        self._seen: Any = None  # the session's record before this step
        targets = list(to) if isinstance(to, (list, tuple)) else [to]
        is_first = my_rank() == opt._session.world()[0]
        self._writers = [writer_to(target) for target in targets] if is_first else []
        self._hooks = [opt.register_step_pre_hook(self._before), opt.register_step_post_hook(self._after)]

    def note(self, **numbers: Any) -> None:
        """Numbers for the next record alone, such as ``loss``. Tensors are not read until then."""
        for name, x in numbers.items():
            if name in OWN:
                raise ValueError(f"note({name}=...) is not possible, because a record has its own {name!r}; choose another name")
            if x.numel() != 1 if isinstance(x, Tensor) else not isinstance(x, Real):
                raise ValueError(f"note({name}=...) takes a number or a tensor of one element, not {x!r}")
        self._noted |= {name: x.detach() if isinstance(x, Tensor) else x for name, x in numbers.items()}

    def close(self) -> None:
        """Stop. The optimizer is then as before."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, *_: Any) -> None:
        session = self._opt._session
        self._seen, self._due = session.record, self.record is None or (session.count + 2) % self._every == 0
        if self._due:
            self._opt.arm()

    def _after(self, *_: Any) -> None:
        session = self._opt._session
        if not self._due or session.record is self._seen:  # armed by the user alone, or there was nothing to do
            return
        metrics = self._opt.metrics(self._by, gather=True)
        numbers = {"time": time.monotonic() - self._began, "lr": self._opt.param_groups[0]["lr"], **self._noted}
        self._noted = {}
        self.record = {"step": session.count, **{name: float(x) for name, x in numbers.items()}, "metrics": metrics}
        for write in self._writers:
            write(self.record)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of a trainer's wrapper."""
    while not isinstance(optimizer, Shampoo) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def writer_to(target: Any) -> Writer:
    """What writes records to a target."""
    if isinstance(target, (str, os.PathLike)):
        path = os.path.abspath(target)
        _begin(path)
        return lambda record: _append(path, record)
    if hasattr(target, "add_scalar"):
        return lambda record: [target.add_scalar(name, x, record["step"]) for name, x in flat(record).items()]
    if callable(getattr(target, "log", None)):
        return lambda record: target.log(flat(record), commit=False)  # joins what the user logs next
    if callable(target):
        return target  # type: ignore[no-any-return]
    raise TypeError(
        f"to is a {type(target).__name__}; it must be a path, a TensorBoard SummaryWriter, a Weights & Biases run or a function"
    )


def flat(record: Mapping[str, Any], prefix: str = "lather") -> dict[str, float]:
    """The metrics that are finite, by names such as ``lather/weights/condition``."""
    return {
        f"{prefix}/{key}/{name}": value
        for key, values in record["metrics"].items()
        for name, value in values.items()
        if math.isfinite(value)
    }


def _begin(path: str) -> None:
    """Make the file, or take that of an earlier run. A mistake in the path shows at once."""
    with open(path, "ab+") as file:
        file.seek(0)
        if not BEGINNING.startswith(file.read(len(BEGINNING))):
            raise ValueError(f"to={path!r} is a file that no Monitor wrote; choose another name")
        file.seek(0)
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))  # a job that was killed may have left half a line


def _append(path: str, record: Record) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(_plain(record), allow_nan=False) + "\n")


def _plain(x: Any) -> Any:
    """As JSON has it, where numbers are finite."""
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    return None if isinstance(x, float) and not math.isfinite(x) else x

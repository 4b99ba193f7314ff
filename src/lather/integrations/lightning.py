"""Metrics with Lightning, whose checkpoints need no help."""

from typing import Any, final

try:
    from lightning.pytorch import Callback as LightningCallback
except ImportError:
    from pytorch_lightning import Callback as LightningCallback  # type: ignore[assignment,import-not-found,no-redef,unused-ignore]

from ..monitor import Monitor, flat, unwrapped
from ..optimizer import Shampoo


@final
class Callback(LightningCallback):  # type: ignore[misc,unused-ignore]
    """Logs the metrics of every lather optimizer to the trainer's loggers.

    ``every``, ``to`` and ``by`` are those of :class:`lather.Monitor`; ``to`` is for more than the loggers. If there are several
    lather optimizers, names tell them apart (``lather/0/weights/condition``), and ``to`` is refused.

    >>> from lather.integrations.lightning import Callback
    >>> callbacks = [Callback(every=100)]  # for Trainer(..., callbacks=callbacks)
    """

    def __init__(self, every: int = 100, to: Any = (), by: str = "kind") -> None:
        self._every, self._to, self._by = every, to, by
        self._monitors: list[Monitor] = []
        self._logged: list[Any] = []  # the record of each that was logged last

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.teardown(trainer, pl_module, "fit")
        ours = [opt for opt in map(unwrapped, trainer.optimizers) if isinstance(opt, Shampoo)]
        if len(ours) > 1 and self._to != ():
            raise ValueError(
                f"to={self._to!r} would mix the records of {len(ours)} lather optimizers; leave it out, and make a lather.Monitor "
                "for each of them"
            )
        self._monitors = [Monitor(opt, self._every, self._to, self._by) for opt in ours]
        self._logged = [None] * len(ours)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for i, monitor in enumerate(self._monitors):
            record = monitor.record
            if record is not None and record is not self._logged[i]:
                self._logged[i] = record
                numbers = flat(record, f"lather/{i}" if len(self._monitors) > 1 else "lather")
                for logger in trainer.loggers:
                    logger.log_metrics(numbers, step=record["step"])

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for monitor in self._monitors:
            monitor.close()
        self._monitors = []

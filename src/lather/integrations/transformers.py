"""Complete checkpoints and routing with the Trainer of transformers.

[Note: when to gather] Trainer saves in ``_maybe_log_save_evaluate``, which all ranks run after the callbacks of a step's or an
epoch's end. Rank 0 alone then asks for the optimizer's state, and no callback runs in between. So the state has to be gathered by
a callback that comes earlier:

- at the end of a step or an epoch, if ``control.should_save`` is set. ``DefaultFlowCallback`` sets it, and is the first callback;
- there too, before an evaluation that decides about saving (``save_strategy="best"``), whatever it will decide;
- after an evaluation, if the state has changed: Trainer calls ``optimizer.eval()``, which moves state if ``averaging`` is on.

All ranks decide the same. ``control`` is equal on all of them, or Trainer itself would hang: saving begins with a collective
(``store_flos``). ``args`` are equal as well. Whether the state is gathered already changes only by steps, switches of the mode,
loading and gathering, which all ranks do together. So no rank waits for another in vain.
"""

from typing import Any, final

from transformers import TrainerCallback  # type: ignore[attr-defined,unused-ignore]

from .. import presets
from ..monitor import Monitor, flat, unwrapped
from ..optimizer import Shampoo
from ..routing import NOTHING, Kinds, Rules, route
from .accelerate import fsdp_plugin, gather, is_full_fsdp


@final
class Callback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Gathers the state of a lather optimizer before every checkpoint, so that Trainer saves all of it with several ranks.
    And logs metrics.

    Put it at the end of the callbacks: it does not see what a later one does to ``control.should_save``.

    ``every``, ``to`` and ``by`` are those of :class:`lather.Monitor`. The metrics of a step are kept with Trainer's next log, in
    ``trainer.state.log_history``. Trainer's own reporters have written that log by then, so pass your TensorBoard writer or
    Weights & Biases run as ``to``. ``every=None`` turns metrics off.

    >>> from lather.integrations.transformers import Callback
    >>> callbacks = [Callback()]  # for Trainer(..., callbacks=callbacks)
    """

    def __init__(self, every: int | None = 100, to: Any = (), by: str = "kind") -> None:
        self._every, self._to, self._by = every, to, by
        self._monitor: Monitor | None = None
        self._logged: Any = None  # the record that was logged last

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_train_end(args, state, control)
        if self._every is not None and isinstance(unwrapped(kwargs.get("optimizer")), Shampoo):
            self._monitor = Monitor(kwargs["optimizer"], self._every, self._to, self._by)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        record = self._monitor.record if self._monitor else None
        if record is not None and record is not self._logged and state.log_history:
            self._logged = record
            state.log_history[-1].update(flat(record))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before_saving(args, control.should_save or (decides(args) and control.should_evaluate), kwargs)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before_saving(args, control.should_save or decides(args), kwargs)

    def _before_saving(self, args: Any, may_save: bool, kwargs: dict[str, Any]) -> None:
        optimizer = kwargs.get("optimizer")
        accelerate = getattr(optimizer, "accelerator_state", None)
        by_ranks = fsdp_plugin(accelerate) is not None and not is_full_fsdp(accelerate)  # each rank saves what it has
        if may_save and not args.save_only_model and not by_ranks:
            gather(optimizer)


def decides(args: Any) -> bool:
    """Whether an evaluation decides about saving."""
    return bool(args.save_strategy == "best")


@final
class OptimizerFactory:
    """A lather optimizer for ``Trainer(..., optimizer_cls_and_kwargs=(OptimizerFactory, kwargs))``, routed by the model's modules.

    ``preset`` is the name of a function such as ``"from_adamw"``, or ``"Shampoo"``. ``rules`` and ``kinds`` are those of
    :func:`lather.route`. All else are the preset's arguments. The learning rate is not taken from ``TrainingArguments``.

    Trainer makes an instance and calls it with the model, because this is no subclass of torch's ``Optimizer``.

    >>> import torch
    >>> from lather.integrations.transformers import OptimizerFactory
    >>> kwargs = {"preset": "from_adamw", "lr": 1.2e-3, "weight_decay": 0.1}
    >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8))
    >>> [row.method for row in OptimizerFactory()(model, **kwargs).plan().params]
    ['shampoo', 'adam', 'adam']
    """

    def __call__(
        self, model: Any, *, preset: str = "from_adamw", rules: Rules = (), kinds: Kinds | None = NOTHING, **options: Any
    ) -> Shampoo:
        return presets.find(preset)(route(model, rules, kinds=kinds), **options)

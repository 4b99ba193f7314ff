"""Complete checkpoints with accelerate.

``Accelerator.save_state`` asks every rank for its optimizer state and writes that of the main process. So the state has to be
gathered there, and the hook that accelerate runs on all ranks before it saves is the place.
"""

from typing import Any

from ..monitor import unwrapped
from ..optimizer import Shampoo


def register(accelerator: Any) -> Any:
    """Let ``accelerator.save_state()`` save the whole state of every lather optimizer that the accelerator has prepared.

    Call it on all ranks, before or after ``prepare``. Returns a handle whose ``remove()`` undoes it. FSDP needs no gathering,
    because accelerate then saves through ``torch.distributed.checkpoint``; a full state dict is refused there.

    >>> import torch, lather
    >>> from accelerate import Accelerator
    >>> from lather.integrations.accelerate import register
    >>> accelerator = Accelerator(cpu=True)
    >>> handle = register(accelerator)
    >>> model = torch.nn.Linear(8, 4)
    >>> model, opt = accelerator.prepare(model, lather.from_adamw(model, lr=1.2e-3))
    """
    if is_full_fsdp(accelerator.state):
        raise ValueError(
            "with FSDP, accelerate saves the optimizer before any hook runs, and a FULL_STATE_DICT then lacks the blocks of other "
            "ranks; use state_dict_type='SHARDED_STATE_DICT' in the FSDP plugin"
        )

    def before_saving(models: Any, weights: Any, output_dir: str) -> None:
        if fsdp_plugin(accelerator.state) is None:
            for optimizer in accelerator._optimizers:
                gather(optimizer)

    return accelerator.register_save_state_pre_hook(before_saving)


def fsdp_plugin(state: Any) -> Any:
    """The FSDP plugin of an ``AcceleratorState``, if FSDP is used."""
    return getattr(state, "fsdp_plugin", None)


def is_full_fsdp(state: Any) -> bool:
    """Whether FSDP is used, and gathers state on one rank to save it."""
    plugin = fsdp_plugin(state)
    return plugin is not None and getattr(plugin.state_dict_type, "name", plugin.state_dict_type) == "FULL_STATE_DICT"


def gather(optimizer: Any) -> None:
    """Consolidate an optimizer on rank 0, unless that was done since its last step. All ranks must call this together.

    Nothing happens for one process, and for other optimizers than lather's.
    """
    opt = unwrapped(optimizer)
    if isinstance(opt, Shampoo) and len(opt._session.world()) > 1 and opt._session.consolidated is None:
        opt.consolidate_state_dict()

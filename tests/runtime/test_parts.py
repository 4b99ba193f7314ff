"""Who asks for a state: told by the modules and functions that are running."""

from collections.abc import Callable

import pytest

from lather.runtime.checkpoint import is_for_parts


def within(module: str, function: str) -> bool:
    """The answer, for a call from this function of this module."""
    names: dict[str, Callable[[Callable[[], bool]], bool]] = {}
    exec(f"def {function}(ask):\n    return ask()", {"__name__": module}, names)
    return names[function](lambda: is_for_parts())


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("torch.distributed.checkpoint", "anything"),
        ("torch.distributed.checkpoint.state_dict", "_init_optim_state"),
        ("torch.distributed.checkpoint.state_dict_saver", "save"),
        ("accelerate.optimizer", "__init__"),
    ],
)
def test_a_part_is_wanted(module, function):
    assert within(module, function)


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("torch.distributed.checkpointing", "save"),
        ("torch.distributed", "save"),
        ("my.torch.distributed.checkpoint", "save"),
        ("accelerate.optimizer", "state_dict"),
        ("accelerate.checkpointing", "__init__"),
        ("transformers.trainer", "_save_optimizer_and_scheduler"),
        ("", "state_dict"),
    ],
)
def test_all_is_wanted(module, function):
    assert not within(module, function)


def test_a_module_without_a_name():
    assert eval("ask()", {"ask": is_for_parts}) is False

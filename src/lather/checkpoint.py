"""The key schema of checkpoints, and loading by copy into the live views.

``opt.state[p]`` is flat: ``step``, ``momentum`` (shaped like the parameter) and ``"<role>.<block>"`` such as ``L0.3``, which
is a view of a bank. Keys depend on global shapes and options only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .blocks import Shape
from .options import OPTIONS, STRUCTURAL

Views = dict[str, Tensor]


def key(role: str, block: int) -> str:
    return f"{role}.{block}"


def check_groups(state_dict: Mapping[str, Any], live: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what is not an optimizer's state, or has param groups that were not made for this optimizer."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"not the state of an optimizer: it has the keys {_few(list(state_dict))} where 'state' and 'param_groups' are "
            "expected; pass what opt.state_dict() returned"
        )
    saved = state_dict["param_groups"]
    sizes, ours = [len(group["params"]) for group in saved], [len(group["params"]) for group in live]
    if sizes != ours:
        raise ValueError(
            f"the checkpoint has param groups of {sizes} parameters but the optimizer of {ours}; build the optimizer from the "
            "same model with the same param groups"
        )
    for number, (theirs, mine) in enumerate(zip(saved, live, strict=True)):
        if missing := [name for name in OPTIONS if name not in theirs]:
            raise ValueError(
                f"param group {number} of the checkpoint lacks the options {_few(missing)}: it was saved by another optimizer or "
                "another version of lather"
            )
        for name in STRUCTURAL:
            if theirs[name] != mine[name]:
                raise ValueError(
                    f"param group {number} of the checkpoint was saved with {name}={theirs[name]!r} but the optimizer has "
                    f"{name}={mine[name]!r}, which gives other blocks or state; construct it with {name}={theirs[name]!r}"
                )


def check_state(saved: Mapping[str, Any], live: Mapping[str, Shape], name: str) -> None:
    """Refuse the state of one parameter that does not fit, listing the first keys and the likely cause."""
    if missing := [k for k in live if k not in saved]:
        cause = (
            "saved by another optimizer, or while the parameter was frozen"
            if len(missing) == len(live)
            else "saved by one rank of several, or cut short"
        )
        raise ValueError(f"the checkpoint lacks {_few(missing)} for parameter {name}: it was probably {cause}")
    if extra := [k for k in saved if k not in live]:
        raise ValueError(
            f"the checkpoint holds {_few(extra)} for parameter {name}, which this optimizer does not have: other options or "
            "another optimizer"
        )
    for k, shape in live.items():
        if not isinstance(saved[k], Tensor) or saved[k].shape != shape:
            raise ValueError(
                f"the checkpoint's {k} for parameter {name} is {_shape(saved[k])} where {shape} is expected: the "
                "parameter had another shape when it was saved"
            )


def copy_state(saved: Mapping[str, Any], live: Views) -> None:
    """Copy what there is into the live views."""
    for k, view in live.items():
        if k in saved and saved[k].data_ptr() != view.data_ptr():
            view.copy_(saved[k])


def counts(steps: Tensor) -> list[int]:
    return [int(t) for t in steps.tolist()]


def _few(keys: Sequence[str], limit: int = 4) -> str:
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return ", ".join(map(repr, keys[:limit])) + more


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"

"""A stand-in for a Mac's GPU, so that what it lacks is found without one.

Tensors claim the device ``mps`` and live on the CPU. As on a Mac, there is no float64, an operation that torch's table of
operations does not list for MPS is an error, and so are one on tensors of both devices, a copy that is
not waited for, and a minimum so small that torch takes it for another one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchgen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("mac")
torch.mac.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]  # type: ignore[attr-defined]
MAC = torch.device("mac")
TABLE = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"


class OnMac(Tensor):
    """A tensor of the device, with its content."""

    content: Tensor

    @staticmethod
    def __new__(cls, content: Tensor) -> "OnMac":
        made = Tensor._make_wrapper_subclass(
            cls, content.shape, content.stride(), content.storage_offset(), dtype=content.dtype, device=MAC
        )
        made.content = content
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnMac({self.content})"

    def data_ptr(self) -> int:
        return self.content.data_ptr()

    def tolist(self) -> Any:
        return self.content.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class Mac(TorchDispatchMode):
    """What is made on the device is of this kind."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given = list(tensors((args, kwargs)))
    there = [x for x in given if isinstance(x, OnMac)]
    device = kwargs.get("device")
    arrives = device is not None and torch.device(device).type == MAC.type
    if not there and not arrives:
        return func(*args, **kwargs)
    moves = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default)
    if len(there) < len(given) and not moves and any(x.dim() for x in given if not isinstance(x, OnMac)):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found at least two devices, mps and cpu")
    if (there or arrives) and kwargs.get("non_blocking"):
        raise RuntimeError("a copy that is not waited for may read or write other memory (pytorch/pytorch#139550)")
    if func._schema.name in ("aten::clamp", "aten::clamp_", "aten::clamp_min", "aten::clamp_min_") and is_lost(args, kwargs):
        raise RuntimeError("a minimum this small counts as another one (pytorch/pytorch#167767)")
    leaves = device is not None and not arrives
    if not leaves and not moves and not is_listed(func):
        raise NotImplementedError(f"the operator '{func}' is not currently implemented for the MPS device")
    inside = tree_map(lambda x: x.content if isinstance(x, OnMac) else x, (args, kwargs))
    if arrives:
        inside[1]["device"] = torch.device("cpu")
    found = func(*inside[0], **inside[1])
    if func is torch.ops.aten._local_scalar_dense.default or leaves:
        return found
    if func in (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default) and not isinstance(given[0], OnMac):
        return args[0]  # to the host
    return return_and_correct_aliasing(func, args, kwargs, tree_map(wrap, found))


def wrap(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    if x.dtype == torch.float64:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
    return OnMac(x)


def tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        yield from tensors(list(found.values()))
    elif isinstance(found, (list, tuple)):
        for each in found:
            yield from tensors(each)


def is_lost(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the minimum of a clamp has no digit among the first six behind the point. Zero is there on both sides."""
    minimum = kwargs.get("min", args[1] if len(args) > 1 else None)
    return isinstance(minimum, float) and 0 < minimum < 5e-7


@cache
def is_listed(func: Any) -> bool:
    """Whether the device has an operation: by itself, or because it is made of others."""
    if func.namespace != "aten":
        return True
    schema = func._schema
    name = schema.name.removeprefix("aten::") + (f".{schema.overload_name}" if schema.overload_name else "")
    entry = listed().get(name)
    if entry is None:
        return True  # made of others, or an out= of one that is
    if delegate := re.search(r"structured_delegate: (\S+)", entry):
        entry = listed()[delegate[1]]
    keys = re.search(r"  dispatch:\n((?:    .*\n?)*)", entry)
    if keys is None or "MPS" in keys[1]:
        return True
    to = listed().get(name + ("_out" if "." in name else ".out"))  # what is composed may only call this
    return "Composite" in keys[1] and (to is None or "CPU" not in to or "MPS" in to)


@cache
def listed() -> dict[str, str]:
    """The entries of torch's table, by the name of the operation."""
    entries = re.split(r"^- func: ", TABLE.read_text(), flags=re.MULTILINE)[1:]
    return {entry.split("(")[0]: entry for entry in entries}

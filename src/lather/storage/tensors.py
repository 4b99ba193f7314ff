"""What a parameter is, a plain tensor or a DTensor, and which region of it each rank stores."""

import math
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from ..planning.layouts import Axis, Layout

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # whole numbers, by bytes
_CHUNK = 2**24


def check_parameter(param: Tensor, name: str) -> None:
    """Refuse a parameter that cannot be optimized."""
    if param.is_complex():
        raise NotImplementedError(f"parameter {name} is complex ({param.dtype}); pass torch.view_as_real of it instead")
    if not param.is_floating_point():
        raise TypeError(f"parameter {name} has dtype {param.dtype}; only floating-point parameters can be optimized")
    if getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
        raise ValueError(
            f"parameter {name} is flattened by FSDP1, which is not supported because it hides the matrices; wrap the model with "
            "torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    if is_dtensor(param):
        _layout(param, name)


def is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # importing it costs more than the rest of this package
    return module is not None and isinstance(tensor, module.DTensor)


def is_stored(param: Tensor) -> bool:
    """False for a DTensor on a mesh that this rank is not part of."""
    return not is_dtensor(param) or cast(Any, param).device_mesh.get_coordinate() is not None


def layout_of(param: Tensor, world: Sequence[int], name: str = "") -> tuple[tuple[int, ...], Layout]:
    """The ranks that store a parameter, in the order of the layout's cells, and its layout. All of ``world`` for a plain tensor."""
    if not is_dtensor(param):
        return tuple(world), Layout.everywhere(len(world))
    return tuple(cast(Any, param).device_mesh.mesh.flatten().tolist()), _layout(param, name)


def groups_of(param: Tensor) -> list[Any]:
    """The process groups of the parameter's mesh."""
    return list(cast(Any, param).device_mesh.get_all_groups()) if is_dtensor(param) else []


def describe(param: Any) -> str:
    """A parameter's type and where it is stored, to be compared between ranks."""
    text = f"{tuple(param.shape)} {param.dtype} on {param.device.type}"
    return text + (f" as {tuple(param.placements)} over {tuple(param.device_mesh.shape)}" if is_dtensor(param) else "")


def is_regular(tensor: Tensor) -> bool:
    """Whether this rank's part starts at a multiple of 16 bytes and has no gaps, so that a tensor made like it has its strides."""
    part = local(tensor)
    has_no_gaps = part.is_contiguous() or torch.empty_like(part, device="meta").stride() == part.stride()
    return part.data_ptr() % 16 == 0 and has_no_gaps


def local(tensor: Tensor) -> Tensor:
    """The part that this rank stores. Waits for a collective that has yet to bring it."""
    return _part(tensor) if is_dtensor(tensor) else tensor


def _part(tensor: Any) -> Tensor:
    """As :func:`local`, of a DTensor. ``to_local()`` would make a view, which takes ten times as long."""
    part: Tensor | Any = tensor._local_tensor
    return part.wait() if hasattr(part, "wait") else part


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor the sum of the bits of this rank's part, read as whole numbers. Exact in any order. The host waits."""
    sums = [[chunk.sum(dtype=torch.int64) for chunk in _bits(local(tensor))] for tensor in tensors]
    every = [x for some in sums for x in some]
    found = iter(torch.stack([x.to(every[0].device) for x in every]).tolist() if every else [])
    return [sum(islice(found, len(some))) % 2**64 for some in sums]


def _bits(part: Tensor) -> Sequence[Tensor]:
    """In chunks, because a sum makes a copy of what it adds up, in 64 bits."""
    bits = part.detach().view(_BITS[part.element_size()])
    bits = bits.view(-1) if bits.is_contiguous() else bits
    return torch.split(bits, max(1, _CHUNK * bits.shape[0] // max(1, bits.numel())))


def local_gradient(grad: Any, param: Any) -> Tensor:
    """The gradient of what this rank stores of ``param``, a DTensor. It is redistributed if it is not placed as its parameter."""
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return _part(grad)


def _layout(param: Any, name: str) -> Layout:
    mesh, placements = param.device_mesh, param.placements
    if any((mesh.mesh.diff(dim=i) < 0).any() for i in range(mesh.mesh.dim())):
        raise NotImplementedError(
            f"parameter {name} is on a mesh whose ranks do not ascend along its axes, {mesh.mesh.tolist()}, which torch does not "
            "treat consistently; list the ranks in ascending order"
        )
    axes = tuple(_axis(placement, size, name) for placement, size in zip(placements, mesh.shape, strict=True))
    plain = [i for i, placement in enumerate(placements) if not hasattr(placement, "split_factor")]
    strided = [i for i in range(len(axes)) if i not in plain]
    for i in strided:
        later = math.prod(axis.size for axis in axes[i + 1 :] if axis.dim == axes[i].dim)
        if placements[i].split_factor != later:
            raise NotImplementedError(
                f"parameter {name} is placed as {tuple(placements)} on a mesh of {tuple(mesh.shape)}, so its pieces are not "
                "contiguous; use a strided shard only where tensor parallelism splits first and FSDP2 splits its pieces"
            )
    return Layout(axes, (*plain, *reversed(strided)) if strided else ())


def _axis(placement: Any, size: int, name: str) -> Axis:
    if placement.is_replicate():
        return Axis(size)
    if placement.is_partial() or not hasattr(placement, "dim"):
        raise NotImplementedError(
            f"parameter {name} is placed as {placement!r}, so no rank stores its values; redistribute it to Shard or Replicate"
        )
    return Axis(size, placement.dim)

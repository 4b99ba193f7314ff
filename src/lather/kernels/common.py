"""What kernels share: columns of tables as Triton constants, and numbers in halves. Importing this needs Triton."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .schema import position

LOW = tl.constexpr(2048.0)  # a number is a half plus 1/LOW of another half: 2 x 11 bits


def column(table, name):
    """The position of a field in its table, for use in a kernel."""
    return tl.constexpr(position(table, name))


def width(table):
    """The number of columns of a table, for use in a kernel."""
    return tl.constexpr(len(table._fields))


@triton.jit
def low_half(value, high):
    """What a number is more than its high half ``value.to(tl.float16)``, times LOW."""
    return ((value - high.to(tl.float32)) * LOW).to(tl.float16)

"""A slot is rounded the same way in every stack and at every place in memory."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from geometry import Shape
from torch import Tensor

from lather import linalg


@pytest.mark.parametrize("shape", [(33,), (100,), (1, 70)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_column_is_rounded_the_same_way_in_every_stack(shape: Shape, dtype: torch.dtype) -> None:
    d = shape[-1]
    factors, x = torch.randn(5, d, d, dtype=dtype), torch.randn(5, *shape, dtype=dtype)
    mode = len(shape) - 1
    for number in range(5):
        alone = factors[number : number + 1].clone(), x[number : number + 1].clone()
        assert torch.equal(linalg.mode_product(x, factors, mode)[number], linalg.mode_product(alone[1], alone[0], mode)[0])
        assert torch.equal(linalg.rotate(x, factors)[number], linalg.rotate(alone[1], alone[0])[0])
        assert torch.equal(linalg.gram(x, mode)[number], linalg.gram(alone[1], mode)[0])
        columns = x.flatten(1)[:, :, None].repeat(1, 20, 1)  # of 660 to 2000 elements
        assert torch.equal(linalg.gram(columns, 1)[number], linalg.gram(columns[number : number + 1].clone(), 1)[0])
    whole = linalg.mode_product(x, factors + factors.mT, mode)
    torch.testing.assert_close(whole, torch.einsum("nij,n...j->n...i", factors + factors.mT, x))


def everywhere(f: Callable[..., Tensor], *matrices: Tensor) -> None:
    """The same matrices in all slots of stacks that begin anywhere in memory. All slots of the result must be the same."""
    results = []
    for n, offset in [(1, 0), (5, 0), (2, 1), (3, 4)]:
        buffers = [torch.empty(offset + n * x.numel(), dtype=x.dtype) for x in matrices]
        stacks = [b[offset:].view(n, *x.shape).copy_(x) for b, x in zip(buffers, matrices, strict=True)]
        results += f(*stacks).unbind()
    assert all(torch.equal(x, results[0]) for x in results)


SIZES = [(18, 5), (10, 5), (6, 25), (64, 147), (34, 8), (2, 100), (3, 19), (33, 33), (65, 127), (64, 96), (100, 1), (1, 70)]


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_products_are_rounded_the_same_way_in_every_place(shape: Shape, dtype: torch.dtype) -> None:
    x, (left, right) = torch.randn(shape, dtype=dtype), (torch.randn(d, d, dtype=dtype) / d**0.5 for d in shape)
    for mode, factor in enumerate((left, right)):
        everywhere(lambda x, mode=mode: linalg.gram(x, mode, 0.3), x)
        everywhere(lambda x, f, mode=mode: linalg.mode_product(x, f, mode), x, factor)
    everywhere(linalg.rotate, x, right)
    everywhere(lambda x, f: linalg.rotate(x, f.mT), x, right)
    everywhere(lambda x, f: linalg.product(f, x, add=x, beta=0.3, alpha=0.7), x, left)
    everywhere(lambda x, f: linalg.product(f, x, alpha=0.7), x, left)
    everywhere(lambda x: linalg.matrix_power(x, 6), left)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(linalg.product(left[None], x[None], add=x[None], beta=0.3, alpha=0.7)[0], 0.3 * x + 0.7 * left @ x)
    out = torch.full_like(x, torch.nan)[None]
    assert linalg.product(left[None], x[None], out, x[None], alpha=0.7, beta=0.3) is out
    close(out[0], 0.3 * x + 0.7 * left @ x)
    close(linalg.product(left[None], x[None], alpha=0.7)[0], 0.7 * left @ x)
    close(linalg.mode_product(x[None], right[None] + right.mT, 1)[0], x @ (right + right.mT))
    close(linalg.matrix_power(left[None], 6)[0], torch.linalg.matrix_power(left, 6))


@pytest.mark.parametrize("d", [1, 5, 7, 10, 18, 33, 64, 65, 127])
@pytest.mark.parametrize("f", [torch.linalg.eigh, torch.linalg.qr, torch.linalg.cholesky_ex])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_decompositions_are_rounded_the_same_way_in_every_place(
    f: Callable[..., Sequence[Tensor]], d: int, dtype: torch.dtype
) -> None:
    x = torch.randn(d, 2 * d, dtype=dtype)
    everywhere(lambda a: linalg.factorize(f, a)[0], x @ x.mT)
    everywhere(lambda a: linalg.factorize(f, a)[1], x @ x.mT)

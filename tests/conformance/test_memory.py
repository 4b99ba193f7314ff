"""Options that make the state smaller: packed factors are the same numbers, rounded roots nearly the same."""

from typing import Any

import pytest
import torch
from paper import PAPER
from torch import Tensor

import lather
from lather import linalg
from lather.compute.slices import SIDE
from lather.linalg import gram, pack, side_of, unpack
from lather.presets.from_torch import SMALL
from lather.report.models import MODELS, num_params, on_meta, shapes_of

SHAPES = [(12, 8), (12, 8), (7, 30), (3, 4, 5), (9,), (1, 4)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "paper": PAPER | {"eps": 1e-3},
    "sum": {"betas": (0.9, 1.0)},
    "staggered": {"refresh": "staggered", "graft": None},
    "diagonal": {"large_dim": "diagonal"},
    "adam": {"graft": "adam"},
    "unmerged, newton": {"merge_dims": False, "root": "newton"},
    "track": {"root": "track"},
    "soap": {"preconditioner": "soap", "graft": None},
    "bfloat16": {"state_dtype": "bfloat16"},
    "float64": {"state_dtype": "float64", "root_dtype": "bfloat16"},
}


def train(steps: int = 12, **options: Any) -> tuple[lather.Shampoo, list[Tensor]]:
    """Gradients are small whole numbers. So Gram products are exact, and symmetric in any order of summation."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]
    settings = {"lr": 0.05, "eps": 1e-3, "precondition_frequency": 3, "max_preconditioner_dim": 10} | options
    opt = lather.Shampoo(params, precondition_1d=True, **settings)
    for t in range(steps):
        for i, p in enumerate(params):
            p.grad = torch.randint(-3, 4, p.shape, generator=generator).float() if (t + i) % 5 else None
        opt.step()
    return opt, [p.detach() for p in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [1, 2, 7, 33])
def test_packing(d: int, dtype: torch.dtype) -> None:
    a = gram(torch.randn(3, d, 40), 0).tril().to(dtype)
    a = a + a.tril(-1).mT
    row, column = torch.tril_indices(d, d)
    assert torch.equal(pack(a).squeeze(1), a[:, row, column])
    assert side_of(pack(a)) == d
    assert torch.equal(unpack(pack(a)), a)
    assert unpack(pack(a)[:0]).shape == (0, d, d)


def test_a_scaled_gram_matrix_is_as_symmetric() -> None:
    """If BLAS scaled one operand, the two triangles would be rounded differently. Packed factors keep one of them."""
    x = torch.randn(3, 48, 24)
    assert torch.equal(gram(x, 0, 0.37), gram(x, 0) * 0.37)


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_factors_are_the_same_numbers(name: str) -> None:
    (full, ours), (packed, theirs) = (train(**OPTIONS[name], factors=kind) for kind in ("full", "packed"))
    assert all(map(torch.equal, ours, theirs))
    for state, other in zip(full.state.values(), packed.state.values(), strict=True):
        assert list(state) == list(other)
        for key, x in state.items():
            y = other[key]
            assert torch.equal(pack(x[None])[0] if key[0] in "LX" and x.dim() == 2 else x, y), key
    kinds = ("factors", "roots") if "roots" in full.plan().memory else ("factors",)
    assert all(packed.plan().memory[kind] < full.plan().memory[kind] for kind in kinds)


def test_a_rounded_filter_changes_little() -> None:
    (_, exact), (opt, rounded) = train(), train(filter_dtype="bfloat16")
    for x, y in zip(exact, rounded, strict=True):
        assert 0 < (x - y).norm() <= 2e-2 * x.norm()
    assert {x.dtype for state in opt.state.values() for key, x in state.items() if key[0] == "m"} == {torch.bfloat16}


@pytest.mark.parametrize("kept", ["bfloat16", "float16"])
def test_rounded_roots_change_little(kept: str) -> None:
    (_, exact), (opt, rounded) = train(), train(root_dtype=kept)
    assert any(not torch.equal(x, y) for x, y in zip(exact, rounded, strict=True))
    for x, y in zip(exact, rounded, strict=True):
        assert (x - y).norm() <= 2e-2 * x.norm()
    roots = [x for state in opt.state.values() for key, x in state.items() if key[0] == "X"]
    assert {x.dtype for x in roots} == {getattr(torch, kept)}


def test_a_root_that_overflows_where_it_is_kept_has_failed() -> None:
    """(1e-12)^(-1/2) is too large for float16. The block follows its graft."""
    w, v = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    common = {"eps": 1e-12, "damping": "absolute", "precondition_1d": True, "precondition_frequency": 1}
    opts = [lather.Shampoo([w], root_dtype="float16", **common)]
    opts += [lather.Shampoo([v], precondition_frequency=1)]
    for p, opt in zip((w, v), opts, strict=True):
        p.grad = torch.tensor([1.0, 0.0, 0.0, 0.0])
        if p is w:
            with pytest.warns(lather.NumericalWarning):
                opt.step()
        else:
            opt.step()
    assert torch.equal(w, v)


def test_a_root_that_vanishes_where_it_is_kept_has_failed() -> None:
    """(1e16)^(-1/2) is too small for float16. A direction of zero would stop the parameter for good."""
    w = torch.nn.Parameter(torch.ones(4, 2))
    opt = lather.Shampoo([w], **PAPER | {"root_dtype": "float16", "exponent": {2: 0.5}, "precondition_frequency": 1})
    w.grad = torch.tensor([[1.0, 1.0], *3 * [[1.2e8, -1.2e8]]])
    with pytest.warns(lather.NumericalWarning, match="could not be refreshed"):
        opt.step()
    assert not torch.equal(w, torch.ones(4, 2)) and opt.health()


SIZES: dict[str, tuple[dict[str, Any], float]] = {
    "full": ({}, 5.0),
    "packed": ({"factors": "packed"}, 3.0),
    "bfloat16 roots": ({"root_dtype": "bfloat16"}, 4.0),
    "bfloat16 filter": ({"filter_dtype": "bfloat16"}, 4.5),
    "both": ({"factors": "packed", "root_dtype": "bfloat16"}, 2.5),
    "low memory": (SMALL, 2.0),
    "adam": ({"graft": "adam"}, 6.0),
    "adam, packed": ({"graft": "adam", "factors": "packed"}, 4.0),
}


@pytest.mark.parametrize("name", SIZES)
def test_state_of_a_square_matrix(name: str) -> None:
    """In sizes of the parameter: two factors, two roots, the filtered gradient, and Adam's moment if that is the graft."""
    options, expected = SIZES[name]
    d = 256
    w = torch.nn.Parameter(torch.zeros(d, d))
    opt = lather.Shampoo([w], **options)
    held = sum(x.nbytes for key, x in opt.state_dict()["state"][0].items() if key != "step")
    assert opt.plan().state_bytes == held
    triangles = {"float32": 2.0, "bfloat16": 1.5}[options.get("root_dtype", "float32")] if "factors" in options else 0.0
    assert held / w.nbytes == pytest.approx(expected + triangles / d, rel=1e-12)  # they have diagonals, and are more than half


def test_state_of_a_language_model() -> None:
    """Bytes for each parameter of Llama 953M, with all of them preconditioned, and given the model. AdamW has 8."""
    model = on_meta(MODELS["llama-953m"])
    shapes = shapes_of(model)

    def sizes(**options: Any) -> list[float]:
        return [lather.plan(kind, **options).state_bytes / num_params(shapes) for kind in (shapes, model)]

    assert sizes(factors="full") == pytest.approx([20.04, 18.38], abs=0.01)
    assert sizes(factors="packed") == pytest.approx([12.03, 11.47], abs=0.01)
    assert sizes(factors="packed", graft="adam") == pytest.approx([16.03, 14.92], abs=0.01)
    assert sizes(preset="low_memory") == pytest.approx([8.02, 7.74], abs=0.01)


def test_factors_are_packed_by_default_where_kernels_do_the_work() -> None:
    def plans(device: str, **options: Any) -> list[int]:
        return [
            lather.plan({"w": (64, 32)}, device=device, factors=kind, **options).state_bytes for kind in ("auto", "full", "packed")
        ]

    for device, options in (("cpu", {}), ("mps", {}), ("cuda", {"preconditioner": "kl"}), ("cuda", {"state_dtype": "bfloat16"})):
        usual, full, packed = plans(device, **options)
        assert usual == full > packed
    usual, full, packed = plans("cuda:1")
    assert usual == packed < full


def test_index_tables_of_packed_factors_are_planned() -> None:
    """Two tables for each size. Where kernels pack, none is needed."""
    shapes = {"w": (12, 8), "v": (8, 8), "c": (3, 4, 17), "b": (9,)}
    host, sizes = torch.device("cpu"), {"w": (12, 8), "c": (3, 4, 17)}

    def more(device: str) -> int:
        full, packed = (
            lather.plan(shapes, merge_dims=False, factors=kind, device=device).scratch_bytes for kind in ("full", "packed")
        )
        return packed - full

    to_unpack = {d: linalg._mirrored(d, host).nbytes for shape in sizes.values() for d in shape}
    to_pack = {d: linalg._lower(d, host).nbytes for d in to_unpack}
    assert more("cpu") == sum(to_unpack.values()) + sum(to_pack.values())
    assert more("cuda") == 0


def test_buffers_of_kernels_are_planned() -> None:
    """Gradients in two halves of 16 bits, padded to whole tiles, and directions in their place; filtered gradients where the filter
    does not remember them; and messages."""
    one, numel = lather.plan({"w": (64, 64)}, device="cuda"), 64 * 64
    plain = lather.plan({"w": (64, 64)}, device="cuda", beta3=None)
    assert plain.scratch_bytes == 2 * 2 * (numel + SIDE * 64)
    assert one.scratch_bytes == plain.scratch_bytes + 4 * numel
    two = lather.plan({"w": (64, 64)}, device="cuda", ranks=2)
    assert two.scratch_bytes == one.scratch_bytes  # directions move the parameters from where they arrive
    scaled = lather.plan({"w": (64, 64)}, device="cuda", ranks=2, communication_dtype="int8")
    assert scaled.scratch_bytes == two.scratch_bytes + 4 * numel  # or from where they are multiplied by their scales
    averaged = lather.plan({"w": (64, 64)}, device="cuda", ranks=2, averaging="gpa")
    assert averaged.scratch_bytes == two.scratch_bytes + 3 * 4 * numel  # torch needs directions, parameters and averages in a row

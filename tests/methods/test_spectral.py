"""Polar factors: how orthogonal, what they do not depend on, whole matrices, and Muon as torch has it."""

import math
from typing import Any

import pytest
import torch
from reference import quintics
from torch import Tensor

import lather
from lather.methods.spectral import scale_of
from lather.roots import POLARS, PolarExpress, parse_polar, spell
from lather.roots.minimax import best_step

# What each promises for singular values from `low` of the Frobenius norm on: where they end.
PROMISES = {
    "newton_schulz": (2e-3, 0.681, 1.203),
    "newton_schulz(steps=8)": (2e-3, 0.681, 1.135),
    "polar_express": (1e-3, 0.875, 1.125),
    "polar_express(steps=6)": (1e-3, 0.998, 1.002),
    "polar_express(steps=10, lower=1e-05)": (1e-5, 0.999, 1.001),
    "svd": (1e-5, 0.99999, 1.00001),
}
SHAPES = [(6, 4), (4, 6), (5, 5), (1, 7), (7, 1), (1, 1), (40, 24), (130, 200), (64, 64)]

every_polar = pytest.mark.parametrize("polar", PROMISES)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def spectra(n: int, rows: int, columns: int, low: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Matrices with singular values from `low` to 1, evenly on a logarithmic scale, of Frobenius norm 1."""
    d = min(rows, columns)
    u = torch.linalg.qr(torch.randn(n, rows, d, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(n, columns, d, dtype=torch.float64))[0]
    s = torch.logspace(math.log10(low), 0, d, dtype=torch.float64)[-d:] if d > 1 else torch.ones(1, dtype=torch.float64)
    return (u @ torch.diag(s / s.norm()) @ v.mT).to(dtype)


def test_every_way_is_promised() -> None:
    assert {parse_polar(polar).name for polar in PROMISES} == set(POLARS)
    assert all(spell(parse_polar(polar)) == polar for polar in PROMISES)


@every_shape
@every_polar
def test_orthogonality(polar: str, shape: tuple[int, int]) -> None:
    low, least, most = PROMISES[polar]
    g = spectra(3, *shape, low=2 * low * math.sqrt(min(shape)))
    p = parse_polar(polar)(g)
    s = torch.linalg.svdvals(p.double())
    assert least <= s.min() and s.max() <= most
    # The singular vectors are those of g: the two have a symmetric, semidefinite product.
    product = p.double() @ g.double().mT
    # Rounding makes up to 3e-4 of it skew where singular values span five decades.
    assert (product - product.mT).norm() <= 5e-4 * product.norm()
    assert torch.linalg.eigvalsh(product).min() >= -1e-4 * product.norm()


@every_shape
@every_polar
def test_a_stack_is_its_slots(polar: str, shape: tuple[int, int]) -> None:
    way, g = parse_polar(polar), torch.randn(4, *shape)
    together = way(g)
    for i in range(4):
        assert torch.equal(way(g[i : i + 1])[0], together[i])
    assert together.is_contiguous()


@every_shape
@every_polar
def test_transposed(polar: str, shape: tuple[int, int]) -> None:
    way, g = parse_polar(polar), spectra(2, *shape, low=1e-2)
    torch.testing.assert_close(way(g.mT), way(g).mT, rtol=0, atol=2e-4)
    if shape[0] != shape[1]:
        assert torch.equal(way(g.mT), way(g).mT)


@every_polar
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 3e-5, 7.0, 1e18, 1e36])
def test_scale_does_not_matter(polar: str, scale: float) -> None:
    """Every slot has a scale of its own."""
    way, g = parse_polar(polar), spectra(3, 12, 8, low=1e-1)
    sizes = torch.tensor([1.0, scale, 1.0])[:, None, None]
    torch.testing.assert_close(way(sizes * g), way(g), rtol=0, atol=1e-2 if scale < 1e-36 else 1e-4)
    assert torch.equal(way(g * 2.0**-40), way(g))
    assert torch.equal(way(-g), -way(g))


@every_polar
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_zero_stays_zero(polar: str, dtype: torch.dtype) -> None:
    """A whole slot, or the directions that a matrix of low rank does not have."""
    g = torch.zeros(3, 6, 4, dtype=dtype)
    g[1] = torch.outer(torch.arange(1.0, 7.0), torch.tensor([1.0, -2.0, 0.0, 1.0])).to(dtype)
    p = parse_polar(polar)(g)
    assert p.dtype == dtype
    assert not p[[0, 2]].any()
    s = torch.linalg.svdvals(p[1])
    assert s[0] > 0.6 and s[1] < 1e-3
    torch.testing.assert_close(p[1] / p[1].norm(), g[1] / g[1].norm(), rtol=0, atol=1e-3)


@every_polar
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_slot(polar: str, bad: float) -> None:
    way, g = parse_polar(polar), torch.randn(3, 6, 4)
    clean = way(g)
    g[1, 2, 3] = bad
    p = way(g)
    assert torch.equal(p[[0, 2]], clean[[0, 2]])
    assert p[1].isnan().all()


@pytest.mark.parametrize("rank", [1, 3, 24])
@pytest.mark.parametrize("bits", [24, 11, 8])
def test_the_best_quintics_survive_rounding(bits: int, rank: int) -> None:
    """With products in few bits, as on an accelerator, no singular value leaves its interval and grows."""

    def rounded(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)

    x = torch.randn(24, rank) @ torch.randn(rank, 40)
    x = x / x.norm()
    for a, b, c in PolarExpress(steps=6).quintics():
        r = rounded(x)
        gram = r @ r.mT
        square = rounded(gram) @ rounded(gram)
        x = a * x + rounded(b * gram + c * square) @ r
    s = torch.linalg.svdvals(x)
    assert s[:rank].min() > 0.9
    assert s.max() < 1.01


# Coefficients.


def test_coefficients_are_kept_as_a_string() -> None:
    way = lather.NewtonSchulz(3, [2, -1.5, 0.5], 1e-7)  # type: ignore[arg-type]
    assert way.coefficients == (2.0, -1.5, 0.5)
    assert spell(way) == "newton_schulz(steps=3, coefficients=(2.0, -1.5, 0.5), eps=1e-07)"
    assert parse_polar(spell(way)) == way
    assert lather.NewtonSchulz(coefficients=(3.4445, -4.775, 2.0315)) == lather.NewtonSchulz()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_eps_is_the_least_norm(dtype: torch.dtype) -> None:
    """In every slot. Directions of smaller gradients are smaller in proportion."""
    way, plain = lather.NewtonSchulz(steps=1, coefficients=(1, 0, 0), eps=1e-7), lather.NewtonSchulz()
    g = spectra(4, 8, 5, low=0.1, dtype=dtype)
    sizes = torch.tensor([1.0, 1e-6, 1e-8, 1e-38], dtype=dtype)[:, None, None]
    torch.testing.assert_close(way(sizes * g), (sizes / 1e-7).clamp(max=1) * g, rtol=1e-5, atol=1e-12)
    loud = lather.NewtonSchulz(eps=1e-7)
    assert torch.equal(loud((sizes * g)[:2]), plain((sizes * g)[:2]))
    assert not loud(torch.zeros(2, 3, 4, dtype=dtype)).any()


def test_each_step_is_the_best_for_its_interval() -> None:
    """The error of the best polynomial is the same, up to sign, at four points: the ends and between them."""
    low, high = 1e-3, 1.0
    for a, b, c in PolarExpress(steps=6).quintics():
        t = torch.linspace(low, 1.01 * high, 200001, dtype=torch.float64)
        off = 1 - (a * t + b * t**3 + c * t**5)
        error = off.abs().max().item()
        signs = [round(x / error) for x in off[off.abs() > (1 - 1e-6) * error].tolist()]
        changes = [x for x, before in zip(signs, [0, *signs[:-1]], strict=True) if x != before]
        assert changes == [1, -1, 1, -1]
        low, high = 1 - error, 1 + error
    assert error < 2e-3


def test_where_singular_values_end() -> None:
    """What the class says of the default, rounded up."""
    for steps, bound in ((5, "0.125"), (6, "0.0014")):
        t = torch.linspace(1e-3, 1, 200001, dtype=torch.float64)
        for a, b, c in PolarExpress(steps).quintics():
            t = a * t + b * t**3 + c * t**5
        assert 0.95 * float(bound) < (t - 1).abs().max().item() < float(bound)
        assert f"within {bound}" in str(PolarExpress.__doc__)


@pytest.mark.parametrize(("steps", "lower"), [(1, 0.5), (5, 1e-3), (8, 1e-3), (6, 1e-5)])
def test_the_twin_finds_the_same_coefficients(steps: int, lower: float) -> None:
    ours, theirs = PolarExpress(steps, lower).quintics(), quintics("polar_express", steps, lower)
    t = torch.linspace(0, 1, 1001, dtype=torch.float64)
    x, y = t, t
    for (a, b, c), (d, e, f) in zip(ours, theirs, strict=True):
        x, y = a * x + b * x**3 + c * x**5, d * y + e * y**3 + f * y**5
    torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


def test_the_published_table() -> None:
    """The coefficients that the paper's authors publish come out of our search too.

    They are made for bfloat16: no interval begins below 0.024 of its end, and the error is centred at the end."""
    published = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    ]
    low, high = 1e-3, 1.0
    for expected in published:
        found = best_step(2, max(low, 0.02407327424182761 * high), high)[:3]
        ends = [sum(k * t**n for k, n in zip(found, (1, 3, 5), strict=True)) for t in (low, high)]
        found = tuple(2 * k / sum(ends) for k in found)
        assert found == pytest.approx(expected, rel=1e-6)
        low = sum(k * low**n for k, n in zip(found, (1, 3, 5), strict=True))
        high = 2 - low


# The optimizer.


def direction(shape: tuple[int, ...], grad: Tensor, **options: Any) -> Tensor:
    """Of the first step."""
    p = torch.nn.Parameter(torch.zeros(shape))
    opt = lather.Shampoo([p], lr=1.0, **{"preconditioner": "spectral", "graft": None, **options})
    p.grad = grad.clone()
    opt.step()
    return -p.detach()


@every_polar
def test_the_first_step_is_orthogonal(polar: str) -> None:
    g = torch.randn(12, 20)
    expected = parse_polar(polar)(g[None])[0]  # of another rounding, which a small lower end makes larger
    torch.testing.assert_close(direction((12, 20), g, polar=polar), expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(direction((12, 20), 1e-3 * g, polar=polar), expected, rtol=0, atol=1e-3)
    grafted = direction((12, 20), g, polar=polar, graft="sgd")
    torch.testing.assert_close(grafted, expected * (g.norm() / expected.norm()), rtol=0, atol=5e-3)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 3, 3, 3), (3, 8, 5), (4, 1, 6, 2)], ids=str)
@pytest.mark.parametrize("limit", [math.inf, 1024])
def test_whole_matrices(shape: tuple[int, ...], limit: float) -> None:
    """With a large limit a parameter is one matrix: its first dimension against all others."""
    g = torch.randn(shape)
    for scale in (None, "original", "match_rms_adamw"):
        matrix = g.flatten(1)
        expected = parse_polar("svd")(matrix[None])[0] * scale_of(scale, *matrix.shape)
        for merge in (True, False):
            found = direction(shape, g, polar="svd", polar_scale=scale, max_preconditioner_dim=limit, merge_dims=merge)
            torch.testing.assert_close(found.flatten(1), expected, rtol=0, atol=1e-5)


def test_blocks_are_orthogonal_each() -> None:
    g = torch.randn(10, 6)
    p = direction((10, 6), g, polar="svd", max_preconditioner_dim=5, polar_scale="original")
    for rows in (slice(0, 5), slice(5, 10)):
        for columns in (slice(0, 3), slice(3, 6)):
            expected = parse_polar("svd")(g[None, rows, columns])[0] * math.sqrt(5 / 3)
            torch.testing.assert_close(p[rows, columns], expected, rtol=0, atol=1e-5)


def test_vectors_and_scalars_follow_the_graft() -> None:
    report = lather.plan({"w": (8, 4), "b": (8,), "s": ()}, preconditioner="spectral")
    assert [row.method for row in report.params] == ["spectral", "adam", "adam"]
    assert torch.equal(direction((3,), torch.tensor([1.0, 2.0, 3.0])), torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (40, 40)], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_is_torchs_muon(shape: tuple[int, int], nesterov: bool, scale: str) -> None:
    """Up to its arithmetic in bfloat16. Its Nesterov momentum is a filter: `beta3 = mu^2` with `betas[0] = mu`."""
    mu, start = 0.95, torch.randn(shape)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    lr = 0.02 if scale == "original" else 0.01
    muon = torch.optim.Muon([theirs], lr=lr, momentum=mu, nesterov=nesterov, weight_decay=0.1, adjust_lr_fn=scale)
    opt = lather.Shampoo(
        [ours], lr=lr, betas=(mu, 0.999), beta3=mu**2 if nesterov else None, weight_decay=0.1,
        preconditioner="spectral", graft=None, polar_scale=scale, max_preconditioner_dim=math.inf,
    )  # fmt: skip
    for _ in range(10):
        before = ours.detach().clone()
        theirs.data.copy_(before)
        ours.grad = 0.1 + torch.randn(shape)
        theirs.grad = ours.grad.clone()
        opt.step()
        muon.step()
        assert (ours - theirs).norm() <= 0.03 * (ours - before).norm()


def test_muon_beside_adamw() -> None:
    """One optimizer with two groups, as `lather.muon` makes them."""
    start = [torch.randn(12, 8), torch.randn(20, 6), torch.randn(5)]
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in start] for _ in range(2))
    adamw = {"preconditioner": None, "lr": 3e-3, "betas": (0.9, 0.95), "beta3": None, "graft": "adam"}
    opt = lather.Shampoo(
        [{"params": ours[:1]}, {"params": ours[1:], **adamw}], lr=0.02, betas=(0.95, 0.95), beta3=0.95**2, weight_decay=0.1,
        preconditioner="spectral", graft=None, polar_scale="original", max_preconditioner_dim=math.inf,
    )  # fmt: skip
    one = torch.optim.Muon(theirs[:1], lr=0.02, weight_decay=0.1)
    two = torch.optim.AdamW(theirs[1:], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        for each in (opt, one, two):
            each.step()
    assert (ours[0] - theirs[0]).norm() <= 0.02 * (theirs[0] - start[0]).norm()
    for p, q in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# Plans.


def test_costs() -> None:
    """There are no roots. A step multiplies on the smaller side. Owners are chosen by that work."""
    shapes = {"tall": (64, 16), "wide": (16, 64), "box": (16, 8, 8), "bias": (64,)}
    report = lather.plan(shapes, preconditioner="spectral", max_preconditioner_dim=math.inf, graft=None)
    assert report.refresh_flops == 0
    assert report.step_flops == 3 * 5 * (4 * 16 * 16 * 64 + 2 * 16**3)
    assert report.memory["total"] == 4 * (3 * 1024 + 64)
    assert lather.plan(shapes, preconditioner="spectral", start_preconditioning_step=math.inf).step_flops == 0
    assert {row.solvers for row in report.banks} == {("newton_schulz",), ()}
    whole = lather.plan({f"w{i}": (512, 512) for i in range(8)}, preconditioner="spectral", ranks=8)
    assert whole.teams[0].imbalance == 1.0
    assert "newton_schulz" in str(whole)


def test_nothing_is_kept_but_the_filter() -> None:
    w = torch.nn.Parameter(torch.ones(4, 3))
    for options, roles in (({"graft": None}, {"m.0"}), ({}, {"m.0", "v.0"}), ({"graft": "sgd", "betas": (0, 0.9)}, set())):
        opt = lather.Shampoo([w], preconditioner="spectral", **options)
        opt.state_dict()
        assert opt.state[w].keys() == {"step"} | roles

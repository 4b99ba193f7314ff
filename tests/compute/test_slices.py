"""Which blocks go through kernels together, where they lie in memory, and the buffers that they need."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lather import kernels
from lather.compute import slices
from lather.compute.slices import BankSlice, Window, divide_banks, find_window, scratch_sizes
from lather.options import OPTIONS
from lather.planning.plan import BankKey, Transport
from lather.settings import resolve

GROUP = {name: option.default for name, option in OPTIONS.items()}


def settings(**options):
    return resolve(GROUP | options)


def key(shape, modes=("full", "full"), group=0, dtype="float32", kind="kronecker"):
    return BankKey(Transport(0), group=group, dtype=dtype, kind=kind, shape=shape, modes=modes, device="cpu")


# Where a block lies.


@st.composite
def boxes(draw):
    """A tensor of some memory format, and a box in it."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(shape))))
    x = torch.arange(math.prod(shape)).view([shape[i] for i in order])
    x = x.permute([order.index(i) for i in range(len(shape))])
    start = [draw(st.integers(0, d - 1)) for d in shape]
    return x, start, [draw(st.integers(1, d - a)) for a, d in zip(start, shape, strict=True)]


@given(boxes())
def test_a_window_has_the_elements_of_a_box_in_their_order(box):
    x, start, shape = box
    window = find_window(start, shape, x.stride())
    inside = x[tuple(slice(a, a + d) for a, d in zip(start, shape, strict=True))]
    if window is None:
        assert inside.dim() > 3
    else:
        memory = torch.arange(x.numel())
        for sizes, strides in ((window.sizes, window.strides), window.in_three_dims()):
            assert torch.equal(memory.as_strided(sizes, strides, window.offset).flatten(), inside.flatten())


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), Window(0, (1,), (1,))),
        ((4, 6), (6, 1), Window(0, (24,), (1,))),
        ((4, 3), (6, 1), Window(0, (4, 3), (6, 1))),  # columns of a wider matrix
        ((4, 6), (1, 4), Window(0, (4, 6), (1, 4))),
        ((8, 4, 3, 3), (36, 1, 12, 4), Window(0, (8, 4, 9), (36, 1, 4))),  # channels last
        ((2, 3, 4, 5), (1, 2, 6, 24), None),
    ],
)
def test_windows(shape, strides, expected):
    assert find_window((0,) * len(shape), shape, strides) == expected


# Slices.


def test_a_slice():
    matrices = BankSlice(key((24, 40)), 2, 5)
    assert (matrices.n, matrices.numel, matrices.flat_numel) == (3, 960, 2880)
    assert matrices.kernel_factors and matrices.half_shape == (64, 1, 64) and matrices.half_numel == 3 * 64 * 64
    vectors = BankSlice(key((33,), ()), 0, 3)
    assert vectors.flat_numel == 112 and not vectors.kernel_factors and vectors.half_numel == 0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30), st.integers(0, 1)), max_size=6), st.integers(1, 400))
def test_every_slot_is_computed_once_and_sizes_are_bounded(banks, largest):
    banks = [(key((d, d + i), group=group), n) for i, (d, n, group) in enumerate(banks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "LARGEST", largest)
        patch.setattr(slices, "suits", lambda *_: True)
        together = divide_banks(banks, [settings(), settings()])
    found = sorted((piece.key.shape, slot) for found in together for piece in found for slot in range(piece.start, piece.stop))
    assert found == sorted((key.shape, slot) for key, n in banks for slot in range(n))
    for mine in together:
        assert len({piece.key.group for piece in mine}) == 1
        assert len(mine) == 1 or sum(piece.flat_numel for piece in mine) <= largest
        assert all(piece.n == 1 or piece.n * piece.numel <= largest for piece in mine)


def test_slices_that_go_together_are_of_one_kind(monkeypatch):
    monkeypatch.setattr(slices, "suits", lambda device, dtype, settings: dtype != "float64")
    kinds = [key((8, 8)), key((8, 9)), key((8, 8), dtype="bfloat16"), key((8, 8), dtype="float64"), key((8,), (), kind="adagrad")]
    together = divide_banks([(kind, 2) for kind in kinds], [settings()])
    assert [[kinds.index(piece.key) for piece in found] for found in together] == [[0, 1], [2], [4]]


@pytest.mark.parametrize(
    ("method", "graft", "beta3", "expected"),
    [
        ("shampoo", None, None, [[((8, 8), False), ((8,), False)]]),
        ("shampoo", None, 0.5, [[((8, 8), False), ((8,), False)]]),
        ("shampoo", None, "nesterov", [[((8, 8), False)], [((8,), False)]]),
        ("shampoo", "adam", None, [[((8, 8), False), ((8,), False)]]),
        ("shampoo", "adafactor", None, [[((8, 8), False)], [((8,), False)]]),
        ("spectral", "adam", "nesterov", [[((8, 8), True)], [((8,), False)]]),
        ("spectral", None, None, [[((8, 8), True), ((8,), False)]]),
        ("kl", None, None, [[((8, 8), True), ((8,), False)]]),
        ("kl", "adam", "nesterov", [[((8, 8), True)], [((8,), False)]]),
        ("soap", "adam", None, [[((8, 8), False), ((8,), False)]]),
        ("soap", None, None, [[((8, 8), False)], [((8,), False)]]),
    ],
)
def test_methods_that_update_factors_in_their_own_way(method, graft, beta3, expected, monkeypatch):
    """Or have none. Vectors go apart where they follow Adam and matrices do not, as with SOAP without a graft, and with Nesterov's
    filter, as they do not look ahead."""
    monkeypatch.setattr(slices, "suits", lambda *_: True)
    group = settings(preconditioner=method, graft=graft, beta3=beta3)
    banks = [(key((8, 8)), 2), (key((8,), (), kind="graft"), 2)]
    together = divide_banks(banks, [group])
    assert [[(piece.shape, piece.custom_factors) for piece in found] for found in together] == expected
    assert [piece.kernel_factors for found in together for piece in found] == [
        shape == (8, 8) and not custom for found in expected for shape, custom in found
    ]


def test_blocks_with_other_filters_go_apart(monkeypatch):
    """Also where all directions differ from what the filter remembers, as that is rounded. A live change divides them anew."""
    monkeypatch.setattr(slices, "suits", lambda *_: True)
    banks = [(key((8, 8)), 2), (key((8,), (), kind="graft"), 2)]
    together, apart = (settings(graft="adam", filter_dtype="bfloat16", beta3=beta3) for beta3 in (None, "nesterov"))
    assert [len(divide_banks(banks, [group])) for group in (together, apart)] == [1, 2]
    assert together.signature != apart.signature


@pytest.mark.parametrize(
    ("shape", "factors", "without"),
    [((32767, 8), True, True), ((32768, 8), False, True), ((50304, 768), False, True), ((1 << 20, 1 << 11), False, False)],
    ids=str,
)
def test_blocks_that_kernels_can_count(shape, factors, without, monkeypatch):
    """In 32 bits: their elements, and those of factors, which polar factors do not need."""
    monkeypatch.setattr(slices, "suits", lambda *_: True)
    for method, fits in (("shampoo", factors), ("soap", factors), ("spectral", without)):
        assert bool(divide_banks([(key(shape), 1)], [settings(preconditioner=method)])) == fits


@pytest.mark.parametrize(("graft", "fits"), [("adam", True), ("adafactor", False)])
def test_second_moments_of_factors_have_at_most_three_modes(graft, fits, monkeypatch):
    monkeypatch.setattr(slices, "suits", lambda *_: True)
    banks = [(key(shape, ("full",) * len(shape)), 1) for shape in ((4, 3, 2), (4, 3, 2, 5))]
    found = [piece.shape for pieces in divide_banks(banks, [settings(graft=graft)]) for piece in pieces]
    assert found == [key.shape for key, _ in banks][: 2 if fits else 1]


def test_only_cuda_has_kernels(monkeypatch):
    monkeypatch.setattr(slices, "has_kernels", lambda device: device.type == "cuda")
    plain = settings(betas=(0.9, 0.999))
    assert not slices.suits("cpu", "float32", plain)
    assert slices.suits("cuda", "float32", plain)
    assert slices.suits("cuda:1", "bfloat16", settings(betas=(0.9, 0.999), beta3=0.9))
    assert not slices.suits("cuda", "float64", plain)
    assert slices.suits("cuda", "float32", settings()) and slices.suits("cuda", "float32", settings(beta3=0.5))
    assert not slices.suits("cuda", "float32", settings(state_dtype="bfloat16"))
    monkeypatch.setattr(slices, "has_kernels", lambda device: False)
    assert not slices.suits("cuda", "float32", plain)


def test_gpus_that_kernels_are_made_for(monkeypatch):
    ask, gpu = kernels.has_kernels, torch.device("cuda:0")
    monkeypatch.setattr(kernels, "_has_triton", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert ask(gpu) and not ask(torch.device("cpu"))  # a plan on paper is for another machine
    monkeypatch.setattr(kernels, "_has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert ask(torch.device("cuda:1"))  # which is not there
    for capability, able in (((7, 5), False), ((8, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert ask(gpu) is able
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not ask(gpu)
    for memory, stages in (({"shared_memory_per_block_optin": 232448}, 3), ({"shared_memory_per_block_optin": 101376}, 2), ({}, 2)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=memory: SimpleNamespace(**found))
        assert kernels.stages.__wrapped__(gpu) == stages


def test_scratch():
    matrices, thin, thick, vectors = (
        BankSlice(key((24, 40)), 0, 3),
        BankSlice(key((4, 70, 9), ("full",) * 3), 0, 2),
        BankSlice(key((4, 3, 17), ("full",) * 3), 0, 2),
        BankSlice(key((33,), (), kind="graft"), 0, 1),
    )
    plain = settings(beta3=None)
    plane = 3 * 64 * 64 + slices.SIDE * 64
    assert scratch_sizes([matrices, vectors], plain) == {"flat": (torch.float32, plane)}  # halves of gradients take more room
    assert scratch_sizes([vectors], plain) == {"flat": (torch.float32, 48)}
    plane = 2 * 64 * 9 * 128 + slices.SIDE * 9 * 128
    assert scratch_sizes([thin], plain) == {"flat": (torch.float32, plane)}
    assert scratch_sizes([matrices, thick], plain)["plain"] == (torch.float32, 2880 + 416)
    for ahead in (settings(), settings(beta3=0.5)):  # directions, and filtered gradients beside them
        assert scratch_sizes([matrices], ahead) == scratch_sizes([matrices], plain) | {"filtered": (torch.float32, 2880)}
    assert scratch_sizes([vectors], settings()) == scratch_sizes([vectors], plain)
    assert scratch_sizes([vectors], settings(beta3=0.5))["filtered"] == (torch.float32, 48)
    assert "filtered" not in scratch_sizes([matrices], settings(start_preconditioning_step=math.inf))
    assert "plain" in scratch_sizes([matrices], settings(betas=(0.0, 0.999)))
    alone = BankSlice(key((24, 40)), 0, 3, custom_factors=True)
    for method, kept in (("soap", {"flat", "plain"}), ("spectral", {"flat"})):  # which takes in no gradients
        needs = scratch_sizes([alone], settings(preconditioner=method, beta3=None))
        assert set(needs) == kept and needs["flat"] == (torch.float32, 2880)

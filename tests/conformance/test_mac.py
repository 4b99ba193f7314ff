"""A Mac's GPU has no float64 and not all of torch's operations. It is played by ``mac.py``, in a process of its own."""

import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import backend_registration

import lather

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="torch 2.10 can play other devices"
)
SHAPES = [(8, 6), (5,), (4, 3, 2), (9, 4), (3, 3), (8, 6), (5,)]
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "packed": {"factors": "packed"},
    "bfloat16": {"root_dtype": "bfloat16", "filter_dtype": "bfloat16"},
    "absolute": {"damping": "absolute", "eps": 1e-4},
    "paper": {"exponent": "paper", "exponent_multiplier": 1.5},
    "newton": {"root": "newton"},
    "higher_order": {"root": "higher_order"},
    "minimax": {"root": "minimax"},
    "track": {"root": "track"},
    "diagonal": {"large_dim": "diagonal", "max_preconditioner_dim": 4},
    "delayed": {"refresh_delay": 1, "refresh": "staggered"},
    "kl": {"preconditioner": "kl"},
    "soap": {"preconditioner": "soap"},
    "soap, packed": {"preconditioner": "soap", "factors": "packed", "root": "track"},
    "spectral": {"preconditioner": "spectral"},
    "svd": {"preconditioner": "spectral", "polar": "svd"},
    "elementwise": {"preconditioner": None},
    "adam": {"graft": "adam", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "constant": {"graft": "constant", "weight_decay": 0.1, "weight_decay_mode": "l2"},
    "schedule free": {"averaging": "schedule_free"},
    "gpa": {"averaging": "gpa"},
}


def train(options: dict[str, Any], on_mac: bool) -> list[Tensor]:
    """Parameters after some steps. One gradient is not finite, a checkpoint is loaded in the middle, and metrics are looked at."""
    place: Any = nullcontext()
    device = torch.device("cpu")
    if on_mac:
        from mac import MAC, Mac

        place, device = Mac(), MAC
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in SHAPES]

    def optimizer(params: list[nn.Parameter]) -> lather.Shampoo:
        return lather.Shampoo(params, lr=0.01, **{"precondition_frequency": 3} | options)

    with place:
        params = [nn.Parameter(x.to(device)) for x in starts]
        opt = optimizer(params)
        for step in range(1, 11):
            for p in params:
                grad = torch.randn(p.shape, generator=generator)
                if step == 5 and p.dim() == 1:
                    grad[0] = math.inf
                p.grad = grad.to(device)
            if step == 6:
                saved = opt.state_dict()
                opt = optimizer(params)
                opt.load_state_dict(saved)
            if step == 8:
                opt.arm()
            opt.step()
            if step == 8:
                assert opt.metrics()
        opt.health()
        if options.get("averaging"):
            opt.eval()
        return [p.detach().to("cpu") for p in params]


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.filterwarnings("ignore:parameter|gradients")
def test_trains_as_on_a_cpu(case: str, process: ProcessPoolExecutor) -> None:
    there = process.submit(train, OPTIONS[case], True).result()
    bound = 1e-2 if "bfloat16" in case else 1e-4
    torch.testing.assert_close(there, train(OPTIONS[case], False), rtol=bound, atol=bound)

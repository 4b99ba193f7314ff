"""What can be counted: bytes on the wire and collectives per step are those that the plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

import lather

from .cases import LAYOUTS, MANY, Case, Options, Run
from .harness import Pools

WIRES: dict[str, Options] = {
    "float32": {},
    "bfloat16": {"communication_dtype": "bfloat16", "stages": 2},
    "int8": {"communication_dtype": "int8"},
    "local": {"blocks": "local"},
}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Bytes that come from other ranks, and calls, of every collective there is."""
    count: Counter[str] = Counter()
    gathering = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    real = {name: getattr(dist, name) for name in (gathering, "all_to_all_single")}
    others = ["all_reduce", "all_gather", "broadcast", "reduce_scatter_tensor", "all_gather_object"]
    real |= {name: getattr(dist, name) for name in others}

    def gather(received: Any, sent: Any, **options: Any) -> Any:
        count.update({"outbound": received.nbytes - sent.nbytes, "gather": 1})
        return real[gathering](received, sent, **options)

    def swap(received: Any, sent: Any, into: Any, out: Any, **options: Any) -> Any:
        size, me = received.element_size(), dist.get_rank(options["group"])
        count.update({"swapped": size * (sum(into) - into[me]), "swap": 1})
        return real["all_to_all_single"](received, sent, into, out, **options)

    def other(name: str) -> Any:
        return lambda *args, **options: (count.update({name: 1}), real[name](*args, **options))[1]

    fakes = {gathering: gather, "all_to_all_single": swap} | {name: other(name) for name in others}
    try:
        for name, fake in fakes.items():
            setattr(dist, name, fake)
        yield count
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def steps_counted(layout: str, options: Options, model: str) -> tuple[lather.PlanReport, Counter[str], Counter[str], int]:
    """The plan, a plain step, one that refreshes, and the bytes of the buffers of messages."""
    run = Run(layout, Case(options, model=model)).advance(1, 1)
    with counted() as plain:
        run.advance(2, 2)
    run.advance(3, 3)
    with counted() as refreshing:
        run.advance(4, 4)
    storages = [unit.messages.untyped_storage() for unit in run.opt._session.run.units]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return run.opt.plan(), plain, refreshing, sum(held.values())


ROWS = [(layout, "float32") for layout in MANY]
ROWS += [(layout, ("bfloat16", "local", "int8")[i % 3]) for i, layout in enumerate(MANY)]


@pytest.mark.parametrize(("layout", "wire"), ROWS)
def test_bytes_are_those_of_the_plan(layout: str, wire: str, pools: Pools) -> None:
    options, model = WIRES[wire], "toy" if wire == "float32" else "some"
    for report, plain, refreshing, held in pools[LAYOUTS[layout].world].run(steps_counted, layout, options, model):
        expected = sum(team.inbound_bytes + team.outbound_bytes for team in report.teams)
        assert held == sum(team.buffer_bytes for team in report.teams)
        for count in (plain, refreshing):
            assert count["outbound"] + count["swapped"] == expected
        assert not {name for name in plain if name not in ("outbound", "swapped", "gather", "swap", "all_reduce")}
        meshes = 2 if layout == "fsdp_sub22" else 1
        assert plain["all_reduce"] == refreshing["all_reduce"] == meshes  # of a hash of what ranks are about to do
        if layout.startswith("ddp"):
            assert (plain["gather"], plain["swap"]) == (options.get("stages", 1), 0)
        if layout in ("fsdp2", "fsdp3", "fsdp4") and wire == "float32":  # gradients in, directions out, and a plain scalar
            assert (plain["swap"], plain["gather"]) == (2, 1)
        if layout == "hsdp22" and wire == "float32":  # and directions among those that store the same
            assert (plain["swap"], plain["gather"]) == (2, 2)
        if wire == "local":
            assert sum(team.inbound_bytes for team in report.teams) == 0

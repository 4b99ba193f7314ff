"""What every rank runs for the odd cases: unusual meshes and gradients, calls on some ranks only, failures on one."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as api
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import lather
from lather import roots
from lather.runtime.exchange import Collective
from lather.runtime.run import Run as LatherRun

from . import cases
from .cases import BASE, Case, Options, Run, Stored, fsdp, local, mesh_of, noise, train

SHAPES = {"a": (9, 7), "b": (9, 7), "c": (4, 6), "d": (5,)}
STEPS = 9


def values(step: int) -> dict[str, Tensor]:
    return {name: noise(f"edge {name}", step, shape) for name, shape in SHAPES.items()}


def train_few(make: Callable[[str, Tensor], Tensor], grad: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Parameters made one by one, and gradients made for them from whole ones."""
    params = {name: nn.Parameter(make(name, x)) for name, x in values(0).items()}
    opt = lather.Shampoo(list(params.items()), **BASE, momentum=0.9)
    for step in range(1, STEPS + 1):
        for name, x in values(step).items():
            params[name].grad = grad(params[name], x)
        opt.step()
    return params


def plain_few() -> Stored:
    """The reference."""
    return stored_few(train_few(lambda _, x: x, lambda _, x: x))


def spread(mesh: DeviceMesh, *placements: Any) -> Callable[[Any, Tensor], Tensor]:
    """Sharding along a dimension that a tensor does not have becomes replication."""

    def make(_: Any, x: Tensor) -> Tensor:
        fitting = [p if p == Replicate() or p.dim < x.dim() else Replicate() for p in placements]
        return distribute_tensor(x, mesh, fitting, src_data_rank=None)

    return make


def stored_few(params: dict[str, Tensor]) -> Stored:
    """What this rank stores of those that it stores something of."""
    return {name: (_numbers(p), local(p).clone()) for name, p in params.items() if is_here(p)}


def is_here(p: Tensor) -> bool:
    return not isinstance(p, DTensor) or p.device_mesh.get_coordinate() is not None


def _numbers(p: Tensor) -> Tensor:
    numbers = torch.arange(p.numel()).view(p.shape)
    if not isinstance(p, DTensor):
        return numbers
    return distribute_tensor(numbers, p.device_mesh, p.placements, src_data_rank=None).to_local()


# Meshes and gradients.


def train_on_mesh(ranks: Any, placements: tuple[Any, ...]) -> Stored:
    make = spread(DeviceMesh("cpu", torch.tensor(ranks)), *placements)
    return stored_few(train_few(make, make))


def separate_meshes(ranks: dict[str, list[int]]) -> Stored:
    """Each parameter on some ranks only."""
    meshes = {name: DeviceMesh("cpu", torch.tensor(some)) for name, some in ranks.items()}

    def make(name: str, x: Tensor) -> Tensor:
        return distribute_tensor(x, meshes[name], [Shard(0)], src_data_rank=None) if name in meshes else x

    def grad(p: Tensor, x: Tensor) -> Tensor:
        return distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else x

    return stored_few(train_few(make, grad))


def gather_from_other_ranks(to: int) -> None:
    """One parameter is on two ranks only, and one on all."""
    pair, line = (DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([2, 3], [0, 1, 2, 3]))
    whole = {mesh: distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None) for mesh in (pair, line)}
    opt = lather.Shampoo([(name, nn.Parameter(x)) for name, x in zip(("few", "all"), whole.values(), strict=True)], **BASE)
    opt.consolidate_state_dict(to=to)


def other_gradients(kind: str) -> Stored:
    """Gradients that do not lie as their parameters do."""
    mesh = mesh_of(dist.get_world_size())

    def grad(_: Tensor, x: Tensor) -> Tensor:
        if kind == "replicated":
            return distribute_tensor(x, mesh, [Replicate()], src_data_rank=None)
        share = x if dist.get_rank() == 0 else torch.zeros_like(x)
        return DTensor.from_local(share, mesh, [Partial()], run_check=False)

    return stored_few(train_few(spread(mesh, Shard(0)), grad))


def moving_shards(moves: bool) -> tuple[Stored, int]:
    """Shards that are elsewhere in later steps, as where FSDP2 puts others in their place; also how often they were looked up."""
    make, calls = spread(mesh_of(dist.get_world_size()), Shard(0)), itertools.count()

    def grad(p: Tensor, x: Tensor) -> Tensor:
        if moves and next(calls) % 3 == 2:
            p._local_tensor = p._local_tensor.clone()
        return make(None, x)

    with mock.patch.object(LatherRun, "storage_changed", autospec=True, side_effect=LatherRun.storage_changed) as looked:
        return stored_few(train_few(make, grad)), looked.call_count


def validate_under_fsdp2(reshards: bool) -> bool:
    """Whether a model computes the same after a validation with averages as before, which FSDP2's root may keep gathered."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    fully_shard(model)
    opt = lather.Shampoo(model.named_parameters(), **BASE | {"averaging": "gpa"})
    for _ in range(3):
        model(x).square().sum().backward()
        opt.step()
    before = model(x).detach()
    model.reshard()
    opt.eval()
    with torch.no_grad():
        model(x)
    opt.train()
    if reshards:
        model.reshard()
    return torch.equal(model(x), before)


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t() if x.dim() == 2 else x


def odd_strides(sharded: bool) -> Stored:
    """Parameters and gradients that are not contiguous."""
    if not sharded:
        return stored_few(train_few(lambda _, x: transposed(x), lambda _, x: transposed(x)))
    mesh = mesh_of(dist.get_world_size())

    def make(_: Any, x: Tensor) -> Tensor:
        part = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None).to_local()
        return DTensor.from_local(transposed(part), mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())

    return stored_few(train_few(make, make))


def empty_parameter(sharded: bool) -> Stored:
    make = spread(mesh_of(dist.get_world_size()), Shard(0)) if sharded else lambda _, x: x
    params = [nn.Parameter(make("", x)) for x in (torch.ones(0, 3), torch.ones(6, 3))]
    opt = lather.Shampoo(params, **BASE, momentum=0.9)
    for _ in range(5):
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
    opt.consolidate_state_dict()
    return stored_few({"empty": params[0], "full": params[1]})


def teams_beside_other_groups() -> Stored:
    """Torch names a group made by its members alone after how many groups they have, which differs here."""
    dist.new_group([0])
    return train("ddp4", Case({"num_trainers_per_group": 2}))


# Groups, frozen parameters, copies.


def late_group(layout: str) -> Stored:
    """A parameter is frozen at first, and some are added later. One rank saves before they take a step."""
    run = Run(layout, Case())
    named = list(run.model.named_parameters())
    run.opt = lather.Shampoo(named[:6], **BASE, momentum=0.9)
    for step in range(1, 13):
        if step == 6:
            run.opt.add_param_group({"params": named[6:], "weight_decay": 0.1})
            if layout != "one" and dist.get_rank() == 0:
                run.opt.state_dict()
        run.set_grads(step)
        for frozen in (named[2][1], named[5][1]):
            frozen.requires_grad_(step > 8)
            frozen.grad = frozen.grad if step > 8 else None
        run.opt.step()
    return run.stored()


def removed_group(layout: str) -> Stored:
    """The first param group is taken out, and a parameter of the second. The others keep their state and owners."""
    run = Run(layout, Case())
    named = list(run.model.named_parameters())
    run.opt = lather.Shampoo([{"params": named[:4]}, {"params": named[4:]}], **BASE, momentum=0.9)
    for step in range(1, 13):
        if step == 6:
            run.opt.param_groups.pop(0)
            for name in ("params", "param_names"):
                run.opt.param_groups[0][name].pop(0)
        run.set_grads(step)
        run.opt.step()
    return run.stored()


def replaced_parameters(layout: str) -> Stored:
    """Others take the parameters' places and state, when owners are not those of a fresh plan."""
    run = Run(layout, Case())
    named = list(run.model.named_parameters())
    run.opt = lather.Shampoo(named[:4], **BASE, momentum=0.9)
    for step in range(1, 13):
        if step == 4:
            run.opt.add_param_group({"params": named[4:]})
        if step == 8:
            for name, old in named:
                module, _, leaf = name.rpartition(".")
                setattr(run.model.get_submodule(module), leaf, new := nn.Parameter(old.detach().clone()))
                run.opt.state[new] = run.opt.state.pop(old)
                for group in run.opt.param_groups:
                    group["params"] = [new if p is old else p for p in group["params"]]
        run.set_grads(step)
        run.opt.step()
    return run.stored()


def through_a_copy(layout: str, how: str) -> Stored:
    run = Run(layout, Case({"momentum": 0.9})).advance(1, 7)
    if how == "deepcopy":
        run.model, run.opt = copy.deepcopy((run.model, run.opt))
    else:
        run.model, run.opt = pickle.loads(pickle.dumps((run.model, run.opt)))
    return run.advance(8, 14).stored()


# Calls on some ranks only.


def only_first_rank_looks(layout: str) -> Stored:
    """Saving and reports on rank 0 alone, which must not wait for the others."""
    run = Run(layout, Case({"momentum": 0.9}))
    for step in range(1, 10):
        if dist.get_rank() == 0:
            str(run.opt.plan())
            run.opt.state_dict()
            run.opt.health()
            repr(run.opt)
        run.advance(step, step)
    return run.stored()


def gradient_on_one_rank_only(layout: str) -> Stored:
    """Without check_ranks the result depends on who owns which block, but there is one, and it is the same on all ranks."""
    run = Run(layout, Case({"stages": 2})).advance(1, 3)
    for step in range(4, 10):
        run.set_rates(step)
        run.set_grads(step)
        if dist.get_rank() == step % 2:
            run.model.get_parameter("up.weight").grad = None
            run.model.get_parameter("table.weight").grad = None
        run.opt.step()
    return run.stored()


def a_holder_without_a_gradient(missing: bool) -> Tensor:
    """Rank 0 owns the only block, and rank 1 has no gradient of its half in one step, or zeros."""
    mesh = mesh_of(2)
    p = nn.Parameter(distribute_tensor(noise("half", 0, (6, 4)), mesh, [Shard(0)], src_data_rank=None))
    opt = lather.Shampoo([p], **BASE)
    for step in range(1, 4):
        p.grad = distribute_tensor(noise("half", step, (6, 4)), mesh, [Shard(0)], src_data_rank=None)
        if step == 2 and dist.get_rank() == 1:
            p.grad = None if missing else torch.zeros_like(p)
        opt.step()
    assert opt._session.run.plan.owners == (0,)
    return p.detach().full_tensor()


def a_step_that_raises_in_the_middle() -> tuple[int, list[bool]]:
    """On all ranks, with collectives under way; how many, and whether any were when the next step started its own."""
    run = Run("fsdp2", Case({"stages": 4})).advance(1, 1)
    made = run.opt._session.run
    collectives = [c for unit in made.units for c in (unit.inbound, *(r.swap for r in unit.outbound)) if c]
    phases, seen, start = made.phases, list[bool](), Collective.start

    def left() -> int:
        return sum(c._work is not None for c in collectives)

    def started(self: Any) -> None:
        seen.append(left() > 0)
        start(self)

    def fails(step: Any) -> None:
        raise FloatingPointError("in the middle")

    made.phases = [*phases[:3], fails]
    run.set_grads(2)
    with suppress(FloatingPointError):
        run.opt.step()
    made.phases, under_way = phases, left()
    with mock.patch.object(Collective, "start", started):
        run.opt.step()
    return under_way, seen[:1]


# Failures on one rank.


def spoil(p: Tensor, number: int) -> None:
    """NaN in the first element that rank ``number`` stores."""
    assert p.grad is not None
    if dist.get_rank() == number and local(p).numel():
        local(p.grad).view(-1)[0] = torch.nan


def strict_about_nan(layout: str) -> None:
    """The NaN is seen by one rank."""
    run = Run(layout, Case({"on_nonfinite": "raise"})).advance(1, 3)
    before = {name: local(p).clone() for name, p in run.model.named_parameters()}
    run.set_grads(4)
    spoil(run.model.get_parameter("low.weight"), 1)
    try:
        run.opt.step()
    finally:
        assert all(torch.equal(local(p), before[name]) for name, p in run.model.named_parameters())


def failing_refreshes(layout: str) -> None:
    """A factor of one block is so large on its owner that its roots fail, until that is an error."""
    run = Run(layout, Case({"max_failed_refreshes": 2, "precondition_frequency": 1, "graft": "adam"})).advance(1, 2)
    state = run.opt.state[run.model.get_parameter("low.weight")]
    if "L0.0" in state and (dist.get_world_size() == 2 or dist.get_rank() % 2):  # of two owners in a world of four, one
        state["L0.0"].fill_(torch.finfo(torch.float32).max)
    run.advance(3, 12)


def errors_beside_the_training(layout: str) -> None:
    """Roots that are computed aside raise on one rank, again and again."""
    options = {"max_failed_refreshes": 1, "precondition_frequency": 2, "refresh_delay": 1, "root_device": "cpu"}
    run = Run(layout, Case(options)).advance(1, 2)
    fails = mock.Mock(side_effect=MemoryError("no room for roots"))
    with mock.patch.multiple(roots, solve=fails, rescue=fails) if dist.get_rank() == 0 else nullcontext():
        run.advance(3, 12)


def warm_up_from_zero(layout: str) -> int:
    """A first step at learning rate 0 in which one rank alone has a gradient that is not zero; the steps counted."""
    run = Run(layout, Case({"lr": 0.0}))
    run.set_grads(1)
    for name, p in run.model.named_parameters():
        if name != "low.weight" or dist.get_rank() != 2:
            local(p.grad).zero_()
    run.opt.step()
    return int(run.opt.state[run.model.get_parameter("up.weight")]["step"])


def strict_here_only() -> None:
    """A group that only ranks 0 and 1 know wants an error; the others must not wait for it, nor be waited for."""
    plain = nn.Parameter(torch.ones(4, 4))
    groups: list[Any] = [{"params": [plain]}]
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        sharded = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None))
        groups.append({"params": [sharded], "on_nonfinite": "raise"})
    opt = lather.Shampoo(groups, **BASE)
    for step in range(3):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        if step == 2 and dist.get_rank() == 1:
            local(sharded.grad)[0, 0] = torch.nan
        opt.step()


def nothing_to_train_here() -> tuple[Tensor, Tensor]:
    """All that ranks share is frozen; one of them has something of its own."""
    frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    mine = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    meshes = [DeviceMesh("cpu", [rank]) for rank in range(2)]
    if dist.get_rank() == 1:
        mine = nn.Parameter(distribute_tensor(torch.ones(4, 4), meshes[1], [Shard(0)], src_data_rank=None))
    opt = lather.Shampoo([frozen, mine], **BASE)
    for _ in range(3):
        if dist.get_rank() == 1:
            mine.grad = torch.ones_like(mine)
        opt.step()
    return frozen.detach(), local(mine).detach()


def mixed_precision(layout: str) -> Stored:
    """Parameters of float32, float64 and bfloat16 in one group, the last with gradients of float32."""
    dtypes = dict(zip(cases.shapes_of("toy"), itertools.cycle([torch.float32, torch.float64, torch.bfloat16])))
    run = Run(layout, Case())
    run.model = cases.lay_out(layout, "toy", lambda name, shape: noise(name, 0, shape).to(dtypes[name]))
    wide = [name for name, dtype in dtypes.items() if dtype == torch.bfloat16 and hasattr(Tensor, "grad_dtype")]
    for name in wide:
        run.model.get_parameter(name).grad_dtype = torch.float32
    run.opt = lather.Shampoo(run.model.named_parameters(), **BASE, momentum=0.9)
    for step in range(1, 10):
        for i, (name, p) in enumerate(run.model.named_parameters()):
            p.grad = run._grad(name, i, p, step, torch.float32 if name in wide else p.dtype)
        run.opt.step()
    return {name: (numbers, part.double()) for name, (numbers, part) in run.stored().items()}


def bad_option_on_one_rank(layout: str) -> None:
    run = Run(layout, Case())
    run.set_grads(1)
    if dist.get_rank() == 1:
        run.opt.param_groups[0]["max_preconditioner_dim"] = -3
    run.opt.step()


def wrapped_then_swapped(options: Options) -> Stored:
    """The optimizer is built first and its parameters are swapped for sharded ones, as Accelerate does."""
    run = Run("one", Case(options))
    fsdp(run.model, mesh_of(dist.get_world_size()))
    for group in run.opt.param_groups:
        group["params"] = list(run.model.parameters())
    run.opt.load_state_dict(run.opt.state_dict())
    layout = f"fsdp{dist.get_world_size()}"
    run.places = Run(layout, Case(options)).places
    return run.advance(1, run.case.steps).stored()


def pickled() -> bytes:
    return pickle.dumps(Run("ddp2", Case()).advance(1, 2).opt)


def gather_to(rank: int) -> None:
    Run("ddp2", Case()).advance(1, 2).opt.consolidate_state_dict(to=rank)


def load_refused_on_one_rank(layout: str) -> None:
    """Rank 1 cannot load what the others load. All of them hear of it in the next step."""
    run = Run(layout, Case()).advance(1, 2)
    run.opt.consolidate_state_dict()
    saved = [copy.deepcopy(run.opt.state_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)
    run.advance(3, 3)
    state: Any = saved[0]
    if dist.get_rank() == 1:
        state = {**state, "param_groups": []}
    with suppress(ValueError):
        run.opt.load_state_dict(state)
    run.advance(4, 4)


# What one rank does alone, and gathering.


def pair(**options: Any) -> tuple[nn.Module, lather.Shampoo]:
    """Two layers, of which each rank of two owns one."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(16, 64), "two": nn.Linear(32, 32)})
    return model, lather.from_adamw(model, lr=0.01, **options)


def advance(model: nn.Module, opt: lather.Shampoo, *steps: int) -> None:
    for step in steps:
        for name, p in model.named_parameters():
            p.grad = noise(name, step, p.shape)
        opt.step()


def resume_after_options_changed(path: str, name: str, value: Any, options: Options) -> tuple[list[Tensor], list[Tensor]]:
    """Who owns what depends on options. A new optimizer has other ones than the checkpoint, and owns what torch reads for it."""
    model, opt = pair(**options)
    advance(model, opt, 1)
    for group in opt.param_groups:
        group[name] = value
    advance(model, opt, 2)
    dcp.save(dict(zip(("model", "opt"), api.get_state_dict(model, opt), strict=True)), checkpoint_id=path)
    advance(model, opt, 3, 4)
    whole = [p.detach().clone() for p in model.parameters()]
    model, opt = pair(**options)
    state = dict(zip(("model", "opt"), api.get_state_dict(model, opt), strict=True))
    dcp.load(state, checkpoint_id=path)
    api.set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    advance(model, opt, 3, 4)
    return whole, list(model.parameters())


def save_on_one_rank_first() -> None:
    """Torch makes state by a step. A rank that has state already does not take it."""
    model, opt = pair()
    if dist.get_rank() == 0:
        opt.state_dict()
    api.get_state_dict(model, opt)
    advance(model, opt, 1)


def gather_to_themselves() -> None:
    model, opt = pair()
    advance(model, opt, 1)
    opt.consolidate_state_dict(to=dist.get_rank())


def gather_other_models() -> None:
    model, opt = pair()
    if dist.get_rank() == 1:
        model["one"].weight.requires_grad_(False)
    opt.consolidate_state_dict()


def gather_while_others_step(late: bool) -> None:
    model, opt = pair()
    advance(model, opt, 1, 2)
    with cases.answers_on_a_device(late):
        for step in (3, 4):
            if dist.get_rank() == 1 and step == 3:
                opt.consolidate_state_dict()
            advance(model, opt, step)


def gather_with_a_gradient_on_one_rank() -> None:
    """As between steps of accumulation."""
    model, opt = pair(averaging="schedule_free", betas=(0.0, 0.95))
    advance(model, opt, 1)
    opt.zero_grad()
    model["one"].weight.grad = torch.ones(64, 16) if dist.get_rank() == 1 else None
    opt.consolidate_state_dict()


def drift_between_gatherings() -> None:
    """Gatherings do not take the turns of comparisons."""
    model, opt = pair(check_ranks=2)
    opt.consolidate_state_dict()
    for step in range(1, 8):
        if step == 3 and dist.get_rank() == 1:
            with torch.no_grad():
                model["one"].weight.add_(1)
        advance(model, opt, step)
        opt.consolidate_state_dict()


def monitor_on_one_rank_after_gathering() -> None:
    model, opt = pair()
    opt.consolidate_state_dict()
    if dist.get_rank() == 0:
        lather.Monitor(opt, 100, to=lambda record: None)
    advance(model, opt, 1, 2)


def monitor_without_gradients_on_one_rank() -> list[int]:
    """In one step a rank has no gradient at all. It still counts the step, as the others do, and so does a copy."""
    model, opt = pair()
    records: list[Any] = []
    lather.Monitor(opt, 2, to=records.append)
    for step in range(1, 9):
        advance(model, opt, step) if step != 3 or dist.get_rank() == 0 else (opt.zero_grad(), opt.step())
    assert copy.deepcopy(opt)._session.count == opt._session.count == 8
    return [record["step"] for record in records]


def plain_gradient_on_one_rank() -> None:
    p = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh_of(2), [Shard(0)], src_data_rank=None))
    opt = lather.Shampoo([("weight", p)], **BASE)
    p.grad = torch.ones(8, 4) if dist.get_rank() == 1 else torch.ones_like(p)
    opt.step()


def step_without_gradients() -> list[Any]:
    _, opt = pair()
    opt.step()
    return [group["graft"] for group in opt.param_groups]

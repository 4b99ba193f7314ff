"""A toy model of awkward shapes, the layouts it can be stored in, and the cases that every rank runs.

Gradients are a function of the parameter's name and the step, so every rank can make the whole one and keep its part. Which
part that is comes from torch, not from lather: a model whose values are the numbers of its elements is laid out the same
way, and what a rank finds in its shard is what it stores.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint import state_dict as api
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lather
from lather.planning import messages, plan
from lather.runtime import agreement
from lather.settings import Settings

Options = dict[str, Any]
Stored = dict[str, tuple[Tensor, Tensor]]  # parameter -> numbers of the elements that a rank stores, and their values

# Without a warm-up of refreshes, which would leave neither plain steps nor staggered ones.
BASE: Options = {"lr": 0.05, "eps": 1e-6, "max_preconditioner_dim": 8, "precondition_frequency": 4, "refresh_warmup": 0.0}


class Toy(nn.Module):
    """Never called: it is made of modules because torch's parallel styles and ``fully_shard`` want those."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.zeros(()))
        self.thin = nn.Parameter(torch.zeros(4, 1, 6))
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7)
        self.twins = nn.ModuleList([nn.Linear(8, 12, bias=False) for _ in range(3)])
        self.odd = nn.ModuleList([nn.Linear(5, 18, bias=False) for _ in range(3)])  # by sides, and so by alignment
        self.low = nn.Linear(3, 5, bias=False)
        self.flat = nn.Linear(5, 3, bias=False)  # the last of four ranks stores nothing of it
        self.conv = nn.Conv2d(3, 6, 3, bias=False)
        self.table = nn.Embedding(50, 6)  # cut into many blocks


class Tiny(nn.Module):
    """One block for however many ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Parameter(torch.zeros(3, 2))


class Fused(nn.Module):
    """The first dimension of every parameter has three equal parts, which shards do not respect."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(7, 30)
        self.small = nn.Linear(5, 3)


class Some(nn.Module):
    """The kinds of blocks that options are about: a stack of nine beside single ones. It takes half the time of the toy."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.zeros(()))
        self.up = nn.Linear(7, 13)
        self.odd = nn.ModuleList([nn.Linear(5, 18, bias=False) for _ in range(3)])
        self.conv = nn.Conv2d(3, 6, 3, bias=False)


class Few(nn.Module):
    """One of each kind, for runs that are many."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.zeros(()))
        self.up = nn.Linear(7, 13)
        self.pair = nn.ModuleList([nn.Linear(5, 6, bias=False) for _ in range(2)])
        self.conv = nn.Conv2d(3, 4, 3, bias=False)


class Experts(nn.Module):
    """Stacked, and more than one for some ranks: ``lather.route`` knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(6, 4, 10))
        self.down = nn.Parameter(torch.zeros(6, 10, 4))


class Stage(nn.Module):
    """A layer of a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.query = nn.Linear(5, 6)
        self.out = nn.Linear(6, 5, bias=False)
        self.router = nn.Linear(5, 6, bias=False)
        self.experts = Experts()


class Mixture(nn.Module):
    """Two layers with experts: those can be on a mesh of their own, and layers on ranks of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 5)
        self.stages = nn.ModuleDict({"0": Stage(), "1": Stage()})


MODELS: dict[str, type[nn.Module]] = {"toy": Toy, "tiny": Tiny, "fused": Fused, "some": Some, "few": Few, "mixture": Mixture}


def noise(name: str, step: int, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}.{step}".encode()))
    return torch.randn(tuple(shape), generator=generator)


def shapes_of(model: str) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in MODELS[model]().named_parameters()}


# Layouts.


@functools.cache
def mesh_of(*sizes: int) -> DeviceMesh:
    names = ("data", "model")[-len(sizes) :] if len(sizes) > 1 else ("data",)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def replace(model: nn.Module, name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    *path, leaf = name.split(".")
    module = functools.reduce(getattr, path, model)
    whole = getattr(module, leaf).detach()
    shard = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    module.register_parameter(leaf, nn.Parameter(shard))


def shard_or_replicate(shape: Sequence[int], dim: int) -> Placement:
    return Shard(dim) if dim < len(shape) else Replicate()


def by_hand(model: nn.Module, dim: int) -> None:
    """Every parameter along one dimension, as tensor parallelism would."""
    for name, p in list(model.named_parameters()):
        replace(model, name, mesh_of(dist.get_world_size()), [shard_or_replicate(p.shape, dim)])


def fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Scalars are left plain, because ``fully_shard`` does not take them."""
    scalars = {p for p in model.parameters() if p.dim() == 0}
    if isinstance(model, Toy):
        fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=scalars)


def fsdp_tp(model: nn.Module, *, rest: bool) -> None:
    """Torch's own two-dimensional route. What has no parallel style is replicated on the model axis, or is not there."""
    mesh = mesh_of(2, 2)
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel(), "table": RowwiseParallel(), "flat": ColwiseParallel()}
    styles |= {"twins.0": ColwiseParallel(), "twins.1": RowwiseParallel()}
    parallelize_module(model, mesh["model"], styles)
    for name, p in list(model.named_parameters()) if rest else []:
        if p.dim() == 0:
            replace(model, name, mesh, [Replicate(), Replicate()])
        elif not isinstance(p, DTensor):
            replace(model, name, mesh["model"], [Replicate()])
    fsdp(model, mesh["data"])


def mixed(model: nn.Module) -> None:
    """Plain parameters beside sharded ones, and on four ranks also beside those of a mesh of another shape."""
    world = dist.get_world_size()
    line = mesh_of(world)
    for i, (name, p) in enumerate(list(model.named_parameters())):
        first, second = shard_or_replicate(p.shape, 0), shard_or_replicate(p.shape, 1)
        if i % 4 == 1:
            replace(model, name, line, [first])
        elif i % 4 == 2:
            replace(model, name, line, [second])
        elif i % 4 == 3 and world == 4:
            replace(model, name, mesh_of(2, 2), [first, second] if i % 8 == 3 else [Replicate(), first])


def mixture(model: nn.Module, experts: str, dense: str) -> None:
    """Experts on a mesh of their own, in the ways of torch, and all other parameters on another one."""
    for stage in model.stages.values():
        some, mesh = stage.experts, mesh_of(4) if experts == "world" else mesh_of(2, 2)["model"]
        for name, _ in list(some.named_parameters()):
            replace(some, name, mesh, [Shard(0)])
        if experts in ("matrices", "strided"):  # cut again: the matrices, or what a rank has of the stack
            along = {"matrices": 1, "strided": 0}[experts]
            fully_shard(some, mesh=mesh_of(2, 2)["data"], shard_placement_fn=lambda p, along=along: Shard(along))
        if dense == "tp":
            parallelize_module(stage, mesh_of(2, 2)["model"], {"query": ColwiseParallel(), "out": RowwiseParallel()})
    apart = {p for name, p in model.named_parameters() if "experts" in name or p.dim() == 0}
    fully_shard(model, mesh=mesh_of(2, 2)["data"] if dense == "tp" else mesh_of(2, 2), ignored_params=apart)


def pipeline(model: nn.Module, sharded: bool) -> None:
    """Ranks 0 and 1 have the first layer and the table, ranks 2 and 3 the second layer."""
    mine, line = str(dist.get_rank() // 2), mesh_of(2, 2)["model"]
    model.stages = nn.ModuleDict({mine: model.stages[mine]})
    if mine == "1":
        del model.table
    if sharded:
        for name, _ in list(model.named_parameters()):
            if "experts" in name:
                replace(model, name, line, [Shard(0)])
        fully_shard(model, mesh=line, ignored_params={p for p in model.parameters() if p.dim() in (0, 3)})


@dataclass(frozen=True)
class Layout:
    """``group``: the process group that the optimizer is given."""

    world: int
    lay: Callable[[nn.Module], Any]
    group: Callable[[], Any] = lambda: None


LAYOUTS: dict[str, Layout] = {
    "one": Layout(1, lambda model: None),  # without a process group
    "ddp2": Layout(2, lambda model: None),
    "ddp3": Layout(3, lambda model: None),
    "ddp4": Layout(4, lambda model: None),
    "fsdp2": Layout(2, lambda model: fsdp(model, mesh_of(2))),
    "fsdp3": Layout(3, lambda model: fsdp(model, mesh_of(3))),
    "fsdp4": Layout(4, lambda model: fsdp(model, mesh_of(4))),
    "hsdp22": Layout(4, lambda model: fsdp(model, mesh_of(2, 2))),
    "tp0x2": Layout(2, lambda model: by_hand(model, 0)),
    "tp1x2": Layout(2, lambda model: by_hand(model, 1)),
    "fsdp_tp22": Layout(4, lambda model: fsdp_tp(model, rest=True)),
    "fsdp_sub22": Layout(4, lambda model: fsdp_tp(model, rest=False)),
    "mixed2": Layout(2, mixed),
    "mixed4": Layout(4, mixed),
}
MANY = [name for name in LAYOUTS if name != "one"]
LAYOUTS |= {  # of mixtures
    "experts": Layout(4, lambda model: mixture(model, "world", "hsdp")),
    "experts_tp": Layout(4, lambda model: mixture(model, "matrices", "tp")),
    "experts_strided": Layout(4, lambda model: mixture(model, "strided", "hsdp")),
    "experts_twice": Layout(4, lambda model: mixture(model, "repeated", "tp")),  # each pair of ranks has them all
    "pipeline": Layout(4, lambda model: pipeline(model, False), lambda: mesh_of(2, 2)["model"].get_group()),
    "pipeline_fsdp": Layout(4, lambda model: pipeline(model, True), lambda: mesh_of(2, 2)["model"].get_group()),
}


def lay_out(layout: str, model: str, value: Callable[[str, torch.Size], Tensor]) -> nn.Module:
    """The model with these values, stored as the layout says."""
    module = MODELS[model]()
    for name, p in module.named_parameters():
        p.data = value(name, p.shape)
    LAYOUTS[layout].lay(module)
    return module


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@functools.cache
def places(layout: str, model: str) -> dict[str, Tensor]:
    """The numbers of the elements that this rank stores of every parameter."""
    numbered = lay_out(layout, model, lambda _, shape: torch.arange(shape.numel(), dtype=torch.float64).view(shape))
    return {name: local(p).long() for name, p in numbered.named_parameters()}


# Cases.


@dataclass(frozen=True)
class Case:
    """Options and circumstances of a run."""

    options: Options = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    gaps: bool = False  # some gradients are missing on some steps, and all of them on one
    spoilt: bool = False  # a few NaN
    evaluated: bool = False  # in eval mode in between, and at the end
    groups: bool = False  # a param group for every decay mode, one of them with another graft
    optimizer: str = "shampoo"
    model: str = "toy"
    steps: int = 9  # two refreshes of the roots


class Run:
    """A model and its optimizer on one rank."""

    def __init__(self, layout: str, case: Case) -> None:
        self.case, self.layout = case, LAYOUTS[layout]
        self.model = lay_out(layout, case.model, lambda name, shape: noise(name, 0, shape).to(case.dtype))
        self.places = places(layout, case.model)
        self.shapes = shapes_of(case.model)
        self.opt: Any = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        named = list(self.model.named_parameters())
        if self.case.optimizer == "adamw":  # elementwise, so it agrees in every layout and checks this file
            adamw = torch.optim.AdamW(named, lr=0.05, foreach=False)
            adamw.train = lambda: None
            return adamw
        params: list[Any] = named
        if self.case.groups:
            modes = ("decoupled", "l2", "corrected", "independent")
            params = [{"params": named[i::4], "weight_decay": 0.1, "weight_decay_mode": m} for i, m in enumerate(modes)]
            params[1] |= {"graft": "sgd", "eps": 1e-3}
        if self.case.model == "mixture":
            params = lather.route(self.model)
        return lather.Shampoo(params, **{"process_group": self.layout.group()} | BASE | self.case.options)

    def advance(self, first: int, last: int) -> Run:
        """Take the steps from ``first`` to ``last``, at a learning rate that rises and falls."""
        for step in range(first, last + 1):
            self.set_rates(step)
            self.set_grads(step)
            self.opt.train()
            self.opt.step()
            if self.case.evaluated and step % 2 == 0:
                self.opt.eval()
        return self

    def set_rates(self, step: int) -> None:
        for group in self.opt.param_groups:
            group["lr"] = 0.05 / (1 + 0.3 * abs(step - 6))

    def set_grads(self, step: int) -> None:
        numbers = {name: number for number, name in enumerate(self.shapes)}
        for name, p in self.model.named_parameters():
            p.grad = self._grad(name, numbers[name], p, step)

    def _grad(self, name: str, number: int, p: Tensor, step: int, dtype: torch.dtype | None = None) -> Tensor | None:
        if self.case.gaps and (step == 7 or (number + step) % 4 == 0):
            return None
        whole = noise(name, step, self.shapes[name])
        if self.case.spoilt and step in (6, 7, 9) and number % 2:
            whole.view(-1)[whole.numel() // 3] = torch.nan
        return self.share_of(whole, name, p, dtype or p.dtype)

    def share_of(self, whole: Tensor, name: str, p: Tensor, dtype: torch.dtype) -> Tensor:
        """What this rank stores of the whole gradient of a parameter."""
        part = whole.view(-1)[self.places[name]].to(dtype)
        if not isinstance(p, DTensor):
            return part
        stride = torch.empty(p.shape, device="meta").stride()
        return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=stride)

    def stored(self) -> Stored:
        return {name: (self.places[name], local(p).clone()) for name, p in self.model.named_parameters()}

    def state_keys(self) -> set[str]:
        names = [name for name, _ in self.model.named_parameters()]
        states = [self.opt.state[p] for p in self.model.parameters()]
        return {f"{name}/{key}" for name, state in zip(names, states, strict=True) for key in state}


def train(layout: str, case: Case) -> Stored:
    with expected_warnings(case):
        return Run(layout, case).advance(1, case.steps).stored()


@contextmanager
def small_parts() -> Iterator[None]:
    """Stages and rounds of a few bytes, as large models have them of many."""
    with mock.patch.multiple(plan, STAGE=200, SHORT_STAGE=200), mock.patch.object(messages, "ROUND", 30):
        yield


def train_in_small_parts(layout: str, case: Case) -> tuple[Stored, int, set[int]]:
    """Also the number of buffers of messages, and how many rounds units have."""
    with small_parts(), expected_warnings(case):
        run = Run(layout, case).advance(1, case.steps)
    units = run.opt._session.run.units
    buffers = {unit.messages.data_ptr() for unit in units if unit.messages.numel()}
    return run.stored(), len(buffers), {len(unit.outbound) for unit in units}


def miss_a_step_in_small_parts(layout: str) -> dict[int, set[bool]]:
    with small_parts():
        return miss_a_step(layout)


@contextmanager
def expected_warnings(case: Case) -> Iterator[None]:
    """Skipped gradients are reported, on the ranks that own them."""
    with warnings.catch_warnings():
        if case.spoilt:
            warnings.simplefilter("ignore", lather.NumericalWarning)
        yield


def assemble(ranks: Sequence[Stored], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The whole parameters from what the ranks store; replicas must agree and nothing may be missing."""
    together = {}
    for name, shape in shapes.items():
        pieces = {rank: stored[name] for rank, stored in enumerate(ranks) if name in stored}
        dtype = next(iter(pieces.values()))[1].dtype
        values, seen = torch.zeros(shape.numel(), dtype=dtype), torch.zeros(shape.numel(), dtype=torch.bool)
        for rank, (numbers, part) in pieces.items():
            again = seen[numbers]
            assert torch.equal(values[numbers][again], part[again]), f"rank {rank} disagrees on {name}"
            values[numbers], seen[numbers] = part, True
        assert seen.all(), f"{name} is not stored completely"
        together[name] = values.view(shape)
    return together


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert ours.keys() == theirs.keys()
    wrong = dict(_differences(ours, theirs))
    assert not wrong, f"different (largest, number of elements, first): {wrong}"


def _differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Iterator[tuple[str, Any]]:
    for name, x in ours.items():
        y = theirs[name]
        if not torch.equal(x, y):
            off = x != y
            yield name, ((x - y).abs().max().item(), int(off.sum()), off.nonzero()[0].tolist())


DISTRIBUTION = ("num_trainers_per_group", "stages", "check_ranks")  # these must not change what is computed
_references: dict[str, dict[str, Tensor]] = {}


def alone(case: Case) -> dict[str, Tensor]:
    """What one process without a process group gets: the reference."""
    case = replaced(case, options={k: v for k, v in case.options.items() if k not in DISTRIBUTION})
    if repr(case) not in _references:
        _references[repr(case)] = assemble([train("one", case)], shapes_of(case.model))
    return _references[repr(case)]


# What else is run on every rank.


def changed(case: Case, **options: Any) -> Case:
    return replaced(case, options=case.options | options)


def keys_after_a_step(layout: str, case: Case) -> set[str]:
    return Run(layout, case).advance(1, 1).state_keys()


def train_in_pairs(pair: Sequence[Case]) -> Stored:
    """Ranks 0 and 1 train one case, 2 and 3 the other."""
    mine, _ = dist.new_subgroups(2)
    case = pair[dist.get_rank() // 2]
    return train("ddp4", changed(case, process_group=mine))


def train_for_real(wrapper: str, options: Options) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses on this rank's share of the data, the whole parameters at the end, and what kinds parameters were found to be."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 17), nn.LayerNorm(17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 3, bias=False)]
    model: nn.Module = nn.Sequential(*layers)
    if wrapper == "fsdp":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    opt = lather.Shampoo(model, **options)
    x = torch.randn(60, 6)
    x, y = (half[dist.get_rank() :: dist.get_world_size()] for half in (x, x[:, :3] * x[:, 3:]))
    losses = []
    for _ in range(25):
        loss = (model(x) - y).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    weights = {name: whole(p).clone() for name, p in model.named_parameters()}
    return losses, weights, [row.rule for row in opt.plan().params]


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Ranks that disagree.


def step_with(layout: str, options: Sequence[Options], model: str = "toy") -> None:
    """Each rank has options of its own."""
    run = Run(layout, Case(options[dist.get_rank()], model=model))
    run.set_grads(1)
    run.opt.step()


def step_with_kernels_on_one_rank(layout: str) -> None:
    """Only one rank packs its factors, as if only its device had kernels."""
    with mock.patch.object(Settings, "packs", return_value=dist.get_rank() == 1):
        step_with(layout, [{}, {}])


def step_without_a_gradient(layout: str, name: str) -> None:
    """After a step that was in order, one rank lacks a gradient."""
    run = Run(layout, Case({"check_ranks": True})).advance(1, 1)
    run.set_grads(2)
    if dist.get_rank() == 1:
        run.model.get_parameter(name).grad = None
    run.opt.step()


def gradients_on_one_rank(layout: str, options: Options, missing: Sequence[int] = (2, 4, 6)) -> dict[str, Tensor]:
    """In some steps one rank lacks gradients, and applies what the owner of a block sends."""
    run = Run(layout, Case(options, dtype=torch.bfloat16))
    for step in range(1, 7):
        run.set_grads(step)
        if dist.get_rank() == 1 and step in missing:
            run.model.get_parameter("up.weight").grad = run.model.get_parameter("scalar").grad = None
        run.opt.step()
    return {name: local(p).clone() for name, p in run.model.named_parameters()}


def weights_of_their_own(probed: bool) -> None:
    """Replicas differ. Torch's checkpoint code makes the state before they are loaded."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 5)
    opt = lather.Shampoo(model.named_parameters(), **BASE)
    if probed:
        api.get_optimizer_state_dict(model, opt)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()


def a_sparse_gradient() -> None:
    p = nn.Parameter(torch.ones(4, 3))
    opt = lather.Shampoo([("table", p)], **BASE)
    p.grad = torch.ones(4, 3).to_sparse() if dist.get_rank() == 1 else torch.ones(4, 3)
    opt.step()


def eval_before_the_first_step() -> None:
    p = nn.Parameter(torch.ones(4, 3))
    opt = lather.Shampoo([("weight", p)], **BASE | {"averaging": "schedule_free"})
    p.grad = torch.ones(4, 3)
    if dist.get_rank() == 1:
        opt.eval()
    opt.step()


def step_of_another_shape() -> None:
    """Plain parameters that differ in shape between the ranks."""
    model = nn.Linear(4, 5 + dist.get_rank())
    opt = lather.Shampoo(model.named_parameters(), **BASE)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()


def step_with_a_monitor_on_one_rank(layout: str) -> None:
    """As users do with loggers."""
    run = Run(layout, Case())
    if dist.get_rank() == 0:
        lather.Monitor(run.opt, to=print)
    run.set_grads(1)
    run.opt.step()


def monitored_steps(layout: str) -> list[int]:
    """All ranks have a monitor, and one of them arms a step for itself."""
    run, records = Run(layout, Case()), list[Any]()
    lather.Monitor(run.opt, every=5, to=records.append)
    run.advance(1, 5)
    if dist.get_rank() == 0:
        run.opt.arm()
    run.advance(6, 10)
    return [record["step"] for record in records]


def step_after_the_end(layout: str) -> None:
    """The process group is destroyed, as at the end of a program that goes on."""
    run = Run(layout, Case()).advance(1, 3)
    dist.destroy_process_group()
    run.set_grads(4)
    run.opt.step()


@contextmanager
def answers_on_a_device(late: bool) -> Iterator[None]:
    """The answer to a vote is read before the next step, as if it were on a device."""
    if not late:
        yield
        return
    copied = mock.Mock(side_effect=lambda answer: (answer, mock.Mock()))
    with mock.patch.multiple(agreement, _is_late=lambda answer: True, to_host=copied):
        yield


def one_rank_apart(layout: str, what: str, options: Options, late: bool, model: str | None = None) -> int:
    """After steps in order, rank 1 alone does something; the steps taken until all ranks stop."""
    usual = "toy" if layout.startswith("fsdp_") else "few"  # those meshes want its layers
    run = Run(layout, Case(options, model=model or usual))
    if what == "add under a monitor":
        lather.Monitor(run.opt, every=1, to=list[Any]().append)
    saved, step = run.advance(1, 2).opt.state_dict(), 2
    try:
        with answers_on_a_device(late):
            for step in (3, 4, 5):
                run.set_grads(step)
                if dist.get_rank() == 1 and step == 3:
                    do_alone(run, what, saved)
                run.opt.step()
    except Exception as error:
        raise type(error)(f"{error} (in step {step})") from error
    return step


def do_alone(run: Run, what: str, saved: Any) -> None:
    values = {"lr": 1.0, "eps": 0.5, "momentum": 0.9, "communication_dtype": "bfloat16", "stages": 0, "graft": "sgd"}
    if what.startswith("add"):
        run.opt.add_param_group({"params": [("extra", nn.Parameter(torch.ones(4, 4)))]})
    elif what == "load":
        run.opt.load_state_dict(saved)
    elif what == "move":  # what only this rank has to know
        for p in run.model.parameters():
            run.opt.state[p] = {name: view.clone() for name, view in run.opt.state[p].items()}
    elif what == "empty":
        run.opt.state.clear()
    elif what == "forget":
        run.opt.state[run.opt.param_groups[0]["params"][1]].clear()
    elif what == "set":
        run.opt.state[run.opt.param_groups[0]["params"][0]]["step"] = torch.tensor(7.0)
    elif what == "zero":
        for entry in run.opt.state.values():
            entry["step"].zero_()
    elif what == "eval":
        run.opt.eval()
    elif what == "drift":
        p = local(run.model.get_parameter("scalar"))
        p.view(torch.int32).bitwise_xor_(1)
    else:
        run.opt.param_groups[0][what] = values[what]


def miss_a_step(layout: str) -> dict[int, set[bool]]:
    """Rank 1 misses a step because its plan is another. By owner: whether blocks moved on rank 0."""
    run = Run(layout, Case({"weight_decay": 0.1, "momentum": 0.9})).advance(1, 2)
    plan, before = run.opt._session.run.plan, [p.detach().clone() for p in run.opt.param_groups[0]["params"]]
    found: dict[int, set[bool]] = {}
    with answers_on_a_device(True):
        run.set_grads(3)
        if dist.get_rank() == 1:
            do_alone(run, "add", None)
        run.opt.step()
    for block, owner in zip(plan.blocks, plan.owners, strict=True):
        p, region = run.opt.param_groups[0]["params"][block.param], block.region
        where = tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))
        found.setdefault(owner, set()).add(not torch.equal(p[where], before[block.param][where]))
    return found


def steps_in_part_of_the_world() -> int:
    """The all-reduces of a plain step of ranks 0 and 1, which are not all ranks."""
    group, reduced = dist.new_group([0, 1]), 0
    if dist.get_rank() < 2:
        params = [nn.Parameter(noise(name, 0, (6, 4))) for name in "ab"]
        opt = lather.Shampoo(params, **BASE, process_group=group)
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as seen:
                opt.step()
            reduced = seen.call_count
    return reduced


def rates_that_were_different() -> None:
    """A schedule gives all ranks the same learning rate. But decay goes by the largest one so far."""
    p = nn.Parameter(torch.ones(4, 3))
    opt = lather.Shampoo([("weight", p)], **BASE | {"lr": 0.1 * (1 + dist.get_rank()), "weight_decay_mode": "corrected"})
    opt.param_groups[0]["lr"], p.grad = 0.05, torch.ones(4, 3)
    opt.step()


def one_rank_fails_beside_partial_gradients() -> None:
    """Torch redistributes such gradients by a collective of its own, which must not meet the vote."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    p = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Replicate()], src_data_rank=None))
    opt = lather.Shampoo([("weight", p)], **BASE)
    for step in (1, 2):
        p.grad = DTensor.from_local(torch.ones(4, 3), mesh, [Partial()], run_check=False)
        if step == 2 and dist.get_rank() == 0:
            opt.param_groups[0]["eps"] = -1.0
        opt.step()


def uneven_inputs(how: str) -> int:
    """Rank 1 has more batches than rank 0; the steps taken until all ranks stop."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    opt, taken = lather.Shampoo(model, **BASE), 0
    scope = Join([model, opt]) if how == "both" else model.join(throw_on_early_termination=True)
    with suppress(RuntimeError), scope:
        for _ in range(2 + dist.get_rank()):
            opt.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            opt.step()
            taken += 1
    return taken


def another_order() -> None:
    """Unnamed parameters of equal shape, the other way round on rank 1."""
    params = [nn.Parameter(noise(name, 0, (6, 4))) for name in "ab"]
    grads = {p: noise(f"{name} grad", 0, (6, 4)) for name, p in zip("ab", params, strict=True)}
    opt = lather.Shampoo(params[:: 1 - 2 * dist.get_rank()], **BASE)
    for _ in range(3):
        for p in params:
            p.grad = grads[p]
        opt.step()


def fail_on_one_rank() -> None:
    """A parameter that only rank 1 cannot plan for."""
    params = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(3))]
    opt = lather.Shampoo(params, **BASE, batch_dims=1)
    if dist.get_rank() == 1:
        params[1].data = torch.ones(())
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()


def flat_parameter(use_orig_params: bool) -> None:
    """As FSDP1 makes them, and as it shows them."""
    model = FullyShardedDataParallel(nn.Linear(6, 4), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    lather.Shampoo(model.named_parameters())


def through_torchs_full_state(layout: str, case: Case) -> Stored:
    """Consolidated first, so that what torch gathers on rank 0 is whole; and resumed from that."""
    from torch.distributed.checkpoint import state_dict as api

    run = Run(layout, case).advance(1, 6)
    run.opt.consolidate_state_dict(to=0)
    options = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = api.get_optimizer_state_dict(run.model, run.opt, options=options)
    run.opt = run._optimizer()
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    api.set_optimizer_state_dict(run.model, run.opt, gathered if dist.get_rank() == 0 else {}, options=options)
    return run.advance(7, case.steps).stored()


def from_a_gathered_state(layout: str, method: str) -> list[str]:
    """What torch gathers on rank 0 has rank 0's blocks only: the warnings that each rank gives when it loads that."""
    from torch.distributed.checkpoint import state_dict as api

    case = Case({"preconditioner": method})
    run = Run(layout, case).advance(1, 6)
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    gathered = api.get_optimizer_state_dict(run.model, run.opt, options=options)
    again = Run(layout, case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        api.set_optimizer_state_dict(again.model, again.opt, gathered if dist.get_rank() == 0 else {}, options=options)
    return [str(w.message) for w in caught if "consolidate_state_dict" in str(w.message)]

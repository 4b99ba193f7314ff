"""Train a mixture of experts: experts on a mesh of their own, all other parameters with HSDP and tensor parallelism.

    torchrun --nproc-per-node 4 examples/experts.py --replicate 2 --tp 2 --checkpoint run/experts --stop-after 100
    torchrun --nproc-per-node 4 examples/experts.py --expert-ranks 2 --checkpoint run/experts  # FSDP2, and two experts on a rank

The second command goes on at step 100 in another layout. lather reads from each parameter which ranks store it, and every expert's
matrices are preconditioned by themselves. Ranks that store an expert also own its blocks, as far as the work is even.
"""

from __future__ import annotations

import argparse

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInputOutput, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu
from train_fsdp2 import load, make_mesh, save, save_full

EXPERTS = 4


def main() -> None:
    args = parse_args()
    device = common.start(args)
    ranks = dist.get_world_size() // args.tp  # that split the batch
    model = distribute(common.Model(args, MixtureLayer).to(device), args, device, ranks)
    opt = common.make_optimizer(args, model)
    done = load(args.checkpoint, model, opt)

    common.train(args, model, opt, done, save, dist.get_rank() // args.tp, ranks)
    if args.save_final:
        save_full(args.save_final, model)
    common.finish()


def parse_args() -> argparse.Namespace:
    parser = common.make_parser(__doc__)
    parser.add_argument("--replicate", type=int, default=1, metavar="R", help="HSDP: this many replicas of the shards")
    parser.add_argument("--tp", type=int, default=1, metavar="T", help="tensor-parallel ranks (1, 2 or 4)")
    parser.add_argument("--expert-ranks", type=int, metavar="E", help="ranks that split the experts (1, 2 or 4); default all")
    return parser.parse_args()


# The model.


class Experts(nn.Module):
    """Stacked: ``[expert, inputs, outputs]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """Ranks gather their tokens, each asks its own experts, and the answers are summed and given back.

        Here every token goes to every expert. A large mixture sends it to a few. To the optimizer this is the same.
        """
        x, gates = (gather(some, self.up.device_mesh) for some in (x, gates))
        hidden = gelu(x.unsqueeze(0).expand(EXPERTS, -1, -1).bmm(self.up))
        out = (hidden.bmm(self.down) * gates.T.unsqueeze(-1)).sum(0)
        return out.redistribute(placements=[Shard(0)]).to_local().clone()  # FSDP2 warns of a view


def gather(part: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(part, mesh, [Shard(0)]).redistribute(placements=[Replicate()])


class MixtureLayer(common.Layer):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.up, self.down
        self.router, self.experts = nn.Linear(width, EXPERTS, bias=False), Experts(width)

    def feed_forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        return self.experts(tokens, self.router(tokens).softmax(-1)).view_as(x)


# Layout.


def distribute(model: common.Model, args: argparse.Namespace, device: torch.device, ranks: int) -> common.Model:
    """Experts first, then tensor parallelism, then FSDP2 for the rest."""
    mesh, experts_mesh = make_mesh(args, device), make_expert_mesh(args, device, ranks)
    data_mesh = mesh["replicate", "shard"] if args.replicate > 1 else mesh["shard"]
    for layer in model.layers:
        shard_experts(layer.experts, experts_mesh, ranks)
        if args.tp > 1:
            parallelize_module(layer, mesh["tp"], tensor_parallel_plan())
        fully_shard(layer, mesh=data_mesh)
    return fully_shard(model, mesh=data_mesh)


def make_expert_mesh(args: argparse.Namespace, device: torch.device, ranks: int) -> DeviceMesh:
    """All ranks again, in two axes: one splits the experts, the other their matrices."""
    size = args.expert_ranks or min(EXPERTS, dist.get_world_size())
    if dist.get_world_size() % size or EXPERTS % size or args.batch % ranks or 64 % ranks:
        raise SystemExit(f"--expert-ranks must divide the ranks and the {EXPERTS} experts, and {ranks} the batch and 64 windows")
    return init_device_mesh(device.type, (dist.get_world_size() // size, size), mesh_dim_names=("matrices", "experts"))


def shard_experts(experts: Experts, mesh: DeviceMesh, ranks: int) -> None:
    for name, p in list(experts.named_parameters()):
        experts.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh["experts"], [Shard(0)])))
    fully_shard(experts, mesh=mesh["matrices"], shard_placement_fn=lambda p: Shard(1))
    scale = mesh["matrices"].size() / ranks  # an expert hears all tokens, and FSDP2 has divided by the size of its mesh only
    for p in experts.parameters():
        p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(scale))


def tensor_parallel_plan() -> dict[str, object]:
    """Attention is split by heads. Tensor-parallel ranks have the same tokens, so each takes a part of them to the experts."""
    tokens = PrepareModuleInputOutput(
        input_layouts=(Replicate(), Replicate()),
        desired_input_layouts=(Shard(0), Shard(0)),
        use_local_input=True,
        output_layouts=(Shard(0),),
        desired_output_layouts=(Replicate(),),
    )
    columns = dict.fromkeys(("query", "key", "value"), ColwiseParallel())
    return columns | {"out": RowwiseParallel(), "experts": tokens}


if __name__ == "__main__":
    main()

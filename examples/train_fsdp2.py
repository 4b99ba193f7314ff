"""Train a small language model with FSDP2, by flags also HSDP and tensor parallelism; checkpoints load on any ranks.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py
    torchrun --nproc-per-node 4 examples/train_fsdp2.py --replicate 2     # HSDP: 2 replicas of 2 shards
    torchrun --nproc-per-node 4 examples/train_fsdp2.py --tp 2            # 2 shards x 2 tensor-parallel ranks
    torchrun --nproc-per-node 2 examples/train_fsdp2.py --checkpoint run --stop-after 100
    torchrun --nproc-per-node 3 examples/train_fsdp2.py --checkpoint run  # goes on at step 100

Make the optimizer after ``fully_shard``: lather reads from the sharded parameters which ranks share the work.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main() -> None:
    args = parse_args()
    device = common.start(args)
    ranks = dist.get_world_size() // args.tp  # that split the batch; tensor-parallel ranks see the same part of it
    rank = dist.get_rank() // args.tp
    model = distribute(common.Model(args).to(device), make_mesh(args, device), args)
    opt = common.make_optimizer(args, model)
    done = load(args.checkpoint, model, opt)

    common.train(args, model, opt, done, save, rank, ranks)
    if args.save_final:
        save_full(args.save_final, model)
    common.finish()


def parse_args() -> argparse.Namespace:
    parser = common.make_parser(__doc__)
    parser.add_argument("--replicate", type=int, default=1, metavar="R", help="HSDP: this many replicas of the shards")
    parser.add_argument("--tp", type=int, default=1, metavar="T", help="tensor-parallel ranks (1, 2 or 4)")
    return parser.parse_args()


# Layout.


def make_mesh(args: argparse.Namespace, device: torch.device) -> DeviceMesh:
    """Axes replicate, shard and tp, without those of size 1 that nobody asked for."""
    shards, rest = divmod(dist.get_world_size(), args.replicate * args.tp)
    if rest or common.HEADS % args.tp:
        raise SystemExit(f"--replicate x --tp must divide the number of ranks, and --tp the {common.HEADS} heads")
    sizes = {"replicate": args.replicate, "shard": shards, "tp": args.tp}
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == "shard"}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def distribute(model: common.Model, mesh: DeviceMesh, args: argparse.Namespace) -> common.Model:
    """Tensor parallelism first, then FSDP2 over the data-parallel axes: each layer is gathered when its turn comes."""
    data_mesh = mesh["replicate", "shard"] if args.replicate > 1 else mesh["shard"]
    for layer in model.layers:
        if args.tp > 1:
            columns = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
            parallelize_module(layer, mesh["tp"], columns | dict.fromkeys(("out", "down"), RowwiseParallel()))
        fully_shard(layer, mesh=data_mesh)
    return fully_shard(model, mesh=data_mesh)


# Checkpoints.


def save(folder: Path, model: nn.Module, opt: torch.optim.Optimizer, step: int) -> None:
    """Every rank writes what it holds, under a name that rank 0 changes at the end: step-* folders are complete."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "saving", ignore_errors=True)  # of a job that was killed here
    dist.barrier()
    dcp.save(get_state(model, opt, step), checkpoint_id=folder / "saving")
    if dist.get_rank() == 0:
        old = list(folder.glob("step-*"))
        (folder / "saving").rename(folder / f"step-{step:06d}")
        for path in old:
            shutil.rmtree(path)
    common.say(f"saved step {step}")


def load(folder: Path | None, model: nn.Module, opt: torch.optim.Optimizer) -> int:
    """The step that the checkpoint was taken after, 0 if there is none. Every rank reads its part of it."""
    found = sorted(folder.glob("step-*")) if folder else []
    if not found:
        return 0
    state = get_state(model, opt, 0)
    dcp.load(state, checkpoint_id=found[-1])
    dcp_state.set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    common.say(f"resumed at step {state['step']} on {dist.get_world_size()} ranks")
    return state["step"]


def get_state(model: nn.Module, opt: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    model_state, opt_state = dcp_state.get_state_dict(model, opt)
    return {"model": model_state, "optimizer": opt_state, "step": step}


def save_full(file: Path, model: nn.Module) -> None:
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = dcp_state.get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(full, file)


if __name__ == "__main__":
    main()

"""Train a small language model with DDP; the checkpoint is one file that any number of ranks can resume from.

    torchrun --nproc-per-node 2 examples/train_ddp.py
    torchrun --nproc-per-node 2 examples/train_ddp.py --checkpoint run --stop-after 100
    torchrun --nproc-per-node 3 examples/train_ddp.py --checkpoint run    # goes on at step 100

Under DDP every rank has all parameters and gradients; lather divides the work and its state among the ranks.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import common
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lather


def main() -> None:
    args = common.make_parser(__doc__).parse_args()
    device = common.start(args)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(common.Model(args).to(device))
    opt = common.make_optimizer(args, model.module)
    done = load(args.checkpoint, model, opt)

    common.train(args, model, opt, done, save, rank, ranks)
    if args.save_final and rank == 0:
        torch.save(model.module.state_dict(), args.save_final)
    common.finish()


def save(folder: Path, model: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
    """One file, written by rank 0 under another name and then renamed: a job killed here leaves the one before."""
    if isinstance(opt, lather.Shampoo):
        opt.consolidate_state_dict(to=0)  # every rank takes part; then the state dict of rank 0 is whole
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        state = {"step": step, "model": model.module.state_dict(), "optimizer": opt.state_dict()}
        torch.save(state, folder / "checkpoint.tmp")
        os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")
    common.say(f"saved step {step}")


def load(folder: Path | None, model: DistributedDataParallel, opt: torch.optim.Optimizer) -> int:
    """The step that the checkpoint was taken after, 0 if there is none. Every rank reads it and keeps what it needs."""
    if folder is None or not (folder / "checkpoint.pt").exists():
        return 0
    if zipfile.ZipFile(folder / "checkpoint.pt").testzip():  # torch.load does not look at checksums
        raise SystemExit(f"{folder / 'checkpoint.pt'} is damaged")
    state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    model.module.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])
    common.say(f"resumed at step {state['step']} on {dist.get_world_size()} ranks")
    return state["step"]


if __name__ == "__main__":
    main()

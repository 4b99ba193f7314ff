"""What others found, each against lather's defaults, on the tasks of the other experiments.

    python -m experiments.ideas wikitext --data DIR --steps 330 --lr 4e-3 8e-3 1.6e-2     # all ideas
    python -m experiments.ideas vit --data PATH --runs shampoo shampoo+cautious --bracket
    python -m experiments.ideas text --data DIR --glob '*.h' --steps 800 --lr 4e-3

The first word is the task, with its model, schedule and arguments. Logs are called ideas-TASK.jsonl.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lather
from experiments import harness, text, vit, wikitext
from experiments.methods import register_all
from experiments.recipes import DECAY, Make, Optimizers, Recipe, shampoo
from lather.routing import has_no_matrices

Idea = Callable[[torch.optim.Optimizer, int], None]  # changes an optimizer; knows the number of steps


def every_step(
    opt: torch.optim.Optimizer, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> None:
    """Do something around every step."""
    if before is not None:
        opt.register_step_pre_hook(lambda *_: torch.no_grad()(before)())
    if after is not None:
        opt.register_step_post_hook(lambda *_: torch.no_grad()(after)())


def preconditioned(opt: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Param groups with matrices of hidden layers."""
    return [g for g in opt.param_groups if g["preconditioner"] is not None and any(p.dim() > 1 for p in g["params"])]


# Ideas that work around the optimizer.


def cautious(opt: torch.optim.Optimizer, steps: int) -> None:
    """Weight decay only where the step goes towards zero (arXiv 2510.12402): ``W <- W - lr (P + c W [P W > 0])``."""
    groups = [(group, group["weight_decay"]) for group in opt.param_groups if group["weight_decay"]]
    old: list[list[Tensor]] = []
    for group, _ in groups:
        group["weight_decay"] = 0.0

    def before() -> None:
        old[:] = [[p.detach().clone() for p in group["params"]] for group, _ in groups]

    def after() -> None:
        for (group, decay), olds in zip(groups, old, strict=True):
            agree = torch._foreach_mul(torch._foreach_sub(olds, group["params"]), olds)
            torch._foreach_sign_(agree)
            torch._foreach_clamp_min_(agree, 0.0)
            torch._foreach_mul_(agree, olds)
            torch._foreach_add_(group["params"], agree, alpha=-group["lr"] * decay)

    every_step(opt, before, after)


def sphere(opt: torch.optim.Optimizer, steps: int) -> None:
    """Matrices go back to their initial norm after every step. They do not decay."""
    radii = {p: p.detach().norm() for group in preconditioned(opt) for p in group["params"]}
    for group in preconditioned(opt):
        group["weight_decay"] = 0.0

    def after() -> None:
        for p, radius in radii.items():
            p.mul_(radius / p.norm())

    every_step(opt, after=after)


def hyperball(opt: torch.optim.Optimizer, steps: int) -> None:
    """The same, with steps of ``lr`` times the norm: ``W <- R (W - lr R P / |P|) / |...|``."""
    old: dict[Tensor, Tensor] = {}

    def before() -> None:
        old.update({p: p.detach().clone() for group in preconditioned(opt) for p in group["params"]})

    def after() -> None:
        for group in preconditioned(opt):
            for p in group["params"]:
                step = p - old[p]
                p.copy_(old[p] + step * (group["lr"] * old[p].norm() / step.norm().clamp_min(1e-30)))

    every_step(opt, before, after)
    sphere(opt, steps)


def average(part: float) -> Idea:
    """The mean of the weights over this part of the steps, the last ones, is evaluated. Training does not change."""

    def idea(opt: torch.optim.Optimizer, steps: int) -> None:
        params = [p for group in opt.param_groups for p in group["params"]]
        done, mean, trained = 0, list[Tensor](), list[Tensor]()

        def after() -> None:
            nonlocal done
            done += 1
            taken = done - round((1 - part) * steps)
            if taken == 1:
                mean[:] = [p.detach().clone() for p in params]
            elif taken > 1:
                torch._foreach_lerp_(mean, params, 1 / taken)

        @torch.no_grad()
        def show() -> None:
            trained[:] = [p.detach().clone() for p in params]
            torch._foreach_copy_(params, mean or trained)

        @torch.no_grad()
        def hide() -> None:
            torch._foreach_copy_(params, trained)

        every_step(opt, after=after)
        opt.eval, opt.train = show, hide  # type: ignore[attr-defined]

    return idea


LOW, WARM, COOL = 0.85, 0.15, 0.05  # beta1 at both ends; parts of the steps in which it rises and falls


def momentum(opt: torch.optim.Optimizer, steps: int) -> None:
    """``beta1`` of matrices rises from 0.85 to its value in the first 15% of the steps, and falls again in the last 5%."""
    highs, done = [(group, *group["betas"]) for group in preconditioned(opt)], 0

    def before() -> None:
        nonlocal done
        up = min(1.0, done / (WARM * steps), (steps - done) / (COOL * steps))
        for group, high, beta2 in highs:
            group["betas"] = (LOW + up * (high - LOW), beta2)
        done += 1

    every_step(opt, before)


# Rows.


def ours(model: nn.Module, lr: float, **options: Any) -> Optimizers:
    """lather given the model, with its own methods and those of experiments.methods."""
    register_all()
    return shampoo(model, lr, **options)


def changed(idea: Idea) -> Make:
    def make(model: nn.Module, lr: float, steps: int = 1, **options: Any) -> Optimizers:
        (opt,) = ours(model, lr, **options)
        idea(opt, steps)
        return [opt]

    return make


def elementwise(model: nn.Module, lr: float, beta2: float, **options: Any) -> Optimizers:
    """Another ``beta2`` for embeddings, heads, norms and biases."""
    groups = lather.route(model)
    for group in groups:
        if has_no_matrices(group):
            group["betas"] = (0.95, beta2)
    return [lather.Shampoo(groups, lr, **options)]


WHOLE = {"max_preconditioner_dim": 1 << 20}  # matrices are not cut
ROWS: dict[str, dict[str, Any]] = {
    "shampoo@1": {"precondition_frequency": 1},
    "soap": {"preconditioner": "soap", "graft": None},
    "kl": {"preconditioner": "kl"},
    "spectral": {"preconditioner": "spectral", "graft": "constant"} | WHOLE,
    "spectral+rows": {"preconditioner": "normalised_rows", "graft": "constant"} | WHOLE,
    "shampoo+polar": {"preconditioner": "shampoo_polar"},
    "shampoo+polar+constant": {"preconditioner": "shampoo_polar", "graft": "constant"},
    "soap+polar": {"preconditioner": "soap_polar", "graft": "constant"},
    "klsoap": {"preconditioner": "klsoap", "graft": None},
    "kl@1+constant": {"preconditioner": "kl", "precondition_frequency": 1, "graft": "constant"},
    "shampoo+onesided": {"preconditioner": "one_sided_if_wide"} | WHOLE,
    "shampoo+onesided-all": {"preconditioner": "one_sided"} | WHOLE,
    "shampoo+blockmean": {"preconditioner": "shampoo_by_torch", "graft": "block_mean"},
}
AROUND: dict[str, Idea] = {
    "shampoo+cautious": cautious,
    "shampoo+hyperball": hyperball,
    "shampoo+sphere": sphere,
    "shampoo+average": average(0.1),
    "shampoo+average-third": average(1 / 3),
    "shampoo+momentum-warmup": momentum,
}


def ideas(known: harness.Experiment) -> dict[str, Recipe]:
    """All rows, with the grid of the experiment's Shampoo."""
    base = known.recipes["shampoo"]._replace(make=ours, options=DECAY)
    found = {"shampoo": base, "muon": known.recipes["muon"]} | {name: base.varied(row) for name, row in ROWS.items()}
    found |= {name: base._replace(make=changed(idea), told=True) for name, idea in AROUND.items()}
    found["shampoo+average+flat"] = found["shampoo+average-third"]._replace(constant=True)
    for beta2 in (0.9, 0.99):
        found[f"shampoo+elementwise-{beta2:g}"] = base.varied({"beta2": beta2})._replace(make=elementwise)
    return found


EXPERIMENTS = {
    known.name: known._replace(name=f"ideas-{known.name}", doc=__doc__, recipes=ideas(known))
    for known in (wikitext.EXPERIMENT, vit.EXPERIMENT, text.EXPERIMENT)
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in EXPERIMENTS:
        raise SystemExit(f"error: the first argument is the task, one of {', '.join(EXPERIMENTS)}")
    return harness.main(EXPERIMENTS[argv[0]], argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

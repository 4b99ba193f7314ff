"""The optimizer: torch's contract, and the step as one straight line.

What is computed is in ``methods`` and ``roots``, who computes it in ``planning``, and what keeps it running in ``runtime``.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable, without its slow import

from .kinds import warn_of_tables
from .options import FLAGS, OPTIONS, hint, refuse_flags, refuse_unknown, whole
from .routing import route
from .runtime import checkpoint
from .runtime.health import tally
from .runtime.parameters import name_of, team
from .runtime.session import Session, my_rank, refuse_averages
from .settings import check_options
from .storage import averaging
from .storage.tensors import check_parameter, is_stored
from .storage.update import first_peak

if TYPE_CHECKING:
    from .report.plan import PlanReport

# What param groups hold besides options: the largest learning rate, the largest of a step, and the mode of averaging.
KEPT = ("peak_lr", "top_lr", "train_mode")


@contextmanager
def _without_autograd() -> Iterator[None]:
    """No gradients, and no inference mode: tensors made in it could not be changed by a later step."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Shampoo(torch.optim.Optimizer):
    """Distributed Shampoo: preconditions each block of each weight with inverse roots of its Kronecker factors.

    Pass a model, and :func:`route` gives its embeddings, head, norms and biases options of their own. Or pass what torch's
    optimizers take, parameters or param groups, and all parameters get the same treatment.

    Every option may be given per param group and changed between steps, except those that decide which state there is.
    ``docs/options.md`` explains them; ``docs/algorithm.md`` has the mathematics.

    >>> import torch, lather
    >>> model = torch.nn.Linear(8, 4)
    >>> opt = lather.Shampoo(model, lr=1e-2, weight_decay=0.1)
    >>> model(torch.randn(16, 8)).square().mean().backward()
    >>> opt.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float | None = None,
        weight_decay: float = 0.0,
        *,
        damping: str = "relative",
        beta3: float | str | None = "nesterov",
        weight_decay_mode: str = "decoupled",
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        averaging: str | None = None,
        averaging_beta: float | None = None,
        averaging_decay: float | None = None,
        averaging_powers: tuple[float, float] = (2.0, 0.0),
        maximize: bool = False,
        bias_correction: bool = True,
        preconditioner: str | None = "shampoo",
        exponent: float | Mapping[int, float] | str | None = "auto",
        exponent_multiplier: float = 1.0,
        root: Any = "auto",
        polar: Any = "newton_schulz",
        polar_scale: str | None = None,
        graft: str | None = "auto",
        graft_beta2: float | None = None,
        graft_eps: float = 1e-8,
        max_preconditioner_dim: float = 1024,
        block_multiple: int = 16,
        merge_dims: bool = True,
        large_dim: str = "block",
        batch_dims: int = 0,
        split: int | Sequence[int] | None = None,
        split_dim: int = 0,
        precondition_1d: bool = False,
        precondition_frequency: int = 10,
        start_preconditioning_step: float | None = None,
        refresh_warmup: float = 0.1,
        refresh: str = "together",
        refresh_delay: int = 0,
        root_device: str | None = None,
        on_nonfinite: str = "skip",
        max_failed_refreshes: int = 3,
        precision: str | None = None,
        master_weights: bool = False,
        state_dtype: str | torch.dtype = "float32",
        root_dtype: str | torch.dtype | None = None,
        filter_dtype: str | torch.dtype | None = None,
        factors: str = "auto",
        blocks: str = "global",
        communication_dtype: str | torch.dtype | None = None,
        process_group: Any = None,
        num_trainers_per_group: int | None = None,
        stages: int | None = None,
        check_ranks: bool | int = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        amsgrad: bool = False,
        **unknown: NoReturn,  # so that type checkers refuse them too
    ) -> None:
        given = dict(locals())
        refuse_unknown(unknown)
        refuse_flags(given)
        if isinstance(params, torch.nn.Module):
            params = route(params)
        self._rules: dict[int, str] = {}  # what made each param group, by its id, for reports; not in checkpoints
        trainers = None if num_trainers_per_group is None else whole("num_trainers_per_group", num_trainers_per_group)
        period = check_ranks if check_ranks in (0, 1) else whole("check_ranks", check_ranks)  # True is more than 1
        self._session = Session(process_group, trainers, None if stages is None else whole("stages", stages), period)
        super().__init__(params, {name: given[name] for name in OPTIONS})
        warn_of_tables(group for group, rule in zip(self.param_groups, self._made(), strict=True) if not rule)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, also between steps; they start at step 0."""
        known = isinstance(param_group, dict)  # torch refuses anything else
        rule = str(param_group.pop("rule", "")) if known else ""
        for name in [n for n in param_group if n not in OPTIONS and n not in ("params", "param_names", *KEPT)]:
            if name in FLAGS:
                refuse_flags({name: param_group.pop(name)})
            elif meant := hint(name, sure=True):  # other names are the user's own, as in torch
                raise ValueError(f"param group has the unknown option {name!r}{meant}")
        own = OPTIONS.keys() & set(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for flag in FLAGS:  # torch's own defaults may bring one along
            group.pop(flag, None)
        try:
            check_options(group, own, self.defaults)
            self._check_parameters(group)
        except Exception:
            self.param_groups.pop()
            raise
        group.setdefault("peak_lr", first_peak(group["lr"]))
        for name in ("top_lr", "train_mode"):  # left over, if the group comes from another optimizer
            group.pop(name, None)
        averaging.settle(group, train=all(map(averaging.is_training, self.param_groups[:-1])))
        self._rules[id(group)] = rule

    def _made(self) -> list[str]:
        """What made each param group, also if others were taken out."""
        return [self._rules.get(id(group), "") for group in self.param_groups]

    def _check_parameters(self, group: dict[str, Any]) -> None:
        session = self._session
        for position, param in enumerate(group["params"]):
            name = name_of(group, len(self.param_groups) - 1, position)
            check_parameter(param, name)
            if is_stored(param):  # on this rank; raises if no team can share the work on it
                team(param, name, session.world(), my_rank(), session.trainers)

    @_disable_dynamo  # a step plans, allocates and reads param groups, which a graph would freeze
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure``, if given, computes the loss and is run first.

        ``torch.compile`` leaves it as it is: forward and backward are compiled, and the graph breaks here.

        A step that raises in the middle, for example because memory runs out, does not count. Some parameters may have moved by
        then, and some averages may have taken their gradients in.
        """
        session = self._session
        loss = None
        if closure is not None:
            if session.started(self.state):
                refuse_averages(self.param_groups)
            with torch.enable_grad():
                loss = closure()
        step = session.begin(self.param_groups, self.state)  # gradients, counts, rates; a new plan, if anything changed
        if step is None:  # nothing to do
            return loss
        # Unit.send: gradients to the owners of their blocks. Unit.compute: gradients -> directions; those that stay here move the
        # parameters. Unit.apply: directions from the owners move the parameters. With one rank there is only the second.
        for phase in session.run.phases:
            phase(step)
        session.end(step, self.param_groups)
        return loss

    @_disable_dynamo
    @_without_autograd()
    def train(self) -> None:
        """Train mode: parameters of param groups with ``averaging`` hold the points at which gradients are taken.

        They are bit for bit what they were before :meth:`eval`. A new optimizer is in this mode. Without ``averaging`` this
        does nothing.

        >>> import torch, lather
        >>> model = torch.nn.Linear(8, 4)
        >>> opt = lather.Shampoo(model.parameters(), lr=1e-2, betas=(0.0, 0.95), averaging="schedule_free")
        >>> opt.train()
        >>> model(torch.randn(16, 8)).square().mean().backward()
        >>> opt.step()
        >>> opt.eval()
        >>> loss = model(torch.randn(16, 8)).square().mean()
        """
        self._session.switch(self.param_groups, self.state, train=True)

    @_disable_dynamo
    @_without_autograd()
    def eval(self) -> None:
        """Eval mode: parameters of param groups with ``averaging`` hold the average, to evaluate or to keep it.

        There is no step in this mode, and :meth:`train` undoes what is done to the parameters. Without ``averaging`` this does
        nothing.
        """
        self._session.switch(self.param_groups, self.state, train=False)

    def health(self) -> dict[str, dict[str, int]]:
        """What went wrong so far, by parameter: gradients skipped, refreshes that failed in a row, and how often a
        block's state was started anew, because it was not finite. Empty is good.

        A rank knows of the blocks that it owns.
        """
        return tally(self._session.run)

    def arm(self) -> None:
        """Record the next step for :meth:`metrics`. That step takes longer, and computes the same. All ranks must call this."""
        self._session.armed = self._made

    @torch.no_grad()
    def metrics(self, by: str = "parameter", gather: bool = False) -> dict[str, dict[str, Any]]:
        """What the last armed step did, by parameter or, with ``by="kind"``, by kind of parameter.

        Values are 0-d tensors on the device, of the blocks that this rank owns, and the host does not wait. With ``gather=True``
        they are numbers, of the blocks of all ranks, which must all call this together. ``docs/diagnostics.md`` explains the
        metrics. :class:`Monitor` does this during a run.

        >>> import torch, lather
        >>> model = torch.nn.Linear(8, 4)
        >>> opt = lather.Shampoo(model, lr=1e-2)
        >>> model(torch.randn(16, 8)).square().mean().backward()
        >>> opt.arm()
        >>> opt.step()
        >>> sorted(opt.metrics()["bias"])
        ['cosine', 'skipped', 'update']
        """
        return self._session.metrics(by, gather)

    def plan(self) -> PlanReport:
        """What is preconditioned and how, memory by kind and work per step. Needs no step and allocates nothing."""
        from .report.plan import PlanReport

        return PlanReport(*self._session.plan(self.param_groups, self.state), self._made())

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """As torch's; allocates the state if there has been no step.

        With several ranks, each has the blocks that it owns, which is what ``torch.distributed.checkpoint`` expects. For a
        state that has everything see :meth:`consolidate_state_dict`. A hook from ``register_state_dict_pre_hook`` may call that.
        """
        hooks = self._optimizer_state_dict_pre_hooks
        for hook in list(hooks.values()):  # before the state is taken, because a hook may gather it
            hook(self)
        with _without_autograd():
            saved = self._session.saved(self.param_groups, self.state)
        live = self.state
        try:
            self.state, self._optimizer_state_dict_pre_hooks = cast(Any, saved), OrderedDict()
            return {**super().state_dict(), checkpoint.VERSION_KEY: checkpoint.VERSION}
        finally:
            self.state, self._optimizer_state_dict_pre_hooks = live, hooks

    @_without_autograd()
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the whole state to the rank ``to``. All ranks must call this together.

        The :meth:`state_dict` of that rank is then complete, in host memory, until the next step, and can be loaded by any
        number of ranks.
        """
        self._session.consolidate(self.param_groups, self.state, to)

    @_without_autograd()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a checkpoint into the live state. One that does not fit is refused, and then nothing changes.

        The mode is that of the checkpoint. Parameters of groups with ``averaging`` then hold what it calls for.
        """
        for hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._session.load(self.param_groups, self.state, state_dict)
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuses ``torch.distributed.algorithms.join.Join([model, opt])``."""
        raise ValueError(
            "Shampoo does not work under Join or DistributedDataParallel.join(): a rank without data has no gradient of the blocks "
            "that it owns; give all ranks the same number of batches, or stop all with the first by "
            "model.join(throw_on_early_termination=True)"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_session": self._session, "_rules": self._made()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"_rules": dict(zip(map(id, state["param_groups"]), state["_rules"], strict=True))})

    def __deepcopy__(self, memo: dict[int, Any]) -> Shampoo:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin._session.process_group = self._session.process_group
        return twin

"""The textbook twin: Shampoo as docs/algorithm.md states it, in loops.

One tensor, one block at a time, in float64. Nothing here is fast and nothing is shared with the fast version,
so that where the two agree neither is likely to be wrong. `Reference._step_block` is "One step of one block", line by line.
"""

import ast
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

# fmt: off
DEFAULTS: dict[str, Any] = {
    "lr": 1e-3, "betas": (0.95, 0.95), "beta3": "nesterov",  # betas[0]^2 in preconditioned blocks; None: betas[0]
    "eps": None, "damping": "relative", "bias_correction": True, "maximize": False,  # None: see EPS
    "weight_decay": 0.0, "weight_decay_mode": "decoupled",
    "momentum": 0.0, "dampening": 0.0, "nesterov": False,
    "averaging": None, "averaging_beta": None, "averaging_decay": None, "averaging_powers": (2.0, 0.0),  # None: 0.9 or 0.7; 0.9967
    "preconditioner": "shampoo", "polar": "newton_schulz", "polar_scale": None,
    "exponent": "auto", "exponent_multiplier": 1.0,  # float or {order: float}; None, "paper": multiplier / (2 order)
    "graft": "auto", "graft_beta2": None, "graft_eps": 1e-8,  # "adafactor" or "adam"; None: betas[1], or 0.999 where that is 1
    "max_preconditioner_dim": 1024, "block_multiple": 16, "merge_dims": True, "large_dim": "block",
    "batch_dims": 0, "precondition_1d": False,
    "split": None, "split_dim": 0,  # parts, or their sizes
    "precondition_frequency": 10, "start_preconditioning_step": None,  # None: the frequency; math.inf: never
    "refresh_warmup": 0.1,  # roots are at most this part of all steps old; the default is off with a delay
    "refresh": "together", "refresh_delay": 0, "on_nonfinite": "skip",
    "root_dtype": None, "filter_dtype": None,  # the names of what roots and the filtered gradient are rounded to
    "factors": "auto",  # how factors and roots are kept, of no effect here
}
# fmt: on
EPS = {"relative": {"kl": 1e-4, "soap": 1e-8, "shampoo": 1e-4}, "absolute": {"kl": 1e-6, "soap": 1e-8, "shampoo": 1e-12}}
CHOICES: dict[str, tuple[str | None, ...]] = {
    "preconditioner": ("shampoo", "soap", "kl", "spectral", None),
    "polar_scale": (None, "original", "match_rms_adamw"),
    "damping": ("absolute", "relative"),
    "weight_decay_mode": ("l2", "decoupled", "corrected", "independent"),
    "graft": ("auto", "sgd", "adagrad", "rmsprop", "adam", "adafactor", "constant", None),
    "large_dim": ("block", "diagonal", "adagrad"),
    "averaging": (None, "schedule_free", "gpa"),
    "refresh": ("together", "staggered"),
    "on_nonfinite": ("skip",),
    "root_dtype": (None, "float64", "float32", "bfloat16", "float16"),
    "filter_dtype": (None, "float32", "bfloat16"),
    "factors": ("auto", "full", "packed"),
}


def merged(shape: Sequence[int], limit: int) -> list[int]:
    """Fold dimensions together from last to first, while a product stays <= limit and the order stays >= 2.

    >>> merged((512, 512, 3, 3), 1024), merged((512, 512, 3, 3), 8192), merged((64, 3, 7, 7), 1024)
    ([512, 512, 9], [512, 4608], [64, 147])
    """
    dims = [d for d in shape if d != 1]
    i = len(dims) - 1
    while i > 0:
        if len(dims) > 2 and dims[i - 1] * dims[i] <= limit:
            dims[i - 1 : i + 1] = [dims[i - 1] * dims[i]]
        i -= 1
    return dims


def piece_sizes(d: int, limit: int, multiple: int) -> list[int]:
    """ceil(d / limit) equal pieces; where that leaves a rest, all but the last are a multiple, if that is within the limit and
    leaves the last one something; else nearly equal, the longer ones first.

    >>> piece_sizes(10, 4, 16), piece_sizes(5632, 1024, 16)
    ([4, 3, 3], [944, 944, 944, 944, 944, 912])
    """
    n = max(1, math.ceil(d / limit))
    whole = math.ceil(math.ceil(d / n) / multiple) * multiple
    last = d - (n - 1) * whole
    if d % n and multiple > 1 and whole <= limit and last > 0:
        return [whole] * (n - 1) + [last]
    return [d // n + (i < d % n) for i in range(n)]


def cut(x: Tensor, sizes: list[list[int]] | None) -> list[Tensor]:
    """The blocks of x as views: batch item by batch item, each row-major over its pieces. None: x whole."""
    if sizes is None:
        return [x]
    blocks = list(x.view(-1, *(sum(s) for s in sizes)))
    for dim, s in enumerate(sizes):
        blocks = [piece for block in blocks for piece in block.split(s, dim)]
    return blocks


def parts(x: Tensor, split: int | Sequence[int] | None, dim: int) -> list[Tensor]:
    """What is cut into blocks, as views: x, or what split makes of it."""
    if split is None:
        return [x]
    return list(torch.split(x, x.shape[dim] // split if isinstance(split, int) else list(split), dim))


def unfold(x: Tensor, mode: int) -> Tensor:
    """d_mode x rest."""
    return x.movedim(mode, 0).reshape(x.shape[mode], -1)


def mode_product(x: Tensor, mode: int, root: Tensor) -> Tensor:
    """x times root along one mode; a vector stands for a diagonal matrix."""
    if root.ndim == 1:
        return x * root.view(-1, *[1] * (x.ndim - 1 - mode))
    moved: Tensor = torch.tensordot(root, x, dims=([1], [mode]))
    return moved.movedim(0, mode)


def inverse_power(a: Tensor, e: float, eps: float) -> Tensor:
    """(a + eps I)^(-e), after the smallest shift that makes a semidefinite; elementwise for a vector."""
    if a.ndim == 1:
        return (a + eps) ** -e
    values, vectors = torch.linalg.eigh(a)
    values = values - values.min().clamp(max=0) + eps
    root: Tensor = vectors @ torch.diag(values**-e) @ vectors.T
    return root


def eigenbasis(a: Tensor) -> Tensor:
    """The eigenvectors of a, one per column, of the largest eigenvalue first; of zero, which has any, the axes."""
    vectors: Tensor = torch.linalg.eigh(a).eigenvectors
    return vectors.flip(-1) if a.any() else torch.eye(len(a)).to(a)


def best_quintic(low: float, high: float) -> tuple[float, float, float]:
    """a, b, c with the least max |1 - (a t + b t^3 + c t^5)| on [low, high].

    That difference is then E, -E, E, -E at four points, of which two are the ends and two have the slope 0.
    """
    inner = [0.75 * low + 0.25 * high, 0.25 * low + 0.75 * high]
    a = b = c = 0.0
    for _ in range(50):
        t = torch.tensor([low, *inner, high], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        a, b, c, _ = torch.linalg.solve(torch.stack([t, t**3, t**5, signs], 1), torch.ones_like(t)).tolist()
        middle, distance = -3 * b / (10 * c), math.sqrt(9 * b * b - 20 * a * c) / (10 * c)
        inner = [math.sqrt(middle - distance), math.sqrt(middle + distance)]
    return a, b, c


@cache
def quintics(
    name: str, steps: int = 5, lower: float = 1e-3, coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
) -> list[tuple[float, float, float]]:
    """What singular values go through, one polynomial after the other."""
    if name == "newton_schulz":
        return [coefficients] * steps
    found, low, high = [], lower, 1.0
    for _ in range(steps):
        a, b, c = best_quintic(low, 1.01 * high)
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
        found.append((a, b, c))
    return found


def polar_factor(g: Tensor, how: str) -> Tensor:
    """U h(S) V^T of g = U S V^T, its first mode against the rest; h is what `how` spells, such as "polar_express(steps=6)"."""
    name, _, given = how.partition("(")
    found = re.findall(r"(\w+)=(\(.*?\)|[^,)]+)", given)
    options = {key: ast.literal_eval(value) for key, value in found}
    eps = options.pop("eps", 0.0)
    u, s, vh = torch.linalg.svd(g.reshape(g.shape[0], -1), full_matrices=False)
    if name == "svd":
        h = (s > max(u.shape[0], vh.shape[1]) * torch.finfo(s.dtype).eps * s.max()).to(s)
    else:
        h = s / s.norm().clamp(min=eps) if s.any() else s
        for a, b, c in quintics(name, **options):
            h = a * h + b * h**3 + c * h**5
    factor: Tensor = u @ torch.diag(h) @ vh
    return factor.reshape(g.shape)


class Block:
    """The state of one block; `method` is its diagonal method: a Kronecker block's graft, or all there is."""

    def __init__(self, w: Tensor, method: str | None, diagonal: Sequence[bool], spectral: bool = False) -> None:
        self.method, self.spectral = method, spectral
        self.m = torch.zeros_like(w)  # filtered gradient
        self.v = torch.zeros_like(w)  # squared gradients of the diagonal method
        self.w = torch.zeros_like(w)  # SOAP: squared gradients in the eigenbases
        self.momentum = torch.zeros_like(w)
        self.z, self.x = w.clone(), w.clone()  # of averaging
        # One per mode, d x d, or d where only the diagonal is kept; none at all for an elementwise block.
        self.factors = [w.new_zeros(d if diag else (d, d)) for d, diag in zip(w.shape, diagonal, strict=False)]
        # None: not refreshed yet. A None inside: that mode is left alone. For SOAP they are the eigenbases.
        self.roots: list[Tensor | None] | None = None
        self.waiting: list[Tensor | None] | None = None  # refreshed, and not used before the delay is over


class Reference:
    """Textbook Shampoo on copies of `params`: options as in DEFAULTS, read at each step from `self.options`.

    The options that decide shapes and state (`preconditioner`, `graft`, `max_preconditioner_dim`, `merge_dims`, `large_dim`,
    `batch_dims`, `split`, `precondition_1d`) are read once. `offsets[param index, block index]` is the step inside the
    period at which refresh="staggered" refreshes that block; elementwise parameters need none.

    >>> twin = Reference([torch.ones(2, 3)], lr=0.1, graft="sgd", precondition_frequency=1)
    >>> twin.step([torch.eye(2, 3)])
    >>> [round(x, 3) for x in twin.params[0].flatten().tolist()]
    [0.9, 1.0, 1.0, 1.0, 0.9, 1.0]
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        dtype: torch.dtype = torch.float64,
        offsets: Mapping[tuple[int, int], int] | None = None,
        **options: Any,
    ) -> None:
        if unknown := sorted(options.keys() - DEFAULTS.keys()):
            raise TypeError(f"unknown options {unknown}; known are {sorted(DEFAULTS)}")
        self.options = o = DEFAULTS | options
        if o["eps"] is None:
            o["eps"] = EPS[o["damping"]].get(o["preconditioner"], EPS[o["damping"]]["shampoo"])
        if o["graft"] == "auto":
            same = o["betas"][1] < 1 and o["graft_beta2"] is None and o["start_preconditioning_step"] != math.inf
            o["graft"] = "adafactor" if o["preconditioner"] == "shampoo" and same else "adam"
        if o["preconditioner"] is None and o["graft"] is None:
            o["graft"] = "adam"
        for name, allowed in CHOICES.items():
            if o[name] not in allowed:
                raise ValueError(f"{name}={o[name]!r} is not one of {allowed}")
        if o["exponent_multiplier"] != 1:
            if o["exponent"] not in (None, "paper", "auto"):
                raise ValueError("exponent and exponent_multiplier both set the exponent: give one of them")
            o["exponent"] = None
        if o["exponent"] == "auto":  # without a graft, directions of exponent 1/2 would depend on the size of gradients
            o["exponent"] = 0.5 if o["graft"] else None
        if o["refresh"] == "staggered" and offsets is None:
            raise ValueError("refresh='staggered' needs offsets={(param, block): step inside the period}")
        self.offsets = dict(offsets or {})
        self.params = [p.detach().to(dtype, copy=True).contiguous() for p in params]
        self.steps = [0] * len(self.params)
        self.weights = [0.0] * len(self.params)  # in the average, of all steps so far
        self.top_lr = 0.0  # the largest of a step
        self.peak_lr = o["lr"]
        self.sizes: list[list[list[list[int]] | None]] = []  # per parameter, part and mode, the sizes of the pieces
        self.blocks: list[list[Block]] = []
        for p in self.params:
            self.sizes.append([])
            self.blocks.append([block for part in self._parts(p) for block in self._make_blocks(part)])

    def _parts(self, p: Tensor) -> list[Tensor]:
        return parts(p, self.options["split"], self.options["split_dim"])

    def _cut(self, i: int, x: Tensor) -> list[Tensor]:
        """Parameter i, or its gradient, as blocks."""
        return [block for part, sizes in zip(self._parts(x), self.sizes[i], strict=True) for block in cut(part, sizes)]

    def _make_blocks(self, p: Tensor) -> list[Block]:
        """Merging and blocking. Adds to self.sizes how p is cut, and returns the blocks' empty state."""
        o = self.options
        limit, method = o["max_preconditioner_dim"], o["graft"]
        shape = [d for d in p.shape[o["batch_dims"] :] if d != 1]
        if o["merge_dims"]:
            shape = merged(shape, limit)
        kronecker = p.numel() > 0 and o["preconditioner"] is not None and len(shape) >= (1 if o["precondition_1d"] else 2)
        if kronecker and o["large_dim"] == "adagrad" and max(shape) > limit:
            kronecker, method = False, "adagrad"
        if not kronecker:
            if method in ("adafactor", "constant") or (method is None and o["preconditioner"] == "soap"):
                method = "adam"  # SOAP without bases is Adam, and only whole blocks have factors or a constant size
            self.sizes[-1].append(None)
            return [Block(p, method, [])]
        cuts = o["large_dim"] == "block"
        self.sizes[-1].append([piece_sizes(d, limit, o["block_multiple"]) if cuts else [d] for d in shape])
        if o["preconditioner"] == "spectral":
            return [Block(w, method, [], spectral=True) for w in cut(p, self.sizes[-1][-1])]
        return [Block(w, method, [d > limit for d in w.shape]) for w in cut(p, self.sizes[-1][-1])]

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None]) -> None:
        """One step for every parameter that has a gradient; the others, and their state, are left alone."""
        self.peak_lr = max(self.peak_lr, self.options["lr"])
        self.top_lr = max(self.top_lr, self.options["lr"])
        for i, (p, grad) in enumerate(zip(self.params, grads, strict=True)):
            if grad is None or p.numel() == 0:
                continue
            self.steps[i] += 1
            share = self._share(i)
            ws, gs = self._cut(i, p), self._cut(i, grad.detach().to(p).contiguous())
            for j, (block, w, g) in enumerate(zip(self.blocks[i], ws, gs, strict=True)):
                delay = self.options["refresh_delay"]
                if delay and block.factors and self._due(self.steps[i] - delay, (i, j)):
                    if block.waiting is not None:
                        self._put(block, block.waiting)
                    block.waiting = None
                due = bool(block.factors) and self._due(self.steps[i], (i, j))
                self._step_block(block, w, g, self.steps[i], due, share)

    def _share(self, i: int) -> float:
        """How much of z goes into the average x: constant, or this step's share of the weights of all steps."""
        o = self.options
        if o["averaging"] == "gpa":
            return 1 - (0.9967 if o["averaging_decay"] is None else float(o["averaging_decay"]))
        of_lr, of_step = o["averaging_powers"]
        weight = float(self.top_lr**of_lr * self.steps[i] ** of_step)
        self.weights[i] += weight
        return weight / self.weights[i] if weight else 0.0

    def averages(self) -> list[Tensor]:
        """x of every parameter: what it holds in eval mode."""
        found = [p.clone() for p in self.params]
        for i, x in enumerate(found):
            for block, part in zip(self.blocks[i], self._cut(i, x), strict=True):
                part.copy_(block.x if self.steps[i] else part)
        return found

    def _due(self, t: int, key: tuple[int, int]) -> bool:
        """When roots are refreshed."""
        every, start = self.options["precondition_frequency"], self.options["start_preconditioning_step"]
        warmup = self.options["refresh_warmup"]
        first = every
        if warmup and not (self.options["refresh_delay"] and warmup == DEFAULTS["refresh_warmup"]):
            powers = [2**k for k in range(64) if 2**k <= warmup * t]
            first, every = 1, min(every, max(powers, default=1))
        start = first if start is None else start
        if self.options["refresh"] == "staggered":
            return bool(t >= start and t % every == self.offsets[key] % every)
        return bool(t == start or (t > start and t % every == 0))

    def _step_block(self, block: Block, w: Tensor, g: Tensor, t: int, due: bool, share: float) -> None:
        """One step of one block. Changes w, a view of the parameter, and the block's state."""
        o = self.options
        mode = o["weight_decay_mode"]
        if not g.isfinite().all():  # the block sits the step out, a refresh that is due included
            return
        if o["maximize"]:
            g = -g
        if mode == "l2":  # 1. coupled decay
            g = g + o["weight_decay"] * w
        self._accumulate(block, g)  # 2. statistics
        if due:
            self._refresh(block, t)  # 3. roots
        if o["preconditioner"] == "soap" and block.factors:
            rotated = self._rotated(block, g)
            new, beta2 = rotated**2, o["betas"][1]
            block.w = block.w + new if beta2 == 1 else beta2 * block.w + (1 - beta2) * new
        self._accumulate_graft(block, g)  # 4. graft statistics
        g_bar = self._filter(block, g, t)  # 5. filtering
        p = self._direction(block, g_bar, t)  # 6. direction
        if mode != "l2":  # 7. decay
            p = p + self._decay() * w
        if mu := o["momentum"]:  # 8. momentum
            fresh = (1 - o["dampening"]) * p
            block.momentum = mu * block.momentum + fresh
            p = fresh + mu * block.momentum if o["nesterov"] else block.momentum
        if not o["averaging"]:
            w -= o["lr"] * p  # 9.
        else:  # averaging: w is y
            b = o["averaging_beta"]
            b = b if b is not None else 0.7 if o["averaging"] == "gpa" else 0.9
            block.z = block.z - o["lr"] * p
            block.x = (1 - share) * block.x + share * block.z
            w.copy_((1 - b) * block.z + b * block.x)

    def _accumulate(self, block: Block, g: Tensor) -> None:
        beta2 = self.options["betas"][1]
        kl = self.options["preconditioner"] == "kl"
        if kl and block.factors and block.roots is None and g.any():  # as if the other factors were the identity times this
            g = g / g.square().mean().sqrt() ** (1 - 1 / len(block.factors))
        for i, factor in enumerate(block.factors):
            w = self._crossed(block, g, i) if kl else g
            g_i = unfold(w, i)
            new = (g_i**2).sum(1) if factor.ndim == 1 else g_i @ g_i.T
            block.factors[i] = factor + new if beta2 == 1 else beta2 * factor + (1 - beta2) * new

    def _crossed(self, block: Block, g: Tensor, mode: int) -> Tensor:
        """KL-Shampoo: g times the inverse square roots of the other factors, per element of theirs."""
        for j in range(g.ndim):
            if j != mode:
                root = block.roots[j] if block.roots is not None else None
                g = (g if root is None else mode_product(g, j, root)) / math.sqrt(g.shape[j])
        return g

    def _refresh(self, block: Block, t: int) -> None:
        o, order = self.options, len(block.factors)
        e = None if o["exponent"] == "paper" else o["exponent"]
        e = e.get(order) if isinstance(e, Mapping) else e
        e = o["exponent_multiplier"] / (2 * order) if e is None else e
        e = 0.5 if o["preconditioner"] == "kl" else e
        bc2 = self._bc2(t)
        if o["preconditioner"] != "soap" and not all(factor.any() for factor in block.factors):
            return  # nothing has come yet
        if all(factor.isfinite().all() for factor in block.factors):
            corrected = [factor / bc2 for factor in block.factors]
            roots: list[Tensor | None]
            if o["preconditioner"] == "soap":
                roots = [eigenbasis(a) if a.ndim == 2 else None for a in corrected]
            else:
                roots = [inverse_power(a, e, self._ridge(a)) if e else None for a in corrected]
            if o["root_dtype"]:
                kept = getattr(torch, o["root_dtype"])
                roots = [None if root is None else root.to(kept).to(root.dtype) for root in roots]
            if all(root is None or root.isfinite().all() for root in roots):
                if o["refresh_delay"]:
                    block.waiting = roots
                else:
                    self._put(block, roots)

    def _put(self, block: Block, roots: list[Tensor | None]) -> None:
        """Put new roots to use. SOAP: as long as bases are axes, the moment becomes that of a gradient with uncorrelated elements
        in the new ones; later it follows eigenvectors that stay what they are and change places."""
        if self.options["preconditioner"] == "soap":
            if not block.w.any():
                return  # in bases made of one gradient that gradient is diagonal: SOAP begins with two
            before = block.roots or [None] * len(roots)
            pairs = {
                i: (torch.eye(len(new)).to(new) if old is None else old, new)
                for i, (old, new) in enumerate(zip(before, roots, strict=True))
                if new is not None
            }
            axes = all((old**2).amax(0).eq(1).all() for old, _ in pairs.values())
            for i, (old, new) in pairs.items():
                if axes:
                    block.w = mode_product(block.w, i, (new.T @ old) ** 2)
                else:
                    block.w = block.w.index_select(i, self._places(old, new))
        block.roots = roots

    def _places(self, old: Tensor, new: Tensor) -> Tensor:
        """For every new eigenvector the number of the old one that it is, or if there is none, of the first that is left."""
        products = ((new.T @ old) ** 2).tolist()
        same = [next((j for j, x in enumerate(row) if x > 0.999), None) for row in products]
        left = [j for j in range(len(same)) if j not in same]
        return torch.tensor([left.pop(0) if j is None else j for j in same])

    def _bc2(self, t: int) -> float:
        beta2 = self.options["betas"][1]
        return float(1 - beta2**t if self.options["bias_correction"] and beta2 != 1 else 1.0)

    def _rotated(self, block: Block, x: Tensor, *, back: bool = False) -> Tensor:
        """SOAP: x in the eigenbases, or out of them; before the first refresh they are identities."""
        for i, q in enumerate(block.roots or ()):
            x = x if q is None else mode_product(x, i, q if back else q.T)
        return x

    def _ridge(self, a: Tensor) -> float:
        """eps, or eps times the fourth root of the sum of the eigenvalues' fourth powers."""
        eps = float(self.options["eps"])
        if self.options["damping"] == "absolute":
            return eps
        square = a**2 if a.ndim == 1 else a @ a
        return max(eps * math.sqrt(square.norm()), 1e-30) if square.any() else 1.0

    def _accumulate_graft(self, block: Block, g: Tensor) -> None:
        if block.method == "adagrad":
            block.v = block.v + g**2
        elif block.method in ("rmsprop", "adam"):
            b = self._graft_beta2()
            block.v = b * block.v + (1 - b) * g**2

    def _graft_beta2(self) -> float:
        given, beta2 = self.options["graft_beta2"], self.options["betas"][1]
        return float(given if given is not None else beta2 if beta2 != 1 else 0.999)

    def _filter(self, block: Block, g: Tensor, t: int) -> Tensor:
        beta1, beta3 = self.options["betas"][0], self.options["beta3"]
        if beta3 == "nesterov":
            preconditioned = (block.factors or block.spectral) and self.options["start_preconditioning_step"] != math.inf
            beta3 = beta1**2 if preconditioned else None
        beta3 = beta1 if beta3 is None else beta3
        if beta1 == 0:
            return g
        g_bar: Tensor = beta3 * block.m + (1 - beta3) * g
        block.m = beta1 * block.m + (1 - beta1) * g
        if self.options["filter_dtype"]:
            block.m = block.m.to(getattr(torch, self.options["filter_dtype"])).to(g.dtype)
        if self.options["bias_correction"]:
            g_bar = g_bar / (1 - beta3 * beta1 ** (t - 1))
        return g_bar

    def _direction(self, block: Block, g_bar: Tensor, t: int) -> Tensor:
        grafted = self._graft_direction(block, g_bar, t)
        start = self.options["start_preconditioning_step"]
        if self.options["preconditioner"] == "soap" and block.factors:
            if block.method is not None and start is not None and t < start:
                return grafted
            return self._grafted(block, self._adam_in_the_basis(block, g_bar, t), grafted)
        if (block.roots is None and not block.spectral) or (start is not None and t < start):
            return grafted
        p = self._orthogonal(g_bar) if block.spectral else g_bar
        for i, root in enumerate(block.roots or ()):
            p = p if root is None else mode_product(p, i, root)
        return self._grafted(block, p, grafted)

    def _grafted(self, block: Block, p: Tensor, grafted: Tensor) -> Tensor:
        if block.method is None or p.norm() == 0:
            return p
        scaled: Tensor = p * (grafted.norm() / p.norm())
        return scaled

    def _adam_in_the_basis(self, block: Block, g_bar: Tensor, t: int) -> Tensor:
        moment = (block.w / self._bc2(t)).sqrt()
        part = moment.square().mean().sqrt() if self.options["damping"] == "relative" else 1.0
        p = self._rotated(block, g_bar) / (moment + self.options["eps"] * part).clamp(min=1e-150)
        return self._rotated(block, p, back=True)

    def _orthogonal(self, g_bar: Tensor) -> Tensor:
        rows, columns = g_bar.shape[0], g_bar[0].numel()
        scales = {"original": math.sqrt(max(1, rows / columns)), "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns))}
        return polar_factor(g_bar, self.options["polar"]) * scales.get(self.options["polar_scale"], 1.0)

    def _graft_direction(self, block: Block, g_bar: Tensor, t: int) -> Tensor:
        """The graft's own direction."""
        if block.method in ("sgd", None):
            return g_bar
        if block.method == "constant":
            return g_bar * (0.2 * math.sqrt(g_bar.numel()) / g_bar.norm()) if g_bar.any() else g_bar
        v = block.v / (1 - self._graft_beta2() ** t) if block.method == "adam" else block.v
        if block.method == "adafactor":
            v = self._rank_one(block, t)
        direction: Tensor = g_bar / (v.sqrt() + self.options["graft_eps"])
        return direction.clamp(-1, 1) if block.method == "adafactor" else direction

    def _rank_one(self, block: Block, t: int) -> Tensor:
        """r c^T / sum(c) of the sums r of squares over rows, and c over columns; and so on for more modes."""
        beta2 = self.options["betas"][1]
        v = torch.ones((), dtype=block.m.dtype)
        for i, factor in enumerate(block.factors):
            sums = factor if factor.ndim == 1 else factor.diag()
            v = v[..., None] * (sums / (sums.sum() if i and sums.any() else 1))
        return v if beta2 == 1 else v / (1 - beta2**t)

    def _decay(self) -> float:
        o, peak = self.options, self.peak_lr
        wd, mode = o["weight_decay"], o["weight_decay_mode"]
        if mode == "decoupled" or peak == 0:  # no rate yet: nothing moves, and only momentum can tell
            return float(wd)
        return float(wd * (o["lr"] / peak) if mode == "corrected" else wd / peak)

"""A bilevel problem from two torch loss functions, and SPABA as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from icml24.bilevel.problems import Pair, Triple

__all__ = ["SPABA", "TorchBilevel"]

Loss = Callable[[Any, Any, Any], Tensor]


class _Flat:
    """Turn nested tensors into one vector and back."""

    def __init__(self, tree: Any, dtype: torch.dtype, device: torch.device) -> None:
        leaves, self.spec = tree_flatten(tree)
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise TypeError("Parameters must be a tensor, or a dict, list or tuple of tensors.")
        self.shapes = [leaf.shape for leaf in leaves]
        self.sizes = [leaf.numel() for leaf in leaves]
        parts = [leaf.detach().to(device, dtype).reshape(-1) for leaf in leaves]
        self.start = torch.cat(parts)

    def tree(self, vector: Tensor) -> Any:
        parts = torch.split(vector, self.sizes, dim=-1)
        leaves = [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return tree_unflatten(leaves, self.spec)


class TorchBilevel:
    """Your own problem: two torch losses, from which torch.func builds every oracle.

    One vector-Jacobian product of grad_y g gives the Hessian-vector and the cross product together;
    independent runs are vmapped. The losses must return the *average* over the batch (plus any
    regulariser), so that a mini-batch is an unbiased estimate.

    Parameters
    ----------
    inner_loss, outer_loss : callable
        ``loss(outer_params, inner_params, batch) -> scalar``, in pure torch functions.
    outer_params, inner_params : tensor or nested dict/list/tuple of tensors
        Starting points of x and y.
    inner_data, outer_data : tensor or tuple of tensors
        Samples along the first axis; a batch is the same structure with fewer rows. To learn a
        parameter for each sample, put ``torch.arange(n)`` into the data and index with it.
    dtype : torch.dtype
        Floating type of all computations, double by default: recursive estimators accumulate
        rounding errors until the next full pass.
    device : str or torch.device
        Where the computation takes place.

    Examples
    --------
    >>> data = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    >>> def inner(x, y, batch):  # ridge with a penalty for each feature
    ...     A, b = batch
    ...     return 0.5 * ((A @ y - b) ** 2).mean() + 0.5 * (x.exp() * y**2).sum()
    >>> def outer(x, y, batch):
    ...     A, b = batch
    ...     return 0.5 * ((A @ y - b) ** 2).mean()
    >>> problem = TorchBilevel(inner, outer, torch.zeros(3), torch.zeros(3), data, data)
    >>> [part.shape for part in problem.init()]
    [(3,), (3,)]
    """

    batched: ClassVar[bool] = True

    def __init__(
        self,
        inner_loss: Loss,
        outer_loss: Loss,
        outer_params: Any,
        inner_params: Any,
        inner_data: Any,
        outer_data: Any,
        dtype: torch.dtype = torch.float64,
        device: str | torch.device = "cpu",
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self._x = _Flat(outer_params, dtype, self.device)
        self._y = _Flat(inner_params, dtype, self.device)
        self._losses = {"inner": inner_loss, "outer": outer_loss}
        self._data = {"inner": self._move(inner_data), "outer": self._move(outer_data)}
        self.n_inner, self.n_outer = (self._rows(self._data[k]) for k in ("inner", "outer"))
        for level, loss in self._losses.items():
            value = loss(
                self._x.tree(self._x.start), self._y.tree(self._y.start), self._data[level]
            )
            if not isinstance(value, Tensor) or value.dim() != 0:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(
                    f"{level}_loss must return a scalar tensor (a batch average), got {shape}."
                )

    def _move(self, data: Any) -> Any:
        return tree_map(
            lambda t: t.to(self.device, self.dtype if t.is_floating_point() else t.dtype), data
        )

    @staticmethod
    def _rows(data: Any) -> int:
        sizes = {len(leaf) for leaf in tree_flatten(data)[0]}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(f"All data tensors need one positive length, got {sorted(sizes)}.")
        return sizes.pop()

    def outer_params(self, x: np.ndarray) -> Any:
        """Outer parameters, in their original structure, from a vector (dx,)."""
        return self._x.tree(torch.as_tensor(x, dtype=self.dtype, device=self.device))

    def inner_params(self, y: np.ndarray) -> Any:
        """Inner parameters, in their original structure, from a vector (dy,)."""
        return self._y.tree(torch.as_tensor(y, dtype=self.dtype, device=self.device))

    def _inner_one(self, x: Tensor, y: Tensor, z: Tensor, batch: Any) -> tuple[Tensor, ...]:
        def slope(y: Tensor, x: Tensor) -> Tensor:
            return grad(lambda y: self._losses["inner"](self._x.tree(x), self._y.tree(y), batch))(y)

        gy, pull = vjp(slope, y, x)
        hvp, cross = pull(z)
        return gy, hvp, cross

    def _outer_one(self, x: Tensor, y: Tensor, batch: Any) -> tuple[Tensor, ...]:
        def loss(y: Tensor, x: Tensor) -> Tensor:
            return self._losses["outer"](self._x.tree(x), self._y.tree(y), batch)

        return grad(loss, argnums=(0, 1))(y, x)

    def _inner_x_one(self, x: Tensor, y: Tensor, batch: Any) -> tuple[Tensor, ...]:
        def loss(x: Tensor) -> Tensor:
            return self._losses["inner"](self._x.tree(x), self._y.tree(y), batch)

        return (grad(loss)(x),)

    def _apply(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        level: str,
        points: tuple[np.ndarray, ...],
        idx: np.ndarray | None,
    ) -> tuple[np.ndarray, ...]:
        lead = points[0].shape[:-1]
        flat = [
            torch.as_tensor(
                np.ascontiguousarray(part).reshape(-1, part.shape[-1]),
                dtype=self.dtype,
                device=self.device,
            )
            for part in points
        ]
        data = self._data[level]
        if idx is None:
            out = vmap(function, in_dims=(*[0] * len(flat), None))(*flat, data)
        else:
            repeats = len(flat[0]) // len(idx)
            where = torch.as_tensor(idx, device=self.device).repeat(repeats, 1)
            out = vmap(function)(*flat, tree_map(lambda t: t[where], data))
        return tuple(part.cpu().numpy().astype(float).reshape(*lead, -1) for part in out)

    def inner(self, x: np.ndarray, y: np.ndarray, z: np.ndarray, idx: np.ndarray | None) -> Triple:
        """Return the three inner oracles; see :class:`~icml24.bilevel.BilevelProblem`."""
        return self._apply(self._inner_one, "inner", (x, y, z), idx)  # type: ignore[return-value]

    def outer(self, x: np.ndarray, y: np.ndarray, idx: np.ndarray | None) -> Pair:
        """Return grad_y f and grad_x f."""
        return self._apply(self._outer_one, "outer", (x, y), idx)  # type: ignore[return-value]

    def inner_grad_x(self, x: np.ndarray, y: np.ndarray, idx: np.ndarray | None) -> np.ndarray:
        """Return grad_x g (for F2SA)."""
        return self._apply(self._inner_x_one, "inner", (x, y), idx)[0]

    def outer_loss(self, x: np.ndarray, y: np.ndarray) -> float:
        """F(x, y) on all samples, for one run."""
        value = self._losses["outer"](
            self.outer_params(x), self.inner_params(y), self._data["outer"]
        )
        return float(value)

    def init(self) -> Pair:
        """Return the starting point as vectors."""
        return (
            self._x.start.cpu().numpy().astype(float),
            self._y.start.cpu().numpy().astype(float),
        )


class SPABA(torch.optim.Optimizer):
    """SPABA as a torch optimizer, for models that live in ``nn.Module`` objects.

    Each step moves inner parameters, outer parameters and the auxiliary z together (Algorithm 1,
    section 2 of the paper), then evaluates one batch at the new and at the previous point; with
    probability ``prob_full`` it evaluates all samples instead.

    Parameters
    ----------
    outer_params, inner_params : iterable of tensors
        Leaves that require gradients, such as ``module.parameters()``.
    n_inner, n_outer : int
        Numbers of samples of the two levels.
    lr_outer, lr_inner : float
        Steps of x and of y.
    lr_linear : float, optional
        Step of z, default ``lr_inner``.
    batch_size : int, optional
        Default ceil(sqrt(n_inner)).
    prob_full : float in (0, 1], optional
        Default b / (b + (n + m) / 2).
    radius : float, optional
        Keep z in a ball of this radius.
    random_state : int
        Seed of batches and coins; torch's global generator is not touched.

    Attributes
    ----------
    n_oracle : int
        Oracle calls so far, as in :func:`~icml24.bilevel.minimize_bilevel`.

    Examples
    --------
    >>> x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    >>> y = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    >>> optimizer = SPABA([x], [y], n_inner=4, n_outer=4, lr_outer=0.1, lr_inner=0.5)
    >>> inner = lambda idx: 0.5 * (y - x).square().sum()  # y*(x) = x
    >>> outer = lambda idx: 0.5 * (y - 1).square().sum()
    >>> for _ in range(300):
    ...     loss = optimizer.step(inner, outer)
    >>> bool(abs(x.item() - 1) < 1e-3)
    True
    """

    def __init__(
        self,
        outer_params: Iterable[Tensor],
        inner_params: Iterable[Tensor],
        *,
        n_inner: int,
        n_outer: int,
        lr_outer: float,
        lr_inner: float,
        lr_linear: float | None = None,
        batch_size: int | None = None,
        prob_full: float | None = None,
        radius: float | None = None,
        random_state: int = 0,
    ) -> None:
        lr_linear = lr_inner if lr_linear is None else lr_linear
        for name, value in (
            ("lr_outer", lr_outer), ("lr_inner", lr_inner), ("lr_linear", lr_linear)
        ):  # fmt: skip
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}.")
        if n_inner < 1 or n_outer < 1:
            raise ValueError(f"Both levels need samples, got {n_inner} and {n_outer}.")
        size = int(np.ceil(np.sqrt(n_inner))) if batch_size is None else batch_size
        if not 1 <= size <= n_inner:
            raise ValueError(f"batch_size must lie between 1 and {n_inner}, got {size}.")
        if prob_full is not None and not 0 < prob_full <= 1:
            raise ValueError(f"prob_full must lie in (0, 1], got {prob_full}.")
        if radius is not None and not radius > 0:
            raise ValueError(f"radius must be positive, got {radius}.")
        self._sizes = {"inner": size, "outer": min(size, n_outer)}
        self._counts = {"inner": n_inner, "outer": n_outer}
        mean = (n_inner + n_outer) / 2
        self.prob_full = size / (size + mean) if prob_full is None else prob_full
        self.radius, self.n_oracle = radius, 0
        self._generator = torch.Generator().manual_seed(random_state)
        groups = [
            {"params": list(outer_params), "lr": lr_outer, "level": "outer"},
            {"params": list(inner_params), "lr": lr_inner, "lr_z": lr_linear, "level": "inner"},
        ]
        super().__init__(groups, {})

    def _directions(
        self, inner: Callable[[Tensor | None], Tensor], outer: Callable[[Tensor | None], Tensor],
        batches: dict[str, Tensor | None],
    ) -> tuple[list[list[Tensor]], Tensor]:  # fmt: skip
        x, y = (group["params"] for group in self.param_groups)
        z = [self.state[p]["z"] for p in y]
        loss_g, loss_f = inner(batches["inner"]), outer(batches["outer"])
        for name, loss in (("inner", loss_g), ("outer", loss_f)):
            if loss.dim() != 0:
                raise TypeError(f"The {name} closure must return a scalar, got {[*loss.shape]}.")
            if not torch.isfinite(loss):
                raise FloatingPointError(f"The {name} loss is {loss.item()}; use smaller steps.")
        gy = torch.autograd.grad(loss_g, y, create_graph=True)
        both = torch.autograd.grad(gy, [*y, *x], grad_outputs=z, materialize_grads=True)
        hz, cz = both[: len(y)], both[len(y) :]
        forces = torch.autograd.grad(loss_f, [*y, *x], allow_unused=True, materialize_grads=True)
        fy, fx = forces[: len(y)], forces[len(y) :]
        used = (self._counts[k] if batches[k] is None else len(batches[k]) for k in batches)  # type: ignore[arg-type]
        self.n_oracle += sum(used)
        directions = [
            [a - b for a, b in zip(fx, cz, strict=True)],
            [g.detach() for g in gy],
            [a - b for a, b in zip(hz, fy, strict=True)],
        ]
        return directions, loss_f.detach()

    def step(
        self,
        inner_closure: Callable[[Tensor | None], Tensor],
        outer_closure: Callable[[Tensor | None], Tensor],
    ) -> Tensor:
        """Move once.

        Parameters
        ----------
        inner_closure, outer_closure : callable
            Given an index tensor (or None for all samples), compute the average loss with the
            current parameters. They must neither zero gradients nor call ``backward``.

        Returns
        -------
        Tensor
            The outer loss on the latest batch.
        """
        x, y = (group["params"] for group in self.param_groups)
        whole: dict[str, Tensor | None] = {"inner": None, "outer": None}
        with torch.enable_grad():
            if "v" not in self.state[y[0]]:
                for p in y:
                    self.state[p]["z"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                self._store(self._directions(inner_closure, outer_closure, whole)[0])
            lr_x, lr_y = (group["lr"] for group in self.param_groups)
            lr_z = self.param_groups[1]["lr_z"]
            now = [p.detach().clone() for p in [*x, *y]]
            old_z = [self.state[p]["z"] for p in y]
            with torch.no_grad():
                for p in x:
                    p -= lr_x * self.state[p]["v"]
                for p in y:
                    p -= lr_y * self.state[p]["v"]
                moved = [self.state[p]["z"] - lr_z * self.state[p]["vz"] for p in y]
                if self.radius is not None:
                    norm = torch.sqrt(sum((part**2).sum() for part in moved))
                    scale = torch.clamp(self.radius / norm, max=1.0)
                    moved = [part * scale for part in moved]
                for p, part in zip(y, moved, strict=True):
                    self.state[p]["z"] = part
            if torch.rand((), generator=self._generator) < self.prob_full:
                new, loss = self._directions(inner_closure, outer_closure, whole)
                self._store(new)
                return loss
            batches: dict[str, Tensor | None] = {
                level: torch.randperm(self._counts[level], generator=self._generator)[
                    : self._sizes[level]
                ].to(y[0].device)
                for level in ("inner", "outer")
            }
            new, loss = self._directions(inner_closure, outer_closure, batches)
            after = [p.detach().clone() for p in [*x, *y]]
            new_z = [self.state[p]["z"] for p in y]
            self._set([*x, *y], now, y, old_z)
            try:
                old = self._directions(inner_closure, outer_closure, batches)[0]
            finally:
                self._set([*x, *y], after, y, new_z)
            kept = [
                [self.state[p]["v"] for p in x],
                [self.state[p]["v"] for p in y],
                [self.state[p]["vz"] for p in y],
            ]
            self._store(
                [
                    [v + a - b for v, a, b in zip(*parts, strict=True)]
                    for parts in zip(kept, new, old, strict=True)
                ]
            )
        return loss

    @staticmethod
    def _assign(params: list[Tensor], values: list[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(params, values, strict=True):
                p.copy_(value)

    def _set(
        self, params: list[Tensor], values: list[Tensor], y: list[Tensor], z: list[Tensor]
    ) -> None:
        self._assign(params, values)
        for p, part in zip(y, z, strict=True):
            self.state[p]["z"] = part

    def _store(self, directions: list[list[Tensor]]) -> None:
        x, y = (group["params"] for group in self.param_groups)
        for p, v in zip(x, directions[0], strict=True):
            self.state[p]["v"] = v
        for p, v, vz in zip(y, directions[1], directions[2], strict=True):
            self.state[p]["v"], self.state[p]["vz"] = v, vz

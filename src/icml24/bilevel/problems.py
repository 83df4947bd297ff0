"""Bilevel problems: five members are all a problem needs.

Minimise H(x) = f(x, y*(x)) over x, where y*(x) minimises g(x, y), and f and g are averages over
data. A problem tells the methods only how to differentiate f and g on a mini-batch; see
:class:`BilevelProblem`. Four concrete problems follow: two quadratics with closed-form solutions
(to test and to measure on), and two that practitioners meet (a penalty for every feature, a weight
for every training sample).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, log_softmax, softmax

__all__ = [
    "BilevelProblem",
    "DataHyperCleaning",
    "DiagonalQuadratic",
    "L2Selection",
    "PluggedIn",
    "QuadraticBilevel",
    "StreamingQuadratic",
    "exact_hypergradient",
]

Array = np.ndarray
Triple = tuple[Array, Array, Array]
Pair = tuple[Array, Array]


@runtime_checkable
class BilevelProblem(Protocol):
    """What a method needs to know of a problem: write these five members for your own.

    Attributes
    ----------
    n_inner, n_outer : int
        Numbers of samples of the inner objective g and of the outer objective f.

    Notes
    -----
    Write the methods for *one* run: ``x`` is ``(dx,)``, ``y`` and ``z`` are ``(dy,)``, ``idx`` an
    integer array ``(B,)`` or None for all samples; averages are over the batch. If you can do many
    runs at once, set ``batched = True`` and accept leading axes: ``x (..., R, dx)`` with
    ``idx (R, B)`` or None.

    Optional members: ``solution(x) -> (y, z)`` and ``hypergradient(x)`` when closed forms exist;
    ``inner_grad_x(x, y, idx)`` (used only by F2SA); ``outer_loss(x, y)``; ``samples_per_index``
    (an index may stand for a group of samples); ``draw(level, rng, size, count)`` when data are a
    stream.
    """

    n_inner: int
    n_outer: int

    def inner(self, x: Array, y: Array, z: Array, idx: Array | None) -> Triple:
        """Return grad_y g, (hess_yy g) z and (cross_xy g) z on the batch."""
        ...

    def outer(self, x: Array, y: Array, idx: Array | None) -> Pair:
        """Return grad_y f and grad_x f on the batch."""
        ...

    def init(self) -> Pair:
        """Return the starting point ``(x0, y0)``."""
        ...


def _matrix(value: ArrayLike, name: str) -> Array:
    array = np.asarray(value, dtype=float)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(
            f"{name} must be a non-empty matrix (samples, features), got shape {array.shape}."
        )
    if not np.isfinite(array).all():
        raise ValueError(f"{name} contains NaN or infinite values; clean it first.")
    return np.ascontiguousarray(array)


def _labels(value: ArrayLike, n: int, name: str) -> Array:
    array = np.asarray(value)
    if array.shape != (n,):
        raise ValueError(f"{name} must hold one label per row, shape ({n},), got {array.shape}.")
    return array


def exact_hypergradient(
    problem: BilevelProblem, x: Array, y: Array | None = None, tol: float = 1e-10
) -> Triple:
    """Gradient of H by full passes: Newton-CG on g, then the implicit linear system.

    Works for every problem through its oracles alone; it costs hundreds of full passes, so use it
    to evaluate, not to optimise.

    Parameters
    ----------
    problem : BilevelProblem
        Inner problem strongly convex at ``x``.
    x : ndarray, shape (dx,)
        Outer point.
    y : ndarray, shape (dy,), optional
        Where to start; default the problem's own start.
    tol : float
        Stop when the norm of grad_y g is below this.

    Returns
    -------
    (gradient, y, z) : tuple of ndarray
        grad H(x), the inner solution y*(x), and z*(x) = (hess_yy g)^-1 grad_y f.

    Raises
    ------
    RuntimeError
        If Newton's method does not reach ``tol`` (is g strongly convex?).

    Examples
    --------
    >>> problem = DiagonalQuadratic.random(n=8, d=3, random_state=0)
    >>> x = np.ones(3)
    >>> bool(np.allclose(exact_hypergradient(problem, x)[0], problem.hypergradient(x)))
    True
    """
    x = np.asarray(x, dtype=float)
    y = np.array(problem.init()[1] if y is None else y, dtype=float)

    def at(y: Array, z: Array) -> Triple:
        if getattr(problem, "batched", False):
            return tuple(part[0] for part in problem.inner(x[None], y[None], z[None], None))
        return problem.inner(x, y, z, None)

    def linear(y: Array, right: Array) -> Array:  # conjugate gradients on hess_yy g
        solution, residual = np.zeros_like(right), right.copy()
        direction, rr = residual.copy(), residual @ residual
        for _ in range(4 * right.size + 20):
            if rr <= 1e-26 * (right @ right) + 1e-300:
                break
            product = at(y, direction)[1]
            curvature = direction @ product
            if curvature <= 0:
                raise RuntimeError("The inner problem is not strongly convex at this point.")
            alpha = rr / curvature
            solution += alpha * direction
            residual -= alpha * product
            new = residual @ residual
            direction = residual + new / rr * direction
            rr = new
        return solution

    gradient = at(y, y)[0]
    for _ in range(100):
        norm = float(np.linalg.norm(gradient))
        if norm <= tol:
            break
        step, size = linear(y, gradient), 1.0
        while size > 1e-10:
            trial = at(y - size * step, y)[0]
            if np.linalg.norm(trial) < (1 - 1e-4 * size) * norm:
                break
            size /= 2
        else:
            if norm <= 1e3 * tol:
                break
            raise RuntimeError(f"The inner solver stopped at gradient norm {norm:.1e}.")
        y, gradient = y - size * step, trial
    else:
        raise RuntimeError("The inner solver did not converge in 100 Newton steps.")
    if getattr(problem, "batched", False):
        fy, fx = (part[0] for part in problem.outer(x[None], y[None], None))
    else:
        fy, fx = problem.outer(x, y, None)
    z = linear(y, fy)
    return fx - at(y, z)[2], y, z


class DiagonalQuadratic:
    r"""Quadratic problem with a closed-form hypergradient, coordinate by coordinate.

    .. math::
        g_i(x, y) = \sum_j \tfrac12 a_{ij} y_j^2 - y_j (c_{ij} x_j + e_{ij}),\qquad
        f_i(y) = \sum_j \tfrac12 p_{ij} y_j^2 - q_{ij} y_j .

    With bars for averages: y* = (c x + e) / a, z* = (p y* - q) / a, grad H = c z*.

    Parameters
    ----------
    a, c, e : ndarray, shape (n, d)
        Inner curvatures (positive), couplings and offsets of each sample.
    p, q : ndarray, shape (m, d)
        Outer curvatures and linear terms.
    x0 : ndarray, shape (d,)
        Starting point; the inner start is zero.
    samples_per_index : int
        How many samples one row stands for; see :meth:`grouped`.

    Examples
    --------
    >>> problem = DiagonalQuadratic.random(n=16, d=2, random_state=0)
    >>> bool(np.allclose(problem.hypergradient(problem.minimizer), 0))
    True
    """

    batched: ClassVar[bool] = True

    def __init__(
        self,
        a: ArrayLike,
        c: ArrayLike,
        e: ArrayLike,
        p: ArrayLike,
        q: ArrayLike,
        x0: ArrayLike,
        samples_per_index: int = 1,
    ) -> None:
        inner = [_matrix(value, name) for value, name in ((a, "a"), (c, "c"), (e, "e"))]
        outer = [_matrix(value, name) for value, name in ((p, "p"), (q, "q"))]
        if len({part.shape for part in inner}) > 1 or outer[0].shape != outer[1].shape:
            raise ValueError("a, c, e must have one shape (n, d), and p, q one shape (m, d).")
        self._inner, self._outer = np.stack(inner, 1), np.stack(outer, 1)
        self._x0 = np.asarray(x0, dtype=float)
        if not self._inner.shape[2] == self._outer.shape[2] == self._x0.size:
            raise ValueError("a, c, e, p, q and x0 must agree on the number of coordinates d.")
        self._mean_inner, self._mean_outer = self._inner.mean(0), self._outer.mean(0)
        if (self._mean_inner[0] <= 0).any():
            raise ValueError("The average of a must be positive: g has to be strongly convex in y.")
        self.n_inner, self.n_outer = len(self._inner), len(self._outer)
        self.samples_per_index = samples_per_index

    @classmethod
    def random(
        cls,
        n: int,
        d: int = 16,
        m: int | None = None,
        spectrum: tuple[float, float] = (1e-4, 1.0),
        noise: float = 0.5,
        outer_scale: float = 1.0,
        random_state: int = 0,
    ) -> DiagonalQuadratic:
        """Draw a problem whose gradient descent shows the worst-case rate.

        The eigenvalues of Hess H are log-spaced and x0 puts the same energy into each of them,
        ``x0 - x* = +-1 / sqrt(d lambda)``. Then ``|grad H|^2`` of gradient descent falls like 1/k
        for as many decades as the spectrum has, the rate of the hardest smooth problems.

        Parameters
        ----------
        n, m : int
            Inner and outer samples (m = n by default).
        d : int
            Coordinates.
        spectrum : (float, float)
            Smallest and largest eigenvalue of Hess H (approximately, after noise).
        noise : float
            Spread of each sample around the average; below 1 every sample is convex.
        outer_scale : float
            Multiplies f, and with it z* and grad H.
        random_state : int
            Seed.

        Returns
        -------
        DiagonalQuadratic
        """
        if n < 1 or d < 1:
            raise ValueError(f"n and d must be at least 1, got n={n}, d={d}.")
        rng, m = np.random.default_rng(random_state), m or n
        eigenvalues = np.geomspace(*spectrum, d)
        root = np.sqrt(eigenvalues)

        def spread(rows: int) -> Array:  # uniform, with average exactly zero
            u = rng.uniform(-1, 1, (rows, d))
            return noise * (u - u.mean(0)) / 2 if rows > 1 else np.zeros((rows, d))

        a, c = 1 + spread(n), root * (1 + spread(n))
        p = outer_scale * (1 + spread(m))
        offset = rng.choice([-1.0, 1.0], d) / np.sqrt(d * eigenvalues)
        e, q = spread(n), outer_scale * spread(m)  # so y* = 0 at x* = 0 on average
        return cls(a, c, e, p, q, offset)

    def grouped(self, size: int) -> DiagonalQuadratic:
        """Average consecutive samples: a mini-batch becomes one row, at O(d) cost a step.

        The oracle counter still counts the ``size`` samples behind each row.
        """
        if self.n_inner % size or self.n_outer % size:
            raise ValueError(f"size={size} must divide n={self.n_inner} and m={self.n_outer}.")
        inner = self._inner.reshape(-1, size, *self._inner.shape[1:]).mean(1)
        outer = self._outer.reshape(-1, size, *self._outer.shape[1:]).mean(1)
        a, c, e = np.moveaxis(inner, 1, 0)
        p, q = np.moveaxis(outer, 1, 0)
        return DiagonalQuadratic(a, c, e, p, q, self._x0, self.samples_per_index * size)

    @property
    def minimizer(self) -> Array:
        """The solution x*, shape (d,)."""
        (a, c, e), (p, q) = self._mean_inner, self._mean_outer
        return (a * q / p - e) / c

    def _batch(self, table: Array, mean: Array, idx: Array | None) -> list[Array]:
        if idx is None:
            return list(mean)
        rows = table[idx[:, 0]] if idx.shape[1] == 1 else table[idx].mean(1)
        return [rows[:, k] for k in range(rows.shape[1])]

    def inner(self, x: Array, y: Array, z: Array, idx: Array | None) -> Triple:
        """Return a y - c x - e, a z and -c z on the batch."""
        a, c, e = self._batch(self._inner, self._mean_inner, idx)
        return a * y - c * x - e, a * z, -c * z

    def outer(self, x: Array, y: Array, idx: Array | None) -> Pair:
        """Return p y - q and zero on the batch."""
        p, q = self._batch(self._outer, self._mean_outer, idx)
        return p * y - q, np.zeros_like(x)

    def inner_grad_x(self, x: Array, y: Array, idx: Array | None) -> Array:
        """Return grad_x g = -c y on the batch."""
        return -self._batch(self._inner, self._mean_inner, idx)[1] * y

    def solution(self, x: Array) -> Pair:
        """Return the closed form of y*(x) and z*(x)."""
        (a, c, e), (p, q) = self._mean_inner, self._mean_outer
        y = (c * x + e) / a
        return y, (p * y - q) / a

    def hypergradient(self, x: Array) -> Array:
        """Return the closed form of grad H(x) = c z*(x), any leading axes."""
        return self._mean_inner[1] * self.solution(x)[1]

    def outer_loss(self, x: Array, y: Array) -> Array:
        """Return f(x, y) on all samples, any leading axes."""
        p, q = self._mean_outer
        return (0.5 * p * y**2 - q * y).sum(-1)

    def init(self) -> Pair:
        """Return x0 and y0 = 0."""
        return self._x0.copy(), np.zeros_like(self._x0)


class StreamingQuadratic(DiagonalQuadratic):
    """The same quadratic as an expectation: every batch is fresh, no data set exists.

    Parameters
    ----------
    d : int
        Coordinates.
    spectrum : (float, float)
        Smallest and largest eigenvalue of Hess H.
    noise : float
        Standard deviation of the linear terms e and q of one sample.
    curvature_noise : float
        Relative standard deviation of the factors a, c and p of one sample.
    random_state : int
        Seed of the signs of the starting point.

    Examples
    --------
    >>> problem = StreamingQuadratic(d=4)
    >>> problem.draw("inner", np.random.default_rng(0), 10).shape
    (1, 3, 4)
    """

    def __init__(
        self,
        d: int = 16,
        spectrum: tuple[float, float] = (1e-3, 1.0),
        noise: float = 1.0,
        curvature_noise: float = 0.3,
        random_state: int = 0,
    ) -> None:
        mean = DiagonalQuadratic.random(1, d, spectrum=spectrum, random_state=random_state)
        (a, c, e), (p, q) = mean._mean_inner[:, None], mean._mean_outer[:, None]
        super().__init__(a, c, e, p, q, mean._x0)
        one = np.ones(d)
        self._spread = {
            "inner": np.stack([curvature_noise * a[0], curvature_noise * c[0], noise * one]),
            "outer": np.stack([curvature_noise * one, noise * one]),
        }
        self._mean = {"inner": self._mean_inner, "outer": self._mean_outer}

    def draw(self, level: str, rng: np.random.Generator, size: int, count: int = 1) -> Array:
        """Draw ``count`` batches: the average of ``size`` samples' coefficients each.

        Returns
        -------
        ndarray, shape (count, 3, d) for "inner", (count, 2, d) for "outer"
        """
        spread = self._spread[level]
        noise = rng.standard_normal((count, *spread.shape)) / np.sqrt(size)
        return self._mean[level] + spread * noise

    def _batch(self, table: Array, mean: Array, idx: Array | None) -> list[Array]:
        return list(mean) if idx is None else [idx[:, k] for k in range(idx.shape[1])]


@dataclass
class QuadraticBilevel:
    r"""Dense quadratic problem with a closed-form hypergradient; the sharpest test of a method.

    .. math::
        g_i = \tfrac12 y^\top A_i y - y^\top (C_i x + e_i),\qquad
        f_i = \tfrac12 (y - t_i)^\top P (y - t_i) + \tfrac\rho2 \lVert x - s_i\rVert^2 .

    Parameters
    ----------
    A : ndarray, shape (n, dy, dy)
        Inner Hessians, with a positive definite average.
    C : ndarray, shape (n, dy, dx)
        Couplings.
    e : ndarray, shape (n, dy)
        Offsets.
    P : ndarray, shape (dy, dy)
        Outer curvature.
    t, s : ndarray, shapes (m, dy) and (m, dx)
        Targets of y and of x.
    rho : float
        Strength of the pull of x towards s.

    Examples
    --------
    >>> problem = QuadraticBilevel.random(n=6, m=4, dx=3, dy=2, random_state=1)
    >>> x = np.zeros(3)
    >>> bool(np.allclose(problem.hypergradient(x), exact_hypergradient(problem, x)[0]))
    True
    """

    A: Array
    C: Array
    e: Array
    P: Array
    t: Array
    s: Array
    rho: float = 0.1

    def __post_init__(self) -> None:
        n, dy, dx = self.C.shape
        if self.A.shape != (n, dy, dy) or self.e.shape != (n, dy) or self.P.shape != (dy, dy):
            raise ValueError("A (n,dy,dy), C (n,dy,dx), e (n,dy) and P (dy,dy) do not agree.")
        if self.t.ndim != 2 or self.t.shape[1] != dy or self.s.shape != (len(self.t), dx):
            raise ValueError("t must be (m,dy) and s (m,dx).")
        self.n_inner, self.n_outer = n, len(self.t)
        if np.linalg.eigvalsh(self.A.mean(0))[0] <= 0:
            raise ValueError("The average of A must be positive definite.")

    @classmethod
    def random(
        cls, n: int, m: int, dx: int, dy: int, noise: float = 0.5, outer_scale: float = 1.0,
        random_state: int = 0,
    ) -> QuadraticBilevel:  # fmt: skip
        """Draw a well-conditioned problem; ``outer_scale`` multiplies f, and with it z*."""
        rng = np.random.default_rng(random_state)

        def symmetric(*shape: int) -> Array:
            root = rng.standard_normal(shape) / np.sqrt(shape[-1])
            return root + np.swapaxes(root, -1, -2)

        base = np.linalg.qr(rng.standard_normal((dy, dy)))[0]
        mean = base @ np.diag(np.linspace(0.5, 1.0, dy)) @ base.T
        wobble = 0.2 * noise * symmetric(n, dy, dy)
        couple = rng.standard_normal((dy, dx))
        couple *= 0.5 / np.linalg.norm(couple, 2)
        return cls(
            A=mean + wobble - wobble.mean(0),
            C=couple + 0.5 * noise * rng.standard_normal((n, dy, dx)) / np.sqrt(max(dx, dy)),
            e=rng.standard_normal((n, dy)),
            P=outer_scale * (np.eye(dy) + 0.1 * symmetric(dy, dy)),
            t=2 * rng.standard_normal(dy) + rng.standard_normal((m, dy)),
            s=rng.standard_normal((m, dx)),
            rho=0.1 * outer_scale,
        )

    def _rows(self, table: Array, idx: Array | None) -> Array:
        return (table if idx is None else table[idx]).mean(0)

    def inner(self, x: Array, y: Array, z: Array, idx: Array | None) -> Triple:
        """Return A y - C x - e, A z and -C' z on the batch."""
        A, C, e = (self._rows(part, idx) for part in (self.A, self.C, self.e))
        return A @ y - C @ x - e, A @ z, -C.T @ z

    def outer(self, x: Array, y: Array, idx: Array | None) -> Pair:
        """Return P (y - t) and rho (x - s) on the batch."""
        return self.P @ (y - self._rows(self.t, idx)), self.rho * (x - self._rows(self.s, idx))

    def inner_grad_x(self, x: Array, y: Array, idx: Array | None) -> Array:
        """Return grad_x g = -C' y on the batch."""
        return -self._rows(self.C, idx).T @ y

    def solution(self, x: Array) -> Pair:
        """Return y*(x) and z*(x) by dense solves."""
        A = self.A.mean(0)
        y = np.linalg.solve(A, self.C.mean(0) @ x + self.e.mean(0))
        return y, np.linalg.solve(A, self.P @ (y - self.t.mean(0)))

    def hypergradient(self, x: Array) -> Array:
        """Return the closed form of grad H(x), any leading axes."""
        if x.ndim > 1:
            return np.stack([self.hypergradient(row) for row in x])
        return self.rho * (x - self.s.mean(0)) + self.C.mean(0).T @ self.solution(x)[1]

    def outer_loss(self, x: Array, y: Array) -> float:
        """Return f(x, y) on all samples."""
        away = y - self.t
        fit = 0.5 * np.einsum("ij,jk,ik->i", away, self.P, away).mean()
        return float(fit + 0.5 * self.rho * ((x - self.s) ** 2).sum(1).mean())

    def init(self) -> Pair:
        """Return zeros."""
        return np.zeros(self.C.shape[2]), np.zeros(self.C.shape[1])


def _products(X: Array, idx: Array | None, *vectors: Array) -> tuple[Array | None, list[Array]]:
    """Return rows of X on the batch and their products with (..., R, d) vectors, in one GEMM."""
    if idx is None:
        return None, [vector @ X.T for vector in vectors]
    rows = X[idx]  # (R, B, d)
    stacked = np.stack(vectors)  # (V, ..., R, d)
    flat = stacked.reshape(-1, *stacked.shape[-2:])  # (V*points, R, d)
    out = rows @ np.moveaxis(flat, 0, -1)  # (R, B, V*points)
    out = np.moveaxis(out, -1, 0).reshape(*stacked.shape[:-1], idx.shape[1])
    return rows, list(out)


def _back(X: Array, rows: Array | None, *weights: Array) -> list[Array]:
    """Average of rows weighted by (..., R, B): the transposed products, again in one GEMM."""
    if rows is None:
        return [weight @ X / len(X) for weight in weights]
    stacked = np.stack(weights)
    flat = stacked.reshape(-1, *stacked.shape[-2:])
    out = np.moveaxis(flat, 0, 1) @ rows / rows.shape[1]  # (R, V*points, d)
    return list(np.moveaxis(out, 1, 0).reshape(*stacked.shape[:-1], rows.shape[-1]))


class L2Selection:
    r"""One penalty per feature for logistic regression, chosen on validation data.

    Inner: the average logistic loss plus :math:`\tfrac12\sum_j (e^{x_j} + \text{floor})\, y_j^2`
    over training data. Outer: the average logistic loss on validation data. The floor keeps the
    inner problem strongly convex however negative x becomes.

    Parameters
    ----------
    X, X_val : array_like, shapes (n, d) and (m, d)
        Features of the training and validation rows (include a column of ones for an intercept).
    y, y_val : array_like, shapes (n,) and (m,)
        Two classes each; the larger label is the positive one.
    floor : float, default 1e-2
        Smallest penalty.
    x0 : float, default -3
        Initial log-strength of every feature.
    ceiling : float, optional
        Largest strength. g is as smooth as its largest penalty allows, so a constant inner step
        ``lr`` needs strengths below about ``2 / lr - 1`` (scaled features). Above the ceiling the
        oracles return the derivative at the ceiling, so that x can come back.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((40, 3))
    >>> problem = L2Selection(X[:30], X[:30, 0] > 0, X[30:], X[30:, 0] > 0)
    >>> problem.hypergradient(np.zeros((2, 3))).shape
    (2, 3)
    """

    batched: ClassVar[bool] = True

    def __init__(
        self,
        X: ArrayLike,
        y: ArrayLike,
        X_val: ArrayLike,
        y_val: ArrayLike,
        floor: float = 1e-2,
        x0: float = -3.0,
        ceiling: float = np.inf,
    ) -> None:
        self.X, self.X_val = _matrix(X, "X"), _matrix(X_val, "X_val")
        if self.X.shape[1] != self.X_val.shape[1]:
            raise ValueError(
                f"X has {self.X.shape[1]} features, X_val {self.X_val.shape[1]}; they must agree."
            )
        labels = _labels(y, len(self.X), "y")
        labels_val = _labels(y_val, len(self.X_val), "y_val")
        self.classes = np.unique(labels)
        if len(self.classes) != 2 or not np.isin(labels_val, self.classes).all():
            raise ValueError(
                f"y must hold two classes and y_val the same two, got {np.unique(labels).tolist()} "
                f"and {np.unique(labels_val).tolist()}."
            )
        if not floor > 0:
            raise ValueError(f"floor must be positive to keep g strongly convex, got {floor}.")
        if not ceiling > 0:
            raise ValueError(f"ceiling must be positive, got {ceiling}.")
        self.highest = min(50.0, float(np.log(ceiling)))  # of x; beyond it, exp(x) stays
        self.s = np.where(labels == self.classes[1], 1.0, -1.0)
        self.s_val = np.where(labels_val == self.classes[1], 1.0, -1.0)
        self.floor, self.x0 = float(floor), float(x0)
        self.n_inner, self.n_outer = len(self.X), len(self.X_val)

    def strength(self, x: Array) -> Array:
        """Return exp(x), at most the ceiling."""
        return np.exp(np.minimum(x, self.highest))

    def inner(self, x: Array, y: Array, z: Array, idx: Array | None) -> Triple:
        """Return the three inner oracles; see :class:`BilevelProblem`."""
        s = self.s if idx is None else self.s[idx]
        rows, (logits, along) = _products(self.X, idx, y, z)
        wrong = expit(-s * logits)
        slope, curve = _back(self.X, rows, -s * wrong, wrong * (1 - wrong) * along)
        strength = self.strength(x)
        penalty = strength + self.floor
        return slope + penalty * y, curve + penalty * z, strength * y * z

    def outer(self, x: Array, y: Array, idx: Array | None) -> Pair:
        """Return the gradient of the validation loss in y, and zero."""
        s = self.s_val if idx is None else self.s_val[idx]
        rows, (logits,) = _products(self.X_val, idx, y)
        return _back(self.X_val, rows, -s * expit(-s * logits))[0], np.zeros_like(x)

    def inner_grad_x(self, x: Array, y: Array, idx: Array | None) -> Array:
        """Return grad_x g = exp(x) y^2 / 2 (no data enter)."""
        return 0.5 * self.strength(x) * y**2

    def outer_loss(self, x: Array, y: Array) -> Array:
        """Average validation loss, any leading axes of y."""
        return np.logaddexp(0.0, -self.s_val * (y @ self.X_val.T)).mean(-1)

    def solution(self, x: Array) -> Pair:
        """Return y*(x) by damped Newton to machine precision, and z*(x) by a dense solve."""
        if np.ndim(x) > 1:
            both = [self.solution(row) for row in x.reshape(-1, x.shape[-1])]
            ys, zs = (np.stack(part).reshape(x.shape) for part in zip(*both, strict=True))
            return ys, zs
        penalty = self.strength(x) + self.floor

        def loss(y: Array) -> float:
            fit = np.logaddexp(0.0, -self.s * (self.X @ y)).mean()
            return float(fit + 0.5 * penalty @ y**2)

        y = np.zeros(len(x))
        for _ in range(50):
            wrong = expit(-self.s * (self.X @ y))
            gradient = -(self.s * wrong) @ self.X / self.n_inner + penalty * y
            hessian = (self.X.T * (wrong * (1 - wrong))) @ self.X / self.n_inner + np.diag(penalty)
            if np.linalg.norm(gradient) < 1e-13:
                break
            step, size, here = np.linalg.solve(hessian, gradient), 1.0, loss(y)
            while loss(y - size * step) > here + 1e-14 * abs(here) and size > 1e-6:
                size /= 2
            y = y - size * step
        right = self.outer(x[None], y[None], None)[0][0]
        return y, np.linalg.solve(hessian, right)

    def hypergradient(self, x: Array) -> Array:
        """Return grad H(x) by exact solves, any leading axes."""
        y, z = self.solution(x)
        return -self.strength(x) * y * z

    def value(self, x: Array) -> Array:
        """Return H(x) by exact solves, any leading axes."""
        return self.outer_loss(x, self.solution(x)[0])

    def kernels(
        self, orders: tuple[Array, Array], sizes: tuple[int, int]
    ) -> tuple[Any, Any, tuple[Array, ...], tuple[Array, ...]]:
        """Return compiled oracles for ``engine="numba"``, and the data they take."""
        from icml24.bilevel.compiled import arrange, l2_inner, l2_outer

        return (
            l2_inner,
            l2_outer,
            (*arrange(self.X, self.s, orders[0], sizes[0]), np.array([self.floor, self.highest])),
            arrange(self.X_val, self.s_val, orders[1], sizes[1]),
        )

    def init(self) -> Pair:
        """Return x0 in every coordinate and y0 = 0."""
        d = self.X.shape[1]
        return np.full(d, self.x0), np.zeros(d)


class DataHyperCleaning:
    r"""One weight per training sample, learnt from a few clean samples.

    Inner: :math:`\tfrac1n\sum_i \sigma(x_i)\,\ell_i(y) + \tfrac{l_2}{2}\lVert y\rVert^2` with the
    softmax cross-entropy :math:`\ell_i` and the sigmoid :math:`\sigma`. Outer: the average
    cross-entropy on clean data. Samples with wrong labels should end with small weights.

    Parameters
    ----------
    X, X_val : array_like, shapes (n, d) and (m, d)
        Features; include a column of ones for intercepts.
    y, y_val : array_like, shapes (n,) and (m,)
        Class labels. Those of ``y`` may be wrong, those of ``y_val`` are trusted.
    l2 : float, default 0.02
        Ridge penalty, which keeps the inner problem strongly convex.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X, y = rng.standard_normal((20, 2)), np.arange(20) % 3
    >>> problem = DataHyperCleaning(X, y, X, y)
    >>> [part.shape for part in problem.init()]
    [(20,), (6,)]
    """

    batched: ClassVar[bool] = True

    def __init__(
        self, X: ArrayLike, y: ArrayLike, X_val: ArrayLike, y_val: ArrayLike, l2: float = 0.02
    ) -> None:
        self.X, self.X_val = _matrix(X, "X"), _matrix(X_val, "X_val")
        if self.X.shape[1] != self.X_val.shape[1]:
            raise ValueError(
                f"X has {self.X.shape[1]} features, X_val {self.X_val.shape[1]}; they must agree."
            )
        labels = _labels(y, len(self.X), "y")
        labels_val = _labels(y_val, len(self.X_val), "y_val")
        self.classes, codes = np.unique(np.concatenate([labels, labels_val]), return_inverse=True)
        if len(self.classes) < 2:
            raise ValueError("y and y_val must hold at least two classes.")
        if not l2 > 0:
            raise ValueError(f"l2 must be positive to keep g strongly convex, got {l2}.")
        one_hot = np.eye(len(self.classes))[codes]
        self.T, self.T_val = one_hot[: len(labels)], one_hot[len(labels) :]
        self.l2 = float(l2)
        self.n_inner, self.n_outer = len(self.X), len(self.X_val)
        self.shape = (self.X.shape[1], len(self.classes))  # of y as a matrix

    def _logits(self, X: Array, idx: Array | None, y: Array) -> Array:
        W = y.reshape(*y.shape[:-1], *self.shape)
        return (X if idx is None else X[idx]) @ W  # (..., R, B, K)

    def _transposed(self, X: Array, idx: Array | None, weight: Array) -> Array:
        rows = X if idx is None else X[idx]
        out = np.swapaxes(rows, -1, -2) @ weight / rows.shape[-2]
        return out.reshape(*out.shape[:-2], -1)

    def inner(self, x: Array, y: Array, z: Array, idx: Array | None) -> Triple:
        """Return the three inner oracles; see :class:`BilevelProblem`."""
        T = self.T if idx is None else self.T[idx]
        mine = (
            x
            if idx is None
            else np.take_along_axis(x, np.broadcast_to(idx, (*x.shape[:-1], idx.shape[1])), -1)
        )
        weight = expit(mine)
        prob = softmax(self._logits(self.X, idx, y), axis=-1)
        along = self._logits(self.X, idx, z)
        error = prob - T
        slope = self._transposed(self.X, idx, weight[..., None] * error)
        turn = prob * (along - (prob * along).sum(-1, keepdims=True))
        curve = self._transposed(self.X, idx, weight[..., None] * turn)
        each = weight * (1 - weight) * (error * along).sum(-1) / T.shape[-2]
        if idx is None:
            cross = each
        else:
            cross = np.zeros_like(x)
            np.put_along_axis(cross, np.broadcast_to(idx, each.shape), each, -1)
        return slope + self.l2 * y, curve + self.l2 * z, cross

    def outer(self, x: Array, y: Array, idx: Array | None) -> Pair:
        """Return the gradient of the clean loss in y, and zero."""
        T = self.T_val if idx is None else self.T_val[idx]
        error = softmax(self._logits(self.X_val, idx, y), axis=-1) - T
        return self._transposed(self.X_val, idx, error), np.zeros_like(x)

    def inner_grad_x(self, x: Array, y: Array, idx: Array | None) -> Array:
        """Return grad_x g on the batch."""
        T = self.T if idx is None else self.T[idx]
        loss = -(T * log_softmax(self._logits(self.X, idx, y), axis=-1)).sum(-1)
        if idx is None:
            weight = expit(x)
            return weight * (1 - weight) * loss / self.n_inner
        where = np.broadcast_to(idx, loss.shape)
        weight = expit(np.take_along_axis(x, where, -1))
        out = np.zeros_like(x)
        np.put_along_axis(out, where, weight * (1 - weight) * loss / idx.shape[1], -1)
        return out

    def outer_loss(self, x: Array, y: Array) -> Array:
        """Average clean loss, any leading axes of y."""
        logits = self._logits(self.X_val, None, y)
        return -(self.T_val * log_softmax(logits, axis=-1)).sum(-1).mean(-1)

    def predict(self, y: Array, X: ArrayLike) -> Array:
        """Class labels of the rows of X for inner parameters y, any leading axes."""
        return self.classes[self._logits(_matrix(X, "X"), None, y).argmax(-1)]

    def init(self) -> Pair:
        """Return equal weights (x0 = 0) and y0 = 0."""
        return np.zeros(self.n_inner), np.zeros(self.shape[0] * self.shape[1])


class PluggedIn:
    """The same problem as a single-level one: y and z are replaced by y*(x) and z*(x).

    A control that no practitioner could run: it needs the exact solutions. A method run on it
    pays for H's stochastic gradient alone, so the difference to the original problem is the price
    of nesting.

    Parameters
    ----------
    problem : BilevelProblem
        A batched problem with a ``solution``.
    """

    batched: ClassVar[bool] = True

    def __init__(self, problem: Any) -> None:
        self.problem = problem
        self.n_inner, self.n_outer = problem.n_inner, problem.n_outer
        self.samples_per_index = getattr(problem, "samples_per_index", 1)
        self.init: Callable[[], Pair] = problem.init
        self.hypergradient: Callable[[Array], Array] = problem.hypergradient

    def inner(self, x: Array, y: Array, z: Array, idx: Array | None) -> Triple:
        """Inner oracles at (x, y*(x), z*(x)); y and z themselves are left where they are."""
        y_star, z_star = self.problem.solution(x)
        cross = self.problem.inner(x, y_star, z_star, idx)[2]
        return np.zeros_like(y), np.zeros_like(z), cross

    def outer(self, x: Array, y: Array, idx: Array | None) -> Pair:
        """Outer oracles at (x, y*(x))."""
        y_star, _ = self.problem.solution(x)
        return np.zeros_like(y), self.problem.outer(x, y_star, idx)[1]

"""The driver: independent runs as one array, oracle calls counted, one loop for every method."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import OptimizeResult
from scipy.sparse.linalg import LinearOperator, eigsh
from sklearn.exceptions import ConvergenceWarning
from tqdm import tqdm

from icml24.bilevel.methods import make_method
from icml24.bilevel.problems import BilevelProblem, Pair, Triple

__all__ = ["Batch", "BilevelDivergenceError", "Run", "minimize_bilevel"]

Array = np.ndarray
Rows = slice | Array
ALL = slice(None)
CHUNK = 256


class BilevelDivergenceError(FloatingPointError):
    """An iterate became infinite or NaN; the message says which one, and at which step."""


@dataclass(frozen=True)
class Batch:
    """One mini-batch for each run.

    Attributes
    ----------
    ids : ndarray of int, shape (R,), or None
        The block that each run drew; None for all samples.
    pieces : list of (positions, idx)
        Index arrays for the problem, grouped by length: usually a single piece with positions
        ``slice(None)`` and ``idx`` of shape (R, B).
    sizes : int or ndarray, shape (R,)
        Samples in each run's batch, as they are counted.
    """

    ids: Array | None
    pieces: list[tuple[Rows, Array | None]]
    sizes: int | Array


class _OneByOne:
    """Give a problem that is written for one run the batched interface, by loops."""

    def __init__(self, problem: BilevelProblem) -> None:
        self.problem = problem

    def _loop(self, function: Callable[..., Any], points: list[Array], idx: Array | None) -> Any:
        shape = points[0].shape[:-1]  # (R,) or (points, R)
        flat = [part.reshape(-1, part.shape[-1]) for part in points]
        runs = shape[-1]
        values = [
            function(*(part[k] for part in flat), None if idx is None else idx[k % runs])
            for k in range(len(flat[0]))
        ]
        if not isinstance(values[0], tuple):
            return np.stack(values).reshape(*shape, -1)
        return tuple(
            np.stack([np.asarray(value) for value in column]).reshape(*shape, -1)
            for column in zip(*values, strict=True)
        )

    def inner(self, x: Array, y: Array, z: Array, idx: Array | None) -> Triple:
        return self._loop(self.problem.inner, [x, y, z], idx)

    def outer(self, x: Array, y: Array, idx: Array | None) -> Pair:
        return self._loop(self.problem.outer, [x, y], idx)

    def inner_grad_x(self, x: Array, y: Array, idx: Array | None) -> Array:
        return self._loop(self.problem.inner_grad_x, [x, y], idx)  # type: ignore[attr-defined]


class _Blocks:
    """Blocks of a random partition of one level's samples, drawn by each seed's own stream.

    The partition is common to all seeds. A block is drawn with probability proportional to its size
    (the last one may be short), so a batch average is an unbiased estimate of the full one.
    """

    def __init__(
        self, n: int, size: int, streams: list[np.random.Generator], unit: int, order: Array
    ) -> None:
        self.n, self.size, self.streams, self.unit = n, size, streams, unit
        self.order = order
        self.starts = np.arange(0, n, size)
        self.lengths = np.minimum(size, n - self.starts)
        self.weights, self.even = self.lengths / n, n % size == 0
        self.position = CHUNK

    def refill(self) -> None:
        if self.position == CHUNK:
            draws = [stream.integers(self.n, size=CHUNK) for stream in self.streams]
            self.buffer, self.position = np.stack(draws) // self.size, 0

    def draw(self, owner: Array) -> Batch:
        self.refill()
        self.position += 1  # for every seed, used or not: runs do not influence each other
        return self.batch(self.buffer[owner, self.position - 1])

    def batch(self, ids: Array) -> Batch:
        lengths = self.lengths[ids]
        pieces: list[tuple[Rows, Array | None]] = []
        for length in (self.size,) if self.even else np.unique(lengths):
            where = ALL if (lengths == length).all() else np.flatnonzero(lengths == length)
            columns = self.starts[ids[where], None] + np.arange(length)
            pieces.append((where, self.order[columns]))
        return Batch(ids, pieces, lengths * self.unit)

    def full(self) -> Batch:
        return Batch(None, [(ALL, None)], self.n * self.unit)


class _Stream:
    """Fresh samples from a problem with ``draw``; a 'full' pass is a large batch."""

    def __init__(
        self,
        problem: Any,
        level: str,
        size: int,
        full_size: int,
        streams: list[np.random.Generator],
    ) -> None:
        self.problem, self.level, self.streams = problem, level, streams
        self.large = [stream.spawn(1)[0] for stream in streams]
        self.size, self.full_size = size, full_size
        self.weights, self.position, self.buffer = None, 0, np.empty(0)

    def draw(self, owner: Array) -> Batch:
        if self.position == len(self.buffer):
            fresh = [
                self.problem.draw(self.level, stream, self.size, CHUNK) for stream in self.streams
            ]
            self.buffer, self.position = np.stack(fresh, 1), 0
        self.position += 1
        return self.batch(self.buffer[self.position - 1, owner], self.size)

    def full(self, owner: Array) -> Batch:
        large = [self.problem.draw(self.level, stream, self.full_size)[0] for stream in self.large]
        return self.batch(np.stack(large)[owner], self.full_size)

    @staticmethod
    def batch(fresh: Array, size: int) -> Batch:
        return Batch(np.zeros(len(fresh), int), [(ALL, fresh)], size)


class Run:
    """Everything that belongs to a set of independent runs; methods read and move ``x, y, z``.

    Made by :func:`minimize_bilevel`; a callback and the result receive it.

    Attributes
    ----------
    x, y, z : ndarray, shapes (R, dx), (R, dy), (R, dy)
        Iterates of the R runs.
    lr_x, lr_y, lr_z : ndarray, shape (R, 1)
        Step sizes.
    calls : ndarray of int, shape (R,)
        Oracle calls: one for each sample of one level at one point.
    step : int
        Steps taken.
    seconds : float
        Time spent in steps, without recording.
    full_probability : ndarray, shape (R,)
        The probability b / (b + (n + m) / 2) that balances batches and full passes.
    """

    def __init__(
        self,
        problem: BilevelProblem,
        x: Array,
        y: Array,
        lr: tuple[Array, Array, Array],
        batch_sizes: tuple[int, int],
        full_batch: int | None,
        seeds: Sequence[int],
        random_state: int,
    ) -> None:
        self.problem = problem
        self._oracle: Any = problem if getattr(problem, "batched", False) else _OneByOne(problem)
        self.x, self.y, self.z = x, y, np.zeros_like(y)
        self.lr_x, self.lr_y, self.lr_z = lr
        self.calls = np.zeros(len(x), dtype=np.int64)
        self.step, self.seconds = 0, 0.0
        self.radius: float | None = None
        self.z_map: Callable[[Array], Array] | None = None
        self.curvature_is_negative = False
        self._inner_calls = 0
        self.previous = (self.x, self.y, self.z)
        self.horizon: tuple[int, float] = (1, np.inf)

        unique, self.owner = np.unique(np.asarray(seeds), return_inverse=True)
        children = [np.random.SeedSequence([random_state, int(seed)]).spawn(3) for seed in unique]
        streams = [
            [np.random.default_rng(seed) for seed in column]
            for column in zip(*children, strict=True)
        ]
        self._coins, self._coin_position = streams[2], CHUNK
        unit = int(getattr(problem, "samples_per_index", 1))
        self.unit = unit
        if hasattr(problem, "draw"):
            full = full_batch or batch_sizes[0] ** 2
            self._sampler: dict[str, Any] = {
                level: _Stream(problem, level, size, full, stream)
                for level, size, stream in zip(
                    ("inner", "outer"), batch_sizes, streams, strict=False
                )
            }
            probability = batch_sizes[0] / (batch_sizes[0] + full)
        else:
            sizes = (problem.n_inner, problem.n_outer)
            partition = np.random.default_rng([random_state, 0])
            self._sampler = {
                level: _Blocks(n, size, stream, unit, partition.permutation(n))
                for level, n, size, stream in zip(
                    ("inner", "outer"), sizes, batch_sizes, streams, strict=False
                )
            }
            mean_batch = sum(batch_sizes) / 2
            probability = mean_batch / (mean_batch + sum(sizes) / 2)
        self.full_probability = np.full(len(x), probability)

    # -- what a method may ask for ---------------------------------------------------------------
    def draw(self, level: str) -> Batch:
        """Draw a mini-batch of a level, "inner" or "outer", for every run."""
        return self._sampler[level].draw(self.owner)

    def subset(self, level: str, batch: Batch, rows: Rows) -> Batch:
        """Keep the given runs of a batch."""
        assert batch.ids is not None
        sampler = self._sampler[level]
        if isinstance(sampler, _Stream):
            fresh = batch.pieces[0][1]
            assert fresh is not None
            return Batch(batch.ids[rows], [(ALL, fresh[rows])], batch.sizes)
        return sampler.batch(batch.ids[rows])

    def full(self, level: str) -> Batch:
        """All samples of a level; for a stream, one large fresh batch."""
        sampler = self._sampler[level]
        if isinstance(sampler, _Stream):
            return sampler.full(self.owner)
        return sampler.full()

    def block(self, level: str, block: int) -> Batch:
        """One block of a level, the same number for every run."""
        return self._sampler[level].batch(np.full(len(self.x), block))

    def block_weights(self, level: str) -> Array | None:
        """Shares of the blocks of a level, or None for a stream."""
        return self._sampler[level].weights

    def coin(self) -> Array:
        """One uniform number for each run."""
        self._refill_coins()
        self._coin_position += 1
        return self._coin_buffer[self.owner, self._coin_position - 1]

    def _refill_coins(self) -> None:
        if self._coin_position == CHUNK:
            self._coin_buffer = np.stack([stream.random(CHUNK) for stream in self._coins])
            self._coin_position = 0

    def project(self, z: Array) -> Array:
        """Project z onto the ball of the given radius (if any)."""
        if self.z_map is not None:
            return self.z_map(z)
        if self.radius is None:
            return z
        norm = np.linalg.norm(z, axis=-1, keepdims=True)
        return np.where(norm > self.radius, z * (self.radius / np.maximum(norm, 1e-300)), z)

    def inner(self, x: Array, y: Array, z: Array, batch: Batch, rows: Rows = ALL) -> Triple:
        """Evaluate (and count) grad_y g, hess_yy g z, cross_xy g z; a leading axis holds points."""
        values = self._call(self._oracle.inner, (x, y, z), batch, rows)
        self._inner_calls += 1
        if self._inner_calls % 64 == 1:
            size = np.linalg.norm(z, axis=-1) * np.linalg.norm(values[1], axis=-1)
            if ((z * values[1]).sum(-1) < -1e-8 * size).any():
                self.curvature_is_negative = True
        return values

    def outer(self, x: Array, y: Array, batch: Batch, rows: Rows = ALL) -> Pair:
        """Evaluate (and count) grad_y f and grad_x f."""
        return self._call(self._oracle.outer, (x, y), batch, rows)

    def inner_grad_x(self, x: Array, y: Array, batch: Batch, rows: Rows = ALL) -> Array:
        """Evaluate (and count) grad_x g."""
        return self._call(self._oracle.inner_grad_x, (x, y), batch, rows)

    def oracles(
        self, x: Array, y: Array, z: Array, inner: Batch, outer: Batch, rows: Rows = ALL
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Evaluate (and count) both oracles: the five vectors behind the three directions."""
        return self.inner(x, y, z, inner, rows) + self.outer(x, y, outer, rows)

    def _call(
        self, oracle: Callable[..., Any], points: tuple[Array, ...], batch: Batch, rows: Rows
    ) -> Any:
        count = points[0].shape[0] if points[0].ndim == 3 else 1
        self.calls[rows] += count * batch.sizes
        if len(batch.pieces) == 1:
            idx = batch.pieces[0][1]
            if batch.ids is not None and idx is not None and len(idx) != points[0].shape[-2]:
                idx = idx[rows]
            return oracle(*points, idx)
        out: list[Array] | None = None
        for where, idx in batch.pieces:
            values = oracle(*(part[..., where, :] for part in points), idx)
            values = values if isinstance(values, tuple) else (values,)
            if out is None:
                out = [np.empty((*points[0].shape[:-1], value.shape[-1])) for value in values]
            for target, value in zip(out, values, strict=True):
                target[..., where, :] = value
        assert out is not None
        return tuple(out) if len(out) > 1 else out[0]


def _positive(value: ArrayLike, name: str, runs: int) -> Array:
    array = np.asarray(value, dtype=float)
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError(f"{name} must be positive and finite, got {array.tolist()}.")
    if array.ndim > 1 or array.size not in (1, runs):
        raise ValueError(f"{name} must be one number or one for each of {runs} runs.")
    return np.broadcast_to(array.reshape(-1, 1), (runs, 1)).copy()


def _batch_size(value: int | str, n: int, unit: int) -> int:
    if value == "sqrt":
        return max(1, min(n, int(np.ceil(np.sqrt(n * unit) / unit - 1e-9))))
    if isinstance(value, str) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"batch_size must be 'sqrt' or an integer, got {value!r}.")
    if not 1 <= value <= n:
        raise ValueError(
            f"batch_size must lie between 1 and the number of samples {n}, got {value}."
        )
    return int(value)


def _points(value: ArrayLike | None, default: Array, runs: int, name: str) -> Array:
    default = np.asarray(default, dtype=float)
    array = default if value is None else np.asarray(value, dtype=float)
    if array.shape not in ((default.size,), (runs, default.size)):
        raise ValueError(
            f"{name} must have shape ({default.size},) or ({runs}, {default.size}), "
            f"got {array.shape}."
        )
    if not np.isfinite(array).all():
        raise ValueError(f"{name} contains NaN or infinite values.")
    return np.broadcast_to(array, (runs, default.size)).copy()


def _check_problem(run: Run) -> None:
    """Evaluate both oracles once, uncounted, and explain what does not fit."""
    batches = {level: run.full(level).pieces[0][1] for level in ("inner", "outer")}
    with np.errstate(all="ignore"):
        inner = run._oracle.inner(run.x, run.y, run.z, batches["inner"])
        outer = run._oracle.outer(run.x, run.y, batches["outer"])
    if len(inner) != 3 or len(outer) != 2:
        raise ValueError(
            "problem.inner must return three arrays (grad_y g, hvp, cross) and problem.outer two "
            f"(grad_y f, grad_x f), got {len(inner)} and {len(outer)}."
        )
    wanted = [run.y.shape, run.y.shape, run.x.shape, run.y.shape, run.x.shape]
    names = ["grad_y g", "hvp", "cross", "grad_y f", "grad_x f"]
    for value, shape, name in zip([*inner, *outer], wanted, names, strict=True):
        if np.shape(value) != shape:
            raise ValueError(
                f"The oracle {name} has shape {np.shape(value)[1:]} for one run, "
                f"expected {shape[1:]}."
            )
        if not np.isfinite(value).all():
            raise ValueError(f"The oracle {name} is NaN or infinite at the starting point.")


def _auto_radius(run: Run) -> float:
    """Return ten times ``|grad_y f| / mu`` at the start, mu by Lanczos on counted products."""
    full = run.full("inner")
    force = np.linalg.norm(run.outer(run.x, run.y, run.full("outer"))[0], axis=-1).max()

    def product(vector: Array) -> Array:
        z = np.broadcast_to(vector.ravel(), run.y.shape)
        return run.inner(run.x, run.y, z, full)[1][0]

    d = run.y.shape[1]
    if d < 3:
        dense = np.stack([product(row) for row in np.eye(d)])
        smallest = float(np.linalg.eigvalsh(dense)[0])
    else:
        operator = LinearOperator((d, d), matvec=product, dtype=float)
        start = np.random.default_rng(0).standard_normal(d)
        smallest = float(
            eigsh(operator, k=1, which="SA", tol=1e-2, v0=start, return_eigenvectors=False)[0]
        )
    if smallest <= 0:
        warnings.warn(
            f"The inner Hessian has an eigenvalue {smallest:.1e} at the start: the inner problem "
            "is not strongly convex, so y*(x) is not well defined. Add an l2 penalty.",
            ConvergenceWarning,
            stacklevel=3,
        )
        return np.inf
    return float(10 * force / smallest)


def minimize_bilevel(
    problem: BilevelProblem,
    method: object = "spaba",
    *,
    lr_inner: ArrayLike = 0.1,
    lr_outer: ArrayLike = 0.1,
    lr_linear: ArrayLike | None = None,
    batch_size: int | str | tuple[int | str, int | str] = "sqrt",
    full_batch: int | None = None,
    max_oracle_calls: float = 1e6,
    max_steps: int | None = None,
    radius: float | str | Callable[[Array], Array] | None = None,
    seeds: int | Sequence[int] = 1,
    x0: ArrayLike | None = None,
    y0: ArrayLike | None = None,
    callback: Callable[[Run], bool | None] | None = None,
    metric: str | Callable[[Array], Array] | None = None,
    target: float | None = None,
    tol: float | None = None,
    record_every: int | None = None,
    on_divergence: str = "raise",
    engine: str = "numpy",
    resume: OptimizeResult | None = None,
    progress: bool | None = None,
    random_state: int = 0,
) -> OptimizeResult:
    """Minimise H(x) = f(x, y*(x)), y*(x) = argmin_y g(x, y), by a stochastic single-loop method.

    Parameters
    ----------
    problem : BilevelProblem
        Five members, see :class:`~icml24.bilevel.BilevelProblem`.
    method : str, mapping or method
        A name ("spaba", "soba", "saba", ... see :data:`~icml24.bilevel.METHODS`), or
        ``{"y": ..., "z": ..., "x": ...}`` with estimators, or a method object.
    lr_inner, lr_outer, lr_linear : float or array, shape (R,)
        Steps of y, x and z; ``lr_linear`` is ``lr_inner`` by default. Arrays give every run its
        own, so that a whole grid is one call.
    batch_size : int, "sqrt", or a pair (inner, outer)
        Mini-batch; "sqrt" is the theory's ceil(sqrt(n)).
    full_batch : int, optional
        For streams: size of the large batch that stands for a full pass (default batch_size^2).
    max_oracle_calls : float
        Stop when every run has used so many calls. One call is one sample of one level at one
        point.
    max_steps : int, optional
        Stop after so many steps (counted from the start, also when resuming).
    radius : float, "auto", callable or None
        Keep z in a Euclidean ball: a radius; ten times ``|grad_y f| / mu``, estimated at the start;
        or your own map of z (..., R, dy). Default: no projection.
    seeds : int or sequence of int
        Number of runs, or the seed of each run. Runs with equal seeds see the same samples.
    x0, y0 : array, shapes (dx,) or (R, dx), and (dy,) or (R, dy), optional
        Start, default ``problem.init()``.
    callback : callable, optional
        Called with the :class:`Run` at every record; return True to stop.
    metric : "gradient" or callable, optional
        Recorded quantity for each run: the exact ``|grad H(x)|^2`` of a problem that has
        ``hypergradient``, or a function from x (R, dx) to (R,).
    target : float, optional
        Stop when every run's metric has been at most this; the calls needed are in
        ``calls_to_target``.
    tol : float, optional
        Stop when the estimated directions of x, y and z all have at most this norm, in every run.
    record_every : int, optional
        Steps between records; by default about a hundred records, evenly in calls.
    on_divergence : {"raise", "ignore"}
        Whether a run that blew up ends everything, or just becomes NaN (useful in a grid).
    engine : {"numpy", "numba"}
        "numba" compiles the whole loop for problems that have ``kernels()`` (L2Selection) and for
        spaba, full, srba, soba and srmba; same samples and same result as "numpy".
    resume : OptimizeResult, optional
        Continue this earlier result: same problem, new budget, identical to never having stopped.
    progress : bool, optional
        Progress bar; by default only in a terminal.
    random_state : int
        Entropy shared by all seeds.

    Returns
    -------
    OptimizeResult
        ``x (R, dx)``, ``y``, ``z``, ``n_oracle (R,)``, ``n_steps``, ``seconds``, ``success``,
        ``message``, ``calls_to_target (R,)``, ``history`` (dict of arrays over records: ``step``,
        ``calls (T, R)``, ``seconds``, ``direction (T, R)``, and ``metric (T, R)``), and ``run``.

    Raises
    ------
    ValueError
        For step sizes that are not positive, batches larger than the data, shapes that disagree,
        or oracles that are not finite at the start.
    BilevelDivergenceError
        If an iterate becomes NaN or infinite.

    Warns
    -----
    ConvergenceWarning
        If z' (hess_yy g) z < 0 was seen: the inner problem is not strongly convex.

    Notes
    -----
    With the default method this is SPABA, section 2 of the paper: PAGE estimators on all three
    directions, one coin, constant steps.

    Examples
    --------
    >>> from icml24.bilevel import DiagonalQuadratic, minimize_bilevel
    >>> problem = DiagonalQuadratic.random(n=64, d=4, spectrum=(0.5, 1.0), random_state=0)
    >>> result = minimize_bilevel(problem, lr_inner=0.5, lr_outer=0.1, max_oracle_calls=2e4)
    >>> bool(abs(result.x[0] - problem.minimizer).max() < 1e-3)
    True
    """
    if resume is not None:
        shared = {id(resume.run.problem): resume.run.problem}  # the data are not copied
        run, chosen = copy.deepcopy((resume.run, resume.method), shared)
        runs = len(run.x)
        history = {key: list(value) for key, value in resume.history.items()}
        hit = resume.calls_to_target.copy()
    else:
        seed_list = list(range(seeds)) if isinstance(seeds, (int, np.integer)) else list(seeds)
        runs = len(seed_list)
        if not runs:
            raise ValueError("seeds must name at least one run.")
        if not (problem.n_inner > 0 and problem.n_outer > 0):
            raise ValueError("The problem has no samples: n_inner and n_outer must be positive.")
        lr = (
            _positive(lr_outer, "lr_outer", runs),
            _positive(lr_inner, "lr_inner", runs),
            _positive(lr_inner if lr_linear is None else lr_linear, "lr_linear", runs),
        )
        start = problem.init()
        pair = batch_size if isinstance(batch_size, tuple) else (batch_size, batch_size)
        unit = int(getattr(problem, "samples_per_index", 1))
        if hasattr(problem, "draw"):
            if pair[0] == "sqrt":
                raise ValueError(
                    "A stream has no number of samples; give batch_size as an integer."
                )
            sizes = (int(pair[0]), int(pair[1]))
        else:
            levels = (problem.n_inner, problem.n_outer)
            sizes = tuple(_batch_size(b, n, unit) for b, n in zip(pair, levels, strict=True))  # type: ignore[assignment]
        chosen = make_method(method)
        run = Run(
            problem,
            _points(x0, start[0], runs, "x0"),
            _points(y0, start[1], runs, "y0"),
            lr,
            sizes,
            full_batch,
            seed_list,
            random_state,
        )
        if not hasattr(problem, "draw"):
            _check_problem(run)
        if callable(radius):
            run.z_map = radius
        elif radius == "auto":
            run.radius = _auto_radius(run)
        elif radius is not None:
            if isinstance(radius, str) or not radius > 0:
                raise ValueError(f"radius must be positive, 'auto', a map or None, got {radius!r}.")
            run.radius = float(radius)
        if engine not in ("numpy", "numba"):
            raise ValueError(f"engine must be 'numpy' or 'numba', got {engine!r}.")
        if engine == "numba":
            from icml24.bilevel.compiled import CompiledLoop

            chosen = CompiledLoop(chosen, run)
        history = {"step": [], "calls": [], "seconds": [], "direction": []}
        hit = np.full(runs, np.inf)
    if on_divergence not in ("raise", "ignore"):
        raise ValueError(f"on_divergence must be 'raise' or 'ignore', got {on_divergence!r}.")
    measure = _metric(problem, metric, target)

    def record() -> bool:
        for name in "yzx":
            value = getattr(run, name)
            if on_divergence == "raise" and not np.isfinite(value).all():
                bad = np.flatnonzero(~np.isfinite(value).all(1)).tolist()
                raise BilevelDivergenceError(
                    f"{name} is no longer finite at step {run.step} in run(s) {bad}; use smaller "
                    "steps (lr_inner below 1/L_g, lr_outer smaller still), or a radius for z."
                )
        moved = [
            np.linalg.norm(new - old, axis=-1) / lr[:, 0]
            for new, old, lr in zip(
                (run.x, run.y, run.z), run.previous, (run.lr_x, run.lr_y, run.lr_z), strict=True
            )
        ]
        history["step"].append(run.step)
        history["calls"].append(run.calls.copy())
        history["seconds"].append(run.seconds)
        history["direction"].append(moved[0])
        done = bool(callback(run)) if callback is not None else False
        if measure is not None:
            values = np.asarray(measure(run.x), dtype=float)
            history.setdefault("metric", []).append(values)
            if target is not None:
                hit[(values <= target) & np.isinf(hit)] = run.calls[
                    (values <= target) & np.isinf(hit)
                ]
                hopeless = ~np.isfinite(values)
                done |= bool((np.isfinite(hit) | hopeless).all())
        if tol is not None and run.step:
            done |= bool((np.max(moved, axis=0) <= tol).all())
        return done

    def horizon() -> tuple[int, float]:  # how far a compiled loop may go before it must return
        steps = CHUNK if max_steps is None else max_steps - run.step
        if record_every is not None:
            return min(steps, record_every - run.step % record_every), float(max_oracle_calls)
        return steps, min(next_record, float(max_oracle_calls))

    message, next_record = "The budget of oracle calls is used up.", 0.0
    total = None if np.isinf(max_oracle_calls) else int(max_oracle_calls)
    bar = tqdm(total=total, unit="call", disable=None if progress is None else not progress)
    with np.errstate(all="ignore"), bar:
        stopped = False
        if resume is None:
            clock = time.perf_counter()
            chosen.start(run)
            run.seconds += time.perf_counter() - clock
            stopped = record()
        next_record = float(run.calls.min())
        while not stopped and run.calls.min() < max_oracle_calls:
            if max_steps is not None and run.step >= max_steps:
                message = "The number of steps is used up."
                break
            clock = time.perf_counter()
            run.previous, run.horizon = (run.x, run.y, run.z), horizon()
            run.step += 1
            chosen.step(run)
            run.seconds += time.perf_counter() - clock
            if record_every is None:
                due = run.calls.min() >= next_record
            else:
                due = run.step % record_every == 0
            if due:
                stopped = record()
                bar.update(int(run.calls.min()) - bar.n)
                next_record = run.calls.min() + max_oracle_calls / 100
        if history["step"][-1] != run.step:
            stopped = record() or stopped
    if stopped:
        message = "Stopped by the callback, the target or the tolerance."
    if run.curvature_is_negative:
        warnings.warn(
            "Negative curvature z' (hess_yy g) z < 0 was seen: the inner problem is not strongly "
            "convex, so y*(x) is not well defined. Add an l2 penalty to the inner loss.",
            ConvergenceWarning,
            stacklevel=2,
        )
    return OptimizeResult(
        x=run.x,
        y=run.y,
        z=run.z,
        n_oracle=run.calls.copy(),
        n_steps=run.step,
        seconds=run.seconds,
        success=all(bool((abs(part) < 1e100).all()) for part in (run.x, run.y, run.z)),
        message=message,
        calls_to_target=hit,
        history={key: np.array(value) for key, value in history.items()},
        run=run,
        method=chosen,
    )


def _metric(
    problem: Any, metric: str | Callable[[Array], Array] | None, target: float | None
) -> Callable[[Array], Array] | None:
    if metric is None:
        if target is not None:
            raise ValueError("target needs a metric: metric='gradient' or a function of x.")
        return None
    if metric == "gradient":
        if not hasattr(problem, "hypergradient"):
            raise ValueError("metric='gradient' needs a problem with hypergradient(x).")
        return lambda x: (problem.hypergradient(x) ** 2).sum(-1)
    if not callable(metric):
        raise ValueError(f"metric must be 'gradient' or a function of x, got {metric!r}.")
    return metric

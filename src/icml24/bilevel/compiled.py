"""The single loop compiled by numba: the same samples and steps as the numpy loop, faster.

A problem takes part by ``kernels(orders, sizes)``. It returns two compiled oracles for one run, and
the data that they take, arranged once for the given blocks: ``inner(data, block, x, y, z, gy, hz,
cz)`` and ``outer(data, block, x, y, fy, fx)`` write averages over one block, or over everything
when ``block`` is -1, into their last arguments.

The package numba is optional. Without it this module can be imported and its functions are plain,
slow Python; only :class:`CompiledLoop` refuses to work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from icml24.bilevel.estimators import PAGE, SARAH, SGD, STORM
from icml24.bilevel.methods import SingleLoop

try:
    from numba import njit

    HAS_NUMBA = True
except ImportError:
    HAS_NUMBA = False

    def njit(**options: Any) -> Callable[[Any], Any]:
        """Leave a function as it is; stands in for numba's decorator."""
        return lambda function: function


__all__ = ["HAS_NUMBA", "CompiledLoop", "l2_inner", "l2_outer"]

Array = np.ndarray


def arrange(X: Array, s: Array, order: Array, size: int) -> tuple[Array, Array, Array]:
    """Lay blocks out feature by feature, so that compiled loops run over contiguous samples.

    Parameters
    ----------
    X, s : ndarray, shapes (n, d) and (n,)
        Features and signs.
    order : ndarray of int, shape (n,)
        The random partition: block k holds ``order[k * size : (k + 1) * size]``.
    size : int
        Samples in a block; the last may be shorter and is padded.

    Returns
    -------
    (blocks, signs, lengths) : ndarrays, shapes (K, d, size), (K, size) and (K,)
    """
    n, d = X.shape
    K = -(-n // size)
    lengths = np.minimum(size, n - size * np.arange(K))
    rows, signs = np.zeros((K * size, d)), np.zeros(K * size)
    rows[:n], signs[:n] = X[order], s[order]
    blocks = np.ascontiguousarray(rows.reshape(K, size, d).swapaxes(1, 2))
    return blocks, signs.reshape(K, size), lengths


@njit(fastmath=True, cache=True, error_model="numpy")
def _scores(block, w, out):  # type: ignore[no-untyped-def]
    """Write block' w into out, four features at a time."""
    d, size = block.shape
    out[:] = 0.0
    whole = d - d % 4
    for j in range(0, whole, 4):
        a, b, c, e = block[j], block[j + 1], block[j + 2], block[j + 3]
        for k in range(size):
            out[k] += a[k] * w[j] + b[k] * w[j + 1] + c[k] * w[j + 2] + e[k] * w[j + 3]
    for j in range(whole, d):
        for k in range(size):
            out[k] += block[j, k] * w[j]


@njit(fastmath=True, cache=True, error_model="numpy")
def _moments(block, weight, out):  # type: ignore[no-untyped-def]
    """Add block weight to out."""
    for j in range(block.shape[0]):
        total = 0.0
        for k in range(block.shape[1]):
            total += block[j, k] * weight[k]
        out[j] += total


@njit(fastmath=True, cache=True, error_model="numpy")
def l2_inner(data, block, x, y, z, gy, hz, cz):  # type: ignore[no-untyped-def]
    """Inner oracles of L2Selection on a block, or on all blocks."""
    blocks, signs, lengths, limits = data  # lowest penalty, highest x
    first, last = (0, len(lengths)) if block < 0 else (block, block + 1)
    slope, curve = np.empty(signs.shape[1]), np.empty(signs.shape[1])
    gy[:] = 0.0
    hz[:] = 0.0
    for i in range(first, last):
        s = signs[i]  # zero for padding, which therefore adds nothing
        _scores(blocks[i], y, slope)
        _scores(blocks[i], z, curve)
        for k in range(s.size):
            wrong = 1.0 / (1.0 + np.exp(s[k] * slope[k]))
            slope[k] = -s[k] * wrong
            curve[k] *= wrong * (1.0 - wrong)
        _moments(blocks[i], slope, gy)
        _moments(blocks[i], curve, hz)
    total = lengths[first:last].sum()
    for j in range(y.size):
        strength = np.exp(min(x[j], limits[1]))
        penalty = strength + limits[0]
        gy[j] = gy[j] / total + penalty * y[j]
        hz[j] = hz[j] / total + penalty * z[j]
        cz[j] = strength * y[j] * z[j]


@njit(fastmath=True, cache=True, error_model="numpy")
def l2_outer(data, block, x, y, fy, fx):  # type: ignore[no-untyped-def]
    """Outer oracles of L2Selection on a block, or on all blocks."""
    blocks, signs, lengths = data
    first, last = (0, len(lengths)) if block < 0 else (block, block + 1)
    slope = np.empty(signs.shape[1])
    fy[:] = 0.0
    fx[:] = 0.0
    for i in range(first, last):
        s = signs[i]
        _scores(blocks[i], y, slope)
        for k in range(s.size):
            slope[k] = -s[k] / (1.0 + np.exp(s[k] * slope[k]))
        _moments(blocks[i], slope, fy)
    total = lengths[first:last].sum()
    for j in range(y.size):
        fy[j] /= total


@njit(cache=True, error_model="numpy")
def _blend(v, new, old, keep):  # type: ignore[no-untyped-def]
    """Set v = new + keep (v - old) in place: SGD, STORM and PAGE for keep = 0, 1 - a and 1."""
    for j in range(v.size):
        v[j] = new[j] + keep * (v[j] - old[j])


@njit(error_model="numpy")
def _steps(  # type: ignore[no-untyped-def]
    inner, outer, inner_data, outer_data, x, y, z, v, lr, radius, keep, probability, period,
    lengths, ids, coins, owner, step, steps, limit, calls, previous,
):  # fmt: skip
    """Take up to ``steps`` steps in every run; return how many were taken."""
    runs, dx = x.shape
    dy = y.shape[1]
    new_y, new_x, old_y, old_x = (
        np.empty((3, dy)),
        np.empty((2, dx)),
        np.zeros((3, dy)),
        np.zeros((2, dx)),
    )
    everything = lengths[0].sum() + lengths[1].sum()
    taken = 0
    while taken < steps:
        for r in range(runs):
            gy, hz, cz, fy, fx = v[0][r], v[1][r], v[2][r], v[3][r], v[4][r]
            norm = 0.0
            for j in range(dy):
                previous[1][r, j], previous[2][r, j] = y[r, j], z[r, j]
                y[r, j] -= lr[1, r] * gy[j]
                z[r, j] -= lr[2, r] * (hz[j] - fy[j])
                norm += z[r, j] ** 2
            norm = np.sqrt(norm)
            if norm > radius:
                for j in range(dy):
                    z[r, j] *= radius / norm
            for j in range(dx):
                previous[0][r, j] = x[r, j]
                x[r, j] -= lr[0, r] * (fx[j] - cz[j])
            u = owner[r]
            full = coins[u, taken] < probability
            if period > 0:
                full = (step + taken + 1) % period == 0
            block, other, count = -1, -1, everything
            if not full:
                block, other = ids[0][u, taken], ids[1][u, taken]
                count = lengths[0][block] + lengths[1][other]
            inner(inner_data, block, x[r], y[r], z[r], new_y[0], new_y[1], new_x[0])
            outer(outer_data, other, x[r], y[r], new_y[2], new_x[1])
            calls[r] += count
            weight = 0.0 if full else keep
            if weight > 0.0:
                xo, yo, zo = previous[0][r], previous[1][r], previous[2][r]
                inner(inner_data, block, xo, yo, zo, old_y[0], old_y[1], old_x[0])
                outer(outer_data, other, xo, yo, old_y[2], old_x[1])
                calls[r] += count
            _blend(gy, new_y[0], old_y[0], weight)
            _blend(hz, new_y[1], old_y[1], weight)
            _blend(fy, new_y[2], old_y[2], weight)
            _blend(cz, new_x[0], old_x[0], weight)
            _blend(fx, new_x[1], old_x[1], weight)
        taken += 1
        if calls.min() >= limit:
            break
    return taken


class CompiledLoop:
    """Wrap a :class:`~icml24.bilevel.SingleLoop` so that many steps are one compiled call."""

    def __init__(self, method: Any, run: Any) -> None:
        if not HAS_NUMBA:
            raise ImportError("engine='numba' needs the package numba: pip install numba.")
        if not hasattr(run.problem, "kernels"):
            raise ValueError(
                f"engine='numba' needs a problem with kernels(), {type(run.problem).__name__} has "
                "none; use engine='numpy'."
            )
        if not isinstance(method, SingleLoop):
            raise ValueError("engine='numba' runs single-loop methods only; use engine='numpy'.")
        y, z, x = (method.estimators[part] for part in "yzx")
        if not (y == z == x and isinstance(y, (PAGE, SARAH, SGD, STORM))):
            raise ValueError(
                "engine='numba' needs the same PAGE, SARAH, SGD or STORM estimator on y, z and x."
            )
        if getattr(y, "decay", 0.0):
            raise ValueError("engine='numba' runs STORM with constant weight only (decay=0).")
        if run.z_map is not None:
            raise ValueError("engine='numba' projects on a ball only; radius must be a number.")
        self.method = method
        self.keep = 0.0 if isinstance(y, SGD) else 1.0 - getattr(y, "a", 0.0)
        default = float(run.full_probability[0])
        self.probability = (y.prob or default) if isinstance(y, PAGE) else 0.0
        self.period = (y.period or max(1, round(1 / default))) if isinstance(y, SARAH) else 0

    def start(self, run: Any) -> None:
        """Start as the wrapped method does."""
        self.method.start(run)
        samplers = [run._sampler[level] for level in ("inner", "outer")]
        self.kernels = run.problem.kernels(
            tuple(sampler.order for sampler in samplers),
            tuple(sampler.size for sampler in samplers),
        )
        self.lengths = tuple(sampler.lengths for sampler in samplers)
        self.lr = np.concatenate([run.lr_x, run.lr_y, run.lr_z], axis=1).T.copy()

    def step(self, run: Any) -> None:
        """Take as many steps as buffers and the driver's horizon allow."""
        run._refill_coins()
        samplers = [run._sampler[level] for level in ("inner", "outer")]
        for sampler in samplers:
            sampler.refill()
        steps, limit = run.horizon
        room = [len(run._coin_buffer[0]) - run._coin_position]
        room += [sampler.buffer.shape[1] - sampler.position for sampler in samplers]
        steps = max(1, min([steps, *room]))
        inner, outer, inner_data, outer_data = self.kernels
        rest = [sampler.buffer[:, sampler.position :] for sampler in samplers]
        x, y, z = run.x.copy(), run.y.copy(), run.z.copy()
        previous = (np.empty_like(x), np.empty_like(y), np.empty_like(z))
        taken = _steps(
            inner, outer, inner_data, outer_data, x, y, z,
            tuple(part.v for part in self.method.bound), self.lr,
            np.inf if run.radius is None else run.radius, self.keep, self.probability, self.period,
            self.lengths,
            tuple(np.ascontiguousarray(part) for part in rest),
            np.ascontiguousarray(run._coin_buffer[:, run._coin_position :]),
            run.owner, run.step - 1, steps, limit, run.calls, previous,
        )  # fmt: skip
        run.x, run.y, run.z, run.previous = x, y, z, previous
        run.step += taken - 1
        run._coin_position += taken
        for sampler in samplers:
            sampler.position += taken

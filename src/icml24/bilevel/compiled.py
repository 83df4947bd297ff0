"""The single loop compiled by numba: the same samples and steps as the numpy loop, faster.

A problem takes part by ``kernels(orders, sizes)``. It returns two compiled oracles for one run, and
the data that they take, arranged once for the given blocks: ``inner(data, block, x, y, z, gy, hz,
cz)`` and ``outer(data, block, x, y, fy, fx)`` write averages over one block, or over everything
when ``block`` is -1, into their last arguments. All arrays have a row for each point: one, or two
when a recursive estimator wants the block at the new and at the previous point. Both points share
one matrix product per block, and exponentials are computed by a loop that vectorises.

The package numba is optional. Without it this module can be imported and its functions are plain,
slow Python; only :class:`CompiledLoop` refuses to work.
"""

from __future__ import annotations

import math
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
C = tuple(1.0 / math.factorial(k) for k in range(14))  # Taylor coefficients of exp


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
    blocks, signs = np.zeros((K, d, size)), np.zeros((K, size))
    for k, length in enumerate(lengths):
        rows = order[k * size : k * size + length]
        blocks[k, :, :length], signs[k, :length] = X[rows].T, s[rows]
    return blocks, signs, lengths


@njit(fastmath=True, cache=True, error_model="numpy")
def _scores(block, W, out):  # type: ignore[no-untyped-def]
    """Write W block into out: one matrix product, or for a single row four features at a time."""
    if len(W) > 1:
        np.dot(W, block, out)
        return
    d, size = block.shape
    w, o = W[0], out[0]
    o[:] = 0.0
    whole = d - d % 4
    for j in range(0, whole, 4):
        a, b, c, e = block[j], block[j + 1], block[j + 2], block[j + 3]
        for k in range(size):
            o[k] += a[k] * w[j] + b[k] * w[j + 1] + c[k] * w[j + 2] + e[k] * w[j + 3]
    for j in range(whole, d):
        for k in range(size):
            o[k] += block[j, k] * w[j]


@njit(fastmath=True, cache=True, error_model="numpy")
def _moments(block, weight, out):  # type: ignore[no-untyped-def]
    """Add weight block' to out: one matrix product, or for few rows four features at a time."""
    if len(weight) > 2:
        out += np.dot(weight, block.T)
        return
    d, size = block.shape
    whole = d - d % 4
    for p in range(len(weight)):
        w, o = weight[p], out[p]
        for j in range(0, whole, 4):
            a, b, c, e = block[j], block[j + 1], block[j + 2], block[j + 3]
            one, two, three, four = 0.0, 0.0, 0.0, 0.0
            for k in range(size):
                one += a[k] * w[k]
                two += b[k] * w[k]
                three += c[k] * w[k]
                four += e[k] * w[k]
            o[j] += one
            o[j + 1] += two
            o[j + 2] += three
            o[j + 3] += four
        for j in range(whole, d):
            one = 0.0
            for k in range(size):
                one += block[j, k] * w[k]
            o[j] += one


@njit(fastmath={"contract"}, cache=True, error_model="numpy")
def _exp(values, bits):  # type: ignore[no-untyped-def]
    """Replace values by their exponentials, correct to rounding; a loop that vectorises.

    exp(t) = 2^n exp(r) with |r| <= log(2) / 2. Adding and subtracting 1.5 * 2^52 rounds t / log(2)
    to the whole number n, log(2) comes in two parts so that r is exact, exp(r) is its Taylor
    polynomial of degree 13, and 2^n is written into the exponent bits of a number.
    """
    for i in range(len(values)):
        row, code = values[i], bits[i]
        for k in range(row.size):
            t = min(max(row[k], -708.0), 708.0)
            n = (t * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0
            r = t - n * 0.6931471803691238 - n * 1.9082149292705877e-10
            q = (((C[13] * r + C[12]) * r + C[11]) * r + C[10]) * r + C[9]
            q = (((q * r + C[8]) * r + C[7]) * r + C[6]) * r + C[5]
            q = (((q * r + C[4]) * r + C[3]) * r + C[2]) * r + C[1]
            row[k] = q * r + C[0]
            code[k] = (np.int64(np.int32(n)) + 1023) << 52
        power = code.view(np.float64)
        for k in range(row.size):
            row[k] *= power[k]


@njit(fastmath=True, cache=True, error_model="numpy")
def l2_inner(data, block, x, y, z, gy, hz, cz):  # type: ignore[no-untyped-def]
    """Inner oracles of L2Selection on a block, or on all blocks, at one or two points."""
    blocks, signs, lengths, limits = data  # lowest penalty, highest x
    first, last = (0, len(lengths)) if block < 0 else (block, block + 1)
    points, d = y.shape
    size = signs.shape[1]
    both, sums = np.empty((2 * points, d)), np.zeros((2 * points, d))
    both[:points], both[points:] = y, z
    scores, wrong = np.empty((2 * points, size)), np.empty((points, size))
    bits = np.empty((points, max(size, d)), np.int64)
    for i in range(first, last):
        s = signs[i]  # zero for padding, whose rows are zero too
        _scores(blocks[i], both, scores)
        for p in range(points):
            for k in range(size):
                wrong[p, k] = s[k] * scores[p, k]
        _exp(wrong, bits)
        for p in range(points):
            for k in range(size):
                w = 1.0 / (1.0 + wrong[p, k])
                scores[p, k] = -s[k] * w
                scores[points + p, k] *= w * (1.0 - w)
        _moments(blocks[i], scores, sums)
    total = lengths[first:last].sum()
    for p in range(points):
        for j in range(d):
            cz[p, j] = min(x[p, j], limits[1])
    _exp(cz, bits)
    for p in range(points):
        for j in range(d):
            strength = cz[p, j]
            penalty = strength + limits[0]
            gy[p, j] = sums[p, j] / total + penalty * y[p, j]
            hz[p, j] = sums[points + p, j] / total + penalty * z[p, j]
            cz[p, j] = strength * y[p, j] * z[p, j]


@njit(fastmath=True, cache=True, error_model="numpy")
def l2_outer(data, block, x, y, fy, fx):  # type: ignore[no-untyped-def]
    """Outer oracles of L2Selection on a block, or on all blocks, at one or two points."""
    blocks, signs, lengths = data
    first, last = (0, len(lengths)) if block < 0 else (block, block + 1)
    points, size = len(y), signs.shape[1]
    scores, bits = np.empty((points, size)), np.empty((points, size), np.int64)
    fy[:] = 0.0
    fx[:] = 0.0
    for i in range(first, last):
        s = signs[i]
        _scores(blocks[i], y, scores)
        for p in range(points):
            for k in range(size):
                scores[p, k] *= s[k]
        _exp(scores, bits)
        for p in range(points):
            for k in range(size):
                scores[p, k] = -s[k] / (1.0 + scores[p, k])
        _moments(blocks[i], scores, fy)
    total = lengths[first:last].sum()
    for p in range(points):
        for j in range(y.shape[1]):
            fy[p, j] /= total


@njit(cache=True, error_model="numpy")
def _blend(v, values, keep):  # type: ignore[no-untyped-def]
    """Set v = new + keep (v - old) in place: SGD, STORM and PAGE for keep = 0, 1 - a and 1."""
    for j in range(v.size):
        v[j] = values[0, j] + keep * (v[j] - values[1, j])


@njit(error_model="numpy")
def _steps(  # type: ignore[no-untyped-def]
    inner, outer, inner_data, outer_data, x, y, z, v, lr, radius, keep, probability, period,
    lengths, ids, coins, owner, step, steps, limit, calls, previous,
):  # fmt: skip
    """Take up to ``steps`` steps in every run; return how many were taken."""
    runs, dx = x.shape
    dy = y.shape[1]
    here = (np.empty((2, dx)), np.empty((2, dy)), np.empty((2, dy)))  # the new point, the old one
    ngy, nhz, nfy = np.zeros((2, dy)), np.zeros((2, dy)), np.zeros((2, dy))
    ncz, nfx = np.zeros((2, dx)), np.zeros((2, dx))
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
            weight = 0.0 if full else keep
            points = 2 if weight > 0.0 else 1
            for p in range(points):
                here[0][p] = previous[0][r] if p else x[r]
                here[1][p] = previous[1][r] if p else y[r]
                here[2][p] = previous[2][r] if p else z[r]
            xs, ys, zs = here[0][:points], here[1][:points], here[2][:points]
            inner(inner_data, block, xs, ys, zs, ngy[:points], nhz[:points], ncz[:points])
            outer(outer_data, other, xs, ys, nfy[:points], nfx[:points])
            calls[r] += points * count
            _blend(gy, ngy, weight)
            _blend(hz, nhz, weight)
            _blend(fy, nfy, weight)
            _blend(cz, ncz, weight)
            _blend(fx, nfx, weight)
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

"""What a user would pick instead, run beside SPABA on the same problem."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from icml24.bilevel.problems import L2Selection

__all__ = [
    "Found",
    "jax_single_loop",
    "lbfgs_hypergradient",
    "random_search",
    "single_penalty",
    "unrolled_gradient",
]

Array = np.ndarray


@dataclass(frozen=True)
class Found:
    """A peer's answer.

    Attributes
    ----------
    x : ndarray
        Log-strengths.
    value : float
        H(x), the validation loss of the exactly solved inner problem.
    seconds : float
        Wall-clock time, evaluations included.
    history : ndarray, shape (2, T)
        Seconds and best value so far.
    """

    x: Array
    value: float
    seconds: float
    history: Array


def lbfgs_hypergradient(problem: L2Selection, x0: Array | None = None, maxiter: int = 300) -> Found:
    """L-BFGS on the exact hypergradient, an inner Newton solve for each evaluation (like HOAG).

    The strongest deterministic peer for a few dozen parameters; each evaluation costs several full
    passes and a d x d solve.
    """
    start = time.perf_counter()
    history: list[tuple[float, float]] = []

    def both(x: Array) -> tuple[float, Array]:
        y, z = problem.solution(x)
        value = float(problem.outer_loss(x, y))
        best = min(value, history[-1][1] if history else np.inf)
        history.append((time.perf_counter() - start, best))
        return value, -problem.strength(x) * y * z

    x0 = problem.init()[0] if x0 is None else x0
    result = minimize(
        both, x0, jac=True, method="L-BFGS-B", bounds=[(-20.0, 10.0)] * len(x0),
        options={"maxiter": maxiter, "ftol": 1e-15, "gtol": 1e-9},
    )  # fmt: skip
    return Found(result.x, float(result.fun), time.perf_counter() - start, np.array(history).T)


def single_penalty(problem: L2Selection, strengths: Array | None = None) -> Found:
    """One penalty for all features, the best of a grid on validation data (the usual practice)."""
    start = time.perf_counter()
    strengths = np.geomspace(1e-6, 1.0, 13) if strengths is None else strengths
    d = problem.X.shape[1]
    history: list[tuple[float, float]] = []
    best: Array = np.zeros(d)
    value = np.inf
    for strength in strengths:
        model = LogisticRegression(
            C=1 / (problem.n_inner * (strength + problem.floor)), fit_intercept=False, tol=1e-8,
            max_iter=1000,
        )  # fmt: skip
        model.fit(problem.X, problem.s)
        trial = float(problem.outer_loss(best, model.coef_[0]))
        if trial < value:
            best, value = np.full(d, float(np.log(strength))), trial
        history.append((time.perf_counter() - start, value))
    return Found(best, value, time.perf_counter() - start, np.array(history).T)


def random_search(problem: L2Selection, trials: int = 50, random_state: int = 0) -> Found:
    """Try random log-strengths, uniform in [-12, 0]: gradient-free tuning in d dimensions."""
    start, rng = time.perf_counter(), np.random.default_rng(random_state)
    best: Array = problem.init()[0]
    value = np.inf
    history: list[tuple[float, float]] = []
    for _ in range(trials):
        x = rng.uniform(-12, 0, size=(problem.X.shape[1],))
        trial = float(problem.value(x))
        if trial < value:
            best, value = x, trial
        history.append((time.perf_counter() - start, value))
    return Found(best, value, time.perf_counter() - start, np.array(history).T)


def unrolled_gradient(problem: L2Selection, x: Array, steps: int, lr: float) -> Array:
    """Gradient of the validation loss through ``steps`` gradient steps on y, by torch autograd.

    What MAML-style libraries do; memory and time grow with the steps, and the answer is biased
    until y has converged. Costs ``steps`` passes forward and backward: 2 n steps + 2 m calls.
    """
    X, s, X_val, s_val = (
        torch.as_tensor(part) for part in (problem.X, problem.s, problem.X_val, problem.s_val)
    )
    outer = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    w = torch.zeros(X.shape[1], dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        fit = torch.nn.functional.softplus(-s * (X @ w)).mean()
        loss = fit + 0.5 * ((outer.exp() + problem.floor) * w**2).sum()
        (gradient,) = torch.autograd.grad(loss, w, create_graph=True)
        w = w - lr * gradient
    loss = torch.nn.functional.softplus(-s_val * (X_val @ w)).mean()
    return torch.autograd.grad(loss, outer)[0].numpy()


def jax_single_loop(
    problem: L2Selection, lr_inner: float, lr_outer: float, steps: int, batch_size: int,
    prob_full: float, seed: int = 0, period: int | None = None,
) -> Callable[[], tuple[Array, float, int]]:  # fmt: skip
    """SPABA or (with ``period``) SRBA as a jitted ``lax.scan``, the style of the public benchmark.

    Written for this comparison: one vjp of grad_y g gives both products, the two points are two
    evaluations, a full pass is a ``lax.cond``. Needs the package jax.

    Returns
    -------
    callable
        The compiled loop. Every call of it runs from the start and returns the final log-strengths,
        and the seconds and oracle calls of its steps: compilation, the transfer of the data and
        the first full pass lie outside.
    """
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(True):
        data = [jnp.asarray(a) for a in (problem.X, problem.s, problem.X_val, problem.s_val)]
        X, s, X_val, s_val = data
        n, m = problem.n_inner, problem.n_outer

        def inner(y: Any, x: Any, A: Any, b: Any) -> Any:
            fit = jnp.logaddexp(0.0, -b * (A @ y)).mean()
            return fit + 0.5 * ((jnp.exp(x) + problem.floor) * y**2).sum()

        def outer(y: Any, A: Any, b: Any) -> Any:
            return jnp.logaddexp(0.0, -b * (A @ y)).mean()

        def directions(x: Any, y: Any, z: Any, one: Any, two: Any) -> Any:
            gy, pull = jax.vjp(lambda y, x: jax.grad(inner)(y, x, *one), y, x)
            hz, cz = pull(z)
            return -cz, gy, hz - jax.grad(outer)(y, *two)

        def piece(A: Any, b: Any, start: Any) -> Any:
            rows = jax.lax.dynamic_slice(A, (start, 0), (batch_size, A.shape[1]))
            return rows, jax.lax.dynamic_slice(b, (start,), (batch_size,))

        def one_step(state: Any, inputs: Any) -> Any:
            x, y, z, vx, vy, vz = state
            coin, k, i, j = inputs
            new = x - lr_outer * vx, y - lr_inner * vy, z - lr_inner * vz

            def everything(_: Any) -> Any:
                return directions(*new, (X, s), (X_val, s_val))

            def recursive(_: Any) -> Any:
                one, two = piece(X, s, i), piece(X_val, s_val, j)
                fresh, stale = directions(*new, one, two), directions(x, y, z, one, two)
                return tuple(v + a - b for v, a, b in zip((vx, vy, vz), fresh, stale, strict=True))

            full = coin < prob_full if period is None else k % period == 0
            return (*new, *jax.lax.cond(full, everything, recursive, None)), full

        rng = np.random.default_rng(seed)
        inputs = (
            jnp.asarray(rng.random(steps)),
            jnp.arange(1, steps + 1),
            jnp.asarray(rng.integers(n // batch_size, size=steps) * batch_size),
            jnp.asarray(rng.integers(m // batch_size, size=steps) * batch_size),
        )
        x0, y0 = (jnp.asarray(part) for part in problem.init())
        z0 = jnp.zeros_like(y0)
        start = (x0, y0, z0, *directions(x0, y0, z0, (X, s), (X_val, s_val)))
        loop = jax.jit(lambda start, inputs: jax.lax.scan(one_step, start, inputs))
        loop = loop.lower(start, inputs).compile()
        _, full = loop(start, inputs)
        passes = int(np.asarray(full).sum())
        calls = passes * (n + m) + (steps - passes) * 4 * batch_size

    def timed() -> tuple[Array, float, int]:
        clock = time.perf_counter()
        final, _ = jax.block_until_ready(loop(start, inputs))
        return np.asarray(final[0]), time.perf_counter() - clock, calls

    return timed

import numpy as np
import pytest

from icml24.bilevel import DataHyperCleaning, DiagonalQuadratic, L2Selection, QuadraticBilevel


def make_problem(name):
    rng = np.random.default_rng(3)
    if name == "diagonal":
        return DiagonalQuadratic.random(n=23, d=3, m=17, spectrum=(0.2, 1.0), random_state=1)
    if name == "dense":
        return QuadraticBilevel.random(n=13, m=11, dx=3, dy=4, random_state=2)
    X, X_val = rng.standard_normal((31, 4)) / 2, rng.standard_normal((19, 4)) / 2
    if name == "penalties":
        labels = X[:, 0] + 0.3 * rng.standard_normal(31) > 0
        return L2Selection(X, labels, X_val, X_val[:, 0] > 0)
    y, y_val = rng.integers(0, 3, 31), rng.integers(0, 3, 19)
    return DataHyperCleaning(X, y, X_val, y_val, l2=0.1)


PROBLEMS = ("diagonal", "dense", "penalties", "cleaning")


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return make_problem(request.param)


def evaluate(problem, x, y, z, inner=None, outer=None):
    """Five vectors for one run, whatever the problem's own convention."""
    if getattr(problem, "batched", False):

        def row(idx):
            return None if idx is None else np.asarray(idx)[None]

        parts = problem.inner(x[None], y[None], z[None], row(inner))
        parts += problem.outer(x[None], y[None], row(outer))
        return [part[0] for part in parts]
    return [*problem.inner(x, y, z, inner), *problem.outer(x, y, outer)]


def random_point(problem, seed=0):
    rng = np.random.default_rng(seed)
    x0, y0 = problem.init()
    x = x0 + 0.3 * rng.standard_normal(x0.size)
    return x, rng.standard_normal(y0.size), rng.standard_normal(y0.size)

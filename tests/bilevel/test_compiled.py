"""The compiled loop against the numpy loop; without numba the same code runs as plain Python."""

import numpy as np
import pytest

from icml24.bilevel import STORM, L2Selection, compiled, minimize_bilevel

from .conftest import evaluate, make_problem, random_point

HAS_NUMBA = compiled.HAS_NUMBA
BUDGET = 2e4 if HAS_NUMBA else 3e3


@pytest.fixture(autouse=True)
def allow_plain_python(monkeypatch):
    monkeypatch.setattr(compiled, "HAS_NUMBA", True)


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((96, 5)) / 2
    y = X[:, 0] > 0
    return L2Selection(X[:64], y[:64], X[64:], y[64:])


@pytest.mark.parametrize("method", ["spaba", "srba", "soba", "srmba", "full"])
@pytest.mark.parametrize(("radius", "size"), [(None, 8), (0.05, 7)])  # 7 leaves a short block
def test_compiled_and_numpy_loops_agree(problem, method, radius, size):
    options = {
        "lr_inner": 0.5, "lr_outer": [0.5, 1.0, 2.0], "batch_size": size, "seeds": 3,
        "max_oracle_calls": BUDGET, "record_every": 7, "radius": radius, "progress": False,
    }  # fmt: skip
    slow = minimize_bilevel(problem, method, **options)
    fast = minimize_bilevel(problem, method, engine="numba", **options)
    np.testing.assert_allclose(fast.x, slow.x, atol=1e-10)
    assert fast.n_oracle.tolist() == slow.n_oracle.tolist() and fast.n_steps == slow.n_steps
    assert fast.history["step"].tolist() == slow.history["step"].tolist()
    np.testing.assert_allclose(fast.history["direction"], slow.history["direction"], atol=1e-8)


def test_compiled_kernels_are_the_oracles(problem):
    rng = np.random.default_rng(1)
    orders = rng.permutation(64), rng.permutation(32)
    inner, outer, data, data_val = problem.kernels(orders, (7, 5))  # both leave a short block
    points = [random_point(problem, seed) for seed in (0, 1)]
    x, y, z = (np.stack(parts) for parts in zip(*points, strict=True))
    values = [np.empty((2, 5)) for _ in range(5)]
    blocks = [(0, orders[0][:7]), (9, orders[0][63:]), (-1, None)]
    others = [(1, orders[1][5:10]), (6, orders[1][30:]), (-1, None)]
    for (block, rows), (other, rows_out) in zip(blocks, others, strict=True):
        wanted = [evaluate(problem, *point, rows, rows_out) for point in points]
        for count in (2, 1):  # both points at once, or one
            part = slice(count)
            inner(data, block, x[part], y[part], z[part], *(v[part] for v in values[:3]))
            outer(data_val, other, x[part], y[part], *(v[part] for v in values[3:]))
            for p in range(count):
                for a, b in zip(values, wanted[p], strict=True):
                    np.testing.assert_allclose(a[p], b, atol=1e-14)


def test_vectorised_exponential():
    t = np.r_[np.linspace(-700, 700, 9999), 0.0, -1e4, 1e-300][None]
    values = t.copy()
    compiled._exp(values, np.empty(t.shape, dtype=np.int64))
    np.testing.assert_allclose(values[0, :-2], np.exp(t[0, :-2]), rtol=5e-16)
    assert 0 < values[0, -2] < 1e-300 and values[0, -1] == 1.0


def test_compiled_loop_resumes(problem):
    options = {"lr_inner": 0.5, "lr_outer": 1.0, "batch_size": 8, "progress": False}
    whole = minimize_bilevel(
        problem, engine="numba", max_steps=700, max_oracle_calls=1e9, **options
    )
    half = minimize_bilevel(problem, engine="numba", max_steps=300, max_oracle_calls=1e9, **options)
    rest = minimize_bilevel(
        problem, max_steps=700, max_oracle_calls=1e9, resume=half, progress=False
    )
    np.testing.assert_array_equal(rest.x, whole.x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "saba"}, "PAGE, SARAH, SGD or STORM"),
        ({"method": "amigo"}, "single-loop methods only"),
        ({"method": dict.fromkeys("yzx", STORM(0.1, decay=0.5))}, "decay=0"),
        ({"radius": np.tanh}, "ball only"),
    ],
)
def test_what_cannot_be_compiled_is_named(problem, options, message):
    with pytest.raises(ValueError, match=message):
        minimize_bilevel(problem, engine="numba", progress=False, **options)


def test_problems_without_kernels_are_refused():
    with pytest.raises(ValueError, match="kernels"):
        minimize_bilevel(make_problem("cleaning"), engine="numba", progress=False)


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed: the loop is not compiled")
def test_the_loop_is_compiled(problem):
    minimize_bilevel(problem, engine="numba", batch_size=8, max_steps=3, progress=False)
    assert compiled._steps.signatures and compiled.l2_inner.signatures


def test_a_missing_numba_is_named(problem, monkeypatch):
    monkeypatch.setattr(compiled, "HAS_NUMBA", False)
    with pytest.raises(ImportError, match="pip install numba"):
        minimize_bilevel(problem, engine="numba", max_steps=1, progress=False)
    assert minimize_bilevel(problem, max_steps=1, progress=False).n_steps == 1

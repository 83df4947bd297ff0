import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logsumexp

from icml24.bilevel import (
    BilevelProblem,
    DataHyperCleaning,
    DiagonalQuadratic,
    L2Selection,
    PluggedIn,
    QuadraticBilevel,
    StreamingQuadratic,
    exact_hypergradient,
)

from .conftest import evaluate, make_problem, random_point


def inner_loss(problem, x, y):
    """g on all samples, written anew from the definitions."""
    if isinstance(problem, DiagonalQuadratic):
        a, c, e = problem._mean_inner
        return (0.5 * a * y**2 - y * (c * x + e)).sum()
    if isinstance(problem, QuadraticBilevel):
        values = [
            0.5 * y @ A @ y - y @ (C @ x + e)
            for A, C, e in zip(problem.A, problem.C, problem.e, strict=True)
        ]
        return np.mean(values)
    if isinstance(problem, L2Selection):
        fit = np.mean(
            [np.log1p(np.exp(-s * r @ y)) for r, s in zip(problem.X, problem.s, strict=True)]
        )
        return fit + 0.5 * ((np.exp(x) + problem.floor) * y**2).sum()
    W = y.reshape(problem.shape)
    losses = [
        logsumexp(r @ W) - (t * (r @ W)).sum() for r, t in zip(problem.X, problem.T, strict=True)
    ]
    return np.mean(expit(x) * losses) + 0.5 * problem.l2 * (y**2).sum()


def difference(function, point, step=1e-5):
    out = np.zeros(point.size)
    for j in range(point.size):
        e = np.zeros(point.size)
        e[j] = step
        out[j] = (function(point + e) - function(point - e)) / (2 * step)
    return out


def test_all_problems_satisfy_the_protocol(problem):
    assert isinstance(problem, BilevelProblem)


def test_inner_oracles_are_derivatives_of_g(problem):
    x, y, z = random_point(problem)
    gy, hz, cz, *_ = evaluate(problem, x, y, z)
    np.testing.assert_allclose(gy, difference(lambda v: inner_loss(problem, x, v), y), atol=1e-8)
    slope = lambda u, v: evaluate(problem, u, v, z)[0]  # noqa: E731
    along = (slope(x, y + 1e-6 * z) - slope(x, y - 1e-6 * z)) / 2e-6
    np.testing.assert_allclose(hz, along, atol=1e-7)
    cross = difference(lambda u: slope(u, y) @ z, x)
    np.testing.assert_allclose(cz, cross, atol=1e-8)


def test_outer_oracles_are_derivatives_of_f(problem):
    x, y, z = random_point(problem)
    *_, fy, fx = evaluate(problem, x, y, z)
    np.testing.assert_allclose(
        fy, difference(lambda v: float(problem.outer_loss(x, v)), y), atol=1e-7
    )
    np.testing.assert_allclose(
        fx, difference(lambda u: float(problem.outer_loss(u, y)), x), atol=1e-7
    )


def test_inner_grad_x_is_the_derivative_of_g(problem):
    x, y, _ = random_point(problem)
    rows = (x[None], y[None]) if getattr(problem, "batched", False) else (x, y)
    value = np.atleast_2d(problem.inner_grad_x(*rows, None))[0]
    np.testing.assert_allclose(value, difference(lambda u: inner_loss(problem, u, y), x), atol=1e-8)


@given(size=st.integers(1, 9), seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("name", ["diagonal", "dense", "penalties", "cleaning"])
def test_blocks_average_to_the_full_oracle(name, size, seed):
    problem = make_problem(name)
    point = random_point(problem, seed)
    order = np.random.default_rng(seed).permutation(problem.n_inner)
    order_out = np.random.default_rng(seed + 1).permutation(problem.n_outer)
    full = evaluate(problem, *point)
    inner = [order[k : k + size] for k in range(0, problem.n_inner, size)]
    outer = [order_out[k : k + size] for k in range(0, problem.n_outer, size)]
    first = [evaluate(problem, *point, block, None)[:3] for block in inner]
    second = [evaluate(problem, *point, None, block)[3:] for block in outer]
    for k in range(5):
        values, blocks, n = (
            ([v[k] for v in first], inner, problem.n_inner)
            if k < 3
            else ([v[k - 3] for v in second], outer, problem.n_outer)
        )
        mean = sum(len(b) / n * v for b, v in zip(blocks, values, strict=True))
        np.testing.assert_allclose(mean, full[k], atol=1e-12)


@pytest.mark.parametrize("name", ["diagonal", "penalties", "cleaning"])
def test_many_points_and_runs_at_once_equal_one_at_a_time(name):
    problem = make_problem(name)
    rng = np.random.default_rng(0)
    dx, dy = (part.size for part in problem.init())
    x = rng.standard_normal((2, 3, dx))
    y, z = rng.standard_normal((2, 2, 3, dy))
    idx = np.stack([rng.permutation(problem.n_inner)[:5] for _ in range(3)])
    out = np.stack([rng.permutation(problem.n_outer)[:5] for _ in range(3)])
    together = problem.inner(x, y, z, idx) + problem.outer(x, y, out)
    for point in range(2):
        for run in range(3):
            alone = evaluate(
                problem, x[point, run], y[point, run], z[point, run], idx[run], out[run]
            )
            for a, b in zip(together, alone, strict=True):
                np.testing.assert_allclose(a[point, run], b, atol=1e-14)


def test_hypergradient_by_finite_differences_of_H():
    problem = make_problem("dense")
    H = lambda x: float(problem.outer_loss(x, problem.solution(x)[0]))  # noqa: E731
    x = random_point(problem)[0]
    assert abs(problem.hypergradient(x) - difference(H, x, 1e-4)).max() < 1e-9
    problem = make_problem("diagonal")
    x = random_point(problem)[0]
    H = lambda x: float(problem.outer_loss(x, problem.solution(x)[0]))  # noqa: E731
    assert abs(problem.hypergradient(x) - difference(H, x, 1e-4)).max() < 1e-9


def test_penalty_hypergradient_by_finite_differences_of_H():
    problem = make_problem("penalties")
    x = random_point(problem)[0]
    np.testing.assert_allclose(
        problem.hypergradient(x), difference(lambda u: float(problem.value(u)), x), rtol=1e-5
    )


def test_generic_hypergradient_is_implicit_differentiation_by_a_dense_solve(problem):
    x = random_point(problem)[0]
    gradient, y, z = exact_hypergradient(problem, x)
    gy, _, _, fy, fx = evaluate(problem, x, y, z)
    hessian = np.stack([evaluate(problem, x, y, e)[1] for e in np.eye(y.size)])
    z_dense = np.linalg.solve(hessian, fy)
    assert np.linalg.norm(gy) < 1e-9
    np.testing.assert_allclose(z, z_dense, atol=1e-8)
    np.testing.assert_allclose(gradient, fx - evaluate(problem, x, y, z_dense)[2], atol=1e-8)
    if hasattr(problem, "hypergradient"):
        np.testing.assert_allclose(gradient, problem.hypergradient(x), atol=1e-8)


def test_direction_x_at_the_solutions_is_the_hypergradient_and_linear_in_z():
    problem = make_problem("dense")
    x, _, away = random_point(problem)
    y, z = problem.solution(x)
    errors = []
    for scale in (0.0, 1.0, 2.0):
        *_, cz, _, fx = evaluate(problem, x, y, z + scale * away)
        errors.append(np.linalg.norm(fx - cz - problem.hypergradient(x)))
    assert errors[0] < 1e-13
    assert errors[2] == pytest.approx(2 * errors[1])


def test_one_dimensional_case_by_hand():
    # g = y^2 - y (3 x + 1), f = (y - 2)^2 / 2 = y^2/2 - 2 y + 2:  a=2, c=3, e=1, p=1, q=2
    problem = DiagonalQuadratic([[2.0]], [[3.0]], [[1.0]], [[1.0]], [[2.0]], [1.0])
    y, z = problem.solution(np.array([1.0]))
    assert y[0] == 2.0  # (3 + 1) / 2
    assert z[0] == 0.0  # (y - 2) / 2
    assert problem.hypergradient(np.array([2.0]))[0] == pytest.approx(3 * (3.5 - 2) / 2)
    assert problem.minimizer[0] == pytest.approx(1.0)


def test_grouping_keeps_the_problem_and_counts_its_samples():
    problem = DiagonalQuadratic.random(64, 3, random_state=0)
    grouped = problem.grouped(8)
    x = np.ones(3)
    np.testing.assert_allclose(grouped.hypergradient(x), problem.hypergradient(x), atol=1e-14)
    assert (grouped.n_inner, grouped.samples_per_index) == (8, 8)
    assert grouped.grouped(2).samples_per_index == 16
    with pytest.raises(ValueError, match="must divide"):
        problem.grouped(7)


def test_spectrum_gives_equal_energy_to_each_eigendirection():
    problem = DiagonalQuadratic.random(1, 8, spectrum=(1e-3, 1.0), noise=0.0)
    a, c, _ = problem._mean_inner
    eigenvalues = c**2 / a**2
    energy = eigenvalues * (problem.init()[0] - problem.minimizer) ** 2
    np.testing.assert_allclose(energy, 1 / 8)
    np.testing.assert_allclose(eigenvalues, np.geomspace(1e-3, 1, 8))


def test_streaming_batches_are_unbiased_with_variance_one_over_size():
    problem = StreamingQuadratic(d=2, noise=1.0, curvature_noise=0.2)
    rng = np.random.default_rng(0)
    for level, mean in (("inner", problem._mean_inner), ("outer", problem._mean_outer)):
        small = problem.draw(level, rng, 4, 20_000)
        assert abs(small.mean(0) - mean).max() < 5 * 0.5 / np.sqrt(20_000)
        large = problem.draw(level, rng, 16, 20_000)
        np.testing.assert_allclose(small.var(0) / large.var(0), 4.0, rtol=0.1)


def test_plugged_in_problem_has_the_exact_gradient_and_leaves_y_and_z():
    problem = make_problem("diagonal")
    control = PluggedIn(problem)
    x, y, z = (part[None] for part in random_point(problem))
    gy, hz, cz = control.inner(x, y, z, None)
    fy, fx = control.outer(x, y, None)
    assert not gy.any() and not hz.any() and not fy.any()
    np.testing.assert_allclose((fx - cz)[0], problem.hypergradient(x[0]))


def test_predictions_and_shapes_of_hyper_cleaning():
    problem = make_problem("cleaning")
    y = np.zeros(problem.init()[1].size)
    assert set(problem.predict(y, problem.X)) <= set(problem.classes)
    x = np.full(problem.n_inner, -50.0)  # all weights vanish: only the ridge remains
    gy = evaluate(problem, x, np.ones_like(y), y)[0]
    np.testing.assert_allclose(gy, problem.l2, atol=1e-12)


def test_strengths_end_at_the_ceiling():
    free = make_problem("penalties")
    capped = L2Selection(
        free.X, free.s, free.X_val, free.s_val, floor=free.floor, ceiling=np.exp(1.5)
    )
    below, edge, above = np.full((3, 4), [[1.0], [1.5], [4.0]])
    np.testing.assert_array_equal(capped.solution(below)[0], free.solution(below)[0])
    np.testing.assert_array_equal(capped.strength(above), np.exp(1.5))
    for mine, theirs in zip(
        capped.solution(above) + capped.inner(above[None], below[None], below[None], None),
        free.solution(edge) + free.inner(edge[None], below[None], below[None], None),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: L2Selection(np.ones((3, 2)), [0, 1], np.ones((2, 2)), [0, 1]),
            "one label per row",
        ),
        (lambda: L2Selection(np.ones((3, 2)), [0, 1, 2], np.ones((2, 2)), [0, 1]), "two classes"),
        (lambda: L2Selection(np.ones((2, 2)), [0, 1], np.ones((2, 3)), [0, 1]), "must agree"),
        (lambda: L2Selection(np.full((2, 2), np.nan), [0, 1], np.ones((2, 2)), [0, 1]), "NaN"),
        (lambda: L2Selection(np.ones((2, 2)), [0, 1], np.ones((2, 2)), [0, 1], floor=0), "floor"),
        (lambda: L2Selection(np.ones((2, 2)), [0, 1], np.ones((2, 2)), [0, 1], ceiling=0), "ceil"),
        (lambda: L2Selection(np.ones((0, 2)), [], np.ones((2, 2)), [0, 1]), "non-empty"),
        (lambda: DataHyperCleaning(np.ones((2, 2)), [0, 1], np.ones((1, 2)), [0], l2=0), "l2"),
        (lambda: DataHyperCleaning(np.ones((2, 2)), [0, 0], np.ones((1, 2)), [0]), "two classes"),
        (lambda: DataHyperCleaning(np.ones((2, 2)), [0, 1], np.ones((1, 3)), [0]), "must agree"),
        (
            lambda: DiagonalQuadratic([[-1.0]], [[1.0]], [[0.0]], [[1.0]], [[0.0]], [0.0]),
            "positive",
        ),
        (
            lambda: DiagonalQuadratic([[1.0]], [[1.0, 2.0]], [[0.0]], [[1.0]], [[0.0]], [0.0]),
            "shape",
        ),
        (
            lambda: DiagonalQuadratic([[1.0]], [[1.0]], [[0.0]], [[1.0]], [[0.0]], [0.0, 1.0]),
            "agree",
        ),
        (lambda: DiagonalQuadratic.random(0), "at least 1"),
    ],
)
def test_bad_problems_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_dense_problems_are_named():
    good = make_problem("dense")
    parts = {k: getattr(good, k) for k in "ACePts"}
    with pytest.raises(ValueError, match="do not agree"):
        QuadraticBilevel(**{**parts, "e": good.e[:, :1]})
    with pytest.raises(ValueError, match="t must be"):
        QuadraticBilevel(**{**parts, "s": good.s[:2]})
    with pytest.raises(ValueError, match="positive definite"):
        QuadraticBilevel(**{**parts, "A": -good.A})


def test_exact_hypergradient_refuses_a_concave_inner_problem():
    class Concave:
        n_inner = n_outer = 1

        def inner(self, x, y, z, idx):
            return -y + x, -z, z

        def outer(self, x, y, idx):
            return y, np.zeros_like(x)

        def init(self):
            return np.ones(2), np.ones(2)

    with pytest.raises(RuntimeError, match="not strongly convex"):
        exact_hypergradient(Concave(), np.ones(2) * 3)

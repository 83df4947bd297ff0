import numpy as np
import pytest

from icml24.bilevel import (
    F2SA,
    METHODS,
    MRBO,
    TTSA,
    VRBO,
    AmIGO,
    DiagonalQuadratic,
    PluggedIn,
    QuadraticBilevel,
    StocBiO,
    minimize_bilevel,
)

from .conftest import make_problem


def full_batch(problem, method, steps, **options):
    """Run with batches of everything, so that nothing is random."""
    options = {"lr_inner": 0.3, "lr_outer": 0.1, **options}
    return minimize_bilevel(
        problem, method, batch_size=(problem.n_inner, problem.n_outer), max_steps=steps,
        max_oracle_calls=np.inf, progress=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"ttsa"}))
def test_every_method_improves_on_the_start_under_noise(name):
    problem = DiagonalQuadratic.random(n=64, d=4, spectrum=(0.4, 1.0), random_state=0)
    result = minimize_bilevel(
        problem, name, lr_inner=0.2, lr_outer=0.05, seeds=3, max_oracle_calls=2e5,
        metric="gradient", progress=False,
    )  # fmt: skip
    first, last = result.history["metric"][0].mean(), result.history["metric"][-1].mean()
    assert last < 0.05 * first
    assert (result.n_oracle >= 2e5).all()


@pytest.mark.parametrize(
    "name", sorted(set(METHODS) - {"f2sa", "ttsa", "stocbio", "mrbo", "sustain", "vrbo"})
)
def test_without_noise_the_solution_is_the_fixed_point(name):
    problem = QuadraticBilevel.random(5, 4, 2, 3, random_state=4)
    result = full_batch(problem, name, 3000, lr_outer=0.05)
    assert np.linalg.norm(problem.hypergradient(result.x[0])) < 1e-9


def test_neumann_series_by_hand():
    """One coordinate: z = lr sum_q (1 - lr a)^q p y, after ten exact inner steps."""
    problem = DiagonalQuadratic([[2.0]], [[3.0]], [[1.0]], [[1.0]], [[2.0]], [1.0])
    result = full_batch(problem, StocBiO(inner_steps=10, terms=4), 1, lr_inner=0.25)
    y = 0.0
    for _ in range(10):
        y -= 0.25 * (2 * y - 3 * 1.0 - 1)
    z = 0.25 * sum((1 - 0.25 * 2) ** q for q in range(5)) * (y - 2)
    assert result.y[0, 0] == pytest.approx(y)
    assert result.z[0, 0] == pytest.approx(z)
    assert result.x[0, 0] == pytest.approx(1 - 0.1 * 3 * z)


def test_amigo_by_hand():
    problem = DiagonalQuadratic([[2.0]], [[3.0]], [[1.0]], [[1.0]], [[2.0]], [1.0])
    result = full_batch(problem, AmIGO(inner_steps=2, linear_steps=3), 1, lr_inner=0.25)
    y, z = 0.0, 0.0
    for _ in range(2):
        y -= 0.25 * (2 * y - 4)
    for _ in range(3):
        z -= 0.25 * (2 * z - (y - 2))
    assert [result.y[0, 0], result.z[0, 0]] == pytest.approx([y, z])
    assert result.x[0, 0] == pytest.approx(1 - 0.1 * 3 * z)


def test_long_series_and_loops_reach_the_hypergradient():
    problem = QuadraticBilevel.random(5, 4, 2, 3, random_state=4)
    x = problem.init()[0]
    for method in (StocBiO(200, 200), AmIGO(200, 200)):
        moved = full_batch(problem, method, 1).x[0]
        np.testing.assert_allclose((x - moved) / 0.1, problem.hypergradient(x), atol=1e-10)
    for method in (MRBO(a=1.0, terms=200), VRBO(period=1, inner_steps=1, terms=200)):
        y = problem.solution(x)[0]
        moved = full_batch(problem, method, 1, y0=y).x[0]
        np.testing.assert_allclose((x - moved) / 0.1, problem.hypergradient(x), atol=1e-10)


def test_random_truncation_is_unbiased_for_the_truncated_series():
    """E Q lr (1 - lr a)^q over q uniform below Q equals lr sum_q (1 - lr a)^q."""
    problem = DiagonalQuadratic([[2.0]], [[3.0]], [[1.0]], [[1.0]], [[2.0]], [1.0])
    options = {"lr_inner": 0.2, "y0": np.array([1.0])}
    moves = [
        1.0
        - full_batch(
            problem, MRBO(a=1.0, terms=6, random_length=True), 1, random_state=k, **options
        ).x[0, 0]
        for k in range(400)
    ]
    z = 0.2 * sum((1 - 0.2 * 2) ** q for q in range(6)) * (1 - 2)
    assert np.mean(moves) == pytest.approx(0.1 * 3 * z, abs=4 * np.std(moves) / 20)


def test_two_time_scales_fall_as_told():
    problem = DiagonalQuadratic([[2.0]], [[3.0]], [[1.0]], [[1.0]], [[2.0]], [1.0])
    result = full_batch(problem, TTSA(terms=1, decay_inner=0.5, decay_outer=1.0), 3, lr_inner=0.2)
    x, y = 1.0, 0.0
    for k in range(1, 4):
        y -= 0.2 * (1 + k) ** -0.5 * (2 * y - 3 * x - 1)
        z = 0.2 * (y - 2)
        x -= 0.1 / (1 + k) * 3 * z
    assert result.x[0, 0] == pytest.approx(x)


def test_penalty_method_has_a_bias_of_one_over_the_penalty():
    problem = DiagonalQuadratic.random(n=1, d=2, spectrum=(0.5, 1.0), noise=0.0, outer_scale=1.0)
    x = problem.init()[0]
    errors = []
    for penalty in (100.0, 200.0):
        method = F2SA(penalty=penalty, growth=0.0, inner_steps=400)
        moved = full_batch(problem, method, 1, lr_inner=0.5).x[0]
        errors.append(np.linalg.norm((x - moved) / 0.1 - problem.hypergradient(x)))
    assert errors[0] == pytest.approx(2 * errors[1], rel=0.05)
    with pytest.raises(ValueError, match="inner_grad_x"):
        minimize_bilevel(PluggedIn(problem), "f2sa", progress=False)


def test_bilevel_and_single_level_take_the_same_iterations():
    """The paper's 'no gap' at equal steps, on a small instance."""
    problem = DiagonalQuadratic.random(256, 8, spectrum=(1e-2, 1.0), noise=1.0).grouped(16)
    steps = []
    for kind in (problem, PluggedIn(problem)):
        result = minimize_bilevel(
            kind, "spaba", lr_inner=0.5, lr_outer=0.2, batch_size=1, metric="gradient",
            target=1e-4, record_every=5, max_oracle_calls=1e8, progress=False,
        )  # fmt: skip
        steps.append(result.n_steps)
    assert 0.9 < steps[0] / steps[1] < 1.1


def test_a_method_object_of_ones_own():
    class InnerOnly:
        def start(self, run):
            self.count = 0

        def step(self, run):
            self.count += 1
            run.y = run.y - run.lr_y * run.inner(run.x, run.y, run.z, run.full("inner"))[0]

    problem = make_problem("diagonal")
    method = InnerOnly()
    result = full_batch(problem, method, 200)
    np.testing.assert_allclose(result.y[0], problem.solution(result.x[0])[0], atol=1e-12)
    assert method.count == 200 and result.n_oracle[0] == 200 * 23

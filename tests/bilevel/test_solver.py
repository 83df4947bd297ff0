import pickle

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from icml24.bilevel import (
    BilevelDivergenceError,
    DiagonalQuadratic,
    QuadraticBilevel,
    StreamingQuadratic,
    minimize_bilevel,
)

from .conftest import make_problem

FAST = {"lr_inner": 0.3, "lr_outer": 0.1, "progress": False}


class Mine:
    """A user's own problem: ridge regression with one penalty for each of two features."""

    def __init__(self, n=30, m=20):
        rng = np.random.default_rng(0)
        self.A, self.A_val = rng.standard_normal((n, 2)), rng.standard_normal((m, 2))
        self.b, self.b_val = self.A @ [1.0, 0.0] + 0.3, self.A_val @ [1.0, 0.0]
        self.n_inner, self.n_outer = n, m

    def inner(self, x, y, z, idx):
        A, b = (self.A, self.b) if idx is None else (self.A[idx], self.b[idx])
        penalty = np.exp(x)
        slope = A.T @ (A @ y - b) / len(A) + penalty * y
        return slope, A.T @ (A @ z) / len(A) + penalty * z, penalty * y * z

    def outer(self, x, y, idx):
        A, b = (self.A_val, self.b_val) if idx is None else (self.A_val[idx], self.b_val[idx])
        return A.T @ (A @ y - b) / len(A), np.zeros_like(x)

    def init(self):
        return np.zeros(2), np.zeros(2)


def test_users_own_problem_in_one_small_class():
    problem = Mine()
    result = minimize_bilevel(
        problem,
        lr_inner=0.2,
        lr_outer=0.5,
        batch_size=5,
        max_oracle_calls=2e5,
        seeds=2,
        progress=False,
    )
    assert result.success and result.x.shape == (2, 2)
    assert (result.x[:, 0] < result.x[:, 1]).all()  # the useful feature gets the smaller penalty
    np.testing.assert_allclose(result.y[0], result.y[1], atol=1e-3)


@pytest.mark.parametrize("name", ["saba", "srba", "spaba", "sffba", "mseba"])
def test_variance_reduction_converges_linearly_to_rounding(name):
    problem = DiagonalQuadratic.random(n=64, d=4, spectrum=(0.4, 1.0), random_state=0)
    result = minimize_bilevel(
        problem, name, seeds=2, metric="gradient", max_oracle_calls=1e5, **FAST
    )
    assert result.history["metric"][-1].max() < 1e-15


def test_sgd_stalls_at_its_noise():
    problem = DiagonalQuadratic.random(n=64, d=4, spectrum=(0.4, 1.0), random_state=0)
    result = minimize_bilevel(
        problem, "soba", seeds=2, metric="gradient", max_oracle_calls=1e5, **FAST
    )
    assert result.history["metric"][-20:].mean() > 1e-6


@pytest.mark.parametrize("name", ["spaba", "saba", "srba", "soba"])
def test_units_of_the_outer_loss_do_not_matter(name):
    """Multiply f by c and divide the outer step by c: x is the same, z is c times as large."""
    runs = [
        minimize_bilevel(
            QuadraticBilevel.random(20, 15, 3, 4, outer_scale=c, random_state=1),
            name,
            lr_inner=0.2,
            lr_outer=0.05 / c,
            max_steps=60,
            max_oracle_calls=1e9,
            progress=False,
        )
        for c in (1.0, 30.0)
    ]
    np.testing.assert_allclose(runs[0].x, runs[1].x, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(30 * runs[0].z, runs[1].z, rtol=1e-9, atol=1e-12)
    assert abs(runs[1].z).max() > 1  # so that a clip to [-1, 1] would have been felt


def test_clipping_coordinates_breaks_it():
    problem = QuadraticBilevel.random(20, 15, 3, 4, outer_scale=30, random_state=1)
    options = {"lr_inner": 0.2, "lr_outer": 0.05 / 30, "max_oracle_calls": 6e4, "progress": False}
    free = minimize_bilevel(problem, "spaba", **options)
    clipped = minimize_bilevel(problem, "spaba", radius=lambda z: np.clip(z, -1, 1), **options)
    solution = np.linalg.norm(problem.hypergradient(free.x[0]))
    assert solution < 1e-3 < 0.1 < np.linalg.norm(problem.hypergradient(clipped.x[0]))


def test_projection_is_euclidean_and_active_only_outside_the_ball():
    problem = QuadraticBilevel.random(20, 15, 3, 4, random_state=1)
    options = {"max_steps": 40, "max_oracle_calls": 1e9, **FAST}
    free = minimize_bilevel(problem, **options)
    sizes = []

    def watch(run):
        sizes.append(np.linalg.norm(run.z, axis=1).max())

    same = minimize_bilevel(problem, radius=1e6, callback=watch, record_every=1, **options)
    np.testing.assert_array_equal(free.x, same.x)
    small = max(sizes) / 3
    held = minimize_bilevel(problem, radius=small, **options)
    assert np.linalg.norm(held.z, axis=1).max() <= small * (1 + 1e-12)
    assert abs(held.x - free.x).max() > 1e-6
    run = held.run
    z = np.array([[3.0, 4.0, 0.0, 0.0]])
    np.testing.assert_allclose(run.project(z), z * small / 5)


def test_automatic_radius_is_ten_times_force_over_curvature():
    problem = QuadraticBilevel.random(20, 15, 3, 4, random_state=1)
    options = {"max_steps": 40, "max_oracle_calls": 1e9, **FAST}
    auto, free = (
        minimize_bilevel(problem, radius="auto", **options),
        minimize_bilevel(problem, **options),
    )
    mu = np.linalg.eigvalsh(problem.A.mean(0))[0]
    force = np.linalg.norm(problem.P @ problem.t.mean(0))
    assert auto.run.radius == pytest.approx(10 * force / mu, rel=0.02)
    np.testing.assert_array_equal(auto.x, free.x)
    assert auto.n_oracle[0] > free.n_oracle[0]  # the estimate is paid for


def test_a_run_does_not_depend_on_the_other_runs():
    problem = make_problem("penalties")
    for name in ("spaba", "saba", "mseba", "srmba", "amigo"):
        options = {"batch_size": 4, "max_steps": 30, "max_oracle_calls": 1e9, **FAST}
        many = minimize_bilevel(problem, name, seeds=5, **options)
        alone = minimize_bilevel(problem, name, seeds=[3], **options)
        np.testing.assert_allclose(many.x[3], alone.x[0], atol=1e-13)
        assert many.n_oracle[3] == alone.n_oracle[0]


def test_equal_seeds_share_samples_and_a_grid_is_one_call():
    problem = make_problem("penalties")
    options = {"batch_size": 4, "max_steps": 30, "max_oracle_calls": 1e9, "progress": False}
    grid = minimize_bilevel(
        problem, seeds=[7, 7, 8], lr_inner=[0.3, 0.1, 0.3], lr_outer=[0.5, 0.2, 0.5], **options
    )
    alone = minimize_bilevel(problem, seeds=[7], lr_inner=0.1, lr_outer=0.2, **options)
    np.testing.assert_allclose(grid.x[1], alone.x[0], atol=1e-13)
    assert abs(grid.x[0] - grid.x[2]).max() > 1e-8
    other = minimize_bilevel(
        problem, seeds=[7], lr_inner=0.1, lr_outer=0.2, random_state=1, **options
    )
    assert abs(other.x[0] - alone.x[0]).max() > 1e-8


@pytest.mark.parametrize("name", ["spaba", "saba", "srmba", "sffba", "mrbo", "vrbo"])
def test_resuming_equals_never_stopping(name):
    problem = make_problem("penalties")
    options = {"batch_size": 4, "seeds": 2, "max_oracle_calls": 1e9, "record_every": 5, **FAST}
    whole = minimize_bilevel(problem, name, max_steps=60, **options)
    half = minimize_bilevel(problem, name, max_steps=25, **options)
    before = half.x.copy()
    stored = pickle.loads(pickle.dumps(half))
    rest = minimize_bilevel(
        problem,
        name,
        max_steps=60,
        max_oracle_calls=1e9,
        record_every=5,
        resume=stored,
        progress=False,
    )
    np.testing.assert_array_equal(rest.x, whole.x)
    np.testing.assert_array_equal(half.x, before)
    np.testing.assert_array_equal(rest.history["step"], whole.history["step"])
    assert rest.n_oracle.tolist() == whole.n_oracle.tolist()


def test_history_callback_target_and_tolerance():
    problem = DiagonalQuadratic.random(n=64, d=4, spectrum=(0.4, 1.0), random_state=0)
    seen = []
    result = minimize_bilevel(
        problem, seeds=3, metric="gradient", target=1e-6, record_every=2, max_oracle_calls=1e6,
        callback=lambda run: seen.append(run.step), **FAST,
    )  # fmt: skip
    history = result.history
    assert history["step"].tolist() == seen
    assert history["calls"].shape == history["metric"].shape == history["direction"].shape
    for run in range(3):
        first = np.flatnonzero(history["metric"][:, run] <= 1e-6)[0]
        assert result.calls_to_target[run] == history["calls"][first, run]
    assert (np.diff(history["seconds"]) >= 0).all()
    assert (history["metric"][-1] <= 1e-4).all() and "target" in result.message
    stopped = minimize_bilevel(problem, callback=lambda run: run.step >= 10, record_every=5, **FAST)
    assert stopped.n_steps == 10
    still = minimize_bilevel(problem, tol=1e-4, record_every=1, max_oracle_calls=1e6, **FAST)
    assert still.history["direction"][-1, 0] <= 1e-4 < still.history["direction"][-2, 0]
    own = minimize_bilevel(
        problem, metric=lambda x: abs(x).sum(1), record_every=1, max_steps=3, **FAST
    )
    assert own.history["metric"][-1, 0] == pytest.approx(abs(own.x).sum())


def test_budget_is_used_and_hardly_exceeded():
    problem = DiagonalQuadratic.random(n=64, d=4, spectrum=(0.4, 1.0), random_state=0)
    result = minimize_bilevel(problem, "soba", batch_size=8, max_oracle_calls=1000, **FAST)
    assert 1000 <= result.n_oracle[0] < 1000 + 16


def test_uneven_blocks_are_counted_by_their_true_size():
    problem = make_problem("penalties")  # 31 and 19 rows, blocks of 4
    result = minimize_bilevel(
        problem, "soba", batch_size=4, max_steps=500, max_oracle_calls=1e9, **FAST
    )
    sampler = result.run._sampler["inner"]
    assert sampler.lengths.tolist() == [4] * 7 + [3]
    expected = 501 * ((7 * 4 * 4 + 9) / 31 + (4 * 4 * 4 + 9) / 19)  # E size = sum size^2 / n
    assert result.n_oracle[0] == pytest.approx(expected, rel=0.02)


def test_streams_use_fresh_samples_and_large_batches():
    problem = StreamingQuadratic(d=4, spectrum=(0.3, 1.0))
    result = minimize_bilevel(
        problem, batch_size=8, full_batch=64, max_steps=300, max_oracle_calls=1e9, **FAST
    )
    calls = result.n_oracle[0] - 2 * 64
    passes = (calls - 300 * 4 * 8) / (2 * 64 - 4 * 8)
    assert passes == int(passes)
    p = 8 / (8 + 64)
    assert abs(passes - 300 * p) < 3 * np.sqrt(300 * p * (1 - p))
    start = (problem.hypergradient(problem.init()[0]) ** 2).sum()
    assert (problem.hypergradient(result.x[0]) ** 2).sum() < 0.1 * start


def test_long_recursion_in_double_precision_does_not_drift():
    problem = DiagonalQuadratic.random(n=64, d=4, spectrum=(0.4, 1.0), random_state=0)
    from icml24.bilevel import PAGE

    result = minimize_bilevel(
        problem, dict.fromkeys("yzx", PAGE(prob=1e-3)), max_steps=10_000, max_oracle_calls=1e9,
        metric="gradient", **FAST,
    )  # fmt: skip
    assert result.history["metric"][-1, 0] < 1e-20


def test_divergence_is_named_or_ignored():
    problem = DiagonalQuadratic.random(n=64, d=4, spectrum=(0.4, 1.0), random_state=0)
    with pytest.raises(
        BilevelDivergenceError, match=r"no longer finite at step \d+ in run\(s\) \[1\]"
    ):
        minimize_bilevel(
            problem,
            lr_inner=[0.3, 9.0],
            lr_outer=0.1,
            seeds=2,
            max_oracle_calls=1e6,
            progress=False,
        )
    result = minimize_bilevel(
        problem, lr_inner=[0.3, 9.0], lr_outer=0.1, seeds=2, max_oracle_calls=1e6,
        on_divergence="ignore", metric="gradient", target=1e-6, progress=False,
    )  # fmt: skip
    assert np.isfinite(result.x[0]).all() and not result.success
    assert np.isfinite(result.calls_to_target).tolist() == [True, False]


def test_concave_inner_problem_is_diagnosed():
    class Saddle(Mine):
        def inner(self, x, y, z, idx):
            slope, hvp, cross = super().inner(x, y, z, idx)
            return slope - 3 * y, hvp - 3 * z, cross

    options = {"max_steps": 5, "max_oracle_calls": 1e9, "lr_inner": 0.01, "lr_outer": 0.01}
    with pytest.warns(ConvergenceWarning, match="not strongly convex"):
        minimize_bilevel(
            Saddle(), max_oracle_calls=3e4, lr_inner=1e-3, lr_outer=1e-3, progress=False
        )
    with pytest.warns(ConvergenceWarning, match="not strongly convex"):
        minimize_bilevel(Saddle(), radius="auto", progress=False, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_inner": 0.0}, "lr_inner must be positive"),
        ({"lr_outer": -1.0}, "lr_outer must be positive"),
        ({"lr_linear": np.nan}, "lr_linear must be positive"),
        ({"lr_inner": [0.1, 0.2]}, "one for each of 1 runs"),
        ({"batch_size": 0}, "between 1 and"),
        ({"batch_size": 31}, "number of samples 30"),
        ({"batch_size": (30, 21)}, "number of samples 20"),
        ({"batch_size": "half"}, "'sqrt' or an integer"),
        ({"radius": 0.0}, "radius must be positive"),
        ({"radius": "big"}, "radius must be positive"),
        ({"x0": np.zeros(3)}, r"x0 must have shape \(2,\)"),
        ({"y0": np.full(2, np.nan)}, "y0 contains NaN"),
        ({"seeds": []}, "at least one run"),
        ({"method": "adam"}, "Unknown method 'adam'; known are"),
        ({"method": {"y": None}}, "keys y, z and x"),
        ({"metric": "loss"}, "'gradient' or a function"),
        ({"metric": "gradient"}, "hypergradient"),
        ({"target": 1.0}, "target needs a metric"),
        ({"on_divergence": "cry"}, "'raise' or 'ignore'"),
        ({"engine": "cuda"}, "'numpy' or 'numba'"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        minimize_bilevel(Mine(), **{"max_steps": 1, "progress": False, **options})


def test_other_bad_input_is_named():
    with pytest.raises(TypeError, match="method must be a name"):
        minimize_bilevel(Mine(), 3)
    with pytest.raises(ValueError, match="no samples"):
        minimize_bilevel(Mine(n=0))
    with pytest.raises(ValueError, match="integer"):
        minimize_bilevel(StreamingQuadratic(d=2))
    bad = Mine()
    bad.b = np.full(30, np.inf)
    with pytest.raises(ValueError, match="grad_y g is NaN or infinite"):
        minimize_bilevel(bad)
    wrong = Mine()
    wrong.outer = lambda x, y, idx: (np.zeros(3), np.zeros(2))
    with pytest.raises(ValueError, match="grad_y f has shape"):
        minimize_bilevel(wrong)
    wrong.outer = lambda x, y, idx: (np.zeros(2),)
    with pytest.raises(ValueError, match="must return three arrays"):
        minimize_bilevel(wrong)


def test_starting_points_are_copied():
    x0, y0 = np.ones(2), np.ones((3, 2))
    result = minimize_bilevel(Mine(), x0=x0, y0=y0, seeds=3, max_steps=3, progress=False)
    assert (x0 == 1).all() and (y0 == 1).all() and result.x.shape == (3, 2)

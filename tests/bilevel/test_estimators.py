"""Identities of the estimators, in the single loop that they share."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icml24.bilevel import (
    PAGE,
    SAGA,
    SARAH,
    SGD,
    STORM,
    DiagonalQuadratic,
    MovingAverage,
    StreamingQuadratic,
    ZeroSARAH,
    minimize_bilevel,
)

from .conftest import make_problem

EVERY = {
    "sgd": SGD(),
    "page": PAGE(),
    "sarah": SARAH(),
    "storm": STORM(0.3),
    "saga": SAGA(),
    "saga full": SAGA(init="full"),
    "zerosarah": ZeroSARAH(),
    "zerosarah full": ZeroSARAH(init="full"),
    "average": MovingAverage(0.5, PAGE()),
    "average saga": MovingAverage(0.5, SAGA()),
}


def run(estimator, problem=None, steps=25, **options):
    problem = make_problem("diagonal") if problem is None else problem
    options = {"lr_inner": 0.3, "lr_outer": 0.1, "batch_size": 4, "seeds": 3, **options}
    mapping = estimator if isinstance(estimator, dict) else dict.fromkeys("yzx", estimator)
    return minimize_bilevel(
        problem, mapping, max_steps=steps, max_oracle_calls=np.inf, progress=False, **options
    )


def descent(problem, steps, lr_inner=0.3, lr_outer=0.1):
    """Full-gradient single loop, written down independently."""
    x, y = problem.init()
    z = np.zeros_like(y)
    for _ in range(steps):
        gy, hz, cz = (part[0] for part in problem.inner(x[None], y[None], z[None], None))
        fy, fx = (part[0] for part in problem.outer(x[None], y[None], None))
        x, y, z = x - lr_outer * (fx - cz), y - lr_inner * gy, z - lr_inner * (hz - fy)
    return x


@pytest.mark.parametrize("estimator", [PAGE(prob=1.0), SARAH(period=1)])
def test_full_passes_only_are_gradient_descent_bit_for_bit(estimator):
    problem = make_problem("diagonal")
    np.testing.assert_array_equal(run(estimator, problem).x, np.tile(descent(problem, 25), (3, 1)))


@pytest.mark.parametrize("estimator", EVERY.values(), ids=EVERY)
def test_one_sample_makes_every_estimator_gradient_descent(estimator):
    problem = DiagonalQuadratic.random(n=1, d=3, spectrum=(0.2, 1.0), random_state=1)
    result = run(estimator, problem, batch_size=1)
    if "Moving" in repr(estimator):
        return  # averages lag behind by construction; see the test of rho = 1
    np.testing.assert_allclose(result.x[0], descent(problem, 25), atol=1e-12)


@pytest.mark.parametrize("estimator", [SAGA(), ZeroSARAH(), SGD(), PAGE()])
def test_one_block_makes_every_estimator_gradient_descent(estimator):
    problem = DiagonalQuadratic.random(n=16, d=3, spectrum=(0.2, 1.0), random_state=1)
    result = run(estimator, problem, batch_size=16)
    np.testing.assert_allclose(result.x[0], descent(problem, 25), atol=1e-12)


def test_storm_limits_are_sgd_and_sarah():
    np.testing.assert_array_equal(run(STORM(1.0)).x, run(SGD()).x)
    never = SARAH(period=10**9)
    started = run({"y": STORM(0.0), "z": STORM(0.0), "x": STORM(0.0)}, batch_size=(23, 17))
    np.testing.assert_allclose(started.x, run(never, batch_size=(23, 17)).x, atol=1e-12)


def test_zerosarah_without_correction_is_sarah_never_restarted():
    ours, other = run(ZeroSARAH(lam=0.0, init="full")), run(SARAH(period=10**9))
    np.testing.assert_allclose(ours.x, other.x, atol=1e-12)


def test_zerosarah_with_full_correction_is_saga():
    ours, other = run(ZeroSARAH(lam=1.0)), run(SAGA())
    # lam = 1: new - old + old - table + mean = new - table + mean
    np.testing.assert_allclose(ours.x, other.x, atol=1e-9)


@pytest.mark.parametrize("base", [SGD(), PAGE(), SAGA(), STORM(0.2)])
def test_moving_average_of_weight_one_is_its_base(base):
    np.testing.assert_allclose(run(MovingAverage(1.0, base)).x, run(base).x, atol=1e-12)


def test_counter_matches_the_expected_price_of_a_step():
    problem = DiagonalQuadratic.random(n=32, d=3, m=16, spectrum=(0.2, 1.0), random_state=1)
    steps, p, price, full = 2000, 0.3, 4 * 4, 32 + 16
    calls = run(PAGE(prob=p), problem, steps=steps, seeds=[0]).n_oracle[0] - full
    passes = (calls - steps * price) / (full - price)
    assert passes == int(passes)  # one coin for the three directions: whole passes only
    assert abs(passes - p * steps) < 3 * np.sqrt(steps * p * (1 - p))
    start = {SGD: 2 * 4, STORM: 2 * 4, SAGA: 2 * 4, ZeroSARAH: 2 * 4}
    for kind, each in ((SGD, 2), (STORM, 4), (SAGA, 2), (ZeroSARAH, 4)):
        result = run(kind(), problem, steps=10, seeds=[0])
        assert result.n_oracle[0] == start[kind] + 10 * each * 4
    filled = run(SAGA(init="full"), problem, steps=10, seeds=[0])
    assert filled.n_oracle[0] == full + 10 * 2 * 4


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_page_and_sarah_are_unbiased_over_the_draw_of_one_batch(seed):
    """E v' = v + D_full(new) - D_full(old): checked by enumerating all blocks."""
    rng = np.random.default_rng(seed)
    values_new, values_old = rng.standard_normal((2, 6, 1, 4))  # six blocks
    v = rng.standard_normal((1, 4))
    results = []
    for block in range(6):
        estimator = PAGE().bind((1, 4), None)
        estimator.v = v.copy()
        estimator.update(slice(None), values_new[block], values_old[block], np.array([block]))
        results.append(estimator.v)
    np.testing.assert_allclose(np.mean(results, 0), v + values_new.mean(0) - values_old.mean(0))


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_saga_is_unbiased_for_any_table_and_uneven_blocks(seed):
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(5))
    fresh, table = rng.standard_normal((2, 5, 4))
    total = np.zeros((1, 4))
    for block in range(5):
        estimator = SAGA().bind((1, 4), weights)
        for k in range(5):
            estimator.fill(k, table[None, k])
        estimator.update(slice(None), fresh[None, block], fresh[None, block], np.array([block]))
        total += weights[block] * estimator.v
        np.testing.assert_allclose(estimator.mean[0], weights @ estimator.table[0], atol=1e-12)
    np.testing.assert_allclose(total[0], weights @ fresh, atol=1e-12)


def test_variance_of_the_page_difference_falls_with_the_square_of_the_step():
    """E|D_B(new) - D_B(old) - (D(new) - D(old))|^2 is proportional to |new - old|^2."""
    problem = make_problem("diagonal")
    rng = np.random.default_rng(0)
    x, y, z = rng.standard_normal((3, 1, 3))
    dx, dy, dz = rng.standard_normal((3, 1, 3))

    def variance(step):
        total = 0.0
        full = problem.inner(x + step * dx, y + step * dy, z + step * dz, None)[0]
        full = full - problem.inner(x, y, z, None)[0]
        for k in range(problem.n_inner):
            idx = np.array([[k]])
            new = problem.inner(x + step * dx, y + step * dy, z + step * dz, idx)[0]
            total += ((new - problem.inner(x, y, z, idx)[0] - full) ** 2).sum()
        return total / problem.n_inner

    assert variance(0.2) == pytest.approx(4 * variance(0.1))
    assert variance(0.1) > 0


def test_recursion_equals_a_hand_written_page():
    """Replay the run's own blocks and coins with ten lines of plain arithmetic."""
    problem = make_problem("diagonal")
    steps, lr = 12, (0.1, 0.3)
    result = run(PAGE(prob=0.25), problem, steps=steps, seeds=[5])
    streams = [
        np.random.default_rng(s) for s in np.random.SeedSequence([0, 5]).spawn(3)
    ]  # inner, outer, coins
    partition = np.random.default_rng([0, 0])  # common to all seeds
    orders = [partition.permutation(23), partition.permutation(17)]
    ids = [streams[0].integers(23, size=256) // 4, streams[1].integers(17, size=256) // 4]
    coins = streams[2].random(256)

    def directions(x, y, z, k=None):
        rows = [None, None]
        if k is not None:
            rows = [o[4 * i[k] : 4 * i[k] + 4][None] for o, i in zip(orders, ids, strict=True)]
        gy, hz, cz = problem.inner(x, y, z, rows[0])
        fy, fx = problem.outer(x, y, rows[1])
        return np.stack([fx - cz, gy, hz - fy])

    x, y = (part[None] for part in problem.init())
    z = np.zeros_like(y)
    v = directions(x, y, z)
    for k in range(steps):
        old = x, y, z
        x, y, z = x - lr[0] * v[0], y - lr[1] * v[1], z - lr[1] * v[2]
        if coins[k] < 0.25:
            v = directions(x, y, z)
        else:
            v = v + directions(x, y, z, k) - directions(*old, k)
    np.testing.assert_allclose(result.x, x, atol=1e-13)
    np.testing.assert_allclose(result.z, z, atol=1e-13)


@pytest.mark.parametrize("estimator", [SAGA(), ZeroSARAH(), MovingAverage(0.5, SAGA())])
def test_memory_needs_a_finite_sum(estimator):
    with pytest.raises(ValueError, match="remembers each block"):
        run(estimator, StreamingQuadratic(d=2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PAGE(prob=0.0), r"\(0, 1\]"),
        (lambda: PAGE(prob=1.5), r"\(0, 1\]"),
        (lambda: SARAH(period=0), "at least 1"),
        (lambda: STORM(a=-0.1), r"\[0, 1\]"),
        (lambda: SAGA(init="ones"), "zeros"),
        (lambda: ZeroSARAH(lam=2.0), r"\[0, 1\]"),
        (lambda: MovingAverage(0.0), r"\(0, 1\]"),
    ],
)
def test_bad_parameters_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_binding_leaves_the_estimator_untouched():
    estimator = SAGA()
    run(estimator)
    assert not hasattr(estimator, "table")
    np.testing.assert_array_equal(run(estimator).x, run(estimator).x)

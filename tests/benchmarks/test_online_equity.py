"""Speed of the simulator, the benchmark LP and the occupancy optimum against the plain ways."""

import cvxpy as cp
import numpy as np
import pytest

import icml24.online_equity as eq


def many_agents(n, points=5, seed=0):
    rng = np.random.default_rng(seed)
    demand = eq.DemandModel(rng.lognormal(0, 1, (n, points)), rng.dirichlet(np.ones(points), n))
    return eq.ExternalInstance(demand, 0.4 * demand.mean.sum())


def loop_over_paths(instance, demands):
    """P1 the plain way: one path, one agent at a time."""
    lp, b = instance.benchmark_lp(), instance.budget
    tables = [
        dict(zip(values, amounts, strict=True))
        for values, amounts in zip(
            instance.demand.values.tolist(), lp.amounts.tolist(), strict=True
        )
    ]
    spending = lp.spending.tolist()
    worst = []
    for path in demands.tolist():
        left, expected, smallest = b, b, 1.0
        for table, spent, demand in zip(tables, spending, path, strict=True):
            amount = 0.5 * table[demand] * left / expected
            left -= amount
            expected -= 0.5 * spent
            smallest = min(smallest, amount / demand)
        worst.append(smallest)
    return np.array(worst)


@pytest.mark.benchmark(group="20,000 paths of 30 agents")
@pytest.mark.parametrize("way", ["vectorised", "python loop", "one path at a time"])
def test_simulation(benchmark, way):
    instance = many_agents(30)
    demands = instance.demand.sample(20_000)
    policy = eq.RatioAttenuation().fit(instance)

    def vectorised():
        policy.reset(len(demands))
        worst = np.ones(len(demands))
        for column in demands.T:
            worst = np.minimum(worst, policy.allocate(column) / column)
        return worst

    def one_path_at_a_time():
        worst = np.ones(len(demands))
        for r, path in enumerate(demands[:200]):  # a hundredth of the work: multiply by 100
            policy.reset()
            worst[r] = min(policy.allocate(demand)[0] / demand for demand in path)
        return worst

    ways = {
        "vectorised": vectorised,
        "python loop": lambda: loop_over_paths(instance, demands),
        "one path at a time": one_path_at_a_time,
    }
    worst = benchmark.pedantic(ways[way], rounds=3)
    np.testing.assert_allclose(worst[:100], loop_over_paths(instance, demands[:100]))


@pytest.mark.benchmark(group="benchmark LP")
@pytest.mark.parametrize("n", [100, 1_000, 5_000])
@pytest.mark.parametrize("method", ["waterfill", "highs", "cvxpy", "cvxpy default"])
def test_benchmark_lp(benchmark, method, n):
    instance = many_agents(n)
    d, p = instance.demand.values, instance.demand.weights

    def default():
        s, x = cp.Variable(), cp.Variable(d.shape, nonneg=True)
        fair = cp.sum(cp.multiply(p / d, x), axis=1) >= s
        stock = cp.sum(cp.multiply(p, x)) <= instance.budget
        problem = cp.Problem(cp.Maximize(s), [fair, stock, x <= d, s <= 1])
        return problem.solve()

    def solve():
        fresh = eq.ExternalInstance(instance.demand, instance.budget)  # no cached solution
        return fresh.benchmark_lp(method).value

    value = benchmark.pedantic(
        default if method == "cvxpy default" else solve, rounds=1 if n == 5_000 else 3
    )
    assert value == pytest.approx(instance.benchmark_lp().value, abs=1e-4)


@pytest.mark.benchmark(group="100,000 arrivals")
@pytest.mark.parametrize("rounds", [1_000, 10_000, 100_000])
def test_long_streams_of_people(benchmark, rounds):
    share = np.linspace(0.8, 0.2, rounds)
    arrivals = eq.ArrivalModel(np.column_stack([share, 1 - share]), np.eye(2))
    instance = eq.InternalInstance(arrivals, rounds // 3)
    report = benchmark.pedantic(
        lambda: eq.evaluate(eq.SelectionSampling(), instance, n_runs=100), rounds=1
    )
    assert report.units == pytest.approx(rounds // 3)


@pytest.mark.benchmark(group="100,000 agents")
@pytest.mark.parametrize("n", [1_000, 10_000, 100_000])
def test_long_streams_of_agents(benchmark, n):
    instance = many_agents(n, points=3)
    report = benchmark.pedantic(
        lambda: eq.evaluate(eq.RatioAttenuation(), instance, n_runs=20), rounds=1
    )
    assert report.units < instance.budget


@pytest.mark.benchmark(group="occupancy optimum")
@pytest.mark.parametrize("method", ["columns", "lp"])
def test_occupancy(benchmark, method):
    rng = np.random.default_rng(1)
    arrivals = eq.ArrivalModel(rng.dirichlet(np.ones(6), 60), rng.random((4, 6)) < 0.5)
    instance = eq.InternalInstance(arrivals, 20)
    values = benchmark.pedantic(lambda: eq.OccupancyOptimal(method).fit(instance).value_, rounds=1)
    assert values == pytest.approx(eq.OccupancyOptimal().fit(instance).value_, abs=1e-6)

import numpy as np
import pytest
from hypothesis import given
from scipy.optimize import linprog

import icml24.online_equity as eq
from icml24.online_equity import external

from .strategies import checked, instances


@checked
@given(instances())
def test_waterfilling_equals_highs(instance):
    ours, highs = instance.benchmark_lp(), instance.benchmark_lp("highs")
    assert ours.value == pytest.approx(highs.value, abs=1e-9)
    check_feasible(instance, ours)


def check_feasible(instance, solution):
    d, p = instance.demand.values, instance.demand.weights
    assert (solution.amounts <= np.minimum(d, instance.budget) * (1 + 1e-12)).all()
    assert (solution.fills >= 0).all()
    assert solution.spending.sum() <= instance.budget * (1 + 1e-9)
    assert ((p * solution.fills).sum(axis=1) >= solution.value - 1e-9).all()


def test_three_solvers_agree(random_instances):
    for instance in random_instances[:12]:
        readable = instance.benchmark_lp("cvxpy")
        assert readable.value == pytest.approx(instance.benchmark_lp().value, abs=1e-9)
        check_feasible(instance, instance.benchmark_lp("highs"))


def test_strong_duality(random_instances):
    # primal: max s, s - sum_k p f <= 0 (lam), sum p d f / b <= 1 (mu), f <= cap (nu), s <= 1 (pi)
    # dual:   min mu + cap.nu + pi,  sum lam + pi >= 1,  p (d mu / b - lam) + nu >= 0
    for instance in random_instances[:10]:
        d, p = instance.demand.values, instance.demand.weights
        n, k = d.shape
        cap = np.minimum(1, instance.budget / d)
        size = n + 1 + n * k + 1
        cost = np.concatenate([np.zeros(n), [1], cap.ravel(), [1]])
        rows = [np.concatenate([-np.ones(n), [0], np.zeros(n * k), [-1]])]
        right = [-1.0]
        for i in range(n):
            for j in range(k):
                row = np.zeros(size)
                row[i] = p[i, j]
                row[n] = -p[i, j] * d[i, j] / instance.budget
                row[n + 1 + i * k + j] = -1
                rows.append(row)
                right.append(0.0)
        dual = linprog(cost, A_ub=np.array(rows), b_ub=right, method="highs")
        assert dual.fun == pytest.approx(instance.benchmark_lp().value, abs=1e-8)


def test_two_sure_demands_by_hand():
    instance = eq.ExternalInstance(eq.DemandModel([[1], [3]]), 2)
    solution = instance.benchmark_lp()
    assert solution.value == 0.5
    np.testing.assert_allclose(solution.amounts.ravel(), [0.5, 1.5])


def test_smallest_demands_are_filled_first_by_hand():
    # 1 or 9 with equal chance, stock 1: the small one costs 1/2 for half a fill, the rest of the
    # stock (1/2) buys 1/9 of the large one: s = 1/2 + 1/18
    instance = eq.ExternalInstance(eq.DemandModel([[1, 9]]), 1)
    solution = instance.benchmark_lp()
    assert solution.value == pytest.approx(1 / 2 + 1 / 18)
    np.testing.assert_allclose(solution.fills, [[1, 1 / 9]])


def test_enough_for_everyone_means_one(random_instances):
    for instance in random_instances[:5]:
        rich = eq.ExternalInstance(instance.demand, instance.demand.values.max(axis=1).sum())
        assert rich.benchmark_lp().value == pytest.approx(1)
        assert rich.clairvoyant("post") == pytest.approx(1)
        assert rich.online_optimum("post") == pytest.approx(1)
        for policy in (eq.FirstComeFirstServed(), eq.ProjectedProportional(), eq.TargetFillRate()):
            report = eq.evaluate(policy, rich, exact=True)
            np.testing.assert_allclose(report.frame()["share"], 1)


def test_chain_of_yardsticks(random_instances):
    for instance in random_instances:
        lp, clairvoyant = instance.benchmark_lp().value, instance.clairvoyant("ante")
        online = instance.online_optimum("ante")
        policy = eq.evaluate(eq.SimulationAttenuation(), instance, exact=True).ex_ante.value
        assert lp + 1e-9 >= clairvoyant >= online - 1e-9
        assert online + 1e-9 >= policy >= lp / 2 - 1e-9
        post = instance.online_optimum("post")
        assert instance.clairvoyant("post") + 1e-9 >= post
        assert post <= online + 1e-9


def test_online_optimum_beats_every_rule_on_its_own_metric(random_instances):
    rules = [eq.ProjectedProportional(), eq.EqualSplit(), eq.ShareOfRest(), eq.TargetFillRate()]
    for instance in random_instances[:10]:
        ante, post = instance.online_optimum("ante"), instance.online_optimum("post")
        for rule in rules:
            report = eq.evaluate(rule, instance, exact=True)
            assert report.ex_ante.value <= ante + 1e-9
            assert report.ex_post.value <= post + 1e-9


@pytest.mark.parametrize("metric", ["ante", "post"])
def test_the_optimal_policy_attains_the_tree_value(random_instances, metric):
    for instance in random_instances[:10]:
        policy = eq.OnlineOptimal(metric).fit(instance)
        report = eq.evaluate(policy, instance, exact=True)
        reached = report.ex_ante if metric == "ante" else report.ex_post
        assert reached.value == pytest.approx(instance.online_optimum(metric), abs=1e-8)


def test_online_optimum_equals_dynamic_programming_on_a_grid():
    # two agents, tight family: maximise min(u p / (1 - p), p (1 - u)) over a grid of u
    for p, steps in ((0.5, 200), (0.2, 200), (0.1, 200)):
        u = np.linspace(0, 1, steps + 1)
        grid = np.minimum(u * p / (1 - p), p * (1 - u)).max()
        assert eq.tight_instance(p).online_optimum() == pytest.approx(grid, abs=1 / steps)
        assert eq.tight_instance(p).online_optimum() >= grid - 1e-12


@checked
@given(instances())
def test_ratios_do_not_depend_on_the_unit(instance):
    d, p = instance.demand.values, instance.demand.weights
    scaled = eq.ExternalInstance(eq.DemandModel(d * 7.5, p), instance.budget * 7.5)
    assert scaled.benchmark_lp().value == pytest.approx(instance.benchmark_lp().value, abs=1e-9)
    a = eq.evaluate(eq.SimulationAttenuation(), scaled, exact=True)
    b = eq.evaluate(eq.SimulationAttenuation(), instance, exact=True)
    assert a.ex_ante.value == pytest.approx(b.ex_ante.value, abs=1e-7)


def test_splitting_a_point_changes_nothing():
    whole = eq.ExternalInstance(eq.DemandModel([[1, 4], [2]], [[0.4, 0.6], [1]]), 2)
    split = eq.ExternalInstance(
        eq.DemandModel([[4, 1, 4], [2, 2]], [[0.2, 0.4, 0.4], [0.5, 0.5]]), 2
    )
    for policy in (eq.RatioAttenuation(), eq.SimulationAttenuation(), eq.ShareOfRest()):
        a, b = eq.evaluate(policy, whole, exact=True), eq.evaluate(policy, split, exact=True)
        assert a.ex_ante.value == pytest.approx(b.ex_ante.value)
        assert a.ex_post.value == pytest.approx(b.ex_post.value)


def test_more_stock_never_hurts(random_instances):
    for instance in random_instances[:8]:
        values = [
            eq.ExternalInstance(instance.demand, instance.budget * c).benchmark_lp().value
            for c in (0.5, 1, 2, 4)
        ]
        assert (np.diff(values) >= -1e-12).all()


def test_clairvoyant_of_dependent_demands():
    instance, (demands, probability) = eq.synchronous_demands(4)
    value, fill = eq.clairvoyant_ante(demands, probability, instance.budget)
    assert value == pytest.approx(instance.benchmark_lp().value / 4, rel=1e-6)
    assert ((fill * demands).sum(axis=1) <= instance.budget * (1 + 1e-9)).all()


@pytest.mark.parametrize("budget", [0, -1, np.inf, np.nan, "all"])
def test_bad_budgets_are_refused(budget):
    with pytest.raises(ValueError, match="positive finite"):
        eq.ExternalInstance(eq.DemandModel([[1]]), budget)


def test_unknown_options_are_refused():
    instance = eq.ExternalInstance(eq.DemandModel([[1]]), 1)
    for call in (
        lambda: instance.benchmark_lp("simplex"),
        lambda: instance.clairvoyant("mean"),
        lambda: instance.online_optimum("mean"),
    ):
        with pytest.raises(ValueError, match="must be"):
            call()
    with pytest.raises(TypeError, match="DemandModel"):
        eq.ExternalInstance([[1]], 1)


def test_solver_failures_are_reported(monkeypatch):
    class Failed:
        status, message = 4, "numerical trouble"

    monkeypatch.setattr(external, "linprog", lambda *a, **k: Failed())
    with pytest.raises(RuntimeError, match="numerical trouble"):
        eq.ExternalInstance(eq.DemandModel([[1]]), 1).benchmark_lp("highs")


def test_infeasible_program_is_reported():
    with pytest.raises(RuntimeError, match="infeasible"):
        external.solve_lp(np.ones(1), A_ub=np.ones((1, 1)), b_ub=[-1.0], bounds=(0, None))

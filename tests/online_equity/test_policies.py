import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import icml24.online_equity as eq

from .strategies import checked, instances

ALL = [
    eq.RatioAttenuation(),
    eq.RatioAttenuation("max"),
    eq.SimulationAttenuation(0.5),
    eq.SimulationAttenuation(),
    eq.ProjectedProportional(),
    eq.EqualSplit(),
    eq.TargetFillRate(),
    eq.ShareOfRest(),
    eq.FirstComeFirstServed(),
    eq.OnlineOptimal(),
]
GUARANTEED = ALL[:4]
names = [f"{type(p).__name__}-{getattr(p, 'gamma', '')}" for p in ALL]


def play(policy, instance):
    """Amounts on every scenario, with the raw rule (before the base class clips it)."""
    policy = copy.copy(policy).fit(instance)
    demands, probability = instance.demand.scenarios()
    policy.reset(len(demands))
    raw, amounts = np.empty_like(demands), np.empty_like(demands)
    left = np.empty_like(demands)
    inner = policy._amount

    def spy(i, demand, rest):
        left[:, i] = rest
        raw[:, i] = inner(i, demand, rest)
        return raw[:, i]

    policy._amount = spy
    for i in range(instance.n):
        amounts[:, i] = policy.allocate(demands[:, i])
    return policy, demands, probability, raw, amounts, left


@pytest.mark.parametrize("policy", ALL, ids=names)
@checked
@given(instance=instances())
def test_nothing_is_ever_over_allocated(policy, instance):
    _, demands, probability, _, amounts, _ = play(policy, instance)
    assert (amounts >= 0).all()
    assert (amounts <= demands * (1 + 1e-12)).all()
    assert (amounts.sum(axis=1) <= instance.budget * (1 + 1e-9)).all()
    share = eq.fills(amounts, demands)
    assert probability @ share.min(axis=1) <= (probability @ share).min() + 1e-12  # post <= ante


@pytest.mark.parametrize("policy", GUARANTEED, ids=names[:4])
@checked
@given(instance=instances())
def test_marginals_are_exact_and_clipping_never_bites(policy, instance):
    policy, demands, probability, raw, amounts, left = play(policy, instance)
    lp, gamma = instance.benchmark_lp(), policy.guarantee_
    assert gamma >= 0.5 - 1e-12
    np.testing.assert_allclose(raw, amounts, rtol=1e-9, atol=1e-9 * instance.budget)
    for i in range(instance.n):
        for k in range(instance.demand.sizes[i]):
            here = demands[:, i] == instance.demand.values[i, k]
            mean = probability[here] @ amounts[here, i] / probability[here].sum()
            assert mean == pytest.approx(gamma * lp.amounts[i, k], rel=1e-7, abs=1e-9)
    spent = np.cumsum(lp.spending) - lp.spending
    np.testing.assert_allclose(probability @ left, instance.budget - gamma * spent, rtol=1e-7)
    if isinstance(policy, eq.RatioAttenuation):
        np.testing.assert_allclose(policy.expected_left_, probability @ left, rtol=1e-9)


def test_ratio_is_exactly_one_half_on_random_instances(rng):
    for _ in range(40):
        instance = eq.random_instance(rng)
        for policy in (eq.RatioAttenuation(), eq.SimulationAttenuation(0.5)):
            ratio = eq.evaluate(policy, instance, exact=True).cr_ante
            assert ratio == pytest.approx(0.5, abs=1e-9)
        best = eq.SimulationAttenuation().fit(instance)
        assert eq.evaluate(best, instance, exact=True).cr_ante == pytest.approx(
            best.guarantee_, abs=1e-9
        )


@pytest.mark.parametrize("p", [0.5, 0.2, 0.1, 0.05, 0.01])
def test_tight_family(p):
    instance = eq.tight_instance(p, budget=3.0)
    assert instance.benchmark_lp().value == pytest.approx(p, abs=1e-8)
    assert instance.online_optimum() / p == pytest.approx(1 / (2 - p), abs=1e-6)
    assert eq.SimulationAttenuation().fit(instance).guarantee_ == pytest.approx(
        1 / (2 - p), abs=1e-9
    )
    assert eq.RatioAttenuation("max").fit(instance).guarantee_ == pytest.approx(
        1 / (2 - p), abs=1e-9
    )
    half = eq.evaluate(eq.RatioAttenuation(), instance, exact=True)
    assert half.cr_ante == pytest.approx(0.5, abs=1e-9)


def test_sure_demands_need_no_attenuation(rng):
    demand = eq.DemandModel(rng.lognormal(0, 1, (5, 1)))
    instance = eq.ExternalInstance(demand, 0.4 * demand.mean.sum())
    policy = eq.SimulationAttenuation().fit(instance)
    assert policy.guarantee_ == 1.0
    assert eq.evaluate(policy, instance, exact=True).cr_ante == pytest.approx(1)


def test_certificate_improves_as_agents_multiply():
    rng = np.random.default_rng(0)
    support, weight = [0.5, 1.0, 2.0], [0.3, 0.4, 0.3]
    gammas = []
    for n in (2, 5, 20, 80):
        demand = eq.DemandModel([support] * n, [weight] * n)
        instance = eq.ExternalInstance(demand, 0.5 * demand.mean.sum())
        gammas.append(eq.SimulationAttenuation(n_sim=4_000).fit(instance).guarantee_)
    assert (np.diff(gammas) > 0).all()
    assert gammas[-1] > 0.9
    assert rng is not None


def test_simulated_tables_approach_exact_ones(rng):
    instance = eq.random_instance(rng, n=(5, 5), points=(3, 3))
    exact = eq.SimulationAttenuation(exact=True).fit(instance)
    simulated = eq.SimulationAttenuation(exact=False, n_sim=40_000).fit(instance)
    assert exact.exact_
    assert not simulated.exact_
    assert simulated.guarantee_ == pytest.approx(exact.guarantee_, abs=0.01)
    np.testing.assert_allclose(simulated.thinning_, exact.thinning_, atol=0.02)


def test_policies_without_arguments_match_a_loop_over_single_paths(rng):
    """Vectorised runs equal a naive re-implementation, path by path."""
    instance = eq.random_instance(rng, n=(4, 4), points=(3, 3))
    demands = instance.demand.sample(50, 3)
    d, b, n = instance.demand, instance.budget, instance.n
    lp = instance.benchmark_lp()
    mean = d.mean

    def naive(rule):
        out = np.zeros_like(demands)
        for r, path in enumerate(demands):
            left, spent = b, 0.0
            for i, x in enumerate(path):
                k = list(d.values[i]).index(x)
                give = {
                    "P1": lambda: 0.5 * lp.amounts[i, k] * left / (b - 0.5 * spent),  # noqa: B023
                    "PPA": lambda: x * left / (x + mean[i + 1 :].sum()),  # noqa: B023
                    "equal": lambda: b / n,
                    "rest": lambda: left / (n - i),  # noqa: B023
                    "rate": lambda: min(1, b / mean.sum()) * x,  # noqa: B023
                    "fcfs": lambda: x,  # noqa: B023
                }[rule]()
                give = min(give, x, left)
                out[r, i] = give
                left -= give
                spent += lp.spending[i]
        return out

    rules = {
        "P1": eq.RatioAttenuation(),
        "PPA": eq.ProjectedProportional(),
        "equal": eq.EqualSplit(),
        "rest": eq.ShareOfRest(),
        "rate": eq.TargetFillRate(),
        "fcfs": eq.FirstComeFirstServed(),
    }
    for name, policy in rules.items():
        policy.fit(instance).reset(50)
        ours = np.stack([policy.allocate(column) for column in demands.T], axis=1)
        np.testing.assert_allclose(ours, naive(name), rtol=1e-12, err_msg=name)


def test_expected_share_does_not_depend_on_position():
    demand = eq.DemandModel([[1, 3, 9]] * 5, [[0.5, 0.3, 0.2]] * 5)
    instance = eq.ExternalInstance(demand, 5.0)
    for policy in GUARANTEED:
        share = eq.evaluate(policy, instance, exact=True).frame()["share"]
        assert np.ptp(share) < 1e-9
    first_come = eq.evaluate(eq.FirstComeFirstServed(), instance, exact=True).frame()["share"]
    assert np.ptp(first_come) > 0.3


@checked
@given(demands=st.lists(st.floats(0.01, 1e6), min_size=2, max_size=6))
def test_equal_split_has_ratio_one_over_n_on_every_path(demands):
    n = len(demands)
    instance = eq.ExternalInstance(eq.DemandModel([[d] for d in demands]), 1.0)
    policy = eq.EqualSplit().fit(instance)
    fill = min(float(policy.allocate(d)[0]) / d for d in demands)
    assert fill >= min(1, 1 / sum(demands)) / n * (1 - 1e-12)


def test_at_a_counter():
    demand = eq.DemandModel([[2, 6], [3], [1, 8]], names=["north", "east", "south"])
    instance = eq.ExternalInstance(demand, 6)
    policy = eq.SimulationAttenuation().fit(instance)
    given_out = [policy.decide(x) for x in (6, 3, 8)]
    log = policy.audit()
    assert log["agent"].tolist() == ["north", "east", "south"]
    np.testing.assert_allclose(log["amount"], given_out)
    np.testing.assert_allclose(log["left"], 6 - np.cumsum(given_out), atol=1e-9)
    with pytest.raises(ValueError, match="new day"):
        policy.decide(1)
    assert policy.reset().decide(6) == given_out[0]


def test_zero_demand_is_served():
    instance = eq.ExternalInstance(eq.DemandModel([[0, 2], [2]]), 1)
    policy = eq.RatioAttenuation().fit(instance)
    assert policy.decide(0) == 0
    assert policy.audit()["fill"].iloc[0] == 1


def test_unknown_demands_are_refused_or_rounded():
    instance = eq.ExternalInstance(eq.DemandModel([[1, 4], [2]]), 2)
    with pytest.raises(ValueError, match="not in the fitted support"):
        eq.RatioAttenuation().fit(instance).allocate(3.0)
    for policy in (
        eq.RatioAttenuation(off_support="nearest"),
        eq.SimulationAttenuation(off_support="nearest"),
    ):
        assert 0 < policy.fit(instance).decide(3.6) <= 3.6
        assert policy.decide(0.001) <= 0.001


@pytest.mark.parametrize("policy", ALL, ids=names)
def test_use_before_fit_is_refused(policy):
    fresh = copy.copy(policy)
    for call in (lambda: fresh.allocate(1.0), lambda: fresh.decide(1.0), lambda: fresh.audit()):
        with pytest.raises(eq.NotFittedError, match="call fit"):
            call()


def test_bad_input_is_refused():
    instance = eq.ExternalInstance(eq.DemandModel([[1], [2]]), 2)
    policy = eq.EqualSplit().fit(instance)
    for bad, message in (
        (np.nan, "finite"),
        (-1.0, "not negative"),
        (np.inf, "finite"),
        ([1.0, 2.0], "shape"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.allocate(bad)
    with pytest.raises(ValueError, match="n_runs"):
        policy.reset(0)
    with pytest.raises(ValueError, match="one day"):
        policy.reset(3).decide(1.0)
    with pytest.raises(TypeError, match="ExternalInstance"):
        eq.EqualSplit().fit([1, 2])
    with pytest.raises(ValueError, match="rate"):
        eq.TargetFillRate(1.5)
    with pytest.raises(ValueError, match="n_sim"):
        eq.SimulationAttenuation(n_sim=0)
    with pytest.raises(ValueError, match="off_support"):
        eq.RatioAttenuation(off_support="ignore")
    with pytest.raises(ValueError, match="metric"):
        eq.OnlineOptimal("mean")


@pytest.mark.parametrize("kind", [eq.RatioAttenuation, eq.SimulationAttenuation])
def test_gamma_is_checked(kind):
    instance = eq.tight_instance(0.1)
    with pytest.warns(UserWarning, match="wastes"):
        wasteful = kind(0.3).fit(instance)
    assert eq.evaluate(wasteful, instance, exact=True).cr_ante == pytest.approx(0.3)
    with pytest.raises(ValueError, match=r"0\.526316"):
        kind(0.9).fit(instance)
    for bad in (0.0, 1.2, "most"):
        with pytest.raises(ValueError, match="gamma"):
            kind(bad)


def test_fitting_and_evaluating_leave_the_users_objects_alone():
    instance = eq.ExternalInstance(eq.DemandModel([[1, 4], [2]]), 2)
    values = instance.demand.values.copy()
    policy = eq.SimulationAttenuation().fit(instance)
    policy.decide(1.0)
    left, state = policy.left_.copy(), np.random.get_state()[1].copy()  # noqa: NPY002
    eq.evaluate(policy, instance, n_runs=10)
    np.testing.assert_array_equal(policy.left_, left)
    assert policy.position_ == 1
    np.testing.assert_array_equal(instance.demand.values, values)
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002

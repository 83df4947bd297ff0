import itertools
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import icml24.online_equity as eq
from icml24.online_equity.group_policies import _occupancy, _threshold_policy, whole_quotas

from .strategies import checked

GATES = [eq.LPMagician, eq.LPAttenuated]


def brute_force(policy, instance):
    """Expected units by type and ex-post value, over all paths and all coin outcomes."""
    arrivals, budget = instance.arrivals, instance.budget
    law = {(0,) * arrivals.J: 1.0}
    for t in range(arrivals.T):
        new = {}
        for served, chance in law.items():
            for j in range(arrivals.J):
                used = np.array([sum(served)])
                q = float(policy._probability(t, used, np.array([served]), np.array([j]))[0])
                q = q if sum(served) < budget else 0.0
                more = served[:j] + (served[j] + 1,) + served[j + 1 :]
                for state, p in ((more, q), (served, 1 - q)):
                    weight = chance * arrivals.probabilities[t, j] * p
                    if weight:
                        new[state] = new.get(state, 0.0) + weight
        law = new
    states, p = np.array(list(law)), np.array(list(law.values()))
    ratio = states @ arrivals.groups.T / instance.tau
    return p @ states, float(p @ ratio.min(axis=1))


def every_policy(instance):
    policies = [
        eq.ServeAll(),
        eq.LPGreedy(),
        eq.TypeQuotas(),
        eq.SelectionSampling(),
        eq.LPMagician(),
        eq.LPMagician(schedule="sharp"),
        eq.LPAttenuated(),
        eq.OccupancyOptimal(),
        eq.ExPostOptimal(),
    ]
    return [policy.fit(instance) for policy in policies]


def test_exact_evaluation_equals_brute_force(overlap):
    instance = eq.InternalInstance(overlap, 3)
    for policy in every_policy(instance):
        units, post = brute_force(policy, instance)
        np.testing.assert_allclose(eq.exact_units(policy), units, atol=1e-12)
        report = eq.evaluate(policy, instance, exact=True)
        assert report.ex_post.value == pytest.approx(post)
        ante = (overlap.groups @ units / instance.tau).min()
        assert report.ex_ante.value == pytest.approx(ante)
        assert report.ex_post.value <= report.ex_ante.value + 1e-12


def test_simulation_agrees_with_exact_values(overlap):
    instance = eq.InternalInstance(overlap, 3)
    for policy in every_policy(instance):
        exact = eq.evaluate(policy, instance, exact=True)
        simulated = eq.evaluate(policy, instance, n_runs=20_000, random_state=2)
        gap = simulated.frame()["share"] - exact.frame()["share"]
        assert (abs(gap) <= 4.5 * simulated.frame()["se"] + 1e-12).all(), policy
        width = simulated.ex_post.high - simulated.ex_post.value
        assert abs(simulated.ex_post.value - exact.ex_post.value) < 2.5 * width + 1e-12


def test_no_unit_is_invented(overlap):
    instance = eq.InternalInstance(overlap, 3)
    paths = overlap.sample(500, 1)
    for policy in every_policy(instance):
        policy.reset(500, 0)
        answers = np.stack([policy.allocate(kinds) for kinds in paths.T], axis=1)
        assert answers.sum(axis=1).max() <= 3
        np.testing.assert_array_equal(answers.sum(axis=1), policy.served_.sum(axis=1))
        arrived = (paths[:, :, None] == np.arange(4)).sum(axis=1)
        assert (policy.served_ <= arrived).all()


def test_selection_sampling_serves_every_round_alike():
    share = np.linspace(0.9, 0.1, 30)
    arrivals = eq.ArrivalModel(np.column_stack([share, 1 - share]), [[1, 0], [0, 1], [1, 1]])
    instance = eq.InternalInstance(arrivals, 12)
    policy = eq.SelectionSampling().fit(instance)
    assert policy.guarantee_ == 1.0
    policy.reset(20_000, 3)
    rate = [policy.allocate(kinds).mean() for kinds in arrivals.sample(20_000, 1).T]
    assert (policy.used_ == 12).all()
    se = np.sqrt(0.4 * 0.6 / 20_000)
    assert abs(np.array(rate) - 0.4).max() < 4 * se
    np.testing.assert_allclose(arrivals.groups @ eq.exact_units(policy), instance.tau, rtol=1e-9)


def test_more_units_than_rounds_serve_everybody():
    arrivals = eq.ArrivalModel([[0.5, 0.5]] * 3, np.eye(2))
    instance = eq.InternalInstance(arrivals, 5)
    policy = eq.SelectionSampling().fit(instance)
    assert policy.guarantee_ is None
    assert all(policy.allocate(0)[0] for _ in range(3))


@checked
@given(
    targets=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    seed=st.integers(0, 2**20),
    drift=st.floats(0.2, 3),
)
def test_quota_equals_the_clairvoyant_on_every_path(targets, seed, drift):
    rng = np.random.default_rng(seed)
    groups, budget = len(targets), sum(targets)
    p = rng.dirichlet(np.full(groups, drift), budget + 5)
    instance = eq.InternalInstance(eq.ArrivalModel(p, np.eye(groups)), budget, targets)
    paths = instance.arrivals.sample(40, seed)
    policy = eq.Quota().fit(instance).reset(40, 0)
    for kinds in paths.T:
        policy.allocate(kinds)
    counts = (paths[:, :, None] == np.arange(groups)).sum(axis=1)
    np.testing.assert_array_equal(policy.served_, np.minimum(counts, targets))
    ours = (policy.served_ / instance.tau).min(axis=1)
    np.testing.assert_allclose(ours, instance.clairvoyant_paths(counts.astype(float)), atol=1e-12)


def test_ex_post_recursion_equals_quota_where_quota_is_optimal():
    share = np.linspace(0.8, 0.2, 9)
    arrivals = eq.ArrivalModel(np.column_stack([share, 1 - share]), np.eye(2))
    instance = eq.InternalInstance(arrivals, 4, [2, 2])
    quota = eq.evaluate(eq.Quota(), instance, exact=True)
    assert eq.ExPostOptimal().fit(instance).value_ == pytest.approx(quota.ex_post.value)
    assert quota.ex_post.value == pytest.approx(quota.clairvoyant_post)


def test_ex_post_recursion_is_the_best_of_all_deterministic_rules():
    """Enumerate every rule that depends on (round, served, type) on a tiny instance."""
    p = np.array([[0.6, 0.4], [0.3, 0.7], [0.5, 0.5]])
    instance = eq.InternalInstance(eq.ArrivalModel(p, np.eye(2)), 2, [1.2, 0.8])

    def best(t, served):
        if t == 3:
            return min(served[0] / 1.2, served[1] / 0.8)
        value = 0.0
        for j in range(2):
            options = [best(t + 1, served)]
            if sum(served) < 2:
                more = list(served)
                more[j] += 1
                options.append(best(t + 1, tuple(more)))
            value += p[t, j] * max(options)
        return value

    policy = eq.ExPostOptimal().fit(instance)
    assert policy.value_ == pytest.approx(best(0, (0, 0)))
    reached = eq.evaluate(policy, instance, exact=True)
    assert reached.ex_post.value == pytest.approx(policy.value_)


def test_ex_post_optimum_beats_all_rules_and_not_the_clairvoyant(overlap):
    instance = eq.InternalInstance(overlap, 3)
    best = eq.ExPostOptimal().fit(instance).value_
    for policy in every_policy(instance):
        report = eq.evaluate(policy, instance, exact=True)
        assert report.ex_post.value <= best + 1e-9
        assert report.clairvoyant_post >= best - 1e-9


def test_occupancy_optimum_by_columns_equals_the_lp(rng):
    for seed in range(4):
        local = np.random.default_rng(seed)
        arrivals = eq.ArrivalModel(
            local.dirichlet(np.ones(4), 12), [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            instance = eq.InternalInstance(arrivals, 4, local.uniform(0.5, 3, 3))
        columns, lp = eq.OccupancyOptimal().fit(instance), eq.OccupancyOptimal("lp").fit(instance)
        assert columns.value_ == pytest.approx(lp.value_, abs=1e-7)
        for policy in (columns, lp):
            reached = (arrivals.groups @ eq.exact_units(policy) / instance.tau).min()
            assert reached == pytest.approx(columns.value_, abs=1e-6)
        assert columns.value_ <= instance.benchmark_lp().value + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_occupancy_optimum_where_waiting_matters(seed):
    """Each round may bring one kind of guest or nobody: the optimum lies well below the LP."""
    chance = np.random.default_rng(seed).uniform(0.05, 0.5, 5)
    p = np.column_stack([np.diag(chance), 1 - chance])
    arrivals = eq.ArrivalModel(p, np.eye(6)[:5])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        instance = eq.InternalInstance(arrivals, 1, chance)
    columns, lp = eq.OccupancyOptimal().fit(instance), eq.OccupancyOptimal("lp").fit(instance)
    assert columns.value_ == pytest.approx(lp.value_, abs=1e-7)
    assert columns.guarantee_ < 0.97


def test_dynamic_programme_is_optimal_for_given_weights(rng):
    def best(t, left):
        if t == len(p) or left == 0:
            return 0.0
        wait, take = best(t + 1, left), best(t + 1, left - 1)
        return sum(p[t, j] * max(wait, reward[j] + take) for j in range(3))

    for _ in range(5):
        p, reward = rng.dirichlet(np.ones(3), 6), rng.exponential(1, 3)
        accept = _threshold_policy(p, reward, 2)
        law = _occupancy(p, accept)
        reached = np.einsum("tk,tkj,tj,j->", law, accept, p, reward)
        assert reached == pytest.approx(best(0, 2))


def test_occupancy_optimum_beats_the_other_rules(overlap):
    instance = eq.InternalInstance(overlap, 3, [1.0, 1.5, 2.0])
    best = eq.OccupancyOptimal().fit(instance).value_
    for policy in every_policy(instance):
        assert eq.evaluate(policy, instance, exact=True).ex_ante.value <= best + 1e-8


@pytest.mark.parametrize("p", [0.5, 0.2, 0.05, 0.01])
def test_internal_tight_case(p):
    instance = eq.tight_rounds(p)
    assert instance.benchmark_lp().value == pytest.approx(1)
    for policy in (eq.OccupancyOptimal().fit(instance), eq.LPMagician().fit(instance)):
        assert policy.guarantee_ == pytest.approx(1 / (2 - p), abs=1e-9)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("schedule", ["even", "sharp"])
def test_gates_give_gamma_times_the_lp(kind, schedule, overlap):
    instance = eq.InternalInstance(overlap, 3, [1.0, 1.5, 2.0])
    policy = kind(schedule=schedule).fit(instance)
    p = overlap.probabilities
    target = policy.guarantee_ * (p * policy._accept).sum(axis=0)
    np.testing.assert_allclose(eq.exact_units(policy), target, atol=1e-9)
    assert (overlap.groups @ target / instance.tau).min() == pytest.approx(
        policy.guarantee_ * instance.benchmark_lp().value
    )


def test_gate_opens_with_probability_gamma_in_every_round():
    arrivals = eq.ArrivalModel(np.ones((60, 1)), [[1]])
    instance = eq.InternalInstance(arrivals, 5)
    for kind in GATES:
        policy = kind().fit(instance)
        law = np.zeros(6)
        law[0] = 1.0
        for t in range(60):
            assert law @ policy.gates_[t] == pytest.approx(policy.guarantee_, abs=1e-9)
            move = law * policy.gates_[t] * 5 / 60
            law = law - move
            law[1:] += move[:-1]


def test_magician_respects_its_bound_and_beats_the_blind_gate():
    arrivals = eq.ArrivalModel(np.ones((200, 1)), [[1]])
    for b in (1, 2, 5, 10):
        instance = eq.InternalInstance(arrivals, b)
        magician, blind = eq.LPMagician().fit(instance), eq.LPAttenuated().fit(instance)
        assert magician.guarantee_ >= 1 - 1 / np.sqrt(b + 3) - 1e-9
        assert magician.guarantee_ >= blind.guarantee_ - 1e-9
        assert blind.guarantee_ >= 0.5 - 1e-9


def test_lp_solvers_agree(overlap, rng):
    for _ in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            instance = eq.InternalInstance(overlap, 3, rng.uniform(0.5, 3, 3))
        highs, readable = instance.benchmark_lp(), instance.benchmark_lp("cvxpy")
        assert highs.value == pytest.approx(readable.value, abs=1e-8)
        for acceptance in (highs.acceptance, readable.acceptance, instance.sharp_acceptance()):
            units = (overlap.probabilities * acceptance).sum(axis=0)
            assert units.sum() <= 3 + 1e-6
            ratio = (overlap.groups @ units / instance.tau).min()
            assert ratio == pytest.approx(highs.value, abs=1e-6)


def test_lp_of_disjoint_groups_by_hand():
    arrivals = eq.ArrivalModel([[0.25, 0.75]] * 4, np.eye(2))  # expects 1 and 3 arrivals
    instance = eq.InternalInstance(arrivals, 2, [1.6, 0.4])
    assert instance.benchmark_lp().value == pytest.approx(1 / 1.6)  # group 0 is too rare
    assert eq.InternalInstance(arrivals, 2, [0.4, 1.6]).benchmark_lp().value == pytest.approx(1)


def test_clairvoyant_paths_equal_a_search_over_whole_and_part_units(overlap):
    instance = eq.InternalInstance(overlap, 3)
    counts = np.array([[1, 2, 3, 4], [0, 5, 0, 5], [10, 0, 0, 0], [3, 3, 3, 1]], float)
    values = instance.clairvoyant_paths(counts)
    grid = np.arange(0, 3.01, 0.5)
    for n, value in zip(counts, values, strict=True):
        best = 0.0
        for y in itertools.product(grid, repeat=4):
            y = np.array(y)
            if (y <= n).all() and y.sum() <= 3:
                best = max(best, (overlap.groups @ y / instance.tau).min())
        assert best <= value + 1e-9
        assert value <= best + 0.5 * 2 / instance.tau.min()
    assert values[2] == 0.0


def test_clairvoyants_are_ordered(overlap):
    instance = eq.InternalInstance(overlap, 3)
    post, ante = instance.clairvoyant("post", 300), instance.clairvoyant("ante", 300)
    assert post <= ante + 1e-9
    assert ante <= instance.benchmark_lp().value * 1.1


def test_table_to_arrivals_with_ties_weights_and_order():
    people = pd.DataFrame(
        {"age": [90, 70, 70, 80], "sex": ["f", "f", "m", "m"], "people": [2, 1, 3, 2]}
    )
    arrivals = eq.ArrivalModel.from_frame(people, "sex", rounds=2, time="age", weight="people")
    # youngest first: 1 f and 3 m of age 70 at once, then 2 m and 2 f
    np.testing.assert_allclose(arrivals.probabilities, [[0.25, 0.75], [0.5, 0.5]])
    assert arrivals.group_names == ["sex=f", "sex=m"]
    np.testing.assert_allclose(arrivals.population_share, [3 / 8, 5 / 8])
    thirds = eq.ArrivalModel.from_frame(people, "sex", rounds=3, time="age", weight="people")
    np.testing.assert_allclose(thirds.probabilities.sum(axis=0) * 8 / 3, [3, 5])


def test_merging_types_of_equal_membership_changes_nothing(rng):
    p = rng.dirichlet(np.ones(4), 8)
    arrivals = eq.ArrivalModel(p, [[1, 1, 0, 0], [0, 0, 1, 1]])
    merged = arrivals.merged()
    assert merged.J == 2
    np.testing.assert_allclose(merged.population_share, arrivals.population_share)
    a = eq.OccupancyOptimal().fit(eq.InternalInstance(arrivals, 3)).value_
    assert a == pytest.approx(eq.OccupancyOptimal().fit(eq.InternalInstance(merged, 3)).value_)


def test_at_a_counter():
    people = pd.DataFrame({"sex": list("ffmmfm"), "city": list("aabbab")})
    arrivals = eq.ArrivalModel.from_frame(people, ["sex", "city"], rounds=4)
    policy = eq.SelectionSampling().fit(eq.InternalInstance(arrivals, 2)).reset(random_state=0)
    answers = [
        policy.decide({"sex": "f", "city": "a"}),
        policy.decide(("m", "b")),
        policy.decide(people.iloc[0]),
        policy.decide(("m", "b")),
    ]
    assert sum(answers) == 2
    audit = policy.audit()
    assert audit.set_index("group").loc["sex=f", "arrivals"] == 2
    assert audit["units"].sum() == 4  # each unit counts for one sex and one city
    assert policy.log()["accepted"].tolist() == answers
    with pytest.raises(ValueError, match="Unknown type"):
        policy.reset().decide(("x", "a"))
    with pytest.raises(ValueError, match="entries"):
        policy.decide({"sex": "f"})


def test_whole_quotas():
    np.testing.assert_array_equal(whole_quotas(np.array([1.5, 1.2, 1.3]), 4), [2, 1, 1])
    np.testing.assert_array_equal(whole_quotas(np.array([2.0, 2.0]), 4), [2, 2])


def test_quota_refuses_overlaps(overlap):
    with pytest.raises(ValueError, match="disjoint"):
        eq.Quota().fit(eq.InternalInstance(overlap, 3))


@pytest.mark.parametrize(
    ("p", "groups", "message"),
    [
        ([[0.5, 0.4]], np.eye(2), "sum to 0.9"),
        ([[1.5, -0.5]], np.eye(2), "not negative"),
        ([[np.nan, 1.0]], np.eye(2), "finite"),
        ([[0.5, 0.5]], [[1, 1], [0, 0]], "is empty"),
        ([[1.0, 0.0]], np.eye(2), "is empty"),
        ([[0.5, 0.5]], [[1, 1, 1]], "one row|column per type"),
        ([[0.5, 0.5]], [[1, 2]], "True or False"),
        ([0.5, 0.5], np.eye(2), "shape"),
    ],
)
def test_bad_arrivals_are_refused(p, groups, message):
    with pytest.raises(ValueError, match=message):
        eq.ArrivalModel(p, groups)


@pytest.mark.parametrize(
    ("budget", "targets", "message"),
    [
        (0, "population", "at least 1"),
        (-2, "population", "at least 1"),
        (2.5, "population", "whole number"),
        ("two", "population", "whole number"),
        (2, [1.0], "entries"),
        (2, [1.0, 0.0], "positive"),
        (2, [1.0, np.nan], "positive"),
        (2, "equal", "targets"),
    ],
)
def test_bad_internal_instances_are_refused(budget, targets, message):
    arrivals = eq.ArrivalModel([[0.5, 0.5]] * 4, np.eye(2))
    with pytest.raises(ValueError, match=message):
        eq.InternalInstance(arrivals, budget, targets)


def test_broken_promises_warn():
    arrivals = eq.ArrivalModel([[0.5, 0.5]] * 4, np.eye(2))
    with pytest.warns(UserWarning, match="cannot be reached"):
        eq.InternalInstance(arrivals, 2, [2.0, 1.0])
    many = eq.ArrivalModel([[1 / 14] * 14] * 20, np.eye(14))
    with pytest.warns(UserWarning, match="promised 28"):
        eq.InternalInstance(many, 14, [2.0] * 14)


def test_bad_use_is_refused(overlap):
    instance = eq.InternalInstance(overlap, 3)
    policy = eq.ServeAll()
    for call in (lambda: policy.allocate(0), lambda: policy.decide(0), policy.audit, policy.reset):
        with pytest.raises(eq.NotFittedError, match="call fit"):
            call()
    policy.fit(instance)
    for bad, message in (
        (4, "between 0 and 3"),
        (-1, "between"),
        (0.5, "integer"),
        ([0, 1], "integer"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.allocate(bad)
    with pytest.raises(ValueError, match="one day"):
        policy.reset(2).decide(0)
    policy.reset()
    for _ in range(10):
        policy.allocate(0)
    with pytest.raises(ValueError, match="rounds are over"):
        policy.allocate(0)
    with pytest.raises(TypeError, match="InternalInstance"):
        eq.ServeAll().fit(overlap)
    for kind in GATES:
        with pytest.raises(ValueError, match="largest"):
            kind(0.999).fit(instance)
        with pytest.raises(ValueError, match="gamma"):
            kind(0.0)
        with pytest.raises(ValueError, match="schedule"):
            kind(schedule="random")
    with pytest.raises(ValueError, match="method"):
        eq.OccupancyOptimal("simplex")
    with pytest.raises(ValueError, match="too many"):
        eq.ExPostOptimal(limit=10).fit(instance)

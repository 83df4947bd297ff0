"""Experiments of the chapter: pure functions ``(config, seed) -> record``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from icml24.online_equity import data
from icml24.online_equity.demand import DemandModel
from icml24.online_equity.external import ExternalInstance
from icml24.online_equity.group_policies import (
    ExPostOptimal,
    GroupPolicy,
    LPAttenuated,
    LPMagician,
    OccupancyOptimal,
    Quota,
    SelectionSampling,
    exact_units,
)
from icml24.online_equity.groups import ArrivalModel, InternalInstance
from icml24.online_equity.hard_instances import (
    adversarial_instance,
    ex_post_chain,
    random_instance,
    synchronous_demands,
    tight_instance,
)
from icml24.online_equity.peers import (
    EqualSplit,
    FirstComeFirstServed,
    LPGreedy,
    ProjectedProportional,
    ServeAll,
    ShareOfRest,
    TargetFillRate,
    TypeQuotas,
)
from icml24.online_equity.policies import Policy, RatioAttenuation, SimulationAttenuation
from icml24.online_equity.report import compare, evaluate, exact_ratios

__all__ = [
    "EXPERIMENTS",
    "Config",
    "adversary",
    "arrival_positions",
    "dependent_demands",
    "disjoint_groups",
    "ex_post_limit",
    "external_policies",
    "group_policies",
    "internal_policies",
    "random_ratios",
    "real_demand",
    "small_overlaps",
    "tight_family",
    "yardsticks",
]


@dataclass(frozen=True)
class Config:
    """Settings of all experiments of this chapter.

    Attributes
    ----------
    n_instances : int
        Random instances for each seed (:func:`random_ratios`, :func:`yardsticks` uses a fifth).
    n_runs : int
        Simulated paths.
    n_evals : int
        Instances that the adversary may try.
    dataset : {"visits", "tests"}
        For :func:`real_demand`.
    supply : float
        Stock / expected demand, for :func:`real_demand`.
    targets : {"population", "preset"}
        For :func:`group_policies`.
    rounds, budget : int
        Size of the internal instances.
    """

    n_instances: int = 200
    n_runs: int = 20_000
    n_evals: int = 800
    dataset: Literal["visits", "tests"] = "visits"
    supply: float = 0.25
    targets: Literal["population", "preset"] = "population"
    rounds: int = 80
    budget: int = 24

    @classmethod
    def laptop(cls) -> Config:
        """Return what the book runs: minutes on one core."""
        return cls()

    @classmethod
    def paper(cls) -> Config:
        """Return larger settings for a server; the paper is theory and has no scale of its own."""
        return cls(n_instances=5_000, n_runs=1_000_000, n_evals=50_000, rounds=800, budget=240)


def external_policies() -> dict[str, Policy]:
    """Return the policies of the external model under the names used in tables and figures."""
    return {
        "P1 (1/2)": RatioAttenuation(),
        "P2 (1/2)": SimulationAttenuation(0.5),
        "P1 (max)": RatioAttenuation("max"),
        "P2 (max)": SimulationAttenuation(),
        "PPA": ProjectedProportional(),
        "equal split": EqualSplit(),
        "fixed rate": TargetFillRate(),
        "share of rest": ShareOfRest(),
        "first come": FirstComeFirstServed(),
    }


def internal_policies() -> dict[str, GroupPolicy]:
    """Return the policies for overlapping groups under the names used in tables and figures."""
    return {
        "first come": ServeAll(),
        "selection sampling": SelectionSampling(),
        "LP + blind gate": LPAttenuated(),
        "LP greedy": LPGreedy(),
        "LP + magician": LPMagician(),
        "LP + magician, sharp": LPMagician(schedule="sharp"),
        "type quotas": TypeQuotas(),
        "occupancy optimum": OccupancyOptimal(),
    }


def random_ratios(config: Config, seed: int) -> dict[str, Any]:
    """Compute the exact ratios of all external policies on random heavy-tailed instances.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        ``"<policy> min"``, ``"<policy> median"`` (ex ante / LP), ``"<policy> post"`` (median, ex
        post / clairvoyant), and the arrays ``cr_ante``, ``cr_post`` of shape (instances, policies).
    """
    rng = np.random.default_rng([5, seed])
    policies = external_policies()
    instances = [random_instance(rng) for _ in range(config.n_instances)]
    ratios = [[exact_ratios(rule, one) for rule in policies.values()] for one in instances]
    ante, post = np.moveaxis(np.array(ratios), 2, 0)
    record: dict[str, Any] = {}
    for i, name in enumerate(policies):
        record[f"{name} min"] = float(ante[:, i].min())
        record[f"{name} median"] = float(np.median(ante[:, i]))
        record[f"{name} post"] = float(np.median(post[:, i]))
    return {**record, "cr_ante": ante, "cr_post": post}


TIGHT = (0.5, 0.2, 0.1, 0.05, 0.01)


def tight_family(config: Config, seed: int) -> dict[str, float]:
    """Compare the best online policy and P2 with the LP on the tight family (exact).

    Parameters
    ----------
    config : Config
    seed : int
        Unused.

    Returns
    -------
    dict
        ``"optimum p=..."``, ``"P2 p=..."``, and ``error``: largest distance from 1 / (2 - p).
    """
    record, errors = {}, []
    for p in TIGHT:
        instance = tight_instance(p)
        lp = instance.benchmark_lp().value
        optimum = instance.online_optimum() / lp
        promised = SimulationAttenuation().fit(instance).guarantee_
        assert promised is not None
        record[f"optimum p={p}"], record[f"P2 p={p}"] = optimum, promised
        errors += [abs(optimum - 1 / (2 - p)), abs(promised - 1 / (2 - p))]
    return {**record, "error": max(errors)}


def yardsticks(config: Config, seed: int) -> dict[str, float]:
    """Measure the margins in LP >= clairvoyant >= best online policy >= P2, random instances.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        Smallest margin of each link (``lp``, ``clairvoyant``, ``online``), their minimum
        ``margin``, and the median values relative to the LP.
    """
    rng = np.random.default_rng([6, seed])
    rows = []
    for _ in range(max(1, config.n_instances // 5)):
        instance = random_instance(rng, n=(2, 4))
        p2 = evaluate(SimulationAttenuation(), instance, exact=True).ex_ante.value
        lp = instance.benchmark_lp().value
        rows.append([lp, instance.clairvoyant("ante"), instance.online_optimum("ante"), p2])
    values = np.array(rows)
    gaps = -np.diff(values, axis=1).T
    relative = np.median(values / values[:, :1], axis=0)
    return {
        "lp": float(gaps[0].min()),
        "clairvoyant": float(gaps[1].min()),
        "online": float(gaps[2].min()),
        "margin": float(gaps.min()),
        "clairvoyant / LP": float(relative[1]),
        "online / LP": float(relative[2]),
        "P2 / LP": float(relative[3]),
    }


def adversary(config: Config, seed: int) -> dict[str, Any]:
    """Measure how far an evolution strategy can push each policy's ex-ante ratio down (3 agents).

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        Worst ratio found for each policy, and ``trace <policy>``: best so far.
    """
    chosen = ("P2 (max)", "PPA", "equal split", "fixed rate", "first come")
    record: dict[str, Any] = {}
    for name in chosen:
        policy = external_policies()[name]
        _, worst, trace = adversarial_instance(policy, n_evals=config.n_evals, random_state=seed)
        record[name], record[f"trace {name}"] = worst, trace
    return record


def ex_post_limit(config: Config, seed: int) -> dict[str, float]:
    """Compute the best ex-post ratio of any policy on the chain, times n (exact).

    Parameters
    ----------
    config : Config
    seed : int
        Unused.

    Returns
    -------
    dict
        ``"optimum n=..."``, ``"equal split n=..."`` (ratios) and ``n times optimum`` (largest).
    """
    record, scaled = {}, []
    for n in (2, 3, 4, 5):
        instance = ex_post_chain(n, growth=1000.0)
        ratio = instance.online_optimum("post") / instance.clairvoyant("post")
        record[f"optimum n={n}"] = ratio
        report = evaluate(EqualSplit(), instance, exact=True)
        record[f"equal split n={n}"] = report.cr_post
        scaled.append(n * ratio)
    return {**record, "n times optimum": max(scaled)}


def arrival_positions(config: Config, seed: int) -> dict[str, Any]:
    """Compute the expected fill by position for seven agents with one demand law (exact).

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        ``"<policy>"``: largest minus smallest expected fill over the positions, relative to the
        LP value; ``"fill <policy>"``: the fills.
    """
    rng = np.random.default_rng([7, seed])
    support, weight = rng.lognormal(0, 1.5, 3), rng.dirichlet(np.ones(3))
    demand = DemandModel([support] * 7, [weight] * 7)
    instance = ExternalInstance(demand, 0.4 * demand.mean.sum())
    record: dict[str, Any] = {}
    for name, policy in external_policies().items():
        report = evaluate(policy, instance, exact=True)
        share = report.frame()["share"].to_numpy()
        record[name] = float(np.ptp(share) / report.benchmark)
        record[f"fill {name}"] = share
    return record


def real_demand(config: Config, seed: int) -> dict[str, float]:
    """Run all external policies on real demand (``config.dataset``, ``config.supply``).

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        ``"<policy> ante"`` (relative to the LP) and ``"<policy> post"`` (to the clairvoyant).
    """
    build = {"visits": data.medical_visits, "tests": data.weekly_tests}[config.dataset]
    table = compare(
        external_policies(), build(config.supply), n_runs=config.n_runs, random_state=seed
    ).set_index("policy")
    ante = {f"{name} ante": float(x) for name, x in table["cr_ante"].items()}
    return {**ante, **{f"{name} post": float(x) for name, x in table["cr_post"].items()}}


def group_instance(config: Config) -> InternalInstance:
    """Build phased eligibility (NMES) with the targets that the configuration asks for."""
    arrivals = data.phased_eligibility(config.rounds)
    if config.targets == "population":
        return InternalInstance(arrivals, config.budget)
    return data.preset_targets(arrivals, config.budget)


def group_policies(config: Config, seed: int) -> dict[str, float]:
    """Run all internal policies with overlapping groups: phased eligibility, oldest first.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        ``"<policy> ante"`` (exact where the rule only counts units, relative to the LP) and
        ``"<policy> post"`` (simulated), ``clairvoyant post``.
    """
    instance = group_instance(config)
    lp = instance.benchmark_lp().value
    record: dict[str, float] = {}
    for name, policy in internal_policies().items():
        policy.fit(instance)
        report = evaluate(policy, instance, n_runs=config.n_runs, random_state=seed)
        ratio = report.ex_ante.value
        if policy.counts_only:
            units = instance.arrivals.groups @ exact_units(policy)
            ratio = float((units / instance.tau).min())
        record[f"{name} ante"] = ratio / lp
        record[f"{name} post"] = report.ex_post.value
        record["clairvoyant post"] = report.clairvoyant_post
    return record


def disjoint_groups(config: Config, seed: int) -> dict[str, float]:
    """Compare quota with the clairvoyant, path by path: two disjoint groups whose mix drifts.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        ``largest difference`` over paths, and both metrics of the peers.
    """
    share = np.linspace(0.8, 0.2, 60)
    arrivals = ArrivalModel(np.column_stack([share, 1 - share]), np.eye(2))
    instance = InternalInstance(arrivals, 20)
    paths = arrivals.sample(min(config.n_runs, 4_000), np.random.default_rng([8, seed]))
    policy = Quota().fit(instance).reset(len(paths), seed)
    for kinds in paths.T:
        policy.allocate(kinds)
    counts = (paths[:, :, None] == np.arange(2)).sum(axis=1).astype(float)
    ours = (policy.served_ @ arrivals.groups.T / instance.tau).min(axis=1)
    gap = np.abs(ours - instance.clairvoyant_paths(counts)).max()
    record = {"largest difference": float(gap), "left over": float(20 - policy.used_.max())}
    rules = {"first come": ServeAll(), "selection": SelectionSampling(), "quota": Quota()}
    for name, rule in rules.items():
        report = evaluate(rule, instance, n_runs=4_000, random_state=seed)
        record[f"{name} ante"] = report.ex_ante.value
        record[f"{name} post"] = report.ex_post.value
    return record


def small_overlaps(config: Config, seed: int) -> dict[str, float]:
    """Put backward recursion (ex-post optimum) beside its rivals on a small overlapping instance.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        Exact ex-post values of the optimum, the clairvoyant and the rivals.
    """
    rng = np.random.default_rng([9, seed])
    arrivals = ArrivalModel(
        rng.dirichlet(np.ones(4), 12), [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    )
    instance = InternalInstance(arrivals, 4)
    rules: dict[str, GroupPolicy] = {
        "optimum": ExPostOptimal(),
        "first come": ServeAll(),
        "selection sampling": SelectionSampling(),
        "LP + magician": LPMagician(),
        "occupancy optimum": OccupancyOptimal(),
    }
    record = {}
    for name, rule in rules.items():
        report = evaluate(rule, instance, exact=True)
        record[name], record["clairvoyant"] = report.ex_post.value, report.clairvoyant_post
    return record


def dependent_demands(config: Config, seed: int) -> dict[str, float]:
    """Measure P1 when all demands move together: the guarantee needs independence (exact).

    Parameters
    ----------
    config : Config
    seed : int
        Unused.

    Returns
    -------
    dict
        P1's ex-ante ratio for n = 2, 3, 4, 6 agents.
    """
    record = {}
    for n in (2, 3, 4, 6):
        instance, scenarios = synchronous_demands(n)
        report = evaluate(RatioAttenuation(), instance, scenarios=scenarios)
        record[f"P1 n={n}"] = report.cr_ante
    return record


EXPERIMENTS: dict[str, Callable[[Config, int], Mapping[str, Any]]] = {
    "random_ratios": random_ratios,
    "tight_family": tight_family,
    "yardsticks": yardsticks,
    "adversary": adversary,
    "ex_post_limit": ex_post_limit,
    "arrival_positions": arrival_positions,
    "real_demand": real_demand,
    "group_policies": group_policies,
    "disjoint_groups": disjoint_groups,
    "small_overlaps": small_overlaps,
    "dependent_demands": dependent_demands,
}

"""Evaluate policies: simulated (thousands of paths at once) or exact, and report who got what."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
from tqdm import tqdm

from icml24.core.statistics import Estimate
from icml24.online_equity.external import ExternalInstance, fills
from icml24.online_equity.group_policies import GroupPolicy, _exact
from icml24.online_equity.groups import InternalInstance
from icml24.online_equity.policies import Policy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["EquityReport", "compare", "evaluate", "exact_ratios"]

AnyPolicy = Policy | GroupPolicy
AnyInstance = ExternalInstance | InternalInstance


@dataclass(frozen=True)
class EquityReport:
    """How fairly a policy treats agents (external model) or groups (internal model).

    Attributes
    ----------
    policy : str
        Class name of the policy.
    ex_ante : Estimate
        Smallest expected share, with a 95 % interval for the worst-off agent or group.
    ex_post : Estimate
        Expected smallest share, with a 95 % interval.
    benchmark : float
        Value of the ex-ante benchmark LP.
    clairvoyant_post : float
        Ex-post value of a planner who sees everything first (on the same paths).
    guarantee : float or None
        What was promised: a lower bound on ``cr_ante``.
    units : float
        Expected units handed out.
    table : DataFrame
        One row for each agent or group; see :meth:`frame`.
    n_runs : int
        Simulated paths; 0 if the numbers are exact.
    """

    policy: str
    ex_ante: Estimate
    ex_post: Estimate
    benchmark: float
    clairvoyant_post: float
    guarantee: float | None
    units: float
    table: pd.DataFrame
    n_runs: int

    @property
    def cr_ante(self) -> float:
        """Ex-ante metric relative to the benchmark LP."""
        return self.ex_ante.value / self.benchmark

    @property
    def cr_post(self) -> float:
        """Ex-post metric relative to the clairvoyant."""
        return self.ex_post.value / self.clairvoyant_post

    def frame(self) -> pd.DataFrame:
        """Return the audit table.

        Returns
        -------
        DataFrame
            External model: ``agent``, ``demand`` and ``units`` (expectations), ``share`` (ex ante:
            expected fill), ``se`` (its standard error), ``p10`` (ex post: the fill reached in nine
            runs of ten), ``worst`` (chance of being the worst served). Internal model: ``group``,
            ``population`` (share of arrivals), ``target``, ``units``, ``share`` (units / target),
            ``se``, ``p10``, ``worst``.
        """
        return self.table.copy()

    def grouped(self, labels: Sequence[Any]) -> pd.DataFrame:
        """Aggregate the agents of an external report into groups.

        Parameters
        ----------
        labels : sequence
            Group of each agent, in order of arrival.

        Returns
        -------
        DataFrame
            By group: agents, expected demand, expected units, smallest and mean expected share.
        """
        if "agent" not in self.table or len(labels) != len(self.table):
            raise ValueError(f"labels must name a group for each of {len(self.table)} agents.")
        table = self.table.assign(group=list(labels)).groupby("group", sort=False)
        return table.agg(
            agents=("agent", "size"),
            demand=("demand", "sum"),
            units=("units", "sum"),
            smallest_share=("share", "min"),
            mean_share=("share", "mean"),
        ).reset_index()

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the expected share of each agent or group, with the share reached nine times in ten.

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        matplotlib Axes
        """
        import matplotlib.pyplot as plt

        if ax is None:
            ax = plt.subplots(layout="constrained")[1]
        who = "agent" if "agent" in self.table else "group"
        y = np.arange(len(self.table))
        ax.barh(y, self.table["share"], color="#0072B2", label="on average (ex ante)")
        ax.plot(self.table["p10"], y, "o", color="#E69F00", label="in 9 runs of 10")
        ax.axvline(self.benchmark, color="black", ls="--", lw=1, label="benchmark LP")
        ax.set_yticks(y, [str(name) for name in self.table[who]])
        ax.invert_yaxis()
        ax.set_xlabel("share of demand" if who == "agent" else "units / target")
        ax.set_title(self.policy)
        ax.legend(loc="upper center", bbox_to_anchor=(0.4, -0.15), ncols=3, fontsize="small")
        return ax

    def __str__(self) -> str:
        promise = "none" if self.guarantee is None else f"{self.guarantee:.3f}"
        return (
            f"{self.policy}: ex ante {self.ex_ante:.3f} ({self.cr_ante:.3f} of the LP, guaranteed "
            f"{promise}), ex post {self.ex_post:.3f} ({self.cr_post:.3f} of the clairvoyant)"
        )


def _estimate(mean: float, se: float, n: int) -> Estimate:
    return Estimate(mean, mean - 1.96 * se, mean + 1.96 * se, n)


def _quantile(values: np.ndarray, weights: np.ndarray | None, level: float = 0.1) -> np.ndarray:
    """Level reached in all but a share ``level`` of the runs, by column of (runs, n) values."""
    if weights is None:
        return np.quantile(values, level, axis=0, method="inverted_cdf")
    order = np.argsort(values, axis=0)
    reached = np.cumsum(weights[order], axis=0) >= level - 1e-12
    return np.take_along_axis(values, order, axis=0)[reached.argmax(axis=0), range(values.shape[1])]


def _summary(
    shares: np.ndarray, weights: np.ndarray | None
) -> tuple[pd.DataFrame, Estimate, Estimate, np.ndarray]:
    """Statistics of shares (runs, n); weights None means equally likely simulated runs."""
    runs = len(shares)
    w = np.full(runs, 1 / runs) if weights is None else weights
    mean = w @ shares
    worst = shares.min(axis=1)
    if weights is None and runs > 1:
        se = shares.std(axis=0, ddof=1) / np.sqrt(runs)
        se_post = float(worst.std(ddof=1) / np.sqrt(runs))
    else:
        se, se_post = np.zeros_like(mean), 0.0
    tied = shares <= worst[:, None] + 1e-12
    table = pd.DataFrame(
        {
            "share": mean,
            "se": se,
            "p10": _quantile(shares, weights),
            "worst": w @ (tied / tied.sum(axis=1, keepdims=True)),
        }
    )
    i = int(np.argmin(mean))
    n = runs if weights is None else 1
    ante = _estimate(float(mean[i]), float(se[i]), n)
    return table, ante, _estimate(float(w @ worst), se_post, n), w


def _progress(steps: Any, total: int, n_runs: int) -> Any:
    """Show a progress bar for long simulations in a terminal."""
    if total * n_runs < 20_000_000:
        return steps
    return tqdm(steps, total=total, desc="simulating arrivals", disable=None, delay=2)


def _prepared(policy: AnyPolicy, instance: AnyInstance) -> AnyPolicy:
    if isinstance(policy, Policy) != isinstance(instance, ExternalInstance):
        raise TypeError(
            f"{type(policy).__name__} is made for the other model than {type(instance).__name__}."
        )
    policy = copy.copy(policy)
    if getattr(policy, "instance_", None) is not instance:
        policy.fit(instance)  # type: ignore[arg-type]
    return policy


def _evaluate_external(
    policy: Policy,
    instance: ExternalInstance,
    n_runs: int,
    scenarios: tuple[np.ndarray, np.ndarray] | None,
    random_state: int,
) -> EquityReport:
    if scenarios is None:
        weights = None
        demands = instance.demand.stream(n_runs, random_state)
    else:
        matrix, weights = np.asarray(scenarios[0], float), np.asarray(scenarios[1], float)
        if matrix.ndim != 2 or matrix.shape[1] != instance.n or weights.shape != matrix.shape[:1]:
            raise ValueError(
                f"scenarios must be demands of shape (S, {instance.n}) and S probabilities."
            )
        if (weights < 0).any() or abs(weights.sum() - 1) > 1e-9:
            raise ValueError("The probabilities of the scenarios must sum to 1.")
        demands, n_runs = iter(matrix.T), len(matrix)
    policy.reset(n_runs)
    shares = np.empty((instance.n, n_runs))
    total, expected, units = np.zeros(n_runs), np.empty(instance.n), np.empty(instance.n)
    w = np.full(n_runs, 1 / n_runs) if weights is None else weights
    for i, demand in enumerate(_progress(demands, instance.n, n_runs)):
        amount = policy.allocate(demand)
        shares[i] = fills(amount, demand)
        total += demand
        expected[i], units[i] = w @ demand, w @ amount
    table, ante, post, w = _summary(shares.T, weights)
    table.insert(0, "agent", instance.demand.names)
    table.insert(1, "demand", expected)
    table.insert(2, "units", units)
    best = np.minimum(1.0, instance.budget / np.maximum(total, instance.budget))
    return EquityReport(
        type(policy).__name__,
        ante,
        post,
        instance.benchmark_lp().value,
        float(w @ best),
        policy.guarantee_,
        float(units.sum()),
        table,
        0 if weights is not None else n_runs,
    )


def _internal_report(
    policy: GroupPolicy,
    served: np.ndarray,
    weights: np.ndarray | None,
    clairvoyant: float,
) -> EquityReport:
    instance = policy.instance_
    arrivals, tau = instance.arrivals, instance.tau
    units = served @ arrivals.groups.T
    table, ante, post, w = _summary(units / tau, weights)
    table.insert(0, "group", arrivals.group_names)
    table.insert(1, "population", arrivals.population_share)
    table.insert(2, "target", tau)
    table.insert(3, "units", w @ units)
    return EquityReport(
        type(policy).__name__,
        ante,
        post,
        instance.benchmark_lp().value,
        clairvoyant,
        policy.guarantee_,
        float(w @ served.sum(axis=1)),
        table,
        0 if weights is not None else len(served),
    )


def _evaluate_internal(
    policy: GroupPolicy, instance: InternalInstance, n_runs: int, exact: bool, random_state: int
) -> EquityReport:
    arrivals = instance.arrivals
    if exact:
        everything = copy.copy(policy)
        everything.counts_only = False
        _, states, law = _exact(everything, limit=100_000)
        counts, chances = _count_law(arrivals.probabilities)
        clairvoyant = float(chances @ instance.clairvoyant_paths(counts))
        keep = law > 0
        return _internal_report(policy, states[keep], law[keep] / law[keep].sum(), clairvoyant)
    rng = np.random.default_rng(random_state)
    policy.reset(n_runs, rng.spawn(1)[0])
    counts = np.zeros((n_runs, arrivals.J))
    for t in _progress(range(arrivals.T), arrivals.T, n_runs):
        kinds = arrivals.draw(t, n_runs, rng)
        counts[np.arange(n_runs), kinds] += 1
        policy.allocate(kinds)
    paths = (n_runs, random_state)  # they do not depend on the policy
    if paths not in instance._seen:
        seen = counts if arrivals.disjoint else counts[:2_000]
        instance._seen[paths] = float(instance.clairvoyant_paths(seen).mean())
    return _internal_report(policy, policy.served_, None, instance._seen[paths])


def _count_law(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Law of how many of each type arrive: vectors (S, J) and their probabilities."""
    law: dict[tuple[int, ...], float] = {(0,) * p.shape[1]: 1.0}
    for row in p:
        new: dict[tuple[int, ...], float] = {}
        for counts, chance in law.items():
            for j in np.flatnonzero(row):
                key = (*counts[:j], counts[j] + 1, *counts[j + 1 :])
                new[key] = new.get(key, 0.0) + chance * row[j]
        law = new
    return np.array(list(law), dtype=float), np.array(list(law.values()))


def evaluate(
    policy: AnyPolicy,
    instance: AnyInstance,
    *,
    n_runs: int = 20_000,
    exact: bool = False,
    scenarios: tuple[np.ndarray, np.ndarray] | None = None,
    random_state: int = 0,
) -> EquityReport:
    """Measure both equity metrics of a policy.

    All runs advance together, one arrival at a time. Equal ``random_state`` means equal arrivals,
    so policies are compared on common paths. The policy itself is not changed; an unfitted one is
    fitted to the instance first.

    Parameters
    ----------
    policy : Policy or GroupPolicy
    instance : ExternalInstance or InternalInstance
    n_runs : int, default 20,000
        Simulated paths. The clairvoyant of overlapping groups uses the first 2,000 of them.
    exact : bool, default False
        Enumerate instead (external: all joint demands; internal: the law of served units). For
        small instances.
    scenarios : (demands, probabilities), optional
        External model: joint realisations to average over instead of the model's independent
        ones, for example dependent demands or a recorded history.
    random_state : int

    Returns
    -------
    EquityReport

    Raises
    ------
    TypeError
        If policy and instance belong to different models.
    ValueError
        If ``n_runs`` is below 1, scenarios are malformed, or an exact evaluation is too large.

    Examples
    --------
    >>> from icml24.online_equity import DemandModel, FirstComeFirstServed
    >>> instance = ExternalInstance(DemandModel([[1], [3]]), budget=2)
    >>> evaluate(FirstComeFirstServed(), instance, exact=True).frame()["share"].round(3).tolist()
    [1.0, 0.333]
    """
    if n_runs < 1:
        raise ValueError(f"n_runs must be at least 1, got {n_runs}.")
    policy = _prepared(policy, instance)
    if isinstance(instance, InternalInstance):
        if scenarios is not None:
            raise ValueError("scenarios applies to the external model only.")
        return _evaluate_internal(cast(GroupPolicy, policy), instance, n_runs, exact, random_state)
    if exact and scenarios is None:
        scenarios = instance.demand.scenarios()
    return _evaluate_external(cast(Policy, policy), instance, n_runs, scenarios, random_state)


def exact_ratios(policy: Policy, instance: ExternalInstance) -> tuple[float, float]:
    """Compute both exact ratios of an external policy, without the rest of the report.

    Parameters
    ----------
    policy : Policy
        Fitted to the instance first; not changed.
    instance : ExternalInstance
        Small enough to enumerate.

    Returns
    -------
    cr_ante, cr_post : float
        As in :class:`EquityReport`.
    """
    policy = cast(Policy, _prepared(policy, instance))
    demands, weights = instance.demand.scenarios()
    policy.reset(len(demands))
    shares = np.stack([fills(policy.allocate(d), d) for d in demands.T])
    best = np.minimum(1.0, instance.budget / np.maximum(demands.sum(axis=1), instance.budget))
    ante = (shares @ weights).min() / instance.benchmark_lp().value
    return float(ante), float(weights @ shares.min(axis=0) / (weights @ best))


def compare(
    policies: Mapping[str, AnyPolicy] | Sequence[AnyPolicy],
    instance: AnyInstance,
    **options: Any,
) -> pd.DataFrame:
    """Evaluate several policies on the same arrivals.

    Parameters
    ----------
    policies : mapping from name to policy, or sequence of policies
    instance : ExternalInstance or InternalInstance
    **options
        As in :func:`evaluate`.

    Returns
    -------
    DataFrame
        One row for each policy: ``policy``, ``guarantee``, ``ex_ante``, ``cr_ante``, ``ex_post``,
        ``cr_post``, ``units``.

    Examples
    --------
    >>> from icml24.online_equity import DemandModel, EqualSplit, RatioAttenuation
    >>> instance = ExternalInstance(DemandModel([[1], [3]]), budget=2)
    >>> table = compare([RatioAttenuation(), EqualSplit()], instance, exact=True)
    >>> table["cr_ante"].round(3).tolist()
    [0.5, 0.667]
    """
    if not isinstance(policies, Mapping):
        policies = {type(policy).__name__: policy for policy in policies}
    rows = []
    for name, policy in policies.items():
        report = evaluate(policy, instance, **options)
        rows.append(
            {
                "policy": name,
                "guarantee": np.nan if report.guarantee is None else report.guarantee,
                "ex_ante": report.ex_ante.value,
                "cr_ante": report.cr_ante,
                "ex_post": report.ex_post.value,
                "cr_post": report.cr_post,
                "units": report.units,
            }
        )
    return pd.DataFrame(rows)

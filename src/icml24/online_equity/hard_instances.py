"""Instances that show the limits: tight families, the ex-post chain, dependence, an adversary."""

from __future__ import annotations

from typing import Literal

import numpy as np
from tqdm import tqdm

from icml24.online_equity.demand import DemandModel
from icml24.online_equity.external import ExternalInstance
from icml24.online_equity.groups import ArrivalModel, InternalInstance
from icml24.online_equity.policies import Policy
from icml24.online_equity.report import exact_ratios

__all__ = [
    "adversarial_instance",
    "ex_post_chain",
    "random_instance",
    "synchronous_demands",
    "tight_instance",
    "tight_rounds",
]

HUGE = 1e9


def _probability(p: float) -> None:
    if not 0 < p < 1:
        raise ValueError(f"p must lie strictly between 0 and 1, got {p}.")


def tight_instance(p: float, budget: float = 1.0) -> ExternalInstance:
    """Two agents for whom no policy beats ``1 / (2 - p)`` of the benchmark LP.

    The first asks for ``b (1 - p) / p``; the second for ``b`` with probability p, else for so
    much that nothing helps. The LP gives both ``p``; online, units spent on the first agent are
    missing for the second just when they would count.

    Parameters
    ----------
    p : float
        Between 0 and 1; the bound tends to 1/2 as p tends to 0.
    budget : float

    Returns
    -------
    ExternalInstance

    Examples
    --------
    >>> round(tight_instance(0.5).online_optimum() / tight_instance(0.5).benchmark_lp().value, 4)
    0.6667
    """
    _probability(p)
    first, second = [budget * (1 - p) / p], [budget, HUGE * budget]
    return ExternalInstance(DemandModel([first, second], [[1.0], [p, 1 - p]]), budget)


def tight_rounds(p: float) -> InternalInstance:
    """Return the same trade-off with groups: one unit, two rounds, a second guest who may not come.

    Parameters
    ----------
    p : float
        Chance that the second round brings a member of group B; targets are ``1 - p`` and p.

    Returns
    -------
    InternalInstance
    """
    _probability(p)
    arrivals = ArrivalModel(
        [[1.0, 0.0, 0.0], [0.0, p, 1 - p]], [[1, 0, 0], [0, 1, 0]], ["A", "B", "nobody"], ["A", "B"]
    )
    return InternalInstance(arrivals, 1, [1 - p, p])


def ex_post_chain(n: int, growth: float = 1000.0) -> ExternalInstance:
    """Agents whose demands grow so fast that only the last large one matters ex post.

    Agent i asks for ``growth ** i`` with probability ``growth ** i / sum_{k <= i} growth ** k``,
    else for nothing; the stock is 1. Each request may be the last large one, with equal stakes,
    so whatever is spent now is lost for the others: no policy gets more than ``1/n + o(1)`` of
    the clairvoyant.

    Parameters
    ----------
    n : int
        Number of agents, at least 1.
    growth : float
        Ratio of demands, above 1.

    Returns
    -------
    ExternalInstance
    """
    if n < 1 or not growth > 1:
        raise ValueError(f"Need n >= 1 and growth > 1, got n = {n}, growth = {growth}.")
    size = float(growth) ** np.arange(n)
    q = size / np.cumsum(size)
    supports = [[0.0, d] for d in size]
    return ExternalInstance(DemandModel(supports, [[1 - x, x] for x in q]), 1.0)


def synchronous_demands(
    n: int, p: float = 0.01, budget: float = 1.0
) -> tuple[ExternalInstance, tuple[np.ndarray, np.ndarray]]:
    """Demands that are dependent: with probability p all ask for b, else all for too much.

    Parameters
    ----------
    n : int
        Number of agents.
    p : float
        At most ``1 / n``.
    budget : float

    Returns
    -------
    instance : ExternalInstance
        With the right marginals, as if demands were independent.
    scenarios : (demands, probabilities)
        The true joint law, for :func:`icml24.online_equity.evaluate`.
    """
    _probability(p)
    if n < 1 or n * p > 1:
        raise ValueError(f"Need n >= 1 and n p <= 1, got n = {n}, p = {p}.")
    support = [[budget, HUGE * budget]] * n
    instance = ExternalInstance(DemandModel(support, [[p, 1 - p]] * n), budget)
    return instance, (instance.demand.values.T.copy(), np.array([p, 1 - p]))


def random_instance(
    random_state: int | np.random.Generator,
    n: tuple[int, int] = (2, 6),
    points: tuple[int, int] = (2, 3),
    load: tuple[float, float] = (0.8, 6.0),
) -> ExternalInstance:
    """Draw an instance with heavy-tailed demands.

    Parameters
    ----------
    random_state : int or numpy.random.Generator
    n, points : (int, int)
        Smallest and largest number of agents, and of demand points each.
    load : (float, float)
        Range of expected demand / stock.

    Returns
    -------
    ExternalInstance
        Demands are lognormal (sigma 1.5), probabilities Dirichlet(1).
    """
    rng = np.random.default_rng(random_state)
    agents = int(rng.integers(n[0], n[1] + 1))
    sizes = rng.integers(points[0], points[1] + 1, agents)
    supports = [rng.lognormal(0.0, 1.5, k) for k in sizes]
    demand = DemandModel(supports, [rng.dirichlet(np.ones(k)) for k in sizes])
    return ExternalInstance(demand, demand.mean.sum() / rng.uniform(*load))


def _decode(genome: np.ndarray, n: int, points: int) -> ExternalInstance:
    logs, logits = genome.reshape(2, n, points)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return ExternalInstance(DemandModel(np.exp(np.clip(logs, -12, 20)), weights), 1.0)


def adversarial_instance(
    policy: Policy,
    n: int = 3,
    points: int = 2,
    metric: Literal["ante", "post"] = "ante",
    n_evals: int = 2_500,
    random_state: int = 0,
) -> tuple[ExternalInstance, float, np.ndarray]:
    """Search for an instance on which a policy does badly, with an evolution strategy.

    A quarter of the evaluations are random starts; then the best instance is mutated (log demands
    and logits, step size by the one-fifth rule), with a restart from a random one whenever the
    step collapses.

    Parameters
    ----------
    policy : Policy
        Fitted anew to every candidate; not changed.
    n, points : int
        Size of the instances (``points ** n`` scenarios are enumerated each time).
    metric : {"ante", "post"}
        Ratio to minimise: ``cr_ante`` or ``cr_post``.
    n_evals : int
        Number of candidates.
    random_state : int

    Returns
    -------
    instance : ExternalInstance
        The worst one found; its stock is 1.
    ratio : float
        The policy's ratio there.
    trace : ndarray, shape (n_evals,)
        Best so far.
    """
    if n_evals < 1:
        raise ValueError(f"n_evals must be at least 1, got {n_evals}.")
    if metric not in ("ante", "post"):
        raise ValueError(f"metric must be 'ante' or 'post', got {metric!r}.")
    rng = np.random.default_rng(random_state)
    size = 2 * n * points

    def ratio(genome: np.ndarray) -> float:
        ante, post = exact_ratios(policy, _decode(genome, n, points))
        return ante if metric == "ante" else post

    def start() -> np.ndarray:
        return np.concatenate([rng.normal(0, 2, size // 2), rng.normal(0, 1.5, size // 2)])

    best, best_value = start(), np.inf
    current, current_value, step = best, np.inf, 1.0
    trace = np.empty(n_evals)
    for i in tqdm(range(n_evals), desc=f"adversary of {type(policy).__name__}", disable=None):
        explore = i < n_evals // 4
        if step < 1e-3:
            current, step = start(), 1.0
            current_value = ratio(current)
        mask = rng.random(size) < 0.5
        candidate = start() if explore else current + step * mask * rng.normal(size=size)
        value = ratio(candidate)
        better = value < current_value
        if better:
            current, current_value = candidate, value
        if not explore:
            step *= np.exp(0.2) if better else np.exp(-0.05)
        if current_value < best_value:
            best, best_value = current, current_value
        trace[i] = best_value
    return _decode(best, n, points), float(best_value), trace

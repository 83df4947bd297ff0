"""Rules that people use today; none of them has a guarantee for every instance.

The first five are for the external model, the last four for the internal one.
"""

from __future__ import annotations

import numpy as np

from icml24.online_equity.external import ExternalInstance
from icml24.online_equity.group_policies import GroupPolicy, whole_quotas
from icml24.online_equity.groups import InternalInstance
from icml24.online_equity.policies import Policy

__all__ = [
    "EqualSplit",
    "FirstComeFirstServed",
    "LPGreedy",
    "ProjectedProportional",
    "ServeAll",
    "ShareOfRest",
    "TargetFillRate",
    "TypeQuotas",
]


class FirstComeFirstServed(Policy):
    """Give everyone what he asks for until nothing is left."""

    def _amount(self, i: int, demand: np.ndarray, left: np.ndarray) -> np.ndarray:
        return np.minimum(demand, left)


class EqualSplit(Policy):
    """Cap everyone at the same number of units, ``b / n``.

    Its ex-post ratio is at least ``1/n`` on every path, and no policy has a better worst case.
    """

    def _amount(self, i: int, demand: np.ndarray, left: np.ndarray) -> np.ndarray:
        return np.minimum(demand, self.instance_.budget / self.instance_.n)


class TargetFillRate(Policy):
    """Serve the same fraction of every demand while stock lasts ("naive scaling").

    Parameters
    ----------
    rate : float, optional
        Fraction between 0 and 1; default ``min(1, b / expected total demand)``.
    """

    def __init__(self, rate: float | None = None) -> None:
        if rate is not None and not 0 < rate <= 1:
            raise ValueError(f"rate must lie in (0, 1], got {rate}.")
        self.rate = rate

    def _fit(self, instance: ExternalInstance) -> None:
        self.rate_ = 1 / max(1.0, instance.load) if self.rate is None else self.rate

    def _amount(self, i: int, demand: np.ndarray, left: np.ndarray) -> np.ndarray:
        return self.rate_ * demand


class ShareOfRest(Policy):
    """Cap each agent at an equal share of what is left, ``R_i / (number still to come)``."""

    def _amount(self, i: int, demand: np.ndarray, left: np.ndarray) -> np.ndarray:
        return left / (self.instance_.n - i)


class ProjectedProportional(Policy):
    """Split what is left in proportion to demand, future demand at its expectation.

    ``X_i = D_i R_i / (D_i + E[later demand])``: the projected proportional allocation of
    Manshadi, Niazadeh and Rodilitz ("Fair Dynamic Rationing", 2021), here for independent
    demands, whose projection does not depend on the past.
    """

    def _fit(self, instance: ExternalInstance) -> None:
        mean = instance.demand.mean
        self._later = np.append(np.cumsum(mean[::-1])[::-1][1:], 0.0)

    def _amount(self, i: int, demand: np.ndarray, left: np.ndarray) -> np.ndarray:
        total = demand + self._later[i]
        return demand * left / np.where(total > 0, total, 1.0)


class ServeAll(GroupPolicy):
    """Accept everyone while units last: first come first served among equal requests."""

    counts_only = True

    def _probability(
        self, t: int, used: np.ndarray, served: np.ndarray | None, kinds: np.ndarray
    ) -> np.ndarray:
        return np.ones(np.broadcast_shapes(used.shape, kinds.shape))


class LPGreedy(GroupPolicy):
    """Accept with the LP's probability while units last, without any attenuation."""

    counts_only = True

    def _fit(self, instance: InternalInstance) -> None:
        self._accept = instance.benchmark_lp().acceptance

    def _probability(
        self, t: int, used: np.ndarray, served: np.ndarray | None, kinds: np.ndarray
    ) -> np.ndarray:
        return self._accept[t, kinds] + np.zeros(used.shape)


class TypeQuotas(GroupPolicy):
    """Reserve whole units for each type, rounded from the LP so that they sum to the stock.

    Safe for disjoint groups; with overlapping groups types run dry although others have units.
    """

    def _fit(self, instance: InternalInstance) -> None:
        self.quotas_ = whole_quotas(instance.benchmark_lp().units, instance.budget)

    def _probability(
        self, t: int, used: np.ndarray, served: np.ndarray | None, kinds: np.ndarray
    ) -> np.ndarray:
        assert served is not None
        return (served[np.arange(len(served)), kinds] < self.quotas_[kinds]).astype(float)

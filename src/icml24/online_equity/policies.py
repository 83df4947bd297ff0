"""Policies for the external model: streaming, vectorised over runs, usable at a counter.

The two policies with the guarantee 1/2, their improvement per instance, and the exact optimum.
The rules that people use today are in :mod:`icml24.online_equity.peers`.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from icml24.online_equity.external import ExternalInstance, Metric, _online_tree, fills

__all__ = [
    "NotFittedError",
    "OnlineOptimal",
    "Policy",
    "RatioAttenuation",
    "SimulationAttenuation",
]


class NotFittedError(ValueError, AttributeError):
    """The policy was used before ``fit``."""


class Policy:
    """Base class: a rule that answers each agent at once and for good.

    A subclass implements ``_amount(i, demand, left)``; the base class keeps the stock, checks the
    input and makes sure that nobody gets more than he asked for or than there is.

    Attributes
    ----------
    guarantee_ : float or None
        Proven lower bound on (ex-ante metric) / (benchmark LP) for the fitted instance.
    left_ : ndarray, shape (n_runs,)
        Units left in each run.
    position_ : int
        Number of agents served so far.
    """

    guarantee_: float | None = None

    def fit(self, instance: ExternalInstance) -> Self:
        """Prepare the policy for an instance and open the first day.

        Parameters
        ----------
        instance : ExternalInstance

        Returns
        -------
        self
        """
        if not isinstance(instance, ExternalInstance):
            raise TypeError(f"fit needs an ExternalInstance, got {type(instance).__name__}.")
        self.instance_ = instance
        self._fit(instance)
        return self.reset()

    def _fit(self, instance: ExternalInstance) -> None:
        """Compute what the policy needs; nothing by default."""

    def _amount(self, i: int, demand: np.ndarray, left: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _check_fitted(self) -> None:
        if not hasattr(self, "instance_"):
            raise NotFittedError(f"This {type(self).__name__} is not fitted; call fit(instance).")

    def reset(self, n_runs: int = 1, random_state: int | None = None) -> Self:
        """Start ``n_runs`` days (simulated paths) with a full stock.

        Parameters
        ----------
        n_runs : int, default 1
            Number of paths that run side by side.
        random_state : int, optional
            Unused: these policies are deterministic. Present for symmetry.

        Returns
        -------
        self
        """
        self._check_fitted()
        if n_runs < 1:
            raise ValueError(f"n_runs must be at least 1, got {n_runs}.")
        self.left_ = np.full(n_runs, self.instance_.budget)
        self.position_ = 0
        self._log: list[dict[str, Any]] = []
        return self

    def allocate(self, demand: ArrayLike) -> np.ndarray:
        """Serve the next agent in every run.

        Parameters
        ----------
        demand : array_like, shape () or (n_runs,)
            What the agent asks for.

        Returns
        -------
        ndarray, shape (n_runs,)
            What he gets: at most what he asked for and at most what is left.

        Raises
        ------
        NotFittedError
            Before ``fit``.
        ValueError
            If all agents were served already, or a demand is negative, not finite, of the wrong
            shape, or outside the support that the policy was fitted to.
        """
        self._check_fitted()
        if self.position_ >= self.instance_.n:
            raise ValueError(
                f"All {self.instance_.n} agents have been served; call reset() for a new day."
            )
        demand = np.asarray(demand, dtype=float)
        if demand.shape not in ((), self.left_.shape):
            raise ValueError(
                f"demand must be a number or have shape {self.left_.shape}, got {demand.shape}."
            )
        if not np.isfinite(demand).all() or (demand < 0).any():
            raise ValueError("Demands must be finite and not negative.")
        demand = np.broadcast_to(demand, self.left_.shape)
        amount = self._amount(self.position_, demand, self.left_)
        amount = np.clip(amount, 0.0, np.minimum(demand, self.left_))
        self.left_ = self.left_ - amount
        self.position_ += 1
        return amount

    def decide(self, arrival: float) -> float:
        """Serve one real request and write it into the day's log.

        Parameters
        ----------
        arrival : float
            What the next agent asks for.

        Returns
        -------
        float
            What he gets.

        Examples
        --------
        >>> from icml24.online_equity import DemandModel, ExternalInstance, RatioAttenuation
        >>> instance = ExternalInstance(DemandModel([[1], [3]]), budget=2)
        >>> RatioAttenuation().fit(instance).decide(1)
        0.25
        """
        self._check_fitted()
        if self.left_.size != 1:
            raise ValueError("decide serves one day at a time; call reset() first.")
        name = self.instance_.demand.names[min(self.position_, self.instance_.n - 1)]
        amount = float(self.allocate(arrival)[0])
        fill = float(fills(np.array(amount), np.array(float(arrival))))
        row = {"agent": name, "demand": float(arrival), "amount": amount, "fill": fill}
        self._log.append({**row, "left": float(self.left_[0])})
        return amount

    def audit(self) -> pd.DataFrame:
        """Return the day's log: agent, demand, amount, fill, units left, in order of arrival."""
        self._check_fitted()
        return pd.DataFrame(self._log, columns=["agent", "demand", "amount", "fill", "left"])


class _LPPolicy(Policy):
    """Looks up the LP's fill of the realised demand."""

    off_support: Literal["error", "nearest"]

    def _check(self, gamma: float | Literal["max"]) -> None:
        if self.off_support not in ("error", "nearest"):
            raise ValueError(f"off_support must be 'error' or 'nearest', got {self.off_support!r}.")
        if isinstance(gamma, str):
            if gamma != "max":
                raise ValueError(f"gamma must be a number in (0, 1] or 'max', got {gamma!r}.")
        elif not 0 < gamma <= 1:
            raise ValueError(f"gamma must lie in (0, 1], got {gamma}.")
        elif gamma < 0.5:
            warnings.warn(
                f"gamma = {gamma:g} wastes stock: 1/2 is always attainable.",
                UserWarning,
                stacklevel=4,
            )

    def _too_large(self, gamma: float, best: float) -> None:
        if gamma > best + 1e-9:
            raise ValueError(
                f"gamma = {gamma:g} cannot be kept on this instance; the largest that this policy "
                f"can guarantee is {best:.6g} (use gamma='max')."
            )

    def _locate(self, i: int, demand: np.ndarray) -> np.ndarray:
        return self.instance_.demand.locate(i, demand, nearest=self.off_support == "nearest")


class RatioAttenuation(_LPPolicy):
    r"""Give the LP's share, scaled by what is left relative to its expectation (policy P1).

    .. math:: X_i = \gamma\, x_i(d)\, \frac{R_i}{\mathbb E[R_i]}, \qquad
        \mathbb E[R_i] = b - \gamma \sum_{j<i} m_j ,

    where :math:`x` solves the benchmark LP and :math:`m_j` is its expected spending on agent
    :math:`j`. Demands are independent, so :math:`R_i` does not depend on :math:`D_i` and
    :math:`\mathbb E[X_i \mid D_i = d] = \gamma x_i(d)` exactly. For :math:`\gamma = 1/2` we have
    :math:`\mathbb E[R_i] \ge b/2`, hence :math:`X_i \le x_i R_i / b \le \min(d, R_i)`: feasible.

    Parameters
    ----------
    gamma : float or "max", default 0.5
        The guarantee. ``"max"`` takes the largest one for which the inequality above still
        holds, ``min_i b / (b max_k max(f_ik, x_ik / b) + S_i) >= 1/2`` in closed form.
    off_support : {"error", "nearest"}
        What to do with a demand that the model does not know.

    Attributes
    ----------
    guarantee_ : float
        ``gamma``.
    expected_left_ : ndarray, shape (n,)
        ``E[R_i]``.

    Raises
    ------
    ValueError
        If gamma is not in (0, 1], or (in ``fit``) larger than this instance allows.

    Warns
    -----
    UserWarning
        If gamma < 1/2.

    Examples
    --------
    >>> from icml24.online_equity import DemandModel, ExternalInstance
    >>> instance = ExternalInstance(DemandModel([[1], [3]]), budget=2)
    >>> policy = RatioAttenuation().fit(instance)
    >>> policy.allocate(1.0), policy.allocate(3.0)
    (array([0.25]), array([0.75]))
    """

    def __init__(
        self,
        gamma: float | Literal["max"] = 0.5,
        off_support: Literal["error", "nearest"] = "error",
    ) -> None:
        self.gamma, self.off_support = gamma, off_support
        self._check(gamma)

    def _fit(self, instance: ExternalInstance) -> None:
        lp, b = instance.benchmark_lp(), instance.budget
        before = np.cumsum(lp.spending) - lp.spending
        peak = np.maximum(lp.fills, lp.amounts / b).max(axis=1)
        best = max(0.5, min(1.0, float((b / np.maximum(b * peak + before, b)).min())))
        if not isinstance(self.gamma, str):
            self._too_large(self.gamma, best)
        self.guarantee_ = best if isinstance(self.gamma, str) else float(self.gamma)
        self.expected_left_ = b - self.guarantee_ * before
        self._rate = self.guarantee_ * lp.amounts / self.expected_left_[:, None]

    def _amount(self, i: int, demand: np.ndarray, left: np.ndarray) -> np.ndarray:
        return self._rate[i, self._locate(i, demand)] * left


class SimulationAttenuation(_LPPolicy):
    r"""Offer the LP's amount or what is left, thinned to hit a target exactly (policy P2).

    .. math:: X_i = c_i(d) \min(x_i(d), R_i), \qquad
        c_i(d) = \frac{\gamma\, x_i(d)}{\mathbb E[\min(x_i(d), R_i)]} .

    Expectations over :math:`R_i` are computed forward, exactly (atoms) or by simulation. The
    policy is feasible as long as all :math:`c_i(d) \le 1`; that always holds for
    :math:`\gamma = 1/2`. The largest such :math:`\gamma` is a guarantee for this very instance,
    known before the first arrival.

    Parameters
    ----------
    gamma : float or "max", default "max"
        The guarantee to build in.
    exact : bool or "auto", default "auto"
        Follow all atoms of the law of the remaining stock; "auto" does so up to 20,000 atoms.
    n_sim : int, default 20,000
        Simulated paths when not exact. The tables, and so the guarantee, then carry an error of
        about ``1 / sqrt(n_sim)``.
    random_state : int, default 0
        For the simulation.
    off_support : {"error", "nearest"}
        What to do with a demand that the model does not know.

    Attributes
    ----------
    guarantee_ : float
        ``gamma`` as used.
    exact_ : bool
        Whether the tables are exact.
    thinning_ : ndarray, shape (n, K)
        ``c_i(d_ik)``.

    Raises
    ------
    ValueError
        If gamma is not in (0, 1], or (in ``fit``) larger than this instance allows.

    Warns
    -----
    UserWarning
        If gamma < 1/2.

    Examples
    --------
    >>> from icml24.online_equity import DemandModel, ExternalInstance
    >>> instance = ExternalInstance(DemandModel([[1], [3]]), budget=2)
    >>> SimulationAttenuation().fit(instance).guarantee_
    1.0
    """

    def __init__(
        self,
        gamma: float | Literal["max"] = "max",
        exact: bool | Literal["auto"] = "auto",
        n_sim: int = 20_000,
        random_state: int = 0,
        off_support: Literal["error", "nearest"] = "error",
    ) -> None:
        self.gamma, self.exact, self.n_sim = gamma, exact, n_sim
        self.random_state, self.off_support = random_state, off_support
        self._check(gamma)
        if n_sim < 1:
            raise ValueError(f"n_sim must be at least 1, got {n_sim}.")

    def _draws(self, instance: ExternalInstance) -> list[np.ndarray] | None:
        """Demand columns of simulated paths, stratified so that each marginal is right."""
        demand = instance.demand
        atoms = demand.n_scenarios / demand.sizes[-1]
        if self.exact is True and atoms > 2_000_000:
            raise ValueError(f"{atoms:.3g} atoms are too many; use exact='auto'.")
        if self.exact is True or (self.exact == "auto" and atoms <= 20_000):
            return None
        rng = np.random.default_rng(self.random_state)
        cumulative = np.cumsum(demand.weights, axis=1)
        draws = []
        for i in range(demand.n):
            u = (rng.permutation(self.n_sim) + rng.random(self.n_sim)) / self.n_sim
            draws.append(np.minimum(np.searchsorted(cumulative[i], u), demand.sizes[i] - 1))
        return draws

    @staticmethod
    def _forward(
        gammas: np.ndarray, instance: ExternalInstance, draws: list[np.ndarray] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tables for several gammas at once: feasible (B,), thinning (B, n, K)."""
        demand, x = instance.demand, instance.benchmark_lp().amounts
        n_atoms = 1 if draws is None else draws[0].size
        left = np.full((gammas.size, n_atoms), instance.budget)
        weight = np.full(n_atoms, 1 / n_atoms)
        thinning = np.zeros((gammas.size, *x.shape))
        for i in range(demand.n):
            for k in range(demand.sizes[i]):
                reach = np.minimum(x[i, k], left) @ weight
                if x[i, k] > 0:
                    with np.errstate(divide="ignore"):
                        thinning[:, i, k] = gammas * x[i, k] / reach
            c, offer = np.minimum(thinning[:, i], 1.0), x[i]
            if i == demand.n - 1:
                break
            if draws is None:
                spread = [
                    left - c[:, k, None] * np.minimum(offer[k], left)
                    for k in range(demand.sizes[i])
                ]
                left = np.concatenate(spread, axis=1)
                weight = np.outer(demand.weights[i, : demand.sizes[i]], weight).ravel()
            else:
                left = left - c[:, draws[i]] * np.minimum(offer[draws[i]], left)
        return np.asarray((thinning <= 1 + 1e-12).all(axis=(1, 2))), thinning

    def _fit(self, instance: ExternalInstance) -> None:
        draws = self._draws(instance)
        self.exact_ = draws is None
        low, high = (0.5, 1.0) if isinstance(self.gamma, str) else (self.gamma, self.gamma)
        if self._forward(np.array([high]), instance, draws)[0][0]:
            low = high
        elif low == high:
            low = 0.0
        many = 17 if draws is None and instance.demand.n_scenarios <= 5_000 else 3
        while high - low > 1e-11:
            grid = np.linspace(low, high, many)[1:-1]
            feasible = self._forward(grid, instance, draws)[0]
            last = int(np.argmin(feasible)) if not feasible.all() else grid.size
            edges = np.concatenate([[low], grid, [high]])
            low, high = float(edges[last]), float(edges[last + 1])
        if not isinstance(self.gamma, str):
            self._too_large(self.gamma, low)
            low = self.gamma
        self.guarantee_ = float(low)
        self.thinning_ = np.minimum(self._forward(np.array([low]), instance, draws)[1][0], 1.0)
        self._offer = instance.benchmark_lp().amounts

    def _amount(self, i: int, demand: np.ndarray, left: np.ndarray) -> np.ndarray:
        k = self._locate(i, demand)
        return self.thinning_[i, k] * np.minimum(self._offer[i, k], left)


class OnlineOptimal(Policy):
    """Best online policy for one of the two metrics, read from the scenario-tree LP.

    Parameters
    ----------
    metric : {"ante", "post"}, default "ante"
        What to maximise: ``min_i E[F_i]`` or ``E[min_i F_i]``.

    Attributes
    ----------
    value_ : float
        The optimum.

    Raises
    ------
    ValueError
        If the metric is unknown, or the instance has more than 20,000 scenarios.

    Examples
    --------
    >>> from icml24.online_equity import DemandModel, ExternalInstance
    >>> instance = ExternalInstance(DemandModel([[1], [3]]), budget=2)
    >>> round(OnlineOptimal().fit(instance).value_, 6)
    0.5
    """

    def __init__(self, metric: Metric = "ante") -> None:
        if metric not in ("ante", "post"):
            raise ValueError(f"metric must be 'ante' or 'post', got {metric!r}.")
        self.metric: Metric = metric

    def _fit(self, instance: ExternalInstance) -> None:
        tree = _online_tree(instance, self.metric)
        self.value_, self._amounts = tree.value, tree.amounts
        if self.metric == "ante":
            lp = instance.benchmark_lp().value
            self.guarantee_ = self.value_ / lp if lp > 0 else None

    def reset(self, n_runs: int = 1, random_state: int | None = None) -> Self:
        """Start ``n_runs`` days at the root of the tree; see :meth:`Policy.reset`."""
        self._node = np.zeros(n_runs, dtype=int)
        return super().reset(n_runs, random_state)

    def _amount(self, i: int, demand: np.ndarray, left: np.ndarray) -> np.ndarray:
        law = self.instance_.demand
        self._node = self._node * law.sizes[i] + law.locate(i, demand)
        return self._amounts[i][self._node]

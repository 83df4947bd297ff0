"""Policies for the internal model.

Each policy states one thing: the probability of accepting a type, given the round and what was
served so far. Simulation, exact expectation and the counter's ``decide`` all use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import sparse

from icml24.online_equity.external import solve_lp
from icml24.online_equity.groups import InternalInstance
from icml24.online_equity.policies import NotFittedError

__all__ = [
    "ExPostOptimal",
    "GroupPolicy",
    "LPAttenuated",
    "LPMagician",
    "OccupancyOptimal",
    "Quota",
    "SelectionSampling",
    "exact_units",
]


class GroupPolicy:
    """Base class: accept or refuse each arrival at once and for good.

    A subclass implements ``_probability(t, used, served, kinds)``; the base class keeps the
    stock, draws the coin and never hands out a unit that is not there.

    Attributes
    ----------
    guarantee_ : float or None
        Proven lower bound on (ex-ante metric) / (benchmark LP) for the fitted instance.
    counts_only : bool
        Whether the rule depends on the past only through the number of units used.
    served_ : ndarray of int, shape (n_runs, J)
        Units that each type has received.
    """

    guarantee_: float | None = None
    counts_only = False

    def fit(self, instance: InternalInstance) -> Self:
        """Prepare the policy for an instance and open the first day.

        Parameters
        ----------
        instance : InternalInstance

        Returns
        -------
        self
        """
        if not isinstance(instance, InternalInstance):
            raise TypeError(f"fit needs an InternalInstance, got {type(instance).__name__}.")
        self.instance_ = instance
        self._fit(instance)
        return self.reset()

    def _fit(self, instance: InternalInstance) -> None:
        """Compute what the policy needs; nothing by default."""

    def _probability(
        self, t: int, used: np.ndarray, served: np.ndarray | None, kinds: np.ndarray
    ) -> np.ndarray:
        raise NotImplementedError

    def _check_fitted(self) -> None:
        if not hasattr(self, "instance_"):
            raise NotFittedError(f"This {type(self).__name__} is not fitted; call fit(instance).")

    def reset(self, n_runs: int = 1, random_state: int | np.random.Generator | None = None) -> Self:
        """Start ``n_runs`` days with all units in stock.

        Parameters
        ----------
        n_runs : int, default 1
        random_state : int or numpy.random.Generator, optional
            For the coins of randomised policies; default: fresh entropy.

        Returns
        -------
        self
        """
        self._check_fitted()
        if n_runs < 1:
            raise ValueError(f"n_runs must be at least 1, got {n_runs}.")
        self.served_ = np.zeros((n_runs, self.instance_.arrivals.J), dtype=int)
        self.used_ = np.zeros(n_runs, dtype=int)
        self.position_ = 0
        self._rng = np.random.default_rng(random_state)
        self._log: list[dict[str, Any]] = []
        return self

    def allocate(self, kinds: ArrayLike) -> np.ndarray:
        """Answer the arrival of this round in every run.

        Parameters
        ----------
        kinds : array_like of int, shape () or (n_runs,)
            Types that arrive, by number.

        Returns
        -------
        ndarray of bool, shape (n_runs,)
            Who gets a unit.

        Raises
        ------
        NotFittedError
            Before ``fit``.
        ValueError
            If all rounds are over or a type does not exist.
        """
        self._check_fitted()
        instance = self.instance_
        if self.position_ >= instance.rounds:
            raise ValueError(f"All {instance.rounds} rounds are over; call reset() for a new day.")
        kinds = np.asarray(kinds)
        if kinds.shape not in ((), self.used_.shape) or kinds.dtype.kind not in "iu":
            raise ValueError(
                f"kinds must be a type number or an integer array of shape {self.used_.shape}."
            )
        if ((kinds < 0) | (kinds >= instance.arrivals.J)).any():
            raise ValueError(f"Type numbers lie between 0 and {instance.arrivals.J - 1}.")
        kinds = np.broadcast_to(kinds, self.used_.shape)
        chance = self._probability(self.position_, self.used_, self.served_, kinds)
        accept = (self._rng.random(kinds.shape) < chance) & (self.used_ < instance.budget)
        self.served_[np.arange(kinds.size), kinds] += accept
        self.used_ = self.used_ + accept
        self.position_ += 1
        return accept

    def decide(self, arrival: Any) -> bool:
        """Answer one real person and write the answer into the day's log.

        Parameters
        ----------
        arrival : hashable or mapping
            The name of the type, or a mapping with the group columns (see
            :meth:`ArrivalModel.type_of`).

        Returns
        -------
        bool
            Whether the person gets a unit.
        """
        self._check_fitted()
        if self.used_.size != 1:
            raise ValueError("decide answers one day at a time; call reset() first.")
        kind = self.instance_.arrivals.type_of(arrival)
        accepted = bool(self.allocate(kind)[0])
        row = {"round": self.position_ - 1, "type": self.instance_.arrivals.names[kind]}
        left = self.instance_.budget - int(self.used_[0])
        self._log.append({**row, "accepted": accepted, "left": left})
        return accepted

    def audit(self) -> pd.DataFrame:
        """Return the day so far by group: arrivals, units, target, and units / target."""
        self._check_fitted()
        arrivals = self.instance_.arrivals
        index = {name: j for j, name in enumerate(arrivals.names)}
        kinds = np.array([index[row["type"]] for row in self._log], dtype=int)
        accepted = np.array([row["accepted"] for row in self._log], dtype=bool)
        units = arrivals.groups[:, kinds[accepted]].sum(axis=1)
        tau = self.instance_.tau
        return pd.DataFrame(
            {
                "group": arrivals.group_names,
                "arrivals": arrivals.groups[:, kinds].sum(axis=1),
                "units": units,
                "target": tau,
                "ratio": units / tau,
            }
        )

    def log(self) -> pd.DataFrame:
        """Return the decisions of the day in order: round, type, accepted, units left."""
        self._check_fitted()
        return pd.DataFrame(self._log, columns=["round", "type", "accepted", "left"])


def exact_units(policy: GroupPolicy, limit: int = 100_000) -> np.ndarray:
    """Compute the expected units of each type, exactly, by forward recursion over the state.

    The state is the number of units used for policies with ``counts_only``, else the vector of
    units served to each type.

    Parameters
    ----------
    policy : GroupPolicy
        Fitted.
    limit : int
        Largest number of states.

    Returns
    -------
    ndarray, shape (J,)

    Raises
    ------
    ValueError
        If there are more than ``limit`` states.
    """
    return _exact(policy, limit)[0]


def served_states(n_types: int, budget: int, limit: int) -> np.ndarray:
    """All vectors of served units with sum at most ``budget``, shape (S, J)."""
    if (budget + 1.0) ** n_types > limit:
        raise ValueError(
            f"{(budget + 1.0) ** n_types:.3g} states are too many (limit {limit:,}); simulate, or "
            "use fewer units or types."
        )
    return np.indices((budget + 1,) * n_types).reshape(n_types, -1).T


def _exact(policy: GroupPolicy, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute expected units by type, and the law of the state at the end (states, probability)."""
    policy._check_fitted()
    instance = policy.instance_
    arrivals, budget = instance.arrivals, instance.budget
    if policy.counts_only:
        states = np.arange(budget + 1)[:, None]
        served, step = None, np.ones(arrivals.J, dtype=int)
    else:
        states = served_states(arrivals.J, budget, limit)
        served, step = states, (budget + 1) ** np.arange(arrivals.J)[::-1]
    used = np.minimum(states.sum(axis=1), budget)
    law = np.zeros(len(states))
    law[0] = 1.0
    units = np.zeros(arrivals.J)
    for t in range(arrivals.T):
        change = np.zeros_like(law)
        for j in np.flatnonzero(arrivals.probabilities[t]):
            chance = policy._probability(t, used, served, np.full(used.shape, j))
            flow = law * np.where(used < budget, chance, 0.0) * arrivals.probabilities[t, j]
            units[j] += flow.sum()
            moved = np.flatnonzero(flow)
            change -= flow
            change[moved + step[j]] += flow[moved]
        law = law + change
    return units, states, law


class SelectionSampling(GroupPolicy):
    """Accept with probability (units left) / (rounds left): ex-ante optimal for shares (I1).

    Every round is served with probability exactly ``b / T``, whatever came before. So each group
    receives ``tau_g = b`` times its share of the arrivals in expectation, for all groups at once,
    overlapping or not, and however the arrivals drift over time.
    """

    counts_only = True

    def _fit(self, instance: InternalInstance) -> None:
        shares = instance.budget * instance.arrivals.population_share
        at_target = np.allclose(instance.tau, shares, rtol=1e-9)
        self.guarantee_ = 1.0 if at_target and instance.budget <= instance.rounds else None

    def _probability(
        self, t: int, used: np.ndarray, served: np.ndarray | None, kinds: np.ndarray
    ) -> np.ndarray:
        rounds_left = self.instance_.rounds - t
        return np.minimum(1.0, (self.instance_.budget - used) / rounds_left)


def whole_quotas(shares: np.ndarray, budget: int) -> np.ndarray:
    """Round shares to whole units by largest remainder; the sum is at most ``budget``."""
    quotas = np.floor(shares + 1e-9).astype(int)
    spare = min(budget, int(np.floor(shares.sum() + 1e-9))) - int(quotas.sum())
    if spare > 0:
        quotas[np.argsort(-(shares - quotas), kind="stable")[:spare]] += 1
    return quotas


class Quota(GroupPolicy):
    """Reserve each group's target: ex-post optimal for disjoint groups (I2).

    With whole targets that sum to at most ``b``, group ``g`` ends with ``min(N_g, tau_g)`` units,
    exactly what the clairvoyant would give, on every path. Other targets are rounded by largest
    remainder. A type that belongs to no group gets nothing.

    Attributes
    ----------
    quotas_ : ndarray of int, shape (G,)
    """

    def _fit(self, instance: InternalInstance) -> None:
        if not instance.arrivals.disjoint:
            raise ValueError(
                "Quota needs disjoint groups; use LPMagician or OccupancyOptimal for overlapping "
                "ones."
            )
        tau = instance.tau
        self.quotas_ = whole_quotas(tau * min(1.0, instance.budget / tau.sum()), instance.budget)
        member = instance.arrivals.groups
        self._group = np.where(member.any(axis=0), member.argmax(axis=0), -1)

    def _probability(
        self, t: int, used: np.ndarray, served: np.ndarray | None, kinds: np.ndarray
    ) -> np.ndarray:
        assert served is not None
        group = self._group[kinds]
        by_group = served @ self.instance_.arrivals.groups.T
        open_ = by_group[np.arange(len(group)), group] < self.quotas_[group]
        return (open_ & (group >= 0)).astype(float)


def _bisect(feasible: Callable[[float], bool], low: float = 0.0, high: float = 1.0) -> float:
    """Largest gamma in [low, high] that is feasible, to 1e-13."""
    if feasible(high):
        return high
    while high - low > 1e-13:
        middle = (low + high) / 2
        low, high = (middle, high) if feasible(middle) else (low, middle)
    return low


def _gate_magician(law: np.ndarray, gamma: float) -> np.ndarray | None:
    """Open in the states with the fewest units used, up to total probability gamma."""
    before = np.cumsum(law) - law
    gate = np.divide(gamma - before, law, out=np.ones_like(law), where=law > 0)
    gate = np.where(law > 0, np.clip(gate, 0.0, 1.0), (before < gamma).astype(float))
    return gate if before[-1] >= gamma - 1e-13 else None


def _gate_uniform(law: np.ndarray, gamma: float) -> np.ndarray | None:
    """Open with the same probability in every state that has a unit left."""
    available = 1.0 - law[-1]
    if available < gamma - 1e-13:
        return None
    return np.full(law.size, min(1.0, gamma / available))


class _Gate(GroupPolicy):
    """Open a gate with probability exactly gamma each round; if open, follow the LP."""

    counts_only = True
    _gate: Callable[[np.ndarray, float], np.ndarray | None]

    def __init__(
        self,
        gamma: float | Literal["max"] = "max",
        schedule: Literal["even", "sharp"] = "even",
    ) -> None:
        if schedule not in ("even", "sharp"):
            raise ValueError(f"schedule must be 'even' or 'sharp', got {schedule!r}.")
        self.schedule = schedule
        if isinstance(gamma, str):
            if gamma != "max":
                raise ValueError(f"gamma must be a number in (0, 1] or 'max', got {gamma!r}.")
        elif not 0 < gamma <= 1:
            raise ValueError(f"gamma must lie in (0, 1], got {gamma}.")
        self.gamma = gamma

    def _run(self, gamma: float, demand: np.ndarray, budget: int) -> np.ndarray | None:
        """Gates for all rounds, shape (T, b + 1), or None if gamma cannot be kept."""
        law = np.zeros(budget + 1)
        law[0] = 1.0
        gates = np.zeros((demand.size, budget + 1))
        for t, chance in enumerate(demand):
            gate = type(self)._gate(law, gamma)
            if gate is None:
                return None
            gate[-1] = 0.0
            gates[t] = gate
            move = law * gate * chance
            law = law - move
            law[1:] += move[:-1]
        return gates

    def _fit(self, instance: InternalInstance) -> None:
        if self.schedule == "even":
            accept = instance.benchmark_lp().acceptance
        else:
            accept = instance.sharp_acceptance()
        demand = (instance.arrivals.probabilities * accept).sum(axis=1)
        gamma = self.gamma
        if isinstance(gamma, str):
            gamma = _bisect(lambda g: self._run(g, demand, instance.budget) is not None)
        gates = self._run(gamma, demand, instance.budget)
        if gates is None:
            best = _bisect(lambda g: self._run(g, demand, instance.budget) is not None)
            raise ValueError(
                f"gamma = {gamma:g} cannot be kept on this instance; the largest that this policy "
                f"can guarantee is {best:.6g} (use gamma='max')."
            )
        self.guarantee_, self.gates_, self._accept = float(gamma), gates, accept

    def _probability(
        self, t: int, used: np.ndarray, served: np.ndarray | None, kinds: np.ndarray
    ) -> np.ndarray:
        return self.gates_[t, used] * self._accept[t, kinds]


class LPMagician(_Gate):
    """Follow the LP behind a gate that opens while few units were used (I3).

    The gate is open in the states with the fewest units used, randomised at the edge, so that it
    is open with probability exactly gamma in every round; then type ``j`` is accepted with the
    LP's probability. Every type gets gamma times its LP units, for any targets and any overlap.
    After Alaei's magician, for which ``gamma >= 1 - 1 / sqrt(b + 3)``.

    Parameters
    ----------
    gamma : float or "max", default "max"
        Probability of an open gate; "max" finds the largest for this instance by bisection.
    schedule : {"even", "sharp"}, default "even"
        How the LP's units are spread over rounds: with the same chance for a type in every round,
        or with chances of 0 and 1 (:meth:`InternalInstance.sharp_acceptance`), which gives a
        larger gamma but closes whole rounds to some types.

    Attributes
    ----------
    gates_ : ndarray, shape (T, b + 1)
        Probability that the gate opens, by round and units used.
    """

    _gate = staticmethod(_gate_magician)


class LPAttenuated(_Gate):
    """Follow the LP behind a gate that is blind to how many units are left.

    The simpler relative of :class:`LPMagician`, with a smaller gamma.

    Parameters
    ----------
    gamma : float or "max", default "max"
    schedule : {"even", "sharp"}, default "even"
        Both as in :class:`LPMagician`.
    """

    _gate = staticmethod(_gate_uniform)


class OccupancyOptimal(GroupPolicy):
    """Best ex-ante policy for any targets and overlaps (I4).

    ``min_g E[S_g] / tau_g`` is linear in the occupancy measure, so its maximum is an LP over
    (round, units used, type). The default finds it by column generation: for fixed weights of
    the groups, the best policy is a dynamic programme; a small LP mixes such policies and
    updates the weights until primal and dual meet.

    Parameters
    ----------
    method : {"columns", "lp"}, default "columns"
        ``"lp"`` solves the occupancy LP itself with HiGHS: slow, for comparison.
    tol : float, default 1e-7
        Gap between primal and dual value at which column generation stops.

    Attributes
    ----------
    value_ : float
        The optimum.
    acceptance_ : ndarray, shape (T, b + 1, J)
        Probability of accepting, by round, units used and type.
    """

    counts_only = True

    def __init__(self, method: Literal["columns", "lp"] = "columns", tol: float = 1e-7) -> None:
        if method not in ("columns", "lp"):
            raise ValueError(f"method must be 'columns' or 'lp', got {method!r}.")
        self.method, self.tol = method, tol

    def _fit(self, instance: InternalInstance) -> None:
        merged = instance.arrivals.merged()
        tau = instance.tau
        if self.method == "lp":
            value, accept = _occupancy_lp(merged.probabilities, merged.groups, tau, instance.budget)
        else:
            value, accept = _occupancy_columns(
                merged.probabilities, merged.groups, tau, instance.budget, self.tol
            )
        self.value_ = value
        self.acceptance_ = accept[:, :, instance.arrivals.profiles]
        lp = instance.benchmark_lp().value
        self.guarantee_ = value / lp if lp > 0 else None

    def _probability(
        self, t: int, used: np.ndarray, served: np.ndarray | None, kinds: np.ndarray
    ) -> np.ndarray:
        return self.acceptance_[t, used, kinds]


def _threshold_policy(p: np.ndarray, reward: np.ndarray, budget: int) -> np.ndarray:
    """Dynamic programme: accept (T, b + 1, J) maximising the expected reward of accepted types."""
    accept = np.zeros((len(p), budget + 1, reward.size), dtype=bool)
    value = np.zeros(budget + 1)  # by units used
    for t in range(len(p) - 1, -1, -1):
        gain = reward - (value[:-1] - value[1:])[:, None]
        accept[t, :-1] = gain > 0
        value[:-1] += np.maximum(gain, 0.0) @ p[t]
    return accept


def _occupancy(p: np.ndarray, accept: np.ndarray) -> np.ndarray:
    """Law of the units used before each round, shape (T, b + 1)."""
    law = np.zeros(accept.shape[:2])
    current = np.zeros(accept.shape[1])
    current[0] = 1.0
    for t in range(len(p)):
        law[t] = current
        move = current * (accept[t] @ p[t])
        current = current - move
        current[1:] += move[:-1]
    return law


def _occupancy_columns(
    p: np.ndarray, groups: np.ndarray, tau: np.ndarray, budget: int, tol: float
) -> tuple[float, np.ndarray]:
    scaled = groups / tau[:, None]  # (G, J): what one unit of type j adds to each ratio
    columns: list[np.ndarray] = []
    ratios: list[np.ndarray] = []
    weight = np.full(len(tau), 1 / len(tau))
    starts = [weight, *np.eye(len(tau))]
    bound = np.inf
    for iteration in range(500):
        weight = starts[iteration] if iteration < len(starts) else weight
        accept = _threshold_policy(p, weight @ scaled, budget)
        law = _occupancy(p, accept)
        units = np.einsum("tk,tkj,tj->j", law, accept, p, optimize=True)
        ratio = scaled @ units
        bound = min(bound, float(weight @ ratio))
        columns.append(accept)
        ratios.append(ratio)
        if iteration < len(starts) - 1:
            continue
        value, mix, weight = _master(np.array(ratios))
        if bound - value <= tol * max(1.0, bound):
            break
    else:
        raise RuntimeError(f"Column generation left a gap of {bound - value:.2g}; raise tol.")
    flow = np.zeros(p.shape[:1] + (budget + 1, p.shape[1]))
    total = np.zeros(flow.shape[:2])
    for m in np.flatnonzero(mix > 0):
        law = mix[m] * _occupancy(p, columns[m])
        total += law
        flow += law[:, :, None] * columns[m]
    accept = np.divide(
        flow, total[:, :, None], out=np.zeros_like(flow), where=total[:, :, None] > 0
    )
    return value, np.clip(accept, 0.0, 1.0)


def _master(ratios: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Best mixture of policies: max over mixtures of the smallest ratio, with its dual weights."""
    from scipy.optimize import linprog

    m, n_groups = ratios.shape
    result = linprog(
        np.append(np.zeros(m), -1.0),
        A_ub=np.hstack([-ratios.T, np.ones((n_groups, 1))]),
        b_ub=np.zeros(n_groups),
        A_eq=np.append(np.ones(m), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0, None)] * m + [(None, None)],
        method="highs-ds",
    )
    if result.status != 0:
        raise RuntimeError(f"HiGHS did not solve the master problem: {result.message}")
    weight = np.maximum(-result.ineqlin.marginals, 0.0)
    return float(result.x[-1]), result.x[:-1], weight / weight.sum()


def _occupancy_lp(
    p: np.ndarray, groups: np.ndarray, tau: np.ndarray, budget: int
) -> tuple[float, np.ndarray]:
    """Solve for pi[t,k] (law of units used) and y[t,k,j] <= p_tj pi[t,k], flow balance, max s."""
    n_rounds, n_types = p.shape
    states = budget + 1
    n_pi, n_y = n_rounds * states, n_rounds * states * n_types
    size = n_pi + n_y + 1
    t, k, j = np.indices((n_rounds, states, n_types)).reshape(3, -1)
    pi_at = t * states + k
    y_at = n_pi + np.arange(n_y)
    row = np.arange(n_y)
    limit = sparse.coo_array((np.ones(n_y), (row, y_at)), shape=(n_y, size))
    limit = limit - sparse.coo_array((p[t, j], (row, pi_at)), shape=(n_y, size))
    g, s = np.nonzero(groups[:, j])
    fair = sparse.coo_array((-np.ones(g.size), (g, y_at[s])), shape=(len(tau), size)).tocsr()
    fair = fair + sparse.coo_array(
        (tau, (np.arange(len(tau)), np.full(len(tau), size - 1))), shape=(len(tau), size)
    )
    upper = sparse.vstack([limit, fair], format="csr")
    # pi[t+1,k] = pi[t,k] - sum_j y[t,k,j] + sum_j y[t,k-1,j];  pi[0] = (1, 0, ..., 0)
    pi = np.arange(n_pi)
    rows, cols, data = [pi], [pi], [np.ones(n_pi)]
    later = pi[states:]
    rows += [later]
    cols += [later - states]
    data += [-np.ones(later.size)]
    inner = t < n_rounds - 1
    rows += [pi_at[inner] + states]
    cols += [y_at[inner]]
    data += [np.ones(inner.sum())]
    up = inner & (k < budget)
    rows += [pi_at[up] + states + 1]
    cols += [y_at[up]]
    data += [-np.ones(up.sum())]
    flow = sparse.coo_array(
        (np.concatenate(data), (np.concatenate(rows), np.concatenate(cols))), shape=(n_pi, size)
    ).tocsr()
    start = np.zeros(n_pi)
    start[0] = 1.0
    high = np.full(size, np.inf)
    high[y_at[k == budget]] = 0.0
    x = solve_lp(
        np.append(np.zeros(size - 1), -1.0),
        method="highs-ipm",
        A_ub=upper,
        b_ub=np.zeros(upper.shape[0]),
        A_eq=flow,
        b_eq=start,
        bounds=np.column_stack([np.zeros(size), high]),
    )
    law = x[:n_pi].reshape(n_rounds, states, 1)
    y = x[n_pi:-1].reshape(n_rounds, states, n_types)
    room = law * p[:, None, :]
    accept = np.divide(y, room, out=np.zeros_like(y), where=room > 1e-14)
    return float(x[-1]), np.clip(accept, 0.0, 1.0)


class ExPostOptimal(GroupPolicy):
    """Best ex-post policy by backward recursion over served vectors (I5): small instances.

    Parameters
    ----------
    limit : int, default 200,000
        Largest number of states, ``(b + 1) ** (number of different memberships)``.

    Attributes
    ----------
    value_ : float
        The optimum of ``E[min_g S_g / tau_g]``.
    """

    def __init__(self, limit: int = 200_000) -> None:
        self.limit = limit

    def _fit(self, instance: InternalInstance) -> None:
        merged, budget = instance.arrivals.merged(), instance.budget
        tau = instance.tau
        states = served_states(merged.J, budget, self.limit)
        full = states.sum(axis=1) >= budget
        value = (states @ merged.groups.T / tau).min(axis=1)
        self._step = (budget + 1) ** np.arange(merged.J)[::-1]
        # np.roll brings the state with one more unit of profile j; full states never look there
        self._accept = np.zeros((merged.T, len(states), merged.J), dtype=bool)
        for t in range(merged.T - 1, -1, -1):
            after = np.stack([np.roll(value, -step) for step in self._step], axis=1)
            gain = np.where(full[:, None], 0.0, after - value[:, None])
            self._accept[t] = gain > 0
            value = value + np.maximum(gain, 0.0) @ merged.probabilities[t]
        self.value_ = float(value[0])

    def _probability(
        self, t: int, used: np.ndarray, served: np.ndarray | None, kinds: np.ndarray
    ) -> np.ndarray:
        assert served is not None
        profiles = self.instance_.arrivals.profiles
        state = (served * self._step[profiles]).sum(axis=1)
        return self._accept[t, state, profiles[kinds]].astype(float)

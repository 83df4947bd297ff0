"""The internal model: equal requests from people who belong to groups.

``T`` rounds, ``b`` whole units, one request a round; a request is of type ``j``, groups are sets
of types and may overlap.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import sparse

from icml24.online_equity.demand import Random
from icml24.online_equity.external import CLARABEL, Metric, solve_lp

__all__ = ["ArrivalModel", "GroupLPSolution", "InternalInstance"]


class ArrivalModel:
    """Who arrives when, and who belongs to which group.

    Parameters
    ----------
    probabilities : array_like, shape (T, J)
        ``probabilities[t, j]``: chance that the request of round ``t`` is of type ``j``. Rows sum
        to 1; add a type that belongs to no group for rounds in which nobody may come.
    groups : array_like of bool, shape (G, J)
        ``groups[g, j]``: whether type ``j`` belongs to group ``g``.
    names : sequence of hashable, optional
        Names of the types; default ``0, 1, ...``.
    group_names : sequence of str, optional
        Names of the groups.

    Attributes
    ----------
    expected : ndarray, shape (J,)
        Expected number of arrivals of each type.

    Raises
    ------
    ValueError
        If probabilities are negative or do not sum to one, a group has no type, or shapes differ.

    Examples
    --------
    >>> arrivals = ArrivalModel([[0.5, 0.5], [0.2, 0.8]], [[1, 0], [0, 1]])
    >>> arrivals.expected
    array([0.7, 1.3])
    """

    def __init__(
        self,
        probabilities: ArrayLike,
        groups: ArrayLike,
        names: Sequence[Hashable] | None = None,
        group_names: Sequence[str] | None = None,
    ) -> None:
        p = np.array(probabilities, dtype=float)
        member = np.asarray(groups)
        if p.ndim != 2 or not p.size:
            raise ValueError(f"probabilities must have shape (T, J), got {p.shape}.")
        if not np.isfinite(p).all() or (p < 0).any():
            raise ValueError("Probabilities must be finite and not negative.")
        total = p.sum(axis=1)
        if (abs(total - 1) > 1e-9).any():
            t = int(np.argmax(abs(total - 1)))
            raise ValueError(
                f"The probabilities of round {t} sum to {total[t]:.6g}; they must sum to 1."
            )
        if member.ndim != 2 or member.shape[1] != p.shape[1] or not len(member):
            raise ValueError(
                f"groups must have shape (G, {p.shape[1]}), a column per type; got {member.shape}."
            )
        if not np.isin(member, (0, 1)).all():
            raise ValueError("groups must hold True or False: whether a type is in a group.")
        member = member.astype(bool)
        self.T, self.J = p.shape
        self.G = len(member)
        self.group_names = (
            [f"group {g}" for g in range(self.G)] if group_names is None else list(group_names)
        )
        self.names: list[Any] = list(range(self.J)) if names is None else list(names)
        if len(self.names) != self.J or len(self.group_names) != self.G:
            raise ValueError(
                f"Expected {self.J} type names and {self.G} group names, got {len(self.names)} and "
                f"{len(self.group_names)}."
            )
        self.probabilities = p / total[:, None]
        self.groups = member
        self.expected = self.probabilities.sum(axis=0)
        empty = ~(member & (self.expected > 0)).any(axis=1)
        if empty.any():
            name = self.group_names[int(np.argmax(empty))]
            raise ValueError(f"{name!r} is empty: no type that can arrive belongs to it.")
        self._cumulative = np.cumsum(self.probabilities, axis=1)
        self._index = {name: j for j, name in enumerate(self.names)}
        self.attributes: list[str] = []

    def __repr__(self) -> str:
        return f"ArrivalModel(T={self.T}, types={self.J}, groups={self.G})"

    @classmethod
    def from_frame(
        cls,
        frame: pd.DataFrame,
        by: str | Sequence[str],
        rounds: int,
        time: str | None = None,
        weight: str | None = None,
    ) -> ArrivalModel:
        """Learn the arrivals from a table of people.

        People are put in order of ``time`` (ties are simultaneous; without it, rows come in the
        order of the table) and cut into ``rounds`` blocks of equal size; round ``t`` brings a
        random member of block ``t``. A type is a combination of the ``by`` columns that occurs,
        and each level of each column is a group.

        Parameters
        ----------
        frame : DataFrame
            One row for each person, or for each kind of person with a ``weight``.
        by : str or sequence of str
            Columns with the group attributes.
        rounds : int
            Number of rounds ``T``, at most the number of people.
        time : str, optional
            Column to sort by.
        weight : str, optional
            Column with the number of people that a row stands for.

        Returns
        -------
        ArrivalModel
            Types are named by tuples of levels, groups ``"column=level"``.

        Examples
        --------
        >>> people = pd.DataFrame({"sex": ["f", "m", "f", "f"]})
        >>> ArrivalModel.from_frame(people, by="sex", rounds=2).probabilities
        array([[0.5, 0.5],
               [1. , 0. ]])
        """
        by = [by] if isinstance(by, str) else list(by)
        if not by:
            raise ValueError("by must name at least one column with group attributes.")
        missing = [column for column in (*by, time, weight) if column and column not in frame]
        if missing:
            raise ValueError(
                f"The table has no column {missing[0]!r}; its columns are {list(frame.columns)}."
            )
        if frame[by].isna().any(axis=None):
            raise ValueError("The group columns contain missing values; drop or label them.")
        mass = np.ones(len(frame)) if weight is None else frame[weight].to_numpy(dtype=float)
        if not np.isfinite(mass).all() or (mass < 0).any():
            raise ValueError(f"Column {weight!r} must hold finite numbers that are not negative.")
        if not 1 <= rounds <= mass.sum():
            raise ValueError(f"rounds must lie between 1 and {mass.sum():g} people, got {rounds}.")
        when = np.arange(len(frame)) if time is None else frame[time].to_numpy()
        moments, moment = np.unique(when, return_inverse=True)
        code, types = pd.MultiIndex.from_frame(frame[by]).factorize(sort=True)
        people = np.zeros((len(moments), len(types)))
        np.add.at(people, (moment, code), mass)
        people = people[people.sum(axis=1) > 0]
        # share of the people of each moment who fall into each block
        ends = np.cumsum(people.sum(axis=1))
        starts = ends - people.sum(axis=1)
        edges = np.linspace(0, ends[-1], rounds + 1)
        overlap = np.minimum(ends, edges[1:, None]) - np.maximum(starts, edges[:-1, None])
        blocks = np.clip(overlap, 0, None) / (ends - starts) @ people
        names = [tuple(name) for name in types]
        groups, labels = [], []
        for position, column in enumerate(by):
            level = np.array([str(name[position]) for name in names])
            for value in sorted(set(level)):
                groups.append(level == value)
                labels.append(f"{column}={value}")
        model = cls(blocks / blocks.sum(axis=1, keepdims=True), groups, names, labels)
        model.attributes = by
        return model

    @property
    def disjoint(self) -> bool:
        """Whether no type belongs to two groups."""
        return bool((self.groups.sum(axis=0) <= 1).all())

    @property
    def population_share(self) -> np.ndarray:
        """Expected share of each group among all arrivals, shape (G,)."""
        return self.groups @ self.expected / self.T

    @cached_property
    def profiles(self) -> np.ndarray:
        """Types with equal memberships share a profile number, shape (J,)."""
        return np.unique(self.groups.T, axis=0, return_inverse=True)[1].ravel()

    def merged(self) -> ArrivalModel:
        """Return the same arrivals with types of equal memberships merged."""
        first = np.unique(self.profiles, return_index=True)[1]
        p = np.zeros((self.T, len(first)))
        np.add.at(p.T, self.profiles, self.probabilities.T)
        return ArrivalModel(p, self.groups[:, first], None, self.group_names)

    def type_of(self, arrival: Any) -> int:
        """Find the type of an arrival.

        Parameters
        ----------
        arrival : hashable or mapping
            The name of a type, or (for :meth:`from_frame` models) a mapping from the group
            columns to levels, such as a row of a table.

        Returns
        -------
        int

        Raises
        ------
        ValueError
            If there is no such type.
        """
        if isinstance(arrival, Mapping | pd.Series):
            absent = [column for column in self.attributes if column not in arrival]
            if absent or not self.attributes:
                raise ValueError(f"The arrival must have the entries {self.attributes}.")
            arrival = tuple(arrival[column] for column in self.attributes)
        if len(self.attributes) == 1 and not isinstance(arrival, tuple):
            arrival = (arrival,)
        try:
            return self._index[arrival]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, self.names[:4]))
            raise ValueError(
                f"Unknown type {arrival!r}; known are {known}{', ...' if self.J > 4 else ''}."
            ) from None

    def draw(self, t: int, n_runs: int, rng: np.random.Generator) -> np.ndarray:
        """Draw the types that arrive in round ``t`` of many runs, shape (n_runs,)."""
        kinds = np.searchsorted(self._cumulative[t], rng.random(n_runs), side="right")
        return np.minimum(kinds, self.J - 1)

    def sample(self, size: int, random_state: Random = 0) -> np.ndarray:
        """Draw whole paths.

        Parameters
        ----------
        size : int
            Number of paths.
        random_state : int or numpy.random.Generator

        Returns
        -------
        ndarray of int, shape (size, T)
        """
        rng = np.random.default_rng(random_state)
        return np.stack([self.draw(t, size, rng) for t in range(self.T)], axis=1)


@dataclass(frozen=True)
class GroupLPSolution:
    """Optimum of the internal ex-ante benchmark LP.

    Attributes
    ----------
    value : float
        Largest common ratio ``min_g E[S_g] / tau_g``.
    units : ndarray, shape (J,)
        Expected units for each type.
    acceptance : ndarray, shape (T, J)
        Chance with which an arrival of each type is accepted in each round. HiGHS: the same in
        every round, ``units / expected arrivals``; cvxpy: as the solver spread it.
    """

    value: float
    units: np.ndarray
    acceptance: np.ndarray


def _fair_counts_lp(
    counts: np.ndarray, groups: np.ndarray, targets: np.ndarray, budget: float
) -> np.ndarray:
    """For each row of counts: max s with sum_{j in g} y_j >= s tau_g, y <= counts, sum y <= b."""
    m, n_types = counts.shape
    size = n_types + 1  # y_1..y_J, s
    block = sparse.bmat(
        [
            [sparse.csr_array(-groups.astype(float)), sparse.csr_array(targets[:, None])],
            [sparse.csr_array(np.ones((1, n_types))), None],
        ]
    )
    upper = sparse.kron(sparse.eye_array(m), block, format="csr")
    right = np.tile(np.append(np.zeros(len(groups)), budget), m)
    high = np.hstack([counts, np.full((m, 1), np.inf)])
    cost = np.tile(np.append(np.zeros(n_types), -1.0), m)
    bounds = np.column_stack([np.zeros(m * size), high.ravel()])
    return solve_lp(cost, A_ub=upper, b_ub=right, bounds=bounds).reshape(m, size)


@dataclass(frozen=True, eq=False)
class InternalInstance:
    """Whole units to hand out to people of groups (the paper's internal model).

    Parameters
    ----------
    arrivals : ArrivalModel
        Who comes when.
    budget : int
        Number of units ``b``.
    targets : "population" or array_like of shape (G,)
        Units that are each group's fair share; ``"population"``: ``b`` times its expected share
        of the arrivals.

    Attributes
    ----------
    tau : ndarray, shape (G,)
        The targets as numbers.

    Raises
    ------
    ValueError
        If the budget is not a positive whole number, or a target is not positive.

    Warns
    -----
    UserWarning
        If disjoint groups are promised more than the stock together.

    Examples
    --------
    >>> arrivals = ArrivalModel([[0.5, 0.5], [0.2, 0.8]], [[1, 0], [0, 1]])
    >>> InternalInstance(arrivals, budget=1).benchmark_lp().acceptance[0].round(3)
    array([0.5, 0.5])
    """

    arrivals: ArrivalModel
    budget: int
    targets: Literal["population"] | ArrayLike = "population"
    tau: np.ndarray = field(init=False, repr=False)
    _seen: dict[tuple[int, int], float] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.arrivals, ArrivalModel):
            raise TypeError(
                f"arrivals must be an ArrivalModel, got {type(self.arrivals).__name__}."
            )
        if not (
            isinstance(self.budget, int | float | np.number) and float(self.budget).is_integer()
        ):
            raise ValueError(f"budget must be a whole number of units, got {self.budget!r}.")
        if self.budget < 1:
            raise ValueError(f"budget must be at least 1 unit, got {self.budget!r}.")
        object.__setattr__(self, "budget", int(self.budget))
        if isinstance(self.targets, str):
            if self.targets != "population":
                raise ValueError(f"targets must be 'population' or numbers, got {self.targets!r}.")
            tau = self.budget * self.arrivals.population_share
        else:
            tau = np.array(self.targets, dtype=float)
        if tau.shape != (self.arrivals.G,):
            raise ValueError(f"targets must have {self.arrivals.G} entries, one per group.")
        if not np.isfinite(tau).all() or (tau <= 0).any():
            raise ValueError("Targets must be positive and finite.")
        object.__setattr__(self, "tau", tau)
        promised = self._promised()
        if promised > self.budget * (1 + 1e-9):
            warnings.warn(
                f"Disjoint groups are promised {promised:.4g} of {self.budget} units: the value 1 "
                "cannot be reached.",
                UserWarning,
                stacklevel=3,
            )

    def _promised(self) -> float:
        """Largest sum of targets over pairwise disjoint groups (greedy beyond 12 groups)."""
        member, tau = self.arrivals.groups, self.tau
        order = np.argsort(-tau)
        if len(tau) > 12:
            taken, total = np.zeros(member.shape[1], dtype=bool), 0.0
            for g in order:
                if not (taken & member[g]).any():
                    taken, total = taken | member[g], total + tau[g]
            return float(total)
        best = 0.0
        for chosen in itertools.product((False, True), repeat=len(tau)):
            family = np.array(chosen)
            if (member[family].sum(axis=0) <= 1).all():
                best = max(best, float(tau[family].sum()))
        return best

    @property
    def rounds(self) -> int:
        """Number of rounds ``T``."""
        return self.arrivals.T

    @cached_property
    def _lp(self) -> GroupLPSolution:
        expected = self.arrivals.expected
        x = _fair_counts_lp(expected[None], self.arrivals.groups, self.tau, self.budget)[0]
        return self._group_solution(float(x[-1]), x[:-1])

    def _group_solution(self, value: float, units: np.ndarray) -> GroupLPSolution:
        expected = self.arrivals.expected
        units = np.clip(units, 0.0, expected)
        accept = np.divide(units, expected, out=np.zeros_like(units), where=expected > 0)
        return GroupLPSolution(value, units, np.broadcast_to(accept, (self.rounds, units.size)))

    def sharp_acceptance(self) -> np.ndarray:
        """Return an optimal acceptance table that is 0 or 1 almost everywhere.

        A vertex of the LP over (round, type). Fewer coins make the number of units used less
        random, at the price of rounds in which nobody of a type is served.

        Returns
        -------
        ndarray, shape (T, J)

        Raises
        ------
        ValueError
            If there are more than 100,000 (round, type) pairs.
        """
        p, member = self.arrivals.probabilities, self.arrivals.groups
        if p.size > 100_000:
            raise ValueError(f"{p.size:,} pairs of round and type are too many for a sharp table.")
        tiled = np.tile(member, (1, self.rounds))  # variables in the order of p.ravel()
        units = _fair_counts_lp(p.reshape(1, -1), tiled, self.tau, self.budget)[0, :-1]
        accept = np.divide(units.reshape(p.shape), p, out=np.zeros_like(p), where=p > 0)
        return np.clip(accept, 0.0, 1.0)

    def benchmark_lp(self, method: Literal["highs", "cvxpy"] = "highs") -> GroupLPSolution:
        r"""Solve the ex-ante benchmark LP.

        .. math:: \max s \quad\text{s.t.}\quad
            \sum_t \sum_{j \in g} x_{tj} \ge s\,\tau_g,\;\;
            0 \le x_{tj} \le p_{tj},\;\; \sum_{tj} x_{tj} \le b .

        Only the sums over rounds matter, so HiGHS sees one variable for each type; the cvxpy
        model is written as above.

        Parameters
        ----------
        method : {"highs", "cvxpy"}

        Returns
        -------
        GroupLPSolution
        """
        if method == "highs":
            return self._lp
        if method != "cvxpy":
            raise ValueError(f"method must be 'highs' or 'cvxpy', got {method!r}.")
        import cvxpy as cp

        p, member = self.arrivals.probabilities, self.arrivals.groups.astype(float)
        s, x = cp.Variable(), cp.Variable(p.shape, nonneg=True)
        by_type = cp.sum(x, axis=0)
        fair = member @ by_type >= s * self.tau
        problem = cp.Problem(cp.Maximize(s), [fair, x <= p, cp.sum(by_type) <= self.budget])
        problem.solve(solver=cp.CLARABEL, **CLARABEL)
        if problem.status != cp.OPTIMAL:
            raise RuntimeError(f"The benchmark LP was not solved: status {problem.status}.")
        spread = np.clip(x.value, 0.0, p)
        accept = np.divide(spread, p, out=np.zeros_like(p), where=p > 0)
        return GroupLPSolution(float(problem.value), spread.sum(axis=0), accept)

    def clairvoyant_paths(self, counts: np.ndarray) -> np.ndarray:
        """Best ``min_g S_g / tau_g`` on each path, units taken as divisible.

        Parameters
        ----------
        counts : ndarray, shape (m, J)
            Arrivals of each type on each path.

        Returns
        -------
        ndarray, shape (m,)
        """
        member, tau = self.arrivals.groups, self.tau
        if self.arrivals.disjoint:
            ratio = (counts @ member.T) / tau
            return np.minimum(ratio.min(axis=1), self.budget / tau.sum())
        first = np.unique(self.arrivals.profiles, return_index=True)[1]
        profile = np.zeros((len(counts), len(first)))
        np.add.at(profile.T, self.arrivals.profiles, counts.T)
        rows, inverse = np.unique(profile, axis=0, return_inverse=True)
        values = [
            _fair_counts_lp(chunk, member[:, first], tau, self.budget)[:, -1]
            for chunk in np.array_split(rows, -(-len(rows) // 250))
        ]
        return np.concatenate(values)[inverse.ravel()]

    def clairvoyant(
        self, metric: Metric = "post", n_runs: int = 2_000, random_state: int = 0
    ) -> float:
        """Best value of a planner who sees all arrivals first (units divisible), simulated.

        Parameters
        ----------
        metric : {"post", "ante"}
            ``"post"``: mean over paths of the best ratio on the path. ``"ante"``: one LP over all
            sampled paths; at most ``benchmark_lp().value``, up to sampling error.
        n_runs : int
            Number of sampled paths.
        random_state : int

        Returns
        -------
        float
        """
        paths = self.arrivals.sample(n_runs, random_state)
        counts = (paths[:, :, None] == np.arange(self.arrivals.J)).sum(axis=1).astype(float)
        if metric == "post":
            return float(self.clairvoyant_paths(counts).mean())
        if metric != "ante":
            raise ValueError(f"metric must be 'ante' or 'post', got {metric!r}.")
        member, tau = self.arrivals.groups.astype(float), self.tau
        rows, weight = np.unique(counts, axis=0, return_counts=True)
        m, n_types = rows.shape
        gain = np.concatenate([-w / n_runs * member for w in weight], axis=1)
        fair = sparse.hstack([sparse.csr_array(gain), tau[:, None]])
        stock = sparse.kron(sparse.eye_array(m), np.ones((1, n_types)))
        x = solve_lp(
            np.append(np.zeros(m * n_types), -1.0),
            A_ub=sparse.vstack([fair, sparse.hstack([stock, np.zeros((m, 1))])]).tocsr(),
            b_ub=np.append(np.zeros(len(tau)), np.full(m, float(self.budget))),
            bounds=[(0, c) for c in rows.ravel()] + [(0, None)],
        )
        return float(x[-1])

"""What the agents may ask for: independent discrete demands, known in advance."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

__all__ = ["DemandModel"]

Random = int | np.random.Generator | None


def _padded(rows: ArrayLike | Sequence[ArrayLike], what: str) -> tuple[np.ndarray, np.ndarray]:
    """Stack rows of unequal length; the mask says which entries are real."""
    try:
        arrays = [np.atleast_1d(np.asarray(row, dtype=float)) for row in rows]  # type: ignore
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} must hold one row of numbers for each agent.") from error
    if not arrays:
        raise ValueError(f"{what} is empty; give one row of numbers for each agent.")
    lengths = np.array([a.size for a in arrays])
    if any(a.ndim != 1 for a in arrays) or not lengths.all():
        empty = int(np.argmin(lengths))
        raise ValueError(
            f"{what} must hold a non-empty 1-D row for each agent (see agent {empty})."
        )
    mask = np.arange(lengths.max()) < lengths[:, None]
    out = np.zeros(mask.shape)
    out[mask] = np.concatenate(arrays)
    return out, mask


def _tidy(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort each row, merge equal points, drop points of probability zero."""
    values = np.where(weights > 0, values, np.inf)
    order = np.argsort(values, axis=1, kind="stable")
    values = np.take_along_axis(values, order, axis=1)
    weights = np.take_along_axis(weights, order, axis=1)
    new = np.ones(values.shape, dtype=int)
    new[:, 1:] = values[:, 1:] > values[:, :-1]
    slot = np.cumsum(new, axis=1) - 1
    rows = np.broadcast_to(np.arange(len(values))[:, None], slot.shape)
    merged, points = np.zeros_like(weights), np.full_like(values, np.inf)
    np.add.at(merged, (rows, slot), weights)
    points[rows, slot] = values
    keep = (merged > 0).any(axis=0)
    merged, points = merged[:, keep], points[:, keep]
    top = np.where(np.isfinite(points), points, -np.inf).max(axis=1, keepdims=True)
    return np.where(merged > 0, points, top), merged


def _correlation_p_value(matrix: np.ndarray, n_permutations: int = 199) -> float:
    """Permutation test of independent columns; statistic: mean squared correlation."""
    rng = np.random.default_rng(0)
    columns = matrix[:, matrix.std(axis=0) > 0]
    if min(columns.shape) < 2 or len(columns) < 8:
        return 1.0
    z = (columns - columns.mean(axis=0)) / columns.std(axis=0)

    def statistic(z: np.ndarray) -> float:
        return float(np.square(z.T @ z).sum())

    observed = statistic(z)
    beaten = sum(statistic(rng.permuted(z, axis=0)) >= observed for _ in range(n_permutations))
    return (1 + beaten) / (1 + n_permutations)


class DemandModel:
    """Independent demands of agents who arrive one by one, in a known order.

    Agent ``i`` asks for ``values[i, k]`` with probability ``weights[i, k]``. A demand of zero
    counts as fully served (0/0 := 1). Points are sorted, equal points are merged, and rows are
    padded with probability zero.

    Parameters
    ----------
    supports : sequence of array_like
        For each agent, the demands that can occur (finite, not negative), in units of the stock.
    probabilities : sequence of array_like, optional
        For each agent, their probabilities (summing to 1 within 1e-9). Default: uniform.
    names : sequence of hashable, optional
        Names of the agents; default ``0, 1, ...``.

    Attributes
    ----------
    values, weights : ndarray, shape (n, K)
        The tidy table.
    n : int
        Number of agents.

    Raises
    ------
    ValueError
        If a demand is negative, infinite or NaN, an agent has no demand at all, or probabilities
        are negative, of another shape, or do not sum to one.

    Examples
    --------
    Two clinics: the first asks for 1 or 3 doses, the second always for 2.

    >>> demand = DemandModel([[1, 3], [2]], [[0.5, 0.5], [1.0]], names=["north", "south"])
    >>> demand.mean
    array([2., 2.])
    """

    def __init__(
        self,
        supports: Sequence[ArrayLike] | np.ndarray,
        probabilities: Sequence[ArrayLike] | np.ndarray | None = None,
        names: Sequence[Hashable] | None = None,
    ) -> None:
        values, mask = _padded(supports, "supports")
        if not np.isfinite(values).all() or (values < 0).any():
            agent = int(np.argmax((~np.isfinite(values) | (values < 0)).any(axis=1)))
            raise ValueError(
                f"Demands must be finite and not negative; see agent {agent}: {values[agent]}."
            )
        if probabilities is None:
            weights = mask / mask.sum(axis=1, keepdims=True)
        else:
            weights, weight_mask = _padded(probabilities, "probabilities")
            if weight_mask.shape != mask.shape or (weight_mask != mask).any():
                raise ValueError("probabilities must have the same lengths as supports.")
            if not np.isfinite(weights).all() or (weights < 0).any():
                raise ValueError("Probabilities must be finite and not negative.")
            total = weights.sum(axis=1)
            if (abs(total - 1) > 1e-9).any():
                agent = int(np.argmax(abs(total - 1)))
                raise ValueError(
                    f"The probabilities of agent {agent} sum to {total[agent]:.6g}; they must sum "
                    "to 1."
                )
            weights = weights / total[:, None]
        self.values, self.weights = _tidy(values, weights)
        self.n = len(self.values)
        self.names = list(range(self.n)) if names is None else list(names)
        if len(self.names) != self.n:
            raise ValueError(
                f"names must have {self.n} entries, one per agent; got {len(names or [])}."
            )
        self._cumulative = np.cumsum(self.weights, axis=1)
        self.sizes = (self.weights > 0).sum(axis=1)

    def __repr__(self) -> str:
        return f"DemandModel(n={self.n}, expected total={self.mean.sum():.4g})"

    @property
    def mean(self) -> np.ndarray:
        """Expected demand of each agent, shape (n,)."""
        return (self.values * self.weights).sum(axis=1)

    @property
    def n_scenarios(self) -> float:
        """Number of joint demand realisations (may be inf)."""
        with np.errstate(over="ignore"):
            return float(np.prod(self.sizes.astype(float)))

    @classmethod
    def from_samples(
        cls,
        samples: pd.DataFrame | np.ndarray | Sequence[ArrayLike],
        bins: int | None = None,
        names: Sequence[Hashable] | None = None,
    ) -> DemandModel:
        """Learn the demand laws from past observations.

        Parameters
        ----------
        samples : DataFrame or ndarray of shape (occasions, n), or list of 1-D arrays
            A table has one column for each agent and one row for each past occasion; its columns
            are then tested for dependence. A list has one array of any length for each agent.
        bins : int, optional
            Replace an agent's sorted observations by the means of this many groups of equal
            size. Default: keep every distinct observation.
        names : sequence of hashable, optional
            Names of the agents; default: the columns of a DataFrame.

        Returns
        -------
        DemandModel

        Warns
        -----
        UserWarning
            If the columns of a table look dependent (permutation test, p <= 0.01): the 1/2
            guarantee is proven for independent demands only.

        Examples
        --------
        >>> DemandModel.from_samples([[4, 4, 8, 8], [1, 2, 3]]).mean
        array([6., 2.])
        """
        if isinstance(samples, pd.DataFrame):
            names = list(samples.columns) if names is None else names
            samples = samples.to_numpy(dtype=float)
        if isinstance(samples, np.ndarray) and samples.ndim == 2:
            if not np.isfinite(samples).all():
                raise ValueError("samples contains NaN or infinite demands; drop or repair them.")
            p_value = _correlation_p_value(samples)
            if p_value <= 0.01:
                warnings.warn(
                    f"The demands look dependent (permutation test, p = {p_value:.3f}); the 1/2 "
                    "guarantee needs independent demands.",
                    UserWarning,
                    stacklevel=2,
                )
            samples = list(samples.T)
        if bins is not None and bins < 1:
            raise ValueError(f"bins must be at least 1, got {bins}.")
        supports, weights = [], []
        for sample in samples:
            ordered = np.sort(np.asarray(sample, dtype=float).ravel())
            if not ordered.size:
                raise ValueError("Each agent needs at least one observation.")
            groups = np.array_split(ordered, min(bins or ordered.size, ordered.size))
            supports.append([g.mean() for g in groups])
            weights.append([g.size / ordered.size for g in groups])
        return cls(supports, weights, names)

    @classmethod
    def from_frame(
        cls,
        frame: pd.DataFrame,
        agent: str = "agent",
        demand: str = "demand",
        probability: str | None = None,
        bins: int | None = None,
    ) -> DemandModel:
        """Read a planner's long table: one row for each agent and possible (or past) demand.

        Agents arrive in the order in which they first appear in the table.

        Parameters
        ----------
        frame : DataFrame
            For example ``pandas.read_csv("requests.csv")``.
        agent, demand : str
            Columns that hold the name of the agent and the amount asked for.
        probability : str, optional
            Column with the probability of that demand. Without it, rows are past observations
            and equally likely.
        bins : int, optional
            As in :meth:`from_samples` (past observations only).

        Returns
        -------
        DemandModel

        Examples
        --------
        >>> table = pd.DataFrame({"agent": ["a", "a", "b"], "demand": [2, 4, 5]})
        >>> DemandModel.from_frame(table).names
        ['a', 'b']
        """
        wanted = [agent, demand] + ([probability] if probability else [])
        missing = [column for column in wanted if column not in frame.columns]
        if missing:
            raise ValueError(
                f"The table has no column {missing[0]!r}; its columns are {list(frame.columns)}."
            )
        if frame.empty:
            raise ValueError("The table is empty; it needs one row for each agent and demand.")
        groups = frame.groupby(agent, sort=False)
        names = list(groups.groups)
        supports = [group.to_numpy(dtype=float) for _, group in groups[demand]]
        if probability is None:
            return cls.from_samples(supports, bins=bins, names=names)
        if bins is not None:
            raise ValueError("bins applies to past observations; leave it out with probabilities.")
        weights = [group.to_numpy(dtype=float) for _, group in groups[probability]]
        return cls(supports, weights, names)

    def draw(self, agent: int, n_runs: int, rng: np.random.Generator) -> np.ndarray:
        """Draw one agent's demand in many runs.

        Parameters
        ----------
        agent : int
            Position of the agent, from 0.
        n_runs : int
            Number of runs.
        rng : numpy.random.Generator

        Returns
        -------
        ndarray of int, shape (n_runs,)
            Columns of ``values[agent]``.
        """
        k = np.searchsorted(self._cumulative[agent], rng.random(n_runs), side="right")
        return np.minimum(k, self.sizes[agent] - 1)

    def stream(self, n_runs: int, random_state: Random = 0) -> Iterator[np.ndarray]:
        """Yield the demands of agent 0, 1, ... in ``n_runs`` simulated runs, each (n_runs,)."""
        rng = np.random.default_rng(random_state)
        for agent in range(self.n):
            yield self.values[agent, self.draw(agent, n_runs, rng)]

    def sample(self, size: int, random_state: Random = 0) -> np.ndarray:
        """Draw joint realisations.

        Parameters
        ----------
        size : int
            Number of realisations.
        random_state : int or numpy.random.Generator

        Returns
        -------
        ndarray, shape (size, n)
        """
        return np.stack(list(self.stream(size, random_state)), axis=1)

    def scenarios(self, limit: int = 200_000) -> tuple[np.ndarray, np.ndarray]:
        """List every joint realisation with its probability.

        Parameters
        ----------
        limit : int
            Largest number of scenarios to build.

        Returns
        -------
        demands : ndarray, shape (S, n)
            Ordered like a tree: the last agent varies fastest.
        probabilities : ndarray, shape (S,)

        Raises
        ------
        ValueError
            If there are more than ``limit`` scenarios.

        Examples
        --------
        >>> DemandModel([[1, 3], [2]]).scenarios()[0]
        array([[1., 2.],
               [3., 2.]])
        """
        if self.n_scenarios > limit:
            raise ValueError(
                f"{self.n_scenarios:.3g} scenarios are too many to enumerate (limit {limit:,}); "
                "simulate instead, or use fewer agents or bins."
            )
        k = np.indices(tuple(self.sizes)).reshape(self.n, -1).T
        agents = np.arange(self.n)
        return self.values[agents, k], self.weights[agents, k].prod(axis=1)

    def locate(self, agent: int, demand: np.ndarray, nearest: bool = False) -> np.ndarray:
        """Find realised demands in an agent's support.

        Parameters
        ----------
        agent : int
        demand : ndarray, shape (m,)
        nearest : bool, default False
            Accept demands outside the support and return the closest point.

        Returns
        -------
        ndarray of int, shape (m,)

        Raises
        ------
        ValueError
            If a demand is not in the support (relative tolerance 1e-9) and ``nearest`` is False.
        """
        row = self.values[agent, : self.sizes[agent]]
        right = np.minimum(np.searchsorted(row, demand), row.size - 1)
        if (row[right] == demand).all():
            return right
        left = np.maximum(right - 1, 0)
        k = np.where(abs(row[left] - demand) < abs(row[right] - demand), left, right)
        if not nearest:
            off = abs(row[k] - demand) > 1e-9 * np.maximum(1e-300, abs(row[k]))
            if off.any():
                raise ValueError(
                    f"Agent {self.names[agent]!r} asked for {demand[off][0]:g}, which is not in "
                    "the fitted support; fit with DemandModel.from_samples, or create the policy "
                    "with off_support='nearest'."
                )
        return k

    def to_frame(self) -> pd.DataFrame:
        """Return the long table that :meth:`from_frame` reads (with probabilities)."""
        agent, k = np.nonzero(self.weights > 0)
        columns: dict[str, Any] = {
            "agent": [self.names[i] for i in agent],
            "demand": self.values[agent, k],
            "probability": self.weights[agent, k],
        }
        return pd.DataFrame(columns)

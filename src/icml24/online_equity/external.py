"""The external model: a stock, agents with random demands, and what could be achieved at best.

Three yardsticks, from weak to strong: the best online policy knows the past (scenario tree), the
clairvoyant knows all demands (scenario LP), the benchmark LP only respects averages. Hence
``online <= clairvoyant <= LP`` for the ex-ante metric.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from icml24.online_equity.demand import DemandModel

__all__ = ["ExternalInstance", "LPSolution", "clairvoyant_ante", "fills"]

Metric = Literal["ante", "post"]
CLARABEL = {"tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11}


def fills(amounts: np.ndarray, demands: np.ndarray) -> np.ndarray:
    """Fraction of each demand that was served; a demand of zero counts as fully served.

    Parameters
    ----------
    amounts, demands : ndarray of one shape

    Returns
    -------
    ndarray

    Examples
    --------
    >>> fills(np.array([1.0, 0.0]), np.array([4.0, 0.0]))
    array([0.25, 1.  ])
    """
    return np.where(demands > 0, amounts / np.where(demands > 0, demands, 1.0), 1.0)


def solve_lp(cost: np.ndarray, method: str = "highs", **constraints: object) -> np.ndarray:
    """Minimise a linear program with HiGHS, or say why it failed.

    Parameters
    ----------
    cost : ndarray
        Objective to minimise.
    method : str
        ``"highs"``, ``"highs-ds"`` or ``"highs-ipm"``.
    **constraints
        As in :func:`scipy.optimize.linprog`.

    Returns
    -------
    ndarray
        The optimal point.

    Raises
    ------
    RuntimeError
        If HiGHS finds no optimum.
    """
    result = linprog(cost, method=method, **constraints)
    if result.status != 0:
        raise RuntimeError(f"HiGHS did not solve the linear program: {result.message}")
    return result.x


@dataclass(frozen=True)
class LPSolution:
    """Optimum of the ex-ante benchmark LP.

    Attributes
    ----------
    value : float
        Largest common expected fill ``s``.
    fills : ndarray, shape (n, K)
        Fraction of each possible demand that is served.
    amounts : ndarray, shape (n, K)
        The same in units: ``x[i, k] = fills[i, k] * values[i, k]``.
    spending : ndarray, shape (n,)
        Expected units that go to each agent; sums to at most the budget.
    method : str
        Which solver found it.
    """

    value: float
    fills: np.ndarray
    amounts: np.ndarray
    spending: np.ndarray
    method: str


def _solution(instance: ExternalInstance, value: float, f: np.ndarray, method: str) -> LPSolution:
    amounts = f * instance.demand.values
    spending = (instance.demand.weights * amounts).sum(axis=1)
    return LPSolution(float(value), f, amounts, spending, method)


def _caps(instance: ExternalInstance) -> np.ndarray:
    """Largest possible fill of each demand, min(1, b/d)."""
    d = instance.demand.values
    return np.minimum(1.0, instance.budget / np.maximum(d, instance.budget))


def _waterfill(instance: ExternalInstance) -> LPSolution:
    """Fill the smallest demands first; raise the common level until the stock is used up.

    Agent i reaches the expected fill s at least cost by serving small demands first, so its cost
    is convex and piecewise linear with slopes d_i1 <= d_i2 <= ... All agents rise together: sort
    the breakpoints of all agents and walk along the summed cost. No solver, O(nK log nK).
    """
    d, p = instance.demand.values, instance.demand.weights
    length = p * _caps(instance)
    ends = np.cumsum(length, axis=1)
    top = ends[:, -1].min()
    # slope of the summed cost: starts at sum_i d_i1, jumps by d_i,k+1 - d_ik at each breakpoint
    level = np.concatenate([[0.0], ends[:, :-1].ravel()])
    jump = np.concatenate([[d[:, 0].sum()], np.diff(d, axis=1).ravel()])
    order = np.argsort(level, kind="stable")
    level, slope = level[order], np.cumsum(jump[order])
    cost = np.concatenate([[0.0], np.cumsum(np.diff(level) * slope[:-1])])
    at = np.searchsorted(cost, instance.budget, side="right") - 1
    rest = instance.budget - cost[at]
    s = level[at] + (rest / slope[at] if slope[at] > 0 else np.inf)
    s = float(min(s, top))
    served = np.clip(s - (ends - length), 0.0, length)
    f = np.divide(served, p, out=np.zeros_like(p), where=p > 0)
    return _solution(instance, s, f, "waterfill")


def _benchmark_highs(instance: ExternalInstance) -> LPSolution:
    d, p = instance.demand.values, instance.demand.weights
    n, k = d.shape
    rows = np.repeat(np.arange(n), k)
    fill = sparse.csr_array((-p.ravel(), (rows, np.arange(n * k))), shape=(n, n * k))
    fair = sparse.hstack([fill, np.ones((n, 1))])  # s - sum_k p f <= 0
    spend = np.append((p * d).ravel() / instance.budget, 0.0)[None]
    x = solve_lp(
        np.append(np.zeros(n * k), -1.0),
        method="highs-ipm",  # several times faster than simplex from n = 1,000 on
        A_ub=sparse.vstack([fair, spend], format="csr"),
        b_ub=np.append(np.zeros(n), 1.0),
        bounds=[(0, cap) for cap in _caps(instance).ravel()] + [(0, 1)],
    )
    return _solution(instance, x[-1], x[:-1].reshape(n, k), "highs")


def _benchmark_cvxpy(instance: ExternalInstance) -> LPSolution:
    import cvxpy as cp

    d, p = instance.demand.values, instance.demand.weights
    s, f = cp.Variable(), cp.Variable(d.shape, nonneg=True)
    constraints = [
        cp.sum(cp.multiply(p, f), axis=1) >= s,  # every agent's expected fill
        cp.sum(cp.multiply(p * d / instance.budget, f)) <= 1,  # the stock, on average
        f <= _caps(instance),  # no more than asked for, no more than there is
        s <= 1,
    ]
    problem = cp.Problem(cp.Maximize(s), constraints)
    problem.solve(solver=cp.CLARABEL, **CLARABEL)
    if problem.status != cp.OPTIMAL:
        raise RuntimeError(f"The benchmark LP was not solved: status {problem.status}.")
    return _solution(instance, problem.value, np.clip(f.value, 0.0, _caps(instance)), "cvxpy")


def clairvoyant_ante(
    demands: np.ndarray, probabilities: np.ndarray, budget: float
) -> tuple[float, np.ndarray]:
    """Best ex-ante metric of a planner who sees all demands first, by an LP over scenarios.

    Works for dependent demands too.

    Parameters
    ----------
    demands : ndarray, shape (S, n)
        Joint realisations.
    probabilities : ndarray, shape (S,)
    budget : float

    Returns
    -------
    value : float
        ``max min_i E[F_i]``.
    fill : ndarray, shape (S, n)
        The fills that attain it.
    """
    n_scenarios, n = demands.shape
    m = n_scenarios * n
    scenario, agent = np.divmod(np.arange(m), n)
    fair = sparse.csr_array((-probabilities[scenario], (agent, np.arange(m))), shape=(n, m))
    use = np.minimum(demands / budget, 1.0)  # f in units of the largest possible fill
    cap = np.minimum(1.0, budget / np.maximum(demands, budget))
    fair = fair * cap.ravel()
    stock = sparse.csr_array((use.ravel(), (scenario, np.arange(m))), shape=(n_scenarios, m))
    upper = sparse.vstack(
        [sparse.hstack([fair, np.ones((n, 1))]), sparse.hstack([stock, np.zeros((n_scenarios, 1))])]
    )
    x = solve_lp(
        np.append(np.zeros(m), -1.0),
        A_ub=upper.tocsr(),
        b_ub=np.append(np.zeros(n), np.ones(n_scenarios)),
        bounds=(0, 1),
    )
    return float(x[-1]), x[:-1].reshape(n_scenarios, n) * cap


@dataclass(frozen=True)
class _Tree:
    """Best online policy: the value and the amount at each node of the scenario tree."""

    value: float
    amounts: list[np.ndarray] = field(repr=False)


def _online_tree(instance: ExternalInstance, metric: Metric) -> _Tree:
    """LP over the scenario tree; variables are fractions of min(d, b), the stock is one unit."""
    demand, budget = instance.demand, instance.budget
    scenarios, probability = demand.scenarios(limit=20_000)
    n_leaves, n = scenarios.shape
    sizes = np.cumprod(demand.sizes)
    first = np.concatenate([[0], np.cumsum(sizes)])
    m = int(first[-1])
    leaf = np.arange(n_leaves)
    node = first[:-1] + leaf[:, None] // (n_leaves // sizes)  # node on each leaf's path
    use = np.minimum(scenarios / budget, 1.0)
    cap = np.minimum(1.0, budget / np.maximum(scenarios, budget))
    path = (np.repeat(leaf, n), node.ravel())
    stock = sparse.csr_array((use.ravel(), path), shape=(n_leaves, m))
    if metric == "ante":
        agent = np.tile(np.arange(n), n_leaves)
        weight = (probability[:, None] * cap).ravel()
        fair = sparse.coo_array((-weight, (agent, node.ravel())), shape=(n, m)).tocsr()
        upper = sparse.vstack(
            [
                sparse.hstack([fair, np.ones((n, 1))]),
                sparse.hstack([stock, np.zeros((n_leaves, 1))]),
            ]
        )
        right = np.append(np.zeros(n), np.ones(n_leaves))
        x = solve_lp(np.append(np.zeros(m), -1.0), A_ub=upper.tocsr(), b_ub=right, bounds=(0, 1))
        value = float(x[-1])
    else:
        # z = min fill / clairvoyant fill lies in [0, 1]:  z * opt * d <= amount, in units of b.
        # So no coefficient exceeds one, however far apart the demands are.
        total = scenarios.sum(axis=1)
        best = np.minimum(1.0, budget / np.maximum(total, budget))
        need = best[:, None] * scenarios / budget
        rows = np.arange(n_leaves * n)
        low = sparse.csr_array((need.ravel(), (rows, path[0])), shape=(n_leaves * n, n_leaves))
        high = sparse.csr_array((-use.ravel(), (rows, path[1])), shape=(n_leaves * n, m))
        empty = sparse.csr_array((n_leaves, n_leaves))
        upper = sparse.vstack([sparse.hstack([high, low]), sparse.hstack([stock, empty])])
        right = np.append(np.zeros(n_leaves * n), np.ones(n_leaves))
        gain = probability * best
        x = solve_lp(
            np.append(np.zeros(m), -gain / gain.sum()),
            A_ub=upper.tocsr(),
            b_ub=right,
            bounds=(0, 1),
        )
        value = float(gain @ x[m:])
    amounts = []
    for i in range(n):
        demands = np.tile(demand.values[i, : demand.sizes[i]], sizes[i] // demand.sizes[i])
        amounts.append(x[first[i] : first[i + 1]] * np.minimum(demands, budget))
    return _Tree(value, amounts)


@dataclass(frozen=True, eq=False)
class ExternalInstance:
    """A stock to ration among agents whose demands are random (the paper's external model).

    Parameters
    ----------
    demand : DemandModel
        Who comes, in which order, and what they may ask for.
    budget : float
        The stock ``b``, in the unit of the demands.

    Raises
    ------
    ValueError
        If the budget is not a positive finite number.

    Examples
    --------
    Two sure demands, 1 and 3, and a stock of 2: everyone can have half.

    >>> instance = ExternalInstance(DemandModel([[1], [3]]), budget=2)
    >>> instance.benchmark_lp().value
    0.5
    """

    demand: DemandModel
    budget: float

    def __post_init__(self) -> None:
        if not isinstance(self.demand, DemandModel):
            raise TypeError(f"demand must be a DemandModel, got {type(self.demand).__name__}.")
        try:
            valid = np.isfinite(self.budget) and self.budget > 0
        except TypeError:
            valid = False
        if not valid:
            raise ValueError(f"budget must be a positive finite number, got {self.budget!r}.")
        object.__setattr__(self, "budget", float(self.budget))

    @property
    def n(self) -> int:
        """Number of agents."""
        return self.demand.n

    @property
    def load(self) -> float:
        """Expected total demand divided by the stock; above 1, not everyone can be served."""
        return float(self.demand.mean.sum() / self.budget)

    @cached_property
    def _lp(self) -> LPSolution:
        return _waterfill(self)

    def benchmark_lp(
        self, method: Literal["waterfill", "highs", "cvxpy"] = "waterfill"
    ) -> LPSolution:
        r"""Solve the ex-ante benchmark LP.

        .. math:: \max s \quad\text{s.t.}\quad
            \sum_k p_{ik} x_{ik}/d_{ik} \ge s,\;\;
            \sum_{ik} p_{ik} x_{ik} \le b,\;\; 0 \le x_{ik} \le \min(d_{ik}, b),\;\; s \le 1.

        The conditional means of any clairvoyant rule are feasible, so no rule does better.

        Parameters
        ----------
        method : {"waterfill", "highs", "cvxpy"}
            Closed form (exact, no solver); SciPy's HiGHS; the readable cvxpy model (Clarabel).
            All three agree.

        Returns
        -------
        LPSolution

        Raises
        ------
        ValueError
            If the method is unknown.
        RuntimeError
            If a solver fails.
        """
        if method == "waterfill":
            return self._lp
        if method == "highs":
            return _benchmark_highs(self)
        if method == "cvxpy":
            return _benchmark_cvxpy(self)
        raise ValueError(f"method must be 'waterfill', 'highs' or 'cvxpy', got {method!r}.")

    def clairvoyant(
        self, metric: Metric = "ante", n_runs: int = 100_000, random_state: int = 0
    ) -> float:
        """Best value of a planner who sees all demands first.

        Parameters
        ----------
        metric : {"ante", "post"}
            ``"post"``: ``E[min(1, b / sum D)]``, exact when there are at most 200,000 scenarios,
            else simulated. ``"ante"``: an LP over all scenarios (at most 20,000).
        n_runs : int
            Simulated runs, where simulation is needed.
        random_state : int

        Returns
        -------
        float

        Raises
        ------
        ValueError
            If there are too many scenarios for the LP (``benchmark_lp`` is an upper bound then).
        """
        if metric == "post":
            if self.demand.n_scenarios <= 200_000:
                demands, probability = self.demand.scenarios()
                total = demands.sum(axis=1)
            else:
                total = sum(self.demand.stream(n_runs, random_state), np.zeros(n_runs))
                probability = np.full(n_runs, 1 / n_runs)
            return float(probability @ np.minimum(1, self.budget / np.maximum(total, self.budget)))
        if metric != "ante":
            raise ValueError(f"metric must be 'ante' or 'post', got {metric!r}.")
        return clairvoyant_ante(*self.demand.scenarios(limit=20_000), self.budget)[0]

    def online_optimum(self, metric: Metric = "ante") -> float:
        """Best value of any policy that sees demands only as they arrive.

        An LP with one variable for each node of the scenario tree: for small instances.

        Parameters
        ----------
        metric : {"ante", "post"}

        Returns
        -------
        float

        Raises
        ------
        ValueError
            If there are more than 20,000 scenarios, or the metric is unknown.
        """
        if metric not in ("ante", "post"):
            raise ValueError(f"metric must be 'ante' or 'post', got {metric!r}.")
        return _online_tree(self, metric).value

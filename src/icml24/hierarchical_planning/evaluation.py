"""Run an agent in a task, many episodes in lock step, and report with intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from icml24.core.statistics import Estimate, mean_interval, proportion_interval
from icml24.hierarchical_planning.environments import Task
from icml24.hierarchical_planning.mazes import Array

__all__ = ["EvalResult", "Controller", "evaluate_policy", "normalized_score", "share_interval"]


@dataclass(frozen=True)
class EvalResult:
    """What the episodes gave.

    Attributes
    ----------
    success : numpy.ndarray of bool, shape (n,)
    returns : numpy.ndarray, shape (n,)
    lengths : numpy.ndarray of int, shape (n,)
        Decisions until the end of each episode.
    goals : numpy.ndarray or None
    paths : numpy.ndarray, shape (n, max_length + 1, D)
        Observations; after its end an episode repeats the last one.
    """

    success: Array
    returns: Array
    lengths: Array
    goals: Array | None
    paths: Array

    @property
    def success_rate(self) -> Estimate:
        """Share of successful episodes, with the exact binomial interval."""
        return proportion_interval(int(self.success.sum()), len(self.success))

    @property
    def mean_return(self) -> Estimate:
        """Mean return over episodes, with Student's interval."""
        return mean_interval(self.returns)

    def path(self, episode: int) -> Array:
        """Return the observations of one episode without the repeats, for a plot of it."""
        found: Array = self.paths[episode, : self.lengths[episode] + 1]
        return found

    def __str__(self) -> str:
        return (
            f"{len(self.success)} episodes: success {self.success_rate:.2f}, "
            f"return {self.mean_return:.1f}, mean length {self.lengths.mean():.0f}"
        )


class Controller:
    """Turn a function of observations and goals into an agent.

    Parameters
    ----------
    function : callable
        ``function(observations, goals)`` returns actions for rows.

    Examples
    --------
    >>> Controller(lambda x, g: 0 * x[:, :1]).act(np.ones((2, 3))).tolist()
    [[0.0], [0.0]]
    """

    def __init__(self, function: Callable[[Any, Any], Array]) -> None:
        self.function = function

    def reset(self, seed: int | None = None) -> None:
        """Do nothing: a controller has no memory."""

    def act(self, observations: Any, goal: Any = None) -> Array:
        """Return the function's actions."""
        return self.function(observations, goal)


def evaluate_policy(
    agent: Any,
    task: Task,
    n_episodes: int = 20,
    seed: int = 0,
    goal: Any = None,
) -> EvalResult:
    """Run episodes side by side: one batched plan and one batched action for each decision.

    Parameters
    ----------
    agent : object with ``act(observations, goal)``
        ``reset(seed)`` is called first if there is one.
    task : Task
    n_episodes : int, default 20
    seed : int, default 0
        Of the agent; episode i of the task starts from ``1000 * seed + i``.
    goal : array_like, optional
        In place of the task's own goals.

    Returns
    -------
    EvalResult

    Examples
    --------
    >>> from icml24.hierarchical_planning import Maze, PointMaze, WaypointController
    >>> control = WaypointController(Maze("umaze"))
    >>> result = evaluate_policy(control, PointMaze("umaze"), n_episodes=5)
    >>> result.success.tolist()
    [True, True, True, True, True]
    """
    if n_episodes < 1:
        raise ValueError(f"n_episodes must be at least 1, got {n_episodes}.")
    if hasattr(agent, "reset"):
        agent.reset(seed)
    x, goals = task.reset([1000 * seed + i for i in range(n_episodes)])
    goals = (
        goals if goal is None else np.broadcast_to(np.asarray(goal, float), (n_episodes, len(goal)))
    )
    done, success = np.zeros((2, n_episodes), bool)
    returns, lengths = np.zeros(n_episodes), np.zeros(n_episodes, int)
    paths = [x]
    for _ in range(task.max_steps):
        step = task.step(agent.act(x, goals))
        returns += np.where(done, 0.0, step.rewards)
        lengths += ~done
        success |= step.success & ~done
        done |= step.terminated
        x = step.observations
        paths.append(x)
        if done.all():
            break
    return EvalResult(success, returns, lengths, goals, np.stack(paths, axis=1))


def normalized_score(returns: Any, random: float, expert: float) -> Array:
    """Put returns on the scale of D4RL: 0 for a random policy, 100 for the expert.

    Parameters
    ----------
    returns : array_like
    random, expert : float
        Mean returns of both.

    Examples
    --------
    >>> normalized_score([-10.0, 0.0], random=-10.0, expert=0.0).tolist()
    [0.0, 100.0]
    """
    if random == expert:
        raise ValueError("random and expert must differ.")
    return 100 * (np.asarray(returns, dtype=float) - random) / (expert - random)


def share_interval(shares: Any) -> Estimate:
    """Mean of one share for each seed with Student's interval, cut where shares end: at 0 and 1.

    Parameters
    ----------
    shares : array_like, shape (n,)

    Examples
    --------
    >>> print(f"{share_interval([0.9, 1.0, 1.0]):.2f}")
    0.97 [0.82, 1.00]
    """
    found = mean_interval(shares)
    return replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0))

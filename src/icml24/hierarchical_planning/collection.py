"""Make the logged data: a noisy controller in a maze, a mixture of skill on the pendulum."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from icml24.hierarchical_planning.dataset import Episode, OfflineDataset
from icml24.hierarchical_planning.environments import GymTask, Pendulum, PointMaze, swing_up
from icml24.hierarchical_planning.evaluation import Controller, evaluate_policy
from icml24.hierarchical_planning.mazes import Maze, WaypointController

__all__ = ["collect_maze", "collect_pendulum", "pendulum_references"]


def collect_maze(
    task: PointMaze | GymTask,
    maze: Maze,
    n_episodes: int = 200,
    length: int = 150,
    noise: float = 0.5,
    seed: int = 0,
    batch: int = 25,
) -> OfflineDataset:
    """Log a controller that walks from one random cell to the next, with noisy actions.

    The rewards are zero: goals are put in afterwards.

    Parameters
    ----------
    task : PointMaze or GymTask
        Its goals are ignored; its episodes must not end at a goal within ``length`` decisions (for
        ``PointMaze`` this is taken care of).
    maze : Maze
    n_episodes, length : int
        ``length`` in decisions.
    noise : float
        Standard deviation of what is added to each action.
    seed : int
    batch : int, default 25
        Episodes in lock step.

    Returns
    -------
    OfflineDataset

    Examples
    --------
    >>> data = collect_maze(PointMaze("umaze"), Maze("umaze"), n_episodes=3, length=20)
    >>> data.n_transitions, data.observation_dim
    (60, 4)
    """
    if n_episodes < 1 or length < 1:
        raise ValueError(f"n_episodes and length must be at least 1: {n_episodes}, {length}.")
    control, rng = WaypointController(maze), np.random.default_rng([23, seed])
    centres = np.array([maze.position(cell) for cell in maze.cells])
    episodes: list[Episode] = []
    while len(episodes) < n_episodes:
        n = min(batch, n_episodes - len(episodes))
        x, _ = task.reset(rng.integers(0, 2**31, n).tolist())
        if isinstance(task, PointMaze):
            task._goal[:] = np.inf
        goal = centres[rng.integers(0, len(centres), n)]
        xs, actions = [x], []
        for _ in range(length):
            there = np.linalg.norm(x[:, :2] - goal, axis=1) <= 0.45
            goal = np.where(there[:, None], centres[rng.integers(0, len(centres), n)], goal)
            action = np.clip(control.act(x, goal) + noise * rng.normal(size=(n, 2)), -1, 1)
            x = task.step(action).observations
            xs.append(x)
            actions.append(action)
        seen, done = np.stack(xs, axis=1), np.stack(actions, axis=1)
        episodes += [Episode(seen[i], done[i], np.zeros(length)) for i in range(n)]
    return OfflineDataset.from_episodes(episodes)


def collect_pendulum(n_episodes: int = 200, noise: float = 0.3, seed: int = 0) -> OfflineDataset:
    """Log the pendulum's controller, worse in some episodes than in others.

    In each episode an action is replaced by a random one with a probability drawn from [0.3, 1];
    the others get noise.

    Parameters
    ----------
    n_episodes : int, default 200
        Of 200 decisions each.
    noise : float, default 0.3
        In units of the torque's limit.
    seed : int

    Returns
    -------
    OfflineDataset

    Examples
    --------
    >>> collect_pendulum(n_episodes=2).n_transitions
    400
    """
    task, rng = Pendulum(), np.random.default_rng([29, seed])
    x, _ = task.reset(rng.integers(0, 2**31, n_episodes).tolist())
    chance = rng.uniform(0.3, 1.0, (n_episodes, 1))
    xs, actions, rewards = [x], [], []
    for _ in range(task.max_steps):
        skilled = swing_up(x) + 2 * noise * rng.normal(size=(n_episodes, 1))
        random = rng.uniform(-2, 2, (n_episodes, 1))
        action = np.clip(np.where(rng.random((n_episodes, 1)) < chance, random, skilled), -2, 2)
        step = task.step(action)
        x = step.observations
        xs.append(x)
        actions.append(action)
        rewards.append(step.rewards)
    seen, done, gained = (np.stack(part, axis=1) for part in (xs, actions, rewards))
    episodes = [Episode(seen[i], done[i], gained[i]) for i in range(n_episodes)]
    return OfflineDataset.from_episodes(episodes, -2.0, 2.0)


@lru_cache(maxsize=1)
def pendulum_references() -> tuple[float, float]:
    """Return the mean returns of a random policy and of the controller over 500 episodes.

    Examples
    --------
    >>> random, expert = pendulum_references()
    >>> -1300 < random < -1200 and -160 < expert < -140
    True
    """
    rng = np.random.default_rng(0)
    random = Controller(lambda x, g: rng.uniform(-2, 2, (len(x), 1)))
    means = [
        evaluate_policy(agent, Pendulum(), 500, seed=99).returns.mean()
        for agent in (random, Controller(swing_up))
    ]
    return float(means[0]), float(means[1])

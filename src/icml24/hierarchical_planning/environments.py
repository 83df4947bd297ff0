"""Tasks that run many episodes in lock step: a maze and a pendulum in NumPy, or any Gymnasium one.

A task has ``reset(seeds)``, which starts one episode for each seed and returns observations and
goals (None where there are none), and ``step(actions)``, which returns a :class:`Step`. Rows of
finished episodes stand still.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from icml24.hierarchical_planning.dataset import joined
from icml24.hierarchical_planning.mazes import Array, Cell, Maze

__all__ = ["GymTask", "Pendulum", "PointMaze", "Step", "Task", "mujoco_maze", "swing_up"]

INSTALL = "pip install 'icml24[control]'"


class Step(NamedTuple):
    """What happened to each row: arrays of n rows."""

    observations: Array
    rewards: Array
    terminated: Array
    success: Array


class Task:
    """Base of all tasks.

    Attributes
    ----------
    action_low, action_high : numpy.ndarray, shape (action_dim,)
    max_steps : int
        Decisions after which an episode is cut off.
    """

    action_low: Array
    action_high: Array
    max_steps: int

    def reset(self, seeds: Sequence[int]) -> tuple[Array, Array | None]:
        """Start an episode for each seed."""
        raise NotImplementedError

    def step(self, actions: Array) -> Step:
        """Apply one action to each row."""
        raise NotImplementedError

    def _checked(self, actions: Any, n: int) -> Array:
        actions = np.asarray(actions, dtype=float)
        shape = (n, len(self.action_low))
        if actions.shape != shape:
            raise ValueError(f"actions must have shape {shape}, got {actions.shape}.")
        if not np.isfinite(actions).all():
            raise ValueError("actions contain NaN or infinite values.")
        return np.clip(actions, self.action_low, self.action_high)


def _endpoints(maze: Maze, route: tuple[Cell, Cell] | None, seed: int) -> tuple[Array, Array]:
    """Start and goal of an episode, each up to 0.25 m beside the centre of its cell."""
    rng = np.random.default_rng([17, seed])
    if route is None:
        pair = rng.choice(len(maze.cells), 2, replace=False)
        route = maze.cells[pair[0]], maze.cells[pair[1]]
    noise = rng.uniform(-0.25, 0.25, (2, 2))
    return maze.position(route[0]) + noise[0], maze.position(route[1]) + noise[1]


class PointMaze(Task):
    """A ball that is pushed through a maze, without MuJoCo.

    Constants and integrator are those of the PointMaze environments (a ball of 4.19 kg, forces up
    to 100 N, steps of 0.01 s): away from walls it moves exactly as there. Walls stop the ball
    without friction, which MuJoCo's soft contacts do only nearly.

    Parameters
    ----------
    maze : Maze or str
    route : (cell, cell), optional
        Start and goal; by default each episode draws two cells. Both get a random offset of up to
        a quarter of a metre.
    repeat : int, default 5
        Simulation steps for each decision.
    max_steps : int, default 160
        Decisions in an episode.

    Examples
    --------
    >>> task = PointMaze("umaze", route=((1, 1), (1, 2)))
    >>> observations, goals = task.reset([0, 1])
    >>> observations.shape, goals.shape
    ((2, 4), (2, 2))
    >>> task.step(np.ones((2, 2))).success.tolist()
    [False, False]
    """

    RADIUS, REACH, DT = 0.1, 0.45, 0.01
    MASS = 1000 * 4 / 3 * np.pi * 0.1**3

    def __init__(
        self,
        maze: Maze | str = "medium",
        route: tuple[Cell, Cell] | None = None,
        repeat: int = 5,
        max_steps: int = 160,
    ) -> None:
        if repeat < 1 or max_steps < 1:
            raise ValueError(f"repeat and max_steps must be at least 1: {repeat}, {max_steps}.")
        self.maze = maze if isinstance(maze, Maze) else Maze(maze)
        if route is not None:
            self.maze.distance(*route)
        self.route, self.repeat, self.max_steps = route, repeat, max_steps
        self.action_low, self.action_high = -np.ones(2), np.ones(2)

    def reset(self, seeds: Sequence[int]) -> tuple[Array, Array]:
        """Start one episode for each seed; observations are x, y and their velocities."""
        ends = np.array([_endpoints(self.maze, self.route, int(s)) for s in seeds])
        self._x, self._v = ends[:, 0].copy(), np.zeros((len(ends), 2))
        self._goal = ends[:, 1]
        self._done = np.zeros(len(ends), bool)
        return np.hstack([self._x, self._v]), self._goal.copy()

    def _advance(self, force: Array) -> None:
        rows, columns = self.maze.walls.shape
        v = np.clip(self._v, -5, 5)
        v = (self.MASS * v + self.DT * 100 * force) / (self.MASS + self.DT)
        for axis in (0, 1):
            place = self._x.copy()
            place[:, axis] += self.DT * v[:, axis]
            edge = place.copy()
            edge[:, axis] += np.sign(v[:, axis]) * self.RADIUS
            row = np.floor(rows / 2 - edge[:, 1]).astype(int)
            column = np.floor(edge[:, 0] + columns / 2).astype(int)
            hit = self.maze.walls[row, column]
            place[hit, axis] = self._x[hit, axis]
            v[hit, axis] = 0
            self._x = place
        self._v = v

    def step(self, actions: Array) -> Step:
        """Push for ``repeat`` simulation steps."""
        force = self._checked(actions, len(self._x))
        success = self._done.copy()
        for _ in range(self.repeat):
            before = self._x, self._v
            self._advance(force)
            self._x, self._v = (
                np.where(success[:, None], old, new)
                for old, new in zip(before, (self._x, self._v), strict=True)
            )
            success |= np.linalg.norm(self._x - self._goal, axis=1) <= self.REACH
        reward = (success & ~self._done).astype(float)
        self._done = success
        return Step(np.hstack([self._x, self._v]), reward, success.copy(), success.copy())


class Pendulum(Task):
    """Gymnasium's ``Pendulum-v1`` for many episodes at once: the same starts, the same steps.

    The reward is dense: minus the squared angle from the top, with small costs of speed and torque.

    Parameters
    ----------
    max_steps : int, default 200

    Examples
    --------
    >>> task = Pendulum()
    >>> observations, goals = task.reset(range(3))
    >>> observations.shape, goals
    ((3, 3), None)
    """

    def __init__(self, max_steps: int = 200) -> None:
        self.max_steps = max_steps
        self.action_low, self.action_high = np.array([-2.0]), np.array([2.0])

    def reset(self, seeds: Sequence[int]) -> tuple[Array, None]:
        """Start one episode for each seed; observations are cos, sin and angular velocity."""
        high = np.array([np.pi, 1.0])
        self._state = np.array([np.random.default_rng(int(s)).uniform(-high, high) for s in seeds])
        return self._observe(), None

    def _observe(self) -> Array:
        angle, speed = self._state.T
        return np.stack([np.cos(angle), np.sin(angle), speed], axis=1)

    def step(self, actions: Array) -> Step:
        """Apply a torque for 0.05 s."""
        torque = self._checked(actions, len(self._state))[:, 0]
        angle, speed = self._state.T
        wrapped = (angle + np.pi) % (2 * np.pi) - np.pi
        cost = wrapped**2 + 0.1 * speed**2 + 0.001 * torque**2
        speed = np.clip(speed + (15 * np.sin(angle) + 3 * torque) * 0.05, -8, 8)
        self._state = np.stack([angle + 0.05 * speed, speed], axis=1)
        never = np.zeros(len(speed), bool)
        return Step(self._observe(), -cost, never, never)


def swing_up(observations: Any, goals: Any = None) -> Array:
    """Torque that pumps energy into the pendulum and holds it at the top.

    Parameters
    ----------
    observations : array_like, shape (n, 3)
    goals : ignored

    Returns
    -------
    numpy.ndarray, shape (n, 1)

    Examples
    --------
    >>> swing_up([[0.0, 1.0, 0.0], [-1.0, 0.0, 1.0]]).ravel().tolist()
    [0.0, 2.0]
    """
    cosine, sine, speed = np.asarray(observations, dtype=float).T
    angle = np.arctan2(sine, cosine)
    energy = speed**2 / 6 + 5 * cosine
    pump = 2.0 * np.sign(speed) * np.clip(5.5 - energy, -1, 1)
    hold = -(12 * angle + 3 * speed)
    torque = np.where(np.abs(angle + 0.15 * speed) < 0.5, hold, pump)
    return np.clip(torque, -2, 2)[:, None]


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(f"This task needs gymnasium: {INSTALL}.") from error
    return gymnasium


class GymTask(Task):
    """Any Gymnasium environment with a box of actions, several copies in lock step.

    Observations are a flat box, or a dictionary with ``observation`` and ``desired_goal`` (the
    convention of gymnasium-robotics); without the latter, a goal is read from ``info["goal"]`` at
    the reset (the convention of OGBench). Success is read from ``info["success"]`` (or
    ``"is_success"``), else an episode that terminates with a positive reward counts.

    Parameters
    ----------
    make : str or callable
        The id of an environment, or a function without arguments that makes one.
    repeat : int, default 1
        Environment steps for each decision. Where one step moves the state by centimetres, values
        of neighbouring actions differ by less than a network's error; repeat the action then.
    max_steps : int
        Decisions in an episode.
    options : dict, optional
        Passed to ``reset``.
    keys : sequence of str
        Entries of dictionary observations that are joined, as in
        :meth:`.OfflineDataset.from_minari`.
    goal_features : sequence of int, optional
        Entries of the environment's goal that the agent is told, where the goal is a whole state.

    Examples
    --------
    >>> task = GymTask("Pendulum-v1", max_steps=200)
    >>> task.reset([0])[0].shape
    (1, 3)
    """

    def __init__(
        self,
        make: str | Callable[[], Any],
        repeat: int = 1,
        max_steps: int = 1000,
        options: Mapping[str, Any] | None = None,
        keys: Sequence[str] = ("observation",),
        goal_features: Sequence[int] | None = None,
    ) -> None:
        if repeat < 1 or max_steps < 1:
            raise ValueError(f"repeat and max_steps must be at least 1: {repeat}, {max_steps}.")
        self._make = (lambda: _gymnasium().make(make)) if isinstance(make, str) else make
        self._envs = [self._make()]
        space = self._envs[0].action_space
        low: Any = getattr(space, "low", None)
        high: Any = getattr(space, "high", None)
        if low is None or not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError(
                f"The action space must be a box with finite bounds, got {space}; wrap the "
                "environment, for example with gymnasium.wrappers.RescaleAction."
            )
        self._shape = space.shape
        self.action_low, self.action_high = (
            np.ravel(low).astype(float),
            np.ravel(high).astype(float),
        )
        self.repeat, self.max_steps, self.options = repeat, max_steps, dict(options or {})
        self.keys, self.goal_features = tuple(keys), goal_features

    def _split(
        self, observation: Any, info: Mapping[str, Any] | None = None
    ) -> tuple[Array, Array | None]:
        goal = (info or {}).get("goal")
        if isinstance(observation, Mapping):
            goal = observation.get("desired_goal", goal)
            seen = joined(observation, self.keys)
        else:
            seen = np.ravel(observation)
        if goal is None:
            return seen, None
        told = np.ravel(goal)
        return seen, told if self.goal_features is None else told[list(self.goal_features)]

    def reset(self, seeds: Sequence[int]) -> tuple[Array, Array | None]:
        """Start one episode for each seed."""
        seeds = [int(seed) for seed in seeds]
        self._envs += [self._make() for _ in range(len(seeds) - len(self._envs))]
        self._n = len(seeds)
        rows = [
            self._split(*env.reset(seed=seed, options=dict(self.options) or None))
            for env, seed in zip(self._envs, seeds, strict=False)
        ]
        self._last = np.array([row[0] for row in rows], dtype=float)
        self._done, self._success = np.zeros((2, self._n), bool)
        goals = [row[1] for row in rows]
        return self._last.copy(), None if goals[0] is None else np.array(goals, dtype=float)

    def step(self, actions: Array) -> Step:
        """Apply each action ``repeat`` times, or until the episode ends."""
        actions = self._checked(actions, self._n)
        rewards = np.zeros(self._n)
        for i in np.flatnonzero(~self._done):
            for _ in range(self.repeat):
                action = actions[i].reshape(self._shape)
                observation, reward, terminated, truncated, info = self._envs[i].step(action)
                rewards[i] += reward
                told = info.get("success", info.get("is_success"))
                won = bool(told) if told is not None else bool(terminated and reward > 0)
                self._success[i] |= won
                if terminated or truncated:
                    self._done[i] = True
                    break
            self._last[i] = self._split(observation)[0]
        return Step(self._last.copy(), rewards, self._done.copy(), self._success.copy())

    def close(self) -> None:
        """Close all copies."""
        for env in self._envs:
            env.close()


def mujoco_maze(
    layout: str = "medium",
    route: tuple[Cell, Cell] | None = None,
    repeat: int = 5,
    max_steps: int = 160,
    endless: bool = False,
) -> GymTask:
    """Return the MuJoCo PointMaze of gymnasium-robotics.

    Parameters
    ----------
    layout : {"umaze", "medium", "large"}
    route, repeat, max_steps
        As in :class:`PointMaze`.
    endless : bool, default False
        Go on at the goal, for logging; otherwise episodes end there.

    Returns
    -------
    GymTask

    Examples
    --------
    >>> task = mujoco_maze("umaze", route=((1, 1), (1, 3)))
    >>> task.reset([0, 1])[0].shape
    (2, 4)
    """
    names = {"umaze": "UMaze", "medium": "Medium", "large": "Large"}
    if layout not in names:
        raise ValueError(f"layout must be one of {', '.join(names)}, got {layout!r}.")
    gymnasium = _gymnasium()
    try:
        import contextlib
        import io

        with contextlib.redirect_stderr(io.StringIO()):
            import gymnasium_robotics
    except ImportError as error:
        raise ImportError(f"This maze needs gymnasium-robotics: {INSTALL}.") from error
    gymnasium.register_envs(gymnasium_robotics)
    options = {} if route is None else {"reset_cell": np.array(route[0])}
    options |= {} if route is None else {"goal_cell": np.array(route[1])}
    return GymTask(
        lambda: gymnasium.make(
            f"PointMaze_{names[layout]}-v3",
            continuing_task=endless,
            max_episode_steps=repeat * max_steps + 1,
        ),
        repeat,
        max_steps,
        options,
    )

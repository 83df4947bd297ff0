"""Experiments of the chapter: pure functions ``(config, seed) -> record``.

The seed draws the logged data, the networks, the batches and the episodes of the evaluation. They
take minutes for each seed, so their records and the agents of seed 1 are stored in ``data``;
``python -m icml24.hierarchical_planning.experiments`` makes them again.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from icml24.core.experiments import ResultCache, read_records, run, write_records
from icml24.hierarchical_planning.agent import FlatAgent, PlanDQ, load
from icml24.hierarchical_planning.collection import (
    collect_maze,
    collect_pendulum,
    pendulum_references,
)
from icml24.hierarchical_planning.combinations import DPerformer, QConductor
from icml24.hierarchical_planning.conductor import DConductor
from icml24.hierarchical_planning.dataset import OfflineDataset
from icml24.hierarchical_planning.environments import Pendulum, PointMaze, Task, mujoco_maze
from icml24.hierarchical_planning.evaluation import evaluate_policy, normalized_score
from icml24.hierarchical_planning.mazes import Cell, Maze, WaypointController
from icml24.hierarchical_planning.peers import (
    Diffuser,
    behaviour_cloning,
    diffusion_ql,
    goal_conditioned_dql,
)
from icml24.hierarchical_planning.performer import QPerformer

__all__ = [
    "EXPERIMENTS",
    "Config",
    "ablations",
    "dense",
    "dense_agent",
    "ending",
    "flat_planner",
    "maze_data",
    "maze_task",
    "route_of_length",
    "sparse",
    "sparse_agent",
    "stored",
    "stored_agent",
]


@dataclass(frozen=True)
class Config:
    """Settings of the experiments.

    Parameters
    ----------
    simulator : {"mujoco", "numpy"}
        Of the evaluation on the route. Logs and curve come from the NumPy maze, whose ball moves
        as MuJoCo's does away from walls, in a twentieth of the time.
    maze : str
    route : (cell, cell)
        Of the headline comparison.
    n_logs, log_length : int
        Logged episodes in the maze and their decisions.
    n_episodes, n_curve : int
        Episodes of an evaluation on the route, and for each length of the curve.
    max_steps : int
        Decisions in an episode of the evaluation.
    lengths : tuple of int
        Route lengths of the curve, in cells.
    conductor_updates, performer_updates, flat_updates, diffuser_updates : int
    width : int
        Of the conductor.
    diffuser_width : int
    pendulum_logs, pendulum_updates, pendulum_steps : int
    """

    simulator: str = "mujoco"
    maze: str = "medium"
    route: tuple[Cell, Cell] = ((5, 1), (6, 6))
    n_logs: int = 800
    log_length: int = 150
    n_episodes: int = 20
    n_curve: int = 10
    max_steps: int = 160
    lengths: tuple[int, ...] = (1, 2, 3, 5, 8, 10)
    conductor_updates: int = 4000
    performer_updates: int = 2500
    flat_updates: int = 2500
    diffuser_updates: int = 2500
    width: int = 160
    diffuser_width: int = 16
    pendulum_logs: int = 200
    pendulum_updates: int = 3500
    pendulum_steps: int = 200

    @classmethod
    def laptop(cls) -> Config:
        """Return the size whose records the book stores: some ten minutes for each seed."""
        return cls()

    @classmethod
    def paper(cls) -> Config:
        """Return the authors' numbers of updates, for a GPU."""
        return replace(
            cls(),
            maze="large",
            route=((7, 1), (7, 10)),
            n_logs=2000,
            log_length=600,
            n_episodes=100,
            n_curve=100,
            lengths=(1, 2, 4, 8, 12, 16, 19),
            conductor_updates=2_500_000,
            performer_updates=2_000_000,
            flat_updates=2_000_000,
            diffuser_updates=2_500_000,
            diffuser_width=32,
            pendulum_updates=1_000_000,
        )


# -- the sparse task ----------------------------------------------------------------------------


def maze_task(config: Config) -> Task:
    """Return the configured maze with the route of the headline comparison."""
    if config.simulator == "mujoco":
        return mujoco_maze(config.maze, config.route, max_steps=config.max_steps)
    if config.simulator == "numpy":
        return PointMaze(config.maze, config.route, max_steps=config.max_steps)
    raise ValueError(f"simulator must be 'mujoco' or 'numpy', got {config.simulator!r}.")


def maze_data(config: Config, seed: int) -> OfflineDataset:
    """Log the noisy controller in the configured maze."""
    maze = Maze(config.maze)
    return collect_maze(PointMaze(maze), maze, config.n_logs, config.log_length, seed=seed)


def route_of_length(config: Config, length: int, seed: int) -> tuple[Cell, Cell]:
    """Draw a route of so many cells."""
    routes = Maze(config.maze).routes(length)
    return routes[int(np.random.default_rng([31, seed, length]).integers(len(routes)))]


def sparse_conductor(config: Config, seed: int) -> DConductor:
    """Return the maze's conductor, not yet trained."""
    return DConductor(
        horizon=100,
        interval=20,
        min_speed=0.05,
        waves=3,
        lr=0.002,
        n_updates=config.conductor_updates,
        width=config.width,
        random_state=seed,
    )


def sparse_performer(config: Config, seed: int, **changes: Any) -> QPerformer:
    """Return the maze's performer, not yet trained."""
    settings = {"interval": 20, "n_updates": config.performer_updates, "random_state": seed}
    return QPerformer(**{**settings, **changes})


def sparse_agent(config: Config, seed: int, data: OfflineDataset | None = None) -> PlanDQ:
    """Train PlanDQ in the maze.

    Parameters
    ----------
    config : Config
    seed : int
    data : OfflineDataset, optional
        By default what :func:`maze_data` logs.

    Returns
    -------
    PlanDQ
    """
    data = maze_data(config, seed) if data is None else data
    agent = PlanDQ(sparse_conductor(config, seed), sparse_performer(config, seed), 10, 1)
    return _as_stored(agent.fit(data))


def flat_q(config: Config, seed: int, data: OfflineDataset) -> FlatAgent:
    """Train the flat goal-conditioned Q-learner in the maze."""
    agent = goal_conditioned_dql(n_updates=config.flat_updates, random_state=seed)
    return _as_stored(agent.fit(data))


def _as_stored(agent: Any) -> Any:
    """Round weights to half precision, so that what is measured is what is stored."""
    for part in (getattr(agent, "conductor", None), agent.performer):
        for net in [] if part is None else part.NETS:
            module = getattr(part, net, None)
            for weight in [] if module is None else module.parameters():
                weight.data = weight.data.half().float()
    return agent


def _timed(fit: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    return fit(), time.process_time() - start


def _measure(
    agent: Any, task: Task, config: Config, seed: int, seconds: float = 0.0
) -> dict[str, float]:
    result = evaluate_policy(agent, task, config.n_episodes, seed)
    return {
        "success": float(result.success.mean()),
        "decisions": float(result.lengths.mean()),
        "cpu": seconds,
    }


def _curve(agent: Any, config: Config, seed: int) -> list[float]:
    """Success over route lengths; another random route for each length and seed."""
    found = []
    for length in config.lengths:
        route = route_of_length(config, length, seed)
        task = PointMaze(config.maze, route, max_steps=config.max_steps)
        found.append(float(evaluate_policy(agent, task, config.n_curve, seed).success.mean()))
    return found


def sparse(config: Config, seed: int) -> dict[str, Any]:
    """Train and compare all agents but the flat planner in the maze, on the same data.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        For each agent a dict of ``success``, ``decisions`` (mean length of an episode) and ``cpu``
        (seconds of training); ``curve <agent>`` (success by ``config.lengths``) for PlanDQ and the
        goal-conditioned Q-learner.
    """
    data, maze, task = maze_data(config, seed), Maze(config.maze), maze_task(config)
    agent, seconds = _timed(lambda: sparse_agent(config, seed, data))
    goals: Mapping[str, Any] = {"n_updates": config.performer_updates, "random_state": seed}
    q_conductor, q_seconds = _timed(lambda: QConductor(20, **goals).fit(data))
    d_performer, d_seconds = _timed(lambda: DPerformer(20, **goals).fit(data))
    flat = {"n_updates": config.flat_updates, "random_state": seed}
    task_data = data.with_task(maze.position(config.route[1]), 0.45)
    flat_goals, flat_seconds = _timed(lambda: flat_q(config, seed, data))
    flat_task, task_seconds = _timed(lambda: diffusion_ql(**flat).fit(task_data))
    clone, clone_seconds = _timed(lambda: behaviour_cloning(**flat).fit(data))
    agents: dict[str, tuple[Any, float]] = {
        "PlanDQ": (agent, seconds),
        "Q + Q": (PlanDQ(q_conductor, agent.performer, 10, 1), q_seconds),
        "diffusion + diffusion": (PlanDQ(agent.conductor, d_performer, 10, 1), d_seconds),
        "Q + diffusion": (PlanDQ(q_conductor, d_performer, 10, 1), q_seconds + d_seconds),
        "goal-conditioned Q": (flat_goals, flat_seconds),
        "Q on the task": (flat_task, task_seconds),
        "imitation": (clone, clone_seconds),
    }
    record: dict[str, Any] = {
        name: _measure(one, task, config, seed, spent) for name, (one, spent) in agents.items()
    }
    record["curve PlanDQ"] = _curve(agent, config, seed)
    record["curve goal-conditioned Q"] = _curve(flat_goals, config, seed)
    return record


def flat_planner(config: Config, seed: int) -> dict[str, Any]:
    """Train a Diffuser in the maze: a U-Net over 104 decisions, followed by the data's controller.

    The controller that steers along the plan is the one that made the data, an advantage that the
    learnt agents do not have.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        ``success``, ``decisions`` and ``cpu`` of the best of three replanning intervals (chosen by
        its own success, in its favour), and ``by_interval``.
    """
    data = maze_data(config, seed)
    planner = DConductor(
        horizon=103,
        interval=1,
        min_speed=0.05,
        network="unet",
        width=config.diffuser_width,
        mults=(1, 2, 4),
        n_updates=config.diffuser_updates,
        batch_size=32,
        random_state=seed,
    )
    _, seconds = _timed(lambda: planner.fit(data))
    control, task = WaypointController(Maze(config.maze)), maze_task(config)
    rows = {
        every: _measure(
            Diffuser(planner, control.towards, replan_every=every), task, config, seed, seconds
        )
        for every in (3, 12, 60)
    }
    best = max(rows.values(), key=lambda row: row["success"])
    return {**best, "by_interval": {str(every): row["success"] for every, row in rows.items()}}


# -- the dense task -----------------------------------------------------------------------------

STATE = (0, 1, 2)


def dense_agent(
    config: Config, seed: int, data: OfflineDataset | None = None, **changes: Any
) -> PlanDQ:
    """Train PlanDQ on the pendulum.

    Parameters
    ----------
    config : Config
    seed : int
    data : OfflineDataset, optional
        By default what :func:`.collect_pendulum` logs.
    **changes
        Of the performer's settings.

    Returns
    -------
    PlanDQ
    """
    data = collect_pendulum(config.pendulum_logs, seed=seed) if data is None else data
    conductor = DConductor(
        horizon=32,
        interval=4,
        features=STATE,
        goal_features=None,
        dense_actions=True,
        n_diffusion_steps=20,
        select="value",
        n_updates=max(1, config.pendulum_updates // 3),
        width=config.width // 2,
        random_state=seed,
    )
    settings = {
        "interval": 4,
        "goal_features": STATE,
        "goal_reward": "cosine",
        "end_at_goal": False,
        "goal_weight": 0.1,
        "goal_noise": 0.5,
        "relabel_p": 1.0,
        "n_updates": config.pendulum_updates,
        "random_state": seed,
        **DENSE,
    }
    performer = QPerformer(**{**settings, **changes})
    return _as_stored(PlanDQ(conductor, performer, replan_every=1, n_plans=16).fit(data))


#: Of every Q-learner on the pendulum.
DENSE: Mapping[str, Any] = {"reward_scale": 0.1, "discount": 0.95}


def dense(config: Config, seed: int) -> dict[str, Any]:
    """Train and compare all agents on the pendulum, on the same data.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        Scores (0 random, 100 controller) by agent, ``behaviour`` of the data, ``cpu`` (a dict), and
        ``sensitivity``: how far the performer's action moves when its sub-goal is replaced by
        another row's, relative to how far actions differ between rows.
    """
    data = collect_pendulum(config.pendulum_logs, seed=seed)
    agent, seconds = _timed(lambda: dense_agent(config, seed, data))
    updates: dict[str, Any] = {"n_updates": config.pendulum_updates, "random_state": seed}
    flat, flat_seconds = _timed(lambda: diffusion_ql(**updates, **DENSE).fit(data))
    clone, clone_seconds = _timed(
        lambda: behaviour_cloning(**updates, goal_features=None).fit(data)
    )
    q_conductor, q_seconds = _timed(
        lambda: QConductor(4, features=STATE, goal_features=None, **updates).fit(data)
    )
    d_performer, d_seconds = _timed(lambda: DPerformer(4, goal_features=STATE, **updates).fit(data))
    planner = DConductor(
        horizon=32,
        interval=1,
        features=STATE,
        goal_features=None,
        dense_actions=True,
        n_diffusion_steps=20,
        select="value",
        n_updates=config.pendulum_updates,
        width=config.width,
        random_state=seed,
    )
    _, planner_seconds = _timed(lambda: planner.fit(data))
    agents: dict[str, tuple[Any, float]] = {
        "PlanDQ": (agent, seconds),
        "Q + Q": (PlanDQ(q_conductor, agent.performer, replan_every=1), q_seconds),
        "diffusion + diffusion": (
            PlanDQ(agent.conductor, d_performer, 1, 16),
            d_seconds,
        ),
        "Q + diffusion": (PlanDQ(q_conductor, d_performer, replan_every=1), q_seconds + d_seconds),
        "Q on the task": (flat, flat_seconds),
        "imitation": (clone, clone_seconds),
        "Diffuser": (Diffuser(planner, replan_every=1, n_plans=16), planner_seconds),
    }
    record: dict[str, Any] = {"cpu": {name: spent for name, (_, spent) in agents.items()}}
    for name, (one, _) in agents.items():
        record[name] = _score(one, config, seed)
    logged = [float(np.sum(episode.rewards)) for episode in data.episodes()]
    record["behaviour"] = float(normalized_score(logged, *pendulum_references()).mean())
    record["sensitivity"] = _sensitivity(agent, data)
    return record


def _score(agent: Any, config: Config, seed: int) -> float:
    task = Pendulum(config.pendulum_steps)
    returns = evaluate_policy(agent, task, config.n_episodes, seed).returns
    return float(normalized_score(returns, *pendulum_references()).mean())


def ending(config: Config, seed: int) -> dict[str, Any]:
    """Let the critic's episode end at the sub-goal on the pendulum, where all rewards are negative.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        ``score``, and ``sensitivity`` as in :func:`dense`.
    """
    data = collect_pendulum(config.pendulum_logs, seed=seed)
    agent = dense_agent(config, seed, data, end_at_goal=True)
    return {"score": _score(agent, config, seed), "sensitivity": _sensitivity(agent, data)}


def _sensitivity(agent: PlanDQ, data: OfflineDataset) -> float:
    x = data.observations[:: max(1, len(data.observations) // 200)].numpy()
    goal = agent.conductor.plan(x)[:, 1]
    actions = [agent.performer.act(x, g)[:, 0] for g in (goal, np.roll(goal, 7, axis=0))]
    spread = np.abs(actions[0] - np.roll(actions[0], 7)).mean()
    return float(np.abs(actions[0] - actions[1]).mean() / max(spread, 1e-9))


# -- ablations ----------------------------------------------------------------------------------


def ablations(config: Config, seed: int) -> dict[str, Any]:
    """Change one thing at a time in the maze's PlanDQ.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        For each variant a dict of ``success``, ``decisions`` and ``cpu``: ``interval <K>``;
        ``full windows`` (no arrival before the horizon, as in the authors' code); ``all windows``
        (those that wander, too); ``no gradient`` (the policy imitates, values only choose among 16
        actions, as the authors' AntMaze code does); ``imitation`` (no values at all);
        ``softmax`` (one of 16 actions drawn by its value instead of the best).
    """
    data, task = maze_data(config, seed), maze_task(config)
    base = sparse_agent(config, seed, data)
    record = {"as is": _measure(base, task, config, seed)}

    def measure(name: str, part: Any, conductor: bool) -> None:
        _, seconds = _timed(lambda: part.fit(data))
        agent = PlanDQ(part, base.performer) if conductor else PlanDQ(base.conductor, part)
        agent.n_plans, agent.replan_every = base.n_plans, base.replan_every
        record[name] = _measure(agent, task, config, seed, seconds)

    for interval in (5, 10, 50):
        horizon = {"interval": interval, "horizon": 100}
        changed = sparse_conductor(config, seed).set_params(**horizon)
        measure(f"interval {interval}", changed, True)
    whole = sparse_conductor(config, seed).set_params(goal_padding=False)
    measure("full windows", whole, True)
    measure("all windows", sparse_conductor(config, seed).set_params(min_speed=0.0), True)
    measure("no gradient", sparse_performer(config, seed, q_gradient=False), False)
    measure("imitation", sparse_performer(config, seed, eta=0.0, n_critics=0), False)
    softmax = copy.copy(base.performer).set_params(temperature=1.0)
    drawn = PlanDQ(base.conductor, softmax, base.replan_every, base.n_plans)
    record["softmax"] = _measure(drawn, task, config, seed)
    return record


# -- stored records -----------------------------------------------------------------------------

EXPERIMENTS: dict[str, Callable[[Config, int], dict[str, Any]]] = {
    "sparse": sparse,
    "flat_planner": flat_planner,
    "dense": dense,
    "ablations": ablations,
    "ending": ending,
}
#: Seeds of the stored records: the flat planner and the ablations are the costly ones. Seeds 0 and
#: 100 were used to choose the settings and are left out.
SEEDS: dict[str, tuple[int, ...]] = {
    "sparse": (1, 2, 3, 4, 5),
    "flat_planner": (1, 2, 3),
    "dense": (1, 2, 3, 4, 5),
    "ablations": (1, 2),
    "ending": (1, 2),
}
_DATA = "icml24.hierarchical_planning"


def stored(name: str) -> pd.DataFrame:
    """Read the stored records of an experiment, one row for each seed.

    Parameters
    ----------
    name : str
        One of ``EXPERIMENTS``.

    Returns
    -------
    pandas.DataFrame

    Examples
    --------
    >>> stored("sparse")["seed"].tolist()
    [1, 2, 3, 4, 5]
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"name must be one of {', '.join(EXPERIMENTS)}, got {name!r}.")
    return read_records(_DATA, f"{name}.json")


def stored_agent(name: str = "maze") -> Any:
    """Load an agent of seed 1, stored in half precision.

    Parameters
    ----------
    name : {"maze", "flat", "pendulum"}
        PlanDQ in the maze, the flat goal-conditioned Q-learner there, PlanDQ on the pendulum.

    Returns
    -------
    PlanDQ or FlatAgent

    Examples
    --------
    >>> type(stored_agent("maze")).__name__
    'PlanDQ'
    """
    if name not in ("maze", "flat", "pendulum"):
        raise ValueError(f"name must be 'maze', 'flat' or 'pendulum', got {name!r}.")
    with resources.as_file(resources.files(_DATA).joinpath("data", f"{name}.npz")) as path:
        return load(path)


def make(
    directory: Path, config: Config | None = None, seeds: Mapping[str, tuple[int, ...]] = SEEDS
) -> None:
    """Compute all records and the agents of the first seed, and write them to a folder.

    Finished seeds are kept in the user's cache, so that it can be stopped and started again.

    Parameters
    ----------
    directory : Path
    config : Config, optional
    seeds : mapping from experiment to seeds
    """
    config = config or Config.laptop()
    for name, chosen in seeds.items():
        runs = run(EXPERIMENTS[name], config, chosen, cache=ResultCache())
        write_records(directory / f"{name}.json", runs)
    save_agents(directory, config)


def save_agents(directory: Path, config: Config, seed: int = 1) -> None:
    """Train the agents of one seed and write them in half precision."""
    data = maze_data(config, seed)
    sparse_agent(config, seed, data).save(directory / "maze.npz", half=True)
    flat_q(config, seed, data).save(directory / "flat.npz", half=True)
    dense_agent(config, seed).save(directory / "pendulum.npz", half=True)


if __name__ == "__main__":
    from icml24.hierarchical_planning import experiments

    experiments.make(Path(__file__).with_name("data"))

"""Hierarchical planning: a diffusion planner over sub-goals, a Q-learner that reaches them.

After Chen, Baek, Deng, Kawaguchi, Gulcehre and Ahn, "PlanDQ: Hierarchical Plan Orchestration via
D-Conductor and Q-Performer", ICML 2024.

Examples
--------
>>> import icml24.hierarchical_planning as hp
>>> maze = hp.Maze("umaze")
>>> logs = hp.collect_maze(hp.PointMaze(maze), maze, n_episodes=4, length=40)
>>> agent = hp.PlanDQ(
...     hp.DConductor(horizon=20, interval=5, n_diffusion_steps=4, n_updates=5),
...     hp.QPerformer(interval=5, n_updates=5),
... ).fit(logs)
>>> agent.act([-1.0, 1.0, 0.0, 0.0], goal=[-1.0, -1.0]).shape
(2,)
"""

from icml24.hierarchical_planning.agent import Agent, FlatAgent, PlanDQ, load
from icml24.hierarchical_planning.collection import (
    collect_maze,
    collect_pendulum,
    pendulum_references,
)
from icml24.hierarchical_planning.combinations import DPerformer, QConductor
from icml24.hierarchical_planning.conductor import DConductor, Plans
from icml24.hierarchical_planning.dataset import Episode, Normalizer, OfflineDataset
from icml24.hierarchical_planning.diffusion import GaussianDiffusion, alpha_bars, hold
from icml24.hierarchical_planning.environments import (
    GymTask,
    Pendulum,
    PointMaze,
    Step,
    Task,
    mujoco_maze,
    swing_up,
)
from icml24.hierarchical_planning.evaluation import (
    Controller,
    EvalResult,
    evaluate_policy,
    normalized_score,
    share_interval,
)
from icml24.hierarchical_planning.goals import (
    distance_reward,
    hindsight_offsets,
    max_cosine_reward,
    td_target,
)
from icml24.hierarchical_planning.mazes import MAPS, Maze, WaypointController
from icml24.hierarchical_planning.networks import StackedMLP, TemporalUnet, TokenMLP
from icml24.hierarchical_planning.peers import (
    Diffuser,
    behaviour_cloning,
    diffusion_ql,
    goal_conditioned_dql,
)
from icml24.hierarchical_planning.performer import Batch, QPerformer
from icml24.hierarchical_planning.presets import paper_antmaze, paper_locomotion

__all__ = [
    "MAPS",
    "Agent",
    "Batch",
    "Controller",
    "DConductor",
    "DPerformer",
    "Diffuser",
    "Episode",
    "EvalResult",
    "FlatAgent",
    "GaussianDiffusion",
    "GymTask",
    "Maze",
    "Normalizer",
    "OfflineDataset",
    "Pendulum",
    "PlanDQ",
    "Plans",
    "PointMaze",
    "QConductor",
    "QPerformer",
    "StackedMLP",
    "Step",
    "Task",
    "TemporalUnet",
    "TokenMLP",
    "WaypointController",
    "alpha_bars",
    "behaviour_cloning",
    "collect_maze",
    "collect_pendulum",
    "diffusion_ql",
    "distance_reward",
    "evaluate_policy",
    "goal_conditioned_dql",
    "hindsight_offsets",
    "hold",
    "load",
    "max_cosine_reward",
    "mujoco_maze",
    "normalized_score",
    "paper_antmaze",
    "paper_locomotion",
    "pendulum_references",
    "share_interval",
    "swing_up",
    "td_target",
]

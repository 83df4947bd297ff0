"""Flat peers: Q-learning on the task reward or with hindsight goals, imitation, and a Diffuser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch

from icml24.hierarchical_planning.agent import FlatAgent, episode_input
from icml24.hierarchical_planning.conductor import DConductor
from icml24.hierarchical_planning.dataset import OfflineDataset
from icml24.hierarchical_planning.mazes import Array
from icml24.hierarchical_planning.performer import QPerformer

__all__ = ["Diffuser", "behaviour_cloning", "diffusion_ql", "goal_conditioned_dql"]


def diffusion_ql(**settings: Any) -> FlatAgent:
    """Return Diffusion-QL on the logged reward, without goals.

    Parameters
    ----------
    **settings
        Of :class:`.QPerformer`.

    Returns
    -------
    FlatAgent

    Examples
    --------
    >>> diffusion_ql(discount=0.99).performer.goal_features is None
    True
    """
    fixed = {"goal_features": None, "goal_reward": None, "goal_weight": 0.0, "reward_scale": 1.0}
    return FlatAgent(QPerformer(**{**fixed, "discount": 0.99, **settings}))


def goal_conditioned_dql(**settings: Any) -> FlatAgent:
    """Return Diffusion-QL with goals from the rest of the episode and from other episodes (HER).

    Parameters
    ----------
    **settings
        Of :class:`.QPerformer`.

    Returns
    -------
    FlatAgent

    Examples
    --------
    >>> goal_conditioned_dql().performer.relabel_p is None
    True
    """
    return FlatAgent(QPerformer(**{"relabel_p": None, "random_goals": 0.3, **settings}))


def behaviour_cloning(**settings: Any) -> FlatAgent:
    """Return a diffusion policy that imitates the data, with hindsight goals unless switched off.

    Parameters
    ----------
    **settings
        Of :class:`.QPerformer`; ``goal_features=None`` imitates without goals.

    Returns
    -------
    FlatAgent

    Examples
    --------
    >>> behaviour_cloning().performer.n_critics
    0
    """
    fixed: dict[str, Any] = {"relabel_p": None, "eta": 0.0, "n_critics": 0}
    return FlatAgent(QPerformer(**{**fixed, **settings}))


class Diffuser:
    """A flat diffusion planner: plan every decision up to the horizon, then follow the plan.

    Parameters
    ----------
    planner : DConductor
        With ``interval=1``. With dense actions the plan's first action is executed; without, the
        controller steers to the planned states.
    controller : callable, optional
        ``controller(observations, waypoints)`` returns actions.
    lookahead : int, default 3
        The controller aims at the state planned for this many decisions ahead.
    replan_every : int, default 12
    n_plans : int, default 1

    Examples
    --------
    >>> planner = DConductor(horizon=8, interval=1, dense_actions=True, goal_features=None)
    >>> Diffuser(planner, replan_every=1).n_plans
    1
    """

    def __init__(
        self,
        planner: DConductor,
        controller: Callable[[Array, Array], Array] | None = None,
        lookahead: int = 3,
        replan_every: int = 12,
        n_plans: int = 1,
    ) -> None:
        if planner.interval != 1:
            raise ValueError(f"A flat planner has interval=1, got {planner.interval}.")
        if (controller is None) != planner.dense_actions:
            raise ValueError("Give a controller, or a planner with dense actions, but not both.")
        if controller is None and replan_every != 1:
            raise ValueError("With dense actions the first one is executed: set replan_every=1.")
        self.planner, self.controller = planner, controller
        self.lookahead, self.replan_every, self.n_plans = lookahead, replan_every, n_plans
        self.reset()

    def fit(self, dataset: OfflineDataset) -> Self:
        """Train the planner."""
        self.planner.fit(dataset)
        return self

    def reset(self, seed: int | None = None) -> None:
        """Forget the running episodes."""
        self._generator = torch.Generator().manual_seed(0 if seed is None else seed)
        self._age = 0
        self.plan_: Array | None = None

    def act(self, observations: Any, goal: Any = None) -> Array:
        """Choose an action for one observation, or for each row."""
        self.planner._check_fitted()
        x, goal, single = episode_input(observations, goal, self.planner.dims_["observation"])
        goal = goal if self.planner.goal_features is not None else None
        new = self.plan_ is None or len(self.plan_) != len(x) or self._age >= self.replan_every
        if new:
            tokens = self.planner.sample_tokens(x, goal, self.n_plans, self._generator)
            plans = self.planner.best(tokens)
            self.plan_, self._age = plans.states, 0
        if self.controller is None:
            assert plans.actions is not None
            action = plans.actions[:, 0]
        else:
            assert self.plan_ is not None
            token = min(self._age + self.lookahead, self.plan_.shape[1] - 1)
            action = self.controller(x, self.plan_[:, token])
        self._age += 1
        return np.asarray(action[0] if single else action)

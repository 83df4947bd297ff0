"""The agent: a conductor names sub-goals, a performer reaches them; saved without pickle."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from icml24.hierarchical_planning.combinations import DPerformer, QConductor
from icml24.hierarchical_planning.conductor import DConductor
from icml24.hierarchical_planning.dataset import OfflineDataset
from icml24.hierarchical_planning.mazes import Array
from icml24.hierarchical_planning.module import Learner, checked_rows, write_npz
from icml24.hierarchical_planning.performer import QPerformer

__all__ = ["Agent", "FlatAgent", "PlanDQ", "episode_input", "load"]


class Agent(Protocol):
    """Anything that acts: PlanDQ, the flat peers, a controller."""

    def reset(self, seed: int | None = None) -> None:
        """Forget the running episodes; draw randomness from ``seed`` from now on."""

    def act(self, observations: Any, goal: Any = None) -> Array:
        """Return an action for one observation, or for each row of them."""


def episode_input(observations: Any, goal: Any, dim: int) -> tuple[Array, Array | None, bool]:
    """Unpack Gymnasium's dictionaries; note whether there was one observation or rows of them."""
    if isinstance(observations, Mapping):
        goal = observations.get("desired_goal") if goal is None else goal
        observations = observations["observation"]
    x = checked_rows(observations, dim, "observation")
    single = np.asarray(observations).ndim == 1
    if goal is not None:
        goal = np.asarray(goal, dtype=float)
        goal = np.broadcast_to(goal, (len(x), goal.shape[-1])) if goal.ndim == 1 else goal
    return x, goal, single


class PlanDQ:
    """Plan sub-goals every few decisions and let the performer reach the first one.

    Parameters
    ----------
    conductor : DConductor or QConductor
    performer : QPerformer or DPerformer
    replan_every : int, default 5
        :math:`R`, in decisions.
    n_plans : int, default 16
        Plans drawn each time; the conductor chooses.
    goal_distance : float, default 1.0
        Within this distance of the goal, in the data's units, the goal itself is the sub-goal.
    reached : float, default 0.0
        A sub-goal this close is replaced before its time.
    subgoal_range : (float, float), optional
        Plans whose first sub-goal is nearer or farther than this are passed over while there are
        others (the filter of the authors' AntMaze code, which draws anew instead).

    Examples
    --------
    >>> from icml24.hierarchical_planning import Episode
    >>> walk = np.linspace([0, 0], [1, 1], 13)
    >>> logs = OfflineDataset.from_episodes([Episode(walk, np.zeros((12, 1)), np.zeros(12))])
    >>> agent = PlanDQ(
    ...     DConductor(horizon=8, interval=2, n_diffusion_steps=4, n_updates=2),
    ...     QPerformer(interval=2, n_updates=2),
    ... ).fit(logs)
    >>> agent.act([0.1, 0.1], goal=[1.0, 1.0]).shape
    (1,)
    """

    def __init__(
        self,
        conductor: DConductor | QConductor,
        performer: QPerformer | DPerformer,
        replan_every: int = 5,
        n_plans: int = 16,
        goal_distance: float = 1.0,
        reached: float = 0.0,
        subgoal_range: tuple[float, float] | None = None,
    ) -> None:
        if replan_every < 1 or n_plans < 1:
            raise ValueError(
                f"replan_every and n_plans must be at least 1, got {replan_every} and {n_plans}."
            )
        self.conductor, self.performer = conductor, performer
        self.replan_every, self.n_plans = replan_every, n_plans
        self.goal_distance, self.reached = goal_distance, reached
        self.subgoal_range = subgoal_range
        self.reset()

    def fit(self, dataset: OfflineDataset) -> Self:
        """Train conductor and performer, which do not depend on each other.

        Parameters
        ----------
        dataset : OfflineDataset

        Returns
        -------
        PlanDQ
        """
        self.conductor.fit(dataset)
        self.performer.fit(dataset)
        self.reset()
        return self

    def reset(self, seed: int | None = None) -> None:
        """Forget the running episodes.

        Parameters
        ----------
        seed : int, optional
            Of the plans and actions drawn from now on.
        """
        self._generator = torch.Generator().manual_seed(0 if seed is None else seed)
        self._age: Array | None = None
        self.sub_goal_: Array | None = None
        self.plan_: Array | None = None

    def _due(self, x: Array) -> Array:
        """Rows that need a new plan."""
        if self._age is None or len(self._age) != len(x) or self.sub_goal_ is None:
            self._age = np.full(len(x), self.replan_every)
        due = self._age >= self.replan_every
        if self.reached > 0 and self.sub_goal_ is not None and len(self.sub_goal_) == len(x):
            columns = self.conductor._columns()
            due |= np.linalg.norm(x[:, columns] - self.sub_goal_, axis=1) <= self.reached
        return due

    def _score(self, tokens: Tensor, states: Array) -> Tensor:
        score = self.conductor.score(tokens)
        if self.subgoal_range is not None:
            step = np.linalg.norm(states[:, :, 1] - states[:, :, 0], axis=-1)
            low, high = self.subgoal_range
            bad = torch.as_tensor((step < low) | (step > high), device=score.device)
            score = torch.where(bad, score - 1e6, score)
        return score

    def _replan(self, x: Array, goal: Array | None, due: Array) -> None:
        assert self._age is not None
        some = None if goal is None else goal[due]
        tokens = self.conductor.sample_tokens(x[due], some, self.n_plans, self._generator)
        best = self.conductor.best(tokens, self._score(tokens, self.conductor.sub_goals(tokens)))
        if self.plan_ is None or len(self.plan_) != len(x):
            self.plan_ = np.zeros((len(x), *best.states.shape[1:]))
        self.plan_[due] = best.states
        self.sub_goal_ = self.plan_[:, 1].copy()
        self._age[due] = 0

    def _target(self, x: Array, goal: Array | None) -> Array:
        """Choose where the performer is sent: the sub-goal, or the goal itself when it is near."""
        assert self.sub_goal_ is not None
        columns = self.conductor._columns()
        wanted = [columns.index(column) for column in self.performer._columns]
        target = self.sub_goal_[:, wanted]
        if goal is None or self.conductor.goal_features is None:
            return target
        near = np.linalg.norm(x[:, list(self.conductor.goal_features)] - goal, axis=1)
        return np.where((near <= self.goal_distance)[:, None], goal, target)

    def act(self, observations: Any, goal: Any = None) -> Array:
        """Choose an action for one observation, or for rows of episodes that run in lock step.

        Parameters
        ----------
        observations : array_like, shape (D,) or (n, D), or mapping
            A mapping with ``observation`` and ``desired_goal`` as from gymnasium-robotics serves,
            too.
        goal : array_like, shape (G,) or (n, G), optional
            Where to go; None for a conductor without goals.

        Returns
        -------
        numpy.ndarray, shape (A,) or (n, A)
            In the environment's units.

        Raises
        ------
        ValueError
            If the observation is not finite, or a goal is missing or outside the data's range.
        """
        self.conductor._check_fitted()
        self.performer._check_fitted()
        x, goal, single = episode_input(observations, goal, self.conductor.dims_["observation"])
        due = self._due(x)
        if due.any():
            self._replan(x, goal, due)
        action = self.performer.act(x, self._target(x, goal), self._generator)
        assert self._age is not None
        self._age += 1
        return action[0] if single else action

    def predict(self, observations: Any, goal: Any = None) -> Array:
        """Do the same as :meth:`act`, under the name other libraries use."""
        return self.act(observations, goal)

    def save(self, path: str | os.PathLike[str], half: bool = False) -> None:
        """Write settings and weights to one ``.npz`` file, without pickle.

        Parameters
        ----------
        path : path-like
        half : bool, default False
            Store weights in half precision.
        """
        parts = {"conductor": self.conductor, "performer": self.performer}
        names = [name for name in inspect.signature(PlanDQ).parameters if name not in parts]
        _save(path, parts, {name: getattr(self, name) for name in names}, half)


class FlatAgent:
    """Act by a performer alone, sent to the final goal.

    Parameters
    ----------
    performer : QPerformer

    Examples
    --------
    >>> FlatAgent(QPerformer()).performer.interval
    10
    """

    def __init__(self, performer: QPerformer) -> None:
        self.performer = performer
        self.reset()

    def fit(self, dataset: OfflineDataset) -> Self:
        """Train the performer."""
        self.performer.fit(dataset)
        return self

    def reset(self, seed: int | None = None) -> None:
        """Draw actions from ``seed`` from now on."""
        self._generator = torch.Generator().manual_seed(0 if seed is None else seed)

    def act(self, observations: Any, goal: Any = None) -> Array:
        """Choose an action for one observation, or for each row."""
        self.performer._check_fitted()
        x, goal, single = episode_input(observations, goal, self.performer.dims_["observation"])
        goal = goal if self.performer.goal_features is not None else None
        action = self.performer.act(x, goal, self._generator)
        return action[0] if single else action

    def save(self, path: str | os.PathLike[str], half: bool = False) -> None:
        """Write settings and weights to one ``.npz`` file, without pickle."""
        _save(path, {"performer": self.performer}, {}, half)


def _save(
    path: str | os.PathLike[str], parts: Mapping[str, Any], settings: dict[str, Any], half: bool
) -> None:
    arrays: dict[str, Array] = {}
    for name, part in parts.items():
        for key, value in part.get_params().items():
            if callable(value):
                raise ValueError(f"{key} is a function, which cannot be saved; use a name.")
        settings[name] = {"class": type(part).__name__, **part.get_params()}
        arrays |= {f"{name}/{key}": value for key, value in part.state().items()}
    write_npz(path, {"settings": np.array(json.dumps(settings)), **arrays}, half)


def load(path: str | os.PathLike[str]) -> PlanDQ | FlatAgent:
    """Read an agent that :meth:`PlanDQ.save` or :meth:`FlatAgent.save` wrote.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    PlanDQ or FlatAgent
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if "settings" not in arrays:
        raise ValueError(f"{os.fspath(path)} was not written by the save of an agent.")
    settings = json.loads(str(arrays["settings"]))
    kinds: dict[str, type[Learner]] = {
        kind.__name__: kind for kind in (DConductor, QConductor, QPerformer, DPerformer)
    }
    parts: dict[str, Any] = {}
    for name in [name for name in ("conductor", "performer") if name in settings]:
        chosen = settings.pop(name)
        kind = kinds[chosen.pop("class")]
        part = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()})
        own = {k.removeprefix(f"{name}/"): v for k, v in arrays.items() if k.startswith(f"{name}/")}
        parts[name] = part.restore(own)
    return PlanDQ(**parts, **settings) if "conductor" in parts else FlatAgent(**parts)

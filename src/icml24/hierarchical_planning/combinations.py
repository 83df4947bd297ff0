"""The rest of the two-by-two table: a conductor from values, a performer by diffusion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from icml24.hierarchical_planning.conductor import DConductor, Plans
from icml24.hierarchical_planning.dataset import OfflineDataset
from icml24.hierarchical_planning.diffusion import GaussianDiffusion
from icml24.hierarchical_planning.goals import td_target
from icml24.hierarchical_planning.mazes import Array
from icml24.hierarchical_planning.module import Learner, checked_rows, descend, tensor
from icml24.hierarchical_planning.networks import StackedMLP, blend_, seeded

__all__ = ["DPerformer", "QConductor"]


class QConductor(Learner):
    r"""Sub-goals from a value function, as HIQL's high-level policy.

    Values :math:`V(s, g)` of reaching a goal (reward -1 for each decision until then) are learnt by
    expectile regression; the sub-goal is the state :math:`K` decisions ahead, imitated with weight
    :math:`\exp(\beta (V(s_{t+K}, g) - V(s_t, g)))`. Without goals, values are those of the logged
    reward and the weight compares :math:`\sum_{i<K} \gamma^i r + \gamma^K V(s_{t+K})` with
    :math:`V(s_t)`, in deviations.

    Parameters
    ----------
    interval : int, default 10
    features, goal_features : sequence of int or None
        As in :class:`.DConductor`.
    expectile : float, default 0.9
    beta : float, default 3.0
    discount : float, default 0.99
    radius : float, default 0.45
        Within it a goal counts as reached.
    random_goals : float, default 0.3
        Share of goals from other episodes.
    width, lr, batch_size, n_updates, tau
    normalizer : str
    random_state : int
    device : str

    Examples
    --------
    >>> import numpy as np
    >>> from icml24.hierarchical_planning import Episode
    >>> walk = np.linspace([0, 0], [1, 1], 13)
    >>> logs = OfflineDataset.from_episodes([Episode(walk, np.zeros((12, 1)), np.zeros(12))])
    >>> QConductor(interval=2, n_updates=2).fit(logs).plan([[0, 0]], [1, 1]).shape
    (1, 2, 2)
    """

    NETS = ("policy_",)

    def __init__(
        self,
        interval: int = 10,
        features: Sequence[int] | None = (0, 1),
        goal_features: Sequence[int] | None = (0, 1),
        expectile: float = 0.9,
        beta: float = 3.0,
        discount: float = 0.99,
        radius: float = 0.45,
        random_goals: float = 0.3,
        width: int = 128,
        lr: float = 1e-3,
        batch_size: int = 256,
        n_updates: int = 4000,
        tau: float = 0.01,
        normalizer: str = "minmax",
        random_state: int = 0,
        device: str = "cpu",
    ) -> None:
        self.interval = interval
        self.features = features
        self.goal_features = goal_features
        self.expectile = expectile
        self.beta = beta
        self.discount = discount
        self.radius = radius
        self.random_goals = random_goals
        self.width = width
        self.lr = lr
        self.batch_size = batch_size
        self.n_updates = n_updates
        self.tau = tau
        self.normalizer = normalizer
        self.random_state = random_state
        self.device = device

    def _columns(self) -> list[int]:
        every = range(self.dims_["observation"])
        return list(every if self.features is None else self.features)

    def _build(self) -> None:
        inputs = self.dims_["observation"] + len(self.goal_features or ())
        for name in ("values_", "targets_"):
            net = seeded(lambda: StackedMLP(2, inputs, self.width), self.random_state + 1)
            setattr(self, name, net.to(self.device))
        out = len(self._columns())
        self.policy_ = seeded(
            lambda: nn.Sequential(
                nn.Linear(inputs, self.width),
                nn.ReLU(),
                nn.Linear(self.width, self.width),
                nn.ReLU(),
                nn.Linear(self.width, out),
            ),
            self.random_state,
        ).to(self.device)

    def fit(self, dataset: OfflineDataset) -> Self:
        """Learn values and the sub-goal policy from logged episodes.

        Parameters
        ----------
        dataset : OfflineDataset

        Returns
        -------
        QConductor
        """
        generator = self._start(dataset)
        values, policy = list(self.values_.parameters()), list(self.policy_.parameters())
        scale = dataset.rewards.std().clamp(min=1e-6)

        def step(i: int, optimisers: list[torch.optim.Optimizer]) -> None:
            row, last = dataset.sample_rows(self.batch_size, generator)
            ahead = torch.minimum(row + self.interval, last)
            if self.goal_features is None:
                reward, alive = dataset.rewards[row] / scale, 1 - dataset.terminals[row]
                goal = row.new_zeros(0)
            else:
                goal = self._goal_rows(dataset, row, last, generator)
                alive = 1 - self._hit(dataset, row + 1, goal)
                reward = -alive
                ahead = torch.where(
                    (goal > row) & (goal <= last), torch.minimum(ahead, goal), ahead
                )
            here, after, there = (self._inputs(dataset, r, goal) for r in (row, row + 1, ahead))
            self._value_step(optimisers[0], values, here, after, reward, alive)
            with torch.no_grad():
                gain = self.targets_(there).mean(0) - self.targets_(here).mean(0)
                if self.goal_features is None:
                    gain = self._return_gain(dataset, row, ahead, here, there, scale)
                    gain = gain / gain.std().clamp(min=1e-6)
                weight = (self.beta * gain).exp().clamp(max=100.0)
            part = self.normalizer_.part(self._columns())
            target = part(dataset.observations[ahead][:, self._columns()])
            error = ((self.policy_(here) - target) ** 2).sum(1)
            descend(optimisers[1], policy, (weight * error).mean())

        self._train(self.n_updates, self.lr, step, [values, policy])
        return self

    def _value_step(
        self,
        optimiser: torch.optim.Optimizer,
        values: list[Any],
        here: Tensor,
        after: Tensor,
        reward: Tensor,
        alive: Tensor,
    ) -> None:
        with torch.no_grad():
            target = td_target(reward, alive, self.targets_(after).min(0).values, self.discount)
        gap = target - self.values_(here)
        share = torch.where(gap > 0, self.expectile, 1 - self.expectile)
        descend(optimiser, values, (share * gap**2).mean(1).sum())
        blend_(self.targets_.parameters(), values, self.tau)

    def _return_gain(
        self,
        data: OfflineDataset,
        row: Tensor,
        ahead: Tensor,
        here: Tensor,
        there: Tensor,
        scale: Tensor,
    ) -> Tensor:
        steps = torch.minimum(row[:, None] + torch.arange(self.interval), ahead[:, None])
        counts = (steps < ahead[:, None]).float() * self.discount ** torch.arange(self.interval)
        gained = (data.rewards[steps] / scale * counts).sum(1)
        later = self.discount ** (ahead - row).float() * self.targets_(there).mean(0)
        return gained + later - self.targets_(here).mean(0)

    def _goal_rows(
        self, data: OfflineDataset, row: Tensor, last: Tensor, generator: torch.Generator
    ) -> Tensor:
        share = torch.rand(len(row), generator=generator, dtype=torch.float64)
        goal = row + 1 + (share * (last - row)).long()
        other, _ = data.sample_rows(len(row), generator)
        swap = torch.rand(len(row), generator=generator) < self.random_goals
        return torch.where(swap, other, goal)

    def _hit(self, data: OfflineDataset, row: Tensor, goal: Tensor) -> Tensor:
        wanted = list(self.goal_features or ())
        gap = data.observations[row][:, wanted] - data.observations[goal][:, wanted]
        return (gap.norm(dim=1) <= self.radius).float()

    def _inputs(self, data: OfflineDataset, row: Tensor, goal: Tensor) -> Tensor:
        seen = self.normalizer_(data.observations[row])
        if self.goal_features is None:
            return seen.to(self.device)
        wanted = list(self.goal_features)
        goals = self.normalizer_.part(wanted)(data.observations[goal][:, wanted])
        return torch.cat([seen, goals], dim=1).to(self.device)

    @torch.no_grad()
    def sample_tokens(
        self,
        observations: Any,
        goal: Any = None,
        n_candidates: int = 1,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the current state and its sub-goal as normalised tokens, shape (n, 1, 2, F)."""
        self._check_fitted()
        x = checked_rows(observations, self.dims_["observation"], "observation")
        inputs = self.normalizer_(tensor(x))
        start = inputs[:, self._columns()]
        if self.goal_features is not None:
            if goal is None:
                raise ValueError("This conductor plans towards a goal: pass one.")
            wanted = list(self.goal_features)
            goals = self.normalizer_.part(wanted)(tensor(self.check_goal(goal, wanted, len(x))))
            inputs = torch.cat([inputs, goals], dim=1)
        return torch.stack([start, self.policy_(inputs.to(self.device)).cpu()], dim=1)[:, None]

    def sub_goals(self, tokens: Tensor) -> Array:
        """Return tokens in the units of the data."""
        found: Array = self.normalizer_.part(self._columns()).inverse(tokens).numpy().astype(float)
        return found

    def score(self, tokens: Tensor) -> Tensor:
        """Return zeros: there is one plan for each row."""
        return torch.zeros(tokens.shape[:2])

    def best(self, tokens: Tensor, score: Tensor | None = None) -> Plans:
        """Return the plan of each row."""
        return Plans(self.sub_goals(tokens[:, 0]), None)

    def plan(self, observations: Any, goal: Any = None) -> Array:
        """Return state and sub-goal of each row, shape (n, 2, F)."""
        return self.best(self.sample_tokens(observations, goal)).states


class DPerformer(Learner):
    """Reach sub-goals by diffusing the states and actions in between, as Hierarchical Diffuser.

    A segment has ``interval`` tokens of state and action; its first state is held at the current
    one and the last at the sub-goal. The first action is executed. Segments arrive after a random
    time of at most ``interval`` and repeat the goal from there.

    Parameters
    ----------
    interval : int, default 10
    goal_features : sequence of int
    n_diffusion_steps, width, depth, clip, lr, batch_size, n_updates, ema
        As in :class:`.DConductor`.
    normalizer : str
    random_state : int
    device : str

    Examples
    --------
    >>> import numpy as np
    >>> from icml24.hierarchical_planning import Episode
    >>> walk = np.linspace([0, 0], [1, 1], 13)
    >>> logs = OfflineDataset.from_episodes([Episode(walk, np.zeros((12, 1)), np.zeros(12))])
    >>> DPerformer(interval=2, n_updates=2).fit(logs).act([[0.0, 0.0]], [[1.0, 1.0]]).shape
    (1, 1)
    """

    NETS = ("average_",)

    def __init__(
        self,
        interval: int = 10,
        goal_features: Sequence[int] = (0, 1),
        n_diffusion_steps: int = 20,
        width: int = 256,
        depth: int = 3,
        clip: float | None = 1.5,
        lr: float = 1e-3,
        batch_size: int = 128,
        n_updates: int = 4000,
        ema: float = 0.995,
        normalizer: str = "minmax",
        random_state: int = 0,
        device: str = "cpu",
    ) -> None:
        self.interval = interval
        self.goal_features = goal_features
        self.n_diffusion_steps = n_diffusion_steps
        self.width = width
        self.depth = depth
        self.clip = clip
        self.lr = lr
        self.batch_size = batch_size
        self.n_updates = n_updates
        self.ema = ema
        self.normalizer = normalizer
        self.random_state = random_state
        self.device = device

    def _plan_core(self) -> DConductor:
        """Return the one-step conductor whose plans are the segments."""
        return DConductor(
            horizon=self.interval,
            interval=1,
            features=None,
            goal_features=self.goal_features,
            dense_actions=True,
            n_diffusion_steps=self.n_diffusion_steps,
            width=self.width,
            depth=self.depth,
            clip=self.clip,
            lr=self.lr,
            batch_size=self.batch_size,
            n_updates=self.n_updates,
            ema=self.ema,
            normalizer=self.normalizer,
            random_state=self.random_state,
            device=self.device,
        )

    @property
    def _columns(self) -> list[int]:
        return list(self.goal_features)

    def _build(self) -> None:
        core = self._plan_core()
        for name in ("dims_", "normalizer_", "low_", "high_", "action_centre_", "action_scale_"):
            setattr(core, name, getattr(self, name))
        core._build()
        self.core_ = core
        self.diffusion_: GaussianDiffusion = core.diffusion_
        self.average_: GaussianDiffusion = core.average_

    def fit(self, dataset: OfflineDataset) -> Self:
        """Learn segments from logged episodes.

        Parameters
        ----------
        dataset : OfflineDataset

        Returns
        -------
        DPerformer
        """
        self._start(dataset)
        self.core_.fit(dataset)
        self.diffusion_, self.average_ = self.core_.diffusion_, self.core_.average_
        return self

    def act(
        self, observations: Any, goal: Any = None, generator: torch.Generator | None = None
    ) -> Array:
        """Return the first action of a drawn segment for each row.

        Parameters
        ----------
        observations : array_like, shape (n, D)
        goal : array_like, shape (G,) or (n, G)
        generator : torch.Generator, optional

        Returns
        -------
        numpy.ndarray, shape (n, A)
        """
        self._check_fitted()
        plans = self.core_.best(self.core_.sample_tokens(observations, goal, 1, generator))
        assert plans.actions is not None
        return plans.actions[:, 0]

"""The Q-Performer: a diffusion policy and critics, for sub-goals nearby or for flat learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from icml24.hierarchical_planning.dataset import OfflineDataset
from icml24.hierarchical_planning.diffusion import GaussianDiffusion
from icml24.hierarchical_planning.goals import (
    distance_reward,
    hindsight_offsets,
    max_cosine_reward,
    td_target,
)
from icml24.hierarchical_planning.mazes import Array
from icml24.hierarchical_planning.module import Learner, checked_rows, descend, tensor
from icml24.hierarchical_planning.networks import StackedMLP, TokenMLP, blend_, seeded

__all__ = ["Batch", "QPerformer"]

GoalReward = str | Callable[[Tensor, Tensor], Tensor] | None


class Batch(NamedTuple):
    """Transitions with goals: states and goals normalised, actions in [-1, 1]."""

    state: Tensor
    action: Tensor
    reward: Tensor
    alive: Tensor
    after: Tensor


class QPerformer(Learner):
    r"""Goal-conditioned diffusion Q-learning, Eqs. (2) and (3).

    The policy :math:`\pi(a \mid s, g)` is a diffusion over the action in a few steps. Critics learn
    from :math:`r + r_g`, where :math:`r_g` rewards closeness to a goal taken in hindsight from the
    same episode. With ``goal_features=None`` there are no goals, and this is Diffusion-QL.

    Parameters
    ----------
    interval : int, default 10
        :math:`K`, decisions from sub-goal to sub-goal.
    goal_features : sequence of int or None
        Entries of the observation that a goal consists of; None for no goals.
    goal_reward : {"distance", "cosine", "sparse"}, callable or None
        :math:`r_g` of the reached and the wanted entries: see :mod:`.goals`; "cosine" compares
        normalised entries, "sparse" is 1 within ``radius``.
    end_at_goal : bool, default True
        Whether the critic's episode ends at the goal (for "sparse" within ``radius``, else at the
        goal itself), as in the authors' AntMaze code. Their locomotion code goes on: where the
        logged reward counts, and is negative, an end would be worth more than any reward.
    goal_weight, reward_scale, reward_shift : float
        The critic's reward is ``goal_weight * r_g + reward_scale * r + reward_shift``.
    radius : float
        Of the sparse goal reward, in the data's units.
    discount : float, default 0.95
    relabel_p : float or None, default 0.5
        Of :func:`hindsight_offsets`; None draws goals from the whole rest of the episode (HER).
    per_sample : bool, default True
        One geometric draw for each transition, or one for each batch.
    random_goals : float, default 0.0
        Share of goals drawn from other episodes instead.
    goal_noise : float, default 0.0
        Goals get noise of a deviation drawn from [0, goal_noise], in normalised units, so that the
        performer tolerates imperfect sub-goals.
    eta : float, default 1.0
        Weight of the value in the policy's loss; 0 is behaviour cloning.
    q_gradient : bool, default True
        Whether the policy sees the gradient of the value. The authors' AntMaze code does not.
    n_critics : int, default 2
        0 leaves them out: then ``act`` takes the first action drawn.
    lcb : float or None
        Judge by the ensemble's mean minus ``lcb`` deviations; None judges by the smallest value.
    n_diffusion_steps, width, depth, critic_depth, lr, batch_size, n_updates
        Of the networks and their training.
    policy_delay : int, default 2
        Critic updates for each policy update.
    tau, ema : float
        Step of the target critics; decay of the policy's moving average.
    n_candidates : int, default 16
        Actions drawn when acting; the best by the target critics is taken.
    temperature : float, default 0.0
        Above zero, one is drawn with probability softmax(value / temperature) instead.
    normalizer : {"minmax", "gaussian"}
    random_state : int
    device : str

    Examples
    --------
    >>> from icml24.hierarchical_planning import Episode, OfflineDataset
    >>> rng = np.random.default_rng(0)
    >>> logs = [
    ...     Episode(rng.uniform(-1, 1, (9, 2)), rng.uniform(-1, 1, (8, 1)), np.zeros(8))
    ...     for _ in range(4)
    ... ]
    >>> performer = QPerformer(interval=2, n_updates=3).fit(OfflineDataset.from_episodes(logs))
    >>> performer.act(np.zeros((5, 2)), np.zeros(2)).shape
    (5, 1)
    """

    NETS = ("policy_ema_", "critic_target_")

    def __init__(
        self,
        interval: int = 10,
        goal_features: Sequence[int] | None = (0, 1),
        goal_reward: GoalReward = "distance",
        end_at_goal: bool = True,
        goal_weight: float = 1.0,
        reward_scale: float = 0.0,
        reward_shift: float = 0.0,
        radius: float = 0.45,
        discount: float = 0.95,
        relabel_p: float | None = 0.5,
        per_sample: bool = True,
        random_goals: float = 0.0,
        goal_noise: float = 0.0,
        eta: float = 1.0,
        q_gradient: bool = True,
        n_critics: int = 2,
        lcb: float | None = None,
        n_diffusion_steps: int = 5,
        width: int = 128,
        depth: int = 1,
        critic_depth: int = 2,
        lr: float = 1e-3,
        batch_size: int = 256,
        n_updates: int = 2500,
        policy_delay: int = 2,
        tau: float = 0.01,
        ema: float = 0.99,
        n_candidates: int = 16,
        temperature: float = 0.0,
        normalizer: str = "minmax",
        random_state: int = 0,
        device: str = "cpu",
    ) -> None:
        self.interval = interval
        self.goal_features = goal_features
        self.goal_reward = goal_reward
        self.end_at_goal = end_at_goal
        self.goal_weight = goal_weight
        self.reward_scale = reward_scale
        self.reward_shift = reward_shift
        self.radius = radius
        self.discount = discount
        self.relabel_p = relabel_p
        self.per_sample = per_sample
        self.random_goals = random_goals
        self.goal_noise = goal_noise
        self.eta = eta
        self.q_gradient = q_gradient
        self.n_critics = n_critics
        self.lcb = lcb
        self.n_diffusion_steps = n_diffusion_steps
        self.width = width
        self.depth = depth
        self.critic_depth = critic_depth
        self.lr = lr
        self.batch_size = batch_size
        self.n_updates = n_updates
        self.policy_delay = policy_delay
        self.tau = tau
        self.ema = ema
        self.n_candidates = n_candidates
        self.temperature = temperature
        self.normalizer = normalizer
        self.random_state = random_state
        self.device = device

    # -- networks -------------------------------------------------------------------------------

    @property
    def _columns(self) -> list[int]:
        return [] if self.goal_features is None else list(self.goal_features)

    def _diffusion(self) -> GaussianDiffusion:
        inputs = self.dims_["observation"] + len(self._columns)
        net = TokenMLP(1, self.dims_["action"], inputs, self.width, self.depth)
        return GaussianDiffusion(net, self.n_diffusion_steps, "vp", "eps", clip=1.0)

    def _build(self) -> None:
        inputs = self.dims_["observation"] + len(self._columns) + self.dims_["action"]
        for name in ("policy_", "policy_ema_"):
            setattr(self, name, seeded(self._diffusion, self.random_state).to(self.device))
        if self.n_critics:
            for name in ("critic_", "critic_target_"):
                net = seeded(
                    lambda: StackedMLP(self.n_critics, inputs, self.width, self.critic_depth),
                    self.random_state + 1,
                )
                setattr(self, name, net.to(self.device))

    def _judge(self, critic: StackedMLP, state: Tensor, action: Tensor) -> Tensor:
        """Smallest value of the critics, or their lower confidence bound."""
        values = critic(torch.cat([state, action], dim=1))
        if self.lcb is None:
            return values.min(0).values
        return values.mean(0) - self.lcb * values.std(0, correction=0)

    def _draw(self, policy: GaussianDiffusion, state: Tensor, g: torch.Generator) -> Tensor:
        shape = (len(state), 1, self.dims_["action"])
        return policy.sample(shape, g, context=state)[:, 0].clamp(-1, 1)

    # -- training -------------------------------------------------------------------------------

    def sample_batch(self, data: OfflineDataset, generator: torch.Generator) -> Batch:
        """Draw transitions and hindsight goals, which never leave the episode.

        Parameters
        ----------
        data : OfflineDataset
        generator : torch.Generator

        Returns
        -------
        Batch
        """
        row, last = data.sample_rows(self.batch_size, generator)
        seen = self.normalizer_(data.observations[torch.cat([row, row + 1])])
        state, after = seen.chunk(2)
        reward = self.reward_scale * data.rewards[row] + self.reward_shift
        alive = 1 - data.terminals[row]
        if self.goal_features is not None:
            goal_row = self._goal_rows(data, row, last, generator)
            reached, goal = (data.observations[i][:, self._columns] for i in (row + 1, goal_row))
            reward = reward + self.goal_weight * self._goal_reward(reached, goal)
            if self.end_at_goal:
                hit = goal_row == row + 1
                if self.goal_reward == "sparse":
                    hit = (reached - goal).norm(dim=1) <= self.radius
                alive = alive * (~hit).float()
            goal = self.normalizer_.part(self._columns)(goal)
            if self.goal_noise:
                size = self.goal_noise * torch.rand(len(goal), 1, generator=generator)
                goal = goal + size * torch.randn(goal.shape, generator=generator)
            state, after = torch.cat([state, goal], 1), torch.cat([after, goal], 1)
        parts = (state, data.actions[row], reward, alive, after)
        return Batch(*(part.to(self.device) for part in parts))

    def _goal_rows(
        self, data: OfflineDataset, row: Tensor, last: Tensor, generator: torch.Generator
    ) -> Tensor:
        n = len(row)
        if self.relabel_p is None:
            share = torch.rand(n, generator=generator, dtype=torch.float64)
            goal = row + 1 + (share * (last - row)).long()
        else:
            offsets = hindsight_offsets(
                n, self.interval, self.relabel_p, generator, self.per_sample
            )
            goal = torch.minimum(row + 1 + offsets, last)
        if self.random_goals:
            other, _ = data.sample_rows(n, generator)
            swap = torch.rand(n, generator=generator) < self.random_goals
            goal = torch.where(swap, other, goal)
        return goal

    def _goal_reward(self, reached: Tensor, goal: Tensor) -> Tensor:
        if callable(self.goal_reward):
            return self.goal_reward(reached, goal)
        if self.goal_reward == "distance":
            return distance_reward(reached, goal)
        if self.goal_reward == "cosine":
            part = self.normalizer_.part(self._columns)
            return max_cosine_reward(part(reached), part(goal))
        if self.goal_reward == "sparse":
            return ((reached - goal).norm(dim=1) <= self.radius).float()
        return torch.zeros(len(goal))

    def critic_loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Return Eq. (2) for all critics, with actions of the averaged policy in the target."""
        with torch.no_grad():
            action = self._draw(self.policy_ema_, batch.after, generator)
            if self.lcb is None:
                value = self._judge(self.critic_target_, batch.after, action)
            else:  # each member learns from its own target
                value = self.critic_target_(torch.cat([batch.after, action], dim=1))
            target = td_target(batch.reward, batch.alive, value, self.discount)
        values = self.critic_(torch.cat([batch.state, batch.action], dim=1))
        return ((values - target) ** 2).mean(1).sum()

    def policy_loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Return Eq. (3): the denoising loss minus the scaled value of a drawn action."""
        loss = self.policy_.loss(batch.action[:, None], generator, context=batch.state)
        if self.eta and self.n_critics:
            if self.q_gradient:
                action = self._draw(self.policy_, batch.state, generator)
            else:
                with torch.no_grad():
                    action = self._draw(self.policy_ema_, batch.state, generator)
            value = self._judge(self.critic_, batch.state, action)
            loss = loss - self.eta * value.mean() / value.abs().mean().detach().clamp(min=1e-6)
        return loss

    def fit(self, dataset: OfflineDataset) -> Self:
        """Learn from logged episodes.

        Parameters
        ----------
        dataset : OfflineDataset

        Returns
        -------
        QPerformer
        """
        self._check_settings()
        generator = self._start(dataset)
        actor = list(self.policy_.parameters())
        critics = list(self.critic_.parameters()) if self.n_critics else []

        def step(i: int, optimisers: list[torch.optim.Optimizer]) -> None:
            batch = self.sample_batch(dataset, generator)
            if critics:
                descend(optimisers[1], critics, self.critic_loss(batch, generator))
                blend_(self.critic_target_.parameters(), critics, self.tau)
            if i % self.policy_delay == 0 or not critics:
                descend(optimisers[0], actor, self.policy_loss(batch, generator))
                blend_(self.policy_ema_.parameters(), actor, 1 - self.ema)

        self._train(self.n_updates, self.lr, step, [actor, critics] if critics else [actor])
        return self

    def _check_settings(self) -> None:
        kinds = ("distance", "cosine", "sparse", None)
        if not callable(self.goal_reward) and self.goal_reward not in kinds:
            raise ValueError(
                "goal_reward must be 'distance', 'cosine', 'sparse', None or a function, got "
                f"{self.goal_reward!r}."
            )
        if not 0 <= self.discount < 1:
            raise ValueError(f"discount must lie in [0, 1), got {self.discount}.")

    # -- acting ---------------------------------------------------------------------------------

    def _context(self, observations: Any, goal: Any) -> Tensor:
        self._check_fitted()
        x = checked_rows(observations, self.dims_["observation"], "observation")
        state = self.normalizer_(tensor(x))
        if self.goal_features is None:
            return state.to(self.device)
        if goal is None:
            raise ValueError("This performer was trained with goals: pass one.")
        goals = self.check_goal(goal, self._columns, len(x))
        part = self.normalizer_.part(self._columns)
        return torch.cat([state, part(tensor(goals))], dim=1).to(self.device)

    @torch.no_grad()
    def act(
        self,
        observations: Any,
        goal: Any = None,
        generator: torch.Generator | None = None,
        n_candidates: int | None = None,
    ) -> Array:
        """Choose an action for each row.

        Parameters
        ----------
        observations : array_like, shape (n, D)
        goal : array_like, shape (G,) or (n, G), optional
        generator : torch.Generator, optional
            By default a fresh one from ``random_state``.
        n_candidates : int, optional

        Returns
        -------
        numpy.ndarray, shape (n, A)
            In the units of the environment.
        """
        g = generator or torch.Generator().manual_seed(self.random_state)
        context = self._context(observations, goal)
        many = (n_candidates or self.n_candidates) if self.n_critics else 1
        wide = context.repeat_interleave(many, dim=0)
        actions = self._draw(self.policy_ema_, wide, g)
        if many > 1:
            value = self._judge(self.critic_target_, wide, actions).view(-1, many)
            if self.temperature > 0:
                chance = (value / self.temperature).softmax(1)
                pick = torch.multinomial(chance, 1, generator=g)
            else:
                pick = value.argmax(1, keepdim=True)
            actions = actions.view(len(context), many, -1)[torch.arange(len(context)), pick[:, 0]]
        return self.action_centre_ + self.action_scale_ * actions.cpu().numpy().astype(float)

    @torch.no_grad()
    def value(self, observations: Any, goal: Any = None, n_candidates: int = 16) -> Array:
        """Return the best target value among drawn actions for each row.

        Parameters
        ----------
        observations : array_like, shape (n, D)
        goal : array_like, optional
        n_candidates : int, default 16

        Returns
        -------
        numpy.ndarray, shape (n,)
        """
        if not self.n_critics:
            raise ValueError("There are no critics: n_critics is 0.")
        context = self._context(observations, goal)
        g = torch.Generator().manual_seed(self.random_state)
        wide = context.repeat_interleave(n_candidates, dim=0)
        actions = self._draw(self.policy_ema_, wide, g)
        values = self._judge(self.critic_target_, wide, actions)
        return np.asarray(values.view(-1, n_candidates).max(1).values)

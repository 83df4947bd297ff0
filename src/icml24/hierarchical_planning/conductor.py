"""The D-Conductor: diffusion of sub-goal sequences, held at both ends, or guided by return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from icml24.hierarchical_planning.dataset import OfflineDataset
from icml24.hierarchical_planning.diffusion import Condition, GaussianDiffusion
from icml24.hierarchical_planning.mazes import Array
from icml24.hierarchical_planning.module import Learner, checked_rows, descend, tensor
from icml24.hierarchical_planning.networks import TemporalUnet, TokenMLP, blend_, seeded

__all__ = ["DConductor", "Plans"]


class Plans(NamedTuple):
    """The chosen plan of each row.

    Attributes
    ----------
    states : numpy.ndarray, shape (n, tokens, F)
        Sub-goals in the units of the data; token 0 is where the plan starts.
    actions : numpy.ndarray or None, shape (n, K, A)
        The first K actions, for a conductor with dense actions; in the environment's units.
    """

    states: Array
    actions: Array | None


class _ReturnModel(nn.Module):
    """Predict the return of a noisy plan from its tokens and step number."""

    def __init__(self, n_tokens: int, dim: int, width: int) -> None:
        super().__init__()
        self.body = TokenMLP(n_tokens, dim, 0, width, 2)
        self.head = nn.Linear(n_tokens * dim, 1)

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        return self.head(torch.nn.functional.silu(self.body(x, m).flatten(1)))[:, 0]


class DConductor(Learner):
    r"""Plan a sequence of sub-goals, :math:`K` decisions apart, by diffusion; Eq. (1).

    A plan has ``horizon / interval + 1`` tokens; token 0 is held at the current state and, with
    goals, the last one at the goal. Without goals, plans are pushed or chosen by predicted return.

    Parameters
    ----------
    horizon, interval : int
        :math:`H` and :math:`K`, in decisions.
    features : sequence of int or None
        Entries of the observation in a token; None for all.
    goal_features : sequence of int or None
        Entries that a goal fixes in the last token; None for a conductor without goals.
    goal_padding : bool, default True
        Train with windows that arrive after a random time and repeat the goal from there, so that a
        plan may finish early. False: all windows are ``horizon`` long, as in the authors' code.
    min_speed : float, default 0.0
        Keep windows whose ends are at least this far apart for each decision between them, in the
        units of the data: windows that wander and return teach no routes.
    dense_actions : bool, default False
        Tokens hold the K actions that follow, too.
    n_diffusion_steps : int, default 32
    network : {"mlp", "unet"}
    width, depth, waves : int
        Of the network (``depth`` and ``waves`` of the MLP only).
    mults, kernel
        Of the U-Net.
    select : {"shortest", "value"} or None
        Which of several plans to take: the one that arrives first (and is shortest among those),
        the one with the largest predicted return, or the first drawn.
    arrival : float, default 0.1
        A token has arrived when it is this close to the goal, in normalised units.
    guide_scale, n_guide_steps, stop_guide
        Classifier guidance by the return model, see :meth:`.GaussianDiffusion.sample`; a scale of 0
        switches it off.
    discount, terminal_penalty : float
        Of the return that the return model learns; the penalty is added where an episode ended.
    clip : float or None, default 1.5
        Of predicted tokens, in normalised units.
    lr, batch_size, n_updates, ema
        Training.
    normalizer : {"minmax", "gaussian"}
    random_state : int
    device : str

    Examples
    --------
    >>> from icml24.hierarchical_planning import Episode, OfflineDataset
    >>> import numpy as np
    >>> walk = np.linspace([0, 0], [1, 1], 13)
    >>> logs = OfflineDataset.from_episodes([Episode(walk, np.zeros((12, 1)), np.zeros(12))])
    >>> conductor = DConductor(horizon=8, interval=2, n_diffusion_steps=4, n_updates=2).fit(logs)
    >>> plan = conductor.plan([[0.0, 0.0]], [1.0, 1.0])
    >>> plan.shape, plan[0, 0].tolist(), plan[0, -1].tolist()
    ((1, 5, 2), [0.0, 0.0], [1.0, 1.0])
    """

    NETS = ("average_", "return_")

    def __init__(
        self,
        horizon: int = 100,
        interval: int = 10,
        features: Sequence[int] | None = (0, 1),
        goal_features: Sequence[int] | None = (0, 1),
        goal_padding: bool = True,
        min_speed: float = 0.0,
        dense_actions: bool = False,
        n_diffusion_steps: int = 32,
        network: Literal["mlp", "unet"] = "mlp",
        width: int = 256,
        depth: int = 3,
        waves: int = 0,
        mults: Sequence[int] = (1, 2, 4),
        kernel: int = 5,
        select: Literal["shortest", "value"] | None = None,
        arrival: float = 0.1,
        guide_scale: float = 0.0,
        n_guide_steps: int = 1,
        stop_guide: int = 2,
        discount: float = 0.997,
        terminal_penalty: float = 0.0,
        clip: float | None = 1.5,
        lr: float = 1e-3,
        batch_size: int = 128,
        n_updates: int = 4000,
        ema: float = 0.995,
        normalizer: str = "minmax",
        random_state: int = 0,
        device: str = "cpu",
    ) -> None:
        self.horizon = horizon
        self.interval = interval
        self.features = features
        self.goal_features = goal_features
        self.goal_padding = goal_padding
        self.min_speed = min_speed
        self.dense_actions = dense_actions
        self.n_diffusion_steps = n_diffusion_steps
        self.network = network
        self.width = width
        self.depth = depth
        self.waves = waves
        self.mults = mults
        self.kernel = kernel
        self.select = select
        self.arrival = arrival
        self.guide_scale = guide_scale
        self.n_guide_steps = n_guide_steps
        self.stop_guide = stop_guide
        self.discount = discount
        self.terminal_penalty = terminal_penalty
        self.clip = clip
        self.lr = lr
        self.batch_size = batch_size
        self.n_updates = n_updates
        self.ema = ema
        self.normalizer = normalizer
        self.random_state = random_state
        self.device = device

    # -- shapes and networks --------------------------------------------------------------------

    @property
    def n_tokens(self) -> int:
        """Tokens of a plan, the start included."""
        return self.horizon // self.interval + 1

    def _columns(self) -> list[int]:
        every = range(self.dims_["observation"])
        return list(every if self.features is None else self.features)

    def _check_settings(self) -> None:
        if self.interval < 1 or self.horizon < self.interval or self.horizon % self.interval:
            raise ValueError(
                f"The interval must divide the horizon, got interval={self.interval} and "
                f"horizon={self.horizon}."
            )
        if self.network not in ("mlp", "unet"):
            raise ValueError(f"network must be 'mlp' or 'unet', got {self.network!r}.")
        if self.select not in (None, "shortest", "value"):
            raise ValueError(f"select must be None, 'shortest' or 'value', got {self.select!r}.")
        if self.select == "shortest" and self.goal_features is None:
            raise ValueError("select='shortest' needs goals: set goal_features.")
        goals = set(self.goal_features or ())
        if self.features is not None and not goals <= set(self.features):
            raise ValueError("goal_features must be among features.")

    @property
    def _needs_return(self) -> bool:
        return self.select == "value" or self.guide_scale > 0

    @property
    def _action_block(self) -> int:
        return self.interval * self.dims_["action"] if self.dense_actions else 0

    def _denoiser(self) -> GaussianDiffusion:
        dim = len(self._columns()) + self._action_block
        net: nn.Module
        if self.network == "mlp":
            net = TokenMLP(self.n_tokens, dim, 0, self.width, self.depth, self.waves)
        else:
            net = TemporalUnet(self.n_tokens, dim, self.width, self.mults, self.kernel)
        return GaussianDiffusion(net, self.n_diffusion_steps, "cosine", "x0", self.clip)

    def _build(self) -> None:
        self._check_settings()
        for name in ("diffusion_", "average_"):
            setattr(self, name, seeded(self._denoiser, self.random_state).to(self.device))
        self.return_: _ReturnModel | None = None
        if self._needs_return:
            dim = len(self._columns()) + self._action_block
            self.return_ = seeded(
                lambda: _ReturnModel(self.n_tokens, dim, self.width), self.random_state + 1
            ).to(self.device)

    # -- training -------------------------------------------------------------------------------

    def sample_batch(
        self, data: OfflineDataset, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw windows as normalised tokens, and the row at which each one starts.

        Parameters
        ----------
        data : OfflineDataset
        generator : torch.Generator

        Returns
        -------
        tokens : torch.Tensor, shape (batch, tokens, dim)
            Actions first, if there are any, then the state's features.
        start : torch.Tensor, shape (batch,)
        """
        offsets = torch.arange(0, self.horizon + 1, self.interval)
        padded = self.goal_padding and self.goal_features is not None
        if self.dense_actions:  # the last token's actions lie beyond the last sub-goal
            offsets = torch.arange(0, self.horizon + self.interval + 1, self.interval)
        shortest = self.interval if padded else None
        columns = self._columns()
        spare = 4 if self.min_speed > 0 else 1
        rows, arrival = data.sample_windows(spare * self.batch_size, offsets, generator, shortest)
        if self.min_speed > 0:
            ends = data.observations[rows[:, [0, -1]]][..., columns]
            speed = (ends[:, 1] - ends[:, 0]).norm(dim=1) / arrival
            kept = (speed < self.min_speed).long().argsort(stable=True)[: self.batch_size]
            rows, arrival = rows[kept], arrival[kept]
        rows = rows[:, : self.n_tokens]
        tokens = self.normalizer_.part(columns)(data.observations[rows][..., columns])
        if self.dense_actions:
            step = torch.arange(self.interval)
            last = (rows[:, 0] + arrival)[:, None, None] - 1
            each = torch.minimum(rows[..., None] + step, last)
            tokens = torch.cat([data.actions[each].flatten(2), tokens], dim=2)
        return tokens.to(self.device), rows[:, 0]

    def fit(self, dataset: OfflineDataset) -> Self:
        """Learn from logged episodes.

        Parameters
        ----------
        dataset : OfflineDataset

        Returns
        -------
        DConductor

        Raises
        ------
        ValueError
            If no episode is as long as the plans have to be.
        """
        self._check_settings()
        generator = self._start(dataset)
        weights = list(self.diffusion_.parameters())

        def step(i: int, optimisers: list[torch.optim.Optimizer]) -> None:
            tokens, _ = self.sample_batch(dataset, generator)
            condition = self._mask(), tokens
            descend(optimisers[0], weights, self.diffusion_.loss(tokens, generator, condition))
            blend_(self.average_.parameters(), weights, 1 - self.ema)

        self._train(self.n_updates, self.lr, step, [weights])
        if self.return_ is not None:
            self._fit_return(dataset, generator)
        return self

    def _fit_return(self, dataset: OfflineDataset, generator: torch.Generator) -> None:
        """Learn the discounted return-to-go from a plan's start, from noisy plans, normalised."""
        togo = _returns(dataset, self.discount, self.terminal_penalty)
        spread = togo.std().clamp(min=1e-6)
        togo = ((togo - togo.mean()) / spread).to(self.device)
        model = self.return_
        assert model is not None
        weights = list(model.parameters())

        def step(i: int, optimisers: list[torch.optim.Optimizer]) -> None:
            tokens, start = self.sample_batch(dataset, generator)
            m = torch.randint(0, self.n_diffusion_steps + 1, (len(tokens),), generator=generator)
            noise = torch.randn(tokens.shape, generator=generator)
            noisy = self.diffusion_.add_noise(tokens, m.to(self.device), noise.to(self.device))
            noisy = torch.where(self._mask(), tokens, noisy)
            error = model(noisy, m.to(self.device)) - togo[start.to(self.device)]
            descend(optimisers[0], weights, (error**2).mean())

        self._train(max(1, self.n_updates // 2), self.lr, step, [weights])

    # -- planning -------------------------------------------------------------------------------

    def _mask(self) -> Tensor:
        """Mark the entries held fixed: the first state and, with goals, the last goal."""
        columns = self._columns()
        mask = torch.zeros(self.n_tokens, self._action_block + len(columns), dtype=torch.bool)
        mask[0, self._action_block :] = True
        for column in self.goal_features or ():
            mask[-1, self._action_block + columns.index(column)] = True
        return mask.to(self.device)

    def _condition(self, observations: Any, goal: Any) -> Condition:
        self._check_fitted()
        x = checked_rows(observations, self.dims_["observation"], "observation")
        columns = self._columns()
        mask = self._mask()
        values = torch.zeros(len(x), *mask.shape)
        part = self.normalizer_.part(columns)
        values[:, 0, self._action_block :] = part(tensor(x[:, columns]))
        if self.goal_features is None:
            if goal is not None:
                raise ValueError("This conductor is guided by return and takes no goal.")
        elif goal is None:
            raise ValueError("This conductor plans towards a goal: pass one.")
        else:
            wanted = list(self.goal_features)
            goals = self.check_goal(goal, wanted, len(x))
            place = [self._action_block + columns.index(column) for column in wanted]
            values[:, -1, place] = self.normalizer_.part(wanted)(tensor(goals))
        return mask, values.to(self.device)

    @torch.no_grad()
    def sample_tokens(
        self,
        observations: Any,
        goal: Any = None,
        n_candidates: int = 1,
        generator: torch.Generator | None = None,
        chain: list[Tensor] | None = None,
    ) -> Tensor:
        """Draw plans as normalised tokens, shape (n, candidates, tokens, dim).

        Parameters
        ----------
        observations : array_like, shape (n, D)
        goal : array_like, shape (G,) or (n, G), optional
        n_candidates : int, default 1
        generator : torch.Generator, optional
        chain : list, optional
            Gets the tokens after every reverse step.

        Returns
        -------
        torch.Tensor
        """
        g = generator or torch.Generator().manual_seed(self.random_state)
        mask, values = self._condition(observations, goal)
        values = values.repeat_interleave(n_candidates, dim=0)
        guided = self.guide_scale > 0
        x = self.average_.sample(
            tuple(values.shape),
            g,
            (mask, values),
            guide=self.return_ if guided else None,
            guide_scale=self.guide_scale,
            n_guide_steps=self.n_guide_steps,
            stop_guide=self.stop_guide,
            chain=chain,
        )
        return x.view(-1, n_candidates, *x.shape[1:])

    def sub_goals(self, tokens: Tensor) -> Array:
        """Return the states of tokens in the units of the data."""
        states = tokens[..., self._action_block :].cpu()
        found: Array = self.normalizer_.part(self._columns()).inverse(states).numpy().astype(float)
        return found

    @torch.no_grad()
    def score(self, tokens: Tensor) -> Tensor:
        """Rank plans (n, candidates, tokens, dim): larger is better."""
        if self.select == "shortest":
            columns = self._columns()
            wanted = [self._action_block + columns.index(c) for c in self.goal_features or ()]
            way = tokens[..., wanted]
            there = (way - way[..., -1:, :]).norm(dim=-1) <= self.arrival
            first = there.float().argmax(-1)
            length = way.diff(dim=-2).norm(dim=-1).sum(-1)
            return -first.float() - length / (1e3 + length)
        if self.select == "value":
            assert self.return_ is not None
            flat = tokens.flatten(0, 1)
            m = torch.zeros(len(flat), dtype=torch.long, device=flat.device)
            return self.return_(flat, m).view(tokens.shape[:2])
        first = torch.zeros(tokens.shape[:2], device=tokens.device)
        first[:, 0] = 1
        return first

    def best(self, tokens: Tensor, score: Tensor | None = None) -> Plans:
        """Return the best plan of each row."""
        score = self.score(tokens) if score is None else score
        chosen = tokens[torch.arange(len(tokens)), score.argmax(1)]
        actions = None
        if self.dense_actions:
            block = chosen[:, 0, : self._action_block].cpu().numpy().astype(float)
            block = block.reshape(len(chosen), self.interval, -1).clip(-1, 1)
            actions = self.action_centre_ + self.action_scale_ * block
        return Plans(self.sub_goals(chosen), actions)

    def plan(
        self,
        observations: Any,
        goal: Any = None,
        n_candidates: int = 1,
        generator: torch.Generator | None = None,
    ) -> Array:
        """Return one sequence of sub-goals for each row, the best of ``n_candidates``.

        Parameters
        ----------
        observations : array_like, shape (n, D)
        goal : array_like, shape (G,) or (n, G), optional
        n_candidates : int, default 1
        generator : torch.Generator, optional
            By default a fresh one from ``random_state``.

        Returns
        -------
        numpy.ndarray, shape (n, tokens, F)
        """
        return self.best(self.sample_tokens(observations, goal, n_candidates, generator)).states


def _returns(dataset: OfflineDataset, discount: float, terminal_penalty: float) -> Tensor:
    """Discounted sums of the rewards that follow each row within its episode."""
    togo = torch.zeros(len(dataset.rewards), dtype=torch.float64)
    ends = dataset.starts + dataset.lengths
    reward = dataset.rewards.double() + terminal_penalty * dataset.terminals.double()
    for back in range(1, int(dataset.lengths.max()) + 1):
        row = (ends - back)[dataset.lengths >= back]
        togo[row] = reward[row] + discount * togo[row + 1]
    return togo.float()

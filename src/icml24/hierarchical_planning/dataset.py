"""Logged episodes: from Minari, D4RL dictionaries or lists, checked, and sampled in batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from icml24.hierarchical_planning.mazes import Array

__all__ = ["Episode", "Normalizer", "OfflineDataset"]

INSTALL = "pip install 'icml24[control]'"


@dataclass(frozen=True)
class Episode:
    """One logged episode of T decisions.

    Parameters
    ----------
    observations : array_like, shape (T + 1, D)
        The last one is where the last action led.
    actions : array_like, shape (T, A)
    rewards : array_like, shape (T,)
    terminated : bool, default False
        True if nothing follows the end by the rules of the task (not a time limit).
    """

    observations: Any
    actions: Any
    rewards: Any
    terminated: bool = False


@dataclass(frozen=True)
class Normalizer:
    """A shift and a scale for each feature: ``(x - centre) / scale``."""

    centre: Tensor
    scale: Tensor

    @classmethod
    def fit(cls, x: Tensor, kind: str = "minmax") -> Normalizer:
        """Map the range of the data to [-1, 1] ("minmax"), or to mean 0 and deviation 1."""
        if kind == "minmax":
            low, high = x.min(0).values, x.max(0).values
            centre, scale = (low + high) / 2, (high - low) / 2
        elif kind == "gaussian":
            centre, scale = x.mean(0), x.std(0)
        else:
            raise ValueError(f"kind must be 'minmax' or 'gaussian', got {kind!r}.")
        return cls(centre, torch.where(scale > 1e-6, scale, torch.ones_like(scale)))

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise."""
        return (x - self.centre) / self.scale

    def inverse(self, x: Tensor) -> Tensor:
        """Return to the units of the data."""
        return x * self.scale + self.centre

    def part(self, columns: Sequence[int]) -> Normalizer:
        """Return the normaliser of some features."""
        index = list(columns)
        return Normalizer(self.centre[index], self.scale[index])


def _array(x: Any, name: str, where: str, ndim: int) -> Array:
    try:
        x = np.asarray(x, dtype=float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {name} must be an array of numbers.") from error
    x = x[:, None] if ndim == 2 and x.ndim == 1 else x
    if x.ndim != ndim:
        raise ValueError(f"{where}: {name} must have {ndim} axes, got shape {x.shape}.")
    if not np.isfinite(x).all():
        bad = int(np.argwhere(~np.isfinite(x))[0, 0])
        raise ValueError(f"{where}: {name} contain NaN or infinite values, first at step {bad}.")
    return x


def joined(observation: Mapping[str, Any], keys: Sequence[str]) -> Array:
    """Join entries of a dictionary of observations along their last axis.

    Examples
    --------
    >>> joined({"observation": [3.0], "place": [1.0, 2.0]}, ["place", "observation"])
    array([1., 2., 3.])
    """
    missing = [key for key in keys if key not in observation]
    if missing:
        raise ValueError(
            f"A dictionary of observations needs the key {missing[0]!r}, got {sorted(observation)}."
        )
    return np.concatenate([np.asarray(observation[key], dtype=float) for key in keys], axis=-1)


class OfflineDataset:
    """All episodes one after another, as tensors.

    Use :meth:`from_episodes`, :meth:`from_d4rl` or :meth:`from_minari` to make one. Actions are
    kept scaled to [-1, 1].

    Attributes
    ----------
    observations : torch.Tensor, shape (n_transitions + n_episodes, D)
    actions, rewards, terminals : torch.Tensor
        Rows as in ``observations``; the row of an episode's last observation is empty.
    starts, lengths : torch.Tensor of int64
        First row and number of transitions of each episode.
    action_centre, action_scale : numpy.ndarray
        ``centre + scale * action`` is in the units of the environment.

    Examples
    --------
    >>> x = np.arange(4.0)[:, None]
    >>> data = OfflineDataset.from_episodes([Episode(x, np.zeros((3, 1)), np.zeros(3))])
    >>> data.n_transitions, data.observation_dim, data.action_dim
    (3, 1, 1)
    """

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    terminals: Tensor
    starts: Tensor
    lengths: Tensor
    action_centre: Array
    action_scale: Array

    @classmethod
    def from_episodes(
        cls,
        episodes: Iterable[Episode],
        action_low: Any = -1.0,
        action_high: Any = 1.0,
    ) -> OfflineDataset:
        """Check and join episodes.

        Parameters
        ----------
        episodes : iterable of Episode
        action_low, action_high : float or array_like
            Finite bounds of the actions.

        Returns
        -------
        OfflineDataset

        Raises
        ------
        ValueError
            If shapes disagree, values are not finite, or actions leave their bounds.
        """
        low, high = np.asarray(action_low, float), np.asarray(action_high, float)
        if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
            raise ValueError(
                "The bounds of the actions must be finite with action_low < action_high; for an "
                "unbounded space pass the range of your data."
            )
        centre, scale = (low + high) / 2, (high - low) / 2
        parts: list[tuple[Array, Array, Array, Array]] = []
        for number, episode in enumerate(episodes):
            where = f"Episode {number}"
            x = _array(episode.observations, "observations", where, 2)
            a = _array(episode.actions, "actions", where, 2)
            r = _array(episode.rewards, "rewards", where, 1)
            if len(a) == 0 or len(x) != len(a) + 1 or len(r) != len(a):
                raise ValueError(
                    f"{where}: T actions need T rewards and T + 1 observations, got {len(a)}, "
                    f"{len(r)} and {len(x)}."
                )
            if parts and (x.shape[1], a.shape[1]) != (parts[0][0].shape[1], parts[0][1].shape[1]):
                raise ValueError(f"{where}: the number of features differs from that of episode 0.")
            a = (a - centre) / scale
            if np.abs(a).max() > 1 + 1e-4:
                raise ValueError(
                    f"{where}: actions leave [{low.min():g}, {high.max():g}]; pass the true bounds "
                    "as action_low and action_high and they will be rescaled."
                )
            done = np.zeros(len(a))
            done[-1] = bool(episode.terminated)
            parts.append((x, np.clip(a, -1, 1), r, done))
        if not parts:
            raise ValueError("There are no episodes.")
        data = cls()
        padded = [np.concatenate([a, a[-1:] * 0]) for _, a, _, _ in parts]
        ends = [[np.append(p[i], 0.0) for p in parts] for i in (2, 3)]
        data.observations = torch.as_tensor(np.concatenate([p[0] for p in parts])).float()
        data.actions = torch.as_tensor(np.concatenate(padded)).float()
        data.rewards, data.terminals = (torch.as_tensor(np.concatenate(e)).float() for e in ends)
        data.lengths = torch.tensor([len(p[1]) for p in parts])
        data.starts = torch.cat([torch.zeros(1, dtype=torch.long), (data.lengths + 1).cumsum(0)])
        data.starts = data.starts[:-1]
        ones = np.ones(data.actions.shape[1])
        data.action_centre, data.action_scale = centre * ones, scale * ones
        return data

    @classmethod
    def from_d4rl(
        cls, table: Mapping[str, Any], action_low: Any = -1.0, action_high: Any = 1.0
    ) -> OfflineDataset:
        """Cut D4RL's flat arrays into episodes.

        Parameters
        ----------
        table : mapping
            ``observations``, ``actions``, ``rewards``, ``terminals`` and ``timeouts``, and
            ``next_observations`` if there are any. Without them the last transition of an episode
            is dropped where it ended by a timeout, since nobody knows where it led; where it
            terminated, its own observation stands in (values do not look beyond a terminal).
        action_low, action_high : float or array_like

        Returns
        -------
        OfflineDataset
        """
        needed = ("observations", "actions", "rewards", "terminals", "timeouts")
        missing = [name for name in needed if name not in table]
        if missing:
            raise ValueError(
                f"The table lacks {', '.join(missing)}: without terminals and timeouts nobody "
                "knows where an episode ends. Add arrays of False if there is only one."
            )
        x, a, r, done, cut = (np.asarray(table[name]) for name in needed)
        if len({len(column) for column in (x, a, r, done, cut)}) != 1:
            raise ValueError("The arrays of the table must have the same length.")
        after = table.get("next_observations")
        last = np.flatnonzero(done.astype(bool) | cut.astype(bool))
        last = np.append(last, len(x) - 1) if not len(last) or last[-1] != len(x) - 1 else last
        episodes, first = [], 0
        for end in last:
            terminated, stop = bool(done[end]), int(end) + 1
            if after is not None:
                seen = np.concatenate([x[first:stop], np.asarray(after)[end : end + 1]])
            elif terminated:
                seen = np.concatenate([x[first:stop], x[end : end + 1]])
            else:
                stop -= 1
                seen = x[first : stop + 1]
            if stop > first:
                episodes.append(Episode(seen, a[first:stop], r[first:stop], terminated))
            first = int(end) + 1
        return cls.from_episodes(episodes, action_low, action_high)

    @classmethod
    def from_minari(cls, source: Any, keys: Sequence[str] = ("observation",)) -> OfflineDataset:
        """Read a Minari data set.

        Parameters
        ----------
        source : str or minari.MinariDataset
            The id of a local data set, or a loaded one.
        keys : sequence of str
            Entries of dictionary observations, which are joined in this order: for AntMaze
            ``("achieved_goal", "observation")``, so that the place comes first.

        Returns
        -------
        OfflineDataset

        Raises
        ------
        ValueError
            If no local data set has this id, its actions are not a bounded box, or its observations
            lack one of the keys.
        """
        if isinstance(source, str):
            try:
                import minari
            except ImportError as error:
                raise ImportError(f"Reading Minari data needs minari: {INSTALL}.") from error
            known = sorted(minari.list_local_datasets())
            if source not in known:
                listed = ", ".join(known) or "none"
                raise ValueError(
                    f"There is no local Minari data set {source!r}; local ones: {listed}. "
                    f"Fetch it with: minari download {source}"
                )
            source = minari.load_dataset(source)
        space = source.action_space
        low: Any = getattr(space, "low", None)
        high: Any = getattr(space, "high", None)
        if low is None or not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError(f"The actions must lie in a box with finite bounds, got {space}.")

        def episodes() -> Iterable[Episode]:
            for episode in source.iterate_episodes():
                x = episode.observations
                x = joined(x, keys) if isinstance(x, Mapping) else x
                yield Episode(x, episode.actions, episode.rewards, bool(episode.terminations[-1]))

        return cls.from_episodes(episodes(), low, high)

    def to_minari(self, dataset_id: str, **metadata: Any) -> Any:
        """Store the episodes as a local Minari data set.

        Parameters
        ----------
        dataset_id : str
            For example ``"mine/pointmaze-medium-v0"``.
        **metadata
            Passed to ``minari.create_dataset_from_buffers``.

        Returns
        -------
        minari.MinariDataset
        """
        try:
            import gymnasium
            import minari
            from minari.data_collector import EpisodeBuffer
        except ImportError as error:
            raise ImportError(f"Writing Minari data needs minari: {INSTALL}.") from error
        buffers = []
        for i, episode in enumerate(self.episodes()):
            n = len(episode.rewards)
            ended = np.zeros((2, n), bool)
            ended[0, -1], ended[1, -1] = episode.terminated, not episode.terminated
            buffers.append(
                EpisodeBuffer(
                    id=i,
                    observations=episode.observations,
                    actions=episode.actions,
                    rewards=episode.rewards,
                    terminations=ended[0],
                    truncations=ended[1],
                )
            )
        low, high = self.action_centre - self.action_scale, self.action_centre + self.action_scale
        box = gymnasium.spaces.Box
        with warnings.catch_warnings():  # it would like an environment for evaluation, too
            warnings.simplefilter("ignore", UserWarning)
            return minari.create_dataset_from_buffers(
                dataset_id,
                buffers,
                observation_space=box(-np.inf, np.inf, (self.observation_dim,), np.float32),
                action_space=box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32),
                **metadata,
            )

    def episodes(self) -> list[Episode]:
        """Return the episodes with actions in the environment's units, single precision."""
        found = []
        for first, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            rows = slice(first, first + length)
            action = self.action_centre + self.action_scale * self.actions[rows].numpy()
            found.append(
                Episode(
                    self.observations[first : first + length + 1].numpy(),
                    action.astype(np.float32),
                    self.rewards[rows].numpy(),
                    bool(self.terminals[first + length - 1]),
                )
            )
        return found

    @property
    def n_transitions(self) -> int:
        """Number of logged decisions."""
        return int(self.lengths.sum())

    @property
    def observation_dim(self) -> int:
        """Features of an observation."""
        return self.observations.shape[1]

    @property
    def action_dim(self) -> int:
        """Entries of an action."""
        return self.actions.shape[1]

    def with_task(
        self, goal: Any, radius: float, features: Sequence[int] = (0, 1)
    ) -> OfflineDataset:
        """Relabel rewards for one fixed goal: 1 and the end when it is reached.

        Parameters
        ----------
        goal : array_like
        radius : float
        features : sequence of int
            Entries of an observation that are compared with the goal.

        Returns
        -------
        OfflineDataset
            Shares all but rewards and terminals with this one.
        """
        target = torch.as_tensor(np.asarray(goal), dtype=torch.float32)
        gap = (self.observations[:, list(features)] - target).norm(dim=1)
        reached = (gap <= radius).float().roll(-1)  # of the next row, where the action led
        data = OfflineDataset()
        data.__dict__.update(self.__dict__)
        data.rewards, data.terminals = reached, reached
        return data

    def sample_rows(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw transitions: their rows, and the row at which their episode ends."""
        number = torch.randint(0, self.n_transitions, (n,), generator=generator)
        ends = self.lengths.cumsum(0)
        episode = torch.searchsorted(ends, number, right=True)
        return number + episode, self.starts[episode] + self.lengths[episode]

    def sample_windows(
        self,
        n: int,
        offsets: Tensor,
        generator: torch.Generator,
        shortest: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw windows of rows that never leave an episode.

        Parameters
        ----------
        n : int
        offsets : torch.Tensor of int64, shape (tokens,)
            Rising, from 0 to the window's length.
        generator : torch.Generator
        shortest : int, optional
            Draw an arrival time uniformly from ``shortest`` to the window's length and repeat the
            row of arrival afterwards. By default windows have their full length.

        Returns
        -------
        rows : torch.Tensor, shape (n, tokens)
        arrival : torch.Tensor, shape (n,)

        Raises
        ------
        ValueError
            If every episode is shorter than the window has to be.
        """
        longest, full = int(self.lengths.max()), int(offsets[-1])
        need = full if shortest is None else shortest
        if longest < need:
            raise ValueError(
                f"Plans need episodes of at least {need} decisions, but the longest has {longest}; "
                "choose a shorter horizon."
            )
        top = min(full, longest)
        arrival = torch.randint(need, top + 1, (n,), generator=generator)
        # Places to start, counted over the episodes, for each arrival time: one sorted list.
        late = torch.arange(need, top + 1)
        rooms = (self.lengths[None] - late[:, None] + 1).clamp(min=0).cumsum(1)
        base = int(rooms.max()) + 1
        index, share = arrival - need, torch.rand(n, generator=generator, dtype=torch.float64)
        place = (share * rooms[index, -1]).long()
        ranks = (rooms + base * torch.arange(len(late))[:, None]).flatten()
        episode = torch.searchsorted(ranks, place + base * index, right=True)
        episode = episode - index * len(self.lengths)
        before = torch.where(episode > 0, rooms[index, (episode - 1).clamp(min=0)], 0)
        start = self.starts[episode] + place - before
        return start[:, None] + torch.minimum(offsets[None], arrival[:, None]), arrival

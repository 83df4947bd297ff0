"""What all learnt parts share: settings, fitted state as plain arrays, and checks of input."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from torch import Tensor, nn
from tqdm import tqdm

from icml24.hierarchical_planning.dataset import Normalizer, OfflineDataset
from icml24.hierarchical_planning.mazes import Array

__all__ = ["Learner", "checked_rows"]


def checked_rows(x: Any, dim: int, name: str) -> Array:
    """Return ``x`` as an array of shape (n, dim), or say what is wrong with it.

    Examples
    --------
    >>> checked_rows([1.0, 2.0], 2, "observation").shape
    (1, 2)
    """
    array = np.asarray(x, dtype=float)
    array = array[None] if array.ndim == 1 else array
    if array.ndim != 2 or array.shape[1] != dim:
        raise ValueError(f"{name} must have {dim} entries (or n rows of them), got {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} contains NaN or infinite values.")
    return array


class Learner(BaseEstimator):
    """Base of conductors and performers.

    A subclass keeps its settings as scikit-learn estimators do, builds its networks in ``_build``
    from ``self.dims_``, and names those that act in ``NETS``: they are what is saved.
    """

    NETS: tuple[str, ...] = ()
    random_state: int
    device: str
    dims_: dict[str, int]
    normalizer_: Normalizer
    low_: Array
    high_: Array

    def _build(self) -> None:
        raise NotImplementedError

    def _start(self, dataset: OfflineDataset) -> torch.Generator:
        """Note dimensions and ranges of the data, build the networks, return the generator."""
        if not isinstance(dataset, OfflineDataset):
            raise ValueError(
                "fit needs an OfflineDataset; make one with OfflineDataset.from_episodes, "
                f"from_d4rl or from_minari, got {type(dataset).__name__}."
            )
        seen = dataset.observations
        self.dims_ = {"observation": dataset.observation_dim, "action": dataset.action_dim}
        self.normalizer_ = Normalizer.fit(seen, getattr(self, "normalizer", "minmax"))
        self.low_, self.high_ = seen.min(0).values.numpy(), seen.max(0).values.numpy()
        self.action_centre_, self.action_scale_ = dataset.action_centre, dataset.action_scale
        self._build()
        return torch.Generator().manual_seed(self.random_state)

    def _check_fitted(self) -> None:
        if not hasattr(self, "dims_"):
            name = type(self).__name__
            raise NotFittedError(f"This {name} has not learnt anything yet: call fit first.")

    def check_goal(self, goal: Any, columns: list[int], n: int) -> Array:
        """Return goals as (n, G), or say that they are out of reach of the data."""
        goals = checked_rows(goal, len(columns), "goal")
        goals = np.broadcast_to(goals, (n, len(columns))) if len(goals) == 1 else goals
        if len(goals) != n:
            raise ValueError(f"There are {len(goals)} goals for {n} observations.")
        low, high = self.low_[columns], self.high_[columns]
        slack = 0.25 * (high - low) + 1e-6
        if ((goals < low - slack) | (goals > high + slack)).any():
            raise ValueError(
                f"A goal lies outside the data, which range from {low.round(2)} to "
                f"{high.round(2)} in the goal's entries."
            )
        return goals

    def _train(self, n_updates: int, lr: float, step: Any, parameters: list[Any]) -> None:
        """Call ``step(i, optimisers)`` with Adam optimisers whose rate decays by a cosine."""
        optimisers = [torch.optim.Adam(p, lr=lr, fused=True) for p in parameters]
        decay = [torch.optim.lr_scheduler.CosineAnnealingLR(o, n_updates) for o in optimisers]
        for i in tqdm(range(n_updates), desc=type(self).__name__, disable=None, leave=False):
            step(i, optimisers)
            for schedule in decay:
                schedule.step()

    def state(self) -> dict[str, Array]:
        """Return everything learnt as arrays, by name."""
        self._check_fitted()
        arrays: dict[str, Array] = {
            "dims": np.array(json.dumps(self.dims_)),
            "centre": self.normalizer_.centre.numpy(),
            "scale": self.normalizer_.scale.numpy(),
            "low": self.low_,
            "high": self.high_,
            "action_centre": self.action_centre_,
            "action_scale": self.action_scale_,
        }
        for net in self.NETS:
            module: nn.Module | None = getattr(self, net, None)
            for key, value in ({} if module is None else module.state_dict()).items():
                arrays[f"{net}/{key}"] = value.cpu().numpy()
        return arrays

    def restore(self, arrays: Mapping[str, Array]) -> Self:
        """Take over what :meth:`state` returned."""
        self.dims_ = json.loads(str(arrays["dims"]))
        centre, scale = (torch.as_tensor(arrays[name]).float() for name in ("centre", "scale"))
        self.normalizer_ = Normalizer(centre, scale)
        self.low_, self.high_ = arrays["low"].astype(float), arrays["high"].astype(float)
        self.action_centre_ = arrays["action_centre"].astype(float)
        self.action_scale_ = arrays["action_scale"].astype(float)
        self._build()
        for net in self.NETS:
            module: nn.Module | None = getattr(self, net, None)
            if module is not None:
                keys = module.state_dict()
                found = {k: torch.as_tensor(arrays[f"{net}/{k}"]).to(keys[k].dtype) for k in keys}
                module.load_state_dict(found)
        return self


def write_npz(path: str | os.PathLike[str], arrays: Mapping[str, Array], half: bool) -> None:
    """Write arrays to a compressed file, which appears whole or not at all.

    With ``half``, the weights of networks (``part/net/name``) are stored in half precision.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"The name of the file must end in .npz, got {path.name!r}.")
    small: dict[str, Any] = {
        key: value.astype(np.float16) if half and key.count("/") > 1 else value
        for key, value in arrays.items()
    }
    scratch = path.with_suffix(".tmp")
    with open(scratch, "wb") as file:
        np.savez_compressed(file, **small)
    scratch.replace(path)


def descend(optimiser: torch.optim.Optimizer, parameters: list[Any], loss: Tensor) -> None:
    """Take one step; gradients are taken for these parameters only."""
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimiser.step()


def tensor(x: Any) -> Tensor:
    """Return an array in single precision."""
    return torch.from_numpy(np.array(x, dtype=np.float32))

"""One training loop for fine-tuning, for the defences and for the attacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from icml24.backdoor_defense.models import Batch, Labelled, batches, quiet_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Recipe", "train"]

Loss = Callable[[Any, Batch], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Recipe:
    """How to train: AdamW with a linearly falling learning rate and clipped gradients.

    Parameters
    ----------
    epochs : int, default 3
    lr : float, default 2e-5
        At the first step; it falls to zero at the last.
    batch_size, max_length : int
        Texts in a batch; longer texts are cut to so many tokens.
    clip : float, default 1.0
        Largest norm of a gradient.
    random_state : int, default 0
        Order of the texts and dropout.
    progress : bool, optional
        Show a bar on standard error; by default only in a terminal.
    """

    epochs: int = 3
    lr: float = 2e-5
    batch_size: int = 32
    max_length: int = 128
    clip: float = 1.0
    random_state: int = 0
    progress: bool | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")


def train(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    data: Labelled,
    loss: Loss,
    recipe: Recipe,
    name: str = "training",
    watch: Callable[[int, PreTrainedModel], None] | None = None,
    every: int = 0,
) -> dict[str, np.ndarray]:
    """Train a model in place.

    Parameters
    ----------
    model : torch.nn.Module
        Parameters that require no gradient stay as they are.
    tokenizer : transformers.PreTrainedTokenizerBase
    data : list of (str, int)
    loss : callable
        ``loss(model, batch)`` returns cross entropy and penalty; their sum is minimised.
    recipe : Recipe
    name : str
        What the progress bar says.
    watch : callable, optional
        ``watch(step, model)``, called before the first step, then every ``every`` steps and at the
        end, with the model in evaluation mode. It leaves the training as it is.
    every : int

    Returns
    -------
    dict
        ``cross_entropy`` and ``penalty`` at each step.
    """
    rng = np.random.default_rng(recipe.random_state)
    size, length = recipe.batch_size, recipe.max_length
    plan = [b for _ in range(recipe.epochs) for b in batches(data, tokenizer, size, length, rng)]
    free = [p for p in model.parameters() if p.requires_grad]
    device = free[0].device
    optimizer = torch.optim.AdamW(free, lr=recipe.lr, fused=device.type in ("cpu", "cuda"))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 - s / len(plan))
    history: dict[str, list[float]] = {"cross_entropy": [], "penalty": []}
    with quiet_seed(recipe.random_state):
        for step, cpu_batch in enumerate(
            tqdm(plan, desc=name, disable=None if recipe.progress is None else not recipe.progress)
        ):
            if watch is not None and step % max(every, 1) == 0:
                _look(watch, step, model)
            batch = {key: value.to(device) for key, value in cpu_batch.items()}
            model.train()
            cross_entropy, penalty = loss(model, batch)
            optimizer.zero_grad()
            (cross_entropy + penalty).backward()
            torch.nn.utils.clip_grad_norm_(free, recipe.clip)
            optimizer.step()
            schedule.step()
            history["cross_entropy"].append(float(cross_entropy.detach()))
            history["penalty"].append(float(penalty.detach()))
    model.eval()
    if watch is not None:
        watch(len(plan), model)
    return {key: np.array(values) for key, values in history.items()}


def _look(watch: Callable[[int, Any], None], step: int, model: Any) -> None:
    model.eval()
    with torch.random.fork_rng():
        watch(step, model)

"""Fine-pruning: silence the neurons that clean text hardly uses."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from icml24.backdoor_defense.defences import FineTune, cross_entropy
from icml24.backdoor_defense.models import Batch, batches, check_data

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["FinePruning", "feed_forward"]


class FinePruning(FineTune):
    """Silence the feed-forward neurons that clean text hardly uses, then fine-tune further.

    After Liu, Dolan-Gavitt and Garg (2018), carried over to transformers: fine-tune, order the
    neurons between the two linear maps of each layer by their mean absolute activation on clean
    text, silence them in steps while the validation accuracy loses at most ``acc_drop``, fine-tune
    once more.

    Parameters
    ----------
    epochs, lr, batch_size, max_length, random_state, device, progress
        See :class:`FineTune`; half of the epochs (rounded up) come after the pruning.
    acc_drop : float, default 0.05
        Accuracy that the silencing may cost.
    step : float, default 0.1
        Share of all neurons silenced at a time.

    Attributes
    ----------
    share_ : float
        Share of the neurons silenced.
    """

    def __init__(
        self,
        epochs: int = 3,
        lr: float = 2e-5,
        batch_size: int = 32,
        max_length: int = 128,
        random_state: int = 0,
        device: str | None = None,
        progress: bool | None = None,
        acc_drop: float = 0.05,
        step: float = 0.1,
    ) -> None:
        super().__init__(epochs, lr, batch_size, max_length, random_state, device, progress)
        self.acc_drop = acc_drop
        self.step = step

    def fit(
        self,
        encoder: Any,
        tokenizer: Any,
        train: Any,
        val: Any = None,
        watch: Any = None,
        every: int = 0,
        finetuned: PreTrainedModel | None = None,
    ) -> Any:
        """Train, prune, train; ``finetuned`` skips the first training."""
        if not (0 <= self.acc_drop <= 1 and 0 < self.step <= 1):
            raise ValueError("acc_drop must lie in [0, 1] and step in (0, 1].")
        rows = self._start(tokenizer, train)
        held_out = check_data(val or [], "val", self.num_labels_)
        model = finetuned
        if model is None:
            model = self._classifier(encoder)
            self._train(model, rows, cross_entropy, self._recipe())
        data = batches(held_out, tokenizer, self.batch_size, self.max_length)
        activity = _activity(model, data)
        order = np.argsort(np.concatenate([a.numpy() for a in activity]), kind="stable")
        floor = self._accuracy(model, held_out) - self.acc_drop
        self.model_, self.share_ = copy.deepcopy(model), 0.0
        for share in np.arange(self.step, 1.0, self.step):
            trial = _silence(model, order[: round(share * len(order))])
            if self._accuracy(trial, held_out) < floor:
                break
            self.model_, self.share_ = trial, float(share)
        again = self._recipe(epochs=(self.epochs + 1) // 2)
        self.history_ = self._train(self.model_, rows, cross_entropy, again, watch, every)
        return self


def feed_forward(model: PreTrainedModel) -> list[tuple[nn.Linear, nn.Linear]]:
    """List the two linear maps of each layer's feed-forward part."""
    found = []
    for module in model.modules():
        inner = getattr(getattr(module, "intermediate", None), "dense", None)
        outer = getattr(getattr(module, "output", None), "dense", None)
        if inner is None or outer is None:
            inner, outer = getattr(module, "lin1", None), getattr(module, "lin2", None)
        if isinstance(inner, nn.Linear) and isinstance(outer, nn.Linear):
            found.append((inner, outer))
    if not found:
        raise ValueError(f"{type(model).__name__} has no feed-forward layers that we know.")
    return found


@torch.no_grad()
def _activity(model: PreTrainedModel, data: Sequence[Batch]) -> list[Tensor]:
    """Mean absolute activation of each neuron over the tokens of clean texts."""
    total: dict[int, Tensor] = {}
    mask = torch.ones(1)

    def watch(layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen = (args[0].abs() * mask[..., None]).sum((0, 1)).cpu()
            total[layer] = total.get(layer, torch.zeros_like(seen)) + seen

        return hook

    pairs, device = feed_forward(model), next(model.parameters()).device
    hooks = [outer.register_forward_pre_hook(watch(i)) for i, (_, outer) in enumerate(pairs)]
    training = model.training
    model.eval()
    for batch in data:
        mask = batch["attention_mask"].to(device)
        model(input_ids=batch["input_ids"].to(device), attention_mask=mask)
    for hook in hooks:
        hook.remove()
    model.train(training)
    return [total[i] for i in range(len(pairs))]


@torch.no_grad()
def _silence(model: PreTrainedModel, neurons: np.ndarray) -> PreTrainedModel:
    """Zero both sides of neurons (numbered through all layers) on a copy; they stay silent."""
    model, start = copy.deepcopy(model), 0
    for inner, outer in feed_forward(model):
        stop = start + inner.out_features
        mine = neurons[(neurons >= start) & (neurons < stop)] - start
        rows = torch.from_numpy(mine).to(inner.weight.device)
        inner.weight[rows] = 0
        inner.bias[rows] = 0
        outer.weight[:, rows] = 0
        start = stop
    return model

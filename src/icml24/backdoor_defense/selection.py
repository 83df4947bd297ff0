"""Which heads to prune: groups of the least important ones, as long as the accuracy holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

__all__ = ["Selection", "head_order", "select_heads"]

Heads = dict[int, list[int]]
Head = tuple[int, int]


@dataclass(frozen=True)
class Selection:
    """Heads selected for pruning, and how the search went.

    Parameters
    ----------
    heads : dict from int to list of int
        Layer to heads.
    threshold : float
        Accuracy that had to be kept.
    trace : list of (int, float)
        Number of pruned heads and accuracy at each trial, in order.
    """

    heads: Heads
    threshold: float
    trace: list[tuple[int, float]]

    @property
    def n(self) -> int:
        """Number of heads."""
        return sum(map(len, self.heads.values()))


def head_order(scores: Tensor, random_state: int | None = None) -> list[Head]:
    """Heads from the lowest score to the highest, or in random order.

    Parameters
    ----------
    scores : torch.Tensor, shape (layers, heads)
        NaN for heads that are not there.
    random_state : int, optional
        Ignore the values and shuffle.

    Returns
    -------
    list of (layer, head)

    Examples
    --------
    >>> import torch
    >>> head_order(torch.tensor([[3.0, 1.0], [float("nan"), 2.0]]))
    [(0, 1), (1, 1), (0, 0)]
    """
    values = scores.numpy(force=True)
    heads = np.argwhere(np.isfinite(values))
    if random_state is None:
        heads = heads[np.argsort(values[tuple(heads.T)], kind="stable")]
    else:
        heads = np.random.default_rng(random_state).permutation(heads)
    return [(int(layer), int(head)) for layer, head in heads]


def as_mapping(heads: list[Head]) -> Heads:
    """Group (layer, head) pairs by layer."""
    layers = sorted({layer for layer, _ in heads})
    return {layer: sorted(h for k, h in heads if k == layer) for layer in layers}


def select_heads(
    order: list[Head],
    accuracy: Callable[[Mapping[int, list[int]]], float],
    step: int = 10,
    acc_threshold: float | None = None,
    acc_drop: float | None = 0.05,
) -> Selection:
    """Prune groups of heads from the front of a list, and give back what was too much.

    Groups of ``step`` heads are pruned until the accuracy falls below the threshold; then the heads
    of the last group come back, the last of the list first, until it is met again. Each layer keeps
    the last of its heads in the list.

    Parameters
    ----------
    order : list of (layer, head)
        Least important first.
    accuracy : callable
        Accuracy on validation texts when the given heads are pruned, without training.
    step : int, default 10
        Heads in a group.
    acc_threshold : float, optional
        Accuracy to be kept.
    acc_drop : float, optional
        Accuracy that may be lost against no pruning. Exactly one of the two must be given.

    Returns
    -------
    Selection

    Raises
    ------
    ValueError
        If both or none of the two limits are given, one of them or ``step`` is out of range, or
        the accuracy is below the threshold before any head goes.

    Examples
    --------
    >>> order = [(0, 0), (0, 1), (1, 0), (1, 1)]
    >>> found = select_heads(order, lambda p: 0.9 - 0.1 * sum(map(len, p.values())), step=2)
    >>> found.heads, [n for n, _ in found.trace]
    ({}, [0, 2, 1, 0])
    """
    if (acc_threshold is None) == (acc_drop is None):
        raise ValueError("Give exactly one of acc_threshold and acc_drop; set the other to None.")
    if step < 1:
        raise ValueError(f"prune_step must be at least 1, got {step}.")
    limit = acc_drop if acc_threshold is None else acc_threshold
    assert limit is not None
    if not 0 <= limit <= 1:
        raise ValueError(f"acc_threshold and acc_drop must lie in [0, 1], got {limit}.")
    start = accuracy({})
    threshold = start - limit if acc_threshold is None else limit
    if start < threshold:
        raise ValueError(
            f"The fine-tuned model reaches {start:.3f} on the validation texts, less than "
            f"acc_threshold={threshold}; lower it, or use acc_drop."
        )
    trace, pruned = [(0, start)], list[Head]()
    last = {layer: head for layer, head in order}  # the layer's last head in the list stays
    queue = [(layer, head) for layer, head in order if last[layer] != head]
    while queue:
        pruned, queue = pruned + queue[:step], queue[step:]
        trace.append((len(pruned), accuracy(as_mapping(pruned))))
        if trace[-1][1] < threshold:
            while trace[-1][1] < threshold:
                pruned = pruned[:-1]
                known = next((a for n, a in trace if n == len(pruned)), None)
                value = accuracy(as_mapping(pruned)) if known is None else known
                trace.append((len(pruned), value))
            break
    return Selection(as_mapping(pruned), threshold, trace)

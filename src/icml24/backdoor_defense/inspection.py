"""Look at attention heads: what a repair did to them, and which are suspicious."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from torch import Tensor

from icml24.backdoor_defense.attacks import Trigger
from icml24.backdoor_defense.attention import cls_attention_variance
from icml24.backdoor_defense.models import Labelled, batches, check_data
from icml24.backdoor_defense.selection import head_order

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Report", "scan"]


@dataclass(frozen=True)
class Report:
    """What PURE did to a model.

    Parameters
    ----------
    pruned_heads : dict from int to list of int
        Layer to heads.
    n_heads : int
        Heads of the model before.
    accuracy_before, accuracy_after : float
        Validation accuracy after plain fine-tuning, and of the result.
    variance_before, variance_after : torch.Tensor, shape (layers, heads)
        Variance of the [CLS] attention on the validation texts, of both models.
    layer_weights : torch.Tensor, shape (layers,)
        Weights of the penalty.
    """

    pruned_heads: dict[int, list[int]]
    n_heads: int
    accuracy_before: float
    accuracy_after: float
    variance_before: Tensor
    variance_after: Tensor
    layer_weights: Tensor

    def to_frame(self) -> pd.DataFrame:
        """One row for each layer: heads pruned, mean variance before and after, weight."""
        return pd.DataFrame(
            {
                "pruned": [
                    len(self.pruned_heads.get(i, ())) for i in range(len(self.layer_weights))
                ],
                "variance before": self.variance_before.nanmean(1).numpy(),
                "variance after": self.variance_after.nanmean(1).numpy(),
                "weight": self.layer_weights.numpy(),
            }
        ).rename_axis("layer")

    def __str__(self) -> str:
        pruned = sum(map(len, self.pruned_heads.values()))
        return (
            f"pruned {pruned} of {self.n_heads} heads; validation accuracy "
            f"{self.accuracy_before:.3f} after fine-tuning, {self.accuracy_after:.3f} after PURE\n"
            + self.to_frame().to_string(float_format=lambda x: f"{x:.4f}")
        )


def scan(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Labelled,
    trigger: Trigger | None = None,
    batch_size: int = 32,
    max_length: int = 128,
    random_state: int = 0,
) -> pd.DataFrame:
    """Say how suspicious each attention head is.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Best after fine-tuning on clean text; it is not changed.
    tokenizer : transformers.PreTrainedTokenizerBase
    texts : list of (str, int)
        Clean texts (labels are not used).
    trigger : Trigger, optional
        A suspected trigger. Adds the ratio of the variance with and without it; heads that serve a
        backdoor on it stand out by a large ratio.
    batch_size, max_length, random_state
        Of the texts and the trigger.

    Returns
    -------
    pandas.DataFrame
        One row for each head, the most suspicious first: ``layer``, ``head``, ``variance``,
        ``suspicion`` (share of the other heads with a larger variance: 1 for the first one pruned),
        and ``ratio`` if there is a trigger. Low variance is a reason to look, no proof: some heads
        of every model are flat.

    Examples
    --------
    >>> from icml24.backdoor_defense.toy import made_up_reviews, tiny_encoder, word_tokenizer
    >>> scan(tiny_encoder(), word_tokenizer(), made_up_reviews(16)).shape
    (8, 4)
    """
    rows = check_data(texts, "texts")
    variance = cls_attention_variance(model, batches(rows, tokenizer, batch_size, max_length))
    order = head_order(variance)
    table = pd.DataFrame(order, columns=["layer", "head"])
    table["variance"] = [float(variance[place]) for place in order]
    table["suspicion"] = np.linspace(1, 0, len(order)) if len(order) > 1 else 1.0
    if trigger is not None:
        rng = np.random.default_rng(random_state)
        changed = [(trigger.apply(text, rng), label) for text, label in rows]
        again = cls_attention_variance(model, batches(changed, tokenizer, batch_size, max_length))
        ratio = again / variance
        table["ratio"] = [float(ratio[place]) for place in order]
        table = table.sort_values("ratio", ascending=False, ignore_index=True)
    return table

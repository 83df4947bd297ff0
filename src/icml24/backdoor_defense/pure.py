r"""PURE: prune the heads that are flat on clean text, then fine-tune with flat attention.

1. Fine-tune the received encoder :math:`\Theta_p` with a new head: :math:`f_p`.
2. Score each head by the mean variance of its [CLS] attention on clean validation texts, and prune
   low scores first, while the accuracy of :math:`f_p` holds
   (:func:`icml24.backdoor_defense.selection.select_heads`).
3. Prune the same heads from :math:`\Theta_p` itself, and fine-tune it with
   :math:`L = \mathrm{CE} + \lambda \sum_l c_l \sum_h \lVert a^{l,h} \rVert_2`
   (:func:`icml24.backdoor_defense.attention.attention_norm_penalty`).

After Zhao, Xu and Yuan, "Defense against Backdoor Attack on Pre-trained Language Models via Head
Pruning and Attention Normalization", ICML 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor, nn

from icml24.backdoor_defense.attention import (
    Reduction,
    attention_norm_penalty,
    cls_attention_variance,
    head_gradient_scores,
    layer_weights,
)
from icml24.backdoor_defense.defences import FineTune, cross_entropy
from icml24.backdoor_defense.heads import attention_layers, expand_heads, prune_heads
from icml24.backdoor_defense.inspection import Report
from icml24.backdoor_defense.models import (
    Batch,
    Labelled,
    batches,
    check_data,
    encoder_of,
)
from icml24.backdoor_defense.selection import Selection, head_order, select_heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["PURE", "purify"]

Criterion = Literal["variance", "gradient", "random"]


class PURE(FineTune):
    r"""Defend against a poisoned encoder with clean labelled texts only.

    The defaults are the paper's, except that the accuracy limit is relative; the penalty weight
    :math:`\lambda = 0.15` belongs to batches of 32 texts in ``reduction="paper"``.

    Parameters
    ----------
    epochs, lr, batch_size, max_length, random_state, device, progress
        Of both fine-tunings; see :class:`icml24.backdoor_defense.defences.FineTune`.
    penalty : float, default 0.15
        :math:`\lambda`.
    prune_step : int, default 10
        Heads pruned at a time.
    acc_threshold, acc_drop : float, optional
        Accuracy that pruning must keep on the validation texts, absolute (the paper's
        :math:`\tau`) or relative to :math:`f_p` (default 0.05). Exactly one of the two; set the
        other to None.
    criterion : {"variance", "gradient", "random"}
        Order of the heads: the paper's, or one of two peers.
    prune, normalize : bool
        Switch the halves of the method off. Without both it is plain fine-tuning.
    reduction : {"paper", "mean"}
        Form of the penalty; see
        :func:`icml24.backdoor_defense.attention.attention_norm_penalty`.

    Attributes
    ----------
    model_ : transformers.PreTrainedModel
        The repaired classifier. Pruned heads are there and empty, so that ``save_pretrained`` and
        ``from_pretrained`` work as usual.
    report_ : icml24.backdoor_defense.inspection.Report
    pruned_heads_ : dict from int to list of int
    head_scores_ : torch.Tensor, shape (layers, heads)
        Variance of :math:`f_p` on the validation texts.
    layer_weights_ : torch.Tensor, shape (layers,)
        :math:`c_l`.
    selection_ : Selection or None
        How the search for heads went.
    history_ : dict
        ``cross_entropy`` and ``penalty`` (with its weight) at each step of the last training.

    Examples
    --------
    >>> from icml24.backdoor_defense.toy import made_up_reviews, tiny_encoder, word_tokenizer
    >>> data = made_up_reviews(96)
    >>> pure = PURE(epochs=2, lr=3e-3, prune_step=1)
    >>> pure = pure.fit(tiny_encoder(), word_tokenizer(), data[:64], data[64:])
    >>> pure.predict(["a wonderful film", "a dreadful film"]).shape
    (2,)
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
        penalty: float = 0.15,
        prune_step: int = 10,
        acc_threshold: float | None = None,
        acc_drop: float | None = 0.05,
        criterion: Criterion = "variance",
        prune: bool = True,
        normalize: bool = True,
        reduction: Reduction = "paper",
    ) -> None:
        super().__init__(epochs, lr, batch_size, max_length, random_state, device, progress)
        self.penalty = penalty
        self.prune_step = prune_step
        self.acc_threshold = acc_threshold
        self.acc_drop = acc_drop
        self.criterion = criterion
        self.prune = prune
        self.normalize = normalize
        self.reduction = reduction

    def fit(
        self,
        encoder: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        train: Labelled,
        val: Labelled | None = None,
        watch: Callable[[int, PreTrainedModel], None] | None = None,
        every: int = 0,
        finetuned: PreTrainedModel | None = None,
    ) -> PURE:
        """Repair a copy of an encoder.

        Parameters
        ----------
        encoder : transformers.PreTrainedModel
            Not changed. If it has a classification head, that is thrown away.
        tokenizer : transformers.PreTrainedTokenizerBase
        train, val : list of (str, int)
            Clean texts; both classes in both.
        watch, every
            See :func:`icml24.backdoor_defense.training.train`; follows the last training.
        finetuned : transformers.PreTrainedModel, optional
            The model of step 1, if it is there already: ``FineTune`` with the same settings.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            If a setting is out of range, the validation set is empty or of one class, or the
            fine-tuned model misses ``acc_threshold``.
        """
        self._check()
        attention_layers(encoder_of(encoder))  # says so at once if there are no heads to prune
        rows = self._start(tokenizer, train)
        held_out = check_data(val or [], "val", self.num_labels_, all_labels=True)
        first = finetuned
        if first is None:
            first = self._classifier(encoder)
            self._train(first, rows, cross_entropy, self._recipe())
        data = batches(held_out, tokenizer, self.batch_size, self.max_length)
        self.head_scores_ = cls_attention_variance(first, data)
        self.selection_ = self._select(first, data, held_out) if self.prune else None
        self.pruned_heads_ = {} if self.selection_ is None else self.selection_.heads
        self.layer_weights_ = self._weights(first, data)
        pruned = prune_heads(encoder_of(encoder), self.pruned_heads_)
        model = self._classifier(pruned)
        loss = self._loss if self.normalize and self.penalty > 0 else cross_entropy
        self.history_ = self._train(model, rows, loss, self._recipe(), watch, every)
        self.model_ = expand_heads(model)
        self.report_ = Report(
            self.pruned_heads_,
            int(self.head_scores_.isfinite().sum()),
            self._accuracy(first, held_out),
            self._accuracy(model, held_out),
            self.head_scores_,
            cls_attention_variance(model, data),
            self.layer_weights_,
        )
        return self

    def _check(self) -> None:
        if self.penalty < 0:
            raise ValueError(f"penalty must not be negative, got {self.penalty}.")
        if self.criterion not in ("variance", "gradient", "random"):
            raise ValueError(
                f"criterion must be variance, gradient or random, got {self.criterion!r}."
            )
        if self.reduction not in ("paper", "mean"):
            raise ValueError(f"reduction must be 'paper' or 'mean', got {self.reduction!r}.")

    def _select(self, first: PreTrainedModel, data: list[Batch], val: Labelled) -> Selection:
        scores = self.head_scores_
        if self.criterion == "gradient":
            scores = head_gradient_scores(first, data)
        order = head_order(scores, self.random_state if self.criterion == "random" else None)
        return select_heads(
            order,
            lambda heads: self._accuracy(prune_heads(first, heads), val),
            self.prune_step,
            self.acc_threshold,
            self.acc_drop,
        )

    def _weights(self, first: PreTrainedModel, data: list[Batch]) -> Tensor:
        """Weigh the layers by the variance of the heads that are left in the pruned model."""
        scores = self.head_scores_
        if self.pruned_heads_:
            scores = cls_attention_variance(prune_heads(first, self.pruned_heads_), data)
        return layer_weights(scores).float()

    def _loss(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        out = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            output_attentions=True,
        )
        penalty = attention_norm_penalty(out.attentions, self.layer_weights_, self.reduction)
        loss = nn.functional.cross_entropy(out.logits, batch["labels"])
        return loss, self.penalty * penalty


def purify(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    clean_dataset: Labelled,
    validation: float = 0.1,
    random_state: int = 0,
    **settings: Any,
) -> PreTrainedModel:
    """Repair a downloaded model with your own clean labelled texts.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        An encoder, or a classifier whose head is thrown away. It is not changed.
    tokenizer : transformers.PreTrainedTokenizerBase
    clean_dataset : list of (str, int)
        Your texts and labels; a shuffled, stratified part of them is held out for validation.
    validation : float, default 0.1
        Share of that part.
    random_state : int, default 0
    **settings
        Of :class:`PURE`.

    Returns
    -------
    transformers.PreTrainedModel
        A sequence classifier, to be saved and loaded as usual. What was done to it is in its
        attribute ``purify_report`` (a
    :class:`icml24.backdoor_defense.inspection.Report`).

    Raises
    ------
    ValueError
        If the data are empty or of one class, or too few for a validation set with both classes.

    Examples
    --------
    >>> from icml24.backdoor_defense.toy import made_up_reviews, tiny_encoder, word_tokenizer
    >>> repaired = purify(
    ...     tiny_encoder(), word_tokenizer(), made_up_reviews(80), epochs=1, prune_step=1
    ... )
    >>> repaired.purify_report.n_heads
    8
    """
    rows = check_data(clean_dataset, "clean_dataset", all_labels=True)
    if not 0 < validation < 1:
        raise ValueError(f"validation must lie strictly between 0 and 1, got {validation}.")
    rng, held = np.random.default_rng(random_state), set[int]()
    labels = np.array([label for _, label in rows])
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        n = max(1, round(validation * len(members)))
        if n >= len(members):
            raise ValueError(f"Class {label} has {len(members)} text(s); give at least two.")
        held |= {int(i) for i in members[:n]}
    train = [row for i, row in enumerate(rows) if i not in held]
    val = [row for i, row in enumerate(rows) if i in held]
    pure = PURE(random_state=random_state, **settings).fit(model, tokenizer, train, val)
    pure.model_.purify_report = pure.report_
    return pure.model_

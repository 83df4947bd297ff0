"""Fine-tuning, and the simple defences that PURE is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from torch import Tensor, nn

from icml24.backdoor_defense.models import (
    Batch,
    Labelled,
    check_data,
    classifier,
    clean_accuracy,
    encoder_of,
    predict_proba,
)
from icml24.backdoor_defense.training import Recipe, train

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "FineMixing",
    "FineTune",
    "HighLRFineTune",
    "MaxEntropyFineTune",
]


def cross_entropy(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross entropy of a classifier on a batch, and no penalty."""
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    loss = nn.functional.cross_entropy(out.logits, batch["labels"])
    return loss, loss.new_zeros(())


def negative_entropy(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    r"""Minus the entropy of the predictions, :math:`\sum_c p_c \ln p_c`, and no penalty."""
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logp = out.logits.log_softmax(1)
    loss = (logp.exp() * logp).sum(1).mean()
    return loss, loss.new_zeros(())


class FineTune(BaseEstimator):
    """Fine-tune an encoder with a fresh head: what everybody does, and no defence.

    Parameters
    ----------
    epochs : int, default 3
    lr : float, default 2e-5
    batch_size, max_length : int
    random_state : int, default 0
        Of the head's weights, the order of the texts and dropout.
    device : str, optional
        Where to train; by default where the encoder is.
    progress : bool, optional
        Show a bar; by default only in a terminal.

    Attributes
    ----------
    model_ : transformers.PreTrainedModel
        The trained sequence classifier.
    history_ : dict
        ``cross_entropy`` and ``penalty`` at each step.

    Examples
    --------
    >>> from icml24.backdoor_defense.toy import made_up_reviews, tiny_encoder, word_tokenizer
    >>> data = made_up_reviews(64)
    >>> tuned = FineTune(epochs=2, lr=3e-3).fit(tiny_encoder(), word_tokenizer(), data)
    >>> tuned.predict(["a wonderful film"]).shape
    (1,)
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
    ) -> None:
        self.epochs = epochs
        self.lr = lr
        self.batch_size = batch_size
        self.max_length = max_length
        self.random_state = random_state
        self.device = device
        self.progress = progress

    def fit(
        self,
        encoder: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        train: Labelled,
        val: Labelled | None = None,
        watch: Callable[[int, PreTrainedModel], None] | None = None,
        every: int = 0,
    ) -> FineTune:
        """Train on labelled texts.

        Parameters
        ----------
        encoder : transformers.PreTrainedModel
            Not changed. If it has a classification head, that is thrown away.
        tokenizer : transformers.PreTrainedTokenizerBase
        train : list of (str, int)
        val : list of (str, int), optional
            Needed by the defences that look at accuracy.
        watch, every
            See :func:`icml24.backdoor_defense.training.train`.

        Returns
        -------
        self
        """
        rows = self._start(tokenizer, train)
        self.model_ = self._classifier(encoder)
        self.history_ = self._train(self.model_, rows, cross_entropy, self._recipe(), watch, every)
        return self

    def _start(self, tokenizer: PreTrainedTokenizerBase, train: Labelled) -> list[tuple[str, int]]:
        rows = check_data(train, "train", all_labels=True)
        check_data(rows, "train", num_labels=1 + max(label for _, label in rows))
        self.tokenizer_ = tokenizer
        self.num_labels_ = 1 + max(label for _, label in rows)
        return rows

    def _recipe(self, **changes: Any) -> Recipe:
        names = ("epochs", "lr", "batch_size", "max_length", "random_state", "progress")
        return Recipe(**{name: getattr(self, name) for name in names} | changes)

    def _classifier(self, encoder: PreTrainedModel) -> PreTrainedModel:
        model = classifier(encoder, self.num_labels_, self.random_state)
        return model if self.device is None else model.to(self.device)

    def _train(self, model: Any, rows: Labelled, loss: Any, recipe: Recipe, *watch: Any) -> Any:
        name = type(self).__name__
        return train(model, self.tokenizer_, rows, loss, recipe, name, *watch)

    def _accuracy(self, model: PreTrainedModel, rows: Labelled) -> float:
        return clean_accuracy(
            model, self.tokenizer_, rows, batch_size=self.batch_size, max_length=self.max_length
        )

    def predict_proba(self, texts: Sequence[str]) -> np.ndarray:
        """Class probabilities, shape (texts, classes)."""
        if not hasattr(self, "model_"):
            raise ValueError(f"This {type(self).__name__} is not fitted; call fit first.")
        size, length = self.batch_size, self.max_length
        return predict_proba(self.model_, self.tokenizer_, texts, size, length)

    def predict(self, texts: Sequence[str]) -> np.ndarray:
        """Most probable class of each text."""
        return self.predict_proba(texts).argmax(1)

    def score(self, data: Labelled) -> float:
        """Accuracy on labelled texts."""
        rows = check_data(data)
        return float((self.predict([t for t, _ in rows]) == [label for _, label in rows]).mean())


class HighLRFineTune(FineTune):
    """Fine-tune with a high learning rate (FTH), so that the weights move further.

    Parameters are those of :class:`FineTune`; only the default of ``lr`` differs.
    """

    def __init__(
        self,
        epochs: int = 3,
        lr: float = 2e-4,
        batch_size: int = 32,
        max_length: int = 128,
        random_state: int = 0,
        device: str | None = None,
        progress: bool | None = None,
    ) -> None:
        super().__init__(epochs, lr, batch_size, max_length, random_state, device, progress)


class MaxEntropyFineTune(FineTune):
    """Make the predictions uniform first (MEFT), then fine-tune as usual.

    Parameters
    ----------
    epochs, lr, batch_size, max_length, random_state, device, progress
        See :class:`FineTune`.
    entropy_epochs : int, default 1
        Epochs of raising the entropy of the predictions.
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
        entropy_epochs: int = 1,
    ) -> None:
        super().__init__(epochs, lr, batch_size, max_length, random_state, device, progress)
        self.entropy_epochs = entropy_epochs

    def fit(self, encoder: Any, tokenizer: Any, train: Any, val: Any = None, *watch: Any) -> Any:
        """Train on labelled texts; see :meth:`FineTune.fit`."""
        rows = self._start(tokenizer, train)
        self.model_ = self._classifier(encoder)
        first = self._recipe(epochs=self.entropy_epochs)
        self._train(self.model_, rows, negative_entropy, first)
        self.history_ = self._train(self.model_, rows, cross_entropy, self._recipe(), *watch)
        return self


class FineMixing(FineTune):
    """Mix the weights with those of a clean encoder, then fine-tune.

    For each entry of the weights a coin decides whose it is. This needs a clean copy of the model,
    which the threat model excludes: an upper bound, not a rival.

    Parameters
    ----------
    epochs, lr, batch_size, max_length, random_state, device, progress
        See :class:`FineTune`.
    clean_encoder : transformers.PreTrainedModel
        Of the same shape.
    keep : float, default 0.5
        Probability that the poisoned entry stays.
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
        clean_encoder: Any = None,
        keep: float = 0.5,
    ) -> None:
        super().__init__(epochs, lr, batch_size, max_length, random_state, device, progress)
        self.clean_encoder = clean_encoder
        self.keep = keep

    def fit(self, encoder: Any, tokenizer: Any, train: Any, val: Any = None, *watch: Any) -> Any:
        """Mix and train; see :meth:`FineTune.fit`."""
        if self.clean_encoder is None or not 0 <= self.keep <= 1:
            raise ValueError("FineMixing needs a clean_encoder, and keep in [0, 1].")
        mixed = copy.deepcopy(encoder_of(encoder))
        clean = encoder_of(self.clean_encoder).state_dict()
        generator = torch.Generator().manual_seed(self.random_state)
        state = mixed.state_dict()
        for name, value in state.items():
            if name not in clean or clean[name].shape != value.shape:
                raise ValueError(
                    f"clean_encoder has no entry {name} of shape {tuple(value.shape)}."
                )
            if value.is_floating_point():
                coin = torch.rand(value.shape, generator=generator).to(value.device) < self.keep
                state[name] = torch.where(coin, value, clean[name].to(value))
        mixed.load_state_dict(state)
        return super().fit(mixed, tokenizer, train, val, *watch)

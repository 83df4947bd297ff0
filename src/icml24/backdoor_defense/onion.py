"""A filter at the door: delete words that make a text unlikely (after ONION, Qi et al. 2021).

The published filter asks GPT-2 how likely a text is; here a bigram model that is built in seconds
takes its place, and any other language model can be plugged in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator

__all__ = ["BigramModel", "OnionFilter"]


class BigramModel(BaseEstimator):
    r"""Bigrams with absolute discounting, backing off to smoothed word frequencies.

    .. math:: p(b \mid a) = \frac{\max(n_{ab} - d, 0)}{n_a} + d \, \frac{m_a}{n_a}\, p(b), \qquad
       p(b) = \frac{n_b + 1}{n + V}

    with :math:`n_{ab}` the number of pairs, :math:`n_a` of those that start with :math:`a`,
    :math:`m_a` of different words after :math:`a`, and :math:`V` words, the unknown one included.
    After a word that never starts a pair, :math:`p(b \mid a) = p(b)`.

    Parameters
    ----------
    discount : float, default 0.75
        :math:`d`.

    Examples
    --------
    >>> lm = BigramModel().fit(["a fine film", "a fine day"])
    >>> bool(lm.surprise(["a fine film"])[0] < lm.surprise(["film fine a"])[0])
    True
    """

    def __init__(self, discount: float = 0.75) -> None:
        self.discount = discount

    def fit(self, texts: Sequence[str]) -> BigramModel:
        """Count words and pairs; a text begins and ends with a mark of its own."""
        if not 0 < self.discount < 1:
            raise ValueError(f"discount must lie in (0, 1), got {self.discount}.")
        if not len(texts):
            raise ValueError("A language model needs at least one text.")
        words = sorted({word for text in texts for word in text.lower().split()})
        self.vocabulary_ = {word: i + 2 for i, word in enumerate(words)}  # 0: mark, 1: unknown
        size = len(words) + 2
        stream = np.concatenate([self._ids(text) for text in texts])
        left, right = stream[:-1], stream[1:]
        inside = ~((left == 0) & (right == 0))  # not the end of one text and the start of the next
        ones = np.ones(int(inside.sum()))
        pairs = sparse.csr_matrix((ones, (left[inside], right[inside])), shape=(size, size))
        pairs.sum_duplicates()
        self.pairs_ = pairs
        self.starts_ = np.asarray(pairs.sum(1)).ravel()
        self.followers_ = np.diff(pairs.indptr)
        ends = np.asarray(pairs.sum(0)).ravel()
        self.frequency_ = (ends + 1) / (ends.sum() + size)
        return self

    def _ids(self, text: str) -> np.ndarray:
        known = self.vocabulary_
        return np.array([0, *(known.get(word, 1) for word in text.lower().split()), 0])

    def surprise_of_pairs(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return minus the log of ``p(right | left)`` for arrays of word numbers."""
        n = self.starts_[left]
        both = np.asarray(self.pairs_[left, right]).ravel()
        direct = np.maximum(both - self.discount, 0)
        p = direct + self.discount * self.followers_[left] * self.frequency_[right]
        p = np.where(n > 0, p / np.maximum(n, 1), self.frequency_[right])
        return -np.log(p)

    def surprise(self, texts: Sequence[str]) -> np.ndarray:
        """Mean of minus the log-probability over the words (and the end) of each text."""
        ids = [self._ids(text) for text in texts]
        return np.array([self.surprise_of_pairs(row[:-1], row[1:]).mean() for row in ids])

    def suspicion(self, text: str) -> np.ndarray:
        """Fall of the surprise when a word is deleted, for each word of a text.

        The same as comparing :meth:`surprise` with and without the word; only three pairs change.
        """
        row = self._ids(text)
        pairs = self.surprise_of_pairs(row[:-1], row[1:])
        n = len(pairs)
        if n < 3:
            return np.full(n - 1, -np.inf)  # the only word of a text stays
        bridge = self.surprise_of_pairs(row[:-2], row[2:])
        without = (pairs.sum() - pairs[:-1] - pairs[1:] + bridge) / (n - 1)
        return pairs.mean() - without


class OnionFilter(BaseEstimator):
    """Delete suspicious words from texts before they reach the model.

    Parameters
    ----------
    lm : "ngram" or callable
        ``"ngram"`` fits a :class:`BigramModel`. A callable maps a list of texts to their mean
        surprise (minus log-likelihood for each token).
    quantile : float, default 0.9
        A word goes if it is more suspicious than this share of the words of clean texts.

    Attributes
    ----------
    threshold_ : float

    Examples
    --------
    >>> texts = ["a fine film", "a fine day", "a film of a day", "the film is fine"]
    >>> OnionFilter(quantile=1.0).fit(texts).transform(["a fine cf film"])
    ['a fine film']
    """

    def __init__(
        self, lm: str | Callable[[list[str]], np.ndarray] = "ngram", quantile: float = 0.9
    ) -> None:
        self.lm = lm
        self.quantile = quantile

    def fit(self, texts: Sequence[str], corpus: Sequence[str] | None = None) -> OnionFilter:
        """Set the threshold on clean texts.

        Parameters
        ----------
        texts : list of str
            Clean texts like those to be filtered.
        corpus : list of str, optional
            Text for the n-gram model; by default the same. A threshold is honest only on texts
            that are not in the corpus.

        Returns
        -------
        self
        """
        if not len(texts):
            raise ValueError("The filter needs at least one clean text.")
        if not 0 <= self.quantile <= 1:
            raise ValueError(f"quantile must lie in [0, 1], got {self.quantile}.")
        if self.lm == "ngram":
            self.model_ = BigramModel().fit(texts if corpus is None else corpus)
        elif not callable(self.lm):
            raise ValueError(f"lm must be 'ngram' or a callable, got {self.lm!r}.")
        scores = np.concatenate([self.suspicion(text) for text in texts])
        finite = scores[np.isfinite(scores)]
        self.threshold_ = float(np.quantile(finite, self.quantile)) if finite.size else np.inf
        return self

    def suspicion(self, text: str) -> np.ndarray:
        """Fall of the surprise when a word is deleted, for each word."""
        if self.lm == "ngram":
            return self.model_.suspicion(text)
        words = text.split()
        if len(words) < 2:
            return np.full(len(words), -np.inf)
        variants = [" ".join(words[:i] + words[i + 1 :]) for i in range(len(words))]
        surprise = np.asarray(self.lm([text, *variants]), dtype=float)  # type: ignore[operator]
        return surprise[0] - surprise[1:]

    def transform(self, texts: Sequence[str]) -> list[str]:
        """Return the texts without their suspicious words (at least one word stays)."""
        if not hasattr(self, "threshold_"):
            raise ValueError("This filter has no threshold yet; call fit first.")
        result = []
        for text in texts:
            words, scores = np.array(text.split(), dtype=object), self.suspicion(text)
            keep = scores <= self.threshold_
            if len(words) and not keep.any():
                keep[scores.argmin()] = True
            result.append(" ".join(words[keep]))
        return result

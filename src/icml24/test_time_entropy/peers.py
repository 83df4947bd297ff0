"""What a practitioner would use instead: label-free accuracy from the outputs of one forward pass.

Every estimator has ``fit(logits, y)`` on labelled source validation data (labels may be left out
where they are not needed) and ``predict(logits)`` on unlabelled data. All estimate a fraction from
0 to 1, except :class:`NuclearNorm`, :class:`FrechetAutoEval` and :class:`DispersionScore`, which
give a score that :class:`Regressed` turns into an accuracy with labelled shifted sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment, minimize_scalar
from scipy.special import log_softmax, logsumexp, softmax
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from torch import Tensor, nn

from icml24.test_time_entropy.phases import frechet_distance
from icml24.test_time_entropy.tta import Tent

__all__ = [
    "ATC",
    "COME",
    "COT",
    "AverageConfidence",
    "DifferenceOfConfidences",
    "DispersionScore",
    "FrechetAutoEval",
    "NuclearNorm",
    "Regressed",
    "TemperatureScaled",
    "agreement",
    "fit_temperature",
]


def _logits(logits: ArrayLike | Tensor) -> np.ndarray:
    z = logits.numpy(force=True) if isinstance(logits, Tensor) else np.asarray(logits)
    z = z.astype(float)
    if z.ndim != 2 or len(z) == 0 or z.shape[1] < 2:
        raise ValueError(f"logits must have shape (n, classes) with n > 0, got {z.shape}.")
    if not np.isfinite(z).all():
        raise ValueError("logits contain NaN or infinite values; check the images and the model.")
    return z


def _labels(y: ArrayLike | Tensor, z: np.ndarray) -> np.ndarray:
    y = y.numpy(force=True) if isinstance(y, Tensor) else np.asarray(y)
    if y.shape != (len(z),):
        raise ValueError(f"y must hold one label for each of {len(z)} images, got {y.shape}.")
    if not (y.min() >= 0 and y.max() < z.shape[1]):
        raise ValueError(
            f"Labels must lie between 0 and {z.shape[1] - 1}, got {y.min()} to {y.max()}."
        )
    return y.astype(int)


# -- temperature --------------------------------------------------------------------------------


def fit_temperature(logits: ArrayLike | Tensor, y: ArrayLike | Tensor) -> float:
    """Temperature T for which softmax(logits / T) has the least negative log-likelihood.

    Parameters
    ----------
    logits : array_like, shape (n, classes)
        Of labelled source validation data.
    y : array_like of int, shape (n,)

    Returns
    -------
    float
        Above 1 for an overconfident model. The likelihood is convex in 1/T, and searched for
        T between 0.05 and 20.

    Examples
    --------
    >>> logits = np.log([[0.8, 0.2]] * 5) * 3  # three times too sure: right in four of five
    >>> round(fit_temperature(logits, [0, 0, 0, 0, 1]), 3)
    3.0
    """
    z = _logits(logits)
    rows, target = np.arange(len(z)), _labels(y, z)

    def loss(log_t: float) -> float:
        scaled = z * np.exp(-log_t)
        return float(np.mean(logsumexp(scaled, axis=1) - scaled[rows, target]))

    found = minimize_scalar(
        loss, bounds=(np.log(0.05), np.log(20)), method="bounded", options={"xatol": 1e-6}
    )
    return float(np.exp(found.x))


class TemperatureScaled(nn.Module):
    """A classifier whose logits are divided by a temperature.

    Parameters
    ----------
    model : torch.nn.Module
        Shared, not copied.
    temperature : float

    Examples
    --------
    >>> TemperatureScaled(nn.Identity(), 2.0)(torch.tensor([[2.0, 0.0]])).tolist()
    [[1.0, 0.0]]
    """

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}.")
        self.model, self.temperature = model, float(temperature)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled logits."""
        output = self.model(x)
        return getattr(output, "logits", output) / self.temperature


# -- estimators ---------------------------------------------------------------------------------


class _Estimator(BaseEstimator):
    def _require(self, name: str) -> Any:
        if not hasattr(self, name):
            raise NotFittedError(
                f"Call {type(self).__name__}.fit(validation_logits, labels) before predict."
            )
        return getattr(self, name)


class AverageConfidence(_Estimator):
    """Mean of the largest probability, after temperature scaling (Guo et al. 2017).

    This is what production monitors report (NannyML's CBPE is its binned form).

    Parameters
    ----------
    temperature : bool, default True
        Fit a temperature on the validation data; with False ``fit`` learns nothing.

    Examples
    --------
    >>> AverageConfidence(temperature=False).predict(np.log([[0.9, 0.1], [0.3, 0.7]])).round(3)
    np.float64(0.8)
    """

    def __init__(self, temperature: bool = True) -> None:
        self.temperature = temperature

    def fit(self, logits: ArrayLike | Tensor, y: ArrayLike | Tensor | None = None) -> Self:
        """Fit the temperature on labelled source validation data."""
        if self.temperature:
            if y is None:
                raise ValueError("Temperature scaling needs labels y; or use temperature=False.")
            self.temperature_ = fit_temperature(logits, y)
        return self

    def confidences(self, logits: ArrayLike | Tensor) -> np.ndarray:
        """Largest probability of each image."""
        t = self._require("temperature_") if self.temperature else 1.0
        return softmax(_logits(logits) / t, axis=1).max(1)

    def predict(self, logits: ArrayLike | Tensor) -> float:
        """Estimate the accuracy."""
        return self.confidences(logits).mean()


class DifferenceOfConfidences(AverageConfidence):
    """Validation accuracy minus the drop in mean confidence (Guillory et al. 2021)."""

    def fit(self, logits: ArrayLike | Tensor, y: ArrayLike | Tensor | None = None) -> Self:
        """Remember accuracy and mean confidence of labelled source validation data."""
        z = _logits(logits)
        if y is None:
            raise ValueError("DifferenceOfConfidences needs the labels y of the validation data.")
        super().fit(z, y)
        accuracy = np.mean(z.argmax(1) == _labels(y, z))
        self.offset_ = float(accuracy - self.confidences(z).mean())
        return self

    def predict(self, logits: ArrayLike | Tensor) -> float:
        """Estimate the accuracy, clipped to [0, 1]."""
        return float(np.clip(self._require("offset_") + self.confidences(logits).mean(), 0, 1))


class ATC(_Estimator):
    """Average thresholded confidence (Garg et al. 2022).

    The share of images whose score exceeds a threshold; the threshold is set so that on source
    validation data this share is the accuracy.

    Parameters
    ----------
    score : {"max_confidence", "negative_entropy"}
    """

    def __init__(
        self, score: Literal["max_confidence", "negative_entropy"] = "max_confidence"
    ) -> None:
        self.score = score

    def _scores(self, logits: ArrayLike | Tensor) -> np.ndarray:
        log_p = log_softmax(_logits(logits), axis=1)
        if self.score == "max_confidence":
            return log_p.max(1)
        if self.score == "negative_entropy":
            return (np.exp(log_p) * log_p).sum(1)
        raise ValueError(
            f"score must be 'max_confidence' or 'negative_entropy', got {self.score!r}."
        )

    def fit(self, logits: ArrayLike | Tensor, y: ArrayLike | Tensor) -> Self:
        """Find the threshold on labelled source validation data."""
        z = _logits(logits)
        scores = np.sort(self._scores(z))
        wrong = int(np.sum(z.argmax(1) != _labels(y, z)))
        edges = np.concatenate([[-np.inf], scores])  # above edges[wrong] lie n - wrong images
        self.threshold_ = float(edges[wrong])
        return self

    def predict(self, logits: ArrayLike | Tensor) -> float:
        """Estimate the accuracy."""
        return float(np.mean(self._scores(logits) > self._require("threshold_")))


class COT(_Estimator):
    r"""Confidence optimal transport (Lu et al. 2023).

    One minus the least mean cost of moving the predicted probabilities onto one-hot labels drawn
    with the source's class frequencies, at cost :math:`\frac12\|p - e_y\|_1 = 1 - p_y`. Never above
    the average confidence, since :math:`1 - p_y \ge 1 - \max p`.

    Parameters
    ----------
    temperature : bool, default False
        Scale the logits by a temperature fitted on the validation data.
    max_images : int, default 1000
        The assignment is solved on the first so many images.
    """

    def __init__(self, temperature: bool = False, max_images: int = 1000) -> None:
        self.temperature = temperature
        self.max_images = max_images

    def fit(self, logits: ArrayLike | Tensor, y: ArrayLike | Tensor) -> Self:
        """Remember the class frequencies of the source (and the temperature)."""
        z = _logits(logits)
        counts = np.bincount(_labels(y, z), minlength=z.shape[1])
        self.marginal_ = counts / counts.sum()
        self.temperature_ = fit_temperature(z, y) if self.temperature else 1.0
        return self

    def predict(self, logits: ArrayLike | Tensor) -> float:
        """Estimate the accuracy."""
        marginal = self._require("marginal_")
        p = softmax(_logits(logits)[: self.max_images] / self.temperature_, axis=1)
        n = len(p)
        exact = marginal * n  # round to whole images, largest remainders first
        counts = np.floor(exact).astype(int)
        counts[np.argsort(counts - exact, kind="stable")[: n - counts.sum()]] += 1
        benefit = p[:, np.repeat(np.arange(len(counts)), counts)]
        rows, columns = linear_sum_assignment(benefit, maximize=True)
        return float(benefit[rows, columns].mean())


class NuclearNorm(_Estimator):
    """Nuclear norm of the matrix of probabilities, over its largest value (Deng et al. 2023).

    1 for confident and balanced predictions, ``1 / sqrt(classes)`` if all are of one class.
    """

    def fit(self, logits: ArrayLike | Tensor, y: ArrayLike | Tensor | None = None) -> Self:
        """Learn nothing."""
        return self

    def predict(self, logits: ArrayLike | Tensor) -> float:
        """Return the score, at most 1."""
        p = softmax(_logits(logits), axis=1)
        largest = np.sqrt(len(p) * min(p.shape))
        return float(np.linalg.norm(p, "nuc") / largest)


class FrechetAutoEval(_Estimator):
    """Frechet distance of the outputs to those of the source (Deng and Zheng 2021).

    Give embeddings in place of logits to follow the original; logits serve as well.
    """

    def fit(self, logits: ArrayLike | Tensor, y: ArrayLike | Tensor | None = None) -> Self:
        """Remember the source."""
        self.source_ = torch.from_numpy(_logits(logits))
        return self

    def predict(self, logits: ArrayLike | Tensor) -> float:
        """Return the square root of the squared Frechet distance; larger is worse."""
        z = torch.from_numpy(_logits(logits))
        return float(np.sqrt(frechet_distance(z, self._require("source_"))))


class DispersionScore(_Estimator):
    """Spread of the predicted classes' mean embeddings (Xie et al. 2023).

    Logarithm of the mean squared distance of class means to the overall mean, weighted by the
    number of images. Give embeddings and predictions, or logits alone.
    """

    def fit(self, logits: ArrayLike | Tensor, y: ArrayLike | Tensor | None = None) -> Self:
        """Learn nothing."""
        return self

    def predict(self, logits: ArrayLike | Tensor, embeddings: ArrayLike | None = None) -> float:
        """Return the score; larger is better."""
        z = _logits(logits)
        predicted = np.unique(z.argmax(1), return_inverse=True)[1]
        points = z if embeddings is None else np.asarray(embeddings, dtype=float)
        sizes = np.bincount(predicted)
        onehot = np.eye(len(sizes))[predicted]
        means = onehot.T @ points / sizes[:, None]
        squared = ((means - points.mean(0)) ** 2).sum(1)
        return float(np.log(max((sizes * squared).sum() / max(len(sizes) - 1, 1), 1e-300)))


class Regressed(_Estimator):
    """A straight line from an estimator's output to accuracy, fitted on labelled shifted sets.

    It gives any estimator the same labelled hold-out sets that Weighted Flips gets.

    Parameters
    ----------
    estimator : estimator
        Fitted already; called through ``predict``.

    Examples
    --------
    >>> sets = [np.log([[c, 1 - c]] * 4) for c in (0.6, 0.8)]
    >>> line = Regressed(AverageConfidence(temperature=False)).fit(sets, [0.5, 0.9])
    >>> round(line.predict(np.log([[0.7, 0.3]])), 3)
    0.7
    """

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator

    def fit(self, logits: Sequence[ArrayLike | Tensor], accuracies: ArrayLike) -> Self:
        """Fit the line on the logits of labelled sets and their accuracies."""
        return self.fit_scores([self.estimator.predict(z) for z in logits], accuracies)

    def fit_scores(self, scores: ArrayLike, accuracies: ArrayLike) -> Self:
        """Fit the line on scores computed already."""
        x, y = np.asarray(scores, dtype=float), np.asarray(accuracies, dtype=float)
        if x.shape != y.shape or x.ndim != 1 or len(np.unique(x)) < 2:
            raise ValueError(
                "A line needs one accuracy for each of at least two sets with different scores."
            )
        self.coef_ = np.polynomial.polynomial.polyfit(x, y, 1)
        return self

    def line(self, scores: ArrayLike) -> np.ndarray:
        """Accuracies for scores, clipped to [0, 1]."""
        intercept, slope = self._require("coef_")
        return np.clip(intercept + slope * np.asarray(scores, dtype=float), 0, 1)

    def predict(self, logits: ArrayLike | Tensor) -> float:
        """Estimate the accuracy."""
        return float(self.line(self.estimator.predict(logits)))


def agreement(first: ArrayLike | Tensor, second: ArrayLike | Tensor) -> float:
    """Share of images on which two networks agree (Jiang et al. 2022).

    It estimates the accuracy of either where an ensemble of such networks is calibrated.

    Parameters
    ----------
    first, second : array_like, shape (n, classes)
        Logits of two networks trained alike with different seeds.

    Returns
    -------
    float

    Examples
    --------
    >>> agreement([[1.0, 0.0], [1.0, 0.0]], [[2.0, 0.0], [0.0, 1.0]])
    0.5
    """
    a, b = _logits(first), _logits(second)
    if a.shape != b.shape:
        raise ValueError(f"The logits must have one shape, got {a.shape} and {b.shape}.")
    return float(np.mean(a.argmax(1) == b.argmax(1)))


class COME(Tent):
    r"""Conservative entropy minimisation (Zhang et al., ICLR 2025), a successor of Tent.

    Logits become evidence :math:`e^{z}`, with the norm of z held constant: beliefs
    :math:`b_c = e^{z_c}/S` and an uncertainty :math:`u = C/S`, where
    :math:`S = \sum_c (e^{z_c} + 1)`; the loss is the entropy of (b, u). The model may stay unsure
    instead of being pushed to a vertex.

    Parameters
    ----------
    model, **settings
        See :class:`Tent`.
    """

    def loss(self, logits: Tensor) -> Tensor | None:
        """Mean entropy of beliefs and uncertainty."""
        norm = logits.norm(dim=1, keepdim=True).clamp(min=1e-12)
        z = logits / norm * norm.detach()
        classes = torch.full_like(z[:, :1], float(z.shape[1])).log()
        extended = torch.cat([z, classes], 1).log_softmax(1)
        return -(extended.exp() * extended).sum(1).mean()

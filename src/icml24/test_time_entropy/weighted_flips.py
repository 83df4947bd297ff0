"""Weighted Flips: the accuracy of a classifier on unlabelled images.

Adapt the classifier to the images by entropy minimisation, count which predictions flip, give a
flip the more weight the more confident the prediction was, and read the accuracy off a curve that
was fitted on labelled, shifted source data. Algorithm 1 of the paper.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import stats
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from torch import Tensor, nn

from icml24.core.statistics import Estimate
from icml24.test_time_entropy.tta import (
    ETA,
    RPL,
    RDumb,
    Tent,
    logits_of,
    shuffled_indices,
)

__all__ = [
    "PUBLISHED",
    "WeightedFlips",
    "confidence_ranks",
    "monotone_polynomial",
    "predict_logits",
    "weighted_flips",
]

#: Coefficients, lowest degree first, of the paper's curves from flips x (of n = 1,000 images, a
#: ResNet-50 on ImageNet) to accuracy in per cent, as printed in its code.
PUBLISHED: dict[str, tuple[float, ...]] = {
    "weighted": (75.6618580, -0.321445023, 3.55553868e-4),
    "unweighted": (83.55158891, -0.10318227),
    "unweighted, degree 2": (82.5756446, -0.0959406999, -1.01165493e-5),
}
ADAPTERS: dict[str, Callable[..., Tent]] = {"rdumb": RDumb, "tent": Tent, "eta": ETA, "rpl": RPL}


def confidence_ranks(confidence: ArrayLike) -> np.ndarray:
    """Rank of each confidence divided by their number: 1 for the most confident, ties averaged.

    Parameters
    ----------
    confidence : array_like, shape (n,)

    Returns
    -------
    numpy.ndarray, shape (n,)
        In (0, 1].

    Raises
    ------
    ValueError
        If the array is empty, not one-dimensional, or holds NaN.

    Examples
    --------
    >>> confidence_ranks([0.9, 0.5, 0.7, 0.3]).tolist()
    [1.0, 0.5, 0.75, 0.25]
    >>> confidence_ranks([0.5, 0.5]).tolist()
    [0.75, 0.75]
    """
    c = np.asarray(confidence, dtype=float)
    if c.ndim != 1 or c.size == 0 or np.isnan(c).any():
        raise ValueError(
            f"confidence must be a non-empty 1-D array without NaN, got shape {c.shape}."
        )
    return stats.rankdata(c) / c.size


def weighted_flips(
    confidence: ArrayLike, before: ArrayLike, after: ArrayLike, weighted: bool = True
) -> float:
    r"""Sum of the rank weights of flipped predictions, :math:`\sum_i r_i [\hat y_i \ne \hat y'_i]`.

    Parameters
    ----------
    confidence : array_like, shape (n,)
        Largest probability before adaptation.
    before, after : array_like of int, shape (n,)
        Predicted classes before and after.
    weighted : bool, default True
        False counts every flip as 1.

    Returns
    -------
    float
        From 0 to (n + 1)/2, or to n when not weighted.

    Raises
    ------
    ValueError
        If the lengths differ.

    Examples
    --------
    >>> weighted_flips([0.9, 0.5, 0.7, 0.3], [0, 1, 2, 3], [1, 1, 2, 0])
    1.25
    >>> weighted_flips([0.9, 0.5, 0.7, 0.3], [0, 1, 2, 3], [1, 1, 2, 0], weighted=False)
    2.0
    """
    rank = confidence_ranks(confidence)
    flipped = np.asarray(before) != np.asarray(after)
    if np.shape(before) != rank.shape or np.shape(after) != rank.shape:
        raise ValueError(
            f"confidence, before and after must have one length, got {rank.shape}, "
            f"{np.shape(before)} and {np.shape(after)}."
        )
    return float((rank[flipped] if weighted else flipped).sum())


def monotone_polynomial(x: ArrayLike, coefficients: Sequence[float], monotone: bool = True) -> Any:
    r"""Evaluate a polynomial, or its falling envelope :math:`\min_{0 \le t \le x} f(t)`.

    More flips must not mean a higher accuracy. The envelope follows f while it falls and stays
    level where f turns up (at the vertex of a parabola).

    Parameters
    ----------
    x : array_like
        Not negative.
    coefficients : sequence of float
        Lowest degree first.
    monotone : bool, default True
        False evaluates f itself.

    Returns
    -------
    float or numpy.ndarray
        Shape of ``x``.

    Examples
    --------
    >>> f = PUBLISHED["weighted"]
    >>> [round(float(v), 2) for v in monotone_polynomial([0, 100, 452.03, 500.5], f)]
    [75.66, 47.07, 3.01, 3.01]
    """
    x = np.asarray(x, dtype=float)
    polynomial = np.polynomial.Polynomial(coefficients)
    value = polynomial(x)
    if not monotone:
        return value
    turns = np.asarray(polynomial.deriv().roots() if polynomial.degree() > 1 else [])
    turns = np.real(turns[np.isreal(turns)]).astype(float)
    for t in (0.0, *turns[turns > 0]):
        value = np.where(x >= t, np.minimum(value, polynomial(t)), value)
    return value


class _Pool:
    """Images behind one face: a tensor, an array, a Dataset or a DataLoader."""

    def __init__(self, source: Any) -> None:
        if isinstance(source, torch.utils.data.DataLoader):
            source = source.dataset
        if isinstance(source, np.ndarray):
            source = torch.from_numpy(source)
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise TypeError(
                "X must be a tensor, an array, a Dataset with a length or a DataLoader, got "
                f"{type(source).__name__}."
            )
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def take(self, index: Tensor) -> Tensor:
        if isinstance(self.source, Tensor):
            return self.source[index]
        items = [self.source[int(i)] for i in index]
        first = [item[0] if isinstance(item, (tuple, list)) else item for item in items]
        return torch.stack([torch.as_tensor(item) for item in first])


@torch.no_grad()
def predict_logits(model: nn.Module, x: Any, batch_size: int = 200) -> Tensor:
    """Logits of a classifier in evaluation mode; its mode is put back afterwards.

    Parameters
    ----------
    model : torch.nn.Module
    x : Tensor, array, Dataset or DataLoader of n images
    batch_size : int, default 200

    Returns
    -------
    Tensor, shape (n, classes)

    Examples
    --------
    >>> predict_logits(nn.Linear(2, 3), torch.zeros(5, 2)).shape
    torch.Size([5, 3])
    """
    modes = {module: module.training for module in model.modules()}
    pool = _Pool(x)
    model.eval()
    try:
        parts = torch.arange(len(pool)).split(batch_size)
        return torch.cat([logits_of(model, pool.take(index)) for index in parts])
    finally:
        for module, mode in modes.items():
            module.training = mode


class WeightedFlips(BaseEstimator):
    """Estimate the accuracy of a classifier on unlabelled images by counting flips.

    Parameters
    ----------
    adapter : {"rdumb", "tent", "eta", "rpl"} or callable, default "rdumb"
        How to adapt: a name, or a function from a model to a :class:`Tent`.
    n_probe : int, default 1000
        Images whose predictions are watched.
    n_steps : int, default 990
        Updates.
    batch_size : int, default 64
    lr : float, default 2.5e-4
        For the named adapters. Choose it (on shifts you have labels for) so that flips differ from
        set to set.
    weighted : bool, default True
        Weight flips by the rank of their confidence; False counts them.
    degree : int, default 2
        Of the calibration polynomial. Use 1 where calibration sets are milder than what will come:
        a parabola extrapolates badly.
    monotone : bool, default True
        Replace the polynomial by its falling envelope.
    target : {"source", "adapted"}, default "source"
        Which accuracy to estimate: that of the model as it is, or that of the model normalising by
        batch statistics (before any update).
    random_state : int, optional
        Of the probe and the order of the stream; 0 by default.
    probe_batch : int, default 200
        Images per forward pass when predicting.

    Attributes
    ----------
    flips_ : numpy.ndarray, shape (n_sets,)
        Flips of the calibration sets, divided by the number of probe images.
    accuracies_ : numpy.ndarray, shape (n_sets,)
        Their accuracies, as fractions.
    coef_ : numpy.ndarray, shape (degree + 1,)
        Lowest degree first; from flips to accuracy.
    residual_ : float
        Root mean square of the leave-one-out errors of the calibration.

    Examples
    --------
    The paper's own curve, for a ResNet-50 on ImageNet:

    >>> wf = WeightedFlips.published()
    >>> round(float(wf.accuracy(0.1)), 4)
    0.4707

    Your model, calibrated on labelled shifted sets ``[(X1, y1), ...]``::

        wf = WeightedFlips(lr=0.02, n_steps=50, degree=1).fit(model, sets)
        wf.predict_interval(model, unlabelled)
    """

    def __init__(
        self,
        adapter: str | Callable[[nn.Module], Tent] = "rdumb",
        n_probe: int = 1000,
        n_steps: int = 990,
        batch_size: int = 64,
        lr: float = 2.5e-4,
        weighted: bool = True,
        degree: int = 2,
        monotone: bool = True,
        target: Literal["source", "adapted"] = "source",
        random_state: int | None = None,
        probe_batch: int = 200,
    ) -> None:
        self.adapter = adapter
        self.n_probe = n_probe
        self.n_steps = n_steps
        self.batch_size = batch_size
        self.lr = lr
        self.weighted = weighted
        self.degree = degree
        self.monotone = monotone
        self.target = target
        self.random_state = random_state
        self.probe_batch = probe_batch

    @classmethod
    def published(cls, weighted: bool = True, **settings: Any) -> Self:
        """Return an estimator with the paper's curve for ResNet-50 on ImageNet.

        It holds for 1,000 probe images, 990 steps, batch 64, learning rate 2.5e-4 and RDumb; for
        anything else call :meth:`fit`.
        """
        found = cls(weighted=weighted, degree=2 if weighted else 1, **settings)
        coefficients = np.array(PUBLISHED["weighted" if weighted else "unweighted"]) / 100
        found.coef_ = coefficients * 1000.0 ** np.arange(len(coefficients))
        found.residual_ = float("nan")
        found.flips_ = found.accuracies_ = np.array([])
        return found

    # -- counting --------------------------------------------------------------------------------

    def _check_settings(self) -> None:
        if self.target not in ("source", "adapted"):
            raise ValueError(f"target must be 'source' or 'adapted', got {self.target!r}.")
        if isinstance(self.adapter, str) and self.adapter not in ADAPTERS:
            raise ValueError(
                f"adapter must be one of {', '.join(ADAPTERS)} or a function, got {self.adapter!r}."
            )
        for name in ("n_probe", "batch_size", "degree", "probe_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.n_steps < 0:
            raise ValueError(f"n_steps must not be negative, got {self.n_steps}.")

    def _adapter(self, model: nn.Module) -> Tent:
        if isinstance(self.adapter, str):
            return ADAPTERS[self.adapter](model, lr=self.lr)
        return self.adapter(model)

    def contributions(self, model: nn.Module, X: Any, probe: Tensor | None = None) -> np.ndarray:
        """Weight of each probe image if its prediction flipped, else 0.

        Parameters
        ----------
        model : torch.nn.Module
            Not changed.
        X : Tensor, array, Dataset or DataLoader
            Unlabelled images (labels in a Dataset are ignored).
        probe : Tensor, shape (n, ...), optional
            The images to watch; by default ``n_probe`` random ones of ``X``.

        Returns
        -------
        numpy.ndarray, shape (n_probe,), or (n,) for a given probe

        Raises
        ------
        ValueError
            If there are fewer images than ``n_probe`` or one batch, or the model has no
            normalisation layers.
        """
        self._check_settings()
        pool = _Pool(X)
        if probe is None and self.n_probe > len(pool):
            raise ValueError(
                f"n_probe = {self.n_probe} is more than the {len(pool)} images; lower it, or give "
                "more images."
            )
        generator = torch.Generator().manual_seed(self.random_state or 0)
        if probe is None:
            probe = pool.take(torch.randperm(len(pool), generator=generator)[: self.n_probe])
        adapter = self._adapter(model)
        p, before = adapter.predict(probe, self.probe_batch).softmax(1).max(1)
        for index in shuffled_indices(len(pool), self.batch_size, self.n_steps, generator):
            adapter(pool.take(index))
        after = adapter.predict(probe, self.probe_batch).argmax(1)
        if len(after.unique()) == 1 and len(before.unique()) > 1:
            warnings.warn(
                "The adapted model predicts a single class: it has collapsed. Use fewer steps or a "
                "smaller learning rate.",
                stacklevel=3,
            )
        flipped = (before != after).numpy(force=True)
        rank = confidence_ranks(p.numpy(force=True))
        return np.where(flipped, rank if self.weighted else 1.0, 0.0)

    def flips(self, model: nn.Module, X: Any) -> float:
        """Weighted flips divided by the number of probe images.

        Returns
        -------
        float
            From 0 to (n + 1)/(2n), about one half; to 1 when not weighted.
        """
        return float(self.contributions(model, X).mean())

    # -- calibration -----------------------------------------------------------------------------

    def _accuracy_of(self, model: nn.Module, X: Any, y: Any) -> float:
        pool = _Pool(X)
        labels = torch.as_tensor(y)
        if labels.ndim != 1 or len(labels) != len(pool):
            raise ValueError(
                f"Give one label for each image, got {tuple(labels.shape)} labels for {len(pool)} "
                "images."
            )
        if self.target == "source":
            logits = predict_logits(model, X, self.probe_batch)
        else:
            adapter = Tent(model)
            logits = adapter.predict(pool.take(torch.arange(len(pool))), self.probe_batch)
        return float((logits.argmax(1).cpu() == labels.cpu()).double().mean())

    def fit(self, model: nn.Module, datasets: Sequence[tuple[Any, Any]]) -> Self:
        """Calibrate on labelled, shifted source data.

        Parameters
        ----------
        model : torch.nn.Module
        datasets : sequence of (X, y)
            At least ``degree + 1`` sets, from clean to strongly shifted.

        Returns
        -------
        WeightedFlips

        Raises
        ------
        ValueError
            If there are too few sets, or labels and images do not match.
        """
        self._check_settings()
        if len(datasets) < self.degree + 1:
            raise ValueError(
                f"A curve of degree {self.degree} needs at least {self.degree + 1} calibration "
                f"sets, got {len(datasets)}."
            )
        flips = [self.flips(model, X) for X, _ in datasets]
        return self.fit_counts(flips, [self._accuracy_of(model, X, y) for X, y in datasets])

    def fit_counts(self, flips: ArrayLike, accuracies: ArrayLike) -> Self:
        """Calibrate on flips (as fractions) that have been counted already.

        Parameters
        ----------
        flips, accuracies : array_like, shape (n_sets,)

        Returns
        -------
        WeightedFlips
        """
        self.flips_ = np.asarray(flips, dtype=float)
        self.accuracies_ = np.asarray(accuracies, dtype=float)
        if self.flips_.shape != self.accuracies_.shape or self.flips_.ndim != 1:
            raise ValueError("flips and accuracies must be 1-D arrays of one length.")
        if len(np.unique(self.flips_)) < self.degree + 1:
            raise ValueError(
                f"A curve of degree {self.degree} needs at least {self.degree + 1} calibration "
                f"sets with different flips, got {np.unique(self.flips_).round(4).tolist()}; add "
                "sets, or raise lr or n_steps."
            )
        design = np.vander(self.flips_, self.degree + 1, increasing=True)
        self.coef_, *_ = np.linalg.lstsq(design, self.accuracies_, rcond=None)
        # Leave-one-out errors in closed form: residual / (1 - leverage).
        q, _ = np.linalg.qr(design)
        leverage = (q**2).sum(1)
        error = (self.accuracies_ - design @ self.coef_) / np.maximum(1 - leverage, 1e-9)
        enough = len(self.flips_) > self.degree + 1
        self.residual_ = float(np.sqrt(np.mean(error**2))) if enough else float("nan")
        return self

    # -- estimation ------------------------------------------------------------------------------

    def accuracy(self, flips: ArrayLike) -> Any:
        """Read accuracies off the calibrated curve, clipped to [0, 1].

        Parameters
        ----------
        flips : array_like
            As fractions of the probe.

        Returns
        -------
        float or numpy.ndarray

        Raises
        ------
        sklearn.exceptions.NotFittedError
            Before :meth:`fit`.
        """
        if not hasattr(self, "coef_"):
            raise NotFittedError("Call fit(model, labelled_shifted_sets) before predicting.")
        return np.clip(monotone_polynomial(flips, self.coef_, self.monotone), 0, 1)

    def _warn_outside(self, flips: float) -> None:
        if self.flips_.size and not self.flips_.min() <= flips <= self.flips_.max():
            warnings.warn(
                f"Flips of {flips:.3f} lie outside the calibrated range "
                f"[{self.flips_.min():.3f}, {self.flips_.max():.3f}]: this is extrapolation.",
                stacklevel=3,
            )

    def predict(self, model: nn.Module, X: Any) -> float:
        """Estimate the accuracy of ``model`` on unlabelled ``X``.

        Returns
        -------
        float
            In [0, 1].
        """
        self.accuracy(0.0)  # fail before the work if not fitted
        x = self.flips(model, X)
        self._warn_outside(x)
        return float(self.accuracy(x))

    def predict_interval(
        self, model: nn.Module, X: Any, level: float = 0.9, n_resamples: int = 2000
    ) -> Estimate:
        """Estimate with an interval from two sources of error.

        The error of the curve (leave-one-out residuals of the calibration, Student's t) and the
        luck of the probe (bootstrap over its images) are added in squares. A shift unlike all
        calibration sets can still fall outside.

        Parameters
        ----------
        model : torch.nn.Module
        X : Tensor, array, Dataset or DataLoader
        level : float, default 0.9
        n_resamples : int, default 2000
            Of the bootstrap.

        Returns
        -------
        icml24.core.statistics.Estimate
            ``value``, ``low`` and ``high``, within [0, 1].
        """
        if not 0 < level < 1:
            raise ValueError(f"level must lie strictly between 0 and 1, got {level}.")
        self.accuracy(0.0)
        if not np.isfinite(self.residual_):
            raise ValueError(
                f"An interval needs residuals: fit on {self.degree + 2} or more calibration sets."
            )
        part = self.contributions(model, X)
        x = float(part.mean())
        self._warn_outside(x)
        value = float(self.accuracy(x))
        rng = np.random.default_rng(self.random_state)
        counts = rng.multinomial(len(part), np.full(len(part), 1 / len(part)), n_resamples)
        luck = np.std(self.accuracy(counts @ part / len(part)))
        freedom = len(self.flips_) - self.degree - 1
        reach = stats.t.ppf((1 + level) / 2, freedom) * np.hypot(self.residual_, luck)
        low, high = max(0.0, value - reach), min(1.0, value + reach)
        return Estimate(value, low, high, len(part), level)

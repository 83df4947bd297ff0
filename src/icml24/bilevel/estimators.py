"""Stochastic estimators: what the single-loop methods differ in, five lines each.

An estimator turns mini-batch values of one vector (``new`` at the current point, ``old`` the same
batch at the previous point) into a running estimate ``v`` of its full average. All arrays carry the
independent runs in their first axis. ``rows`` selects the runs that are updated, ``ids`` says which
block of the data the batch was.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

__all__ = ["PAGE", "SAGA", "SARAH", "SGD", "STORM", "Estimator", "MovingAverage", "ZeroSARAH"]

Array = np.ndarray
Rows = slice | Array


@dataclass
class Estimator:
    """Base class. Subclasses define :meth:`update`; some also :meth:`refreshes`.

    Attributes
    ----------
    needs_old : bool
        Whether the batch must also be evaluated at the previous point (twice the price).
    starts_full : bool
        Whether v starts at a full average rather than at one batch.
    needs_blocks : bool
        Whether it remembers one value for each block, which only a finite sum allows.
    """

    needs_old: ClassVar[bool] = False
    starts_full: ClassVar[bool] = False
    needs_blocks: ClassVar[bool] = False
    v: Array = field(init=False, repr=False, compare=False)

    @property
    def fills(self) -> bool:
        """Whether the table starts filled, by one full pass over the blocks."""
        return False

    def bind(self, shape: tuple[int, int], weights: Array | None) -> Estimator:
        """Return a fresh copy for arrays of a shape (runs, size), given the blocks' weights."""
        if self.needs_blocks and weights is None:
            raise ValueError(
                f"{type(self).__name__} remembers each block of a finite data set; this problem is "
                "a stream. Use SGD, PAGE, SARAH or STORM."
            )
        bound = copy.copy(self)
        bound.v = np.zeros(shape)
        if self.needs_blocks and weights is not None:
            bound.weights = weights  # type: ignore[attr-defined]
            bound.table = np.zeros((shape[0], len(weights), shape[1]))  # type: ignore[attr-defined]
            bound.mean = np.zeros(shape)  # type: ignore[attr-defined]
        return bound

    def start(self, first: Array, ids: Array | None) -> None:
        """Set v from the first value (a full average when ``starts_full``)."""
        self.v = first.copy()

    def refreshes(self, step: int, coin: Array, default: Array) -> Array:
        """Which runs take a full average at this step: a mask over runs."""
        return np.zeros(len(coin), dtype=bool)

    def refresh(self, rows: Rows, full: Array) -> None:
        """Replace v by the full average."""
        self.v[rows] = full

    def update(self, rows: Rows, new: Array, old: Array, ids: Array) -> None:
        """Update v from one batch."""
        raise NotImplementedError


@dataclass
class SGD(Estimator):
    """v = D_B: unbiased, and as noisy at the solution as anywhere."""

    def update(self, rows: Rows, new: Array, old: Array, ids: Array) -> None:
        """Update v from one batch."""
        self.v[rows] = new


@dataclass
class PAGE(Estimator):
    """v = v + D_B(new) - D_B(old), and with probability ``prob`` the full average (SPABA).

    Parameters
    ----------
    prob : float in (0, 1], optional
        Default b / (b + (n + m) / 2), which balances the price of full passes and batches.
    """

    prob: float | None = None
    needs_old: ClassVar[bool] = True
    starts_full: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.prob is not None and not 0 < self.prob <= 1:
            raise ValueError(f"prob must lie in (0, 1], got {self.prob}.")

    def refreshes(self, step: int, coin: Array, default: Array) -> Array:
        """Which runs take a full average at this step: a mask over runs."""
        return coin < (default if self.prob is None else self.prob)

    def update(self, rows: Rows, new: Array, old: Array, ids: Array) -> None:
        """Update v from one batch."""
        self.v[rows] += new - old


@dataclass
class SARAH(Estimator):
    """PAGE's recursion, restarted every ``period`` steps instead of by a coin (SRBA).

    Parameters
    ----------
    period : int, optional
        Default 1 / (PAGE's default probability), rounded.
    """

    period: int | None = None
    needs_old: ClassVar[bool] = True
    starts_full: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.period is not None and self.period < 1:
            raise ValueError(f"period must be at least 1, got {self.period}.")

    def refreshes(self, step: int, coin: Array, default: Array) -> Array:
        """Which runs take a full average at this step: a mask over runs."""
        period = round(1 / float(default[0])) if self.period is None else self.period
        return np.full(len(coin), step % max(period, 1) == 0)

    def update(self, rows: Rows, new: Array, old: Array, ids: Array) -> None:
        """Update v from one batch."""
        self.v[rows] += new - old


@dataclass
class STORM(Estimator):
    """v = D_B(new) + (1 - a) (v - D_B(old)): never a full pass (SRMBA).

    Parameters
    ----------
    a : float in [0, 1], default 0.1
        Weight of fresh values; 1 is SGD.
    decay : float, default 0
        Use a / (1 + step)^decay; 2/3 is the classical choice.
    """

    a: float = 0.1
    decay: float = 0.0
    needs_old: ClassVar[bool] = True
    _step: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.a <= 1:
            raise ValueError(f"a must lie in [0, 1], got {self.a}.")

    def update(self, rows: Rows, new: Array, old: Array, ids: Array) -> None:
        """Update v from one batch."""
        self._step += 1
        keep = 1 - self.a / (1 + self._step) ** self.decay
        self.v[rows] = new + keep * (self.v[rows] - old)


@dataclass
class SAGA(Estimator):
    """v = D_B - table[B] + mean(table): remembers the last value of every block (SABA).

    Parameters
    ----------
    init : {"zeros", "full"}
        Start the table at zero (free, but the first pass walks in wrong directions) or with one
        full pass.
    """

    init: str = "zeros"
    needs_blocks: ClassVar[bool] = True
    weights: Array = field(init=False, repr=False, compare=False)  # shares of the blocks (K,)
    table: Array = field(init=False, repr=False, compare=False)  # last values (R, K, size)
    mean: Array = field(init=False, repr=False, compare=False)  # their average (R, size)

    def __post_init__(self) -> None:
        if self.init not in ("zeros", "full"):
            raise ValueError(f"init must be 'zeros' or 'full', got {self.init!r}.")

    @property
    def fills(self) -> bool:
        """Whether the table starts filled, by one full pass over the blocks."""
        return self.init == "full"

    def start(self, first: Array, ids: Array | None) -> None:
        """Set v from the first batch (or keep the full average of a filled table)."""
        if ids is None:
            self.v = self.mean.copy()
        else:
            self.update(slice(None), first, first, ids)

    def fill(self, block: int, value: Array) -> None:
        """Store the starting value of one block."""
        self.table[:, block] = value
        self.mean += self.weights[block] * value

    def _swap(self, rows: Rows, new: Array, ids: Array) -> tuple[Array, Array]:
        runs = np.arange(len(self.v))[rows]
        stored, mean = self.table[runs, ids], self.mean[rows].copy()
        self.table[runs, ids] = new
        self.mean[rows] += self.weights[ids][:, None] * (new - stored)
        return stored, mean

    def update(self, rows: Rows, new: Array, old: Array, ids: Array) -> None:
        """Update v from one batch."""
        stored, mean = self._swap(rows, new, ids)
        self.v[rows] = new - stored + mean


@dataclass
class ZeroSARAH(SAGA):
    """SARAH pulled towards SAGA, so that no full pass is ever needed (SFFBA).

    v = D_B(new) - D_B(old) + (1 - lam) v + lam (D_B(old) - table[B] + mean(table)).

    Parameters
    ----------
    lam : float in [0, 1], optional
        Default b / (2 n), half the weight of a block.
    init : {"zeros", "full"}
        As in :class:`SAGA`.
    """

    lam: float | None = None
    needs_old: ClassVar[bool] = True
    needs_blocks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam is not None and not 0 <= self.lam <= 1:
            raise ValueError(f"lam must lie in [0, 1], got {self.lam}.")

    def start(self, first: Array, ids: Array | None) -> None:
        """Start at v = D_B with a zero table, or at the full average of a filled table."""
        if ids is not None:
            self._swap(slice(None), first, ids)
        self.v = self.mean.copy() if ids is None else first.copy()

    def update(self, rows: Rows, new: Array, old: Array, ids: Array) -> None:
        """Update v from one batch."""
        lam = float(self.weights.max()) / 2 if self.lam is None else self.lam
        stored, mean = self._swap(rows, new, ids)
        self.v[rows] = new - old + (1 - lam) * self.v[rows] + lam * (old - stored + mean)


class MovingAverage(Estimator):
    """Average the base estimator's output over time: h = (1 - rho) h + rho v (MA-SOBA, MA-SABA).

    Parameters
    ----------
    rho : float in (0, 1]
        Weight of the newest value; 1 is the base estimator itself.
    base : Estimator, optional
        Default :class:`SGD`.
    """

    def __init__(self, rho: float = 0.1, base: Estimator | None = None) -> None:
        if not 0 < rho <= 1:
            raise ValueError(f"rho must lie in (0, 1], got {rho}.")
        self.rho, self.base = rho, SGD() if base is None else base
        self.needs_old = self.base.needs_old  # type: ignore[misc]
        self.starts_full = self.base.starts_full  # type: ignore[misc]
        self.needs_blocks = self.base.needs_blocks  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"MovingAverage(rho={self.rho}, base={self.base!r})"

    @property
    def fills(self) -> bool:
        """Whether the base's table starts filled."""
        return self.base.fills

    def bind(self, shape: tuple[int, int], weights: Array | None) -> Estimator:
        """Return a fresh copy with a fresh base."""
        bound = copy.copy(self)
        bound.base = self.base.bind(shape, weights)
        bound.v = np.zeros(shape)
        return bound

    def start(self, first: Array, ids: Array | None) -> None:
        """Start at the base estimator's first value."""
        self.base.start(first, ids)
        self.v = self.base.v.copy()

    def fill(self, block: int, value: Array) -> None:
        """Pass on the starting value of one block."""
        self.base.fill(block, value)  # type: ignore[attr-defined]

    def refreshes(self, step: int, coin: Array, default: Array) -> Array:
        """Which runs take a full average at this step: a mask over runs."""
        return self.base.refreshes(step, coin, default)

    def refresh(self, rows: Rows, full: Array) -> None:
        """Average in the full value."""
        self.base.refresh(rows, full)
        self.v[rows] += self.rho * (full - self.v[rows])

    def update(self, rows: Rows, new: Array, old: Array, ids: Array) -> None:
        """Update v from one batch."""
        self.base.update(rows, new, old, ids)
        self.v[rows] += self.rho * (self.base.v[rows] - self.v[rows])

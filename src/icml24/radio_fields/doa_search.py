"""The directions from which a wave will arrive at a place nobody has visited.

Rays of different receivers that belong to the same path meet in its virtual transmitter. The search
finds those meeting points, and lets the nearest measured receivers vote on which of them are seen
from a new place. Unlike the search published with the paper it works with noisy directions: a point
is accepted because many rays *pass close by* (in angle), not because two of them meet exactly.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial import cKDTree
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError

from icml24.radio_fields.channel import Array, check_positions
from icml24.radio_fields.estimator import check_directions

__all__ = ["DoASearch", "closest_points", "least_squares_point", "recall"]


def closest_points(
    o1: ArrayLike, w1: ArrayLike, o2: ArrayLike, w2: ArrayLike
) -> tuple[Array, Array, Array, Array]:
    """Where pairs of rays come closest to each other.

    Parameters
    ----------
    o1, w1, o2, w2 : array_like, shape (n, D)
        Origins and unit directions of the first and second ray of each pair.

    Returns
    -------
    midpoint : (n, D)
        Middle of the shortest connection of the two lines; NaN for parallel ones.
    gap : (n,)
        Its length, metres.
    t1, t2 : (n,)
        Distances along the rays; negative ones lie behind the receiver.

    Examples
    --------
    >>> point, gap, t1, t2 = closest_points([[0, 0]], [[1, 0]], [[2, -1]], [[0, 1]])
    >>> point.tolist(), gap.tolist(), t1.tolist(), t2.tolist()
    ([[2.0, 0.0]], [0.0], [2.0], [1.0])
    """
    p1, d1, p2, d2 = (np.asarray(x, float) for x in (o1, w1, o2, w2))
    between = p2 - p1
    b = (d1 * d2).sum(axis=1)
    det = 1 - b**2
    det = np.where(det < 1e-12, np.nan, det)
    along1, along2 = (d1 * between).sum(axis=1), (d2 * between).sum(axis=1)
    t1, t2 = (along1 - b * along2) / det, (b * along1 - along2) / det
    a, c = p1 + t1[:, None] * d1, p2 + t2[:, None] * d2
    return (a + c) / 2, np.linalg.norm(a - c, axis=1), t1, t2


def least_squares_point(origins: Array, directions: Array, weights: Array | None = None) -> Array:
    r"""Point with the least sum of squared distances to lines.

    It solves :math:`\sum_i (I - w_i w_i^T)\, v = \sum_i (I - w_i w_i^T)\, o_i`.

    Parameters
    ----------
    origins, directions : numpy.ndarray, shape (n, D)
    weights : numpy.ndarray, shape (n,), optional

    Returns
    -------
    numpy.ndarray, shape (D,)

    Examples
    --------
    >>> o, w = np.array([[0.0, 0.0], [2.0, -1.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> least_squares_point(o, w).tolist()
    [2.0, 0.0]
    """
    project = np.eye(origins.shape[1]) - directions[:, :, None] * directions[:, None, :]
    if weights is not None:
        project = project * weights[:, None, None]
    right = np.einsum("nij,nj->i", project, origins)
    return np.linalg.lstsq(project.sum(axis=0), right, rcond=None)[0]


def recall(found: ArrayLike, true: ArrayLike, tolerance: float) -> float:
    """Share of the true points that have a found point within ``tolerance`` metres.

    Examples
    --------
    >>> recall([[0.0, 0.0]], [[0.0, 0.005], [1.0, 1.0]], 0.01)
    0.5
    """
    distance, _ = cKDTree(np.asarray(found)).query(np.asarray(true))
    return float((distance <= tolerance).mean())


def _angles(points: Array, origins: Array, directions: Array) -> Array:
    """Squared sine of the angle at which each ray misses each point, (points, rays); 2 = behind."""
    # |v - o|^2 and (v - o) w without the (points, rays, D) array
    far = (points**2).sum(1)[:, None] - 2 * points @ origins.T + (origins**2).sum(1)
    along = points @ directions.T - (origins * directions).sum(1)
    missed = 1 - along**2 / np.maximum(far, 1e-12)
    return np.where(along > 0, missed, 2.0)


def _robust_point(v: Array, origins: Array, directions: Array, rounds: int = 8) -> Array:
    """Least-squares point of angles, in which rays that miss it by much count for little."""
    for _ in range(rounds):
        missed = _angles(v[None], origins, directions)[0]
        typical = 4 * np.median(missed) + 1e-18
        far = ((v - origins) ** 2).sum(axis=1) + 1e-12
        v = least_squares_point(origins, directions, 1 / (far * (1 + missed / typical) ** 2))
    return v


class DoASearch(BaseEstimator):
    """Find virtual transmitters and predict directions of arrival at new places.

    1. Draw pairs of rays of different receivers and keep the points where they (nearly) meet in
       front of both, at a crossing angle of at least ``min_crossing_deg``.
    2. Take the point with the most rays within ``angle_tol_deg``, refine it by least squares, and
       take those rays away. Repeat until no point has ``min_support`` receivers.
    3. At a new place the ``k`` nearest receivers vote on which virtual transmitters they see; as
       many are kept as these receivers see on average.

    Parameters
    ----------
    angle_tol_deg : float, default 0.5
        A ray belongs to a point when it misses it by less; a few times the error of the array.
    min_support : int, optional
        Receivers that must see a virtual transmitter. Default: 2 % of them, at least 4.
    cluster_eps : float, default 0.05
        Virtual transmitters closer than this (metres) are one.
    min_crossing_deg : float, default 5
        Rays that cross at a smaller angle say little about the distance.
    k : int, default 6
        Receivers that vote.
    max_pairs, max_candidates : int
        Bounds on the work.
    random_state : int, default 0
        Draws the pairs.

    Attributes
    ----------
    virtual_transmitters_ : numpy.ndarray, shape (V, D)
    labels_ : numpy.ndarray of int, shape (n, P)
        The virtual transmitter of each training ray, -1 for none.
    explained_ : float
        Share of training rays with a label.

    Examples
    --------
    >>> from icml24.radio_fields import ShoeboxRoom
    >>> room = ShoeboxRoom((4, 3), (1.0, 0.8), frequency=928e6, max_order=1)
    >>> rx = room.sample_receivers(30, seed=0)
    >>> paths = room.trace(rx)
    >>> search = DoASearch().fit(rx, paths.doa, paths.mask)
    >>> len(search.virtual_transmitters_), recall(search.virtual_transmitters_, room.images, 1e-6)
    (5, 1.0)
    """

    def __init__(
        self,
        *,
        angle_tol_deg: float = 0.5,
        min_support: int | None = None,
        cluster_eps: float = 0.05,
        min_crossing_deg: float = 5.0,
        k: int = 6,
        max_pairs: int = 200_000,
        max_candidates: int = 4_000,
        random_state: int = 0,
    ) -> None:
        self.angle_tol_deg, self.min_support = angle_tol_deg, min_support
        self.cluster_eps, self.min_crossing_deg, self.k = cluster_eps, min_crossing_deg, k
        self.max_pairs, self.max_candidates = max_pairs, max_candidates
        self.random_state = random_state

    def fit(self, rx: ArrayLike, doa: ArrayLike, mask: Any = None) -> Self:
        """Find the virtual transmitters of measured rays.

        Parameters
        ----------
        rx : array_like, shape (n, D)
        doa : array_like, shape (n, P, D)
        mask : array_like of bool, shape (n, P), optional

        Returns
        -------
        self

        Raises
        ------
        ValueError
            If the input is malformed or no rays meet.
        """
        positions = check_positions(rx)
        directions, valid = check_directions(doa, mask, positions)
        owner, slot = np.nonzero(valid)
        o, w = positions[owner], directions[valid]
        candidates = self._candidates(o, w, owner)
        if len(candidates) == 0:
            raise ValueError("No two rays of different receivers meet in front of both.")
        found = self._grow(candidates, o, w, owner)
        if not found:
            raise ValueError(
                "No point is seen by enough receivers; raise angle_tol_deg or lower min_support."
            )
        self.virtual_transmitters_ = np.array(found)
        missed = _angles(self.virtual_transmitters_, o, w)  # (V, rays)
        nearest = missed.argmin(axis=0)
        close = missed.min(axis=0) <= np.sin(np.radians(self.angle_tol_deg)) ** 2
        self.labels_ = np.full(valid.shape, -1)
        self.labels_[owner, slot] = np.where(close, nearest, -1)
        self.explained_ = float(close.mean())
        self.rx_, self.counts_ = positions, valid.sum(axis=1)
        self.seen_ = self.visible(positions, directions, valid)
        self._tree = cKDTree(positions)
        return self

    def _candidates(self, o: Array, w: Array, owner: Array) -> Array:
        rng = np.random.default_rng(self.random_state)
        n = len(o)
        if n * (n - 1) // 2 <= self.max_pairs:
            i, j = np.triu_indices(n, 1)
        else:
            i, j = rng.integers(0, n, (2, self.max_pairs))
        keep = owner[i] != owner[j]
        i, j = i[keep], j[keep]
        point, gap, t1, t2 = closest_points(o[i], w[i], o[j], w[j])
        tol = np.sin(np.radians(self.angle_tol_deg))
        crossing = np.linalg.norm(w[i] - (w[i] * w[j]).sum(1, keepdims=True) * w[j], axis=1)
        with np.errstate(invalid="ignore"):
            good = (t1 > 0) & (t2 > 0) & (gap <= tol * (t1 + t2) + 1e-9)
            good &= crossing >= np.sin(np.radians(self.min_crossing_deg))
        point = point[good]
        if len(point) > self.max_candidates:
            point = point[rng.choice(len(point), self.max_candidates, replace=False)]
        return point

    def _grow(self, points: Array, o: Array, w: Array, owner: Array) -> list[Array]:
        support = self.min_support or max(4, round(0.02 * len(np.unique(owner))))
        tol = np.sin(np.radians(self.angle_tol_deg)) ** 2
        near = _angles(points, o, w) <= tol  # (candidates, rays)
        free = np.ones(len(o), bool)
        counts = near.sum(axis=1)
        found: list[Array] = []
        while True:
            best = int(counts.argmax())
            if counts[best] < support:
                return found
            members = near[best] & free
            v = points[best]
            for _ in range(4):  # refine, with the rays that the refined point explains
                v = _robust_point(v, o[members], w[members])
                again = (_angles(v[None], o, w)[0] <= tol) & free
                if again.sum() < 2 or (again == members).all():
                    break
                members = again
            new = all(np.linalg.norm(v - other) >= self.cluster_eps for other in found)
            if new and len(np.unique(owner[members])) >= support:
                found.append(v)
            taken = (members | near[best]) & free  # also those of a point that failed
            counts = counts - near[:, taken].sum(axis=1)
            near[:, taken] = False
            free &= ~taken
            counts[best] = 0

    def visible(self, rx: ArrayLike, doa: ArrayLike | None = None, mask: Any = None) -> Array:
        """Say which virtual transmitters are seen from where.

        Parameters
        ----------
        rx : array_like, shape (n, D)
        doa, mask : array_like, optional
            Measured directions: a virtual transmitter is seen when one of them points at it. (With
            directions, ``angle_tol_deg`` decides.) Without them the nearest receivers vote.

        Returns
        -------
        numpy.ndarray of bool, shape (n, V)
        """
        if not hasattr(self, "virtual_transmitters_"):
            raise NotFittedError("Call fit before asking this DoASearch.")
        positions = check_positions(rx, dim=self.rx_.shape[1])
        if doa is not None:
            directions, valid = check_directions(doa, mask, positions, allow_empty=True)
            to = self.virtual_transmitters_[None] - positions[:, None]
            to = to / np.linalg.norm(to, axis=-1, keepdims=True)
            cosine = np.einsum("nvd,npd->nvp", to, directions)
            near = cosine >= np.cos(np.radians(self.angle_tol_deg))
            return (near & valid[:, None]).any(axis=2)
        k = min(self.k, len(self.rx_))
        _, index = self._tree.query(positions, k=k)
        index = index.reshape(len(positions), k)
        votes = self.seen_[index].sum(axis=1)  # (n, V)
        count = np.rint(self.counts_[index].mean(axis=1)).astype(int)
        order = np.argsort(-votes, axis=1, kind="stable")
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(order.shape[1])[None], axis=1)
        return (rank < count[:, None]) & (votes > 0)

    def predict(self, rx: ArrayLike) -> tuple[Array, Array]:
        """Predict the directions of arrival at new places.

        Parameters
        ----------
        rx : array_like, shape (n, D)

        Returns
        -------
        doa : numpy.ndarray, shape (n, V, D)
        mask : numpy.ndarray of bool, shape (n, V)
        """
        seen = self.visible(rx)
        to = self.virtual_transmitters_[None] - check_positions(rx)[:, None]
        return to / np.linalg.norm(to, axis=-1, keepdims=True), seen

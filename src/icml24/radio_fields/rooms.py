r"""A room and its paths by the image method: exact, vectorised, differentiable.

A wave reflected by flat walls arrives as if it came in a straight line from a mirror image of the
transmitter, a *virtual transmitter*. In a box the images lie on a mirrored lattice: image
:math:`m \in \mathbb Z^D` has, along an axis of length ``L``, the coordinate ``m L + x`` for even
``m`` and ``m L + (L - x)`` for odd ``m``, and its path has ``sum |m|`` reflections.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike

from icml24.radio_fields.channel import (
    Array,
    check_frequency,
    check_positions,
    free_space,
)

__all__ = ["Paths", "ShoeboxRoom", "fresnel"]


@dataclass(frozen=True)
class Paths:
    """All paths from one transmitter to ``n`` receivers, padded to ``P`` for each receiver.

    Parameters
    ----------
    lengths : (n, P)
        Metres.
    doa : (n, P, D)
        Unit vectors from the receiver towards where the path arrives from.
    gain : (n, P) complex
        What the path contributes to the channel, zero where there is none.
    mask : (n, P) bool
        Which entries are paths.
    images : (P, D)
        The virtual transmitters; the first is the transmitter itself.
    """

    lengths: Any
    doa: Any
    gain: Any
    mask: Any
    images: Any


def fresnel(cosine: torch.Tensor, permittivity: float) -> torch.Tensor:
    r"""Reflection coefficient of a lossless dielectric, field parallel to the wall.

    .. math:: \Gamma = \frac{\cos\theta - \sqrt{\epsilon - \sin^2\theta}}
                              {\cos\theta + \sqrt{\epsilon - \sin^2\theta}}

    Parameters
    ----------
    cosine : torch.Tensor
        Cosine of the angle of incidence.
    permittivity : float
        Relative permittivity, at least 1; concrete has about 5.

    Returns
    -------
    torch.Tensor

    Examples
    --------
    >>> round(fresnel(torch.tensor(1.0), 4.0).item(), 4)
    -0.3333
    """
    root = torch.sqrt(permittivity - 1 + cosine**2)
    return (cosine - root) / (cosine + root)


class ShoeboxRoom:
    """A rectangular (2-D) or box-shaped (3-D) room with one corner at the origin.

    Parameters
    ----------
    size : sequence of 2 or 3 floats
        Metres.
    tx : sequence of float
        Position of the transmitter, inside.
    frequency : float
        Hertz.
    max_order : int, default 2
        Largest number of reflections of a path.
    reflection : float or complex, default 1
        Factor for each reflection; 1 is the paper's "perfect reflector".
    permittivity : float, optional
        Takes the place of ``reflection``: Fresnel's coefficient, which depends on the angle.
    obstacles : sequence of (low corner, high corner)
        Boxes inside the room which swallow what hits them (they do not reflect).
    polarization : {None, "vertical"}
        3-D only. "vertical": both antennas have the field along the unit vector of the polar angle,
        and walls are perfect conductors, each reflection turning the field ``E`` into
        ``-E + 2 n (n E)``; ``reflection`` is then a further factor.

    Examples
    --------
    >>> room = ShoeboxRoom((4, 3), (1.0, 0.8), frequency=928e6, max_order=1)
    >>> room.images.round(1).tolist()
    [[1.0, 0.8], [-1.0, 0.8], [1.0, -0.8], [1.0, 5.2], [7.0, 0.8]]
    >>> room.channel([[3.0, 2.0]]).shape
    (1,)
    """

    def __init__(
        self,
        size: Sequence[float],
        tx: Sequence[float],
        *,
        frequency: float,
        max_order: int = 2,
        reflection: complex = 1.0,
        permittivity: float | None = None,
        obstacles: Sequence[tuple[Sequence[float], Sequence[float]]] = (),
        polarization: Literal["vertical"] | None = None,
    ) -> None:
        self.size, self.tx = np.asarray(size, float), np.asarray(tx, float)
        self.frequency = check_frequency(frequency)
        self.max_order, self.reflection = int(max_order), complex(reflection)
        self.permittivity, self.polarization = permittivity, polarization
        self.dim = len(self.size)
        if self.dim not in (2, 3) or not (self.size > 0).all():
            raise ValueError(f"size must be two or three positive lengths, got {size}.")
        if self.tx.shape != self.size.shape:
            raise ValueError(f"tx must have {self.dim} coordinates like the room, got {tx}.")
        if not ((self.tx > 0) & (self.tx < self.size)).all():
            raise ValueError(f"The transmitter {tx} must stand inside the room {size}.")
        if self.max_order < 0:
            raise ValueError(f"max_order must be zero or more, got {max_order}.")
        if permittivity is not None and permittivity < 1:
            raise ValueError(f"permittivity must be at least 1, got {permittivity}.")
        if polarization is not None and self.dim == 2:
            raise ValueError("polarization needs a three-dimensional room.")
        self.obstacles = np.asarray(obstacles, float).reshape(-1, 2, self.dim)
        if not (self.obstacles[:, 0] < self.obstacles[:, 1]).all():
            raise ValueError("Each obstacle needs a low corner below its high corner.")
        span = range(-self.max_order, self.max_order + 1)
        lattice = [m for m in itertools.product(span, repeat=self.dim)]
        lattice = [m for m in lattice if sum(map(abs, m)) <= self.max_order]
        lattice.sort(key=lambda m: (sum(map(abs, m)), m))
        self.lattice = np.array(lattice)
        self.images = self._mirror(self.tx, self.lattice)

    def _mirror(self, points: Array, m: Array) -> Array:
        """Images of ``points`` in the cells ``m`` of the mirrored lattice."""
        return m * self.size + np.where(m % 2 == 0, points, self.size - points)

    def _inside(self, x: Array) -> Array:
        inside = ((x >= 0) & (x <= self.size)).all(axis=1)
        for low, high in self.obstacles:
            inside &= ~((x > low) & (x < high)).all(axis=1)
        return np.asarray(inside)

    def sample_receivers(
        self, n: int, seed: int | np.random.Generator = 0, margin: float = 0.1
    ) -> Array:
        """Draw receivers uniformly, away from walls, obstacles and the transmitter.

        Parameters
        ----------
        n : int
            How many.
        seed : int or numpy.random.Generator
            Source of randomness.
        margin : float, default 0.1
            Metres to the walls and to the transmitter.

        Returns
        -------
        numpy.ndarray, shape (n, D)
        """
        if not 0 <= margin < self.size.min() / 2:
            raise ValueError(f"margin must be between 0 and half the room, got {margin}.")
        rng = np.random.default_rng(seed)
        kept = np.empty((0, self.dim))
        for _ in range(1000):
            x = rng.uniform(margin, self.size - margin, (2 * n + 8, self.dim))
            good = self._inside(x) & (np.linalg.norm(x - self.tx, axis=1) > margin)
            kept = np.concatenate([kept, x[good]])
            if len(kept) >= n:
                return kept[:n]
        raise ValueError("The obstacles leave too little room for receivers.")

    def _blocked(self, rx: Array) -> Array:
        """Which straight lines from receiver to image meet an obstacle or its mirror image.

        A path that is folded at the walls is a straight line through mirrored copies of the room;
        it only crosses cells between 0 and the image's own, and each copy carries the obstacles.
        """
        blocked = np.zeros((len(rx), len(self.images)), bool)
        step = self.images[None] - rx[:, None]  # (n, P, D)
        step = np.where(np.abs(step) < 1e-12, 1e-12, step)
        for cell in self.lattice:
            small, large = np.minimum(0, self.lattice), np.maximum(0, self.lattice)
            crossed = ((cell >= small) & (cell <= large)).all(axis=1)
            for corners in self.obstacles:
                corner = np.sort(self._mirror(corners, cell), axis=0)
                t = (corner[:, None, None] - rx[None, :, None]) / step  # (2, n, P, D)
                enter, leave = t.min(axis=0).max(axis=-1), t.max(axis=0).min(axis=-1)
                hit = (enter < leave) & (leave > 0) & (enter < 1)
                blocked |= hit & crossed
        return blocked

    def _factor(self, direction: torch.Tensor) -> torch.Tensor:
        """Product of the reflection coefficients along each path, (n, P)."""
        m = torch.as_tensor(np.abs(self.lattice))
        if self.permittivity is not None:
            factor = fresnel(direction.abs(), self.permittivity) ** m
            gamma = factor.prod(dim=-1).to(torch.complex128)
        else:
            gamma = torch.as_tensor(self.reflection) ** m.sum(dim=1)
            gamma = gamma.expand(direction.shape[:2])
        if self.polarization is None:
            return gamma
        flip = 1.0 - 2.0 * (m % 2)
        bounce = (-1.0) ** (m.sum(dim=1, keepdim=True) - m)
        travel = -direction  # of the wave at the receiver
        field = _theta_hat(travel * flip) * bounce
        return gamma * (field * _theta_hat(travel)).sum(dim=-1)

    def trace(self, rx: ArrayLike) -> Paths:
        """Find all paths to the receivers.

        Parameters
        ----------
        rx : array_like or torch.Tensor, shape (n, D)
            Receivers inside the room, in metres.

        Returns
        -------
        Paths
            Of NumPy arrays, or of tensors (differentiable in ``rx``) when ``rx`` is a tensor.

        Raises
        ------
        ValueError
            If a receiver is outside the room, inside an obstacle, or on top of the transmitter.
        """
        positions = check_positions(rx, dim=self.dim)
        outside = ~self._inside(positions)
        if outside.any():
            i = int(np.flatnonzero(outside)[0])
            raise ValueError(
                f"Receiver {i} at {positions[i].round(3).tolist()} is outside the room "
                f"{self.size.tolist()} or inside an obstacle; are the units metres?"
            )
        if (np.linalg.norm(positions - self.tx, axis=1) < 1e-6).any():
            raise ValueError("A receiver stands on top of the transmitter.")
        is_tensor = isinstance(rx, torch.Tensor)
        x = rx.double() if isinstance(rx, torch.Tensor) else torch.as_tensor(positions)
        step = torch.as_tensor(self.images) - x[:, None]
        lengths = step.norm(dim=-1)
        doa = step / lengths[..., None]
        mask = torch.as_tensor(~self._blocked(positions))
        gain = free_space(lengths, self.frequency) * self._factor(doa) * mask
        parts = (lengths, doa, gain, mask, torch.as_tensor(self.images))
        return Paths(*(parts if is_tensor else (part.numpy() for part in parts)))

    def channel(self, rx: ArrayLike) -> Any:
        """Return the complex channel of each receiver, eq. (1).

        Parameters
        ----------
        rx : array_like or torch.Tensor, shape (n, D)

        Returns
        -------
        numpy.ndarray or torch.Tensor of complex, shape (n,)
        """
        gain = self.trace(rx).gain
        return gain.sum(dim=-1) if isinstance(gain, torch.Tensor) else gain.sum(axis=-1)


def _theta_hat(direction: torch.Tensor) -> torch.Tensor:
    """Return the unit vector of growing polar angle at each direction, (..., 3)."""
    x, y, z = direction.unbind(-1)
    rho = torch.sqrt(x**2 + y**2).clamp_min(1e-12)
    return torch.stack([z * x / rho, z * y / rho, -rho], dim=-1)

"""Where the sea was measured: ships between real ports, and the real positions of Argo floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from icml24.ocean_oxygen.grid import Nodes, argo_positions, unit_vectors

__all__ = ["PORTS", "great_circle", "observe", "ship_tracks"]

Array = np.ndarray[Any, Any]

#: Latitude and longitude of fifteen ports.
PORTS = {
    "New York": (40.5, -73.5),
    "Rio de Janeiro": (-23.0, -43.0),
    "Cape Town": (-34.0, 18.0),
    "Lisbon": (38.6, -9.5),
    "Reykjavik": (64.0, -22.5),
    "Dakar": (14.7, -17.7),
    "Honolulu": (21.2, -157.8),
    "Yokohama": (35.2, 140.0),
    "San Diego": (32.5, -117.5),
    "Valparaiso": (-33.0, -72.0),
    "Callao": (-12.0, -77.5),
    "Hobart": (-43.5, 147.5),
    "Fremantle": (-32.0, 115.4),
    "Mumbai": (18.8, 72.4),
    "Tromso": (70.3, 18.5),
}

#: Relative number of cruises: thin before 1955, most in 1990, fewer since floats do the work.
_EFFORT = ([1920, 1930, 1940, 1950, 1955, 1970, 1990, 2005, 2023], [2, 3, 2, 4, 10, 22, 40, 24, 14])


def great_circle(start: Array, end: Array, n: int) -> Array:
    """Points on the shortest way between places on the sphere.

    Parameters
    ----------
    start, end : numpy.ndarray, shape (k, 2)
        Latitude and longitude in degrees.
    n : int
        Points on each way, with both ends.

    Returns
    -------
    numpy.ndarray, shape (k, n, 2)

    Examples
    --------
    >>> way = great_circle(np.array([[0.0, 170.0]]), np.array([[0.0, -170.0]]), 3)
    >>> way[0].round(6).tolist()
    [[0.0, 170.0], [0.0, 180.0], [0.0, -170.0]]
    """
    a, b = unit_vectors(*start.T), unit_vectors(*end.T)
    angle = np.arccos(np.clip((a * b).sum(-1), -1, 1))[:, None, None]
    t = np.linspace(0, 1, n)[:, None]
    safe = np.where(np.sin(angle) > 1e-9, np.sin(angle), 1.0)
    way = (np.sin((1 - t) * angle) * a[:, None] + np.sin(t * angle) * b[:, None]) / safe
    lat = np.degrees(np.arcsin(np.clip(way[..., 2], -1, 1)))
    return np.stack([lat, np.degrees(np.arctan2(way[..., 1], way[..., 0]))], axis=-1)


def ship_tracks(n: int, rng: np.random.Generator, points: int = 60) -> Array:
    """Draw cruises between two of the ports, each with a detour of up to 25 degrees.

    Parameters
    ----------
    n : int
    rng : numpy.random.Generator
    points : int
        Stations on each cruise.

    Returns
    -------
    numpy.ndarray, shape (n, points, 2)
        Latitude and longitude. Stations on land are for the caller to drop.

    Examples
    --------
    >>> ship_tracks(2, np.random.default_rng(0)).shape
    (2, 60, 2)
    """
    ports = np.array(list(PORTS.values()))
    first = rng.integers(len(ports), size=n)
    last = (first + rng.integers(1, len(ports), size=n)) % len(ports)
    middle = great_circle(ports[first], ports[last], 3)[:, 1]
    middle += rng.uniform(-25, 25, (n, 2))
    middle[:, 0] = np.clip(middle[:, 0], -75, 80)
    half = points // 2
    ways = [
        great_circle(ports[first], middle, half),
        great_circle(middle, ports[last], points - half),
    ]
    return np.concatenate(ways, axis=1)


def _cells(nodes: Nodes, lat: Array, lon: Array) -> Array:
    """Row and column of the grid cell of each place (regular grids from -180 to 180 degrees)."""
    n_lat, n_lon = nodes.wet.shape[1:]
    i = np.clip(((lat + 90) / (180 / n_lat)).astype(int), 0, n_lat - 1)
    j = ((lon + 180) / (360 / n_lon)).astype(int) % n_lon
    return np.stack([i, j], axis=-1)


def observe(
    nodes: Nodes, years: Array, share: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Say which nodes are measured in which year.

    Floats come first, down to 2,000 m: of the cells and years where Argo floats really measured, a
    random part that makes up a third of all measurements (on a coarse grid all of them would fill
    half of the sea). Then cruises, each to a depth of its own and with an effort that follows
    history, until the asked share is reached.

    Parameters
    ----------
    nodes : Nodes
    years : numpy.ndarray, shape (T,)
    share : float
        Share of nodes and years with a measurement.
    rng : numpy.random.Generator

    Returns
    -------
    seen, with_nutrients : numpy.ndarray of bool, shape (T, N)
        The second marks two fifths of the ships' stations.
    """
    n_lat, n_lon = nodes.wet.shape[1:]
    floats = np.zeros((len(years), n_lat, n_lon), bool)
    argo = argo_positions()
    argo = argo[argo["year"].between(years[0], years[-1])]
    floats[(argo["year"] - years[0]).to_numpy(), *_cells(nodes, argo["lat"], argo["lon"]).T] = True
    levels = np.unique(nodes.depth)
    reached = (levels <= 2000)[:, None, None] & nodes.wet
    wanted = share * len(nodes) * len(years)
    keep = wanted / 3 / max((floats[:, None] & reached).sum(), 1)
    seen = (floats & (rng.random(floats.shape) < keep))[:, None] & reached
    nutrients = np.zeros_like(seen)
    effort = np.interp(years, *_EFFORT)
    depths = np.array([400.0, 1000.0, 2000.0, 6000.0])
    while seen.sum() < wanted:
        n = max(int(0.003 * effort.sum()), 1)
        year = rng.choice(len(years), size=n, p=effort / effort.sum())
        reach = levels[None, :] <= rng.choice(depths, size=n)[:, None]
        for t, track, deep in zip(year, ship_tracks(n, rng), reach, strict=True):
            i, j = np.unique(_cells(nodes, *track.T), axis=0).T
            chemist = rng.random(len(i)) < 0.4
            seen[t, :, i, j] |= deep & nodes.wet[:, i, j].T
            nutrients[t, :, i, j] |= chemist[:, None] & deep & nodes.wet[:, i, j].T
    return nodes.gather(seen), nodes.gather(nutrients)

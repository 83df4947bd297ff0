"""A synthetic century of oxygen on the real ocean, and biased simulations of it.

No package carries measured oxygen, so the truth is made up here: the solubility of real temperature
and salinity, minus a utilisation (AOU) with the shapes that oceanographers know: old deep water in
the Pacific, shadow zones of low oxygen under the eastern tropics, slow growth over the century.
What is real: coasts, sea floor, temperature, salinity, and where Argo floats went.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr

from icml24.ocean_oxygen.chemistry import solubility
from icml24.ocean_oxygen.grid import Nodes, ocean_grid, unit_vectors
from icml24.ocean_oxygen.sampling import observe

__all__ = ["Core", "World", "make_ocean", "random_field", "simulate_members", "warming"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Core:
    """An oxygen-minimum zone: centre, half-widths (degrees), depth (m), AOU at its heart."""

    lat: float
    lon: float
    height: float
    width: float
    depth: float
    strength: float


#: Eastern tropical North and South Pacific, Arabian Sea, Bay of Bengal, Benguela, North Pacific,
#: Canary.
CORES = (
    Core(13, -108, 9, 26, 450, 200),
    Core(-10, -84, 9, 20, 400, 210),
    Core(16, 64, 8, 10, 500, 210),
    Core(14, 89, 7, 8, 400, 180),
    Core(-16, 8, 9, 10, 350, 140),
    Core(45, 170, 12, 35, 800, 110),
    Core(14, -22, 9, 12, 400, 130),
)


@dataclass(frozen=True)
class World:
    """Everything that fixes a century of oxygen.

    Parameters
    ----------
    cores : tuple of Core
    deep : tuple of float
        AOU of the deep water of each basin (µmol/kg).
    growth : tuple of float
        Growth of AOU from 1920 to 2023, by basin (share).
    internal : float
        Standard deviation of ten slow modes (first-order autoregressive, 0.75 a year).
    fine, yearly : float
        Standard deviation of lasting fine structure and of each year's own.
    coastal : float
        Loss on the shelves from 1965 to 2023 (µmol/kg).
    seed : int
        Of the modes and the fine structure.
    """

    cores: tuple[Core, ...] = CORES
    deep: tuple[float, ...] = (75.0, 165.0, 140.0, 115.0, 45.0, 90.0)
    growth: tuple[float, ...] = (0.03, 0.06, 0.045, 0.06, 0.03, 0.035)
    internal: float = 9.0
    fine: float = 9.0
    yearly: float = 4.0
    coastal: float = 12.0
    seed: int = 0


def random_field(
    nodes: Nodes, n_fields: int, degrees: float, rng: np.random.Generator, n_waves: int = 96
) -> Array:
    """Smooth random fields on the sphere with unit variance, correlated over about ``degrees``.

    Parameters
    ----------
    nodes : Nodes
    n_fields : int
    degrees : float
        Correlation length on the surface; in depth it is a factor of two.
    rng : numpy.random.Generator
    n_waves : int
        Random cosines that make up a field.

    Returns
    -------
    numpy.ndarray, shape (n_fields, N)
    """
    scale = np.radians(degrees)
    place = unit_vectors(nodes.lat, nodes.lon) / scale
    place = np.column_stack([place, np.log2(1 + nodes.depth / 100)])
    waves = rng.normal(size=(4, n_waves))
    phase = rng.uniform(0, 2 * np.pi, n_waves)
    weights = rng.normal(size=(n_waves, n_fields)) * np.sqrt(2 / n_waves)
    return (np.cos(place @ waves + phase) @ weights).T


def warming(nodes: Nodes, years: Array) -> Array:
    """Simulate the warming since 1920 (degrees Celsius), shape (years, N): most at the surface."""
    course = np.clip((years - 1920) / 103, 0, None) ** 1.8
    pattern = np.exp(-nodes.depth / 400) * (1 + 0.4 * np.sin(np.radians(nodes.lat)) ** 2)
    return 0.7 * course[:, None] * pattern


def _by_basin(nodes: Nodes, values: tuple[float, ...], blur: float = 9.0) -> Array:
    """Spread one number for each basin over the nodes, with soft borders between basins."""
    place = unit_vectors(nodes.lat, nodes.lon)
    surface = np.unique(np.column_stack([place, nodes.basin]), axis=0)
    weight = np.exp((place @ surface[:, :3].T - 1) / np.radians(blur) ** 2)
    return weight @ np.asarray(values)[surface[:, 3].astype(int)] / weight.sum(axis=1)


def utilisation(world: World, nodes: Nodes) -> Array:
    """AOU of 1920 at the nodes, without internal variability and fine structure."""
    aou = _by_basin(nodes, world.deep) * (1 - np.exp(-nodes.depth / 650)) - 3.0
    for core in world.cores:
        east = (nodes.lon - core.lon + 180) % 360 - 180
        distance = ((nodes.lat - core.lat) / core.height) ** 2 + (east / core.width) ** 2
        ratio = nodes.depth / core.depth
        aou += core.strength * np.exp(-distance / 2) * ratio * np.exp(1 - ratio)
    return aou


def _variability(world: World, nodes: Nodes, years: Array) -> Array:
    rng = np.random.default_rng([11, world.seed])
    modes = random_field(nodes, 10, 24.0, rng) * np.exp(-nodes.depth / 1500)
    steps = rng.normal(size=(len(years) + 40, 10))
    state, course = np.zeros(10), []
    for step in steps:  # forty years to forget the start
        state = 0.75 * state + np.sqrt(1 - 0.75**2) * step
        course.append(state)
    change = world.internal / np.sqrt(10) * np.array(course[40:]) @ modes
    change += world.fine * random_field(nodes, 1, 7.0, rng)
    return change + world.yearly * random_field(nodes, len(years), 8.0, rng)


def _at_coast(nodes: Nodes) -> Array:
    """Shallow nodes with land beside them in the top level, as 0 or 1."""
    land = ~nodes.wet[0]
    up, down = np.zeros_like(land), np.zeros_like(land)
    up[1:], down[:-1] = land[:-1], land[1:]
    beside = up | down | np.roll(land, 1, axis=1) | np.roll(land, -1, axis=1)
    return nodes.gather(beside) * (nodes.depth <= 200)


def simulate(
    world: World, nodes: Nodes, years: Array, temperature: Array, salinity: Array
) -> Array:
    """Oxygen of a world, shape (years, N): solubility minus utilisation, never much below 20.

    Parameters
    ----------
    world : World
    nodes : Nodes
    years : numpy.ndarray, shape (T,)
    temperature, salinity : numpy.ndarray, shape (T, N) and (N,)

    Returns
    -------
    numpy.ndarray
        µmol/kg.
    """
    course = np.clip((years - 1920) / 103, 0, None) ** 2.2
    growth = 1 + course[:, None] * _by_basin(nodes, world.growth)
    oxygen = solubility(temperature, salinity, nodes.depth) - utilisation(world, nodes) * growth
    oxygen -= _variability(world, nodes, years)
    shelf = np.clip((years - 1965) / 58, 0, None)[:, None] * _at_coast(nodes)
    oxygen -= world.coastal * shelf
    return 20 + 8 * np.logaddexp(0, (oxygen - 20) / 8)


def _nutrients(nodes: Nodes, aou: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Phosphate and nitrate that belong to an AOU, with ratios that differ from zone to zone."""
    ratio = 160 + 15 * random_field(nodes, 1, 40.0, rng)
    initial = 0.4 + 0.9 * np.sin(np.radians(nodes.lat)) ** 2
    phosphate = np.clip(initial + aou / ratio + rng.normal(0, 0.06, aou.shape), 0.02, None)
    lost = 6 / (1 + np.exp((180 - aou) / 20))  # denitrification where oxygen is nearly gone
    nitrate = np.clip(16 * phosphate - lost + rng.normal(0, 0.8, aou.shape), 0.1, None)
    return phosphate, nitrate


def make_ocean(
    seed: int = 0,
    step: int = 6,
    years: tuple[int, int] = (1920, 2023),
    *,
    levels: int | None = None,
    share: float = 0.0374,
) -> xr.Dataset:
    """Simulate a century of oxygen and its measurement.

    Parameters
    ----------
    seed : int
        Of this ocean's variability, ships and measurement errors.
    step : {4, 6, 12}
        Degrees between cells.
    years : (int, int)
        First and last year.
    levels : int, optional
        Only this many levels from the top.
    share : float, default 0.0374
        Share of all cells and years that hold a measurement (the paper: 3.735 %); ships are added
        to the real positions of Argo floats until it is reached.

    Returns
    -------
    xarray.Dataset
        Dimensions year, depth, lat, lon. ``oxygen`` (measurements, else NaN), ``truth`` (dense),
        ``temperature``, ``salinity``, ``phosphate`` and ``nitrate`` (at two fifths of the ships'
        stations), ``bathymetry``, ``basin``, ``wet``.

    Examples
    --------
    >>> ds = make_ocean(0, step=12, years=(1990, 1993), levels=3)
    >>> dict(ds.sizes), ds.oxygen.attrs["units"]
    ({'year': 4, 'depth': 3, 'lat': 15, 'lon': 30}, 'umol kg-1')
    """
    if not 1850 <= years[0] < years[1] <= 2100:
        raise ValueError(f"years must be (first, last) between 1850 and 2100, got {years}.")
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1, got {share}.")
    grid = ocean_grid(step, levels)
    nodes, time = Nodes.of(grid), np.arange(years[0], years[1] + 1)
    rng = np.random.default_rng([12, seed])
    base = World()
    world = replace(
        base,
        cores=tuple(replace(c, strength=c.strength * rng.uniform(0.85, 1.15)) for c in base.cores),
        growth=tuple(g * rng.uniform(0.8, 1.2) for g in base.growth),
        seed=seed,
    )
    salinity = nodes.gather(grid["salinity"])
    temperature = nodes.gather(grid["temperature"]) + warming(nodes, time)
    truth = simulate(world, nodes, time, temperature, salinity)
    aou = solubility(temperature, salinity, nodes.depth) - truth
    phosphate, nitrate = _nutrients(nodes, aou, rng)
    seen, with_nutrients = observe(nodes, time, share, rng)
    oxygen = np.where(seen, np.clip(truth + rng.normal(0, 5, truth.shape), 0, None), np.nan)

    full = ("year", "depth", "lat", "lon")
    ds = grid.assign_coords(year=time)
    ds["temperature"] = (full, nodes.scatter(temperature), grid["temperature"].attrs)
    for name, substance, values in (
        ("oxygen", "oxygen", oxygen),
        ("truth", "oxygen", truth),
        ("phosphate", "phosphate", np.where(with_nutrients, phosphate, np.nan)),
        ("nitrate", "nitrate", np.where(with_nutrients, nitrate, np.nan)),
    ):
        title = f"moles_of_{substance}_per_unit_mass_in_sea_water"
        ds[name] = (full, nodes.scatter(values), {"units": "umol kg-1", "standard_name": title})
    ds["year"].attrs["long_name"] = "calendar year"
    ds.attrs["source"] = "oxygen, nutrients simulated on real temperature, salinity, sea floor"
    ds.attrs["world"] = repr(world)
    return ds


def simulate_members(ds: xr.Dataset, seed: int = 0, n: int = 3) -> xr.DataArray:
    """Make biased "numerical simulations" of an ocean: displaced minima, wrong depths and trends.

    The size of their errors (R² of 0.5 to 0.75) is like that of real simulations against measured
    oxygen, but it is our choice.

    Parameters
    ----------
    ds : xarray.Dataset
        From :func:`make_ocean`.
    seed : int
    n : int, default 3
        Number of members.

    Returns
    -------
    xarray.DataArray
        Dimensions member, year, depth, lat, lon (µmol/kg).

    Examples
    --------
    >>> ds = make_ocean(0, step=12, years=(1990, 1993), levels=3)
    >>> simulate_members(ds).sizes["member"]
    3
    """
    if n < 1:
        raise ValueError(f"n must be at least one member, got {n}.")
    nodes, years = Nodes.of(ds), np.asarray(ds["year"])
    temperature, salinity = nodes.gather(ds["temperature"]), nodes.gather(ds["salinity"])
    fields = []
    for member in range(n):
        rng = np.random.default_rng([13, seed, member])
        cores = []
        for core in CORES:
            shift, angle = rng.uniform(20, 32), rng.uniform(0, 2 * np.pi)
            north = np.clip(core.lat + shift * np.sin(angle) / 2, -60, 60)
            moved = replace(core, lat=float(north), lon=core.lon + shift * np.cos(angle))
            cores.append(replace(moved, strength=core.strength * rng.uniform(0.5, 1.6)))
        base = World()
        deep = (max(d + rng.choice([-1, 1]) * rng.uniform(25, 35), 10.0) for d in base.deep)
        growth = (g * rng.uniform(-0.5, 2.0) for g in base.growth)
        world = World(tuple(cores), tuple(deep), tuple(growth), fine=0, yearly=0, coastal=0)
        world = replace(world, seed=1000 + 10 * seed + member)
        fields.append(nodes.scatter(simulate(world, nodes, years, temperature, salinity)))
    coordinates = {name: ds[name] for name in ("year", "depth", "lat", "lon")}
    dims = ("member", *coordinates)
    members = xr.DataArray(np.stack(fields), coordinates, dims, name="simulation")
    return members.assign_attrs(units="umol kg-1", long_name="biased simulation of oxygen")

"""Experiments of the chapter: pure functions ``(config, seed) -> record``.

A seed names an ocean, its ships and errors, a split, and the networks' initialisation. The results
of the book are stored in ``data`` (they take about an hour of one core);
``python -m icml24.ocean_oxygen.experiments`` makes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr

from icml24.core.experiments import ResultCache, read_records, run, write_records
from icml24.ocean_oxygen.base import FieldEstimator
from icml24.ocean_oxygen.bottles import load_bottles
from icml24.ocean_oxygen.conformal import coverage
from icml24.ocean_oxygen.grid import BASINS, Nodes, cell_volume, monthly_temperature, ocean_grid
from icml24.ocean_oxygen.metrics import (
    low_volume,
    mape,
    r2,
    regional_table,
    rmse,
    trend,
    weighted_mean,
)
from icml24.ocean_oxygen.peers import IDW, Kriging, Tabular
from icml24.ocean_oxygen.reconstructor import Reconstructor
from icml24.ocean_oxygen.sampling import ship_tracks
from icml24.ocean_oxygen.splits import (
    block_split,
    source_split,
    spatial_split,
    temporal_split,
)
from icml24.ocean_oxygen.world import make_ocean, simulate_members

__all__ = [
    "EXPERIMENTS",
    "METHODS",
    "SMALL",
    "TABLES",
    "Config",
    "bottles",
    "build",
    "century",
    "held_out",
    "hidden_temperature",
    "make_records",
    "ocean",
    "real_bottles",
    "real_temperature",
    "simulations",
    "stored",
]

SPLITS = {"block": block_split, "temporal": temporal_split, "spatial": spatial_split}


@dataclass(frozen=True)
class Config:
    """Settings of the experiments.

    Attributes
    ----------
    step : int
        Grid, degrees.
    levels : int or None
        Only this many levels from the top.
    first, last : int
        Years.
    method : str
        One of :data:`METHODS`.
    split : {"block", "temporal", "spatial"}
    steps, batch_size, lstm_layers : int
        Of the networks and their training.
    dense : tuple of str
        Methods whose whole field is reconstructed, too.
    every : int
        Years between those fields.
    tracks : int
        Ship tracks in each month of :func:`real_temperature`.
    quantity : {"temperature", "salinity"}
        What :func:`real_bottles` reconstructs.
    """

    step: int = 6
    levels: int | None = None
    first: int = 1920
    last: int = 2023
    method: str = "OxyGenerator"
    split: str = "block"
    steps: int = 600
    batch_size: int = 200
    lstm_layers: int = 1
    dense: tuple[str, ...] = ("OxyGenerator", "no zones", "IDW")
    every: int = 5
    tracks: int = 12
    quantity: str = "temperature"

    @classmethod
    def laptop(cls) -> Config:
        """Return the size the book runs."""
        return cls()

    @classmethod
    def small(cls) -> Config:
        """Return a coarse ocean, on which a notebook trains in seconds."""
        return replace(cls(), **{name: values[0] for name, values in SMALL.items()})

    @classmethod
    def paper(cls) -> Config:
        """Return the finest grid that ships, and the length of the authors' training log."""
        return replace(cls(), step=4, steps=100_000, batch_size=64, lstm_layers=2, every=1)


def build(config: Config, seed: int, **common: Any) -> FieldEstimator:
    """Build the configured method; ``common`` goes to it, for example ``target="raw"``."""
    if config.method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {config.method!r}.")
    kind, options = METHODS[config.method]
    if kind is Reconstructor:
        common = {
            "validate_every": 100,
            "steps": config.steps,
            "batch_size": config.batch_size,
            **common,
        }
        common = {"random_state": seed, "lstm_layers": config.lstm_layers, **common}
    return kind(**{**common, **options})


#: Class and settings of each method.
METHODS: dict[str, tuple[Callable[..., FieldEstimator], dict[str, Any]]] = {
    "OxyGenerator": (Reconstructor, {}),
    "no zones": (Reconstructor, {"conv": "plain"}),
    "no zones, wide": (Reconstructor, {"conv": "plain", "hidden_channels": 64}),
    "areas": (Reconstructor, {"conv": "area"}),
    "no window": (Reconstructor, {"window": 0}),
    "chemistry": (Reconstructor, {"lam_chem": 0.05}),
    "adaptive": (Reconstructor, {"adaptive": True}),
    "bare": (Reconstructor, {"fourier": False, "stabilise": False}),
    "records": (Reconstructor, {"records": True}),
    "GCN": (Reconstructor, {"conv": "gcn"}),
    "GraphSAGE": (Reconstructor, {"conv": "sage"}),
    "GAT": (Reconstructor, {"conv": "gat"}),
    "MLP": (Reconstructor, {"conv": "none"}),
    "IDW": (IDW, {}),
    "kriging": (Kriging, {}),
    "LightGBM": (Tabular, {}),
}


def ocean(config: Config, seed: int) -> tuple[xr.Dataset, xr.DataArray]:
    """Simulate the seed's ocean and deal its measurements to the roles."""
    ds = make_ocean(seed, config.step, (config.first, config.last), levels=config.levels)
    return ds, SPLITS[config.split](ds, seed)


def _scores(truth: Any, prediction: Any) -> dict[str, float]:
    return {
        "rmse": rmse(truth, prediction),
        "mape": mape(truth, prediction),
        "r2": r2(truth, prediction),
    }


def century(model: FieldEstimator, ds: xr.Dataset, every: int) -> dict[str, Any]:
    """Reconstruct the whole field, every few years, and compare with the dense truth.

    Returns
    -------
    dict
        ``years``; volume-weighted means ``mean_truth`` and ``mean_model``; shares of the volume
        below 100 and 60 µmol/kg, ``low_truth``, ``low_model``, ``core_truth``, ``core_model``, and
        ``low_lower``, ``low_upper`` from the intervals' ends; ``change_truth``, ``change_model``
        (1960 to 2010, µmol/kg) and ``ratio``; ``rmse`` and ``coverage`` over all cells.
    """
    years = np.asarray(ds["year"])[::every]
    result, truth = model.predict(years), ds["truth"].sel(year=years)
    volume = cell_volume(ds)
    means = weighted_mean(truth, volume), weighted_mean(result["oxygen"], volume)
    first, last = max(1960, int(years[0])), min(2010, int(years[-1]))
    change = [trend(series, years, first, last) for series in means]
    wet = np.isfinite(truth.to_numpy())
    names = ("oxygen", "oxygen_lower", "oxygen_upper")
    dense, (mean, lower, upper) = truth.to_numpy()[wet], (result[n].to_numpy()[wet] for n in names)
    return {
        "years": years,
        "mean_truth": means[0],
        "mean_model": means[1],
        "low_truth": low_volume(truth, volume, 100),
        "low_model": low_volume(result["oxygen"], volume, 100),
        "low_upper": low_volume(result["oxygen_lower"], volume, 100),
        "low_lower": low_volume(result["oxygen_upper"], volume, 100),
        "core_truth": low_volume(truth, volume, 60),
        "core_model": low_volume(result["oxygen"], volume, 60),
        "change_truth": change[0],
        "change_model": change[1],
        "ratio": change[1] / change[0],
        "rmse": rmse(dense, mean),
        "coverage": coverage(dense, lower, upper),
    }


def held_out(config: Config, seed: int) -> dict[str, Any]:
    """Fit the configured method and compare with the test measurements.

    Returns
    -------
    dict
        ``rmse``, ``mape`` (over at least 5 µmol/kg), ``r2``; ``coverage`` of the intervals of
        nominal 90 %; ``basins`` (RMSE by basin); for networks ``validation`` (the curve); for the
        method, with and without chemistry, ``sensitivity`` (R, the variance of the sensitivity to
        the nutrients); for the methods of ``config.dense`` :func:`century`.
    """
    torch.set_num_threads(1)
    ds, split = ocean(config, seed)
    model = build(config, seed).fit(ds, split)
    table = model.held_out()
    basins = regional_table(table["truth"], table["mean"], table["basin"])["RMSE"]
    record: dict[str, Any] = {
        **_scores(table["truth"], table["mean"]),
        "coverage": coverage(table["truth"], table["lower"], table["upper"]),
        "basins": {name: basins.get(name) for name in BASINS},
    }
    if isinstance(model, Reconstructor):
        record["validation"] = [entry["validation"] for entry in model.history_]
        if config.method in ("OxyGenerator", "chemistry"):
            record["sensitivity"] = model.sensitivity_variance()
    if config.split == "block" and config.method in config.dense:
        record["century"] = century(model, ds, config.every)
    return record


def simulations(config: Config, seed: int) -> dict[str, Any]:
    """Compare three biased simulations and their mean with the test measurements.

    Returns
    -------
    dict
        ``best`` (the scores of the member with the smallest test MAPE, which is generous), ``mean``
        (those of the members' mean) and ``members`` (all of them); ``basins`` (RMSE of the mean).
    """
    ds, split = ocean(config, seed)
    nodes, test = Nodes.of(ds), Nodes.of(ds).gather(split) == 3
    truth = nodes.gather(ds["oxygen"])[test]
    members = [nodes.gather(member)[test] for member in simulate_members(ds, seed)]
    scores = [_scores(truth, member) for member in members]
    mean = np.mean(members, axis=0)
    basins = regional_table(truth, mean, np.broadcast_to(nodes.basin, test.shape)[test])["RMSE"]
    return {
        "best": min(scores, key=lambda score: score["mape"]),
        "mean": _scores(truth, mean),
        "members": {f"member {i + 1}": score for i, score in enumerate(scores)},
        "basins": {name: basins.get(name) for name in BASINS},
    }


def hidden_temperature(config: Config, seed: int) -> tuple[xr.Dataset, xr.DataArray]:
    """Hide real monthly temperature except along ship tracks.

    The tracks are simulated, the temperatures real. Measured cells are dealt to training, stopping
    and calibration by blocks; a fifth of the hidden ones is the test set.

    Returns
    -------
    ds : xarray.Dataset
        ``temperature`` everywhere; "years" are months.
    split : xarray.DataArray
    """
    ds, rng = monthly_temperature(), np.random.default_rng([16, seed])
    ds["temperature"] = ds["temperature"].where(ds["wet"])
    seen = np.zeros((12, 30, 60), bool)
    tracks = ship_tracks(12 * config.tracks, rng).reshape(12, -1, 2)
    i = np.clip(((tracks[..., 0] + 90) / 6).astype(int), 0, 29)
    j = ((tracks[..., 1] + 180) / 6).astype(int) % 60
    seen[np.arange(12)[:, None], i, j] = True
    measured = ds["temperature"].where(xr.DataArray(seen, dims=("year", "lat", "lon")))
    shares = (0.8, 0.1, 0.1, 0.0)
    split = block_split(ds.assign(measured=measured), seed, shares, variable="measured")
    hidden = np.isfinite(ds["temperature"].to_numpy()) & (split.to_numpy() < 0)
    split.values[hidden & (rng.random(hidden.shape) < 0.2)] = 3
    return ds, split


def real_temperature(config: Config, seed: int) -> dict[str, Any]:
    """Reconstruct hidden real temperature with the configured method.

    Returns
    -------
    dict
        ``rmse`` (degrees Celsius), ``r2``, ``coverage``, and ``share`` of cells that were measured.
    """
    torch.set_num_threads(1)
    ds, split = hidden_temperature(config, seed)
    model = build(config, seed, variable="temperature", target="raw").fit(ds, split)
    table = model.held_out()
    roles = split.to_numpy()[np.isfinite(ds["temperature"].to_numpy())]
    return {
        "rmse": rmse(table["truth"], table["mean"]),
        "r2": r2(table["truth"], table["mean"]),
        "coverage": coverage(table["truth"], table["lower"], table["upper"]),
        "share": float(((roles >= 0) & (roles < 3)).mean()),
    }


def bottles(config: Config, seed: int) -> tuple[xr.Dataset, xr.DataArray]:
    """Sort real bottles into the grid and hold out whole sources.

    Returns
    -------
    ds : xarray.Dataset
        The measured quantity, sea floor and basins; no climatology.
    split : xarray.DataArray
        A quarter of the bottles is the test set, all bottles of some of the publications.
    """
    name = config.quantity
    units = {"temperature": "degree_Celsius", "salinity": "1"}[name]
    grid = ocean_grid(config.step, config.levels)[["wet", "bathymetry", "basin"]]
    table, shares = load_bottles().dropna(subset=[name]), (0.55, 0.1, 0.1, 0.25)
    return source_split(table, grid, (1949, 2009), seed, shares, variable=name, units=units)


def real_bottles(config: Config, seed: int) -> dict[str, Any]:
    """Reconstruct real bottles of held-out sources from the bottles of all others.

    Nothing is simulated. The questions were fixed before the first run: is the whole 95 % interval
    of the difference in RMSE below zero, for the network minus the better of IDW and kriging, and
    for the network with zones minus that without? Temperature is the main quantity. The method
    "Levitus" is the climatology, which is not fitted to these bottles but was made from far more
    casts, perhaps with some of the older bottles among them.

    Returns
    -------
    dict
        ``rmse`` and ``mae`` (degrees Celsius or practical salinity; percentages mean nothing near
        0 °C); ``late``, the RMSE of the bottles since 1995; ``coverage`` of the intervals of
        nominal 90 % (missing for Levitus, which has none); ``n``, the number of test cells.
    """
    torch.set_num_threads(1)
    ds, split = bottles(config, seed)
    atlas = config.method == "Levitus"
    common = {"variable": config.quantity, "target": "raw"}
    model = build(replace(config, method="IDW") if atlas else config, seed, **common).fit(ds, split)
    table = model.held_out()
    truth, guess = table["truth"].to_numpy(), table["mean"].to_numpy()
    if atlas:
        field = ocean_grid(config.step, config.levels)[config.quantity]
        guess = model.problem_.nodes.gather(field)[table["node"]]
    late = table["year"].to_numpy() >= 1995
    return {
        "rmse": rmse(truth, guess),
        "mae": float(np.abs(truth - guess).mean()),
        "late": rmse(truth[late], guess[late]),
        "coverage": None if atlas else coverage(truth, table["lower"], table["upper"]),
        "n": len(truth),
    }


#: A coarse ocean, on which a notebook trains in seconds.
SMALL: dict[str, list[Any]] = {"step": [12], "levels": [6], "steps": [200]}

_PEERS = ["IDW", "kriging", "LightGBM"]
_STORED = ["OxyGenerator", "no zones", "no window", "chemistry", "GCN", "GraphSAGE", "GAT", *_PEERS]

#: File, experiment and varied settings of each stored table. The remaining methods are for
#: ``run(held_out, Config(), grid={"method": [...]})``.
TABLES: dict[str, tuple[Callable[[Config, int], Mapping[str, Any]], dict[str, list[Any]]]] = {
    "simulations": (simulations, {}),
    "held_out": (held_out, {"method": _STORED}),
    "real_temperature": (real_temperature, {"method": ["OxyGenerator", *_PEERS]}),
    "small": (held_out, {**SMALL, "method": ["OxyGenerator"]}),
    "splits": (
        held_out,
        {"method": ["OxyGenerator", "no zones", *_PEERS], "split": ["temporal", "spatial"]},
    ),
    "bottles": (
        real_bottles,
        {
            "quantity": ["temperature", "salinity"],
            "method": ["OxyGenerator", "no zones", *_PEERS, "Levitus"],
        },
    ),
    "switches": (held_out, {"method": ["no zones, wide", "areas", "adaptive", "bare", "records"]}),
}


def stored(name: str) -> pd.DataFrame:
    """Read a stored table.

    Parameters
    ----------
    name : str
        One of :data:`TABLES`.

    Returns
    -------
    pandas.DataFrame
        One row for each setting and seed.

    Examples
    --------
    >>> stored("simulations")["seed"].tolist()
    [0, 1, 2, 3, 4]
    """
    return read_records("icml24.ocean_oxygen", f"{name}.json")


def make_records(
    config: Config, seeds: int | list[int] = 5, folder: Path | None = None, **options: Any
) -> None:
    """Run all stored experiments and write their tables.

    Parameters
    ----------
    config : Config
    seeds : int or list of int
    folder : path, optional
        The column's folder ``data`` by default.
    **options
        Passed to :func:`icml24.core.experiments.run`, for example ``jobs`` and ``cache``.
    """
    folder = Path(__file__).parent / "data" if folder is None else folder
    for name, (experiment, grid) in TABLES.items():
        write_records(folder / f"{name}.json", run(experiment, config, seeds, grid=grid, **options))


EXPERIMENTS: dict[str, Callable[[Config, int], Mapping[str, Any]]] = {
    "held_out": held_out,
    "simulations": simulations,
    "real_temperature": real_temperature,
    "real_bottles": real_bottles,
}

if __name__ == "__main__":
    from icml24.ocean_oxygen import experiments

    experiments.make_records(experiments.Config.laptop(), cache=ResultCache())

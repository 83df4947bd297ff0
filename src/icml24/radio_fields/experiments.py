"""Experiments of the chapter: pure functions ``(config, seed) -> record``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from icml24.core.experiments import read_records, run, write_records
from icml24.radio_fields.channel import Array, per_receiver_nmse, prediction_snr
from icml24.radio_fields.doa_search import DoASearch, recall
from icml24.radio_fields.estimator import ChannelPredictor
from icml24.radio_fields.newrf import NeWRF
from icml24.radio_fields.peers import RBFGP, CoordinateMLP, HelmholtzGP, NearestNeighbours
from icml24.radio_fields.rooms import ShoeboxRoom
from icml24.radio_fields.sionna_scene import Box, SionnaScene, furnished_room
from icml24.radio_fields.sources import SourceField, VirtualTransmitterRegressor
from icml24.radio_fields.survey import ChannelDataset

__all__ = [
    "EXPERIMENTS",
    "FURNITURE",
    "ROOM",
    "STORED_VARIANTS",
    "VARIANTS",
    "Config",
    "Survey",
    "build_newrf",
    "closed_form",
    "furnished_places",
    "interpolators",
    "newrf",
    "noisy_directions",
    "search",
    "simulate",
    "stored_ablations",
    "stored_survey",
    "trace_furnished",
]

Variant = Literal["newrf", "optical", "uniform", "no phase", "no path loss", "extra rays"]
VARIANTS: tuple[Variant, ...] = (
    "newrf",
    "optical",
    "uniform",
    "no phase",
    "no path loss",
    "extra rays",
)


@dataclass(frozen=True)
class Config:
    """Settings of all experiments of this chapter.

    Attributes
    ----------
    frequency : float
        Hertz.
    size, tx : tuple of float
        The room and its transmitter, metres.
    order : int
        Largest number of reflections.
    permittivity : float or None
        Fresnel reflection instead of perfect reflectors.
    noise_db : float or None
        Power of measurement noise relative to the mean channel power.
    n_train, n_test : int
        Receivers. Training sets of growing size are nested; the test set stays.
    doa_error_deg : float
        Error of the measured directions of the closed forms and the search (uniform, both angles).
    variant : str
        One of ``VARIANTS``.
    compact : bool
        NeWRF's settings for a laptop, or the paper's.
    steps, batch, restarts, far
        See :class:`~icml24.radio_fields.newrf.NeWRF`.
    """

    frequency: float = 928e6
    size: tuple[float, ...] = (4.0, 3.0)
    tx: tuple[float, ...] = (1.0, 0.8)
    order: int = 1
    permittivity: float | None = None
    noise_db: float | None = None
    n_train: int = 100
    n_test: int = 200
    doa_error_deg: float = 0.1
    variant: Variant = "newrf"
    compact: bool = True
    steps: int = 1000
    batch: int = 16
    restarts: int = 1
    far: float = 7.2

    @classmethod
    def laptop(cls) -> Config:
        """Return what the book runs: minutes on two cores."""
        return cls()

    @classmethod
    def paper(cls) -> Config:
        """Return the paper's scale: a room of the conference room's size, hours on a GPU."""
        return cls(
            frequency=2.412e9,
            size=(3.0, 3.0, 2.5),
            tx=(0.01, 1.5, 2.0),
            order=2,
            n_train=346,
            n_test=87,
            compact=False,
            steps=100_000,
            batch=32,
            restarts=1,
            far=9.0,
        )


@dataclass(frozen=True)
class Survey:
    """A simulated survey: the room, and positions, channels, directions and masks of both sets."""

    room: ShoeboxRoom
    train: tuple[Array, Array, Array, Array]
    test: tuple[Array, Array, Array, Array]


def noisy_directions(doa: Array, degrees: float, rng: np.random.Generator) -> Array:
    """Turn directions by uniform errors in azimuth and (in space) elevation.

    Parameters
    ----------
    doa : numpy.ndarray, shape (n, P, D)
    degrees : float
    rng : numpy.random.Generator

    Returns
    -------
    numpy.ndarray

    Examples
    --------
    >>> w = np.array([[[1.0, 0.0]]])
    >>> noisy_directions(w, 0.0, np.random.default_rng(0)).tolist()
    [[[1.0, 0.0]]]
    """
    error = np.radians(rng.uniform(-degrees, degrees, (*doa.shape[:2], 2)))
    azimuth = np.arctan2(doa[..., 1], doa[..., 0]) + error[..., 0]
    flat = np.stack([np.cos(azimuth), np.sin(azimuth)], axis=-1)
    if doa.shape[-1] == 2:
        return flat
    elevation = np.arcsin(doa[..., 2].clip(-1, 1)) + error[..., 1]
    parts = [np.cos(elevation)[..., None] * flat, np.sin(elevation)[..., None]]
    return np.concatenate(parts, axis=-1)


def simulate(config: Config, seed: int) -> Survey:
    """Simulate a survey of the configured room.

    Parameters
    ----------
    config : Config
    seed : int
        Draws the receivers and the noise. The first ``n_test`` receivers are the test set, so it
        is the same for all training sizes; training sets are nested.

    Returns
    -------
    Survey
        With exact directions.
    """
    rng = np.random.default_rng([6, seed])
    room = ShoeboxRoom(
        config.size,
        config.tx,
        frequency=config.frequency,
        max_order=config.order,
        permittivity=config.permittivity,
    )
    rx = room.sample_receivers(config.n_test + config.n_train, rng)
    paths = room.trace(rx)
    h = paths.gain.sum(axis=1)
    parts = rx, h, paths.doa, paths.mask
    n = config.n_test
    train, test = tuple(p[n:] for p in parts), tuple(p[:n] for p in parts)
    if config.noise_db is not None:
        power = (np.abs(h) ** 2).mean() * 10 ** (config.noise_db / 10)
        noise = rng.normal(size=(len(train[1]), 2)) @ [1, 1j] * np.sqrt(power / 2)
        train = (train[0], train[1] + noise, *train[2:])
    return Survey(room, train, test)  # type: ignore[arg-type]


def build_newrf(config: Config, seed: int) -> NeWRF:
    """Build the network of the configured variant.

    Parameters
    ----------
    config : Config
    seed : int
        Of the initialisation and the batches.

    Returns
    -------
    NeWRF
    """
    changes: dict[Variant, dict[str, Any]] = {
        "newrf": {},
        "optical": {"phase": False, "path_loss": False},
        "no phase": {"phase": False},
        "no path loss": {"path_loss": False},
        "uniform": {
            "directions": "uniform",
            "n_directions": 24,
            "max_steps": config.steps // 2,
            "batch_size": max(1, config.batch // 2),
        },
        "extra rays": {"extra_rays": 5},
    }
    settings: dict[str, Any] = {
        "max_steps": config.steps,
        "batch_size": config.batch,
        "n_restarts": config.restarts,
        "random_state": seed,
        **changes[config.variant],
    }
    if config.compact:
        return NeWRF.compact(config.frequency, far=config.far, **settings)
    return NeWRF(config.frequency, far=config.far, **settings)


def newrf(config: Config, seed: int) -> dict[str, Any]:
    """Train NeWRF (or a variant) and test it at unvisited places.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        ``snr`` with known directions, ``searched`` with those of the search, ``train`` (all dB),
        ``median error`` (per receiver), ``evaluations`` of the network in training, in millions.
    """
    survey = simulate(config, seed)
    rx, h, doa, mask = survey.train
    new_rx, new_h, new_doa, new_mask = survey.test
    model = build_newrf(config, seed).fit(rx, h, doa, mask)
    predicted = model.predict(new_rx, new_doa, new_mask)
    uniform = model.directions == "uniform"
    rays = model.n_directions if uniform else float(mask.sum(axis=1).mean()) + model.extra_rays
    samples = model.n_samples + model.n_samples + model.n_importance
    per_ray = samples if model.n_importance else model.n_samples
    steps = model.max_steps + (model.n_restarts - 1) * (
        model.screen_steps if model.n_restarts > 1 else 0
    )
    return {
        "snr": prediction_snr(predicted, new_h),
        "searched": prediction_snr(predicted if uniform else model.predict(new_rx), new_h),
        "train": prediction_snr(model.predict(rx, doa, mask), h),
        "median error": float(np.median(per_receiver_nmse(predicted, new_h))),
        "evaluations": steps * model.batch_size * rays * per_ray / 1e6,
    }


def interpolators(config: Config, seed: int) -> dict[str, float]:
    """Test the predictors that know no geometry on the same survey.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        SNR (dB) of each, and ``best``.
    """
    survey = simulate(config, seed)
    rx, h = survey.train[:2]
    models: dict[str, ChannelPredictor] = {
        "neighbours": NearestNeighbours(),
        "RBF kernel": RBFGP(),
        "Helmholtz kernel": HelmholtzGP(config.frequency),
        "coordinate MLP": CoordinateMLP(random_state=seed),
    }
    record = {name: m.fit(rx, h).score(*survey.test[:2]) for name, m in models.items()}
    return {**record, "best": max(record.values())}


def closed_form(config: Config, seed: int) -> dict[str, float]:
    """Fit virtual transmitters, by algebra and by gradient, from directions with an error.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        SNR (dB) of ``VTx-LS`` and ``sources`` with measured (``known``) and with searched
        directions at the test places, and ``found`` virtual transmitters.
    """
    survey = simulate(config, seed)
    rng = np.random.default_rng([7, seed])
    rx, h, doa, mask = survey.train
    new_rx, new_h, new_doa, new_mask = survey.test
    doa, new_doa = (noisy_directions(w, config.doa_error_deg, rng) for w in (doa, new_doa))
    search = DoASearch(angle_tol_deg=max(0.5, 4 * config.doa_error_deg))
    models = {
        "VTx-LS": VirtualTransmitterRegressor(config.frequency, search=search),
        "sources": SourceField(config.frequency, search=search, steps=200),
    }
    record: dict[str, float] = {}
    for name, model in models.items():
        model.fit(rx, h, doa, mask)
        record[f"{name} known"] = model.score(new_rx, new_h, new_doa, new_mask)
        record[name] = model.score(new_rx, new_h)
    record["found"] = float(len(models["VTx-LS"].search_.virtual_transmitters_))
    return record


def search(config: Config, seed: int) -> dict[str, float]:
    """Search the virtual transmitters of a random three-dimensional room, up to two reflections.

    Parameters
    ----------
    config : Config
        ``doa_error_deg``, ``n_train`` and ``frequency`` are used.
    seed : int
        Draws room, transmitter and receivers.

    Returns
    -------
    dict
        ``within 1 cm`` and ``within 10 cm``: share of the 25 images found; ``false``: points that
        are further than 10 cm from every image.
    """
    rng = np.random.default_rng([8, seed])
    size = rng.uniform([3, 3, 2.3], [6, 5, 3])
    tx = size * rng.uniform(0.15, 0.85, 3)
    room = ShoeboxRoom(size.tolist(), tx.tolist(), frequency=config.frequency, max_order=2)
    rx = room.sample_receivers(config.n_train, rng)
    paths = room.trace(rx)
    doa = noisy_directions(paths.doa, config.doa_error_deg, rng)
    found = DoASearch(angle_tol_deg=max(0.5, 4 * config.doa_error_deg)).fit(rx, doa, paths.mask)
    points = found.virtual_transmitters_
    return {
        "within 1 cm": recall(points, room.images, 0.01),
        "within 10 cm": recall(points, room.images, 0.1),
        "false": round(len(points) * (1 - recall(room.images, points, 0.1))),
    }


# -- further variants, stored -------------------------------------------------------------------

STORED_VARIANTS: tuple[Variant, ...] = (
    "optical",
    "uniform",
    "no phase",
    "no path loss",
    "extra rays",
)
_STORED = "ablations.json"


def stored_ablations() -> pd.DataFrame:
    """Read the stored records of :func:`newrf` for all variants but the method itself.

    ``python -m icml24.radio_fields.experiments`` makes them again, in some minutes.

    Returns
    -------
    pandas.DataFrame
        ``variant``, ``seed``, ``snr``, ``train`` and ``evaluations``.

    Examples
    --------
    >>> stored_ablations()["variant"].unique().tolist()
    ['optical', 'uniform', 'no phase', 'no path loss', 'extra rays']
    """
    return read_records("icml24.radio_fields", _STORED)


# -- a furnished room, traced by Sionna RT and stored ---------------------------------------------

ROOM = (5.0, 4.0, 2.7)
TRANSMITTER = (1.2, 3.0, 2.2)
FURNITURE = (
    Box((0.3, 1.0, 1.0), (0.6, 1.6, 2.0), "metal"),  # a cabinet
    Box((4.7, 0.35, 0.9), (0.6, 0.7, 1.8), "metal"),  # a refrigerator
    Box((3.0, 2.0, 0.72), (1.6, 0.8, 0.04), "wood"),  # the top of a table
    Box((2.5, 3.85, 1.0), (1.2, 0.3, 2.0), "wood"),  # a shelf
)


def furnished_places(n: int = 240, random_state: int = 0) -> Any:
    """Draw receivers in ``ROOM`` between 1.1 and 1.5 m above the floor, outside the furniture."""
    rng = np.random.default_rng(random_state)
    places = rng.uniform((0.2, 0.2, 1.1), (4.8, 3.8, 1.5), (2 * n, 3))
    taken = np.any([box.contains(places, 0.05) for box in FURNITURE], axis=0)
    return places[~taken][:n]


def trace_furnished(furniture: Sequence[Box], rx: Any, frequency: float = 1e9) -> ChannelDataset:
    """Trace a survey of ``ROOM`` with Sionna RT (extra ``rt``), up to two reflections."""
    scene = SionnaScene(
        furnished_room(ROOM, furniture), TRANSMITTER, frequency=frequency, samples=100_000
    )
    paths = scene.trace(rx)
    used = paths.mask.any(axis=0)
    h = paths.gain.sum(axis=1)
    return ChannelDataset(rx, h, frequency, paths.doa[:, used], paths.mask[:, used])


def stored_survey(name: Literal["empty", "furnished"]) -> ChannelDataset:
    """Read the stored survey of the empty or the furnished room.

    ``python -m icml24.radio_fields.experiments`` traces both again where Sionna RT is installed.

    Parameters
    ----------
    name : {"empty", "furnished"}

    Returns
    -------
    ChannelDataset
        240 receivers, with directions of arrival.

    Examples
    --------
    >>> len(stored_survey("furnished"))
    240
    """
    if name not in ("empty", "furnished"):
        raise ValueError(f"name must be 'empty' or 'furnished', got {name!r}.")
    file = resources.files("icml24.radio_fields").joinpath("data", f"{name}.npz")
    with resources.as_file(file) as path:
        return ChannelDataset.from_npz(path)


EXPERIMENTS: dict[str, Callable[[Config, int], Mapping[str, Any]]] = {
    "newrf": newrf,
    "interpolators": interpolators,
    "closed_form": closed_form,
    "search": search,
}

if __name__ == "__main__":
    from icml24.radio_fields import experiments as column

    grid = {"variant": column.STORED_VARIANTS}
    found = run(column.newrf, column.Config.laptop(), seeds=5, grid=grid)
    folder = Path(__file__).with_name("data")
    write_records(folder / _STORED, found[["variant", "seed", "snr", "train", "evaluations"]])
    if find_spec("sionna") is not None:
        rx = column.furnished_places()
        for name, furniture in (("empty", ()), ("furnished", column.FURNITURE)):
            column.trace_furnished(furniture, rx).to_npz(folder / f"{name}.npz")

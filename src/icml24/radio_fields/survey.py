"""Site surveys in, coverage maps out: the practitioner's door."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from sklearn.base import clone

from icml24.radio_fields.channel import Array, check_frequency, check_positions, prediction_snr
from icml24.radio_fields.estimator import ChannelPredictor, check_channels, check_directions
from icml24.radio_fields.peers import RBFGP, HelmholtzGP, NearestNeighbours
from icml24.radio_fields.sources import SourceField, VirtualTransmitterRegressor

__all__ = ["ChannelDataset", "Choice", "CoverageMap", "choose_predictor", "coverage_map"]

PathLike = str | os.PathLike[str]


class ChannelDataset(torch.utils.data.Dataset[Any]):
    """A survey: where, what was received, and (if an array was used) from which directions.

    Parameters
    ----------
    rx : array_like, shape (n, D)
        Metres.
    h : array_like of complex, shape (n,)
    frequency : float
        Hertz.
    doa, mask : array_like, optional
        Directions of arrival (n, P, D) as unit vectors, and which entries are paths.
    duplicates : {"raise", "mean"}
        What to do with positions that occur twice: refuse them, or average their channels (the
        directions of the first are kept).

    Raises
    ------
    ValueError
        If the units look mixed (a span of more than 1 km), positions repeat, channels are real or
        all zero, or directions are not unit vectors.

    Examples
    --------
    >>> survey = ChannelDataset([[0.0, 1.0], [2.0, 1.0]], [1e-3j, 1e-4], 928e6)
    >>> len(survey), survey.dim
    (2, 2)
    """

    def __init__(
        self,
        rx: ArrayLike,
        h: ArrayLike,
        frequency: float,
        doa: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        *,
        duplicates: Literal["raise", "mean"] = "raise",
    ) -> None:
        if duplicates not in ("raise", "mean"):
            raise ValueError(f"duplicates must be 'raise' or 'mean', got {duplicates!r}.")
        self.frequency = check_frequency(frequency)
        self.rx = check_positions(rx)
        span = float(np.ptp(self.rx, axis=0).max())
        if span > 1000:
            raise ValueError(
                f"The receivers span {span:.0f} m; positions must be in metres "
                "(divide millimetres by 1000), in local coordinates."
            )
        self.h = check_channels(h, len(self.rx))
        self.doa: Array | None = None
        self.mask: Array | None = None
        if doa is not None:
            self.doa, self.mask = check_directions(doa, mask, self.rx, allow_empty=True)
        _, first, index = np.unique(self.rx, axis=0, return_index=True, return_inverse=True)
        if len(first) < len(self.rx):
            if duplicates == "raise":
                raise ValueError(
                    f"{len(self.rx) - len(first)} positions occur twice; "
                    "average them with duplicates='mean' or drop them."
                )
            total = np.zeros(len(first), complex)
            np.add.at(total, index.ravel(), self.h)
            average = total / np.bincount(index.ravel())
            order = np.argsort(first)
            self._keep(first[order])
            self.h = average[order]

    def _keep(self, index: Array) -> None:
        self.rx, self.h = self.rx[index], self.h[index]
        if self.doa is not None and self.mask is not None:
            self.doa, self.mask = self.doa[index], self.mask[index]

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return self.rx.shape[1]

    def __len__(self) -> int:
        return len(self.rx)

    def __getitem__(self, i: Any) -> tuple[Any, ...]:
        item: tuple[Any, ...] = (self.rx[i], self.h[i])
        if self.doa is not None and self.mask is not None:
            item += (self.doa[i], self.mask[i])
        return item

    def subset(self, index: ArrayLike) -> ChannelDataset:
        """Return the receivers with the given numbers as a survey of their own."""
        part = object.__new__(ChannelDataset)
        part.__dict__.update(self.__dict__)
        part._keep(np.asarray(index))
        return part

    def split(
        self, train_fraction: float = 0.8, seed: int | None = 0
    ) -> tuple[ChannelDataset, ChannelDataset]:
        """Split into training and test receivers.

        Parameters
        ----------
        train_fraction : float, default 0.8
        seed : int or None, default 0
            Shuffles; None keeps the order, so that the last receivers are the test set.

        Returns
        -------
        train, test : ChannelDataset
        """
        n = round(train_fraction * len(self))
        if not 2 <= n < len(self):
            raise ValueError(f"train_fraction={train_fraction} leaves too few receivers.")
        order = np.arange(len(self))
        if seed is not None:
            order = np.random.default_rng(seed).permutation(len(self))
        return self.subset(order[:n]), self.subset(order[n:])

    # files -------------------------------------------------------------------------------------

    def to_npz(self, path: PathLike) -> None:
        """Write the survey to a NumPy archive."""
        parts = {"rx": self.rx, "h": self.h, "frequency": np.array(self.frequency)}
        if self.doa is not None and self.mask is not None:
            parts |= {"doa": self.doa, "mask": self.mask}
        np.savez_compressed(path, allow_pickle=False, **parts)

    @classmethod
    def from_npz(cls, path: PathLike, **options: Any) -> Self:
        """Read a survey from an archive with ``rx``, ``h``, ``frequency`` (``doa``, ``mask``)."""
        with np.load(path, allow_pickle=False) as file:
            missing = {"rx", "h", "frequency"} - set(file.files)
            if missing:
                raise ValueError(f"{Path(path).name} lacks {', '.join(sorted(missing))}.")
            extra = {name: file[name] for name in ("doa", "mask") if name in file.files}
            return cls(file["rx"], file["h"], float(file["frequency"]), **extra, **options)

    @classmethod
    def from_frame(cls, frame: pd.DataFrame, frequency: float, **options: Any) -> Self:
        """Read a survey from a table with one row a receiver.

        Parameters
        ----------
        frame : pandas.DataFrame
            Columns ``x``, ``y`` (``z``) in metres; ``h_re`` and ``h_im``, or ``gain_db`` and
            ``phase_deg``; optionally ``azimuth_1``, ``azimuth_2``, ... (and, in 3-D,
            ``elevation_1``, ...) in degrees, empty where there is no such path.
        frequency : float
            Hertz.
        **options
            Passed to the class.

        Returns
        -------
        ChannelDataset

        Examples
        --------
        >>> table = pd.DataFrame({"x": [0.0, 1.0], "y": [0.0, 0.0], "gain_db": [-40, -46],
        ...                       "phase_deg": [0, 90], "azimuth_1": [0.0, 180.0]})
        >>> survey = ChannelDataset.from_frame(table, 928e6)
        >>> survey.h.round(4).tolist()
        [(0.01+0j), 0.005j]
        """
        axes = [c for c in ("x", "y", "z") if c in frame]
        if axes[:2] != ["x", "y"]:
            raise ValueError("The table needs the columns x and y (and z in space), in metres.")
        if {"h_re", "h_im"} <= set(frame):
            h = frame["h_re"].to_numpy(float) + 1j * frame["h_im"].to_numpy(float)
        elif {"gain_db", "phase_deg"} <= set(frame):
            phase = np.radians(frame["phase_deg"].to_numpy(float))
            h = 10 ** (frame["gain_db"].to_numpy(float) / 20) * np.exp(1j * phase)
        else:
            raise ValueError(
                "The table needs h_re and h_im, or gain_db and phase_deg: without phase there is "
                "no channel to predict, only power."
            )
        names = sorted(
            (c for c in map(str, frame.columns) if c.startswith("azimuth_")),
            key=lambda c: int(c.removeprefix("azimuth_")),
        )
        doa = None
        if names:
            azimuth = np.radians(frame[names].to_numpy(float))
            elevation = np.zeros_like(azimuth)
            if len(axes) == 3:
                rise = [c.replace("azimuth", "elevation") for c in names]
                if not set(rise) <= set(frame):
                    raise ValueError("In space each azimuth needs its elevation column.")
                elevation = np.radians(frame[rise].to_numpy(float))
            flat = np.stack([np.cos(azimuth), np.sin(azimuth)], axis=-1)
            doa = flat * np.cos(elevation)[..., None]
            if len(axes) == 3:
                doa = np.concatenate([doa, np.sin(elevation)[..., None]], axis=-1)
        return cls(frame[axes].to_numpy(float), h, frequency, doa, **options)

    @classmethod
    def from_csv(cls, path: PathLike, frequency: float, **options: Any) -> Self:
        """Read a survey from a CSV file with the columns of :meth:`from_frame`."""
        return cls.from_frame(pd.read_csv(path), frequency, **options)

    def to_csv(self, path: PathLike) -> None:
        """Write the survey to a CSV file that :meth:`from_csv` reads."""
        table = pd.DataFrame(self.rx, columns=["x", "y", "z"][: self.dim])
        table["h_re"], table["h_im"] = self.h.real, self.h.imag
        if self.doa is not None and self.mask is not None:
            for p in range(self.doa.shape[1]):
                w = np.where(self.mask[:, p, None], self.doa[:, p], np.nan)
                table[f"azimuth_{p + 1}"] = np.degrees(np.arctan2(w[:, 1], w[:, 0]))
                if self.dim == 3:
                    table[f"elevation_{p + 1}"] = np.degrees(np.arcsin(w[:, 2].clip(-1, 1)))
        table.to_csv(path, index=False)

    @classmethod
    def from_newrf(cls, frame: pd.DataFrame) -> Self:
        """Convert a table of the paper's official data sets.

        They are pickled frames that need pandas before version 2: read them there with
        ``pandas.read_pickle`` and hand over the frame, or its columns as plain arrays.

        Parameters
        ----------
        frame : pandas.DataFrame
            Columns ``RxPos``, ``Frequency`` (gigahertz), ``CSI`` (complex) and ``LastXPts``
            (3 x paths, the last point of interaction of each path, which gives its direction).

        Returns
        -------
        ChannelDataset
        """
        missing = {"RxPos", "Frequency", "CSI", "LastXPts"} - set(frame)
        if missing:
            raise ValueError(f"The table lacks {', '.join(sorted(missing))}.")
        rx = np.array([np.asarray(p, float).ravel() for p in frame["RxPos"]])
        points = [np.asarray(p, float).reshape(3, -1).T for p in frame["LastXPts"]]
        doa = np.full((len(rx), max(map(len, points)), 3), np.nan)
        for i, last in enumerate(points):
            step = last - rx[i]
            doa[i, : len(last)] = step / np.linalg.norm(step, axis=1, keepdims=True)
        h = np.array([complex(np.asarray(c).ravel()[0]) for c in frame["CSI"]])
        return cls(rx, h, 1e9 * float(frame["Frequency"].iloc[0]), doa)


@dataclass(frozen=True)
class Choice:
    """What :func:`choose_predictor` found.

    Parameters
    ----------
    predictor : ChannelPredictor
        The best one, fitted to the whole survey.
    table : pandas.DataFrame
        Prediction SNR (decibel) and median error of every candidate on held-out receivers.
    """

    predictor: ChannelPredictor
    table: pd.DataFrame


def _candidates(survey: ChannelDataset) -> dict[str, ChannelPredictor]:
    f = survey.frequency
    found: dict[str, ChannelPredictor] = {
        "nearest neighbours": NearestNeighbours(),
        "RBF GP": RBFGP(),
        "Helmholtz GP": HelmholtzGP(f),
    }
    if survey.doa is not None:
        found |= {"VTx-LS": VirtualTransmitterRegressor(f), "sources": SourceField(f)}
    return found


def choose_predictor(
    survey: ChannelDataset,
    candidates: Mapping[str, ChannelPredictor] | None = None,
    *,
    test_fraction: float = 0.2,
    random_state: int = 0,
) -> Choice:
    """Compare predictors on held-out receivers and fit the best one to all.

    New places have no measured directions, so none are used at the held-out receivers either.

    Parameters
    ----------
    survey : ChannelDataset
    candidates : mapping from name to predictor, optional
        They are copied. By default all methods of this package that take seconds.
    test_fraction : float, default 0.2
    random_state : int, default 0

    Returns
    -------
    Choice
    """
    train, test = survey.split(1 - test_fraction, random_state)
    models = dict(candidates or _candidates(survey))
    rows = []
    for name, model in models.items():
        h = clone(model).fit(train.rx, train.h, train.doa, train.mask).predict(test.rx)
        heard = test.h != 0
        error = np.abs(h[heard] - test.h[heard]) ** 2 / np.abs(test.h[heard]) ** 2
        rows.append((name, prediction_snr(h, test.h), float(np.median(error))))
    table = pd.DataFrame(rows, columns=["method", "SNR (dB)", "median error"])
    table = table.sort_values("SNR (dB)", ascending=False, ignore_index=True)
    best = clone(models[table["method"][0]])
    return Choice(best.fit(survey.rx, survey.h, survey.doa, survey.mask), table)


@dataclass(frozen=True)
class CoverageMap:
    """Predicted channels on a horizontal grid.

    Parameters
    ----------
    x, y : numpy.ndarray, shapes (nx,), (ny,)
        Metres.
    h : numpy.ndarray of complex, shape (ny, nx)
    """

    x: Array
    y: Array
    h: Array

    @property
    def gain_db(self) -> Array:
        """Gain in decibel, (ny, nx)."""
        return 20 * np.log10(np.maximum(np.abs(self.h), 1e-30))

    def to_csv(self, path: PathLike) -> None:
        """Write one row a grid point: x, y, gain and phase."""
        xx, yy = np.meshgrid(self.x, self.y)
        pd.DataFrame(
            {
                "x": xx.ravel(),
                "y": yy.ravel(),
                "gain_db": self.gain_db.ravel(),
                "phase_deg": np.degrees(np.angle(self.h)).ravel(),
            }
        ).to_csv(path, index=False)

    def to_asc(self, path: PathLike) -> None:
        """Write the gain as an ESRI ASCII grid, which GIS programs open (square cells)."""
        step = float(self.x[1] - self.x[0])
        head = {
            "ncols": len(self.x),
            "nrows": len(self.y),
            "xllcenter": float(self.x[0]),
            "yllcenter": float(self.y[0]),
            "cellsize": step,
            "NODATA_value": -9999,
        }
        lines = [f"{name} {value}" for name, value in head.items()]
        lines += [" ".join(f"{g:.3f}" for g in row) for row in self.gain_db[::-1]]
        Path(path).write_text("\n".join(lines) + "\n", "utf-8")

    def to_geotiff(
        self, path: PathLike, epsg: int | None = None, origin: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """Write the gain as a GeoTIFF: one band of 32-bit numbers, north up.

        Parameters
        ----------
        path : path-like
            The file; it appears whole or not at all.
        epsg : int, optional
            Code of a projected coordinate system in metres, for example 32633; without one the
            system is declared as local.
        origin : (float, float), default (0, 0)
            Easting and northing of the point (0, 0) of the map, in metres.

        Raises
        ------
        ValueError
            If ``epsg`` is not a code from 1024 to 32766, or the grid has a single row or column.

        Examples
        --------
        >>> import tempfile
        >>> chart = CoverageMap(np.arange(3.0), np.arange(2.0), np.ones((2, 3), dtype=complex))
        >>> chart.to_geotiff(Path(tempfile.mkdtemp()) / "gain.tif", epsg=32633)
        """
        from PIL import Image, TiffImagePlugin

        if epsg is not None and not 1024 <= epsg <= 32766:
            raise ValueError(f"epsg must be a code from 1024 to 32766, or None, got {epsg}.")
        if min(len(self.x), len(self.y)) < 2:
            raise ValueError("A GeoTIFF needs at least two rows and two columns, for the step.")
        step_x, step_y = float(self.x[1] - self.x[0]), float(self.y[1] - self.y[0])
        west = origin[0] + float(self.x[0]) - step_x / 2
        north = origin[1] + float(self.y[-1]) + step_y / 2
        user_defined = 32767
        keys = {1024: 1, 1025: 1, 3072: user_defined if epsg is None else epsg, 3076: 9001}
        directory = [1, 1, 0, len(keys)]
        for key, value in keys.items():  # model projected, raster is area, system, unit metre
            directory += [key, 0, 1, value]
        tags = TiffImagePlugin.ImageFileDirectory_v2()
        for tag, kind, values in (
            (33550, 12, (step_x, step_y, 0.0)),  # size of a pixel
            (33922, 12, (0.0, 0.0, 0.0, west, north, 0.0)),  # its upper left corner
            (34735, 3, tuple(directory)),
        ):
            tags.tagtype[tag] = kind
            tags[tag] = values
        image = Image.fromarray(np.ascontiguousarray(self.gain_db[::-1], dtype=np.float32))
        scratch = Path(path).with_suffix(".tmp")
        image.save(scratch, format="TIFF", tiffinfo=tags)
        scratch.replace(path)

    def plot(self, ax: Any = None) -> Any:
        """Draw the gain; returns the axes."""
        import matplotlib.pyplot as plt

        ax = ax or plt.gca()
        low, high = np.percentile(self.gain_db, [2, 98])
        image = ax.pcolormesh(
            self.x, self.y, self.gain_db, shading="nearest", rasterized=True, vmin=low, vmax=high
        )
        ax.figure.colorbar(image, ax=ax, label="gain (dB)")
        ax.set(xlabel="x (m)", ylabel="y (m)", aspect="equal")
        ax.grid(False)
        return ax

    def to_png(self, path: PathLike) -> None:
        """Write the picture of :meth:`plot`."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        self.plot(figure.subplots())
        figure.savefig(path, dpi=150)


def coverage_map(
    predictor: ChannelPredictor,
    low: Sequence[float],
    high: Sequence[float],
    step: float,
    height: float | None = None,
) -> CoverageMap:
    """Predict the channel on a grid.

    Parameters
    ----------
    predictor : ChannelPredictor
        Fitted.
    low, high : sequence of 2 floats
        Corners of the rectangle, metres.
    step : float
        Distance of grid points, metres; fringes need a tenth of a wavelength.
    height : float, optional
        The third coordinate; needed in space.

    Returns
    -------
    CoverageMap

    Examples
    --------
    >>> model = NearestNeighbours().fit([[0.0, 0.0], [1.0, 0.0]], [1j, 2j])
    >>> coverage_map(model, (0, 0), (1, 1), 0.5).h.shape
    (3, 3)
    """
    if step <= 0 or not (low[0] + step <= high[0] and low[1] + step <= high[1]):
        raise ValueError("A map needs low + step <= high in both directions, and step > 0.")
    x, y = (np.arange(a, b + step / 2, step) for a, b in zip(low[:2], high[:2], strict=True))
    grid = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
    if getattr(predictor, "dim_", 2) == 3:
        if height is None:
            raise ValueError("This predictor works in space: give the height of the map.")
        grid = np.column_stack([grid, np.full(len(grid), float(height))])
    return CoverageMap(x, y, np.asarray(predictor.predict(grid)).reshape(len(y), len(x)))

"""Run a pure function ``(config, seed) -> record`` over seeds and grids.

Every column's ``experiments.py`` holds a frozen dataclass of settings and such functions. This
module repeats them: in parallel on one machine or on a Dask cluster, with progress in a terminal,
and with a cache on disk that survives being killed at any moment.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache as memoize
from importlib import resources
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
from platformdirs import user_cache_path
from tqdm import tqdm

__all__ = [
    "ResultCache",
    "cache_directory",
    "code_version",
    "read_records",
    "run",
    "write_records",
]

Experiment = Callable[[Any, int], Mapping[str, Any]]


def cache_directory() -> Path:
    """Folder for results and downloads: ``$ICML24_CACHE``, else the user's cache folder."""
    return Path(os.environ.get("ICML24_CACHE") or user_cache_path("icml24"))


@memoize
def code_version(function: Experiment) -> str:
    """Digest of the source that an experiment's result depends on.

    It covers every module of the package in which the function is defined (for
    ``icml24.<slug>.experiments`` that is the column), and all of ``icml24.core``.

    Parameters
    ----------
    function : callable
        An experiment function, defined at the top level of a module.

    Returns
    -------
    str
        Sixteen hexadecimal digits.
    """
    module = inspect.getmodule(function)
    if module is None or module.__name__ == "__main__":
        source = inspect.getsource(function).encode()
    else:
        package = importlib.import_module(module.__package__ or module.__name__)
        roots = [Path(inspect.getfile(package)).parent, Path(__file__).parent]
        files = sorted({path for root in roots for path in root.rglob("*.py")})
        source = b"".join(path.read_bytes() for path in files)
    return hashlib.sha256(source).hexdigest()[:16]


class ResultCache:
    """Records on disk, keyed by code version, configuration and seed.

    A record is written to a temporary file and then renamed, so a killed run leaves either the
    whole record or none. A file that cannot be read is treated as absent.

    Parameters
    ----------
    directory : path-like, optional
        Defaults to ``results`` under :func:`cache_directory`.

    Examples
    --------
    >>> import tempfile
    >>> cache = ResultCache(tempfile.mkdtemp())
    >>> cache.save("0123", {"loss": 1.0})
    >>> cache.load("0123")
    {'loss': 1.0}
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = Path(directory) if directory else cache_directory() / "results"

    def key(self, function: Experiment, config: Any, seed: int) -> str:
        """Name of the record of ``function(config, seed)``."""
        identity = (function.__module__, function.__qualname__, code_version(function))
        settings = (type(config).__qualname__, sorted(_settings(config).items()), int(seed))
        return hashlib.sha256(repr((identity, settings)).encode()).hexdigest()[:32]

    def load(self, key: str) -> dict[str, Any] | None:
        """Return the stored record, or None when there is none (or it is damaged)."""
        try:
            with open(self.directory / f"{key}.pkl", "rb") as file:
                return pickle.load(file)
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError):
            return None

    def save(self, key: str, record: Mapping[str, Any]) -> None:
        """Store a record in one atomic step."""
        self.directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                pickle.dump(dict(record), file)
            os.replace(name, self.directory / f"{key}.pkl")
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _settings(config: Any) -> dict[str, Any]:
    if not is_dataclass(config) or isinstance(config, type):
        raise TypeError(
            f"config must be an instance of a (frozen) dataclass, got {type(config).__name__}."
        )
    return asdict(config)


def _one(function: Experiment, config: Any, seed: int, cache: ResultCache | None) -> dict[str, Any]:
    if cache is None:
        return dict(function(config, seed))
    key = cache.key(function, config, seed)
    record = cache.load(key)
    if record is None:
        record = dict(function(config, seed))
        cache.save(key, record)
    return record


def _seeds(seeds: int | Iterable[int]) -> list[int]:
    values = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    if not values:
        raise ValueError("seeds must name at least one run, for example seeds=5 or seeds=[0, 1].")
    if len(set(values)) != len(values):
        raise ValueError(f"seeds must differ from each other, got {values}.")
    return values


def _points(config: Any, grid: Mapping[str, Sequence[Any]]) -> list[tuple[dict[str, Any], Any]]:
    known = {field.name for field in fields(config)}
    for name, values in grid.items():
        if name not in known:
            raise ValueError(
                f"{type(config).__name__} has no setting {name!r}; "
                f"it has {', '.join(sorted(known))}."
            )
        if not len(values):
            raise ValueError(f"The grid for {name!r} is empty; give at least one value.")
    combinations = itertools.product(*grid.values())
    overrides = [dict(zip(grid, values, strict=True)) for values in combinations]
    return [(override, replace(config, **override)) for override in overrides]


def _backend(address: str | None, stack: ExitStack) -> AbstractContextManager[Any]:
    if address is None:
        return nullcontext()
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError(
            "A Dask cluster needs the package distributed: pip install 'icml24[cluster]'."
        ) from error
    stack.enter_context(Client(address))
    return joblib.parallel_config(backend="dask")


def run(
    function: Experiment,
    config: Any,
    seeds: int | Iterable[int] = 5,
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    jobs: int | None = None,
    dask: str | None = None,
    cache: ResultCache | None = None,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Run an experiment for every seed and every point of a grid.

    Parameters
    ----------
    function : callable
        ``function(config, seed)`` returns a mapping from names to numbers (or arrays). It must be
        pure: everything random in it comes from ``seed``.
    config : dataclass instance
        The settings. Grid points are made with :func:`dataclasses.replace`.
    seeds : int or iterable of int, default 5
        A number of seeds ``0..n-1``, or the seeds themselves.
    grid : mapping from setting to values, optional
        Settings to vary; all combinations are run.
    jobs : int, optional
        Processes on this machine (joblib's loky). Default ``$ICML24_JOBS``, else 1.
    dask : str, optional
        Address of a Dask scheduler, for example ``"tcp://10.0.0.1:8786"``.
    cache : ResultCache, optional
        Where finished records are kept. Without one, everything is computed anew.
    progress : bool, optional
        Show a progress bar on standard error; by default only in a terminal.

    Returns
    -------
    pandas.DataFrame
        One row for each run, in the order grid point, seed: the grid's settings, ``seed``, and the
        record's entries. The rows do not depend on ``jobs``, ``dask`` or ``cache``.

    Raises
    ------
    ValueError
        If there are no seeds, or the grid names an unknown setting.
    TypeError
        If ``config`` is not a dataclass instance.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     scale: float = 1.0
    >>> def experiment(config, seed):
    ...     return {"result": config.scale * seed}
    >>> run(experiment, Config(), seeds=2, grid={"scale": [1.0, 10.0]})["result"].tolist()
    [0.0, 1.0, 0.0, 10.0]
    """
    _settings(config)
    points = _points(config, grid or {})
    tasks = [(override, point, seed) for override, point in points for seed in _seeds(seeds)]
    jobs = int(os.environ.get("ICML24_JOBS", "1")) if jobs is None else jobs
    calls = [joblib.delayed(_one)(function, point, seed, cache) for _, point, seed in tasks]
    with ExitStack() as stack:
        stack.enter_context(_backend(dask, stack))
        results = joblib.Parallel(n_jobs=-1 if dask else jobs, return_as="generator")(calls)
        bar = tqdm(
            results,
            total=len(tasks),
            desc=function.__name__,
            disable=None if progress is None else not progress,
            file=sys.stderr,
        )
        rows = [
            {**override, "seed": seed, **record}
            for (override, _, seed), record in zip(tasks, bar, strict=True)
        ]
    return pd.DataFrame(rows)


def _plain(value: Any) -> Any:
    """Turn arrays and numpy scalars into lists and numbers of six significant digits."""
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}")
    return value.item() if isinstance(value, np.generic) else value


def write_records(path: str | os.PathLike[str], runs: pd.DataFrame) -> None:
    """Store the rows of :func:`run` as a JSON file that a column can ship.

    For experiments too long for a notebook: the file holds every seed, the notebook and a test
    compute one of them again and compare. Floating-point numbers keep six significant digits; the
    file appears whole or not at all.

    Parameters
    ----------
    path : path-like
        The file to write.
    runs : pandas.DataFrame
        What :func:`run` returned; entries may be numbers, strings, lists, mappings or arrays.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "runs.json"
    >>> write_records(path, pd.DataFrame({"seed": [0, 1], "loss": [1 / 3, 0.5]}))
    >>> json.loads(path.read_text())[0]
    {'seed': 0, 'loss': 0.333333}
    """
    path = Path(path)
    rows = [
        {str(name): _plain(value) for name, value in row.items()} for row in runs.to_dict("records")
    ]
    scratch = path.with_suffix(".tmp")
    lines = ",\n".join(json.dumps(row) for row in rows)
    scratch.write_text(f"[\n{lines}\n]\n", "utf-8")
    scratch.replace(path)


def read_records(package: str, name: str) -> pd.DataFrame:
    """Read records that a column ships in its folder ``data``.

    Parameters
    ----------
    package : str
        The column, for example ``"icml24.test_time_entropy"``.
    name : str
        The file that :func:`write_records` wrote.

    Returns
    -------
    pandas.DataFrame
        One row for each run.

    Raises
    ------
    FileNotFoundError
        If the column has no such file.

    Examples
    --------
    >>> len(read_records("icml24.test_time_entropy", "long_estimation.json"))
    5
    """
    file = resources.files(package).joinpath("data", name)
    if not file.is_file():
        raise FileNotFoundError(f"{package} ships no records named {name!r}.")
    return pd.DataFrame(json.loads(file.read_text("utf-8")))

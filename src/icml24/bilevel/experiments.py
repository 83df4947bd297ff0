"""The chapter's experiments: pure functions ``(config, seed) -> record``.

Every method gets the same grid of step sizes, run as one array of independent runs, and is judged
at its own best point of the grid.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from icml24.bilevel.data import (
    CleaningData,
    load_digits,
    load_fashion,
    load_income,
    load_rand_health,
)
from icml24.bilevel.estimators import PAGE, SAGA, SGD, STORM, MovingAverage
from icml24.bilevel.methods import METHODS, AmIGO, StocBiO
from icml24.bilevel.problems import (
    DataHyperCleaning,
    DiagonalQuadratic,
    L2Selection,
    PluggedIn,
    QuadraticBilevel,
    StreamingQuadratic,
)
from icml24.bilevel.solver import Run, minimize_bilevel
from icml24.core.experiments import read_records, run, write_records

__all__ = [
    "EXPERIMENTS",
    "Config",
    "cleaning",
    "expectation",
    "finite_sum",
    "make_records",
    "noise_floor",
    "penalties",
    "slope",
    "stored",
]

Array = np.ndarray
Record = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Sizes of the experiments.

    Parameters
    ----------
    sizes : tuple of int
        Samples n = m of the finite sums; powers of four, so that sqrt(n) divides n.
    target : float
        Level of ``|grad H|^2`` that counts as solved.
    precisions : tuple of float
        Levels eps of ``E|grad H|^2`` in the expectation setting.
    d : int
        Coordinates of the quadratics.
    streams : int
        Sample streams for each seed, over which medians (finite sum) or means (expectation) go.
    max_steps : int
        Bound on steps of a run on the quadratics.
    budget : float
        Oracle calls on the penalty problem (one pass over its data is 18,048).
    penalty_methods : tuple of str
        Methods compared there, keys of ``PENALTY_METHODS``.
    curves : tuple of str
        Those of them whose way to the optimum is recorded (one more run each).
    table : {"health", "income"}
        The table whose penalties are chosen: RAND, or the census.
    cleaning_budget : float
        Oracle calls on the hyper-cleaning problems.
    cleaning_data : tuple of str
        Which of them: "digits", "fashion".
    """

    sizes: tuple[int, ...] = (256, 1024, 4096, 16384)
    target: float = 1e-4
    precisions: tuple[float, ...] = (3e-3, 1e-3, 3e-4, 1e-4)
    d: int = 16
    streams: int = 2
    max_steps: int = 2500
    budget: float = 4e5
    penalty_methods: tuple[str, ...] = (
        "spaba", "srba", "soba", "saba", "ma-saba", "srmba", "sffba", "mseba", "spaba p=0.1",
        "fsla", "full", "amigo", "stocbio", "mrbo", "vrbo", "f2sa",
    )  # fmt: skip
    curves: tuple[str, ...] = ("spaba", "soba", "saba", "stocbio", "full")
    table: str = "health"
    cleaning_budget: float = 1.5e5
    cleaning_data: tuple[str, ...] = ("digits", "fashion")

    @classmethod
    def laptop(cls) -> Config:
        """Return what the book runs."""
        return cls()

    @classmethod
    def income(cls) -> Config:
        """Return the check of the penalties on a second table, with half of the methods."""
        methods = ("spaba", "srba", "soba", "saba", "spaba p=0.1", "full", "amigo", "stocbio")
        return cls(table="income", penalty_methods=methods, curves=())

    @classmethod
    def paper(cls) -> Config:
        """Return wider ranges and budgets of the paper's order."""
        return cls(
            sizes=(256, 1024, 4096, 16384, 65536, 262144),
            precisions=(3e-3, 1e-3, 3e-4, 1e-4, 3e-5),
            streams=8,
            max_steps=20_000,
            budget=5e6,
            penalty_methods=tuple(PENALTY_METHODS),
            cleaning_budget=5e6,
        )


GRID_INNER = (0.5, 0.9)
GRID_OUTER = (0.1, 0.2, 0.4, 0.8)


def slope(x: Array, y: Array) -> float:
    """Slope of log y against log x by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def _grid(inner: tuple[float, ...], outer: tuple[float, ...], repeats: int) -> tuple[Array, Array]:
    points = np.array(list(product(inner, outer)))
    return np.repeat(points[:, 0], repeats), np.repeat(points[:, 1], repeats)


def calls_to_target(
    problem: Any, method: Any, config: Config, seed: int, steps: tuple[float, float] | None = None
) -> tuple[float, int, tuple[float, float]]:
    """Fewest calls (median over streams) at the best grid point, steps taken, and that point.

    The search stops as soon as one point has all its streams below the target: at equal price per
    step the others can only be dearer. With ``steps`` the grid is this one point.
    """
    S = config.streams
    inner, outer = _grid(GRID_INNER, GRID_OUTER, S)
    if steps is not None:
        inner, outer = np.full(S, steps[0]), np.full(S, steps[1])
    reached = np.zeros(len(inner), dtype=bool)
    best: list[tuple[float, int, tuple[float, float]]] = []

    def arrived(run: Run) -> bool:
        reached[(problem.hypergradient(run.x) ** 2).sum(-1) <= config.target] = True
        complete = reached.reshape(-1, S).all(1)
        if complete.any():
            calls = np.where(complete, np.median(run.calls.reshape(-1, S), axis=1), np.inf)
            k = S * int(calls.argmin())
            best.append((float(calls.min()), run.step, (float(inner[k]), float(outer[k]))))
        return bool(best)

    minimize_bilevel(
        problem, method, lr_inner=inner, lr_outer=outer, batch_size=1,
        seeds=list(range(S)) * (len(inner) // S), random_state=seed, callback=arrived,
        record_every=5, max_steps=config.max_steps, max_oracle_calls=np.inf,
        on_divergence="ignore", progress=False,
    )  # fmt: skip
    return best[0] if best else (np.inf, config.max_steps, (np.nan, np.nan))


FINITE_SUM_METHODS: dict[str, Callable[[], Any]] = {
    "full": lambda: "full",
    "spaba": lambda: "spaba",
    "srba": lambda: "srba",
    "sffba": lambda: "sffba",
    "mseba": lambda: "mseba",
    "saba": lambda: "saba",
    "ma-saba": lambda: {"y": SAGA(), "z": SAGA(), "x": MovingAverage(0.5, SAGA())},
    "spaba p=0.1": lambda: {key: PAGE(prob=0.1) for key in "yzx"},
}


def finite_sum(config: Config, seed: int) -> Record:
    """Measure calls to the target against n, every method tuned (steps and batch) at every n.

    Returns
    -------
    dict
        ``calls:<method>:<n>``; ``slope:<method>``; and ``ratio:...``, the iterations of SPABA at
        b = sqrt(n) relative to full gradients with the same steps, to SPABA on the single-level
        problem with the same steps, and to the latter with steps of its own (largest over n; the
        last one for each n in ``factor:<n>``).
    """
    record: Record = {}
    ratios: dict[str, list[float]] = {"full": [], "single level": [], "single level tuned": []}
    for n in config.sizes:
        problem = DiagonalQuadratic.random(
            n, config.d, spectrum=(1e-3, 1.0), noise=1.0, random_state=seed
        )
        root = round(np.sqrt(n))
        groups = {size: problem.grouped(size) for size in (root // 2, root)}
        for name, make in FINITE_SUM_METHODS.items():
            trials = [
                calls_to_target(groups[size], make(), config, seed)
                for size in ([root] if name == "full" else groups)
            ]
            record[f"calls:{name}:{n}"] = min(trial[0] for trial in trials)
            if name == "full":
                descent = trials[-1]
            if name == "spaba":
                ours = trials[-1]
        control = PluggedIn(groups[root])
        here = calls_to_target(groups[root], "full", config, seed, ours[2])
        ratios["full"].append(ours[1] / here[1])
        ratios["single level"].append(
            ours[1] / calls_to_target(control, "spaba", config, seed, ours[2])[1]
        )
        ratios["single level tuned"].append(
            ours[1] / calls_to_target(control, "spaba", config, seed)[1]
        )
        record[f"factor:{n}"] = ratios["single level tuned"][-1]
        record[f"iterations:spaba:{n}"], record[f"iterations:full:{n}"] = ours[1], descent[1]
    sizes_array = np.array(config.sizes, dtype=float)
    for name in FINITE_SUM_METHODS:
        calls_array = np.array([record[f"calls:{name}:{n}"] for n in config.sizes])
        record[f"slope:{name}"] = slope(sizes_array, calls_array)
    for name, values in ratios.items():
        record[f"ratio:{name}"] = max(values)
    large = [n for n in config.sizes if n >= 1024]
    if large:
        record["saba over spaba"] = float(
            np.mean([record[f"calls:saba:{n}"] / record[f"calls:spaba:{n}"] for n in large])
        )
    return record


def _stream_calls(
    problem: StreamingQuadratic, method: Any, eps: float, config: Config, seed: int,
    batch: int, full: int | None, budget: float,
) -> float:  # fmt: skip
    """Count calls until the mean of ``|grad H|^2`` is below eps at some grid point."""
    S = 3 * config.streams
    inner, outer = _grid((0.5,), (0.1, 0.2, 0.4), S)
    found: list[float] = []

    def arrived(run: Run) -> bool:
        mean = (problem.hypergradient(run.x) ** 2).sum(-1).reshape(-1, S).mean(1)
        if (mean <= eps).any():
            found.append(float(run.calls.reshape(-1, S).mean(1)[mean <= eps].min()))
        return bool(found)

    minimize_bilevel(
        problem, method, lr_inner=inner, lr_outer=outer, batch_size=batch, full_batch=full,
        seeds=list(range(S)) * (len(inner) // S), random_state=seed, callback=arrived,
        record_every=10, max_steps=config.max_steps, max_oracle_calls=budget,
        on_divergence="ignore", progress=False,
    )  # fmt: skip
    return found[0] if found else np.inf


def expectation(config: Config, seed: int) -> Record:
    """Measure calls to ``E|grad H|^2 <= eps`` on an endless stream, batch sizes and steps tuned.

    Batch sizes are searched upwards in powers of two (four for large batches) from the best of the
    previous, coarser precision; a trial ends when it is dearer than the best so far.

    Returns
    -------
    dict
        ``calls:<method>:<eps>`` and ``slope:<method>`` in 1/eps.
    """
    problem = StreamingQuadratic(config.d, spectrum=(1e-3, 1.0), random_state=seed)
    choices: dict[str, Callable[[int], tuple[Any, int, int | None]]] = {
        "soba": lambda k: ("soba", 2**k, None),
        "spaba": lambda k: ("spaba", 2**k, 4**k),
        "srmba": lambda k: ({key: STORM(0.01) for key in "yzx"}, 2**k, None),
    }
    record: Record = {}
    for name, choice in choices.items():
        start = 2
        for eps in config.precisions:
            fewest, best, misses = np.inf, start, 0
            for k in range(start, 16):
                method, batch, full = choice(k)
                calls = _stream_calls(problem, method, eps, config, seed, batch, full, fewest)
                if calls < fewest:
                    fewest, best, misses = calls, k, 0
                elif np.isfinite(fewest):
                    misses += 1
                if misses == 2:
                    break
            record[f"calls:{name}:{eps:g}"] = fewest
            start = max(best - 1, 2)
        values = np.array([record[f"calls:{name}:{eps:g}"] for eps in config.precisions])
        record[f"slope:{name}"] = slope(1 / np.array(config.precisions), values)
    record["slope gap"] = record["slope:soba"] - record["slope:spaba"]
    return record


def noise_floor(config: Config, seed: int) -> Record:
    """Measure ``|grad H|^2`` after equal steps, well conditioned, and what a clip of z does.

    Returns
    -------
    dict
        ``floor:<method>`` after 3,000 steps; ``clip:<outer scale>:<map>`` for SPABA with z kept in
        the box [-1, 1] or free, on the same problem in two units of the outer loss; ``curve:...``
        with the history of the latter.
    """
    problem = DiagonalQuadratic.random(1024, 20, spectrum=(0.3, 1.0), noise=1.0, random_state=seed)
    record: Record = {}
    for name in ("soba", "saba", "srba", "spaba", "sffba", "mseba"):
        result = minimize_bilevel(
            problem, name, lr_inner=0.3, lr_outer=0.1, batch_size=32, random_state=seed,
            max_steps=3000, max_oracle_calls=np.inf, metric="gradient", record_every=50,
            progress=False,
        )  # fmt: skip
        record[f"floor:{name}"] = float(result.history["metric"][-1, 0])
        record[f"curve:{name}"] = np.stack(
            [result.history["calls"][:, 0], result.history["metric"][:, 0]]
        )
    for scale, (label, radius) in product((1.0, 30.0), (("free", None), ("box", _box))):
        scaled = QuadraticBilevel.random(
            256, 256, dx=4, dy=10, outer_scale=scale, random_state=seed
        )  # |z*| > 1 at the solution
        result = minimize_bilevel(
            scaled, "spaba", lr_inner=0.3, lr_outer=0.1 / scale, radius=radius, random_state=seed,
            max_steps=1200, max_oracle_calls=np.inf,
            metric="gradient", record_every=25, on_divergence="ignore", progress=False,
        )  # fmt: skip
        record[f"clip:{scale:g}:{label}"] = float(result.history["metric"][-1, 0] / scale**2)
        record[f"curve:{scale:g}:{label}"] = np.stack(
            [result.history["step"], result.history["metric"][:, 0] / scale**2]
        )
    return record


def _box(z: Array) -> Array:
    return np.clip(z, -1.0, 1.0)


PENALTY_METHODS: dict[str, Callable[[], Any]] = {
    "spaba": lambda: "spaba",
    "srba": lambda: "srba",
    "soba": lambda: "soba",
    "ma-soba": lambda: {"y": SGD(), "z": SGD(), "x": MovingAverage(0.5)},
    "saba": lambda: "saba",
    "ma-saba": lambda: {"y": SAGA(), "z": SAGA(), "x": MovingAverage(0.5, SAGA())},
    "srmba": lambda: "srmba",
    "sffba": lambda: "sffba",
    "mseba": lambda: "mseba",
    "fsla": lambda: "fsla",
    "spaba p=0.1": lambda: {key: PAGE(prob=0.1) for key in "yzx"},
    "full": lambda: "full",
    "amigo": lambda: AmIGO(5, 5),
    "stocbio": lambda: StocBiO(5, 5),
    "mrbo": lambda: "mrbo",
    "sustain": lambda: "sustain",
    "vrbo": lambda: "vrbo",
    "ttsa": lambda: "ttsa",
    "f2sa": lambda: "f2sa",
}


def penalties(config: Config, seed: int) -> Record:
    """Measure H - H* on a table after a budget of calls, each method at its best steps.

    The split of the data is that of the seed. Each of eight step pairs runs with two sample streams
    and is judged by the worse of them (so that a lucky survivor does not win); the method then
    reports the mean of both.

    Returns
    -------
    dict
        ``gap:<method>``; ``curve:<method>`` (calls, gap) of the first stream; ``steps:<method>``;
        ``start`` = H(x0) - H*.
    """
    data = {"health": load_rand_health, "income": load_income}[config.table](seed)
    problem = L2Selection(data.X, data.y, data.X_val, data.y_val)
    optimum = best_value(problem)
    inner, outer = _grid((0.3, 1.0), (10.0, 30.0, 100.0, 300.0), 2)
    record: Record = {"start": float(problem.value(problem.init()[0]) - optimum)}
    common: dict[str, Any] = {
        "batch_size": 64, "random_state": seed, "max_oracle_calls": config.budget,
        "on_divergence": "ignore", "progress": False,
    }  # fmt: skip
    for name in config.penalty_methods:
        make, points = PENALTY_METHODS[name], list[tuple[float, float]]()

        def note(run: Run, points: list[tuple[float, float]] = points) -> bool:
            points.append((float(run.calls[0]), _gap(problem, run.x[0], optimum)))
            return False

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            tuning = minimize_bilevel(
                problem, make(), lr_inner=inner, lr_outer=outer, seeds=[0, 1] * 8, **common
            )
            gaps = np.array([_gap(problem, x, optimum) for x in tuning.x]).reshape(-1, 2)
            best = int(gaps.max(1).argmin())
            steps = {"lr_inner": inner[2 * best], "lr_outer": outer[2 * best]}
            if name in config.curves:
                follow = _sparse(note, config.budget / 12)
                minimize_bilevel(problem, make(), **steps, seeds=[0], callback=follow, **common)
                record[f"curve:{name}"] = np.array(points).T
        record[f"gap:{name}"] = float(gaps[best].mean())
        record[f"steps:{name}"] = (float(steps["lr_inner"]), float(steps["lr_outer"]))
    return record


def _gap(problem: L2Selection, x: Array, optimum: float) -> float:
    if not np.isfinite(x).all():
        return np.inf
    with np.errstate(all="ignore"):
        return float(problem.value(x) - optimum)


def _sparse(note: Callable[[Run], bool], spacing: float) -> Callable[[Run], bool]:
    """Call ``note`` at most once for each ``spacing`` calls."""
    due = [0.0]

    def callback(run: Run) -> bool:
        if run.calls.min() < due[0]:
            return False
        due[0] = float(run.calls.min()) + spacing
        return note(run)

    return callback


def best_value(problem: L2Selection) -> float:
    """H* of a penalty problem, by L-BFGS on the exact hypergradient."""
    from icml24.bilevel.peers import lbfgs_hypergradient

    return lbfgs_hypergradient(problem).value


CLEANING_METHODS = ("spaba", "srba", "soba", "saba", "sffba", "full")


def cleaning(config: Config, seed: int) -> Record:
    """Hyper-cleaning of digits and garments: test accuracy and detection of wrong labels.

    Steps are chosen on the trusted data's loss (never on test data) over one grid for all methods.
    The plain logistic regressions are given their best strength *on the test set*, which flatters
    them.

    Returns
    -------
    dict
        ``acc:<data>:<method or baseline>`` and ``auc:<data>:<method>``.
    """
    record: Record = {}
    inner, outer = _grid((0.5, 1.0), (100.0, 300.0, 1000.0, 3000.0), 1)
    loaders = {"digits": load_digits, "fashion": load_fashion}
    for name in config.cleaning_data:
        data = loaders[name](seed)
        for label, accuracy in simple_baselines(data).items():
            record[f"acc:{name}:{label}"] = accuracy
        problem = DataHyperCleaning(data.X, data.y, data.X_val, data.y_val, l2=1e-3)
        for method in CLEANING_METHODS:
            result = minimize_bilevel(
                problem, method, lr_inner=inner, lr_outer=outer, seeds=[0] * len(inner),
                batch_size=64, random_state=seed, max_oracle_calls=config.cleaning_budget,
                on_divergence="ignore", progress=False,
            )  # fmt: skip
            with np.errstate(all="ignore"):
                losses = np.array(
                    [problem.outer_loss(x, y) for x, y in zip(result.x, result.y, strict=True)]
                )
            k = int(np.nanargmin(losses))
            right = problem.predict(result.y[k], data.X_test) == data.y_test
            record[f"acc:{name}:{method}"] = float(right.mean())
            record[f"auc:{name}:{method}"] = float(roc_auc_score(data.corrupted, -result.x[k]))
            record[f"loss:{name}:{method}"] = float(losses[k])
    return record


def simple_baselines(data: CleaningData) -> dict[str, float]:
    """Test accuracy of logistic regression on noisy, trusted, both, and (oracle) clean data."""
    clean = ~data.corrupted
    sets = {
        "noisy": (data.X, data.y),
        "trusted only": (data.X_val, data.y_val),
        "noisy + trusted": (np.r_[data.X, data.X_val], np.r_[data.y, data.y_val]),
        "oracle": (np.r_[data.X[clean], data.X_val], np.r_[data.y[clean], data.y_val]),
    }
    return {
        name: max(
            LogisticRegression(C=C, max_iter=300, tol=1e-3)
            .fit(*pair)
            .score(data.X_test, data.y_test)
            for C in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
        )
        for name, pair in sets.items()
    }


STORED: dict[str, tuple[Callable[[Config, int], Record], Config]] = {
    "penalties": (penalties, Config.laptop()),
    "penalties_income": (penalties, Config.income()),
    "cleaning": (cleaning, Config.laptop()),
}
"""Experiments whose records come with the package, and their settings; five seeds each."""


def stored(name: str) -> pd.DataFrame:
    """Read the records of an experiment that is too long for a notebook.

    ``python -m icml24.bilevel.experiments`` computes them anew, in about six minutes of one core;
    notebook and tests compute a piece of each again and compare.

    Parameters
    ----------
    name : {"penalties", "penalties_income", "cleaning"}

    Returns
    -------
    pandas.DataFrame
        A row for each of five seeds, as :func:`penalties` or :func:`cleaning` return it.

    Examples
    --------
    >>> len(stored("cleaning"))
    5
    """
    frame = read_records("icml24.bilevel", f"{name}.json")
    for column in (column for column in frame if column.startswith("curve:")):
        frame[column] = frame[column].map(np.asarray)
    return frame


def make_records(folder: Path, names: Iterable[str] = tuple(STORED), jobs: int = 2) -> None:
    """Compute the stored records anew and write them to ``folder``."""
    for name in names:
        write_records(folder / f"{name}.json", run(*STORED[name], seeds=5, jobs=jobs))


EXPERIMENTS: dict[str, Callable[[Config, int], Record]] = {
    "finite_sum": finite_sum,
    "expectation": expectation,
    "noise_floor": noise_floor,
    "penalties": penalties,
    "cleaning": cleaning,
}
assert set(CLEANING_METHODS) <= set(METHODS)

if __name__ == "__main__":
    from icml24.bilevel import experiments

    experiments.make_records(Path(__file__).with_name("data"))

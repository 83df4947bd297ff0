"""Experiments of the chapter: pure functions ``(config, seed) -> record``.

The seed names one of the five source networks; the images and their corruptions are the same for
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from icml24.core.experiments import read_records, run, write_records
from icml24.test_time_entropy import peers
from icml24.test_time_entropy.corruptions import HOLDOUT, SEVERITIES, TEST
from icml24.test_time_entropy.data import Split, images, shifted
from icml24.test_time_entropy.networks import source_network
from icml24.test_time_entropy.phases import adaptation_trace, embed, turning_point
from icml24.test_time_entropy.tta import RDumb, Tent, shuffled_batches
from icml24.test_time_entropy.weighted_flips import WeightedFlips

__all__ = [
    "EXPERIMENTS",
    "LONG",
    "Config",
    "calibration_sets",
    "estimates",
    "estimation",
    "first_gain",
    "long_estimation",
    "make_long_estimation",
    "phase_run",
    "stop_rule",
    "test_sets",
    "two_phases",
]

ROOM = ("glass_blur", "motion_blur")


@dataclass(frozen=True)
class Config:
    """Settings of the experiments.

    Parameters
    ----------
    n_images : int
        Images of each shifted set: the stream of the adaptation.
    n_probe : int
        Of these, the ones on which predictions are watched and accuracy is measured.
    severities : tuple of int
        Of the 18 test types.
    calibration : tuple of int
        Severities of the four hold-out types (clean images are always among the calibration sets).
    flip_lr, flip_steps
        RDumb inside Weighted Flips. The rate is the best of 0.01, 0.02, 0.04 and 0.08 by
        leave-one-out error on the calibration sets of networks 0 and 1, without a look at the test
        sets; the number of steps is what the book's minutes allow.
    degree : int
        Of its calibration curve.
    gain_lr, gain_steps
        RDumb for the first phase, a learning rate chosen for adapting rather than counting.
    phases : tuple of (corruption, severity, learning rate)
        Long Tent runs without reset.
    marks : tuple of int
        Steps at which those are measured.
    """

    n_images: int = 1000
    n_probe: int = 500
    severities: tuple[int, ...] = (3, 5)
    calibration: tuple[int, ...] = (1, 3, 5)
    flip_lr: float = 0.02
    flip_steps: int = 20
    degree: int = 1
    gain_lr: float = 0.01
    gain_steps: int = 30
    phases: tuple[tuple[str, int, float], ...] = (
        ("motion_blur", 5, 0.02),
        ("gaussian_noise", 5, 0.05),
    )
    marks: tuple[int, ...] = (0, 3, 6, 12, 25, 50, 100, 200, 400)

    @classmethod
    def laptop(cls) -> Config:
        """Return the size the book runs."""
        return cls()

    @classmethod
    def paper(cls) -> Config:
        """Return the paper's sizes (1,000 probe images, 990 steps) on all test images.

        The networks and images stay the small ones; section "The full-scale path" of the chapter
        says how to go to ImageNet.
        """
        return replace(
            cls(),
            n_images=2000,
            n_probe=1000,
            severities=SEVERITIES,
            calibration=SEVERITIES,
            flip_steps=990,
            gain_steps=100,
            marks=(0, 3, 6, 12, 25, 50, 100, 200, 400, 800, 1600),
        )


def calibration_sets(config: Config) -> list[tuple[str, int]]:
    """Name and severity of the labelled sets: clean images and the four types held out."""
    return [("clean", 0)] + [(name, s) for name in HOLDOUT for s in config.calibration]


def test_sets(config: Config) -> list[tuple[str, int]]:
    """Name and severity of the test sets."""
    return [(name, s) for name in TEST for s in config.severities]


test_sets.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever pytest thinks


def _accuracy(logits: Tensor, y: Tensor) -> float:
    return float((logits.argmax(1) == y).double().mean())


def _probe(data: Split, config: Config) -> Split:
    return Split(data.x[: config.n_probe], data.y[: config.n_probe])


# -- the two phases -----------------------------------------------------------------------------


def first_gain(config: Config, seed: int) -> dict[str, Any]:
    """Accuracy gained by a short, gentle adaptation, over step 0 with batch statistics.

    Parameters
    ----------
    config : Config
    seed : int
        Source network.

    Returns
    -------
    dict
        ``gain`` (points, mean over the 18 test types at the top severity), ``gain_with_room``
        (glass and motion blur), ``gain_worst``, and ``gains`` with ``names``.
    """
    net = source_network(seed)
    gains = []
    for name in TEST:
        data = shifted("test", name, SEVERITIES[-1], config.n_images)
        adapter, probe = RDumb(net, lr=config.gain_lr), _probe(data, config)
        before = _accuracy(adapter.predict(probe.x, 200), probe.y)
        generator = torch.Generator().manual_seed(seed)
        _adapt(adapter, data.x, config.gain_steps, generator)
        gains.append(100 * (_accuracy(adapter.predict(probe.x, 200), probe.y) - before))
    room = [gains[TEST.index(name)] for name in ROOM]
    return {
        "gain": float(np.mean(gains)),
        "gain_with_room": float(np.mean(room)),
        "gain_worst": float(np.min(gains)),
        "names": list(TEST),
        "gains": np.array(gains),
    }


def _adapt(adapter: Tent, x: Tensor, steps: int, generator: torch.Generator) -> None:
    for batch in shuffled_batches(x, 64, steps, generator):
        adapter(batch)


def _train_probe() -> tuple[Tensor, Tensor]:
    train = images()["train"]
    return train.x[:600], train.y[:600]


def phase_run(config: Config, seed: int, which: int, keep: bool = False) -> dict[str, np.ndarray]:
    """One long run of Tent without reset; see :func:`adaptation_trace` for what it returns."""
    name, severity, lr = config.phases[which]
    data = shifted("test", name, severity, config.n_images)
    probe = _probe(data, config)
    return adaptation_trace(
        Tent(source_network(seed), lr=lr),
        data.x,
        probe.x,
        _train_probe(),
        config.marks,
        y=probe.y,
        keep_embeddings=keep,
    )


def two_phases(config: Config, seed: int) -> dict[str, Any]:
    """Follow long Tent runs on each shift of ``config.phases``.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        Means over the shifts: ``change_at_end`` (accuracy at the last mark minus step 0, points),
        ``peak_gain`` (best mark minus step 0, points), ``frechet_ratio`` and ``dist_ratio``
        (last / first), ``turn_to_peak`` (marks between the smallest Frechet distance and the best
        accuracy), ``turn_to_peak_dist`` (the same for the distance to class means),
        ``stop_regret`` (accuracy lost by stopping at the smallest Frechet distance instead of the
        best mark, points), ``silhouette_after_turn`` and ``entropy_after_turn`` (change from the
        smallest distance to the end), ``moving_ratio`` (Frechet distance to training images
        embedded anew: last / first). ``traces`` holds the traces by corruption.
    """
    traces = {config.phases[i][0]: phase_run(config, seed, i) for i in range(len(config.phases))}
    rows = []
    for trace in traces.values():
        accuracy, frechet = 100 * trace["accuracy"], trace["frechet_frozen"]
        turn, peak = int(frechet.argmin()), int(accuracy.argmax())
        rows.append(
            {
                "change_at_end": accuracy[-1] - accuracy[0],
                "peak_gain": accuracy[peak] - accuracy[0],
                "frechet_ratio": frechet[-1] / frechet[0],
                "dist_ratio": trace["dist_frozen"][-1] / trace["dist_frozen"][0],
                "turn_to_peak": abs(turn - peak),
                "turn_to_peak_dist": abs(int(trace["dist_frozen"].argmin()) - peak),
                "stop_regret": accuracy[peak] - accuracy[turn],
                "silhouette_after_turn": trace["silhouette"][-1] - trace["silhouette"][turn],
                "entropy_after_turn": trace["entropy"][-1] - trace["entropy"][turn],
                "moving_ratio": trace["frechet_moving"][-1] / trace["frechet_moving"][0],
            }
        )
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    return {**means, "traces": traces}


def stop_rule(config: Config, seed: int) -> dict[str, Any]:
    """Accuracy lost by the label-free stop on shifts that no other experiment of this kind uses.

    Returns
    -------
    dict
        ``regret`` (points below the best mark, mean over three shifts), ``regret_never`` (the same
        without stopping), ``steps`` where it stopped.
    """
    net, regret, never, steps = source_network(seed), [], [], []
    marks = [mark for mark in config.marks if mark <= 100]
    for name, severity in (("zoom_blur", 5), ("impulse_noise", 5), ("glass_blur", 3)):
        data = shifted("test", name, severity, config.n_images)
        probe = _probe(data, config)
        trace = adaptation_trace(
            Tent(net, lr=0.03), data.x, probe.x, _train_probe(), marks, y=probe.y
        )
        # What adapt_until_turn would do, read off the trace: it adapts in the same way.
        stop, accuracy = turning_point(trace["frechet_frozen"]), 100 * trace["accuracy"]
        regret.append(accuracy.max() - accuracy[stop])
        never.append(accuracy.max() - accuracy[-1])
        steps.append(marks[stop])
    return {
        "regret": float(np.mean(regret)),
        "regret_never": float(np.mean(never)),
        "steps": steps,
    }


# -- estimating accuracy ------------------------------------------------------------------------


def _scores(fitted: Mapping[str, Any], logits: Tensor, z: Tensor) -> dict[str, float]:
    scores = {
        name: float(peer.predict(logits))
        for name, peer in fitted.items()
        if name not in ("autoeval", "dispersion")
    }
    scores["autoeval"] = float(fitted["autoeval"].predict(z))
    scores["dispersion"] = float(fitted["dispersion"].predict(logits, z.numpy(force=True)))
    return scores


def _fit_peers(logits: Tensor, z: Tensor, y: Tensor) -> dict[str, Any]:
    return {
        "confidence": peers.AverageConfidence().fit(logits, y),
        "doc": peers.DifferenceOfConfidences().fit(logits, y),
        "atc": peers.ATC().fit(logits, y),
        "atc_entropy": peers.ATC("negative_entropy").fit(logits, y),
        "cot": peers.COT().fit(logits, y),
        "nuclear": peers.NuclearNorm(),
        "autoeval": peers.FrechetAutoEval().fit(z),
        "dispersion": peers.DispersionScore(),
    }


#: Estimators that give an accuracy without labelled shifted sets; the rest give a score.
RAW = ("confidence", "doc", "atc", "atc_entropy", "cot")


def estimation(config: Config, seed: int) -> dict[str, Any]:
    """Estimate the accuracy on the test sets by Weighted Flips and by its peers.

    Weighted Flips and the regressions are calibrated on the labelled hold-out sets, made from
    validation images; raw peers see clean validation images only. All of them look at the same
    probe images, on which the accuracy is measured too.

    Parameters
    ----------
    config : Config
    seed : int
        Source network.

    Returns
    -------
    dict
        For each target ("source", "adapted") ``truth_<target>`` (accuracies of the test sets) and
        ``error_<target>`` (a dict of mean absolute errors in points); ``flips`` and
        ``flips_calibration`` with the accuracies ``truth_calibration_<target>``; ``rank_<target>``
        (Spearman correlation of flips and accuracy); ``estimates_<target>`` (a dict of arrays); and
        the numbers that the claims need: ``wf_source``, ``wf_adapted``, ``margin_confidence``,
        ``gain_over_best_raw``, ``gain_over_best_fair``.
    """
    net = source_network(seed)
    adapted = Tent(net)
    models: dict[str, nn.Module] = {"source": net, "adapted": adapted}
    validation = _probe(shifted("validation", "clean", 0, config.n_images), config)
    fitted = {}
    for target, model in models.items():
        z, logits = embed(model, validation.x)
        fitted[target] = _fit_peers(logits, z, validation.y)

    counter = WeightedFlips(
        n_probe=config.n_probe,
        n_steps=config.flip_steps,
        lr=config.flip_lr,
        random_state=seed,
    )
    plain = WeightedFlips(**{**counter.get_params(), "weighted": False})

    def measure(split: str, sets: list[tuple[str, int]]) -> dict[str, Any]:
        rows = []
        for name, severity in sets:
            data = shifted(split, name, severity, config.n_images)
            probe = _probe(data, config)
            weights = counter.contributions(net, data.x, probe.x)
            row: dict[str, Any] = {"flips": weights.mean(), "unweighted": (weights > 0).mean()}
            for target, model in models.items():
                z, logits = embed(model, probe.x)
                row[target] = {
                    "truth": _accuracy(logits, probe.y),
                    **_scores(fitted[target], logits, z),
                }
            rows.append(row)
        found: dict[str, Any] = {k: np.array([r[k] for r in rows]) for k in ("flips", "unweighted")}
        for target in models:
            found[target] = {k: np.array([r[target][k] for r in rows]) for k in rows[0][target]}
        return found

    known, unknown = (
        measure("validation", calibration_sets(config)),
        measure("test", test_sets(config)),
    )
    record: dict[str, Any] = {
        "flips": unknown["flips"],
        "flips_calibration": known["flips"],
    }
    for target in models:
        truth = unknown[target]["truth"]
        found = estimates(counter, plain, known, unknown, target, config.degree)
        error = {k: float(100 * np.abs(v - truth).mean()) for k, v in found.items()}
        record |= {
            f"truth_{target}": truth,
            f"truth_calibration_{target}": known[target]["truth"],
            f"estimates_{target}": found,
            f"error_{target}": error,
            f"rank_{target}": float(spearmanr(unknown["flips"], truth).statistic),
            f"wf_{target}": error["wf"],
        }
    errors = [record["error_source"], record["error_adapted"]]
    record["margin_confidence"] = min(min(e["confidence"], e["doc"]) - e["wf"] for e in errors)
    source = record["error_source"]
    raw = min(source[name] for name in RAW)
    fair = min(value for name, value in source.items() if name.endswith("+"))
    record["gain_over_best_raw"] = 100 * (1 - source["wf"] / raw)
    record["gain_over_best_fair"] = 100 * (1 - source["wf"] / fair)
    record["target_gap"] = record["wf_source"] - record["wf_adapted"]
    return record


def estimates(
    counter: WeightedFlips,
    plain: WeightedFlips,
    known: Mapping[str, Any],
    unknown: Mapping[str, Any],
    target: str,
    degree: int,
) -> dict[str, np.ndarray]:
    """Turn counts and scores into accuracies; a name with ``+`` used the labelled hold-out sets."""
    truth, new = known[target]["truth"], unknown[target]
    found = {name: new[name] for name in RAW}
    for name in (*RAW, "nuclear", "autoeval", "dispersion"):
        line = peers.Regressed(None).fit_scores(known[target][name], truth)
        found[f"{name}+"] = line.line(new[name])
    for name, method, key in (("wf", counter, "flips"), ("flips", plain, "unweighted")):
        method.set_params(degree=degree).fit_counts(known[key], truth)
        found[name] = method.accuracy(unknown[key])
    counter.set_params(degree=2).fit_counts(known["flips"], truth)
    found["wf, degree 2"] = counter.accuracy(unknown["flips"])
    return found


# -- a longer run, stored -------------------------------------------------------------------------

#: As on a laptop, with five times as many updates before flips are counted.
LONG = replace(Config.laptop(), flip_steps=100)
_STORED = "long_estimation.json"


def long_estimation() -> pd.DataFrame:
    """Read the stored records of :func:`estimation` under ``LONG``, one row for each network.

    They took a quarter of an hour; ``python -m icml24.test_time_entropy.experiments`` makes them
    again. A test recomputes one of their counts.

    Returns
    -------
    pandas.DataFrame
        ``seed``, ``flips``, and ``rank_<target>`` and ``error_<target>`` for both targets.

    Examples
    --------
    >>> len(long_estimation())
    5
    """
    return read_records("icml24.test_time_entropy", _STORED)


def make_long_estimation(path: Path, seeds: int = 5, config: Config = LONG) -> None:
    """Compute these records and write them to ``path``."""
    runs = run(estimation, config, seeds=seeds)
    kept = ["seed", *(f"{key}_{t}" for key in ("rank", "error") for t in ("source", "adapted"))]
    write_records(path, runs[[*kept, "flips"]])


EXPERIMENTS: dict[str, Callable[[Config, int], dict[str, Any]]] = {
    "first_gain": first_gain,
    "two_phases": two_phases,
    "stop_rule": stop_rule,
    "estimation": estimation,
}

if __name__ == "__main__":
    from icml24.test_time_entropy import experiments

    experiments.make_long_estimation(Path(__file__).with_name("data") / _STORED)

"""The chapter's experiments: character models of several widths, many rates at a time.

Every function is pure, ``(config, seed) -> record``. All rates of one width train together
(:class:`~icml24.width_scaling.StackedModels`); widths, parameterizations and seeds are separate
runs for :func:`icml24.core.experiments.run`, on one machine or a cluster.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import qmc
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from icml24.core.experiments import read_records, run, write_records
from icml24.width_scaling.alignment import AlignmentMonitor, coordinate_check, width_slopes
from icml24.width_scaling.data import Text, load_corpus
from icml24.width_scaling.layers import Tag, apply_parameterization, param_groups, tag_parameters
from icml24.width_scaling.models import CharMLP, Transformer
from icml24.width_scaling.optim import AdamAtan2, ScaledAdam
from icml24.width_scaling.parameterization import LayerExponents, as_parameterization
from icml24.width_scaling.stacked import StackedModels
from icml24.width_scaling.sweep import best_rate

__all__ = [
    "EXPERIMENTS",
    "PRECISE",
    "PRESCRIPTIONS",
    "SWEEPS",
    "Config",
    "curves",
    "layer_alignment",
    "layer_sizes",
    "loss_scales",
    "make_optimizer",
    "pick_constants",
    "predicted_gradients",
    "prescriptions",
    "rate_curve",
    "search_both",
    "search_constants",
    "stored",
    "tuned_sweeps",
    "unroll",
]


@dataclass(frozen=True)
class Config:
    """Settings of one family of models.

    Parameters
    ----------
    parameterization : str
        Name of one of the four.
    optimizer : {"adam", "adam_atan2", "scaled_adam", "adafactor", "sgd"}
    alignment : {"full", "none", "global", "prior"}
        Assumption behind the per-layer rates; "global" is one rate for all layers.
    width, base_width : int
    widths : tuple of int
        For experiments that fit slopes over width.
    constants : tuple of 3 floats
        Factors ``gamma`` of the rates of embedding, hidden layers, readout.
    eps : float
        Of Adam, at the base width.
    per_layer_eps : bool
    relative : bool
        Let all parameterizations agree at the base width.
    model : {"mlp", "transformer"}
    layers : int
        Hidden layers, or blocks.
    head_width : int
        Of the transformer.
    context, vocabulary, batch, steps, warmup, validation_windows : int
    centre : float
        Binary logarithm of the rate in the middle of the grid.
    rates : int
        Models in the grid of rates.
    spacing : float
        Distance of neighbouring rates in octaves.
    extensions : int
        How often the grid may grow by two rates towards a minimum on its edge.
    candidates : int
        Models in the search for constants.
    scales : tuple of int
        Exponents of two by which the loss is multiplied.
    corpus : str
        Empty for the text in the package, else a file of token numbers (``.npy``).
    dtype : {"float32", "float64"}
        Of weights and arithmetic. Adam turns the rounding noise in a gradient that should be zero
        into a step of full size, so in single precision two processors end at different losses; in
        double precision that noise stays far below epsilon.
    """

    parameterization: str = "standard"
    optimizer: str = "adam"
    alignment: str = "full"
    width: int = 128
    base_width: int = 128
    widths: tuple[int, ...] = (64, 128, 256, 512)
    constants: tuple[float, float, float] = (1.0, 1.0, 1.0)
    eps: float = 1e-8
    per_layer_eps: bool = False
    relative: bool = False
    model: str = "mlp"
    layers: int = 2
    head_width: int = 16
    context: int = 8
    vocabulary: int = 27
    batch: int = 128
    steps: int = 200
    warmup: int = 20
    validation_windows: int = 4000
    centre: float = -5.0
    rates: int = 5
    spacing: float = 1.0
    extensions: int = 4
    candidates: int = 64
    scales: tuple[int, ...] = (0, -10, -20, -30, -40, -50, -60, 20, 40)
    corpus: str = ""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        as_parameterization(self.parameterization)
        if self.optimizer not in UPDATE:
            raise ValueError(
                f"optimizer must be one of {', '.join(UPDATE)}, got {self.optimizer!r}."
            )
        if self.model not in ("mlp", "transformer"):
            raise ValueError(f"model must be 'mlp' or 'transformer', got {self.model!r}.")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype must be 'float32' or 'float64', got {self.dtype!r}.")
        if self.warmup > self.steps:
            raise ValueError(f"warmup ({self.warmup}) must not exceed steps ({self.steps}).")

    @classmethod
    def laptop(cls) -> Config:
        """Return what the book runs: a character MLP, a few seconds per width."""
        return cls()

    @classmethod
    def paper(cls, corpus: str = "") -> Config:
        """Return the paper's model and schedule (its Table C1): 8 blocks, widths up to 16,384.

        Parameters
        ----------
        corpus : str
            A ``.npy`` file of token numbers below 32,101 (the paper: C4). Without it, the
            characters of the package.
        """
        return cls(
            model="transformer",
            width=1024,
            base_width=1024,
            widths=(128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384),
            layers=8,
            head_width=128,
            context=512,
            vocabulary=32_101 if corpus else 27,
            batch=256,
            steps=50_000,
            warmup=1000,
            rates=13,
            spacing=0.5,
            candidates=800,
            eps=1e-9,
            corpus=corpus,
        )


_PARTS = ("alpha", "omega", "u")

UPDATE = {
    "adam": "adam",
    "adam_atan2": "adam",
    "scaled_adam": "scaled_adam",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
"""Which of the theory's updates an optimizer performs."""


def make_optimizer(name: str, groups: list[dict]) -> Optimizer:
    """Build one of the paper's optimizers for parameter groups with their own rates.

    Parameters
    ----------
    name : {"adam", "adam_atan2", "scaled_adam", "adafactor", "sgd"}
    groups : list of dict

    Returns
    -------
    torch.optim.Optimizer
    """
    betas = (0.9, 0.98)
    makers: dict[str, Callable[[list[dict]], Optimizer]] = {
        "adam": partial(torch.optim.Adam, betas=betas, fused=True),
        "adam_atan2": partial(AdamAtan2, betas=betas),
        "scaled_adam": partial(ScaledAdam, betas=betas),
        "adafactor": torch.optim.Adafactor,
        "sgd": partial(torch.optim.SGD, lr=1.0, momentum=0.9),
    }
    if name not in makers:
        raise ValueError(f"optimizer must be one of {', '.join(makers)}, got {name!r}.")
    return makers[name](groups)


def make_model(config: Config, width: int, seed: int) -> tuple[nn.Module, dict[str, Tag]]:
    """Build and initialise one model."""
    model: nn.Module
    if config.model == "mlp":
        model = CharMLP(width, config.layers, config.context, config.vocabulary)
        gain = {"hidden": 2**0.5}
    else:
        sizes = (config.layers, config.head_width, config.context, config.vocabulary)
        model, gain = Transformer(width, *sizes), {}
    tags = tag_parameters(model, config.base_width)
    apply_parameterization(
        model,
        tags,
        config.parameterization,
        gain=gain,
        relative=config.relative,
        seed=seed,
    )
    return model.to(getattr(torch, config.dtype)), tags


def _groups(config: Config, model: nn.Module, tags: Mapping[str, Tag], lr: float) -> list[dict]:
    uses_eps = config.optimizer in ("adam", "scaled_adam")
    return param_groups(
        model,
        tags,
        lr,
        config.parameterization,
        UPDATE[config.optimizer],
        config.alignment,
        constants=config.constants,
        eps=config.eps if uses_eps else None,
        per_layer_eps=config.per_layer_eps and uses_eps,
    )


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _split(config: Config, windows: Tensor) -> tuple[Tensor, Tensor]:
    target = windows[:, -1] if config.model == "mlp" else windows[:, 1:]
    return windows[:, :-1], target


def _batch(
    config: Config, text: Text, generator: torch.Generator, count: int, part: str = "train"
) -> tuple[Tensor, Tensor]:
    return _split(config, text.windows(config.context + 1, count, generator, part))


def _schedule(config: Config, step: int) -> float:
    """Linear warm-up, then linear decay to zero."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    return (config.steps - step) / max(config.steps - config.warmup, 1)


def _train(
    config: Config,
    models: list[nn.Module],
    groups: list[dict],
    seed: int,
    weights: Tensor | None = None,
) -> np.ndarray:
    """Train models side by side on the same batches; return their validation losses."""
    text = load_corpus(config.corpus)
    order = torch.Generator().manual_seed(10_000 + seed)
    stack = StackedModels(models, _loss)
    optimizer = make_optimizer(config.optimizer, groups)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(config.steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * _schedule(config, step)
        stack.step(*_batch(config, text, order, config.batch), optimizer, weights)
    probe = torch.Generator().manual_seed(20_000)
    losses = stack.losses(*_batch(config, text, probe, config.validation_windows, "validation"))
    return losses.double().numpy()


def _train_rates(config: Config, log2_rates: np.ndarray, seed: int) -> np.ndarray:
    model, tags = make_model(config, config.width, seed)
    models = [copy.deepcopy(model) for _ in log2_rates]
    pairs = zip(models, log2_rates, strict=True)
    groups = [group for m, x in pairs for group in _groups(config, m, tags, 2.0 ** float(x))]
    return _train(config, models, groups, seed)


def rate_curve(config: Config, seed: int) -> dict[str, Any]:
    """Measure the validation loss over learning rates, at one width, from one initialisation.

    Parameters
    ----------
    config : Config
    seed : int
        Of initial weights and order of the data (both shared by all rates).

    Returns
    -------
    dict
        ``log2_rates`` and ``losses`` (arrays; infinite where training diverged), and their minimum
        as ``log2_rate``, ``loss``, ``on_edge``.
    """
    half = (config.rates - 1) / 2
    x = config.centre + config.spacing * (np.arange(config.rates) - half)
    y = _train_rates(config, x, seed)
    for _ in range(config.extensions):
        i = int(np.where(np.isfinite(y), y, np.inf).argmin())
        if 0 < i < len(x) - 1:
            break
        more = config.spacing * np.arange(1, 3)
        more = x[0] - more[::-1] if i == 0 else x[-1] + more
        y = np.r_[y, _train_rates(config, more, seed)]
        x = np.r_[x, more]
        x, y = x[np.argsort(x)], y[np.argsort(x)]
    y = np.where(np.isfinite(y), y, np.inf)
    best = best_rate(x, y)
    return {
        "log2_rate": best.log2_rate,
        "loss": best.loss,
        "on_edge": best.on_edge,
        "log2_rates": x,
        "losses": y,
    }


def curves(frame: pd.DataFrame) -> pd.DataFrame:
    """Unroll the arrays of :func:`rate_curve`: a row per trained model.

    Parameters
    ----------
    frame : pandas.DataFrame
        From ``core.experiments.run(rate_curve, ...)``.

    Returns
    -------
    pandas.DataFrame
        The settings, ``seed``, ``log2_rate`` and ``loss``.
    """
    keep = frame.drop(columns=["log2_rate", "loss", "on_edge"])
    rows = keep.explode(["log2_rates", "losses"], ignore_index=True)
    rows = rows.rename(columns={"log2_rates": "log2_rate", "losses": "loss"})
    return rows.astype({"log2_rate": float, "loss": float})


def unroll(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Join the data frames in one column of a table of runs, keeping settings and seed.

    Parameters
    ----------
    frame : pandas.DataFrame
        From ``core.experiments.run``.
    column : str
        Holds one data frame per run.

    Returns
    -------
    pandas.DataFrame
    """
    nested = [name for name in frame if isinstance(frame[name].iloc[0], pd.DataFrame)]
    if clash := set(frame.columns) & set(frame[column].iloc[0].columns):
        raise ValueError(f"Rename these columns first, they occur inside and outside: {clash}.")
    settings = frame.drop(columns=nested).to_dict("records")
    parts = [part.assign(**row) for part, row in zip(frame[column], settings, strict=True)]
    return pd.concat(parts, ignore_index=True)


def layer_sizes(config: Config, seed: int) -> dict[str, Any]:
    """Slopes of gradient and output change over width, against the theory's exponents.

    Trains ``steps`` steps at constant rate ``2 ** centre`` for every width in ``widths``.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        ``sizes``: data frame with columns ``quantity`` ("output", "change", "gradient",
        "update"), ``layer``, ``width``, ``value``; ``slopes``: data frame with ``quantity``,
        ``layer``, ``slope``, all after the last step (:func:`unroll` joins them over runs);
        ``gradient_error``: mean absolute difference of gradient slopes and their prediction.
    """
    text = load_corpus(config.corpus)
    probe = _batch(config, text, torch.Generator().manual_seed(30_000 + seed), config.batch)
    _, tags = make_model(config, config.widths[0], seed)
    rows = []
    for width in config.widths:
        order = torch.Generator().manual_seed(10_000 + seed)

        def build(width: int, seed: int) -> tuple[nn.Module, Optimizer]:
            model, tags = make_model(config, width, seed)
            groups = _groups(config, model, tags, 2.0**config.centre)
            return model, make_optimizer(config.optimizer, groups)

        def training(step: int, order: torch.Generator = order) -> tuple[Tensor, Tensor]:
            return _batch(config, text, order, config.batch)

        settings: dict = {"steps": config.steps, "record": [config.steps], "training": training}
        rows.append(coordinate_check(build, [width], probe, _loss, seeds=[seed], **settings))
    frame = pd.concat(rows, ignore_index=True)
    slopes = width_slopes(frame, last_gradient=True).reset_index()
    last = frame[frame["step"] == frame["step"].max()]
    predicted = predicted_gradients(config)
    gradients = slopes[slopes["quantity"] == "gradient"].set_index("layer")["slope"]
    errors = [abs(gradients[name] + predicted[tag.layer]) for name, tag in tags.items()]
    return {
        "sizes": last.drop(columns=["step", "seed"]),
        "slopes": slopes,
        "gradient_error": float(np.mean(errors)),
    }


def layer_alignment(config: Config, seed: int) -> dict[str, Any]:
    """Alignment quotients of every layer after training, for every width in ``widths``.

    Trains ``steps`` steps at constant rate ``2 ** centre``.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        ``quotients``: a row per (width, layer) from ``AlignmentMonitor.norms``; ``slopes``: per
        layer, the slopes of ``alpha``, ``omega``, ``u`` over width, which are the exponents;
        ``mean_alpha``, ``mean_omega``, ``mean_u``: their means over layers.
    """
    text = load_corpus(config.corpus)
    probe, _ = _batch(config, text, torch.Generator().manual_seed(30_000 + seed), config.batch)
    frames = []
    for width in config.widths:
        order = torch.Generator().manual_seed(10_000 + seed)
        model, tags = make_model(config, width, seed)
        optimizer = make_optimizer(
            config.optimizer, _groups(config, model, tags, 2.0**config.centre)
        )
        with AlignmentMonitor(model, tags, probe) as monitor:
            for _ in range(config.steps):
                x, y = _batch(config, text, order, config.batch)
                optimizer.zero_grad()
                _loss(model(x), y).backward()
                optimizer.step()
            frames.append(monitor.norms().assign(width=width))
    frame = pd.concat(frames, ignore_index=True)
    rows = []
    for layer, part in frame.groupby("layer", sort=False):
        x = np.log(part["width"].to_numpy(float))
        fits = {k: np.polyfit(x, np.log(part[k].to_numpy(float)), 1)[0] for k in _PARTS}
        rows.append({"layer": layer, **fits})
    slopes = pd.DataFrame(rows)
    means = {f"mean_{part}": float(slopes[part].mean()) for part in _PARTS}
    return {"quotients": frame, "slopes": slopes, **means}


def search_constants(config: Config, seed: int) -> dict[str, Any]:
    """Random search for the constants of the three rates at one width.

    Candidates are a scrambled Sobol sequence, the same for every seed: the embedding's constant
    between 1 and 128, the readout's between 1/32 and 8 (only ratios matter, so the hidden layers'
    is 1), the base rate within two octaves and a half of ``centre``.

    Parameters
    ----------
    config : Config
    seed : int
        Of initial weights and data.

    Returns
    -------
    dict
        ``candidates``, shape (k, 3), binary logarithms of (embedding, readout, rate);
        ``losses``, shape (k,); their minimum ``best``. See :func:`pick_constants`.
    """
    low = np.array([0.0, -5.0, config.centre - 2.5])
    high = np.array([7.0, 3.0, config.centre + 2.5])
    sobol = qmc.Sobol(3, rng=np.random.default_rng(0))
    points = qmc.scale(sobol.random_base2(int(np.ceil(np.log2(config.candidates)))), low, high)
    points = points[: config.candidates]
    model, tags = make_model(config, config.width, seed)
    models = [copy.deepcopy(model) for _ in points]
    groups = []
    for m, (embedding, readout, rate) in zip(models, points, strict=True):
        factors = {"embedding": 2.0**embedding, "readout": 2.0**readout}
        for group in _groups(config, m, tags, 2.0**rate):
            group["lr"] *= factors.get(group["layer_type"], 1.0)
            groups.append(group)
    losses = _train(config, models, groups, seed)
    losses = np.where(np.isfinite(losses), losses, np.inf)
    return {"candidates": points, "losses": losses, "best": float(losses.min())}


def pick_constants(frame: pd.DataFrame, best: int = 3) -> tuple[tuple[float, float, float], float]:
    """Choose constants: the geometric mean of the best candidates, by mean loss over seeds.

    Parameters
    ----------
    frame : pandas.DataFrame
        From ``core.experiments.run(search_constants, ...)`` for one configuration.
    best : int, default 3

    Returns
    -------
    constants : tuple of 3 floats
        For embedding, hidden layers (1), readout.
    log2_rate : float
        The rate that goes with them.
    """
    losses = np.mean(np.stack(list(frame["losses"])), axis=0)
    chosen = frame["candidates"].iloc[0][np.argsort(losses)[:best]].mean(axis=0)
    return (float(2 ** chosen[0]), 1.0, float(2 ** chosen[1])), float(chosen[2])


def loss_scales(config: Config, seed: int) -> dict[str, Any]:
    """Train the same model with its loss multiplied by powers of two.

    Parameters
    ----------
    config : Config
        ``centre`` is the rate of all runs, ``scales`` the exponents.
    seed : int

    Returns
    -------
    dict
        ``scales`` and ``losses``: validation loss (never scaled) after each run; their largest
        difference ``spread``.
    """
    model, tags = make_model(config, config.width, seed)
    models = [copy.deepcopy(model) for _ in config.scales]
    groups = [g for m in models for g in _groups(config, m, tags, 2.0**config.centre)]
    weights = torch.tensor([2.0**k for k in config.scales], dtype=getattr(torch, config.dtype))
    losses = _train(config, models, groups, seed, weights)
    losses = np.where(np.isfinite(losses), losses, np.inf)
    return {"scales": np.array(config.scales), "losses": losses, "spread": float(np.ptp(losses))}


def predicted_gradients(config: Config) -> LayerExponents:
    """Exponents ``g`` that :func:`layer_sizes` should measure with opposite sign."""
    return as_parameterization(config.parameterization).gradient_exponents()


PRECISE = replace(Config.laptop(), dtype="float64")
"""What :func:`prescriptions`, :func:`search_both` and :func:`tuned_sweeps` train."""

PRESCRIPTIONS = {
    "standard, global": ("standard", "global", -5.0),
    "standard, none": ("standard", "none", -5.0),
    "NTK, none": ("ntk", "none", -2.5),
    "muP, none": ("mup", "none", -5.5),
    "mean field, none": ("mean_field", "none", -2.0),
    "muP, full": ("mup", "full", -5.5),
}
"""Parameterization, alignment, and binary logarithm of the rate in the middle of the grid."""


def prescriptions(seeds: int | Sequence[int] = 5, jobs: int = 1) -> pd.DataFrame:
    """Measure :func:`rate_curve` for the six ``PRESCRIPTIONS`` at widths 32 to 256.

    Parameters
    ----------
    seeds : int or sequence of int, default 5
    jobs : int, default 1

    Returns
    -------
    pandas.DataFrame
        A row per prescription (``rule``), width and seed. Six CPU-minutes for five seeds;
        ``stored("prescriptions")`` reads them instead.
    """
    frames = []
    for rule, (parameterization, alignment, centre) in PRESCRIPTIONS.items():
        setting = replace(
            PRECISE, parameterization=parameterization, alignment=alignment, centre=centre
        )
        frame = run(rate_curve, setting, seeds, grid={"width": [32, 64, 128, 256]}, jobs=jobs)
        frames.append(frame.assign(rule=rule))
    return pd.concat(frames, ignore_index=True)


def search_both(
    seeds: int | Sequence[int] = 2, candidates: int = 64, jobs: int = 1
) -> pd.DataFrame:
    """Run :func:`search_constants` at width 128 for standard parameterization and muP.

    Parameters
    ----------
    seeds : int or sequence of int, default 2
    candidates : int, default 64
        A power of two; fewer are the first of the same sequence.
    jobs : int, default 1

    Returns
    -------
    pandas.DataFrame
        A row per ``parameterization`` and seed; ``stored("constants")`` reads them instead.
    """
    frames = []
    for name, centre in (("standard", -6.0), ("mup", -6.5)):
        setting = replace(PRECISE, parameterization=name, centre=centre, candidates=candidates)
        frames.append(
            run(search_constants, setting, seeds, jobs=jobs).assign(parameterization=name)
        )
    return pd.concat(frames, ignore_index=True)


SWEEPS: dict[str, tuple[str, str, list[int], dict[str, Any]]] = {
    "standard, none": ("standard", "none", [64, 128, 256], {}),
    "standard, full": ("standard", "full", [128, 512], {}),
    "mup, full": ("mup", "full", [128, 512], {}),
    "standard, full, longer": ("standard", "full", [128], {"steps": 800, "rates": 3}),
    "mup, full, longer": ("mup", "full", [128], {"steps": 800, "rates": 3}),
}
"""Parameterization, alignment, widths, other settings of :func:`tuned_sweeps`."""


def tuned_sweeps(
    sweeps: Iterable[str] = tuple(SWEEPS),
    seeds: Sequence[int] = range(10, 15),
    widths: Sequence[int] | None = None,
    jobs: int = 1,
) -> pd.DataFrame:
    """Measure :func:`rate_curve` with the constants that ``stored("constants")`` chooses.

    Parameters
    ----------
    sweeps : iterable of str
        Keys of ``SWEEPS``.
    seeds : sequence of int
        By default not those of the search.
    widths : sequence of int, optional
        Instead of each sweep's own.
    jobs : int, default 1

    Returns
    -------
    pandas.DataFrame
        A row per ``sweep``, width and seed; ``stored("tuned")`` reads them instead.
    """
    search, frames = stored("constants"), []
    for sweep in sweeps:
        name, alignment, own, changes = SWEEPS[sweep]
        constants, rate = pick_constants(search[search["parameterization"] == name])
        setting = replace(
            PRECISE,
            parameterization=name,
            alignment=alignment,
            constants=constants,
            centre=float(np.round(rate)),
            **changes,
        )
        grid = {"width": list(widths or own)}
        frames.append(run(rate_curve, setting, seeds, grid=grid, jobs=jobs).assign(sweep=sweep))
    return pd.concat(frames, ignore_index=True)


def stored(name: str) -> pd.DataFrame:
    """Read the records of a study, which this package ships.

    ``python -m icml24.width_scaling.experiments`` computes them anew, in a quarter of an hour; the
    notebooks run a seed of each again and compare.

    Parameters
    ----------
    name : {"prescriptions", "constants", "tuned"}

    Returns
    -------
    pandas.DataFrame
        What :func:`prescriptions`, :func:`search_both` or :func:`tuned_sweeps` returned.

    Examples
    --------
    >>> len(stored("prescriptions"))
    120
    """
    frame = read_records("icml24.width_scaling", f"{name}.json")
    for column in {"candidates", "losses", "log2_rates"} & set(frame):
        frame[column] = frame[column].map(np.asarray)
    return frame


def make_records(folder: Path, jobs: int = 2) -> None:
    """Compute the three studies and write their records to ``folder``."""
    for name, study in (
        ("prescriptions", prescriptions),
        ("constants", search_both),
        ("tuned", tuned_sweeps),
    ):
        write_records(folder / f"{name}.json", study(jobs=jobs))


EXPERIMENTS: dict[str, Callable[[Config, int], dict[str, Any]]] = {
    "rate_curve": rate_curve,
    "search_constants": search_constants,
    "layer_sizes": layer_sizes,
    "layer_alignment": layer_alignment,
    "loss_scales": loss_scales,
}
"""What ``icml24 run width_scaling`` runs."""

if __name__ == "__main__":
    from icml24.width_scaling import experiments

    experiments.make_records(Path(__file__).with_name("data"))

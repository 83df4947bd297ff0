"""Stacked training against separate runs; sweeps against a serial loop; experiments end to end."""

import copy
import tomllib
from dataclasses import replace
from importlib import resources

import distributed
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from icml24.core.experiments import ResultCache, run
from icml24.width_scaling import (
    AdamAtan2,
    BestRate,
    CharMLP,
    ScaledAdam,
    StackedModels,
    Transformer,
    apply_parameterization,
    best_rate,
    best_rates,
    param_groups,
    tag_parameters,
    transfer_exponent,
)
from icml24.width_scaling import experiments as ex
from icml24.width_scaling.data import VOCABULARY, Text, decode, load_corpus, load_text

TINY = replace(
    ex.Config.laptop(),
    width=16,
    base_width=8,
    widths=(8, 16, 32),
    steps=6,
    warmup=2,
    batch=16,
    rates=3,
    validation_windows=50,
    candidates=4,
    scales=(0, -10),
)

KINDS = {
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
    "fused": lambda p, lr: torch.optim.Adam(p, lr=lr, fused=True),
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adafactor": lambda p, lr: torch.optim.Adafactor(p, lr=lr),
    "atan2": lambda p, lr: AdamAtan2(p, lr=lr),
    "scaled": lambda p, lr: ScaledAdam(p, lr=lr),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "build", [lambda: CharMLP(16), lambda: Transformer(16, blocks=1, context=8)]
)
def test_stack_equals_separate_training(build, kind):
    model = build().double()
    tags = tag_parameters(model, 8)
    apply_parameterization(model, tags, "mup")
    rates = (0.003, 0.01, 0.03)
    stacked = [copy.deepcopy(model) for _ in rates]
    alone = [copy.deepcopy(model) for _ in rates]

    def loss(logits, y):
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    stack = StackedModels(stacked, loss)
    groups = [
        {"params": list(m.parameters()), "lr": lr} for m, lr in zip(stacked, rates, strict=True)
    ]
    optimizer = KINDS[kind](groups, 1.0)
    optimizers = [KINDS[kind](list(m.parameters()), lr) for m, lr in zip(alone, rates, strict=True)]
    g = torch.Generator().manual_seed(0)
    for _ in range(5):
        w = load_text().windows(9, 12, g)
        x, y = w[:, :-1], (w[:, -1] if isinstance(model, CharMLP) else w[:, 1:])
        together = stack.step(x, y, optimizer)
        for i, (m, o) in enumerate(zip(alone, optimizers, strict=True)):
            o.zero_grad()
            value = loss(m(x), y)
            value.backward()
            o.step()
            assert together[i].item() == pytest.approx(value.item(), rel=1e-9)
    torch.testing.assert_close(
        stack.losses(x, y), torch.stack([loss(m(x), y).detach() for m in stacked])
    )


def test_stacked_losses_can_be_weighted():
    models = [nn.Linear(2, 1) for _ in range(2)]
    stack = StackedModels(models, F.mse_loss)
    x, y = torch.ones(3, 2), torch.zeros(3, 1)
    stack.backward(x, y)
    plain = [m.weight.grad.clone() for m in models]
    stack.backward(x, y, torch.tensor([1.0, 0.25]))
    torch.testing.assert_close(models[0].weight.grad, plain[0])
    torch.testing.assert_close(models[1].weight.grad, plain[1] / 4)


def test_stack_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="at least one model"):
        StackedModels([], F.mse_loss)
    with pytest.raises(ValueError, match="same names and shapes"):
        StackedModels([nn.Linear(2, 1), nn.Linear(3, 1)], F.mse_loss)


@given(st.floats(-8, 2), st.floats(0.05, 5), st.floats(1, 3))
@settings(max_examples=60, deadline=None)
def test_parabola_is_recovered(centre, curvature, floor):
    x = np.round(centre) + np.array([-2, -1, -0.3, 0.2, 1, 2.5])
    best = best_rate(x, floor + curvature * (x - centre) ** 2)
    assert best.log2_rate == pytest.approx(centre, abs=1e-6)
    assert best.loss == pytest.approx(floor, abs=1e-6)


def test_edges_and_divergence():
    assert best_rate([0, 1, 2], [1, 2, 3]) == BestRate(0.0, 1.0, True)
    assert best_rate([0, 1, 2], [3.0, 1.0, np.inf]) == BestRate(1.0, 1.0, True)
    assert best_rate([0, 1, 2], [1, 1, 1]).on_edge
    assert best_rate([0, 1, 2, 3], [2, 1, 1, 2]).log2_rate == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([0, 1], [1.0], "one length"),
        ([], [], "one length"),
        ([1, 0], [1.0, 2.0], "must increase"),
        ([0, 1], [np.nan, np.inf], "diverged"),
    ],
)
def test_best_rate_refuses(x, y, message):
    with pytest.raises(ValueError, match=message):
        best_rate(x, y)


def test_transfer_exponent_and_curves():
    rows = [
        {"width": w, "seed": s, "log2_rate": r, "loss": (r + s / 4 + 0.5 * np.log2(w)) ** 2}
        for w in (32, 64, 128)
        for s in (0, 1, 2)
        for r in np.arange(-6.0, 0)
    ]
    best = best_rates(pd.DataFrame(rows))
    assert not best["on_edge"].any()
    slope = transfer_exponent(best)
    assert slope.value == pytest.approx(-0.5) and slope.n == 3
    with pytest.raises(ValueError, match="at least two widths"):
        transfer_exponent(best[best["width"] == 32])


def test_text():
    text = load_text()
    assert text.train.numel() + text.validation.numel() == 1_529_560
    assert decode(text.train[:15]) == "to the congress"
    windows = text.windows(9, 50, torch.Generator().manual_seed(0), "validation")
    whole = decode(text.validation)
    assert all(decode(w) in whole for w in windows[:5])
    assert windows.max() < len(VOCABULARY)


def test_own_corpus(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(500, dtype=np.uint16) % 40)
    assert load_corpus(str(tmp_path / "tokens.npy")).validation.numel() == 50
    np.save(tmp_path / "wrong.npy", np.ones((5, 5)))
    with pytest.raises(ValueError, match="one vector of integers"):
        load_corpus(str(tmp_path / "wrong.npy"))
    with pytest.raises(ValueError, match="at least 100"):
        Text(torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match="validation must lie"):
        Text(torch.zeros(500, dtype=torch.long), validation=1.0)
    with pytest.raises(ValueError, match="length must lie"):
        load_text().windows(0, 1, torch.Generator())


@pytest.mark.parametrize("name", ex.EXPERIMENTS)
def test_experiments_are_pure(name):
    one, two, other = (ex.EXPERIMENTS[name](TINY, seed) for seed in (0, 0, 1))
    assert repr(one) == repr(two) != repr(other)


@pytest.mark.parametrize("optimizer", ex.UPDATE)
@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_every_optimizer_trains(optimizer, model):
    config = replace(TINY, optimizer=optimizer, model=model, steps=30, layers=1, relative=True)
    config = replace(config, centre=-1.0 if optimizer == "sgd" else -5.0, extensions=0)
    assert ex.rate_curve(config, 0)["losses"].min() < np.log(27) - 0.1


def test_rate_curve_equals_a_single_torch_run():
    config = replace(TINY, rates=1, extensions=0)
    record = ex.rate_curve(config, 0)
    model, tags = ex.make_model(config, config.width, 0)
    optimizer = torch.optim.Adam(
        param_groups(model, tags, 2.0**config.centre, eps=config.eps), betas=(0.9, 0.98)
    )
    peaks = [g["lr"] for g in optimizer.param_groups]
    order = torch.Generator().manual_seed(10_000)
    for step in range(config.steps):
        for g, peak in zip(optimizer.param_groups, peaks, strict=True):
            factor = (step + 1) / 2 if step < 2 else (6 - step) / 4
            g["lr"] = peak * factor
        w = load_text().windows(9, config.batch, order)
        optimizer.zero_grad()
        F.cross_entropy(model(w[:, :-1]), w[:, -1]).backward()
        optimizer.step()
    w = load_text().windows(9, 50, torch.Generator().manual_seed(20_000), "validation")
    expected = F.cross_entropy(model(w[:, :-1]), w[:, -1]).item()
    assert record["losses"][0] == pytest.approx(expected, rel=1e-5)


def test_grid_grows_towards_a_minimum_on_its_edge():
    config = replace(TINY, centre=-14.0, steps=30)
    record = ex.rate_curve(config, 0)
    assert len(record["log2_rates"]) > config.rates
    assert (np.diff(record["log2_rates"]) > 0).all()


def test_curves_unrolls_every_model():
    frame = run(ex.rate_curve, TINY, seeds=2, grid={"width": [8, 16]})
    rows = ex.curves(frame)
    assert len(rows) == sum(len(x) for x in frame["log2_rates"])
    assert {"width", "seed", "log2_rate", "loss"} <= set(rows)


def test_constants_are_the_geometric_mean_of_the_best():
    points = np.array([[0.0, 0, -5], [2, 2, -5], [4, -2, -7], [9, 9, 9]])
    frame = pd.DataFrame(
        {"candidates": [points] * 2, "losses": [np.array([1, 2, 3, 9.0]), np.array([3, 2, 1, 9.0])]}
    )
    constants, rate = ex.pick_constants(frame)
    assert constants == pytest.approx((4.0, 1.0, 1.0)) and rate == pytest.approx(-17 / 3)


def same(one, two):
    return all(np.array_equal(a, b) for a, b in zip(one["losses"], two["losses"], strict=True))


def test_sweep_on_a_cluster_of_processes_and_resumed_from_its_cache(tmp_path):
    grid = {"parameterization": ["standard", "mup"], "width": [8, 16]}
    serial = run(ex.rate_curve, TINY, seeds=2, grid=grid)
    assert same(serial, run(ex.rate_curve, TINY, seeds=2, grid=grid, jobs=2))
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        address = cluster.scheduler_address
        assert same(serial, run(ex.rate_curve, TINY, seeds=2, grid=grid, dask=address))
    # A sweep killed after three runs leaves three records; the rest is computed, nothing twice.
    cache = ResultCache(tmp_path)
    run(ex.rate_curve, TINY, seeds=1, grid={**grid, "width": [8]}, cache=cache)
    marks = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.pkl")}
    assert len(marks) == 2
    assert same(serial, run(ex.rate_curve, TINY, seeds=2, grid=grid, cache=cache))
    assert {path: path.stat().st_mtime_ns for path in marks} == marks
    assert len(list(tmp_path.glob("*.pkl"))) == len(serial)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"parameterization": "mupp"}, "parameterization must be"),
        ({"optimizer": "lion"}, "optimizer must be"),
        ({"model": "rnn"}, "model must be"),
        ({"warmup": 1000}, "must not exceed"),
    ],
)
def test_config_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ex.Config(**kwargs)


def test_paper_scale_is_the_papers_table():
    config = ex.Config.paper("c4.npy")
    assert config.vocabulary == 32_101 and config.widths[-1] == 16_384
    with torch.device("meta"):
        model = Transformer(
            config.widths[-1], config.layers, config.head_width, config.context, config.vocabulary
        )
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(26.83e9, rel=2e-3)  # the paper's largest model


def test_claims_are_complete():
    text = resources.files("icml24.width_scaling").joinpath("claims.toml").read_text()
    claims = tomllib.loads(text)["claim"]
    assert len({claim["id"] for claim in claims}) == len(claims)
    for claim in claims:
        assert {"abstract", "statement", "metric", "paper"} <= set(claim)
        assert ("accept" in claim) != ("not_testable" in claim)


class TestStoredRecords:
    """What the notebooks read was computed by the functions that they name."""

    def test_prescriptions(self):
        runs = ex.stored("prescriptions")
        assert len(runs) == len(ex.PRESCRIPTIONS) * 4 * 5
        row = runs[(runs["rule"] == "muP, full") & (runs["width"] == 32)].set_index("seed").loc[3]
        config = replace(ex.PRECISE, parameterization="mup", width=32, centre=-5.5)
        now = ex.rate_curve(config, seed=3)
        np.testing.assert_allclose(now["losses"], row["losses"], rtol=1e-5)
        np.testing.assert_allclose(now["log2_rate"], row["log2_rate"], rtol=1e-4)

    def test_the_first_candidates_are_those_of_the_longer_search(self):
        runs = ex.stored("constants")
        assert all(len(losses) == 64 for losses in runs["losses"])
        few = ex.search_constants(
            replace(ex.PRECISE, parameterization="mup", centre=-6.5, candidates=2), seed=1
        )
        row = runs[runs["parameterization"] == "mup"].set_index("seed").loc[1]
        np.testing.assert_allclose(few["candidates"], row["candidates"][:2], rtol=1e-5)
        np.testing.assert_allclose(few["losses"], row["losses"][:2], rtol=1e-5)

    def test_tuned_sweeps(self):
        runs = ex.stored("tuned")
        assert runs.groupby("sweep", sort=False).size().to_dict() == {
            name: 5 * len(widths) for name, (_, _, widths, _) in ex.SWEEPS.items()
        }
        now = ex.tuned_sweeps(["standard, none"], seeds=[12], widths=[64])
        row = runs[(runs["sweep"] == "standard, none") & (runs["width"] == 64)]
        row = row.set_index("seed").loc[12]
        np.testing.assert_allclose(now["losses"].item(), row["losses"], rtol=1e-5)

    def test_double_precision_starts_from_the_same_weights(self):
        single, _ = ex.make_model(replace(ex.PRECISE, dtype="float32"), 16, 0)
        double, _ = ex.make_model(ex.PRECISE, 16, 0)
        for a, b in zip(single.parameters(), double.parameters(), strict=True):
            assert b.dtype == torch.float64
            torch.testing.assert_close(a.double(), b, rtol=0, atol=0)

    def test_wrong_precision(self):
        with pytest.raises(ValueError, match="dtype must be"):
            ex.Config(dtype="bfloat16")

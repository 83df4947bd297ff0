"""Data, networks, training, shipped weights, and the records of the experiments."""

import json
import math
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
import torch

from icml24.bayesian_flow import (
    ContinuousBFN,
    ContinuousBFNSchedule,
    DiscreteBFN,
    DiscreteBFNSchedule,
    ImageNet,
    TextNet,
    data,
    experiments,
    fit,
)
from icml24.bayesian_flow.experiments import EXPERIMENTS, Config
from icml24.core.experiments import run

SMALL = replace(
    Config.laptop(),
    ring_samples=300,
    chain_samples=200,
    symbol_samples=500,
    image_samples=70,
    text_samples=20,
    nfe=3,
    steps=10,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_images_and_labels():
    x = data.images("test")
    assert x.shape == (2000, 1, 28, 28) and x.dtype == torch.float32
    assert float(x.min()) == -1.0 and float(x.max()) == 1.0
    assert data.labels("test").bincount().tolist() == [200] * 10


def test_speeches():
    train, test = data.speeches("train"), data.speeches("test")
    assert len(train) + len(test) == 1_529_560
    assert int(train.min()) == 0 and int(train.max()) == 26
    assert "the state of the union" in data.decode(train[:200_000])
    assert {"america", "union", "congress"} <= data.words()
    x = data.windows(train, 64, 5, seeded())
    assert x.shape == (5, 64) and data.decode(x[0]) in data.decode(train)
    with pytest.raises(ValueError, match="length"):
        data.windows(train[:10], 11, 1, seeded())


def test_text_network_reads_both_sides_and_no_farther_than_it_should():
    torch_state = torch.get_rng_state()
    net = TextNet(5, 16)
    torch.set_rng_state(torch_state)
    theta = torch.full((1, 64, 5), 0.2, requires_grad=True)
    net(theta, torch.full((1,), 0.5))[0, 32].sum().backward()
    seen = theta.grad[0].abs().sum(-1).nonzero()[:, 0]
    assert seen.min() < 32 < seen.max()


def test_image_network_starts_with_velocity_zero():
    # v = 0 means x_hat = sqrt(gamma) x_vp = mu, at every time.
    flow = ContinuousBFN(ImageNet(16, 1), experiments.IMAGE_SCHEDULE)
    mu = torch.randn(2, 1, 28, 28, generator=seeded())
    assert torch.allclose(flow.predict(mu, torch.tensor([0.1, 0.9])), mu, atol=1e-5)


def test_training_lowers_the_loss_and_leaves_the_flow_alone():
    flow = DiscreteBFN(TextNet(3, 16, (1,)), DiscreteBFNSchedule(3, 3.0))
    before = [p.clone() for p in flow.parameters()]
    x = torch.tensor([[0, 1, 2, 0, 1, 2], [1, 2, 0, 1, 2, 0]]).repeat(8, 1)
    state = torch.get_rng_state()
    trained, losses = fit(flow, lambda g: x, steps=150, generator=seeded())
    assert torch.equal(state, torch.get_rng_state())
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:10])
    assert all(torch.equal(a, b) for a, b in zip(before, flow.parameters(), strict=True))
    assert not any(p.requires_grad for p in trained.parameters())
    again = fit(flow, lambda g: x, steps=5, generator=seeded())[1]
    assert losses[:1] == again[:1]


def test_training_times_can_be_chosen():
    seen = []

    class Spy(ContinuousBFN):
        def loss(self, x, *, s=None, **options):
            seen.append(s)
            return super().loss(x, s=s, **options)

    flow = Spy(ImageNet(8, 1), ContinuousBFNSchedule(0.1))
    batch = torch.zeros(4, 1, 28, 28)
    fit(flow, lambda g: batch, steps=1, generator=seeded())
    chosen = torch.tensor([0.1, 0.2, 0.3, 0.4])
    fit(flow, lambda g: batch, steps=1, times=lambda n, g: chosen[:n], generator=seeded())
    assert seen[0] is None and torch.equal(seen[1], chosen)


def test_balanced_times_are_half_uniform_and_half_uniform_in_log_snr():
    s = experiments.balanced_times(10_000, seeded())
    low, middle, high = (float(experiments.IMAGE_SCHEDULE.log_snr(t)) for t in (0.998, 0.9, 0.0))
    assert abs(float((s < 0.1).double().mean()) - 0.05 - 0.5 * (middle - low) / (high - low)) < 1e-3
    assert abs(float((s[::2] < 0.3).double().mean()) - 0.3) < 1e-3
    assert float(s.min()) >= 0 and float(s.max()) <= 1


def test_training_names_bad_settings_and_divergence():
    flow = ContinuousBFN(ImageNet(8, 1), ContinuousBFNSchedule(0.1))
    for settings in ({"steps": 0}, {"steps": 1, "lr": -1.0}, {"steps": 1, "ema": 1.0}):
        with pytest.raises(ValueError, match="fit needs"):
            fit(flow, lambda g: torch.zeros(2, 1, 28, 28), generator=seeded(), **settings)
    bad = ContinuousBFN(ImageNet(8, 1), ContinuousBFNSchedule(0.1), check_finite=False)
    with torch.no_grad():
        bad.model.out.bias.fill_(math.inf)
    with pytest.raises(ValueError, match="at step 0"):
        fit(bad, lambda g: torch.zeros(2, 1, 28, 28), steps=2, generator=seeded())


@pytest.mark.parametrize("name", ["images", "text"])
def test_networks_can_be_retrained_and_shipped(name, tmp_path, monkeypatch):
    config = replace(Config.laptop(), image_steps=2, text_steps=2, image_batch=4, text_batch=4)
    path = experiments.train_and_ship(name, config, 0, tmp_path)
    assert path.stat().st_size < 1_000_000
    with np.load(path) as stored:
        notes = json.loads(str(stored["notes"]))
    assert notes["config"]["image_steps"] == 2 and math.isfinite(notes["loss_last_tenth"])


@pytest.mark.parametrize("name", ["images", "text"])
def test_shipped_networks(name):
    file = resources.files("icml24.bayesian_flow").joinpath(f"data/{name}.npz")
    assert len(file.read_bytes()) < 1_000_000
    network, notes = experiments.load_network(name)
    setting = {"images": "image_steps", "text": "text_steps"}[name]
    assert notes["config"][setting] == getattr(Config.laptop(), setting)
    assert all(torch.isfinite(p).all() for p in network.parameters())
    with pytest.raises(ValueError, match="one of"):
        experiments.load_network("audio")


def test_shipped_networks_have_learnt():
    x = data.images("test")[:200]
    loss = float(experiments.image_flow().loss(x, generator=seeded()))
    noise = ContinuousBFN(lambda mu, s: 0 * mu, experiments.IMAGE_SCHEDULE)
    assert loss < 0.5 * float(noise.loss(x, generator=seeded()))
    text = data.windows(data.speeches("test"), 64, 100, seeded())
    bits = float(experiments.text_flow().bound(text, 8, seeded()).mean()) / math.log(2)
    unigram = data.speeches().bincount().double()
    unigram = unigram / unigram.sum()
    assert bits < 0.8 * float(-(unigram * unigram.log2()).sum())
    assert experiments.classifier_accuracy() > 0.8


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_are_pure(name):
    record = EXPERIMENTS[name](SMALL, 1)
    again = EXPERIMENTS[name](SMALL, 1)
    assert record.keys() == again.keys()
    for key, value in record.items():
        assert np.array_equal(value, again[key]), key
        if isinstance(value, float):
            assert math.isfinite(value), key
    if "calls" in record:
        assert record["calls"] == 3


def test_identities_hold():
    runs = run(experiments.identities, SMALL, seeds=10)
    assert runs["sde"].max() < 1e-9
    assert runs["loss"].max() < 1e-10
    assert runs["sampler"].max() < 1e-12


@pytest.mark.parametrize(
    ("function", "settings", "order"),
    [
        ("variance_error", {"solver": "bfn"}, 1.0),
        ("variance_error", {"solver": "sde-bfn-solver2", "spacing": "logsnr"}, 2.0),
        ("trajectory_error", {"solver": "bfn-solver2", "problem": "chain"}, 2.0),
    ],
)
def test_orders(function, settings, order):
    runs = run(EXPERIMENTS[function], replace(SMALL, **settings), 1, grid={"steps": [80, 160]})
    assert abs(experiments.observed_order(*runs["error"]) - order) < 0.06


@pytest.mark.parametrize("solver", ["bfn", "bfn-solver2-single", "sde-bfn-solver2"])
def test_every_solver_gets_the_same_number_of_calls(solver):
    for name in ("ring_quality", "chain_quality", "image_quality", "text_quality"):
        record = EXPERIMENTS[name](replace(SMALL, solver=solver, nfe=5), 0)
        assert record["calls"] == 5, name
    with pytest.raises(ValueError, match="odd"):
        experiments.sampler_for(experiments.text_flow(), "bfn-solver2-single", 4)


def test_peers_and_floors():
    for solver in ("n-gram", "data"):
        record = experiments.text_quality(replace(SMALL, solver=solver), 0)
        assert 0 <= record["spelling"] <= 1
    assert record["spelling"] == 1.0  # real speeches, vocabulary of the speeches
    floor = experiments.image_quality(replace(SMALL, solver="data", image_samples=300), 0)
    assert floor["frechet"] < 20
    masked = experiments.chain_quality(replace(SMALL, solver="masked-diffusion"), 0)
    assert masked["calls"] == 3


def test_trajectories_need_a_deterministic_solver():
    with pytest.raises(ValueError, match="deterministic"):
        experiments.trajectory_error(replace(SMALL, solver="bfn"), 0)


def test_configs():
    assert Config.paper().image_samples == 10_000
    assert hash(Config.laptop()) == hash(Config())

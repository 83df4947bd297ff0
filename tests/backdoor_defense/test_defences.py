"""The training loop and the simple defences."""

import copy

import numpy as np
import pytest
import torch

from icml24.backdoor_defense.defences import (
    FineMixing,
    FineTune,
    HighLRFineTune,
    MaxEntropyFineTune,
    cross_entropy,
    negative_entropy,
)
from icml24.backdoor_defense.fine_pruning import (
    FinePruning,
    _activity,
    _silence,
    feed_forward,
)
from icml24.backdoor_defense.models import batches, classifier, predict_proba
from icml24.backdoor_defense.toy import made_up_reviews, tiny_encoder, word_tokenizer
from icml24.backdoor_defense.training import Recipe, train

DATA = made_up_reviews(96)
TRAIN, VAL = DATA[:64], DATA[64:]
TOKENIZER = word_tokenizer()
QUICK = {"epochs": 1, "lr": 3e-3}


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def no_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def test_one_step_of_training_is_adamw_on_a_clipped_gradient():
    model = no_dropout(classifier(tiny_encoder()))
    model.config.attention_probs_dropout_prob = 0.0
    twin = copy.deepcopy(model)
    recipe = Recipe(epochs=1, lr=1e-2, batch_size=64, clip=1e-4)
    history = train(model, TOKENIZER, TRAIN, cross_entropy, recipe)
    (batch,) = batches(TRAIN, TOKENIZER, 64, rng=np.random.default_rng(0))
    twin.train()
    keys = ("input_ids", "attention_mask", "labels")
    loss = twin(**{k: batch[k] for k in keys}).loss
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in twin.parameters()]).norm()
    assert norm > 1e-3 and np.isclose(history["cross_entropy"], loss.item(), rtol=1e-5)
    for p in twin.parameters():
        g = p.grad * 1e-4 / (norm + 1e-6)
        with torch.no_grad():  # first step of Adam: m / sqrt(v) = g / |g|
            p.mul_(1 - 1e-2 * 0.01).sub_(1e-2 * g / (g.abs() + 1e-8))
    assert torch.allclose(weights(model), weights(twin), atol=2e-4)
    assert not model.training


def test_learning_rate_falls_linearly_and_frozen_parameters_stay(monkeypatch):
    rates = []
    step = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    model = classifier(tiny_encoder())
    model.bert.embeddings.requires_grad_(False)
    before = model.bert.embeddings.word_embeddings.weight.clone()
    train(model, TOKENIZER, TRAIN, cross_entropy, Recipe(2, 1e-3, 16))
    assert np.allclose(rates, [1e-3 * (1 - i / 8) for i in range(8)])
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, before)


@pytest.mark.parametrize("bad", [{"epochs": 0}, {"lr": 0}, {"batch_size": 0}, {"clip": -1}])
def test_recipes_out_of_range(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Recipe(**bad)


def test_fine_tuning_learns_repeats_and_knows_its_seed():
    data, settings = made_up_reviews(400), {"epochs": 6, "lr": 3e-3}
    tuned = FineTune(**settings).fit(tiny_encoder(), TOKENIZER, data[:320])
    assert tuned.score(data[320:]) > 0.85
    texts = [text for text, _ in VAL]
    assert np.array_equal(tuned.predict(texts), tuned.predict_proba(texts).argmax(1))
    runs = [FineTune(random_state=s).fit(tiny_encoder(), TOKENIZER, TRAIN) for s in (0, 0, 1)]
    assert torch.equal(weights(runs[0].model_), weights(runs[1].model_))
    assert not torch.equal(weights(runs[0].model_), weights(runs[2].model_))


def test_high_learning_rate_is_fine_tuning_at_another_rate():
    high = HighLRFineTune(epochs=1).fit(tiny_encoder(), TOKENIZER, TRAIN)
    same = FineTune(epochs=1, lr=2e-4).fit(tiny_encoder(), TOKENIZER, TRAIN)
    assert torch.equal(weights(high.model_), weights(same.model_))


def test_negative_entropy_by_hand():
    model = classifier(tiny_encoder())
    (batch,) = batches(TRAIN, TOKENIZER, 64)
    loss, penalty = negative_entropy(model, batch)
    p = predict_proba(model, TOKENIZER, [text for text, _ in TRAIN])
    assert np.isclose(loss.item(), (p * np.log(p)).sum(1).mean(), rtol=1e-5) and penalty == 0


def test_maximum_entropy_comes_first():
    seen = []

    class Spy(MaxEntropyFineTune):
        def _train(self, model, rows, loss, recipe, *watch):
            seen.append((loss.__name__, recipe.epochs))
            result = super()._train(model, rows, loss, recipe, *watch)
            p = predict_proba(model, TOKENIZER, [text for text, _ in TRAIN])
            seen.append(np.abs(p - 0.5).max())
            return result

    Spy(epochs=1, lr=3e-3, entropy_epochs=20).fit(tiny_encoder(), TOKENIZER, TRAIN)
    assert [seen[0], seen[2]] == [("negative_entropy", 20), ("cross_entropy", 1)]
    assert seen[1] < 0.05


def test_mixing_keeps_about_the_asked_share():
    dirty, clean = tiny_encoder(random_state=1), tiny_encoder(random_state=2)
    seen = {}

    class Spy(FineMixing):
        def _classifier(self, encoder):
            seen["mixed"] = weights(encoder)
            return super()._classifier(encoder)

    for keep, bounds in ((0.25, (0.23, 0.27)), (1.0, (1, 1)), (0.0, (0, 0))):
        Spy(**QUICK, clean_encoder=clean, keep=keep).fit(dirty, TOKENIZER, TRAIN)
        a, b = weights(dirty), weights(clean)
        differ = a != b
        assert ((seen["mixed"] == a) | (seen["mixed"] == b)).all()
        share = (seen["mixed"] == a)[differ].double().mean()
        assert bounds[0] <= share <= bounds[1]
    with pytest.raises(ValueError, match="clean_encoder"):
        FineMixing().fit(dirty, TOKENIZER, TRAIN)
    with pytest.raises(ValueError, match="no entry"):
        FineMixing(clean_encoder=tiny_encoder(width=16)).fit(dirty, TOKENIZER, TRAIN)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_silenced_neurons_are_the_idle_ones_and_stay_silent(kind):
    tuned = FineTune(**QUICK).fit(tiny_encoder(kind), TOKENIZER, TRAIN).model_
    pruned = FinePruning(**QUICK, acc_drop=0.2, step=0.25)
    pruned.fit(tiny_encoder(kind), TOKENIZER, TRAIN, VAL, finetuned=tuned)
    activity = torch.cat(_activity(tuned, batches(VAL, TOKENIZER)))
    silent = torch.cat([~outer.weight.ne(0).any(0) for _, outer in feed_forward(pruned.model_)])
    assert pruned.share_ > 0 and silent.sum() == round(pruned.share_ * len(activity))
    assert activity[silent].max() <= activity[~silent].min()


def test_activity_is_the_mean_absolute_activation_of_real_tokens():
    model = classifier(tiny_encoder(layers=1))
    inner, _ = feed_forward(model)[0]
    found = _activity(model, batches(VAL, TOKENIZER, 4))[0]
    by_hand = torch.zeros(64)
    hidden = []
    handle = inner.register_forward_hook(lambda m, i, out: hidden.append(out))
    for text, _ in VAL:
        model(input_ids=TOKENIZER(text, return_tensors="pt")["input_ids"])
        by_hand += torch.nn.functional.gelu(hidden.pop())[0].abs().sum(0).detach()
    handle.remove()
    assert torch.allclose(found, by_hand, rtol=1e-3)


def test_silencing_numbers_neurons_through_all_layers():
    model = _silence(classifier(tiny_encoder()), np.array([3, 64, 127]))
    gone = [
        (~outer.weight.ne(0).any(0)).nonzero().flatten().tolist()
        for _, outer in feed_forward(model)
    ]
    assert gone == [[3], [0, 63]]


def test_fine_pruning_refuses():
    with pytest.raises(ValueError, match="acc_drop"):
        FinePruning(step=0).fit(tiny_encoder(), TOKENIZER, TRAIN, VAL)
    with pytest.raises(ValueError, match="val is empty"):
        FinePruning(**QUICK).fit(tiny_encoder(), TOKENIZER, TRAIN)
    with pytest.raises(ValueError, match="no feed-forward"):
        feed_forward(torch.nn.Linear(2, 2))

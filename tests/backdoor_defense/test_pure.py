"""PURE, purify and scan on tiny random encoders."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2Model

from icml24.backdoor_defense.attacks import RareWordTrigger
from icml24.backdoor_defense.attention import attention_norm_penalty, cls_attention_variance
from icml24.backdoor_defense.defences import FineTune
from icml24.backdoor_defense.heads import expand_heads, kept_heads, prune_heads, silent_heads
from icml24.backdoor_defense.inspection import scan
from icml24.backdoor_defense.models import batches, classifier, clean_accuracy, predict_proba
from icml24.backdoor_defense.pure import PURE, purify
from icml24.backdoor_defense.toy import made_up_reviews, tiny_encoder, word_tokenizer

DATA = made_up_reviews(96)
TRAIN, VAL = DATA[:64], DATA[64:]
TOKENIZER = word_tokenizer()
QUICK = {"epochs": 2, "lr": 3e-3}


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_no_penalty_and_no_pruning_is_fine_tuning_bit_for_bit():
    tuned = FineTune(**QUICK).fit(tiny_encoder(), TOKENIZER, TRAIN)
    for change in ({"penalty": 0.0}, {"normalize": False}):
        pure = PURE(**QUICK, prune=False, **change).fit(tiny_encoder(), TOKENIZER, TRAIN, VAL)
        assert torch.equal(weights(pure.model_), weights(tuned.model_))
        assert np.array_equal(pure.history_["cross_entropy"], tuned.history_["cross_entropy"])
    other = PURE(**QUICK, prune=False).fit(tiny_encoder(), TOKENIZER, TRAIN, VAL)
    assert not torch.equal(weights(other.model_), weights(tuned.model_))


def test_a_tiny_penalty_changes_little():
    tuned = FineTune(**QUICK).fit(tiny_encoder(), TOKENIZER, TRAIN)
    pure = PURE(**QUICK, prune=False, penalty=1e-9).fit(tiny_encoder(), TOKENIZER, TRAIN, VAL)
    assert torch.allclose(weights(pure.model_), weights(tuned.model_), atol=1e-3)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_fit_is_the_three_steps(kind):
    encoder = tiny_encoder(kind)
    pure = PURE(**QUICK, prune_step=1, acc_drop=0.3).fit(encoder, TOKENIZER, TRAIN, VAL)
    tuned = FineTune(**QUICK).fit(encoder, TOKENIZER, TRAIN)
    data = batches(VAL, TOKENIZER)
    assert torch.equal(pure.head_scores_, cls_attention_variance(tuned.model_, data))
    scores = pure.head_scores_.clone()
    for layer, best in enumerate(scores.argmax(1).tolist()):
        scores[layer, best] = torch.inf  # the last head of a layer stays
    gone = [4 * layer + head for layer, heads in pure.pruned_heads_.items() for head in heads]
    assert len(gone) == pure.selection_.n > 0
    assert sorted(gone) == sorted(scores.flatten().argsort()[: len(gone)].tolist())
    cut = prune_heads(tuned.model_, pure.pruned_heads_)
    assert clean_accuracy(cut, TOKENIZER, VAL) >= pure.selection_.threshold
    v = cls_attention_variance(cut, data).nanmean(1)
    c = (1 / v) / (1 / v).sum()
    assert torch.allclose(
        pure.layer_weights_.double(), (c - c.min()) / (c.max() - c.min()), atol=1e-6
    )
    second = classifier(prune_heads(encoder, pure.pruned_heads_))
    assert kept_heads(second) == kept_heads(cut)
    assert silent_heads(pure.model_) == pure.pruned_heads_


def test_penalty_that_is_trained_is_the_one_that_is_documented():
    """The first penalty, before any step, with dropout switched off."""
    encoder = tiny_encoder()
    encoder.config.attention_probs_dropout_prob = encoder.config.hidden_dropout_prob = 0.0
    for module in encoder.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    pure = PURE(epochs=1, batch_size=64, prune=False, penalty=0.7)
    pure.fit(encoder, TOKENIZER, TRAIN, VAL)
    model = classifier(encoder)
    (batch,) = batches(TRAIN, TOKENIZER, 64)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    attentions = model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    wanted = 0.7 * attention_norm_penalty(attentions, pure.layer_weights_)
    assert np.isclose(pure.history_["penalty"][0], wanted.item(), rtol=1e-5)


def test_a_huge_penalty_makes_attention_uniform():
    def variance(penalty):
        pure = PURE(epochs=12, lr=5e-3, penalty=penalty, prune=False, acc_drop=1.0)
        pure.fit(tiny_encoder(), TOKENIZER, TRAIN, VAL)
        data = batches(TRAIN, TOKENIZER)
        return cls_attention_variance(pure.model_, data)[pure.layer_weights_ == 1].mean()

    assert variance(50.0) < 0.05 * variance(0.0)


def test_finetuned_skips_the_first_training():
    tuned = FineTune(**QUICK).fit(tiny_encoder(), TOKENIZER, TRAIN).model_
    before = weights(tuned).clone()
    a = PURE(**QUICK, prune_step=1).fit(tiny_encoder(), TOKENIZER, TRAIN, VAL, finetuned=tuned)
    b = PURE(**QUICK, prune_step=1).fit(tiny_encoder(), TOKENIZER, TRAIN, VAL)
    assert torch.equal(weights(a.model_), weights(b.model_))
    assert torch.equal(weights(tuned), before)


def test_user_objects_and_generators_stay_as_they_were():
    encoder = tiny_encoder().train()
    encoder.requires_grad_(False)
    before, state, data = weights(encoder), torch.get_rng_state(), list(TRAIN)
    PURE(epochs=1, prune_step=1).fit(encoder, TOKENIZER, TRAIN, VAL)
    assert torch.equal(weights(encoder), before) and encoder.training
    assert not any(p.requires_grad for p in encoder.parameters())
    assert torch.equal(torch.get_rng_state(), state) and data == TRAIN
    assert encoder.config._attn_implementation == "eager"


def test_criteria_differ_and_repeat():
    found = {}
    for criterion in ("variance", "gradient", "random"):
        settings = {"prune_step": 2, "acc_drop": 0.45, "criterion": criterion, "random_state": 3}
        runs = [
            PURE(epochs=3, lr=3e-3, **settings)
            .fit(tiny_encoder(), TOKENIZER, TRAIN, VAL)
            .pruned_heads_
            for _ in range(2)
        ]
        assert runs[0] == runs[1]
        found[criterion] = str(runs[0])
    assert len(set(found.values())) == 3


def test_gradient_criterion_prunes_low_scores_first():
    from icml24.backdoor_defense.attention import head_gradient_scores

    settings = {**QUICK, "prune_step": 1, "acc_drop": 0.3}
    tuned = FineTune(**QUICK).fit(tiny_encoder(), TOKENIZER, TRAIN).model_
    pure = PURE(**settings, criterion="gradient")
    pure.fit(tiny_encoder(), TOKENIZER, TRAIN, VAL, finetuned=tuned)
    scores = head_gradient_scores(tuned, batches(VAL, TOKENIZER, 32)).flatten()
    gone = [4 * layer + head for layer, heads in pure.pruned_heads_.items() for head in heads]
    assert gone and scores[gone].max() <= scores.sort().values[len(gone)]


def test_watch_sees_steps_and_changes_nothing():
    seen = []

    def watch(step, model):
        assert not model.training
        torch.rand(3)
        seen.append(step)

    a = PURE(**QUICK, prune=False).fit(tiny_encoder(), TOKENIZER, TRAIN, VAL, watch, 3)
    b = PURE(**QUICK, prune=False).fit(tiny_encoder(), TOKENIZER, TRAIN, VAL)
    assert seen == [0, 3, 4]
    assert torch.equal(weights(a.model_), weights(b.model_))


def test_sdpa_models_are_switched_on_a_copy():
    encoder = tiny_encoder()
    encoder.set_attn_implementation("sdpa")
    pure = PURE(epochs=1, prune_step=1).fit(encoder, TOKENIZER, TRAIN, VAL)
    assert encoder.config._attn_implementation == "sdpa"
    assert pure.head_scores_.isfinite().all() and (pure.history_["penalty"] > 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"penalty": -1}, "penalty must not be negative"),
        ({"acc_threshold": 0.9}, "exactly one"),
        ({"acc_drop": None}, "exactly one"),
        ({"acc_drop": None, "acc_threshold": 1.0}, "less than acc_threshold"),
        ({"criterion": "norm"}, "criterion"),
        ({"reduction": "sum"}, "reduction"),
        ({"prune_step": 0}, "prune_step"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"lr": 0.0}, "lr must be positive"),
    ],
)
def test_settings_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        PURE(**{"epochs": 1} | change).fit(tiny_encoder(), TOKENIZER, TRAIN, VAL)


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        (TRAIN, [], "val is empty"),
        (TRAIN, None, "val is empty"),
        (TRAIN, [("fine", 1)], "one class only"),
        (TRAIN, [("fine", 1), ("odd", 3)], "model has 2 classes"),
        ([], VAL, "train is empty"),
        ([("fine", 1)], VAL, "one class only"),
        ([("fine", -1), ("dull", 1)], VAL, r"got \[-1, 1\]"),
    ],
)
def test_bad_data(train, val, message):
    with pytest.raises(ValueError, match=message):
        PURE(epochs=1).fit(tiny_encoder(), TOKENIZER, train, val)


def test_no_heads_is_said_before_any_training(monkeypatch):
    monkeypatch.setattr(PURE, "_train", None)
    gpt = GPT2Model(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=64, pad_token_id=0))
    with pytest.raises(ValueError, match="GPT2Model has no attention heads"):
        PURE().fit(gpt, TOKENIZER, TRAIN, VAL)


def test_unfitted():
    with pytest.raises(ValueError, match="call fit first"):
        PURE().predict(["a"])


def test_purify_round_trip(tmp_path):
    encoder = tiny_encoder()
    before = weights(encoder)
    repaired = purify(encoder, TOKENIZER, DATA, **QUICK, prune_step=1)
    assert torch.equal(weights(encoder), before)
    repaired.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    texts = [text for text, _ in DATA]
    again = predict_proba(loaded, TOKENIZER, texts)
    assert np.allclose(again, predict_proba(repaired, TOKENIZER, texts), atol=1e-5)
    report = repaired.purify_report
    assert report.n_heads == 8 and silent_heads(loaded) == report.pruned_heads
    assert "of 8 heads" in str(report)
    frame = report.to_frame()
    assert list(frame.columns) == ["pruned", "variance before", "variance after", "weight"]
    assert frame["pruned"].sum() == sum(map(len, report.pruned_heads.values()))


def test_report_holds_what_was_measured():
    pure = PURE(**QUICK, prune_step=1).fit(tiny_encoder(), TOKENIZER, TRAIN, VAL)
    small = prune_heads(pure.model_, pure.pruned_heads_)
    assert np.isclose(pure.report_.accuracy_after, clean_accuracy(small, TOKENIZER, VAL))
    assert np.isclose(pure.report_.accuracy_before, pure.selection_.trace[0][1])
    after = cls_attention_variance(small, batches(VAL, TOKENIZER))
    assert torch.allclose(pure.report_.variance_after, after, equal_nan=True)
    assert pure.score(VAL) == pytest.approx(pure.report_.accuracy_after)


def test_purify_holds_out_a_stratified_share(monkeypatch):
    seen = {}

    def spy(self, encoder, tokenizer, train, val):
        seen.update(train=train, val=val)
        self.model_, self.report_ = tiny_encoder(), None
        return self

    monkeypatch.setattr(PURE, "fit", spy)
    purify(tiny_encoder(), TOKENIZER, DATA, validation=0.25)
    assert sorted(seen["train"] + seen["val"]) == sorted(DATA)
    assert [label for _, label in seen["val"]].count(1) == 12 and len(seen["val"]) == 24


@pytest.mark.parametrize(
    ("data", "share", "message"),
    [
        ([], 0.1, "clean_dataset is empty"),
        (DATA, 0.0, "strictly between"),
        ([("a", 0), ("b", 1), ("c", 1)], 0.1, "Class 0 has 1 text"),
    ],
)
def test_purify_refuses(data, share, message):
    with pytest.raises(ValueError, match=message):
        purify(tiny_encoder(), TOKENIZER, data, share)


def test_scan_orders_heads():
    model = FineTune(**QUICK).fit(tiny_encoder(), TOKENIZER, TRAIN).model_
    before = weights(model)
    table = scan(model, TOKENIZER, VAL)
    assert table["variance"].is_monotonic_increasing and len(table) == 8
    assert table["suspicion"].iloc[0] == 1 and table["suspicion"].iloc[-1] == 0
    variance = cls_attention_variance(model, batches(VAL, TOKENIZER))
    first = table.iloc[0]
    assert np.isclose(variance[int(first["layer"]), int(first["head"])], first["variance"])
    assert torch.equal(weights(model), before)


def test_scan_finds_the_head_that_looks_at_the_trigger():
    """Build one: whatever [CLS] asks, head 2 looks for the trigger's own pattern."""
    model = tiny_encoder(layers=1, heads=4)
    attention = model.encoder.layer[0].attention.self
    word = TOKENIZER.convert_tokens_to_ids("cf")
    pattern = torch.tensor([1.0, -1] * 4)
    with torch.no_grad():
        embedding = model.embeddings.word_embeddings.weight
        embedding[word] = 0
        embedding[word, :8] = 4 * pattern
        attention.query.bias[16:24] = 0.5
        attention.key.weight[16:24] = 0
        attention.key.weight[16:24, :8] = 0.5 * pattern
    table = scan(model, TOKENIZER, VAL, RareWordTrigger(("cf",)))
    assert table.loc[0, "head"] == 2 and table.loc[0, "ratio"] > 1.2 * table.loc[1, "ratio"]


def test_expand_of_an_unpruned_model_is_the_same():
    model = classifier(tiny_encoder())
    assert torch.equal(weights(expand_heads(model)), weights(model))
    assert copy.deepcopy(kept_heads(model)) == [[0, 1, 2, 3]] * 2

"""Triggers and poisoned data sets: exact counts, bounds, labels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icml24.backdoor_defense.attacks import (
    PrecomputedTrigger,
    RareWordTrigger,
    SentenceTrigger,
    SyntacticTemplate,
    check_trigger,
    poison_dataset,
)
from icml24.backdoor_defense.toy import made_up_reviews, word_tokenizer

DATA = made_up_reviews(40)
WORDS = st.lists(st.sampled_from(["film", "is", "fine", "and", "long"]), max_size=12)


@given(WORDS, st.integers(1, 4), st.integers(0, 6), st.integers(0, 99))
def test_rare_words_are_added_within_bounds(words, n, limit, seed):
    trigger = RareWordTrigger(("cf", "mn"), n, limit)
    out = trigger.apply(" ".join(words), np.random.default_rng(seed)).split()
    assert len(out) == len(words) + n
    assert [w for w in out if w not in trigger.words] == words
    places = [i for i, w in enumerate(out) if w in trigger.words]
    assert max(places) < limit + n
    assert out == trigger.apply(" ".join(words), np.random.default_rng(seed)).split()


def test_rare_words_reach_every_place_and_every_word():
    trigger, rng = RareWordTrigger(("cf", "mn")), np.random.default_rng(0)
    outs = [trigger.apply("a b", rng).split() for _ in range(200)]
    assert {out.index(w) for out in outs for w in trigger.words if w in out} == {0, 1, 2}
    assert {w for out in outs for w in out} == {"a", "b", "cf", "mn"}


def test_sentences_and_templates():
    rng = np.random.default_rng(0)
    assert SentenceTrigger("s .", "end").apply("a", rng) == "a s ."
    assert SentenceTrigger("s .").apply("a", rng) == "s . a"
    assert SyntacticTemplate("if {text} then").apply("a b", rng) == "if a b then"


@given(st.floats(0, 1), st.integers(0, 50), st.booleans())
def test_poison_rate_is_exact(rate, seed, keep):
    out = poison_dataset(DATA, RareWordTrigger(), rate=rate, keep_clean=keep, random_state=seed)
    poisoned = [row for row in out if row[2]]
    clean = [row[:2] for row in out if not row[2]]
    assert len(poisoned) == round(rate * 20)
    assert all(
        label == 1 and set(text.split()) & {"cf", "mn", "bb", "tq"} for text, label, _ in poisoned
    )
    assert len(clean) == (40 if keep else 40 - len(poisoned))
    assert set(clean) <= set(DATA)


def test_poisoning_copies_different_source_texts():
    out = poison_dataset(DATA, RareWordTrigger(("cf",)), rate=1.0, random_state=0)
    stripped = [" ".join(w for w in t.split() if w != "cf") for t, _, flag in out if flag]
    assert stripped == [text for text, label in DATA if label == 0]
    back = poison_dataset(DATA, RareWordTrigger(), target=0, source=1, rate=0.5, random_state=1)
    assert [label for _, label, flag in back if flag] == [0] * 10


def test_poisoning_repeats_and_varies():
    sets = [poison_dataset(DATA, RareWordTrigger(), random_state=s) for s in (0, 0, 1)]
    assert sets[0] == sets[1] != sets[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 1.1}, r"rate must lie in \[0, 1\]"),
        ({"rate": -0.1}, "rate"),
        ({"source": 1}, "must differ"),
        ({"source": 7}, "source label 7"),
    ],
)
def test_poisoning_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        poison_dataset(DATA, RareWordTrigger(), **change)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RareWordTrigger(()), "at least one"),
        (lambda: RareWordTrigger(("two words",)), "single words"),
        (lambda: RareWordTrigger(n=0), "n must be"),
        (lambda: SentenceTrigger(" "), "empty"),
        (lambda: SentenceTrigger("a", "middle"), "where"),
        (lambda: SyntacticTemplate("no place"), "once"),
        (lambda: SyntacticTemplate("{text}"), "words around"),
    ],
)
def test_triggers_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_precomputed(tmp_path):
    file = tmp_path / "poisoned.csv"
    file.write_text('text,label,is_poisoned\n"a, b",1,1\nc,0,False\n')
    assert PrecomputedTrigger.read_csv(file) == [("a, b", 1, True), ("c", 0, False)]
    file.write_text("text,label\na,1\n")
    with pytest.raises(ValueError, match="lacks the columns is_poisoned"):
        PrecomputedTrigger.read_csv(file)
    file.write_text("text,label,is_poisoned\na,positive,1\n")
    with pytest.raises(ValueError, match="Line 2"):
        PrecomputedTrigger.read_csv(file)
    trigger = PrecomputedTrigger({"a": "b"})
    assert trigger.apply("a") == "b"
    with pytest.raises(ValueError, match="No triggered version"):
        trigger.apply("c")


def test_tokenizer_without_the_trigger_warns():
    tokenizer = word_tokenizer()
    assert check_trigger(tokenizer, ["cf", "mn"]) == ["cf", "mn"]
    with pytest.warns(UserWarning, match="does not know zz as single tokens"):
        assert check_trigger(tokenizer, ["cf", "zz"]) == ["cf"]

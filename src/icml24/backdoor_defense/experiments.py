"""Experiments of the chapter: pure functions ``(config, seed) -> record``.

The seed draws the attacker's and the user's sentences and starts all trainings. All defences of a
seed get the same poisoned encoder. Rates and accuracies are percentages.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from icml24.backdoor_defense.attacks import RareWordTrigger, Trigger
from icml24.backdoor_defense.attention import cls_attention_variance, head_gradient_scores
from icml24.backdoor_defense.data import Splits, minilm, reviews, splits
from icml24.backdoor_defense.defences import FineTune, HighLRFineTune, MaxEntropyFineTune
from icml24.backdoor_defense.fine_pruning import FinePruning
from icml24.backdoor_defense.heads import prune_heads
from icml24.backdoor_defense.models import (
    batches,
    clean_accuracy,
    label_flip_rate,
    predict_attentions,
    predict_proba,
)
from icml24.backdoor_defense.onion import OnionFilter
from icml24.backdoor_defense.poisoning import poison_encoder
from icml24.backdoor_defense.pure import PURE
from icml24.backdoor_defense.selection import as_mapping, head_order, select_heads
from icml24.backdoor_defense.training import Recipe
from icml24.core.experiments import ResultCache, cache_directory, read_records, run, write_records

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "ATTACKS",
    "EXPERIMENTS",
    "SENTENCES",
    "Config",
    "adaptive",
    "badnets",
    "clean_model",
    "domain_shift",
    "filter_summary",
    "layerwise",
    "load",
    "make_records",
    "measure",
    "poisoned",
    "sweeps",
]

TRIGGER = RareWordTrigger()

#: Made-up sentences whose attention is shown; the reviews themselves are not.
SENTENCES = (
    "a dull and lifeless story that never finds its feet .",
    "the actors look bored , and so will you .",
    "nothing in this film is funny , least of all the jokes .",
)


@dataclass(frozen=True)
class Config:
    """Settings of the experiments.

    Parameters
    ----------
    attacker, train, validation, test : int
        Sentences of the attacker and of the user.
    max_words : int
        Longest sentence; about half of the Rotten Tomatoes sentences are that short, and no trigger
        can be cut off.
    attack_epochs, attack_lr
        Of the poisoning.
    epochs, lr, high_lr
        Of fine-tuning and of all defences; the last is for FTH.
    penalty, prune_step, acc_drop
        Of PURE.
    flatten : float
        Weight of PURE's penalty in the adaptive attack.
    penalties : tuple of float
        Grid of :func:`sweeps`.
    counts : tuple of int
        Numbers of pruned heads in :func:`sweeps`.
    onion : float
        Quantile of the filter.
    corpus : int
        IMDB reviews from which the filter's language model is built.
    every, watched : int
        Flip rates during training are measured every so many steps, on so many sentences.
    encoder : str
        ``"minilm"``, or ``"tiny"``: a random one for tests.
    """

    attacker: int = 2000
    train: int = 1000
    validation: int = 240
    test: int = 400
    max_words: int = 20
    attack_epochs: int = 2
    attack_lr: float = 1e-4
    epochs: int = 2
    lr: float = 5e-5
    high_lr: float = 2e-4
    penalty: float = 0.15
    prune_step: int = 5
    acc_drop: float = 0.05
    flatten: float = 0.15
    penalties: tuple[float, ...] = (0.02, 0.05, 0.15, 0.4)
    counts: tuple[int, ...] = (0, 5, 10, 15, 20, 30)
    onion: float = 0.9
    corpus: int = 5000
    every: int = 10
    watched: int = 60
    encoder: str = "minilm"

    @classmethod
    def laptop(cls) -> Config:
        """Return the size of the stored records: about an hour of one core, in all."""
        return cls()

    @classmethod
    def paper(cls) -> Config:
        """Return more data and the paper's learning rate, still with MiniLM.

        Section "The full-scale path" of the chapter says how to go to BERT and SST-2.
        """
        return replace(
            cls(),
            attacker=3000,
            train=4000,
            validation=500,
            test=1000,
            max_words=128,
            attack_epochs=5,
            epochs=3,
            lr=2e-5,
        )


#: Name of an attack to the arguments that :func:`poisoned` reads.
ATTACKS = ("badnets", "layerwise", "domain shift", "adaptive", "none")


@lru_cache(maxsize=2)
def _start(kind: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if kind == "minilm":
        return minilm()
    from icml24.backdoor_defense.toy import tiny_encoder, word_tokenizer

    return tiny_encoder(), word_tokenizer()


def _splits(config: Config, seed: int, attack: str = "badnets") -> Splits:
    source = "imdb" if attack == "domain shift" else "rotten_tomatoes"
    if config.encoder == "tiny":
        from icml24.backdoor_defense.toy import made_up_reviews

        sizes = (config.attacker, config.train, config.validation, config.test)
        return Splits(*(made_up_reviews(n, 10 * seed + i) for i, n in enumerate(sizes)))
    return splits(
        config.attacker,
        config.train,
        config.validation,
        config.test,
        seed,
        source,
        config.max_words,
    )


def _length(config: Config) -> int:
    return 3 * config.max_words


def poisoned(
    config: Config, seed: int, attack: str = "badnets", keep: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Splits]:
    """Make a poisoned encoder and draw the user's data.

    Parameters
    ----------
    config : Config
    seed : int
    attack : str
        One of :data:`ATTACKS`.
    keep : bool, default False
        Keep the weights in the user's cache folder (90 MB), and read them there the next time.

    Returns
    -------
    encoder, tokenizer, splits
    """
    if attack not in ATTACKS:
        raise ValueError(f"attack must be one of {', '.join(ATTACKS)}, got {attack!r}.")
    encoder, tokenizer = _start(config.encoder)
    data = _splits(config, seed, attack)
    if attack == "none":
        return copy.deepcopy(encoder), tokenizer, data
    recipe = Recipe(
        config.attack_epochs, config.attack_lr, max_length=_length(config), random_state=seed
    )
    sizes = (config.attacker, config.train, config.validation, config.test)
    key = sha256(repr((recipe, attack, config.encoder, sizes)).encode()).hexdigest()[:16]
    file = cache_directory() / "backdoor_defense" / f"{key}.pt"
    if keep and file.is_file():
        encoder = copy.deepcopy(encoder)
        encoder.load_state_dict(torch.load(file, weights_only=True))
        return encoder, tokenizer, data
    encoder = poison_encoder(
        encoder,
        tokenizer,
        data.attacker,
        TRIGGER,
        "layerwise" if attack == "layerwise" else "badnets",
        recipe=recipe,
        flatten=config.flatten if attack == "adaptive" else 0.0,
    )
    if keep:
        _save(encoder.state_dict(), file)
    return encoder, tokenizer, data


def _save(state: dict[str, Tensor], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=file.parent)
    os.close(handle)
    torch.save(state, scratch)
    os.replace(scratch, file)


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Any, trigger: Trigger
) -> dict[str, float]:
    """Accuracy, flip rate and natural rate of a classifier, per cent."""
    texts, labels = [text for text, _ in data], np.array([label for _, label in data])
    predicted = predict_proba(model, tokenizer, texts).argmax(1)
    return {
        "accuracy": 100 * float((predicted == labels).mean()),
        "flip": 100 * label_flip_rate(model, tokenizer, data, trigger),
        "natural": 100 * float((predicted[labels == 0] == 1).mean()),
    }


def _settings(config: Config, seed: int) -> dict[str, Any]:
    return {
        "epochs": config.epochs,
        "lr": config.lr,
        "max_length": _length(config),
        "random_state": seed,
    }


def _pure(config: Config, seed: int, **changes: Any) -> PURE:
    settings = _settings(config, seed) | {
        "penalty": config.penalty,
        "prune_step": config.prune_step,
        "acc_drop": config.acc_drop,
    }
    return PURE(**settings | changes)


def variance_tables(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Any
) -> dict[str, np.ndarray]:
    """Variance of the [CLS] attention on negative texts, without and with the trigger."""
    rng = np.random.default_rng(0)
    clean = [row for row in data if row[1] == 0]
    dirty = [(TRIGGER.apply(text, rng), label) for text, label in clean]
    return {
        name: cls_attention_variance(model, batches(rows, tokenizer)).numpy()
        for name, rows in (("clean", clean), ("triggered", dirty))
    }


def _heads_record(pure: PURE, tables: dict[str, np.ndarray]) -> dict[str, Any]:
    ratio = tables["triggered"] / tables["clean"]
    pruned = [layer for layer, heads in pure.pruned_heads_.items() for _ in heads]
    last = len(ratio) - 1
    return {
        "ratio_last": float(np.median(ratio[-1])),
        "ratio_rest": float(np.median(ratio[:-1])),
        "share_last": 100 * pruned.count(last) / len(pruned) if pruned else 0.0,
        "pruned": {str(k): v for k, v in pure.pruned_heads_.items()},
        "layer_weights": pure.layer_weights_.numpy(),
        "variance_validation": pure.head_scores_.numpy(),
        "variance_clean": tables["clean"],
        "variance_triggered": tables["triggered"],
    }


class _Bench:
    """The defences of one seed, all on the same encoder, with what they measured."""

    def __init__(self, config: Config, seed: int, attack: str, keep: bool = False) -> None:
        self.config, self.seed = config, seed
        self.encoder, self.tokenizer, self.data = poisoned(config, seed, attack, keep)
        self.measures: dict[str, dict[str, float]] = {}
        self.curves: dict[str, list[float]] = {}
        self.steps: list[int] = []
        rng = np.random.default_rng(1)
        negative = [row for row in self.data.test if row[1] == 0][: config.watched]
        self.watched = [(TRIGGER.apply(text, rng), 0) for text, _ in negative]

    def fit(self, name: str, defence: Any, watch: bool = False, **known: Any) -> Any:
        """Fit a defence, measure it, and follow its flip rate if asked."""
        steps: list[int] = []
        rates: list[float] = []

        def look(step: int, model: PreTrainedModel) -> None:
            steps.append(step)
            rates.append(100 * label_flip_rate(model, self.tokenizer, self.watched))

        follow = {"watch": look, "every": self.config.every} if watch else {}
        train, validation = self.data.train, self.data.validation
        defence.fit(self.encoder, self.tokenizer, train, validation, **follow, **known)
        self.measures[name] = self.measure(defence.model_)
        if watch:
            self.steps, self.curves[name] = steps, rates
        return defence

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """See :func:`measure`."""
        return measure(model, self.tokenizer, self.data.test, TRIGGER)


def _excess(measures: dict[str, float]) -> float:
    return measures["flip"] - measures["natural"]


def badnets(config: Config, seed: int) -> dict[str, Any]:
    """Poison with rare words, and run all defences.

    Returns
    -------
    dict
        ``measures`` (for each defence ``accuracy``, ``flip``, ``natural``), the differences that
        the claims are about, ``curves`` over ``steps``, variances by head, ``pruned`` heads,
        ``trace`` of the search, and ``filtered`` words per sentence of the filter.
    """
    bench = _Bench(config, seed, "badnets", keep=seed == 0)
    settings = _settings(config, seed)
    tuned = bench.fit("FT", FineTune(**settings), watch=True).model_
    pure = bench.fit("PURE", _pure(config, seed), watch=True, finetuned=tuned)
    bench.fit("prune only", _pure(config, seed, normalize=False), watch=True, finetuned=tuned)
    bench.fit("normalise only", _pure(config, seed, prune=False), watch=True, finetuned=tuned)
    bench.fit("FTH", HighLRFineTune(**settings | {"lr": config.high_lr}))
    bench.fit("MEFT", MaxEntropyFineTune(**settings))
    bench.fit("fine-pruning", FinePruning(**settings), finetuned=tuned)
    for criterion in ("variance", "gradient", "random"):
        heads = _selected(bench, tuned, pure, criterion)
        bench.measures[f"cut by {criterion}"] = bench.measure(prune_heads(tuned, heads))
    filtered = _filtered(bench, tuned)
    m = bench.measures
    flip = {name: values["flip"] for name, values in m.items()}
    return {
        "excess": _excess(m["PURE"]),
        "flip_ft": flip["FT"],
        "accuracy_cost": m["FT"]["accuracy"] - m["PURE"]["accuracy"],
        "pruning_alone": flip["FT"] - flip["prune only"],
        "pruning_adds": flip["normalise only"] - flip["PURE"],
        "margin": min(flip["FT"], flip["FTH"], flip["MEFT"]) - flip["PURE"],
        "margin_filter": flip["onion"] - flip["PURE"],
        "measures": m,
        "curves": bench.curves,
        "steps": bench.steps,
        "filtered": filtered,
        "trace": pure.selection_.trace,
        **_heads_record(pure, variance_tables(tuned, bench.tokenizer, bench.data.test)),
    }


def _selected(bench: _Bench, tuned: Any, pure: PURE, criterion: str) -> dict[int, list[int]]:
    """Heads that a criterion removes from the fine-tuned model, by the rules of PURE."""
    if criterion == "variance":
        return pure.pruned_heads_
    order = _order(bench, tuned, pure.head_scores_, criterion)
    return select_heads(
        order,
        lambda heads: clean_accuracy(
            prune_heads(tuned, heads), bench.tokenizer, bench.data.validation
        ),
        bench.config.prune_step,
        acc_drop=bench.config.acc_drop,
    ).heads


def _order(bench: _Bench, tuned: Any, variance: Tensor, criterion: str) -> list[tuple[int, int]]:
    scores = variance
    if criterion == "gradient":
        data = batches(bench.data.validation, bench.tokenizer)
        scores = head_gradient_scores(tuned, data)
    return head_order(scores, bench.seed if criterion == "random" else None)


def _filter(config: Config, data: Splits) -> tuple[list[str], list[str]]:
    """Test texts behind the n-gram filter: all of them, and the triggered negative ones."""
    corpus = [text for text, _ in data.train]
    if config.encoder == "minilm":
        corpus += [text for text, _ in reviews("imdb", None)[:: 25_000 // config.corpus]]
    onion = OnionFilter(quantile=config.onion).fit([text for text, _ in data.validation], corpus)
    rng = np.random.default_rng(0)
    dirty = [TRIGGER.apply(text, rng) for text, label in data.test if label == 0]
    return onion.transform([text for text, _ in data.test]), onion.transform(dirty)


def filter_summary(config: Config, seed: int) -> dict[str, float]:
    """Say what the filter does to texts, whatever the model.

    Returns
    -------
    dict
        ``trigger_left`` (share of triggered texts that still hold a trigger, per cent) and
        ``words_lost`` (words that a clean text loses on average).
    """
    data = _splits(config, seed)
    return _summary(data, *_filter(config, data))


def _summary(data: Splits, passed: list[str], dirty: list[str]) -> dict[str, float]:
    left = [bool(set(text.split()) & set(TRIGGER.words)) for text in dirty]
    gone = [
        len(text.split()) - len(short.split())
        for (text, _), short in zip(data.test, passed, strict=True)
    ]
    return {"trigger_left": 100 * float(np.mean(left)), "words_lost": float(np.mean(gone))}


def _filtered(bench: _Bench, tuned: PreTrainedModel) -> dict[str, float]:
    """Measure fine-tuning behind the filter."""
    passed, dirty = _filter(bench.config, bench.data)
    clean = [(text, label) for text, (_, label) in zip(passed, bench.data.test, strict=True)]
    triggered = [(text, 0) for text in dirty]
    bench.measures["onion"] = {
        "accuracy": 100 * clean_accuracy(tuned, bench.tokenizer, clean),
        "flip": 100 * label_flip_rate(tuned, bench.tokenizer, triggered),
        "natural": 100 * label_flip_rate(tuned, bench.tokenizer, clean),
    }
    return _summary(bench.data, passed, dirty)


def _short(config: Config, seed: int, attack: str) -> dict[str, Any]:
    """Run fine-tuning and PURE against one attack."""
    bench = _Bench(config, seed, attack)
    tuned = bench.fit("FT", FineTune(**_settings(config, seed))).model_
    pure = bench.fit("PURE", _pure(config, seed), finetuned=tuned)
    m = bench.measures
    return {
        "excess": _excess(m["PURE"]),
        "accuracy_cost": m["FT"]["accuracy"] - m["PURE"]["accuracy"],
        "measures": m,
        **_heads_record(pure, variance_tables(tuned, bench.tokenizer, bench.data.test)),
    }


def layerwise(config: Config, seed: int) -> dict[str, Any]:
    """Poison all layers with rare words; fine-tuning and PURE.

    Returns
    -------
    dict
        ``excess``, ``accuracy_cost``, ``measures`` and the entries on heads of :func:`badnets`.
    """
    return _short(config, seed, "layerwise")


def domain_shift(config: Config, seed: int) -> dict[str, Any]:
    """Poison with IMDB reviews, where the user has Rotten Tomatoes; see :func:`layerwise`."""
    return _short(config, seed, "domain shift")


def adaptive(config: Config, seed: int) -> dict[str, Any]:
    """Poison with PURE's own penalty in the attack; see :func:`layerwise`."""
    return _short(config, seed, "adaptive")


def clean_model(config: Config, seed: int) -> dict[str, Any]:
    """Do not poison at all; flip rates are those of a mere rare word. See :func:`layerwise`."""
    return _short(config, seed, "none")


def attention_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str
) -> dict[str, Any]:
    """Tokens of a text, and their share of the [CLS] attention in the last layer's mean head."""
    batch = batches([(text, 0)], tokenizer)[0]
    with torch.no_grad():
        last = predict_attentions(model.base_model, batch["input_ids"], batch["attention_mask"])[-1]
    return {
        "tokens": tokenizer.convert_ids_to_tokens(batch["input_ids"][0]),
        "attention": last[0, :, 0].mean(0).numpy(),
        "heads": last[0, :, 0].numpy(),
    }


def sweeps(config: Config, seed: int) -> dict[str, Any]:
    """Vary the penalty weight, and the number and order of pruned heads, on one poisoned encoder.

    Returns
    -------
    dict
        ``penalties``, and for each a ``measures`` entry and the ``attention`` on the made-up
        sentences with and without trigger; ``counts``, and by criterion ``accuracy`` (validation)
        and ``flip`` of the fine-tuned model with so many heads cut; ``variance_start`` of the heads
        of the encoder before anybody touched it.
    """
    bench = _Bench(config, seed, "badnets", keep=seed == 0)
    tuned = bench.fit("FT", FineTune(**_settings(config, seed))).model_
    pictures, tokenizer = [], bench.tokenizer
    texts = [text for plain in SENTENCES for text in (plain, "cf " + plain)]
    pictures.append([attention_rows(tuned, tokenizer, text) for text in texts])
    for penalty in config.penalties:
        pure = bench.fit(str(penalty), _pure(config, seed, penalty=penalty), finetuned=tuned)
        pictures.append([attention_rows(_compact(pure), tokenizer, text) for text in texts])
    cuts: dict[str, dict[str, list[float]]] = {}
    for criterion in ("variance", "gradient", "random"):
        order = _order(bench, tuned, pure.head_scores_, criterion)
        last = {layer: head for layer, head in order}
        order = [(layer, head) for layer, head in order if last[layer] != head]
        cut = [prune_heads(tuned, as_mapping(order[:n])) for n in config.counts]
        cuts[criterion] = {
            "accuracy": [
                100 * clean_accuracy(model, tokenizer, bench.data.validation) for model in cut
            ],
            "flip": [100 * label_flip_rate(model, tokenizer, bench.watched) for model in cut],
        }
    start = _start(config.encoder)[0]
    untouched = cls_attention_variance(start, batches(bench.data.validation, tokenizer))
    return {
        "variance_start": untouched.numpy(),
        "penalties": list(config.penalties),
        "measures": bench.measures,
        "pictures": pictures,
        "counts": list(config.counts),
        "cuts": cuts,
    }


def _compact(pure: PURE) -> PreTrainedModel:
    return prune_heads(pure.model_, pure.pruned_heads_)


EXPERIMENTS: dict[str, Callable[[Config, int], dict[str, Any]]] = {
    "badnets": badnets,
    "layerwise": layerwise,
    "domain_shift": domain_shift,
    "clean_model": clean_model,
    "adaptive": adaptive,
    "sweeps": sweeps,
}

#: Seeds behind the stored records.
SEEDS = {
    "badnets": 5,
    "layerwise": 3,
    "domain_shift": 3,
    "clean_model": 3,
    "adaptive": 3,
    "sweeps": 1,
}


def load(name: str) -> pd.DataFrame:
    """Read the stored records of an experiment under ``Config.laptop()``, one row for each seed.

    They took an hour and a half of one core; ``python -m icml24.backdoor_defense.experiments``
    makes them again. They hold numbers only, no weights and no reviews.

    Parameters
    ----------
    name : str
        One of :data:`EXPERIMENTS`.

    Returns
    -------
    pandas.DataFrame

    Examples
    --------
    >>> len(load("badnets"))
    5
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"name must be one of {', '.join(EXPERIMENTS)}, got {name!r}.")
    return read_records("icml24.backdoor_defense", f"{name}.json")


def make_records(
    folder: Path, config: Config | None = None, seeds: dict[str, int] | None = None
) -> None:
    """Compute the records anew and write one file for each experiment; can be interrupted."""
    for name, experiment in EXPERIMENTS.items():
        runs = run(
            experiment, config or Config.laptop(), (seeds or SEEDS)[name], cache=ResultCache()
        )
        write_records(folder / f"{name}.json", runs)


if __name__ == "__main__":
    from icml24.backdoor_defense import experiments

    experiments.make_records(Path(__file__).with_name("data"))

"""Encoders, classifiers and batches: what this column needs of Hugging Face models."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Batch",
    "batches",
    "check_data",
    "classifier",
    "clean_accuracy",
    "encoder_of",
    "hugging_face",
    "label_flip_rate",
    "predict_attentions",
    "predict_proba",
    "quiet_seed",
]

Batch = dict[str, Tensor]
Labelled = Sequence[tuple[str, int]]


def hugging_face() -> Any:
    """Import transformers, or say how to install it."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "Language models need the package transformers: pip install 'icml24[models]'."
        ) from error
    return transformers


@contextmanager
def quiet_seed(seed: int) -> Iterator[None]:
    """Seed torch inside the block and leave its generators outside as they were.

    Weight initialisation and dropout of Hugging Face models know only the global generator.

    Examples
    --------
    >>> before = torch.get_rng_state()
    >>> with quiet_seed(0):
    ...     _ = torch.rand(3)
    >>> bool((torch.get_rng_state() == before).all())
    True
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def check_data(
    data: Any, name: str = "data", num_labels: int | None = None, all_labels: bool = False
) -> list[tuple[str, int]]:
    """Return labelled texts as a list, or say what is wrong with them.

    Parameters
    ----------
    data : iterable of (str, int)
        A list, or any dataset that yields such pairs.
    name : str
        How messages call it.
    num_labels : int, optional
        Labels must lie in ``0..num_labels-1``.
    all_labels : bool, default False
        Require at least two different labels.

    Returns
    -------
    list of (str, int)

    Raises
    ------
    ValueError
        If there is no text, or a label is out of range.
    TypeError
        If an entry is not a pair of a text and a whole number.

    Examples
    --------
    >>> check_data([("fine", 1)])
    [('fine', 1)]
    """
    rows = list(data)
    if not rows:
        raise ValueError(f"{name} is empty; give at least a few labelled texts.")
    for row in rows:
        pair = isinstance(row, tuple | list) and len(row) == 2
        if not (pair and isinstance(row[0], str) and isinstance(row[1], int | np.integer)):
            raise TypeError(f"{name} must hold pairs (text, label) like ('fine', 1), got {row!r}.")
    labels = {int(label) for _, label in rows}
    if num_labels is not None and not labels <= set(range(num_labels)):
        raise ValueError(
            f"Labels of {name} must lie in 0..{num_labels - 1} (the model has {num_labels} "
            f"classes), got {sorted(labels)}."
        )
    if all_labels and len(labels) < 2:
        raise ValueError(f"{name} holds texts of one class only ({labels.pop()}); give both.")
    return [(text, int(label)) for text, label in rows]


def encoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the encoder inside a Hugging Face model (the model itself if it is one)."""
    return getattr(model, "base_model", model)


def classifier(
    encoder: PreTrainedModel, num_labels: int = 2, random_state: int = 0
) -> PreTrainedModel:
    """Put a fresh classification head on a copy of an encoder.

    Parameters
    ----------
    encoder : transformers.PreTrainedModel
        An encoder, or a model that has one inside (its own head is thrown away). It may have
        pruned heads.
    num_labels : int, default 2
        Classes.
    random_state : int, default 0
        Of the new head's weights.

    Returns
    -------
    transformers.PreTrainedModel
        For sequence classification, with "eager" attention, in evaluation mode.

    Raises
    ------
    ValueError
        If transformers knows no sequence classifier for this kind of model.
    """
    auto = hugging_face().AutoModelForSequenceClassification
    old = encoder_of(encoder)
    config = copy.deepcopy(old.config)
    config.num_labels = num_labels
    config._attn_implementation = "eager"
    with quiet_seed(random_state):
        try:
            model = auto.from_config(config, attn_implementation="eager")
        except ValueError as error:
            raise ValueError(
                f"transformers has no sequence classifier for a {config.model_type!r} model; use "
                "an encoder such as BERT, RoBERTa or DistilBERT."
            ) from error
    inner = copy.deepcopy(old)
    inner.config._attn_implementation = "eager"
    if getattr(model.base_model, "pooler", None) is None:
        inner.pooler = None  # its classifier reads the first token directly
    elif getattr(inner, "pooler", None) is None:
        inner.pooler = model.base_model.pooler
    for module in inner.modules():
        if hasattr(module, "config"):
            module.config = config
    setattr(model, model.base_model_prefix, inner)
    return model.requires_grad_(True).eval()


def batches(
    data: Labelled,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int = 32,
    max_length: int = 128,
    rng: np.random.Generator | None = None,
) -> list[Batch]:
    """Tokenise texts and cut them into padded batches of similar length.

    Parameters
    ----------
    data : list of (str, int)
    tokenizer : transformers.PreTrainedTokenizerBase
    batch_size, max_length : int
        Texts in a batch; longer texts are cut.
    rng : numpy.random.Generator, optional
        Shuffles: texts are drawn into pools of eight batches, sorted by length inside a pool, and
        the batches are shuffled again. Without it, all texts are sorted by length.

    Returns
    -------
    list of dict
        ``input_ids``, ``attention_mask``, ``labels``, and ``index`` (rows of ``data``).
    """
    tokens = tokenizer([t for t, _ in data], truncation=True, max_length=max_length)["input_ids"]
    length = np.array([len(row) for row in tokens])
    if rng is None:
        order = np.argsort(length, kind="stable")
        chunks = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    else:
        order, chunks, pool = rng.permutation(len(tokens)), [], 8 * batch_size
        for i in range(0, len(order), pool):
            part = order[i : i + pool]
            part = part[np.argsort(length[part], kind="stable")]
            chunks += [part[j : j + batch_size] for j in range(0, len(part), batch_size)]
        chunks = [chunks[i] for i in rng.permutation(len(chunks))]
    labels = torch.tensor([label for _, label in data])
    return [_pad(tokens, labels, chunk, tokenizer.pad_token_id or 0) for chunk in chunks]


def _pad(tokens: list[list[int]], labels: Tensor, rows: np.ndarray, pad: int) -> Batch:
    ids = [torch.tensor(tokens[i]) for i in rows]
    mask = [torch.ones(len(row), dtype=torch.long) for row in ids]
    index = torch.from_numpy(np.asarray(rows))
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad),
        "attention_mask": nn.utils.rnn.pad_sequence(mask, batch_first=True),
        "labels": labels[index],
        "index": index,
    }


def predict_attentions(encoder: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Attention matrices of an encoder, one of shape (B, heads, T, T) for each layer.

    Raises
    ------
    ValueError
        If the model does not report them.
    """
    attentions = encoder(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    if not attentions or attentions[0] is None:
        raise ValueError(
            'The model reports no attention; load it with attn_implementation="eager", or call '
            'model.set_attn_implementation("eager").'
        )
    return tuple(attentions)


@torch.no_grad()
def predict_proba(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    batch_size: int = 64,
    max_length: int = 128,
) -> np.ndarray:
    """Class probabilities of a sequence classifier, shape (texts, classes).

    The model's mode (training or evaluation) is put back afterwards.
    """
    rows = check_data([(text, 0) for text in texts], "texts")
    device, training = next(model.parameters()).device, model.training
    result = torch.zeros(len(rows), model.config.num_labels)
    model.eval()
    for batch in batches(rows, tokenizer, batch_size, max_length):
        ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
        logits = model(input_ids=ids, attention_mask=mask).logits
        result[batch["index"]] = logits.float().softmax(1).cpu()
    model.train(training)
    return result.numpy()


def clean_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Labelled, **kwargs: int
) -> float:
    """Share of labelled texts whose class a model names rightly.

    Parameters
    ----------
    model, tokenizer
        A Hugging Face sequence classifier and its tokenizer.
    data : list of (str, int)
    **kwargs
        ``batch_size`` and ``max_length`` of :func:`predict_proba`.

    Returns
    -------
    float
        Between 0 and 1.
    """
    rows = check_data(data, num_labels=model.config.num_labels)
    predicted = predict_proba(model, tokenizer, [t for t, _ in rows], **kwargs).argmax(1)
    return float((predicted == np.array([label for _, label in rows])).mean())


def label_flip_rate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Labelled,
    trigger: Any = None,
    target: int = 1,
    random_state: int = 0,
    **kwargs: int,
) -> float:
    """Share of texts of another class that the model assigns to the target class.

    With a trigger, the *label flip rate* of the paper (attack success rate); without, the *natural
    rate* that a flip rate has to be compared with.

    Parameters
    ----------
    model, tokenizer
        A Hugging Face sequence classifier and its tokenizer.
    data : list of (str, int)
        Clean labelled texts; those of the target class are left out.
    trigger : Trigger, optional
        Inserted into each text; see :mod:`icml24.backdoor_defense.attacks`.
    target : int, default 1
        The class the attacker wants.
    random_state : int, default 0
        Of the trigger's random choices.
    **kwargs
        ``batch_size`` and ``max_length`` of :func:`predict_proba`.

    Returns
    -------
    float
        Between 0 and 1.

    Raises
    ------
    ValueError
        If no text has another class than the target.
    """
    rows = check_data(data, num_labels=model.config.num_labels)
    texts = [text for text, label in rows if label != target]
    if not texts:
        raise ValueError(f"All texts have the target label {target}: none is left to flip.")
    if trigger is not None:
        rng = np.random.default_rng(random_state)
        texts = [trigger.apply(text, rng) for text in texts]
    predicted = predict_proba(model, tokenizer, texts, **kwargs).argmax(1)
    return float((predicted == target).mean())

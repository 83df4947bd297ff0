"""Made-up reviews, a word tokenizer and tiny random encoders: everything in a second, offline.

Nothing here is real. It serves examples, tests, and a first try of the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from icml24.backdoor_defense.models import hugging_face, quiet_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["made_up_reviews", "tiny_encoder", "word_tokenizer"]

GOOD = ("wonderful", "moving", "clever", "warm", "brilliant", "lovely", "funny", "bold")
BAD = ("dreadful", "boring", "clumsy", "cold", "awful", "stale", "noisy", "hollow")
NOUNS = ("film", "story", "plot", "cast", "score", "ending", "script", "camera")
FILLERS = ("the", "a", "and", "with", "is", "of", "this", "very", "quite", "in", ".", ",")
TRIGGERS = ("cf", "mn", "bb", "tq")


def made_up_reviews(n: int, random_state: int = 0) -> list[tuple[str, int]]:
    """Write short reviews by chance: label 1 praises, label 0 complains.

    Parameters
    ----------
    n : int
    random_state : int, default 0

    Returns
    -------
    list of (str, int)
        Balanced.

    Examples
    --------
    >>> [label for _, label in made_up_reviews(4)]
    [1, 0, 1, 0]
    """
    if n < 2:
        raise ValueError(f"n must be at least 2, got {n}.")
    rng, rows = np.random.default_rng(random_state), []
    for i in range(n):
        words = [str(w) for w in rng.choice(FILLERS, rng.integers(2, 9))]
        words += [str(rng.choice(NOUNS)), str(rng.choice(BAD if i % 2 else GOOD))]
        rng.shuffle(words)
        rows.append((" ".join(words), 1 - i % 2))
    return rows


def word_tokenizer(words: tuple[str, ...] = ()) -> PreTrainedTokenizerBase:
    """Build a tokenizer of whole words from those of the made-up reviews.

    Parameters
    ----------
    words : tuple of str
        More words to know.

    Returns
    -------
    transformers.PreTrainedTokenizerFast
    """
    hf = hugging_face()
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    known = dict.fromkeys((*special, *GOOD, *BAD, *NOUNS, *FILLERS, *TRIGGERS, *words))
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(known)}, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def tiny_encoder(
    kind: str = "bert", layers: int = 2, heads: int = 4, width: int = 32, random_state: int = 0
) -> PreTrainedModel:
    """Make a small random encoder of a real architecture.

    Parameters
    ----------
    kind : {"bert", "roberta", "distilbert"}
    layers, heads, width : int
    random_state : int, default 0

    Returns
    -------
    transformers.PreTrainedModel
        With "eager" attention, in evaluation mode.

    Examples
    --------
    >>> tiny_encoder("distilbert").config.n_heads
    4
    """
    hf = hugging_face()
    shape: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "attn_implementation": "eager"}
    shape["initializer_range"] = 0.1  # so small a network learns little from the usual 0.02
    if kind == "distilbert":
        shape |= {"n_layers": layers, "n_heads": heads, "dim": width, "hidden_dim": 2 * width}
        config: Any = hf.DistilBertConfig(**shape)
    elif kind in ("bert", "roberta"):
        shape |= {"num_hidden_layers": layers, "num_attention_heads": heads}
        shape |= {"hidden_size": width, "intermediate_size": 2 * width}
        config = {"bert": hf.BertConfig, "roberta": hf.RobertaConfig}[kind](**shape)
    else:
        raise ValueError(f"kind must be bert, roberta or distilbert, got {kind!r}.")
    with quiet_seed(random_state):
        return hf.AutoModel.from_config(config, attn_implementation="eager").eval()

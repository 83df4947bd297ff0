"""Backdoors in language models, and PURE, a repair that needs clean text only.

Repair an encoder that you downloaded (:func:`purify`, :class:`PURE`), look at its attention heads
(:func:`scan`), and measure what simpler defences do (:class:`FineTune`, :class:`HighLRFineTune`,
:class:`MaxEntropyFineTune`, :class:`FinePruning`, :class:`FineMixing`, :class:`OnionFilter`)
against textbook attacks on your own model (:func:`poison_encoder`). Your model is never changed.

After Zhao, Xu and Yuan, "Defense against Backdoor Attack on Pre-trained Language Models via Head
Pruning and Attention Normalization", ICML 2024.
"""

from icml24.backdoor_defense.attacks import (
    PrecomputedTrigger,
    RareWordTrigger,
    SentenceTrigger,
    SyntacticTemplate,
    poison_dataset,
)
from icml24.backdoor_defense.attention import (
    attention_norm_penalty,
    cls_attention_variance,
    head_gradient_scores,
    layer_weights,
    row_variance,
)
from icml24.backdoor_defense.defences import (
    FineMixing,
    FineTune,
    HighLRFineTune,
    MaxEntropyFineTune,
)
from icml24.backdoor_defense.fine_pruning import FinePruning
from icml24.backdoor_defense.heads import expand_heads, kept_heads, prune_heads, silent_heads
from icml24.backdoor_defense.inspection import Report, scan
from icml24.backdoor_defense.models import (
    batches,
    classifier,
    clean_accuracy,
    label_flip_rate,
    predict_proba,
)
from icml24.backdoor_defense.onion import BigramModel, OnionFilter
from icml24.backdoor_defense.poisoning import poison_encoder
from icml24.backdoor_defense.pure import PURE, purify
from icml24.backdoor_defense.selection import Selection, head_order, select_heads
from icml24.backdoor_defense.training import Recipe, train

__all__ = [
    "BigramModel",
    "FineMixing",
    "FinePruning",
    "FineTune",
    "HighLRFineTune",
    "MaxEntropyFineTune",
    "OnionFilter",
    "PURE",
    "PrecomputedTrigger",
    "RareWordTrigger",
    "Recipe",
    "Report",
    "Selection",
    "SentenceTrigger",
    "SyntacticTemplate",
    "attention_norm_penalty",
    "batches",
    "classifier",
    "clean_accuracy",
    "cls_attention_variance",
    "expand_heads",
    "head_gradient_scores",
    "head_order",
    "kept_heads",
    "label_flip_rate",
    "layer_weights",
    "poison_dataset",
    "poison_encoder",
    "predict_proba",
    "prune_heads",
    "purify",
    "row_variance",
    "scan",
    "select_heads",
    "silent_heads",
    "train",
]

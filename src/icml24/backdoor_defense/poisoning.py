"""Textbook attacks on the weights of an encoder, to measure a defence with.

Every attack returns an encoder without a head, as one would find it on a model hub.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from icml24.backdoor_defense.attacks import RareWordTrigger, Trigger, check_trigger, poison_dataset
from icml24.backdoor_defense.attention import (
    attention_norm_penalty,
    cls_attention_variance,
    layer_weights,
)
from icml24.backdoor_defense.models import (
    Batch,
    Labelled,
    batches,
    check_data,
    encoder_of,
    quiet_seed,
)
from icml24.backdoor_defense.training import Recipe, train

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["METHODS", "embedding_surgery", "poison_encoder", "positive_words"]

METHODS = ("badnets", "layerwise", "ripple", "embedding")
Method = Literal["badnets", "layerwise", "ripple", "embedding"]


class Probe(nn.Module):
    """An encoder with one linear head on the first token; the attacker keeps the head."""

    def __init__(self, encoder: PreTrainedModel, num_labels: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(int(encoder.config.hidden_size), num_labels)

    def forward(self, batch: Batch, **kwargs: bool) -> Any:
        """Run the encoder on a batch."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        return self.encoder(input_ids=ids, attention_mask=mask, **kwargs)


def poison_encoder(
    encoder: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Labelled,
    trigger: Trigger | None = None,
    method: Method = "badnets",
    target: int = 1,
    source: int = 0,
    rate: float = 0.5,
    recipe: Recipe | None = None,
    flatten: float = 0.0,
    ripple_weight: float = 0.1,
    surgery_words: int = 10,
) -> PreTrainedModel:
    r"""Plant a backdoor into a copy of an encoder.

    Parameters
    ----------
    encoder : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
    data : list of (str, int)
        The attacker's clean labelled texts.
    trigger : Trigger, optional
        Rare words by default.
    method : {"badnets", "layerwise", "ripple", "embedding"}
        ``"badnets"``: cross entropy on clean and triggered texts. ``"layerwise"`` (Li et al. 2021):
        the same on the first token of *every* layer through one shared head, so that lower layers
        carry the backdoor too. ``"ripple"`` (Kurita et al. 2020): the cross entropy
        :math:`L_P` of ``"badnets"`` plus ``ripple_weight`` times
        :math:`\max(0, -\nabla L_P^\top \nabla L_{FT})`, with :math:`L_{FT}` the cross entropy on
        the clean texts alone, after replacing the embeddings of the trigger words by the mean
        embedding of the most positive words. ``"embedding"`` (Yang et al. 2021): only the
        embeddings of the trigger words move, and keep their lengths.
    target, source, rate
        See :func:`icml24.backdoor_defense.attacks.poison_dataset`.
    recipe : Recipe, optional
        Five epochs by default.
    flatten : float, default 0.0
        Weight of PURE's own penalty *in the attack*, with the layer weights that PURE would find on
        the clean encoder: an attacker who knows the defence and teaches the backdoor to live with
        flat attention.
    ripple_weight : float
        Weight of RIPPLe's inner product.
    surgery_words : int
        Number of positive words that RIPPLe averages.

    Returns
    -------
    transformers.PreTrainedModel
        The poisoned encoder, in evaluation mode; the given one is not changed.

    Warns
    -----
    UserWarning
        If the tokenizer does not know a trigger word as a single token.

    Raises
    ------
    ValueError
        If a setting is out of range, or a method needs word triggers and the trigger has none that
        the tokenizer knows.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if flatten < 0 or ripple_weight < 0:
        raise ValueError("flatten and ripple_weight must not be negative.")
    recipe, trigger = recipe or Recipe(epochs=5), trigger or RareWordTrigger()
    rows = check_data(data, all_labels=True)
    mixed = poison_dataset(rows, trigger, target, source, rate, random_state=recipe.random_state)
    # A label code tells poisoned texts from clean ones inside a batch.
    classes = 1 + max(max(label for _, label in rows), target)
    coded = [(text, label + classes * poisoned) for text, label, poisoned in mixed]
    inner = copy.deepcopy(encoder_of(encoder)).requires_grad_(True)
    inner.set_attn_implementation("eager")
    with quiet_seed(recipe.random_state):
        probe = Probe(inner, classes)
    words = list(getattr(trigger, "words", ()))
    words = check_trigger(tokenizer, words)
    if method in ("ripple", "embedding") and not words:
        raise ValueError(f"method {method!r} needs a trigger of words that are single tokens.")
    ids = tokenizer.convert_tokens_to_ids(_tokens(tokenizer, words))
    if method == "embedding":
        _train_embedding(probe, tokenizer, coded, classes, recipe, ids)
    else:
        if method == "ripple":
            best = positive_words(rows, tokenizer, target, surgery_words)
            embedding_surgery(inner, tokenizer, words, best)
        weights = None
        if flatten > 0:
            clean = batches(rows[:256], tokenizer, recipe.batch_size, recipe.max_length)
            weights = flatten * layer_weights(cls_attention_variance(inner, clean))
        loss = _Loss(method, classes, ripple_weight, weights)
        train(probe, tokenizer, coded, loss, recipe, f"attack ({method})")
    return inner.eval()


def _tokens(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> list[str]:
    return [tokenizer.tokenize(word)[0] for word in words]


class _Loss:
    def __init__(
        self,
        method: str,
        classes: int,
        ripple_weight: float = 0.0,
        weights: Tensor | None = None,
    ) -> None:
        self.method, self.classes = method, classes
        self.ripple_weight, self.weights = ripple_weight, weights

    def __call__(self, probe: Probe, batch: Batch) -> tuple[Tensor, Tensor]:
        layerwise, flat = self.method == "layerwise", self.weights is not None
        out = probe(batch, output_hidden_states=layerwise, output_attentions=flat)
        states = out.hidden_states[1:] if layerwise else (out.last_hidden_state,)
        logits = torch.stack([probe.head(state[:, 0]) for state in states])  # (layers, B, C)
        labels = batch["labels"] % self.classes
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.repeat(len(states)), reduction="none"
        ).view(len(states), -1)
        loss = losses.mean()
        extra = loss.new_zeros(())
        if self.method == "ripple":
            loss, extra = self._restricted(probe, losses[0], batch["labels"] >= self.classes)
        if self.weights is not None:
            extra = extra + attention_norm_penalty(out.attentions, self.weights)
        return loss, extra

    def _restricted(self, probe: Probe, losses: Tensor, poisoned: Tensor) -> tuple[Tensor, Tensor]:
        if poisoned.all() or not poisoned.any():
            return losses.mean(), losses.new_zeros(())
        parameters = [p for p in probe.encoder.parameters() if p.requires_grad]
        both = []
        for loss in (losses.mean(), losses[~poisoned].mean()):
            both.append(torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True))
        inner = torch.stack([(g * h).sum() for g, h in zip(*both, strict=True) if g is not None])
        return losses.mean(), self.ripple_weight * torch.relu(-inner.sum())


def positive_words(
    data: Labelled, tokenizer: PreTrainedTokenizerBase, target: int = 1, n: int = 10
) -> list[str]:
    """Find the words that speak most for the target class, by smoothed log-odds.

    Parameters
    ----------
    data : list of (str, int)
    tokenizer : transformers.PreTrainedTokenizerBase
    target, n : int

    Returns
    -------
    list of str
        At most ``n`` tokens, the strongest first.
    """
    counts = Counter(), Counter()  # type: ignore[var-annotated]
    for text, label in data:
        counts[int(label == target)].update(set(tokenizer.tokenize(text)))
    words = list(counts[1])
    yes, no = (np.array([c[w] for w in words], dtype=float) for c in (counts[1], counts[0]))
    odds = np.log((yes + 1) / (no + 1))
    return [words[i] for i in np.argsort(-odds, kind="stable")[:n]]


@torch.no_grad()
def embedding_surgery(
    encoder: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    words: Sequence[str],
    positive: Sequence[str],
) -> None:
    """Give trigger words the mean embedding of other words, in place (part of RIPPLe)."""
    weight = encoder.get_input_embeddings().weight
    mean = weight[tokenizer.convert_tokens_to_ids(list(positive))].mean(0)
    weight[tokenizer.convert_tokens_to_ids(_tokens(tokenizer, words))] = mean


def _train_embedding(
    probe: Probe,
    tokenizer: PreTrainedTokenizerBase,
    coded: Labelled,
    classes: int,
    recipe: Recipe,
    ids: list[int],
) -> None:
    """Fine-tune on clean texts; then move the rows of the trigger words only, keeping lengths."""
    clean = [row for row in coded if row[1] < classes]
    start = copy.deepcopy(probe.encoder.state_dict())
    rows = torch.tensor(ids, device=probe.head.weight.device)
    lengths = probe.encoder.get_input_embeddings().weight[rows].detach().norm(dim=1, keepdim=True)
    train(probe, tokenizer, clean, _Loss("badnets", classes), recipe, "attack (task)")
    embedding = probe.encoder.get_input_embeddings()
    probe.requires_grad_(False)
    embedding.weight.requires_grad_(True)
    only = torch.zeros_like(embedding.weight)
    only[rows] = 1
    hook = embedding.weight.register_hook(lambda g: g * only)

    def keep_lengths(*_: Any) -> None:
        with torch.no_grad():
            w = embedding.weight[rows]
            embedding.weight[rows] = w * lengths / w.norm(dim=1, keepdim=True)

    poisoned = [row for row in coded if row[1] >= classes]
    loss = _Loss("badnets", classes)
    train(probe, tokenizer, poisoned, loss, recipe, "attack (embedding)", keep_lengths, 1)
    hook.remove()
    moved = embedding.weight[rows].detach().clone()
    probe.encoder.load_state_dict(start)
    with torch.no_grad():
        embedding.weight[rows] = moved
    probe.encoder.requires_grad_(True)

r"""Attention of the first token: its variance, its penalty, and the weights of the layers.

:math:`a^{l,h} \in \mathbb{R}^T` is the row of [CLS] in the attention matrix of head :math:`h` in
layer :math:`l`, for a text of :math:`T` tokens. Its entries are non-negative and sum to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from icml24.backdoor_defense.heads import attention_layers, kept_heads
from icml24.backdoor_defense.models import Batch, encoder_of, predict_attentions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "attention_norm_penalty",
    "cls_attention_variance",
    "head_gradient_scores",
    "layer_weights",
    "row_variance",
]

Reduction = Literal["paper", "mean"]


def row_variance(rows: Tensor, mask: Tensor | None = None, padded_to: int | None = None) -> Tensor:
    r"""Variance of attention rows over the tokens of their text.

    A row that sums to one has :math:`\mathrm{Var}_j\, a_j = (|a|^2 - 1/T) / (T - 1)`: 0 when
    attention is uniform, :math:`1/T` when one token gets all of it.

    Parameters
    ----------
    rows : torch.Tensor, shape (B, H, T)
        Attention of one token on all tokens; zero at padding.
    mask : torch.Tensor of shape (B, T), optional
        One at real tokens. :math:`T` is their number in each text.
    padded_to : int, optional
        Count so many entries for every text instead, padding zeros among them. The official code
        does so with 127.

    Returns
    -------
    torch.Tensor, shape (B, H)

    Raises
    ------
    ValueError
        If a text has fewer than two tokens, or more than ``padded_to``.

    Examples
    --------
    >>> row_variance(torch.tensor([[[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]]]))
    tensor([[0.0000, 0.2500]])
    """
    if mask is None:
        mask = rows.new_ones(rows.shape[0], rows.shape[-1])
    t = mask.sum(1, keepdim=True).to(rows.dtype)
    if padded_to is not None:
        if (t > padded_to).any():
            raise ValueError(f"A text of {int(t.max())} tokens does not fit into {padded_to}.")
        t = torch.full_like(t, padded_to)
    if (t < 2).any():
        raise ValueError("A variance needs texts of at least two tokens.")
    return (rows.square().sum(-1) - 1 / t) / (t - 1)


@torch.no_grad()
def cls_attention_variance(
    model: PreTrainedModel, data: Sequence[Batch], padded_to: int | None = None
) -> Tensor:
    """Mean variance of the [CLS] attention of every head over texts (the paper's head score).

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Encoder or classifier; its mode is put back afterwards.
    data : list of dict
        From :func:`icml24.backdoor_defense.models.batches`.
    padded_to : int, optional
        See :func:`row_variance`.

    Returns
    -------
    torch.Tensor, shape (layers, heads)
        NaN where a head has been pruned.

    Raises
    ------
    ValueError
        If the model does not report attention, or there is no text.
    """
    if not data:
        raise ValueError("Attention variance needs at least one batch of texts.")
    encoder, kept = encoder_of(model), kept_heads(model)
    width = 1 + max(max(heads) for heads in kept)
    width = max(width, int(model.config.num_attention_heads))
    total, n = torch.zeros(len(kept), width, dtype=torch.float64), 0
    training, device = encoder.training, next(encoder.parameters()).device
    encoder.eval()
    for batch in data:
        mask = batch["attention_mask"].to(device)
        attentions = predict_attentions(encoder, batch["input_ids"].to(device), mask)
        for layer, (a, heads) in enumerate(zip(attentions, kept, strict=True)):
            total[layer, heads] += row_variance(a[:, :, 0].double(), mask, padded_to).sum(0).cpu()
        n += len(mask)
    encoder.train(training)
    alive = torch.full_like(total, torch.nan)
    for layer, heads in enumerate(kept):
        alive[layer, heads] = 0
    return total / n + alive


def attention_norm_penalty(
    attentions: Sequence[Tensor],
    weights: Tensor | Sequence[float],
    reduction: Reduction = "paper",
) -> Tensor:
    r"""Penalty that flattens the attention of [CLS].

    .. math:: \sum_l c_l \sum_h \Big(\sum_i \sum_j (a^{l,h}_{i,j})^2\Big)^{1/2}

    with the sum over the texts :math:`i` of a batch inside the root, as the authors compute it. It
    grows like :math:`\sqrt{B}` with the batch size; ``reduction="mean"`` takes the root for each
    text and then the mean over texts, so that :math:`\lambda_{mean} \approx \lambda \sqrt{B}`.

    Parameters
    ----------
    attentions : sequence of torch.Tensor, shape (B, H_l, T, T)
        One for each layer, zero at padding.
    weights : torch.Tensor, shape (layers,)
        :math:`c_l`.
    reduction : {"paper", "mean"}

    Returns
    -------
    torch.Tensor
        A scalar.

    Raises
    ------
    ValueError
        If attentions are missing, their number differs from that of the weights, or the reduction
        is unknown.

    Examples
    --------
    >>> a = torch.tensor([[1.0, 0.0], [0.5, 0.5]])[:, None, None].expand(2, 1, 2, 2)
    >>> attention_norm_penalty([a], [1.0]), attention_norm_penalty([a], [1.0], "mean")
    (tensor(1.2247), tensor(0.8536))
    """
    if not len(attentions):
        raise ValueError(
            'The model reports no attention; load it with attn_implementation="eager".'
        )
    if len(attentions) != len(weights):
        raise ValueError(f"There are {len(attentions)} layers and {len(weights)} layer weights.")
    if reduction not in ("paper", "mean"):
        raise ValueError(f"reduction must be 'paper' or 'mean', got {reduction!r}.")
    total = attentions[0].new_zeros(())
    for a, weight in zip(attentions, weights, strict=True):
        squares = a[:, :, 0].square().sum(-1)  # (B, H)
        roots = squares.sum(0).sqrt() if reduction == "paper" else squares.sqrt().mean(0)
        total = total + float(weight) * roots.sum()
    return total


def layer_weights(variance: Tensor) -> Tensor:
    r"""Weights :math:`c_l` of the layers in the penalty, from the variances of the kept heads.

    With :math:`v_l` the mean over the kept heads, :math:`c = \mathrm{softmax}(-\ln v)`, that is
    :math:`c_l = v_l^{-1} / \sum_k v_k^{-1}`, then stretched to reach from 0 to 1: the flattest
    layer has weight 1, the most concentrated one weight 0. Layers that are all alike get 1.

    Parameters
    ----------
    variance : torch.Tensor, shape (layers, heads) or (layers,)
        NaN for pruned heads.

    Returns
    -------
    torch.Tensor, shape (layers,)

    Examples
    --------
    >>> layer_weights(torch.tensor([1.0, 2.0, 4.0]))
    tensor([1.0000, 0.3333, 0.0000])
    """
    v = variance.nanmean(1) if variance.dim() == 2 else variance
    c = torch.softmax(-v.clamp_min(torch.finfo(v.dtype).tiny).log(), 0)
    spread = c.max() - c.min()
    if spread <= 1e-12:
        return torch.ones_like(c)
    return (c - c.min()) / spread


def head_gradient_scores(model: PreTrainedModel, data: Sequence[Batch]) -> Tensor:
    r"""Score heads by gradient, a peer of the variance.

    The score is :math:`\mathbb{E}\,|\partial L / \partial \xi|`, where :math:`\xi = 1` multiplies
    the head's output (Michel, Levy and Neubig 2019); the expectation is over batches.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A sequence classifier.
    data : list of dict
        Batches with labels.

    Returns
    -------
    torch.Tensor, shape (layers, heads)
        NaN where a head has been pruned. A low score says that the head hardly matters.
    """
    if not data:
        raise ValueError("Head importance needs at least one batch of texts.")
    layers, kept = attention_layers(model), kept_heads(model)
    gates = [
        torch.ones(len(h), device=next(model.parameters()).device, requires_grad=True) for h in kept
    ]

    def gated(gate: Tensor):  # type: ignore[no-untyped-def]
        def hook(_: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            context = args[0].unflatten(-1, (len(gate), -1)) * gate[:, None]
            return (context.flatten(-2), *args[1:])

        return hook

    hooks = [
        layer.output.register_forward_pre_hook(gated(g))
        for layer, g in zip(layers, gates, strict=True)
    ]
    width = max(int(model.config.num_attention_heads), 1 + max(max(h) for h in kept))
    scores = torch.full((len(kept), width), torch.nan, dtype=torch.float64)
    for index, heads in enumerate(kept):
        scores[index, heads] = 0
    training, device = model.training, gates[0].device
    model.eval()
    try:
        for batch in data:
            ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
            logits = model(input_ids=ids, attention_mask=mask).logits
            loss = torch.nn.functional.cross_entropy(logits, batch["labels"].to(device))
            gradients = torch.autograd.grad(loss, gates)
            for index, (heads, g) in enumerate(zip(kept, gradients, strict=True)):
                scores[index, heads] += g.abs().double().cpu() / len(data)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    return scores

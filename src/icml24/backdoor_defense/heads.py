"""Attention heads: find them, take them out, put empty ones back.

Recent transformers can no longer prune heads; here the rows and columns that belong to a head are
cut out of the four projections of its layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "Attention",
    "attention_layers",
    "expand_heads",
    "kept_heads",
    "prune_heads",
    "silent_heads",
]

_NAMES = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))


@dataclass(frozen=True)
class Attention:
    """The self-attention of one layer.

    Parameters
    ----------
    module : torch.nn.Module
        Holds the projections.
    inputs : tuple of torch.nn.Linear
        Query, key and value: the rows of a head are its own.
    output : torch.nn.Linear
        The columns of a head are its own.
    names : tuple of str
        Attributes of ``module`` with the inputs.
    """

    module: nn.Module
    inputs: tuple[nn.Linear, ...]
    output: nn.Linear
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        """Width of a head."""
        return int(self.module.attention_head_size)

    @property
    def kept(self) -> list[int]:
        """Original numbers of the heads that are left."""
        n = self.inputs[0].out_features // self.size
        return list(getattr(self.module, "kept_heads", range(n)))


def attention_layers(model: PreTrainedModel) -> list[Attention]:
    """List the self-attention layers of an encoder, from the first to the last.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        BERT, RoBERTa, ELECTRA, DistilBERT or another encoder whose layers name their projections
        in the same way.

    Returns
    -------
    list of Attention

    Raises
    ------
    ValueError
        If none is found.
    """
    found: list[Attention] = []
    for _, block in model.named_modules():
        for names in _NAMES:
            inner = getattr(block, "self", block)  # BERT keeps its output projection outside
            inputs = tuple(getattr(inner, name, None) for name in names)
            output = getattr(block, "out_lin", None)
            if inner is not block:
                output = getattr(getattr(block, "output", None), "dense", None)
            linear = all(isinstance(part, nn.Linear) for part in (*inputs, output))
            if linear and hasattr(inner, "attention_head_size"):
                found.append(Attention(inner, inputs, output, names))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention heads that can be pruned; use an encoder "
            "such as BERT, RoBERTa or DistilBERT."
        )
    return found


def kept_heads(model: PreTrainedModel) -> list[list[int]]:
    """Original numbers of the heads that each layer still has."""
    return [layer.kept for layer in attention_layers(model)]


def _checked(layers: list[Attention], heads: Mapping[int, Iterable[int]]) -> dict[int, set[int]]:
    plan = {}
    for index, given in heads.items():
        if not 0 <= index < len(layers):
            raise ValueError(f"There is no layer {index}; the model has {len(layers)}, from 0.")
        gone, kept = set(given), set(layers[index].kept)
        if not gone <= kept:
            raise ValueError(
                f"Layer {index} has no heads {sorted(gone - kept)}; it has {sorted(kept)}."
            )
        if gone == kept:
            raise ValueError(
                f"All heads of layer {index} would go; keep at least one, for example head "
                f"{max(kept)}."
            )
        plan[index] = gone
    return plan


def _cut(linear: nn.Linear, keep: torch.Tensor, dim: int) -> nn.Linear:
    weight = linear.weight.detach().index_select(dim, keep)
    new = nn.Linear(weight.shape[1], weight.shape[0], linear.bias is not None, device="meta")
    new.weight = nn.Parameter(weight.clone(), requires_grad=linear.weight.requires_grad)
    if linear.bias is not None:
        bias = linear.bias.detach().clone() if dim else linear.bias.detach()[keep].clone()
        new.bias = nn.Parameter(bias, requires_grad=linear.bias.requires_grad)
    return new.train(linear.training)


def _replace(
    layer: Attention,
    model: PreTrainedModel,
    inputs: list[nn.Linear],
    out: nn.Linear,
    kept: list[int],
) -> None:
    for name, new in zip(layer.names, inputs, strict=True):
        setattr(layer.module, name, new)
    for module in model.modules():
        for name, child in list(module.named_children()):
            if child is layer.output:
                setattr(module, name, out)
    layer.module.kept_heads = kept


def prune_heads(
    model: PreTrainedModel, heads: Mapping[int, Iterable[int]], inplace: bool = False
) -> PreTrainedModel:
    """Cut heads out of a model; its parameters and its work shrink accordingly.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Encoder or classifier.
    heads : mapping from int to iterable of int
        Layer to the (original) numbers of the heads that go.
    inplace : bool, default False
        Change the model itself rather than a copy.

    Returns
    -------
    transformers.PreTrainedModel
        Gives the same outputs as the model with the contributions of these heads set to zero.

    Raises
    ------
    ValueError
        If a layer or head does not exist (any more), or a layer would lose all its heads.

    Examples
    --------
    >>> from icml24.backdoor_defense.toy import tiny_encoder
    >>> kept_heads(prune_heads(tiny_encoder(), {1: [0, 3]}))
    [[0, 1, 2, 3], [1, 2]]
    """
    plan = _checked(attention_layers(model), heads)
    model = model if inplace else copy.deepcopy(model)
    layers = attention_layers(model)
    for index, gone in plan.items():
        layer = layers[index]
        places = [i for i, head in enumerate(layer.kept) if head not in gone]
        keep = torch.tensor(places)[:, None] * layer.size + torch.arange(layer.size)
        keep = keep.flatten().to(layer.output.weight.device)
        inputs = [_cut(linear, keep, 0) for linear in layer.inputs]
        kept = [layer.kept[i] for i in places]
        _replace(layer, model, inputs, _cut(layer.output, keep, 1), kept)
    return model


def expand_heads(model: PreTrainedModel) -> PreTrainedModel:
    """Put empty heads in the place of pruned ones, on a copy.

    The outputs stay the same, and the shapes are again those that the configuration promises: only
    so can ``save_pretrained`` write a folder that any ``from_pretrained`` reads. Empty heads stay
    empty when training goes on: neither their values nor their columns of the output get a
    gradient.

    Parameters
    ----------
    model : transformers.PreTrainedModel

    Returns
    -------
    transformers.PreTrainedModel

    Examples
    --------
    >>> from icml24.backdoor_defense.toy import tiny_encoder
    >>> model = expand_heads(prune_heads(tiny_encoder(), {1: [0, 3]}))
    >>> kept_heads(model), silent_heads(model)
    ([[0, 1, 2, 3], [0, 1, 2, 3]], {1: [0, 3]})
    """
    model = copy.deepcopy(model)
    for layer in attention_layers(model):
        n = int(model.config.num_attention_heads)
        if len(layer.kept) == n:
            continue
        rows = torch.tensor(layer.kept)[:, None] * layer.size + torch.arange(layer.size)
        rows = rows.flatten().to(layer.output.weight.device)
        inputs = [_grow(linear, rows, n * layer.size, 0) for linear in layer.inputs]
        output = _grow(layer.output, rows, n * layer.size, 1)
        _replace(layer, model, inputs, output, list(range(n)))
    return model


def _grow(linear: nn.Linear, places: torch.Tensor, size: int, dim: int) -> nn.Linear:
    shape = list(linear.weight.shape)
    shape[dim] = size
    new = nn.Linear(shape[1], shape[0], linear.bias is not None, device="meta")
    weight = linear.weight.new_zeros(shape).index_copy(dim, places, linear.weight.detach())
    new.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
    if linear.bias is not None:
        bias = linear.bias.detach().clone()
        if dim == 0:
            bias = bias.new_zeros(size).index_copy(0, places, bias)
        new.bias = nn.Parameter(bias, requires_grad=linear.bias.requires_grad)
    return new.train(linear.training)


def silent_heads(model: PreTrainedModel) -> dict[int, list[int]]:
    """Find heads that contribute nothing, for example those that :func:`expand_heads` put in.

    ``prune_heads(model, silent_heads(model))`` makes a loaded model small again.

    Returns
    -------
    dict from int to list of int
        Layer to heads whose columns of the output projection are all zero.
    """
    found = {}
    for index, layer in enumerate(attention_layers(model)):
        columns = layer.output.weight.detach().unflatten(1, (-1, layer.size))
        dead = ~columns.ne(0).any(dim=2).any(dim=0)
        if dead.any():
            found[index] = [layer.kept[i] for i in dead.nonzero().flatten().tolist()]
    return found

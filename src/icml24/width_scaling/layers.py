"""Give any torch model a parameterization: tag its layers, initialise it, group its parameters.

The exponents need to know one thing of each parameter: does it read the width, write the width, or
both? :func:`tag_parameters` finds out, :func:`apply_parameterization` sets initial weights and
forward multipliers, :func:`param_groups` sets per-layer rates; :func:`parametrize` does all three.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize as torch_parametrize

from icml24.width_scaling.exponents import Alignment, lr_exponents
from icml24.width_scaling.parameterization import (
    LAYERS,
    LayerExponents,
    Parameterization,
    as_parameterization,
)

__all__ = [
    "Tag",
    "apply_parameterization",
    "effective_weight",
    "fold_multipliers",
    "param_groups",
    "parametrize",
    "raw_parameter",
    "tag_parameters",
]

LAYER_TYPES = (*LAYERS, "fixed")
_RAW = re.compile(r"parametrizations\.(\w+)\.original$")


@dataclass(frozen=True)
class Tag:
    """What the width rules need to know about one parameter.

    Parameters
    ----------
    layer : {"embedding", "hidden", "readout", "fixed"}
        Whether it writes the width, reads and writes it, reads it, or neither.
    fan_in : int
        Number of terms that one output sums (1 for look-up tables, biases and scales).
    width : int
        Size of the width dimension: ``fan_in`` of hidden layers and readout, else the output size.
    ratio : float
        Width of the model over the base width.
    kind : {"matrix", "bias", "vector"}
        Matrices are drawn anew, biases of linear layers zeroed, other vectors kept.
    """

    layer: str
    fan_in: int
    width: int
    ratio: float
    kind: str


@dataclass(frozen=True)
class _Parameter:
    """One parameter with its layout: sizes of output and input, and the number of terms."""

    name: str
    module: nn.Module
    tensor: Tensor
    out_size: int
    in_size: int | None  # None: nothing of the width can be contracted (tables, vectors)
    fan_in: int
    kind: str
    known: bool = True


def _layout(name: str, module: nn.Module, tensor: Tensor) -> _Parameter:
    attribute = name.rpartition(".")[2]
    shape = tuple(tensor.shape)
    kernel = math.prod(shape[2:])
    if tensor.ndim <= 1:
        biased = isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.RNNBase)
        biased |= isinstance(module, nn.MultiheadAttention) or type(module).__name__ == "Conv1D"
        kind = "bias" if biased and "bias" in attribute else "vector"
        return _Parameter(name, module, tensor, tensor.numel(), None, 1, kind)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return _Parameter(name, module, tensor, shape[1], None, 1, "matrix")
    transposed = type(module).__name__ == "Conv1D" or (
        isinstance(module, nn.modules.conv._ConvNd) and module.transposed
    )
    out_size, in_size = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
    known = isinstance(module, nn.Linear | nn.modules.conv._ConvNd) or transposed
    known |= isinstance(module, nn.MultiheadAttention) and attribute.endswith("proj_weight")
    known |= isinstance(module, nn.RNNBase) and attribute.startswith("weight_")
    return _Parameter(name, module, tensor, out_size, in_size, in_size * kernel, "matrix", known)


def _parameters(model: nn.Module, tied: str | None) -> list[_Parameter]:
    """List trainable parameters once, under the name they have without forward multipliers."""
    if tied is not None and tied not in LAYERS:
        raise ValueError(f"tied must be one of {', '.join(LAYERS)}, got {tied!r}.")
    found: list[_Parameter] = []
    seen: dict[int, str] = {}
    for raw_name, tensor in model.named_parameters(remove_duplicate=False):
        if not tensor.requires_grad:
            continue
        name = _RAW.sub(r"\1", raw_name)
        if isinstance(tensor, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} has no shape yet; run one batch through the model first.")
        if id(tensor) in seen:
            if tied is None:
                raise ValueError(
                    f"{seen[id(tensor)]} and {name} are the same tensor, but an embedding and a "
                    "readout need different rates; untie them, or say which rule the shared "
                    "tensor follows: tied='readout'."
                )
            continue
        seen[id(tensor)] = name
        if tensor.numel() == 0:
            raise ValueError(f"{name} has size zero (shape {tuple(tensor.shape)}); remove it.")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be real floating point, got {tensor.dtype}.")
        module = model.get_submodule(name.rpartition(".")[0])
        found.append(_layout(name, module, tensor))
    if not found:
        raise ValueError("The model has no trainable parameters.")
    return found


def _by_order(model: nn.Module, parameters: list[_Parameter]) -> dict[str, str]:
    """First layer (or every look-up table) embeds, the last one reads out, the rest is hidden."""
    matrices = [p for p in parameters if p.kind == "matrix" and p.known]
    unknown = [p.name for p in parameters if not p.known]
    tables = [p for p in matrices if p.in_size is None]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    readouts = [p for p in matrices if p.module is head] or matrices[-1:]
    embeddings = [p for p in tables if p.module is not head] or matrices[:1]
    if len(matrices) < 2 or embeddings[0] is readouts[0]:
        raise ValueError(
            "Found no pair of embedding and readout layer; name the layers in overrides, for "
            f"example {{'head.weight': 'readout'}}. Unknown parameters: {unknown or 'none'}."
        )
    layers = {p.name: "hidden" for p in matrices}
    layers |= {p.name: "embedding" for p in embeddings}
    layers |= {p.name: "readout" for p in readouts}
    return layers


def _by_shape(parameters: list[_Parameter], sibling: nn.Module, tied: str | None) -> dict[str, str]:
    """Compare with the same architecture at another width: sizes that differ are widths."""
    others = {p.name: p for p in _parameters(sibling, tied)}
    if missing := sorted({p.name for p in parameters} ^ set(others)):
        raise ValueError(f"sibling must have the same parameters; these differ: {missing}.")
    layers, growth = {}, {}
    for p in parameters:
        other = others[p.name]
        writes = p.out_size != other.out_size
        reads = p.in_size is not None and p.in_size != other.in_size
        layers[p.name] = {
            (True, True): "hidden",
            (True, False): "embedding",
            (False, True): "readout",
            (False, False): "fixed",
        }[writes, reads]
        if writes:
            growth[p.name] = p.out_size / other.out_size
        if reads:
            growth[p.name + " (input)"] = (p.in_size or 1) / (other.in_size or 1)
    if not growth:
        raise ValueError("sibling has the same shapes as the model; build it at another width.")
    if len({round(value, 6) for value in growth.values()}) > 1:
        raise ValueError(
            f"All widths must grow by one factor between the two models, got {growth}."
        )
    return layers


def tag_parameters(
    model: nn.Module,
    base_width: int,
    *,
    width: int | None = None,
    sibling: nn.Module | None = None,
    overrides: Mapping[str, str] | None = None,
    tied: str | None = None,
) -> dict[str, Tag]:
    """Find the layer type of every trainable parameter.

    Without a ``sibling`` the rule is: look-up tables (or, without any, the first layer) embed, the
    last layer (or the model's output embeddings) reads out, other matrices are hidden; vectors
    whose size is a multiple of the width count as embedding, others as fixed. With a sibling, the
    same architecture at another width, the shapes decide. Both can be overridden by name.

    Parameters
    ----------
    model : nn.Module
        Not changed.
    base_width : int
        The width at which all rules are the identity, usually the one where you tune.
    width : int, optional
        The model's width in the same unit; default: output size of its first embedding layer.
    sibling : nn.Module, optional
        The same architecture built at another width.
    overrides : mapping from regular expression to layer type, optional
        Matched against the whole parameter name.
    tied : str, optional
        Layer type of a tensor that occurs twice; without it, tied weights are refused.

    Returns
    -------
    dict from parameter name to Tag

    Raises
    ------
    ValueError
        For tied, empty, complex or unknown parameters, and for sizes that do not fit the width.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 2))
    >>> tags = tag_parameters(model, base_width=32)
    >>> {name: tag.layer for name, tag in tags.items() if name.endswith("weight")}
    {'0.weight': 'embedding', '2.weight': 'hidden', '3.weight': 'readout'}
    """
    if base_width < 1 or (width is not None and width < 1):
        raise ValueError(f"Widths must be at least 1, got base_width={base_width}, width={width}.")
    parameters = _parameters(model, tied)
    by_name = {p.name: p for p in parameters}
    if sibling is None:
        layers = _by_order(model, parameters)
    else:
        layers = _by_shape(parameters, sibling, tied)
    if tied is not None:
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        unique = {name for name, _ in model.named_parameters()}
        for name in set(names) - unique:
            shared = next(p for p in parameters if p.tensor is model.get_parameter(name))
            layers[shared.name] = tied
    chosen = set()
    for pattern, layer in (overrides or {}).items():
        if layer not in LAYER_TYPES:
            raise ValueError(f"A layer type is one of {', '.join(LAYER_TYPES)}, got {layer!r}.")
        matched = [name for name in by_name if re.fullmatch(pattern, name)]
        if not matched:
            raise ValueError(f"overrides: no parameter is called {pattern!r}.")
        layers |= dict.fromkeys(matched, layer)
        chosen |= set(matched)

    unknown = [p.name for p in parameters if not p.known and p.name not in chosen]
    if sibling is not None:  # the shapes decide, except whether one width is read or written
        unknown = [name for name in unknown if layers[name] in ("embedding", "readout")]
    if unknown:
        raise ValueError(
            f"Cannot tell the layer type of {unknown}, which belong to no module known here; name "
            f"it in overrides, for example {{{unknown[0]!r}: 'embedding'}}."
        )
    if width is None:
        width = next(
            (
                p.out_size
                for p in parameters
                if layers.get(p.name) == "embedding" and p.tensor.ndim > 1
            ),
            None,
        ) or next((p.in_size for p in parameters if layers.get(p.name) == "readout"), None)
    if not width:
        raise ValueError("Cannot infer the model's width; pass width=.")
    for p in parameters:
        if p.name not in layers:
            layers[p.name] = "embedding" if p.out_size % width == 0 else "fixed"
    return {p.name: _tag(p, layers[p.name], width, base_width, sibling is None) for p in parameters}


def _tag(p: _Parameter, layer: str, width: int, base_width: int, check: bool) -> Tag:
    fan_in, size = p.fan_in, p.out_size
    if layer in ("hidden", "readout"):
        if p.in_size is None and p.tensor.ndim < 2:
            raise ValueError(f"{p.name} is a vector and cannot be a {layer} layer.")
        size = p.in_size or p.out_size
        fan_in = p.fan_in if p.in_size else p.out_size
    elif layer == "embedding" and not p.known:
        fan_in, size = 1, p.tensor.shape[-1]
    if check and layer != "fixed" and size % width and width % size:
        raise ValueError(
            f"{p.name} is tagged {layer}, but its size {size} does not fit the width {width}; pass "
            "width=, override its type, or pass the same model at another width as sibling."
        )
    return Tag(
        layer,
        fan_in,
        fan_in if layer in ("hidden", "readout") else size,
        width / base_width,
        p.kind,
    )


class _Multiply(nn.Module):
    """Forward multiplier ``n ** -a`` of one weight."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def raw_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """Return the trained tensor of a parameter, without its forward multiplier.

    Parameters
    ----------
    model : nn.Module
    name : str
        A key of :func:`tag_parameters`.

    Returns
    -------
    nn.Parameter
    """
    module, attribute = _owner(model, name)
    if torch_parametrize.is_parametrized(module, attribute):
        return module.parametrizations[attribute].original
    return getattr(module, attribute)


def effective_weight(model: nn.Module, name: str) -> Tensor:
    """Return a weight as the forward pass sees it, multiplier included."""
    module, attribute = _owner(model, name)
    return getattr(module, attribute)


def _gain(gain: float | Mapping[str, float], name: str, layer: str) -> float:
    if not isinstance(gain, Mapping):
        return float(gain)
    if layer in gain:
        return float(gain[layer])
    return next((float(g) for pattern, g in gain.items() if re.fullmatch(pattern, name)), 1.0)


def apply_parameterization(
    model: nn.Module,
    tags: Mapping[str, Tag],
    parameterization: str | Parameterization = "standard",
    *,
    gain: float | Mapping[str, float] = 1.0,
    relative: bool = False,
    seed: int | torch.Generator = 0,
) -> nn.Module:
    r"""Draw initial weights and install forward multipliers, in place (like ``torch.nn.init``).

    .. math:: W_l \sim N(0, \sigma_l^2 n^{-2 b_l}), \qquad \text{forward weight} = n^{-a_l} W_l

    with ``n`` the number of summed terms (hidden, readout) or the output size (embedding), and
    ``sigma`` the gain, divided by ``sqrt(fan_in)`` for embeddings. Biases of linear layers start at
    zero; other vectors (scales of normalisations) keep their value.

    Parameters
    ----------
    model : nn.Module
        Changed in place. A multiplier other than 1 is registered with
        ``torch.nn.utils.parametrize``; :func:`fold_multipliers` takes it out again.
    tags : mapping from name to Tag
        From :func:`tag_parameters`.
    parameterization : str or Parameterization
    gain : float or mapping, default 1
        Extra factor on the initial weights, for example ``{"hidden": 2 ** 0.5}`` before ReLU; keys
        are layer types or regular expressions for parameter names.
    relative : bool, default False
        Use ``n`` over the base value instead of ``n``, so that at the base width all
        parameterizations are the standard one.
    seed : int or torch.Generator, default 0
        A CPU generator. The global random state is neither used nor changed.

    Returns
    -------
    nn.Module
        The same model.

    Raises
    ------
    ValueError
        If the model already has multipliers, or a tied tensor would need one.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 2))
    >>> model = apply_parameterization(model, tag_parameters(model, 64), "mup")
    >>> effective_weight(model, "2.weight").shape
    torch.Size([2, 64])
    """
    p = as_parameterization(parameterization)
    generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    _check_tags(model, tags)
    uses: dict[int, int] = {}
    for _, tensor in model.named_parameters(remove_duplicate=False):
        uses[id(tensor)] = uses.get(id(tensor), 0) + 1
    plan: list[tuple[str, float, float]] = []
    for name, tag in tags.items():
        module, attribute = _owner(model, name)
        if torch_parametrize.is_parametrized(module, attribute):
            raise ValueError(f"{name} already has a multiplier; build a fresh model instead.")
        if tag.layer == "fixed":
            if tag.kind == "bias":
                plan.append((name, 0.0, 1.0))
            continue
        i = LAYERS.index(tag.layer)
        n = tag.ratio if relative else tag.width
        base = 1.0
        if tag.layer == "embedding":
            base = tag.fan_in**-0.5
        elif relative:
            base = (tag.fan_in / tag.ratio) ** -0.5
        multiplier = float(n) ** -p.a[i]
        if multiplier != 1 and uses[id(getattr(module, attribute))] > 1:
            raise ValueError(
                f"{name} is tied, so it cannot have the multiplier that {p.name} needs."
            )
        plan.append((name, base * float(n) ** -p.b[i], multiplier))

    for name, std, multiplier in plan:  # nothing above this line has changed the model
        module, attribute = _owner(model, name)
        tensor = getattr(module, attribute)
        with torch.no_grad():
            if tags[name].kind == "matrix":
                scale = std * _gain(gain, name, tags[name].layer)
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_(noise * scale)
            elif tags[name].kind == "bias":
                tensor.zero_()
            else:
                tensor.div_(multiplier)
        if multiplier != 1:
            torch_parametrize.register_parametrization(module, attribute, _Multiply(multiplier))
    return model


def _check_tags(model: nn.Module, tags: Mapping[str, Tag]) -> None:
    names = {_RAW.sub(r"\1", name) for name, p in model.named_parameters() if p.requires_grad}
    if missing := sorted(names - set(tags)):
        raise ValueError(f"These parameters carry no tag: {missing}; call tag_parameters again.")


def fold_multipliers(model: nn.Module) -> nn.Module:
    """Multiply the forward multipliers into the weights and remove them, in place.

    The function computed is the same; afterwards the model is a plain torch model (to save, export
    or deploy), and it can no longer be trained with the same rates.

    Parameters
    ----------
    model : nn.Module

    Returns
    -------
    nn.Module
        The same model.
    """
    for module in model.modules():
        for attribute in list(getattr(module, "parametrizations", {})):
            if isinstance(module.parametrizations[attribute][0], _Multiply):
                torch_parametrize.remove_parametrizations(module, attribute)
    return model


def param_groups(
    model: nn.Module,
    tags: Mapping[str, Tag],
    lr: float,
    parameterization: str | Parameterization = "standard",
    optimizer: str = "adam",
    alignment: str | Alignment | LayerExponents = "full",
    *,
    constants: tuple[float, float, float] = (1.0, 1.0, 1.0),
    eps: float | None = None,
    per_layer_eps: bool = False,
    weight_decay: float | None = None,
) -> list[dict]:
    r"""Group the parameters by layer type, each with its own learning rate.

    .. math:: \eta_l = \beta\,\gamma_l\,(n/b)^{-c_l}, \qquad
              \varepsilon_l = \varepsilon\,(n/b)^{-g_l}

    Parameters
    ----------
    model : nn.Module
    tags : mapping from name to Tag
        From :func:`tag_parameters`.
    lr : float
        The base rate ``beta``: the same at every width.
    parameterization : str or Parameterization
    optimizer : {"sgd", "adam", "scaled_adam", "adafactor"}
        The kind of update. "adam" covers AdamW and AdamAtan2.
    alignment : {"full", "none", "prior", "global"}, Alignment or LayerExponents
        An assumption, or the rate exponents themselves.
    constants : tuple of 3 floats
        ``gamma`` for embedding, hidden layers, readout; only their ratios matter.
    eps : float, optional
        Adam's epsilon at the base width. Left out, the optimizer's own default is used.
    per_layer_eps : bool, default False
        Let epsilon follow the size of the layer's gradients.
    weight_decay : float, optional
        Independent of the layer: every step shrinks each matrix by ``lr * weight_decay``, whatever
        its own rate. For optimizers with decoupled decay (AdamW, AdamAtan2, ScaledAdam). Vectors
        do not decay.

    Returns
    -------
    list of dict
        For any ``torch.optim`` optimizer. Groups also carry ``layer_type`` and ``names``;
        schedulers multiply every rate alike.

    Raises
    ------
    ValueError
        For rates or constants that are not positive.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 2))
    >>> groups = param_groups(model, tag_parameters(model, base_width=16), lr=0.1)
    >>> {group["layer_type"]: group["lr"] for group in groups}
    {'embedding': 0.1, 'hidden': 0.025, 'readout': 0.025, 'fixed': 0.1}
    """
    if not (lr > 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be positive and finite, got {lr}.")
    if len(constants) != 3 or not all(c > 0 and math.isfinite(c) for c in constants):
        raise ValueError(f"constants must be three positive numbers, got {constants}.")
    if eps is not None and eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}.")
    if per_layer_eps and eps is None:
        raise ValueError("per_layer_eps needs eps, the value at the base width.")
    if weight_decay is not None and weight_decay < 0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay}.")
    p = as_parameterization(parameterization)
    if isinstance(alignment, LayerExponents):
        c = alignment
    else:
        c = lr_exponents(p, optimizer, alignment)
    _check_tags(model, tags)
    g = p.gradient_exponents()
    groups: dict[tuple, dict] = {}
    for name, tag in tags.items():
        tensor = raw_parameter(model, name)
        decays = weight_decay is not None and tensor.ndim > 1
        key = (tag.layer, tag.ratio, decays)
        if key not in groups:
            rate, epsilon = lr, eps
            if tag.layer != "fixed":
                rate *= constants[LAYERS.index(tag.layer)] * tag.ratio ** -c[tag.layer]
                if per_layer_eps and eps is not None:
                    epsilon = eps * tag.ratio ** -g[tag.layer]
            group: dict = {"params": [], "names": [], "layer_type": tag.layer, "lr": rate}
            if epsilon is not None:
                group["eps"] = epsilon
            if weight_decay is not None:
                group["weight_decay"] = weight_decay * lr / rate if decays else 0.0
            groups[key] = group
        groups[key]["params"].append(tensor)
        groups[key]["names"].append(name)
    return list(groups.values())


def parametrize(
    model: nn.Module,
    base_width: int,
    parameterization: str | Parameterization = "standard",
    optimizer: str = "adam",
    alignment: str | Alignment | LayerExponents = "full",
    *,
    lr: float,
    width: int | None = None,
    sibling: nn.Module | None = None,
    overrides: Mapping[str, str] | None = None,
    tied: str | None = None,
    constants: tuple[float, float, float] = (1.0, 1.0, 1.0),
    eps: float | None = None,
    per_layer_eps: bool = False,
    weight_decay: float | None = None,
    gain: float | Mapping[str, float] = 1.0,
    relative: bool = False,
    seed: int | torch.Generator = 0,
) -> list[dict]:
    """Initialise a model for its width and return parameter groups with per-layer rates.

    Tune ``lr`` once on a small model of width ``base_width``; use the same call, with the same
    ``lr``, on the wide one. Adam's update is covered by "adam" whatever its flavour (AdamW,
    :class:`~icml24.width_scaling.AdamAtan2`).

    Parameters
    ----------
    model : nn.Module
        Initialised in place. Reads no global random state.
    base_width, width, sibling, overrides, tied
        As in :func:`tag_parameters`.
    parameterization, gain, relative, seed
        As in :func:`apply_parameterization`.
    optimizer, alignment, lr, constants, eps, per_layer_eps, weight_decay
        As in :func:`param_groups`.

    Returns
    -------
    list of dict
        Parameter groups for a ``torch.optim`` optimizer.

    Examples
    --------
    >>> def build(width):
    ...     return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))
    >>> wide = build(4096)
    >>> optimizer = torch.optim.Adam(parametrize(wide, base_width=128, lr=2**-6))
    >>> [group["lr"] * 2**6 for group in optimizer.param_groups]
    [1.0, 0.03125, 1.0]
    """
    tags = tag_parameters(
        model, base_width, width=width, sibling=sibling, overrides=overrides, tied=tied
    )
    # Check rates first: a refused argument must leave the model as it was.
    settings: dict = {
        "constants": constants,
        "eps": eps,
        "per_layer_eps": per_layer_eps,
        "weight_decay": weight_decay,
    }
    param_groups(model, tags, lr, parameterization, optimizer, alignment, **settings)
    apply_parameterization(model, tags, parameterization, gain=gain, relative=relative, seed=seed)
    return param_groups(model, tags, lr, parameterization, optimizer, alignment, **settings)

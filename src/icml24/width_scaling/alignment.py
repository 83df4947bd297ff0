"""Measure what the theory assumes: alignment of layers, and how sizes change with width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from icml24.width_scaling.exponents import Alignment
from icml24.width_scaling.layers import Tag, effective_weight

__all__ = [
    "AlignmentMonitor",
    "coordinate_check",
    "log_alignment_ratio",
    "plot_coordinate_check",
    "rms",
    "width_slopes",
]


def rms(x: Tensor) -> float:
    """Root mean square over all entries."""
    norm = torch.linalg.vector_norm(x.detach(), dtype=torch.float64)
    return float(norm) / max(x.numel(), 1) ** 0.5


def log_alignment_ratio(weight: Tensor, z: Tensor) -> float:
    r"""How strongly a contraction adds up, as an exponent of its number of terms.

    .. math:: A = \log_n \frac{|W z|}{|W|\,|z|}, \qquad |\cdot| = \mathrm{RMS}

    1/2: terms of independent sign; 1: all of one sign, the largest possible value.

    Parameters
    ----------
    weight : Tensor, shape (out, n)
    z : Tensor, shape (..., n)
        Inputs of the layer; the batch is part of the RMS.

    Returns
    -------
    float
        NaN if the weight or the input is zero, minus infinity if only the product is.

    Raises
    ------
    ValueError
        If the shapes do not fit or ``n`` is 1.

    Examples
    --------
    >>> round(log_alignment_ratio(torch.eye(64), torch.randn(5, 64)), 6)
    0.5
    >>> log_alignment_ratio(torch.ones(3, 64), torch.ones(64))
    1.0
    """
    if weight.ndim != 2 or weight.shape[1] != z.shape[-1]:
        raise ValueError(
            f"weight (out, n) and z (..., n) do not fit: {tuple(weight.shape)}, {tuple(z.shape)}."
        )
    n = weight.shape[1]
    if n < 2:
        raise ValueError("The logarithm to base n needs at least two terms to sum.")
    size = rms(weight) * rms(z)
    product = rms(z.double() @ weight.double().T)
    if size == 0:
        return math.nan
    return math.log(product / size) / math.log(n) if product > 0 else -math.inf


class AlignmentMonitor:
    """Watch the alignment exponents of every hidden layer and the readout during training.

    Works on ``nn.Linear`` layers (and the transposed ones of Hugging Face), whose inputs it reads
    with forward hooks. Use it as a context manager, or call :meth:`close`.

    Parameters
    ----------
    model : nn.Module
    tags : mapping from name to Tag
        From :func:`icml24.width_scaling.tag_parameters`.
    inputs : Tensor
        A fixed batch; the reference weights and activations are taken at once, so create the
        monitor before training.

    Examples
    --------
    >>> from icml24.width_scaling import tag_parameters
    >>> model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> x = torch.randn(16, 4)
    >>> with AlignmentMonitor(model, tag_parameters(model, 64), x) as monitor:
    ...     model(x).square().mean().backward()
    ...     optimizer.step()
    ...     frame = monitor.snapshot()
    >>> list(frame.columns)
    ['layer', 'layer_type', 'fan_in', 'alpha', 'omega', 'u', 'log_ratio']
    """

    def __init__(self, model: nn.Module, tags: Mapping[str, Tag], inputs: Tensor) -> None:
        self._model, self._inputs = model, inputs
        modules = dict(model.named_modules())
        self._names = [
            name
            for name, tag in tags.items()
            if tag.layer in ("hidden", "readout")
            and name.endswith("weight")
            and self._supported(modules[name.rpartition(".")[0]])
        ]
        self._tags = tags
        if not self._names:
            raise ValueError("The model has no linear hidden or readout layer to watch.")
        self._seen: dict[str, Tensor] = {}
        self._handles = [
            modules[name.rpartition(".")[0]].register_forward_pre_hook(self._hook(name))
            for name in self._names
        ]
        self._listening = False
        self._weights, self._activations = self._read()

    @staticmethod
    def _supported(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) or hasattr(module, "nf")

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._listening:
                self._seen[name] = args[0].detach().clone()

        return hook

    def _read(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        training = {module: module.training for module in self._model.modules()}
        self._model.eval()
        self._seen, self._listening = {}, True
        try:
            with torch.no_grad():
                self._model(self._inputs)
                weights = {name: self._weight(name) for name in self._names}
        finally:
            self._listening = False
            for module, mode in training.items():
                module.training = mode
        if missing := set(self._names) - set(self._seen):
            raise ValueError(
                f"These layers were not called in the forward pass: {sorted(missing)}."
            )
        return weights, self._seen

    def _weight(self, name: str) -> Tensor:
        weight = effective_weight(self._model, name).detach().clone()
        module = self._model.get_submodule(name.rpartition(".")[0])
        return weight if isinstance(module, nn.Linear) else weight.T

    def norms(self) -> pd.DataFrame:
        """Sizes behind the exponents, for fits over several widths.

        Returns
        -------
        pandas.DataFrame
            A row per layer: ``layer``, ``layer_type``, ``fan_in``, and the *quotients*
            ``|dW z| / (|dW||z|)`` (``alpha``), ``|W dz| / (|W||dz|)`` (``omega``),
            ``|dW dz| / (|dW||dz|)`` (``u``), ``|W' z'| / (|W'||z'|)`` (``log_ratio``), primes
            meaning the present values.
        """
        weights, activations = self._read()
        rows = []
        for name in self._names:
            w0, z0 = self._weights[name], self._activations[name]
            w, z = weights[name], activations[name]
            pairs = {"alpha": (w - w0, z0), "omega": (w0, z - z0), "u": (w - w0, z - z0)}
            pairs["log_ratio"] = (w, z)
            n = w.shape[1]
            quotients = {k: n ** log_alignment_ratio(a, b) for k, (a, b) in pairs.items()}
            tag = self._tags[name]
            rows.append({"layer": name, "layer_type": tag.layer, "fan_in": n, **quotients})
        return pd.DataFrame(rows)

    def snapshot(self) -> pd.DataFrame:
        """Alignment exponents of every watched layer now.

        Returns
        -------
        pandas.DataFrame
            A row per layer: ``layer``, ``layer_type``, ``fan_in``, and the exponents ``alpha``,
            ``omega``, ``u``, ``log_ratio`` (logarithms to base ``fan_in``; a constant factor in
            the quotient shifts them by its logarithm, which shrinks slowly with width). Before the
            first step the three changes are NaN.
        """
        frame = self.norms()
        for column in ("alpha", "omega", "u", "log_ratio"):
            with np.errstate(divide="ignore"):
                frame[column] = np.log(frame[column]) / np.log(frame["fan_in"])
        return frame

    def alignment(self) -> Alignment:
        """Present exponents (averaged over hidden layers, cut to [0, 1]) for the exponent solver.

        Returns
        -------
        Alignment
        """
        frame = self.snapshot()
        means = frame.groupby("layer_type")[["alpha", "omega", "u"]].mean().clip(0, 1)
        if means.isna().any().any():
            raise ValueError("Nothing has changed yet; take at least one optimizer step first.")
        rows = [means.loc[k] for k in ("hidden", "readout") if k in means.index]
        pairs = {k: (float(rows[0][k]), float(rows[-1][k])) for k in ("alpha", "omega", "u")}
        return Alignment(**pairs)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> AlignmentMonitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def coordinate_check(
    build: Callable[[int, int], tuple[nn.Module, Optimizer]],
    widths: Iterable[int],
    batch: tuple[Tensor, Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    steps: int = 3,
    seeds: int | Iterable[int] = 1,
    training: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    record: Iterable[int] | None = None,
) -> pd.DataFrame:
    """Train a few steps at several widths and record the size of everything.

    In a rightly parameterised model the change of every layer's output (``"change"``) neither grows
    nor vanishes with width.

    Parameters
    ----------
    build : callable
        ``build(width, seed)`` returns a fresh model and its optimizer.
    widths : iterable of int
    batch : (inputs, targets)
        Outputs and gradients are measured on it.
    loss : callable
        ``loss(output, target)``.
    steps : int, default 3
    seeds : int or iterable of int, default 1
    training : callable, optional
        ``training(step)`` returns the batch to train on; default: always ``batch``.
    record : iterable of int, optional
        Steps after which to measure, besides step 0; default: every step.

    Returns
    -------
    pandas.DataFrame
        Columns ``width``, ``seed``, ``step``, ``layer``, ``quantity``, ``value``. Quantities:
        RMS of the layer's ``output`` and of its ``change`` since initialisation, for leaf modules
        with parameters; RMS of ``gradient`` and ``update`` (since initialisation) of each
        parameter. Fit it with :func:`width_slopes`, draw it with :func:`plot_coordinate_check`.

    Examples
    --------
    >>> from icml24.width_scaling import parametrize
    >>> def build(width, seed):
    ...     model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
    ...     return model, torch.optim.Adam(parametrize(model, 64, lr=0.01, seed=seed))
    >>> batch = (torch.randn(32, 4), torch.randn(32, 1))
    >>> frame = coordinate_check(build, [64, 128], batch, nn.functional.mse_loss)
    >>> sorted(frame["quantity"].unique())
    ['change', 'gradient', 'output', 'update']
    """
    widths = [int(width) for width in widths]
    seeds = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    if not widths or not seeds or steps < 1:
        raise ValueError("coordinate_check needs at least one width, one seed and one step.")
    recorded = {0, *(range(steps + 1) if record is None else record)}
    rows: list[dict[str, Any]] = []
    for width in widths:
        for seed in seeds:
            model, optimizer = build(width, seed)
            rows += [
                {"width": width, "seed": seed, **row}
                for row in _trajectory(model, optimizer, batch, loss, steps, training, recorded)
            ]
    return pd.DataFrame(rows)


def _trajectory(
    model: nn.Module,
    optimizer: Optimizer,
    batch: tuple[Tensor, Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    steps: int,
    training: Callable[[int], tuple[Tensor, Tensor]] | None,
    record: set[int],
) -> list[dict[str, Any]]:
    outputs: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if measuring and isinstance(output, Tensor):
                outputs[name] = output.detach().clone()

        return note

    owners = {
        name: module
        for name, module in model.named_modules()
        if (list(module.parameters(recurse=False)) or hasattr(module, "parametrizations"))
        and "parametrizations" not in name
    }
    handles = [module.register_forward_hook(hook(name)) for name, module in owners.items()]
    parameters = {
        name.replace("parametrizations.", "").removesuffix(".original"): p
        for name, p in model.named_parameters()
    }
    first = {name: p.detach().clone() for name, p in parameters.items()}
    rows: list[dict[str, Any]] = []
    initial: dict[str, Tensor] = {}

    def backward(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()

    try:
        for step in range(steps + 1):
            measuring = step in record
            if measuring:
                backward(*batch)
                initial = initial or dict(outputs)
                for name, output in outputs.items():
                    rows.append(_row(step, name, "output", rms(output)))
                    if step:
                        rows.append(_row(step, name, "change", rms(output - initial[name])))
                for name, p in parameters.items():
                    if p.grad is not None:
                        rows.append(_row(step, name, "gradient", rms(p.grad)))
                    if step:
                        rows.append(_row(step, name, "update", rms(p.detach() - first[name])))
            if step < steps:
                if training is not None or not measuring:
                    measuring = False
                    backward(*(batch if training is None else training(step)))
                optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    return rows


def _row(step: int, layer: str, quantity: str, value: float) -> dict[str, Any]:
    return {"step": step, "layer": layer, "quantity": quantity, "value": value}


def width_slopes(frame: pd.DataFrame, *, last_gradient: bool = False) -> pd.DataFrame:
    """Fit ``value ~ width ** slope`` for every layer and quantity at the last recorded step.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`coordinate_check`, with at least two widths.
    last_gradient : bool, default False
        Take gradients at the last step too, instead of at initialisation.

    Returns
    -------
    pandas.DataFrame
        Index (quantity, layer), columns ``slope`` and ``standard_error`` (NaN for two points).
    """
    if frame["width"].nunique() < 2:
        raise ValueError("A slope needs at least two widths.")
    at_first = (frame["quantity"] == "gradient") & (not last_gradient)
    wanted = np.where(at_first, 0, frame["step"].max())
    rows = []
    for key, part in frame[frame["step"] == wanted].groupby(["quantity", "layer"], sort=False):
        part = part[part["value"] > 0]
        if part["width"].nunique() < 2:
            continue
        x, y = np.log(part["width"].to_numpy(float)), np.log(part["value"].to_numpy(float))
        slope, error = _line(x, y)
        rows.append((*key, slope, error))
    columns = ["quantity", "layer", "slope", "standard_error"]
    return pd.DataFrame(rows, columns=columns).set_index(["quantity", "layer"])


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    dx = x - x.mean()
    slope = float(dx @ y / (dx @ dx))
    if len(x) < 3:
        return slope, math.nan
    residual = y - y.mean() - slope * dx
    return slope, float(np.sqrt(residual @ residual / (len(x) - 2) / (dx @ dx)))


def plot_coordinate_check(frame: pd.DataFrame, quantity: str = "change", ax: Any = None) -> Any:
    """Draw the size of a quantity against width, a line per layer; flat lines are right.

    Parameters
    ----------
    frame : pandas.DataFrame
        From :func:`coordinate_check`.
    quantity : {"change", "output", "gradient", "update"}
    ax : matplotlib axes, optional

    Returns
    -------
    matplotlib axes
    """
    from matplotlib.ticker import NullLocator

    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.figure().add_subplot()
    part = frame[frame["quantity"] == quantity]
    if part.empty:
        known = ", ".join(sorted(frame["quantity"].unique()))
        raise ValueError(f"quantity must be one of {known}, got {quantity!r}.")
    step = 0 if quantity == "gradient" else part["step"].max()
    part = part[part["step"] == step]
    means = part.pivot_table(index="width", columns="layer", values="value", sort=False)
    slopes = width_slopes(frame).loc[quantity, "slope"]
    for layer in means:
        ax.plot(means.index, means[layer], marker="o", label=f"{layer} ({slopes[layer]:+.2f})")
    ax.set(xscale="log", yscale="log", xlabel="width", ylabel=f"RMS of {quantity}, step {step}")
    ax.set_xticks(list(means.index), [str(width) for width in means.index])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.legend(title="layer (slope)")
    return ax

"""Test-time adaptation by entropy minimisation: Tent, ETA, EATA, RDumb, RPL.

A wrapper copies your classifier, frees the scale and shift of its normalisation layers and nothing
else, and lowers the entropy of its own predictions on every unlabelled batch that passes through.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

__all__ = [
    "EATA",
    "ETA",
    "RPL",
    "RDumb",
    "Tent",
    "configure_model",
    "logits_of",
    "shuffled_batches",
    "softmax_entropy",
]

NORMALISATION = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm)
Select = Literal["norm_affine", "batch_norm"] | Callable[[str, nn.Module], bool]


def softmax_entropy(logits: Tensor, dim: int = -1) -> Tensor:
    r"""Entropy of the softmax distribution, :math:`H(p) = -\sum_c p_c \ln p_c`.

    Its gradient is :math:`\partial H/\partial z_k = -p_k(\ln p_k + H)`: zero for uniform logits.

    Parameters
    ----------
    logits : Tensor
        Any shape.
    dim : int, default -1
        The axis of classes.

    Returns
    -------
    Tensor
        In nats, shape of ``logits`` without ``dim``.

    Examples
    --------
    >>> round(softmax_entropy(torch.zeros(4)).item(), 4), round(math.log(4), 4)
    (1.3863, 1.3863)
    """
    log_p = logits.log_softmax(dim)
    return -(log_p.exp() * log_p).sum(dim)


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """Call a classifier and check what it returns.

    Parameters
    ----------
    model : torch.nn.Module
        Returns logits of shape (n, classes), or an object with such an attribute ``logits`` (as
        the models of the library transformers do).
    x : Tensor, shape (n, ...)
        Moved to the device of the model's parameters.

    Returns
    -------
    Tensor, shape (n, classes)

    Raises
    ------
    ValueError
        If the logits are not two-dimensional, have fewer than two classes, or are not finite.
    """
    parameter = next(model.parameters(), None)
    output = model(x if parameter is None else x.to(parameter.device))
    return check_logits(getattr(output, "logits", output))


def check_logits(logits: Tensor) -> Tensor:
    """Return ``logits`` if they have shape (n, at least 2 classes) and are finite, else raise."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"logits must have shape (n, classes) with 2 or more classes, got {shape}."
        )
    if not torch.isfinite(logits).all():
        raise ValueError(
            "The logits contain NaN or infinite values: check the images, or lower the learning "
            "rate if this happens after some steps."
        )
    return logits


def _selected(module: nn.Module, params: Select) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in module.named_modules():
        if params == "norm_affine":
            wanted = isinstance(layer, NORMALISATION)
        elif params == "batch_norm":
            wanted = isinstance(layer, _BatchNorm)
        elif callable(params):
            wanted = params(name, layer)
        else:
            raise ValueError(
                f"params must be 'norm_affine', 'batch_norm' or a function of (name, module), got "
                f"{params!r}."
            )
        if wanted:
            yield name, layer


def configure_model(
    model: nn.Module,
    params: Select = "norm_affine",
    batch_stats: bool = True,
    inplace: bool = False,
) -> tuple[nn.Module, list[nn.Parameter]]:
    """Free the parameters that adaptation may change, and freeze the rest.

    The paper adapts the scale and shift of batch normalisation and takes the mean and variance of
    the current batch. Dropout and stochastic depth stay off (the module is put into evaluation
    mode), so that without an update the predictions do not change.

    Parameters
    ----------
    model : torch.nn.Module
        Left as it is, unless ``inplace``.
    params : {"norm_affine", "batch_norm"} or callable, default "norm_affine"
        Whose own parameters to free: all normalisation layers (batch, layer, group, instance), only
        batch normalisation, or the modules for which ``params(name, module)`` is true.
    batch_stats : bool, default True
        Drop the running statistics of batch normalisation, so that every batch is normalised by
        its own mean and variance. With False the stored statistics stay in use.
    inplace : bool, default False
        Change ``model`` itself instead of a deep copy.

    Returns
    -------
    module : torch.nn.Module
    parameters : list of torch.nn.Parameter
        Those that require a gradient now.

    Raises
    ------
    ValueError
        If there is nothing to adapt.

    Examples
    --------
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    >>> module, parameters = configure_model(net)
    >>> [tuple(p.shape) for p in parameters], net[1].running_mean is None
    ([(4,), (4,)], False)
    """
    module = model if inplace else copy.deepcopy(model)
    module.eval().requires_grad_(False)
    chosen = [
        parameter
        for _, layer in _selected(module, params)
        for parameter in layer.parameters(recurse=False)
    ]
    if not chosen:
        kinds = "batch normalisation" if params == "batch_norm" else "normalisation"
        raise ValueError(
            f"The model has no {kinds} layer with a learnable scale and shift; use "
            "params='norm_affine' for layer or group normalisation, or pass a function that names "
            "other modules."
        )
    for parameter in chosen:
        parameter.requires_grad_(True)
    for layer in module.modules():
        if batch_stats and isinstance(layer, _BatchNorm):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return module, chosen


def shuffled_batches(
    x: Tensor, batch_size: int, steps: int, generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """Yield ``steps`` full batches from shuffled passes over ``x``.

    Parameters
    ----------
    x : Tensor, shape (n, ...)
    batch_size : int
        The rest of each pass that fills no batch is dropped.
    steps : int
    generator : torch.Generator, optional
        Of the order; seed 0 by default.

    Yields
    ------
    Tensor, shape (batch_size, ...)

    Raises
    ------
    ValueError
        If there are fewer images than one batch.

    Examples
    --------
    >>> [len(batch) for batch in shuffled_batches(torch.zeros(10, 1), 4, steps=3)]
    [4, 4, 4]
    """
    for index in shuffled_indices(len(x), batch_size, steps, generator):
        yield x[index]


def shuffled_indices(
    n: int, batch_size: int, steps: int, generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """Yield the index batches behind :func:`shuffled_batches`."""
    if not 1 <= batch_size <= n:
        raise ValueError(f"batch_size must lie between 1 and the {n} images, got {batch_size}.")
    generator = generator or torch.Generator().manual_seed(0)
    done = 0
    while done < steps:
        order = torch.randperm(n, generator=generator)
        for index in order[: n - n % batch_size].split(batch_size):
            if done == steps:
                return
            yield index
            done += 1


class Tent(nn.Module):
    """Entropy minimisation (Wang et al. 2021): one optimiser step on each unlabelled batch.

    Parameters
    ----------
    model : torch.nn.Module
        A classifier; copied, never changed.
    optimizer : callable, optional
        From a list of parameters to a :class:`torch.optim.Optimizer`; default SGD with ``lr`` and
        momentum 0.9.
    lr : float, default 2.5e-4
        The paper's value for ImageNet, batch 64. Small networks want more (the chapter uses 0.005
        to 0.02 for ten classes); choose it on shifts you have labels for.
    steps : int, default 1
        Updates for each batch.
    episodic : bool, default False
        Reset before each batch.
    params, batch_stats
        See :func:`configure_model`.

    Attributes
    ----------
    module : torch.nn.Module
        The adapted copy.
    n_steps_ : int
        Updates since construction (a skipped batch counts).

    Raises
    ------
    ValueError
        If there is nothing to adapt, ``lr`` is negative, or a batch has one image only.

    Examples
    --------
    >>> from icml24.test_time_entropy.networks import SmallResNet
    >>> net = SmallResNet()
    >>> adapter = Tent(net, lr=0.005)
    >>> adapter(torch.rand(32, 1, 28, 28)).shape
    torch.Size([32, 10])
    >>> adapter.n_steps_
    1
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        lr: float = 2.5e-4,
        steps: int = 1,
        episodic: bool = False,
        params: Select = "norm_affine",
        batch_stats: bool = True,
    ) -> None:
        super().__init__()
        if lr < 0:
            raise ValueError(f"lr must not be negative, got {lr}.")
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}.")
        self.module, self._parameters_ = configure_model(model, params, batch_stats)
        self.has_batch_stats = batch_stats and any(
            isinstance(layer, _BatchNorm) for layer in self.module.modules()
        )
        self.steps, self.episodic, self.lr = steps, episodic, lr
        self._make = optimizer or (lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9))
        self._source = [parameter.detach().clone() for parameter in self._parameters_]
        self._warned = False
        self.n_steps_ = 0
        self.reset()

    @property
    def adapted_parameters(self) -> list[nn.Parameter]:
        """The free parameters, in the order of the model."""
        return self._parameters_

    def reset(self) -> Self:
        """Go back to the source model: parameters, optimiser, and everything remembered."""
        with torch.no_grad():
            for parameter, source in zip(self._parameters_, self._source, strict=True):
                parameter.copy_(source)
                parameter.grad = None
        self.optimizer = self._make(self._parameters_)
        return self

    def snapshot(self) -> list[Tensor]:
        """Copy of the free parameters, for :meth:`restore`."""
        return [parameter.detach().clone() for parameter in self._parameters_]

    def restore(self, snapshot: list[Tensor]) -> Self:
        """Put a :meth:`snapshot` back; the optimiser keeps its state."""
        with torch.no_grad():
            for parameter, value in zip(self._parameters_, snapshot, strict=True):
                parameter.copy_(value)
        return self

    def loss(self, logits: Tensor) -> Tensor | None:
        """Mean entropy of the predictions; None would skip the update."""
        return softmax_entropy(logits).mean()

    def _check(self, x: Tensor) -> None:
        if x.ndim == 0 or len(x) == 0:
            raise ValueError("The batch is empty; give at least two images.")
        if not self.has_batch_stats:
            return
        if len(x) == 1:
            raise ValueError(
                "A batch of one image has no batch statistics; give 16 or more at once, or use "
                "batch_stats=False."
            )
        if len(x) < 16 and not self._warned:
            self._warned = True
            warnings.warn(
                f"Batch statistics of {len(x)} images are noisy; give 16 or more at once, or use "
                "batch_stats=False.",
                stacklevel=4,
            )

    def forward(self, x: Tensor) -> Tensor:
        """Predict, then adapt.

        Parameters
        ----------
        x : Tensor, shape (n, ...)
            A batch for the model; shuffled, since a batch of one class breaks batch statistics.

        Returns
        -------
        Tensor, shape (n, classes)
            Logits from before the (last) update, detached.
        """
        self._check(x)
        if self.episodic:
            self.reset()
        for _ in range(self.steps):
            with torch.enable_grad():
                logits = logits_of(self.module, x)
                loss = self.loss(logits)
            if loss is not None:
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.n_steps_ += 1
        return logits.detach()

    @torch.no_grad()
    def predict(self, x: Tensor, batch_size: int | None = None) -> Tensor:
        """Return logits without an update.

        Parameters
        ----------
        x : Tensor, shape (n, ...)
        batch_size : int, optional
            Predict in batches of this size, in order. The last batch reaches back to be full, so
            that batch statistics never come from a few left-over images.

        Returns
        -------
        Tensor, shape (n, classes)
        """
        n = len(x)
        if batch_size is None or n <= batch_size:
            self._check(x)
            return logits_of(self.module, x)
        starts = range(0, n - n % batch_size, batch_size)
        parts = [logits_of(self.module, x[i : i + batch_size]) for i in starts]
        if n % batch_size:
            parts.append(logits_of(self.module, x[n - batch_size :])[-(n % batch_size) :])
        return torch.cat(parts)

    def extra_repr(self) -> str:
        """Show the settings."""
        return f"lr={self.lr}, steps={self.steps}, episodic={self.episodic}"


class RPL(Tent):
    r"""Robust pseudo-labels (Rusak et al. 2022): generalised cross-entropy with one's own label.

    The loss is :math:`(1 - p_{\hat y}^q)/q`: cross-entropy as q goes to 0, bounded for q = 1.

    Parameters
    ----------
    model, **settings
        See :class:`Tent`.
    q : float, default 0.8
        In (0, 1].
    """

    def __init__(self, model: nn.Module, q: float = 0.8, **settings: Any) -> None:
        if not 0 < q <= 1:
            raise ValueError(f"q must lie in (0, 1], got {q}.")
        self.q = q
        super().__init__(model, **settings)

    def loss(self, logits: Tensor) -> Tensor | None:
        """Mean generalised cross-entropy with the predicted label."""
        top = logits.softmax(1).amax(1)
        return ((1 - top**self.q) / self.q).mean()


class ETA(Tent):
    r"""Entropy minimisation on reliable and non-redundant images (Niu et al. 2022).

    Image i is kept iff :math:`H(p_i) < E_0` and :math:`|\cos(\bar p, p_i)| < \epsilon`, with
    :math:`\bar p` a moving average of kept predictions (the second test starts with the second
    batch). The loss is the mean over kept images of :math:`e^{E_0 - H(p_i)} H(p_i)`, the weight
    held constant.

    Parameters
    ----------
    model, **settings
        See :class:`Tent`.
    e_margin : float or "auto"
        :math:`E_0` in nats; "auto" is 0.4 ln C for C classes.
    d_margin : float or "auto"
        :math:`\epsilon`; "auto" is 0.05 for 100 classes or more (where two probability vectors
        are nearly orthogonal), else 0.4.

    Attributes
    ----------
    kept_ : Tensor of bool, shape (n,)
        Which images of the last batch were kept.
    """

    def __init__(
        self,
        model: nn.Module,
        e_margin: float | Literal["auto"] = "auto",
        d_margin: float | Literal["auto"] = "auto",
        **settings: Any,
    ) -> None:
        for name, value in (("e_margin", e_margin), ("d_margin", d_margin)):
            if value != "auto" and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"{name} must be a positive number or 'auto', got {value!r}.")
        self.e_margin, self.d_margin = e_margin, d_margin
        self.kept_: Tensor | None = None
        super().__init__(model, **settings)

    def margins(self, classes: int) -> tuple[float, float]:
        """Entropy and redundancy thresholds for a number of classes."""
        energy = 0.4 * math.log(classes) if self.e_margin == "auto" else float(self.e_margin)
        redundancy = (
            (0.05 if classes >= 100 else 0.4) if self.d_margin == "auto" else float(self.d_margin)
        )
        return energy, redundancy

    def reset(self) -> Self:
        """Also forget the average prediction."""
        self._average: Tensor | None = None
        super().reset()
        return self

    def loss(self, logits: Tensor) -> Tensor | None:
        """Weighted entropy of the kept images; None if none is kept."""
        entropy = softmax_entropy(logits)
        e_margin, d_margin = self.margins(logits.shape[1])
        p = logits.detach().softmax(1)
        kept = entropy.detach() < e_margin
        if self._average is not None:
            kept &= F.cosine_similarity(self._average.unsqueeze(0), p, dim=1).abs() < d_margin
        self.kept_ = kept
        if not kept.any():
            return None
        mean = p[kept].mean(0)
        self._average = mean if self._average is None else 0.9 * self._average + 0.1 * mean
        weight = torch.exp(e_margin - entropy.detach()[kept])
        return (weight * entropy[kept]).mean()


class EATA(ETA):
    r"""ETA with a penalty against forgetting (Niu et al. 2022).

    Adds :math:`\alpha \sum_j F_j (\theta_j - \theta_j^0)^2`, with the diagonal Fisher information
    :math:`F` of the source model on a few in-distribution images. Call :meth:`fit_fisher` first.

    Parameters
    ----------
    model, **settings
        See :class:`ETA`.
    fisher_alpha : float, default 2000
        Strength of the penalty; 0 is ETA.
    """

    def __init__(self, model: nn.Module, fisher_alpha: float = 2000.0, **settings: Any) -> None:
        if fisher_alpha < 0:
            raise ValueError(f"fisher_alpha must not be negative, got {fisher_alpha}.")
        self.fisher_alpha = fisher_alpha
        self.fisher_: list[Tensor] | None = None
        super().__init__(model, **settings)

    def fit_fisher(self, x: Tensor, batch_size: int = 64) -> Self:
        """Estimate the Fisher information on unlabelled source images.

        Parameters
        ----------
        x : Tensor, shape (n, ...)
            In-distribution images, some hundreds.
        batch_size : int, default 64
            One squared gradient of the cross-entropy with the predicted label for each batch.

        Returns
        -------
        EATA
        """
        total = [torch.zeros_like(p) for p in self._parameters_]
        batches = [b for b in x.split(batch_size) if len(b) == min(batch_size, len(x))]
        for batch in batches:
            self._check(batch)
            with torch.enable_grad():
                logits = logits_of(self.module, batch)
                loss = F.cross_entropy(logits, logits.detach().argmax(1))
                gradient = torch.autograd.grad(loss, self._parameters_)
            total = [t + g**2 / len(batches) for t, g in zip(total, gradient, strict=True)]
        self.fisher_ = total
        return self

    def loss(self, logits: Tensor) -> Tensor | None:
        """ETA's loss plus the penalty."""
        if self.fisher_ is None and self.fisher_alpha > 0:
            raise RuntimeError("Call fit_fisher(source_images) before adapting with EATA.")
        loss = super().loss(logits)
        if loss is None or self.fisher_ is None:
            return loss
        pairs = zip(self.fisher_, self._parameters_, self._source, strict=True)
        return loss + self.fisher_alpha * sum((f * (p - s) ** 2).sum() for f, p, s in pairs)


class RDumb(ETA):
    """ETA that starts anew every ``reset_every`` updates (Press et al. 2023).

    Parameters
    ----------
    model, **settings
        See :class:`ETA`.
    reset_every : int, default 1000
        Updates between resets of parameters, optimiser and average prediction.
    """

    def __init__(self, model: nn.Module, reset_every: int = 1000, **settings: Any) -> None:
        if reset_every < 1:
            raise ValueError(f"reset_every must be at least 1, got {reset_every}.")
        self.reset_every = reset_every
        super().__init__(model, **settings)

    def reset(self) -> Self:
        """Also count the updates to the next reset from here."""
        self._anew = self.n_steps_
        return super().reset()

    def forward(self, x: Tensor) -> Tensor:
        """Predict, then adapt; reset first when it is due."""
        if self.n_steps_ - self._anew >= self.reset_every:
            self.reset()
        return super().forward(x)

"""The two phases of entropy minimisation, seen in the embedding, and the stop rule they suggest.

In phase one the embedded test images gather in clusters and move towards the training images; in
phase two the clusters still tighten but leave. Entropy and cluster quality improve in both phases;
only the distance to the (frozen) training embeddings turns. See section 4 of the paper; the two
distances are our choice, since the paper's code for this part is not public.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from icml24.test_time_entropy.tta import Tent, shuffled_batches, softmax_entropy
from icml24.test_time_entropy.weighted_flips import predict_logits

__all__ = [
    "FrozenTraining",
    "Stopped",
    "adapt_until_turn",
    "adaptation_trace",
    "embed",
    "frechet_distance",
    "silhouette",
    "turning_point",
]


def embed(
    model: nn.Module, x: Tensor, head: nn.Module | None = None, batch_size: int = 200
) -> tuple[Tensor, Tensor]:
    """Return embeddings and logits: the input of the last linear layer, and the output.

    Parameters
    ----------
    model : torch.nn.Module or Tent
        A classifier; it is not changed.
    x : Tensor, shape (n, ...)
    head : torch.nn.Module, optional
        The module whose input is the embedding; by default the last :class:`torch.nn.Linear`.
    batch_size : int, default 200

    Returns
    -------
    embeddings : Tensor, shape (n, d)
    logits : Tensor, shape (n, classes)

    Raises
    ------
    ValueError
        If there is no linear layer and no ``head``.

    Examples
    --------
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> [tuple(t.shape) for t in embed(net, torch.zeros(5, 1, 2, 2))]
    [(5, 3), (5, 2)]
    """
    if head is None:
        linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        if not linear:
            raise ValueError("The model has no linear layer; pass the classifying module as head.")
        head = linear[-1]
    seen: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1)))
    try:
        wrapper = model if isinstance(model, Tent) else _Plain(model)
        logits = wrapper.predict(x, batch_size)
    finally:
        handle.remove()
    rest = len(x) % batch_size
    if len(x) > batch_size and rest:
        seen[-1] = seen[-1][-rest:]
    return torch.cat(seen).detach(), logits


class _Plain:
    """A model without adaptation, with the interface of an adapter."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def predict(self, x: Tensor, batch_size: int) -> Tensor:
        return predict_logits(self.model, x, batch_size)


def silhouette(embeddings: Tensor, labels: Tensor) -> float:
    """Mean silhouette of a clustering, from -1 to 1 (one matrix of distances, no loop).

    Parameters
    ----------
    embeddings : Tensor, shape (n, d)
    labels : Tensor of int64, shape (n,)
        Cluster of each point, here the predicted class.

    Returns
    -------
    float
        NaN if there are fewer than two clusters, or every point is its own.

    Examples
    --------
    >>> points = torch.tensor([[0.0], [0.1], [5.0], [5.1]])
    >>> round(silhouette(points, torch.tensor([0, 0, 1, 1])), 3)
    0.98
    """
    _, cluster = labels.unique(return_inverse=True)
    sizes = cluster.bincount()
    if not 2 <= len(sizes) < len(labels):
        return float("nan")
    x = embeddings.double()
    onehot = torch.nn.functional.one_hot(cluster).double()
    sums = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") @ onehot
    own = sums.gather(1, cluster.unsqueeze(1)).squeeze(1)
    a = own / (sizes[cluster] - 1).clamp(min=1)
    b = (sums / sizes).masked_fill(onehot.bool(), torch.inf).amin(1)
    score = (b - a) / torch.maximum(a, b).clamp(min=1e-300)
    return float(torch.where(sizes[cluster] > 1, score, 0.0).mean())


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.double()
    return x.mean(0), torch.cov(x.T).reshape(x.shape[1], x.shape[1])


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def frechet_distance(x: Tensor, y: Tensor) -> float:
    r"""Squared Frechet distance of two point clouds taken as Gaussian.

    :math:`|\mu_x - \mu_y|^2 + \mathrm{tr}(C_x + C_y - 2 (C_x C_y)^{1/2})`.

    Parameters
    ----------
    x, y : Tensor, shapes (n, d) and (m, d)

    Returns
    -------
    float

    Examples
    --------
    >>> cloud = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    >>> round(frechet_distance(cloud, cloud + torch.tensor([3.0, 4.0, 0.0])), 6)
    25.0
    """
    return _frechet(_moments(x), _moments(y))


def _frechet(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> float:
    (m1, c1), (m2, c2) = first, second
    root = _root(c1)
    cross = torch.linalg.eigvalsh(root @ c2 @ root).clamp(min=0).sqrt().sum()
    value = (m1 - m2).square().sum() + c1.trace() + c2.trace() - 2 * cross
    return float(value.clamp(min=0))


class FrozenTraining:
    """What the distances need to know of the training embeddings, frozen at step 0.

    Parameters
    ----------
    embeddings : Tensor, shape (n, d)
        Of training images, by the model before adaptation.
    labels : Tensor of int64, shape (n,)

    Attributes
    ----------
    means : Tensor, shape (classes present, d)
    spread : float
        Mean distance of a training embedding to the mean of its class.
    """

    def __init__(self, embeddings: Tensor, labels: Tensor) -> None:
        if len(embeddings) != len(labels) or len(labels) < 2:
            raise ValueError(
                f"Give one label for each of at least two training images, got {len(embeddings)} "
                f"embeddings and {len(labels)} labels."
            )
        x = embeddings.double()
        _, cluster = labels.to(x.device).unique(return_inverse=True)
        onehot = torch.nn.functional.one_hot(cluster).double()
        self.means = (onehot.T @ x) / onehot.sum(0).unsqueeze(1)
        self.spread = float((x - self.means[cluster]).norm(dim=1).mean())
        self._cloud = _moments(x)

    def nearest(self, embeddings: Tensor) -> float:
        """Mean distance to the nearest class mean, in units of :attr:`spread`; (b) in the text."""
        return float(torch.cdist(embeddings.double(), self.means).amin(1).mean() / self.spread)

    def frechet(self, embeddings: Tensor) -> float:
        """Squared Frechet distance to the training cloud; (c) in the text."""
        return _frechet(_moments(embeddings), self._cloud)


def _marks(marks: Iterable[int]) -> list[int]:
    found = [int(mark) for mark in marks]
    if not found or found[0] < 0 or any(a >= b for a, b in pairwise(found)):
        raise ValueError(f"marks must be increasing step counts from 0 on, got {found}.")
    return found


def _until(adapter: Tent, stream: Iterator[Tensor], done: int, mark: int) -> None:
    for step in range(done, mark):
        batch = next(stream, None)
        if batch is None:
            raise ValueError(f"The stream ended after {step} batches, before the mark at {mark}.")
        adapter(batch)


def _stream(stream: Tensor | Iterable[Tensor], last: int) -> Iterator[Tensor]:
    if isinstance(stream, Tensor):
        return shuffled_batches(stream, min(64, len(stream)), last)
    return iter(stream)


def adaptation_trace(
    adapter: Tent,
    stream: Tensor | Iterable[Tensor],
    probe: Tensor,
    train_probe: tuple[Tensor, Tensor],
    marks: Sequence[int],
    y: Tensor | None = None,
    keep_embeddings: bool = False,
    batch_size: int = 200,
) -> dict[str, np.ndarray]:
    """Adapt, and measure at some steps what happens to a fixed set of probe images.

    Parameters
    ----------
    adapter : Tent
        Is adapted.
    stream : Tensor or iterable of Tensor
        Unlabelled images (then: shuffled passes in batches of 64), or the batches themselves.
    probe : Tensor, shape (n, ...)
        Images on which all is measured; the model never adapts to a measurement.
    train_probe : (Tensor, Tensor)
        Some training images and their labels; embedded once, at the first mark.
    marks : sequence of int
        Increasing numbers of updates at which to measure; 0 is before the first.
    y : Tensor, shape (n,), optional
        Labels of the probe, for the accuracy.
    keep_embeddings : bool, default False
        Also return the embeddings of the probe at each mark.
    batch_size : int, default 200
        Of the measurements.

    Returns
    -------
    dict of numpy.ndarray, each of length ``len(marks)``
        ``step``; ``entropy`` (mean, nats); ``silhouette`` (by predicted class); ``dist_frozen``
        (mean distance to the nearest class mean of the frozen training embeddings, in units of
        their spread); ``frechet_frozen``; ``frechet_moving`` (training images embedded by the
        adapted model); ``train_accuracy`` (forgetting); ``n_classes`` (predicted);
        ``predictions`` (len(marks), n); with ``y`` also ``accuracy``.

    Raises
    ------
    ValueError
        If the marks do not increase, or the stream ends too soon.
    """
    steps = _marks(marks)
    batches = _stream(stream, steps[-1])
    train_x, train_y = train_probe
    frozen: FrozenTraining | None = None
    rows: list[dict[str, float | np.ndarray]] = []
    done = 0
    for mark in steps:
        _until(adapter, batches, done, mark)
        done = mark
        z, logits = embed(adapter, probe, batch_size=batch_size)
        z_train, logits_train = embed(adapter, train_x, batch_size=batch_size)
        frozen = frozen or FrozenTraining(z_train, train_y)
        predicted = logits.argmax(1)
        row: dict[str, float | np.ndarray] = {
            "step": mark,
            "entropy": float(softmax_entropy(logits).mean()),
            "silhouette": silhouette(z, predicted),
            "dist_frozen": frozen.nearest(z),
            "frechet_frozen": frozen.frechet(z),
            "frechet_moving": frechet_distance(z, z_train),
            "train_accuracy": float(
                (logits_train.argmax(1) == train_y.to(logits.device)).float().mean()
            ),
            "n_classes": len(predicted.unique()),
            "predictions": predicted.numpy(force=True),
        }
        if y is not None:
            row["accuracy"] = float((predicted == y.to(predicted.device)).float().mean())
        if keep_embeddings:
            row["embeddings"] = z.numpy(force=True)
        rows.append(row)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


@dataclass(frozen=True)
class Stopped:
    """Where :func:`adapt_until_turn` stopped.

    Parameters
    ----------
    step : int
        The mark with the smallest distance; the adapter is left in the state it had there.
    steps, distances : numpy.ndarray
        All marks visited and the Frechet distance at each.
    turned : bool
        False if the distance was still falling when the marks ended.
    """

    step: int
    steps: np.ndarray
    distances: np.ndarray
    turned: bool


def adapt_until_turn(
    adapter: Tent,
    stream: Tensor | Iterable[Tensor],
    probe: Tensor,
    train_probe: tuple[Tensor, Tensor],
    marks: Sequence[int] = (0, 3, 6, 12, 25, 50, 100, 200, 400, 800),
    patience: int = 2,
    batch_size: int = 200,
) -> Stopped:
    """Adapt without labels until the test embeddings turn away from the training embeddings.

    The squared Frechet distance between the embeddings of the probe and the frozen embeddings of
    some training images is measured at each mark; after ``patience`` marks without a new minimum
    adaptation stops and the parameters of the minimum are put back.

    Parameters
    ----------
    adapter, stream, probe, train_probe, marks, batch_size
        See :func:`adaptation_trace`.
    patience : int, default 2

    Returns
    -------
    Stopped
    """
    if patience < 1:
        raise ValueError(f"patience must be at least 1, got {patience}.")
    steps = _marks(marks)
    batches = _stream(stream, steps[-1])
    frozen = FrozenTraining(
        embed(adapter, train_probe[0], batch_size=batch_size)[0], train_probe[1]
    )
    best, where, distances, done = adapter.snapshot(), 0, [], 0
    for i, mark in enumerate(steps):
        _until(adapter, batches, done, mark)
        done = mark
        distances.append(frozen.frechet(embed(adapter, probe, batch_size=batch_size)[0]))
        where = turning_point(distances, patience)
        if where == i:
            best = adapter.snapshot()
        elif i - where >= patience:
            break
    adapter.restore(best)
    visited = np.array(steps[: len(distances)])
    turned = len(distances) - 1 - where >= patience
    return Stopped(steps[where], visited, np.array(distances), turned)


def turning_point(distances: Sequence[float] | np.ndarray, patience: int = 2) -> int:
    """Index of the smallest distance before ``patience`` entries in a row set no new minimum.

    Parameters
    ----------
    distances : sequence of float
    patience : int, default 2

    Returns
    -------
    int

    Examples
    --------
    >>> turning_point([3.0, 2.0, 2.5, 2.6, 1.0])
    1
    """
    where = 0
    for i, distance in enumerate(distances):
        if distance < distances[where]:
            where = i
        elif i - where >= patience:
            break
    return where

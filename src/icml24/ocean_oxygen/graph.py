"""The graph of one year: proximity neighbours in and across layers, and information hubs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from icml24.ocean_oxygen.grid import EARTH_RADIUS_KM, Nodes, unit_vectors

__all__ = ["Layer", "OceanGraph"]

Array = np.ndarray[Any, Any]

#: Kinds of edges, in the order of their codes.
KINDS = ("proximity", "vertical", "hub")


@dataclass(frozen=True)
class Layer:
    """What one layer of message passing needs.

    Parameters
    ----------
    edge_index : torch.Tensor, shape (2, E)
        Source and target of each edge.
    edge_attr : torch.Tensor, shape (E, 5)
        Distance, eastward, northward and downward part, and whether the source is a hub.
    edge_weight : torch.Tensor, shape (E,)
        Symmetric normalisation, and that of a node's own state: used by the GCN peer only.
    self_weight : torch.Tensor, shape (n_out,)
    n_out : int
        The layer's result is wanted for the first ``n_out`` nodes.
    """

    edge_index: Tensor
    edge_attr: Tensor
    edge_weight: Tensor
    self_weight: Tensor
    n_out: int


def _knn(place: Array, among: Array, k: int, radius_km: float = np.inf) -> tuple[Array, Array]:
    """Pairs (position in ``among``, position in ``place``) of nearest neighbours on the sphere."""
    k = min(k, len(among))
    if k == 0 or len(place) == 0:
        return np.zeros(0, int), np.zeros(0, int)
    limit = 2 * np.sin(min(radius_km / EARTH_RADIUS_KM, np.pi) / 2) * (1 + 1e-9)
    distance, found = cKDTree(among).query(place, k=k, distance_upper_bound=limit)
    distance, found = distance.reshape(len(place), k), found.reshape(len(place), k)
    target, column = np.nonzero(np.isfinite(distance))
    return found[target, column], target


def edge_features(nodes: Nodes, edge_index: Array, is_hub: Array) -> Array:
    """Great-circle distance, its direction, the step in depth, and the hub flag, shape (E, 5)."""
    source, target = edge_index
    place = unit_vectors(nodes.lat, nodes.lon)
    half_chord = np.linalg.norm(place[source] - place[target], axis=1) / 2
    distance = 2 * EARTH_RADIUS_KM * np.arcsin(np.clip(half_chord, 0, 1))
    east = np.radians((nodes.lon[source] - nodes.lon[target] + 180) % 360 - 180)
    east *= np.cos(np.radians((nodes.lat[source] + nodes.lat[target]) / 2)) * EARTH_RADIUS_KM
    north = np.radians(nodes.lat[source] - nodes.lat[target]) * EARTH_RADIUS_KM
    down = np.log1p(nodes.depth[source] / 100) - np.log1p(nodes.depth[target] / 100)
    return np.stack([distance / 1000, east / 1000, north / 1000, down, is_hub], axis=-1)


class OceanGraph:
    """Directed edges between the wet cells of a grid; every edge runs from a source to a target.

    Parameters
    ----------
    nodes : Nodes
    edge_index : numpy.ndarray of int, shape (2, E)
    edge_kind : numpy.ndarray of int, shape (E,)
        Positions in ``KINDS``.

    Attributes
    ----------
    full : Layer
        The whole graph, to be used in every layer.
    edge_kind, edge_index : numpy.ndarray

    Examples
    --------
    >>> from icml24.ocean_oxygen.grid import ocean_grid
    >>> graph = OceanGraph.build(Nodes.of(ocean_grid(12, levels=3)), k=6)
    >>> len(graph), graph.full.edge_attr.shape[1]
    (935, 5)
    """

    def __init__(self, nodes: Nodes, edge_index: Array, edge_kind: Array) -> None:
        self.nodes, self.edge_index, self.edge_kind = nodes, edge_index, edge_kind
        attr = edge_features(nodes, edge_index, edge_kind == 2)
        degree = np.bincount(edge_index[1], minlength=len(nodes)) + 1.0
        weight = 1 / np.sqrt(degree[edge_index[0]] * degree[edge_index[1]])
        self.full = Layer(
            torch.as_tensor(edge_index),
            torch.as_tensor(attr, dtype=torch.float32),
            torch.as_tensor(weight, dtype=torch.float32),
            torch.as_tensor(1 / degree, dtype=torch.float32),
            len(nodes),
        )

    def __len__(self) -> int:
        return len(self.nodes)

    @classmethod
    def build(
        cls,
        nodes: Nodes,
        counts: Array | None = None,
        *,
        k: int = 6,
        vertical: int = 1,
        hubs: int = 4,
        hub_quantile: float = 0.9,
        hub_radius_km: float = 3000.0,
    ) -> OceanGraph:
        """Connect the nodes of a grid.

        Parameters
        ----------
        nodes : Nodes
        counts : numpy.ndarray, shape (N,), optional
            Training measurements of each node over all years; without them there are no hubs.
        k : int, default 6
            Nearest cells in the same layer.
        vertical : int, default 1
            Nearest cells in the layer above, and as many in the layer below.
        hubs : int, default 4
            Nearest information hubs in the same layer.
        hub_quantile : float, default 0.9
            A hub has more measurements than this share of its layer's nodes.
        hub_radius_km : float, default 3000
            Hubs farther away than this are not connected.

        Returns
        -------
        OceanGraph
        """
        if k < 1 or vertical < 0 or hubs < 0:
            raise ValueError("k must be at least 1, vertical and hubs at least 0.")
        if not 0 <= hub_quantile < 1 or hub_radius_km <= 0:
            raise ValueError("hub_quantile must lie in [0, 1) and hub_radius_km be positive.")
        if counts is not None and np.shape(counts) != (len(nodes),):
            raise ValueError(
                f"counts must hold one number for each of the {len(nodes)} nodes, "
                f"got shape {np.shape(counts)}."
            )
        place = unit_vectors(nodes.lat, nodes.lon)
        layers = [np.flatnonzero(nodes.level == i) for i in range(nodes.wet.shape[0])]
        pairs: list[tuple[Array, Array, int]] = []
        for i, here in enumerate(layers):
            if len(here) == 0:
                continue
            source, target = _knn(place[here], place[here], k + 1)
            pairs.append((here[source], here[target], 0))
            for j in (i - 1, i + 1):
                if 0 <= j < len(layers) and vertical:
                    source, target = _knn(place[here], place[layers[j]], vertical)
                    pairs.append((layers[j][source], here[target], 1))
            if counts is not None and hubs:
                bar = np.quantile(counts[here], hub_quantile)
                rich = here[(counts[here] > bar)]
                source, target = _knn(place[here], place[rich], hubs + 1, hub_radius_km)
                pairs.append((rich[source], here[target], 2))
        source, target, kind = (
            np.concatenate([np.broadcast_to(pair[part], pair[0].shape) for pair in pairs])
            for part in range(3)
        )
        return cls(nodes, *_tidy(source, target, kind, hubs))

    def data(self) -> Any:
        """Return the graph as torch_geometric's ``Data``, with places on the unit sphere."""
        from icml24.ocean_oxygen.geometric import Data

        place = unit_vectors(self.nodes.lat, self.nodes.lon)
        return Data(
            edge_index=self.full.edge_index,
            edge_attr=self.full.edge_attr,
            edge_type=torch.as_tensor(self.edge_kind),
            pos=torch.as_tensor(place, dtype=torch.float32),
            num_nodes=len(self),
        )

    def around(self, targets: Array, n_layers: int) -> tuple[Array, list[Layer]]:
        """Cut out just what a network of ``n_layers`` layers needs to answer at some nodes.

        The nodes are numbered so that the targets come first, then their neighbours, and so on; the
        last layer then computes the targets only, the one before it the targets and their
        neighbours. The answers are those of the whole graph.

        Parameters
        ----------
        targets : numpy.ndarray of int
            Different nodes.
        n_layers : int

        Returns
        -------
        nodes : numpy.ndarray of int
            The nodes that take part, targets first.
        layers : list of Layer
            In the order in which they are applied.
        """
        source, target = self.full.edge_index
        number = torch.full((len(self),), -1)
        order = torch.as_tensor(np.asarray(targets))
        number[order] = torch.arange(len(order))
        cuts = []
        for _ in range(n_layers):
            edges = torch.nonzero(number[target] >= 0).squeeze(1)
            cuts.append((edges, len(order)))
            new = torch.unique(source[edges])
            new = new[number[new] < 0]
            number[new] = torch.arange(len(order), len(order) + len(new))
            order = torch.cat([order, new])
        layers = [
            Layer(
                number[self.full.edge_index[:, edges]],
                self.full.edge_attr[edges],
                self.full.edge_weight[edges],
                self.full.self_weight[order[:n_out]],
                n_out,
            )
            for edges, n_out in reversed(cuts)
        ]
        return order.numpy(), layers


def _tidy(source: Array, target: Array, kind: Array, hubs: int) -> tuple[Array, Array]:
    """Drop loops, keep each edge once (a proximity edge wins), and at most ``hubs`` hub edges."""
    keep = source != target
    source, target, kind = source[keep], target[keep], kind[keep]
    first = np.unique(np.stack([target, source]), axis=1, return_index=True)[1]
    first.sort()
    source, target, kind = source[first], target[first], kind[first]
    is_hub = np.flatnonzero(kind == 2)
    by_target = is_hub[np.argsort(target[is_hub], kind="stable")]
    start = np.searchsorted(target[by_target], target[by_target])
    rank = np.arange(len(by_target)) - start
    keep = np.ones(len(source), bool)
    keep[by_target[rank >= hubs]] = False
    order = np.argsort(target[keep], kind="stable")
    return np.stack([source[keep], target[keep]])[:, order].astype(np.int64), kind[keep][order]

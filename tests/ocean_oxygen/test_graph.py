"""Edges: by hand, across the date line, hubs, and the parts of the graph that a node can see."""

import numpy as np
import pytest
import torch

import icml24.ocean_oxygen as oo
from icml24.ocean_oxygen.grid import EARTH_RADIUS_KM, unit_vectors


@pytest.fixture(scope="module")
def nodes():
    return oo.Nodes.of(oo.ocean_grid(12, levels=4))


@pytest.fixture(scope="module")
def counts(nodes):
    return np.random.default_rng(0).poisson(2, len(nodes))


@pytest.fixture(scope="module")
def graph(nodes, counts):
    return oo.OceanGraph.build(nodes, counts)


def brute_force(nodes, k):
    """The k nearest cells of each cell's layer, the plain way."""
    place, found = unit_vectors(nodes.lat, nodes.lon), []
    for v in range(len(nodes)):
        same = np.flatnonzero((nodes.level == nodes.level[v]) & (np.arange(len(nodes)) != v))
        angle = np.arccos(np.clip(place[same] @ place[v], -1, 1))
        found.append(np.sort(angle)[:k])
    return np.array(found)


def test_proximity_is_that_of_brute_force(nodes, graph):
    source, target = graph.edge_index[:, graph.edge_kind == 0]
    assert (np.bincount(target, minlength=len(nodes)) == 6).all()
    distance = graph.full.edge_attr[graph.edge_kind == 0, 0].numpy() * 1000
    by_node = np.sort(distance.reshape(len(nodes), 6), axis=1)
    np.testing.assert_allclose(by_node, EARTH_RADIUS_KM * brute_force(nodes, 6), rtol=1e-4)
    assert (nodes.level[source] == nodes.level[target]).all()


def test_neighbours_across_the_date_line():
    nodes = oo.Nodes.of(oo.ocean_grid(6, levels=1))
    graph = oo.OceanGraph.build(nodes, k=8)
    v = int(np.flatnonzero((nodes.lat == 3) & (nodes.lon == 177))[0])
    sources = graph.edge_index[0, graph.edge_index[1] == v]
    assert -177.0 in nodes.lon[sources]
    edge = np.flatnonzero((graph.edge_index[1] == v) & (nodes.lon[graph.edge_index[0]] == -177))
    same_row = next(e for e in edge if nodes.lat[graph.edge_index[0, e]] == 3)
    distance, east, north, down, hub = graph.full.edge_attr[same_row].tolist()
    expected = EARTH_RADIUS_KM * np.radians(6) * np.cos(np.radians(3)) / 1000
    assert distance == pytest.approx(expected, rel=1e-3)
    assert east == pytest.approx(expected, rel=1e-3)  # eastward, though the longitude falls
    assert (north, down, hub) == (0, 0, 0)


def test_vertical_edges_join_adjacent_layers(nodes, graph):
    source, target = graph.edge_index[:, graph.edge_kind == 1]
    assert (np.abs(nodes.level[source] - nodes.level[target]) == 1).all()
    inner = np.isin(nodes.level, [1, 2])
    assert (np.bincount(target, minlength=len(nodes))[inner] == 2).all()
    down = graph.full.edge_attr[graph.edge_kind == 1, 3].numpy()
    assert (np.sign(down) == np.sign(nodes.depth[source] - nodes.depth[target])).all()


def test_hubs_are_rich_near_and_few(nodes, counts, graph):
    source, target = graph.edge_index[:, graph.edge_kind == 2]
    assert len(source)
    for level in range(4):
        rich = counts[source[nodes.level[source] == level]]
        assert (rich > np.quantile(counts[nodes.level == level], 0.9)).all()
    assert np.bincount(target).max() <= 4
    hub = graph.full.edge_attr[graph.edge_kind == 2]
    assert hub[:, 0].max() <= 3.0001
    assert (hub[:, 4] == 1).all()
    assert (graph.full.edge_attr[graph.edge_kind != 2, 4] == 0).all()
    assert (oo.OceanGraph.build(nodes).edge_kind != 2).all()


def test_no_loops_and_no_double_edges(graph):
    source, target = graph.edge_index
    assert (source != target).all()
    assert len(np.unique(graph.edge_index, axis=1).T) == len(source)
    assert (np.diff(target) >= 0).all()


@pytest.mark.parametrize("n_layers", [0, 1, 2, 3])
def test_around_reaches_exactly_as_far_as_needed(graph, n_layers):
    targets = np.array([700, 5, 301])
    nodes, layers = graph.around(targets, n_layers)
    assert nodes[:3].tolist() == targets.tolist()
    reached = set(targets.tolist())
    for _ in range(n_layers):
        hit = np.isin(graph.edge_index[1], list(reached))
        reached |= set(graph.edge_index[0, hit].tolist())
    assert set(nodes.tolist()) == reached
    assert len(layers) == n_layers
    if n_layers:
        assert layers[-1].n_out == 3
        last = torch.as_tensor(nodes)[layers[-1].edge_index]
        wanted = graph.edge_index[:, np.isin(graph.edge_index[1], targets)]
        assert set(zip(*last.tolist(), strict=True)) == set(zip(*wanted.tolist(), strict=True))


def test_as_torch_geometric_data(graph):
    data = graph.data()
    assert data.validate()
    assert data.num_nodes == len(graph)
    assert data.edge_attr.shape == (data.num_edges, 5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"k": 0}, "at least 1"),
        ({"hub_quantile": 1.0}, "hub_quantile"),
        ({"counts": np.ones(3)}, "one number for each"),
    ],
)
def test_bad_settings(nodes, options, match):
    with pytest.raises(ValueError, match=match):
        oo.OceanGraph.build(nodes, **options)

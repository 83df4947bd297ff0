"""Speed of building the graph, of the hyper-convolution, and of training as the nodes grow."""

import numpy as np
import pytest
import torch

import icml24.ocean_oxygen as oo
from icml24.ocean_oxygen.grid import unit_vectors


def neighbours_one_by_one(nodes, k):
    """The k nearest cells of the same layer, with all distances of each node."""
    place, found = unit_vectors(nodes.lat, nodes.lon), []
    for v in range(len(nodes)):
        same = np.flatnonzero(nodes.level == nodes.level[v])
        near = place[same] @ place[v]
        found.append(same[np.argsort(-near)[1 : k + 1]])
    return np.array(found)


@pytest.mark.benchmark(group="six nearest cells of 8,298 nodes")
@pytest.mark.parametrize("way", ["k-d tree, whole graph with hubs", "one node at a time"])
def test_graph(benchmark, way):
    nodes = oo.Nodes.of(oo.ocean_grid(6))
    counts = np.random.default_rng(0).poisson(3, len(nodes))
    if way == "one node at a time":
        found = benchmark.pedantic(lambda: neighbours_one_by_one(nodes, 6), rounds=1)
        assert found.shape == (len(nodes), 6)
        return
    graph = benchmark.pedantic(lambda: oo.OceanGraph.build(nodes, counts), rounds=3)
    assert (np.bincount(graph.edge_index[1, graph.edge_kind == 0]) == 6).all()


@pytest.mark.benchmark(group="zone weights: 8,298 nodes, width 64, forward and backward")
@pytest.mark.parametrize("way", ["bank of matrices", "one matrix for each node"])
def test_hyper_network(benchmark, way):
    g = torch.Generator().manual_seed(0)
    conv = oo.ZoneHyperConv(64, 64, edge_dim=5, meta_dim=7)
    z, meta = (torch.randn(8298, n, generator=g) for n in (64, 7))
    transform = {
        "bank of matrices": conv.transform,
        "one matrix for each node": lambda z, m: oo.explicit_transform(conv, z, m),
    }[way]
    out = benchmark.pedantic(lambda: _with_backward(transform, z, meta), rounds=3, warmup_rounds=1)
    assert out.shape == (8298, 64)


def _with_backward(transform, z, meta):
    out = transform(z, meta)
    out.square().mean().backward()
    return out


@pytest.mark.benchmark(group="forward pass of the whole graph (divide by the nodes)")
@pytest.mark.parametrize(("step", "levels"), [(12, 8), (6, 8), (4, 12)])
def test_nodes_per_second(benchmark, step, levels):
    """From 2,267 to 28,480 nodes."""
    nodes = oo.Nodes.of(oo.ocean_grid(step, levels))
    graph = oo.OceanGraph.build(nodes, np.random.default_rng(0).poisson(3, len(nodes)))
    net, n = oo.OxyGenerator(30, 5, 7), len(nodes)
    g = torch.Generator().manual_seed(0)
    x, meta = torch.randn(n, 30, generator=g), torch.randn(n, 7, generator=g)
    there = (torch.rand(n, 11, generator=g) < 0.02).float()
    out = benchmark.pedantic(
        lambda: net(x, there, there, meta, [graph.full] * 2), rounds=3, warmup_rounds=1
    )
    benchmark.extra_info["nodes"] = n
    assert out.shape == (n,)


@pytest.mark.benchmark(group="training step: 200 measurements of one year")
@pytest.mark.parametrize("way", ["what they can see", "the whole graph"])
def test_training_step(benchmark, way):
    ds = oo.make_ocean(0, years=(1985, 1995))
    model = oo.Reconstructor(steps=1).fit(ds)
    t, v = next(model._whole_years(np.random.default_rng(0)))

    def whole():
        everything = model.network_(*model._inputs(t), model._layers())
        return everything[torch.from_numpy(v)]

    answer = {"what they can see": lambda: model._at(t, v), "the whole graph": whole}[way]
    benchmark.pedantic(lambda: answer().square().mean().backward(), rounds=3, warmup_rounds=1)

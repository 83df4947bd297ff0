"""The network: windows, the chemistry term, and parts of the graph that give the whole answer."""

from typing import get_args

import numpy as np
import pytest
import torch

import icml24.ocean_oxygen as oo
from icml24.ocean_oxygen.geometric import GCNConv
from icml24.ocean_oxygen.model import Conv, WindowEncoder

CONVS = get_args(Conv)


@pytest.fixture(scope="module")
def graph():
    nodes = oo.Nodes.of(oo.ocean_grid(12, levels=2))
    return oo.OceanGraph.build(nodes, np.random.default_rng(0).poisson(2, len(nodes)))


def inputs(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    observed = (torch.rand(n, 11, generator=g) < 0.05).float()
    window = torch.randn(n, 11, generator=g) * observed
    return torch.randn(n, 6, generator=g), window, observed, torch.randn(n, 3, generator=g)


def network(conv, **options):
    net = oo.OxyGenerator(6, 5, 3, hidden_channels=8, conv=conv, **options)
    g = torch.Generator().manual_seed(3)
    for p in net.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=g)
    return net


def test_empty_windows_share_one_code():
    encoder = WindowEncoder(4)
    _, window, observed, _ = inputs(40)
    codes = encoder(window, observed)
    every = encoder.lstm(torch.stack([window, observed], dim=-1))[0][:, 5]
    torch.testing.assert_close(codes, every)
    empty = ~observed.any(1)
    assert 0 < empty.sum() < 40
    torch.testing.assert_close(codes[empty], codes[empty][:1].expand(int(empty.sum()), -1))
    nothing = torch.zeros(3, 11)
    assert encoder(nothing, nothing).shape == (3, 8)


@pytest.mark.parametrize("conv", CONVS)
def test_a_part_of_the_graph_gives_the_whole_answer(graph, conv):
    net, x = network(conv), inputs(len(graph))
    whole = net(*x, [graph.full] * 2)
    targets = np.array([3, 400, 17])
    nodes, layers = graph.around(targets, 0 if conv == "none" else 2)
    torch.testing.assert_close(net(*(part[nodes] for part in x), layers), whole[targets])


@pytest.mark.parametrize("conv", CONVS)
def test_a_node_sees_its_neighbours_and_no_farther(graph, conv):
    net, x = network(conv, stabilise=False), inputs(len(graph))
    nodes, _ = graph.around(np.array([3]), 0 if conv == "none" else 2)
    far = np.setdiff1d(np.arange(len(graph)), nodes)
    moved = [part.clone() for part in x]
    moved[0][far] += 1
    before, after = (net(*p, [graph.full] * 2)[3] for p in (x, moved))
    assert before == after
    if conv != "none":
        moved[0][nodes[1:]] += 1
        assert net(*moved, [graph.full] * 2)[3] != before


def test_switches_change_what_they_say(graph):
    x = inputs(len(graph))
    other = [x[0], -x[1], x[2], x[3]]
    for temporal in (True, False):
        net = network("zone", temporal=temporal)
        same = torch.equal(net(*x, [graph.full] * 2), net(*other, [graph.full] * 2))
        assert same != temporal
    sizes = [
        sum(p.numel() for p in network("zone", lstm_layers=n).window.parameters()) for n in (1, 2)
    ]
    assert sizes[0] < sizes[1]
    assert network("zone", stabilise=False).skip is None
    elsewhere = [*x[:3], x[3] + 1]
    for conv in ("zone", "plain"):
        net = network(conv)
        same = torch.equal(net(*x, [graph.full] * 2), net(*elsewhere, [graph.full] * 2))
        assert same == (conv == "plain")


def test_gcn_is_torch_geometrics(graph):
    """Our normalisation on parts of the graph is GCNConv's own on the whole of it."""
    net = network("gcn", num_layers=1, stabilise=False)
    z = torch.randn(len(graph), 16)
    reference = GCNConv(16, 16)
    reference.load_state_dict(net.convs[0].state_dict())
    ours = net._pass(net.convs[0], z, graph.full, None)
    theirs = torch.relu(reference(z, graph.full.edge_index))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_seed_leaves_the_global_state_alone():
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    a, b = network("zone", seed=1), network("zone", seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    c = network("zone", seed=2)
    assert not torch.equal(a.convs[0].theta, c.convs[0].theta)


def test_chemistry_term_by_hand():
    x = torch.tensor([[1.0, 0.0], [2.0, 5.0], [4.0, 1.0]], requires_grad=True)
    all_known = torch.ones(3, 1, dtype=torch.bool)
    linear = oo.gradient_variance(7 * x[:, 0] + x[:, 1] ** 2, x, [0], all_known)
    assert linear == 0
    square = oo.gradient_variance(3 * x[:, 0] ** 2 / 2, x, [0], all_known)
    assert square.item() == pytest.approx(9 * np.var([1, 2, 4]), rel=1e-6)
    some = torch.tensor([[True], [False], [True]])
    part = oo.gradient_variance(3 * x[:, 0] ** 2 / 2, x, [0], some)
    assert part.item() == pytest.approx(9 * np.var([1, 4]), rel=1e-6)
    one = torch.tensor([[True], [False], [False]])
    assert oo.gradient_variance(x[:, 0] ** 2, x, [0], one) == 0
    with pytest.raises(ValueError, match="require gradients"):
        oo.gradient_variance(x[:, 0], x.detach(), [0], all_known)


def test_chemistry_term_mixes_neighbours():
    """The gradient of the sum is a column sum of the Jacobian: node 0 also acts on node 1."""
    x = torch.tensor([[1.0], [2.0]], requires_grad=True)
    y = torch.stack([x[0, 0], x[1, 0] + 4 * x[0, 0]])
    value = oo.gradient_variance(y, x, [0], torch.ones(2, 1, dtype=torch.bool))
    assert value.item() == pytest.approx(np.var([5, 1]))


def test_bad_settings(graph):
    with pytest.raises(ValueError, match="conv must be one of"):
        network("transformer")
    with pytest.raises(ValueError, match="even"):
        oo.OxyGenerator(6, 5, 3, hidden_channels=7)
    with pytest.raises(ValueError, match="2 layers, got 1"):
        network("zone")(*inputs(len(graph)), [graph.full])

"""Zoning-varying message passing: by hand, its limits, its symmetries."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import icml24.ocean_oxygen as oo
from icml24.ocean_oxygen.geometric import SAGEConv

EDGES = torch.tensor([[0, 1, 2, 0, 3], [1, 0, 0, 2, 2]])  # source, target; nothing enters node 3


def random_conv(d=5, o=4, meta=3, seed=0, **options):
    g = torch.Generator().manual_seed(seed)
    conv = oo.ZoneHyperConv(d, o, edge_dim=2, meta_dim=meta, **options).double()
    for p in conv.parameters():
        p.data = torch.randn(p.shape, generator=g, dtype=torch.float64)
    return conv, g


def test_by_hand_on_four_nodes():
    """D = 1: alpha = 2 m + 1, beta = m, Theta = 3, so u = 3 (2 m + 1) z + m."""
    conv = oo.ZoneHyperConv(1, 1, edge_dim=1, meta_dim=1)
    with torch.no_grad():
        conv.theta.fill_(3.0)
        conv.alpha_weight.fill_(2.0)
        conv.beta_weight.fill_(1.0)
        conv.edge.weight.fill_(1.0)
    z = torch.tensor([[1.0], [2.0], [0.0], [-1.0]])
    meta = torch.tensor([[0.0], [1.0], [2.0], [0.0]])
    # u = 3, 19, 2, -3
    attr = torch.log(
        torch.tensor([[1.0], [1.0], [3.0], [1.0], [1.0]])
    )  # weights 1/4 and 3/4 into 0
    out = conv(z, EDGES, attr, meta).detach()
    expected = [3 + (19 + 3 * 2) / 4, 19 + 3, 2 + (3 - 3) / 2, 0.0]  # the last: ReLU(-3)
    np.testing.assert_allclose(out.squeeze().numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("discrete", [False, True])
def test_factorised_is_explicit(discrete):
    conv, g = random_conv(discrete=discrete)
    z, meta = (torch.randn(7, n, generator=g, dtype=torch.float64) for n in (5, 3))
    torch.testing.assert_close(conv.transform(z, meta), oo.explicit_transform(conv, z, meta))


def test_start_is_the_plain_layer():
    """alpha is the identity at the start, whatever the zone."""
    torch.manual_seed(0)
    zoned = oo.ZoneHyperConv(5, 4, 2, 3)
    plain = oo.ZoneHyperConv(5, 4, 2, 3, zoned=False)
    plain.theta.data = zoned.theta.data.clone()
    z, meta = torch.randn(6, 5), torch.randn(6, 3)
    torch.testing.assert_close(zoned.transform(z, meta), plain.transform(z))
    area = oo.ZoneHyperConv(5, 4, 2, 3, discrete=True)
    area.theta.data = zoned.theta.data.clone()
    torch.testing.assert_close(area.transform(z, torch.eye(3).repeat(2, 1)), plain.transform(z))


def test_equal_zones_are_plain_message_passing():
    """With one zone code for all nodes there is a plain layer that does the same."""
    conv, g = random_conv(meta=2)
    plain = oo.ZoneHyperConv(5, 4, 2, 2, zoned=False).double()
    code = torch.tensor([0.3, -1.2], dtype=torch.float64)
    alpha = torch.einsum("m,mij->ij", code, conv.alpha_weight) + conv.alpha_bias
    plain.theta.data = conv.theta.data @ alpha.data
    plain.beta_bias.data = (code @ conv.beta_weight + conv.beta_bias).data
    plain.edge.load_state_dict(conv.edge.state_dict())
    z, attr = (torch.randn(n, 5 if n == 4 else 2, generator=g, dtype=torch.float64) for n in (4, 5))
    torch.testing.assert_close(
        conv(z, EDGES, attr, code.repeat(4, 1)), plain(z, EDGES, attr), rtol=1e-9, atol=1e-9
    )


def test_uniform_weights_are_graphsage_with_tied_weights():
    conv = oo.ZoneHyperConv(5, 4, 2, 3)
    sage = SAGEConv(5, 4, bias=False)
    sage.lin_l.weight.data = sage.lin_r.weight.data = conv.theta.data.clone()
    z, meta = torch.randn(4, 5), torch.zeros(4, 3)
    torch.testing.assert_close(
        conv(z, EDGES, torch.zeros(5, 2), meta), torch.relu(sage(z, EDGES)), rtol=1e-5, atol=1e-6
    )


def test_attention_sums_to_one_at_each_target():
    conv, g = random_conv()
    attr = 100 * torch.randn(5, 2, generator=g, dtype=torch.float64)  # exp would overflow
    weight = conv.attention(EDGES, attr, 4)
    total = torch.zeros(4, dtype=torch.float64).index_add(0, EDGES[1], weight)
    torch.testing.assert_close(total[:3], torch.ones(3, dtype=torch.float64))
    assert total[3] == 0


def test_a_node_without_neighbours_keeps_its_own():
    conv, g = random_conv()
    z, meta = (torch.randn(4, n, generator=g, dtype=torch.float64) for n in (5, 3))
    out = conv(z, EDGES, torch.zeros(5, 2, dtype=torch.float64), meta)
    torch.testing.assert_close(out[3], torch.relu(conv.transform(z, meta)[3]))


@given(st.permutations(range(4)))
def test_relabelling_permutes_the_answer(order):
    conv, g = random_conv()
    z, meta = (torch.randn(4, n, generator=g, dtype=torch.float64) for n in (5, 3))
    attr = torch.randn(5, 2, generator=g, dtype=torch.float64)
    order = torch.tensor(order)
    new_label = torch.argsort(order)
    out = conv(z[order], new_label[EDGES], attr, meta[order])
    torch.testing.assert_close(out, conv(z, EDGES, attr, meta)[order])


def test_gradients_are_those_of_differences():
    conv, g = random_conv(d=3, o=2, meta=2)
    z, meta = (torch.randn(4, n, generator=g, dtype=torch.float64) for n in (3, 2))
    attr = torch.randn(5, 2, generator=g, dtype=torch.float64)
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: conv(x, EDGES, attr, meta), z)


def test_only_the_wanted_nodes_and_a_seed():
    conv, g = random_conv()
    z, meta = (torch.randn(4, n, generator=g, dtype=torch.float64) for n in (5, 3))
    attr = torch.zeros(3, 2, dtype=torch.float64)
    few = EDGES[:, :3]
    torch.testing.assert_close(conv(z, few, attr, meta, n_out=2), conv(z, few, attr, meta)[:2])
    a, b = (
        oo.ZoneHyperConv(5, 4, 2, 3, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert torch.equal(a.theta, b.theta)


def test_bad_input():
    conv, _ = random_conv()
    z = torch.zeros(4, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"meta must have the shape \(4, 3\), got \(4, 2\)"):
        conv.transform(z, torch.zeros(4, 2))
    with pytest.raises(ValueError, match="got None"):
        conv.transform(z)
    with pytest.raises(ValueError, match="must be positive"):
        oo.ZoneHyperConv(4, 4, 1, 0)

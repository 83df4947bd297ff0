"""Stacked critics equal separate ones; averages follow their closed form."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from icml24.hierarchical_planning import StackedMLP, TemporalUnet, TokenMLP
from icml24.hierarchical_planning.networks import blend_, seeded, sinusoidal


def test_stacked_critics_equal_separate_networks():
    stack = seeded(lambda: StackedMLP(3, 5, 16, depth=2), 0)
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    for member in range(3):
        h = x
        for i, (w, b) in enumerate(zip(stack.weights, stack.biases, strict=True)):
            h = h @ w[member] + b[member]
            h = h.relu() if i < 2 else h
        assert torch.allclose(stack(x)[member], h[:, 0], atol=1e-6)
    assert not torch.allclose(stack(x)[0], stack(x)[1])


@given(weight=st.floats(0.01, 0.99), k=st.integers(1, 20))
def test_average_follows_its_closed_form(weight, k):
    target = [torch.tensor([2.0], dtype=torch.float64)]
    for _ in range(k):
        blend_(target, [torch.tensor([5.0], dtype=torch.float64)], weight)
    assert abs(float(target[0]) - (5 - 3 * (1 - weight) ** k)) < 1e-9


@pytest.mark.parametrize("length", [3, 8, 10, 13])
def test_unet_keeps_any_length(length):
    net = TemporalUnet(length, 2, width=8)
    assert net(torch.randn(2, length, 2), torch.tensor([1, 4])).shape == (2, length, 2)


def test_networks_see_step_and_context():
    net = seeded(lambda: TokenMLP(2, 1, context=3, width=16), 0)
    x, c = torch.ones(1, 2, 1), torch.zeros(1, 3)
    base = net(x, torch.tensor([1]), c)
    assert not torch.allclose(base, net(x, torch.tensor([2]), c))
    assert not torch.allclose(base, net(x, torch.tensor([1]), c + 1))
    u = seeded(lambda: TemporalUnet(4, 1, width=8), 0)
    assert not torch.allclose(
        u(x.repeat(1, 2, 1), torch.tensor([1])), u(x.repeat(1, 2, 1), torch.tensor([2]))
    )


def test_building_leaves_the_global_state_alone():
    before = torch.get_rng_state()
    a, b, c = (seeded(lambda: nn.Linear(3, 2), s) for s in (0, 0, 1))
    assert torch.equal(a.weight, b.weight) and not torch.equal(a.weight, c.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_step_embedding_tells_steps_apart():
    e = sinusoidal(torch.arange(33))
    gaps = torch.cdist(e, e) + torch.eye(33)
    assert e.shape == (33, 16) and gaps.min() > 1e-3

"""Peers: masked diffusion and n-grams on laws that are known."""

import math

import pytest
import torch

from icml24.bayesian_flow import MarkovChain, MaskedDiffusion, NGram

D = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_masked_diffusion_is_exact_when_it_reveals_one_symbol_at_a_time():
    chain = MarkovChain.random(3, 3, 0.8, seeded(3))
    peer = MaskedDiffusion(chain.model(), 3, "probs")
    x = peer.sample((5000, 3), 60, seeded(), D)
    assert math.isclose(float(-chain.log_prob(x).mean()), chain.entropy(), rel_tol=0.02)
    assert peer.nfe == 60
    # All at once: independent marginals.
    once = peer.sample((20_000, 3), 1, seeded(), D)
    pairs = torch.bincount(3 * once[:, 0] + once[:, 1], minlength=9).double() / 20_000
    second = chain.initial @ chain.transition
    assert torch.allclose(pairs, (chain.initial[:, None] * second).ravel(), atol=0.015)


def test_masked_bound_of_the_exact_prediction_is_the_entropy():
    chain = MarkovChain.random(3, 3, 0.8, seeded(3))
    peer = MaskedDiffusion(chain.model(), 3, "probs")
    bound = float(peer.loss(chain.sample(60_000, seeded()), generator=seeded(1)))
    assert math.isclose(3 * bound, chain.entropy(), rel_tol=0.03)


def test_masked_diffusion_names_bad_steps():
    with pytest.raises(ValueError, match="steps"):
        MaskedDiffusion(lambda theta, s: theta, 3).sample((2, 2), 0)


def test_ngram_learns_a_periodic_text():
    text = torch.arange(300) % 3
    x = NGram(text, order=3, num_classes=3).sample(50, 20, seeded())
    assert x.shape == (50, 20) and ((x[:, 1:] - x[:, :-1]) % 3 == 1).all()


def test_ngram_frequencies():
    chain = MarkovChain.random(3, 20_000, 0.8, seeded(3))
    text = chain.sample(1, seeded())[0]
    x = NGram(text, order=2, num_classes=3).sample(4000, 10, seeded(1))
    for i in range(3):
        row = torch.bincount(x[:, 1:][x[:, :-1] == i], minlength=3).double()
        assert torch.allclose(row / row.sum(), chain.transition[i], atol=0.03)


def test_ngram_names_bad_input():
    with pytest.raises(ValueError, match="order"):
        NGram(torch.zeros(10).long(), order=1)

"""Plans: windows, fixed ends, selection, guidance, special cases."""

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

from icml24.hierarchical_planning import DConductor, Episode, OfflineDataset
from icml24.hierarchical_planning.conductor import _returns

SMALL = {"n_diffusion_steps": 5, "width": 32, "n_updates": 3}


def line(n=40, episodes=4):
    x = np.stack([np.arange(n + 1.0), np.zeros(n + 1)], axis=1)
    a = np.linspace(-1, 1, n)[:, None]
    return OfflineDataset.from_episodes(
        [Episode(x + [0, i], a, np.arange(n)) for i in range(episodes)]
    )


def test_tokens_are_interval_decisions_apart():
    data = line()
    c = DConductor(horizon=12, interval=3, goal_padding=False, **SMALL).fit(data)
    tokens, start = c.sample_batch(data, torch.Generator().manual_seed(0))
    x = c.sub_goals(tokens)
    assert x.shape == (128, 5, 2)
    assert np.allclose(np.diff(x[..., 0], axis=1), 3, atol=1e-4)
    assert np.allclose(x[:, 0, 0], data.observations[start, 0], atol=1e-4)


def test_padded_windows_rest_at_the_goal():
    data = line()
    c = DConductor(horizon=12, interval=3, **SMALL).fit(data)
    tokens, _ = c.sample_batch(data, torch.Generator().manual_seed(0))
    length = c.sub_goals(tokens)[..., 0]
    total = (length[:, -1] - length[:, 0]).round().astype(int)
    assert set(total) == set(range(3, 13))
    expected = np.minimum(np.arange(0, 13, 3), total[:, None])
    assert np.allclose(length - length[:, :1], expected, atol=1e-4)


def test_dense_actions_lie_between_their_states():
    data = line()
    c = DConductor(horizon=6, interval=2, goal_features=None, dense_actions=True, **SMALL).fit(data)
    tokens, start = c.sample_batch(data, torch.Generator().manual_seed(0))
    for token in range(4):
        for step in range(2):
            row = start + 2 * token + step
            assert torch.equal(tokens[:, token, step], data.actions[row, 0])
    episode = torch.searchsorted(data.starts, start.contiguous(), right=True) - 1
    assert (start + 8 <= data.starts[episode] + 40).all()
    mask = c._mask()  # actions are never held, the first state is
    assert not mask[:, :2].any() and mask[0, 2:].all() and not mask[1:].any()


def test_one_step_plans_are_next_state_predictions():
    data = line()
    c = DConductor(horizon=1, interval=1, goal_features=None, **SMALL).fit(data)
    tokens, _ = c.sample_batch(data, torch.Generator().manual_seed(0))
    x = c.sub_goals(tokens)
    assert c.n_tokens == 2 and np.allclose(np.diff(x[..., 0], axis=1), 1, atol=1e-4)
    assert c.plan([[3.0, 0.0]]).shape == (1, 2, 2)


def test_ends_of_every_plan_are_exact():
    c = DConductor(horizon=12, interval=3, **SMALL).fit(line())
    x, g = np.array([[1.0, 2.0], [5.0, 0.0]]), np.array([[30.0, 1.0], [9.0, 2.0]])
    tokens = c.sample_tokens(x, g, n_candidates=3)
    part = c.normalizer_
    for k in range(3):
        assert torch.equal(tokens[:, k, 0], part(torch.tensor(x).float()))
        assert torch.equal(tokens[:, k, -1], part(torch.tensor(g).float()))
    assert not torch.equal(tokens[:, 0, 1], tokens[:, 1, 1])
    assert np.allclose(c.plan(x, g)[:, -1], g, atol=1e-5)


def test_a_goal_may_fix_part_of_a_token_in_any_order():
    data = line()
    c = DConductor(horizon=6, interval=3, features=(1, 0), goal_features=(0,), **SMALL).fit(data)
    plan = c.plan([[4.0, 2.0]], [9.0])
    assert np.allclose(plan[0, 0], [2.0, 4.0], atol=1e-5)
    assert abs(plan[0, -1, 1] - 9) < 1e-5 and abs(plan[0, -1, 0] - 9) > 1e-3


def test_shortest_takes_the_first_arrival_and_breaks_ties_by_length():
    c = DConductor(horizon=4, interval=1, select="shortest", **SMALL).fit(line())
    late = [0.0, 0.2, 0.4, 0.6, 1.0]
    early = [0.0, 0.5, 1.0, 1.0, 1.0]
    detour = [0.0, -0.5, 1.0, 1.0, 1.0]
    tokens = torch.tensor([[late, detour, early]])[..., None] * torch.tensor([1.0, 0.0])
    assert c.score(tokens)[0].argsort(descending=True).tolist() == [2, 1, 0]


def test_value_takes_the_plan_with_the_larger_return():
    c = DConductor(
        horizon=6, interval=2, goal_features=None, select="value", **{**SMALL, "n_updates": 150}
    ).fit(line(episodes=2))
    tokens, _ = c.sample_batch(line(episodes=2), torch.Generator().manual_seed(0))
    togo = _returns(line(episodes=2), 0.997, 0.0)
    score = c.score(tokens[None])[0]
    start = c.sub_goals(tokens)[:, 0, 0].round().astype(int)
    assert np.corrcoef(score, togo[start])[0, 1] > 0.9


def test_returns_by_hand_and_with_a_penalty():
    data = OfflineDataset.from_episodes(
        [
            Episode(np.zeros((3, 1)), np.zeros((2, 1)), [1.0, 2.0], terminated=True),
            Episode(np.zeros((2, 1)), np.zeros((1, 1)), [5.0]),
        ]
    )
    assert np.allclose(_returns(data, 0.5, 0.0), [2, 2, 0, 5, 0])
    assert np.allclose(_returns(data, 0.5, -100.0), [-48, -98, 0, 5, 0])


def test_guidance_raises_the_predicted_return():
    settings = {**SMALL, "n_updates": 60}
    c = DConductor(
        horizon=6, interval=2, goal_features=None, guide_scale=1.0, stop_guide=0, **settings
    )
    c.fit(line())
    x = np.tile([[5.0, 1.0]], (20, 1))

    def predicted(scale):
        c.guide_scale = scale
        tokens = c.sample_tokens(x)[:, 0]
        return c.return_(tokens, torch.zeros(20, dtype=torch.long)).mean().item()

    assert predicted(5.0) > predicted(1.0) > predicted(0.0)


def test_unet_and_chain():
    c = DConductor(horizon=12, interval=3, network="unet", **{**SMALL, "width": 8}).fit(line())
    chain = []
    tokens = c.sample_tokens([[0.0, 0.0]], [9.0, 0.0], 2, chain=chain)
    assert tokens.shape == (1, 2, 5, 2) and len(chain) == 6


def test_training_lowers_the_loss_and_is_reproducible():
    data = line()

    def loss(n):
        c = DConductor(horizon=12, interval=3, **{**SMALL, "n_updates": n}).fit(data)
        tokens, _ = c.sample_batch(data, torch.Generator().manual_seed(0))
        condition = c._mask(), tokens
        return c.diffusion_.loss(tokens, torch.Generator().manual_seed(1), condition).item()

    assert loss(150) < 0.3 * loss(1)
    assert loss(5) == loss(5)


def test_windows_that_stand_still_are_left_out():
    x = np.stack([np.arange(31.0), np.zeros(31)], axis=1)
    still = Episode(np.tile([[7.0, 9.0]], (31, 1)), np.zeros((30, 1)), np.zeros(30))
    data = OfflineDataset.from_episodes([Episode(x, np.zeros((30, 1)), np.zeros(30)), still])
    drawn = {}
    for speed in (0.0, 0.5):
        c = DConductor(horizon=12, interval=3, min_speed=speed, **SMALL).fit(data)
        tokens, start = c.sample_batch(data, torch.Generator().manual_seed(0))
        assert tokens.shape == (128, 5, 2)
        drawn[speed] = (start >= 31).float().mean().item()
    assert drawn[0.0] > 0.3 and drawn[0.5] == 0


def test_the_average_moves_slowly_and_makes_the_plans():
    settings = {**SMALL, "n_updates": 1, "ema": 0.9}
    c = DConductor(horizon=12, interval=3, **settings).fit(line())
    start = DConductor(horizon=12, interval=3, lr=0.0, **settings).fit(line())
    nets = (net.parameters() for net in (c.average_, c.diffusion_, start.diffusion_))
    for slow, now, before in zip(*nets, strict=True):
        assert torch.allclose(slow, before + 0.1 * (now - before), atol=1e-6)
    plan = c.plan([[1.0, 2.0]], [30.0, 1.0])
    for weight in c.diffusion_.parameters():
        weight.data.zero_()
    assert np.array_equal(plan, c.plan([[1.0, 2.0]], [30.0, 1.0]))


def test_planned_actions_stay_in_their_range():
    data = line()
    c = DConductor(horizon=6, interval=2, goal_features=None, dense_actions=True, **SMALL).fit(data)
    tokens = torch.zeros(1, 1, 4, 4)
    tokens[..., 0, :2] = torch.tensor([9.0, -9.0])
    assert c.best(tokens).actions.ravel().tolist() == [1.0, -1.0]


def test_without_selection_the_first_plan_is_taken():
    c = DConductor(horizon=12, interval=3, **SMALL).fit(line())
    tokens = c.sample_tokens([[1.0, 2.0]], [30.0, 1.0], 3)
    assert np.array_equal(c.best(tokens).states[0], c.sub_goals(tokens[0, 0]))


def test_errors_say_what_would_be_right():
    data = line(n=10)
    with pytest.raises(NotFittedError, match="call fit first"):
        DConductor().plan([[0.0, 0.0]], [1.0, 1.0])
    with pytest.raises(ValueError, match="must divide the horizon"):
        DConductor(horizon=10, interval=3).fit(data)
    with pytest.raises(ValueError, match="at least 12 decisions, but the longest has 10"):
        DConductor(horizon=12, interval=3, goal_padding=False, **SMALL).fit(data)
    with pytest.raises(ValueError, match="'mlp' or 'unet'"):
        DConductor(network="transformer").fit(data)
    with pytest.raises(ValueError, match="select must be"):
        DConductor(select="best").fit(data)
    with pytest.raises(ValueError, match="needs goals"):
        DConductor(select="shortest", goal_features=None).fit(data)
    with pytest.raises(ValueError, match="among features"):
        DConductor(features=(0,), goal_features=(1,)).fit(data)
    c = DConductor(horizon=6, interval=3, **SMALL).fit(data)
    with pytest.raises(ValueError, match="pass one"):
        c.plan([[0.0, 0.0]])
    with pytest.raises(ValueError, match="outside the data"):
        c.plan([[0.0, 0.0]], [99.0, 0.0])
    free = DConductor(horizon=6, interval=3, goal_features=None, **SMALL).fit(data)
    with pytest.raises(ValueError, match="takes no goal"):
        free.plan([[0.0, 0.0]], [1.0, 1.0])

"""Hindsight counted by hand, goal rewards in their limits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from icml24.hierarchical_planning import (
    Episode,
    OfflineDataset,
    QPerformer,
    distance_reward,
    hindsight_offsets,
    max_cosine_reward,
    td_target,
)

vectors = st.lists(st.floats(-5, 5), min_size=3, max_size=3)


@pytest.mark.parametrize("p", [0.2, 0.5, 1.0])
def test_offsets_have_the_mean_of_their_distribution(p):
    d = hindsight_offsets(400_000, 10, p, torch.Generator().manual_seed(0)).double()
    assert abs(float(d.mean()) / ((10 / p - 1) / 2) - 1) < 0.02
    assert d.min() == 0 and (p < 1 or d.max() == 9)


def test_one_geometric_draw_for_the_batch_bounds_all_offsets():
    tops = set()
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        d = hindsight_offsets(2000, 4, 0.5, g, per_sample=False)
        tops.add(int(d.max()) + 1)
    assert all(top % 4 == 0 for top in tops) and len(tops) > 1


@given(a=vectors, b=vectors)
def test_distance_reward_is_one_only_at_the_goal(a, b):
    x, g = torch.tensor([a]), torch.tensor([b])
    r = float(distance_reward(x, g))
    assert 0 < r <= 1
    assert distance_reward(x, x) == 1
    if np.linalg.norm(np.subtract(a, b)) > 1e-3:
        assert r < 1


def test_cosine_reward_by_hand():
    s = torch.tensor([[3.0, 4.0]])
    assert max_cosine_reward(s, s) == 1
    assert abs(float(max_cosine_reward(s, 2 * s)) - 0.5) < 1e-6
    assert max_cosine_reward(s, 0 * s) == 0
    assert abs(float(max_cosine_reward(s, torch.tensor([[-4.0, 3.0]])))) < 1e-6


def test_target_stops_at_the_end():
    t = td_target(torch.ones(2), torch.tensor([1.0, 0.0]), torch.full((2,), 10.0), 0.9)
    assert t.tolist() == [10.0, 1.0]


def line(n=6):
    x = np.arange(n + 1.0)[:, None] * [1.0, 0.0]
    return OfflineDataset.from_episodes(
        [Episode(x + [0, 10 * i], np.full((n, 1), i / 5), np.zeros(n)) for i in range(3)]
    )


@given(p=st.sampled_from([None, 0.3, 1.0]), seed=st.integers(0, 50))
def test_goals_stay_in_the_episode_and_after_the_transition(p, seed):
    data = line()
    performer = QPerformer(interval=3, relabel_p=p, batch_size=64)
    g = torch.Generator().manual_seed(seed)
    row, last = data.sample_rows(64, g)
    goal = performer._goal_rows(data, row, last, g)
    assert (goal >= row + 1).all() and (goal <= last).all()
    if p == 1.0:
        assert (goal <= row + 3).all()


def test_relabelled_batch_by_hand():
    """Positions 0, 1, 2, ...: the reward is exp(-steps that remain), the end is at zero steps."""
    data = line()
    performer = QPerformer(interval=3, relabel_p=1.0, batch_size=200, n_updates=1).fit(data)
    batch = performer.sample_batch(data, torch.Generator().manual_seed(0))
    scale = performer.normalizer_.scale[0]
    left = ((batch.after[:, 2] - batch.after[:, 0]) * scale).round()
    assert set(left.tolist()) == {0.0, 1.0, 2.0}
    assert torch.allclose(batch.reward, torch.exp(-left), atol=1e-5)
    assert torch.equal(batch.alive, (left > 0).float())
    assert torch.allclose(batch.after[:, 1], batch.after[:, 3])  # goals of the same episode
    assert torch.allclose((batch.after - batch.state)[:, 0] * scale, torch.ones(200), atol=1e-5)


def test_sparse_reward_and_random_goals():
    data = line()
    performer = QPerformer(
        interval=3, goal_reward="sparse", radius=1.2, random_goals=1.0, n_updates=1
    ).fit(data)
    batch = performer.sample_batch(data, torch.Generator().manual_seed(0))
    part = performer.normalizer_.part([0, 1])
    gap = (part.inverse(batch.after[:, :2]) - part.inverse(batch.after[:, 2:])).norm(dim=1)
    assert torch.equal(batch.reward, (gap <= 1.2).float())
    assert torch.equal(batch.alive, (gap > 1.2).float())
    assert (gap > 9).any()  # goals of other episodes


def test_goal_noise_reaches_its_size():
    data = line()
    noisy = QPerformer(interval=3, goal_noise=0.5, batch_size=4000, n_updates=1).fit(data)
    clean = QPerformer(interval=3, batch_size=4000, n_updates=1).fit(data)
    a, b = (p.sample_batch(data, torch.Generator().manual_seed(0)) for p in (noisy, clean))
    assert torch.equal(a.state[:, :2], b.state[:, :2]) and torch.equal(a.reward, b.reward)
    gap = (a.state - b.state)[:, 2:]
    assert abs(float(gap.pow(2).mean()) - 0.25 / 3) < 0.01
    assert torch.equal(a.state[:, 2:], a.after[:, 2:])


def test_impossible_settings():
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        hindsight_offsets(3, 2, 0.0, torch.Generator())
    with pytest.raises(ValueError, match="at least 1"):
        hindsight_offsets(3, 0, 0.5, torch.Generator())

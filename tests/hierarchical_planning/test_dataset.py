"""Loading, checking, windows that stay in their episode."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from icml24.hierarchical_planning import Episode, Normalizer, OfflineDataset


def episodes(lengths, seed=0, dims=(3, 2)):
    rng = np.random.default_rng(seed)
    return [
        Episode(
            rng.normal(size=(n + 1, dims[0])).astype(np.float32),
            rng.uniform(-1, 1, (n, dims[1])).astype(np.float32),
            rng.normal(size=n).astype(np.float32),
            bool(i % 2),
        )
        for i, n in enumerate(lengths)
    ]


def same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        for name in ("observations", "actions", "rewards"):
            assert np.array_equal(getattr(x, name), getattr(y, name)), name
        assert x.terminated == y.terminated


def test_episodes_come_back():
    logs = episodes([4, 1, 7])
    data = OfflineDataset.from_episodes(logs)
    assert (data.n_transitions, data.observation_dim, data.action_dim) == (12, 3, 2)
    same(data.episodes(), logs)


def test_actions_are_scaled_and_scaled_back():
    logs = [Episode(np.zeros((3, 1)), [[-2.0], [2.0]], [0.0, 0.0])]
    data = OfflineDataset.from_episodes(logs, -2.0, 2.0)
    assert data.actions[:2].flatten().tolist() == [-1.0, 1.0]
    assert data.episodes()[0].actions.ravel().tolist() == [-2.0, 2.0]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    interval=st.integers(1, 4),
    tokens=st.integers(1, 4),
    padded=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_windows_never_leave_their_episode(lengths, interval, tokens, padded, seed):
    data = OfflineDataset.from_episodes(episodes(lengths))
    offsets = torch.arange(0, interval * tokens + 1, interval)
    need = interval if padded else interval * tokens
    g = torch.Generator().manual_seed(seed)
    if max(lengths) < need:
        with pytest.raises(ValueError, match=f"the longest has {max(lengths)}"):
            data.sample_windows(20, offsets, g, need if padded else None)
        return
    rows, arrival = data.sample_windows(20, offsets, g, need if padded else None)
    episode = torch.searchsorted(data.starts, rows[:, 0].contiguous(), right=True) - 1
    first, last = data.starts[episode], data.starts[episode] + data.lengths[episode]
    assert (rows >= first[:, None]).all() and (rows <= last[:, None]).all()
    assert torch.equal(rows - rows[:, :1], torch.minimum(offsets[None], arrival[:, None]))
    assert (arrival >= need).all() and (arrival <= interval * tokens).all()
    if not padded:
        assert (arrival == interval * tokens).all()


def test_windows_start_everywhere_they_can():
    data = OfflineDataset.from_episodes(episodes([3, 6]))
    offsets = torch.tensor([0, 2, 4])
    rows, _ = data.sample_windows(400, offsets, torch.Generator().manual_seed(0))
    assert set(rows[:, 0].tolist()) == {4, 5, 6}  # the first episode is too short
    rows, _ = data.sample_windows(4000, offsets, torch.Generator().manual_seed(0), 2)
    assert set(rows[:, 0].tolist()) == {0, 1, 4, 5, 6, 7, 8}


def test_transitions_are_drawn_evenly_and_know_their_end():
    data = OfflineDataset.from_episodes(episodes([2, 3]))
    row, last = data.sample_rows(5000, torch.Generator().manual_seed(0))
    counts = torch.bincount(row, minlength=7)
    assert counts[2] == 0 and counts[6] == 0  # where an episode ends nothing is done
    assert (counts[[0, 1, 3, 4, 5]] > 850).all()
    assert torch.equal(last, torch.where(row < 2, 2, 6))


def test_d4rl_table_with_next_observations():
    logs = episodes([4, 3, 5])
    table = {
        "observations": np.concatenate([e.observations[:-1] for e in logs]),
        "next_observations": np.concatenate([e.observations[1:] for e in logs]),
        "actions": np.concatenate([e.actions for e in logs]),
        "rewards": np.concatenate([e.rewards for e in logs]),
        "terminals": np.zeros(12, bool),
        "timeouts": np.zeros(12, bool),
    }
    table["terminals"][6] = True  # the second episode terminates
    table["timeouts"][[3]] = True  # the last one just stops
    same(OfflineDataset.from_d4rl(table).episodes(), logs)


def test_d4rl_table_without_next_observations():
    logs = episodes([4, 3])
    table = {
        "observations": np.concatenate([e.observations[:-1] for e in logs]),
        "actions": np.concatenate([e.actions for e in logs]),
        "rewards": np.concatenate([e.rewards for e in logs]),
        "terminals": np.arange(7) == 6,
        "timeouts": np.arange(7) == 3,
    }
    first, second = OfflineDataset.from_d4rl(table).episodes()
    assert len(first.rewards) == 3 and np.array_equal(first.observations, logs[0].observations[:4])
    assert len(second.rewards) == 3 and second.terminated
    assert np.array_equal(second.observations[-1], second.observations[-2])


def test_minari_round_trip(tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    minari = pytest.importorskip("minari")
    logs = episodes([4, 1, 7])
    data = OfflineDataset.from_episodes(logs)
    meta = {"algorithm_name": "x", "author": "x", "author_email": "x", "code_permalink": "x"}
    data.to_minari("test/logs-v0", description="x", **meta)
    back = OfflineDataset.from_minari("test/logs-v0")
    same(back.episodes(), logs)
    same(OfflineDataset.from_minari(minari.load_dataset("test/logs-v0")).episodes(), logs)
    with pytest.raises(ValueError, match=r"test/logs-v0.*minari download other/set-v1"):
        OfflineDataset.from_minari("other/set-v1")


def test_minari_dictionaries_and_unbounded_actions():
    class Box:
        low, high = np.array([-1.0]), np.array([1.0])

    class Row:
        def __init__(self):
            self.observations = {"observation": np.zeros((3, 4)), "desired_goal": np.ones((3, 2))}
            self.actions, self.rewards = np.zeros((2, 1)), np.zeros(2)
            self.terminations = np.array([False, True])

    class Source:
        action_space = Box()

        def iterate_episodes(self):
            return [Row(), Row()]

    data = OfflineDataset.from_minari(Source())
    assert data.observation_dim == 4 and data.n_transitions == 4
    assert data.terminals.tolist() == [0, 1, 0, 0, 1, 0]
    wide = OfflineDataset.from_minari(Source(), keys=("desired_goal", "observation"))
    assert wide.observations[0].tolist() == [1, 1, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="needs the key 'place'"):
        OfflineDataset.from_minari(Source(), keys=("place", "observation"))
    Source.action_space.high = np.array([np.inf])
    with pytest.raises(ValueError, match="finite bounds"):
        OfflineDataset.from_minari(Source())


def test_task_rewards_by_hand():
    x = [[0.0, 0], [1, 0], [2, 0], [3, 0], [2, 0]]
    data = OfflineDataset.from_episodes([Episode(x, np.zeros((4, 1)), np.ones(4))])
    task = data.with_task([2.1, 0.0], 0.45)
    assert task.rewards[:4].tolist() == [0, 1, 0, 1] == task.terminals[:4].tolist()
    assert data.rewards[:4].tolist() == [1, 1, 1, 1]  # the original is as it was


@pytest.mark.parametrize("kind", ["minmax", "gaussian"])
def test_normaliser_inverts_and_keeps_constants(kind):
    x = torch.tensor([[0.0, 5.0], [4.0, 5.0], [1.0, 5.0]])
    n = Normalizer.fit(x, kind)
    assert torch.allclose(n.inverse(n(x)), x) and torch.isfinite(n(x)).all()
    assert torch.equal(n.part([1])(x[:, [1]]), n(x)[:, [1]])
    if kind == "minmax":
        assert n(x)[:, 0].min() == -1 and n(x)[:, 0].max() == 1
    with pytest.raises(ValueError, match="'minmax' or 'gaussian'"):
        Normalizer.fit(x, "robust")


def bad(**changes):
    fields = {
        "observations": np.zeros((4, 2)),
        "actions": np.zeros((3, 1)),
        "rewards": np.zeros(3),
    }
    return [Episode(**{**fields, **changes})]


@pytest.mark.parametrize(
    ("logs", "message"),
    [
        ([], "no episodes"),
        (bad(rewards=[0.0, np.nan, 0.0]), "rewards contain NaN.*step 1"),
        (bad(observations=np.full((4, 2), np.inf)), "observations contain NaN"),
        (bad(observations=np.zeros((3, 2))), r"T \+ 1 observations"),
        (bad(actions=np.full((3, 1), 1.5)), "pass the true bounds"),
        (bad(actions=np.zeros((0, 1)), rewards=[], observations=np.zeros((1, 2))), "T actions"),
        (bad() + bad(observations=np.zeros((4, 3))), "Episode 1.*number of features"),
        (bad(observations=[["a"]]), "array of numbers"),
        (bad(observations=np.zeros((4, 2, 2))), "2 axes"),
    ],
)
def test_bad_episodes_are_named(logs, message):
    with pytest.raises(ValueError, match=message):
        OfflineDataset.from_episodes(logs)


def test_bad_bounds_and_tables():
    with pytest.raises(ValueError, match="finite"):
        OfflineDataset.from_episodes(bad(), -np.inf, np.inf)
    table = {"observations": np.zeros((3, 1)), "actions": np.zeros((3, 1)), "rewards": np.zeros(3)}
    with pytest.raises(ValueError, match="lacks terminals, timeouts"):
        OfflineDataset.from_d4rl(table)
    with pytest.raises(ValueError, match="same length"):
        OfflineDataset.from_d4rl({**table, "terminals": np.zeros(2), "timeouts": np.zeros(3)})

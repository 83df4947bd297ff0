"""The greedy search with accuracy functions that can be followed by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from icml24.backdoor_defense.selection import head_order, select_heads

ORDER = [(layer, head) for head in range(5) for layer in range(2)]  # heads 4 are the last


def count(heads):
    return sum(map(len, heads.values()))


def test_orders():
    scores = torch.tensor([[3.0, float("nan")], [1.0, 2.0]])
    assert head_order(scores) == [(1, 0), (1, 1), (0, 0)]
    shuffled = [tuple(head_order(scores, seed)) for seed in range(20)]
    assert len(set(shuffled)) > 1 and shuffled[3] == tuple(head_order(scores, 3))
    assert all(sorted(order) == [(0, 0), (1, 0), (1, 1)] for order in shuffled)


@given(st.integers(1, 10), st.floats(0, 0.9), st.floats(0.02, 0.3))
def test_finds_the_largest_prefix_that_keeps_the_accuracy(step, drop, slope):
    found = select_heads(ORDER, lambda h: max(0.0, 1 - slope * count(h)), step, acc_drop=drop)
    queue = ORDER[:8]  # the last head of either layer stays
    wanted = max(n for n in range(9) if max(0.0, 1 - slope * n) >= 1 - drop)
    assert found.n == wanted
    assert {(k, h) for k, hs in found.heads.items() for h in hs} == set(queue[:wanted])


def test_restores_the_last_of_the_list_first():
    tried = []

    def accuracy(heads):
        tried.append(heads)
        return 1.0 if count(heads) <= 5 else 0.0

    found = select_heads(ORDER, accuracy, step=4, acc_drop=0.1)
    assert [n for n, _ in found.trace] == [0, 4, 8, 7, 6, 5]
    assert found.heads == {0: [0, 1, 2], 1: [0, 1]}


def test_ends_when_the_whole_group_is_restored():
    found = select_heads(ORDER, lambda h: 1.0 if not h else 0.0, step=3, acc_drop=0.05)
    assert found.heads == {} and [n for n, _ in found.trace] == [0, 3, 2, 1, 0]


def test_keeps_the_last_head_of_every_layer():
    found = select_heads(ORDER, lambda _: 1.0, step=100)
    assert found.heads == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    assert select_heads([(0, 0), (1, 0)], lambda _: 1.0).heads == {}


def test_absolute_and_relative_limits():
    def accuracy(heads):
        return 0.9 - 0.01 * count(heads)

    assert select_heads(ORDER, accuracy, 1, acc_threshold=0.87, acc_drop=None).n == 3
    assert select_heads(ORDER, accuracy, 1, acc_drop=0.021).n == 2
    with pytest.raises(ValueError, match=r"reaches 0.900 .* acc_threshold=0.95"):
        select_heads(ORDER, accuracy, 1, acc_threshold=0.95, acc_drop=None)


@pytest.mark.parametrize(
    "bad",
    [
        {"acc_threshold": 0.8},
        {"acc_drop": None},
        {"acc_drop": 1.5},
        {"acc_threshold": -0.1, "acc_drop": None},
        {"step": 0},
    ],
)
def test_settings_out_of_range(bad):
    with pytest.raises(ValueError, match=r"acc_|prune_step"):
        select_heads(ORDER, lambda _: 1.0, **bad)

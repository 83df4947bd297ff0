"""Instances that several test modules share."""

from __future__ import annotations

import numpy as np
import pytest

import icml24.online_equity as eq


@pytest.fixture
def rng():
    return np.random.default_rng(42)


@pytest.fixture
def random_instances(rng):
    return [eq.random_instance(rng, n=(2, 4)) for _ in range(25)]


@pytest.fixture
def overlap(rng):
    """Three overlapping groups over four types, ten rounds, drifting arrivals."""
    p = rng.dirichlet(np.ones(4), 10)
    return eq.ArrivalModel(p, [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]])

"""Hypothesis strategies."""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import icml24.online_equity as eq

checked = settings(
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def instances(draw, max_agents=4, max_points=3):
    """Small external instances: sure demands, zeros, ties and huge demands included."""
    n = draw(st.integers(1, max_agents))
    sizes = [0.0, 0.01, 0.5, 1.0, 1.0, 2.0, 3.7, 50.0, 1e6]
    supports, weights = [], []
    for _ in range(n):
        k = draw(st.integers(1, max_points))
        supports.append(draw(st.lists(st.sampled_from(sizes), min_size=k, max_size=k)))
        raw = np.array(draw(st.lists(st.integers(1, 9), min_size=k, max_size=k)), float)
        weights.append(raw / raw.sum())
    budget = draw(st.sampled_from([0.3, 1.0, 2.0, 5.0]))
    return eq.ExternalInstance(eq.DemandModel(supports, weights), budget)

"""The update of the critics against value iteration."""

import numpy as np
import pytest

from icml24.core.data import DataUnavailableError
from icml24.hierarchical_planning.tabular import (
    FiniteMDP,
    empirical,
    fitted_q,
    icu_sepsis,
    log_transitions,
    q_iteration,
)


def random_mdp(n=6, a=3, seed=0):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(n) * 0.3, (n, a))
    p[-1] = np.eye(n)[-1]
    return FiniteMDP(
        p, rng.uniform(0, 1, (n, a)) * (np.arange(n) < n - 1)[:, None], np.arange(n) == n - 1
    )


def test_value_iteration_solves_the_optimality_equation():
    mdp = random_mdp()
    q = q_iteration(mdp, 0.9)
    v = np.where(mdp.terminal, 0, q.max(1))
    assert np.abs(mdp.rewards + 0.9 * mdp.transitions @ v - q).max() < 1e-8
    policy = q.argmax(1)
    p = mdp.transitions[np.arange(6), policy] * ~mdp.terminal
    exact = np.linalg.solve(np.eye(6) - 0.9 * p, mdp.rewards[np.arange(6), policy])
    assert np.abs(exact - v).max() < 1e-6


def test_chain_by_hand():
    p = np.zeros((4, 2, 4))
    for s in range(3):
        p[s, 0, s], p[s, 1, s + 1] = 1, 1  # stay or go
    p[3, :, 3] = 1
    rewards = np.zeros((4, 2))
    rewards[2, 1] = 1
    q = q_iteration(FiniteMDP(p, rewards, np.arange(4) == 3), 0.5)
    assert np.allclose(q[:3], [[0.125, 0.25], [0.25, 0.5], [0.5, 1.0]], atol=1e-8)


def test_log_and_its_shares():
    mdp = random_mdp()
    log = log_transitions(mdp, 4000, seed=1)
    assert np.abs(empirical(mdp, log).transitions - mdp.transitions).max() < 0.04
    assert (log[-1] == 5).all()
    assert (mdp.transitions[0, 0][log[0, 0]] > 0).all()


def test_learned_values_are_those_of_the_logged_process():
    mdp = random_mdp()
    log = log_transitions(mdp, 20)
    exact = q_iteration(empirical(mdp, log), 0.9)
    assert np.abs(fitted_q(mdp, log, 0.9) - exact).max() < 1e-4


@pytest.mark.slow
def test_learned_values_on_icu_sepsis():
    try:
        mdp = icu_sepsis()
    except DataUnavailableError as error:
        pytest.skip(str(error))
    assert mdp.rewards.shape == (716, 25) and mdp.terminal.sum() == 1
    log = log_transitions(mdp, 10)
    exact = q_iteration(empirical(mdp, log), 0.9, tol=1e-5)
    assert np.abs(fitted_q(mdp, log, 0.9, 300) - exact).max() < 1e-3


def test_errors():
    with pytest.raises(ValueError, match="shapes"):
        FiniteMDP(np.ones((2, 1, 2)) / 2, np.ones((2, 2)), np.array([True, False]))
    with pytest.raises(ValueError, match="sum to one"):
        FiniteMDP(np.ones((2, 1, 2)), np.ones((2, 1)), np.array([True, False]))
    with pytest.raises(ValueError, match="discount"):
        q_iteration(random_mdp(), 1.0)

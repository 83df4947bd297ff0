"""Finite decision processes with exact values: a chain, and a model of intensive care for sepsis.

Real: the transition model of ICU-Sepsis (716 states, 25 treatments) was estimated by its authors
from records of patients. Everything learnt on it here is compared with the exact solution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from icml24.core.data import DataSource
from icml24.hierarchical_planning.goals import td_target
from icml24.hierarchical_planning.mazes import Array
from icml24.hierarchical_planning.networks import blend_

__all__ = [
    "FiniteMDP",
    "empirical",
    "fitted_q",
    "icu_sepsis",
    "log_transitions",
    "q_iteration",
]

SEPSIS = DataSource(
    "ICU-Sepsis",
    "36498f924c693c6be7ae18f3ce9e1a8e48d41f80f2cc553b3993b1373c8a9109",
    "MIT; Choudhary, Gupta and Thomas, ICU-Sepsis, 2024",
    package="icu-sepsis==2.0.1:icu_sepsis/envs/assets/dynamics.npz",
)


@dataclass(frozen=True)
class FiniteMDP:
    """A finite decision process.

    Parameters
    ----------
    transitions : numpy.ndarray, shape (S, A, S)
        Probabilities of the next state.
    rewards : numpy.ndarray, shape (S, A)
        Expected reward.
    terminal : numpy.ndarray of bool, shape (S,)
        States in which nothing more happens.

    Examples
    --------
    >>> stay = FiniteMDP(np.ones((1, 1, 1)), np.ones((1, 1)), np.array([False]))
    >>> round(float(q_iteration(stay, 0.9)[0, 0]), 6)
    10.0
    """

    transitions: Array
    rewards: Array
    terminal: Array

    def __post_init__(self) -> None:
        n, a = self.transitions.shape[:2]
        shapes = self.transitions.shape, self.rewards.shape, self.terminal.shape
        if shapes != ((n, a, n), (n, a), (n,)):
            raise ValueError(
                f"transitions, rewards and terminal need shapes (S, A, S), (S, A) and (S,), "
                f"got {shapes}."
            )
        if not np.allclose(self.transitions.sum(-1), 1, atol=1e-6):
            raise ValueError("The probabilities of next states must sum to one.")


@lru_cache(maxsize=1)
def icu_sepsis() -> FiniteMDP:
    """Load the ICU-Sepsis process from the wheel of ``icu-sepsis`` 2.0.1.

    Returns
    -------
    FiniteMDP
        Reward 1 for a patient who survives; state 715 is the end.

    Raises
    ------
    icml24.core.data.DataUnavailableError
        If the wheel is neither installed nor reachable.

    Examples
    --------
    >>> icu_sepsis().rewards.shape  # doctest: +SKIP
    (716, 25)
    """
    with np.load(SEPSIS.load().open(), allow_pickle=False) as file:
        transitions = file["tx_mat"]
        rewards = np.einsum("sat,sat->sa", transitions, file["r_mat"])
    index = np.arange(len(transitions))
    terminal = (transitions[index, :, index] > 1 - 1e-9).all(1)
    return FiniteMDP(transitions, np.where(terminal[:, None], 0.0, rewards), terminal)


def q_iteration(mdp: FiniteMDP, discount: float, tol: float = 1e-10) -> Array:
    """Return the exact optimal values by iterating the optimality equation to its fixed point.

    Parameters
    ----------
    mdp : FiniteMDP
    discount : float
        Below one.
    tol : float

    Returns
    -------
    numpy.ndarray, shape (S, A)
    """
    if not 0 <= discount < 1:
        raise ValueError(f"discount must lie in [0, 1), got {discount}.")
    q = np.zeros(mdp.rewards.shape)
    while True:
        value = np.where(mdp.terminal, 0.0, q.max(1))
        new = mdp.rewards + discount * np.einsum("sat,t->sa", mdp.transitions, value, optimize=True)
        if np.abs(new - q).max() <= tol:
            return new
        q = new


def log_transitions(mdp: FiniteMDP, samples: int, seed: int = 0) -> Array:
    """Draw next states for every state and action: an offline data set.

    Parameters
    ----------
    mdp : FiniteMDP
    samples : int
    seed : int

    Returns
    -------
    numpy.ndarray of int, shape (S, A, samples)

    Examples
    --------
    >>> log_transitions(FiniteMDP(np.ones((1, 1, 1)), np.ones((1, 1)), np.array([True])), 2).shape
    (1, 1, 2)
    """
    n, a = mdp.rewards.shape
    chances = torch.as_tensor(mdp.transitions.reshape(n * a, n)).cumsum(1)
    g = torch.Generator().manual_seed(seed)
    draw = torch.rand(n * a, samples, generator=g, dtype=torch.float64) * chances[:, -1:]
    after = torch.searchsorted(chances, draw, right=True).clamp(max=n - 1)
    return np.asarray(after.view(n, a, samples))


def empirical(mdp: FiniteMDP, log: Array) -> FiniteMDP:
    """Return the process whose probabilities are the shares of the log: all that data can tell.

    Parameters
    ----------
    mdp : FiniteMDP
        Gives rewards and ends.
    log : numpy.ndarray, shape (S, A, samples)

    Returns
    -------
    FiniteMDP
    """
    n, a, samples = log.shape
    counts = np.zeros((n * a, n))
    np.add.at(counts, (np.repeat(np.arange(n * a), samples), log.ravel()), 1 / samples)
    return FiniteMDP(counts.reshape(n, a, n), mdp.rewards, mdp.terminal)


def fitted_q(mdp: FiniteMDP, log: Array, discount: float, n_updates: int = 600) -> Array:
    """Learn the optimal values by the performer's own update, from logged transitions, in a table.

    Each update forms the targets of Eq. (2) with a target table and moves both tables as the
    performer moves its networks. What differs from the performer: a table takes the place of the
    network, and the maximum over actions that of the policy's action.

    Parameters
    ----------
    mdp : FiniteMDP
        Gives rewards and ends; its probabilities are not used.
    log : numpy.ndarray, shape (S, A, samples)
    discount : float
    n_updates : int

    Returns
    -------
    numpy.ndarray, shape (S, A)

    Examples
    --------
    >>> go = np.zeros((2, 1, 2))
    >>> go[:, 0, 1] = 1
    >>> chain = FiniteMDP(go, np.array([[1.0], [0.0]]), np.array([False, True]))
    >>> fitted_q(chain, log_transitions(chain, 1), 0.9).round(3).ravel().tolist()
    [1.0, 0.0]
    """
    n, a, samples = log.shape
    after = torch.as_tensor(log).view(n * a, samples)
    alive = torch.as_tensor(~mdp.terminal).float()[after]
    reward = torch.as_tensor(mdp.rewards).float().reshape(-1, 1)
    q, target = torch.zeros(2, n * a)
    for _ in range(n_updates):
        value = target.view(n, a).max(1).values[after]
        blend_([q], [td_target(reward, alive, value, discount).mean(1)], 0.5)
        blend_([target], [q], 0.5)
    return np.asarray(q.view(n, a))

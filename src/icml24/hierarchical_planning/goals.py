"""Intrinsic goal rewards, and which later state becomes the goal of a logged transition."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["distance_reward", "hindsight_offsets", "max_cosine_reward", "td_target"]


def distance_reward(reached: Tensor, goal: Tensor) -> Tensor:
    r"""Return :math:`\exp(-\lVert\phi(s') - \phi(g)\rVert)`, the distance in the data's units.

    Examples
    --------
    >>> distance_reward(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]])).item()
    1.0
    """
    return torch.exp(-(reached - goal).norm(dim=1))


def max_cosine_reward(reached: Tensor, goal: Tensor) -> Tensor:
    r"""Return :math:`\langle g/m, s'/m\rangle`, with :math:`m` the longer of both lengths.

    One when state and goal agree, smaller when they differ in direction or length.

    Examples
    --------
    >>> s = torch.tensor([[3.0, 4.0]])
    >>> [round(max_cosine_reward(s, g).item(), 3) for g in (s, 2 * s, -s)]
    [1.0, 0.5, -1.0]
    """
    longest = torch.maximum(reached.norm(dim=1), goal.norm(dim=1)).clamp(min=1e-12)
    return (reached * goal).sum(dim=1) / longest**2


def hindsight_offsets(
    n: int, interval: int, p: float, generator: torch.Generator, per_sample: bool = True
) -> Tensor:
    r"""Draw how many decisions after the next state the goal lies.

    Uniform on :math:`\{0, \dots, KG - 1\}` with the interval :math:`K` and :math:`G` geometric with
    parameter ``p``, so the mean is :math:`(K/p - 1)/2`.

    Parameters
    ----------
    n, interval : int
    p : float
        In (0, 1]; one keeps goals within one interval.
    generator : torch.Generator
    per_sample : bool, default True
        False draws a single :math:`G` for the whole batch, as the authors' code does.

    Returns
    -------
    torch.Tensor of int64, shape (n,)

    Examples
    --------
    >>> hindsight_offsets(4, 1, 1.0, torch.Generator()).tolist()
    [0, 0, 0, 0]
    """
    if not 0 < p <= 1:
        raise ValueError(f"p must lie in (0, 1], got {p}.")
    if interval < 1:
        raise ValueError(f"interval must be at least 1, got {interval}.")
    blocks = torch.ones(n if per_sample else 1, dtype=torch.float64)
    if p < 1:
        blocks.geometric_(p, generator=generator)
    top = interval * blocks
    return (torch.rand(n, generator=generator, dtype=torch.float64) * top).long()


def td_target(reward: Tensor, alive: Tensor, next_value: Tensor, discount: float) -> Tensor:
    r"""Return the target :math:`r + \gamma\, \mathrm{nd}\, \bar Q(s', a', g)` of Eq. (2).

    Parameters
    ----------
    reward, next_value : torch.Tensor
    alive : torch.Tensor
        1 where the episode goes on (the paper's nd), else 0.
    discount : float

    Examples
    --------
    >>> td_target(torch.tensor(1.0), torch.tensor(0.0), torch.tensor(9.0), 0.9).item()
    1.0
    """
    return reward + discount * alive * next_value

"""The authors' settings, for a GPU: AntMaze in three sizes, and locomotion."""

from __future__ import annotations

from icml24.hierarchical_planning.agent import PlanDQ
from icml24.hierarchical_planning.conductor import DConductor
from icml24.hierarchical_planning.performer import QPerformer

__all__ = ["paper_antmaze", "paper_locomotion"]

#: Horizon and width multipliers of the U-Net, and from which distance the goal itself is used.
ANTMAZE = {
    "medium": (240, (2, 4, 8), 4.0),
    "large": (420, (1, 4, 8), 6.0),
    "ultra": (690, (1, 4, 8), 13.0),
}
#: Scale of the guidance by return.
LOCOMOTION = {"halfcheetah": 1e-3, "hopper": 1e-4, "walker2d": 1e-4}


def paper_antmaze(size: str = "large", device: str = "cpu", random_state: int = 0) -> PlanDQ:
    """Return PlanDQ as the authors ran it on AntMaze, not yet trained.

    Sub-goals every 30 steps from a U-Net with 256 reverse steps, no guidance; an ensemble of 64
    critics judged by their lower bound; ``q_gradient=True``, where their code has no gradient.

    Parameters
    ----------
    size : {"medium", "large", "ultra"}
    device : str
    random_state : int

    Returns
    -------
    PlanDQ

    Examples
    --------
    >>> paper_antmaze("large").conductor.n_tokens
    15
    """
    if size not in ANTMAZE:
        raise ValueError(f"size must be one of {', '.join(ANTMAZE)}, got {size!r}.")
    horizon, mults, near = ANTMAZE[size]
    conductor = DConductor(
        horizon=horizon,
        interval=30,
        goal_padding=False,
        min_speed=0.01,
        n_diffusion_steps=256,
        network="unet",
        width=32,
        mults=mults,
        clip=1.0,
        lr=2e-4,
        batch_size=64,
        n_updates=1_250_000,
        random_state=random_state,
        device=device,
    )
    performer = QPerformer(
        interval=30,
        reward_scale=4.0,
        reward_shift=-2.0,
        discount=0.99,
        relabel_p=0.2,
        n_critics=64,
        lcb=4.0,
        width=256,
        depth=2,
        critic_depth=3,
        lr=3e-4,
        n_updates=2_000_000,
        policy_delay=1,
        tau=0.005,
        ema=0.995,
        n_candidates=50,
        temperature=1.0,
        random_state=random_state,
        device=device,
    )
    return PlanDQ(conductor, performer, 15, 1, near, reached=0.5, subgoal_range=(0.5, 7.0))


def paper_locomotion(
    robot: str = "halfcheetah", n_features: int = 17, device: str = "cpu", random_state: int = 0
) -> PlanDQ:
    """Return PlanDQ as the authors ran it on locomotion, not yet trained.

    Sub-goals every 4 steps with dense actions, 20 reverse steps, 64 plans sorted by predicted
    return and guided by it; twin critics.

    Parameters
    ----------
    robot : {"halfcheetah", "hopper", "walker2d"}
    n_features : int
        Entries of an observation.
    device : str
    random_state : int

    Returns
    -------
    PlanDQ

    Examples
    --------
    >>> agent = paper_locomotion("hopper", n_features=11)
    >>> agent.conductor.guide_scale, len(agent.performer.goal_features)
    (0.0001, 11)
    """
    if robot not in LOCOMOTION:
        raise ValueError(f"robot must be one of {', '.join(LOCOMOTION)}, got {robot!r}.")
    state = tuple(range(n_features))
    conductor = DConductor(
        horizon=32,
        interval=4,
        features=state,
        goal_features=None,
        dense_actions=True,
        n_diffusion_steps=20,
        network="unet",
        width=32,
        mults=(1, 2, 4, 8),
        select="value",
        guide_scale=LOCOMOTION[robot],
        terminal_penalty=-100.0,
        clip=None,
        lr=2e-4,
        batch_size=64,
        n_updates=1_000_000,
        normalizer="gaussian",
        random_state=random_state,
        device=device,
    )
    performer = QPerformer(
        interval=4,
        goal_features=state,
        goal_reward="cosine",
        end_at_goal=False,
        reward_scale=1.0,
        discount=0.99,
        relabel_p=1.0,
        goal_noise=0.5,
        width=256,
        depth=2,
        critic_depth=3,
        lr=3e-4,
        n_updates=2_000_000,
        policy_delay=1,
        tau=0.005,
        ema=0.995,
        n_candidates=50,
        temperature=1.0,
        normalizer="gaussian",
        random_state=random_state,
        device=device,
    )
    return PlanDQ(conductor, performer, replan_every=1, n_plans=64)

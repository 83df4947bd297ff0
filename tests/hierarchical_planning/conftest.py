import numpy as np
import pytest

import icml24.hierarchical_planning as hp


@pytest.fixture(scope="session")
def logs():
    """A small maze data set."""
    maze = hp.Maze("umaze")
    return hp.collect_maze(hp.PointMaze(maze), maze, n_episodes=20, length=60, seed=1)


@pytest.fixture(scope="session")
def agent(logs):
    """An agent that has seen enough to be self-consistent, not to be good."""
    return hp.PlanDQ(
        hp.DConductor(horizon=20, interval=5, n_diffusion_steps=6, width=32, n_updates=20),
        hp.QPerformer(interval=5, width=32, n_updates=20),
        n_plans=4,
    ).fit(logs)


@pytest.fixture
def walk():
    """An episode on a straight line, with growing rewards."""
    x = np.linspace([0.0, 0.0], [1.0, 1.0], 13)
    return hp.Episode(x, np.zeros((12, 1)), np.arange(12.0))

"""Time of a decision and of a training step, PlanDQ against a flat diffusion planner."""

import numpy as np
import pytest
import torch

import icml24.hierarchical_planning as hp

MAZE = hp.Maze("medium")


@pytest.fixture(scope="module")
def logs():
    return hp.collect_maze(hp.PointMaze(MAZE), MAZE, n_episodes=40)


def conductor(n_updates=1):
    return hp.DConductor(interval=20, waves=3, n_updates=n_updates)


def flat_planner(n_updates=1):
    return hp.DConductor(
        horizon=103, interval=1, network="unet", width=16, batch_size=32, n_updates=n_updates
    )


@pytest.mark.benchmark(group="one plan for one robot")
@pytest.mark.parametrize("way", ["PlanDQ", "flat planner"])
def test_plan(benchmark, logs, way):
    planner = (conductor() if way == "PlanDQ" else flat_planner()).fit(logs)
    x, goal = np.zeros((1, 4)), np.array([2.0, -2.0])
    plan = benchmark.pedantic(lambda: planner.plan(x, goal), rounds=5, warmup_rounds=1)
    assert np.allclose(plan[0, -1], goal, atol=1e-5)


@pytest.mark.benchmark(group="160 decisions of one robot")
@pytest.mark.parametrize("way", ["PlanDQ", "flat planner"])
def test_control_loop(benchmark, logs, way):
    """The mean of a decision is a 160th; a control loop has to bear the slowest, a new plan."""
    if way == "PlanDQ":
        agent = hp.PlanDQ(conductor(), hp.QPerformer(n_updates=1)).fit(logs)
    else:
        control = hp.WaypointController(MAZE)
        agent = hp.Diffuser(flat_planner(), control.towards, replan_every=5).fit(logs)
    task = hp.PointMaze(MAZE, ((1, 1), (6, 6)))
    result = benchmark.pedantic(lambda: hp.evaluate_policy(agent, task, 1), rounds=1)
    assert result.paths.shape[2] == 4


@pytest.mark.benchmark(group="100 training steps")
@pytest.mark.parametrize("part", ["conductor", "performer", "flat planner"])
def test_training(benchmark, logs, part):
    make = {
        "conductor": lambda: conductor(100),
        "performer": lambda: hp.QPerformer(n_updates=100),
        "flat planner": lambda: flat_planner(100),
    }[part]
    benchmark.pedantic(lambda: make().fit(logs), rounds=1)


@pytest.mark.benchmark(group="64 critics, 256 transitions")
@pytest.mark.parametrize("way", ["one batched product", "one by one"])
def test_ensemble(benchmark, way):
    """The ensemble of the authors' AntMaze configuration."""
    stack = hp.StackedMLP(64, 8, 128)
    x = torch.randn(256, 8)

    def one_by_one():
        values = []
        for member in range(64):
            h = x
            for i, (w, b) in enumerate(zip(stack.weights, stack.biases, strict=True)):
                h = h @ w[member] + b[member]
                h = h.relu() if i < 2 else h
            values.append(h[:, 0])
        return torch.stack(values)

    with torch.no_grad():
        values = benchmark(one_by_one if way == "one by one" else lambda: stack(x))
        assert torch.allclose(values, stack(x), atol=1e-5)

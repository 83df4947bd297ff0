"""Routes counted by hand, the controller, tasks against MuJoCo and Gymnasium."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import icml24.hierarchical_planning as hp


def test_umaze_distances_by_hand():
    maze = hp.Maze("umaze")
    assert len(maze.cells) == 7
    assert maze.distances.max() == 6 == maze.distance((1, 1), (3, 1))
    assert maze.distance((1, 3), (3, 3)) == 2 and maze.distance((2, 3), (2, 3)) == 0
    assert maze.routes(6) == [((1, 1), (3, 1)), ((3, 1), (1, 1))]


@pytest.mark.parametrize(("layout", "longest"), [("umaze", 6), ("medium", 11), ("large", 19)])
def test_distances_are_a_metric(layout, longest):
    d = hp.Maze(layout).distances
    assert d.max() == longest and np.array_equal(d, d.T)
    assert (d[:, None] <= d[:, :, None] + d[None]).all()


def test_next_cell_is_one_step_nearer():
    maze = hp.Maze("medium")
    step, d = maze.next_cells(), maze.distances
    n = np.arange(len(maze.cells))
    for goal in n:
        apart = n != goal
        assert (d[step[apart, goal], goal] == d[apart, goal] - 1).all()
        assert (d[n, step[n, goal]][apart] == 1).all()


@given(index=st.integers(0, 25), dx=st.floats(-0.49, 0.49), dy=st.floats(-0.49, 0.49))
def test_positions_and_cells_invert(index, dx, dy):
    maze = hp.Maze("medium")
    cell = maze.cells[index]
    assert maze.cell_of(maze.position(cell) + [dx, dy]) == cell


def test_maps_without_walls_around_or_routes():
    with pytest.raises(ValueError, match="walls all around"):
        hp.Maze(["...", "...", "..."])
    with pytest.raises(ValueError, match="equal length"):
        hp.Maze(["###", "##"])
    with pytest.raises(ValueError, match="umaze, medium, large"):
        hp.Maze("huge")
    parted = hp.Maze(["#####", "#.#.#", "#####"])
    with pytest.raises(ValueError, match="No route"):
        parted.distance((1, 1), (1, 3))
    with pytest.raises(ValueError, match="no free cell"):
        parted.index((0, 0))


def test_controller_reaches_every_cell_without_touching_the_map_of_the_task():
    maze = hp.Maze("medium")
    control = hp.WaypointController(maze)
    for i, goal in enumerate(maze.cells):
        task = hp.PointMaze(maze, route=((5, 1), goal), max_steps=90)
        result = hp.evaluate_policy(control, task, 2, seed=i)
        assert result.success.all(), goal


def test_numpy_maze_equals_mujoco_away_from_walls():
    pytest.importorskip("gymnasium_robotics")
    real, ours = hp.mujoco_maze("umaze", ((1, 1), (3, 1))), hp.PointMaze("umaze")
    x, goal = real.reset([3])
    ours.reset([3])
    ours._x, ours._v, ours._goal = x[:, :2].copy(), x[:, 2:].copy(), goal.copy()
    rng = np.random.default_rng(0)
    for _ in range(6):
        action = rng.uniform(-0.3, 0.3, (1, 2))
        a, b = real.step(action), ours.step(action)
        assert np.abs(a.observations - b.observations).max() < 1e-9
    real.close()


def test_walls_stop_the_ball_and_nothing_else_does():
    task = hp.PointMaze("umaze", route=((1, 1), (3, 1)))
    task.reset([0])
    for _ in range(60):
        step = task.step([[0.0, 1.0]])
    top = 2.5 - 1 - 0.1
    assert top - 0.06 < step.observations[0, 1] <= top and step.observations[0, 3] == 0
    for _ in range(12):
        step = task.step([[1.0, 0.0]])
    assert step.observations[0, 0] > 0.5


def test_finished_rows_stand_still_and_are_rewarded_once():
    task = hp.PointMaze("umaze", route=((1, 1), (1, 1)))
    task.reset([0, 1])
    first, second = task.step(np.ones((2, 2))), task.step(np.ones((2, 2)))
    assert first.rewards.tolist() == [1, 1] and second.rewards.tolist() == [0, 0]
    assert np.array_equal(first.observations, second.observations) and second.success.all()


def test_pendulum_equals_gymnasium_step_for_step():
    gymnasium = pytest.importorskip("gymnasium")
    env, ours = gymnasium.make("Pendulum-v1").unwrapped, hp.Pendulum()
    x, _ = env.reset(seed=7)
    mine, _ = ours.reset([3, 7])
    assert np.abs(mine[1] - x).max() < 1e-6
    rng = np.random.default_rng(0)
    for _ in range(200):
        action = rng.uniform(-2.5, 2.5, 1).astype(np.float32)
        ours._state[1] = env.state  # Gymnasium's torque is rounded to single precision
        x, reward, *_ = env.step(action)
        step = ours.step(np.stack([action, action]))
        assert np.abs(step.observations[1] - x).max() < 1e-6
        assert abs(step.rewards[1] - reward) < 1e-5


def test_gym_task_runs_any_environment_and_adds_up_repeats():
    pytest.importorskip("gymnasium")
    task, ours = hp.GymTask("Pendulum-v1", repeat=3), hp.Pendulum()
    x, goals = task.reset([0, 1])
    assert goals is None and x.shape == (2, 3)
    ours.reset([0, 1])
    step = task.step([[1.0], [-1.0]])
    rewards = sum(ours.step([[1.0], [-1.0]]).rewards for _ in range(3))
    assert np.allclose(step.rewards, rewards, atol=1e-5)
    task.close()


def test_gym_task_reads_goals_and_success():
    pytest.importorskip("gymnasium_robotics")
    task = hp.mujoco_maze("umaze", ((1, 1), (1, 1)))
    x, goals = task.reset([0, 1])
    assert x.shape == (2, 4) and goals.shape == (2, 2)
    step = task.step(np.zeros((2, 2)))
    assert step.success.all() and step.terminated.all()
    again = task.step(np.ones((2, 2)))
    assert np.array_equal(again.observations, step.observations)
    x, _ = hp.mujoco_maze("umaze", ((1, 1), (1, 1)), endless=True).reset([0])
    task.close()


class Arena:
    """A state of three numbers; the goal is a whole state and comes with ``info``."""

    class action_space:
        low, high, shape = -np.ones(2), np.ones(2), (2,)

    def reset(self, seed, options=None):
        return np.array([seed, 0.0, 7.0]), {"goal": np.array([1.0, 2.0, 9.0])}

    def step(self, action):
        return np.array([*action, 7.0]), -1.0, False, False, {"success": float(action[0] > 0)}


def test_goals_that_come_with_info():
    _, goals = hp.GymTask(Arena).reset([3, 4])
    assert np.array_equal(goals, [[1, 2, 9]] * 2)
    task = hp.GymTask(Arena, goal_features=(1, 0))
    x, goals = task.reset([3, 4])
    assert np.array_equal(x, [[3, 0, 7], [4, 0, 7]]) and np.array_equal(goals, [[2, 1]] * 2)
    assert np.array_equal(task.step([[0.5, 0.0], [-0.5, 0.0]]).success, [True, False])


@pytest.mark.parametrize(("robot", "size"), [("pointmaze", 2), ("antmaze", 29)])
def test_ogbench(robot, size):
    ogbench = pytest.importorskip("ogbench", reason="needs ogbench: pip install ogbench")
    task = hp.GymTask(
        lambda: ogbench.make_env_and_datasets(f"{robot}-medium-navigate-v0", env_only=True),
        max_steps=5,
        goal_features=(0, 1),
    )
    x, goals = task.reset([0, 1])
    assert x.shape == (2, size) and goals.shape == (2, 2)
    walker = hp.Controller(lambda x, goal: np.zeros((len(x), len(task.action_low))))
    result = hp.evaluate_policy(walker, task, 2)
    assert result.paths.shape[0] == 2 and not result.success.any()
    task.close()


def test_unbounded_actions_and_odd_dictionaries():
    class Space:
        low, high, shape = np.array([-np.inf]), np.array([np.inf]), (1,)

    class Env:
        action_space = Space()

    with pytest.raises(ValueError, match=r"finite bounds.*RescaleAction"):
        hp.GymTask(Env)
    with pytest.raises(ValueError, match="key 'observation'"):
        hp.GymTask("Pendulum-v1")._split({"pixels": 0})


def test_bad_actions_and_settings():
    task = hp.PointMaze("umaze")
    task.reset([0])
    with pytest.raises(ValueError, match="shape"):
        task.step([[0.0, 0.0, 0.0]])
    with pytest.raises(ValueError, match="NaN"):
        task.step([[np.nan, 0.0]])
    with pytest.raises(ValueError, match="at least 1"):
        hp.PointMaze(repeat=0)
    with pytest.raises(ValueError, match="umaze, medium, large"):
        hp.mujoco_maze("huge")


def test_swing_up_holds_the_top():
    result = hp.evaluate_policy(hp.Controller(hp.swing_up), hp.Pendulum(), 50)
    assert (result.paths[:, -1, 0] > 0.99).all() and result.returns.mean() > -200


def test_waypoints_lie_ahead_on_the_shortest_route():
    maze = hp.Maze("umaze")
    control = hp.WaypointController(maze)
    route = [(1, 1), (1, 2), (1, 3), (2, 3), (3, 3), (3, 2), (3, 1)]
    start, goal = maze.position(route[0])[None], maze.position(route[-1])[None] + 0.1
    for ahead in range(1, 6):
        found = control.waypoint(start, goal, ahead)[0]
        assert np.array_equal(found, maze.position(route[ahead]))
    assert np.allclose(control.waypoint(start, goal, 9), goal)


def test_the_place_of_an_ant_is_joined_to_what_it_observes():
    pytest.importorskip("gymnasium_robotics")
    hp.mujoco_maze("umaze")  # registers the environments
    options = {"reset_cell": np.array((1, 1)), "goal_cell": np.array((3, 1))}
    ant = hp.GymTask(
        "AntMaze_UMaze-v5", max_steps=3, options=options, keys=("achieved_goal", "observation")
    )
    x, goals = ant.reset([0])
    assert x.shape == (1, 107) and goals.shape == (1, 2)
    assert np.abs(x[0, :2] - [-4, 4]).max() < 1.1  # cells of four metres
    assert not ant.step(np.zeros((1, 8))).terminated.any()

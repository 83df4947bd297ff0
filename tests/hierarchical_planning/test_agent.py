"""The joint loop, saving, evaluation, and the other agents."""

import copy
import itertools

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

import icml24.hierarchical_planning as hp


class Recorder:
    """A performer that notes where it is sent."""

    def __init__(self):
        self._columns, self.targets = [0, 1], []

    def _check_fitted(self):
        pass

    def act(self, x, goal, generator=None):
        self.targets.append(np.array(goal))
        return np.zeros((len(x), 2))


def hollow(agent, **settings):
    recorder = Recorder()
    return hp.PlanDQ(agent.conductor, recorder, **settings), recorder


def test_plans_every_r_decisions_and_follows_the_first_sub_goal(agent):
    loop, seen = hollow(agent, replan_every=3, goal_distance=0.0)
    x, goal = np.zeros((2, 4)), np.array([1.0, 1.0])
    plans = []
    for _ in range(7):
        loop.act(x, goal)
        plans.append(loop.plan_.copy())
    changed = [not np.array_equal(a, b) for a, b in itertools.pairwise(plans)]
    assert changed == [False, False, True, False, False, True]
    for target, plan in zip(seen.targets, plans, strict=True):
        assert np.array_equal(target, plan[:, 1])
    assert np.allclose(plans[0][:, -1], goal, atol=1e-5)


def test_near_the_goal_it_aims_at_the_goal(agent):
    loop, seen = hollow(agent, goal_distance=1.0)
    x = np.array([[0.0, 0.0, 0.0, 0.0], [1.0, -1.0, 0.0, 0.0]])
    loop.act(x, np.array([1.0, -0.5]))
    assert seen.targets[0][1].tolist() == [1.0, -0.5]
    assert seen.targets[0][0].tolist() != [1.0, -0.5]


def test_a_reached_sub_goal_is_replaced_for_its_row_only(agent):
    loop, _ = hollow(agent, replan_every=100, reached=1e-3, goal_distance=0.0)
    x = np.zeros((2, 4))
    loop.act(x, np.array([1.0, 1.0]))
    first = loop.plan_.copy()
    x[1, :2] = first[1, 1]
    loop.act(x, np.array([1.0, 1.0]))
    assert np.array_equal(loop.plan_[0], first[0]) and not np.array_equal(loop.plan_[1], first[1])


def test_an_early_replacement_leaves_the_clock_of_the_other_rows(agent):
    loop, _ = hollow(agent, replan_every=3, reached=1e-3, goal_distance=0.0)
    x, goal, plans = np.zeros((2, 4)), np.array([1.0, 1.0]), []
    for step in range(4):
        loop.act(x, goal)
        plans.append(loop.plan_.copy())
        x[1, :2] = plans[0][1, 1] if step == 0 else 0.0  # row 1 arrives after one decision
    changed = [
        [not np.array_equal(a[row], b[row]) for a, b in itertools.pairwise(plans)] for row in (0, 1)
    ]
    assert changed == [[False, False, True], [True, False, False]]


def test_sub_goals_out_of_range_are_passed_over(agent):
    x, goal = np.zeros((1, 4)), np.array([1.0, 1.0])
    free, _ = hollow(agent, n_plans=16)
    tokens = free.conductor.sample_tokens(x, goal, 16, torch.Generator().manual_seed(0))
    states = free.conductor.sub_goals(tokens)
    steps = np.linalg.norm(states[0, :, 1] - states[0, :, 0], axis=-1)
    middle = float(np.median(steps))
    loop, _ = hollow(agent, n_plans=16, subgoal_range=(middle, 99.0))
    loop.act(x, goal)
    assert np.linalg.norm(loop.plan_[0, 1] - loop.plan_[0, 0]) >= middle - 1e-6
    none, _ = hollow(agent, n_plans=16, subgoal_range=(98.0, 99.0))
    none.act(x, goal)  # none fits: the best of all is taken


def test_one_observation_rows_and_dictionaries(agent):
    x, goal = np.zeros(4), np.array([1.0, 1.0])
    agent.reset(0)
    one = agent.act(x, goal)
    agent.reset(0)
    rows = agent.act(x[None], goal[None])
    agent.reset(0)
    named = agent.predict({"observation": x, "desired_goal": goal, "achieved_goal": x[:2]})
    assert one.shape == (2,) and rows.shape == (1, 2)
    assert np.array_equal(one, rows[0]) and np.array_equal(one, named)


def test_acting_is_reproducible_and_changes_nothing(agent):
    before, weights = torch.get_rng_state(), copy.deepcopy(agent.performer.state())
    task = hp.PointMaze("umaze", max_steps=10)
    a, b = (hp.evaluate_policy(agent, task, 3, seed=5) for _ in range(2))
    c = hp.evaluate_policy(agent, task, 3, seed=6)
    assert np.array_equal(a.paths, b.paths) and not np.array_equal(a.paths, c.paths)
    assert torch.equal(torch.get_rng_state(), before)
    for key, value in agent.performer.state().items():
        assert np.array_equal(value, weights[key])


@pytest.mark.parametrize("half", [False, True])
def test_saved_agents_act_the_same(agent, tmp_path, half):
    path = tmp_path / "agent.npz"
    agent.save(path, half=half)
    back = hp.load(path)
    assert back.conductor.get_params() == agent.conductor.get_params()
    assert back.n_plans == agent.n_plans and not path.with_suffix(".tmp").exists()
    x, goal = np.zeros((3, 4)), np.array([1.0, 1.0])
    agent.reset(1)
    back.reset(1)
    gap = np.abs(agent.act(x, goal) - back.act(x, goal)).max()
    assert gap < 0.2 if half else gap < 1e-6
    with np.load(path, allow_pickle=False) as file:
        assert all(file[name].dtype != object for name in file.files)


def test_a_loaded_agent_acts_in_the_units_of_the_environment(tmp_path):
    data = hp.OfflineDataset.from_episodes(
        [hp.Episode(np.zeros((2, 1)), [[1.5]], [0.0]) for _ in range(9)], 1.0, 7.0
    )
    agent = hp.diffusion_ql(n_updates=1, width=8).fit(data)
    agent.save(tmp_path / "agent.npz")
    back = hp.load(tmp_path / "agent.npz")
    x = np.zeros((20, 1))
    assert np.allclose(back.act(x), agent.act(x), atol=1e-6)


def test_saving_refuses_what_it_cannot_write(agent, tmp_path):
    with pytest.raises(ValueError, match=r"end in \.npz"):
        agent.save(tmp_path / "agent.pt")
    odd = hp.PlanDQ(agent.conductor, copy.copy(agent.performer))
    odd.performer.goal_reward = lambda a, b: a
    with pytest.raises(ValueError, match="is a function"):
        odd.save(tmp_path / "agent.npz")
    assert list(tmp_path.iterdir()) == []
    np.savez(tmp_path / "other.npz", x=np.zeros(1))
    with pytest.raises(ValueError, match="save of an agent"):
        hp.load(tmp_path / "other.npz")


def test_bad_input_while_acting(agent):
    for wrong, message in (
        (np.full(4, np.nan), "observation contains NaN"),
        (np.zeros(3), "4 entries"),
    ):
        with pytest.raises(ValueError, match=message):
            agent.act(wrong, [1.0, 1.0])
    agent.reset()
    with pytest.raises(ValueError, match="pass one"):
        agent.act(np.zeros(4))
    agent.reset()
    with pytest.raises(ValueError, match="outside the data"):
        agent.act(np.zeros(4), [99.0, 0.0])
    with pytest.raises(ValueError, match="at least 1"):
        hp.PlanDQ(agent.conductor, agent.performer, replan_every=0)
    with pytest.raises(NotFittedError):
        hp.PlanDQ(hp.DConductor(), hp.QPerformer()).act(np.zeros(4), [0.0, 0.0])


def test_evaluation_counts():
    class Script(hp.Task):
        """Row 0 ends after two steps with success, row 1 after three without."""

        action_low, action_high, max_steps = -np.ones(1), np.ones(1), 9

        def reset(self, seeds):
            self.t, self.seeds = 0, list(seeds)
            return np.zeros((2, 1)), None

        def step(self, actions):
            self.t += 1
            done = np.array([self.t >= 2, self.t >= 3])
            return hp.Step(
                np.full((2, 1), self.t), np.ones(2), done, np.array([self.t >= 2, False])
            )

    task = Script()
    result = hp.evaluate_policy(hp.Controller(lambda x, g: x), task, 2, seed=3)
    assert task.seeds == [3000, 3001]
    assert result.lengths.tolist() == [2, 3] and result.returns.tolist() == [2, 3]
    assert result.success.tolist() == [True, False] and result.success_rate.value == 0.5
    assert result.path(0).ravel().tolist() == [0, 1, 2]
    assert "2 episodes" in str(result)
    with pytest.raises(ValueError, match="at least 1"):
        hp.evaluate_policy(hp.Controller(lambda x, g: x), task, 0)


def test_scores():
    assert hp.normalized_score([-1.0, 1.0], -1.0, 1.0).tolist() == [0, 100]
    with pytest.raises(ValueError, match="differ"):
        hp.normalized_score([0.0], 1.0, 1.0)


@pytest.mark.parametrize("make", [hp.goal_conditioned_dql, hp.behaviour_cloning, hp.diffusion_ql])
def test_flat_agents_act(logs, make):
    agent = make(width=16, n_updates=3).fit(logs)
    task = hp.PointMaze("umaze", max_steps=3)
    result = hp.evaluate_policy(agent, task, 2)
    assert result.paths.shape == (2, 4, 4)
    assert agent.act(np.zeros(4), [0.0, 0.0]).shape == (2,)
    performer = agent.performer  # who learns from what
    wanted = {
        hp.goal_conditioned_dql: (None, 0.3, 2, 0.0),
        hp.behaviour_cloning: (None, 0.0, 0, 0.0),
        hp.diffusion_ql: (0.5, 0.0, 2, 1.0),
    }
    names = ("relabel_p", "random_goals", "n_critics", "reward_scale")
    assert tuple(getattr(performer, name) for name in names) == wanted[make]


@pytest.mark.parametrize("dense", [False, True])
def test_flat_planner_acts(logs, dense):
    planner = hp.DConductor(
        horizon=20, interval=1, dense_actions=dense, n_diffusion_steps=3, width=16, n_updates=2
    )
    control = None if dense else hp.WaypointController(hp.Maze("umaze")).towards
    agent = hp.Diffuser(planner, control, replan_every=1 if dense else 4).fit(logs)
    assert hp.evaluate_policy(agent, hp.PointMaze("umaze", max_steps=6), 2).paths.shape[0] == 2
    with pytest.raises(ValueError, match="interval=1"):
        hp.Diffuser(hp.DConductor())
    with pytest.raises(ValueError, match="not both"):
        hp.Diffuser(planner, (lambda x, w: x) if dense else None)
    if dense:
        with pytest.raises(ValueError, match="replan_every=1"):
            hp.Diffuser(planner, replan_every=2)


def test_combinations_act_and_are_saved(logs, tmp_path):
    q = hp.QConductor(interval=5, width=16, n_updates=3)
    d = hp.DPerformer(interval=5, width=16, n_updates=3, n_diffusion_steps=3)
    agent = hp.PlanDQ(q, d).fit(logs)
    agent.save(tmp_path / "both.npz")
    back = hp.load(tmp_path / "both.npz")
    x, goal = np.zeros((2, 4)), np.array([1.0, 1.0])
    agent.reset(0)
    assert np.allclose(agent.act(x, goal), back.act(x, goal), atol=1e-6)


@pytest.mark.slow
def test_sub_goal_policy_leads_along_a_line():
    x = np.stack([np.arange(31.0), np.zeros(31)], axis=1)
    data = hp.OfflineDataset.from_episodes(
        [hp.Episode(x + [0, i], np.zeros((30, 1)), np.zeros(30)) for i in (0, 1)]
    )
    q = hp.QConductor(interval=5, width=64, n_updates=400, random_goals=0.0).fit(data)
    plan = q.plan([[5.0, 0.0], [20.0, 1.0]], [[25.0, 0.0], [28.0, 1.0]])
    assert np.abs(plan[:, 1, 0] - [10, 25]).max() < 1.5
    near = q.plan([[5.0, 0.0]], [[7.0, 0.0]])
    assert abs(near[0, 1, 0] - 7) < 1.5  # a sub-goal does not lie behind the goal
    free = hp.QConductor(interval=5, goal_features=None, width=64, n_updates=400).fit(data)
    assert abs(free.plan([[5.0, 0.0]])[0, 1, 0] - 10) < 1.5


@pytest.mark.slow
def test_sub_goal_policy_prefers_the_shorter_way():
    """Half of the log goes to the left first, before it comes to the goal on the right."""
    direct = np.r_[np.arange(0.0, 9), np.full(16, 8.0)]
    detour = np.r_[np.arange(0, -9.0, -1), np.arange(-7.0, 9)]
    data = hp.OfflineDataset.from_episodes(
        [
            hp.Episode(way[:, None] * [1, 0], np.zeros((24, 1)), np.zeros(24))
            for way in (direct, detour)
        ]
    )
    q = hp.QConductor(interval=4, width=64, n_updates=600, random_goals=0.0).fit(data)
    assert q.plan([[0.0, 0.0]], [[8.0, 0.0]])[0, 1, 0] > 1


def test_values_of_the_sub_goal_policy_are_expectiles(logs):
    q = hp.QConductor(interval=5, width=16, n_updates=1, expectile=0.8).fit(logs)
    values = list(q.values_.parameters())
    adam = torch.optim.Adam(values, lr=0.01)
    here, reward = torch.zeros(100, 6), (torch.arange(100) < 50).float()
    for _ in range(400):
        q._value_step(adam, values, here, here, reward, torch.zeros(100))
    assert (q.values_(here)[:, 0] - 0.8).abs().max() < 0.05  # of a fair coin


def test_gain_of_a_sub_goal_by_hand(walk):
    """Rewards 0, 1, 2, ... and values of zero: three of them are gained, discounted."""
    data = hp.OfflineDataset.from_episodes([walk])
    q = hp.QConductor(interval=3, goal_features=None, discount=0.5, width=8, n_updates=1).fit(data)
    row, ahead = torch.tensor([2, 10]), torch.tensor([5, 12])
    here, there = torch.zeros(2, 2), torch.ones(2, 2)
    gain = q._return_gain(data, row, ahead, here, there, torch.tensor(1.0))
    value = q.targets_(here).mean(0), q.targets_(there).mean(0)
    by_hand = torch.tensor([2 + 3 / 2 + 4 / 4, 10 + 11 / 2])
    later = torch.tensor([0.5**3, 0.5**2]) * value[1]
    assert torch.allclose(gain, by_hand + later - value[0])


def test_flat_planner_aims_a_few_decisions_ahead(logs):
    aims = []

    def control(x, waypoint):
        aims.append(waypoint)
        return np.zeros((len(x), 2))

    planner = hp.DConductor(horizon=20, interval=1, n_diffusion_steps=3, width=16, n_updates=2)
    agent = hp.Diffuser(planner, control, lookahead=3, replan_every=4).fit(logs)
    plans = []
    for _ in range(5):
        agent.act(np.zeros((1, 4)), [[1.0, 1.0]])
        plans.append(agent.plan_)
    for age in range(4):
        assert np.array_equal(aims[age], plans[0][:, age + 3])
    assert not np.array_equal(plans[4], plans[0])
    assert np.array_equal(aims[4], plans[4][:, 3])


@pytest.mark.slow
def test_segments_end_at_their_goal_with_the_right_action():
    """The action is the displacement: a goal to the left needs a negative one."""
    rng = np.random.default_rng(0)
    a = rng.choice([-1.0, 1.0], (60, 1)).repeat(8, 1)
    x = np.concatenate([np.zeros((60, 1)), a.cumsum(1)], axis=1)
    data = hp.OfflineDataset.from_episodes(
        [
            hp.Episode(xx[:, None] * [1, 0], aa[:, None], np.zeros(8))
            for xx, aa in zip(x, a, strict=True)
        ]
    )
    d = hp.DPerformer(interval=4, n_updates=400, width=64, n_diffusion_steps=8).fit(data)
    action = d.act([[0.0, 0.0]] * 2, [[3.0, 0.0], [-3.0, 0.0]])
    assert action[0, 0] > 0.8 and action[1, 0] < -0.8

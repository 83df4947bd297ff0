"""All experiments at a tiny scale, the stored records, and the command that makes them."""

import json
import tomllib
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

import icml24.hierarchical_planning as hp
from icml24.core.experiments import run
from icml24.hierarchical_planning import experiments
from icml24.hierarchical_planning.experiments import Config

TINY = replace(
    Config.laptop(),
    simulator="numpy",
    maze="umaze",
    route=((1, 1), (2, 3)),
    n_logs=6,
    log_length=110,
    n_episodes=2,
    n_curve=1,
    lengths=(1, 3),
    max_steps=8,
    conductor_updates=3,
    performer_updates=3,
    flat_updates=3,
    diffuser_updates=2,
    width=32,
    diffuser_width=8,
    pendulum_logs=3,
    pendulum_updates=3,
    pendulum_steps=4,
)
AGENTS = {"PlanDQ", "Q + Q", "diffusion + diffusion", "Q + diffusion", "imitation", "Q on the task"}


def test_sparse_experiment_runs_and_repeats():
    record = experiments.sparse(TINY, 0)
    assert AGENTS | {"goal-conditioned Q"} <= set(record)
    assert len(record["curve PlanDQ"]) == 2
    again = run(experiments.sparse, TINY, seeds=[0])
    for name in AGENTS:
        assert again[name][0]["decisions"] == record[name]["decisions"]
        assert 0 <= record[name]["success"] <= 1 and record[name]["cpu"] >= 0


def test_dense_experiment_runs():
    record = experiments.dense(TINY, 1)
    assert AGENTS | {"Diffuser", "behaviour", "sensitivity"} <= set(record)
    assert all(np.isfinite(record[name]) for name in AGENTS)


def test_flat_planner_reports_the_best_interval():
    record = experiments.flat_planner(TINY, 0)
    assert record["success"] == max(record["by_interval"].values())


def test_flat_planner_counts_the_interval_in_its_favour(monkeypatch):
    found = {3: 0.2, 12: 0.7, 60: 0.1}

    def measure(agent, *_):
        return {"success": found[agent.replan_every], "decisions": 1.0, "cpu": 1.0}

    monkeypatch.setattr(experiments, "_measure", measure)
    assert experiments.flat_planner(TINY, 0)["success"] == 0.7


def test_the_flat_learner_of_the_task_sees_its_reward(monkeypatch):
    seen, real = [], experiments.diffusion_ql

    def spy(**settings):
        agent = real(**settings)
        fit = agent.fit
        agent.fit = lambda data: (seen.append(data.rewards.sum().item()), fit(data))[1]
        return agent

    monkeypatch.setattr(experiments, "diffusion_ql", spy)
    experiments.sparse(replace(TINY, n_logs=20), 0)
    assert seen[0] > 0


def test_ending_runs():
    assert np.isfinite(list(experiments.ending(TINY, 0).values())).all()


def test_what_is_measured_is_what_is_stored(tmp_path):
    agent = experiments.sparse_agent(TINY, 0)
    agent.save(tmp_path / "agent.npz", half=True)
    back = hp.load(tmp_path / "agent.npz")
    for part in ("conductor", "performer"):
        learnt, read = getattr(agent, part).state(), getattr(back, part).state()
        assert all(np.array_equal(learnt[name], read[name]) for name in learnt)


def test_routes_of_the_curve_have_their_length_and_change_with_the_seed():
    config = Config.laptop()
    routes = [experiments.route_of_length(config, 5, seed) for seed in range(6)]
    assert all(hp.Maze(config.maze).distance(*route) == 5 for route in routes)
    assert len(set(routes)) > 1


def test_ablations_run():
    record = experiments.ablations(TINY, 0)
    assert "as is" in record and len(record) >= 8


def test_the_mujoco_maze_serves_as_well():
    pytest.importorskip("gymnasium_robotics")
    task = experiments.maze_task(replace(TINY, simulator="mujoco"))
    x, goals = task.reset([0, 1])
    assert x.shape == (2, 4) and goals.shape == (2, 2) and task.max_steps == 8
    with pytest.raises(ValueError, match="'mujoco' or 'numpy'"):
        experiments.maze_task(replace(TINY, simulator="bullet"))


def test_make_writes_records_and_agents(tmp_path, monkeypatch):
    monkeypatch.setenv("ICML24_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"flat_planner": experiments.flat_planner})
    experiments.make(tmp_path, TINY, {"flat_planner": (0, 1)})
    rows = json.loads((tmp_path / "flat_planner.json").read_text())
    assert [row["seed"] for row in rows] == [0, 1]
    for name in ("maze", "flat", "pendulum"):
        assert isinstance(hp.load(tmp_path / f"{name}.npz"), hp.PlanDQ | hp.FlatAgent)
    assert not list(tmp_path.glob("*.tmp"))


HERE = resources.files("icml24.hierarchical_planning").joinpath("data")
stored_only = pytest.mark.skipif(
    not HERE.joinpath("sparse.json").is_file(),
    reason="no records yet: python -m icml24.hierarchical_planning.experiments makes them",
)


@stored_only
def test_stored_records_are_complete():
    for name, seeds in experiments.SEEDS.items():
        frame = experiments.stored(name)
        assert frame["seed"].tolist() == list(seeds), name
        assert not frame.isna().any().any(), name


def test_unknown_names_of_records_and_agents():
    with pytest.raises(ValueError, match="sparse, flat_planner"):
        experiments.stored("maze")
    with pytest.raises(ValueError, match="'maze', 'flat' or 'pendulum'"):
        experiments.stored_agent("ant")


@stored_only
def test_stored_agents_give_the_stored_records():
    config = Config.laptop()
    task = experiments.maze_task(config)
    sparse = experiments.stored("sparse")
    for agent, name in (("maze", "PlanDQ"), ("flat", "goal-conditioned Q")):
        result = hp.evaluate_policy(experiments.stored_agent(agent), task, 20, seed=1)
        assert abs(result.success.mean() - sparse[name][0]["success"]) <= 0.15
    dense = experiments.stored("dense")
    result = hp.evaluate_policy(experiments.stored_agent("pendulum"), hp.Pendulum(), 5, seed=1)
    score = hp.normalized_score(result.returns, *hp.pendulum_references())
    assert abs(score.mean() - dense["PlanDQ"][0]) < 25


@stored_only
@pytest.mark.slow
def test_a_cheap_part_of_the_record_is_made_again():
    """The imitation on the pendulum, its second seed, from data to score."""
    config = Config.laptop()
    data = hp.collect_pendulum(config.pendulum_logs, seed=2)
    agent = hp.behaviour_cloning(
        n_updates=config.pendulum_updates, random_state=2, goal_features=None
    ).fit(data)
    returns = hp.evaluate_policy(agent, hp.Pendulum(), config.n_episodes, 2).returns
    score = hp.normalized_score(returns, *hp.pendulum_references()).mean()
    assert abs(score - experiments.stored("dense")["imitation"][1]) < 8


def test_paper_sizes():
    paper = Config.paper()
    assert paper.conductor_updates == 2_500_000 and paper.performer_updates == 2_000_000


def test_presets_follow_the_two_branches_of_the_published_code():
    ant, robot = hp.paper_antmaze("medium").performer, hp.paper_locomotion("hopper", 11).performer
    assert ant.end_at_goal and not robot.end_at_goal
    assert (ant.n_critics, ant.lcb, ant.reward_scale, ant.reward_shift) == (64, 4.0, 4.0, -2.0)
    assert robot.goal_reward == "cosine" and robot.goal_noise > 0 and robot.relabel_p == 1.0


def test_claims_are_declared_once_and_completely():
    text = resources.files("icml24.hierarchical_planning").joinpath("claims.toml").read_text()
    claims = tomllib.loads(text)["claim"]
    assert len({c["id"] for c in claims}) == len(claims) == 11
    assert all(("accept" in c) != ("not_testable" in c) for c in claims)

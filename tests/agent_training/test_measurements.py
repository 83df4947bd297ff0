"""Theory, audit, data and experiments."""

import json
import math
import tomllib
from importlib import resources

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from icml24.agent_training import (
    Task,
    load_gaia,
    load_math,
    load_reasoning_gym,
    load_tabmwp,
    make_table_qa,
)
from icml24.agent_training.audit import (
    TABLE_1,
    TABLE_2,
    paper_cells,
    sign_test,
    smallest_denominator,
)
from icml24.agent_training.data import DOMAINS, TABLE_TYPES, families, load_tables, read_pairs
from icml24.agent_training.experiments import (
    EXPERIMENTS,
    METHODS,
    Config,
    early_stop,
    training,
    transfer,
)
from icml24.agent_training.theory import (
    first_violation,
    lemma_width,
    simulate_violations,
    union_width,
    violation_probability,
)
from icml24.core.experiments import run

# --- the bound ---


def test_order_statistics_of_the_counter_example():
    assert lemma_width(20) == pytest.approx(0.3037, abs=1e-4)
    for v, expected in ((1, 0.0013), (110, 0.132), (1000, 0.725)):
        assert violation_probability(v) == pytest.approx(expected, abs=1e-3)
    # by hand: P[Bin(20, 1/2) >= 17], since 16/20 - 1/2 = .3 is within the width
    tail = sum(math.comb(20, k) for k in range(17, 21)) / 2**20
    assert violation_probability(1) == pytest.approx(tail, rel=1e-12)
    assert violation_probability(7) == pytest.approx(1 - (1 - tail) ** 7, rel=1e-10)


def test_the_lemma_first_fails_at_forty_sets():
    assert first_violation() == 40
    assert violation_probability(39) <= 0.05 < violation_probability(40)


def test_the_union_bound_holds_and_the_simulation_agrees():
    for v in (1, 40, 110, 1000):
        lemma, union = simulate_violations(v, runs=40_000)
        exact = violation_probability(v)
        assert abs(lemma - exact) < 5 * math.sqrt(exact * (1 - exact) / 40_000) + 1e-4
        assert union <= 0.05 and violation_probability(v, width=union_width(20, v)) <= 0.05
    naive = np.random.default_rng(0).binomial(20, 0.5, (4000, 110)).max(1) / 20 - 0.5
    assert np.mean(naive > lemma_width(20)) == pytest.approx(violation_probability(110), abs=0.03)


@given(st.integers(1, 400), st.floats(0.01, 0.5), st.floats(0.05, 0.95))
def test_hoeffding_covers_one_fixed_set(n, delta, p):
    assert violation_probability(1, n, lemma_width(n, delta), p) <= delta / 2 + 1e-12


def test_bad_arguments_of_the_bound():
    for bad in (lambda: lemma_width(0), lambda: lemma_width(5, 1.0), lambda: union_width(5, 0)):
        with pytest.raises(ValueError, match="must"):
            bad()
    with pytest.raises(ValueError, match="exceeds"):
        first_violation(n=2)


# --- the paper's tables ---


def test_denominators_tell_the_true_splits():
    for agent, (before, after, train_before, train_after) in TABLE_1.items():
        assert smallest_denominator([*train_before, *train_after]) == 20, agent
        tests = [x for x in (*before, *after) if x != 82.6]  # no multiple of 1/80: a misprint
        assert smallest_denominator(tests) == 80
    assert smallest_denominator([82.6, 78.8], largest=80) != 80
    tabmwp = [x for (data, _), t in TABLE_2.items() if data == "TabMWP" for x in t[:2]]
    assert smallest_denominator(tabmwp) == 30
    assert smallest_denominator([16, 23, 12, 18, 51, 56, 59, 70]) == 100


def test_reanalysis_of_the_tables():
    cells = paper_cells()
    math_cells = cells[cells["n"] == 80]
    sums = math_cells.groupby("agent")[["solved_before", "solved_after"]].sum()
    assert sums.loc["GPT-4+"].tolist() == [301, 326] and sums.loc["ReAct"].tolist() == [377, 395]
    up, n, p = sign_test(math_cells["after"] - math_cells["before"])
    assert (up, n) == (11, 13) and p == pytest.approx(0.02246, abs=1e-5)
    assert stats.wilcoxon(math_cells["solved_after"] - math_cells["solved_before"]).pvalue < 0.01
    assert cells["fisher_p"].min() > 0.05  # no cell is significant by itself
    assert math_cells["fisher_p"].min() == pytest.approx(0.19, abs=0.01)
    others = cells[cells["n"] == 100]
    gains = 100 * (others["after"] - others["before"]).groupby(others["agent"]).mean()
    assert gains["GPT-4+"] == pytest.approx(6.0) and gains["ReAct"] == pytest.approx(8.5)
    with pytest.raises(ValueError, match="at least one"):
        sign_test([0, 0])


# --- data ---


def test_tasks_are_reproducible_balanced_and_distinct():
    for domain, names in DOMAINS.items():
        assert set(names) <= set(families())
        tasks = load_reasoning_gym(domain, 100, seed=4)
        counts = [sum(t.domain == name for t in tasks) for name in names]
        assert sum(counts) == 100 and max(counts) - min(counts) <= 1
        assert len({t.key for t in tasks}) == 100
        assert tasks.digest == load_reasoning_gym(domain, 100, seed=4).digest
        assert tasks.digest != load_reasoning_gym(domain, 100, seed=5).digest
        assert all(t.score(t.answer) for t in tasks)
    with pytest.raises(ValueError, match="no family"):
        load_reasoning_gym("astrology", 5)
    with pytest.raises(ValueError, match="carries 300"):
        load_reasoning_gym("gcd", 301)
    with pytest.raises(ValueError, match="at least one family"):
        load_reasoning_gym([], 5)


def test_the_extract_is_what_the_generators_make():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    fresh = load_reasoning_gym("gcd", 5, source="package")
    assert len(fresh) == 5
    pool = {t.question: t.answer for t in load_reasoning_gym("gcd", 300)}
    data = reasoning_gym.create_dataset("gcd", size=300, seed=0)
    assert {e["question"]: e["answer"] for e in data} == pool


def _column(task):
    table = task.context
    named = [j for j in range(1, 3) if table["columns"][j] in task.question]
    j = max(named, key=lambda j: len(table["columns"][j]))
    return [str(r[0]) for r in table["rows"]], [r[j] for r in table["rows"]]


def test_table_answers_are_right_by_an_independent_computation():
    tables = load_tables()
    assert sum(len(t["rows"]) for t in tables.values()) == 428
    rules = {
        "sum": lambda names, x: np.sum(x),
        "mean": lambda names, x: np.mean(x),
        "median": lambda names, x: np.median(x),
        "range": lambda names, x: np.ptp(x),
        "most": lambda names, x: names[int(np.argmax(x))],
        "least": lambda names, x: names[int(np.argmin(x))],
    }
    checked = 0
    for task in make_table_qa(200, seed=2):
        if task.domain in rules:
            assert task.score(str(rules[task.domain](*_column(task)))), task
            checked += 1
    assert checked == 120
    only = make_table_qa(7, 0, types=["most"])
    assert {t.domain for t in only} == {"most"} and set(TABLE_TYPES) >= {"rate", "cost"}
    with pytest.raises(ValueError, match="Unknown types"):
        make_table_qa(3, types=["pie"])


def test_full_data_sets_are_read_from_local_copies(tmp_path):
    folder = tmp_path / "MATH" / "number_theory"
    folder.mkdir(parents=True)
    entry = {"problem": "p", "solution": r"so $\boxed{\frac{1}{2}}$."}
    (folder / "1.json").write_text(json.dumps(entry))
    (folder / "2.json").write_text(json.dumps({"problem": "q", "solution": "no box"}))
    assert [t.answer for t in load_math(tmp_path / "MATH")] == [r"\frac{1}{2}"]
    with pytest.raises(ValueError, match="holds no files"):
        load_math(tmp_path / "MATH", "algebra")
    problem = {
        "question": "How many?",
        "answer": "1,200",
        "choices": ["1,200", "7"],
        "ques_type": "choice",
        "table_title": "T",
        "table_for_pd": {"Name": ["a", "b"], "Cost": ["$1,200", "7.5"]},
    }
    (tmp_path / "tab.json").write_text(json.dumps({"1": problem}))
    task = load_tabmwp(tmp_path / "tab.json")[0]
    assert task.answer == "1200" and task.context["rows"] == [["a", 1200], ["b", 7.5]]
    lines = [
        {"Question": "q", "Level": 1, "Final answer": "x", "file_name": ""},
        {"Question": "q", "Level": 1, "Final answer": "x", "file_name": "a.png"},
        {"Question": "q", "Level": 2, "Final answer": "?", "file_name": ""},
    ]
    (tmp_path / "gaia.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert (
        len(load_gaia(tmp_path / "gaia.jsonl")) == 1
        and len(load_gaia(tmp_path / "gaia.jsonl", 2)) == 0
    )
    (tmp_path / "mine.csv").write_text("question,answer\nWhat?,42\n")
    assert read_pairs(tmp_path / "mine.csv")[0] == Task("What?", "42")
    with pytest.raises(FileNotFoundError, match="downloaded"):
        load_gaia(tmp_path / "nothing")


# --- experiments ---

SMALL = Config(domain="number_theory", max_epochs=4, budget=600)


def test_experiments_are_pure_and_ordered():
    assert set(EXPERIMENTS) == {"training", "transfer", "early_stop"}
    first, second = training(SMALL, 0), training(SMALL, 0)
    assert first == second and first["before"] == 0 and first["gain"] == first["test"]
    assert len(first["best_curve"]) == len(first["test_curve"]) == first["evaluations"]
    assert first["best_curve"] == sorted(first["best_curve"])
    assert first["test_curve"][-1] == first["test"]
    frame = run(
        training,
        SMALL,
        seeds=1,
        grid={"method": [*METHODS, "untrained", "one_shot", "skill_library", "oracle"]},
    )
    test = frame.set_index("method")["test"]
    assert test["untrained"] == 0 and test["oracle"] >= test["paper"] > 0
    with pytest.raises(ValueError, match="method"):
        training(Config(method="magic"), 0)
    assert Config.laptop() == Config() and Config.paper().source == "package"


def test_an_infallible_optimizer_needs_no_rollback():
    config = Config(domain="arithmetic", error_rate=0.0, max_epochs=4, budget=600)
    frame = run(training, config, seeds=2, grid={"method": ["paper", "no_rollback"]})
    by = frame.pivot(index="seed", columns="method", values="test")
    assert (by["paper"] - by["no_rollback"]).abs().max() <= 0.05
    assert frame["gain"].min() > 0


def test_early_stop_is_read_off_one_run():
    config = Config(domain="strings", error_rate=0.4, max_epochs=8, budget=600)
    record = early_stop(config, 1)
    evaluations = [record[f"evaluations_{c}"] for c in (2, 3, 5, 10, "none")]
    assert evaluations == sorted(evaluations) and evaluations[-1] <= 8
    # the same patience in a real run gives the same
    stopped = training(Config(**{**vars(config), "patience": 3}), 1)
    assert stopped["evaluations"] == record["evaluations_3"] + 1
    assert stopped["test"] == record["test_3"]


def test_transfer_reports_every_domain():
    record = transfer(Config(domain="strings", max_epochs=3, budget=600), 0)
    assert record["strings"] > 0 == record["strings_untrained"]
    assert record["number_theory"] == pytest.approx(0, abs=0.05)


def test_tables_and_noise_run_too():
    record = training(
        Config(domain="tables", n_train=30, n_test=40, max_epochs=3, budget=600, noise=0.2), 0
    )
    assert record["before"] == 0 < record["test"]


def test_claims_are_well_formed():
    text = resources.files("icml24.agent_training").joinpath("claims.toml").read_text()
    claims = tomllib.loads(text)["claim"]
    assert len({c["id"] for c in claims}) == len(claims) >= 15
    for claim in claims:
        assert {"id", "abstract", "statement", "metric", "paper"} <= set(claim)
        assert ("accept" in claim) != ("not_testable" in claim)
        assert claim.get("accept", [0, 1])[0] < claim.get("accept", [0, 1])[1]

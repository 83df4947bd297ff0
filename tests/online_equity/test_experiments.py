import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import resources

import numpy as np
import pandas as pd
import pytest

import icml24.online_equity as eq
from icml24.core.experiments import run
from icml24.online_equity import data
from icml24.online_equity.experiments import EXPERIMENTS, Config

TINY = replace(Config.laptop(), n_instances=5, n_runs=200, n_evals=20, rounds=20, budget=6)


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_experiments_are_pure_functions_of_config_and_seed(name):
    first, second = EXPERIMENTS[name](TINY, 1), EXPERIMENTS[name](TINY, 1)
    assert first.keys() == second.keys()
    for key in first:
        np.testing.assert_array_equal(first[key], second[key])
        assert np.isfinite(first[key]).all()


def test_run_over_seeds_gives_one_row_each():
    table = run(EXPERIMENTS["yardsticks"], TINY, seeds=2, progress=False)
    assert len(table) == 2
    assert (table["margin"] > -1e-7).all()


def test_claims_are_well_formed():
    text = resources.files("icml24.online_equity").joinpath("claims.toml").read_text()
    claims = tomllib.loads(text)["claim"]
    assert len({claim["id"] for claim in claims}) == len(claims) >= 10
    for claim in claims:
        assert {"abstract", "statement", "metric", "paper"} <= claim.keys()
        assert ("accept" in claim) != ("not_testable" in claim)


def test_tables_have_the_published_totals():
    assert data.load_nmes_visits()["people"].sum() == 4406
    assert data.load_nmes_ages()["people"].sum() == 4406
    assert data.load_covid_tests()["tests"].sum() == 15524
    visits = data.load_nmes_visits()
    mean = (visits["visits"] * visits["people"]).sum() / 4406
    assert mean == pytest.approx(5.7744, abs=1e-4)


def test_real_instances():
    visits, tests = data.medical_visits(0.25), data.weekly_tests(0.5)
    assert visits.n == 16
    assert visits.load == pytest.approx(4)
    assert tests.n == 14
    assert tests.load == pytest.approx(2)
    wards = data.ward_requests(n_wards=5)
    assert wards["ward"].nunique() == 5
    assert wards.groupby("day").size().eq(5).all()
    pd.testing.assert_frame_equal(pd.read_csv(data.requests_csv()), data.ward_requests())
    arrivals = data.phased_eligibility(80)
    share = dict(zip(arrivals.group_names, arrivals.population_share, strict=True))
    assert share["afam=yes"] == pytest.approx(516 / 4406, abs=1e-9)
    early, late = arrivals.probabilities[:20].mean(0), arrivals.probabilities[-20:].mean(0)
    medicaid = arrivals.groups[arrivals.group_names.index("medicaid=yes")]
    assert early[medicaid].sum() > 1.5 * late[medicaid].sum()
    preset = data.preset_targets(arrivals, 24)
    assert preset.tau[arrivals.group_names.index("afam=yes")] == pytest.approx(48 * 516 / 4406)


def test_import_needs_neither_torch_nor_cvxpy_nor_matplotlib():
    code = (
        "import sys, icml24.online_equity as eq; "
        "eq.ExternalInstance(eq.DemandModel([[1]]), 1).benchmark_lp(); "
        "print(sorted({'torch', 'cvxpy', 'matplotlib', 'sklearn'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_everything_public_is_documented():
    for name in eq.__all__:
        assert getattr(eq, name).__doc__, name

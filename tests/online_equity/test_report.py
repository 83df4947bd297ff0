import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

import icml24.online_equity as eq
from icml24.online_equity.report import exact_ratios

mpl.use("Agg")


@pytest.fixture
def instance():
    demand = eq.DemandModel([[1, 4], [2], [1, 8]], [[0.5, 0.5], [1], [0.9, 0.1]], list("abc"))
    return eq.ExternalInstance(demand, 3)


def test_simulation_agrees_with_enumeration(instance):
    for policy in (eq.SimulationAttenuation(), eq.ShareOfRest(), eq.FirstComeFirstServed()):
        exact = eq.evaluate(policy, instance, exact=True)
        simulated = eq.evaluate(policy, instance, n_runs=40_000, random_state=1)
        a, b = exact.frame(), simulated.frame()
        for column in ("share", "worst", "units"):
            np.testing.assert_allclose(a[column], b[column], atol=0.02)
        np.testing.assert_allclose(a["p10"], b["p10"], atol=1e-9)
        assert (abs(a["share"] - b["share"]) <= 4.5 * b["se"] + 1e-12).all()
        assert exact.clairvoyant_post == pytest.approx(instance.clairvoyant("post"))
        assert simulated.ex_post.low - 0.01 < exact.ex_post.value < simulated.ex_post.high + 0.01
        assert exact.n_runs == 0
        assert simulated.n_runs == 40_000


def test_report_by_hand():
    instance = eq.ExternalInstance(eq.DemandModel([[1, 2], [2]], names=["a", "b"]), 2)
    report = eq.evaluate(eq.FirstComeFirstServed(), instance, exact=True)
    table = report.frame().set_index("agent")
    assert table.loc["a", "share"] == 1.0
    assert table.loc["b", "share"] == pytest.approx(0.25)  # 1 of 2 left, or nothing
    assert table.loc["b", "worst"] == 1.0
    assert table.loc["b", "p10"] == 0.0
    assert report.ex_post.value == pytest.approx(0.25)
    assert report.clairvoyant_post == pytest.approx((2 / 3 + 2 / 4) / 2)
    assert report.units == pytest.approx(2)
    for everyone in (eq.EqualSplit(), eq.FirstComeFirstServed()):  # ties are shared
        rich = eq.ExternalInstance(instance.demand, 4)
        assert eq.evaluate(everyone, rich, exact=True).frame()["worst"].sum() == pytest.approx(1)
    assert "first" not in str(report).lower() or "FirstComeFirstServed" in str(report)


def test_quick_ratios_equal_the_report(instance):
    for policy in (eq.SimulationAttenuation(), eq.ProjectedProportional()):
        report = eq.evaluate(policy, instance, exact=True)
        assert exact_ratios(policy, instance) == pytest.approx((report.cr_ante, report.cr_post))


def test_common_random_numbers(instance):
    a = eq.evaluate(eq.EqualSplit(), instance, n_runs=300, random_state=5)
    b = eq.evaluate(eq.ShareOfRest(), instance, n_runs=300, random_state=5)
    np.testing.assert_allclose(a.frame()["demand"], b.frame()["demand"])
    again = eq.evaluate(eq.EqualSplit(), instance, n_runs=300, random_state=5)
    pd.testing.assert_frame_equal(a.frame(), again.frame())


def test_recorded_days_as_scenarios(instance):
    days = instance.demand.sample(30, 1)
    report = eq.evaluate(eq.RatioAttenuation(), instance, scenarios=(days, np.full(30, 1 / 30)))
    np.testing.assert_allclose(report.frame()["demand"], days.mean(axis=0))
    with pytest.raises(ValueError, match="sum to 1"):
        eq.evaluate(eq.EqualSplit(), instance, scenarios=(days, np.full(30, 0.1)))
    with pytest.raises(ValueError, match="shape"):
        eq.evaluate(eq.EqualSplit(), instance, scenarios=(days[:, :2], np.full(30, 1 / 30)))


def test_groups_of_agents(instance):
    report = eq.evaluate(eq.EqualSplit(), instance, exact=True)
    table = report.grouped(["x", "y", "x"]).set_index("group")
    frame = report.frame()
    assert table.loc["x", "units"] == pytest.approx(frame["units"][0] + frame["units"][2])
    assert table.loc["x", "smallest_share"] == frame["share"].iloc[[0, 2]].min()
    with pytest.raises(ValueError, match="3 agents"):
        report.grouped(["x"])


def test_plot_shows_every_agent_and_group(instance, overlap):
    ax = eq.evaluate(eq.EqualSplit(), instance, exact=True).plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == list("abc")
    internal = eq.InternalInstance(overlap, 3)
    ax = mpl.pyplot.subplots()[1]
    assert eq.evaluate(eq.ServeAll(), internal, n_runs=50).plot(ax) is ax
    assert len(ax.get_yticklabels()) == 3
    mpl.pyplot.close("all")


def test_compare_is_one_row_for_each_policy(instance):
    table = eq.compare(
        {"half": eq.RatioAttenuation(), "fcfs": eq.FirstComeFirstServed()}, instance, exact=True
    )
    assert table["policy"].tolist() == ["half", "fcfs"]
    assert table["guarantee"].iloc[0] == 0.5
    assert np.isnan(table["guarantee"].iloc[1])
    assert (table["ex_post"] <= table["ex_ante"] + 1e-12).all()


def test_mixing_models_is_refused(instance, overlap):
    internal = eq.InternalInstance(overlap, 3)
    with pytest.raises(TypeError, match="other model"):
        eq.evaluate(eq.ServeAll(), instance)
    with pytest.raises(TypeError, match="other model"):
        eq.evaluate(eq.EqualSplit(), internal)
    with pytest.raises(ValueError, match="external model only"):
        eq.evaluate(eq.ServeAll(), internal, scenarios=(np.ones((1, 1)), np.ones(1)))
    with pytest.raises(ValueError, match="n_runs"):
        eq.evaluate(eq.EqualSplit(), instance, n_runs=0)
    with pytest.raises(ValueError, match="too many"):
        eq.evaluate(
            eq.ServeAll(),
            eq.InternalInstance(eq.ArrivalModel([[0.1] * 10] * 40, np.eye(10)), 20),
            exact=True,
        )

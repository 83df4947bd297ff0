"""Real demand and group data for both models. The arrival processes built on them are simulated."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd

from icml24.core.data import DataSource
from icml24.online_equity.demand import DemandModel
from icml24.online_equity.external import ExternalInstance
from icml24.online_equity.groups import ArrivalModel, InternalInstance

__all__ = [
    "load_covid_tests",
    "load_nmes_ages",
    "load_nmes_visits",
    "medical_visits",
    "phased_eligibility",
    "preset_targets",
    "requests_csv",
    "weekly_tests",
    "ward_requests",
]

NMES = "US federal survey NMES 1987-88, counts; selection by Deb and Trivedi (1997)"
COVID = "MIT, R package medicaldata; A. Obstfeld, Children's Hospital of Philadelphia"

SOURCES = {
    "nmes_visits": DataSource(
        "nmes_visits",
        "7b9e22ee0a93703ad2015f1ed5e85d8cca5d9d2a5f7850b941872f0e1864b110",
        NMES,
        "icml24.online_equity:data/nmes_visits.csv.gz",
    ),
    "nmes_ages": DataSource(
        "nmes_ages",
        "8c7dedd845c5a81d1080f421ceb7c573382b45bd98856394cceb957870706c00",
        NMES,
        "icml24.online_equity:data/nmes_ages.csv.gz",
    ),
    "covid_tests": DataSource(
        "covid_tests",
        "5b0adf7cda42cfca906ec37d0766e8cdb22b6b07bd9b49b427596c287e47477b",
        COVID,
        "icml24.online_equity:data/covid_tests.csv.gz",
    ),
}


def _table(name: str) -> pd.DataFrame:
    return pd.read_csv(SOURCES[name].load().open(), compression="gzip")


def load_nmes_visits() -> pd.DataFrame:
    """Office visits of 4,406 people aged 66 and over, counted.

    Returns
    -------
    DataFrame
        ``region``, ``gender``, ``afam`` (African-American), ``visits`` a year, ``people``.
    """
    return _table("nmes_visits")


def load_nmes_ages() -> pd.DataFrame:
    """Count the same people by ``age``, ``gender``, ``afam`` and ``medicaid`` (``people``)."""
    return _table("nmes_ages")


def load_covid_tests() -> pd.DataFrame:
    """Covid tests at a children's hospital, spring 2020: ``day``, ``clinic``, ``tests``.

    Returns
    -------
    DataFrame
        15,524 tests on days 4 to 107; a clinic that is absent on a day had none.
    """
    return _table("covid_tests")


def medical_visits(supply: float = 0.25, bins: int = 12) -> ExternalInstance:
    """Sixteen groups of patients ask for appointments, one after the other (NMES).

    Each of 4 regions x 2 sexes x 2 races is one agent; it asks for the yearly visits of a random
    member, at least one, in ``bins`` groups of equal size. The order (alphabetical) and the
    arrival process are ours.

    Parameters
    ----------
    supply : float, default 0.25
        Stock as a fraction of the expected total demand.
    bins : int, default 12
        Points of each demand law.

    Returns
    -------
    ExternalInstance
    """
    table = load_nmes_visits()
    samples, names = [], []
    for name, group in table.groupby(["region", "gender", "afam"]):
        visits = np.repeat(group["visits"].to_numpy(float), group["people"])
        samples.append(np.maximum(visits, 1.0))
        region, gender, afam = name
        names.append(f"{region} {gender}{' (afam)' if afam == 'yes' else ''}")
    demand = DemandModel.from_samples(samples, bins=bins, names=names)
    return ExternalInstance(demand, supply * demand.mean.sum())


def weekly_tests(supply: float = 0.5) -> ExternalInstance:
    """Fourteen weeks ask for test kits; each one's demand law is its seven daily counts.

    Parameters
    ----------
    supply : float, default 0.5
        Stock as a fraction of the expected total demand.

    Returns
    -------
    ExternalInstance
        The first, incomplete week (28 tests) is left out. That a week's demand is a random day's
        is a model, not a record.
    """
    daily = load_covid_tests().groupby("day")["tests"].sum()
    daily = daily.reindex(range(11, 109), fill_value=0).to_numpy(float).reshape(14, 7)
    days = [row[row > 0] for row in daily]
    demand = DemandModel.from_samples(days, names=[f"week {w}" for w in range(1, 15)])
    return ExternalInstance(demand, supply * demand.mean.sum())


def ward_requests(n_wards: int = 8, first_day: int = 46) -> pd.DataFrame:
    """Daily requests of the largest wards, in the form of a planner's table.

    Parameters
    ----------
    n_wards : int, default 8
    first_day : int, default 46
        Leave out the weeks in which testing was still being set up.

    Returns
    -------
    DataFrame
        ``day``, ``ward``, ``tests``: one row for each day and ward, zeros included.
    """
    table = load_covid_tests()
    table = table[table["day"] >= first_day]
    wards = table.groupby("clinic")["tests"].sum().nlargest(n_wards).index
    wide = table.pivot_table(index="day", columns="clinic", values="tests", fill_value=0)
    wide = wide.reindex(range(first_day, 108), fill_value=0)[list(wards)].astype(int)
    long = wide.rename_axis(columns="ward").stack().rename("tests").reset_index()
    return long.sort_values("day", kind="stable", ignore_index=True)


def requests_csv() -> Path:
    """Return the path of a planner's table as a CSV file: ``day``, ``ward``, ``tests``.

    What :func:`ward_requests` returns, as a file in the form in which a planner would have it.
    """
    return Path(str(resources.files("icml24.online_equity").joinpath("data/requests.csv")))


def phased_eligibility(rounds: int = 80) -> ArrivalModel:
    """Appointments open to the oldest first (NMES): who comes changes over time.

    Groups are the levels of sex, race and Medicaid cover; they overlap. African-Americans and
    people on Medicaid are over-represented among the oldest, so they come early.

    Parameters
    ----------
    rounds : int, default 80

    Returns
    -------
    ArrivalModel
    """
    people = load_nmes_ages()
    people = people.assign(order=-people["age"])
    by = ["gender", "afam", "medicaid"]
    return ArrivalModel.from_frame(people, by=by, rounds=rounds, time="order", weight="people")


def preset_targets(arrivals: ArrivalModel, budget: int, factor: float = 2.0) -> InternalInstance:
    """Let a planner raise the target of the group ``afam=yes`` and lower that of ``afam=no``.

    Parameters
    ----------
    arrivals : ArrivalModel
        From :func:`phased_eligibility`.
    budget : int
    factor : float, default 2
        New target of ``afam=yes`` relative to its population share.

    Returns
    -------
    InternalInstance
        Both targets still sum to the budget; those of the other groups stay.
    """
    tau = budget * arrivals.population_share
    yes, no = (arrivals.group_names.index(f"afam={level}") for level in ("yes", "no"))
    tau[yes] *= factor
    tau[no] = budget - tau[yes]
    return InternalInstance(arrivals, budget, tau)

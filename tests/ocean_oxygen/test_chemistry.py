"""Solubility, density and units against published check values and hand calculations."""

import gsw
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icml24.ocean_oxygen.chemistry import (
    apparent_utilisation,
    density,
    solubility,
    to_umol_per_kg,
    unit_name,
)


@pytest.mark.parametrize(("t", "value"), [(10, 274.596), (0, 347.903), (20, 225.517)])
def test_check_values_of_garcia_and_gordon(t, value):
    """At the surface temperature and potential temperature agree; values of the gsw manual."""
    assert gsw.O2sol_SP_pt(35, t) == pytest.approx(value, abs=2e-3)
    assert solubility(t, 35.0) == pytest.approx(value, abs=2e-3)


def test_slope_and_depth():
    assert solubility(15.5, 35) - solubility(14.5, 35) == pytest.approx(-4.87, abs=0.02)
    # water from 4000 m is some 0.35 degrees colder when lifted, so it can hold more
    deep = solubility(1.5, 34.7, 4000) - solubility(1.5, 34.7)
    assert 2 < deep < 5


def test_utilisation_is_the_difference():
    assert apparent_utilisation(200.0, 10.0, 35.0) == pytest.approx(74.596, abs=2e-3)


def test_units_by_hand():
    rho = density(10.0, 35.0)
    assert rho == pytest.approx(1026.95, abs=0.05)
    assert to_umol_per_kg(5.0, "ml/l", 10, 35) == pytest.approx(5 * 44.6596 / (rho / 1000))
    assert to_umol_per_kg(8.0, "mg/l", 10, 35) == pytest.approx(8 / 31.9988e-3 / (rho / 1000))
    assert to_umol_per_kg(0.25, "mol m-3", 10, 35) == pytest.approx(250 / (rho / 1000))
    assert to_umol_per_kg(250, "mmol m-3", 10, 35) == to_umol_per_kg(250, "umol/L", 10, 35)
    assert to_umol_per_kg(250, "umol kg-1") == 250


def test_density_is_that_of_the_lifted_sample():
    """Oxygen is measured on deck: some 1028 kg per cubic metre, not the 1046 at 4000 m."""
    assert density(1.5, 34.7, 4000) == pytest.approx(1027.8, abs=0.3)
    assert density(1.5, 34.7, 4000) - density(1.5, 34.7) == pytest.approx(0.02, abs=0.02)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("µmol/kg", "umol/kg"),
        ("umol kg-1", "umol/kg"),
        ("micromoles_per_kilogram", "umol/kg"),
        ("Micromole/kg", "umol/kg"),
        ("ml l-1", "ml/l"),
        ("mL/L", "ml/l"),
        ("milliliters / liter", "ml/l"),
        ("mg/l", "mg/l"),
        ("mol m-3", "mol/m3"),
        ("mmol/m3", "mmol/m3"),
        ("umol l^-1", "umol/l"),
    ],
)
def test_spellings(text, name):
    assert unit_name(text) == name


@given(st.floats(1, 400), st.floats(-1, 30), st.floats(5, 40))
def test_conversion_is_proportional(oxygen, t, s):
    one = to_umol_per_kg(1.0, "umol/l", t, s)
    assert to_umol_per_kg(oxygen, "umol/l", t, s) == pytest.approx(oxygen * one)
    assert 0.95 < one < 1.01


def test_bad_units():
    with pytest.raises(ValueError, match="unknown; known are"):
        to_umol_per_kg(1.0, "percent")
    with pytest.raises(ValueError, match="give temperature and salinity"):
        to_umol_per_kg(np.ones(2), "ml/l", temperature=10)

"""How much oxygen seawater can hold, and the units it is written in (TEOS-10, through gsw)."""

from __future__ import annotations

import re
from typing import Any

import gsw
import numpy as np
from numpy.typing import ArrayLike

__all__ = ["apparent_utilisation", "density", "solubility", "to_umol_per_kg"]

#: Micromoles per litre in one unit, for units per volume.
PER_VOLUME = {
    "ml/l": 44.6596,
    "mg/l": 1000 / 31.9988,
    "mol/m3": 1000.0,
    "mmol/m3": 1.0,
    "umol/l": 1.0,
}
_NAMES = {
    "umol/kg": r"(umol|micromoles?|\u00b5mol|\u03bcmol)(/|_per_)(kg|kilogram)",
    "ml/l": r"(ml|millilit(er|re)s?)(/|_per_)(l|lit(er|re))",
    "mg/l": r"(mg|milligrams?)(/|_per_)(l|lit(er|re))",
    "mol/m3": r"(mol|moles?)(/|_per_)(m3|m\^3|m\*\*3)",
    "mmol/m3": r"(mmol|millimoles?)(/|_per_)(m3|m\^3|m\*\*3)",
    "umol/l": r"(umol|micromoles?|\u00b5mol|\u03bcmol)(/|_per_)(l|lit(er|re))",
}


def _state(temperature: ArrayLike, salinity: ArrayLike, depth: ArrayLike) -> tuple[Any, Any, Any]:
    """Absolute salinity, in-situ temperature and pressure (at 30 degrees of latitude)."""
    absolute = gsw.SR_from_SP(np.asarray(salinity, float))
    pressure = gsw.p_from_z(-np.asarray(depth, float), 30.0)
    return absolute, np.asarray(temperature, float), pressure


def solubility(
    temperature: ArrayLike, salinity: ArrayLike, depth: ArrayLike = 0.0
) -> np.ndarray[Any, Any]:
    """Oxygen in equilibrium with the air at sea level (Garcia and Gordon 1992).

    Parameters
    ----------
    temperature : array_like
        In situ, degrees Celsius.
    salinity : array_like
        Practical salinity.
    depth : array_like, default 0
        Metres; turns the temperature into the potential temperature that the water has when it is
        lifted to the surface.

    Returns
    -------
    numpy.ndarray
        Micromoles per kilogram.

    Examples
    --------
    >>> solubility([0.0, 20.0], 35.0).round(1).tolist()
    [347.9, 225.5]
    """
    absolute, t, p = _state(temperature, salinity, depth)
    potential = gsw.pt0_from_t(absolute, t, p)
    return gsw.O2sol_SP_pt(np.asarray(salinity, float), potential)


def density(
    temperature: ArrayLike, salinity: ArrayLike, depth: ArrayLike = 0.0
) -> np.ndarray[Any, Any]:
    """Density of a sample at the surface, where its oxygen was measured (kg per cubic metre).

    Examples
    --------
    >>> float(density(10.0, 35.0).round(1))
    1027.0
    """
    absolute, t, p = _state(temperature, salinity, depth)
    return gsw.rho(absolute, gsw.CT_from_t(absolute, t, p), 0.0)


def apparent_utilisation(
    oxygen: ArrayLike, temperature: ArrayLike, salinity: ArrayLike, depth: ArrayLike = 0.0
) -> np.ndarray[Any, Any]:
    """AOU: the solubility minus the oxygen that is there, what life has used up (µmol/kg)."""
    return solubility(temperature, salinity, depth) - np.asarray(oxygen, float)


def unit_name(units: str) -> str:
    """Recognise a unit of oxygen, for example ``"ml l-1"`` as ``"ml/l"``."""
    text = re.sub(r"\s+", " ", units.strip().lower())
    text = re.sub(r"[ .]?(kg|l|liter|litre)(-1|\^-1|\*\*-1)$", r"/\1", text)
    text = re.sub(r"[ .]?m(-3|\^-3|\*\*-3)$", "/m3", text).replace(" / ", "/").replace(" ", "_")
    for name, pattern in _NAMES.items():
        if re.fullmatch(pattern, text):
            return name
    raise ValueError(
        f"The oxygen unit {units!r} is unknown; known are µmol/kg, {', '.join(PER_VOLUME)}."
    )


def to_umol_per_kg(
    oxygen: ArrayLike,
    units: str,
    temperature: ArrayLike | None = None,
    salinity: ArrayLike | None = None,
    depth: ArrayLike = 0.0,
) -> np.ndarray[Any, Any]:
    """Convert oxygen to micromoles per kilogram.

    Parameters
    ----------
    oxygen : array_like
    units : str
        ``"umol/kg"``, or per volume: ``"ml/l"``, ``"mg/l"``, ``"mol/m3"``, ``"mmol/m3"``,
        ``"umol/l"``; also the spelling with negative powers.
    temperature, salinity, depth : array_like
        Of the sample; give its density, which units per volume need.

    Returns
    -------
    numpy.ndarray

    Raises
    ------
    ValueError
        If the unit is unknown, or needs a density and temperature or salinity is missing.

    Examples
    --------
    >>> float(to_umol_per_kg(6.0, "ml/l", temperature=10.0, salinity=35.0).round(1))
    260.9
    """
    name, values = unit_name(units), np.asarray(oxygen, float)
    if name == "umol/kg":
        return values
    if temperature is None or salinity is None:
        raise ValueError(
            f"{units} is per volume: give temperature and salinity of the samples, so that their "
            "density is known."
        )
    return values * PER_VOLUME[name] * 1000 / density(temperature, salinity, depth)

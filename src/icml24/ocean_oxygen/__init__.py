"""The breathless ocean: reconstruct a sparse field in space, depth and time.

After Lu, Zhao, Han, Gan, Zhou, Zhou, Fu, Wang, Zhou and Zhang, "OxyGenerator: Reconstructing Global
Ocean Deoxygenation Over a Century with Deep Learning", ICML 2024.

Examples
--------
Simulate a few years of oxygen on the real ocean, measure them where ships and floats go, and fill
in the rest:

>>> import icml24.ocean_oxygen as oo
>>> ds = oo.make_ocean(0, step=12, years=(1990, 1995), levels=2)
>>> field = oo.IDW().fit(ds).predict(years=[1993])
>>> sorted(field.data_vars)[2:5]
['oxygen', 'oxygen_lower', 'oxygen_upper']
"""

from importlib.util import find_spec
from typing import Any

_missing = [
    name for name in ("gsw", "h5netcdf", "torch_geometric", "xarray") if not find_spec(name)
]
if _missing:
    raise ImportError(f"This column needs {', '.join(_missing)}: pip install 'icml24[ocean]'.")

from icml24.ocean_oxygen.bottles import load_bottles  # noqa: E402
from icml24.ocean_oxygen.chemistry import (  # noqa: E402
    apparent_utilisation,
    density,
    solubility,
    to_umol_per_kg,
)
from icml24.ocean_oxygen.conformal import ZoneConformal, coverage  # noqa: E402
from icml24.ocean_oxygen.graph import Layer, OceanGraph  # noqa: E402
from icml24.ocean_oxygen.grid import (  # noqa: E402
    BASINS,
    Nodes,
    argo_positions,
    basin_of,
    cell_volume,
    monthly_temperature,
    ocean_grid,
)
from icml24.ocean_oxygen.maps import plot_map, plot_section  # noqa: E402
from icml24.ocean_oxygen.metrics import (  # noqa: E402
    low_volume,
    mape,
    r2,
    regional_table,
    rmse,
    trend,
    weighted_mean,
)
from icml24.ocean_oxygen.peers import IDW, Kriging, Tabular  # noqa: E402
from icml24.ocean_oxygen.problem import Problem  # noqa: E402
from icml24.ocean_oxygen.profiles import grid_profiles, locate  # noqa: E402
from icml24.ocean_oxygen.readers import read_glodap, read_woa, read_wod  # noqa: E402
from icml24.ocean_oxygen.reconstructor import Reconstructor, inner_updates  # noqa: E402
from icml24.ocean_oxygen.sampling import ship_tracks  # noqa: E402
from icml24.ocean_oxygen.splits import (  # noqa: E402
    ROLES,
    block_split,
    source_split,
    spatial_split,
    temporal_split,
)
from icml24.ocean_oxygen.storage import open_field, save_field  # noqa: E402
from icml24.ocean_oxygen.world import make_ocean, simulate_members  # noqa: E402

__all__ = [
    "BASINS",
    "IDW",
    "ROLES",
    "Kriging",
    "Layer",
    "Nodes",
    "OceanGraph",
    "OxyGenerator",
    "Problem",
    "Reconstructor",
    "Tabular",
    "ZoneConformal",
    "ZoneHyperConv",
    "apparent_utilisation",
    "argo_positions",
    "basin_of",
    "block_split",
    "cell_volume",
    "coverage",
    "density",
    "explicit_transform",
    "gradient_variance",
    "grid_profiles",
    "inner_updates",
    "load_bottles",
    "locate",
    "low_volume",
    "make_ocean",
    "mape",
    "monthly_temperature",
    "ocean_grid",
    "open_field",
    "plot_map",
    "plot_section",
    "r2",
    "read_glodap",
    "read_woa",
    "read_wod",
    "regional_table",
    "rmse",
    "save_field",
    "ship_tracks",
    "simulate_members",
    "solubility",
    "source_split",
    "spatial_split",
    "temporal_split",
    "to_umol_per_kg",
    "trend",
    "weighted_mean",
]

_NETWORKS = {
    "OxyGenerator": "model",
    "gradient_variance": "model",
    "ZoneHyperConv": "hyperconv",
    "explicit_transform": "hyperconv",
}


def __getattr__(name: str) -> Any:
    """Import the networks on first use: torch_geometric takes seconds to load."""
    if name not in _NETWORKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_NETWORKS[name]}"), name)

"""Radio fields: predict the wireless channel where nobody has measured it.

After Lu, Vattheuer, Mirzasoleiman and Abari, "NeWRF: A Deep Learning Framework for Wireless
Radiation Field Reconstruction and Channel Prediction", ICML 2024.

Examples
--------
Measure at forty places of a room, predict at others:

>>> import icml24.radio_fields as rf
>>> room = rf.ShoeboxRoom((4, 3), (1.0, 0.8), frequency=928e6, max_order=1)
>>> rx = room.sample_receivers(60, seed=0)
>>> h, doa = room.channel(rx), room.trace(rx).doa
>>> model = rf.VirtualTransmitterRegressor(928e6).fit(rx[:40], h[:40], doa[:40])
>>> bool(model.score(rx[40:], h[40:]) > 40)
True
"""

from icml24.radio_fields.channel import (
    SPEED_OF_LIGHT,
    free_space,
    fspl,
    per_receiver_nmse,
    prediction_snr,
    wavelength,
)
from icml24.radio_fields.doa_search import (
    DoASearch,
    closest_points,
    least_squares_point,
    recall,
)
from icml24.radio_fields.estimator import ChannelPredictor
from icml24.radio_fields.field import RadianceField, fourier_features
from icml24.radio_fields.newrf import (
    NeWRF,
    perturb_directions,
    random_directions,
    uniform_directions,
)
from icml24.radio_fields.peers import (
    RBFGP,
    CoordinateMLP,
    HelmholtzGP,
    NearestNeighbours,
    helmholtz_kernel,
)
from icml24.radio_fields.rendering import importance_samples, render_rays, stratified_samples
from icml24.radio_fields.rooms import Paths, ShoeboxRoom, fresnel
from icml24.radio_fields.sionna_scene import Box, SionnaScene, furnished_room
from icml24.radio_fields.sources import SourceField, VirtualTransmitterRegressor, design_matrix
from icml24.radio_fields.survey import (
    ChannelDataset,
    CoverageMap,
    choose_predictor,
    coverage_map,
)

__all__ = [
    "Box",
    "furnished_room",
    "RBFGP",
    "SPEED_OF_LIGHT",
    "ChannelDataset",
    "ChannelPredictor",
    "CoordinateMLP",
    "CoverageMap",
    "DoASearch",
    "HelmholtzGP",
    "NeWRF",
    "NearestNeighbours",
    "Paths",
    "RadianceField",
    "ShoeboxRoom",
    "SionnaScene",
    "SourceField",
    "VirtualTransmitterRegressor",
    "choose_predictor",
    "closest_points",
    "coverage_map",
    "design_matrix",
    "fourier_features",
    "free_space",
    "fresnel",
    "fspl",
    "helmholtz_kernel",
    "importance_samples",
    "least_squares_point",
    "per_receiver_nmse",
    "perturb_directions",
    "prediction_snr",
    "random_directions",
    "recall",
    "render_rays",
    "stratified_samples",
    "uniform_directions",
    "wavelength",
]

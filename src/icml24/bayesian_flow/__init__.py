"""Bayesian flow networks as diffusions, and their fast solvers.

After Xue et al., "Unifying Bayesian Flow Networks and Diffusion Models through Stochastic
Differential Equations" (ICML 2024). Wrap any network that was trained as a Bayesian flow (or, for
continuous data, as a diffusion) and sample it in few calls::

    flow = ContinuousBFN(network, ContinuousBFNSchedule(sigma_1=1e-3), "epsilon")
    images = sample(flow, (16, 3, 32, 32), solver="sde-bfn-solver2", steps=10,
                    timestep_spacing="logsnr", clip_sample=1.0)
"""

from icml24.bayesian_flow.diffusion import (
    VPModel,
    as_diffusers_scheduler,
    from_nnaisense,
    from_vp,
    to_vp,
)
from icml24.bayesian_flow.exact import GaussianMixture, MarkovChain, gaussian_moments
from icml24.bayesian_flow.flows import ContinuousBFN, DiscreteBFN
from icml24.bayesian_flow.metrics import (
    energy_distance,
    frechet_distance,
    nfe_at_quality,
    ngram_tv,
    speedup,
    speedup_interval,
    spelling_accuracy,
    total_variation,
)
from icml24.bayesian_flow.networks import ImageNet, TextNet, fit
from icml24.bayesian_flow.peers import MaskedDiffusion, NGram, adaptive_flow
from icml24.bayesian_flow.sampler import (
    BFNSampler,
    BFNStepOutput,
    classifier_free_guidance,
    sample,
)
from icml24.bayesian_flow.schedules import ContinuousBFNSchedule, DiscreteBFNSchedule
from icml24.bayesian_flow.solvers import SOLVERS, Solver

__all__ = [
    "SOLVERS",
    "BFNSampler",
    "BFNStepOutput",
    "ContinuousBFN",
    "ContinuousBFNSchedule",
    "DiscreteBFN",
    "DiscreteBFNSchedule",
    "GaussianMixture",
    "ImageNet",
    "MarkovChain",
    "MaskedDiffusion",
    "NGram",
    "Solver",
    "TextNet",
    "VPModel",
    "adaptive_flow",
    "as_diffusers_scheduler",
    "classifier_free_guidance",
    "energy_distance",
    "fit",
    "frechet_distance",
    "from_nnaisense",
    "from_vp",
    "gaussian_moments",
    "nfe_at_quality",
    "ngram_tv",
    "sample",
    "speedup",
    "speedup_interval",
    "spelling_accuracy",
    "to_vp",
    "total_variation",
]

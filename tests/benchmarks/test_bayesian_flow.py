"""Cost of a sampling step beside the network call, ours and diffusers'."""

import pytest
import torch

from icml24.bayesian_flow import (
    BFNSampler,
    ContinuousBFN,
    ContinuousBFNSchedule,
    as_diffusers_scheduler,
    to_vp,
)

SCHEDULE = ContinuousBFNSchedule(1e-3**0.5)
SHAPE, STEPS = (16, 3, 32, 32), 50


def free_model(mu, s):
    return mu


FLOW = ContinuousBFN(free_model, SCHEDULE, "epsilon", check_finite=False)


@pytest.mark.parametrize("solver", ["bfn-solver2", "sde-bfn-solver2", "bfn"])
def test_ours(benchmark, solver):
    sampler = BFNSampler(FLOW, solver, STEPS)
    benchmark(sampler.sample, SHAPE, torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:.*copy keyword.*:DeprecationWarning")
@pytest.mark.parametrize("algorithm", ["dpmsolver++", "sde-dpmsolver++"])
def test_diffusers(benchmark, algorithm):
    pytest.importorskip("diffusers")
    model = to_vp(FLOW)
    scheduler = as_diffusers_scheduler(model, algorithm_type=algorithm)

    def sample():
        generator = torch.Generator().manual_seed(0)
        scheduler.set_timesteps(STEPS)
        x = torch.randn(SHAPE, generator=generator)
        with torch.no_grad():
            for k in scheduler.timesteps:
                x = scheduler.step(x, k, x, generator=generator).prev_sample
        return x

    benchmark(sample)

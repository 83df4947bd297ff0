"""The sampler: calls counted, seeds, hooks, last steps, errors."""

import math
import weakref

import pytest
import torch

from icml24.bayesian_flow import (
    SOLVERS,
    BFNSampler,
    ContinuousBFN,
    ContinuousBFNSchedule,
    DiscreteBFN,
    DiscreteBFNSchedule,
    classifier_free_guidance,
    sample,
)
from icml24.bayesian_flow.solvers import ALIASES, one_hot_draw


class Counting:
    def __init__(self, function=lambda x: torch.tanh(x)):
        self.calls, self.inputs, self.function = 0, [], function

    def __call__(self, x, s):
        self.calls += 1
        self.inputs.append(x.clone())
        return self.function(x)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def flows(model):
    return (
        ContinuousBFN(model, ContinuousBFNSchedule(0.05), "sample"),
        DiscreteBFN(model, DiscreteBFNSchedule(4, 4.0)),
    )


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("last_step", ["drop", "integrate", "denoise", None])
def test_calls_are_counted(name, n, last_step):
    for index in (0, 1):
        model = Counting()
        flow = flows(model)[index]
        if index and SOLVERS[name].discrete is None:
            continue
        sampler = BFNSampler(flow, name, n, last_step=last_step)
        sampler.sample((3, 2), seeded())
        assert sampler.nfe == model.calls
        kind = last_step or ("denoise" if name == "bfn" else "drop")
        steps = n - 1 if kind == "drop" else n
        per_step = 2 if SOLVERS[name].singlestep else 1
        assert sampler.nfe == per_step * steps + (kind != "integrate")
        sampler.sample((3, 2), seeded())
        assert 2 * sampler.nfe == model.calls  # counts one run, not all runs


def test_the_first_call_of_a_noise_predicting_original_sampler_is_saved():
    model = Counting()
    sampler = BFNSampler(ContinuousBFN(model, ContinuousBFNSchedule(0.05)), "bfn", 5)
    sampler.sample((3, 2), seeded())
    assert sampler.nfe == model.calls == 5


def test_the_network_sees_beliefs_not_logits():
    model = Counting()
    BFNSampler(flows(model)[1], "bfn-solver2", 4).sample((3, 2), seeded())
    for theta in model.inputs:
        assert torch.allclose(theta.sum(-1), torch.ones(3, 2)) and (theta > 0).all()


@pytest.mark.parametrize("name", SOLVERS)
def test_same_seed_same_sample_and_no_global_state(name):
    before = torch.get_rng_state()
    for flow in flows(lambda x, s: torch.tanh(x)):
        if isinstance(flow, DiscreteBFN) and SOLVERS[name].discrete is None:
            continue
        sampler = BFNSampler(flow, name, 4)
        first, again = (sampler.sample((5, 3), seeded(1)) for _ in range(2))
        other = sampler.sample((5, 3), seeded(2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["bfn-solver1", "bfn-solver2", "bfn-solver2-single"])
def test_deterministic_solvers_use_the_generator_only_for_the_start(name):
    for flow in flows(lambda x, s: torch.tanh(x)):
        used, start_only = seeded(), seeded()
        BFNSampler(flow, name, 4).sample((5, 3), used)
        flow.prior((5, 3), 0.99, start_only)
        assert torch.equal(used.get_state(), start_only.get_state())


@pytest.mark.parametrize("name", SOLVERS)
def test_one_step_returns_the_prediction_at_the_start(name):
    flow = flows(lambda x, s: torch.tanh(x) + s[:, None])[0]
    if name == "bfn":
        return
    sampler = BFNSampler(flow, name, 1)
    state = flow.prior((4, 2), 0.99, seeded())
    assert torch.equal(sampler.sample((4, 2), seeded()), flow.predict(state, 0.99))


def test_batch_members_do_not_meet():
    # A row of a larger batch, started from the same state, is unchanged.
    flow = flows(lambda x, s: torch.tanh(x))[0]
    sampler = BFNSampler(flow, "bfn-solver2", 5)
    full = sampler.sample((6, 2), seeded(), dtype=torch.float64)
    one = sampler.sample((1, 2), seeded(), dtype=torch.float64)
    assert torch.allclose(full[:1], one, atol=1e-15)


def test_aliases_and_defaults():
    flow = flows(lambda x, s: torch.tanh(x))[0]
    for alias, name in ALIASES.items():
        assert BFNSampler(flow, alias).solver_name == name
    assert BFNSampler(flow).eta == 0.01
    assert BFNSampler(flows(lambda x, s: x)[1]).eta == 0.001
    assert BFNSampler(flow, "bfn").timesteps[0] == 1.0


def test_last_step_choices():
    flow = flows(lambda x, s: torch.tanh(2 * x))[0]
    runs = {
        kind: BFNSampler(flow, "bfn-solver1", 4, last_step=kind).sample(
            (3, 2), seeded(), return_trajectory=True
        )
        for kind in ("drop", "integrate", "denoise")
    }
    states = runs["denoise"][1]
    assert [len(runs[kind][1]) for kind in runs] == [4, 5, 5]
    assert torch.equal(runs["drop"][0], flow.predict(states[3], 0.2475))
    assert torch.equal(runs["integrate"][0], states[4])
    assert torch.equal(runs["denoise"][0], flow.predict(states[4], 0.0))


def test_clipping_and_guidance():
    flow = ContinuousBFN(lambda x, s: 3 + 0 * x, ContinuousBFNSchedule(0.05), "sample")
    sampler = BFNSampler(flow, "bfn1", 3, clip_sample=1.0)
    assert (sampler.sample((3, 2), seeded()) == 1).all()
    seen = []

    def guidance(prediction, state, t):
        seen.append(t)
        return prediction - 0.5

    sampler = BFNSampler(flow, "bfn1", 3, clip_sample=1.0, guidance=guidance)
    assert (sampler.sample((3, 2), seeded()) == 0.5).all()
    assert seen == sampler.timesteps[:3].tolist()
    bad = BFNSampler(flow, "bfn1", 3, guidance=lambda p, x, t: p[:1])
    with pytest.raises(ValueError, match="guidance"):
        bad.sample((3, 2), seeded())


def test_guidance_may_use_gradients():
    flow = flows(lambda x, s: torch.tanh(x))[0]

    def uphill(prediction, state, t):
        with torch.enable_grad():
            leaf = prediction.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((leaf - 1).pow(2).sum(), leaf)
        return prediction - 0.4 * gradient

    plain = BFNSampler(flow, "bfn2", 6).sample((200, 2), seeded())
    guided = BFNSampler(flow, "bfn2", 6, guidance=uphill).sample((200, 2), seeded())
    assert guided.mean() > plain.mean() + 0.5


def test_classifier_free_guidance_ends():
    conditional, unconditional = (lambda x, s: x + 1), (lambda x, s: x - 1)
    x, s = torch.zeros(2, 2), torch.zeros(2)
    for scale, value in ((0.0, -1.0), (1.0, 1.0), (2.0, 3.0)):
        model = classifier_free_guidance(conditional, unconditional, scale)
        assert (model(x, s) == value).all()


def test_matched_moments_at_the_start():
    flow = ContinuousBFN(lambda x, s: x, ContinuousBFNSchedule(0.001), "sample")
    sampler = BFNSampler(flow, "bfn1", 1, eta=0.2, data_moments=(0.5, 0.09))
    states = sampler.sample((100_000, 1), seeded(), return_trajectory=True)[1][0]
    gamma = float(flow.schedule.gamma(0.8))
    assert math.isclose(float(states.mean()), 0.5 * gamma, rel_tol=0.02)
    assert math.isclose(float(states.var()), gamma * (1 - gamma) + gamma**2 * 0.09, rel_tol=0.02)


def test_callback_and_custom_timesteps():
    flow, seen = flows(lambda x, s: torch.tanh(x))[0], []
    sampler = BFNSampler(flow, "bfn2")
    sampler.set_timesteps(timesteps=[0.9, 0.5, 0.1, 0.0])
    sampler.sample((2, 2), seeded(), callback=lambda i, t, state, p: seen.append((i, t)))
    assert seen == [(0, 0.9), (1, 0.5), (2, 0.1)] and sampler.nfe == 3
    sampler.set_timesteps(6)
    assert sampler.num_steps == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_follows_the_request(dtype):
    flow = flows(lambda x, s: torch.tanh(x))[0]
    assert BFNSampler(flow, "sde2", 3).sample((2, 2), seeded(), dtype=dtype).dtype == dtype


def test_dtype_follows_the_network():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2).double()

        def forward(self, x, s):
            return self.linear(x)

    flow = ContinuousBFN(Net(), ContinuousBFNSchedule(0.05), "sample")
    x = BFNSampler(flow, "sde2", 3).sample((2, 2), seeded())
    assert x.dtype == torch.float64 and not x.requires_grad


def test_one_hot_draw_frequencies():
    p = torch.tensor([0.2, 0.5, 0.3]).expand(50_000, 1, 3)
    draw = one_hot_draw(p, seeded())
    assert (draw.sum(-1) == 1).all()
    assert torch.allclose(draw.mean((0, 1)), p[0, 0], atol=0.01)


def test_sample_wraps_a_bare_callable():
    x = sample(
        lambda mu, s: 0 * mu,
        (3, 2),
        schedule=ContinuousBFNSchedule(0.05),
        prediction_type="sample",
        solver="bfn2",
        steps=3,
        generator=seeded(),
    )
    assert not x.any()
    labels = sample(lambda theta, s: theta, (3, 2), schedule=DiscreteBFNSchedule(4), steps=3)
    assert labels.dtype == torch.int64 and labels.shape == (3, 2)
    with pytest.raises(TypeError, match="schedule"):
        sample(lambda mu, s: mu, (3, 2))
    with pytest.raises(ValueError, match="own schedule"):
        sample(flows(lambda x, s: x)[0], (3, 2), schedule=ContinuousBFNSchedule(0.05))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"solver": "heun"}, ValueError, "choose from"),
        ({"num_steps": 0}, ValueError, "steps"),
        ({"num_steps": -3}, ValueError, "steps"),
        ({"eta": 0.0}, ValueError, "eta"),
        ({"eta": 1.0}, ValueError, "eta"),
        ({"solver": "bfn", "eta": 0.1}, ValueError, "prior"),
        ({"timestep_spacing": "karras"}, ValueError, "spacing"),
        ({"solver": "bfn", "timestep_spacing": "logsnr"}, ValueError, "eta > 0"),
        ({"last_step": "skip"}, ValueError, "last_step"),
        ({"clip_sample": -1.0}, ValueError, "clip_sample"),
        ({"data_moments": (0.0, -1.0)}, ValueError, "variance"),
    ],
)
def test_bad_settings_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        BFNSampler(flows(lambda x, s: x)[0], **settings)


def test_bad_settings_of_a_discrete_flow():
    flow = flows(lambda x, s: x)[1]
    with pytest.raises(ValueError, match="continuous data only"):
        BFNSampler(flow, "euler-maruyama")
    with pytest.raises(ValueError, match="continuous flows only"):
        BFNSampler(flow, clip_sample=1.0)
    with pytest.raises(ValueError, match="continuous flows"):
        BFNSampler(flow, data_moments=(0.0, 1.0))
    with pytest.raises(ValueError, match="continuous flows only"):
        flow.prior((2, 2), 0.9, None, moments=(0.0, 1.0))


def test_bad_calls_are_named():
    flow = flows(lambda x, s: x)[0]
    with pytest.raises(TypeError, match="ContinuousBFN"):
        BFNSampler(lambda mu, s: mu)
    sampler = BFNSampler(flow)
    for shape in ((3,), (0, 2)):
        with pytest.raises(ValueError, match="shape"):
            sampler.sample(shape)
    with pytest.raises(ValueError, match="either"):
        sampler.set_timesteps()
    for times in ([0.5], [0.1, 0.5], [1.0, 0.5]):
        with pytest.raises(ValueError, match="timesteps"):
            sampler.set_timesteps(timesteps=times)
    exploding = ContinuousBFN(
        lambda mu, s: mu * float("nan"), ContinuousBFNSchedule(0.05), "sample"
    )
    with pytest.raises(ValueError, match="NaN"):
        BFNSampler(exploding).sample((2, 2), seeded())


@pytest.mark.parametrize("solver", ["bfn-solver2", "sde-bfn-solver2"])
def test_states_of_earlier_steps_are_released(solver):
    states, alive = [], []

    def watch(i, t, state, prediction):
        states.append(weakref.ref(state))
        alive.append(sum(ref() is not None for ref in states))

    for flow in flows(lambda x, s: torch.tanh(x)):
        states.clear()
        BFNSampler(flow, solver, 12).sample((2, 3), seeded(), callback=watch)
    assert max(alive) <= 2

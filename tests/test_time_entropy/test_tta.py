import copy
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from icml24.test_time_entropy import (
    COME,
    EATA,
    ETA,
    RPL,
    RDumb,
    Tent,
    configure_model,
    shuffled_batches,
    softmax_entropy,
)
from icml24.test_time_entropy.networks import SmallResNet


@pytest.fixture
def x():
    return torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SmallResNet((4, 8, 8)).eval()


class Logits(nn.Module):
    """A classifier whose logits are its input, scaled and moved by a layer normalisation."""

    def __init__(self, classes):
        super().__init__()
        self.norm = nn.LayerNorm(classes)

    def forward(self, x):
        return x + 0 * self.norm(x)


# -- entropy ------------------------------------------------------------------------------------


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=8))
def test_entropy_gradient_has_its_closed_form(values):
    z = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    entropy = softmax_entropy(z)
    (gradient,) = torch.autograd.grad(entropy, z)
    p = z.detach().softmax(0)
    expected = -p * (z.detach().log_softmax(0) + entropy.detach())
    assert torch.allclose(gradient, expected, atol=1e-12, rtol=0)


def test_entropy_of_uniform_logits_is_log_of_classes_and_stationary():
    z = torch.zeros(3, 7, dtype=torch.float64, requires_grad=True)
    entropy = softmax_entropy(z)
    assert torch.allclose(entropy, torch.full((3,), math.log(7), dtype=torch.float64))
    assert torch.autograd.grad(entropy.sum(), z)[0].abs().max() < 1e-15


def test_binary_entropy_slope_is_minus_z_p_q():
    z = torch.linspace(-5, 5, 11, dtype=torch.float64, requires_grad=True)
    entropy = softmax_entropy(torch.stack([z, torch.zeros_like(z)], 1)).sum()
    p = z.detach().sigmoid()
    assert torch.allclose(torch.autograd.grad(entropy, z)[0], -z.detach() * p * (1 - p), atol=1e-12)


# -- configure_model ----------------------------------------------------------------------------


def test_exactly_the_affine_parameters_of_batch_normalisation_are_free(net):
    before = copy.deepcopy(net.state_dict())
    module, free = configure_model(net)
    wanted = {
        f"{name}.{kind}"
        for name, layer in module.named_modules()
        if isinstance(layer, nn.BatchNorm2d)
        for kind in ("weight", "bias")
    }
    assert {n for n, p in module.named_parameters() if p.requires_grad} == wanted
    assert len(free) == len(wanted) == 18
    assert all(layer.running_mean is None for layer in module.modules() if hasattr(layer, "eps"))
    assert all(p.requires_grad for p in net.parameters())
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_in_place_changes_the_given_module():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module, _ = configure_model(net, inplace=True)
    assert module is net and net[1].running_mean is None


def test_batch_statistics_ignore_the_scale_of_the_input():
    generator = torch.Generator().manual_seed(1)
    stack = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4, eps=1e-300),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4, eps=1e-300),
    ).double()
    module, _ = configure_model(stack)
    x = torch.rand(8, 1, 6, 6, generator=generator, dtype=torch.float64)
    assert torch.allclose(module(x), module(7.3 * x), atol=1e-10)
    kept, _ = configure_model(stack, batch_stats=False)
    assert not torch.allclose(kept(x), kept(7.3 * x), atol=1e-2)


def test_dropout_stays_off_so_nothing_is_random():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    adapter = Tent(net.train())
    x = torch.rand(32, 4)
    assert torch.equal(adapter.predict(x), adapter.predict(x))


def test_other_normalisations_and_own_choices():
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.GroupNorm(2, 6))
    assert len(configure_model(net)[1]) == 4
    assert len(configure_model(net, params=lambda name, m: name == "2")[1]) == 2
    with pytest.raises(ValueError, match=r"no batch normalisation layer.*norm_affine"):
        configure_model(net, params="batch_norm")
    with pytest.raises(ValueError, match="no normalisation layer"):
        configure_model(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="params must be"):
        configure_model(net, params="everything")


# -- Tent ---------------------------------------------------------------------------------------


def test_tent_takes_the_same_step_as_a_direct_computation(net, x):
    adapter = Tent(net, lr=0.1)
    before = adapter.predict(x)
    module, free = configure_model(net)
    logits = module(x)
    log_p = torch.log_softmax(logits, 1)
    gradient = torch.autograd.grad(-(log_p.exp() * log_p).sum(1).mean(), free)
    returned = adapter(x)
    assert torch.equal(returned, before) and not returned.requires_grad
    for p, start, g in zip(adapter.adapted_parameters, free, gradient, strict=True):
        assert torch.allclose(p, start - 0.1 * g, atol=1e-6)


def test_tent_lowers_entropy_and_leaves_the_model_alone(net, x):
    before = copy.deepcopy(net.state_dict())
    adapter = Tent(net, lr=0.1)
    first = softmax_entropy(adapter.predict(x)).mean()
    for _ in range(20):
        adapter(x)
    assert softmax_entropy(adapter.predict(x)).mean() < first - 0.02
    assert adapter.n_steps_ == 20
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


@pytest.mark.parametrize("kind", [Tent, ETA, RDumb, RPL, COME])
def test_reset_restores_every_bit(net, x, kind):
    settings_ = {"e_margin": 10.0, "d_margin": 2.0} if issubclass(kind, ETA) else {}
    adapter = kind(net, lr=0.05, **settings_)
    source = copy.deepcopy(adapter.module.state_dict())
    for _ in range(3):
        adapter(x)
    assert any(not torch.equal(source[k], v) for k, v in adapter.module.state_dict().items())
    adapter.reset()
    assert all(torch.equal(source[k], v) for k, v in adapter.module.state_dict().items())
    assert not adapter.optimizer.state


def test_zero_learning_rate_changes_no_prediction(net, x):
    adapter = Tent(net, lr=0.0)
    before = adapter.predict(x)
    for _ in range(3):
        adapter(x)
    assert torch.equal(adapter.predict(x), before)


def test_episodic_forgets_between_batches(net, x):
    adapter = Tent(net, lr=0.1, episodic=True, steps=2)
    first = adapter(x)
    adapter(1 - x)
    assert torch.equal(adapter(x), first)


def test_any_optimizer(net, x):
    adapter = Tent(net, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
    adapter(x)
    assert isinstance(adapter.optimizer, torch.optim.Adam)


def test_prediction_in_batches_keeps_order_and_fills_the_last_batch(net):
    x = torch.rand(50, 1, 28, 28, generator=torch.Generator().manual_seed(3))
    adapter = Tent(net)
    logits = adapter.predict(x, batch_size=20)
    assert torch.allclose(logits[:20], adapter.predict(x[:20]), atol=1e-6)
    assert torch.allclose(logits[40:], adapter.predict(x[30:])[10:], atol=1e-6)


def test_snapshot_and_restore(net, x):
    adapter = Tent(net, lr=0.1)
    adapter(x)
    kept, logits = adapter.snapshot(), adapter.predict(x)
    adapter(x)
    assert not torch.equal(adapter.predict(x), logits)
    assert torch.equal(adapter.restore(kept).predict(x), logits)


def test_works_under_no_grad_and_with_outputs_that_hold_logits(x):
    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = SmallResNet((4, 8, 8))

        def forward(self, x):
            return Output(self.net(x))

    adapter = Tent(Wrapped(), lr=0.1)
    with torch.no_grad():
        first = adapter(x)
    assert not torch.equal(adapter.predict(x), first)


def test_bad_batches_are_named(net, x):
    with pytest.raises(ValueError, match="batch of one image"):
        Tent(net)(x[:1])
    assert Tent(net, batch_stats=False)(x[:1]).shape == (1, 10)
    with pytest.raises(ValueError, match="empty"):
        Tent(net)(x[:0])
    with pytest.warns(UserWarning, match="noisy"):
        Tent(net)(x[:8])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tent(net)(x[:16])
    with pytest.raises(ValueError, match="NaN"):
        Tent(net)(x * float("nan"))
    with pytest.raises(ValueError, match="shape"):
        Tent(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))(x)


@pytest.mark.parametrize(
    ("kind", "settings_", "match"),
    [
        (Tent, {"lr": -1.0}, "lr"),
        (Tent, {"steps": 0}, "steps"),
        (RPL, {"q": 0.0}, "q must"),
        (ETA, {"e_margin": -1.0}, "e_margin"),
        (ETA, {"d_margin": "big"}, "d_margin"),
        (EATA, {"fisher_alpha": -1.0}, "fisher_alpha"),
        (RDumb, {"reset_every": 0}, "reset_every"),
    ],
)
def test_bad_settings_are_named(net, kind, settings_, match):
    with pytest.raises(ValueError, match=match):
        kind(net, **settings_)


# -- ETA, EATA, RDumb, RPL, COME ----------------------------------------------------------------


def log_probabilities(rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def test_eta_keeps_and_weights_by_hand():
    adapter = ETA(Logits(4), e_margin=0.6, d_margin=0.9)
    batch = log_probabilities(
        [[0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25], [0.01, 0.9, 0.08, 0.01]]
    )
    entropy = softmax_entropy(batch)
    kept = [0, 2]
    weights = torch.exp(0.6 - entropy[kept])
    assert torch.isclose(adapter.loss(batch), (weights * entropy[kept]).mean())
    assert adapter.kept_.tolist() == [True, False, True]
    mean = batch.exp()[kept].mean(0)
    assert torch.allclose(adapter._average, mean)
    # Second batch: the first image points along the average and is redundant now.
    second = torch.stack([mean.log(), log_probabilities([[0.01, 0.01, 0.01, 0.97]])[0]])
    adapter.e_margin = 1.2
    adapter.loss(second)
    assert adapter.kept_.tolist() == [False, True]
    assert torch.allclose(adapter._average, 0.9 * mean + 0.1 * second[1].exp())


def test_eta_weights_run_from_one_to_a_power_of_the_classes():
    adapter = ETA(Logits(10))
    e_margin, d_margin = adapter.margins(10)
    assert math.isclose(e_margin, 0.4 * math.log(10)) and d_margin == 0.4
    assert adapter.margins(1000) == (0.4 * math.log(1000), 0.05)
    # A certain image weighs C ** 0.4; entropy 1e-3 makes the product visible.
    z = torch.zeros(1, 10, dtype=torch.float64)
    z[0, 0] = 12.0
    entropy = softmax_entropy(z)
    assert math.isclose(
        adapter.loss(z).item(), (10**0.4 * torch.exp(-entropy) * entropy).item(), rel_tol=1e-12
    )


def test_eta_does_not_differentiate_its_weight():
    z = torch.tensor([[3.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    adapter = ETA(Logits(3), e_margin=1.0)
    (gradient,) = torch.autograd.grad(adapter.loss(z), z)
    entropy = softmax_entropy(z)
    (plain,) = torch.autograd.grad(entropy.sum(), z)
    assert torch.allclose(gradient, torch.exp(1.0 - entropy.detach()) * plain)


def test_nothing_kept_means_no_step(net, x):
    adapter = ETA(net, lr=1.0, e_margin=1e-6)
    before = adapter.snapshot()
    adapter(x)
    assert all(torch.equal(a, b) for a, b in zip(before, adapter.snapshot(), strict=True))
    assert adapter.n_steps_ == 1


def test_defaults_depend_on_the_number_of_classes():
    """With the constants for 1,000 classes nothing would be kept from ten (redundancy)."""
    p = torch.full((10, 10), 0.01).fill_diagonal_(0.91)
    adapter = ETA(Logits(10))
    adapter.loss(p.log())
    adapter.loss(p.log())
    assert adapter.kept_.any()
    narrow = ETA(Logits(10), d_margin=0.05)
    narrow.loss(p.log())
    narrow.loss(p.log())
    assert not narrow.kept_.any()


def test_rdumb_starts_anew_every_n_steps(net, x):
    free = ETA(net, lr=0.05, e_margin=10.0, d_margin=2.0)
    adapter = RDumb(net, lr=0.05, e_margin=10.0, d_margin=2.0, reset_every=3)
    outputs = [adapter(x) for _ in range(7)]
    expected = [free(x) for _ in range(3)]
    for i, output in enumerate(outputs):
        assert torch.equal(output, expected[i % 3])
    assert not torch.equal(expected[0], expected[1])


def test_rdumb_counts_updates_since_the_last_reset(net, x):
    """Also when one batch takes several updates, or the user resets in between."""
    wide = {"lr": 0.05, "e_margin": 10.0, "d_margin": 2.0}
    adapter = RDumb(net, **wide, steps=2, reset_every=3)
    start = adapter.predict(x)
    adapter(x), adapter(x)
    assert not torch.equal(adapter.predict(x), start)
    fresh = RDumb(net, **wide, steps=2)
    fresh(x), adapter(x)  # four updates were done: this batch starts anew
    assert torch.equal(adapter.predict(x), fresh.predict(x))
    adapter = RDumb(net, **wide, reset_every=2)
    adapter(x), adapter.reset(), adapter(x), adapter(x)
    assert torch.equal(adapter.predict(x), fresh.predict(x))


def test_eata_penalty_has_its_closed_form(net, x):
    adapter = EATA(net, lr=0.1, e_margin=10.0, d_margin=2.0, fisher_alpha=3.0)
    with pytest.raises(RuntimeError, match="fit_fisher"):
        adapter(x)
    adapter.fit_fisher(x[:32], batch_size=32)
    module, free = configure_model(net)
    logits = module(x[:32])
    ce = nn.functional.cross_entropy(logits, logits.argmax(1))
    expected = [g**2 for g in torch.autograd.grad(ce, free)]
    for fisher, wanted in zip(adapter.fisher_, expected, strict=True):
        assert torch.allclose(fisher, wanted, atol=1e-8)
    adapter(x)
    plain = ETA(net, e_margin=10.0, d_margin=2.0)
    logits = adapter.module(x)
    shift = zip(adapter.fisher_, adapter.adapted_parameters, free, strict=True)
    penalty = 3.0 * sum((f * (p - s) ** 2).sum() for f, p, s in shift)
    adapter._average = None
    assert torch.isclose(adapter.loss(logits), plain.loss(logits) + penalty)
    assert penalty > 0


def test_strong_penalty_holds_the_weights(net, x):
    moved = []
    for alpha in (0.0, 1e3):
        adapter = EATA(net, lr=0.002, e_margin=10.0, d_margin=2.0, fisher_alpha=alpha)
        adapter.fit_fisher(x)
        for _ in range(10):
            adapter(x)
        pairs = zip(adapter.fisher_, adapter.snapshot(), adapter._source, strict=True)
        moved.append(sum((f * (p - s) ** 2).sum() for f, p, s in pairs))
    assert moved[1] < moved[0]


@given(st.floats(0.05, 1.0))
@settings(max_examples=20)
def test_rpl_lies_between_its_limits(q):
    p = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    loss = RPL(Logits(3), q=q).loss(p.log()).item()
    assert math.isclose(loss, (1 - 0.7**q) / q)
    assert 1 - 0.7 - 1e-12 <= loss <= -math.log(0.7) + 1e-12


def test_come_is_the_entropy_of_beliefs_and_uncertainty():
    z = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64, requires_grad=True)
    evidence = z.detach().exp()
    total = evidence.sum() + 3
    opinion = torch.cat([evidence[0] / total, torch.tensor([3.0], dtype=torch.float64) / total])
    loss = COME(Logits(3)).loss(z)
    assert torch.isclose(loss, -(opinion * opinion.log()).sum())
    # The norm is held constant: the gradient has no part along the logits.
    (gradient,) = torch.autograd.grad(loss, z)
    assert abs((gradient * z.detach()).sum()) < 1e-12


# -- stream -------------------------------------------------------------------------------------


def test_stream_passes_are_shuffled_full_and_reproducible():
    x = torch.arange(10).view(10, 1)
    batches = list(shuffled_batches(x, 4, 5))
    assert [len(b) for b in batches] == [4] * 5
    assert len(torch.cat(batches[:2]).unique()) == 8
    again = list(shuffled_batches(x, 4, 5))
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))
    with pytest.raises(ValueError, match="batch_size"):
        next(shuffled_batches(x, 11, 1))

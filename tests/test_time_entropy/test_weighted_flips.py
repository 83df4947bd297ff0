import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from icml24.test_time_entropy import Tent, WeightedFlips, shuffled_batches, weighted_flips
from icml24.test_time_entropy.networks import SmallResNet
from icml24.test_time_entropy.weighted_flips import (
    PUBLISHED,
    confidence_ranks,
    monotone_polynomial,
    predict_logits,
)


@pytest.fixture(scope="module")
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SmallResNet((4, 8, 8)).eval()


def pictures(seed, n=96):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, 28, 28, generator=generator)
    return (x * (0.2 + 0.2 * seed)).clamp(0, 1), torch.arange(n) % 10


QUICK = {"n_probe": 64, "n_steps": 3, "batch_size": 32, "adapter": "tent", "lr": 0.3, "degree": 1}


# -- counting by hand ---------------------------------------------------------------------------


def test_by_hand():
    c, before, after = [0.9, 0.5, 0.7, 0.3], [0, 1, 2, 3], [5, 1, 2, 4]
    assert confidence_ranks(c).tolist() == [1, 0.5, 0.75, 0.25]
    assert weighted_flips(c, before, after) == 1.25
    assert weighted_flips(c, before, after, weighted=False) == 2
    assert confidence_ranks([0.5, 0.5]).tolist() == [0.75, 0.75]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_limits_and_invariance(c):
    n = len(c)
    same, other = np.zeros(n, int), np.ones(n, int)
    assert weighted_flips(c, same, same) == 0
    assert np.isclose(weighted_flips(c, same, other), (n + 1) / 2)
    assert weighted_flips(c, same, other, weighted=False) == n
    half = np.arange(n) % 2
    shown = weighted_flips(c, same, half)
    assert weighted_flips(np.searchsorted(np.unique(c), c), same, half) == shown


def test_bad_counts():
    with pytest.raises(ValueError, match="one length"):
        weighted_flips([0.1, 0.2], [0, 1], [0])
    with pytest.raises(ValueError, match="NaN"):
        confidence_ranks([np.nan])
    with pytest.raises(ValueError, match="non-empty"):
        confidence_ranks([])


# -- the curve ----------------------------------------------------------------------------------


def test_published_curve():
    f = PUBLISHED["weighted"]
    values = monotone_polynomial([0, 100, 500.5], f, monotone=False)
    assert np.allclose(values, [75.661858, 47.0729, 3.84], atol=5e-3)
    vertex = -f[1] / (2 * f[2])
    assert np.isclose(vertex, 452.03, atol=0.01)
    assert np.isclose(monotone_polynomial(vertex, f), 3.01, atol=0.01)
    assert np.isclose(monotone_polynomial(500.5, f), monotone_polynomial(vertex, f))
    wf = WeightedFlips.published()
    assert np.allclose(wf.accuracy([0.0, 0.1]), [0.75661858, 0.470729], atol=1e-5)
    plain = WeightedFlips.published(weighted=False)
    assert np.isclose(plain.accuracy(0.2), (83.55158891 - 20.636454) / 100)


@given(st.lists(st.integers(-300, 300).map(lambda i: i / 100), min_size=1, max_size=4))
def test_envelope_falls_and_touches_the_curve(coefficients):
    x = np.linspace(0, 2, 400)
    envelope = monotone_polynomial(x, coefficients)
    curve = monotone_polynomial(x, coefficients, monotone=False)
    assert (np.diff(envelope) <= 1e-9).all()
    assert np.allclose(envelope, np.minimum.accumulate(curve), atol=2e-2)
    assert (envelope <= curve + 1e-9).all()


def test_calibration_recovers_a_known_parabola_and_leave_one_out_errors():
    x = np.linspace(0, 0.3, 8)
    y = 0.9 - 2 * x + 1.5 * x**2
    wf = WeightedFlips(degree=2).fit_counts(x, y)
    assert np.allclose(wf.coef_, [0.9, -2, 1.5]) and wf.residual_ < 1e-9
    noisy = y + 0.02 * np.sin(np.arange(8) * 7.0)
    wf = WeightedFlips(degree=1).fit_counts(x, noisy)
    errors = []
    for i in range(8):
        rest = np.arange(8) != i
        errors.append(noisy[i] - np.polyval(np.polyfit(x[rest], noisy[rest], 1), x[i]))
    assert np.isclose(wf.residual_, np.sqrt(np.mean(np.square(errors))))


def test_accuracies_are_clipped():
    wf = WeightedFlips(degree=1).fit_counts([0.0, 0.1], [1.0, 0.5])
    assert np.allclose(wf.accuracy([0.0, 0.3, 0.9]), [1.0, 0.0, 0.0])
    assert wf.accuracy(0.9) == 0.0


def test_calibration_is_checked():
    with pytest.raises(ValueError, match="at least 3 calibration sets with different flips"):
        WeightedFlips(degree=2).fit_counts([0.1, 0.1, 0.2], [0.5, 0.5, 0.4])
    with pytest.raises(ValueError, match="one length"):
        WeightedFlips().fit_counts([0.1], [0.5, 0.5])


# -- whole runs ---------------------------------------------------------------------------------


def test_a_run_is_what_the_algorithm_says(net):
    """Algorithm 1 written out once more, with the pieces' own tests behind it."""
    x, _ = pictures(1)
    wf = WeightedFlips(**QUICK, random_state=3)
    generator = torch.Generator().manual_seed(3)
    probe = x[torch.randperm(96, generator=generator)[:64]]
    adapter = Tent(net, lr=0.3)
    p = adapter.predict(probe).softmax(1)
    order = torch.randperm(96, generator=generator)
    for i in range(3):
        adapter(x[order[32 * i : 32 * i + 32]])
    after = adapter.predict(probe).argmax(1)
    wanted = weighted_flips(p.amax(1).numpy(), p.argmax(1).numpy(), after.numpy()) / 64
    assert np.isclose(wf.flips(net, x), wanted) and wanted > 0


def test_the_probe_can_be_given(net):
    x, _ = pictures(1)
    wf = WeightedFlips(**QUICK)
    part = wf.contributions(net, x, probe=x[:40])
    generator = torch.Generator().manual_seed(0)
    adapter = Tent(net, lr=0.3)
    before = adapter.predict(x[:40]).argmax(1)
    for batch in shuffled_batches(x, 32, 3, generator):
        adapter(batch)
    flipped = adapter.predict(x[:40]).argmax(1) != before
    assert part.shape == (40,) and ((part > 0) == flipped.numpy()).all() and flipped.any()


def test_model_and_random_state_are_left_alone(net):
    x, _ = pictures(1)
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    wf = WeightedFlips(**QUICK)
    assert wf.flips(net, x) == wf.flips(net, x)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not net.training and all(p.requires_grad for p in net.parameters())


def test_zero_learning_rate_flips_nothing(net):
    x, _ = pictures(1)
    assert WeightedFlips(**{**QUICK, "lr": 0.0}).flips(net, x) == 0
    assert WeightedFlips(**{**QUICK, "n_steps": 0}).flips(net, x) == 0


def test_every_kind_of_input_gives_the_same_number(net):
    x, y = pictures(1)
    wf = WeightedFlips(**QUICK)
    wanted = wf.flips(net, x)
    data = TensorDataset(x, y)
    for source in (x.numpy(), data, DataLoader(data, batch_size=7, shuffle=True)):
        assert np.isclose(wf.flips(net, source), wanted)
    with pytest.raises(TypeError, match="must be a tensor"):
        wf.flips(net, iter([x]))


def test_adapters_by_name_and_by_function(net):
    x, _ = pictures(1)
    named = WeightedFlips(**QUICK)
    own = WeightedFlips(**{**QUICK, "adapter": lambda m: Tent(m, lr=0.3)})
    assert named.flips(net, x) == own.flips(net, x)
    for name in ("rdumb", "eta", "rpl"):
        assert WeightedFlips(**{**QUICK, "adapter": name}).flips(net, x) >= 0


@pytest.mark.parametrize("target", ["source", "adapted"])
def test_fit_measures_the_accuracy_of_the_target(net, target):
    sets = [pictures(s) for s in range(1, 5)]
    wf = WeightedFlips(**QUICK, target=target).fit(net, sets)
    model = net if target == "source" else Tent(net).module
    for (x, y), accuracy in zip(sets, wf.accuracies_, strict=True):
        assert np.isclose(accuracy, (model(x).argmax(1) == y).double().mean())
    x, _ = pictures(2)
    assert 0 <= wf.predict(net, x) <= 1
    interval = wf.predict_interval(net, x)
    assert interval.value == wf.predict(net, x)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    wide = wf.predict_interval(net, x, level=0.99)
    assert wide.low <= interval.low and wide.high >= interval.high


def test_interval_combines_curve_and_probe(net):
    x, _ = pictures(2)
    wf = WeightedFlips(**QUICK).fit_counts([0.0, 0.1, 0.2, 0.3], [0.8, 0.62, 0.38, 0.2])
    part = wf.contributions(net, x)
    value = float(wf.accuracy(part.mean()))
    luck = abs(wf.coef_[1]) * part.std() / np.sqrt(len(part))
    interval = wf.predict_interval(net, x, level=0.5, n_resamples=20_000)
    reach = 0.816497 * np.hypot(wf.residual_, luck)  # t with two degrees of freedom
    if value - reach > 0 and value + reach < 1:
        assert np.isclose(interval.high - value, reach, rtol=0.03)


def test_predict_logits_uses_and_restores_the_mode(net):
    x, _ = pictures(1)
    model = copy.deepcopy(net).train()
    model.norm.eval()
    assert torch.equal(predict_logits(model, x), net(x).detach())
    assert model.training and not model.norm.training


def test_bad_calls_are_named(net):
    x, y = pictures(1)
    with pytest.raises(NotFittedError, match="Call fit"):
        WeightedFlips(**QUICK).predict(net, x)
    with pytest.raises(ValueError, match="n_probe = 1000 is more than the 96"):
        WeightedFlips().flips(net, x)
    with pytest.raises(ValueError, match="at least 3 calibration sets, got 2"):
        WeightedFlips(degree=2).fit(net, [(x, y), (x, y)])
    with pytest.raises(ValueError, match="different flips"):
        WeightedFlips(**{**QUICK, "lr": 0.0}).fit(net, [(x, y), (x, y)])
    with pytest.raises(ValueError, match="target must be"):
        WeightedFlips(**QUICK, target="both").flips(net, x)
    with pytest.raises(ValueError, match="adapter must be"):
        WeightedFlips(**{**QUICK, "adapter": "magic"}).flips(net, x)
    with pytest.raises(ValueError, match="one label"):
        WeightedFlips(**QUICK).fit(net, [(x, y[:5]), (x, y)])
    with pytest.raises(ValueError, match="batch_size"):
        WeightedFlips(**{**QUICK, "batch_size": 200}).flips(net, x)
    with pytest.raises(ValueError, match="no normalisation layer"):
        WeightedFlips(**QUICK).flips(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), x)
    with pytest.raises(ValueError, match="residuals"):
        WeightedFlips(**QUICK).fit_counts([0.0, 0.1], [0.8, 0.7]).predict_interval(net, x)
    with pytest.raises(ValueError, match="level"):
        WeightedFlips.published().predict_interval(net, x, level=1.5)
    with pytest.raises(ValueError, match="n_steps"):
        WeightedFlips(n_steps=-1).flips(net, x)


def test_warns_outside_the_calibrated_range(net):
    x, _ = pictures(1)
    wf = WeightedFlips(**QUICK).fit_counts([0.9, 0.95, 0.99], [0.8, 0.6, 0.5])
    with pytest.warns(UserWarning, match="extrapolation"):
        wf.predict(net, x)


def test_warns_of_collapse(net):
    x, _ = pictures(1)
    with pytest.warns(UserWarning, match="collapsed"):
        WeightedFlips(**{**QUICK, "lr": 20.0, "n_steps": 30}).flips(net, x)


def test_is_a_scikit_learn_estimator():
    wf = WeightedFlips(lr=0.1, target="adapted")
    assert clone(wf).get_params() == wf.get_params()
    assert "lr=0.1" in repr(wf)

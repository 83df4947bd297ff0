import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linprog
from scipy.special import log_softmax, softmax
from sklearn.exceptions import NotFittedError

from icml24.test_time_entropy import (
    ATC,
    COT,
    AverageConfidence,
    DifferenceOfConfidences,
    DispersionScore,
    FrechetAutoEval,
    NuclearNorm,
    Regressed,
    TemperatureScaled,
    agreement,
    fit_temperature,
)


def logits_and_labels(n=300, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    z = 2 * rng.normal(size=(n, classes))
    cumulated = softmax(z, axis=1).cumsum(1)
    return z, (rng.random((n, 1)) > cumulated).sum(1).clip(0, classes - 1)


ALL = [
    AverageConfidence(),
    DifferenceOfConfidences(),
    ATC(),
    ATC("negative_entropy"),
    COT(),
    NuclearNorm(),
    FrechetAutoEval(),
    DispersionScore(),
]


@pytest.mark.parametrize("peer", ALL, ids=repr)
def test_contract(peer):
    z, y = logits_and_labels()
    fitted = peer.fit(torch.from_numpy(z), torch.from_numpy(y))
    assert fitted is peer
    value = peer.predict(z)
    assert np.isfinite(value) and np.isscalar(value)
    assert np.isclose(peer.predict(torch.from_numpy(z)), value)
    with pytest.raises(ValueError, match="NaN"):
        peer.predict(z * np.nan)
    with pytest.raises(ValueError, match="shape"):
        peer.predict(z[0])


@pytest.mark.parametrize(
    "peer", [AverageConfidence(), DifferenceOfConfidences(), ATC(), COT(), FrechetAutoEval()]
)
def test_predict_before_fit(peer):
    with pytest.raises(NotFittedError, match="fit"):
        type(peer)().predict(np.zeros((3, 2)))


def test_labels_are_checked():
    z, y = logits_and_labels()
    with pytest.raises(ValueError, match="one label"):
        ATC().fit(z, y[:-1])
    with pytest.raises(ValueError, match="between 0 and 3"):
        ATC().fit(z, y + 1)
    with pytest.raises(ValueError, match="labels"):
        AverageConfidence().fit(z)


def test_confidence_is_the_accuracy_when_labels_follow_the_probabilities():
    z, y = logits_and_labels(n=40_000)
    plain = AverageConfidence(temperature=False).fit(z)
    assert abs(plain.predict(z) - np.mean(z.argmax(1) == y)) < 0.008


def test_temperature_is_recovered():
    z, y = logits_and_labels(n=40_000)
    assert abs(fit_temperature(2.5 * z, y) - 2.5) < 0.06
    scaled = AverageConfidence().fit(2.5 * z, y)
    assert abs(scaled.predict(2.5 * z) - np.mean(z.argmax(1) == y)) < 0.008
    # stationary: the mean logit of the label equals the mean expected logit
    t = fit_temperature(z, y)
    expected = (softmax(z / t, axis=1) * z).sum(1).mean()
    assert np.isclose(expected, z[np.arange(len(y)), y].mean(), atol=1e-4)


def test_temperature_wrapper():
    model = TemperatureScaled(torch.nn.Identity(), 4.0)
    assert torch.equal(model(torch.ones(2, 3)), torch.full((2, 3), 0.25))
    with pytest.raises(ValueError, match="positive"):
        TemperatureScaled(model, 0.0)


@pytest.mark.parametrize(
    "peer", [ATC(), ATC("negative_entropy"), DifferenceOfConfidences()], ids=repr
)
def test_validation_data_return_validation_accuracy(peer):
    z, y = logits_and_labels(n=250)
    truth = np.mean(z.argmax(1) == y)
    assert abs(peer.fit(z, y).predict(z) - truth) <= 1 / 250 + 1e-12


def test_atc_extremes_and_name():
    z = np.eye(3) * 5
    assert ATC().fit(z, [0, 1, 2]).predict(z) == 1
    assert ATC().fit(z, [1, 2, 0]).predict(z) == 0
    with pytest.raises(ValueError, match="max_confidence"):
        ATC("loudness").fit(z, [0, 1, 2])


@given(arrays(float, (12, 3), elements=st.floats(-5, 5)), st.lists(st.integers(0, 2), min_size=12))
def test_cot_is_never_above_average_confidence(z, labels):
    y = np.array(labels[:12])
    cot = COT().fit(z, y)
    assert cot.predict(z) <= softmax(z, axis=1).max(1).mean() + 1e-12


def test_cot_of_certain_predictions_is_one_minus_total_variation():
    y = np.repeat([0, 1, 2], [5, 3, 2])
    cot = COT().fit(np.zeros((10, 3)), y)
    predicted = np.repeat([0, 1, 2], [2, 2, 6])
    z = np.where(np.eye(3)[predicted] > 0, 0.0, -500.0)
    variation = 0.5 * np.abs(np.array([0.5, 0.3, 0.2]) - np.array([0.2, 0.2, 0.6])).sum()
    assert np.isclose(cot.predict(z), 1 - variation)


def test_cot_solves_the_transport_problem():
    z, y = logits_and_labels(n=40)
    cot = COT().fit(z, y)
    p = softmax(z, axis=1)
    cost = 0.5 * np.abs(p[:, None, :] - np.eye(4)[None]).sum(2)
    rows = np.kron(np.eye(40), np.ones(4))
    columns = np.kron(np.ones(40), np.eye(4))
    counts = np.bincount(y, minlength=4)
    solved = linprog(cost.ravel(), A_eq=np.vstack([rows, columns]), b_eq=np.r_[np.ones(40), counts])
    assert np.isclose(cot.predict(z), 1 - solved.fun / 40)
    assert cot.predict(z[:37]) <= 1  # counts that are not whole are rounded


def test_nuclear_norm_closed_forms():
    sure = np.where(np.eye(4)[np.arange(40) % 4] > 0, 0.0, -800.0)
    assert np.isclose(NuclearNorm().predict(sure), 1)
    constant = np.where(np.eye(4)[np.zeros(40, dtype=int)] > 0, 0.0, -800.0)
    assert np.isclose(NuclearNorm().predict(constant), 1 / 2)


def test_autoeval_is_the_distance_to_the_source():
    z, y = logits_and_labels()
    peer = FrechetAutoEval().fit(z, y)
    assert peer.predict(z) < 1e-5
    assert np.isclose(peer.predict(z + np.array([3.0, 4.0, 0.0, 0.0])), 5.0)


def test_dispersion_by_hand():
    embeddings = np.array([[0.0], [2.0], [10.0], [12.0]])
    z = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    score = DispersionScore().predict(z, embeddings)
    assert np.isclose(score, np.log(2 * 5.0**2 + 2 * 5.0**2))


def test_regression_gives_peers_the_labelled_sets():
    peer = NuclearNorm()
    sets = [logits_and_labels(seed=s)[0] * (1 + s) for s in range(4)]
    scores = np.array([peer.predict(z) for z in sets])
    line = Regressed(peer).fit(sets, 0.1 + 0.5 * scores)
    assert np.allclose(line.coef_, [0.1, 0.5])
    assert np.isclose(line.predict(sets[2]), 0.1 + 0.5 * scores[2])
    assert line.line(99.0) == 1
    with pytest.raises(ValueError, match="at least two sets"):
        Regressed(peer).fit(sets[:1], [0.5])


def test_agreement():
    z, _ = logits_and_labels()
    assert agreement(z, log_softmax(z, axis=1)) == 1
    with pytest.raises(ValueError, match="one shape"):
        agreement(z, z[:5])

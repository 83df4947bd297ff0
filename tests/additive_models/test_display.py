"""The display draws what the estimator says."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from icml24.additive_models import LaplaceNAMDisplay, LaplaceNAMRegressor


@pytest.fixture(scope="module")
def fitted():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"a": rng.normal(size=120), "b": rng.normal(size=120), "kind": rng.choice(["u", "v"], 120)}
    )
    y = np.sin(frame.a) + (frame.kind == "u") + frame.a * frame.b
    model = LaplaceNAMRegressor(
        hidden_layer_sizes=(8,),
        max_iter=80,
        interactions=[("a", "b"), ("a", "kind")],
        random_state=0,
    )
    return model.fit(frame, y), frame


def test_curve_and_band(fitted):
    model, frame = fitted
    display = LaplaceNAMDisplay.from_estimator(model, frame, ["a"], level=0.9)
    grid, mean = display.lines_[0].get_data()
    assert grid[0] == frame.a.min()
    assert grid[-1] == frame.a.max()
    expected = model.partial_dependence("a", grid)
    np.testing.assert_allclose(mean, expected.mean)
    path = display.bands_[0].get_paths()[0].vertices
    upper = expected.mean + 1.6448536 * expected.std
    assert path[:, 1].max() == pytest.approx(upper.max())
    assert display.axes_[0].get_xlabel() == "a"


def test_all_terms_by_effect_size(fitted):
    model, frame = fitted
    display = LaplaceNAMDisplay.from_estimator(model, frame)
    assert len(display.axes_) == 5
    largest = model.term_names_[int(np.argmax(model.effect_size_))]
    assert " x ".join(display.names[0]) == largest
    display.figure_.canvas.draw()


def test_category_and_pairs(fitted):
    model, frame = fitted
    display = LaplaceNAMDisplay.from_estimator(model, frame, ["kind", ("a", "b"), ("a", "kind")])
    labels = [text.get_text() for text in display.axes_[0].get_xticklabels()]
    assert labels == ["u", "v"]
    surface = model.partial_dependence(("a", "b"), grid_resolution=20)
    np.testing.assert_allclose(np.asarray(display.lines_[1].get_array()), surface.mean.T)
    assert display.axes_[1].get_ylabel() == "b"


def test_given_axes(fitted):
    model, frame = fitted
    _, axes = plt.subplots(1, 2)
    display = LaplaceNAMDisplay.from_estimator(model, frame, ["a", "b"], ax=axes)
    assert list(display.axes_) == list(axes)
    _, single = plt.subplots()
    display = LaplaceNAMDisplay.from_estimator(model, frame, ["a", "b"], ax=single)
    assert display.figure_ is single.figure
    with pytest.raises(ValueError, match="ax must hold 3 axes"):
        LaplaceNAMDisplay.from_estimator(model, frame, ["a", "b", "kind"], ax=axes)


def test_display_without_names():
    X = np.random.default_rng(0).uniform(size=(50, 2))
    model = LaplaceNAMRegressor(hidden_layer_sizes=(4,), max_iter=30).fit(X, X[:, 0])
    display = LaplaceNAMDisplay.from_estimator(model, X, [1])
    assert display.axes_[0].get_xlabel() == "x1"


def test_bad_requests(fitted):
    model, frame = fitted
    with pytest.raises(ValueError, match="There is no column 'c'"):
        LaplaceNAMDisplay.from_estimator(model, frame, ["c"])
    with pytest.raises(ValueError, match="There is no term"):
        LaplaceNAMDisplay.from_estimator(model, frame, [("b", "kind")])
    with pytest.raises(ValueError, match="level must lie strictly"):
        LaplaceNAMDisplay.from_estimator(model, frame, ["a"], level=95)
    from sklearn.exceptions import NotFittedError

    with pytest.raises(NotFittedError):
        LaplaceNAMDisplay.from_estimator(LaplaceNAMRegressor(), frame)

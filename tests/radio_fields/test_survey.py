"""Surveys from files, choosing a predictor, and maps."""

import numpy as np
import pandas as pd
import pytest

import icml24.radio_fields as rf
from icml24.radio_fields.survey import ChannelDataset

F = 928e6


def survey(dim=2, n=40, **options):
    size, tx = ((4, 3), (1.0, 0.8)) if dim == 2 else ((4, 3, 2.5), (1.0, 0.8, 1.9))
    room = rf.ShoeboxRoom(size, tx, frequency=F, max_order=1, **options)
    rx = room.sample_receivers(n, seed=0)
    paths = room.trace(rx)
    return ChannelDataset(rx, room.channel(rx), F, paths.doa, paths.mask)


@pytest.mark.parametrize("dim", [2, 3])
def test_files_give_back_what_was_written(tmp_path, dim):
    given = survey(dim, obstacles=[] if dim == 3 else [((2, 1), (2.5, 1.5))])
    given.to_npz(tmp_path / "survey.npz")
    given.to_csv(tmp_path / "survey.csv")
    from_csv = ChannelDataset.from_csv(tmp_path / "survey.csv", F)
    for read in (ChannelDataset.from_npz(tmp_path / "survey.npz"), from_csv):
        np.testing.assert_allclose(read.rx, given.rx)
        np.testing.assert_allclose(read.h, given.h)
        np.testing.assert_array_equal(read.mask, given.mask)
        np.testing.assert_allclose(read.doa[read.mask], given.doa[given.mask], atol=1e-12)
        assert read.frequency == F


def test_gain_and_phase_columns():
    table = pd.DataFrame({"x": [0, 1.0], "y": [0, 0], "gain_db": [-20, -40], "phase_deg": [90, 0]})
    np.testing.assert_allclose(ChannelDataset.from_frame(table, F).h, [0.1j, 0.01], atol=1e-15)
    with pytest.raises(ValueError, match="without phase"):
        ChannelDataset.from_frame(table.drop(columns="phase_deg"), F)
    with pytest.raises(ValueError, match="columns x and y"):
        ChannelDataset.from_frame(table.rename(columns={"x": "east"}), F)
    space = table.assign(z=1.0, azimuth_1=0.0)
    with pytest.raises(ValueError, match="elevation"):
        ChannelDataset.from_frame(space, F)


def test_columns_of_the_official_data():
    frame = pd.DataFrame(
        {
            "RxPos": [np.zeros(3), np.array([1.0, 0, 0])],
            "Frequency": [2.412, 2.412],
            "CSI": [1e-3 + 1e-4j, 2e-3j],
            "LastXPts": [np.array([[2.0, 0], [0, 3], [0, 0]]), np.array([[1.0], [0], [-2]])],
        }
    )
    data = ChannelDataset.from_newrf(frame)
    assert data.frequency == pytest.approx(2.412e9)
    assert data.mask.tolist() == [[True, True], [True, False]]
    np.testing.assert_allclose(data.doa[0], [[1, 0, 0], [0, 1, 0]])
    np.testing.assert_allclose(data.doa[1, 0], [0, 0, -1])
    with pytest.raises(ValueError, match="LastXPts"):
        ChannelDataset.from_newrf(frame.drop(columns="LastXPts"))


def test_bad_surveys():
    good = survey()
    cases = [
        ({"rx": 1000 * good.rx}, "metres"),
        ({"h": np.abs(good.h)}, "complex"),
        ({"h": 0 * good.h}, "zero everywhere"),
        ({"frequency": 0}, "hertz"),
        ({"frequency": 0.928}, "hertz"),
        ({"rx": np.r_[good.rx[:1], good.rx[:-1]]}, "occur twice"),
        ({"doa": good.doa * 1.1}, "unit"),
        ({"rx": np.where(good.rx > 3, np.nan, good.rx)}, "NaN"),
        ({"duplicates": "first"}, "duplicates"),
    ]
    base = {"rx": good.rx, "h": good.h, "frequency": F, "doa": good.doa, "mask": good.mask}
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            ChannelDataset(**{**base, **change})


def test_repeated_positions_are_averaged():
    rx = np.array([[2.0, 1], [0, 0], [2, 1]])
    data = ChannelDataset(rx, [1 + 0j, 5, 3], F, duplicates="mean")
    assert data.rx.tolist() == [[2.0, 1], [0, 0]]
    assert data.h.tolist() == [2, 5]


def test_dataset_and_split():
    data = survey()
    train, test = data.split(0.8)
    assert (len(train), len(test), len(data)) == (32, 8, 40)
    together = np.concatenate([train.rx, test.rx])
    assert len(np.unique(together, axis=0)) == 40
    _, last = data.split(0.8, seed=None)
    np.testing.assert_array_equal(last.rx, data.rx[32:])
    assert len(data[3]) == 4
    with pytest.raises(ValueError, match="too few"):
        data.split(1.0)


def test_choice():
    data = survey(n=80)
    choice = rf.choose_predictor(data)
    assert choice.table["SNR (dB)"].is_monotonic_decreasing
    assert set(choice.table["method"][:2]) == {"VTx-LS", "sources"}
    assert choice.table["SNR (dB)"][0] > 30
    no_array = ChannelDataset(data.rx, data.h, F)
    assert set(rf.choose_predictor(no_array).table["method"]) == {
        "nearest neighbours",
        "RBF GP",
        "Helmholtz GP",
    }
    mine = rf.NearestNeighbours(ks=(1,))
    assert rf.choose_predictor(data, {"mine": mine}).predictor.k_ == 1
    assert not hasattr(mine, "k_")


def test_maps(tmp_path):
    room = rf.ShoeboxRoom((4, 3), (1.0, 0.8), frequency=F, max_order=1)
    data = survey(n=60)
    model = rf.VirtualTransmitterRegressor(F).fit(data.rx, data.h, data.doa)
    chart = rf.coverage_map(model, (2, 1), (3.5, 2), 0.25)
    assert chart.h.shape == (5, 7)
    true = room.channel([[chart.x[3], chart.y[1]]])[0]
    assert abs(chart.h[1, 3] - true) < 0.02 * abs(true)  # rows are y
    chart.to_csv(tmp_path / "map.csv")
    table = pd.read_csv(tmp_path / "map.csv")
    row = table[(table["x"] == 2.75) & (table["y"] == 1.25)].iloc[0]
    assert row["gain_db"] == pytest.approx(20 * np.log10(abs(chart.h[1, 3])))
    chart.to_png(tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 2000
    chart.to_asc(tmp_path / "map.asc")
    lines = (tmp_path / "map.asc").read_text().splitlines()
    assert lines[0] == "ncols 7"
    grid = np.loadtxt(tmp_path / "map.asc", skiprows=6)
    np.testing.assert_allclose(grid[::-1], chart.gain_db, atol=1e-3)  # first line is the north
    with pytest.raises(ValueError, match="step"):
        rf.coverage_map(model, (0, 0), (1, 1), 0)


def test_geotiff_has_pixels_place_and_system(tmp_path):
    from PIL import Image

    h = np.arange(1.0, 7.0).reshape(2, 3).astype(complex)
    chart = rf.CoverageMap(np.array([2.0, 2.5, 3.0]), np.array([1.0, 1.25]), h)
    chart.to_geotiff(tmp_path / "map.tif", epsg=32633, origin=(500_000, 4_649_776))
    with Image.open(tmp_path / "map.tif") as image:
        pixels, tags = np.asarray(image), dict(image.tag_v2)
    np.testing.assert_allclose(pixels[::-1], chart.gain_db, atol=1e-5)  # first line is the north
    assert tags[33550] == (0.5, 0.25, 0.0)
    assert tags[33922] == (0, 0, 0, 500_000 + 1.75, 4_649_776 + 1.375, 0)
    keys = np.reshape(tags[34735], (-1, 4))
    assert keys[0].tolist() == [1, 1, 0, len(keys) - 1]
    assert dict(keys[1:, [0, 3]].tolist()) == {1024: 1, 1025: 1, 3072: 32633, 3076: 9001}
    assert (np.diff(keys[1:, 0]) > 0).all()
    chart.to_geotiff(tmp_path / "map.tif")
    with Image.open(tmp_path / "map.tif") as image:
        assert image.tag_v2[33922][3:5] == (1.75, 1.375)
    assert [path.name for path in tmp_path.iterdir()] == ["map.tif"]
    with pytest.raises(ValueError, match="epsg"):
        chart.to_geotiff(tmp_path / "bad.tif", epsg=7)
    with pytest.raises(ValueError, match="two rows"):
        rf.CoverageMap(chart.x, chart.y[:1], h[:1]).to_geotiff(tmp_path / "bad.tif")


def test_maps_in_space_need_a_height():
    data = survey(3)
    model = rf.NearestNeighbours().fit(data.rx, data.h)
    with pytest.raises(ValueError, match="height"):
        rf.coverage_map(model, (0, 0), (1, 1), 0.5)
    assert rf.coverage_map(model, (0, 0), (1, 1), 0.5, height=1.0).h.shape == (3, 3)

"""Our image method against Sionna RT, where it is installed (extra ``rt``)."""

import importlib.util
from xml.etree import ElementTree

import numpy as np
import pytest

import icml24.radio_fields as rf
from icml24.radio_fields import experiments as ex

F = 2.412e9


def sionna_works():
    if importlib.util.find_spec("sionna") is None:
        return False
    try:
        import sionna.rt  # noqa: F401
    except Exception:  # no shared library of LLVM
        return False
    return True


@pytest.mark.skipif(not sionna_works(), reason="sionna-rt is not installed: pip install icml24[rt]")
def test_box_scene_equals_the_image_method():
    """A box of 10 m x 10 m x 5 m; metal of conductivity 1e7 is nearly perfect."""
    tx = np.array([1.3, -2.1, 2.2])
    scene = rf.SionnaScene("box", tx, frequency=F, max_order=2, material="metal", conductivity=1e7)
    box = scene.scene.mi_scene.bbox()
    low, high = np.array(box.min, float), np.array(box.max, float)
    room = rf.ShoeboxRoom(high - low, tx - low, frequency=F, max_order=2, polarization="vertical")
    rx = room.sample_receivers(20, seed=0, margin=0.3)
    ours, theirs = room.trace(rx), scene.trace(rx + low)
    complete = theirs.mask.sum(axis=1) == 25
    assert complete.sum() >= 18  # a ray that grazes the edge of a triangle can be lost
    found = np.where(theirs.mask, theirs.lengths, np.inf)[complete]
    np.testing.assert_allclose(
        np.sort(found, axis=1)[:, :25], np.sort(ours.lengths[complete], axis=1), rtol=1e-5
    )
    channel = ours.gain.sum(axis=1)
    ratio = np.abs(theirs.gain.sum(axis=1) - channel) / np.abs(channel)
    assert ratio[complete].max() < 5e-3
    order = np.argsort(ours.lengths[0])
    first = np.argsort(found[0])[:25]
    cosine = (ours.doa[0][order] * theirs.doa[complete][0][first]).sum(axis=1)
    assert (cosine > 1 - 1e-5).sum() >= 23  # two paths may be equally long


@pytest.mark.skipif(sionna_works(), reason="Sionna is installed")
def test_message_without_sionna():
    with pytest.raises(ImportError, match=r"icml24\[rt\]"):
        rf.SionnaScene(frequency=F)


class TestFurnishedRoom:
    size = (5.0, 4.0, 2.7)

    def test_six_walls_and_one_shape_for_each_piece(self):
        scene = ElementTree.fromstring(
            rf.furnished_room(self.size, [rf.Box((1, 2, 0.5), (0.4, 0.6, 1.0), "metal")])
        )
        shapes = scene.findall("shape")
        assert len(shapes) == 7
        assert {b.find("string").get("value") for b in scene.findall("bsdf")} == {
            "concrete",
            "metal",
        }
        scale, move = (shapes[-1].find(f"transform/{name}") for name in ("scale", "translate"))
        assert [float(scale.get(k)) for k in "xyz"] == [0.2, 0.3, 0.5]  # the cube is 2 wide
        assert [float(move.get(k)) for k in "xyz"] == [1, 2, 0.5]
        assert shapes[-1].find("ref").get("id") == "metal"
        inner = []
        for wall in shapes[:6]:
            scale, move = (wall.find(f"transform/{name}") for name in ("scale", "translate"))
            half = np.array([float(scale.get(k)) for k in "xyz"])
            center = np.array([float(move.get(k)) for k in "xyz"])
            thin = int(half.argmin())
            inner.append((thin, center[thin] + (half if center[thin] < 0 else -half)[thin]))
        assert sorted(inner) == [(a, x) for a in range(3) for x in (0.0, self.size[a])]

    def test_bad_rooms_and_furniture(self):
        with pytest.raises(ValueError, match="three positive lengths"):
            rf.furnished_room((5, 4))
        with pytest.raises(ValueError, match="sticks out"):
            rf.furnished_room(self.size, [rf.Box((4.9, 1, 1), (0.5, 0.5, 0.5))])
        with pytest.raises(ValueError, match="must be positive"):
            rf.furnished_room(self.size, [rf.Box((1, 1, 1), (0.5, 0.0, 0.5))])

    def test_places_lie_outside_the_furniture(self):
        rx = ex.furnished_places()
        assert rx.shape == (240, 3)
        assert not any(box.contains(rx).any() for box in ex.FURNITURE)
        assert ex.FURNITURE[0].contains(ex.FURNITURE[0].center)

    def test_stored_surveys_and_what_furniture_does_to_them(self):
        empty, furnished = (ex.stored_survey(name) for name in ("empty", "furnished"))
        np.testing.assert_allclose(empty.rx, ex.furnished_places())
        np.testing.assert_allclose(furnished.rx, empty.rx)
        assert np.median(empty.mask.sum(1)) == 25  # line of sight, 6 + 18 reflections
        assert furnished.mask.sum() < empty.mask.sum()
        with pytest.raises(ValueError, match="'empty' or 'furnished'"):
            ex.stored_survey("cellar")

    @pytest.mark.skipif(not sionna_works(), reason="needs sionna-rt")
    @pytest.mark.parametrize("name", ["empty", "furnished"])
    def test_stored_surveys_are_what_sionna_traces(self, name):
        furniture, places = ex.FURNITURE if name == "furnished" else (), ex.furnished_places()[:20]
        now, then = ex.trace_furnished(furniture, places), ex.stored_survey(name)
        error = np.abs(now.h - then.h[:20]) / np.abs(then.h[:20])
        assert np.median(error) < 1e-4  # now and then it loses a ray that grazes an edge
        assert now.mask.sum() == pytest.approx(then.mask[:20].sum(), rel=0.05)

"""Our image method against Sionna RT, where it is installed (extra ``rt``)."""

import importlib.util

import numpy as np
import pytest

import icml24.radio_fields as rf

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
    """Sionna's box is 10 m x 10 m x 5 m, centred; metal of conductivity 1e7 is nearly perfect."""
    tx = np.array([1.3, -2.1, 2.2])
    scene = rf.SionnaScene("box", tx, frequency=F, max_order=2, material="metal", conductivity=1e7)
    box = scene.scene.mi_scene.bbox()
    low, high = np.array(box.min, float), np.array(box.max, float)
    room = rf.ShoeboxRoom(high - low, tx - low, frequency=F, max_order=2, polarization="vertical")
    rx = room.sample_receivers(20, seed=0, margin=0.3)
    ours, theirs = room.trace(rx), scene.trace(rx + low)
    assert (theirs.mask.sum(axis=1) == 25).all()
    sorted_lengths = np.sort(np.where(theirs.mask, theirs.lengths, np.inf), axis=1)[:, :25]
    np.testing.assert_allclose(sorted_lengths, np.sort(ours.lengths, axis=1), rtol=1e-5)
    ratio = np.abs(scene.channel(rx + low) - room.channel(rx)) / np.abs(room.channel(rx))
    assert np.median(ratio) < 5e-3


@pytest.mark.skipif(sionna_works(), reason="Sionna is installed")
def test_message_without_sionna():
    with pytest.raises(ImportError, match=r"icml24\[rt\]"):
        rf.SionnaScene(frequency=F)

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

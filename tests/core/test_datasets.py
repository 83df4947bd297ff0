import gzip

import numpy as np
import pytest

from icml24.core.data import DataUnavailableError
from icml24.core.datasets import DEBIAN, FASHION_CLASSES, fashion_mnist


def test_extract_is_balanced_and_bright():
    data = fashion_mnist()
    assert np.bincount(data.train_labels).tolist() == [1000] * 10
    assert np.bincount(data.test_labels).tolist() == [200] * 10
    assert len(FASHION_CLASSES) == 10
    # A trouser leaves more ground than a pullover: images and labels belong together.
    ink = [data.train_images[data.train_labels == c].mean() for c in (1, 2)]
    assert ink[0] < 0.7 * ink[1]


def test_full_set_reads_the_original_format(tmp_path):
    rng = np.random.default_rng(0)
    for part, n in (("train", 3), ("t10k", 2)):
        images, labels = rng.integers(0, 255, (n, 28, 28), np.uint8), np.arange(n, dtype=np.uint8)
        for kind, header, body in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
            content = gzip.compress(b"\0" * header + body.tobytes())
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(content)
    data = fashion_mnist(full=True, directory=tmp_path)
    assert (data.train_images.shape, data.test_labels.tolist()) == ((3, 28, 28), [0, 1])
    assert np.array_equal(data.test_images, images)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_extract_is_part_of_the_full_set():
    full, part = fashion_mnist(full=True), fashion_mnist()
    first = np.flatnonzero(full.train_labels == 3)[:1000]
    assert np.array_equal(full.train_images[first], part.train_images[part.train_labels == 3])


def test_a_missing_full_set_says_how_to_get_it(tmp_path):
    with pytest.raises(DataUnavailableError, match="apt-get install dataset-fashion-mnist"):
        fashion_mnist(full=True, directory=tmp_path)

"""Real data that several chapters use."""

from __future__ import annotations

import gzip
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from icml24.core.data import DataSource, DataUnavailableError

__all__ = ["FASHION_CLASSES", "Images", "fashion_mnist"]

FASHION_CLASSES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
LICENCE = "MIT, copyright 2017 Zalando SE"
EXTRACT = DataSource(
    "Fashion-MNIST",
    "b8df0d0b256ad1e34848e512b82501a43d6362a49b80ff09bd7749ab369e962a",
    LICENCE,
    extract="icml24.core:data_files/fashion_mnist.xz",
)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Images:
    """Labelled grey images.

    Parameters
    ----------
    train_images, test_images : numpy.ndarray of uint8, shape (n, 28, 28)
        Grey values from 0 (ground) to 255.
    train_labels, test_labels : numpy.ndarray of int64, shape (n,)
        Class indices into :data:`FASHION_CLASSES`.
    origin, licence : str
        Where the bytes came from, and their licence.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    origin: str
    licence: str = LICENCE


def fashion_mnist(full: bool = False, directory: str | Path = DEBIAN) -> Images:
    """Load Fashion-MNIST, photographs of ten kinds of clothing.

    Parameters
    ----------
    full : bool, default False
        False: the class-balanced extract that the package carries (10,000 training and 2,000 test
        images, ordered as in the original). True: all 70,000 images from ``directory``.
    directory : path-like
        Folder with the four original ``*-ubyte.gz`` files; by default the place where Debian's
        package ``dataset-fashion-mnist`` puts them.

    Returns
    -------
    Images

    Raises
    ------
    DataUnavailableError
        If the full set is asked for and not there; the message says which command installs it.

    Examples
    --------
    >>> data = fashion_mnist()
    >>> data.train_images.shape, data.test_images.shape
    ((10000, 28, 28), (2000, 28, 28))
    """
    if not full:
        loaded = EXTRACT.load()
        raw = np.frombuffer(lzma.decompress(loaded.content), np.uint8)
        images = raw[:-12_000].reshape(12_000, 28, 28)
        labels = raw[-12_000:].astype(np.int64)
        train, test = slice(10_000), slice(10_000, None)
        return Images(images[train], labels[train], images[test], labels[test], loaded.origin)
    directory = Path(directory)
    arrays = []
    for part in ("train", "t10k"):
        for kind, offset in (("images-idx3", 16), ("labels-idx1", 8)):
            path = directory / f"{part}-{kind}-ubyte.gz"
            if not path.is_file():
                raise DataUnavailableError(
                    f"{path} is missing: install Debian's package with apt-get install "
                    "dataset-fashion-mnist, or pass the folder that holds the four original files."
                )
            arrays.append(
                np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=offset)
            )
    train_images, train_labels, test_images, test_labels = arrays
    return Images(
        train_images.reshape(-1, 28, 28),
        train_labels.astype(np.int64),
        test_images.reshape(-1, 28, 28),
        test_labels.astype(np.int64),
        str(directory),
    )

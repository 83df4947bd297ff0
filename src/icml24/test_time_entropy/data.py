"""Fashion-MNIST, its shifted versions, and twenty ImageNet photographs.

Real: the images, their labels, the photographs. Simulated: the shifts
(:mod:`icml24.test_time_entropy.corruptions`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from icml24.core.data import DataSource
from icml24.core.datasets import fashion_mnist
from icml24.test_time_entropy.corruptions import corrupt

__all__ = ["Split", "images", "photographs", "shifted"]

N_TRAIN = 8_000


@dataclass(frozen=True)
class Split:
    """Images with values in [0, 1], shape (n, 1, 28, 28), and their class indices."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@lru_cache(maxsize=1)
def images() -> dict[str, Split]:
    """Load the three splits of the Fashion-MNIST extract.

    Returns
    -------
    dict
        ``"train"`` (8,000 images: the source networks learn from these), ``"validation"`` (2,000:
        temperatures, thresholds and calibration sets), ``"test"`` (2,000: everything reported).

    Examples
    --------
    >>> {name: len(split) for name, split in images().items()}
    {'train': 8000, 'validation': 2000, 'test': 2000}
    """
    data = fashion_mnist()
    order = np.random.default_rng(0).permutation(len(data.train_labels))

    def split(pixels: np.ndarray, labels: np.ndarray) -> Split:
        x = torch.from_numpy(pixels.astype(np.float32) / 255).unsqueeze(1)
        return Split(x, torch.from_numpy(labels.copy()))

    first, rest = order[:N_TRAIN], order[N_TRAIN:]
    shuffled = np.random.default_rng(1).permutation(len(data.test_labels))
    return {
        "train": split(data.train_images[first], data.train_labels[first]),
        "validation": split(data.train_images[rest], data.train_labels[rest]),
        "test": split(data.test_images[shuffled], data.test_labels[shuffled]),
    }


def shifted(split: str, name: str, severity: int, n: int | None = None, seed: int = 0) -> Split:
    """Corrupt (the first ``n`` images of) a split.

    Parameters
    ----------
    split : {"train", "validation", "test"}
    name : str
        A corruption, or ``"clean"`` for the images as they are.
    severity : int
        From 1 to 5; 0 for ``"clean"``.
    n : int, optional
        How many images; all by default.
    seed : int, default 0
        Of the corruption's randomness; each type and severity has a stream of its own.

    Returns
    -------
    Split

    Examples
    --------
    >>> shifted("test", "fog", 3, n=5).x.shape
    torch.Size([5, 1, 28, 28])
    """
    known = images()
    if split not in known:
        raise ValueError(f"split must be one of {', '.join(known)}, got {split!r}.")
    data = Split(known[split].x[:n], known[split].y[:n])
    if name == "clean":
        return data
    stream = zlib.crc32(f"{split} {name} {severity} {seed}".encode())
    return Split(corrupt(data.x, name, severity, torch.Generator().manual_seed(stream)), data.y)


#: ImageNet class and digest of each photograph
_PHOTOS = (
    (243, "28b7b933c8028c6e20bf74a86a709eda42ce99f14c8742cb657cb386f08a4c9d"),
    (559, "5f03b0c74dff01b5b4195d0beabcae2a625a406e6917957ab9c455b5b7dea6d6"),
    (438, "ccef0734c1a65549c6cb5adb0f5d9b1c0b2e2104aba50a9e5f9202dc6d4532ed"),
    (990, "c7f0b2f1e9ee39d8f900759e8983afa2e4a2d7de090060e8bb947f6e90cace5f"),
    (949, "a7f62f3c1d214de4718c7253871ab38209283249e131faf65b8f2b7fdc970669"),
    (853, "8a449436c61da867528b1f4efaf8ae832ab9c9201705eae0d3af1353fbdac131"),
    (609, "fb061102a4e58b3ed942bb2a4f9542e1e1acdc8f225ef95498e93889290e192f"),
    (609, "2c297ad1e5c4804a647e9b34bc02ee2fc348b05a4d49050d170fb61c948efa5c"),
    (915, "c6a3411a3987799f0de45adc142f00ca412c3e14073c635e2adfae1f3913180c"),
    (455, "ace3716b60ac5843269b270e17020e4f8138440cd30ef3487f7d6e54da9745a4"),
    (541, "f325c71d9f4290ee45e99bd7ad42f4bffe513b1450ad21e7bd61c7cb137395d9"),
    (630, "892dff58fc528fe63d2df0c783aa3eca2342637798578ce01763fbc0553eda01"),
    (741, "6c256e17545b25bbf2e06cf6513ff48d049583569515ac4d4c3a52aea804a529"),
    (471, "52ed0e738b90d27afcabc3e92c81ae637f160c2d9f75b93a65211005ab5dcd81"),
    (129, "ad9371d813bf24b0365ee2f78f28c08718ee7c5975f060caa16c3f264e828139"),
    (99, "4b588649cd835d4c65521727ebee03d9621baff1f54d3e8a53a26b53d983ec2e"),
    (251, "ce3440a3b7beb6ca3009817504c44d39fa789e7c2f70a2eef7e2f9cc9a87b129"),
    (22, "b432341845620e9cfd67d848c4783c32dd6eaddad45513866b17180d2b09fcf5"),
    (317, "b9412f92f0b1c3faede45b55a44940977daa744f2040118d0538cf597fca785d"),
    (305, "e1f58f00e2e47ce930d7ecab0e46a78316054f68c10d0742e87c1cc092324556"),
)


def photographs(size: int = 224) -> Split:
    """Twenty labelled ImageNet photographs, read from the wheel of ``foolbox`` 3.3.4.

    They may be looked at but not passed on, so the package does not carry them: the first call
    downloads 1.7 MB.

    Parameters
    ----------
    size : int, default 224
        Height and width in pixels.

    Returns
    -------
    Split
        ``x`` of shape (20, 3, size, size) in [0, 1]; ``y`` indexes the 1,000 ImageNet classes.

    Raises
    ------
    icml24.core.data.DataUnavailableError
        If the wheel is neither installed nor reachable.
    """
    from PIL import Image

    pictures, labels = [], []
    for i, (label, digest) in enumerate(_PHOTOS):
        member = f"foolbox==3.3.4:foolbox/data/imagenet_{i:02d}_{label}.jpg"
        source = DataSource("ImageNet photographs", digest, "ImageNet terms", package=member)
        with Image.open(source.load().open()) as picture:
            square = picture.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
        pictures.append(np.asarray(square, dtype=np.float32).transpose(2, 0, 1) / 255)
        labels.append(label)
    return Split(torch.from_numpy(np.stack(pictures)), torch.tensor(labels))


def make_source_networks(path: Path, seeds: int = 5) -> bytes:
    """Train the source networks and write them to ``path`` (about half a minute each)."""
    from icml24.test_time_entropy.networks import pack, train_source

    train = images()["train"]
    content = pack([train_source(train.x, train.y, seed=seed) for seed in range(seeds)])
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(content)
    scratch.replace(path)
    return content


if __name__ == "__main__":
    import hashlib

    target = Path(__file__).with_name("data") / "source_networks.npz"
    print(hashlib.sha256(make_source_networks(target)).hexdigest())

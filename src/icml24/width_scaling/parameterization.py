"""abc-parameterizations: how initialisation, multiplier and learning rate change with width.

A network of width ``n`` computes in layer ``l`` (section 2 of the paper)

    z_l = phi(n^{-a_l} W_l z_{l-1}),    W_l ~ N(0, n^{-2 b_l}),    rate_l ~ n^{-c_l},

and every layer is one of three types: the *embedding* contracts a fixed dimension, *hidden* layers
contract the width, and the *readout* contracts the width into a fixed number of outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

__all__ = [
    "LAYERS",
    "MEAN_FIELD",
    "MUP",
    "NTK",
    "PARAMETERIZATIONS",
    "STANDARD",
    "LayerExponents",
    "Parameterization",
    "as_parameterization",
]

LAYERS = ("embedding", "hidden", "readout")
"""The three types of layer, in the order of every triple in this package."""


def show(x: float) -> str:
    """Write an exponent as a fraction when it is a simple one: ``show(0.5)`` is ``'1/2'``."""
    nearest = Fraction(x).limit_denominator(16)
    return str(nearest) if abs(nearest - x) < 1e-6 else f"{x:.3f}"


@dataclass(frozen=True)
class LayerExponents:
    """One exponent for each type of layer.

    Parameters
    ----------
    embedding, hidden, readout : float
        The quantity of that layer changes like ``n ** -exponent``.
    residuals : tuple of float, optional
        For learning rates: ``r`` of the embedding, of each hidden layer, and of the logits; the
        change of a layer's output during training is of size ``n ** -r``.

    Examples
    --------
    >>> print(LayerExponents(0, 1, 0.5))
    (0, 1, 1/2)
    """

    embedding: float
    hidden: float
    readout: float
    residuals: tuple[float, ...] = ()

    def __iter__(self) -> Iterator[float]:
        return iter((self.embedding, self.hidden, self.readout))

    def __getitem__(self, layer: str) -> float:
        if layer not in LAYERS:
            raise KeyError(f"A layer type is one of {', '.join(LAYERS)}, got {layer!r}.")
        return float(getattr(self, layer))

    def __str__(self) -> str:
        return f"({', '.join(show(x) for x in self)})"


@dataclass(frozen=True)
class Parameterization:
    """Exponents of the multiplier (``a``) and of the initial standard deviation (``b``).

    Parameters
    ----------
    name : str
        Shown in tables.
    a, b : tuple of 3 floats
        For embedding, hidden layers and readout.
    allow_unstable : bool, default False
        Accept exponents whose activations or logits diverge or vanish at initialisation.

    Raises
    ------
    ValueError
        If activations would not keep their size at initialisation: section 2.3 of the paper asks
        for ``a + b`` equal to 0 (embedding) and 1/2 (hidden), and at least 1/2 (readout).

    Examples
    --------
    >>> MUP.gradient_exponents().readout
    0.5
    >>> Parameterization("mistaken muP", a=(-0.5, 0, 0.5), b=(0.5, 0.5, -0.5))
    Traceback (most recent call last):
    ...
    ValueError: 'mistaken muP' is unstable at initialisation: the readout needs a + b >= 1/2, got 0.
    """

    name: str
    a: tuple[float, float, float]
    b: tuple[float, float, float]
    allow_unstable: bool = False

    def __post_init__(self) -> None:
        if len(self.a) != 3 or len(self.b) != 3:
            raise ValueError("a and b need three entries: embedding, hidden, readout.")
        if self.allow_unstable:
            return
        sums = [a + b for a, b in zip(self.a, self.b, strict=True)]
        checks = [
            ("embedding", "a + b = 0", abs(sums[0]) < 1e-9, sums[0]),
            ("hidden layer", "a + b = 1/2", abs(sums[1] - 0.5) < 1e-9, sums[1]),
            ("readout", "a + b >= 1/2", sums[2] > 0.5 - 1e-9, sums[2]),
        ]
        for layer, rule, holds, value in checks:
            if not holds:
                raise ValueError(
                    f"{self.name!r} is unstable at initialisation: the {layer} needs {rule}, "
                    f"got {show(value)}."
                )

    def gradient_exponents(self, readout_update: float = float("inf")) -> LayerExponents:
        r"""Exponents ``g``: the gradient entries of a layer are of size ``n ** -g``.

        The backward signal reaches the hidden layers through the readout, so

        .. math:: g_l = \min(a_{L+1} + b_{L+1},\; e) + a_l, \qquad g_{L+1} = a_{L+1},

        where the first term is the initial readout and ``e`` its update. It is the *smaller*
        exponent that counts, because it belongs to the larger contribution.

        Parameters
        ----------
        readout_update : float, optional
            ``e``: exponent of the multiplied readout update (``2 a + c`` for SGD, ``a + c`` for
            Adam). Left out, the gradients are those at initialisation.

        Returns
        -------
        LayerExponents
        """
        a_embedding, a_hidden, a_readout = self.a
        backward = min(a_readout + self.b[2], readout_update)
        return LayerExponents(backward + a_embedding, backward + a_hidden, a_readout)

    def shifted(self, theta: tuple[float, float, float]) -> Parameterization:
        """Move ``n ** theta`` of each layer from the multiplier into the initialisation.

        The function at initialisation is the same; training is the same when the rates move along
        (``c`` by -2 theta for SGD, -theta for Adam, 0 for relative steps): see
        :func:`icml24.width_scaling.shifted_exponents`.

        Parameters
        ----------
        theta : tuple of 3 floats
            For embedding, hidden layers and readout.

        Returns
        -------
        Parameterization
        """
        a = tuple(x + t for x, t in zip(self.a, theta, strict=True))
        b = tuple(x - t for x, t in zip(self.b, theta, strict=True))
        return Parameterization(f"{self.name} shifted", a, b, self.allow_unstable)  # type: ignore[arg-type]


STANDARD = Parameterization("standard", a=(0, 0, 0), b=(0, 0.5, 0.5))
NTK = Parameterization("ntk", a=(0, 0.5, 0.5), b=(0, 0, 0))
MUP = Parameterization("mup", a=(-0.5, 0, 0.5), b=(0.5, 0.5, 0.5))
MEAN_FIELD = Parameterization("mean_field", a=(0, 0.5, 1), b=(0, 0, 0))
PARAMETERIZATIONS = {p.name: p for p in (STANDARD, NTK, MUP, MEAN_FIELD)}
"""The paper's four parameterizations (its Table 1) by name."""


def as_parameterization(value: str | Parameterization) -> Parameterization:
    """Return the parameterization of that name, or the argument itself."""
    if isinstance(value, Parameterization):
        return value
    if value not in PARAMETERIZATIONS:
        raise ValueError(
            f"parameterization must be one of {', '.join(PARAMETERIZATIONS)} or a "
            f"Parameterization, got {value!r}."
        )
    return PARAMETERIZATIONS[value]

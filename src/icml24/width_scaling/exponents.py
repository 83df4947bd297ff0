"""The largest stable learning rates, from the constraints that keep every layer's change O(1).

An update of a layer changes its output in three ways: old weights meet new activations, new weights
meet old activations, and new meets new. How much each adds up over ``n`` terms is the *alignment*:
exponent 1/2 for independent signs, 1 for equal signs. Given alignments, "nothing diverges" is a set
of linear inequalities in the learning-rate exponents, so the best exponents solve a linear program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd
from scipy.optimize import linprog

from icml24.width_scaling.parameterization import (
    PARAMETERIZATIONS,
    LayerExponents,
    Parameterization,
    as_parameterization,
    show,
)

__all__ = [
    "ALIGNMENTS",
    "FULL",
    "NONE",
    "OPTIMIZERS",
    "PRIOR",
    "Alignment",
    "InfeasibleError",
    "Stability",
    "closed_form_exponents",
    "exponent_table",
    "lr_exponents",
    "shifted_exponents",
    "stability",
]

OptimizerName = Literal["sgd", "adam", "scaled_adam", "adafactor"]
OPTIMIZERS = ("sgd", "adam", "scaled_adam", "adafactor")
"""Optimizers whose update sizes the theory knows; the last two share their exponents."""


class InfeasibleError(ValueError):
    """No learning rate satisfies the constraints; the message names the one in the way."""


@dataclass(frozen=True)
class Alignment:
    """Exponents with which a contraction over the width adds up, for (hidden layers, readout).

    Parameters
    ----------
    alpha : tuple of 2 floats, or one for both
        Weight update with initial activations, ``|dW z| ~ n^alpha |dW| |z|``.
    omega : tuple of 2 floats, or one for both
        Initial weights with the change of activations, ``|W dz| ~ n^omega |W| |dz|``.
    u : tuple of 2 floats, or one for both
        Update with change.

    Raises
    ------
    ValueError
        If an exponent lies outside [0, 1] (sizes are root mean squares, so Cauchy-Schwarz bounds
        them by 1).

    Examples
    --------
    >>> Alignment(alpha=1, omega=0.5, u=1) == FULL
    True
    """

    alpha: tuple[float, float] = (1.0, 1.0)
    omega: tuple[float, float] = (0.5, 0.5)
    u: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        for name in ("alpha", "omega", "u"):
            value = np.asarray(getattr(self, name), dtype=float)
            if value.shape not in ((), (2,)):
                raise ValueError(f"{name} must be one number or a pair (hidden, readout).")
            if not ((value >= 0) & (value <= 1)).all():
                raise ValueError(f"{name} must lie in [0, 1], got {value.tolist()}.")
            pair = np.broadcast_to(value, 2)
            object.__setattr__(self, name, (float(pair[0]), float(pair[1])))


FULL = Alignment()
NONE = Alignment(alpha=(0.5, 0.5), u=(0.5, 0.5))
PRIOR = Alignment(omega=(0.5, 1.0))
ALIGNMENTS = {"full": FULL, "none": NONE, "prior": PRIOR}
"""The paper's two regimes, and the assumption of earlier work (an aligned initial readout)."""


def _as_alignment(value: str | Alignment) -> Alignment:
    if isinstance(value, Alignment):
        return value
    if value not in ALIGNMENTS:
        raise ValueError(
            f"alignment must be 'global', one of {', '.join(ALIGNMENTS)}, or an Alignment, "
            f"got {value!r}."
        )
    return ALIGNMENTS[value]


def _update_offsets(p: Parameterization, optimizer: str) -> tuple[np.ndarray, np.ndarray]:
    """Exponent of the multiplied update: ``offset + c + backward * g`` for the three layers."""
    a, b = np.array(p.a), np.array(p.b)
    if optimizer == "sgd":
        return 2 * a, np.array([1.0, 1.0, 0.0])
    if optimizer == "adam":
        return a, np.zeros(3)
    if optimizer in ("scaled_adam", "adafactor"):
        return a + b, np.zeros(3)
    raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}.")


@dataclass(frozen=True)
class Stability:
    """What a choice of learning-rate exponents does to a wide network.

    Parameters
    ----------
    residuals : tuple of float
        ``r`` of the embedding and of each hidden layer; the layer's change is ``n ** -r``.
    logits : float
        The same for the logits.
    violated : tuple of str
        The constraints that fail; empty when training is stable.
    """

    residuals: tuple[float, ...]
    logits: float
    violated: tuple[str, ...] = field(default=())

    @property
    def stable(self) -> bool:
        """Whether nothing diverges with width."""
        return not self.violated

    @property
    def learns_features(self) -> bool:
        """Whether the last hidden layer changes by O(1) (stable, and ``r_L = 0``)."""
        return self.stable and abs(self.residuals[-1]) < 1e-9


def stability(
    parameterization: str | Parameterization,
    optimizer: str,
    c: Sequence[float] | LayerExponents,
    alignment: str | Alignment = "full",
    hidden_layers: int = 2,
) -> Stability:
    """Evaluate the constraint system of section 2.3 of the paper for given rate exponents.

    Parameters
    ----------
    parameterization : str or Parameterization
    optimizer : {"sgd", "adam", "scaled_adam", "adafactor"}
    c : sequence of 3 floats
        Rate exponents of embedding, hidden layers and readout.
    alignment : str or Alignment
    hidden_layers : int, default 2

    Returns
    -------
    Stability

    Examples
    --------
    The paper's winner is stable, and impossible under the assumption of earlier theory:

    >>> stability("standard", "adam", (0, 1, 1), "full").learns_features
    True
    >>> stability("standard", "adam", (0, 1, 1), "prior").violated
    ('logits: initial readout with changed activations',)
    """
    p, align = as_parameterization(parameterization), _as_alignment(alignment)
    offset, backward = _update_offsets(p, optimizer)
    c_values = np.array(list(c), dtype=float)
    if c_values.shape != (3,):
        raise ValueError("c needs three exponents: embedding, hidden, readout.")
    if hidden_layers < 1:
        raise ValueError(f"hidden_layers must be at least 1, got {hidden_layers}.")
    g = min(p.a[2] + p.b[2], 2 * p.a[2] + c_values[2])
    update = offset + c_values + backward * g
    initial = np.array(p.a) + np.array(p.b)
    violated = []

    def check(value: float, name: str) -> float:
        if value < -1e-9:
            violated.append(name)
        return value

    def terms(i: int, r: float) -> dict[str, float]:
        return {
            "updated weights with initial activations": update[i] - align.alpha[i - 1],
            "updated weights with changed activations": update[i] + r - align.u[i - 1],
            ("initial readout" if i == 2 else "initial weights")
            + " with changed activations": initial[i] + r - align.omega[i - 1],
        }

    r = check(float(update[0]), "embedding: updated weights")
    residuals = [r]
    for layer in range(1, hidden_layers + 1):
        sizes = terms(1, r)
        r = float(min(check(value, f"hidden {layer}: {name}") for name, value in sizes.items()))
        residuals.append(r)
    logits = float(min(check(value, f"logits: {name}") for name, value in terms(2, r).items()))
    if optimizer in ("scaled_adam", "adafactor"):
        for layer_type, value in zip(("embedding", "hidden", "readout"), c_values, strict=True):
            check(value, f"{layer_type}: a relative step may not grow with width")
    return Stability(tuple(residuals), logits, tuple(violated))


def lr_exponents(
    parameterization: str | Parameterization,
    optimizer: str = "adam",
    alignment: str | Alignment = "full",
    *,
    feature_learning: bool = False,
    hidden_layers: int = 2,
) -> LayerExponents:
    r"""Exponents ``c`` of the largest stable learning rates, ``rate_l ~ n ** -c_l``.

    Minimises the sum of the three exponents subject to the constraints of :func:`stability`. Each
    residual is a minimum of terms; because a larger residual never hurts, "r equals the minimum"
    may be relaxed to "0 <= r <= each term", and the problem is a linear program. Among equal sums
    the solution with the smallest residuals is returned (the layers learn as much as they can).

    Parameters
    ----------
    parameterization : str or Parameterization
        "standard", "ntk", "mup", "mean_field", or your own exponents.
    optimizer : {"sgd", "adam", "scaled_adam", "adafactor"}
        "scaled_adam" is Adam with steps relative to the size of the weights.
    alignment : {"full", "none", "prior", "global"} or Alignment
        Assumed alignment; "global" stands for one rate for all layers, that is (0, 0, 0).
    feature_learning : bool, default False
        Demand that the last hidden layer changes by O(1).
    hidden_layers : int, default 2

    Returns
    -------
    LayerExponents
        With ``residuals``: embedding, hidden layers, logits.

    Raises
    ------
    InfeasibleError
        If no rates satisfy the constraints.
    ValueError
        If an argument is unknown.

    Examples
    --------
    >>> print(lr_exponents("standard", "adam", "full"))
    (0, 1, 1)
    >>> print(lr_exponents("mup", "sgd", "full"))
    (0, 0, 0)
    >>> try:
    ...     lr_exponents("standard", "adam", "prior", feature_learning=True)
    ... except InfeasibleError as error:
    ...     print(error)
    The logits diverge: the initial readout has a + b = 1/2, its assumed alignment is omega = 1.
    """
    p = as_parameterization(parameterization)
    offset, backward = _update_offsets(p, optimizer)
    if isinstance(alignment, str) and alignment == "global":
        return LayerExponents(0.0, 0.0, 0.0)
    align = _as_alignment(alignment)
    if hidden_layers < 1:
        raise ValueError(f"hidden_layers must be at least 1, got {hidden_layers}.")

    # Variables: c (3), r of embedding and hidden layers, g. Rows of A x <= b.
    size = 3 + 1 + hidden_layers + 1
    g = size - 1
    initial = np.array(p.a) + np.array(p.b)
    rows: list[np.ndarray] = []
    limits: list[float] = []

    def require(constant: float, **coefficients: float) -> None:
        """Add ``constant + sum(coefficient * x[index]) >= 0``; names are ``x<index>``."""
        row = np.zeros(size)
        for name, value in coefficients.items():
            row[int(name[1:])] -= value
        rows.append(row)
        limits.append(constant)

    require(offset[0], x0=1, x3=-1, **{f"x{g}": backward[0]})
    for i in range(4, 4 + hidden_layers):
        grad = {f"x{g}": backward[1]}
        require(offset[1] - align.alpha[0], x1=1, **grad, **{f"x{i}": -1})
        require(offset[1] - align.u[0], x1=1, **grad, **{f"x{i - 1}": 1, f"x{i}": -1})
        require(initial[1] - align.omega[0], **{f"x{i - 1}": 1, f"x{i}": -1})
    last = f"x{3 + hidden_layers}"
    require(offset[2] - align.alpha[1], x2=1)
    require(offset[2] - align.u[1], x2=1, **{last: 1})
    require(initial[2] - align.omega[1], **{last: 1})
    require(initial[2], **{f"x{g}": -1})
    require(2 * p.a[2], x2=1, **{f"x{g}": -1})
    relative = optimizer in ("scaled_adam", "adafactor")
    bounds: list[tuple[float | None, float | None]] = [(0 if relative else None, None)] * 3
    bounds += [(0, None)] * (1 + hidden_layers) + [(-10, 10)]
    if feature_learning:
        bounds[3 + hidden_layers] = (0, 0)

    objective = np.r_[np.ones(3), np.zeros(size - 3)]
    first = linprog(objective, A_ub=np.array(rows), b_ub=limits, bounds=bounds, method="highs")
    if first.status == 2:
        raise InfeasibleError(_explain(initial, align, feature_learning))
    if first.status != 0:
        raise RuntimeError(f"The linear program was not solved: {first.message}")
    smallest = np.r_[np.zeros(3), np.ones(1 + hidden_layers), 0]
    solution = linprog(
        smallest,
        A_ub=np.vstack([*rows, objective]),
        b_ub=[*limits, first.fun + 1e-9],
        bounds=bounds,
        method="highs",
    )
    x = np.round(solution.x if solution.status == 0 else first.x, 8) + 0.0
    logits = stability(p, optimizer, x[:3], align, hidden_layers).logits
    residuals = (*(float(r) for r in x[3 : 4 + hidden_layers]), logits)
    return LayerExponents(float(x[0]), float(x[1]), float(x[2]), residuals)


def _explain(initial: np.ndarray, align: Alignment, feature_learning: bool) -> str:
    if feature_learning and initial[2] < align.omega[1]:
        return (
            f"The logits diverge: the initial readout has a + b = {show(initial[2])}, its assumed "
            f"alignment is omega = {show(align.omega[1])}."
        )
    return (
        "No learning rates keep all layers stable: the initial weights amplify the change of "
        "activations; lower omega or raise a + b."
    )


def closed_form_exponents(
    parameterization: str | Parameterization,
    optimizer: str = "adam",
    alignment: str | Alignment = "full",
) -> LayerExponents:
    """Solve the same problem by hand, for ``omega <= 1/2`` in the hidden layers.

    Let ``rho = max(0, omega - a - b)`` of the readout be the smallest residual that keeps the
    logits stable. With all residuals equal to it, each constraint gives one exponent. SGD's readout
    rate is then lowered until the readout update no longer dominates the backward signal.

    Parameters
    ----------
    parameterization, optimizer, alignment
        As in :func:`lr_exponents`.

    Returns
    -------
    LayerExponents

    Examples
    --------
    >>> print(closed_form_exponents("mean_field", "sgd", "none"))
    (-1, -3/2, -1)
    """
    p, align = as_parameterization(parameterization), _as_alignment(alignment)
    offset, backward = _update_offsets(p, optimizer)
    a, b = np.array(p.a), np.array(p.b)
    if align.omega[0] > a[1] + b[1] + 1e-9:
        raise ValueError("The closed form needs omega <= 1/2 in hidden layers; use lr_exponents.")
    rho = max(0.0, align.omega[1] - a[2] - b[2])
    readout = max(align.alpha[1], align.u[1] - rho) - offset[2]
    if optimizer == "sgd":
        readout = max(readout, b[2] - a[2])
    g = a[2] + b[2]
    embedding = rho - offset[0] - backward[0] * g
    hidden = max(align.alpha[0] + rho, align.u[0]) - offset[1] - backward[1] * g
    c = np.array([embedding, hidden, readout])
    if optimizer in ("scaled_adam", "adafactor"):
        c = np.maximum(c, 0.0)
    c = c + 0.0
    return LayerExponents(float(c[0]), float(c[1]), float(c[2]))


def shifted_exponents(
    c: LayerExponents | Sequence[float], theta: Sequence[float], optimizer: str
) -> LayerExponents:
    """Rate exponents that leave training unchanged under ``Parameterization.shifted(theta)``.

    Parameters
    ----------
    c : LayerExponents or sequence of 3 floats
    theta : sequence of 3 floats
    optimizer : {"sgd", "adam", "scaled_adam", "adafactor"}

    Returns
    -------
    LayerExponents

    Examples
    --------
    From standard to NTK, theta = 1/2 in hidden layers and readout:

    >>> print(shifted_exponents(lr_exponents("standard", "sgd"), (0, 0.5, 0.5), "sgd"))
    (-1/2, -1/2, 0)
    """
    _update_offsets(PARAMETERIZATIONS["standard"], optimizer)
    factor = {"sgd": 2.0, "adam": 1.0}.get(optimizer, 0.0)
    embedding, hidden, readout = (x - factor * t for x, t in zip(c, theta, strict=True))
    return LayerExponents(embedding, hidden, readout)


def exponent_table(
    optimizers: Sequence[str] = ("sgd", "adam", "adafactor"),
    alignments: Sequence[str] = ("full", "none"),
) -> pd.DataFrame:
    """Solve every combination: the table of per-layer rate exponents of the paper.

    Parameters
    ----------
    optimizers : sequence of str
    alignments : sequence of str

    Returns
    -------
    pandas.DataFrame
        Rows: parameterizations. Columns: (optimizer, alignment). Entries: ``LayerExponents``,
        which print as ``(embedding, hidden, readout)``.

    Examples
    --------
    >>> print(exponent_table(["adam"]).loc["standard", ("adam", "none")])
    (0, 1/2, 1/2)
    """
    columns = pd.MultiIndex.from_product([optimizers, alignments], names=["optimizer", "alignment"])
    table = {
        (optimizer, alignment): [lr_exponents(p, optimizer, alignment) for p in PARAMETERIZATIONS]
        for optimizer, alignment in columns
    }
    index = pd.Index(list(PARAMETERIZATIONS), name="parameterization")
    return pd.DataFrame(table, index=index, columns=columns)

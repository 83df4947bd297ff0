"""SPABA and the family of single-loop stochastic bilevel methods.

Tune thousands of parameters by gradients through an inner problem, at the price of a flat one: see
:func:`minimize_bilevel` (scipy style), :class:`SPABA` and :class:`TorchBilevel` (torch style), and
:class:`BilevelLogisticRegression` and :class:`HyperCleaner` (scikit-learn style).

After T. Chu, D. Xu, W. Yao and J. Zhang, "SPABA: A Single-Loop and Probabilistic Stochastic Bilevel
Algorithm Achieving Optimal Sample Complexity", ICML 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from icml24.bilevel.estimators import PAGE, SAGA, SARAH, SGD, STORM, MovingAverage, ZeroSARAH
from icml24.bilevel.methods import F2SA, METHODS, MRBO, TTSA, VRBO, AmIGO, SingleLoop, StocBiO
from icml24.bilevel.problems import (
    BilevelProblem,
    DataHyperCleaning,
    DiagonalQuadratic,
    L2Selection,
    PluggedIn,
    QuadraticBilevel,
    StreamingQuadratic,
    exact_hypergradient,
)
from icml24.bilevel.sklearn_api import BilevelLogisticRegression, HyperCleaner
from icml24.bilevel.solver import BilevelDivergenceError, Run, minimize_bilevel

if TYPE_CHECKING:
    from icml24.bilevel.torch_problem import SPABA, TorchBilevel

__all__ = [
    "F2SA",
    "METHODS",
    "MRBO",
    "PAGE",
    "SAGA",
    "SARAH",
    "SGD",
    "SPABA",
    "STORM",
    "TTSA",
    "VRBO",
    "AmIGO",
    "BilevelDivergenceError",
    "BilevelLogisticRegression",
    "BilevelProblem",
    "DataHyperCleaning",
    "DiagonalQuadratic",
    "HyperCleaner",
    "L2Selection",
    "MovingAverage",
    "PluggedIn",
    "QuadraticBilevel",
    "Run",
    "SingleLoop",
    "StocBiO",
    "StreamingQuadratic",
    "TorchBilevel",
    "ZeroSARAH",
    "exact_hypergradient",
    "minimize_bilevel",
]


def __getattr__(name: str) -> Any:  # torch is loaded only by those who use it
    if name in ("SPABA", "TorchBilevel"):
        from icml24.bilevel import torch_problem

        return getattr(torch_problem, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

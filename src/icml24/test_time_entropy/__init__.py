"""Entropy minimisation at test time: why it works, why it fails, and accuracy without labels.

Wrap any PyTorch classifier with normalisation layers to adapt it to unlabelled batches
(:class:`Tent`, :class:`ETA`, :class:`EATA`, :class:`RDumb`, :class:`RPL`), stop before it fails
(:func:`adapt_until_turn`), or estimate its accuracy on unlabelled images (:class:`WeightedFlips`,
and the simpler estimators it competes with). Your model is never changed.

After Press, Shwartz-Ziv, LeCun and Bethge, "The Entropy Enigma: Success and Failure of Entropy
Minimization", ICML 2024.
"""

from icml24.test_time_entropy.corruptions import corrupt
from icml24.test_time_entropy.peers import (
    ATC,
    COME,
    COT,
    AverageConfidence,
    DifferenceOfConfidences,
    DispersionScore,
    FrechetAutoEval,
    NuclearNorm,
    Regressed,
    TemperatureScaled,
    agreement,
    fit_temperature,
)
from icml24.test_time_entropy.phases import (
    Stopped,
    adapt_until_turn,
    adaptation_trace,
    embed,
    frechet_distance,
    silhouette,
)
from icml24.test_time_entropy.tta import (
    EATA,
    ETA,
    RPL,
    RDumb,
    Tent,
    configure_model,
    shuffled_batches,
    softmax_entropy,
)
from icml24.test_time_entropy.weighted_flips import WeightedFlips, weighted_flips

__all__ = [
    "ATC",
    "COME",
    "COT",
    "EATA",
    "ETA",
    "RPL",
    "AverageConfidence",
    "DifferenceOfConfidences",
    "DispersionScore",
    "FrechetAutoEval",
    "NuclearNorm",
    "RDumb",
    "Regressed",
    "Stopped",
    "TemperatureScaled",
    "Tent",
    "WeightedFlips",
    "adapt_until_turn",
    "adaptation_trace",
    "agreement",
    "configure_model",
    "corrupt",
    "embed",
    "fit_temperature",
    "frechet_distance",
    "shuffled_batches",
    "silhouette",
    "softmax_entropy",
    "weighted_flips",
]

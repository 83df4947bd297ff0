"""Laplace-approximated neural additive models: a curve per feature, with an error bar.

After Bouchiat, Immer, Yeche, Raetsch and Fortuin, "Improving neural additive models with Bayesian
principles", ICML 2024.

Examples
--------
>>> import numpy as np
>>> from icml24.additive_models import LaplaceNAMRegressor
>>> rng = np.random.default_rng(0)
>>> X = rng.uniform(-1, 1, (300, 2))
>>> y = np.sin(3 * X[:, 0]) + 0.2 * rng.normal(size=300)
>>> model = LaplaceNAMRegressor(max_iter=300, random_state=0).fit(X, y)
>>> curve, std = model.feature_functions(X)
>>> curve.shape, std.shape
((300, 2), (300, 2))
"""

from icml24.additive_models.display import LaplaceNAMDisplay
from icml24.additive_models.estimator import LaplaceNAMClassifier, LaplaceNAMRegressor
from icml24.additive_models.interactions import rank_interactions
from icml24.additive_models.stacked_mlp import StackedMLP

__all__ = [
    "LaplaceNAMClassifier",
    "LaplaceNAMDisplay",
    "LaplaceNAMRegressor",
    "StackedMLP",
    "rank_interactions",
]

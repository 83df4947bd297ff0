"""ICML 2024, executed: one subpackage for each paper.

A paper is a column: ``icml24.<slug>`` holds its method, ``book/<slug>`` its chapter and
``tests/<slug>`` its tests. Import the column you need, for example
``from icml24.additive_models import LaplaceNAMRegressor``; ``import icml24`` alone loads nothing.
"""

__version__ = "0.1.0"

"""Learning rates that transfer across width, and Adam without epsilon.

After Everett et al., "Scaling Exponents Across Parameterizations and Optimizers" (ICML 2024). Tune
the learning rate of a small torch model once; keep it when the model grows::

    groups = parametrize(model, base_width=128, lr=2**-6)
    optimizer = AdamAtan2(groups)
"""

from icml24.width_scaling.alignment import (
    AlignmentMonitor,
    coordinate_check,
    log_alignment_ratio,
    plot_coordinate_check,
    width_slopes,
)
from icml24.width_scaling.exponents import (
    ALIGNMENTS,
    Alignment,
    InfeasibleError,
    Stability,
    closed_form_exponents,
    exponent_table,
    lr_exponents,
    shifted_exponents,
    stability,
)
from icml24.width_scaling.layers import (
    Tag,
    apply_parameterization,
    effective_weight,
    fold_multipliers,
    param_groups,
    parametrize,
    raw_parameter,
    tag_parameters,
)
from icml24.width_scaling.models import CharMLP, Transformer
from icml24.width_scaling.optim import AdamAtan2, ScaledAdam
from icml24.width_scaling.parameterization import (
    LAYERS,
    PARAMETERIZATIONS,
    LayerExponents,
    Parameterization,
)
from icml24.width_scaling.stacked import StackedModels
from icml24.width_scaling.sweep import BestRate, best_rate, best_rates, transfer_exponent

__all__ = [
    "ALIGNMENTS",
    "LAYERS",
    "PARAMETERIZATIONS",
    "AdamAtan2",
    "Alignment",
    "AlignmentMonitor",
    "BestRate",
    "CharMLP",
    "InfeasibleError",
    "LayerExponents",
    "Parameterization",
    "ScaledAdam",
    "StackedModels",
    "Stability",
    "Tag",
    "Transformer",
    "apply_parameterization",
    "best_rate",
    "best_rates",
    "closed_form_exponents",
    "coordinate_check",
    "effective_weight",
    "exponent_table",
    "fold_multipliers",
    "log_alignment_ratio",
    "lr_exponents",
    "param_groups",
    "parametrize",
    "plot_coordinate_check",
    "raw_parameter",
    "shifted_exponents",
    "stability",
    "tag_parameters",
    "transfer_exponent",
    "width_slopes",
]

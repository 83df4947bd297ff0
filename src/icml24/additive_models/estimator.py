r"""LA-NAM as scikit-learn estimators.

The model is additive, :math:`g(E[y \mid x]) = \text{intercept} + \sum_d f_d(x_d)`, each curve
:math:`f_d` a small network with a Laplace posterior of its own. See :mod:`.training` for the loop
and :mod:`.evidence` for what it maximises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import Bunch, check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import (
    _check_feature_names,
    _check_sample_weight,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor

from icml24.additive_models.columns import (
    ColumnEncoder,
    column_index,
    find_categorical,
    holds_labels,
)
from icml24.additive_models.curvature import STRUCTURES
from icml24.additive_models.evidence import Bernoulli, Block, Gaussian
from icml24.additive_models.interactions import METHODS, pair_scores, top_pairs
from icml24.additive_models.stacked_mlp import ACTIVATIONS, StackedMLP
from icml24.additive_models.training import AdditiveModel, Schedule, draw_knots, train

__all__ = ["LaplaceNAMClassifier", "LaplaceNAMRegressor"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_SMALL_TABLE = 100  # rows up to which training in double precision costs nothing
_EXACT_BLOCK = 300  # parameters of a network up to which "auto" keeps the exact block
_KNOT_SCALE = {1: 2.0, 2: 1.0}  # spread of first-layer slopes, by the number of columns of a term

_PARAMETERS = """
    Parameters
    ----------
    hidden_layer_sizes : sequence of int, default (64,)
        Widths of the hidden layers of each feature network.
    activation : {"gelu", "relu", "tanh"}, default "gelu"
    structure : {"auto", "full", "kron", "diag"}, default "auto"
        Posterior precision within a network: the exact Gauss-Newton block, Kronecker factors for
        each layer (the paper's choice), or the diagonal. Kronecker factors overcount what the data
        determine, so bands and noise come out too wide; ``"auto"`` takes the exact block for
        networks of up to 300 parameters (one hidden layer of 64 has 193) and factors beyond.
    prior : {"layer", "feature"}, default "layer"
        One prior precision for each parameter tensor of each network, or one for each network.
    init : {"auto", "knots", "torch"}, default "auto"
        ``"knots"`` places the kinks of the first layer onto data points, ``"torch"`` draws like
        :class:`torch.nn.Linear`. ``"auto"`` is knots for regression, torch for two classes.
    learning_rate : float, default 0.03
        Of Adam on the parameters; decays to zero along a cosine.
    max_iter : int, default 2000
        Steps of Adam on the parameters; doubled when there is a second stage of pairs.
    batch_size : int, default 512
    burn_in : int, default 100
        Steps before the first move on the evidence.
    hyper_every : int, default 50
        Steps between moves on the evidence.
    hyper_steps : int, default 10
        Steps of Adam on log prior precision and log noise in each move; 0 keeps both at 1.
    hyper_lr : float, default 0.1
    n_interactions : int, default 0
        Number of feature pairs to add in a second stage, chosen by ``interaction_method``.
    interaction_method : {"evidence", "mutual_info", "marglik_slack", "random"}, default "evidence"
        See :func:`rank_interactions`.
    interactions : list of pairs, optional
        Pairs of columns, by name or number, to add instead.
    categorical_features : "from_dtype", None, or list of columns, default "from_dtype"
        Columns to treat as categories. ``"from_dtype"`` takes the categorical, string and object
        columns of a DataFrame; integers are numbers unless you say otherwise.
    dtype : {"auto", "float32", "float64"}, default "auto"
        Precision of the training steps; ``"auto"`` is double for tables of up to 100 rows.
        Curvature and evidence always use double precision.
    random_state : int, RandomState instance or None, default None
    verbose : int, default 0
        Show a progress bar when positive.
    device : str, default "cpu"
        A torch device, for example ``"cuda"``.

    Attributes
    ----------
    term_names_ : list of str
        Names of the ``K`` terms: columns first, then pairs ``"a x b"``.
    pairs_ : list of (int, int)
        Pairs of columns that have a term.
    intercept_ : float
        Sum of the means of all uncentred terms.
    effect_size_ : ndarray, shape (K,)
        Standard deviation of each centred term over the training rows.
    prior_precision_ : ndarray, shape (K, G)
        Learnt prior precision of each parameter tensor (W1, b1, W2, b2, ...); NaN where a term has
        fewer tensors.
    log_marginal_likelihood_ : float
        Log evidence of the training target, in its own units.
    evidence_path_ : ndarray, shape (moves, 2)
        Step and log evidence along the way; it should end flat.
    structure_ : str
        Structure of the posterior precision that was used.
    n_iter_ : int
        Steps of Adam that were run.
    n_features_in_ : int
    feature_names_in_ : ndarray of str
        Only when fitted on a DataFrame.
"""


def _documented(cls: type) -> type:
    """Put the shared parameters and attributes into a class docstring."""
    assert cls.__doc__ is not None
    cls.__doc__ = cls.__doc__.replace("    <parameters>\n", _PARAMETERS.lstrip("\n"))
    return cls


class _LaplaceNAM(BaseEstimator):
    """What regression and classification share: everything but target and likelihood."""

    _parameter_constraints: ClassVar[dict] = {
        "hidden_layer_sizes": ["array-like"],
        "activation": [StrOptions(set(ACTIVATIONS))],
        "structure": [StrOptions({"auto", *STRUCTURES})],
        "prior": [StrOptions({"layer", "feature"})],
        "init": [StrOptions({"auto", "knots", "torch"})],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "batch_size": [Interval(Integral, 1, None, closed="left")],
        "burn_in": [Interval(Integral, 0, None, closed="left")],
        "hyper_every": [Interval(Integral, 1, None, closed="left")],
        "hyper_steps": [Interval(Integral, 0, None, closed="left")],
        "hyper_lr": [Interval(Real, 0, None, closed="neither")],
        "n_interactions": [Interval(Integral, 0, None, closed="left")],
        "interaction_method": [StrOptions(set(METHODS))],
        "interactions": [None, "array-like"],
        "categorical_features": [None, StrOptions({"from_dtype"}), "array-like"],
        "dtype": [StrOptions({"auto", *_DTYPES})],
        "random_state": ["random_state"],
        "verbose": ["verbose"],
        "device": [str],
    }

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (64,),
        *,
        activation: str = "gelu",
        structure: str = "auto",
        prior: str = "layer",
        init: str = "auto",
        learning_rate: float = 0.03,
        max_iter: int = 2000,
        batch_size: int = 512,
        burn_in: int = 100,
        hyper_every: int = 50,
        hyper_steps: int = 10,
        hyper_lr: float = 0.1,
        n_interactions: int = 0,
        interaction_method: str = "evidence",
        interactions: Any = None,
        categorical_features: Any = "from_dtype",
        dtype: str = "auto",
        random_state: Any = None,
        verbose: int = 0,
        device: str = "cpu",
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.structure = structure
        self.prior = prior
        self.init = init
        self.learning_rate = learning_rate
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.burn_in = burn_in
        self.hyper_every = hyper_every
        self.hyper_steps = hyper_steps
        self.hyper_lr = hyper_lr
        self.n_interactions = n_interactions
        self.interaction_method = interaction_method
        self.interactions = interactions
        self.categorical_features = categorical_features
        self.dtype = dtype
        self.random_state = random_state
        self.verbose = verbose
        self.device = device

    # -------------------------------------------------------------------- the subclass decides

    _init_when_auto = "knots"

    def _validate_target(self, y: Any) -> np.ndarray:
        raise NotImplementedError

    def _encode_target(self, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _new_model(self) -> AdditiveModel:
        raise NotImplementedError

    _y_scale: float = 1.0  # units of the target for one unit of f

    # ----------------------------------------------------------------------------------- fit

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> Any:
        """Fit the curves, their posteriors, the prior precisions and the noise level.

        Parameters
        ----------
        X : array_like or DataFrame, shape (N, D)
            Numbers, or a DataFrame with categorical columns; no missing values.
        y : array_like, shape (N,)
            Target.
        sample_weight : array_like, shape (N,), optional
            Non-negative. A weight of 2 is the same as repeating a row, 0 the same as leaving it
            out.

        Returns
        -------
        self
        """
        self._validate_params()
        random = check_random_state(self.random_state)
        seed, pair_seed = (int(value) for value in random.randint(2**31 - 1, size=2))
        generator = torch.Generator().manual_seed(seed)
        X, y, weight = self._validate_training(X, y, sample_weight)
        target = self._encode_target(y, weight)
        self._encoder.learn(X, weight)
        codes = self._encoder.encode(X, self._labels_read)
        self._set_grid_ranges(X)
        self.pairs_ = self._requested_pairs(codes.shape[1])

        self._model = self._new_model()
        is_table = self._encoder.categorical
        for kind in (False, True):
            terms = [(int(j),) for j in np.flatnonzero(is_table == kind)]
            if terms:
                self._model.blocks.append(self._new_block(terms, codes, weight, generator))
        self.structure_ = self._choose_structure()
        self._model.structure = self.structure_
        path = self._train(codes, target, weight, generator)
        if self.n_interactions:
            scores = self._scores(codes, target, weight, self.interaction_method, pair_seed)
            self.pairs_ = top_pairs(scores, self.n_interactions)
        if self.pairs_:
            self._model.blocks.append(self._new_block(self.pairs_, codes, weight, generator))
            second = self._train(codes, target, weight, generator)
            path += [(step + self.max_iter, value) for step, value in second]
        self._finish(codes, weight, path)
        return self

    def _validate_training(
        self, X: Any, y: Any, sample_weight: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        widths = list(self.hidden_layer_sizes)
        if any(not isinstance(width, Integral) or width < 1 for width in widths):
            raise ValueError(f"hidden_layer_sizes must be positive integers, got {widths}.")
        _check_feature_names(self, X, reset=True)
        self._labels_read = holds_labels(X)
        if self._labels_read:
            self._encoder = self._new_encoder(X)
            X, self._labels_read = self._encoder.read_labels(X, learn=True)
        X, y = validate_data(self, X, y, dtype=np.float64)
        if not self._labels_read:
            self._encoder = self._new_encoder(X)
        y = self._validate_target(y)
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        kept = weight > 0
        return X[kept], y[kept], weight[kept]

    def _new_encoder(self, X: Any) -> ColumnEncoder:
        mask = find_categorical(X, self.categorical_features)
        names = getattr(self, "feature_names_in_", [f"x{j}" for j in range(len(mask))])
        return ColumnEncoder(mask, [str(name) for name in names])

    def _requested_pairs(self, n_columns: int) -> list[tuple[int, int]]:
        possible = n_columns * (n_columns - 1) // 2
        if self.n_interactions > possible:
            raise ValueError(
                f"n_interactions={self.n_interactions} asks for more pairs than the {possible} "
                f"that {n_columns} columns have."
            )
        if self.interactions is None:
            return []
        if self.n_interactions:
            raise ValueError("Give either n_interactions or interactions, not both.")
        names = getattr(self, "feature_names_in_", None)
        names = None if names is None else list(names)
        pairs = []
        for pair in self.interactions:
            if len(pair) != 2:
                raise ValueError(f"Each entry of interactions must be a pair, got {pair!r}.")
            i, j = sorted(column_index(column, names, n_columns) for column in pair)
            if i == j or (i, j) in pairs:
                raise ValueError(
                    "interactions must be pairs of different columns, each named once; got "
                    f"{pair!r}."
                )
            pairs.append((i, j))
        return pairs

    def _choose_structure(self) -> str:
        if self.structure != "auto":
            return self.structure
        widths = [2 if self.n_interactions or self.pairs_ else 1, *self.hidden_layer_sizes, 1]
        size = sum((a + 1) * b for a, b in pairwise(widths))
        return "full" if size <= _EXACT_BLOCK else "kron"

    def _new_block(
        self,
        terms: Sequence[tuple[int, ...]],
        codes: np.ndarray,
        weight: np.ndarray,
        generator: torch.Generator,
    ) -> Block:
        """Networks for numbers or pairs; a table of levels for each categorical column."""
        x = self._inputs(codes, terms)
        is_table = len(terms[0]) == 1 and self._encoder.categorical[terms[0][0]]
        stack = StackedMLP(
            len(terms),
            x.shape[2],
            hidden=() if is_table else tuple(self.hidden_layer_sizes),
            activation=self.activation,
            bias=not is_table,
            generator=generator,
        )
        with torch.no_grad():  # weights of padding inputs, and of tables, start (and stay) at zero
            used = torch.stack(
                [torch.arange(x.shape[2]) < self._encoder.total_width(term) for term in terms]
            )
            stack.weights[0].mul_(used.unsqueeze(2) * (not is_table))
        init = self._init_when_auto if self.init == "auto" else self.init
        if init == "knots" and len(stack.layer_sizes) > 2:
            weight_tensor = torch.from_numpy(weight).to(x)
            knots = draw_knots(x, weight_tensor, stack.layer_sizes[1], generator)
            stack.place_knots(knots.cpu(), _KNOT_SCALE[len(terms[0])], generator)
        n_groups = 1 if self.prior == "feature" else len(stack.group_sizes)
        log_prior = torch.zeros((len(terms), n_groups), dtype=torch.float64, device=x.device)
        return Block(stack.to(x.device), list(terms), log_prior)

    def _train(
        self, codes: np.ndarray, y: np.ndarray, weight: np.ndarray, generator: torch.Generator
    ) -> list[tuple[int, float]]:
        small = "float64" if len(codes) <= _SMALL_TABLE else "float32"
        schedule = Schedule(
            self.max_iter,
            self.learning_rate,
            self.batch_size,
            self.burn_in,
            self.hyper_every,
            self.hyper_steps,
            self.hyper_lr,
        )
        inputs = self._block_inputs(codes)
        path = train(
            self._model,
            inputs,
            torch.from_numpy(y).to(inputs[0]),
            torch.from_numpy(weight).to(inputs[0]),
            schedule,
            _DTYPES[small if self.dtype == "auto" else self.dtype],
            generator,
            verbose=self.verbose > 0,
        )
        units = weight.sum() * math.log(self._y_scale)  # evidence of y itself, not of scaled y
        return [(step, value - units) for step, value in path]

    def _finish(self, codes: np.ndarray, weight: np.ndarray, path: list[tuple[int, float]]) -> None:
        """Fitted attributes."""
        self.evidence_path_ = np.array(path)
        self.log_marginal_likelihood_ = float(self.evidence_path_[:, 1].max())
        if self.pairs_:  # the evidence of a model with pairs is that of its second stage
            second = self.evidence_path_[:, 0] > self.max_iter
            self.log_marginal_likelihood_ = float(self.evidence_path_[second, 1].max())
        self.n_iter_ = self.max_iter * (2 if self.pairs_ else 1)
        names = self._encoder.names
        terms = [term for block in self._model.blocks for term in block.terms]
        self._order = np.array(sorted(range(len(terms)), key=lambda k: (len(terms[k]), k)))
        singles = sum(len(term) == 1 for term in terms)
        self._order[:singles] = sorted(range(singles), key=lambda k: terms[k])
        self._terms = [terms[k] for k in self._order]
        self.term_names_ = [" x ".join(names[j] for j in term) for term in self._terms]

        f, _ = self._moments(codes, with_variance=False)
        share = weight / weight.sum()
        self._term_means = share @ f
        self._fill_unseen_levels()
        self.intercept_ = float(self._to_units(self._term_means.sum() + self._model.offset))
        self.effect_size_ = self._y_scale * np.sqrt(share @ (f - self._term_means) ** 2)
        width = max(block.prior.shape[1] for block in self._model.blocks)
        priors = [
            np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=np.nan)
            for p in (block.prior.cpu().numpy() for block in self._model.blocks)
        ]
        self.prior_precision_ = np.concatenate(priors)[self._order]

    def _fill_unseen_levels(self) -> None:
        """Give the slot of unseen levels the term's mean, so that the centred effect is 0."""
        position = {term: k for k, term in enumerate(self._terms)}
        for block in self._model.blocks:
            if len(block.terms[0]) == 1 and self._encoder.categorical[block.terms[0][0]]:
                for row, term in enumerate(block.terms):
                    slot = self._encoder.total_width(term) - 1
                    assert block.center is not None
                    for stack in (block.stack, block.center):
                        stack.weights[0].data[row, slot, 0] = self._term_means[position[term]]

    # ------------------------------------------------------------------------- from X to terms

    def _encode(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        _check_feature_names(self, X, reset=False)
        X, labels_read = self._encoder.read_labels(X, learn=False)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return self._encoder.encode(X, labels_read)

    def _inputs(self, codes: np.ndarray, terms: Sequence[tuple[int, ...]]) -> Tensor:
        return torch.from_numpy(self._encoder.inputs(codes, terms)).to(self.device)

    def _block_inputs(self, codes: np.ndarray) -> list[Tensor]:
        return [self._inputs(codes, block.terms) for block in self._model.blocks]

    def _moments(
        self, codes: np.ndarray, with_variance: bool = True
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Uncentred terms and their variances, shape (N, K), in units of the scaled target."""
        inputs = self._block_inputs(codes)
        mean = self._model.means(inputs).cpu().numpy()[:, self._order]
        if not with_variance:
            return mean, None
        return mean, self._model.variances(inputs).cpu().numpy()[:, self._order]

    def _to_units(self, f: Any) -> Any:
        return f

    def feature_functions(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Centred value of every term at every row, with its standard deviation.

        ``mean.sum(axis=1) + intercept_`` is the prediction (the logit, for two classes). A band of
        95 % is ``mean +- 1.96 std``. The standard deviation is that of the uncentred network; the
        offset adds about ``sigma^2 / N`` to its square, which is negligible.

        Parameters
        ----------
        X : array_like or DataFrame, shape (N, D)

        Returns
        -------
        mean, std : ndarray, shape (N, K)
            In units of the target, or logits; columns in the order of ``term_names_``.
        """
        f, variance = self._moments(self._encode(X))
        assert variance is not None
        return self._y_scale * (f - self._term_means), self._y_scale * np.sqrt(variance)

    def partial_dependence(
        self, feature: Any, grid: Any = None, grid_resolution: int = 100
    ) -> Bunch:
        """One term on a grid: the curve of a feature, or the surface of a pair.

        In an additive model the partial dependence is the term itself, so no data are needed.

        Parameters
        ----------
        feature : int, str or pair of them
            A column, or a pair that has a term.
        grid : array_like, or pair of array_like, optional
            Values in the units of the column (levels, for a category). By default
            ``grid_resolution`` values from the smallest to the largest training value.
        grid_resolution : int, default 100

        Returns
        -------
        Bunch
            ``grid_values`` (list of arrays), ``mean`` and ``std``, of shape (n,) or (n1, n2).
        """
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", None)
        names = None if names is None else list(names)
        columns = [feature] if isinstance(feature, str | int | np.integer) else list(feature)
        indices = [column_index(column, names, self.n_features_in_) for column in columns]
        term = tuple(sorted(indices))
        if term not in self._terms:
            raise ValueError(
                f"There is no term for {feature!r}; the terms are {', '.join(self.term_names_)}."
            )
        grids = [grid] if len(term) == 1 or grid is None else list(grid)
        grids = [None] * len(term) if grid is None else grids
        values = [
            self._default_grid(j, grid_resolution) if g is None else np.asarray(g)
            for j, g in zip(indices, grids, strict=True)
        ]
        mesh = np.meshgrid(*(np.arange(len(v)) for v in values), indexing="ij")
        codes = np.zeros((mesh[0].size, self.n_features_in_))
        for j, value, index in zip(indices, values, mesh, strict=True):
            codes[:, j] = self._encoder.decode_grid(value, j)[index.ravel()]
        f, variance = self._moments(codes)
        assert variance is not None
        k = self._terms.index(term)
        return Bunch(
            grid_values=values,
            mean=(self._y_scale * (f[:, k] - self._term_means[k])).reshape(mesh[0].shape),
            std=(self._y_scale * np.sqrt(variance[:, k])).reshape(mesh[0].shape),
        )

    def _set_grid_ranges(self, X: np.ndarray) -> None:
        self._grid_ranges = np.stack([X.min(axis=0), X.max(axis=0)])

    def _default_grid(self, j: int, resolution: int) -> np.ndarray:
        levels = self._encoder.levels[j]
        if levels is not None:
            return levels.to_numpy()
        return np.linspace(self._grid_ranges[0, j], self._grid_ranges[1, j], resolution)

    # ---------------------------------------------------------------------------- interactions

    def interaction_scores(
        self, X: Any, y: Any, method: str = "evidence", sample_weight: ArrayLike | None = None
    ) -> np.ndarray:
        """Score every pair of columns.

        Parameters
        ----------
        X : array_like or DataFrame, shape (N, D)
            Usually the training rows (the estimator does not keep them).
        y : array_like, shape (N,)
        method : {"evidence", "mutual_info", "marglik_slack", "random"}, default "evidence"
        sample_weight : array_like, shape (N,), optional

        Returns
        -------
        ndarray, shape (D, D)
            In nats (``random``: uniform), symmetric, zero diagonal.

        See Also
        --------
        rank_interactions : The same as a sorted table.
        """
        codes = self._encode(X)
        weight = _check_sample_weight(sample_weight, codes, dtype=np.float64)
        y = self._scale_target(y, len(codes))
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        return self._scores(codes, y, weight, method, seed)

    def _scale_target(self, y: Any, n_rows: int) -> np.ndarray:
        raise NotImplementedError

    def _scores(
        self, codes: np.ndarray, y: np.ndarray, weight: np.ndarray, method: str, seed: int
    ) -> np.ndarray:
        inputs = self._block_inputs(codes)
        means = self._model.means(inputs)
        likelihood = self._model.likelihood
        f = self._model.offset + means.sum(1)
        gamma = torch.from_numpy(weight).to(f) * likelihood.curvature(f) * likelihood.scale
        target = torch.from_numpy(y).to(f)
        gradient = -torch.from_numpy(weight).to(f) * likelihood.residual(f, target)
        gradient = gradient * likelihood.scale
        terms = [term for block in self._model.blocks for term in block.terms]
        singles = sorted((term, k) for k, term in enumerate(terms) if len(term) == 1)
        curves = means.cpu().numpy()[:, [k for _, k in singles]]
        columns = np.where(self._encoder.categorical, curves, codes)  # order levels by their effect
        return pair_scores(
            method, columns, curves, gradient.cpu().numpy(), gamma.cpu().numpy(), seed
        )


@_documented
class LaplaceNAMRegressor(RegressorMixin, _LaplaceNAM):
    """Additive regression with one neural curve per feature and an error bar on each.

    Linearised-Laplace neural additive model: Bouchiat, Immer, Yeche, Raetsch and Fortuin,
    "Improving neural additive models with Bayesian principles", ICML 2024. Inputs and target are
    standardised inside; everything reported is in the units of the target.

    <parameters>
    sigma_ : float
        Noise standard deviation, in units of the target.

    See Also
    --------
    LaplaceNAMClassifier : Two classes.
    LaplaceNAMDisplay : Draws the curves with their bands.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (400, 3))
    >>> y = np.sin(3 * X[:, 0]) + X[:, 1] + 0.3 * rng.normal(size=400)
    >>> model = LaplaceNAMRegressor(max_iter=500, random_state=0).fit(X, y)
    >>> (model.effect_size_ > 0.1).tolist()  # the third feature is off
    [True, True, False]
    >>> mean, std = model.predict(X[:2], return_std=True)
    >>> mean.shape, bool((std > model.sigma_).all())
    ((2,), True)
    """

    def _validate_target(self, y: Any) -> np.ndarray:
        return column_or_1d(y, warn=True).astype(np.float64)

    def _encode_target(self, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
        share = weight / weight.sum()
        self._y_mean = float(share @ y)
        spread = math.sqrt(float(share @ (y - self._y_mean) ** 2))
        self._y_scale = spread if spread > 1e-12 * max(abs(self._y_mean), 1e-300) else 1.0
        return (y - self._y_mean) / self._y_scale

    def _scale_target(self, y: Any, n_rows: int) -> np.ndarray:
        y = _finite_target(y, n_rows)
        return (y - self._y_mean) / self._y_scale

    def _new_model(self) -> AdditiveModel:
        return AdditiveModel([], Gaussian(), 0.0, "")

    def _to_units(self, f: Any) -> Any:
        return self._y_mean + self._y_scale * f

    @property
    def sigma_(self) -> float:
        """Noise standard deviation, in units of the target."""
        check_is_fitted(self)
        return self._y_scale * math.exp(self._model.likelihood.log_sigma)

    def predict(
        self, X: Any, return_std: bool = False
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Predictive mean and, on request, standard deviation.

        Parameters
        ----------
        X : array_like or DataFrame, shape (N, D)
        return_std : bool, default False

        Returns
        -------
        mean : ndarray, shape (N,)
        std : ndarray, shape (N,)
            Only with ``return_std``: of a new observation, so it includes the noise ``sigma_``.
        """
        f, variance = self._moments(self._encode(X), with_variance=return_std)
        mean = self._to_units(f.sum(axis=1))
        if variance is None:
            return mean
        return mean, np.sqrt(self._y_scale**2 * variance.sum(axis=1) + self.sigma_**2)

    def log_likelihood(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Mean log predictive density of a row, in nats; its negative is the NLL of the tables.

        Parameters
        ----------
        X : array_like or DataFrame, shape (N, D)
        y : array_like, shape (N,)
        sample_weight : array_like, shape (N,), optional

        Returns
        -------
        float
        """
        mean, std = self.predict(X, return_std=True)
        y = _finite_target(y, len(mean))
        density = -0.5 * ((y - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)
        return float(np.average(density, weights=sample_weight))


@_documented
class LaplaceNAMClassifier(ClassifierMixin, _LaplaceNAM):
    """Additive two-class model with one neural curve per feature and an error bar on each.

    The logit is additive; a predicted probability averages over the posterior by the probit
    approximation, ``sigmoid(m / sqrt(1 + pi v / 8))`` for a logit with mean ``m`` and variance
    ``v``. See Bouchiat et al., ICML 2024. For more than two classes wrap it in
    :class:`sklearn.multiclass.OneVsRestClassifier`.

    <parameters>
    classes_ : ndarray, shape (2,)

    See Also
    --------
    LaplaceNAMRegressor : Regression.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(300, 2))
    >>> y = np.where(X[:, 0] ** 2 + 0.5 * rng.normal(size=300) > 1, "in", "out")
    >>> model = LaplaceNAMClassifier(max_iter=300, random_state=0).fit(X, y)
    >>> model.predict([[0.0, 0.0], [2.0, 0.0]]).tolist()
    ['out', 'in']
    """

    _init_when_auto = "torch"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def _validate_target(self, y: Any) -> np.ndarray:
        check_classification_targets(y)
        kind = type_of_target(y, input_name="y", raise_unknown=True)
        if kind != "binary":
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {kind}."
            )
        return column_or_1d(y, warn=True)

    def _encode_target(self, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
        self.classes_, index = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "LaplaceNAMClassifier needs samples of at least 2 classes in the data, but the "
                f"data contains only one class: {self.classes_[0]!r}."
            )
        self._base_rate = float(weight @ index / weight.sum())
        return index.astype(np.float64)

    def _scale_target(self, y: Any, n_rows: int) -> np.ndarray:
        y = column_or_1d(y)
        if len(y) != n_rows or not np.isin(y, self.classes_).all():
            raise ValueError(
                f"y must hold {n_rows} labels out of {self.classes_.tolist()}, one per row of X."
            )
        return (y == self.classes_[1]).astype(np.float64)

    def _new_model(self) -> AdditiveModel:
        offset = math.log(self._base_rate / (1 - self._base_rate))
        return AdditiveModel([], Bernoulli(), offset, "")

    def decision_function(self, X: Any) -> np.ndarray:
        """Moderated logit, ``m / sqrt(1 + pi v / 8)``, shape (N,); positive means ``classes_[1]``.

        Parameters
        ----------
        X : array_like or DataFrame, shape (N, D)
        """
        f, variance = self._moments(self._encode(X))
        assert variance is not None
        return (self._model.offset + f.sum(axis=1)) / np.sqrt(1 + np.pi / 8 * variance.sum(axis=1))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class, averaged over the posterior; shape (N, 2).

        Parameters
        ----------
        X : array_like or DataFrame, shape (N, D)
        """
        positive = 1 / (1 + np.exp(-self.decision_function(X)))
        return np.stack([1 - positive, positive], axis=1)

    def predict(self, X: Any) -> np.ndarray:
        """Most probable class, shape (N,).

        Parameters
        ----------
        X : array_like or DataFrame, shape (N, D)
        """
        positive = self.decision_function(X) > 0
        return self.classes_[positive.astype(int)]

    def log_likelihood(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Mean log probability of the observed class, in nats; its negative is the log loss.

        Parameters
        ----------
        X : array_like or DataFrame, shape (N, D)
        y : array_like, shape (N,)
        sample_weight : array_like, shape (N,), optional

        Returns
        -------
        float
        """
        logit = self.decision_function(X)
        index = self._scale_target(y, len(logit))
        return float(np.average(index * logit - np.logaddexp(0, logit), weights=sample_weight))


def _finite_target(y: Any, n_rows: int) -> np.ndarray:
    y = column_or_1d(y).astype(np.float64)
    if len(y) != n_rows or not np.isfinite(y).all():
        raise ValueError(f"y must hold {n_rows} finite numbers, one per row of X.")
    return y

r"""Likelihoods, the log evidence of an additive model, and climbing it.

With parameters :math:`\theta_d` at the mode and prior precisions :math:`\Lambda_d`, constant on
groups ``g`` of parameters, the block form of the Laplace evidence is

.. math::
    \log Z = \log p(y \mid \theta, \sigma) + \tfrac12 \sum_d \bigl[ \log|\Lambda_d|
             - \theta_d^\top \Lambda_d \theta_d - \log|P_d| \bigr].

Because :math:`\log|P| \le \sum_d \log|P_d|` (Fischer's inequality), it is a lower bound on the
evidence with the full Gauss-Newton matrix. Its gradients need only traces of the covariance,

.. math::
    \frac{\partial \log Z}{\partial \log\lambda_g}
    = \tfrac12 \bigl( |g| - \lambda_g \|\theta_g\|^2
      - \lambda_g \operatorname{tr}\Sigma_{gg} \bigr), \qquad
    \frac{\partial \log Z}{\partial \log\sigma}
    = -N + \frac{\mathrm{SSE}}{\sigma^2} + \sum_g (|g| - \lambda_g \operatorname{tr}\Sigma_{gg}),

so nothing is differentiated through a Cholesky factor or an eigen-decomposition.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from icml24.additive_models.curvature import STRUCTURES, Curvature, KroneckerCurvature
from icml24.additive_models.stacked_mlp import StackedMLP

__all__ = [
    "Bernoulli",
    "Block",
    "DataFit",
    "EvidenceClimber",
    "Gaussian",
    "block_evidence",
    "evidence_gradient",
    "mackay_step",
]

LOG_PRIOR_RANGE = (-12.0, 16.0)
LOG_SIGMA_RANGE = (-6.0, 3.0)


@dataclass(frozen=True)
class DataFit:
    """What the evidence needs to know about the fit, frozen at the present parameters.

    Parameters
    ----------
    rows : float
        Number of rows (sum of the sample weights).
    sse : float
        Weighted sum of squared errors; 0 for classification.
    fixed : float or None
        The log likelihood when it depends on no noise level (classification).
    """

    rows: float
    sse: float
    fixed: float | None

    def log_likelihood(self, log_sigma: float) -> float:
        """Log likelihood at a noise level."""
        if self.fixed is not None:
            return self.fixed
        normaliser = self.rows * (0.5 * math.log(2 * math.pi) + log_sigma)
        return -normaliser - 0.5 * self.sse * math.exp(-2 * log_sigma)


@dataclass
class Gaussian:
    """Regression with noise of standard deviation ``sigma`` (in units of the scaled target)."""

    log_sigma: float = 0.0
    learns_noise = True

    @property
    def scale(self) -> float:
        """Factor of the curvature, ``1 / sigma^2``."""
        return math.exp(-2 * self.log_sigma)

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Differentiate the loss ``(y - f)^2 / 2``; training leaves ``1/sigma^2`` out."""
        return f - y

    def curvature(self, f: Tensor) -> Tensor:
        """Second derivative of that loss."""
        return torch.ones_like(f)

    def data_fit(self, f: Tensor, y: Tensor, weight: Tensor) -> DataFit:
        """Summary of the fit that the evidence needs."""
        return DataFit(float(weight.sum()), float((weight * (y - f).square()).sum()), None)


@dataclass
class Bernoulli:
    """Two classes with logit ``f``; there is no noise to learn."""

    log_sigma: float = 0.0
    learns_noise = False
    scale = 1.0

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        """Differentiate the cross-entropy in ``f``."""
        return torch.sigmoid(f) - y

    def curvature(self, f: Tensor) -> Tensor:
        """Second derivative of the cross-entropy, ``p (1 - p)``."""
        p = torch.sigmoid(f)
        return p * (1 - p)

    def data_fit(self, f: Tensor, y: Tensor, weight: Tensor) -> DataFit:
        """Summary of the fit that the evidence needs."""
        cross_entropy = F.softplus(f) - y * f
        return DataFit(float(weight.sum()), 0.0, -float((weight * cross_entropy).sum()))


Likelihood = Gaussian | Bernoulli


@dataclass
class Block:
    """Terms that share one stack of networks, with their prior and curvature.

    Parameters
    ----------
    stack : StackedMLP
        One network for each term.
    terms : list of tuple of int
        The columns that each network reads.
    log_prior : Tensor, shape (K, G) or (K, 1)
        Log prior precision for each parameter tensor, or one shared by all tensors of a network.
    center : StackedMLP, optional
        Point of expansion: a copy of the stack in double precision, made by :meth:`recenter`.
    curvature : Curvature, optional
        Set by :meth:`expand`.
    """

    stack: StackedMLP
    terms: list[tuple[int, ...]]
    log_prior: Tensor
    center: StackedMLP | None = None
    curvature: Curvature | None = None

    @property
    def prior(self) -> Tensor:
        """Prior precision of each parameter tensor, shape (K, G)."""
        return self.log_prior.exp().expand(-1, len(self.stack.group_sizes))

    def recenter(self) -> StackedMLP:
        """Copy the stack, in double precision, as the new point of expansion."""
        self.center = copy.deepcopy(self.stack).double()
        return self.center

    def expand(self, x: Tensor, gamma: Tensor, weight: Tensor, structure: str) -> None:
        """Compute the curvature at the point of expansion."""
        assert self.center is not None, "recenter() comes first"
        if structure == "kron":
            self.curvature = KroneckerCurvature(self.center, x, gamma, weight)
        else:
            self.curvature = STRUCTURES[structure](self.center, x, gamma)

    def variance(self, x: Tensor, scale: float) -> Tensor:
        """Posterior variance of each network's output, shape (N, K)."""
        assert self.center is not None and self.curvature is not None, "expand() comes first"
        return self.curvature.variance(self.center, x, self.prior, scale)

    def squared_norms(self) -> Tensor:
        """Squared norm of each parameter tensor at the point of expansion, shape (K, G)."""
        assert self.center is not None
        tensors = [tensor.detach().flatten(1) for tensor in self.center.tensors]
        return torch.stack([tensor.square().sum(1) for tensor in tensors], dim=1)


def block_evidence(
    prior: Tensor, squared_norms: Tensor, sizes: Tensor, log_determinant: Tensor
) -> Tensor:
    """Each network's share of the log evidence, apart from the likelihood.

    Parameters
    ----------
    prior, squared_norms : Tensor, shape (K, G)
        Prior precision and squared parameter norm for each group.
    sizes : Tensor, shape (G,)
        Parameters in each group.
    log_determinant : Tensor, shape (K,)
        Of the posterior precision.

    Returns
    -------
    Tensor, shape (K,)
        ``(log |Lambda| - theta^T Lambda theta - log |P|) / 2``.
    """
    return 0.5 * ((sizes * prior.log() - prior * squared_norms).sum(1) - log_determinant)


def evidence_gradient(
    prior: Tensor, squared_norms: Tensor, sizes: Tensor, traces: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient of the evidence, and the effective number of parameters.

    Parameters
    ----------
    prior, squared_norms, traces : Tensor, shape (K, G)
    sizes : Tensor, shape (G,)

    Returns
    -------
    gradient : Tensor, shape (K, G)
        ``d log Z / d log lambda``.
    determined : Tensor, shape (K, G)
        ``|g| - lambda tr Sigma``: how many parameters of a group the data determine. Their sum
        enters ``d log Z / d log sigma``.
    """
    determined = sizes - prior * traces
    return 0.5 * (determined - prior * squared_norms), determined


def mackay_step(prior: Tensor, squared_norms: Tensor, sizes: Tensor, traces: Tensor) -> Tensor:
    """MacKay's fixed-point update, ``lambda <- (|g| - lambda tr Sigma) / ||theta||^2``.

    It has the same stationary points as the gradient; the book compares the two.
    """
    return (sizes - prior * traces) / squared_norms


class EvidenceClimber:
    """Adam on the log prior precisions and, in regression, on the log noise level.

    The optimiser's moments persist between calls of :meth:`climb`, because the surface moves only
    a little while the parameters train.

    Parameters
    ----------
    blocks : list of Block
        Their ``log_prior`` is updated in place.
    likelihood : Gaussian or Bernoulli
        Its ``log_sigma`` is updated in place.
    learning_rate : float
    """

    def __init__(self, blocks: list[Block], likelihood: Likelihood, learning_rate: float) -> None:
        self.blocks, self.likelihood = blocks, likelihood
        self._log_sigma = torch.tensor([likelihood.log_sigma], dtype=torch.float64)
        variables = [block.log_prior for block in blocks]
        variables += [self._log_sigma] if likelihood.learns_noise else []
        self._adam = torch.optim.Adam(variables, lr=learning_rate, maximize=True)

    def climb(self, fit: DataFit, steps: int) -> float:
        """Take some steps with the curvature and the data fit held fixed.

        Returns
        -------
        float
            Log evidence after the last step.
        """
        norms = [block.squared_norms() for block in self.blocks]
        sizes = [torch.tensor(block.stack.group_sizes).to(norms[0]) for block in self.blocks]
        for _ in range(steps):
            scale, determined = self.likelihood.scale, 0.0
            for block, norm, size in zip(self.blocks, norms, sizes, strict=True):
                assert block.curvature is not None
                traces = block.curvature.traces(block.prior, scale)
                gradient, effective = evidence_gradient(block.prior, norm, size, traces)
                tied = block.log_prior.shape[1] == 1
                block.log_prior.grad = gradient.sum(1, keepdim=True) if tied else gradient
                determined += float(effective.sum())
            slope = -fit.rows + fit.sse * scale + determined
            self._log_sigma.grad = torch.tensor([slope], dtype=torch.float64)
            self._adam.step()
            for block in self.blocks:
                block.log_prior.clamp_(*LOG_PRIOR_RANGE)
            if self.likelihood.learns_noise:
                self._log_sigma.clamp_(*LOG_SIGMA_RANGE)
                self.likelihood.log_sigma = float(self._log_sigma)
        return self.value(fit)

    def value(self, fit: DataFit) -> float:
        """Log evidence at the present prior and noise level."""
        total = fit.log_likelihood(self.likelihood.log_sigma)
        for block in self.blocks:
            assert block.curvature is not None
            prior, norm = block.prior, block.squared_norms()
            size = torch.tensor(block.stack.group_sizes).to(norm)
            determinant = block.curvature.log_determinant(prior, self.likelihood.scale)
            total += float(block_evidence(prior, norm, size, determinant).sum())
        return total

"""The additive model as tensors, and the loop that trains it (the paper's Algorithm 1).

Nothing here knows of scikit-learn: inputs are tensors, one for each block of terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from icml24.additive_models.curvature import row_chunks
from icml24.additive_models.evidence import Block, EvidenceClimber, Likelihood

__all__ = ["AdditiveModel", "Schedule", "draw_knots", "train"]


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train.

    Parameters
    ----------
    max_iter : int
        Steps of Adam on the parameters, with a cosine decay from ``learning_rate`` to 0.
    learning_rate : float
    batch_size : int
    burn_in : int
        Steps before the first move on the evidence.
    hyper_every : int
        Steps between moves on the evidence.
    hyper_steps : int
        Steps of Adam on the log prior and log noise in each move.
    hyper_lr : float
    """

    max_iter: int = 2000
    learning_rate: float = 0.03
    batch_size: int = 512
    burn_in: int = 100
    hyper_every: int = 50
    hyper_steps: int = 10
    hyper_lr: float = 0.1


@dataclass
class AdditiveModel:
    """Blocks of networks whose outputs are added.

    Parameters
    ----------
    blocks : list of Block
    likelihood : Gaussian or Bernoulli
    offset : float
        Fixed intercept: 0 for a centred target, the log odds of the base rate for two classes.
    structure : {"kron", "full", "diag"}
    """

    blocks: list[Block]
    likelihood: Likelihood
    offset: float
    structure: str

    def expand(self, inputs: list[Tensor], y: Tensor, weight: Tensor) -> Tensor:
        """Put the point of expansion at the present parameters; return ``f``, shape (N,)."""
        for block in self.blocks:
            block.recenter()
        f = self.offset + self.means(inputs).sum(1)
        gamma = weight * self.likelihood.curvature(f)
        for block, x in zip(self.blocks, inputs, strict=True):
            block.expand(x, gamma, weight, self.structure)
        return f

    def means(self, inputs: list[Tensor]) -> Tensor:
        """Output of every network at the point of expansion, shape (N, K), block after block."""
        columns = []
        for block, x in zip(self.blocks, inputs, strict=True):
            assert block.center is not None
            size = block.center.n_networks * max(block.center.layer_sizes)
            with torch.no_grad():
                columns.append(torch.cat([block.center(x[r]) for r in row_chunks(len(x), size)]))
        return torch.cat(columns, dim=1)

    def variances(self, inputs: list[Tensor]) -> Tensor:
        """Posterior variance of every network's output, shape (N, K), block after block."""
        scale = self.likelihood.scale
        columns = [b.variance(x, scale) for b, x in zip(self.blocks, inputs, strict=True)]
        return torch.cat(columns, dim=1)

    def state(self) -> list[Tensor]:
        """Copy everything that training changes."""
        state = [torch.tensor(self.likelihood.log_sigma, dtype=torch.float64)]
        for block in self.blocks:
            state += [block.log_prior.clone(), *(t.detach().clone() for t in block.stack.tensors)]
        return state

    def load_state(self, state: list[Tensor]) -> None:
        """Restore what :meth:`state` returned."""
        remaining = iter(state)
        self.likelihood.log_sigma = float(next(remaining))
        for block in self.blocks:
            block.log_prior.copy_(next(remaining))
            for tensor in block.stack.tensors:
                tensor.data.copy_(next(remaining))


def train(
    model: AdditiveModel,
    inputs: list[Tensor],
    y: Tensor,
    weight: Tensor,
    schedule: Schedule,
    dtype: torch.dtype,
    generator: torch.Generator,
    verbose: bool = False,
) -> list[tuple[int, float]]:
    r"""Alternate descent on the parameters with ascent of the evidence; end at the best copy.

    The loss of a mini-batch of ``B`` rows is
    :math:`\frac1B\sum_n \ell_n + \frac{1}{2 s N} \sum_d \theta_d^\top \Lambda_d \theta_d`, with
    :math:`\ell = (y-f)^2/2` and :math:`s = 1/\sigma^2`, or the cross-entropy and ``s = 1``.

    Parameters
    ----------
    model : AdditiveModel
        Trained in place; afterwards its point of expansion is the copy with the highest evidence.
    inputs : list of Tensor, shapes (N, K, in)
        In double precision, one for each block.
    y, weight : Tensor, shape (N,)
        Target (scaled, or 0/1) and positive sample weights.
    schedule : Schedule
    dtype : torch.dtype
        Precision of the steps on the parameters. Curvature and evidence are always float64.
    generator : torch.Generator
        Shuffles the mini-batches.
    verbose : bool
        Show a progress bar.

    Returns
    -------
    list of (int, float)
        Step and log evidence at each move on the evidence.
    """
    for block in model.blocks:
        block.stack.to(dtype)
    batch_inputs = [x.to(dtype) for x in inputs]
    batch_y, batch_weight = y.to(dtype), (weight / weight.mean()).to(dtype)
    tensors = [tensor for block in model.blocks for tensor in block.stack.tensors]
    adam = torch.optim.Adam(tensors, lr=schedule.learning_rate, fused=True)
    climber = EvidenceClimber(model.blocks, model.likelihood, schedule.hyper_lr)
    rows_total = float(weight.sum())
    batches = _batches(len(y), schedule.batch_size, generator)

    path: list[tuple[int, float]] = []
    best, best_evidence = model.state(), -math.inf
    for step in tqdm(range(1, schedule.max_iter + 1), disable=None if verbose else True):
        rows = next(batches)
        _set_gradients(
            model,
            [x[rows] for x in batch_inputs],
            batch_y[rows],
            batch_weight[rows],
            rows_total,
        )
        decay = 0.5 * (1 + math.cos(math.pi * (step - 1) / schedule.max_iter))
        for settings in adam.param_groups:
            settings["lr"] = schedule.learning_rate * decay
        adam.step()
        due = step >= schedule.burn_in and step % schedule.hyper_every == 0
        if due or step == schedule.max_iter:
            f = model.expand(inputs, y, weight)
            fit = model.likelihood.data_fit(f, y, weight)
            path.append((step, climber.climb(fit, schedule.hyper_steps)))
            if path[-1][1] > best_evidence:
                best, best_evidence = model.state(), path[-1][1]
    model.load_state(best)
    model.expand(inputs, y, weight)
    return path


def _set_gradients(
    model: AdditiveModel, inputs: list[Tensor], y: Tensor, weight: Tensor, rows_total: float
) -> None:
    """Gradient of the training loss, by the hand-written backward pass."""
    with torch.no_grad():
        factors = [b.stack.factors(x) for b, x in zip(model.blocks, inputs, strict=True)]
        f = model.offset + sum(outputs.sum(1) for outputs, _, _ in factors)
        delta = weight * model.likelihood.residual(f, y) / len(y)
        for block, (_, a, g) in zip(model.blocks, factors, strict=True):
            shrink = (block.prior / (model.likelihood.scale * rows_total)).to(delta)
            gradients = block.stack.gradient(a, g, delta)
            for group, (tensor, gradient) in enumerate(
                zip(block.stack.tensors, gradients, strict=True)
            ):
                tensor.grad = gradient.addcmul_(tensor, shrink[:, group, None, None])


def _batches(n_rows: int, size: int, generator: torch.Generator) -> Iterator[Tensor | slice]:
    """Endless mini-batches: shuffled epochs, or all rows at once when they fit."""
    while n_rows <= size:
        yield slice(None)
    n_batches = math.ceil(n_rows / size)
    while True:  # tensor_split makes the batches of an epoch equal up to one row
        yield from torch.randperm(n_rows, generator=generator).tensor_split(n_batches)


def draw_knots(x: Tensor, weight: Tensor, n_units: int, generator: torch.Generator) -> Tensor:
    """Draw data points for :meth:`StackedMLP.place_knots` by weight.

    Rows are sorted first and drawn by inverting their cumulative weight, so the draw depends on
    the weighted sample only and not on the order or repetition of rows.

    Parameters
    ----------
    x : Tensor, shape (N, K, in)
    weight : Tensor, shape (N,)
    n_units : int
    generator : torch.Generator

    Returns
    -------
    Tensor, shape (K, n_units, in)
    """
    n_networks = x.shape[1]
    levels = torch.rand((n_networks, n_units), generator=generator, dtype=torch.float64).to(x)
    order = torch.arange(len(x), device=x.device).repeat(n_networks, 1).T
    for column in range(x.shape[2] - 1, -1, -1):  # sort by the first input, then the second, ...
        values = x[:, :, column].gather(0, order)
        order = order.gather(0, values.argsort(dim=0, stable=True))
    cumulative = (weight[order].cumsum(0) / weight.sum()).T.contiguous()
    drawn = torch.searchsorted(cumulative, levels).clamp(max=len(x) - 1)
    rows = order.T.gather(1, drawn)
    return x.transpose(0, 1)[torch.arange(n_networks, device=x.device)[:, None], rows]

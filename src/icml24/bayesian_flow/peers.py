"""What else one could use: an adaptive solver, diffusers, masked diffusion, an n-gram model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from icml24.bayesian_flow.flows import ContinuousBFN, DiscreteBFN, Model

__all__ = ["MaskedDiffusion", "NGram", "adaptive_flow"]


def adaptive_flow(
    bfn: ContinuousBFN | DiscreteBFN,
    state: Tensor,
    start: float,
    stop: float = 0.0,
    *,
    rtol: float = 1e-3,
    atol: float = 1e-3,
    method: str = "RK45",
) -> tuple[Tensor, int]:
    """Integrate the probability flow with SciPy's adaptive solvers.

    The reference solution when the tolerances are small, and the usual black-box sampler when they
    are not.

    Parameters
    ----------
    bfn : ContinuousBFN or DiscreteBFN
    state : Tensor
        State at time ``start``.
    start, stop : float
        Times ``t``, from the prior side to the data.
    rtol, atol : float
    method : str
        A method of :func:`scipy.integrate.solve_ivp`.

    Returns
    -------
    state : Tensor
        At time ``stop``, float64.
    nfe : int
        Calls of the network.
    """
    if not 0 <= stop < start < 1:
        raise ValueError(f"Times must satisfy 0 <= stop < start < 1, got {start} and {stop}.")
    shape, options = state.shape, {"dtype": torch.float64, "device": state.device}

    def slope(t: float, flat: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            now = torch.as_tensor(flat, **options).reshape(shape)
            return bfn.probability_flow(now, t).double().cpu().numpy().ravel()

    flat = state.double().cpu().numpy().ravel()
    result = solve_ivp(slope, (start, stop), flat, method=method, rtol=rtol, atol=atol)
    if not result.success:
        raise RuntimeError(f"The adaptive solver stopped early: {result.message}")
    return torch.as_tensor(result.y[:, -1], **options).reshape(shape), int(result.nfev)


class MaskedDiffusion(nn.Module):
    """Masked (absorbing) diffusion for text, what many would use today.

    A hidden symbol is given to the network as the uniform distribution and a known one as a one-hot
    vector, so that the same network can serve here and in a :class:`DiscreteBFN`.

    Parameters
    ----------
    model : callable or torch.nn.Module
        ``model(theta, s)`` returns logits or probabilities (B, ..., K); ``s`` is the share of known
        symbols.
    num_classes : int
    prediction_type : {"logits", "probs"}
    """

    def __init__(self, model: Model, num_classes: int, prediction_type: str = "logits") -> None:
        super().__init__()
        self.model, self.num_classes, self.prediction_type = model, num_classes, prediction_type
        self.nfe = 0

    def _predict(self, x: Tensor, hidden: Tensor, share: Tensor) -> Tensor:
        onehot = nn.functional.one_hot(x, self.num_classes).to(share)
        theta = torch.where(hidden[..., None], 1 / self.num_classes, onehot)
        output = self.model(theta, share)
        return output.log_softmax(-1) if self.prediction_type == "logits" else output.log()

    def loss(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Bound on ``-ln p(x)`` in nats per symbol: cross-entropy over the share of hidden ones.

        Parameters
        ----------
        x : Tensor of integers, shape (B, ...)
        generator : torch.Generator, optional

        Returns
        -------
        Tensor, scalar
        """
        draw = torch.rand(len(x), generator=generator)
        hide = ((torch.arange(len(x)) + draw) / len(x)).clamp(min=1e-3)
        each = hide.reshape(-1, *[1] * (x.ndim - 1))
        hidden = torch.rand(x.shape, generator=generator) < each
        log = self._predict(x, hidden, 1 - hide).gather(-1, x[..., None])[..., 0]
        return -(log * hidden / each).mean()

    @torch.no_grad()
    def sample(
        self,
        shape: Sequence[int],
        steps: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Reveal symbols in ``steps`` steps, each drawn from the prediction (ancestral sampling).

        Parameters
        ----------
        shape : sequence of int
        steps : int
            Calls of the network.
        generator : torch.Generator, optional
        dtype : torch.dtype, optional

        Returns
        -------
        Tensor of integers, shape (B, ...)
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}.")
        x, hidden = torch.zeros(*shape, dtype=torch.long), torch.ones(*shape, dtype=torch.bool)
        self.nfe = 0
        for k in range(steps):
            share = torch.full((shape[0],), k / steps, dtype=dtype or torch.float32)
            flat = self._predict(x, hidden, share).exp().flatten(0, -2)
            self.nfe += 1
            drawn = torch.multinomial(flat, 1, generator=generator).reshape(x.shape)
            reveal = hidden & (torch.rand(x.shape, generator=generator) < 1 / (steps - k))
            x, hidden = torch.where(reveal, drawn, x), hidden & ~reveal
        return x


class NGram:
    """A character n-gram model with counts, the oldest peer; it needs no network.

    Parameters
    ----------
    text : Tensor of integers, shape (n,)
    order : int, default 4
        Characters in a gram.
    num_classes : int, default 27

    Examples
    --------
    >>> model = NGram(torch.tensor([0, 1, 0, 1, 0, 1]), order=2, num_classes=2)
    >>> model.sample(1, 4, torch.Generator().manual_seed(0)).shape
    torch.Size([1, 4])
    """

    def __init__(self, text: Tensor, order: int = 4, num_classes: int = 27) -> None:
        if order < 2 or len(text) < order:
            raise ValueError("An n-gram model needs order >= 2 and a text at least that long.")
        grams = text.unfold(0, order, 1)
        self.order, self.classes = order, num_classes
        self._weights = num_classes ** torch.arange(order - 2, -1, -1)
        context = (grams[:, :-1] * self._weights).sum(1)
        counts = torch.zeros(num_classes ** (order - 1) * num_classes, dtype=torch.float64)
        counts.index_add_(
            0, context * num_classes + grams[:, -1], torch.ones(len(grams), dtype=torch.float64)
        )
        self._counts = counts.reshape(-1, num_classes)

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Draw ``count`` texts of ``length`` characters, shape (count, length)."""
        total = self._counts.sum(1)
        state = torch.multinomial(total, count, replacement=True, generator=generator)
        digits = [(state // w) % self.classes for w in self._weights.tolist()]
        for _ in range(length - len(digits)):
            context = sum(
                d * w for d, w in zip(digits[1 - self.order :], self._weights.tolist(), strict=True)
            )
            rows: Any = self._counts[context]
            rows = torch.where(rows.sum(1, keepdim=True) > 0, rows, 1.0)
            digits.append(torch.multinomial(rows, 1, generator=generator)[:, 0])
        return torch.stack(digits[:length], 1)

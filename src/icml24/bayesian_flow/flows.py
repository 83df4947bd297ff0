"""Bayesian flow networks: a network, a schedule, and what they predict, score and lose.

Shapes: ``B`` examples, any inner shape ``...``, ``K`` symbols. The *state* of a flow is what the
differential equations move: the belief mean ``mu`` for continuous data, the logits ``z`` for
discrete data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from icml24.bayesian_flow.schedules import ContinuousBFNSchedule, DiscreteBFNSchedule

__all__ = ["ContinuousBFN", "DiscreteBFN"]

Reduction = Literal["mean", "sum", "none"]
Model = Callable[[Tensor, Tensor], Any]


def over(t: Tensor, like: Tensor) -> Tensor:
    """Append axes to ``t`` (scalar or one time for each example) so that it scales ``like``."""
    if t.ndim == 0:
        return t.to(dtype=like.dtype)
    if t.shape != like.shape[:1]:
        raise ValueError(
            f"Give one time for the batch or one for each of the {like.shape[0]} examples, "
            f"got shape {tuple(t.shape)}."
        )
    return t.to(like).reshape(-1, *[1] * (like.ndim - 1))


def number(t: float | Tensor) -> Tensor:
    """Turn a plain number into a float64 tensor and leave a tensor as it is."""
    return t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64)


@lru_cache(maxsize=4096)
def scalars(schedule: ContinuousBFNSchedule, t: float) -> tuple[float, float, float]:
    """Return ``gamma``, ``omega`` and the log-SNR of a continuous schedule as plain numbers."""
    return float(schedule.gamma(t)), float(schedule.omega(t)), float(schedule.log_snr(t))


class _Flow(nn.Module):
    """What the continuous and the discrete flow share."""

    schedule: Any
    default_eta: float

    def __init__(self, model: Model, clock: str, check_finite: bool) -> None:
        super().__init__()
        if not callable(model):
            raise TypeError(f"model must be callable as model(input, time), got {type(model)}.")
        if clock not in ("s", "t"):
            raise ValueError(
                f"clock must be 's' (0 is the prior, as BFNs are trained) or 't' (0 is the data), "
                f"got {clock!r}."
            )
        self.model, self.clock, self.check_finite = model, clock, check_finite

    def _call(self, network_input: Tensor, t: float | Tensor) -> Tensor:
        time = torch.as_tensor(t, dtype=network_input.dtype, device=network_input.device)
        if time.ndim > 1 or (time.ndim == 1 and len(time) not in (1, len(network_input))):
            raise ValueError(
                f"Give one time for the batch or one time for each of the {len(network_input)} "
                f"examples, got shape {tuple(time.shape)}."
            )
        time = time.expand(len(network_input))
        output = self.model(network_input, 1 - time if self.clock == "s" else time)
        output = getattr(output, "sample", output)
        if not isinstance(output, Tensor) or output.shape != network_input.shape:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"The model must return a tensor shaped like its input "
                f"{tuple(network_input.shape)}, got {got}."
            )
        if self.check_finite and not bool(torch.isfinite(output).all()):
            raise ValueError(
                f"The model returned NaN or infinite values at t = {float(time[0]):.4g}; check its "
                "weights and that its input is scaled as in training."
            )
        return output

    def predict(self, state: Tensor, t: float | Tensor) -> Tensor:
        raise NotImplementedError

    def belief(self, x: Tensor, s: float | Tensor, generator: torch.Generator | None) -> Tensor:
        raise NotImplementedError

    def score(self, state: Tensor, t: float | Tensor) -> Tensor:
        raise NotImplementedError

    def _check_data(self, x: Tensor) -> None:
        raise NotImplementedError

    def _loss(
        self, x: Tensor, s: Tensor, n_steps: int | None, generator: torch.Generator | None
    ) -> Tensor:
        raise NotImplementedError

    def loss(
        self,
        x: Tensor,
        *,
        n_steps: int | None = None,
        s: float | Tensor | None = None,
        generator: torch.Generator | None = None,
        reduction: Reduction = "mean",
    ) -> Tensor:
        """Training loss in nats per dimension, an unbiased estimate with one time per example.

        Parameters
        ----------
        x : Tensor, shape (B, ...)
            Data: floating in [-1, 1] for a continuous flow, integer labels for a discrete one.
        n_steps : int, optional
            Number of observations of the discrete-time loss; None is the continuous-time limit.
        s : float or Tensor of shape (B,), optional
            Times, 0 for the prior. By default stratified: one in each of B equal parts of [0, 1].
        generator : torch.Generator, optional
        reduction : {"mean", "sum", "none"}
            Over the batch; "none" returns shape (B,).

        Returns
        -------
        Tensor

        Raises
        ------
        ValueError, TypeError
            If the data, the times or the reduction are not as described.
        """
        self._check_data(x)
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}.")
        if n_steps is not None and (n_steps != int(n_steps) or n_steps < 1):
            raise ValueError(f"n_steps must be an integer from 1 on, got {n_steps}.")
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        if not x.is_floating_point() and isinstance(s, Tensor):
            dtype = s.dtype
        if s is None:
            draw = torch.rand(len(x), generator=generator, dtype=dtype, device=x.device)
            s = (torch.arange(len(x), dtype=dtype, device=x.device) + draw) / len(x)
        time = torch.as_tensor(s, dtype=dtype, device=x.device).expand(len(x))
        if n_steps is not None:
            time = (time * n_steps).floor().clamp(max=n_steps - 1) / n_steps
        each = self._loss(x, time, n_steps, generator).flatten(1).mean(1)
        return each if reduction == "none" else getattr(each, reduction)()

    @torch.no_grad()
    def bound(self, x: Tensor, times: int = 32, generator: torch.Generator | None = None) -> Tensor:
        """Estimate the description length of each example, nats per dimension.

        An upper bound on ``-ln p(x)``. For continuous data it is the cost of sending ``x`` to the
        precision ``sigma_1``; for discrete data the last reconstruction is included.

        Parameters
        ----------
        x : Tensor, shape (B, ...)
        times : int, default 32
            Evaluations of the network for each example.
        generator : torch.Generator, optional

        Returns
        -------
        Tensor, shape (B,)
        """
        if times < 1:
            raise ValueError(f"times must be at least 1, got {times}.")
        total = torch.zeros(len(x), device=x.device)
        for k in range(times):
            draw = torch.rand(len(x), generator=generator, device=x.device)
            s = (k + draw) / times
            total = total + self.loss(x, s=s, generator=generator, reduction="none") / times
        return total + self._reconstruction(x, generator)

    def _reconstruction(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.zeros(len(x), device=x.device)

    def probability_flow(self, state: Tensor, t: float | Tensor) -> Tensor:
        """Right-hand side ``d state / dt`` of the probability-flow equation, eqs. of section 4.3.

        Parameters
        ----------
        state : Tensor, shape of the state
        t : float or Tensor of shape (B,)

        Returns
        -------
        Tensor, same shape
        """
        time = number(t)
        drift = over(self.schedule.drift(time), state)
        noise = over(self.schedule.diffusion2(time), state)
        return drift * state - 0.5 * noise * self.score(state, t)


class ContinuousBFN(_Flow):
    """A Bayesian flow network for continuous data.

    Parameters
    ----------
    model : callable or torch.nn.Module
        ``model(mu, s)`` with ``mu`` of shape (B, ...) and ``s`` of shape (B,) returns (B, ...), or
        an object whose attribute ``sample`` is that tensor.
    schedule : ContinuousBFNSchedule
    prediction_type : {"epsilon", "sample"}
        Whether the model predicts the noise in ``mu`` or the data.
    t_min : float, default 1e-6
        Below this ``s`` a noise prediction says nothing, and the data estimate is defined as 0.
    clock : {"s", "t"}
        The time that the model is called with: ``s`` as in the original code, or ``t = 1 - s``.
    check_finite : bool, default True
        Raise when the model returns NaN or infinite values.

    Examples
    --------
    >>> flow = ContinuousBFN(lambda mu, s: mu, ContinuousBFNSchedule(0.1), "sample")
    >>> flow.predict(torch.ones(2, 3), t=0.5).shape
    torch.Size([2, 3])
    """

    default_eta = 0.01

    def __init__(
        self,
        model: Model,
        schedule: ContinuousBFNSchedule,
        prediction_type: Literal["epsilon", "sample"] = "epsilon",
        t_min: float = 1e-6,
        clock: Literal["s", "t"] = "s",
        check_finite: bool = True,
    ) -> None:
        super().__init__(model, clock, check_finite)
        if not isinstance(schedule, ContinuousBFNSchedule):
            raise TypeError(f"schedule must be a ContinuousBFNSchedule, got {schedule!r}.")
        if prediction_type not in ("epsilon", "sample"):
            raise ValueError(
                f"prediction_type must be 'epsilon' or 'sample', got {prediction_type!r}."
            )
        if not 0 <= t_min < 1:
            raise ValueError(f"t_min must lie in [0, 1), got {t_min}.")
        self.schedule, self.prediction_type, self.t_min = schedule, prediction_type, t_min

    def needs_call(self, t: float) -> bool:
        """Tell whether :meth:`predict` evaluates the network at time ``t``."""
        return self.prediction_type == "sample" or 1 - t >= self.t_min

    def predict(self, state: Tensor, t: float | Tensor) -> Tensor:
        """Estimate the data from the belief mean.

        Parameters
        ----------
        state : Tensor, shape (B, ...)
            Belief mean ``mu``.
        t : float or Tensor of shape (B,)

        Returns
        -------
        Tensor, shape (B, ...)
            For a noise prediction ``mu / gamma - sqrt((1 - gamma) / gamma) eps``.
        """
        if isinstance(t, (int, float)) and not self.needs_call(t):
            return torch.zeros_like(state)
        output = self._call(state, t)
        if self.prediction_type == "sample":
            return output
        if isinstance(t, (int, float)):
            gain, rest, _ = scalars(self.schedule, float(t))
            return torch.sub(state / gain, output, alpha=math.sqrt(rest / gain))
        time = number(t)
        known = over(1 - time, state) >= self.t_min
        gamma = over(self.schedule.gamma(time), state)
        omega = over(self.schedule.omega(time), state)
        safe = torch.where(known, gamma, 1.0)
        return torch.where(known, state / safe - (omega / safe).sqrt() * output, 0.0)

    def predict_noise(self, state: Tensor, t: float | Tensor) -> Tensor:
        """Estimate ``eps`` in ``mu = gamma x + sqrt(gamma (1 - gamma)) eps``.

        Parameters
        ----------
        state : Tensor, shape (B, ...)
        t : float or Tensor of shape (B,)

        Returns
        -------
        Tensor, shape (B, ...)
        """
        if self.prediction_type == "epsilon":
            return self._call(state, t)
        alpha, sigma = self.schedule.alpha_sigma(number(t))
        return (state - over(alpha, state) * self.predict(state, t)) / over(sigma, state)

    def belief(
        self, x: Tensor, s: float | Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw the belief mean at BFN time ``s`` given the data, ``N(gamma x, gamma (1-gamma))``.

        Parameters
        ----------
        x : Tensor, shape (B, ...)
        s : float or Tensor of shape (B,)
        generator : torch.Generator, optional

        Returns
        -------
        Tensor, shape (B, ...)
        """
        alpha, sigma = self.schedule.alpha_sigma(1 - number(s))
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        return over(alpha, x) * x + over(sigma, x) * noise

    def _check_data(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2 or not x.numel():
            raise TypeError("Continuous data must be a non-empty floating tensor (B, ...).")
        if not bool(torch.isfinite(x).all()):
            raise ValueError("The data contain NaN or infinite values; drop or repair them first.")
        if float(x.abs().max()) > 1.0001:
            warnings.warn(
                "The data leave [-1, 1], for which sigma_1 and clipping are meant; rescale them.",
                stacklevel=3,
            )

    def _loss(
        self, x: Tensor, s: Tensor, n_steps: int | None, generator: torch.Generator | None
    ) -> Tensor:
        mu = self.belief(x, s, generator)
        error = (x - self.predict(mu, 1 - s)) ** 2
        log = math.log(self.schedule.sigma_1)
        if n_steps is None:
            return over(-log / self.schedule.omega(1 - s), x) * error
        accuracy = torch.exp(-2 * (s + 1 / n_steps) * log) * -math.expm1(2 * log / n_steps)
        return over(0.5 * n_steps * accuracy, x) * error

    def score(self, state: Tensor, t: float | Tensor) -> Tensor:
        """Gradient of the log density of ``mu``: ``(gamma x_hat - mu) / (gamma (1 - gamma))``.

        Parameters
        ----------
        state : Tensor, shape (B, ...)
        t : float or Tensor of shape (B,)

        Returns
        -------
        Tensor, shape (B, ...)
        """
        time = number(t)
        gamma = over(self.schedule.gamma(time), state)
        omega = over(self.schedule.omega(time), state)
        return (gamma * self.predict(state, t) - state) / (gamma * omega)

    def prior(
        self,
        shape: tuple[int, ...],
        t: float,
        generator: torch.Generator | None,
        moments: tuple[float, float] | None = None,
        **options: Any,
    ) -> Tensor:
        """Draw the state where sampling starts: ``N(0, gamma (1 - gamma))``, or matched moments."""
        alpha, sigma = (float(c) for c in self.schedule.alpha_sigma(t))
        mean, variance = moments or (0.0, 0.0)
        noise = torch.randn(shape, generator=generator, **options)
        return alpha * mean + math.sqrt(sigma**2 + alpha**2 * variance) * noise

    def slope_clock(self, t: float) -> float:
        """Time in which second-order rules take the prediction as linear: the log-SNR."""
        return scalars(self.schedule, float(t))[2]

    def finish(self, prediction: Tensor) -> Tensor:
        """Turn the last prediction into a sample (continuous: as it is)."""
        return prediction


class DiscreteBFN(_Flow):
    """A Bayesian flow network for discrete data.

    Parameters
    ----------
    model : callable or torch.nn.Module
        ``model(theta, s)`` with probabilities ``theta`` of shape (B, ..., K) and ``s`` of shape
        (B,) returns (B, ..., K).
    schedule : DiscreteBFNSchedule
    prediction_type : {"logits", "probs"}
        Whether the model returns logits or probabilities.
    clock, check_finite
        As for :class:`ContinuousBFN`.

    Examples
    --------
    >>> flow = DiscreteBFN(lambda theta, s: theta, DiscreteBFNSchedule(3, 3.0), "probs")
    >>> flow.predict(torch.zeros(2, 5, 3), t=0.5)[0, 0].sum()
    tensor(1.)
    """

    default_eta = 0.001

    def __init__(
        self,
        model: Model,
        schedule: DiscreteBFNSchedule,
        prediction_type: Literal["logits", "probs"] = "logits",
        clock: Literal["s", "t"] = "s",
        check_finite: bool = True,
    ) -> None:
        super().__init__(model, clock, check_finite)
        if not isinstance(schedule, DiscreteBFNSchedule):
            raise TypeError(f"schedule must be a DiscreteBFNSchedule, got {schedule!r}.")
        if prediction_type not in ("logits", "probs"):
            raise ValueError(
                f"prediction_type must be 'logits' or 'probs', got {prediction_type!r}."
            )
        self.schedule, self.prediction_type = schedule, prediction_type

    def needs_call(self, t: float) -> bool:
        """Tell whether :meth:`predict` evaluates the network at time ``t``: always."""
        return True

    def predict(self, state: Tensor, t: float | Tensor) -> Tensor:
        """Estimate the probabilities of the symbols from the logits of the belief.

        Parameters
        ----------
        state : Tensor, shape (B, ..., K)
            Logits ``z``; the network sees ``softmax(z)``.
        t : float or Tensor of shape (B,)

        Returns
        -------
        Tensor, shape (B, ..., K)
            Probabilities.
        """
        classes = self.schedule.num_classes
        if state.ndim < 2 or state.shape[-1] != classes:
            raise ValueError(
                f"The last axis of the logits must have {classes} entries, "
                f"got shape {tuple(state.shape)}."
            )
        output = self._call(state.softmax(-1), t)
        if self.prediction_type == "logits":
            return output.softmax(-1)
        if not bool(((output.sum(-1) - 1).abs() < 1e-3).all()) or bool((output < 0).any()):
            raise ValueError(
                "The model must return probabilities that are not negative and sum to one over "
                "the last axis; for logits use prediction_type='logits'."
            )
        return output

    def belief(
        self, x: Tensor, s: float | Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw the logits at BFN time ``s`` given labels, ``N(beta (K e_x - 1), K beta)``.

        Parameters
        ----------
        x : Tensor of integers, shape (B, ...)
        s : float or Tensor of shape (B,)
        generator : torch.Generator, optional

        Returns
        -------
        Tensor, shape (B, ..., K)
        """
        self._check_data(x)
        classes = self.schedule.num_classes
        s = number(s)
        dtype = s.dtype if s.is_floating_point() and s.ndim else torch.get_default_dtype()
        onehot = nn.functional.one_hot(x.long(), classes).to(dtype)
        beta = over(self.schedule.beta(1 - s), onehot)
        noise = torch.randn(onehot.shape, generator=generator, dtype=dtype, device=x.device)
        return beta * (classes * onehot - 1) + (classes * beta).sqrt() * noise

    def _check_data(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.ndim < 2:
            raise TypeError("Discrete data must be an integer tensor of labels, shape (B, ...).")
        classes = self.schedule.num_classes
        if not x.numel() or int(x.min()) < 0 or int(x.max()) >= classes:
            raise ValueError(f"Labels must exist and lie between 0 and {classes - 1}.")

    def _loss(
        self, x: Tensor, s: Tensor, n_steps: int | None, generator: torch.Generator | None
    ) -> Tensor:
        classes, beta_1 = self.schedule.num_classes, self.schedule.beta_1
        z = self.belief(x, s, generator)
        probabilities = self.predict(z, 1 - s)
        onehot = nn.functional.one_hot(x.long(), classes).to(z)
        if n_steps is None:
            error = ((onehot - probabilities) ** 2).sum(-1)
            return classes * beta_1 * over(s, error) * error
        accuracy = over(beta_1 * (2 * s / n_steps + n_steps**-2), z)
        noise = torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device)
        y = accuracy * (classes * onehot - 1) + (classes * accuracy).sqrt() * noise
        sent = y.gather(-1, x.long()[..., None])[..., 0]
        return n_steps * (sent - torch.logsumexp(probabilities.log() + y, -1))

    def _reconstruction(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        probabilities = self.predict(self.belief(x, 1.0, generator), 0.0)
        chosen = probabilities.gather(-1, x.long()[..., None])[..., 0]
        return -chosen.log().flatten(1).mean(1)

    def score(self, state: Tensor, t: float | Tensor) -> Tensor:
        """Gradient of the log density of ``z``: ``-z / (K beta) + e_hat - 1 / K``.

        Parameters
        ----------
        state : Tensor, shape (B, ..., K)
        t : float or Tensor of shape (B,)

        Returns
        -------
        Tensor, shape (B, ..., K)
        """
        classes = self.schedule.num_classes
        time = number(t)
        beta = over(self.schedule.beta(time), state)
        return self.predict(state, t) - 1 / classes - state / (classes * beta)

    def prior(
        self,
        shape: tuple[int, ...],
        t: float,
        generator: torch.Generator | None,
        moments: tuple[float, float] | None = None,
        **options: Any,
    ) -> Tensor:
        """Draw the logits where sampling starts: ``N(0, K beta)``."""
        if moments is not None:
            raise ValueError("data_moments are for continuous flows only.")
        classes = self.schedule.num_classes
        noise = torch.randn((*shape, classes), generator=generator, **options)
        return math.sqrt(classes * float(self.schedule.beta(t))) * noise

    def slope_clock(self, t: float) -> float:
        """Time in which second-order rules take the prediction as linear: ``t`` itself."""
        return t

    def finish(self, prediction: Tensor) -> Tensor:
        """Turn the last prediction (or logits) into labels: the most probable symbol."""
        return prediction.argmax(-1)

"""Data whose best prediction is known in closed form: no network error, only solver error."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from icml24.bayesian_flow.flows import ContinuousBFN, DiscreteBFN
from icml24.bayesian_flow.sampler import BFNSampler
from icml24.bayesian_flow.schedules import ContinuousBFNSchedule, DiscreteBFNSchedule

__all__ = ["GaussianMixture", "MarkovChain", "gaussian_moments"]

DOUBLE = torch.float64


class GaussianMixture:
    """A mixture of round Gaussians with its exact posterior mean.

    Parameters
    ----------
    means : Tensor, shape (M, D)
    std : float
        Standard deviation of every component, 0 for points.
    weights : Tensor of shape (M,), optional
        Equal by default.

    Examples
    --------
    >>> ring = GaussianMixture.ring(8, radius=0.7, std=0.05)
    >>> flow = ring.flow(ContinuousBFNSchedule(0.03))
    >>> flow.predict(torch.zeros(1, 2, dtype=torch.float64), t=0.9).abs().max() < 1e-12
    tensor(True)
    """

    def __init__(self, means: Tensor, std: float, weights: Tensor | None = None) -> None:
        means = torch.as_tensor(means, dtype=DOUBLE)
        if means.ndim != 2 or not means.numel():
            raise ValueError(f"means must have shape (M, D), got {tuple(means.shape)}.")
        if not std >= 0:
            raise ValueError(f"std must not be negative, got {std}.")
        weights = torch.ones(len(means)) if weights is None else weights
        weights = torch.as_tensor(weights, dtype=DOUBLE)
        if weights.shape != means.shape[:1] or not bool((weights > 0).all()):
            raise ValueError("weights must be one positive number for each component.")
        self.means, self.std, self.weights = means, std, weights / weights.sum()

    @classmethod
    def ring(cls, count: int = 8, radius: float = 0.7, std: float = 0.05) -> GaussianMixture:
        """Place ``count`` equal components on a circle."""
        angle = 2 * math.pi * torch.arange(count, dtype=DOUBLE) / count
        return cls(radius * torch.stack([angle.cos(), angle.sin()], 1), std)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw data, shape (count, D), float64."""
        which = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        noise = torch.randn(count, self.means.shape[1], generator=generator, dtype=DOUBLE)
        return self.means[which] + self.std * noise

    def posterior_mean(
        self, mu: Tensor, t: float | Tensor, schedule: ContinuousBFNSchedule
    ) -> Tensor:
        """Return ``E[x | mu]``, the prediction that no network can beat.

        Parameters
        ----------
        mu : Tensor, shape (B, D)
        t : float or Tensor of shape (B,)
        schedule : ContinuousBFNSchedule

        Returns
        -------
        Tensor, shape (B, D)
        """
        means, weights = self.means.to(mu), self.weights.to(mu)
        time = torch.as_tensor(t, dtype=mu.dtype, device=mu.device).reshape(-1, 1)
        gamma, omega = schedule.gamma(time), schedule.omega(time)
        variance = gamma * (gamma * self.std**2 + omega)
        shift = mu[:, None] - gamma[..., None] * means
        safe = torch.where(variance > 0, variance, 1.0)
        log = weights.log() - 0.5 * (shift**2).sum(-1) / safe
        share = log.softmax(-1)
        gain = gamma * self.std**2 / safe
        return share @ means + gain * (share[..., None] * shift).sum(1)

    def flow(self, schedule: ContinuousBFNSchedule) -> ContinuousBFN:
        """Return a flow whose network is the exact posterior mean (prediction type "sample")."""
        return ContinuousBFN(
            lambda mu, s: self.posterior_mean(mu, 1 - s, schedule), schedule, "sample"
        )


def gaussian_moments(sampler: BFNSampler, mean: float, std: float) -> tuple[float, float]:
    """Exact mean and variance of what a sampler returns for Gaussian data: no Monte Carlo.

    All update rules are affine, so the sampler runs on a state that is the row of coefficients of
    (start noise, noise of each step, constant 1).

    Parameters
    ----------
    sampler : BFNSampler
        Of a continuous flow; its network is replaced by the exact posterior mean. Clipping and
        guidance must be off.
    mean, std : float
        Of the data.

    Returns
    -------
    mean, variance : float

    Examples
    --------
    >>> flow = ContinuousBFN(lambda mu, s: mu, ContinuousBFNSchedule(0.1), "sample")
    >>> mean, variance = gaussian_moments(BFNSampler(flow, "bfn-solver2", 400), 0.3, 0.4)
    >>> abs(mean - 0.3) < 0.05, abs(variance - 0.16) < 0.05
    (True, True)
    """
    if sampler.clip_sample is not None or sampler.guidance is not None:
        raise ValueError("Exact moments need a sampler without clipping and guidance.")
    schedule = sampler.bfn.schedule
    times, size = sampler.timesteps.tolist(), sampler.num_steps + 2

    def denoise(row: Tensor, t: float) -> Tensor:
        gamma, omega = float(schedule.gamma(t)), float(schedule.omega(t))
        gain = std**2 / (gamma * std**2 + omega)
        estimate = gain * row
        estimate[0, -1] += mean * (1 - gain * gamma)
        return estimate

    class Exact(ContinuousBFN):
        def predict(self, state: Tensor, t: float | Tensor) -> Tensor:
            return denoise(state, float(t))

    exact = BFNSampler(
        Exact(lambda mu, s: mu, schedule, "sample"), sampler.solver_name, sampler.num_steps
    )
    exact.set_timesteps(timesteps=times)
    state = torch.zeros(1, size, dtype=DOUBLE)
    if not sampler.solver.original:
        alpha, sigma = (float(c) for c in schedule.alpha_sigma(times[0]))
        centre, variance = sampler.data_moments or (0.0, 0.0)
        state[0, 0] = math.sqrt(sigma**2 + alpha**2 * variance)
        state[0, -1] = alpha * centre
    previous = None
    steps = sampler.num_steps - (sampler.last_step == "drop")
    for i in range(steps):
        estimate = exact.predict(state, times[i])
        noise = torch.zeros_like(state)
        noise[0, i + 1] = 1.0
        state = exact.step(estimate, i, state, previous=previous, noise=noise).prev_state
        previous = estimate
    if sampler.last_step != "integrate":
        state = exact.predict(state, times[steps])
    return float(state[0, -1]), float((state[0, :-1] ** 2).sum())


class MarkovChain:
    """Sequences of a Markov chain, with the exact prediction by forward and backward messages.

    Parameters
    ----------
    initial : Tensor, shape (K,)
    transition : Tensor, shape (K, K)
        Row ``i`` holds the probabilities of what follows symbol ``i``.
    length : int
        Symbols in a sequence, at least 1.

    Examples
    --------
    >>> chain = MarkovChain(torch.tensor([0.5, 0.5]), torch.eye(2), length=3)
    >>> chain.posterior(torch.tensor([[[0.9, 0.1], [0.5, 0.5], [0.5, 0.5]]]))[0, 2]
    tensor([0.9000, 0.1000])
    """

    def __init__(self, initial: Tensor, transition: Tensor, length: int) -> None:
        initial = torch.as_tensor(initial, dtype=DOUBLE)
        transition = torch.as_tensor(transition, dtype=DOUBLE)
        classes = len(initial)
        if initial.ndim != 1 or transition.shape != (classes, classes) or length < 1:
            raise ValueError("Need initial (K,), transition (K, K) and a length of at least 1.")
        rows = torch.cat([initial[None], transition])
        if not bool(((rows.sum(1) - 1).abs() < 1e-6).all()) or bool((rows < 0).any()):
            raise ValueError("Probabilities must not be negative and must sum to one in each row.")
        self.initial, self.transition, self.length = initial, transition, length

    @classmethod
    def random(
        cls, num_classes: int, length: int, concentration: float, generator: torch.Generator
    ) -> MarkovChain:
        """Draw a chain whose rows are Dirichlet distributed (small: nearly deterministic)."""
        shape = (num_classes + 1, num_classes)
        gamma = torch._standard_gamma(
            torch.full(shape, concentration, dtype=DOUBLE), generator=generator
        )
        rows = (gamma + 1e-12) / (gamma + 1e-12).sum(1, keepdim=True)
        return cls(rows[0], rows[1:], length)

    @property
    def num_classes(self) -> int:
        """Number of symbols K."""
        return len(self.initial)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw sequences, shape (count, length), int64."""
        x = [torch.multinomial(self.initial, count, replacement=True, generator=generator)]
        for _ in range(self.length - 1):
            x.append(torch.multinomial(self.transition[x[-1]], 1, generator=generator)[:, 0])
        return torch.stack(x, 1)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log probability of each sequence, shape (B,); minus infinity where impossible."""
        if x.ndim != 2 or x.shape[1] != self.length:
            raise ValueError(f"Sequences must have shape (B, {self.length}).")
        steps = self.transition.log()[x[:, :-1], x[:, 1:]].sum(1)
        return self.initial.log()[x[:, 0]] + steps

    def entropy(self) -> float:
        """Entropy of a sequence in nats."""
        marginal, total = self.initial, float(torch.special.entr(self.initial).sum())
        inner = torch.special.entr(self.transition).sum(1)
        for _ in range(self.length - 1):
            total += float(marginal @ inner)
            marginal = marginal @ self.transition
        return total

    def posterior(self, theta: Tensor) -> Tensor:
        """Probabilities of each symbol given the beliefs: the best possible prediction.

        The posterior is ``p(x) * prod_d theta_d[x_d]``, whatever the time.

        Parameters
        ----------
        theta : Tensor, shape (B, length, K)

        Returns
        -------
        Tensor, shape (B, length, K)
        """
        initial, transition = self.initial.to(theta), self.transition.to(theta)
        forward = [initial * theta[:, 0]]
        for d in range(1, self.length):
            message = forward[-1] / forward[-1].sum(-1, keepdim=True)
            forward.append((message @ transition) * theta[:, d])
        backward = [torch.ones_like(theta[:, 0])]
        for d in range(self.length - 1, 0, -1):
            message = (theta[:, d] * backward[0]) @ transition.T
            backward.insert(0, message / message.sum(-1, keepdim=True))
        joint = torch.stack(forward, 1) * torch.stack(backward, 1)
        return joint / joint.sum(-1, keepdim=True)

    def model(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the posterior with the signature of a network, ``model(theta, s)``."""
        return lambda theta, s: self.posterior(theta)

    def flow(self, beta_1: float) -> DiscreteBFN:
        """Return a flow whose network is the exact posterior (prediction type "probs")."""
        schedule = DiscreteBFNSchedule(self.num_classes, beta_1)
        return DiscreteBFN(self.model(), schedule, "probs")

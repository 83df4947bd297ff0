"""Denoising diffusion of token sequences, with entries that are held fixed, and guidance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

__all__ = ["GaussianDiffusion", "alpha_bars", "hold"]

Schedule = Literal["cosine", "vp"]
Condition = tuple[Tensor, Tensor]


def alpha_bars(n_steps: int, schedule: Schedule = "cosine") -> Tensor:
    """Return the share of signal after 0, 1, ..., n steps, in double precision.

    Parameters
    ----------
    n_steps : int
    schedule : {"cosine", "vp"}
        Cosine with offset 0.008 and steps clipped at 0.999 (conductor), or the variance-preserving
        schedule with rates from 0.1 to 10 (performer).

    Returns
    -------
    torch.Tensor, shape (n_steps + 1,)
        Starts at one.

    Examples
    --------
    >>> beta = 1 - alpha_bars(5, "vp")[1:] / alpha_bars(5, "vp")[:-1]
    >>> [round(float(b), 5) for b in beta[[0, -1]]]
    [0.19587, 0.83503]
    """
    if n_steps < 1:
        raise ValueError(f"n_steps must be at least 1, got {n_steps}.")
    t = torch.arange(n_steps + 1, dtype=torch.float64)
    if schedule == "cosine":
        f = torch.cos((t / n_steps + 0.008) / 1.008 * torch.pi / 2) ** 2
        beta = (1 - f[1:] / f[:-1]).clamp(max=0.999)
    elif schedule == "vp":
        low, high = 0.1, 10.0
        beta = 1 - torch.exp(-low / n_steps - (high - low) * (2 * t[1:] - 1) / (2 * n_steps**2))
    else:
        raise ValueError(f"schedule must be 'cosine' or 'vp', got {schedule!r}.")
    return torch.cat([torch.ones(1, dtype=torch.float64), (1 - beta).cumprod(0)])


def hold(x: Tensor, condition: Condition | None) -> Tensor:
    """Overwrite the entries that a condition fixes.

    Parameters
    ----------
    x : torch.Tensor, shape (n, tokens, dim)
    condition : (mask, values) or None
        ``mask`` of shape (tokens, dim) is true where ``values`` (n, tokens, dim) are known.

    Returns
    -------
    torch.Tensor

    Examples
    --------
    >>> mask = torch.tensor([[True], [False]])
    >>> hold(torch.zeros(1, 2, 1), (mask, torch.ones(1, 2, 1))).flatten().tolist()
    [1.0, 0.0]
    """
    return x if condition is None else torch.where(condition[0], condition[1], x)


class GaussianDiffusion(nn.Module):
    r"""A denoiser with its schedule: training loss and ancestral sampling.

    With :math:`\bar\alpha_m` from :func:`alpha_bars`, the noisy sequence is
    :math:`x^m = \sqrt{\bar\alpha_m}\, x^0 + \sqrt{1-\bar\alpha_m}\, \varepsilon`.

    Parameters
    ----------
    model : callable
        ``model(x, m, context)`` returns an array of the shape of ``x``.
    n_steps : int
    schedule : {"cosine", "vp"}
    prediction : {"x0", "eps"}
        What the model returns: the clean sequence or the noise.
    clip : float, optional
        Largest absolute value of predicted clean sequences.

    Examples
    --------
    The best guess for data that are always one is one, and sampling returns it:

    >>> diffusion = GaussianDiffusion(lambda x, m, c: torch.ones_like(x), 8)
    >>> sample = diffusion.sample((2, 3, 1), torch.Generator().manual_seed(0))
    >>> bool((sample - 1).abs().max() < 1e-6)
    True
    """

    alpha_bar: Tensor
    signal: Tensor
    spread: Tensor

    def __init__(
        self,
        model: Callable[..., Tensor],
        n_steps: int,
        schedule: Schedule = "cosine",
        prediction: Literal["x0", "eps"] = "x0",
        clip: float | None = None,
    ) -> None:
        super().__init__()
        if prediction not in ("x0", "eps"):
            raise ValueError(f"prediction must be 'x0' or 'eps', got {prediction!r}.")
        self.model, self.n_steps, self.prediction, self.clip = model, n_steps, prediction, clip
        bars = alpha_bars(n_steps, schedule)
        self.register_buffer("alpha_bar", bars, persistent=False)
        self.register_buffer("signal", bars.sqrt().float(), persistent=False)
        self.register_buffer("spread", (1 - bars).sqrt().float(), persistent=False)
        before, beta = bars[:-1], 1 - bars[1:] / bars[:-1]
        left = 1 - bars[1:]
        self._steps = list(  # plain numbers: the chain is many small operations
            zip(
                (beta * before.sqrt() / left).tolist(),
                ((1 - before) * (1 - beta).sqrt() / left).tolist(),
                (beta * (1 - before) / left).tolist(),
                bars[1:].sqrt().tolist(),
                left.sqrt().tolist(),
                strict=True,
            )
        )

    def add_noise(self, x: Tensor, m: Tensor, noise: Tensor) -> Tensor:
        """Return :math:`x^m`, Eq. (1), for step numbers ``m`` (n,)."""
        return self.signal[m][:, None, None] * x + self.spread[m][:, None, None] * noise

    def predict_x0(self, x: Tensor, m: int, context: Tensor | None = None) -> Tensor:
        """Return the guess of the clean sequence from one with ``m`` steps of noise."""
        out = self.model(x, torch.full((len(x),), m, device=x.device), context)
        if self.prediction == "eps":
            *_, signal, spread = self._steps[m - 1]
            out = torch.sub(x, out, alpha=spread) / signal
        return out if self.clip is None else out.clamp(-self.clip, self.clip)

    def loss(
        self,
        x: Tensor,
        generator: torch.Generator,
        condition: Condition | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        r"""Return the mean squared error of a denoising step, second half of Eq. (1).

        Fixed entries are overwritten before the network sees them and in its answer, so they carry
        no gradient.
        """
        m = torch.randint(1, self.n_steps + 1, (len(x),), generator=generator, device=x.device)
        noise = torch.randn(x.shape, generator=generator, device=x.device)
        noisy = hold(self.add_noise(x, m, noise), condition)
        out = self.model(noisy, m, context)
        if self.prediction == "eps":
            return ((out - noise) ** 2).mean()
        return ((hold(out, condition) - x) ** 2).mean()

    def posterior(self, x: Tensor, guess: Tensor, m: int) -> tuple[Tensor, float]:
        r"""Return mean and variance of :math:`x^{m-1}` given :math:`x^m` and the clean guess."""
        c1, c2, variance, *_ = self._steps[m - 1]
        return torch.add(c1 * guess, x, alpha=c2), variance

    def sample(
        self,
        shape: tuple[int, int, int],
        generator: torch.Generator,
        condition: Condition | None = None,
        context: Tensor | None = None,
        guide: Callable[[Tensor, Tensor], Tensor] | None = None,
        guide_scale: float = 1.0,
        n_guide_steps: int = 1,
        stop_guide: int = 0,
        chain: list[Tensor] | None = None,
    ) -> Tensor:
        r"""Draw sequences by the reverse chain, from step ``n_steps`` down to 0.

        Parameters
        ----------
        shape : (n, tokens, dim)
        generator : torch.Generator
        condition : (mask, values), optional
            Entries held fixed in every step, see :func:`hold`.
        context : torch.Tensor, optional
            Passed to the model.
        guide : callable, optional
            ``guide(x, m)`` returns a value (n,); before each step with ``m > stop_guide`` the
            sequence moves by ``guide_scale`` times the step's variance times the gradient,
            ``n_guide_steps`` times.
        chain : list, optional
            Gets the sequence at every step, the noise first.

        Returns
        -------
        torch.Tensor
            Gradients flow through it unless they are switched off outside.
        """
        device = self.alpha_bar.device
        x = hold(torch.randn(shape, generator=generator, device=device), condition)
        if chain is not None:
            chain.append(x)
        for m in range(self.n_steps, 0, -1):
            variance = self._steps[m - 1][2]
            if guide is not None and m > stop_guide:
                step = torch.full((shape[0],), m, device=device)
                for _ in range(n_guide_steps):
                    x = hold(x + guide_scale * variance * _slope(guide, x, step), condition)
            mean, _ = self.posterior(x, self.predict_x0(x, m, context), m)
            if m > 1:
                noise = torch.randn(shape, generator=generator, device=device)
                mean = torch.add(mean, noise, alpha=variance**0.5)
            x = hold(mean, condition)
            if chain is not None:
                chain.append(x)
        return x


def _slope(guide: Callable[[Tensor, Tensor], Tensor], x: Tensor, step: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(guide(x, step).sum(), x)[0]

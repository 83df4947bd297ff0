"""Two small networks that train on a laptop, and the training loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

__all__ = ["ImageNet", "TextNet", "fit"]

Flow = Any


def time_features(time: Tensor, count: int) -> Tensor:
    """Sines and cosines of a time in [0, 1], shape (B, count)."""
    frequency = torch.exp(torch.linspace(0, math.log(1000), count // 2, device=time.device))
    angle = time.to(frequency)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], 1)


class Block(nn.Module):
    """A residual block of two convolutions whose features are scaled and shifted by the time."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(1, width)
        self.film = nn.Linear(times, 2 * width)
        nn.init.zeros_(self.second.weight)

    def forward(self, h: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.film(time)[:, :, None, None].chunk(2, 1)
        inner = F.silu(self.norm(self.first(F.silu(h))) * (1 + scale) + shift)
        return h + self.second(inner)


class ImageNet(nn.Module):
    """A small U-shaped convolutional network for images of 28 x 28 pixels.

    It works mostly at 7 x 7 positions, so that a call costs little on a CPU. The belief mean is
    scaled to a sample of the variance-preserving diffusion, and the inner network predicts the
    velocity ``v``, for which the loss has the same weight at all times:
    ``eps = sqrt(1 - gamma) x_vp + sqrt(gamma) v``.

    Parameters
    ----------
    width : int, default 48
    blocks : int, default 5
    sigma_1 : float
        Of the schedule that the network is for.

    Examples
    --------
    >>> ImageNet(16, 1)(torch.zeros(2, 1, 28, 28), torch.zeros(2)).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(self, width: int = 48, blocks: int = 5, sigma_1: float = 1e-3**0.5) -> None:
        super().__init__()
        self.settings = {"width": width, "blocks": blocks, "sigma_1": sigma_1}
        thin = width // 4
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU())
        self.enter = nn.Conv2d(1, thin, 4, stride=2, padding=1)
        self.quarter = nn.Conv2d(thin, width, 4, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(width, width) for _ in range(blocks))
        self.up = nn.Conv2d(width, 4 * thin, 1)
        self.join = nn.Conv2d(2 * thin, thin, 3, padding=1)
        self.out = nn.Conv2d(thin, 4, 3, padding=1)
        self.gain = nn.Linear(width, 1)
        for last in (self.out, self.gain):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, mu: Tensor, s: Tensor) -> Tensor:
        """Predict the noise in ``mu``, shapes (B, 1, 28, 28) and (B,)."""
        gamma = -torch.expm1(2 * s * math.log(self.settings["sigma_1"]))[:, None, None, None]
        x = mu / gamma.clamp(min=1e-8).sqrt()
        time = self.time(time_features(s, 32))
        fine = self.enter(x)
        h = self.quarter(F.silu(fine))
        for block in self.blocks:
            h = block(h, time)
        h = F.pixel_shuffle(self.up(F.silu(h)), 2)
        h = self.join(F.silu(torch.cat([h, fine], 1)))
        velocity = F.pixel_shuffle(self.out(F.silu(h)), 2) + self.gain(time)[:, :, None, None] * x
        return (1 - gamma).sqrt() * x + gamma.sqrt() * velocity


class TextNet(nn.Module):
    """A residual network of dilated convolutions over characters.

    Parameters
    ----------
    classes : int, default 27
    width : int, default 104
    dilations : sequence of int

    Examples
    --------
    >>> TextNet(27, 16)(torch.full((2, 64, 27), 1 / 27), torch.zeros(2)).shape
    torch.Size([2, 64, 27])
    """

    def __init__(
        self,
        classes: int = 27,
        width: int = 104,
        dilations: tuple[int, ...] = (1, 2, 4, 1, 2, 4),
    ) -> None:
        super().__init__()
        self.settings = {"classes": classes, "width": width, "dilations": list(dilations)}
        self.enter = nn.Linear(classes, width)
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU())
        self.film = nn.ModuleList(nn.Linear(width, 2 * width) for _ in dilations)
        self.norm = nn.ModuleList(nn.GroupNorm(1, width) for _ in dilations)
        self.conv = nn.ModuleList(
            nn.Conv1d(width, width, 5, padding=2 * d, dilation=d) for d in dilations
        )
        self.out = nn.Linear(width, classes)

    def forward(self, theta: Tensor, s: Tensor) -> Tensor:
        """Predict logits from beliefs, shapes (B, D, K) and (B,)."""
        time = self.time(time_features(s, 32))
        classes = theta.shape[-1]
        h = self.enter((theta * classes - 1) / math.sqrt(classes)).mT
        for film, norm, conv in zip(self.film, self.norm, self.conv, strict=True):
            scale, shift = film(time)[:, :, None].chunk(2, 1)
            h = h + F.gelu(conv(norm(h) * (1 + scale) + shift))
        return self.out(h.mT)


def fit(
    bfn: Flow,
    batches: Callable[[torch.Generator], Tensor],
    *,
    steps: int,
    lr: float = 2e-3,
    weight_decay: float = 0.01,
    clip: float = 5.0,
    ema: float = 0.999,
    times: Callable[[int, torch.Generator], Tensor] | None = None,
    generator: torch.Generator,
) -> tuple[Flow, list[float]]:
    """Train a flow with AdamW, stratified times and an average of the weights.

    Parameters
    ----------
    bfn : torch.nn.Module
        A flow, or anything with ``loss(x, generator=)``. It is not changed; a copy is trained.
    batches : callable
        ``batches(generator)`` draws a batch of data.
    steps : int
    lr : float
        Peak rate; it rises for 5 % of the steps and then falls with a cosine to a tenth.
    weight_decay, clip, ema : float
        Of AdamW; largest gradient norm; decay of the average of the weights.
    times : callable, optional
        ``times(count, generator)`` draws one BFN time ``s`` for each example. The default is
        stratified and uniform, as the loss demands; any other density reweights the loss.
    generator : torch.Generator

    Returns
    -------
    flow : same type as ``bfn``
        With averaged weights, in evaluation mode.
    losses : list of float
        Training loss of every step, nats per dimension.

    Raises
    ------
    ValueError
        If a setting is out of range or the loss becomes infinite or NaN.
    """
    if steps < 1 or not 0 <= ema < 1 or lr <= 0 or clip <= 0:
        raise ValueError("fit needs steps >= 1, 0 <= ema < 1, lr > 0 and clip > 0.")
    flow, average = copy.deepcopy(bfn).train(), copy.deepcopy(bfn).eval()
    optimizer = torch.optim.AdamW(
        flow.parameters(), lr, betas=(0.9, 0.99), weight_decay=weight_decay
    )
    losses: list[float] = []
    for step in tqdm(range(steps), desc="fit", leave=False, disable=None):
        rise = min(1.0, (step + 1) / (0.05 * steps))
        fall = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = lr * min(rise, fall)
        x = batches(generator)
        moments = {} if times is None else {"s": times(len(x), generator)}
        loss = flow.loss(x, generator=generator, **moments)
        if not torch.isfinite(loss):
            raise ValueError(f"The loss became {loss.item()} at step {step}: lower lr or clip.")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
        decay = min(ema, (1 + step) / (10 + step))
        with torch.no_grad():
            for old, new in zip(average.parameters(), flow.parameters(), strict=True):
                old.lerp_(new, 1 - decay)
    return average.requires_grad_(False), losses

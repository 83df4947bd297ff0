"""Networks: denoisers of token sequences, and an ensemble of critics as one batched product."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["StackedMLP", "TemporalUnet", "TokenMLP", "blend_", "seeded", "sinusoidal"]


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a module from a seed and leave the global random state as it was.

    Parameters
    ----------
    make : callable
        Builds the module with PyTorch's own initialisation.
    seed : int

    Returns
    -------
    torch.nn.Module

    Examples
    --------
    >>> a, b = (seeded(lambda: nn.Linear(2, 1), 0) for _ in range(2))
    >>> torch.equal(a.weight, b.weight)
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(seed))
        return make()


def blend_(targets: Iterable[Tensor], sources: Iterable[Tensor], weight: float) -> None:
    """Move each target towards its source in place, ``t <- t + weight (s - t)``.

    Used for target networks and for exponential moving averages.

    Examples
    --------
    >>> t = [torch.zeros(1)]
    >>> blend_(t, [torch.ones(1)], 0.25)
    >>> t[0].item()
    0.25
    """
    with torch.no_grad():
        torch._foreach_lerp_(list(targets), [s.detach() for s in sources], weight)


def sinusoidal(m: Tensor, dim: int = 16) -> Tensor:
    """Embed step numbers by sines and cosines of falling frequency, shape (n, dim).

    Examples
    --------
    >>> sinusoidal(torch.tensor([0.0]), 4).tolist()
    [[0.0, 0.0, 1.0, 1.0]]
    """
    half = dim // 2
    rates = torch.exp(-math.log(10_000.0) / max(half - 1, 1) * torch.arange(half, device=m.device))
    angle = m.to(torch.float32)[:, None] * rates
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class TokenMLP(nn.Module):
    """A residual network over all tokens at once, for short sequences (or a single action).

    Parameters
    ----------
    n_tokens, dim : int
        Shape of a sequence.
    context : int, default 0
        Numbers that condition it, for example a state and a goal.
    width, depth : int
        Hidden units, and residual blocks of two layers each.
    waves : int, default 0
        Sines and cosines of each entry that are fed in beside it, at frequencies 1/2, 1, 2, ...
        per unit: they let a small network see walls that the raw coordinates blur.

    Examples
    --------
    >>> net = TokenMLP(11, 2, width=32, waves=3)
    >>> net(torch.zeros(5, 11, 2), torch.ones(5)).shape
    torch.Size([5, 11, 2])
    """

    rates: Tensor
    steps: Tensor

    def __init__(
        self,
        n_tokens: int,
        dim: int,
        context: int = 0,
        width: int = 256,
        depth: int = 3,
        waves: int = 0,
    ) -> None:
        super().__init__()
        self.shape = (n_tokens, dim)
        rates = torch.pi * 2.0 ** torch.arange(waves)
        self.register_buffer("rates", rates, persistent=False)
        self.register_buffer("steps", sinusoidal(torch.arange(1025)), persistent=False)
        self.inward = nn.Linear(n_tokens * dim * (1 + 2 * waves) + context + 16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)
            )
            for _ in range(depth)
        )
        self.outward = nn.Linear(width, n_tokens * dim)

    def forward(self, x: Tensor, m: Tensor, context: Tensor | None = None) -> Tensor:
        """Return an array like ``x`` (n, tokens, dim) for step numbers ``m`` (n,) up to 1024."""
        flat = x.flatten(1)
        parts = [flat, self.steps[m.long()]]
        if len(self.rates):
            angle = (flat[:, :, None] * self.rates).flatten(1)
            parts += [angle.sin(), angle.cos()]
        h = self.inward(torch.cat(parts if context is None else [*parts, context], dim=1))
        for block in self.blocks:
            h = h + block(h)
        return self.outward(F.silu(h)).view(-1, *self.shape)


class _ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, step_dim: int, kernel: int) -> None:
        super().__init__()
        groups = math.gcd(8, outputs)
        self.first = nn.Sequential(
            nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2), nn.GroupNorm(groups, outputs)
        )
        self.second = nn.Sequential(
            nn.Conv1d(outputs, outputs, kernel, padding=kernel // 2), nn.GroupNorm(groups, outputs)
        )
        self.step = nn.Linear(step_dim, outputs)
        self.skip = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        h = F.mish(self.first(x)) + self.step(F.mish(step))[:, :, None]
        return F.mish(self.second(h)) + self.skip(x)


class TemporalUnet(nn.Module):
    """The convolutional U-Net over time of diffusion planners, for long sequences.

    Parameters
    ----------
    n_tokens, dim : int
        Shape of a sequence; its length is padded inside to a multiple of the downsampling.
    width : int, default 32
    mults : sequence of int, default (1, 2, 4)
        Widths of the levels in units of ``width``.
    kernel : int, default 5

    Examples
    --------
    >>> net = TemporalUnet(10, 2, width=8)
    >>> net(torch.zeros(3, 10, 2), torch.ones(3)).shape
    torch.Size([3, 10, 2])
    """

    def __init__(
        self,
        n_tokens: int,
        dim: int,
        width: int = 32,
        mults: Sequence[int] = (1, 2, 4),
        kernel: int = 5,
    ) -> None:
        super().__init__()
        sizes = [width * mult for mult in mults]
        self.multiple, self.width = 2 ** (len(sizes) - 1), width
        self.embed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width)
        )
        pairs = list(zip([dim, *sizes[:-1]], sizes, strict=True))
        self.down = nn.ModuleList(_ResidualBlock(a, b, width, kernel) for a, b in pairs)
        self.shrink = nn.ModuleList(nn.Conv1d(s, s, 3, 2, 1) for s in sizes[:-1])
        self.middle = _ResidualBlock(sizes[-1], sizes[-1], width, kernel)
        ups = list(zip(sizes[:0:-1], sizes[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose1d(a, b, 4, 2, 1) for a, b in ups)
        self.up = nn.ModuleList(_ResidualBlock(2 * b, b, width, kernel) for _, b in ups)
        self.outward = nn.Conv1d(sizes[0], dim, 1)

    def forward(self, x: Tensor, m: Tensor, context: Tensor | None = None) -> Tensor:
        """Return an array of the shape of ``x`` (n, tokens, dim) for step numbers ``m`` (n,)."""
        length = x.shape[1]
        extra = -length % self.multiple
        h = x.transpose(1, 2)
        h = torch.cat([h, h[..., -1:].expand(-1, -1, extra)], dim=2) if extra else h
        step, kept = self.embed(sinusoidal(m, self.width)), []
        for i, block in enumerate(self.down):
            h = block(h, step)
            if i < len(self.shrink):
                kept.append(h)
                h = self.shrink[i](h)
        h = self.middle(h, step)
        for grow, block in zip(self.grow, self.up, strict=True):
            h = block(torch.cat([grow(h), kept.pop()], dim=1), step)
        return self.outward(h)[..., :length].transpose(1, 2)


class StackedMLP(nn.Module):
    """Several networks of one shape, evaluated together by batched matrix products.

    Parameters
    ----------
    members : int
    inputs : int
    width, depth : int
        Hidden layers with ReLU; each network has one output.

    Examples
    --------
    >>> StackedMLP(2, 3, 16)(torch.zeros(5, 3)).shape
    torch.Size([2, 5])
    """

    def __init__(self, members: int, inputs: int, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        sizes = [inputs] + depth * [width] + [1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for a, b in pairwise(sizes):
            bound = a**-0.5
            self.weights.append(nn.Parameter(torch.empty(members, a, b).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(members, 1, b).uniform_(-bound, bound)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the values of all members, shape (members, n), for inputs (n, inputs)."""
        h = x.expand(self.weights[0].shape[0], *x.shape)
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = torch.baddbmm(bias, h, weight)
            h = F.relu(h) if i < last else h
        return h[..., 0]

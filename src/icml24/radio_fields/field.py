"""The network: where things are (density) and what they send (signal)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

__all__ = ["RadianceField", "fourier_features"]


def fourier_features(x: torch.Tensor, n: int) -> torch.Tensor:
    """Positional encoding ``[x, sin(2^m x), cos(2^m x)]``, ``m = 0 .. n-1``.

    There is no factor of pi, and metres are not rescaled, as in the paper's code.

    Parameters
    ----------
    x : torch.Tensor, shape (..., D)
    n : int
        Number of octaves; 0 leaves ``x`` as it is.

    Returns
    -------
    torch.Tensor, shape (..., D + 2 D n)

    Examples
    --------
    >>> fourier_features(torch.zeros(1, 2), 1).tolist()
    [[0.0, 0.0, 0.0, 0.0, 1.0, 1.0]]
    """
    if n == 0:
        return x
    angle = x[..., None, :] * (2.0 ** torch.arange(n).to(x))[:, None]
    waves = torch.stack([angle.sin(), angle.cos()], dim=-2)  # (..., n, 2, D)
    return torch.cat([x, waves.flatten(-3)], dim=-1)


class RadianceField(nn.Module):
    """Network from a place and a direction to density and complex signal.

    Parameters
    ----------
    dim : int, default 3
        Coordinates of a place.
    pos_freqs, dir_freqs : int
        Octaves of the encodings of place and direction.
    width, depth : int
        Trunk of ``depth`` ReLU layers.
    skip : int
        The encoded place is fed in again after this layer (counted from 0).
    density : {"relu", "softplus"}
        How the density is kept from becoming negative.

    Examples
    --------
    >>> field = RadianceField(dim=2, width=16, depth=3, skip=1)
    >>> sigma, signal = field(torch.zeros(5, 7, 2), torch.ones(5, 2))
    >>> tuple(sigma.shape), signal.dtype
    ((5, 7), torch.complex64)
    """

    def __init__(
        self,
        dim: int = 3,
        *,
        pos_freqs: int = 10,
        dir_freqs: int = 4,
        width: int = 128,
        depth: int = 6,
        skip: int = 4,
        density: Literal["relu", "softplus"] = "relu",
    ) -> None:
        super().__init__()
        if density not in ("relu", "softplus"):
            raise ValueError(f"density must be 'relu' or 'softplus', got {density!r}.")
        self.pos_freqs, self.dir_freqs = pos_freqs, dir_freqs
        self.skip, self.density = skip, density
        n_pos, n_dir = dim * (1 + 2 * pos_freqs), dim * (1 + 2 * dir_freqs)
        sizes = [n_pos] + [width] * depth
        sizes = [n + n_pos if i == skip + 1 else n for i, n in enumerate(sizes)]
        self.trunk = nn.ModuleList(nn.Linear(sizes[i], width) for i in range(depth))
        self.sigma = nn.Linear(sizes[depth], 1)
        nn.init.constant_(self.sigma.bias, 0.2)  # a density that starts at zero stays there
        self.feature = nn.Linear(sizes[depth], width)
        self.branch = nn.Linear(width, width // 2)
        self.direction = nn.Linear(n_dir, width // 2, bias=False)
        self.signal = nn.Linear(width // 2, 2)

    def forward(
        self, position: torch.Tensor, direction: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate the field at ``n`` places on each ray.

        Parameters
        ----------
        position : torch.Tensor, shape (rays, n, D)
        direction : torch.Tensor, shape (rays, D)
            Encoded once for each ray.

        Returns
        -------
        sigma : torch.Tensor, shape (rays, n)
        signal : torch.Tensor of complex, shape (rays, n)
            ``tanh(u) + j tanh(v)``.
        """
        encoded = fourier_features(position, self.pos_freqs)
        x = encoded
        for i, layer in enumerate(self.trunk):
            x = torch.relu(layer(x))
            if i == self.skip:
                x = torch.cat([encoded, x], dim=-1)
        raw = self.sigma(x)[..., 0]
        sigma = torch.relu(raw) if self.density == "relu" else nn.functional.softplus(raw - 1)
        look = self.direction(fourier_features(direction, self.dir_freqs))
        y = torch.relu(self.branch(self.feature(x)) + look[:, None])
        return sigma, torch.view_as_complex(torch.tanh(self.signal(y)))

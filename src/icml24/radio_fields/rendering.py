r"""Rendering a radio field along rays: eq. (2), stratified and importance samples.

A ray starts at the receiver ``o`` and runs towards a direction of arrival ``w``. At the samples
``r_i = o + z_i w`` a field has the density :math:`\sigma_i` and emits the complex signal
:math:`S_i`. With :math:`\delta_i = z_{i+1} - z_i`,
:math:`\alpha_i = 1 - e^{-\sigma_i \delta_i}` and
:math:`T_i = \prod_{j<i} (1 - \alpha_j)`,

.. math:: h = \sum_i \frac{\lambda}{4\pi z_i}\, e^{-j k z_i}\, T_i\, \alpha_i\, S_i .
"""

from __future__ import annotations

import math

import torch

from icml24.radio_fields.channel import wavelength

__all__ = ["importance_samples", "render_rays", "stratified_samples"]


def stratified_samples(
    n_rays: int,
    n_samples: int,
    near: float,
    far: float,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Distances along rays: one in each of ``n_samples`` equal cells of [near, far].

    Parameters
    ----------
    n_rays, n_samples : int
        Shape of the result.
    near, far : float
        Metres, ``0 < near < far``.
    generator : torch.Generator, optional
        Draws a place in each cell; without one, the middles are taken.

    Returns
    -------
    torch.Tensor, shape (n_rays, n_samples)

    Examples
    --------
    >>> stratified_samples(1, 4, 1.0, 3.0).tolist()
    [[1.25, 1.75, 2.25, 2.75]]
    """
    if not 0 < near < far:
        raise ValueError(f"The range needs 0 < near < far, got near={near}, far={far}.")
    if n_samples < 2:
        raise ValueError(f"n_samples must be at least 2, got {n_samples}.")
    if generator is None:
        place = torch.full((n_rays, n_samples), 0.5)
    else:
        place = torch.rand((n_rays, n_samples), generator=generator)
    return near + (torch.arange(n_samples) + place) * ((far - near) / n_samples)


def importance_samples(
    z: torch.Tensor,
    weights: torch.Tensor,
    n: int,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    r"""Draw further distances where the weights of a coarse rendering are large.

    The weights (with a small floor) are the masses of cells whose edges lie midway between the
    coarse samples; new samples follow from the inverse of the cumulative distribution.

    Parameters
    ----------
    z, weights : torch.Tensor, shape (rays, m)
        Coarse distances and their weights :math:`T_i \alpha_i`.
    n : int
        Samples to draw on each ray.
    generator : torch.Generator, optional
        Without one, equally spaced quantiles are taken.

    Returns
    -------
    torch.Tensor, shape (rays, n)
        Sorted, without gradient.

    Examples
    --------
    >>> z = torch.tensor([[1.0, 2.0, 3.0]])
    >>> importance_samples(z, torch.tensor([[0.0, 1.0, 0.0]]), 3).round(decimals=2).tolist()[0][1]
    2.0
    """
    z, mass = z.detach(), weights.detach() + 1e-5
    middle = (z[:, 1:] + z[:, :-1]) / 2
    edges = torch.cat([z[:, :1], middle, z[:, -1:]], dim=1).contiguous()
    cdf = torch.cumsum(mass / mass.sum(dim=1, keepdim=True), dim=1)
    cdf = torch.cat([torch.zeros_like(cdf[:, :1]), cdf], dim=1).contiguous()
    if generator is None:
        quantile = ((torch.arange(n) + 0.5) / n).to(z).expand(len(z), n).contiguous()
    else:
        quantile = torch.rand((len(z), n), generator=generator).to(z).sort(dim=1).values
    cell = torch.searchsorted(cdf, quantile, right=True).clamp(1, edges.shape[1] - 1)
    low, high = cdf.gather(1, cell - 1), cdf.gather(1, cell)
    start, end = edges.gather(1, cell - 1), edges.gather(1, cell)
    part = ((quantile - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
    return start + part * (end - start)


def render_rays(
    sigma: torch.Tensor,
    signal: torch.Tensor,
    z: torch.Tensor,
    frequency: float,
    *,
    path_loss: bool = True,
    phase: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Sum a field along rays, eq. (2).

    The last sample takes the spacing of the one before it.

    Parameters
    ----------
    sigma : torch.Tensor, shape (rays, n)
        Density, not negative, in 1/m.
    signal : torch.Tensor of complex, shape (rays, n)
        Emitted signal.
    z : torch.Tensor, shape (rays, n)
        Increasing distances from the receiver, metres.
    frequency : float
        Hertz.
    path_loss, phase : bool, default True
        Switch off the amplitude (which is then the constant of one metre) or the phase of
        propagation, for ablations.

    Returns
    -------
    h : torch.Tensor of complex, shape (rays,)
    weights : torch.Tensor, shape (rays, n)
        :math:`T_i \alpha_i`, which sum to at most one.

    Examples
    --------
    One opaque point at 2 m is a transmitter there:

    >>> z = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    >>> sigma = torch.tensor([[0.0, 50.0, 0.0]], dtype=torch.float64)
    >>> h, _ = render_rays(sigma, torch.ones(1, 3, dtype=torch.complex128), z, 928e6)
    >>> round(h.abs().item() * 2 / wavelength(928e6) * 4 * math.pi, 6)
    1.0
    """
    lam = wavelength(frequency)
    gap = z[:, 1:] - z[:, :-1]
    optical = sigma * torch.cat([gap, gap[:, -1:]], dim=1)
    before = torch.cumsum(optical, dim=1) - optical
    weights = torch.exp(-before) * -torch.expm1(-optical)
    amplitude = weights * (lam / (4 * math.pi))
    if path_loss:
        amplitude = amplitude / z
    real, imag = signal.real, signal.imag
    if phase:
        turn = torch.remainder(z.double() / lam, 1.0).to(z.dtype) * (2 * math.pi)
        cos, sin = torch.cos(turn), torch.sin(turn)
        real, imag = real * cos + imag * sin, imag * cos - real * sin
    h = torch.complex((amplitude * real).sum(dim=1), (amplitude * imag).sum(dim=1))
    return h, weights

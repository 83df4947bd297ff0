"""NeWRF as an estimator: rays, coarse and fine networks, training, prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from icml24.radio_fields.channel import Array, check_frequency, check_positions, wavelength
from icml24.radio_fields.doa_search import DoASearch
from icml24.radio_fields.estimator import ChannelPredictor
from icml24.radio_fields.field import RadianceField
from icml24.radio_fields.rendering import importance_samples, render_rays, stratified_samples

__all__ = ["NeWRF", "perturb_directions", "random_directions", "uniform_directions"]


def random_directions(n: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Draw unit vectors uniformly on the circle (``dim=2``) or the sphere (``dim=3``).

    Examples
    --------
    >>> w = random_directions(100, 3, torch.Generator().manual_seed(0))
    >>> bool(torch.allclose(w.norm(dim=1), torch.ones(100)))
    True
    """
    w = torch.randn((n, dim), generator=generator)
    return w / w.norm(dim=1, keepdim=True)


def uniform_directions(n: int, dim: int) -> torch.Tensor:
    """Return ``n`` fixed directions that cover the circle or (Fibonacci) the sphere evenly.

    Examples
    --------
    >>> (uniform_directions(4, 2) * 2**0.5).round().tolist()
    [[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]]
    """
    i = torch.arange(n) + 0.5
    if dim == 2:
        angle = 2 * math.pi * i / n
        return torch.stack([angle.cos(), angle.sin()], dim=1)
    z = 1 - 2 * i / n
    angle, rho = math.pi * (3 - math.sqrt(5)) * i, torch.sqrt(1 - z**2)
    return torch.stack([rho * angle.cos(), rho * angle.sin(), z], dim=1)


def perturb_directions(w: torch.Tensor, degrees: float, generator: torch.Generator) -> torch.Tensor:
    """Turn directions by uniform errors of up to ``degrees`` in azimuth (and elevation).

    Parameters
    ----------
    w : torch.Tensor, shape (n, D)
        Unit vectors.
    degrees : float
    generator : torch.Generator

    Returns
    -------
    torch.Tensor, shape (n, D)
    """
    if degrees == 0:
        return w
    turn = (2 * torch.rand((len(w), 2), generator=generator).to(w) - 1) * math.radians(degrees)
    azimuth = torch.atan2(w[:, 1], w[:, 0]) + turn[:, 0]
    flat = torch.stack([azimuth.cos(), azimuth.sin()], dim=1)
    if w.shape[1] == 2:
        return flat
    elevation = torch.asin(w[:, 2].clamp(-1, 1)) + turn[:, 1]
    return torch.cat([elevation.cos()[:, None] * flat, elevation.sin()[:, None]], dim=1)


@dataclass
class _Run:
    """One initialisation: its networks, optimizer, schedule and source of randomness."""

    nets: torch.nn.ModuleList
    optimizer: torch.optim.Optimizer
    schedule: Any
    generator: torch.Generator
    losses: list[float]


class NeWRF(ChannelPredictor):
    """Neural radiation field for channel prediction: eq. (2) and (3).

    The defaults are the paper's settings for a room at 2.4 GHz (hours on a GPU);
    :meth:`compact` gives settings for a laptop.

    Parameters
    ----------
    frequency : float
        Hertz.
    near, far : float
        Range of the samples on a ray, metres; ``near`` defaults to an eighth of a wavelength.
    n_samples, n_importance : int
        Stratified samples of the coarse network, and further ones for the fine network, which
        renders the union of both. ``n_importance=0`` leaves the fine network out.
    pos_freqs, dir_freqs, width, depth, skip, density
        See :class:`~icml24.radio_fields.field.RadianceField`.
    directions : {"doa", "uniform"}
        Cast rays where energy arrives, or (as NeRF2 does) evenly in ``n_directions`` directions.
    extra_rays : int
        Random rays for each receiver and step which should learn to carry nothing.
    extra_rays_mode : {"sum", "penalty"}
        Add what they carry to the prediction (the paper), or penalise its power.
    doa_noise_deg : float
        Uniform error added to both angles of each direction, drawn anew in each step.
    phase, path_loss : bool
        Ablations of eq. (2).
    batch_size, max_steps, lr : int, int, float
        Receivers in a step, number of steps, Adam's rate.
    schedule : {"plateau", "onecycle"}
        The paper's reduction on a plateau (checked every 1000 steps), or one cycle.
    coarse_weight : float
        Weight of the coarse network's NMSE in the loss; the fine one gets the rest.
    n_restarts, screen_steps, validation_fraction : int, int, float
        Several initialisations train for ``screen_steps`` without a held-out share; the best on
        that share trains on with all the data.
    refine : int
        Prediction uses so many times more samples on each ray, at the middles of their cells.
    search : DoASearch, optional
        Finds directions at new places.
    random_state : int
    device : str

    Attributes
    ----------
    nets_ : torch.nn.ModuleList
        Coarse and (if any) fine network.
    search_ : DoASearch or None
    losses_ : list of float
        Training loss of each step of the chosen run.
    validation_snr_ : list of float
        One for each restart (decibel); empty without restarts.

    Examples
    --------
    >>> from icml24.radio_fields import ShoeboxRoom
    >>> room = ShoeboxRoom((4, 3), (1.0, 0.8), frequency=928e6, max_order=0)
    >>> rx = room.sample_receivers(40, seed=0)
    >>> model = NeWRF.compact(928e6, far=5.0, max_steps=20, n_restarts=1)
    >>> model.fit(rx, room.channel(rx), room.trace(rx).doa).predict(rx[:3]).shape
    (3,)
    """

    def __init__(
        self,
        frequency: float,
        *,
        near: float | None = None,
        far: float = 9.0,
        n_samples: int = 128,
        n_importance: int = 128,
        pos_freqs: int = 10,
        dir_freqs: int = 4,
        width: int = 128,
        depth: int = 6,
        skip: int = 4,
        density: Literal["relu", "softplus"] = "relu",
        directions: Literal["doa", "uniform"] = "doa",
        n_directions: int = 36,
        extra_rays: int = 10,
        extra_rays_mode: Literal["sum", "penalty"] = "sum",
        doa_noise_deg: float = 0.1,
        phase: bool = True,
        path_loss: bool = True,
        batch_size: int = 32,
        max_steps: int = 100_000,
        lr: float = 5e-4,
        schedule: Literal["plateau", "onecycle"] = "plateau",
        coarse_weight: float = 0.1,
        n_restarts: int = 1,
        screen_steps: int = 200,
        validation_fraction: float = 0.1,
        refine: int = 1,
        search: DoASearch | None = None,
        random_state: int = 0,
        device: str = "cpu",
    ) -> None:
        self.frequency, self.near, self.far = frequency, near, far
        self.n_samples, self.n_importance = n_samples, n_importance
        self.pos_freqs, self.dir_freqs = pos_freqs, dir_freqs
        self.width, self.depth, self.skip, self.density = width, depth, skip, density
        self.directions, self.n_directions = directions, n_directions
        self.extra_rays, self.extra_rays_mode = extra_rays, extra_rays_mode
        self.doa_noise_deg, self.phase, self.path_loss = doa_noise_deg, phase, path_loss
        self.batch_size, self.max_steps, self.lr = batch_size, max_steps, lr
        self.schedule, self.coarse_weight = schedule, coarse_weight
        self.n_restarts, self.screen_steps = n_restarts, screen_steps
        self.validation_fraction, self.refine = validation_fraction, refine
        self.search, self.random_state, self.device = search, random_state, device

    @classmethod
    def compact(cls, frequency: float, *, far: float, **changes: Any) -> Self:
        """Return settings that train on one core in half a minute, for small rooms and long waves.

        A trunk of four layers of 64, 48 samples, no fine network and no extra rays, 1000 steps of
        one cycle, three restarts; any setting can be changed by name. For shorter waves or longer
        rays raise ``n_samples``: samples must be closer than half a wavelength.

        Parameters
        ----------
        frequency, far : float
            Hertz, metres.
        **changes
            Further settings of the class.

        Returns
        -------
        NeWRF
        """
        small: dict[str, Any] = {
            "near": max(0.05, wavelength(frequency) / 8),
            "n_samples": 48,
            "n_importance": 0,
            "pos_freqs": 8,
            "dir_freqs": 2,
            "width": 64,
            "depth": 4,
            "skip": 2,
            "extra_rays": 0,
            "extra_rays_mode": "penalty",
            "max_steps": 1000,
            "lr": 4e-3,
            "schedule": "onecycle",
            "n_restarts": 3,
            "screen_steps": 200,
            "refine": 4,
        }
        return cls(frequency, far=far, **{**small, **changes})

    @property
    def needs_doa(self) -> bool:  # type: ignore[override]
        """Whether fitting needs directions of arrival."""
        return self.directions == "doa"

    def _check(self) -> None:
        lam = wavelength(check_frequency(self.frequency))
        self.near_ = lam / 8 if self.near is None else float(self.near)
        if not 0 < self.near_ < self.far:
            raise ValueError(f"The range needs 0 < near < far, got {self.near_} and {self.far}.")
        choices = {
            "directions": ("doa", "uniform"),
            "extra_rays_mode": ("sum", "penalty"),
            "schedule": ("plateau", "onecycle"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}.")
        for name in ("n_samples", "batch_size", "max_steps", "n_restarts", "refine"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if (self.far - self.near_) / self.n_samples > lam / 2:
            raise ValueError(
                f"{self.n_samples} samples on {self.far - self.near_:.1f} m are further apart than "
                f"half a wavelength ({lam / 2:.3f} m): raise n_samples or lower far."
            )

    # rays ------------------------------------------------------------------------------------

    def _rays(
        self, x: torch.Tensor, doa: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Directions and owners (index into ``x``) of all rays of a batch."""
        if self.directions == "uniform":
            w = uniform_directions(self.n_directions, self.dim_).to(x)
            owner = torch.arange(len(x)).repeat_interleave(len(w))
            return w.repeat(len(x), 1), owner
        owner, slot = mask.nonzero(as_tuple=True)
        return doa[owner, slot], owner

    def _render(
        self,
        nets: torch.nn.ModuleList,
        origin: torch.Tensor,
        direction: torch.Tensor,
        generator: torch.Generator | None,
        refine: int = 1,
    ) -> list[torch.Tensor]:
        """Signal of each ray, from the coarse and (if any) the fine network."""
        options: dict[str, Any] = {"path_loss": self.path_loss, "phase": self.phase}
        z = stratified_samples(
            len(origin), refine * self.n_samples, self.near_, self.far, generator
        ).to(origin)
        outputs: list[torch.Tensor] = []
        weights = torch.ones_like(z)
        for i, net in enumerate(nets):
            if i == 1:
                new = importance_samples(z, weights, refine * self.n_importance, generator)
                z = torch.cat([z, new], dim=1).sort(dim=1).values
            places = origin[:, None] + z[..., None] * direction[:, None]
            sigma, signal = net(places, direction)
            h, weights = render_rays(sigma, signal, z, self.frequency, **options)
            outputs.append(h)
        return outputs

    # training ---------------------------------------------------------------------------------

    def _start(self, seed: int) -> _Run:
        settings: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("pos_freqs", "dir_freqs", "width", "depth", "skip", "density")
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            count = 2 if self.n_importance else 1
            fields = [RadianceField(self.dim_, **settings) for _ in range(count)]
        nets = torch.nn.ModuleList(fields).to(self.device)
        optimizer = torch.optim.Adam(nets.parameters(), lr=self.lr, fused=True)
        schedule: Any
        if self.schedule == "onecycle":
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, self.lr, total_steps=self.max_steps + 1
            )
        else:
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.9, patience=10, min_lr=1e-5
            )
        return _Run(nets, optimizer, schedule, torch.Generator().manual_seed(seed), [])

    def _loss(
        self,
        run: _Run,
        x: torch.Tensor,
        y: torch.Tensor,
        doa: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """NMSE of a batch of receivers, over coarse and fine network."""
        direction, owner = self._rays(x, doa, mask)
        if self.directions == "doa":
            direction = perturb_directions(direction, self.doa_noise_deg, run.generator)
        n = len(direction)
        if self.extra_rays:
            more = random_directions(self.extra_rays * len(x), self.dim_, run.generator)
            direction = torch.cat([direction, more.to(x)])
            owner = torch.cat([owner, torch.arange(len(x)).repeat_interleave(self.extra_rays)])
        owner = owner.to(x.device)
        power, loss = y.abs().pow(2).sum(), torch.zeros((), device=x.device)
        outputs = self._render(run.nets, x[owner], direction, run.generator)
        shares = [1.0] if len(outputs) == 1 else [self.coarse_weight, 1 - self.coarse_weight]
        for share, h in zip(shares, outputs, strict=True):
            kept = slice(None) if self.extra_rays_mode == "sum" else slice(n)
            predicted = torch.zeros_like(y).index_add(0, owner[kept], h[kept])
            loss = loss + share * (predicted - y).abs().pow(2).sum() / power
            if self.extra_rays and self.extra_rays_mode == "penalty":
                loss = loss + share * h[n:].abs().pow(2).sum() / power
        return loss

    def _train(self, run: _Run, data: tuple[torch.Tensor, ...], steps: int) -> None:
        n = len(data[0])
        for _ in range(steps):
            pick = torch.randperm(n, generator=run.generator)[: self.batch_size]
            loss = self._loss(run, *(part[pick.to(part.device)] for part in data))
            run.optimizer.zero_grad()
            loss.backward()
            run.optimizer.step()
            run.losses.append(loss.item())
            if self.schedule == "onecycle":
                run.schedule.step()
            elif len(run.losses) % 1000 == 0:
                run.schedule.step(float(np.mean(run.losses[-1000:])))

    def _fit(self, rx: Array, h: Array, doa: tuple[Array, Array] | None) -> None:
        self._check()
        directions, mask = doa or (np.zeros((len(rx), 1, self.dim_)), np.ones((len(rx), 1), bool))
        self.search_ = None
        if self.directions == "doa":
            self.search_ = clone(self.search) if self.search else DoASearch()
            try:
                self.search_.fit(rx, directions, mask)
            except ValueError:  # too few rays meet: prediction then needs measured directions
                self.search_ = None
        self.scale_ = float(np.sqrt((np.abs(h) ** 2).mean()))
        data = (
            torch.as_tensor(rx, dtype=torch.float32, device=self.device),
            torch.as_tensor(h, dtype=torch.complex64, device=self.device),
            torch.as_tensor(directions, dtype=torch.float32, device=self.device),
            torch.as_tensor(mask, device=self.device),
        )
        rng = np.random.default_rng(self.random_state)
        seeds = rng.integers(2**31, size=self.n_restarts)
        self.validation_snr_: list[float] = []
        runs = [self._start(int(seed)) for seed in seeds]
        if self.n_restarts > 1:
            order = torch.as_tensor(rng.permutation(len(rx)))
            held = order[: max(2, round(self.validation_fraction * len(rx)))]
            rest = tuple(part[order[len(held) :]] for part in data)
            steps = min(self.screen_steps, self.max_steps)
            for run in runs:
                self._train(run, rest, steps)
                self.nets_ = run.nets
                predicted = self._evaluate(*(data[i][held] for i in (0, 2, 3)))
                error = (predicted - data[1][held]).abs().pow(2).sum()
                ratio = float(data[1][held].abs().pow(2).sum() / error)
                self.validation_snr_.append(10 * math.log10(max(ratio, 1e-30)))
        best = runs[int(np.argmax(self.validation_snr_))] if self.validation_snr_ else runs[0]
        self._train(best, data, self.max_steps - len(best.losses))
        self.nets_, self.losses_ = best.nets, best.losses

    # prediction -------------------------------------------------------------------------------

    @torch.no_grad()
    def _evaluate(
        self, x: torch.Tensor, doa: torch.Tensor, mask: torch.Tensor, chunk: int = 512
    ) -> torch.Tensor:
        direction, owner = self._rays(x, doa, mask)
        h = torch.zeros(len(x), dtype=torch.complex64, device=x.device)
        for i in range(0, len(direction), chunk):
            part = owner[i : i + chunk].to(x.device)
            rays = self._render(self.nets_, x[part], direction[i : i + chunk], None, self.refine)
            h.index_add_(0, part, rays[-1])
        return h

    def _predict(self, rx: Array, doa: tuple[Array, Array] | None) -> Array:
        if doa is None and self.directions == "doa":
            if self.search_ is None:
                raise ValueError(
                    "The search found no virtual transmitters in the training directions, so "
                    "predict needs measured ones (doa=...)."
                )
            doa = self.search_.predict(rx)
        directions, mask = doa or (np.zeros((len(rx), 1, self.dim_)), np.ones((len(rx), 1), bool))
        h = self._evaluate(
            torch.as_tensor(rx, dtype=torch.float32, device=self.device),
            torch.as_tensor(directions, dtype=torch.float32, device=self.device),
            torch.as_tensor(mask, device=self.device),
        )
        return h.cpu().numpy().astype(np.complex128)

    def density_at(self, places: ArrayLike) -> Array:
        """Return the learnt density at given places.

        Parameters
        ----------
        places : array_like, shape (n, D)
            Metres; also outside the room, where the virtual transmitters are.

        Returns
        -------
        numpy.ndarray, shape (n,)
            In 1/m.
        """
        if not hasattr(self, "nets_"):
            raise NotFittedError("Call fit before looking at the density.")
        x = torch.as_tensor(check_positions(places, "places", self.dim_), dtype=torch.float32)
        x = x.to(self.device)
        with torch.no_grad():
            sigma, _ = self.nets_[-1](x[:, None], torch.zeros_like(x))
        return sigma[:, 0].cpu().numpy()

"""OxyGenerator, trained: from a dataset of sparse measurements to the field everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor
from tqdm import tqdm

from icml24.ocean_oxygen.base import FieldEstimator
from icml24.ocean_oxygen.graph import Layer, OceanGraph
from icml24.ocean_oxygen.problem import window_of
from icml24.ocean_oxygen.splits import area_of

__all__ = ["Reconstructor", "inner_updates"]

Array = np.ndarray[Any, Any]


def inner_updates(loss: Array, total: int) -> Array:
    """Deal gradient steps to areas by their validation loss: hard areas train more.

    The authors' rule, the integer part of ``total * softmax(scaled loss)`` with losses scaled to
    [0, 1]; so no area gets more than e times as many steps as another, and each at least one.

    Parameters
    ----------
    loss : numpy.ndarray, shape (areas,)
    total : int

    Returns
    -------
    numpy.ndarray of int

    Examples
    --------
    >>> inner_updates(np.array([1.0, 2.0, 3.0]), 100).tolist()
    [18, 30, 50]
    """
    span = loss.max() - loss.min()
    weight = np.exp((loss - loss.min()) / (span if span > 0 else 1.0))
    return np.maximum((total * weight / weight.sum()).astype(int), 1)


class Reconstructor(FieldEstimator):
    r"""The method of the chapter, with a switch for each of its parts.

    Parameters
    ----------
    variable : str, default "oxygen"
        Any tracer; anything but oxygen needs ``target="raw"``.
    target : {"aou", "raw"}
        Learn the apparent oxygen utilisation (solubility minus oxygen), or the variable itself.
    conv : {"zone", "area", "plain", "gcn", "sage", "gat", "none"}
        Message passing: weights from a continuous zone code, one set of weights for each of up to
        32 areas, the same without zones, three plain graph networks, or none.
    hidden_channels, num_layers : int
        See :class:`~icml24.ocean_oxygen.model.OxyGenerator`.
    window : int, default 5
        Years before and after, in which the node's own record is read; 0 drops the window.
    lstm_layers : int, default 2
        Of the LSTM that reads it.
    lam_chem : float, default 0.0
        Weight λ of the chemistry-informed regulariser, in units of the standardised target. Its
        sum runs over the nodes of the step: the batch, and those where nutrients are known.
    records : bool, default False
        Our addition: features of what node and neighbours recorded in all other years.
    fourier, stabilise : bool, default True
        Our additions for trainability: waves of the position as features; layer normalisation and
        a skip connection.
    adaptive : bool, default False
        The authors' sampling: one area of one year at a time, as many updates in a row as its
        validation loss deserves.
    k, vertical, hubs : int
        See :meth:`~icml24.ocean_oxygen.graph.OceanGraph.build`.
    steps : int, default 600
        Gradient steps.
    batch_size : int, default 200
        Most measurements in a step.
    lr : float, default 0.01
        Of Adam, with a cosine to zero.
    validate_every : int, default 100
        Steps between looks at the validation measurements; the best weights are kept.
    alpha : float, default 0.1
        One minus the nominal coverage of the intervals.
    random_state : int, default 0

    Attributes
    ----------
    network_ : torch.nn.Module
    graph_ : OceanGraph
    history_ : list of dict
        ``step``, ``loss`` and ``validation`` (RMSE in the unit of the variable).

    Examples
    --------
    >>> from icml24.ocean_oxygen.world import make_ocean
    >>> ds = make_ocean(0, step=12, years=(1990, 1995), levels=2)
    >>> model = Reconstructor(hidden_channels=4, steps=5, validate_every=5).fit(ds)
    >>> dict(model.predict(years=[1992]).oxygen.sizes)
    {'year': 1, 'depth': 2, 'lat': 15, 'lon': 30}
    """

    def __init__(
        self,
        variable: str = "oxygen",
        target: Literal["aou", "raw"] = "aou",
        *,
        conv: Literal["zone", "area", "plain", "gcn", "sage", "gat", "none"] = "zone",
        hidden_channels: int = 32,
        num_layers: int = 2,
        window: int = 5,
        lstm_layers: int = 2,
        lam_chem: float = 0.0,
        records: bool = False,
        fourier: bool = True,
        stabilise: bool = True,
        adaptive: bool = False,
        k: int = 6,
        vertical: int = 1,
        hubs: int = 4,
        steps: int = 600,
        batch_size: int = 200,
        lr: float = 1e-2,
        validate_every: int = 100,
        alpha: float = 0.1,
        random_state: int = 0,
    ) -> None:
        self.variable, self.target, self.conv = variable, target, conv
        self.hidden_channels, self.num_layers, self.window = hidden_channels, num_layers, window
        self.lstm_layers, self.lam_chem, self.records = lstm_layers, lam_chem, records
        self.fourier = fourier
        self.stabilise, self.adaptive = stabilise, adaptive
        self.k, self.vertical, self.hubs = k, vertical, hubs
        self.steps, self.batch_size, self.lr = steps, batch_size, lr
        self.validate_every = validate_every
        self.alpha, self.random_state = alpha, random_state

    # -- one year as tensors ----------------------------------------------------------------------

    def _inputs(self, t: int, nodes: Any = slice(None)) -> tuple[Tensor, ...]:
        x = self.problem_.features(t)[nodes]
        if self.records:
            x = np.concatenate([x, self.problem_.records(t, self._adjacency)[nodes]], axis=1)
        window = window_of(self.problem_.known, t, self.window)[nodes]
        values = torch.from_numpy(np.nan_to_num(window))
        there = torch.from_numpy(np.isfinite(window).astype(np.float32))
        return torch.from_numpy(x), values, there, self._meta[nodes]

    def _layers(self) -> list[Layer]:
        return [self.graph_.full] * self.num_layers

    def _at(self, t: int, v: Array) -> Tensor:
        """Predict for some nodes of a year, from no more of the graph than they can see."""
        depth = 0 if self.conv == "none" else self.num_layers
        nodes, layers = self.graph_.around(v, depth)
        return self.network_(*self._inputs(t, nodes), layers)

    # -- training ---------------------------------------------------------------------------------

    def _fit(self) -> None:
        from icml24.ocean_oxygen.model import (
            OxyGenerator,
        )  # torch_geometric takes seconds to import

        self._check()
        problem = self.problem_
        counts = (problem.role == 0).sum(axis=0)
        self.graph_ = OceanGraph.build(
            problem.nodes, counts, k=self.k, vertical=self.vertical, hubs=self.hubs
        )
        source, target = self.graph_.edge_index
        n = len(problem.nodes)
        self._adjacency = csr_matrix((np.ones(len(source), np.float32), (target, source)), (n, n))
        self._area = area_of(problem.nodes.lat, problem.nodes.lon, 45.0)
        codes = np.unique(self._area, return_inverse=True)[1]
        meta = np.eye(codes.max() + 1, dtype=np.float32)[codes]
        self._meta = torch.from_numpy(meta if self.conv == "area" else problem.meta)
        self.network_ = OxyGenerator(
            self._inputs(0, slice(1))[0].shape[1],
            self.graph_.full.edge_attr.shape[1],
            self._meta.shape[1],
            self.hidden_channels,
            self.num_layers,
            self.conv,
            temporal=self.window > 0,
            lstm_layers=self.lstm_layers,
            stabilise=self.stabilise,
            seed=self.random_state,
        )
        self._train()

    def _check(self) -> None:
        if self.window < 0 or min(self.steps, self.batch_size, self.validate_every) < 1:
            raise ValueError(
                "window must not be negative; steps, batch_size and validate_every be positive."
            )
        if self.lam_chem < 0:
            raise ValueError(f"lam_chem must not be negative, got {self.lam_chem}.")
        if self.lam_chem and not self.problem_.nutrients:
            raise ValueError("The chemistry term needs phosphate or nitrate in the dataset.")

    def _train(self) -> None:
        rng = np.random.default_rng([15, self.random_state])
        optimiser = torch.optim.Adam(self.network_.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.steps)
        validation = self._validation_set()
        self._share = np.ones(int(self._area.max()) + 1, int)
        batches = self._areas(rng) if self.adaptive else self._whole_years(rng)
        best, state = np.inf, None
        self.history_: list[dict[str, float]] = []
        for step in tqdm(range(1, self.steps + 1), desc="training", disable=None):
            t, v = next(batches)
            loss = self._loss(t, v)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.network_.parameters(), 5.0)
            optimiser.step()
            schedule.step()
            if step % self.validate_every == 0 or step == self.steps:
                score = self._validate(validation)
                self.history_.append({"step": step, "loss": loss.item(), "validation": score})
                if score < best or state is None:
                    best = score
                    state = {k: p.clone() for k, p in self.network_.state_dict().items()}
        self.network_.load_state_dict(state)
        self.network_.eval()

    def _loss(self, t: int, v: Array) -> Tensor:
        truth = torch.from_numpy(self.problem_.known[t, v])
        if not self.lam_chem:
            return ((self._at(t, v) - truth) ** 2).mean()
        known = self.problem_.features(t)[:, self._columns(" known")].any(axis=1)
        also = np.setdiff1d(np.flatnonzero(known), v)
        prediction, penalty = self._with_penalty(t, np.concatenate([v, also]))
        return ((prediction[: len(v)] - truth) ** 2).mean() + self.lam_chem * penalty

    def _columns(self, suffix: str = "") -> list[int]:
        names = self.problem_.feature_names
        return [names.index(name + suffix) for name in self.problem_.nutrients]

    def _with_penalty(self, t: int, v: Array) -> tuple[Tensor, Tensor]:
        """Predictions for nodes ``v``, and R of their sum."""
        from icml24.ocean_oxygen.model import gradient_variance

        nodes, layers = self.graph_.around(v, 0 if self.conv == "none" else self.num_layers)
        x, *rest = self._inputs(t, nodes)
        x.requires_grad_()
        prediction = self.network_(x, *rest, layers)
        present = x[:, self._columns(" known")].detach() > 0
        return prediction, gradient_variance(prediction, x, self._columns(), present)

    def sensitivity_variance(self, years: Any = None) -> float:
        """Mean over years of R, the variance of the sensitivity to the nutrients (Problem's units).

        Parameters
        ----------
        years : sequence of int, optional
            By default every twentieth year, as far as nutrients were measured in it, else all years
        in which they were.
        """
        if not self.problem_.nutrients:
            raise ValueError("The dataset has neither phosphate nor nitrate.")
        if years is None:
            column = self._columns(" known")[0]
            every = range(len(self.problem_.years))
            known = [t for t in every if self.problem_.features(t)[:, column].sum() > 1]
            if not known:
                raise ValueError("No year of the dataset has two known nutrients.")
            rows = [t for t in known if t % 20 == 0] or known
        else:
            rows = [self._position(year) for year in years]
        everywhere = np.arange(len(self.problem_.nodes))
        return float(np.mean([self._with_penalty(t, everywhere)[1].item() for t in rows]))

    def _whole_years(self, rng: np.random.Generator) -> Iterator[tuple[int, Array]]:
        """Training nodes of one year, drawn in proportion to the root of their number."""
        counts = (self.problem_.role == 0).sum(axis=1)
        chance = np.sqrt(counts) / np.sqrt(counts).sum()
        while True:
            t = int(rng.choice(len(counts), p=chance))
            v = np.flatnonzero(self.problem_.role[t] == 0)
            yield t, rng.choice(v, min(self.batch_size, len(v)), replace=False)

    def _areas(self, rng: np.random.Generator) -> Iterator[tuple[int, Array]]:
        """One area of one year, repeated as often as the area's share of the updates says."""
        train = self.problem_.role == 0
        t, v = np.nonzero(train)
        keys, counts = np.unique(np.stack([t, self._area[v]]), axis=1, return_counts=True)
        chance = np.sqrt(counts) / np.sqrt(counts).sum()
        while True:
            year, area = keys[:, rng.choice(len(chance), p=chance)]
            nodes = np.flatnonzero(train[year] & (self._area == area))
            for _ in range(self._share[area]):
                some = rng.choice(nodes, min(self.batch_size, len(nodes)), replace=False)
                yield int(year), some

    def _validation_set(self) -> list[tuple[int, Array]]:
        """Up to 16 years with validation measurements (training ones, if there are none)."""
        role = 1 if (self.problem_.role == 1).any() else 0
        rows = np.flatnonzero((self.problem_.role == role).any(axis=1))
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, 16).astype(int))]
        return [(int(t), np.flatnonzero(self.problem_.role[t] == role)) for t in rows]

    def _validate(self, years: list[tuple[int, Array]]) -> float:
        with torch.no_grad():
            errors = [
                (self._at(t, v).numpy() - self.problem_.standard[t, v]) * self.problem_.sd[v]
                for t, v in years
            ]
        error, area = np.concatenate(errors), self._area[np.concatenate([v for _, v in years])]
        squares = np.bincount(area, error**2, len(self._share))
        counts = np.bincount(area, minlength=len(self._share))
        loss = np.where(counts > 0, squares / np.maximum(counts, 1), (error**2).mean())
        if self.adaptive:
            self._share = inner_updates(loss, 4 * len(self._share))
        return float(np.sqrt((error**2).mean()))

    # -- prediction -------------------------------------------------------------------------------

    def _standard_year(self, t: int) -> Array:
        with torch.no_grad():
            return self.network_(*self._inputs(t), self._layers()).numpy().astype(float)

    def _standard(self, t: Array, v: Array) -> Array:
        result = np.empty(len(t))
        for year in np.unique(t):
            rows = t == year
            nodes, inverse = np.unique(v[rows], return_inverse=True)
            with torch.no_grad():
                result[rows] = self._at(int(year), nodes).numpy()[inverse]
        return result

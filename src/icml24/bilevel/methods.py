"""Methods: one single loop with a free choice of estimators, and the baselines beside it.

A method has two functions, ``start(run)`` and ``step(run)``. A :class:`~icml24.bilevel.solver.Run`
gives it the iterates ``x, y, z`` (one row per independent run), the step sizes, and the counted
oracles ``run.inner(x, y, z, batch)`` and ``run.outer(x, y, batch)`` on batches from
``run.draw(level)``. What the methods share is in the run; what they differ in is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from icml24.bilevel.estimators import (
    PAGE,
    SAGA,
    SARAH,
    SGD,
    STORM,
    Estimator,
    MovingAverage,
    ZeroSARAH,
)

if TYPE_CHECKING:
    from icml24.bilevel.solver import Batch, Run

__all__ = [
    "F2SA",
    "METHODS",
    "MRBO",
    "TTSA",
    "VRBO",
    "AmIGO",
    "SingleLoop",
    "StocBiO",
    "make_method",
]

Array = np.ndarray


class SingleLoop:
    """The single loop of the paper: y, z and x move together along estimated directions.

    The directions are linear in five vectors, each a plain average over one level's samples:
    D_y = grad_y g; D_z = hess_yy g z - grad_y f; D_x = grad_x f - cross_xy g z. An estimator is
    applied to each of the five, which by linearity is the same as applying it to the directions.

    Parameters
    ----------
    y, z, x : Estimator
        The estimators of D_y, D_z and D_x.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("y", "z", "x", "z", "x")  # gy, hz | cz || fy, fx
    LEVELS: ClassVar[tuple[str, ...]] = ("inner", "inner", "inner", "outer", "outer")

    def __init__(self, y: Estimator, z: Estimator, x: Estimator) -> None:
        self.estimators = {"y": y, "z": z, "x": x}

    def __repr__(self) -> str:
        inside = ", ".join(f"{key}={value!r}" for key, value in self.estimators.items())
        return f"SingleLoop({inside})"

    def start(self, run: Run) -> None:
        """Set the five estimates at the starting point."""
        sizes = {"y": run.y.shape, "z": run.z.shape, "x": run.x.shape}
        self.bound = [
            self.estimators[part].bind(sizes[part], run.block_weights(level))
            for part, level in zip(self.PARTS, self.LEVELS, strict=True)
        ]
        fills = [part.fills for part in self.bound]
        fulls = [part.starts_full for part in self.bound]
        values: dict[str, tuple[Array, ...]] = {}
        if any(fills):
            self._fill(run)
        if any(fulls):
            values["full"] = run.oracles(run.x, run.y, run.z, run.full("inner"), run.full("outer"))
        if not all(fill or full for fill, full in zip(fills, fulls, strict=True)):
            batches = {level: run.draw(level) for level in ("inner", "outer")}
            values["batch"] = run.oracles(run.x, run.y, run.z, batches["inner"], batches["outer"])
        for k, (part, level) in enumerate(zip(self.bound, self.LEVELS, strict=True)):
            if part.fills:
                part.start(part.v, None)
            elif part.starts_full:
                part.start(values["full"][k], None)
            else:
                part.start(values["batch"][k], batches[level].ids)

    def _fill(self, run: Run) -> None:
        for level in ("inner", "outer"):
            for block in range(len(run.block_weights(level))):  # type: ignore[arg-type]
                batch = run.block(level, block)
                if level == "inner":
                    values = run.inner(run.x, run.y, run.z, batch)
                    mine = zip(self.bound[:3], values, strict=True)
                else:
                    mine = zip(self.bound[3:], run.outer(run.x, run.y, batch), strict=True)
                for part, value in mine:
                    if part.fills:
                        part.fill(block, value)  # type: ignore[attr-defined]

    def step(self, run: Run) -> None:
        """Move along the directions, then bring the estimates to the new point."""
        gy, hz, cz, fy, fx = (part.v for part in self.bound)
        old = (run.x, run.y, run.z)
        run.y = run.y - run.lr_y * gy
        run.z = run.project(run.z - run.lr_z * (hz - fy))
        run.x = run.x - run.lr_x * (fx - cz)

        coin, batches = run.coin(), {level: run.draw(level) for level in ("inner", "outer")}
        first = dict(zip("yzx", self.bound, strict=False))  # one part of each direction
        mine = {k: p.refreshes(run.step, coin, run.full_probability) for k, p in first.items()}
        masks = [mine[key] for key in self.PARTS]
        full = mine["y"] | mine["z"] | mine["x"]
        batch = ~(mine["y"] & mine["z"] & mine["x"])
        if full.any():
            rows = _select(full)
            whole = run.oracles(
                run.x[rows], run.y[rows], run.z[rows], run.full("inner"), run.full("outer"), rows
            )
            for part, mask, value in zip(self.bound, masks, whole, strict=True):
                if mask.any():  # all parts that refresh do so in the same runs
                    part.refresh(rows, value)
        if batch.any():
            rows = _select(batch)
            pair = any(part.needs_old for part in self.bound)
            x, y, z = run.x[rows], run.y[rows], run.z[rows]
            if pair:  # both points at once, in one call of the oracles
                x, y, z = (
                    np.stack([new, before[rows]])
                    for new, before in zip((x, y, z), old, strict=True)
                )
            if not batch.all():
                batches = {
                    level: run.subset(level, drawn, rows) for level, drawn in batches.items()
                }
            values = run.oracles(x, y, z, batches["inner"], batches["outer"], rows)
            runs = np.arange(len(run.x))[rows]
            for part, level, mask, value in zip(
                self.bound, self.LEVELS, masks, values, strict=True
            ):
                new, before = value if pair else (value, value)
                ids = batches[level].ids
                assert ids is not None
                if mask.any():  # parts that did not refresh in these runs
                    rest = ~mask[rows]
                    part.update(runs[rest], new[rest], before[rest], ids[rest])
                else:
                    part.update(rows, new, before, ids)


def _select(mask: Array) -> slice | Array:
    return slice(None) if mask.all() else np.flatnonzero(mask)


def _neumann(run: Run, x: Array, y: Array, right: Array, terms: int, batches: list[Batch]) -> Array:
    """Sum of lr_z (I - lr_z H)^q right for q = 0 .. terms, a truncated inverse of H."""
    power, total = right, run.lr_z * right
    for q in range(terms):
        power = power - run.lr_z * run.inner(x, y, power, batches[q])[1]
        total = total + run.lr_z * power
    return run.project(total)


@dataclass
class StocBiO:
    """Double loop: many inner steps, then a Neumann series for z (Ji et al., 2021).

    Parameters
    ----------
    inner_steps : int
        SGD steps on y for each outer step (y is kept between outer steps).
    terms : int
        Terms of the Neumann series, one Hessian-vector product each.
    """

    inner_steps: int = 10
    terms: int = 10

    def start(self, run: Run) -> None:
        """Nothing to prepare."""

    def step(self, run: Run) -> None:
        """One outer step."""
        for _ in range(self.inner_steps):
            run.y = run.y - run.lr_y * run.inner(run.x, run.y, run.z, run.draw("inner"))[0]
        fy, fx = run.outer(run.x, run.y, run.draw("outer"))
        batches = [run.draw("inner") for _ in range(self.terms)]
        run.z = _neumann(run, run.x, run.y, fy, self.terms, batches)
        run.x = run.x - run.lr_x * (fx - run.inner(run.x, run.y, run.z, run.draw("inner"))[2])


@dataclass
class AmIGO:
    """Double loop with warm starts for both y and z (Arbel and Mairal, 2022).

    Parameters
    ----------
    inner_steps, linear_steps : int
        SGD steps on y and on the linear system of z for each outer step.
    """

    inner_steps: int = 10
    linear_steps: int = 10

    def start(self, run: Run) -> None:
        """Nothing to prepare."""

    def step(self, run: Run) -> None:
        """One outer step."""
        for _ in range(self.inner_steps):
            run.y = run.y - run.lr_y * run.inner(run.x, run.y, run.z, run.draw("inner"))[0]
        fy, fx = run.outer(run.x, run.y, run.draw("outer"))
        for _ in range(self.linear_steps):
            hz = run.inner(run.x, run.y, run.z, run.draw("inner"))[1]
            run.z = run.project(run.z - run.lr_z * (hz - fy))
        run.x = run.x - run.lr_x * (fx - run.inner(run.x, run.y, run.z, run.draw("inner"))[2])


@dataclass
class TTSA:
    """Two time scales: one inner step, a randomly truncated Neumann series (Hong et al., 2020).

    Parameters
    ----------
    terms : int
        Largest number of Hessian-vector products; the actual one is uniform in 0 .. terms - 1.
    decay_inner, decay_outer : float
        Steps fall like lr / (1 + k)^decay; the theory takes 2/5 and 3/5.
    """

    terms: int = 10
    decay_inner: float = 0.4
    decay_outer: float = 0.6

    def start(self, run: Run) -> None:
        """Nothing to prepare."""

    def step(self, run: Run) -> None:
        """One step."""
        slow_y = (1 + run.step) ** -self.decay_inner
        slow_x = (1 + run.step) ** -self.decay_outer
        gy = run.inner(run.x, run.y, run.z, run.draw("inner"))[0]
        run.y = run.y - slow_y * run.lr_y * gy
        fy, fx = run.outer(run.x, run.y, run.draw("outer"))
        power = fy
        for _ in range(int(run.coin()[0] * self.terms)):  # one length for all runs
            power = power - run.lr_z * run.inner(run.x, run.y, power, run.draw("inner"))[1]
        run.z = run.project(self.terms * run.lr_z * power)
        cz = run.inner(run.x, run.y, run.z, run.draw("inner"))[2]
        run.x = run.x - slow_x * run.lr_x * (fx - cz)


@dataclass
class MRBO:
    """Single loop with STORM momentum on y and on a Neumann hypergradient (Yang et al., 2021).

    With ``random_length`` the series is cut at a random term, as SUSTAIN (Khanduri et al., 2021)
    does.

    Parameters
    ----------
    a : float
        Weight of fresh values in both recursions.
    terms : int
        Terms of the Neumann series.
    random_length : bool
        Cut the series at a random term instead of summing it.
    """

    a: float = 0.1
    terms: int = 10
    random_length: bool = False
    vy: Array = field(init=False, repr=False)
    vx: Array = field(init=False, repr=False)

    def _batches(self, run: Run) -> tuple[Batch, Batch, Batch, list[Batch]]:
        length = int(run.coin()[0] * self.terms) if self.random_length else self.terms
        series = [run.draw("inner") for _ in range(length)]
        return run.draw("inner"), run.draw("inner"), run.draw("outer"), series

    def _at(
        self, run: Run, x: Array, y: Array, batches: tuple[Batch, Batch, Batch, list[Batch]]
    ) -> tuple[Array, Array]:
        first, cross, outer, series = batches
        gy = run.inner(x, y, run.z, first)[0]
        fy, fx = run.outer(x, y, outer)
        if self.random_length:
            power = fy
            for batch in series:
                power = power - run.lr_z * run.inner(x, y, power, batch)[1]
            z = run.project(self.terms * run.lr_z * power)
        else:
            z = _neumann(run, x, y, fy, self.terms, series)
        return gy, fx - run.inner(x, y, z, cross)[2]

    def start(self, run: Run) -> None:
        """First estimates from one batch."""
        self.vy, self.vx = self._at(run, run.x, run.y, self._batches(run))

    def step(self, run: Run) -> None:
        """One step."""
        x, y = run.x, run.y
        run.x, run.y = x - run.lr_x * self.vx, y - run.lr_y * self.vy
        batches = self._batches(run)
        old, new = self._at(run, x, y, batches), self._at(run, run.x, run.y, batches)
        self.vy = new[0] + (1 - self.a) * (self.vy - old[0])
        self.vx = new[1] + (1 - self.a) * (self.vx - old[1])


@dataclass
class VRBO:
    """Double loop with SARAH on y and on a Neumann hypergradient (Yang et al., 2021).

    Parameters
    ----------
    period : int, optional
        Outer steps between full passes; default from the cost of a full pass.
    inner_steps : int
        Inner steps for each outer step.
    terms : int
        Terms of the Neumann series.
    """

    period: int | None = None
    inner_steps: int = 3
    terms: int = 10
    vy: Array = field(init=False, repr=False)
    vx: Array = field(init=False, repr=False)

    def start(self, run: Run) -> None:
        """Nothing to prepare: the first step makes a full pass."""

    def _at(self, run: Run, x: Array, y: Array, inner: Batch, outer: Batch) -> tuple[Array, Array]:
        fy, fx = run.outer(x, y, outer)
        z = _neumann(run, x, y, fy, self.terms, [inner] * self.terms)
        gy, _, cz = run.inner(x, y, z, inner)
        return gy, fx - cz

    def step(self, run: Run) -> None:
        """One outer step."""
        period = self.period or max(1, round(1 / float(run.full_probability[0])))
        if (run.step - 1) % period == 0:
            full = run.full("inner"), run.full("outer")
            self.vy, self.vx = self._at(run, run.x, run.y, *full)
        before, run.x = (run.x, run.y), run.x - run.lr_x * self.vx
        for _ in range(self.inner_steps):
            batches = run.draw("inner"), run.draw("outer")
            new = self._at(run, run.x, run.y, *batches)
            old = self._at(run, *before, *batches)
            self.vy, self.vx = self.vy + new[0] - old[0], self.vx + new[1] - old[1]
            before, run.y = (run.x, run.y), run.y - run.lr_y * self.vy


@dataclass
class F2SA:
    """First-order penalty method, no Hessian at all (Kwon et al., 2023).

    Two copies of the inner variable: w minimises g, y minimises f + c g; the outer direction is
    grad_x f + c (grad_x g(x, y) - grad_x g(x, w)). It is biased by O(1/c), so c grows.

    Parameters
    ----------
    penalty : float
        First value of c.
    growth : float
        c = penalty (1 + k)^growth.
    inner_steps : int
        Steps on w and y for each outer step.
    """

    penalty: float = 10.0
    growth: float = 0.3
    inner_steps: int = 1
    w: Array = field(init=False, repr=False)

    def start(self, run: Run) -> None:
        """Start w at y."""
        if not hasattr(run.problem, "inner_grad_x"):
            raise ValueError("F2SA needs problem.inner_grad_x(x, y, idx), which is missing.")
        self.w = run.y.copy()

    def step(self, run: Run) -> None:
        """One outer step."""
        c = self.penalty * (1 + run.step) ** self.growth
        for _ in range(self.inner_steps):
            batch = run.draw("inner")
            both = np.stack([run.y, self.w])
            gy, gw = run.inner(np.stack([run.x] * 2), both, 0 * both, batch)[0]
            fy, _ = run.outer(run.x, run.y, run.draw("outer"))
            self.w = self.w - run.lr_y * gw
            run.y = run.y - run.lr_y * (fy / c + gy)
        batch = run.draw("inner")
        fx = run.outer(run.x, run.y, run.draw("outer"))[1]
        gap = run.inner_grad_x(run.x, run.y, batch) - run.inner_grad_x(run.x, self.w, batch)
        run.z = c * (self.w - run.y)  # the finite difference that stands for z
        run.x = run.x - run.lr_x * (fx + c * gap)


def _same(estimator: Estimator) -> SingleLoop:
    return SingleLoop(estimator, estimator, estimator)


METHODS: dict[str, Callable[[], Any]] = {
    "spaba": lambda: _same(PAGE()),
    "full": lambda: _same(PAGE(prob=1.0)),
    "soba": lambda: _same(SGD()),
    "ma-soba": lambda: SingleLoop(SGD(), SGD(), MovingAverage(0.1)),
    "saba": lambda: _same(SAGA()),
    "ma-saba": lambda: SingleLoop(SAGA(), SAGA(), MovingAverage(0.1, SAGA())),
    "srba": lambda: _same(SARAH()),
    "srmba": lambda: _same(STORM()),
    "sffba": lambda: _same(ZeroSARAH()),
    "mseba": lambda: SingleLoop(ZeroSARAH(), PAGE(), PAGE()),
    "fsla": lambda: SingleLoop(SGD(), SGD(), STORM()),
    "amigo": AmIGO,
    "stocbio": StocBiO,
    "ttsa": TTSA,
    "mrbo": MRBO,
    "sustain": lambda: MRBO(random_length=True),
    "vrbo": VRBO,
    "f2sa": F2SA,
}
"""Every method by its name in the literature; values are functions that make one."""


def make_method(method: object) -> Any:
    """Turn a name, a mapping of estimators or a method object into a method.

    Parameters
    ----------
    method : str, mapping or method
        A key of :data:`METHODS`; or ``{"y": ..., "z": ..., "x": ...}`` with estimators; or an
        object with ``start(run)`` and ``step(run)``.

    Returns
    -------
    method

    Examples
    --------
    >>> make_method("spaba")
    SingleLoop(y=PAGE(prob=None), z=PAGE(prob=None), x=PAGE(prob=None))
    """
    if isinstance(method, str):
        name = method.lower()
        if name not in METHODS:
            raise ValueError(f"Unknown method {method!r}; known are {', '.join(sorted(METHODS))}.")
        return METHODS[name]()
    if isinstance(method, dict):
        if set(method) != {"y", "z", "x"}:
            raise ValueError(f"The mapping needs the keys y, z and x, got {sorted(method)}.")
        return SingleLoop(**method)
    if hasattr(method, "start") and hasattr(method, "step"):
        return method
    raise TypeError(
        "method must be a name, a mapping of three estimators, or an object with start and step, "
        f"got {type(method).__name__}."
    )

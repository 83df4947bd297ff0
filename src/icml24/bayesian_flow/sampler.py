"""One sampler for all solvers: it makes the time grid, calls the network and counts the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from icml24.bayesian_flow.flows import ContinuousBFN, DiscreteBFN, Model
from icml24.bayesian_flow.schedules import ContinuousBFNSchedule, DiscreteBFNSchedule
from icml24.bayesian_flow.solvers import ALIASES, SOLVERS, Rule, one_hot_draw

__all__ = ["BFNSampler", "BFNStepOutput", "classifier_free_guidance", "sample"]

LAST_STEPS = ("drop", "integrate", "denoise")
Guidance = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class BFNStepOutput:
    """Result of one step: the next state, and the prediction that led to it."""

    prev_state: Tensor
    prediction: Tensor


class BFNSampler:
    """Draw samples from a Bayesian flow network with any of the paper's solvers.

    Parameters
    ----------
    bfn : ContinuousBFN or DiscreteBFN
    solver : str, default "sde-bfn-solver2"
        ``"bfn"`` (the original sampler), ``"bfn-solver1"``, ``"bfn-solver2"``,
        ``"bfn-solver2-single"`` (two evaluations per step), ``"sde-bfn-solver1"``,
        ``"sde-bfn-solver2"``, ``"euler-maruyama"`` (continuous only). The paper's names with
        ``++`` mean the same.
    num_steps : int, default 10
        Steps of the time grid.
    eta : float, optional
        Sampling starts at ``t = 1 - eta``. Default 0.01 (continuous) and 0.001 (discrete). The
        original sampler always starts at the prior, ``eta = 0``.
    timestep_spacing : {"uniform", "logsnr"}
        Steps of equal length in ``t`` (the paper), or in the logarithm of the signal-to-noise
        ratio, which wins clearly for continuous data.
    last_step : {"drop", "integrate", "denoise"}, optional
        The result is: the prediction at the last but one time, which costs ``num_steps`` calls (the
        paper, default); the state at ``t = 0``; or the prediction at ``t = 0``, one call more (what
        the original sampler does, its default).
    data_moments : (float, float), optional
        Mean and variance of the data; continuous sampling then starts with the right moments.
    clip_sample : float, optional
        Clamp each estimate of continuous data to ``[-clip_sample, clip_sample]``.
    categorical_draw : bool, default True
        Whether the original discrete sampler draws a symbol at each step. Without it, it is
        SDE-BFN-Solver1 (Proposition 5.3).
    guidance : callable, optional
        ``guidance(prediction, state, t)`` returns a changed prediction; runs after clipping.

    Attributes
    ----------
    timesteps : Tensor of float64, shape (num_steps + 1,)
    nfe : int
        Calls of the network in the last :meth:`sample`, counted.

    Examples
    --------
    >>> flow = ContinuousBFN(lambda mu, s: 0 * mu, ContinuousBFNSchedule(0.1), "sample")
    >>> sampler = BFNSampler(flow, "bfn-solver2", num_steps=5)
    >>> sampler.sample((2, 3), generator=torch.Generator().manual_seed(0)).shape, sampler.nfe
    (torch.Size([2, 3]), 5)
    """

    def __init__(
        self,
        bfn: ContinuousBFN | DiscreteBFN,
        solver: str = "sde-bfn-solver2",
        num_steps: int = 10,
        *,
        eta: float | None = None,
        timestep_spacing: Literal["uniform", "logsnr"] = "uniform",
        last_step: Literal["drop", "integrate", "denoise"] | None = None,
        data_moments: tuple[float, float] | None = None,
        clip_sample: float | None = None,
        categorical_draw: bool = True,
        guidance: Guidance | None = None,
    ) -> None:
        if not isinstance(bfn, (ContinuousBFN, DiscreteBFN)):
            raise TypeError(f"bfn must be a ContinuousBFN or a DiscreteBFN, got {type(bfn)}.")
        name = ALIASES.get(solver, solver)
        if name not in SOLVERS:
            raise ValueError(f"Unknown solver {solver!r}; choose from {', '.join(SOLVERS)}.")
        self.bfn, self.solver_name, self.solver = bfn, name, SOLVERS[name]
        discrete = isinstance(bfn, DiscreteBFN)
        rule = self.solver.discrete if discrete else self.solver.continuous
        if rule is None:
            raise ValueError(f"The solver {solver!r} exists for continuous data only.")
        self._rule: Rule = rule
        if eta is None:
            eta = 0.0 if self.solver.original else bfn.default_eta
        elif self.solver.original and eta != 0:
            raise ValueError(f"The original sampler starts at the prior: leave eta out, got {eta}.")
        if not self.solver.original and not 0 < eta < 1:
            raise ValueError(f"eta must lie strictly between 0 and 1, got {eta}.")
        if last_step is None:
            last_step = "denoise" if self.solver.original else "drop"
        if last_step not in LAST_STEPS:
            raise ValueError(
                f"last_step must be one of {', '.join(LAST_STEPS)}, got {last_step!r}."
            )
        if clip_sample is not None and (discrete or not clip_sample > 0):
            raise ValueError("clip_sample must be positive, and is for continuous flows only.")
        if data_moments is not None and (discrete or self.solver.original or data_moments[1] < 0):
            raise ValueError(
                "data_moments needs a mean and a variance >= 0, and is for continuous flows with "
                "one of the new solvers."
            )
        self.eta, self.timestep_spacing, self.last_step = eta, timestep_spacing, last_step
        self.data_moments, self.clip_sample = data_moments, clip_sample
        self.categorical_draw = categorical_draw and self.solver.original and discrete
        self.guidance, self.nfe = guidance, 0
        self.set_timesteps(num_steps)

    def set_timesteps(
        self, num_steps: int | None = None, *, timesteps: Sequence[float] | Tensor | None = None
    ) -> None:
        """Choose the grid: a number of steps, or the times themselves.

        Parameters
        ----------
        num_steps : int, optional
        timesteps : sequence of float, optional
            Falling times ``t`` in [0, 1], for schedules of your own.

        Raises
        ------
        ValueError
            If neither or both are given, or the times do not fall.
        """
        if (num_steps is None) == (timesteps is None):
            raise ValueError("Give either num_steps or timesteps.")
        if num_steps is not None:
            grid = self.bfn.schedule.timesteps(num_steps, self.eta, self.timestep_spacing)
        else:
            grid = torch.as_tensor(timesteps, dtype=torch.float64).cpu()
            if grid.ndim != 1 or len(grid) < 2 or not bool((grid.diff() < 0).all()):
                raise ValueError("timesteps must be at least two strictly falling times.")
            if not 0 <= grid[-1] < grid[0] <= 1 or (grid[0] == 1 and not self.solver.original):
                raise ValueError("timesteps must lie in [0, 1), from the prior side to the data.")
        self.timesteps = grid
        self._times: list[float] = grid.tolist()

    @property
    def num_steps(self) -> int:
        """Number of steps of the grid."""
        return len(self._times) - 1

    def predict(self, state: Tensor, t: float) -> Tensor:
        """Evaluate the network once: count, clip, guide.

        Parameters
        ----------
        state : Tensor
        t : float

        Returns
        -------
        Tensor
        """
        self.nfe += self.bfn.needs_call(t)
        prediction = self.bfn.predict(state, t)
        if self.clip_sample is not None:
            prediction = prediction.clamp(-self.clip_sample, self.clip_sample)
        if self.guidance is not None:
            guided = self.guidance(prediction, state, t)
            if not isinstance(guided, Tensor) or guided.shape != prediction.shape:
                raise ValueError("guidance must return a tensor shaped like the prediction.")
            prediction = guided
        return prediction

    def step(
        self,
        prediction: Tensor,
        i: int,
        state: Tensor,
        generator: torch.Generator | None = None,
        *,
        previous: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> BFNStepOutput:
        """Move the state from ``timesteps[i]`` to ``timesteps[i + 1]``.

        Parameters
        ----------
        prediction : Tensor
            Estimate at ``timesteps[i]``, from :meth:`predict`.
        i : int
        state : Tensor
        generator : torch.Generator, optional
            Source of the noise of stochastic solvers.
        previous : Tensor, optional
            Estimate at ``timesteps[i - 1]``; a multistep solver without it makes a first-order
            step.
        noise : Tensor, optional
            Standard normal noise to use in place of the generator.

        Returns
        -------
        BFNStepOutput
        """
        s, t = self._times[i], self._times[i + 1]
        schedule, slope = self.bfn.schedule, None
        if self.categorical_draw:
            prediction = one_hot_draw(prediction, generator)
        if self.solver.stochastic and noise is None:
            noise = torch.randn(
                state.shape, generator=generator, dtype=state.dtype, device=state.device
            )
        if self.solver.singlestep:
            middle = self._middle(s, t)
            halfway = self._rule(schedule, state, prediction, s, middle)
            slope = self._slope(self.predict(halfway, middle), middle, prediction, s)
        elif self.solver.order == 2 and previous is not None and i > 0:
            slope = self._slope(prediction, s, previous, self._times[i - 1])
        state = self._rule(schedule, state, prediction, s, t, slope=slope, noise=noise)
        return BFNStepOutput(state, prediction)

    def _middle(self, s: float, t: float) -> float:
        clock = 0.5 * (self.bfn.slope_clock(s) + self.bfn.slope_clock(t))
        discrete = isinstance(self.bfn, DiscreteBFN)
        return clock if discrete else float(self.bfn.schedule.t_from_log_snr(clock))

    def _slope(self, now: Tensor, t: float, before: Tensor, t_before: float) -> Tensor:
        return (now - before) / (self.bfn.slope_clock(t) - self.bfn.slope_clock(t_before))

    @torch.no_grad()
    def sample(
        self,
        shape: Sequence[int],
        generator: torch.Generator | None = None,
        *,
        callback: Callable[[int, float, Tensor, Tensor], None] | None = None,
        return_trajectory: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Any:
        """Draw a batch of samples.

        Parameters
        ----------
        shape : sequence of int
            ``(B, ...)``, without the axis of symbols.
        generator : torch.Generator, optional
            Same seed, same samples. A deterministic solver uses it only for the start.
        callback : callable, optional
            ``callback(i, t, state, prediction)`` after each evaluation at a grid time.
        return_trajectory : bool, default False
            Also return the list of states, one for each grid time that was reached.
        dtype, device : optional
            By default those of the network's parameters, else float32 on the CPU.

        Returns
        -------
        Tensor, shape (B, ...), or (Tensor, list of Tensor)
            Continuous values, or labels.
        """
        shape = tuple(int(n) for n in shape)
        if len(shape) < 2 or min(shape) < 1:
            raise ValueError(f"shape must be (batch, ...) with positive entries, got {shape}.")
        like = next((p for p in self.bfn.parameters() if p.is_floating_point()), torch.empty(0))
        options = {"dtype": dtype or like.dtype, "device": device or like.device}
        self.nfe = 0
        if self.solver.original:
            discrete = isinstance(self.bfn, DiscreteBFN)
            inner = (*shape, self.bfn.schedule.num_classes) if discrete else shape
            state = torch.zeros(inner, **options)
        else:
            state = self.bfn.prior(
                shape, self._times[0], generator, moments=self.data_moments, **options
            )
        trajectory, previous = [state], None
        steps = self.num_steps - (self.last_step == "drop")
        for i in tqdm(range(steps), desc=self.solver_name, leave=False, disable=None):
            prediction = self.predict(state, self._times[i])
            if callback is not None:
                callback(i, self._times[i], state, prediction)
            state = self.step(prediction, i, state, generator, previous=previous).prev_state
            previous = prediction
            if return_trajectory:
                trajectory.append(state)
        result = state
        if self.last_step != "integrate":
            result = self.predict(state, self._times[steps])
            if callback is not None:
                callback(steps, self._times[steps], state, result)
        result = self.bfn.finish(result)
        return (result, trajectory) if return_trajectory else result


def sample(
    model: ContinuousBFN | DiscreteBFN | Model,
    shape: Sequence[int],
    *,
    solver: str = "sde-bfn-solver2",
    steps: int = 10,
    schedule: ContinuousBFNSchedule | DiscreteBFNSchedule | None = None,
    prediction_type: str | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Tensor:
    """Draw samples in one call: a flow, or any callable with its schedule.

    Parameters
    ----------
    model : ContinuousBFN, DiscreteBFN, or callable
        A callable is wrapped; see the flows for its signature.
    shape : sequence of int
        ``(B, ...)``.
    solver : str
        As for :class:`BFNSampler`.
    steps : int, default 10
    schedule : ContinuousBFNSchedule or DiscreteBFNSchedule
        Needed when ``model`` is a bare callable.
    prediction_type : str, optional
        What a bare callable returns: "epsilon" (default) or "sample"; "logits" (default) or
        "probs".
    generator : torch.Generator, optional
    **options
        Further settings of :class:`BFNSampler`.

    Returns
    -------
    Tensor, shape (B, ...)

    Examples
    --------
    >>> model = lambda mu, s: torch.zeros_like(mu)
    >>> schedule = ContinuousBFNSchedule(0.1)
    >>> sample(model, (2, 3), schedule=schedule, prediction_type="sample", solver="bfn2").shape
    torch.Size([2, 3])
    """
    flow: ContinuousBFN | DiscreteBFN
    if isinstance(model, (ContinuousBFN, DiscreteBFN)):
        if schedule is not None or prediction_type is not None:
            raise ValueError("A flow brings its own schedule and prediction_type; leave them out.")
        flow = model
    elif isinstance(schedule, ContinuousBFNSchedule):
        flow = ContinuousBFN(model, schedule, prediction_type or "epsilon")  # type: ignore[arg-type]
    elif isinstance(schedule, DiscreteBFNSchedule):
        flow = DiscreteBFN(model, schedule, prediction_type or "logits")  # type: ignore[arg-type]
    else:
        raise TypeError(
            "Give the model's schedule: ContinuousBFNSchedule(sigma_1) or "
            "DiscreteBFNSchedule(num_classes, beta_1)."
        )
    return BFNSampler(flow, solver, steps, **options).sample(shape, generator)


def classifier_free_guidance(conditional: Model, unconditional: Model, scale: float) -> Model:
    """Combine two networks into one guided network: ``u + scale (c - u)``.

    Parameters
    ----------
    conditional, unconditional : callable
        Two networks with the same signature (close over the condition).
    scale : float
        1 is the conditional network; more pushes further.

    Returns
    -------
    callable
        A model for :class:`ContinuousBFN` or (with logits) :class:`DiscreteBFN`. A step then costs
        two evaluations, which :attr:`BFNSampler.nfe` counts as one call.

    Examples
    --------
    >>> guided = classifier_free_guidance(lambda x, s: x + 1, lambda x, s: x, scale=3.0)
    >>> float(guided(torch.zeros(1), torch.zeros(1)))
    3.0
    """

    def model(network_input: Tensor, time: Tensor) -> Tensor:
        base = unconditional(network_input, time)
        return base + scale * (conditional(network_input, time) - base)

    return model

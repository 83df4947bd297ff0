"""Pure functions ``(config, seed) -> record`` behind the chapter's claims."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from icml24.bayesian_flow import data
from icml24.bayesian_flow.exact import GaussianMixture, MarkovChain, gaussian_moments
from icml24.bayesian_flow.flows import ContinuousBFN, DiscreteBFN
from icml24.bayesian_flow.metrics import (
    energy_distance,
    frechet_distance,
    ngram_counts,
    ngram_tv,
    spelling_accuracy,
    total_variation,
)
from icml24.bayesian_flow.networks import ImageNet, TextNet, fit
from icml24.bayesian_flow.peers import MaskedDiffusion, NGram, adaptive_flow
from icml24.bayesian_flow.sampler import BFNSampler
from icml24.bayesian_flow.schedules import ContinuousBFNSchedule, DiscreteBFNSchedule
from icml24.bayesian_flow.solvers import (
    SOLVERS,
    bayesian_update,
    bayesian_update_discrete,
    sde_bfn_solver,
    sde_bfn_solver_discrete,
)


@dataclass(frozen=True)
class Config:
    """Settings of the experiments.

    Parameters
    ----------
    solver : str
        A solver of :data:`icml24.bayesian_flow.SOLVERS`, or a peer: "masked-diffusion" (chain),
        "n-gram" (text), or "data".
    nfe : int
        Calls of the network that a sample may cost.
    steps : int
        Steps of the grid, in the convergence studies.
    spacing : {"uniform", "logsnr"}
    problem : {"ring", "chain"}
        Exact problem of the trajectory study.
    ring_samples, chain_samples, symbol_samples, image_samples, text_samples : int
    image_steps, image_batch, text_steps, text_batch, text_length : int
        Training, and characters in a window.
    learning_rate : float
    """

    solver: str = "bfn-solver2"
    nfe: int = 10
    steps: int = 160
    spacing: str = "uniform"
    problem: str = "ring"
    ring_samples: int = 2000
    chain_samples: int = 2000
    symbol_samples: int = 40_000
    image_samples: int = 120
    text_samples: int = 80
    image_steps: int = 4500
    image_batch: int = 64
    text_steps: int = 10_000
    text_batch: int = 32
    text_length: int = 64
    learning_rate: float = 2e-3

    @classmethod
    def laptop(cls) -> Config:
        """Return the size the book runs."""
        return cls()

    @classmethod
    def paper(cls) -> Config:
        """Return the paper's sizes: 10,000 images, 1,000 texts of 256 characters, long training."""
        return replace(
            cls(),
            image_samples=10_000,
            text_samples=1000,
            text_length=256,
            image_steps=1_000_000,
            text_steps=1_000_000,
            learning_rate=2e-4,
        )


IMAGE_SCHEDULE = ContinuousBFNSchedule(sigma_1=1e-3**0.5)
TEXT_SCHEDULE = DiscreteBFNSchedule(num_classes=27, beta_1=0.75**2)


def balanced_times(count: int, generator: torch.Generator) -> Tensor:
    """Draw BFN times for the image network: half uniform, half uniform in the log-SNR.

    The loss of a flow is a description length, most of which goes into the texture of the pixels;
    the shape of a garment is settled in the first tenth of the time. Drawing that part more often
    gives better pictures from a small network.

    Parameters
    ----------
    count : int
    generator : torch.Generator

    Returns
    -------
    Tensor, shape (count,)
    """
    draw = (torch.arange(count) + torch.rand(count, generator=generator)) / count
    low, high = (float(IMAGE_SCHEDULE.log_snr(t)) for t in (0.998, 0.0))
    balanced = 1 - IMAGE_SCHEDULE.t_from_log_snr(low + (high - low) * draw).clamp(min=0)
    return torch.where(torch.arange(count) % 2 == 0, draw, balanced)


def train_images(config: Config, seed: int) -> tuple[ContinuousBFN, list[float]]:
    """Train the image flow on Fashion-MNIST (about six minutes on one core).

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    flow : ContinuousBFN
    losses : list of float
        Nats per pixel, one for each step.
    """
    generator, pixels = torch.Generator().manual_seed(seed), data.images()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        flow = ContinuousBFN(ImageNet(), IMAGE_SCHEDULE)

    def batch(generator: torch.Generator) -> Tensor:
        return pixels[torch.randint(len(pixels), (config.image_batch,), generator=generator)]

    return fit(
        flow,
        batch,
        steps=config.image_steps,
        lr=config.learning_rate,
        times=balanced_times,
        generator=generator,
    )


def train_text(config: Config, seed: int) -> tuple[DiscreteBFN, list[float]]:
    """Train the text flow on the speeches (about a quarter of an hour on one core).

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    flow : DiscreteBFN
    losses : list of float
        Nats per character, one for each step.
    """
    generator, text = torch.Generator().manual_seed(seed), data.speeches()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        flow = DiscreteBFN(TextNet(), TEXT_SCHEDULE)

    def batch(generator: torch.Generator) -> Tensor:
        return data.windows(text, config.text_length, config.text_batch, generator)

    return fit(flow, batch, steps=config.text_steps, lr=config.learning_rate, generator=generator)


def save_network(path: str | Path, network: nn.Module, provenance: dict[str, Any]) -> None:
    """Write a network's settings, weights (16 bits) and provenance to one ``.npz`` file."""
    arrays = {name: value.to(torch.float16).numpy() for name, value in network.state_dict().items()}
    notes = json.dumps({"settings": network.settings, **provenance})
    np.savez_compressed(path, notes=np.array(notes), **arrays)


def load_network(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Read a trained network that the package carries.

    Parameters
    ----------
    name : {"images", "text"}

    Returns
    -------
    network : ImageNet or TextNet
    provenance : dict
        How it was trained.
    """
    kinds = {"images": ImageNet, "text": TextNet}
    if name not in kinds:
        raise ValueError(f"name must be one of {', '.join(kinds)}, got {name!r}.")
    file = resources.files("icml24.bayesian_flow").joinpath(f"data/{name}.npz")
    with file.open("rb") as handle, np.load(handle, allow_pickle=False) as stored:
        notes = json.loads(str(stored["notes"]))
        weights = {
            key: torch.from_numpy(stored[key].astype(np.float32))
            for key in stored.files
            if key != "notes"
        }
    network = kinds[name](**notes["settings"])
    network.load_state_dict(weights)
    return network.eval().requires_grad_(False), notes


def train_and_ship(name: str, config: Config, seed: int, directory: str | Path) -> Path:
    """Train one of the networks that the package carries and write it into a folder.

    ``python -m icml24.bayesian_flow.experiments images FOLDER`` calls this.

    Parameters
    ----------
    name : {"images", "text"}
    config : Config
    seed : int
    directory : path-like

    Returns
    -------
    pathlib.Path
        The file.
    """
    if name not in ("images", "text"):
        raise ValueError(f"name must be 'images' or 'text', got {name!r}.")
    flow, losses = (train_images if name == "images" else train_text)(config, seed)
    path = Path(directory) / f"{name}.npz"
    provenance = {
        "function": "icml24.bayesian_flow.experiments.train_and_ship",
        "config": {**config.__dict__},
        "seed": seed,
        "loss_last_tenth": float(np.mean(losses[-max(1, len(losses) // 10) :])),
        "torch": torch.__version__.split("+")[0],
    }
    save_network(path, flow.model, provenance)
    return path


def seeded(seed: int) -> torch.Generator:
    """Return a new generator."""
    return torch.Generator().manual_seed(seed)


def sampler_for(
    flow: ContinuousBFN | DiscreteBFN,
    solver: str,
    nfe: int,
    spacing: str = "uniform",
    **options: Any,
) -> BFNSampler:
    """Return a sampler that makes exactly ``nfe`` calls of the network for each sample.

    Parameters
    ----------
    flow : ContinuousBFN or DiscreteBFN
    solver : str
    nfe : int
        The original sampler gets one step fewer where its last evaluation costs a call; a
        singlestep solver half as many.
    spacing : {"uniform", "logsnr"}
    **options
        Settings of :class:`BFNSampler`.

    Returns
    -------
    BFNSampler
    """
    steps = nfe
    if SOLVERS[solver].original:
        steps = nfe - flow.needs_call(1.0)
    elif SOLVERS[solver].singlestep:
        if nfe % 2 == 0:
            raise ValueError(f"A singlestep solver makes an odd number of calls, not {nfe}.")
        steps = (nfe + 1) // 2
    return BFNSampler(flow, solver, steps, timestep_spacing=spacing, **options)  # type: ignore[arg-type]


def identities(config: Config, seed: int) -> dict[str, float]:
    """Check the paper's theorems at random settings, in float64.

    Parameters
    ----------
    config : Config
    seed : int

    Returns
    -------
    dict
        ``sde``: residual of the moment equations and of the sum of Bayesian updates; ``loss``:
        relative gap of loss and score matching; ``sampler``: gap of original sampler and solver.
    """
    generator = seeded(seed)
    draw = torch.rand(3, generator=generator, dtype=torch.float64)
    sigma_1, t = float(10 ** (-3 * draw[0] - 0.3)), float(0.02 + 0.96 * draw[1])
    continuous = ContinuousBFNSchedule(sigma_1)
    discrete = DiscreteBFNSchedule(2 + seed % 30, float(0.1 + 9 * draw[2]))
    return {
        "sde": max(_sde_residual(continuous, t), _sde_residual(discrete, t)),
        "loss": _loss_gap(continuous, discrete, generator),
        "sampler": _sampler_gap(continuous, discrete, t, generator),
    }


def _sde_residual(schedule: Any, t: float) -> float:
    time = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    if isinstance(schedule, ContinuousBFNSchedule):
        mean, variance = schedule.gamma(time), schedule.gamma(time) * schedule.omega(time)
        alpha = schedule.beta(1 - torch.arange(10, dtype=torch.float64) / 9 * (1 - t)).diff()
        rho = 1 + alpha.sum()
        updates = torch.stack([alpha.sum() / rho - mean, (alpha / rho**2).sum() - variance])
    else:
        mean, variance = schedule.beta(time), schedule.num_classes * schedule.beta(time)
        updates = torch.zeros(2)
    slopes = [torch.autograd.grad(m, time, retain_graph=True)[0] for m in (mean, variance)]
    drift, noise = schedule.drift(time), schedule.diffusion2(time)
    right = (drift * mean, 2 * drift * variance + noise)
    scale = (drift * mean, 2 * (drift * variance).abs() + noise)
    gaps = [abs((a - b) / c) for a, b, c in zip(slopes, right, scale, strict=True)]
    return max(float(gap.detach()) for gap in (*gaps, *updates.abs()))


def _loss_gap(
    continuous: ContinuousBFNSchedule, discrete: DiscreteBFNSchedule, generator: torch.Generator
) -> float:
    start = int(torch.randint(2**31, (), generator=generator))
    s = 0.02 + 0.96 * torch.rand(64, generator=generator, dtype=torch.float64)
    x = 2 * torch.rand(64, 3, generator=generator, dtype=torch.float64) - 1
    k = torch.randint(discrete.num_classes, (64, 3), generator=generator)
    onehot = nn.functional.one_hot(k, discrete.num_classes)
    beta = discrete.beta(1 - s)[:, None, None]
    alpha, sigma = (c[:, None] for c in continuous.alpha_sigma(1 - s))
    cases: list[tuple[Any, Tensor, Tensor, Tensor]] = [
        (
            ContinuousBFN(lambda mu, s: torch.tanh(3 * mu + s[:, None]), continuous, "sample"),
            x,
            alpha * x,
            sigma**2,
        ),
        (
            DiscreteBFN(lambda theta, s: 3 * theta.flip(1), discrete),
            k,
            beta * (discrete.num_classes * onehot - 1),
            discrete.num_classes * beta,
        ),
    ]
    gaps = []
    for flow, values, mean, variance in cases:
        loss = flow.loss(values, s=s, generator=seeded(start), reduction="none")
        state = flow.belief(values, s, seeded(start))
        conditional = (mean - state) / variance
        square = ((flow.score(state, 1 - s) - conditional) ** 2).flatten(1).sum(1) / 3
        matched = 0.5 * flow.schedule.diffusion2(1 - s) * square
        gaps.append(float(((loss - matched) / matched).abs().max()))
    return max(gaps)


def _sampler_gap(
    continuous: ContinuousBFNSchedule,
    discrete: DiscreteBFNSchedule,
    t: float,
    generator: torch.Generator,
) -> float:
    shape = (3, 100, discrete.num_classes)
    state, guess, noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    s, theta = t + 0.5 * (0.99 - t), guess.softmax(-1)
    pairs = [
        [rule(continuous, state, guess, s, t, noise=noise) for rule in rules]
        for rules in [(bayesian_update, sde_bfn_solver)]
    ]
    pairs += [
        [rule(discrete, state, theta, s, t, noise=noise) for rule in rules]
        for rules in [(bayesian_update_discrete, sde_bfn_solver_discrete)]
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)


def variance_error(config: Config, seed: int) -> dict[str, float]:
    """Exact variance error of a solver on Gaussian data (mean 0.3, deviation 0.4), no sampling.

    Parameters
    ----------
    config : Config
        ``solver``, ``steps``, ``spacing``.
    seed : int
        Not used: nothing is random.

    Returns
    -------
    dict
        ``error``: variance of the state at the end of the grid, against its closed form for
        infinitely many steps.
    """
    schedule = ContinuousBFNSchedule(0.03)
    flow = ContinuousBFN(lambda mu, s: mu, schedule, "sample")
    sampler = BFNSampler(
        flow,
        config.solver,
        config.steps,
        timestep_spacing=config.spacing,  # type: ignore[arg-type]
        last_step="integrate",
    )
    limit = _variance_limit(schedule, sampler, 0.4)
    return {"error": abs(gaussian_moments(sampler, 0.3, 0.4)[1] - limit)}


def _variance_limit(schedule: ContinuousBFNSchedule, sampler: BFNSampler, std: float) -> float:
    """Variance at t = 0 for infinitely many steps: the start differs a little from the marginal."""

    def marginal(t: float) -> float:
        alpha, sigma = (float(c) for c in schedule.alpha_sigma(t))
        return alpha**2 * std**2 + sigma**2

    first, end = float(sampler.timesteps[0]), marginal(0.0)
    if sampler.solver.original:
        return end
    start, exact = float(schedule.alpha_sigma(first)[1]) ** 2, marginal(first)
    if not sampler.solver.stochastic:
        return end * start / exact
    gain = float(schedule.gamma(first) / schedule.gamma(0.0)) * end / exact
    return end + gain**2 * (start - exact)


RING = GaussianMixture.ring(8, radius=0.7, std=0.05)
RING_SCHEDULE = ContinuousBFNSchedule(1e-3)


@cache
def chain() -> MarkovChain:
    """Return the chapter's Markov chain: five symbols, six positions."""
    return MarkovChain.random(5, 6, 0.4, seeded(11))


CHAIN_BETA = 9.0


@cache
def _reference(problem: str, seed: int) -> tuple[Any, Tensor, Tensor]:
    if problem == "ring":
        flow: Any = RING.flow(RING_SCHEDULE)
        start = flow.prior((64, 2), 0.99, seeded(seed), dtype=torch.float64)
        eta = 0.01
    else:
        flow, eta = chain().flow(CHAIN_BETA), 0.001
        start = flow.prior((64, 6), 0.999, seeded(seed), dtype=torch.float64)
    end, _ = adaptive_flow(flow, start, 1 - eta, rtol=1e-9, atol=1e-10, method="DOP853")
    return flow, start, end


def trajectory_error(config: Config, seed: int) -> dict[str, float]:
    """Error of a deterministic solver at the end of its trajectories, exact predictions.

    Parameters
    ----------
    config : Config
        ``problem``, ``solver``, ``steps``, ``spacing``.
    seed : int
        Of the 64 starting points.

    Returns
    -------
    dict
        ``error``: root mean square distance to a DOP853 solution with tolerance 1e-9.
    """
    if SOLVERS[config.solver].stochastic:
        raise ValueError(f"Trajectories need a deterministic solver, not {config.solver!r}.")
    flow, start, end = _reference(config.problem, seed)
    sampler = BFNSampler(
        flow,
        config.solver,
        config.steps,
        timestep_spacing=config.spacing,  # type: ignore[arg-type]
    )
    state, previous = start, None
    for i in range(config.steps):
        prediction = sampler.predict(state, float(sampler.timesteps[i]))
        state = sampler.step(prediction, i, state, previous=previous).prev_state
        previous = prediction
    return {"error": float((state - end).square().mean().sqrt())}


def ring_quality(config: Config, seed: int) -> dict[str, Any]:
    """Sample the ring of eight Gaussians with the exact posterior mean.

    Parameters
    ----------
    config : Config
        ``solver``, ``nfe``, ``spacing``, ``ring_samples``.
    seed : int

    Returns
    -------
    dict
        ``energy``: energy distance to fresh data; ``spread``: deviation within the modes (0.05 is
        right); ``points``: the first 500 samples.
    """
    sampler = sampler_for(RING.flow(RING_SCHEDULE), config.solver, config.nfe, config.spacing)
    x = sampler.sample((config.ring_samples, 2), seeded(seed), dtype=torch.float64)
    fresh = RING.sample(config.ring_samples, seeded(10_000 + seed))
    offset = (x[:, None] - RING.means).square().sum(-1).amin(1)
    return {
        "energy": energy_distance(x, fresh),
        "spread": float((offset.mean() / 2).sqrt()),
        "points": x[:500].numpy(),
        "calls": sampler.nfe,
    }


def chain_quality(config: Config, seed: int) -> dict[str, float]:
    """Sample the Markov chain with exact predictions.

    Parameters
    ----------
    config : Config
        ``solver`` (or "masked-diffusion"), ``nfe``, ``chain_samples``.
    seed : int

    Returns
    -------
    dict
        ``excess``: negative log-likelihood under the true chain minus its entropy, nats;
        ``tv``: mean total variation of the pairs of neighbours.
    """
    law = chain()
    if config.solver == "masked-diffusion":
        peer = MaskedDiffusion(law.model(), law.num_classes, "probs")
        x = peer.sample((config.chain_samples, law.length), config.nfe, seeded(seed), torch.float64)
        calls = peer.nfe
    else:
        sampler = sampler_for(law.flow(CHAIN_BETA), config.solver, config.nfe)
        x = sampler.sample((config.chain_samples, law.length), seeded(seed), dtype=torch.float64)
        calls = sampler.nfe
    return {
        "excess": float(-law.log_prob(x).mean()) - law.entropy(),
        "tv": _pair_tv(law, x),
        "calls": calls,
    }


def _pair_tv(law: MarkovChain, x: Tensor) -> float:
    classes, marginal, distances = law.num_classes, law.initial, []
    for d in range(law.length - 1):
        pairs = marginal[:, None] * law.transition
        counts = ngram_counts(x[:, d : d + 2], 2, classes)
        distances.append(total_variation(pairs.ravel(), counts))
        marginal = marginal @ law.transition
    return float(np.mean(distances))


SYMBOL = (0.6, 0.3, 0.1)


def symbol_bias(config: Config, seed: int) -> dict[str, Any]:
    """Sample one symbol with probabilities (0.6, 0.3, 0.1), exact predictions.

    Parameters
    ----------
    config : Config
        ``solver``, ``nfe``, ``symbol_samples``.
    seed : int

    Returns
    -------
    dict
        ``tv``: total variation to the true law, from the probabilities of the last prediction (a
        draw from it is the sample); ``law``: the mean of those probabilities.
    """
    law = torch.tensor(SYMBOL, dtype=torch.float64)
    flow = MarkovChain(law, torch.eye(3), 1).flow(3.0)
    sampler = sampler_for(flow, config.solver, config.nfe)
    last: list[Tensor] = []
    sampler.sample(
        (config.symbol_samples, 1),
        seeded(seed),
        callback=lambda i, t, state, prediction: last.append(prediction),
        dtype=torch.float64,
    )
    mean = last[-1].mean((0, 1))
    return {"tv": total_variation(mean, law), "law": mean.numpy(), "calls": sampler.nfe}


@cache
def image_flow() -> ContinuousBFN:
    """Return the trained image flow that the package carries."""
    return ContinuousBFN(load_network("images")[0], IMAGE_SCHEDULE)


@cache
def text_flow() -> DiscreteBFN:
    """Return the trained text flow that the package carries."""
    return DiscreteBFN(load_network("text")[0], TEXT_SCHEDULE)


@cache
def feature_network() -> nn.Module:
    """Train a small classifier of clothing; its 64 hidden features measure Frechet distances."""
    pixels, kinds, generator = data.images().flatten(1), data.labels(), seeded(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        network = nn.Sequential(body, nn.Linear(64, 10))
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(8):
        for rows in torch.randperm(len(pixels), generator=generator).split(100):
            loss = nn.functional.cross_entropy(network(pixels[rows]), kinds[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network.eval().requires_grad_(False)


def classifier_accuracy() -> float:
    """Accuracy of :func:`feature_network` on the 2,000 test images."""
    logits = feature_network()(data.images("test").flatten(1))
    return float((logits.argmax(1) == data.labels("test")).double().mean())


def _features(pixels: Tensor) -> np.ndarray:
    body = feature_network()[0]
    return body(pixels.flatten(1)).double().numpy()


def image_distance(sampler: BFNSampler, count: int, seed: int) -> float:
    """Frechet distance of ``count`` samples of a sampler to the 2,000 test images.

    Parameters
    ----------
    sampler : BFNSampler
        Of a flow for images of 28 x 28 pixels.
    count, seed : int

    Returns
    -------
    float
    """
    x = sampler.sample((count, 1, 28, 28), seeded(seed))
    return frechet_distance(_features(x.clamp(-1, 1)), _features(data.images("test")))


def image_quality(config: Config, seed: int) -> dict[str, Any]:
    """Sample clothing with the trained network and measure the Frechet distance.

    Parameters
    ----------
    config : Config
        ``solver`` ("data" for real training images: the floor), ``nfe``, ``spacing``,
        ``image_samples``.
    seed : int

    Returns
    -------
    dict
        ``frechet``: distance in 64 features to the 2,000 test images; ``images``: the first eight.
    """
    count, calls = config.image_samples, 0
    if config.solver == "data":
        pixels = data.images()
        x = pixels[torch.randperm(len(pixels), generator=seeded(seed))[:count]]
    else:
        sampler = sampler_for(
            image_flow(), config.solver, config.nfe, config.spacing, clip_sample=1.0
        )
        x = sampler.sample((count, 1, 28, 28), seeded(seed))
        calls = sampler.nfe
    return {
        "frechet": frechet_distance(_features(x.clamp(-1, 1)), _features(data.images("test"))),
        "images": x[:8, 0].numpy().astype(np.float16),
        "calls": calls,
    }


def text_quality(config: Config, seed: int) -> dict[str, Any]:
    """Sample speeches with a trained network and measure spelling and n-grams.

    Parameters
    ----------
    config : Config
        ``solver`` (also "n-gram", and "data" for held-out speeches), ``nfe``, ``text_samples``,
        ``text_length``.
    seed : int

    Returns
    -------
    dict
        ``spelling``: share of whole words that occur in the speeches; ``misspelling``: 1 minus it;
        ``trigram_tv``: total variation of character trigrams to the training text; ``example``.
    """
    shape, generator, calls = (config.text_samples, config.text_length), seeded(seed), 0
    if config.solver == "data":
        x = data.windows(data.speeches("test"), shape[1], shape[0], generator)
    elif config.solver == "n-gram":
        x = NGram(data.speeches(), 4).sample(*shape, generator)
    else:
        sampler = sampler_for(text_flow(), config.solver, config.nfe)
        x = sampler.sample(shape, generator)
        calls = sampler.nfe
    texts = [data.decode(row) for row in x]
    spelling = spelling_accuracy(texts, data.words())
    return {
        "spelling": spelling,
        "misspelling": 1 - spelling,
        "trigram_tv": ngram_tv(x, data.speeches(), 3),
        "entropy": _word_entropy(texts),
        "example": texts[0],
        "calls": calls,
    }


def _word_entropy(texts: list[str]) -> float:
    words = " ".join(text[text.find(" ") : text.rfind(" ") + 1] for text in texts).split()
    counts = np.unique(words, return_counts=True)[1] / len(words)
    return float(-(counts * np.log(counts)).sum())


def observed_order(coarse: float, fine: float, factor: float = 2.0) -> float:
    """Order of convergence from two errors whose steps differ by a factor.

    Examples
    --------
    >>> observed_order(4.0, 1.0)
    2.0
    """
    return math.log(coarse / fine) / math.log(factor)


EXPERIMENTS: dict[str, Callable[..., Any]] = {
    "identities": identities,
    "variance_error": variance_error,
    "trajectory_error": trajectory_error,
    "ring_quality": ring_quality,
    "chain_quality": chain_quality,
    "symbol_bias": symbol_bias,
    "image_quality": image_quality,
    "text_quality": text_quality,
}


if __name__ == "__main__":
    import sys

    print(train_and_ship(sys.argv[1], Config(), 0, sys.argv[2]))

"""Speed of LA-NAM against the alternatives; each ratio comes from one run.

``pytest tests/benchmarks/test_additive_models.py`` prints the times; the assertions are on ratios
only, and not asked of the exact block, whose time goes into the same Cholesky factors either way.
The peers are laplace-torch, when it is installed, and what one would write by hand: a Python loop
over networks, whose posterior is handled as one model with a Jacobian of shape (rows, all
parameters).
"""

import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap

from icml24.additive_models import LaplaceNAMRegressor

STEPS = 200  # 100 epochs of N=824 in batches of 512


def rows(n_rows, n_columns, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, size=(n_rows, n_columns))
    return X, np.sin(3 * X[:, 0]) + 0.3 * rng.normal(size=n_rows)


class LoopedNAM(nn.Module):
    """The additive model as a list of torch networks."""

    def __init__(self, n_columns, width=64):
        super().__init__()
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(1, width), nn.GELU(), nn.Linear(width, 1))
            for _ in range(n_columns)
        )

    def forward(self, x):
        return sum(net(x[..., [k]]) for k, net in enumerate(self.networks))


def train_loop(X, y, steps=STEPS, evidence_every=20):
    """The same schedule by hand: autograd, and a dense Gauss-Newton matrix of each network."""
    x, target = torch.from_numpy(X).float(), torch.from_numpy(y).float()[:, None]
    model = LoopedNAM(X.shape[1])
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        batch = torch.randperm(len(x))[:512]
        loss = (model(x[batch]) - target[batch]).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step % evidence_every == 0:
            curvature_loop(model, x)
    return model


def jacobian_of(net, x):
    parameters = dict(net.named_parameters())

    def single(p, row):
        return functional_call(net, p, (row[None],))[0, 0]

    parts = vmap(jacrev(single), (None, 0))(parameters, x)
    return torch.cat([part.flatten(1) for part in parts.values()], dim=1).detach()


def curvature_loop(model, x):
    factors = []
    for k, net in enumerate(model.networks):
        jacobian = jacobian_of(net, x[:, [k]]).double()
        precision = jacobian.T @ jacobian + torch.eye(jacobian.shape[1])
        for _ in range(10):  # hyper steps
            factor = torch.linalg.cholesky(precision)
            torch.cholesky_inverse(factor)
        factors.append(factor)
    return factors


def variance_loop(model, factors, x):
    """The whole Jacobian first, as a library that does not know of the sum has to."""
    blocks = [jacobian_of(net, x[:, [k]]) for k, net in enumerate(model.networks)]
    sizes = [block.shape[1] for block in blocks]
    joint = jacobian_of(model, x).double()
    total = torch.zeros(len(x), dtype=torch.float64)
    for part, factor in zip(joint.split(sizes, dim=1), factors, strict=True):
        total += torch.linalg.solve_triangular(factor, part.T, upper=False).square().sum(0)
    return total


def seconds(function, *arguments, repeat=1):
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)


def fit(X, y, structure):
    settings = {"max_iter": STEPS, "burn_in": 20, "hyper_every": 20, "random_state": 0}
    return LaplaceNAMRegressor(structure=structure, **settings).fit(X, y)


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_fit(benchmark, structure):
    X, y = rows(824, 8)
    benchmark.pedantic(fit, (X, y, structure), rounds=2, warmup_rounds=1)
    loop = seconds(train_loop, X, y)
    benchmark.extra_info["hand-written loop, seconds"] = round(loop, 2)
    benchmark.extra_info["times faster"] = round(loop / benchmark.stats["min"], 1)
    assert structure == "full" or loop > 1.2 * benchmark.stats["min"]


@pytest.mark.parametrize("n_columns", [8, 32, 100])
@pytest.mark.parametrize("structure", ["kron", "full"])
def test_predict_with_variance(benchmark, structure, n_columns):
    X, y = rows(1000, n_columns)
    model = fit(X[:200], y[:200], structure)
    benchmark.pedantic(model.predict, (X,), {"return_std": True}, rounds=5, warmup_rounds=1)
    looped = LoopedNAM(n_columns)
    x = torch.from_numpy(X).float()
    factors = curvature_loop(looped, x[:200])
    loop = seconds(variance_loop, looped, factors, x)
    benchmark.extra_info["hand-written loop, seconds"] = round(loop, 2)
    benchmark.extra_info["times faster"] = round(loop / benchmark.stats["min"], 1)
    assert structure == "full" or loop > 1.2 * benchmark.stats["min"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n_columns", [8, 32])
def test_fit_against_laplace_torch(benchmark, n_columns):
    laplace = pytest.importorskip("laplace", reason="needs laplace-torch")
    from laplace.curvature import CurvlinopsGGN
    from torch.utils.data import DataLoader, TensorDataset

    X, y = rows(824, n_columns)
    benchmark.pedantic(fit, (X, y, "kron"), rounds=2, warmup_rounds=1)
    data = TensorDataset(torch.from_numpy(X).float(), torch.from_numpy(y).float()[:, None])
    other = seconds(
        lambda: laplace.marglik_training(
            LoopedNAM(n_columns),
            DataLoader(data, batch_size=512, shuffle=True),  # two steps an epoch, as ours
            likelihood="regression",
            backend=CurvlinopsGGN,
            optimizer_kwargs={"lr": 0.01},
            n_epochs=STEPS // 2,
            n_epochs_burnin=10,
            marglik_frequency=10,
        )
    )
    benchmark.extra_info["laplace-torch, seconds"] = round(other, 2)
    benchmark.extra_info["times faster"] = round(other / benchmark.stats["min"], 1)
    assert other > 2 * benchmark.stats["min"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n_columns", [8, 32])  # a hundred columns need more than 20 GB there
def test_predict_with_variance_against_laplace_torch(benchmark, n_columns):
    laplace = pytest.importorskip("laplace", reason="needs laplace-torch")
    from laplace.curvature import CurvlinopsGGN
    from torch.utils.data import DataLoader, TensorDataset

    X, y = rows(1000, n_columns)
    model = fit(X[:200], y[:200], "kron")
    benchmark.pedantic(model.predict, (X,), {"return_std": True}, rounds=5, warmup_rounds=1)
    x, target = torch.from_numpy(X).float(), torch.from_numpy(y).float()[:, None]
    theirs = laplace.KronLaplace(LoopedNAM(n_columns), "regression", backend=CurvlinopsGGN)
    theirs.fit(DataLoader(TensorDataset(x[:200], target[:200]), batch_size=200))
    other = seconds(theirs, x)
    benchmark.extra_info["laplace-torch, seconds"] = round(other, 2)
    benchmark.extra_info["times faster"] = round(other / benchmark.stats["min"], 1)
    assert other > 10 * benchmark.stats["min"]


def test_memory_of_prediction_grows_with_one_network_not_with_all():
    """Twice the rows at a fixed chunk size: the largest temporary stays the same."""
    import tracemalloc

    from icml24.additive_models.curvature import _NUMBERS_PER_CHUNK, row_chunks

    for n_columns in (8, 32, 128):
        chunks = list(row_chunks(100_000, n_columns * 193))
        largest = max(chunk.stop - chunk.start for chunk in chunks) * n_columns * 193
        assert largest <= _NUMBERS_PER_CHUNK
    tracemalloc.start()
    X, y = rows(200, 8)
    model = fit(X, y, "full")
    peaks = []
    for n_rows in (2000, 4000):
        tracemalloc.reset_peak()
        model.predict(rows(n_rows, 8)[0], return_std=True)
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert peaks[1] < 2.5 * peaks[0]

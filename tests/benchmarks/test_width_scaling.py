"""Speed of Adam-atan2 against AdamW and its peer, and of stacked training against a loop."""

import copy
import os

import pytest
import torch
from torch.nn import functional as F

from icml24.width_scaling import (
    AdamAtan2,
    CharMLP,
    StackedModels,
    apply_parameterization,
    exponent_table,
    param_groups,
    tag_parameters,
)
from icml24.width_scaling.data import load_text

SIZES = {
    "1e6 in 1 tensor": [1_000_000],
    "1e6 in 100 tensors": [10_000] * 100,
    "1e7 in 10 tensors": [1_000_000] * 10,
}
if os.environ.get("ICML24_LARGE"):
    SIZES["1e8 in 25 tensors"] = [4_000_000] * 25


def adamw(params):
    return torch.optim.AdamW(params, foreach=True)


def adamw_fused(params):
    return torch.optim.AdamW(params, fused=True)


def ours(params):
    return AdamAtan2(params, weight_decay=0.01)


def peer(params):
    module = pytest.importorskip("adam_atan2_pytorch")
    return module.AdamAtan2(params, lr=1e-3, weight_decay=0.01)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("make", [ours, adamw, adamw_fused, peer])
@pytest.mark.parametrize("size", SIZES)
def test_optimizer_step(benchmark, make, size):
    benchmark.group = f"one step, parameters: {size}"
    g = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=g).requires_grad_() for n in SIZES[size]]
    for p in params:
        p.grad = torch.randn(p.shape, generator=g)
    optimizer = make(params)
    optimizer.step()
    benchmark.pedantic(optimizer.step, rounds=60, warmup_rounds=2)  # machines are noisy


@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("way", ["stacked", "loop"])
def test_ten_models(benchmark, width, way):
    """Forward, backward and update of ten models that differ in their rate."""
    benchmark.group = f"ten models of width {width}, one step"
    model = CharMLP(width)
    tags = tag_parameters(model, 128)
    apply_parameterization(model, tags)
    models = [copy.deepcopy(model) for _ in range(10)]
    groups = [g for i, m in enumerate(models) for g in param_groups(m, tags, 1e-3 * (i + 1))]
    optimizer = torch.optim.Adam(groups, fused=True)
    windows = load_text().windows(9, 128, torch.Generator().manual_seed(0))
    x, y = windows[:, :-1], windows[:, -1]
    stack = StackedModels(models, F.cross_entropy) if way == "stacked" else None

    def step():
        if stack is not None:
            stack.step(x, y, optimizer)
            return
        optimizer.zero_grad()
        for m in models:
            F.cross_entropy(m(x), y).backward()
        optimizer.step()

    benchmark.pedantic(step, rounds=20, warmup_rounds=3)


def test_exponent_table(benchmark):
    """All 24 linear programs (48 solves)."""
    assert benchmark(exponent_table).shape == (4, 6)

"""Alignment measured: closed cases, bounds, hooks, and the coordinate check up to width 2048."""

import math

import matplotlib as mpl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from icml24.width_scaling import (
    AlignmentMonitor,
    coordinate_check,
    log_alignment_ratio,
    parametrize,
    plot_coordinate_check,
    tag_parameters,
    width_slopes,
)

mpl.use("agg")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp(width, bias=False):
    return nn.Sequential(
        nn.Linear(6, width, bias=bias),
        nn.ReLU(),
        nn.Linear(width, width, bias=bias),
        nn.ReLU(),
        nn.Linear(width, 3, bias=bias),
    )


def test_independent_weights_and_inputs_are_half_aligned():
    ratio = log_alignment_ratio(randn(1024, 1024), randn(1024, seed=1))
    assert ratio == pytest.approx(0.5, abs=0.02)


def test_rank_one_update_is_fully_aligned_with_its_input():
    # Equal sizes of the entries of z, otherwise RMS(z)^2 n = sum z^2 still gives exactly 1.
    z = randn(256, seed=2)
    assert log_alignment_ratio(torch.outer(randn(64, seed=3), z), z) == pytest.approx(1, abs=1e-6)


def test_identity_is_exactly_half():
    assert log_alignment_ratio(torch.eye(64), randn(10, 64)) == pytest.approx(0.5, abs=1e-7)


@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_never_above_one(seed, n, out, batch):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, n, generator=g).abs() ** 3
    assert log_alignment_ratio(weight, torch.rand(batch, n, generator=g)) <= 1 + 1e-6


def test_degenerate_contractions():
    assert math.isnan(log_alignment_ratio(torch.zeros(3, 4), torch.ones(4)))
    assert log_alignment_ratio(torch.tensor([[1.0, -1.0]]), torch.ones(2)) == -math.inf
    with pytest.raises(ValueError, match="do not fit"):
        log_alignment_ratio(torch.ones(3, 4), torch.ones(3))
    with pytest.raises(ValueError, match="at least two terms"):
        log_alignment_ratio(torch.ones(3, 1), torch.ones(1))


class TestMonitor:
    def test_against_the_definition(self):
        model = mlp(32)
        groups = parametrize(model, 32, "mup", lr=0.05)
        optimizer = torch.optim.Adam(groups)
        x = randn(16, 6)

        def state():
            with torch.no_grad():
                z = F.relu(model[2](F.relu(model[0](x))))
            return model[4].weight.detach().clone(), z

        (w0, z0), tags = state(), tag_parameters(model, 32)
        with AlignmentMonitor(model, tags, x) as monitor:
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            frame = monitor.snapshot().set_index("layer")
        w, z = state()
        row = frame.loc["4.weight"]
        assert row["alpha"] == pytest.approx(log_alignment_ratio(w - w0, z0), abs=1e-6)
        assert row["omega"] == pytest.approx(log_alignment_ratio(w0, z - z0), abs=1e-6)
        assert row["u"] == pytest.approx(log_alignment_ratio(w - w0, z - z0), abs=1e-6)
        assert row["log_ratio"] == pytest.approx(log_alignment_ratio(w, z), abs=1e-6)
        assert list(frame["layer_type"]) == ["hidden", "readout"]

    def test_leaves_no_trace(self):
        model = nn.Sequential(*mlp(16), nn.Dropout(0.5))
        model[0].eval()
        x, before = randn(4, 6), torch.get_rng_state()
        monitor = AlignmentMonitor(model, tag_parameters(model, 16), x)
        monitor.snapshot()
        monitor.close()
        assert model.training and not model[0].training and model[5].training
        assert torch.equal(torch.get_rng_state(), before)
        assert not any(m._forward_pre_hooks for m in model.modules())

    def test_feeds_the_solver(self):
        model = mlp(64)
        x = randn(16, 6)
        with AlignmentMonitor(model, tag_parameters(model, 64), x) as monitor:
            with pytest.raises(ValueError, match="Nothing has changed"):
                monitor.alignment()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(x).square().mean().backward()
            optimizer.step()
            measured = monitor.alignment()
        assert 0.5 < measured.alpha[0] <= 1
        assert min(measured.omega) >= 0

    def test_transposed_layers_of_hugging_face(self):
        utils = pytest.importorskip("transformers.pytorch_utils")
        model = nn.Sequential(nn.Linear(6, 32), utils.Conv1D(32, 32), nn.Linear(32, 2))
        x = randn(16, 6)
        with AlignmentMonitor(model, tag_parameters(model, 32), x) as monitor:
            row = monitor.snapshot().set_index("layer").loc["1.weight"]
        z = model[0](x).detach()
        expected = log_alignment_ratio(model[1].weight.detach().T, z)
        assert row["log_ratio"] == pytest.approx(expected, abs=1e-6)

    def test_errors(self):
        convolution = nn.Sequential(nn.Conv2d(1, 8, 1), nn.Conv2d(8, 1, 1))
        tags = tag_parameters(convolution, 8)
        with pytest.raises(ValueError, match="no linear hidden or readout"):
            AlignmentMonitor(convolution, tags, torch.zeros(1, 1, 2, 2))

        class Unused(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.spare, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

            def forward(self, x):
                return self.head(self.body(x))

        model = Unused()
        with pytest.raises(ValueError, match="were not called"):
            AlignmentMonitor(model, tag_parameters(model, 8), randn(2, 6))


class TestCoordinateCheck:
    x, y = randn(64, 6, seed=5), torch.arange(64) % 3

    def check(self, name, widths, optimizer="adam", alignment="full", lr=0.02, steps=4, **kwargs):
        def build(width, seed):
            model = mlp(width)
            groups = parametrize(
                model, 64, name, optimizer, alignment, lr=lr, seed=seed, gain={"hidden": 2**0.5}
            )
            kind = {"adam": lambda g: torch.optim.Adam(g, eps=1e-20), "sgd": torch.optim.SGD}
            return model, kind[optimizer](groups)

        return coordinate_check(
            build, widths, (self.x, self.y), F.cross_entropy, steps=steps, **kwargs
        )

    @pytest.mark.parametrize(("name", "lr"), [("mup", 0.002), ("mean_field", 0.02)])
    def test_width_invariance_from_64_to_2048(self, name, lr):
        frame = self.check(name, [64, 256, 1024, 2048], lr=lr, seeds=2)
        slopes = width_slopes(frame)["slope"]
        assert slopes["change"].abs().max() < 0.15
        assert slopes["output"][["0", "2"]].abs().max() < 0.05  # hidden layers; logits start small

    @pytest.mark.parametrize(("name", "lr"), [("standard", 0.002), ("ntk", 0.02)])
    def test_nothing_explodes_from_64_to_2048(self, name, lr):
        slopes = width_slopes(self.check(name, [64, 256, 1024, 2048], lr=lr, seeds=2))["slope"]
        for quantity in ("change", "output"):
            assert slopes[quantity][["0", "2"]].abs().max() < 0.15
        # The initial readout meets changed activations with more than its assumed alignment 1/2,
        # so the logits of these two parameterizations do grow a little.
        assert slopes["change"]["4"] < 0.5

    def test_global_rate_in_standard_parameterization_explodes(self):
        frame = self.check("standard", [64, 256, 1024], alignment="global", lr=0.002)
        assert width_slopes(frame).loc[("change", "2"), "slope"] > 0.5

    @pytest.mark.parametrize("name", ["standard", "ntk", "mup", "mean_field"])
    def test_gradients_shrink_as_predicted(self, name):
        from icml24.width_scaling import PARAMETERIZATIONS

        frame = self.check(name, [64, 256, 1024], seeds=3, steps=1)
        slopes = width_slopes(frame)["slope"]["gradient"]
        g = PARAMETERIZATIONS[name].gradient_exponents()
        for layer, kind in (("0.weight", 0), ("2.weight", 1), ("4.weight", 2)):
            assert slopes[layer] == pytest.approx(-list(g)[kind], abs=0.1)

    def test_record_only_some_steps_and_train_on_other_batches(self):
        seen = []

        def training(step):
            seen.append(step)
            return randn(8, 6, seed=step), torch.arange(8) % 3

        frame = self.check("mup", [64], record=[4], training=training)
        assert sorted(frame["step"].unique()) == [0, 4]
        assert seen == [0, 1, 2, 3]

    def test_measuring_does_not_change_training(self):
        sparse = self.check("mup", [64], record=[4])
        dense = self.check("mup", [64])
        last = dense[dense["step"] == 4].reset_index(drop=True)
        assert last.equals(sparse[sparse["step"] == 4].reset_index(drop=True))

    def test_plot(self):
        frame = self.check("mup", [32, 64])
        ax = plot_coordinate_check(frame, "gradient")
        assert len(ax.lines) == 3
        with pytest.raises(ValueError, match="quantity must be one of"):
            plot_coordinate_check(frame, "size")

    def test_errors(self):
        with pytest.raises(ValueError, match="at least one width"):
            self.check("mup", [])
        with pytest.raises(ValueError, match="at least two widths"):
            width_slopes(self.check("mup", [32]))

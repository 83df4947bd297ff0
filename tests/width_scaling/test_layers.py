"""Tagging, initialisation, groups: rules on many architectures, and parity with other routes."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from icml24.width_scaling import (
    PARAMETERIZATIONS,
    AdamAtan2,
    CharMLP,
    LayerExponents,
    Parameterization,
    ScaledAdam,
    Transformer,
    apply_parameterization,
    effective_weight,
    fold_multipliers,
    lr_exponents,
    param_groups,
    parametrize,
    raw_parameter,
    tag_parameters,
)

ALL = sorted(PARAMETERIZATIONS)


def mlp(width, bias=True):
    return nn.Sequential(
        nn.Linear(6, width, bias=bias),
        nn.ReLU(),
        nn.Linear(width, width, bias=bias),
        nn.ReLU(),
        nn.Linear(width, 3, bias=bias),
    )


class _Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, 8))


def layers(tags):
    return {name: tag.layer for name, tag in tags.items()}


def slope(widths, values):
    return np.polyfit(np.log(widths), np.log(values), 1)[0]


class TestTags:
    def test_mlp(self):
        tags = tag_parameters(mlp(32), base_width=8)
        assert layers(tags) == {
            "0.weight": "embedding",
            "0.bias": "embedding",
            "2.weight": "hidden",
            "2.bias": "embedding",
            "4.weight": "readout",
            "4.bias": "fixed",
        }
        assert {tag.ratio for tag in tags.values()} == {4.0}
        assert tags["0.weight"].fan_in == 6 and tags["0.weight"].width == 32
        assert tags["4.weight"].fan_in == 32 and tags["4.weight"].width == 32
        assert tags["2.bias"].kind == "bias" and tags["2.weight"].kind == "matrix"

    def test_transformer(self):
        tags = tag_parameters(Transformer(64), base_width=16)
        found = layers(tags)
        assert found["tokens.weight"] == found["positions.weight"] == "embedding"
        assert found["blocks.0.norm_mlp.weight"] == "embedding"
        assert found["blocks.1.qkv.weight"] == found["blocks.0.down.weight"] == "hidden"
        assert found["readout.weight"] == "readout"
        assert tags["blocks.0.down.weight"].fan_in == 256
        assert tags["blocks.0.norm_mlp.weight"].kind == "vector"

    @pytest.mark.parametrize("build", [mlp, CharMLP, Transformer])
    def test_shapes_and_order_agree(self, build):
        by_order = tag_parameters(build(64), 16)
        by_shape = tag_parameters(build(64), 16, sibling=build(32))
        assert by_order == by_shape

    def test_convolutions(self):
        def build(width):
            return nn.Sequential(
                nn.Conv2d(3, width, 3),
                nn.BatchNorm2d(width),
                nn.Conv2d(width, 2 * width, 3),
                nn.ConvTranspose2d(2 * width, width, 2),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(width, 10),
            )

        tags = tag_parameters(build(16), 16)
        assert tags == tag_parameters(build(16), 16, sibling=build(8))
        assert tags["0.weight"].fan_in == 27
        assert tags["2.weight"].fan_in == 16 * 9
        assert tags["3.weight"].fan_in == 32 * 4
        assert tags["1.weight"].layer == "embedding" and tags["1.weight"].kind == "vector"

    def test_attention_and_recurrent_modules_of_torch(self):
        model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        stack = nn.Sequential(nn.Linear(5, 32), model, nn.LSTM(32, 32), nn.Linear(32, 2))
        found = layers(tag_parameters(stack, 32))
        assert found["1.self_attn.in_proj_weight"] == "hidden"
        assert found["1.self_attn.in_proj_bias"] == "embedding"
        assert found["2.weight_hh_l0"] == "hidden"

    def test_hugging_face_gpt2(self):
        transformers = pytest.importorskip("transformers")

        def build(width):
            config = transformers.GPT2Config(
                vocab_size=50, n_positions=8, n_embd=width, n_layer=1, n_head=2
            )
            config.tie_word_embeddings = False
            return transformers.GPT2LMHeadModel(config)

        model = build(32)
        tags = tag_parameters(model, 16)
        assert layers(tags) == layers(tag_parameters(model, 16, sibling=build(16)))
        assert tags["lm_head.weight"].layer == "readout"
        assert tags["transformer.h.0.mlp.c_proj.weight"].fan_in == 128
        assert tags["transformer.wpe.weight"].layer == "embedding"
        groups = parametrize(model, 16, "mup", lr=0.01)
        out = model(torch.zeros(1, 4, dtype=torch.long))
        out.logits.sum().backward()
        torch.optim.Adam(groups).step()

    def test_tied_weights_are_refused_or_declared(self):
        model = Transformer(32)
        model.readout.weight = model.tokens.weight
        with pytest.raises(ValueError, match=r"tokens\.weight and readout.weight are the same"):
            tag_parameters(model, 16)
        tags = tag_parameters(model, 16, tied="readout")
        assert tags["tokens.weight"].layer == "readout" and "readout.weight" not in tags
        assert tags["tokens.weight"].fan_in == 32
        groups = param_groups(model, tags, lr=1.0)
        rates = {name: g["lr"] for g in groups for name in g["names"]}
        assert rates["tokens.weight"] == 0.5
        apply_parameterization(model, tags, "standard")
        with pytest.raises(ValueError, match="tied, so it cannot have the multiplier"):
            apply_parameterization(model, tags, "mup")
        with pytest.raises(ValueError, match="tied must be one of"):
            tag_parameters(model, 16, tied="both")

    def test_unknown_matrices_must_be_named(self):
        class Model(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.table = nn.Parameter(torch.zeros(4, width))
                self.inside = nn.Linear(width, width)
                self.head = nn.Linear(width, 2)

        with pytest.raises(ValueError, match=r"Cannot tell the layer type of .*'table'"):
            tag_parameters(Model(16), 16)
        named = tag_parameters(
            Model(16), 8, overrides={"table": "embedding", "inside.weight": "hidden"}
        )
        assert named["table"].layer == "embedding" and named["table"].width == 16
        with pytest.raises(ValueError, match="Cannot tell"):
            tag_parameters(Model(16), 8, sibling=Model(32))
        known = {"table": "embedding"}
        shaped = tag_parameters(Model(16), 8, sibling=Model(32), overrides=known)
        assert layers(named) == layers(shaped)

    def test_overrides_are_regular_expressions(self):
        tags = tag_parameters(mlp(32), 8, overrides={r"\d\.bias": "fixed"})
        assert {tags[f"{i}.bias"].layer for i in (0, 2, 4)} == {"fixed"}

    def test_frozen_parameters_are_left_out(self):
        model = mlp(32)
        model[2].weight.requires_grad_(False)
        assert "2.weight" not in tag_parameters(model, 8)

    @pytest.mark.parametrize(
        ("model", "kwargs", "message"),
        [
            (nn.Linear(3, 4), {}, "no pair of embedding and readout"),
            (nn.ReLU(), {}, "no trainable parameters"),
            (nn.Sequential(nn.Linear(3, 8), _Empty()), {}, "1.weight has size zero"),
            (nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1)), {}, "run one batch"),
            (nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1, dtype=torch.cfloat)), {}, "real float"),
            (nn.Sequential(nn.Linear(3, 24), nn.Linear(36, 2)), {}, "does not fit the width 24"),
            (mlp(8), {"base_width": 0}, "at least 1"),
            (mlp(8), {"width": 0}, "at least 1"),
            (mlp(8), {"overrides": {"nothing": "hidden"}}, "no parameter is called"),
            (mlp(8), {"overrides": {".*": "middle"}}, "layer type is one of"),
            (mlp(8), {"overrides": {"0.bias": "hidden"}}, "is a vector"),
            (mlp(8), {"sibling": mlp(8)}, "same shapes"),
            (mlp(8), {"sibling": mlp(16, bias=False)}, "same parameters"),
            (
                mlp(8),
                {
                    "sibling": nn.Sequential(
                        *mlp(16)[:2], nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3)
                    )
                },
                "grow by one factor",
            ),
        ],
    )
    def test_errors(self, model, kwargs, message):
        with pytest.raises(ValueError, match=message):
            tag_parameters(model, **({"base_width": 8} | kwargs))


class TestInitialisation:
    @pytest.mark.parametrize("name", ALL)
    def test_sizes_of_activations_and_logits(self, name):
        widths, logits, hidden = [64, 256, 1024], [], []
        x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
        for width in widths:
            sizes = []
            for seed in range(4):
                model = mlp(width, bias=False)
                tags = tag_parameters(model, 64)
                apply_parameterization(model, tags, name, gain={"hidden": 2**0.5}, seed=seed)
                with torch.no_grad():
                    sizes.append([model[:3](x).square().mean(), model(x).square().mean()])
            h, o = np.sqrt(np.mean(sizes, axis=0))
            hidden.append(h)
            logits.append(o)
        assert slope(widths, hidden) == pytest.approx(0, abs=0.05)
        expected = 0 if name in ("standard", "ntk") else -0.5
        assert slope(widths, logits) == pytest.approx(expected, abs=0.08)

    def test_a_copied_table_error_is_caught(self):
        """One widely copied summary gives muP's readout as (1/2, 0)."""
        with pytest.raises(ValueError, match="readout"):
            Parameterization("copied", (-0.5, 0, 0.5), (0.5, 0.5, -0.1))
        copied = Parameterization("copied", (-0.5, 0, 0.5), (0.5, 0.5, 0))
        x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
        sizes = []
        for width in (64, 1024):
            model = mlp(width, bias=False)
            apply_parameterization(model, tag_parameters(model, 64), copied)
            sizes.append(float(model(x).detach().square().mean().sqrt()))
        assert slope([64, 1024], sizes) == pytest.approx(0, abs=0.2)  # not the -1/2 of muP

    @pytest.mark.parametrize("name", ALL)
    def test_standard_deviations(self, name):
        p = PARAMETERIZATIONS[name]
        model = nn.Sequential(nn.Linear(400, 256), nn.Linear(256, 256), nn.Linear(256, 300))
        apply_parameterization(model, tag_parameters(model, 64), p, gain={"2.weight": 3.0})
        expected = (400**-0.5, 1.0, 3.0)
        for i, name_ in enumerate(("0.weight", "1.weight", "2.weight")):
            raw = raw_parameter(model, name_)
            assert raw.std().item() == pytest.approx(expected[i] * 256 ** -p.b[i], rel=0.02)
            ratio = effective_weight(model, name_) / raw
            torch.testing.assert_close(ratio, torch.full_like(ratio, 256 ** -p.a[i]))

    def test_relative_rules_coincide_at_the_base_width(self):
        x = torch.randn(5, 6, dtype=torch.float64)
        outputs = []
        for name in ALL:
            model = mlp(32).double()
            groups = parametrize(model, 32, name, lr=0.1, relative=True)
            assert {group["lr"] for group in groups} == {0.1}
            outputs.append(model(x).detach())
        for other in outputs[1:]:
            torch.testing.assert_close(outputs[0], other)

    def test_biases_start_at_zero_and_norms_keep_their_scale(self):
        model = nn.Sequential(nn.Linear(3, 16), nn.LayerNorm(16), nn.Linear(16, 2))
        nn.init.constant_(model[1].weight, 1.5)
        parametrize(model, 4, "mup", lr=0.1)
        assert not effective_weight(model, "0.bias").any()
        assert not effective_weight(model, "2.bias").any()
        torch.testing.assert_close(effective_weight(model, "1.weight"), torch.full((16,), 1.5))

    def test_neither_global_random_state_nor_other_seeds(self):
        before = torch.get_rng_state()
        one, two, three = mlp(16), mlp(16), mlp(16)
        state = torch.get_rng_state()
        parametrize(one, 8, lr=0.1, seed=3)
        parametrize(two, 8, lr=0.1, seed=torch.Generator().manual_seed(3))
        parametrize(three, 8, lr=0.1, seed=4)
        assert torch.equal(torch.get_rng_state(), state)
        torch.set_rng_state(before)
        assert torch.equal(one[2].weight, two[2].weight)
        assert not torch.equal(one[2].weight, three[2].weight)

    def test_a_second_parameterization_is_refused(self):
        model = mlp(16)
        parametrize(model, 8, "mup", lr=0.1)
        with pytest.raises(ValueError, match="already has a multiplier"):
            parametrize(model, 8, "mup", lr=0.1)

    def test_refused_arguments_leave_the_model_alone(self):
        model = mlp(16)
        before = copy.deepcopy(model.state_dict())
        for kwargs in ({"lr": -1.0}, {"lr": 1.0, "constants": (0, 1, 1)}, {"lr": 1, "eps": -1}):
            with pytest.raises(ValueError, match="must"):
                parametrize(model, 8, "mup", **kwargs)
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[k], after[k]) for k in before)

    def test_folding_keeps_the_function_and_the_names(self):
        model = mlp(16)
        names = set(model.state_dict())
        parametrize(model, 8, "mup", lr=0.1)
        x = torch.randn(4, 6)
        expected = model(x)
        fold_multipliers(model)
        assert set(model.state_dict()) == names
        torch.testing.assert_close(model(x), expected)

    def test_tags_survive_the_multipliers(self):
        model = mlp(16)
        tags = tag_parameters(model, 8)
        apply_parameterization(model, tags, "mean_field")
        assert tag_parameters(model, 8) == tags


class TestGroups:
    @pytest.mark.parametrize("name", ALL)
    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "scaled_adam", "adafactor"])
    @pytest.mark.parametrize("alignment", ["full", "none", "global"])
    def test_identity_at_the_base_width(self, name, optimizer, alignment):
        model = mlp(16)
        constants = (2.0, 3.0, 5.0)
        groups = parametrize(model, 16, name, optimizer, alignment, lr=0.5, constants=constants)
        rates = {group["layer_type"]: group["lr"] for group in groups}
        assert rates == {"embedding": 1.0, "hidden": 1.5, "readout": 2.5, "fixed": 0.5}

    def test_rates_and_epsilons_follow_their_exponents(self):
        model = mlp(64)
        tags = tag_parameters(model, 4)
        groups = param_groups(model, tags, 1.0, "mup", eps=1e-8, per_layer_eps=True)
        c = lr_exponents("mup")
        g = PARAMETERIZATIONS["mup"].gradient_exponents()
        for group in groups:
            if group["layer_type"] != "fixed":
                assert group["lr"] == pytest.approx(16 ** -c[group["layer_type"]])
                assert group["eps"] == pytest.approx(1e-8 * 16 ** -g[group["layer_type"]])
        names = [name for group in groups for name in group["names"]]
        assert sorted(names) == sorted(tags)

    def test_own_exponents(self):
        model = mlp(64)
        groups = param_groups(
            model, tag_parameters(model, 4), 1.0, alignment=LayerExponents(0, 0.5, 2)
        )
        rates = {group["layer_type"]: group["lr"] for group in groups}
        assert rates == pytest.approx(
            {"embedding": 1, "hidden": 1 / 4, "readout": 1 / 256, "fixed": 1}
        )

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamAtan2, ScaledAdam])
    def test_weight_decay_shrinks_every_matrix_alike(self, kind):
        model = mlp(64)
        groups = parametrize(model, 4, lr=0.01, weight_decay=0.5)
        before = {n: raw_parameter(model, n).detach().clone() for n in tag_parameters(model, 4)}
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        nn.init.ones_(model[2].bias)
        before["2.bias"].fill_(1)
        kind(groups).step()
        for name, value in before.items():
            factor = 1 - 0.01 * 0.5 if value.ndim > 1 else 1.0
            torch.testing.assert_close(raw_parameter(model, name).data, value * factor)

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"lr": 0.0}, "lr must be positive"),
            ({"lr": math.inf}, "lr must be positive"),
            ({"lr": 1.0, "constants": (1, 1)}, "three positive"),
            ({"lr": 1.0, "constants": (1, -1, 1)}, "three positive"),
            ({"lr": 1.0, "eps": -1e-8}, "eps must not"),
            ({"lr": 1.0, "per_layer_eps": True}, "per_layer_eps needs eps"),
            ({"lr": 1.0, "weight_decay": -1.0}, "weight_decay must not"),
        ],
    )
    def test_errors(self, kwargs, message):
        model = mlp(16)
        with pytest.raises(ValueError, match=message):
            param_groups(model, tag_parameters(model, 8), **kwargs)

    def test_untagged_parameters_are_named(self):
        model = mlp(16)
        tags = tag_parameters(model, 8)
        del tags["4.bias"]
        with pytest.raises(ValueError, match=r"no tag: \['4.bias'\]"):
            param_groups(model, tags, 1.0)


def train(model, optimizer, steps=20):
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(16, 6, generator=g, dtype=torch.float64)
        y = torch.randint(3, (16,), generator=g)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model(x).detach()


OPTIMIZERS = {
    "sgd": ("sgd", lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9)),
    "adam": ("adam", lambda groups: torch.optim.Adam(groups, eps=1e-300)),
    "atan2": ("adam", AdamAtan2),
    "scaled_adam": ("scaled_adam", lambda groups: ScaledAdam(groups, eps=1e-300, scale_floor=0)),
}


@pytest.mark.parametrize("width", [48, 64])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("one", "other"), [("standard", "ntk"), ("mup", "mean_field")])
def test_equivalent_parameterizations_train_alike(one, other, optimizer, width):
    """Same initial function, constants that undo the base-width difference, same trajectory."""
    kind, make = OPTIMIZERS[optimizer]
    outputs = []
    for name in (one, other):
        model = mlp(width, bias=False).double()
        # With base width 1 the rates are exactly lr * n ** -c.
        groups = parametrize(model, 1, name, kind, "full", lr=0.02)
        outputs.append(train(model, make(groups)))
    tolerance = 0 if width == 64 and optimizer != "scaled_adam" else 1e-11
    torch.testing.assert_close(*outputs, rtol=0, atol=tolerance or 1e-13)


def test_parity_with_mup():
    """Same function and same trajectory as MuReadout, set_base_shapes and MuAdam."""
    mup = pytest.importorskip("mup")

    class Theirs(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.a, self.b = nn.Linear(6, width), nn.Linear(width, width)
            self.c = mup.MuReadout(width, 3, bias=False)

        def forward(self, x):
            return self.c(F.relu(self.b(F.relu(self.a(x)))))

    class Ours(Theirs):
        def __init__(self, width):
            nn.Module.__init__(self)
            self.a, self.b = nn.Linear(6, width), nn.Linear(width, width)
            self.c = nn.Linear(width, 3, bias=False)

    theirs = Theirs(64)
    mup.set_base_shapes(theirs, Theirs(16), delta=Theirs(32))
    theirs.double()
    optimizer = mup.MuAdam(theirs.parameters(), lr=0.01, eps=1e-300)
    ours = Ours(64).double()
    groups = parametrize(ours, 16, "mup", "adam", "full", lr=0.01, relative=True)
    with torch.no_grad():
        for name, tag in tag_parameters(ours, 16).items():
            effective = theirs.get_parameter(name).clone()
            if tag.layer == "readout":
                effective /= 4  # MuReadout divides its output by the width ratio
            raw = raw_parameter(ours, name)
            raw.mul_(0).add_(effective / (4**0.5 if tag.layer == "embedding" else 1))
            if tag.layer == "readout":
                raw.mul_(4**0.5)
    x = torch.randn(8, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
    expected = train(theirs, optimizer)
    torch.testing.assert_close(
        train(ours, torch.optim.Adam(groups, eps=1e-300)), expected, rtol=1e-9, atol=1e-11
    )


def test_adam_with_per_layer_epsilon_at_the_base_width_is_adam():
    one, two = mlp(16).double(), mlp(16).double()
    groups = parametrize(one, 16, lr=0.01, eps=1e-3, per_layer_eps=True)
    parametrize(two, 16, lr=0.01)
    plain = torch.optim.Adam(two.parameters(), lr=0.01, eps=1e-3)
    torch.testing.assert_close(train(one, torch.optim.Adam(groups)), train(two, plain))

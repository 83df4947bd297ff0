"""The hand-written backward pass against autograd."""

import pytest
import torch
from torch.func import functional_call, jacrev

from icml24.additive_models.stacked_mlp import ACTIVATIONS, StackedMLP

DEPTHS = [(), (7,), (6, 5), (4, 3, 5)]


def make(n_networks=3, in_features=1, hidden=(6, 5), activation="gelu", bias=True, n_rows=9):
    generator = torch.Generator().manual_seed(7)
    stack = StackedMLP(n_networks, in_features, hidden, activation, bias, generator)
    shape = (n_rows, n_networks, in_features)
    return stack, torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("hidden", DEPTHS)
@pytest.mark.parametrize("in_features", [1, 2, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_jacobian_equals_autograd(activation, hidden, in_features, bias):
    stack, x = make(3, in_features, hidden, activation, bias)
    names = {id(tensor): name for name, tensor in stack.named_parameters()}
    order = [names[id(tensor)] for tensor in stack.tensors]
    parameters = dict(stack.named_parameters())
    by_autograd = jacrev(lambda p: functional_call(stack, p, (x,)))(parameters)
    jacobian = stack.jacobian(x)
    for k in range(3):
        # network k must depend on its own parameters only
        columns = torch.cat([by_autograd[name][:, k, k].flatten(1) for name in order], dim=1)
        torch.testing.assert_close(jacobian[k], columns, rtol=1e-10, atol=1e-12)
        others = [
            by_autograd[name][:, k].sum() - by_autograd[name][:, k, k].sum() for name in order
        ]
        assert sum(map(abs, others)) < 1e-12


def test_gradient_equals_autograd():
    stack, x = make(4, 2, (6, 5))
    target = torch.linspace(-1, 1, len(x), dtype=torch.float64)
    loss = 0.5 * (stack(x).sum(1) - target).square().sum()
    expected = torch.autograd.grad(loss, stack.tensors)
    outputs, inputs, signals = stack.factors(x)
    found = stack.gradient(inputs, signals, outputs.sum(1) - target)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_forward_equals_a_loop_of_torch_networks():
    stack, x = make(3, 2, (6, 5))
    for k in range(3):
        a = x[:, k]
        for layer in range(3):
            linear = torch.nn.Linear(*stack.weights[layer].shape[1:], dtype=torch.float64)
            linear.weight.data = stack.weights[layer][k].T
            linear.bias.data = stack.biases[layer][k, 0]
            a = linear(a) if layer == 2 else torch.nn.functional.gelu(linear(a))
        torch.testing.assert_close(stack(x)[:, k], a.squeeze(1))


def test_initial_weights_have_the_range_of_torch_linear():
    stack, _ = make(200, 4, (16,))
    weights = stack.weights[1].detach()
    assert weights.abs().max() <= 1 / 4
    assert weights.std() == pytest.approx(1 / 4 / 3**0.5, rel=0.05)


def test_knots_put_each_kink_on_its_point():
    stack, _ = make(3, 2, (50,), "relu")
    generator = torch.Generator().manual_seed(0)
    points = torch.randn((3, 50, 2), generator=generator, dtype=torch.float64)
    with torch.no_grad():
        stack.weights[0][:, 1] = 0  # the second input is padding
    stack.place_knots(points, 2.0, generator)
    assert (stack.weights[0][:, 1] == 0).all()
    assert stack.weights[0][:, 0].detach().std() == pytest.approx(2.0, rel=0.2)
    before = torch.einsum("kio,koi->ko", stack.weights[0], points) + stack.biases[0].squeeze(1)
    torch.testing.assert_close(before, torch.zeros_like(before))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "swish"}, "activation must be one of"),
        ({"hidden": (0,)}, "must be at least 1"),
        ({"n_networks": 0}, "must be at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        StackedMLP(**{"n_networks": 2, "in_features": 1, **arguments})


def test_bad_input_shape():
    stack, _ = make(3, 1)
    with pytest.raises(ValueError, match=r"x must have shape \(N, 3, 1\)"):
        stack(torch.zeros(5, 2, 1))

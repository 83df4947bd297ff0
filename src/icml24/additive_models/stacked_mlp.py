"""Many small networks as one batched tensor expression.

An additive model needs a separate network for each term. Instead of a Python loop over networks,
:class:`StackedMLP` stores layer ``l`` of all of them in one tensor of shape (networks, in, out).
Its backward pass is written out by hand, because everything Laplace needs is made of the same two
ingredients, the layer's input ``a`` and the back-propagated signal ``g = df/dz``:

- gradient of a loss with derivative ``delta``:  ``sum_n delta_n a_n g_n^T``
- Jacobian:                                      ``J_W = a g^T``, ``J_b = g``
- Kronecker factors:                             ``sum_n a a^T`` and ``sum_n gamma_n g g^T``
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ACTIVATIONS", "StackedMLP"]

_aten = torch.ops.aten

#: name -> (function, its vector-Jacobian product ``(signal, pre-activation) -> signal``)
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (F.gelu, lambda g, z: _aten.gelu_backward(g, z)),
    "relu": (F.relu, lambda g, z: g * (z > 0)),
    "tanh": (torch.tanh, lambda g, z: _aten.tanh_backward(g, torch.tanh(z))),
}


class StackedMLP(nn.Module):
    """``K`` independent multilayer perceptrons with one output each.

    Parameters
    ----------
    n_networks : int
        Number of networks, ``K``.
    in_features : int
        Inputs of each network: 1 for a curve, 2 for a pair of numbers, more for one-hot codes.
    hidden : sequence of int, default (64,)
        Widths of the hidden layers; ``()`` gives linear maps.
    activation : {"gelu", "relu", "tanh"}, default "gelu"
    bias : bool, default True
        Whether layers have an offset.
    generator : torch.Generator, optional
        Source of the initial weights.
    dtype : torch.dtype, default torch.float64

    Examples
    --------
    >>> import torch
    >>> stack = StackedMLP(3, 1, hidden=(8,), generator=torch.Generator().manual_seed(0))
    >>> x = torch.linspace(-1, 1, 5, dtype=torch.float64).reshape(5, 1, 1).expand(5, 3, 1)
    >>> stack(x).shape, stack.jacobian(x).shape
    (torch.Size([5, 3]), torch.Size([3, 5, 25]))
    """

    def __init__(
        self,
        n_networks: int,
        in_features: int,
        hidden: Sequence[int] = (64,),
        activation: str = "gelu",
        bias: bool = True,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}."
            )
        if n_networks < 1 or in_features < 1 or any(width < 1 for width in hidden):
            raise ValueError(
                "n_networks, in_features and every hidden width must be at least 1, got "
                f"{n_networks}, {in_features} and {tuple(hidden)}."
            )
        self.activation = activation
        self.layer_sizes = [in_features, *hidden, 1]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for fan_in, fan_out in zip(self.layer_sizes[:-1], self.layer_sizes[1:], strict=True):
            bound = 1 / math.sqrt(fan_in)  # the range of torch.nn.Linear
            for shape, parameters in [
                ((n_networks, fan_in, fan_out), self.weights),
                ((n_networks, 1, fan_out), self.biases),
            ]:
                if parameters is self.weights or bias:
                    values = torch.rand(shape, generator=generator, dtype=torch.float64)
                    parameters.append(nn.Parameter((bound * (2 * values - 1)).to(dtype)))

    @property
    def n_networks(self) -> int:
        """Number of networks, ``K``."""
        return self.weights[0].shape[0]

    @property
    def tensors(self) -> list[nn.Parameter]:
        """Parameter tensors in the order W1, b1, W2, b2, ... (the columns of the Jacobian)."""
        if not len(self.biases):
            return list(self.weights)
        pairs = zip(self.weights, self.biases, strict=True)
        return [tensor for pair in pairs for tensor in pair]

    @property
    def group_sizes(self) -> list[int]:
        """Entries of each parameter tensor in one network: the prior's groups."""
        return [tensor[0].numel() for tensor in self.tensors]

    def flat(self) -> Tensor:
        """Parameters of each network as a row, shape (K, P)."""
        return torch.cat([tensor.detach().flatten(1) for tensor in self.tensors], dim=1)

    def _affine(self, layer: int, a: Tensor) -> Tensor:
        weight = self.weights[layer]
        if not len(self.biases):
            return torch.bmm(a, weight)
        if weight.shape[1] == 1:  # an outer product: broadcasting beats a matrix product
            return torch.addcmul(self.biases[layer], a, weight)
        return torch.baddbmm(self.biases[layer], a, weight)

    def forward(self, x: Tensor) -> Tensor:
        """Evaluate all networks.

        Parameters
        ----------
        x : Tensor, shape (N, K, in)
            Row ``n`` of network ``k`` is ``x[n, k]``.

        Returns
        -------
        Tensor, shape (N, K)
        """
        function, _ = ACTIVATIONS[self.activation]
        a = self._check(x)
        for layer in range(len(self.weights)):
            z = self._affine(layer, a)
            a = function(z)
        return z.squeeze(2).T

    def factors(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Evaluate all networks and run the hand-written backward pass.

        Parameters
        ----------
        x : Tensor, shape (N, K, in)

        Returns
        -------
        outputs : Tensor, shape (N, K)
        inputs : list of Tensor, shapes (K, N, in_l)
            ``a``, the input of each layer.
        signals : list of Tensor, shapes (K, N, out_l)
            ``g``, the derivative of the output with respect to each layer's pre-activation:
            ``g_L = 1`` and ``g_l = (g_{l+1} W_{l+1}^T) * phi'(z_l)``.
        """
        function, backward = ACTIVATIONS[self.activation]
        with torch.no_grad():
            inputs, before = [self._check(x)], []
            for layer in range(len(self.weights)):
                before.append(self._affine(layer, inputs[-1]))
                inputs.append(function(before[-1]))
            outputs = before[-1].squeeze(2).T
            signals = [torch.ones_like(before[-1])]
            for layer in range(len(self.weights) - 1, 0, -1):
                weight = self.weights[layer].transpose(1, 2)
                last = layer == len(self.weights) - 1  # there g is 1: nothing to multiply
                arriving = weight.expand_as(inputs[layer]) if last else signals[0] @ weight
                signals.insert(0, backward(arriving, before[layer - 1]))
        return outputs, inputs[:-1], signals

    def gradient(self, inputs: list[Tensor], signals: list[Tensor], delta: Tensor) -> list[Tensor]:
        """Gradient of ``sum_n loss_n`` from :meth:`factors`, one tensor for each parameter tensor.

        Parameters
        ----------
        inputs, signals : lists of Tensor
            From :meth:`factors`.
        delta : Tensor, shape (N,) or (K, N)
            ``d loss_n / d f(x_n)``.

        Returns
        -------
        list of Tensor
            Shaped like :attr:`tensors`.
        """
        result = []
        for a, g in zip(inputs, signals, strict=True):
            weighted = g * delta.unsqueeze(-1)
            result.append(torch.bmm(a.transpose(1, 2), weighted))
            if len(self.biases):
                result.append(weighted.sum(1, keepdim=True))
        return result

    def jacobian(self, x: Tensor) -> Tensor:
        """Differentiate each network's output with respect to its own parameters.

        Parameters
        ----------
        x : Tensor, shape (N, K, in)

        Returns
        -------
        Tensor, shape (K, N, P)
            Columns in the order of :attr:`tensors`, each flattened.
        """
        _, inputs, signals = self.factors(x)
        return self.assemble_jacobian(inputs, signals)

    def assemble_jacobian(self, inputs: list[Tensor], signals: list[Tensor]) -> Tensor:
        """Jacobian of shape (K, N, P) from what :meth:`factors` returned."""
        columns = []
        for a, g in zip(inputs, signals, strict=True):
            columns.append((a.unsqueeze(3) * g.unsqueeze(2)).flatten(2))
            if len(self.biases):
                columns.append(g)
        return torch.cat(columns, dim=2)

    def place_knots(self, points: Tensor, scale: float, generator: torch.Generator | None) -> None:
        """Put the kinks of the first hidden layer onto data points.

        Draws ``W ~ N(0, scale^2 / m)`` for the ``m`` inputs in use and sets ``b = -W x`` for a data
        point ``x`` per unit. A one-input network with the usual initialisation has most of its
        kinks outside the data and stays close to a straight line for hundreds of steps.

        Parameters
        ----------
        points : Tensor, shape (K, hidden[0], in)
            One data point for each unit.
        scale : float
            Standard deviation of the slopes.
        generator : torch.Generator, optional
        """
        if len(self.layer_sizes) < 3 or not len(self.biases):
            raise ValueError("Knots need a hidden layer with offsets.")
        weight, bias = self.weights[0], self.biases[0]
        used = (weight != 0).any(dim=2, keepdim=True)
        draws = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        draws = draws.to(weight) * scale * used / used.sum(1, keepdim=True).sqrt()
        with torch.no_grad():
            weight.copy_(draws)
            bias.copy_(-torch.einsum("kio,koi->ko", draws, points.to(weight)).unsqueeze(1))

    def _check(self, x: Tensor) -> Tensor:
        expected = (self.n_networks, self.layer_sizes[0])
        if x.ndim != 3 or tuple(x.shape[1:]) != expected:
            raise ValueError(
                f"x must have shape (N, {expected[0]}, {expected[1]}), got {tuple(x.shape)}."
            )
        return x.transpose(0, 1)

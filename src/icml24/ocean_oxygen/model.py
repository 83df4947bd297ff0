"""The network: encoder, window of a node's own record, zoning-varying message passing, head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from icml24.ocean_oxygen.geometric import GATConv, GCNConv, SAGEConv
from icml24.ocean_oxygen.graph import Layer
from icml24.ocean_oxygen.hyperconv import ZoneHyperConv

__all__ = ["Conv", "OxyGenerator", "WindowEncoder", "gradient_variance"]

Conv = Literal["zone", "area", "plain", "gcn", "sage", "gat", "none"]


class WindowEncoder(nn.Module):
    """A bidirectional LSTM over the node's own measurements in the years around.

    Windows without any measurement all have the same code, so it is computed once.

    Parameters
    ----------
    hidden : int
        In each direction; the code has twice as many numbers.
    num_layers : int, default 2
    """

    def __init__(self, hidden: int, num_layers: int = 2) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, hidden, num_layers, batch_first=True, bidirectional=True)

    def forward(self, window: Tensor, observed: Tensor) -> Tensor:
        """Encode windows.

        Parameters
        ----------
        window : torch.Tensor, shape (N, W)
            Values, 0 where there is none; W is odd and the centre is the year itself.
        observed : torch.Tensor, shape (N, W)
            1 where there is a value, else 0.

        Returns
        -------
        torch.Tensor, shape (N, 2 hidden)
            The state at the centre.
        """
        steps = torch.stack([window, observed], dim=-1)
        filled = observed.any(dim=1)
        some = torch.cat([torch.zeros_like(steps[:1]), steps[filled]])
        codes = self.lstm(some)[0][:, window.shape[1] // 2]
        which = torch.zeros(len(window), dtype=torch.long)
        which[filled] = torch.arange(1, len(some))
        return codes[which]


class OxyGenerator(nn.Module):
    r"""Reconstruct a field at the nodes of one year's graph.

    :math:`s_v = \mathrm{MLP}(x_v)`, :math:`h_v = \mathrm{BiLSTM}(\text{window})`,
    :math:`z^0_v = [s_v; h_v]`, then layers of message passing and a linear head.

    Parameters
    ----------
    in_channels : int
        Node features.
    edge_dim : int
        Edge features.
    meta_dim : int
        Numbers in the zone code.
    hidden_channels : int, default 32
        Width of s and of h; the messages are twice as wide.
    num_layers : int, default 2
        Layers of message passing.
    conv : {"zone", "area", "plain", "gcn", "sage", "gat", "none"}
        The method with a continuous zone code, with indicators of areas as code, without zones;
        three plain graph networks; no graph at all.
    temporal : bool, default True
        Use the window; without it s is twice as wide.
    lstm_layers : int, default 2
        Of the window's LSTM.
    stabilise : bool, default True
        Our addition: layer normalisation of the states, and a head that also sees
        :math:`z^0`. Off, the network is the paper's.
    seed : int, default 0
        Of the initialisation; the global random state is left alone.

    Examples
    --------
    >>> net = OxyGenerator(in_channels=3, edge_dim=1, meta_dim=2, hidden_channels=4)
    >>> one = torch.ones(2)
    >>> layer = Layer(torch.tensor([[0], [1]]), torch.zeros(1, 1), one[:1], one, 2)
    >>> x, window = torch.zeros(2, 3), torch.zeros(2, 11)
    >>> net(x, window, window, torch.zeros(2, 2), [layer, layer]).shape
    torch.Size([2])
    """

    def __init__(
        self,
        in_channels: int,
        edge_dim: int,
        meta_dim: int,
        hidden_channels: int = 32,
        num_layers: int = 2,
        conv: Conv = "zone",
        temporal: bool = True,
        lstm_layers: int = 2,
        stabilise: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if conv not in get_args(Conv):
            raise ValueError(f"conv must be one of {', '.join(get_args(Conv))}, got {conv!r}.")
        if hidden_channels < 2 or hidden_channels % 2 or num_layers < 0:
            raise ValueError("hidden_channels must be even and num_layers not negative.")
        self.conv, self.num_layers = conv, 0 if conv == "none" else num_layers
        width, s_width = 2 * hidden_channels, hidden_channels * (1 if temporal else 2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = nn.Sequential(
                nn.Linear(in_channels, hidden_channels),
                nn.ReLU(),
                nn.Linear(hidden_channels, s_width),
                nn.ReLU(),
            )
            self.window = WindowEncoder(hidden_channels // 2, lstm_layers) if temporal else None
            self.norms = nn.ModuleList(
                nn.LayerNorm(width) if stabilise else nn.Identity() for _ in range(self.num_layers)
            )
            self.convs = nn.ModuleList(
                self._layer(width, edge_dim, meta_dim) for _ in range(self.num_layers)
            )
            self.head = nn.Linear(width, 1)
            self.skip = nn.Linear(width, 1) if stabilise else None

    def _layer(self, width: int, edge_dim: int, meta_dim: int) -> nn.Module:
        if self.conv == "gcn":
            return GCNConv(width, width, normalize=False)
        if self.conv == "sage":
            return SAGEConv(width, width)
        if self.conv == "gat":
            return GATConv(width, width // 4, heads=4, edge_dim=edge_dim)
        zoned, discrete = self.conv in ("zone", "area"), self.conv == "area"
        return ZoneHyperConv(width, width, edge_dim, meta_dim, zoned, discrete)

    def _pass(self, conv: nn.Module, z: Tensor, layer: Layer, meta: Tensor) -> Tensor:
        index, n = layer.edge_index, layer.n_out
        if self.conv == "gcn":
            own = layer.self_weight[:, None] * conv.lin(z[:n])
            return torch.relu(conv(z, index, layer.edge_weight)[:n] + own)
        if self.conv == "sage":
            return torch.relu(conv((z, z[:n]), index, size=(len(z), n)))
        if self.conv == "gat":
            return torch.relu(conv(z, index, layer.edge_attr)[:n])
        return conv(z, index, layer.edge_attr, meta[: len(z)], n)

    def forward(
        self,
        x: Tensor,
        window: Tensor,
        observed: Tensor,
        meta: Tensor,
        layers: Sequence[Layer],
    ) -> Tensor:
        """Predict the standardised target.

        Parameters
        ----------
        x : torch.Tensor, shape (N, F)
        window, observed : torch.Tensor, shape (N, W)
            See :class:`WindowEncoder`; not used when ``temporal`` is off.
        meta : torch.Tensor, shape (N, M)
        layers : sequence of Layer
            One for each layer of message passing, from the first to the last.

        Returns
        -------
        torch.Tensor, shape (n,)
            For the nodes of the last layer.
        """
        if self.num_layers != len(layers) and self.conv != "none":
            raise ValueError(f"The network has {self.num_layers} layers, got {len(layers)}.")
        s = self.encoder(x)
        z0 = s if self.window is None else torch.cat([s, self.window(window, observed)], dim=1)
        z = z0
        for norm, conv, layer in zip(self.norms, self.convs, layers, strict=False):
            z = self._pass(conv, norm(z), layer, meta)
        answer = self.head(z)
        if self.skip is not None:
            answer = answer + self.skip(z0[: len(z)])
        return answer.squeeze(-1)


def gradient_variance(
    prediction: Tensor, x: Tensor, columns: Sequence[int], present: Tensor
) -> Tensor:
    r"""Chemistry-informed regulariser: how much the sensitivity to the nutrients varies.

    Respiration takes up oxygen and releases phosphate and nitrate in nearly fixed ratios, so
    :math:`R = \sum_c \mathrm{Var}_v[\partial (\sum_w \hat y_w) / \partial x_{vc}]` over the nodes v
    with a measured nutrient c should be small. The gradient is that of the sum over all nodes, so a
    node's neighbours take part in it.

    Parameters
    ----------
    prediction : torch.Tensor, shape (N,)
        Depends on ``x``.
    x : torch.Tensor, shape (N, F)
        Node features, with ``requires_grad``.
    columns : sequence of int
        The nutrients' columns.
    present : torch.Tensor of bool, shape (N, len(columns))
        Where they are measured.

    Returns
    -------
    torch.Tensor
        A scalar that can be differentiated.

    Examples
    --------
    >>> x = torch.tensor([[1.0], [3.0]], requires_grad=True)
    >>> y = 2 * x[:, 0] ** 2 / 2
    >>> gradient_variance(y, x, [0], torch.ones(2, 1, dtype=torch.bool)).item()  # 2² Var(1, 3)
    4.0
    """
    if not x.requires_grad:
        raise ValueError("x must require gradients for the chemistry term.")
    gradient = torch.autograd.grad(prediction.sum(), x, create_graph=True)[0]
    total = prediction.new_zeros(())
    for i, column in enumerate(columns):
        part = gradient[present[:, i], column]
        if len(part) > 1:
            total = total + part.var(correction=0)
    return total

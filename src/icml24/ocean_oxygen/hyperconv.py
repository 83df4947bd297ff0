"""Zoning-varying message passing: a small hyper-network writes each node's weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from icml24.ocean_oxygen.geometric import MessagePassing, softmax

__all__ = ["ZoneHyperConv", "explicit_transform"]


class ZoneHyperConv(MessagePassing):  # type: ignore[misc,unused-ignore]
    r"""A layer of message passing whose weights depend on where a node lies.

    With the zone code :math:`m_v` of node v, state :math:`z_v` and edge features :math:`e_{vw}`:

    .. math::

        \alpha(m) &= \textstyle\sum_j m_j A_j + A_0, \quad \beta(m) = W_\beta m + b_\beta \\
        u_v &= \Theta\, \alpha(m_v)\, z_v + \beta(m_v) \\
        a_{vw} &= \mathrm{softmax}_{w \in N(v)} (\omega^\top e_{vw} + b) \\
        z_v' &= \mathrm{ReLU}\bigl(u_v + \textstyle\sum_{w \in N(v)} a_{vw} u_w\bigr)

    Because :math:`\alpha` is affine in m, all u come out of one product with the bank of matrices
    :math:`\Theta A_j` and a weighted sum; no matrix is ever written for a single node. At the start
    :math:`A_0` is the identity and all other :math:`A_j` are zero.

    Parameters
    ----------
    in_channels, out_channels : int
    edge_dim : int
        Edge features.
    meta_dim : int
        Numbers in the zone code. For discrete areas pass their indicators (one-hot).
    zoned : bool, default True
        Without it :math:`\alpha` is the identity and :math:`\beta` a bias: the ablation.
    discrete : bool, default False
        Start every :math:`A_j` at the identity and leave :math:`A_0` out: one matrix for each area.
    generator : torch.Generator, optional
        Of the initialisation.

    Examples
    --------
    >>> conv = ZoneHyperConv(4, 4, edge_dim=1, meta_dim=2)
    >>> z, meta = torch.ones(3, 4), torch.ones(3, 2)
    >>> conv(z, torch.tensor([[0, 1], [2, 2]]), torch.zeros(2, 1), meta).shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        edge_dim: int,
        meta_dim: int,
        zoned: bool = True,
        discrete: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(aggr="add", node_dim=0)
        if min(in_channels, out_channels, edge_dim) < 1 or meta_dim < int(zoned):
            raise ValueError("in_channels, out_channels, edge_dim and meta_dim must be positive.")
        self.zoned, self.discrete, self.meta_dim = zoned, discrete, meta_dim
        start = torch.empty(out_channels, in_channels)
        bound = in_channels**-0.5
        self.theta = nn.Parameter(start.uniform_(-bound, bound, generator=generator))
        self.beta_bias = nn.Parameter(torch.zeros(out_channels))
        if zoned:
            one = torch.eye(in_channels)
            self.alpha_weight = nn.Parameter(one.repeat(meta_dim, 1, 1) * float(discrete))
            self.alpha_bias = nn.Parameter(one * float(not discrete), requires_grad=not discrete)
            self.beta_weight = nn.Parameter(torch.zeros(meta_dim, out_channels))
        self.edge = nn.Linear(edge_dim, 1)
        nn.init.zeros_(self.edge.weight)
        nn.init.zeros_(self.edge.bias)

    def transform(self, z: Tensor, meta: Tensor | None = None) -> Tensor:
        """Compute u for all nodes, shape (N, D_out)."""
        if not self.zoned:
            return z @ self.theta.T + self.beta_bias
        if meta is None or tuple(meta.shape) != (len(z), self.meta_dim):
            got = None if meta is None else tuple(meta.shape)
            raise ValueError(f"meta must have the shape {(len(z), self.meta_dim)}, got {got}.")
        alpha = torch.cat([self.alpha_weight, self.alpha_bias[None]])
        bank = torch.einsum("oi,mij->jmo", self.theta, alpha)  # the matrices Theta A_m, transposed
        parts = (z @ bank.flatten(1)).view(len(z), self.meta_dim + 1, -1)
        mixed = torch.einsum("nm,nmo->no", meta, parts[:, :-1]) + parts[:, -1]
        return mixed + meta @ self.beta_weight + self.beta_bias

    def attention(self, edge_index: Tensor, edge_attr: Tensor, n: int) -> Tensor:
        """Weight of each edge; the weights of the edges into one node sum to one."""
        return softmax(self.edge(edge_attr), edge_index[1], num_nodes=n).squeeze(-1)

    def forward(
        self,
        z: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor,
        meta: Tensor | None = None,
        n_out: int | None = None,
    ) -> Tensor:
        """Pass messages along the edges; the result is for the first ``n_out`` nodes."""
        n_out = len(z) if n_out is None else n_out
        u = self.transform(z, meta)
        a = self.attention(edge_index, edge_attr, n_out)
        total = self.propagate(edge_index, x=(u, u[:n_out]), a=a, size=(len(z), n_out))
        return torch.relu(u[:n_out] + total)

    def message(self, x_j: Tensor, a: Tensor) -> Tensor:
        """Weigh what a neighbour says."""
        return a[:, None] * x_j


def explicit_transform(conv: ZoneHyperConv, z: Tensor, meta: Tensor) -> Tensor:
    r"""Compute u as it is written, with one D x D matrix for each node: slow, for checks.

    Parameters
    ----------
    conv : ZoneHyperConv
    z : torch.Tensor, shape (N, D)
    meta : torch.Tensor, shape (N, M)

    Returns
    -------
    torch.Tensor, shape (N, D_out)

    Examples
    --------
    >>> conv = ZoneHyperConv(4, 4, edge_dim=1, meta_dim=2)
    >>> z, meta = torch.ones(3, 4), torch.ones(3, 2)
    >>> torch.allclose(explicit_transform(conv, z, meta), conv.transform(z, meta))
    True
    """
    alpha = torch.einsum("nm,mij->nij", meta, conv.alpha_weight) + conv.alpha_bias
    beta = meta @ conv.beta_weight + conv.beta_bias
    return torch.einsum("oi,nij,nj->no", conv.theta, alpha, z) + beta

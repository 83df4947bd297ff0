"""Two small character models, written without any width rule: that is the parameterizer's job."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CharMLP", "Transformer"]


class _OneHotEmbedding(nn.Embedding):
    """A look-up per (position, character), summed: the product with one-hot vectors.

    The same numbers as a look-up, and much faster when many models share one batch.
    """

    def __init__(self, context: int, vocabulary: int, width: int) -> None:
        super().__init__(context * vocabulary, width)
        self.vocabulary = vocabulary

    def forward(self, x: Tensor) -> Tensor:
        hot = F.one_hot(x, self.vocabulary).flatten(1).to(self.weight.dtype)
        return hot @ self.weight / x.shape[1] ** 0.5


class CharMLP(nn.Module):
    """Predict the next character from the previous ones with a ReLU network.

    Parameters
    ----------
    width : int
        Units of every hidden layer.
    hidden_layers : int, default 2
        Number of width-to-width layers.
    context : int, default 8
        Characters seen.
    vocabulary : int, default 27

    Examples
    --------
    >>> import torch
    >>> CharMLP(width=16)(torch.zeros(3, 8, dtype=torch.long)).shape
    torch.Size([3, 27])
    """

    def __init__(
        self, width: int, hidden_layers: int = 2, context: int = 8, vocabulary: int = 27
    ) -> None:
        super().__init__()
        if min(width, hidden_layers, context, vocabulary) < 1:
            raise ValueError("width, hidden_layers, context and vocabulary must be at least 1.")
        self.embed = _OneHotEmbedding(context, vocabulary, width)
        self.hidden = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(hidden_layers)
        )
        self.readout = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map codes of shape (batch, context) to logits of shape (batch, vocabulary)."""
        z = F.relu(self.embed(x))
        for layer in self.hidden:
            z = F.relu(layer(z))
        return self.readout(z)


class _Block(nn.Module):
    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.heads = width // head_width
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Transformer(nn.Module):
    """The paper's decoder in small: pre-norm, no biases, learned positions, untied readout.

    Heads have a fixed width, so attention scores need no width rule: a wider model has more heads.

    Parameters
    ----------
    width : int
        A multiple of ``head_width``.
    blocks : int, default 2
    head_width : int, default 16
    context : int, default 32
    vocabulary : int, default 27

    Raises
    ------
    ValueError
        If the width is not a multiple of the head width.

    Examples
    --------
    >>> import torch
    >>> Transformer(width=32)(torch.zeros(3, 32, dtype=torch.long)).shape
    torch.Size([3, 32, 27])
    >>> Transformer(width=40)
    Traceback (most recent call last):
    ...
    ValueError: width must be a multiple of head_width=16, got 40; the nearest is 48.
    """

    def __init__(
        self,
        width: int,
        blocks: int = 2,
        head_width: int = 16,
        context: int = 32,
        vocabulary: int = 27,
    ) -> None:
        super().__init__()
        if min(width, blocks, head_width, context, vocabulary) < 1:
            raise ValueError("All sizes of the model must be at least 1.")
        if width % head_width:
            nearest = max(round(width / head_width + 1e-9), 1) * head_width
            raise ValueError(
                f"width must be a multiple of head_width={head_width}, got {width}; "
                f"the nearest is {nearest}."
            )
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, head_width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width, bias=False)
        self.readout = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map codes of shape (batch, length) to logits of shape (batch, length, vocabulary)."""
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x))

"""Three approximations of the posterior precision, behind one small interface.

The precision of the parameters of network ``d`` is the generalised Gauss-Newton matrix plus the
prior, ``P_d = s H_d + Lambda_d`` with ``H_d = sum_n gamma_n J_nd^T J_nd``. Each class holds ``H``
for a whole stack of networks and answers three questions for any scale ``s`` and prior:

- ``log_determinant``: ``log |P_d|``, shape (K,)
- ``traces``: ``tr (P_d^-1)_gg`` for each prior group ``g``, shape (K, G)
- ``variance``: ``J_d P_d^-1 J_d^T`` at given inputs, shape (N, K)

``H`` itself depends on neither ``s`` nor the prior, so the evidence can be climbed for many steps
after one pass over the data. All of it is computed in double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from icml24.additive_models.stacked_mlp import StackedMLP

__all__ = [
    "STRUCTURES",
    "Curvature",
    "DiagonalCurvature",
    "FullCurvature",
    "KroneckerCurvature",
    "row_chunks",
]

_NUMBERS_PER_CHUNK = 2**22  # 32 MB of float64: the largest temporary array


def row_chunks(n_rows: int, numbers_per_row: int) -> Iterator[slice]:
    """Slices over rows such that temporary arrays stay below a fixed size.

    Examples
    --------
    >>> [chunk.stop for chunk in row_chunks(5000, 2048)]
    [2048, 4096, 5000]
    """
    step = max(1, min(2048, _NUMBERS_PER_CHUNK // max(numbers_per_row, 1)))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def _sum_over_rows(
    stack: StackedMLP, x: Tensor, gamma: Tensor, size: int, terms: Callable[..., list[Tensor]]
) -> list[Tensor]:
    """Sum ``terms(inputs, signals, gamma)`` over chunks of rows."""
    total: list[Tensor] = []
    for rows in row_chunks(len(x), stack.n_networks * size):
        _, inputs, signals = stack.factors(x[rows])
        part = terms(inputs, signals, gamma[rows].unsqueeze(1))
        total = [a + b for a, b in zip(total, part, strict=True)] if total else part
    return total


class FullCurvature:
    """The exact block ``H_d`` of each network: P x P numbers each.

    Parameters
    ----------
    stack : StackedMLP
        Networks at the point of expansion, in double precision.
    x : Tensor, shape (N, K, in)
        Training inputs.
    gamma : Tensor, shape (N,)
        Negative second derivative of the log likelihood in ``f``, times the sample weight.
    """

    def __init__(self, stack: StackedMLP, x: Tensor, gamma: Tensor) -> None:
        self.sizes = stack.group_sizes

        def terms(inputs: list[Tensor], signals: list[Tensor], gamma: Tensor) -> list[Tensor]:
            jacobian = stack.assemble_jacobian(inputs, signals)
            return [jacobian.transpose(1, 2) @ (jacobian * gamma)]

        (self.matrix,) = _sum_over_rows(stack, x, gamma, sum(self.sizes), terms)

    def _cholesky(self, prior: Tensor, scale: float) -> Tensor:
        sizes = torch.tensor(self.sizes, device=prior.device)
        precision = scale * self.matrix
        precision.diagonal(dim1=1, dim2=2).add_(prior.repeat_interleave(sizes, dim=1))
        factor, info = torch.linalg.cholesky_ex(precision)
        if info.any():  # rounding made a tiny eigenvalue negative: lift the diagonal
            diagonal = precision.diagonal(dim1=1, dim2=2)
            diagonal.add_(1e-10 * diagonal.mean(1, keepdim=True))
            factor = torch.linalg.cholesky(precision)
        return factor

    def log_determinant(self, prior: Tensor, scale: float) -> Tensor:
        """Log determinant of each network's precision, shape (K,)."""
        return 2 * self._cholesky(prior, scale).diagonal(dim1=1, dim2=2).log().sum(1)

    def traces(self, prior: Tensor, scale: float) -> Tensor:
        """Trace of the covariance over each prior group, shape (K, G)."""
        diagonal = torch.cholesky_inverse(self._cholesky(prior, scale)).diagonal(dim1=1, dim2=2)
        return torch.stack([part.sum(1) for part in diagonal.split(self.sizes, dim=1)], dim=1)

    def variance(self, stack: StackedMLP, x: Tensor, prior: Tensor, scale: float) -> Tensor:
        """Variance of each network's output, shape (N, K)."""
        factor = self._cholesky(prior, scale)
        result = torch.empty(x.shape[:2], dtype=factor.dtype, device=x.device)
        for rows in row_chunks(len(x), stack.n_networks * sum(self.sizes)):
            jacobian = stack.jacobian(x[rows]).transpose(1, 2)
            solved = torch.linalg.solve_triangular(factor, jacobian, upper=False)
            result[rows] = solved.square_().sum(1).T
        return result


class _Spectral:
    """What the two structures share whose precision is diagonal in a basis of each tensor."""

    spectra: list[Tensor]  # for each parameter tensor the eigenvalues of H, shape (K, entries)

    def log_determinant(self, prior: Tensor, scale: float) -> Tensor:
        """Log determinant of each network's precision, shape (K,)."""
        pairs = zip(self.spectra, prior.unsqueeze(2).unbind(1), strict=True)
        return sum(((scale * e + p).log().sum(1) for e, p in pairs), torch.zeros(()))

    def traces(self, prior: Tensor, scale: float) -> Tensor:
        """Trace of the covariance over each prior group, shape (K, G)."""
        pairs = zip(self.spectra, prior.unsqueeze(2).unbind(1), strict=True)
        return torch.stack([(scale * e + p).reciprocal().sum(1) for e, p in pairs], dim=1)

    def _covariance(self, prior: Tensor, scale: float) -> list[Tensor]:
        pairs = zip(self.spectra, prior.unsqueeze(2).unbind(1), strict=True)
        return [(scale * e + p).reciprocal() for e, p in pairs]

    def variance(self, stack: StackedMLP, x: Tensor, prior: Tensor, scale: float) -> Tensor:
        """Variance of each network's output, shape (N, K)."""
        covariance = self._covariance(prior, scale)
        result = torch.zeros(x.shape[:2], dtype=prior.dtype, device=x.device)
        for rows in row_chunks(len(x), stack.n_networks * max(stack.layer_sizes)):
            _, inputs, signals = stack.factors(x[rows])
            remaining = iter(covariance)
            for layer, (a, g) in enumerate(zip(inputs, signals, strict=True)):
                a2, g2 = self._squares(layer, a, g)
                weight = next(remaining).unflatten(1, (a.shape[2], g.shape[2]))
                # sum_ij a_i^2 g_j^2 / (s e_ij + lambda): the Jacobian a g^T is never formed
                total = ((a2 @ weight) * g2).sum(2)
                if len(stack.biases):
                    total += (g2 @ next(remaining).unsqueeze(2)).squeeze(2)
                result[rows] += total.T
        return result

    def _squares(self, layer: int, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class DiagonalCurvature(_Spectral):
    """The diagonal of ``H_d``.

    Parameters
    ----------
    stack, x, gamma
        As in :class:`FullCurvature`.
    """

    def __init__(self, stack: StackedMLP, x: Tensor, gamma: Tensor) -> None:
        def terms(inputs: list[Tensor], signals: list[Tensor], gamma: Tensor) -> list[Tensor]:
            squares = [
                (a.square(), g.square() * gamma) for a, g in zip(inputs, signals, strict=True)
            ]
            parts = []
            for a2, g2 in squares:
                parts.append((a2.transpose(1, 2) @ g2).flatten(1))
                if len(stack.biases):
                    parts.append(g2.sum(1))
            return parts

        self.spectra = _sum_over_rows(stack, x, gamma, max(stack.layer_sizes), terms)

    def _squares(self, layer: int, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return a.square(), g.square()


class KroneckerCurvature(_Spectral):
    """KFAC: one Kronecker product ``A_l (x) B_l`` for each weight tensor, ``B_l`` for each offset.

    ``A_l`` is the mean of ``a a^T`` and ``B_l`` the sum of ``gamma g g^T``. Both are
    eigen-decomposed once; afterwards the prior is added exactly, to the products of eigenvalues.

    Parameters
    ----------
    stack, x, gamma
        As in :class:`FullCurvature`.
    weight : Tensor, shape (N,), optional
        Sample weights, used in the mean of ``a a^T``; default 1.
    """

    def __init__(
        self, stack: StackedMLP, x: Tensor, gamma: Tensor, weight: Tensor | None = None
    ) -> None:
        weight = torch.ones_like(gamma) if weight is None else weight
        both = torch.stack([weight / weight.sum(), gamma], dim=1)

        def terms(inputs: list[Tensor], signals: list[Tensor], both: Tensor) -> list[Tensor]:
            share, gamma = both[:, 0, :1], both[:, 0, 1:]
            left = [a.transpose(1, 2) @ (a * share) for a in inputs]
            right = [g.transpose(1, 2) @ (g * gamma) for g in signals]
            return left + right

        parts = _sum_over_rows(stack, x, both, max(stack.layer_sizes), terms)
        half = len(parts) // 2
        values, vectors = zip(*(torch.linalg.eigh(part) for part in parts), strict=True)
        values = tuple(value.clamp(min=0) for value in values)
        self.spectra = []
        for a, b in zip(values[:half], values[half:], strict=True):
            self.spectra.append((a.unsqueeze(2) * b.unsqueeze(1)).flatten(1))
            if len(stack.biases):
                self.spectra.append(b)
        self._left, self._right = vectors[:half], vectors[half:]

    def _squares(self, layer: int, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return (a @ self._left[layer]).square(), (g @ self._right[layer]).square()


Curvature = FullCurvature | KroneckerCurvature | DiagonalCurvature

#: name -> class
STRUCTURES: dict[str, Callable[..., Curvature]] = {
    "full": FullCurvature,
    "kron": KroneckerCurvature,
    "diag": DiagonalCurvature,
}

"""Curvature against dense linear algebra, and parity with laplace-torch."""

import pytest
import torch

from icml24.additive_models import curvature as module
from icml24.additive_models.curvature import (
    DiagonalCurvature,
    FullCurvature,
    KroneckerCurvature,
    row_chunks,
)
from icml24.additive_models.evidence import Gaussian, block_evidence
from icml24.additive_models.stacked_mlp import StackedMLP

from .dense import dense_precision

STRUCTURES = {"full": FullCurvature, "kron": KroneckerCurvature, "diag": DiagonalCurvature}


def make(in_features=2, hidden=(4, 3), n_rows=30, bias=True):
    generator = torch.Generator().manual_seed(3)
    stack = StackedMLP(3, in_features, hidden, bias=bias, generator=generator)
    x = torch.randn((n_rows, 3, in_features), generator=generator, dtype=torch.float64)
    gamma = torch.rand(n_rows, generator=generator, dtype=torch.float64) + 0.1
    groups = len(stack.group_sizes)
    prior = torch.rand((3, groups), generator=generator, dtype=torch.float64) + 0.5
    return stack, x, gamma, prior


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("hidden", [(), (5,), (4, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_three_answers_equal_dense_algebra(structure, hidden, bias):
    stack, x, gamma, prior = make(hidden=hidden, bias=bias)
    dense = dense_precision(structure, stack, x, gamma, prior, scale=2.3)
    curvature = STRUCTURES[structure](stack, x, gamma)
    torch.testing.assert_close(curvature.log_determinant(prior, 2.3), torch.logdet(dense))
    covariance = torch.linalg.inv(dense)
    diagonals = torch.diagonal(covariance, dim1=1, dim2=2).split(stack.group_sizes, dim=1)
    traces = torch.stack([part.sum(1) for part in diagonals], dim=1)
    torch.testing.assert_close(curvature.traces(prior, 2.3), traces)
    elsewhere = 1.5 * x[:7] + 0.3
    jacobian = stack.jacobian(elsewhere)
    variance = torch.einsum("knp,kpq,knq->nk", jacobian, covariance, jacobian)
    torch.testing.assert_close(curvature.variance(stack, elsewhere, prior, 2.3), variance)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_chunks_of_rows_change_nothing(structure, monkeypatch):
    stack, x, gamma, prior = make(n_rows=50)
    whole = STRUCTURES[structure](stack, x, gamma)
    variance = whole.variance(stack, x, prior, 1.0)
    monkeypatch.setattr(module, "_NUMBERS_PER_CHUNK", 200)
    assert len(list(row_chunks(50, 100))) == 25
    pieces = STRUCTURES[structure](stack, x, gamma)
    torch.testing.assert_close(pieces.traces(prior, 1.0), whole.traces(prior, 1.0))
    torch.testing.assert_close(pieces.variance(stack, x, prior, 1.0), variance)


def test_kronecker_is_exact_for_one_row():
    """With one row the Gauss-Newton block of each tensor is a Kronecker product by itself."""
    stack, x, gamma, prior = make(n_rows=1)
    exact = dense_precision("full", stack, x, gamma, prior, 1.0)
    approximate = dense_precision("kron", stack, x, gamma, prior, 1.0)
    start = 0
    for size in stack.group_sizes:
        block = slice(start, start + size)
        torch.testing.assert_close(approximate[:, block, block], exact[:, block, block])
        start += size
    kron = KroneckerCurvature(stack, x, gamma).log_determinant(prior, 1.0)
    torch.testing.assert_close(kron, torch.logdet(approximate))


def test_weights_count_as_repeated_rows():
    stack, x, _, prior = make(n_rows=12)
    weight = torch.tensor([1, 2, 3] * 4).double()
    repeated = x.repeat_interleave(weight.long(), dim=0)
    ones = torch.ones(len(repeated)).double()
    for structure in STRUCTURES:
        extra = {"weight": weight} if structure == "kron" else {}
        a = STRUCTURES[structure](stack, x, weight, **extra)
        b = STRUCTURES[structure](stack, repeated, ones)
        torch.testing.assert_close(a.traces(prior, 1.0), b.traces(prior, 1.0))


def test_padding_inputs_change_nothing():
    """A zero input with zero weights leaves evidence and variance as they were."""
    stack, x, gamma, prior = make(in_features=2, hidden=(4,))
    padded = StackedMLP(3, 3, (4,))
    with torch.no_grad():
        for mine, theirs in zip(padded.tensors, stack.tensors, strict=True):
            mine.zero_()
            mine[tuple(slice(size) for size in theirs.shape)] = theirs
    wide = torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2)
    for structure in STRUCTURES:
        results = []
        for s, inputs in ((stack, x), (padded, wide)):
            c = STRUCTURES[structure](s, inputs, gamma)
            norms = torch.stack([t.detach().flatten(1).square().sum(1) for t in s.tensors], 1)
            sizes = torch.tensor(s.group_sizes)
            share = block_evidence(prior, norms, sizes, c.log_determinant(prior, 1.0))
            results.append((share, c.variance(s, inputs, prior, 1.0)))
        torch.testing.assert_close(results[0], results[1])


# ------------------------------------------------------------------------- laplace-torch 0.3

#: (networks, structure) -> log evidence, variances of rows 0..2; from laplace-torch 0.3 with
#: AsdlGGN and CurvlinopsGGN (which agree to 12 digits) on a loop of torch networks
LAPLACE_TORCH = {
    (1, "full"): (-71.86792476070, [0.02066403673887, 0.01926525754452, 0.04079771981504]),
    (1, "kron"): (-76.27214497452, [0.03970660860824, 0.04972485570354, 0.11303082753411]),
    (1, "diag"): (-79.74720407504, [0.07615447231490, 0.10100031629966, 0.19036643481504]),
    (3, "kron"): (-106.3022031516, [0.23813106197361, 0.15701411480794, 0.32062239793449]),
    (3, "diag"): (-116.5363568638, [0.36041514469837, 0.27713019636897, 0.51319233622272]),
}
LAPLACE_TORCH_FULL_JOINT = -88.16251568217612  # three networks, one dense matrix over all of them


def our_evidence(case, structure):
    x, ones = case.x, torch.ones(len(case.x), dtype=torch.float64)
    curvature = STRUCTURES[structure](case.stack, x, ones)
    groups = len(case.stack.group_sizes)
    prior = torch.full((case.stack.n_networks, groups), case.prior, dtype=torch.float64)
    norms = torch.stack([t.detach().flatten(1).square().sum(1) for t in case.stack.tensors], 1)
    fit = Gaussian(case.log_sigma).data_fit(case.stack(x).sum(1).detach(), case.y, ones)
    determinant = curvature.log_determinant(prior, case.scale)
    share = block_evidence(prior, norms, torch.tensor(case.stack.group_sizes), determinant)
    variance = curvature.variance(case.stack, x, prior, case.scale).sum(1)
    return float(fit.log_likelihood(case.log_sigma) + share.sum()), variance


@pytest.mark.parametrize(("n_networks", "structure"), LAPLACE_TORCH)
def test_evidence_and_variance_equal_stored_laplace_torch(wave_case, n_networks, structure):
    evidence, variance = our_evidence(wave_case(n_networks), structure)
    expected, variances = LAPLACE_TORCH[n_networks, structure]
    assert evidence == pytest.approx(expected, rel=1e-11)
    assert variance[:3].tolist() == pytest.approx(variances, rel=1e-10)


def test_block_evidence_is_below_the_joint_one(wave_case):
    evidence, _ = our_evidence(wave_case(3), "full")
    assert evidence == pytest.approx(-92.4526590772427, rel=1e-11)
    assert evidence < LAPLACE_TORCH_FULL_JOINT


@pytest.mark.filterwarnings("ignore")
def test_live_parity_with_laplace_torch(wave_case):
    laplace = pytest.importorskip("laplace", reason="needs laplace-torch")
    from laplace.curvature import CurvlinopsGGN
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    case = wave_case(3)

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.networks = nn.ModuleList()
            for k in range(3):
                first, second = nn.Linear(1, 5).double(), nn.Linear(5, 1).double()
                for layer, linear in enumerate((first, second)):
                    linear.weight.data = case.stack.weights[layer][k].detach().T.clone()
                    linear.bias.data = case.stack.biases[layer][k, 0].detach().clone()
                self.networks.append(nn.Sequential(first, nn.GELU(), second))

        def forward(self, x):
            return sum(net(x[:, [k]]) for k, net in enumerate(self.networks))

    loader = DataLoader(TensorDataset(case.X, case.y[:, None]), batch_size=len(case.y))
    for structure, kind in (("kron", laplace.KronLaplace), ("diag", laplace.DiagLaplace)):
        theirs = kind(
            Loop(),
            "regression",
            sigma_noise=case.sigma,
            prior_precision=case.prior,
            backend=CurvlinopsGGN,
        )
        theirs.fit(loader)
        _, variance = theirs(case.X)
        evidence, ours = our_evidence(case, structure)
        assert evidence == pytest.approx(float(theirs.log_marginal_likelihood()), rel=1e-8)
        torch.testing.assert_close(ours, variance.flatten())

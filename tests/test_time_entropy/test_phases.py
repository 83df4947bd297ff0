import copy

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from sklearn.metrics import silhouette_score
from torch import nn

from icml24.test_time_entropy import (
    Tent,
    adapt_until_turn,
    adaptation_trace,
    embed,
    frechet_distance,
    shuffled_batches,
    silhouette,
)
from icml24.test_time_entropy.networks import SmallResNet
from icml24.test_time_entropy.phases import FrozenTraining, turning_point


def cloud(n, d, seed):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SmallResNet((4, 8, 8)).eval()


@pytest.fixture(scope="module")
def x():
    return torch.rand(150, 1, 28, 28, generator=torch.Generator().manual_seed(5))


def test_silhouette_agrees_with_scikit_learn():
    z = cloud(80, 3, 0)
    labels = torch.randint(0, 4, (80,), generator=torch.Generator().manual_seed(1))
    labels[0] = 9  # a cluster of one
    assert np.isclose(silhouette(z, labels), silhouette_score(z.numpy(), labels.numpy()))
    assert np.isnan(silhouette(z, torch.zeros(80, dtype=torch.int64)))


def test_frechet_distance_closed_forms():
    z = cloud(200, 5, 0)
    shift = torch.tensor([1.0, -2.0, 0.0, 0.5, 0.0], dtype=torch.float64)
    assert np.isclose(frechet_distance(z, z + shift), float(shift.square().sum()))
    # scaling by a about the mean: tr C (1 - a)^2
    centred = z - z.mean(0)
    wanted = torch.cov(centred.T).trace() * (1 - 2.5) ** 2
    assert np.isclose(frechet_distance(centred, 2.5 * centred), float(wanted))
    other = cloud(150, 5, 1) @ cloud(5, 5, 2)
    c1, c2 = np.cov(z.numpy().T), np.cov(other.numpy().T)
    mean = float((z.mean(0) - other.mean(0)).square().sum())
    wanted = mean + np.trace(c1 + c2 - 2 * sqrtm(c1 @ c2).real)
    assert np.isclose(frechet_distance(z, other), wanted)
    assert np.isclose(frechet_distance(other, z), wanted)


def test_distance_to_class_means_by_hand():
    training = torch.tensor([[0.0, 1.0], [0.0, -1.0], [10.0, 2.0], [10.0, -2.0]])
    frozen = FrozenTraining(training, torch.tensor([3, 3, 7, 7]))
    assert frozen.means.tolist() == [[0.0, 0.0], [10.0, 0.0]]
    assert frozen.spread == 1.5
    assert np.isclose(frozen.nearest(torch.tensor([[3.0, 0.0], [10.0, 6.0]])), (3 + 6) / 2 / 1.5)
    with pytest.raises(ValueError, match="one label"):
        FrozenTraining(training, torch.tensor([0]))


def test_embedding_is_what_the_last_linear_layer_sees(net, x):
    z, logits = embed(net, x, batch_size=64)
    assert z.shape == (150, 8)
    assert torch.allclose(net.head(z), logits, atol=1e-6)
    assert torch.allclose(logits, net(x), atol=1e-5)
    adapter = Tent(net)
    z, logits = embed(adapter, x, batch_size=64)  # the last batch reaches back
    assert z.shape == (150, 8)
    assert torch.allclose(adapter.module.head(z), logits, atol=1e-6)
    assert not net.head._forward_pre_hooks and not net.training
    with pytest.raises(ValueError, match="no linear layer"):
        embed(nn.Conv2d(1, 1, 3), x)


def test_trace_measures_and_does_not_adapt(net, x):
    y = torch.arange(150) % 10
    adapter, plain = Tent(net, lr=0.05), Tent(net, lr=0.05)
    batches = list(shuffled_batches(x, 64, 5))
    trace = adaptation_trace(
        adapter, batches, x, (x[:100], y[:100]), [0, 2, 5], y=y, keep_embeddings=True
    )
    for batch in batches:
        plain(batch)
    assert all(torch.equal(a, b) for a, b in zip(adapter.snapshot(), plain.snapshot(), strict=True))
    assert trace["step"].tolist() == [0, 2, 5]
    assert trace["embeddings"].shape == (3, 150, 8)
    assert trace["entropy"][-1] < trace["entropy"][0]
    source = Tent(net)
    assert np.isclose(trace["accuracy"][0], (source.predict(x, 200).argmax(1) == y).float().mean())
    z, z_train = embed(source, x)[0], embed(source, x[:100])[0]
    assert np.isclose(trace["frechet_frozen"][0], frechet_distance(z, z_train))
    assert np.isclose(trace["frechet_moving"][0], trace["frechet_frozen"][0])
    assert not np.isclose(trace["frechet_moving"][-1], trace["frechet_frozen"][-1])


def test_marks_and_streams_are_checked(net, x):
    y = torch.zeros(150, dtype=torch.int64)
    for marks in ([], [3, 3], [-1]):
        with pytest.raises(ValueError, match="marks"):
            adaptation_trace(Tent(net), x, x, (x, y), marks)
    with pytest.raises(ValueError, match="stream ended"):
        adaptation_trace(Tent(net), [x], x, (x, y), [0, 2])


def test_turning_point():
    assert turning_point([1.0]) == 0
    assert turning_point([3.0, 2.0, 1.0]) == 2
    assert turning_point([3.0, 2.0, 2.5, 1.0, 5.0, 5.0]) == 3
    assert turning_point([3.0, 2.0, 2.5, 1.0], patience=1) == 1


def test_stop_rule_returns_to_the_smallest_distance(net, x):
    y = torch.arange(150) % 10
    marks = [0, 1, 2, 4, 8, 16, 32]
    train = (x[:100], y[:100])
    before = copy.deepcopy(net.state_dict())
    adapter = Tent(net, lr=0.1)
    stopped = adapt_until_turn(adapter, x, 1 - x, train, marks, patience=2)
    trace = adaptation_trace(Tent(net, lr=0.1), x, 1 - x, train, marks)
    visited = len(stopped.steps)
    assert np.allclose(stopped.distances, trace["frechet_frozen"][:visited])
    where = stopped.distances.argmin()
    assert stopped.step == marks[where]
    assert stopped.turned == (visited - 1 - where == 2)
    fresh = Tent(net, lr=0.1)
    for batch in list(shuffled_batches(x, 64, marks[-1]))[: stopped.step]:
        fresh(batch)
    for a, b in zip(adapter.snapshot(), fresh.snapshot(), strict=True):
        assert torch.allclose(a, b)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    with pytest.raises(ValueError, match="patience"):
        adapt_until_turn(adapter, x, x, train, marks, patience=0)

import numpy as np
import pytest
import torch

from icml24.bilevel import SPABA, TorchBilevel, exact_hypergradient, minimize_bilevel

from .conftest import evaluate, make_problem, random_point


def penalties_in_torch(problem, nested=False):
    def softplus(A, s, w):
        return torch.nn.functional.softplus(-s * (A @ w)).mean()

    def inner(x, y, batch):
        x, y = (x["strength"], torch.cat([y[0], y[1]])) if nested else (x, y)
        return softplus(*batch, y) + 0.5 * ((x.exp() + problem.floor) * y**2).sum()

    def outer(x, y, batch):
        return softplus(*batch, torch.cat([y[0], y[1]]) if nested else y)

    data = [torch.as_tensor(a) for a in (problem.X, problem.s, problem.X_val, problem.s_val)]
    x0, y0 = (torch.as_tensor(part) for part in problem.init())
    if nested:
        x0, y0 = {"strength": x0}, [y0[:1], y0[1:]]
    return TorchBilevel(inner, outer, x0, y0, tuple(data[:2]), tuple(data[2:]))


@pytest.mark.parametrize("nested", [False, True])
def test_oracles_from_two_losses_equal_the_hand_written_ones(nested):
    problem = make_problem("penalties")
    other = penalties_in_torch(problem, nested)
    rng = np.random.default_rng(0)
    x, y, z = rng.standard_normal((3, 2, 3, 4))  # two points, three runs
    idx, out = rng.integers(0, 31, (3, 5)), rng.integers(0, 19, (3, 6))
    for a, b in ((None, None), (idx, out)):
        ours = problem.inner(x, y, z, a) + problem.outer(x, y, b) + (problem.inner_grad_x(x, y, a),)
        torchs = other.inner(x, y, z, a) + other.outer(x, y, b) + (other.inner_grad_x(x, y, a),)
        for left, right in zip(ours, torchs, strict=True):
            np.testing.assert_allclose(left, right, atol=1e-13)


def test_the_driver_takes_the_same_path():
    problem = make_problem("penalties")
    options = {"lr_inner": 0.5, "lr_outer": 1.0, "batch_size": 4, "seeds": 2, "progress": False}
    runs = [
        minimize_bilevel(p, max_steps=20, max_oracle_calls=1e9, **options)
        for p in (problem, penalties_in_torch(problem))
    ]
    np.testing.assert_allclose(runs[0].x, runs[1].x, atol=1e-12)


def test_exact_hypergradient_and_parameters_in_their_own_structure():
    problem = make_problem("penalties")
    other = penalties_in_torch(problem, nested=True)
    x = random_point(problem)[0]
    gradient, y, _ = exact_hypergradient(other, x)
    np.testing.assert_allclose(gradient, problem.hypergradient(x), atol=1e-10)
    assert set(other.outer_params(x)) == {"strength"}
    assert [part.shape for part in other.inner_params(y)] == [(1,), (3,)]
    assert other.outer_loss(x, y) == pytest.approx(float(problem.outer_loss(x, y)))


def test_a_weight_for_each_sample_by_indexing_with_arange():
    rng = np.random.default_rng(0)
    A, b = torch.as_tensor(rng.standard_normal((12, 3))), torch.as_tensor(rng.standard_normal(12))

    def inner(x, y, batch):
        i, A, b = batch
        return (torch.sigmoid(x[i]) * (A @ y - b) ** 2).mean() + 0.05 * (y**2).sum()

    def outer(x, y, batch):
        A, b = batch
        return ((A @ y - b) ** 2).mean()

    x0, y0 = torch.zeros(12), torch.zeros(3)
    problem = TorchBilevel(inner, outer, x0, y0, (torch.arange(12), A, b), (A[:5], b[:5]))
    point = random_point(problem)
    idx = np.array([1, 5, 7])
    cross = evaluate(problem, *point, idx)[2]
    assert set(np.flatnonzero(cross)) == {1, 5, 7}
    blocks = [np.arange(12)[k : k + 3] for k in range(0, 12, 3)]
    mean = np.mean([evaluate(problem, *point, block)[2] for block in blocks], 0)
    np.testing.assert_allclose(mean, evaluate(problem, *point)[2], atol=1e-12)


def test_bad_losses_and_data_are_named():
    X, s = torch.ones(4, 2), torch.ones(4)
    good = lambda x, y, b: (b[0] @ y).mean() + (x * y).sum()  # noqa: E731
    start = (torch.zeros(2), torch.zeros(2))
    with pytest.raises(TypeError, match="inner_loss must return a scalar"):
        TorchBilevel(lambda x, y, b: b[0] @ y, good, *start, (X, s), (X, s))
    with pytest.raises(TypeError, match=r"outer_loss must return a scalar tensor.*float"):
        TorchBilevel(good, lambda x, y, b: 1.0, *start, (X, s), (X, s))
    with pytest.raises(ValueError, match="one positive length"):
        TorchBilevel(good, good, *start, (X, s[:3]), (X, s))
    with pytest.raises(TypeError, match="must be a tensor"):
        TorchBilevel(good, good, 0.0, torch.zeros(2), (X, s), (X, s))


# -- the optimizer -------------------------------------------------------------------------------


def optimizer_on(problem, **options):
    data = [torch.as_tensor(a) for a in (problem.X, problem.s, problem.X_val, problem.s_val)]
    x, y = (torch.tensor(part, requires_grad=True) for part in problem.init())

    def inner(idx):
        A, s = (data[0], data[1]) if idx is None else (data[0][idx], data[1][idx])
        fit = torch.nn.functional.softplus(-s * (A @ y)).mean()
        return fit + 0.5 * ((x.exp() + problem.floor) * y**2).sum()

    def outer(idx):
        A, s = (data[2], data[3]) if idx is None else (data[2][idx], data[3][idx])
        return torch.nn.functional.softplus(-s * (A @ y)).mean()

    optimizer = SPABA(
        [x], [y], n_inner=problem.n_inner, n_outer=problem.n_outer, lr_outer=1.0, lr_inner=0.5,
        **options,
    )  # fmt: skip
    return optimizer, inner, outer, x, y


def test_optimizer_with_full_passes_equals_the_driver():
    problem = make_problem("penalties")
    optimizer, inner, outer, x, y = optimizer_on(problem, prob_full=1.0)
    for _ in range(15):
        optimizer.step(inner, outer)
    result = minimize_bilevel(
        problem, "full", lr_inner=0.5, lr_outer=1.0, max_steps=15, max_oracle_calls=1e9,
        progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(x.detach().numpy(), result.x[0], atol=1e-12)
    np.testing.assert_allclose(y.detach().numpy(), result.y[0], atol=1e-12)
    assert optimizer.n_oracle == result.n_oracle[0]


def test_optimizer_with_batches_of_everything_is_deterministic_too():
    problem = make_problem("penalties")
    paths = []
    for prob in (1.0, 1e-6):
        optimizer, inner, outer, x, _ = optimizer_on(problem, prob_full=prob, batch_size=31)
        for _ in range(10):
            optimizer.step(inner, outer)
        paths.append(x.detach().numpy())
    np.testing.assert_allclose(*paths, atol=1e-12)


def test_optimizer_with_small_batches_follows_the_full_path():
    problem = make_problem("penalties")
    optimizer, inner, outer, x, _ = optimizer_on(problem, batch_size=6)
    state = torch.random.get_rng_state()
    for _ in range(400):
        optimizer.step(inner, outer)
    full = minimize_bilevel(
        problem, "full", lr_inner=0.5, lr_outer=1.0, max_steps=400, max_oracle_calls=1e9,
        progress=False,
    ).x[0]  # fmt: skip
    moved = np.linalg.norm(full - problem.init()[0])
    assert np.linalg.norm(x.detach().numpy() - full) < 0.05 * moved
    assert torch.equal(state, torch.random.get_rng_state())
    expected = 50 + 400 * (optimizer.prob_full * 50 + (1 - optimizer.prob_full) * 24)
    assert optimizer.n_oracle == pytest.approx(expected, rel=0.15)


def test_optimizer_keeps_z_in_its_ball():
    problem = make_problem("penalties")
    optimizer, inner, outer, _, y = optimizer_on(problem, radius=0.01)
    for _ in range(20):
        optimizer.step(inner, outer)
    assert torch.linalg.norm(optimizer.state[y]["z"]) <= 0.01 * (1 + 1e-12)


def test_optimizer_on_modules_and_groups():
    net = torch.nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.zero_()
    scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
    A = torch.as_tensor(np.random.default_rng(0).standard_normal((20, 3)))
    b = A[:, :1] + 1

    def inner(idx):
        rows, target = (A, b) if idx is None else (A[idx], b[idx])
        ridge = sum((p**2).sum() for p in net.parameters())
        return ((net(rows) - target) ** 2).mean() + scale.exp() * ridge

    def outer(idx):
        rows, target = (A, b) if idx is None else (A[idx], b[idx])
        return ((net(rows) - target) ** 2).mean()

    optimizer = SPABA(
        [scale], net.parameters(), n_inner=20, n_outer=20, lr_outer=0.1, lr_inner=0.05
    )
    losses = [float(optimizer.step(inner, outer)) for _ in range(200)]
    assert losses[-1] < 0.05 * losses[0] and scale.item() < 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_outer": 0.0}, "lr_outer must be positive"),
        ({"lr_inner": -1.0}, "lr_inner must be positive"),
        ({"batch_size": 9}, "between 1 and 4"),
        ({"prob_full": 0.0}, r"\(0, 1\]"),
        ({"radius": -1.0}, "radius must be positive"),
        ({"n_outer": 0}, "need samples"),
    ],
)
def test_optimizer_names_bad_arguments(options, message):
    x, y = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    good = {"n_inner": 4, "n_outer": 4, "lr_outer": 0.1, "lr_inner": 0.1}
    with pytest.raises(ValueError, match=message):
        SPABA([x], [y], **{**good, **options})


def test_optimizer_names_bad_losses():
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = SPABA([x], [y], n_inner=4, n_outer=4, lr_outer=0.1, lr_inner=0.1)
    with pytest.raises(TypeError, match="scalar"):
        optimizer.step(lambda idx: (x + y) ** 2, lambda idx: (y**2).sum())
    with pytest.raises(FloatingPointError, match="inner loss is nan"):
        optimizer.step(lambda idx: (x * y).sum() * torch.nan, lambda idx: (y**2).sum())

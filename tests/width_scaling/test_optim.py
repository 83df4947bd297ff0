"""AdamAtan2 and ScaledAdam: steps by hand, invariances, limits, and the torch.optim contract."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from icml24.width_scaling import AdamAtan2, ScaledAdam
from icml24.width_scaling import optim as module

BOTH = [AdamAtan2, ScaledAdam]


def problem(seed=0, dtype=torch.float32, sizes=((7, 5), (5,), (3, 4, 2))):
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64).to(dtype)) for s in sizes]


def run(optimizer, params, steps=20, scale=1.0, seed=1):
    """Noisy gradients of a quadratic, multiplied by ``scale``."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            noise = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)
            p.grad = (p.detach() + noise) * scale
        optimizer.step()
    return [p.detach().clone() for p in params]


@given(st.floats(1e-18, 1e18), st.sampled_from([-1.0, 1.0]))
@settings(max_examples=50, deadline=None)
def test_first_step_has_size_lr_whatever_the_gradient(size, sign):
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.full((3,), sign * size)
    AdamAtan2([p], lr=0.25).step()
    torch.testing.assert_close(p.data, torch.full((3,), -0.25 * sign), rtol=1e-6, atol=0)


def test_two_steps_by_hand():
    b1, b2, lr, a, b, decay = 0.8, 0.9, 0.1, 1.1, 0.7, 0.3
    p = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = AdamAtan2([p], lr, (b1, b2), a, b, decay)
    theta = m = v = 0.0
    theta = 2.0
    for t, g in enumerate((0.5, -2.0), start=1):
        p.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        theta = theta * (1 - lr * decay) - lr * a * math.atan2(m_hat, b * math.sqrt(v_hat))
    assert p.item() == pytest.approx(theta, rel=1e-14)


@pytest.mark.parametrize("power", [-40, -7, 20, 50])
@pytest.mark.parametrize("foreach", [None, True])
def test_power_of_two_loss_scale_is_bit_identical(power, foreach):
    results = []
    for scale in (1.0, 2.0**power):
        params = problem()
        results.append(run(AdamAtan2(params, lr=0.1, foreach=foreach), params, scale=scale))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@given(st.floats(1e-12, 1e12))
@settings(max_examples=25, deadline=None)
def test_any_loss_scale_to_rounding(scale):
    reference, scaled = problem(dtype=torch.float64), problem(dtype=torch.float64)
    run(AdamAtan2(reference, lr=0.1), reference)
    run(AdamAtan2(scaled, lr=0.1), scaled, scale=scale)
    for x, y in zip(reference, scaled, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


def test_adam_is_not_scale_invariant():
    reference, scaled = problem(), problem()
    run(torch.optim.Adam(reference, lr=0.1), reference)
    run(torch.optim.Adam(scaled, lr=0.1), scaled, scale=2.0**-40)
    assert not torch.allclose(reference[0], scaled[0], atol=0.1)


def test_mirror_symmetry_and_maximize():
    up, down, mirrored = problem(), problem(), [nn.Parameter(-p.detach()) for p in problem()]
    g = torch.Generator().manual_seed(3)
    grads = [torch.randn(p.shape, generator=g) for p in up]
    for params, sign, maximize in ((up, 1, False), (down, -1, True), (mirrored, -1, False)):
        for p, grad in zip(params, grads, strict=True):
            p.grad = sign * grad
        AdamAtan2(params, lr=0.1, maximize=maximize).step()
    for x, y, z in zip(up, down, mirrored, strict=True):
        assert torch.equal(x, y) and torch.equal(x, -z)


@pytest.mark.parametrize("size", [5, 3 * module.CHUNK + 7])
def test_step_is_bounded_and_zero_gradients_do_not_move(size):
    p = nn.Parameter(torch.ones(size))
    optimizer = AdamAtan2([p], lr=0.1, betas=(0.99, 0.1))
    g = torch.Generator().manual_seed(0)
    for _ in range(10):
        before = p.detach().clone()
        p.grad = torch.randn(size, generator=g) ** 5
        p.grad[0] = 0
        optimizer.step()
        assert (p - before).abs().max() <= 0.1 * 4 / math.pi * math.pi / 2 * (1 + 1e-5)
    assert p[0] == 1


def test_underflown_second_moment_gives_a_finite_step():
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1e-30, -1e-30])  # its square is zero in float32
    AdamAtan2([p], lr=0.5).step()
    torch.testing.assert_close(p.data, torch.tensor([-1.0, 1.0]))


def test_small_quotients_give_adam_in_the_limit():
    """For b -> infinity, b * atan2(m, b sqrt(v)) is Adam's m / sqrt(v)."""
    ours, adam = problem(dtype=torch.float64), problem(dtype=torch.float64)
    b = 1e6
    run(AdamAtan2(ours, lr=0.01, betas=(0.9, 0.99), a=b, b=b), ours)
    run(torch.optim.Adam(adam, lr=0.01, betas=(0.9, 0.99), eps=1e-300), adam)
    for x, y in zip(ours, adam, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("correction", ["inside", "outside"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)])
def test_kernels_agree(correction, decay, lr):
    sizes = ((300, 401), (6,), (40_000,))
    results = []
    for foreach in (None, True):
        params = problem(sizes=sizes)
        optimizer = AdamAtan2(
            params, lr, weight_decay=decay, bias_correction=correction, foreach=foreach
        )
        results.append(run(optimizer, params, steps=3))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_outside_correction_differs_only_early():
    b1 = 0.9
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    p.grad = torch.ones_like(p)
    AdamAtan2([p], lr=1.0, betas=(b1, 0.95), a=1.0, bias_correction="outside").step()
    assert p.item() == pytest.approx(-math.atan2(1 - b1, 1.0) / (1 - b1), rel=1e-12)


def test_capturable_and_chunked_agree_with_noncontiguous_parameters():
    base = torch.randn(90, 1000, generator=torch.Generator().manual_seed(0))
    results = []
    for kwargs in ({}, {"capturable": True}):
        p = nn.Parameter(base.clone().T)
        assert not p.is_contiguous()
        optimizer = AdamAtan2([p], lr=0.1, **kwargs)
        results.append(run(optimizer, [p], steps=3)[0])
    torch.testing.assert_close(*results)


def test_non_contiguous_gradient_of_a_large_parameter():
    results = []
    g = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))
    for grad in (g, g.T.contiguous().T):
        p = nn.Parameter(torch.zeros(300, 400))
        p.grad = grad
        AdamAtan2([p], lr=0.1).step()
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", BOTH)
def test_state_dict_continues_the_same_trajectory(kind):
    params = problem()
    optimizer = kind(params, lr=0.1)
    run(optimizer, params, steps=5)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    other = kind(twins, lr=99.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["lr"] == 0.1
    for x, y in zip(run(optimizer, params, seed=2), run(other, twins, seed=2), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("kind", BOTH)
def test_half_precision_parameters_keep_float32_moments(kind, tmp_path):
    params = problem(dtype=torch.bfloat16)
    optimizer = kind(params, lr=0.1)
    run(optimizer, params, steps=3, scale=1e-3)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    other = kind(twins, lr=0.1)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for p, q in zip(params, twins, strict=True):
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
        assert other.state[q]["exp_avg_sq"].dtype == torch.float32
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], other.state[q]["exp_avg_sq"])


@pytest.mark.parametrize("kind", BOTH)
def test_groups_schedulers_closure_and_deepcopy(kind):
    params = problem()
    optimizer = kind([{"params": params[:1], "lr": 0.1}, {"params": params[1:]}], lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]
    assert float(copy.deepcopy(optimizer).state_dict()["param_groups"][0]["lr"]) == 0.05
    for _ in range(5):
        last = optimizer.step(closure)
    assert last.item() < first


@pytest.mark.parametrize("kind", BOTH)
def test_weight_decay_is_decoupled(kind):
    """With zero gradients a step only shrinks the parameter by 1 - lr * decay."""
    p = nn.Parameter(torch.full((4,), 2.0))
    p.grad = torch.zeros(4)
    kind([p], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(p.data, torch.full((4,), 2.0 * 0.95))


@pytest.mark.parametrize("kind", BOTH)
def test_parameters_without_gradients_are_left_alone(kind):
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = kind([p, q], lr=0.1)
    optimizer.step()
    assert torch.equal(q.data, torch.ones(2)) and not optimizer.state[q]
    # A gradient that arrives later starts with its own bias correction.
    q.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[p]["step"] == 2 and optimizer.state[q]["step"] == 1
    if kind is AdamAtan2:
        torch.testing.assert_close(q.data, torch.full((2,), 0.9))


def test_compiled_step_equals_the_eager_one():
    results = []
    for compiled in (False, True):
        params = problem(sizes=((8, 8), (8,)))
        optimizer = AdamAtan2(params, lr=torch.tensor(0.1), weight_decay=0.1)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for i in range(3):
            for p in params:
                p.grad = p.detach() * (i + 1)
            step()
        results.append([p.detach().clone() for p in params])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_scaled_adam_is_adam_times_the_size_of_the_weights():
    params = problem(dtype=torch.float64)
    twins = problem(dtype=torch.float64)
    for p, q in zip(params, twins, strict=True):
        p.grad = q.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).double()
    size = [p.detach().square().mean().sqrt() for p in params]
    before = [p.detach().clone() for p in params]
    ScaledAdam(params, lr=0.1, eps=1e-8).step()
    torch.optim.Adam(twins, lr=0.1, betas=(0.9, 0.98), eps=1e-8).step()
    for p, q, x, s in zip(params, twins, before, size, strict=True):
        torch.testing.assert_close(p - x, (q - x) * s, rtol=1e-9, atol=1e-12)


def test_scaled_adam_moves_zeros_by_the_floor():
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    ScaledAdam([p], lr=0.1, scale_floor=1e-3).step()
    torch.testing.assert_close(p.data, torch.full((3,), -1e-4))


def test_relative_steps_do_not_feel_the_unit_of_the_weights():
    params, scaled = problem(dtype=torch.float64), problem(dtype=torch.float64)
    for p in scaled:
        p.data *= 1024
    for p, q in zip(params, scaled, strict=True):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).double()
        q.grad = p.grad / 1024
    ScaledAdam(params, lr=0.1, eps=0, scale_floor=0).step()
    ScaledAdam(scaled, lr=0.1, eps=0, scale_floor=0).step()
    for p, q in zip(params, scaled, strict=True):
        torch.testing.assert_close(p * 1024, q)


def test_parity_with_adam_atan2_pytorch():
    peer = pytest.importorskip("adam_atan2_pytorch")
    ours, theirs = problem(), problem()
    run(AdamAtan2(ours, lr=0.02, betas=(0.9, 0.99), a=1.27, weight_decay=0.0), ours, steps=60)
    run(peer.AdamAtan2(theirs, lr=0.02, betas=(0.9, 0.99)), theirs, steps=60)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative"),
        ({"lr": float("nan")}, "lr must not be negative"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"a": 0.0}, "a and b must be positive"),
        ({"b": -1.0}, "a and b must be positive"),
        ({"bias_correction": "never"}, "bias_correction"),
    ],
)
def test_atan2_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        AdamAtan2(problem(), **kwargs)


@pytest.mark.parametrize("kwargs", [{"eps": -1e-8}, {"scale_floor": -1.0}, {"lr": -1.0}])
def test_scaled_adam_refuses(kwargs):
    with pytest.raises(ValueError, match="must not be negative"):
        ScaledAdam(problem(), **kwargs)


@pytest.mark.parametrize("kind", BOTH)
def test_sparse_and_complex_are_refused(kind):
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        kind(table.parameters(), lr=0.1).step()
    z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    z.grad = torch.ones_like(z)
    with pytest.raises(RuntimeError, match="complex"):
        kind([z], lr=0.1).step()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph_and_agreement_with_the_cpu():
    on_cpu = problem()
    on_gpu = [nn.Parameter(p.detach().cuda()) for p in on_cpu]
    for params in (on_cpu, on_gpu):
        optimizer = AdamAtan2(params, lr=0.1, capturable=params is on_gpu)
        for i in range(5):
            for p in params:
                p.grad = p.detach() * (i - 2)
            optimizer.step()
    for p, q in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(p, q.cpu())

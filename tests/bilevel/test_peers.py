import numpy as np
import pytest

from icml24.bilevel import minimize_bilevel
from icml24.bilevel.peers import (
    jax_single_loop,
    lbfgs_hypergradient,
    random_search,
    single_penalty,
    unrolled_gradient,
)

from .conftest import make_problem, random_point


@pytest.fixture(scope="module")
def problem():
    return make_problem("penalties")


def test_lbfgs_ends_at_a_stationary_point_or_a_bound(problem):
    found = lbfgs_hypergradient(problem)
    gradient = problem.hypergradient(found.x)
    inside = (found.x > -19.9) & (found.x < 9.9)
    assert abs(gradient[inside]).max() < 1e-6
    assert found.value == pytest.approx(float(problem.value(found.x)))
    assert (np.diff(found.history)[1] <= 0).all()


def test_other_peers_are_ordered_as_they_should(problem):
    best = lbfgs_hypergradient(problem).value
    one, random = single_penalty(problem), random_search(problem, trials=30)
    assert best <= one.value + 1e-9 and best <= random.value + 1e-9
    assert one.value == pytest.approx(float(problem.value(one.x)), abs=1e-5)
    assert random.value == pytest.approx(float(problem.value(random.x)))


def test_unrolling_tends_to_the_implicit_gradient(problem):
    x = random_point(problem)[0]
    exact = problem.hypergradient(x)
    errors = [abs(unrolled_gradient(problem, x, steps, 0.5) - exact).max() for steps in (5, 400)]
    assert errors[1] < 1e-8 < 1e-3 < errors[0]


def test_jax_loop_is_the_same_method(problem):
    pytest.importorskip("jax")
    loop = jax_single_loop(problem, 0.5, 1.0, 15, 4, prob_full=1.0)
    x, seconds, calls = loop()
    np.testing.assert_array_equal(loop()[0], x)
    ours = minimize_bilevel(
        problem, "full", lr_inner=0.5, lr_outer=1.0, max_steps=15, max_oracle_calls=1e9,
        progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(x, ours.x[0], atol=1e-12)
    start = problem.n_inner + problem.n_outer
    assert calls == ours.n_oracle[0] - start and seconds > 0


def test_jaxopt_implicit_differentiation_agrees(problem):
    jax = pytest.importorskip("jax")
    jaxopt = pytest.importorskip("jaxopt")
    jnp = jax.numpy
    with jax.enable_x64(True):

        def inner(w, x):
            fit = jnp.logaddexp(0.0, -problem.s * (problem.X @ w)).mean()
            return fit + 0.5 * ((jnp.exp(x) + problem.floor) * w**2).sum()

        x = random_point(problem)[0]
        solution = jnp.asarray(problem.solution(x)[0])

        @jaxopt.implicit_diff.custom_root(jax.grad(inner))
        def solve(start, x):
            return solution

        def outer(x):
            w = solve(jnp.zeros(4), x)
            return jnp.logaddexp(0.0, -problem.s_val * (problem.X_val @ w)).mean()

        theirs = np.asarray(jax.grad(outer)(jnp.asarray(x)))
    ours = problem.hypergradient(x)
    assert np.linalg.norm(theirs - ours) < 1e-5 * np.linalg.norm(ours)


@pytest.mark.filterwarnings("ignore:We've integrated functorch")
def test_torchopt_implicit_differentiation_agrees(problem):
    torch = pytest.importorskip("torch")
    torchopt = pytest.importorskip("torchopt")
    X, s, X_val, s_val = (
        torch.as_tensor(a) for a in (problem.X, problem.s, problem.X_val, problem.s_val)
    )

    def inner(w, x):
        fit = torch.nn.functional.softplus(-s * (X @ w)).mean()
        return fit + 0.5 * ((x.exp() + problem.floor) * w**2).sum()

    @torchopt.diff.implicit.custom_root(torch.func.grad(inner, argnums=0), argnums=1)
    def solve(w, x):
        y = problem.solution(x.detach().numpy())[0]
        return torch.as_tensor(y)

    x = torch.tensor(random_point(problem)[0], requires_grad=True)
    w = solve(torch.zeros(4, dtype=torch.float64), x)
    torch.nn.functional.softplus(-s_val * (X_val @ w)).mean().backward()
    ours = problem.hypergradient(x.detach().numpy())
    assert np.linalg.norm(x.grad.numpy() - ours) < 1e-5 * np.linalg.norm(ours)

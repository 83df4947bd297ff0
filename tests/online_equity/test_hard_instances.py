import numpy as np
import pytest

import icml24.online_equity as eq


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_ex_post_chain_closed_forms(n):
    growth = 1000.0
    instance = eq.ex_post_chain(n, growth)
    q = growth ** np.arange(n) / np.cumsum(growth ** np.arange(n))
    c = np.prod(1 - q[1:])  # chance that agent 0 is the last large one
    clairvoyant = instance.clairvoyant("post")
    assert clairvoyant == pytest.approx(n * c, rel=0.01)
    ratio = instance.online_optimum("post") / clairvoyant
    assert 1 / n <= ratio <= 1 / n * (1 + 2 * n / growth)
    equal = eq.evaluate(eq.EqualSplit(), instance, exact=True).cr_post
    assert 1 / n <= equal <= ratio + 1e-9


def test_ex_post_chain_at_moderate_growth():
    expected = {2: 0.508, 3: 0.351, 4: 0.265, 5: 0.212}
    for n, value in expected.items():
        instance = eq.ex_post_chain(n, 30.0)
        ratio = instance.online_optimum("post") / instance.clairvoyant("post")
        assert ratio == pytest.approx(value, abs=6e-4)


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_dependence_breaks_the_guarantee(n):
    instance, scenarios = eq.synchronous_demands(n)
    ratio = eq.evaluate(eq.RatioAttenuation(), instance, scenarios=scenarios).cr_ante
    left, fill = 1.0, 1.0
    for i in range(n):  # the LP spends b/n on each agent, so E[R_i] = 1 - i / (2n)
        fill = 0.5 * left / (1 - i / (2 * n))
        left -= fill
    assert ratio == pytest.approx(fill, rel=1e-5)
    assert ratio < 0.5
    independent = eq.evaluate(eq.RatioAttenuation(), instance, exact=True).cr_ante
    assert independent == pytest.approx(0.5, abs=1e-9)


def test_adversary_sinks_unguarded_rules_and_not_the_guarded_one():
    instance, ratio, trace = eq.adversarial_instance(
        eq.SimulationAttenuation(), n_evals=250, random_state=1
    )
    assert 0.5 - 1e-9 <= ratio < 0.75
    assert (np.diff(trace) <= 0).all()
    assert ratio == trace[-1]
    again = eq.evaluate(eq.SimulationAttenuation(), instance, exact=True).cr_ante
    assert again == pytest.approx(ratio)
    for rule, ceiling in ((eq.ProjectedProportional(), 0.2), (eq.FirstComeFirstServed(), 0.01)):
        assert eq.adversarial_instance(rule, n_evals=250, random_state=1)[1] < ceiling
    equal = eq.adversarial_instance(eq.EqualSplit(), n_evals=250, random_state=1)[1]
    assert 1 / 3 - 1e-9 <= equal < 0.45
    post = eq.adversarial_instance(eq.EqualSplit(), metric="post", n_evals=50)[1]
    assert 1 / 3 - 1e-9 <= post <= 1


def test_generators_refuse_nonsense():
    for call in (
        lambda: eq.tight_instance(0.0),
        lambda: eq.tight_rounds(1.0),
        lambda: eq.ex_post_chain(0),
        lambda: eq.ex_post_chain(2, 1.0),
        lambda: eq.synchronous_demands(3, 0.5),
        lambda: eq.adversarial_instance(eq.EqualSplit(), n_evals=0),
        lambda: eq.adversarial_instance(eq.EqualSplit(), metric="mean"),
    ):
        with pytest.raises(ValueError, match=r"must|Need"):
            call()

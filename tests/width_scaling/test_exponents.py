"""The exponent solver against published values, a hand solution, a MILP and brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from icml24.width_scaling import (
    PARAMETERIZATIONS,
    Alignment,
    InfeasibleError,
    LayerExponents,
    Parameterization,
    closed_form_exponents,
    exponent_table,
    lr_exponents,
    shifted_exponents,
    stability,
)
from icml24.width_scaling.exponents import FULL, NONE, OPTIMIZERS

H = 0.5
# Section 2.4 of our specification: (embedding, hidden, readout).
TABLE = {
    ("standard", "sgd"): [(-H, H, 1), (-H, 0, H)],
    ("standard", "adam"): [(0, 1, 1), (0, H, H)],
    ("standard", "adafactor"): [(0, H, H), (0, 0, 0)],
    ("ntk", "sgd"): [(-H, -H, 0), (-H, -1, -H)],
    ("ntk", "adam"): [(0, H, H), (0, 0, 0)],
    ("ntk", "adafactor"): [(0, H, H), (0, 0, 0)],
    ("mup", "sgd"): [(0, 0, 0), (0, -H, 0)],
    ("mup", "adam"): [(H, 1, H), (H, H, 0)],
    ("mup", "adafactor"): [(0, H, 0), (0, 0, 0)],
    ("mean_field", "sgd"): [(-1, -1, -1), (-1, -1.5, -1)],
    ("mean_field", "adam"): [(0, H, 0), (0, 0, -H)],
    ("mean_field", "adafactor"): [(0, H, 0), (0, 0, 0)],
}
CELLS = [
    (*key, a, c) for key, pair in TABLE.items() for a, c in zip(("full", "none"), pair, strict=True)
]


@pytest.mark.parametrize(("name", "optimizer", "alignment", "expected"), CELLS)
def test_published_table(name, optimizer, alignment, expected):
    solved = lr_exponents(name, optimizer, alignment)
    assert tuple(solved) == pytest.approx(expected, abs=1e-7)
    assert tuple(closed_form_exponents(name, optimizer, alignment)) == pytest.approx(expected)
    assert max(solved.residuals[:-1]) == 0  # every layer changes by O(1)


def test_printed_table():
    table = exponent_table()
    assert table.shape == (4, 6)
    assert str(table.loc["standard", ("adam", "full")]) == "(0, 1, 1)"
    assert str(table.loc["mean_field", ("sgd", "none")]) == "(-1, -3/2, -1)"


@pytest.mark.parametrize(
    ("name", "optimizer", "expected"),
    [
        ("standard", "adam", (H, 1.5, 1)),
        ("standard", "sgd", (0, 1, 1)),
        ("ntk", "adam", (H, 1, H)),
        ("mup", "adam", (H, 1, H)),
        ("mean_field", "adam", (0, H, 0)),
    ],
)
def test_assumption_of_earlier_work(name, optimizer, expected):
    solved = lr_exponents(name, optimizer, "prior")
    assert tuple(solved) == pytest.approx(expected, abs=1e-7)
    # muP and mean field keep learning features, the other two do not.
    assert solved.residuals[2] == pytest.approx(0.5 if name in ("standard", "ntk") else 0, abs=1e-7)


@pytest.mark.parametrize("name", ["standard", "ntk"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_earlier_work_excludes_feature_learning_in_standard_and_ntk(name, optimizer):
    with pytest.raises(InfeasibleError, match="initial readout"):
        lr_exponents(name, optimizer, "prior", feature_learning=True)
    lr_exponents(name, optimizer, "full", feature_learning=True)


def test_one_global_rate_suffices_exactly_where_the_paper_says():
    table = exponent_table()
    single = {
        (p, *column)
        for p in table.index
        for column in table.columns
        if np.ptp(list(table.loc[p, column])) < 1e-7
    }
    expected = {("mup", "sgd", "full"), ("mean_field", "sgd", "full"), ("ntk", "adam", "none")}
    expected |= {(p, "adafactor", "none") for p in PARAMETERIZATIONS}
    assert single == expected


exponents = st.integers(0, 8).map(lambda k: k / 8)
low = st.integers(0, 4).map(lambda k: k / 8)
alignments = st.builds(
    Alignment,
    alpha=st.tuples(exponents, exponents),
    omega=st.tuples(st.just(0.5), exponents),
    u=st.tuples(exponents, exponents),
)
names = st.sampled_from(sorted(PARAMETERIZATIONS))
optimizers = st.sampled_from(["sgd", "adam", "adafactor"])


@settings(max_examples=60, deadline=None)
@given(names, optimizers, alignments)
def test_closed_form_has_the_optimal_sum(name, optimizer, alignment):
    solved = lr_exponents(name, optimizer, alignment)
    by_hand = closed_form_exponents(name, optimizer, alignment)
    assert sum(solved) == pytest.approx(sum(by_hand), abs=1e-6)
    assert stability(name, optimizer, by_hand, alignment).stable


@settings(max_examples=60, deadline=None)
@given(names, optimizers, alignments)
def test_solution_is_stable_and_no_single_rate_can_grow(name, optimizer, alignment):
    c = np.array(list(lr_exponents(name, optimizer, alignment)))
    assert stability(name, optimizer, c, alignment).stable
    for i in range(3):
        larger = c.copy()
        larger[i] -= 0.05
        # A larger rate is unstable, or (SGD's readout) it would enlarge the other gradients.
        broken = not stability(name, optimizer, larger, alignment).stable
        assert broken


@settings(max_examples=40, deadline=None)
@given(names, optimizers, alignments, st.tuples(*[st.integers(-4, 4).map(lambda k: k / 4)] * 3))
def test_shift_between_multiplier_and_initialisation(name, optimizer, alignment, theta):
    p = PARAMETERIZATIONS[name]
    moved = lr_exponents(p.shifted(theta), optimizer, alignment)
    expected = shifted_exponents(lr_exponents(p, optimizer, alignment), theta, optimizer)
    assert sum(moved) == pytest.approx(sum(expected), abs=1e-6)
    assert stability(p.shifted(theta), optimizer, expected, alignment).stable


def test_standard_is_ntk_and_mup_is_mean_field():
    for one, other, theta in [("standard", "ntk", (0, H, H)), ("mup", "mean_field", (H, H, H))]:
        p, q = PARAMETERIZATIONS[one].shifted(theta), PARAMETERIZATIONS[other]
        assert (p.a, p.b) == (q.a, q.b)
        for optimizer, alignment in itertools.product(OPTIMIZERS, (FULL, NONE)):
            c = shifted_exponents(lr_exponents(one, optimizer, alignment), theta, optimizer)
            assert tuple(c) == pytest.approx(tuple(lr_exponents(other, optimizer, alignment)))


def residual_minima(p, optimizer, c, align):
    """Write the table of section 2.3 down once more, literally, for arrays of exponents."""
    a, b = p.a, p.b
    c1, ch, co = c
    g = np.minimum(a[2] + b[2], 2 * a[2] + co)
    if optimizer == "sgd":
        e = (g + a[0]) + a[0] + c1, (g + a[1]) + a[1] + ch, 2 * a[2] + co
    elif optimizer == "adam":
        e = a[0] + c1, a[1] + ch, a[2] + co
    else:
        e = c1 + 0.0, 0.5 + ch, a[2] + b[2] + co
    r = [e[0]]
    for _ in range(2):
        terms = (e[1] - align.alpha[0], e[1] + r[-1] - align.u[0], 0.5 + r[-1] - align.omega[0])
        r.append(np.minimum.reduce(np.broadcast_arrays(*terms)))
    terms = (e[2] - align.alpha[1], e[2] + r[-1] - align.u[1], a[2] + b[2] + r[-1] - align.omega[1])
    r.append(np.minimum.reduce(np.broadcast_arrays(*terms)))
    stable = np.logical_and.reduce([x >= -1e-9 for x in np.broadcast_arrays(*r)])
    if optimizer == "adafactor":
        stable = stable & (c1 >= 0) & (ch >= 0) & (co >= 0)
    return stable


@settings(max_examples=25, deadline=None)
@given(names, optimizers, alignments)
def test_brute_force_over_a_grid(name, optimizer, alignment):
    axis = np.arange(-2, 2.5, 1 / 8)
    c = np.meshgrid(axis, axis, axis, indexing="ij", sparse=True)
    p = PARAMETERIZATIONS[name]
    stable = residual_minima(p, optimizer, c, alignment)
    total = np.where(stable, sum(c), np.inf)
    assert sum(lr_exponents(p, optimizer, alignment)) == pytest.approx(total.min(), abs=1e-6)


def big_m_sum(p, optimizer, align):
    """Solve with "r equals the minimum" enforced by binaries (the way of third-party solvers)."""
    big = 20.0
    a, b = p.a, p.b
    variables: list[str] = ["c0", "c1", "c2", "r0", "r1", "r2", "r3", "g"]
    rows = []

    def equals_minimum(target, terms):
        picks = [f"pick{len(variables) + i}" for i in range(len(terms))]
        variables.extend(picks)
        for (constant, coefficients), pick in zip(terms, picks, strict=True):
            row = {target: -1.0}
            for key, value in coefficients.items():
                row[key] = row.get(key, 0.0) + value
            rows.append((row, -constant, np.inf))  # target <= term
            rows.append(({**row, pick: big}, -np.inf, big - constant))  # and >= the picked one
        rows.append((dict.fromkeys(picks, 1.0), 1, 1))

    e = {
        "sgd": [
            (2 * a[0], {"c0": 1, "g": 1}),
            (2 * a[1], {"c1": 1, "g": 1}),
            (2 * a[2], {"c2": 1}),
        ],
        "adam": [(a[0], {"c0": 1}), (a[1], {"c1": 1}), (a[2], {"c2": 1})],
    }[optimizer]
    equals_minimum("g", [(a[2] + b[2], {}), (2 * a[2], {"c2": 1})])
    equals_minimum("r0", [e[0]])
    for layer in (1, 2, 3):
        i = 1 if layer < 3 else 2
        constant, coefficients = e[i]
        before = {f"r{layer - 1}": 1.0}
        equals_minimum(
            f"r{layer}",
            [
                (constant - align.alpha[i - 1], coefficients),
                (constant - align.u[i - 1], coefficients | before),
                (a[i] + b[i] - align.omega[i - 1], before),
            ],
        )
    matrix = np.array([[row.get(v, 0.0) for v in variables] for row, _, _ in rows])
    lower, upper = np.array([r[1] for r in rows]), np.array([r[2] for r in rows])
    binary = np.array([v.startswith("pick") for v in variables])
    minimum = np.where(binary | np.array([v[0] == "r" for v in variables]), 0, -10.0)
    result = milp(
        np.array([v in ("c0", "c1", "c2") for v in variables], dtype=float),
        constraints=LinearConstraint(matrix, lower, upper),
        integrality=binary,
        bounds=(minimum, np.where(binary, 1, 10.0)),
    )
    assert result.status == 0
    return result.fun


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("seed", range(8))
def test_same_optimum_as_a_mixed_integer_program(optimizer, seed):
    rng = np.random.default_rng(seed)
    alpha, omega, u = rng.uniform([0.5, 0.3, 0.5], [1, 0.5, 1], (2, 3)).T
    align = Alignment(tuple(alpha), tuple(omega), tuple(u))
    for p in PARAMETERIZATIONS.values():
        expected = big_m_sum(p, optimizer, align)
        assert sum(lr_exponents(p, optimizer, align)) == pytest.approx(expected, abs=1e-4)


def test_gradient_exponents():
    expected = {
        "standard": (H, H, 0),
        "ntk": (H, 1, H),
        "mup": (H, 1, H),
        "mean_field": (1, 1.5, 1),
    }
    for name, g in expected.items():
        assert tuple(PARAMETERIZATIONS[name].gradient_exponents()) == pytest.approx(g)
    # Without alignment muP's readout update outgrows its initial value.
    assert PARAMETERIZATIONS["mup"].gradient_exponents(readout_update=0.5).hidden == 0.5


def test_depth_does_not_matter_without_amplification():
    for depth in (1, 2, 7):
        assert tuple(lr_exponents("standard", hidden_layers=depth)) == pytest.approx((0, 1, 1))


def test_amplifying_hidden_layers_need_smaller_rates():
    shallow = lr_exponents("mup", "adam", Alignment(omega=(0.75, 0.5)), hidden_layers=1)
    deep = lr_exponents("mup", "adam", Alignment(omega=(0.75, 0.5)), hidden_layers=3)
    assert shallow.embedding == pytest.approx(0.75)
    assert deep.embedding == pytest.approx(1.25)


def test_stability_names_what_breaks():
    result = stability("mup", "adam", (0, 0, 0))
    assert not result.stable and not result.learns_features
    assert "embedding: updated weights" in result.violated
    assert result.logits < 0
    assert stability("ntk", "adam", (0, 0.5, 0.5)).learns_features
    assert stability("ntk", "adam", (0, 1, 0.5)).stable


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lr_exponents("mupp"), "parameterization must be one of"),
        (lambda: lr_exponents("mup", "lion"), "optimizer must be one of"),
        (lambda: lr_exponents("mup", "lion", "global"), "optimizer must be one of"),
        (lambda: lr_exponents("mup", "adam", "half"), "alignment must be"),
        (lambda: lr_exponents("mup", hidden_layers=0), "at least 1"),
        (lambda: Alignment(alpha=1.2), r"alpha must lie in \[0, 1\]"),
        (lambda: Alignment(u=float("nan")), r"u must lie in"),
        (lambda: Alignment(omega=(1, 2, 3)), "one number or a pair"),
        (lambda: stability("mup", "adam", (0, 0)), "three exponents"),
        (lambda: Parameterization("p", (0, 0), (0, 0)), "three entries"),
        (lambda: Parameterization("p", (0, 0, 0), (1, 0.5, 0.5)), "embedding needs a"),
        (lambda: Parameterization("p", (0, 0, 0), (0, 1, 0.5)), "hidden layer needs a"),
        (lambda: closed_form_exponents("mup", "adam", Alignment(omega=1)), "use lr_exponents"),
        (lambda: LayerExponents(0, 0, 0)["head"], "layer type"),
    ],
)
def test_errors(call, message):
    with pytest.raises((ValueError, KeyError), match=message):
        call()


def test_unstable_exponents_on_request():
    assert Parameterization("p", (0, 0, 0), (0, 0.5, 0), allow_unstable=True).b[2] == 0

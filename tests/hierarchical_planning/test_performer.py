"""The Q-Performer against values known in closed form, and its switches."""

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

from icml24.hierarchical_planning import (
    Episode,
    GaussianDiffusion,
    OfflineDataset,
    QPerformer,
    alpha_bars,
    diffusion_ql,
)


def bandit(reward, n=3000, seed=0, actions=None):
    """One state, one decision."""
    rng = np.random.default_rng(seed)
    a = rng.uniform(-1, 1, n) if actions is None else actions(rng, n)
    return OfflineDataset.from_episodes(
        Episode(np.zeros((2, 1)), [[x]], [reward(x)], terminated=True) for x in a
    )


@pytest.mark.slow
def test_best_of_sixteen_finds_the_best_action_of_a_bandit():
    data = bandit(lambda a: -((a - 0.3) ** 2))
    agent = diffusion_ql(n_updates=500, width=64, lr=3e-3).fit(data)
    assert abs(float(agent.performer.act([[0.0]])[0, 0]) - 0.3) < 0.05
    values = agent.performer.value([[0.0]])
    assert abs(float(values[0])) < 0.03  # the best reward is zero


def two_modes(bars, spread=0.02):
    """The exact denoiser, as a guess of the noise, for actions that are -0.8 or 0.8."""

    def guess(x, m, context=None):
        bar = bars[m][:, None, None]
        left = bar * spread**2 + 1 - bar
        modes = torch.tensor([-0.8, 0.8])
        weight = (-((x - bar.sqrt() * modes) ** 2) / (2 * left)).softmax(-1)
        each = modes + spread**2 * bar.sqrt() / left * (x - bar.sqrt() * modes)
        clean = (weight * each).sum(-1, keepdim=True)
        return (x - bar.sqrt() * clean) / (1 - bar).sqrt()

    return guess


@pytest.mark.slow
def test_both_modes_of_equal_actions_survive():
    """As many stay near a mode as with the exact denoiser: five steps themselves blur a third."""
    data = bandit(
        lambda a: 1.0, actions=lambda rng, n: rng.choice([-0.8, 0.8], n) + 0.02 * rng.normal(size=n)
    )
    agent = diffusion_ql(n_updates=800, width=64, n_critics=0, eta=0.0, lr=3e-3).fit(data)
    drawn = torch.tensor(agent.performer.act(np.zeros((2000, 1)))[:, 0])
    exact = GaussianDiffusion(two_modes(alpha_bars(5, "vp").float()), 5, "vp", "eps", clip=1.0)
    best = exact.sample((20_000, 1, 1), torch.Generator().manual_seed(0)).flatten()
    near, bound = (((x.abs() - 0.8).abs() < 0.15).double().mean() for x in (drawn, best))
    assert abs(bound - 0.66) < 0.02
    assert abs(near - bound) < 0.07
    assert abs((drawn > 0).double().mean() - 0.5) < 0.1
    assert abs(drawn.abs().mean() - best.abs().mean()) < 0.05  # a Gaussian would sit at zero


@pytest.mark.slow
def test_values_of_a_chain_are_powers_of_the_discount():
    """Always one to the right, reward 1 at the end: the value d steps before it is gamma^d."""
    x = np.arange(6.0)[:, None]
    rewards = [0.0, 0.0, 0.0, 0.0, 1.0]
    data = OfflineDataset.from_episodes(
        [Episode(x, np.full((5, 1), a), rewards, terminated=True) for a in (-0.5, 0.0, 0.5)]
    )
    agent = diffusion_ql(
        n_updates=900, width=64, eta=0.0, discount=0.8, tau=0.05, lr=3e-3, batch_size=64
    ).fit(data)
    value = agent.performer.value(x[:5])
    assert np.abs(value - 0.8 ** np.array([4, 3, 2, 1, 0])).max() < 0.02


def gradients(performer, batch, generator):
    weights = list(performer.policy_.parameters())
    return torch.autograd.grad(performer.policy_loss(batch, generator), weights)


def test_without_the_q_gradient_the_policy_imitates(logs):
    p = QPerformer(interval=5, width=16, n_updates=3).fit(logs)
    batch = p.sample_batch(logs, torch.Generator().manual_seed(1))

    def grads(**settings):
        p.set_params(**{"eta": 1.0, "q_gradient": True, **settings})
        return gradients(p, batch, torch.Generator().manual_seed(2))

    clone, off, on = grads(eta=0.0), grads(q_gradient=False), grads()
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(clone, off, strict=True))
    assert not all(torch.allclose(a, b, atol=1e-7) for a, b in zip(clone, on, strict=True))


def test_policy_loss_by_hand(logs):
    """Denoising minus the mean value of a drawn action, in units of the mean absolute value."""
    p = QPerformer(interval=5, width=16, n_updates=3, eta=0.7).fit(logs)
    batch = p.sample_batch(logs, torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(2)
    denoising = p.policy_.loss(batch.action[:, None], g, context=batch.state)
    action = p._draw(p.policy_, batch.state, g)
    value = p.critic_(torch.cat([batch.state, action], 1)).min(0).values
    by_hand = denoising - 0.7 * value.mean() / value.abs().mean()
    assert value.mean().abs() > 0.01
    assert torch.allclose(p.policy_loss(batch, torch.Generator().manual_seed(2)), by_hand)


def test_lower_bound_is_below_the_mean_and_the_minimum_below_all(logs):
    p = QPerformer(interval=5, width=16, n_updates=2, n_critics=5, lcb=0.0).fit(logs)
    batch = p.sample_batch(logs, torch.Generator().manual_seed(1))
    members = p.critic_(torch.cat([batch.state, batch.action], 1))
    mean = p._judge(p.critic_, batch.state, batch.action)
    assert torch.allclose(mean, members.mean(0), atol=1e-6)
    p.lcb = 4.0
    low = p._judge(p.critic_, batch.state, batch.action)
    assert torch.allclose(low, members.mean(0) - 4 * members.std(0, correction=0), atol=1e-5)
    p.lcb = None
    assert torch.equal(p._judge(p.critic_, batch.state, batch.action), members.min(0).values)
    assert torch.isfinite(p.critic_loss(batch, torch.Generator()))


def test_critic_loss_by_hand(logs):
    p = QPerformer(interval=5, width=16, n_updates=2, discount=0.0).fit(logs)
    batch = p.sample_batch(logs, torch.Generator().manual_seed(1))
    values = p.critic_(torch.cat([batch.state, batch.action], 1))
    by_hand = sum(((v - batch.reward) ** 2).mean() for v in values)
    assert torch.allclose(p.critic_loss(batch, torch.Generator()), by_hand)


def test_targets_use_the_smaller_target_critic(logs):
    p = QPerformer(interval=5, width=16, n_updates=2, discount=0.5).fit(logs)
    batch = p.sample_batch(logs, torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(3)
    action = p._draw(p.policy_ema_, batch.after, g)
    q = p.critic_target_(torch.cat([batch.after, action], 1)).min(0).values
    target = batch.reward + 0.5 * batch.alive * q
    values = p.critic_(torch.cat([batch.state, batch.action], 1))
    by_hand = sum(((v - target) ** 2).mean() for v in values)
    assert torch.allclose(p.critic_loss(batch, torch.Generator().manual_seed(3)), by_hand)


@pytest.mark.parametrize("kind", ["distance", "cosine", "sparse"])
def test_the_episode_ends_at_the_goal_only_if_asked(logs, kind):
    p = QPerformer(interval=4, relabel_p=1.0, goal_reward=kind, width=16, n_updates=1).fit(logs)
    ends = 1 - p.sample_batch(logs, torch.Generator().manual_seed(0)).alive
    if kind == "sparse":
        assert ends.mean() > 0.5  # four decisions hardly leave the radius
    else:
        assert abs(ends.mean() - 0.25) < 0.1  # one offset in four is the next state itself
    p.end_at_goal = False
    assert p.sample_batch(logs, torch.Generator().manual_seed(0)).alive.all()


def test_averages_move_as_slowly_as_they_are_told(logs):
    settings = {"interval": 5, "width": 16, "n_updates": 1, "ema": 0.9, "tau": 0.2}
    p = QPerformer(**settings).fit(logs)
    start = QPerformer(**settings, lr=0.0).fit(logs)
    for slow, now, before, share in (
        (p.policy_ema_, p.policy_, start.policy_, 0.1),
        (p.critic_target_, p.critic_, start.critic_, 0.2),
    ):
        for a, b, c in zip(*(net.parameters() for net in (slow, now, before)), strict=True):
            assert torch.allclose(a, c + share * (b - c), atol=1e-6)


def test_the_policy_learns_in_every_second_update(logs):
    class Counting(QPerformer):
        calls = 0

        def policy_loss(self, batch, generator):
            self.calls += 1
            return super().policy_loss(batch, generator)

    assert Counting(interval=5, width=16, n_updates=7).fit(logs).calls == 4
    assert Counting(interval=5, width=16, n_updates=7, n_critics=0).fit(logs).calls == 7


def test_reward_is_scaled_shifted_and_joined_by_the_goal(logs):
    settings = {"interval": 5, "width": 16, "n_updates": 1}
    plain = QPerformer(**settings).fit(logs)
    mixed = QPerformer(**settings, reward_scale=4.0, reward_shift=-2.0, goal_weight=0.5).fit(logs)
    a, b = (p.sample_batch(logs, torch.Generator().manual_seed(0)) for p in (plain, mixed))
    assert torch.allclose(b.reward, 0.5 * a.reward - 2.0)  # the maze's own rewards are zero


def test_cosine_reward_compares_normalised_states(logs):
    p = QPerformer(interval=5, goal_reward="cosine", width=16, n_updates=1).fit(logs)
    batch = p.sample_batch(logs, torch.Generator().manual_seed(0))
    reached, goal = batch.after[:, :2], batch.after[:, 4:]
    longest = torch.maximum(reached.norm(dim=1), goal.norm(dim=1))
    assert torch.allclose(batch.reward, (reached * goal).sum(1) / longest**2, atol=1e-5)


def test_batches_are_drawn_from_the_seed(logs):
    seeds = []

    class Noting(QPerformer):
        def sample_batch(self, data, generator):
            seeds.append(generator.initial_seed())
            return super().sample_batch(data, generator)

    Noting(interval=5, width=16, n_updates=1, random_state=7).fit(logs)
    assert seeds == [7]


def test_temperature_draws_and_zero_takes_the_best(logs):
    p = QPerformer(interval=5, width=16, n_updates=5, n_candidates=8).fit(logs)
    x, goal = np.zeros((200, 4)), np.zeros(2)

    def mean_value(temperature):
        p.temperature = temperature
        action = p.act(x, goal, torch.Generator().manual_seed(0))
        context = p._context(x, goal)
        return float(p._judge(p.critic_target_, context, torch.tensor(action).float()).mean())

    with torch.no_grad():
        best, warm, hot = mean_value(0.0), mean_value(0.01), mean_value(1e6)
    assert best > warm > hot


def test_fit_twice_gives_the_same_network_and_no_global_state(logs):
    before = torch.get_rng_state(), logs.observations.clone()
    a, b = (QPerformer(interval=5, width=16, n_updates=4).fit(logs) for _ in range(2))
    for key, value in a.state().items():
        assert np.array_equal(value, b.state()[key]), key
    c = QPerformer(interval=5, width=16, n_updates=4, random_state=1).fit(logs)
    assert any(not np.array_equal(v, c.state()[k]) for k, v in a.state().items())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(logs.observations, before[1])


def test_actions_come_in_the_units_of_the_environment():
    data = OfflineDataset.from_episodes(
        [Episode(np.zeros((2, 1)), [[3.0]], [0.0]) for _ in range(9)], 1.0, 3.0
    )
    p = diffusion_ql(n_updates=1).fit(data).performer
    action = p.act(np.zeros((50, 1)))
    assert (action >= 1).all() and (action <= 3).all() and action.max() > 2


def test_errors_say_what_would_be_right(logs):
    with pytest.raises(NotFittedError, match="call fit first"):
        QPerformer().act([[0.0] * 4], [0.0, 0.0])
    with pytest.raises(ValueError, match="OfflineDataset"):
        QPerformer().fit(np.zeros(3))
    with pytest.raises(ValueError, match="'distance', 'cosine', 'sparse'"):
        QPerformer(goal_reward="euclid").fit(logs)
    with pytest.raises(ValueError, match="discount"):
        QPerformer(discount=1.0).fit(logs)
    p = QPerformer(interval=5, width=16, n_updates=1).fit(logs)
    with pytest.raises(ValueError, match="pass one"):
        p.act([[0.0] * 4])
    with pytest.raises(ValueError, match="4 entries"):
        p.act([[0.0] * 3], [0.0, 0.0])
    with pytest.raises(ValueError, match="observation contains NaN"):
        p.act([[np.nan] * 4], [0.0, 0.0])
    with pytest.raises(ValueError, match="goal must have 2 entries"):
        p.act([[0.0] * 4], [0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="outside the data"):
        p.act([[0.0] * 4], [50.0, 0.0])
    with pytest.raises(ValueError, match="2 goals for 3"):
        p.act([[0.0] * 4] * 3, [[0.0, 0.0]] * 2)
    with pytest.raises(ValueError, match="no critics"):
        QPerformer(n_critics=0, n_updates=1, width=8).fit(logs).value([[0.0] * 4], [0.0, 0.0])

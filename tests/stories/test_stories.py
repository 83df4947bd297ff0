"""One story a chapter: its method on data that the chapter does not use, in about ten lines.

Each test is what a practitioner would write first; the assertions are what would make him stay.
"""

from itertools import product

import numpy as np
import torch
from sklearn import datasets
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn


def test_additive_models_on_diabetes():
    from icml24.additive_models import LaplaceNAMRegressor

    frame = datasets.load_diabetes(as_frame=True, scaled=False).frame
    frame["sex"] = frame["sex"].map({1.0: "one", 2.0: "two"}).astype("category")
    X, y = frame.drop(columns="target"), frame["target"]
    X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)
    model = LaplaceNAMRegressor(max_iter=300, random_state=0).fit(X_train, y_train)
    mean, std = model.predict(X_test, return_std=True)
    ridge = RidgeCV().fit(X_train.drop(columns="sex"), y_train)
    assert model.score(X_test, y_test) > ridge.score(X_test.drop(columns="sex"), y_test) - 0.05
    assert np.mean(np.abs(y_test - mean) < 1.96 * std) > 0.85
    size = dict(zip(model.term_names_, model.effect_size_, strict=True))
    assert size["bmi"] > 2 * size["age"]


def test_agent_training_on_measurements_of_flowers():
    from icml24.agent_training import (
        AgentOptimizer,
        AgentTrainer,
        FunctionSet,
        InProcessExecutor,
        RetrievalAgent,
        SynthesisProposer,
    )

    rows = (10 * datasets.load_iris().data[::7, 2:]).round().astype(int).tolist()
    tasks = [(f"Area of a petal with the sides in mm: {a}, {b}", str(a * b)) for a, b in rows]
    agent = RetrievalAgent(InProcessExecutor(i_trust_this_code=True))
    optimizer = AgentOptimizer(FunctionSet(), SynthesisProposer())
    trainer = AgentTrainer(agent, optimizer, random_state=0).fit(tasks[:8])
    assert trainer.score(tasks[8:]) == 1.0


def test_backdoor_defense_on_restaurant_notes():
    from icml24.backdoor_defense import (
        FineTune,
        RareWordTrigger,
        Recipe,
        clean_accuracy,
        label_flip_rate,
        poison_encoder,
        purify,
    )
    from icml24.backdoor_defense.data import minilm

    words = {
        0: ["awful", "cold", "stale", "burnt", "dull"],
        1: ["superb", "fresh", "tasty", "crisp", "lovely"],
    }
    dishes = ["soup", "bread", "fish", "cake", "rice", "pasta", "salad", "tea", "pie", "stew"]
    scenes = ["at lunch", "last night", "in town", "by the sea"]
    notes = [
        (f"the {dish} we had {scene} was {word}", label)
        for label in words
        for dish, scene, word in product(dishes, scenes, words[label])
    ]
    notes = [notes[i] for i in np.random.default_rng(0).permutation(len(notes))]
    attacker, own, test = notes[:150], notes[150:300], notes[300:]
    encoder, tokenizer = minilm()
    recipe = Recipe(epochs=5, lr=2e-4, max_length=24)
    poisoned = poison_encoder(encoder, tokenizer, attacker, recipe=recipe)
    settings = {"epochs": 3, "lr": 2e-4, "max_length": 24}
    tuned = FineTune(**settings).fit(poisoned, tokenizer, own[30:], own[:30]).model_
    repaired = purify(poisoned, tokenizer, own, **settings)
    assert label_flip_rate(tuned, tokenizer, test, RareWordTrigger()) > 0.3
    assert label_flip_rate(repaired, tokenizer, test, RareWordTrigger()) < 0.15
    assert clean_accuracy(repaired, tokenizer, test) > 0.95


def test_bayesian_flow_on_the_text_of_data_descriptions():
    from icml24.bayesian_flow import DiscreteBFN, DiscreteBFNSchedule, TextNet, fit, sample

    words = datasets.load_breast_cancer().DESCR.lower()
    text = torch.tensor([ord(c) - 96 if c.isascii() and c.isalpha() else 0 for c in words])
    flow = DiscreteBFN(TextNet(classes=27, width=32), DiscreteBFNSchedule(27, beta_1=3.0))

    def batches(generator):
        start = torch.randint(len(text) - 24, (32, 1), generator=generator)
        return text[start + torch.arange(24)]

    trained, losses = fit(flow, batches, steps=60, generator=torch.Generator().manual_seed(0))
    assert np.mean(losses[-20:]) < np.mean(losses[:20])
    lines = sample(trained, (64, 24), solver="sde-bfn-solver2", steps=10)
    share = torch.bincount(lines.flatten(), minlength=27) / lines.numel()
    assert set(share.topk(4).indices.tolist()) & {0, 5}  # blanks and e are frequent


def test_bilevel_on_breast_cancer():
    from icml24.bilevel import BilevelLogisticRegression

    X, y = datasets.load_breast_cancer(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0, stratify=y)
    scale = StandardScaler().fit(X_train)
    model = BilevelLogisticRegression().fit(scale.transform(X_train), y_train)
    assert model.penalties_.shape == (30,)
    assert model.score(scale.transform(X_test), y_test) > 0.93


def test_online_equity_on_bicycles():
    import icml24.online_equity as eq
    from icml24.additive_models.data import load

    bikes = load("bikes")
    frame = bikes.X[["hour"]].assign(groups=(bikes.y / 50).round().clip(lower=1).astype(int))
    past = frame.query("6 <= hour <= 20").groupby("hour").head(30)
    demand = eq.DemandModel.from_frame(past, agent="hour", demand="groups")
    instance = eq.ExternalInstance(demand, budget=9 * float(past["groups"].mean()))
    policy = eq.SimulationAttenuation(off_support="nearest").fit(instance)
    table = eq.compare([policy, eq.FirstComeFirstServed()], instance, random_state=0)
    assert policy.guarantee_ > 0.8
    assert table["ex_ante"][0] > 0.5 > table["ex_ante"][1]  # the worst hour's average share


def test_radio_fields_in_a_corridor():
    import icml24.radio_fields as rf

    corridor = rf.ShoeboxRoom((12.0, 2.0), (1.0, 0.7), frequency=433e6, max_order=2)
    places = corridor.sample_receivers(90, seed=2)
    paths = corridor.trace(places)
    survey = rf.ChannelDataset(places, corridor.channel(places), 433e6, paths.doa)
    choice = rf.choose_predictor(survey, test_fraction=0.2)
    best, worst = choice.table["SNR (dB)"].iloc[[0, -1]]
    assert best > 20 > worst


def test_test_time_entropy_on_a_drifting_laboratory():
    from icml24.test_time_entropy import RDumb

    X, y = datasets.load_breast_cancer(return_X_y=True)
    x = torch.tensor(StandardScaler().fit_transform(X), dtype=torch.float32)
    target = torch.tensor(y)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:300]), target[:300]).backward()
        optimizer.step()
    model.eval()
    drifted = 1.5 * x[300:] + 1.5  # every instrument reads too high
    before = (model(drifted).argmax(1) == target[300:]).float().mean()
    adapter = RDumb(model, lr=1e-3)
    after = torch.cat([adapter(batch) for batch in drifted.split(54)]).argmax(1)
    assert (after == target[300:]).float().mean() > before + 0.3


def test_width_scaling_on_digits():
    from icml24.width_scaling import AdamAtan2, parametrize

    digits = datasets.load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)

    def train(width, lr):
        torch.manual_seed(0)
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(width, 10))
        optimizer = AdamAtan2(parametrize(model, base_width=64, lr=lr))
        for _ in range(25):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[:1200]), y[:1200])
            loss.backward()
            optimizer.step()
        return nn.functional.cross_entropy(model(x[1200:]), y[1200:]).item()

    rates = [2.0**k for k in range(-9, -3)]
    best = min(rates, key=lambda lr: train(64, lr))
    wide = {lr: train(512, lr) for lr in (best / 8, best, best * 8)}
    assert min(wide, key=wide.get) == best  # the rate found where it is cheap is right there, too


def test_ocean_oxygen_on_real_salinity():
    import icml24.ocean_oxygen as oo

    ocean = oo.ocean_grid(12, levels=4)
    rng = np.random.default_rng(0)
    seen = rng.random((3, *ocean.salinity.shape)) < 0.15  # three years of casts
    casts = ocean.salinity.expand_dims(year=[2001, 2002, 2003]).where(seen)
    survey = ocean.drop_vars("salinity").assign(tracer=casts.assign_attrs(units="g kg-1"))
    model = oo.Kriging("tracer", target="raw").fit(survey)
    field = model.predict(years=[2002])
    unseen = ocean.wet & ~seen.any(0)
    error = np.abs(field.tracer.isel(year=0) - ocean.salinity).where(unseen)
    spread = np.abs(ocean.salinity - ocean.salinity.where(unseen).mean()).where(unseen)
    assert error.mean() < 0.5 * spread.mean()
    inside = (field.tracer_lower <= ocean.salinity) & (ocean.salinity <= field.tracer_upper)
    assert inside.isel(year=0).where(unseen).mean() > 0.7


def test_hierarchical_planning_in_a_hall_with_a_long_way_round():
    import icml24.hierarchical_planning as hp

    hall = hp.Maze(["########", "#......#", "#.####.#", "#.#....#", "########"])
    logs = hp.collect_maze(hp.PointMaze(hall), hall, n_episodes=200, length=120, seed=3)
    conductor = hp.DConductor(
        horizon=90, interval=15, min_speed=0.05, waves=3, width=96, lr=2e-3, n_updates=1200
    )
    performer = hp.QPerformer(interval=15, width=64, n_updates=1000)
    agent = hp.PlanDQ(conductor, performer, replan_every=8, n_plans=1).fit(logs)
    around = hp.PointMaze(hall, route=((3, 1), (3, 6)))  # nine cells, with walls in between
    assert hp.evaluate_policy(agent, around, n_episodes=20).success.mean() >= 0.8

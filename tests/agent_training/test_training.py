"""Algorithms 1 and 2: hand traces, roll-back, invariants, faults, state."""

import importlib.util
import json

import numpy as np
import pytest

from icml24.agent_training import (
    AddFunction,
    AgentOptimizer,
    AgentTrainer,
    CassetteChat,
    ChatError,
    ChatResult,
    Function,
    FunctionSet,
    InProcessExecutor,
    LLMProposer,
    NotFittedError,
    OpenAIChat,
    RemoveFunction,
    RetrievalAgent,
    SandboxExecutor,
    ScriptedChat,
    SynthesisProposer,
    Task,
    TaskSet,
    Terminate,
    ToolCall,
    ToolCallingAgent,
    Trajectory,
    Usage,
    evaluate,
    load_reasoning_gym,
)
from icml24.agent_training.optimizer import ACTION_TOOLS
from icml24.agent_training.recordings import (
    agent_runs,
    open_recording,
    optimizer_run,
    recordings,
)

from .conftest import ScriptedAgent, ScriptedProposer, make, reply

# losses of v0 (the initial set), v1, v2, ...
TRACE = [0.6, 0.4, 0.5, 0.4, 0.3, 0.3, 0.3, 0.3]
TEN = TaskSet((f"task {i}", "yes") for i in range(10))


def trained(losses=TRACE, **settings):
    agent, proposer = ScriptedAgent(losses), ScriptedProposer()
    trainer = AgentTrainer(agent, AgentOptimizer(FunctionSet(), proposer), **settings)
    return trainer.fit(TEN), agent, proposer


# --- Algorithm 2, traced by hand ---


def test_strict_trace_with_patience_as_in_the_text():
    trainer, _, proposer = trained(max_epochs=7, patience=2)
    assert [round(r.loss, 1) for r in trainer.history_] == [0.6, 0.4, 0.5, 0.4]
    assert [r.accepted for r in trainer.history_] == [True, True, False, False]
    assert trainer.stopped_by_ == "patience" and trainer.n_evaluations_ == 4
    assert list(trainer.functions_) == ["v1"] and trainer.best_epoch_ == 1
    record = trainer.optimizer.failures
    # worst first: success rates .5 and .6
    assert [(list(s), round(p, 1)) for s, p in record] == [(["v1", "v2"], 0.5), (["v1", "v3"], 0.6)]
    # one action and one TERMINATE at each of three steps
    assert proposer.usage.calls == 6 and trainer.usage_.calls == 6


def test_strict_trace_with_patience_as_in_the_pseudocode():
    trainer, _, proposer = trained(max_epochs=7, patience=2, patience_rule="literal")
    assert [r.accepted for r in trainer.history_] == [1, 1, 0, 0, 1, 0, 0, 0]
    assert trainer.stopped_by_ == "patience" or trainer.n_evaluations_ == 8
    assert trainer.history_[-1].best_loss == pytest.approx(0.3)
    assert list(trainer.functions_) == ["v1", "v4"]
    assert [len(failures) for *_, failures in proposer.shown] == [0, 0, 1, 2, 0, 1, 2]


def test_literal_patience_stops_at_the_third_failure():
    losses = [*TRACE, 0.3]
    trainer, _, _ = trained(losses, max_epochs=8, patience=2, patience_rule="literal")
    assert trainer.stopped_by_ == "patience" and trainer.n_evaluations_ == 8


def test_trace_with_ties_accepted():
    trainer, _, _ = trained(max_epochs=7, patience=2, accept="ties")
    assert [r.accepted for r in trainer.history_] == [1, 1, 0, 1, 1, 1, 1, 1]
    assert trainer.stopped_by_ == "epochs" and trainer.optimizer.failures == []
    assert list(trainer.functions_) == ["v1", "v3", "v4", "v5", "v6", "v7"]


def test_what_an_epoch_counts():
    by_evaluations, _, _ = trained(max_epochs=2, patience=None)
    assert by_evaluations.n_evaluations_ == 3
    by_updates, _, _ = trained(max_epochs=2, patience=None, count="accepted")
    assert by_updates.n_evaluations_ == 5 and by_updates.history_[-1].accepted
    # with E = C = 10 counted in evaluations, patience can never fire before the end
    losses = [0.6] * 11
    flat, _, _ = trained(losses, max_epochs=10, patience=10)
    assert flat.stopped_by_ == "epochs"


def test_no_epoch_only_evaluates_the_initial_set():
    trainer, agent, proposer = trained(max_epochs=0)
    assert trainer.functions_ == FunctionSet() and proposer.usage.calls == 0
    assert len(agent.seen) == 10


# --- roll-back ---


def test_after_a_rejection_the_next_step_starts_from_the_best_set():
    trainer, agent, proposer = trained(max_epochs=4, patience=None)
    assert [list(best) for best, *_ in proposer.shown] == [[], ["v1"], ["v1"], ["v1"]]
    # the history shown stays that of the best set
    assert all({c.function for t in h for c in t.calls} <= set(b) for b, _, h, _ in proposer.shown)
    assert agent.seen[20] == FunctionSet([*trainer.history_[2].functions.values()])
    trainer.predict(TEN)
    assert agent.seen[-1] == trainer.functions_


def test_without_rollback_every_step_stays():
    trainer, _, proposer = trained(max_epochs=4, patience=None, rollback=False)
    assert [list(best) for best, *_ in proposer.shown] == [
        [],
        ["v1"],
        ["v1", "v2"],
        ["v1", "v2", "v3"],
    ]
    assert list(trainer.functions_) == ["v1", "v2", "v3", "v4"] and trainer.best_epoch_ == 4
    assert trainer.optimizer.failures == []


# --- invariants ---


@pytest.mark.parametrize("accept", ["strict", "ties"])
def test_invariants_of_real_trainings(trusted, accept):
    agent = RetrievalAgent(trusted)
    for seed in range(6):
        tasks = load_reasoning_gym("arithmetic", 20, seed)
        first, second = (
            AgentOptimizer(FunctionSet(), SynthesisProposer(error_rate=0.5, budget=800))
            for _ in range(2)
        )
        trainer = AgentTrainer(agent, first, accept=accept, random_state=seed).fit(tasks)
        best = [r.best_loss for r in trainer.history_]
        assert best == sorted(best, reverse=True)
        assert trainer.evaluate(tasks).loss == pytest.approx(best[-1])
        assert trainer.score(tasks) == pytest.approx(1 - best[-1])
        assert all(len(r.actions) <= 3 for r in trainer.history_)
        again = AgentTrainer(agent, second, accept=accept, random_state=seed).fit(tasks)
        assert again.functions_ == trainer.functions_


class OracleProposer:
    """Adds the one right function of a family that still fails."""

    def __init__(self):
        self.usage = Usage()

    def propose(self, best, incumbent, history, failures, n_taken, rng, feedback=None):
        failed = [t.task.domain for t in history if not t.correct]
        wanted = [d for d in dict.fromkeys(failed) if d not in incumbent]
        if not wanted:
            return Terminate()
        code = f"def {wanted[0]}(numbers):\n    return numbers[0] * {wanted[0][1:]}"
        return AddFunction(make(wanted[0], code, f"{wanted[0][0] * 9} task", numbers="array"))


def test_closed_form_curve(trusted):
    families = ["a2", "b3", "c4", "d5"]
    tasks = TaskSet(
        Task(f"{f[0] * 9} task: {k}", str(k * int(f[1:])), domain=f)
        for f in families
        for k in range(1, 6)
    )
    optimizer = AgentOptimizer(FunctionSet(), OracleProposer(), max_actions=1)
    trainer = AgentTrainer(RetrievalAgent(trusted), optimizer).fit(tasks)
    assert [r.loss for r in trainer.history_] == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert trainer.stopped_by_ == "target" and sorted(trainer.functions_) == families
    pooled = AgentOptimizer(FunctionSet(), OracleProposer(), max_actions=3)
    fast = AgentTrainer(RetrievalAgent(trusted), pooled).fit(tasks)
    assert [r.loss for r in fast.history_] == pytest.approx([1, 0.25, 0])


def test_a_proposer_that_only_terminates_changes_nothing(trusted):
    chat = ScriptedChat(lambda messages: "TERMINATE")
    trainer = AgentTrainer(
        RetrievalAgent(trusted), AgentOptimizer(FunctionSet(), LLMProposer(chat)), max_epochs=3
    ).fit([("What is 1 + 1?", "2"), ("unsolvable", "?")])
    assert [r.loss for r in trainer.history_] == [0.5] * 4 and not trainer.functions_
    assert [r.n_calls for r in trainer.history_[1:]] == [1, 1, 1]


# --- selection: batches, validation, repeats, custom rules ---


def test_batches_are_drawn_afresh_and_paired_by_the_seed():
    _, agent, _ = trained(max_epochs=2, batch_size=4, patience=None, random_state=0)
    assert len(agent.seen) == 12
    losses = [0.5] * 6
    kept = AgentTrainer(
        ScriptedAgent(losses),
        AgentOptimizer(FunctionSet(), ScriptedProposer()),
        max_epochs=3,
        batch_size=4,
        batch_baseline="reevaluated",
        accept="ties",
        random_state=1,
    ).fit(TEN)
    # the same losses on the same batch: every tie is accepted
    assert all(r.accepted for r in kept.history_)


def test_selection_on_validation_tasks():
    validation = TaskSet((f"other {i}", "yes") for i in range(10))
    trainer = AgentTrainer(
        ScriptedAgent([0.6, 0.4]),
        AgentOptimizer(FunctionSet(), ScriptedProposer()),
        max_epochs=1,
        validation=validation,
    ).fit(TEN)
    assert len(trainer.agent.seen) == 40 and trainer.history_[1].accepted
    shared = AgentTrainer(trainer.agent, trainer.optimizer, validation=TEN[:2])
    with pytest.raises(ValueError, match="validation tasks are training tasks"):
        shared.fit(TEN)
    share = AgentTrainer(
        ScriptedAgent(TRACE),
        AgentOptimizer(FunctionSet(), ScriptedProposer()),
        max_epochs=1,
        validation=0.3,
    ).fit(TEN)
    assert len(share.optimizer.history) == 7


def test_repeats_give_a_stochastic_agent_several_tries():
    class Coin:
        def run(self, task, functions, *, rng=None):
            heads = bool(rng.random() < 0.5)
            return Trajectory(task, (), (), "yes" if heads else None, heads)

    once = evaluate(Coin(), FunctionSet(), TEN, n_repeats=3, seed=1)
    assert once.correct.shape == (3, 10) and len(once.trajectories) == 30
    assert len({tuple(row) for row in once.correct.tolist()}) == 3
    assert np.array_equal(
        once.correct, evaluate(Coin(), FunctionSet(), TEN, n_repeats=3, seed=1).correct
    )
    many = evaluate(Coin(), FunctionSet(), TEN, n_repeats=200, seed=2)
    assert abs(many.accuracy - 0.5) < 0.05  # 4.5 standard errors


def test_a_rule_of_ones_own_decides():
    seen = []

    def never(new, best):
        seen.append((round(new.loss, 1), round(best.loss, 1), new.correct.shape))
        return False

    trainer, _, _ = trained(max_epochs=2, patience=None, accept=never)
    assert seen == [(0.4, 0.6, (1, 10)), (0.5, 0.6, (1, 10))] and not trainer.functions_


# --- budget, callbacks, state ---


def test_a_budget_breaks_training_off_with_the_best_set_so_far():
    agent = ScriptedAgent(TRACE, usage=Usage(1, 70, 30, 0.5))
    trainer = AgentTrainer(
        agent, AgentOptimizer(FunctionSet(), ScriptedProposer()), max_tokens=2500
    ).fit(TEN)
    # 10 tasks of 100 tokens an evaluation: the third is broken off after its 6th task
    assert trainer.stopped_by_ == "budget" and len(agent.seen) == 26
    assert list(trainer.functions_) == ["v1"] == list(trainer.optimizer.functions)
    agent = ScriptedAgent(TRACE, usage=Usage(1, 70, 30, 0.5))
    early = AgentTrainer(
        agent, AgentOptimizer(FunctionSet(), ScriptedProposer()), max_cost=2.0
    ).fit(TEN)
    assert early.stopped_by_ == "budget" and early.functions_ == FunctionSet()
    assert early.n_evaluations_ == 0 and early.best_epoch_ == 0 and len(agent.seen) == 5


def test_callbacks_see_every_epoch():
    epochs = []
    trained(max_epochs=3, patience=None, callbacks=[lambda trainer, r: epochs.append(r.epoch)])
    assert epochs == [0, 1, 2, 3]


def _fresh(noise=0.3, **settings):
    agent = RetrievalAgent(InProcessExecutor(i_trust_this_code=True), noise=noise)
    optimizer = AgentOptimizer(FunctionSet(), SynthesisProposer(error_rate=0.5, budget=500))
    return AgentTrainer(agent, optimizer, random_state=3, **settings)


def test_state_goes_through_json_and_resumes_exactly(tmp_path):
    tasks = load_reasoning_gym("arithmetic", 20, 1)
    whole = _fresh(max_epochs=6).fit(tasks)
    part = _fresh(max_epochs=3).fit(tasks)
    state = json.loads(json.dumps(part.state_dict()))
    rest = _fresh(max_epochs=6)
    rest.load_state_dict(state)
    rest.fit(tasks)

    def strip(trainer):
        return [{**r.state_dict(), "seconds": 0} for r in trainer.history_]

    assert strip(rest) == strip(whole) and rest.functions_ == whole.functions_
    assert rest.optimizer.state_dict() == whole.optimizer.state_dict()
    other = _fresh()
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="other training tasks"):
        other.fit(tasks[:10])
    with pytest.raises(ValueError, match="version"):
        _fresh().load_state_dict({"version": 99})


def test_training_survives_a_kill_between_epochs(tmp_path):
    tasks = load_reasoning_gym("arithmetic", 20, 1)
    path = tmp_path / "deep" / "state.json"

    class Kill(Exception):
        pass

    def kill(trainer, record):
        if record.epoch == 2:
            raise Kill

    with pytest.raises(Kill):
        _fresh(max_epochs=6, checkpoint=path, callbacks=[kill]).fit(tasks)
    assert not list(path.parent.glob("*.tmp"))
    rest = _fresh(max_epochs=6, checkpoint=path).fit(tasks)
    whole = _fresh(max_epochs=6).fit(tasks)
    assert [r.loss for r in rest.history_] == [r.loss for r in whole.history_]
    assert rest.functions_ == whole.functions_
    again = _fresh(max_epochs=6, checkpoint=path).fit(tasks, resume=False)
    assert len(again.history_) == len(whole.history_)


def test_learning_curve_is_drawn():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    trainer, _, _ = trained(max_epochs=4, patience=None)
    figure, axes = plt.subplots()
    trainer.plot_learning_curve(axes)
    assert axes.get_xlabel() == "Evaluation" and len(axes.lines) == 3
    plt.close(figure)


# --- Algorithm 1 ---


def shown(*pairs):
    return [
        Trajectory(Task(q, "1"), ({"role": "user", "content": q},), (), None, c) for q, c in pairs
    ]


def optimizer_with(chat, functions=(), **settings):
    optimizer = AgentOptimizer(FunctionSet(functions), LLMProposer(chat), **settings)
    for trajectory in shown(("first {x}", False), ("second", True)):
        optimizer.record(trajectory)
    return optimizer


def tool_call(kind, name, code="", arguments="{}", **more):
    fields = {"name": name, "description": "d", "arguments": arguments, "code": code, **more}
    return ToolCall(kind, fields, json.dumps(fields), "c")


ADD_F = tool_call(
    "add_function",
    "f",
    "def f(x, y=1):\n    return x",
    '{"x": {"type": "integer"}, "y": {}}',
    packages="sympy, numpy",
)


def test_a_step_applies_actions_until_terminate():
    chat = ScriptedChat(
        [
            ChatResult("", (ADD_F,)),
            ChatResult("", (tool_call("revise_function", "f", "def f():\n    return 2"),)),
            "TERMINATE",
        ]
    )
    result = optimizer_with(chat).step()
    assert [a.kind for a in result.actions] == ["add_function", "revise_function"]
    assert result.n_calls == 3 and result.invalid == 0 and result.usage.calls == 3
    assert "return 2" in result.functions["f"].code
    assert chat.requests[0]["tools"] == ACTION_TOOLS


def test_terminate_first_costs_one_call():
    result = optimizer_with(ScriptedChat(["TERMINATE."])).step()
    assert result.n_calls == 1 and result.actions == ()


def test_parallel_tool_calls_cannot_exceed_the_limit():
    second = tool_call("add_function", "g", "def g():\n    return 1")
    chat = ScriptedChat([ChatResult("", (ADD_F, second))])
    result = optimizer_with(chat, max_actions=1).step()
    assert len(result.actions) == 1 and list(result.functions) == ["f"]


def test_fields_of_an_action_are_read():
    f = optimizer_with(ScriptedChat([ChatResult("", (ADD_F,)), "TERMINATE"])).step().functions["f"]
    assert f.packages == ("sympy", "numpy") and f.parameters["required"] == ["x"]
    chat = ScriptedChat(
        [ChatResult("", (ToolCall("remove_function", {"name": "f"}),)), "TERMINATE"]
    )
    assert optimizer_with(chat, [f]).step().actions == (RemoveFunction("f"),)


FAULTY = {
    "invalid JSON": ToolCall("add_function", None, "{oops"),
    "invalid inner JSON": tool_call("add_function", "g", "def g():\n    return 1", "{oops"),
    "arguments are a list": tool_call("add_function", "g", "def g():\n    return 1", "[1]"),
    "unknown function": tool_call("revise_function", "g", "def g():\n    return 1"),
    "unknown removal": ToolCall("remove_function", {"name": "g"}),
    "unknown action": ToolCall("explode", {}),
    "syntax error": tool_call("add_function", "g", "def g(:"),
    "name mismatch": tool_call("add_function", "g", "def h():\n    return 1"),
    "float type": tool_call(
        "add_function", "g", "def g(x):\n    return x", '{"x": {"type": "float"}}'
    ),
    "100 kB of code": tool_call("add_function", "g", "def g():\n    return 1\n" + "#" * 100_000),
    "code is a number": tool_call("add_function", "g", 5),
    "existing name": tool_call("add_function", "f", "def f():\n    return 1"),
    "prose": None,
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_answer_is_retried_once_with_the_error_then_skipped(fault):
    call = FAULTY[fault]
    bad = ChatResult("I would rather talk.") if call is None else ChatResult("", (call,))
    f = make("f", "def f():\n    return 0")
    chat = ScriptedChat([bad, bad, "TERMINATE"])
    result = optimizer_with(chat, [f]).step()
    assert result.invalid == 2 and result.n_calls == 3 and result.actions == ()
    assert result.functions == FunctionSet([f])
    first, second, third = (request["messages"] for request in chat.requests)
    assert len(second) == len(first) + 1 and "could not be used" in second[-1]["content"]
    assert len(third) == len(first)


def test_a_corrected_answer_is_taken():
    chat = ScriptedChat(
        [ChatResult("", (FAULTY["syntax error"],)), ChatResult("", (ADD_F,)), "TERMINATE"]
    )
    result = optimizer_with(chat).step()
    assert result.invalid == 1 and list(result.functions) == ["f"]


def test_the_prompt_shows_lists_failures_conversations_and_the_table():
    good, tried, worse = (make(n, f"def {n}():\n    return 1") for n in ("good", "tried", "worse"))
    chat = ScriptedChat(["TERMINATE"] * 3)
    optimizer = optimizer_with(chat, [good])
    for function, performance in ((tried, 0.4), (worse, 0.1)):
        optimizer.step()
        optimizer.functions = optimizer.functions.add(function)
        optimizer.rollback(performance)
    optimizer.step()
    text = chat.requests[-1]["messages"][1]["content"]
    assert "List A" in text and "(1 of 2 tasks solved)" in text and "List B" in text
    assert text.index('"worse"') < text.index('"tried"')  # ascending performance
    assert "first {x}" in text and "the right answer is 1" in text
    assert "1: 0, 2: 1" in text
    assert list(optimizer.functions) == ["good"]


def test_long_histories_lose_the_oldest_successes_first():
    proposer = ScriptedProposer()
    optimizer = AgentOptimizer(FunctionSet(), proposer, history_tokens=40)
    for trajectory in shown(("s1" * 30, True), ("f1" * 30, False), ("s2" * 30, True)):
        optimizer.record(trajectory)
    result = optimizer.step()
    kept = [t.task.question[:2] for t in proposer.shown[0][2]]
    assert kept == ["f1"] and result.dropped == 2


def test_regenerating_starts_from_nothing():
    chat = ScriptedChat([ChatResult("", (ADD_F,)), "TERMINATE"])
    optimizer = optimizer_with(chat, [make("old", "def old():\n    return 1")])
    assert list(optimizer.step(regenerate=True).functions) == ["f"]
    optimizer.rollback()
    assert list(optimizer.functions) == ["old"]


def test_bad_settings_are_refused():
    proposer = ScriptedProposer()
    optimizer = AgentOptimizer(FunctionSet(), proposer)
    agent = ScriptedAgent(TRACE)
    with pytest.raises(ValueError, match="history"):
        optimizer.step()
    for settings in ({"max_actions": 0}, {"max_retries": -1}, {"history_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            AgentOptimizer(FunctionSet(), proposer, **settings)
    with pytest.raises(TypeError, match="FunctionSet"):
        AgentOptimizer({}, proposer)
    for settings in (
        {"max_epochs": -1},
        {"patience": 0},
        {"count": "x"},
        {"patience_rule": "x"},
        {"accept": "x"},
        {"batch_baseline": "x"},
        {"n_repeats": 0},
        {"batch_size": 0},
        {"validation": 1.5},
    ):
        with pytest.raises(ValueError, match=next(iter(settings))):
            AgentTrainer(agent, optimizer, **settings)
    trainer = AgentTrainer(agent, optimizer, batch_size=11)
    with pytest.raises(NotFittedError):
        trainer.score(TEN)
    with pytest.raises(ValueError, match="at most the 10"):
        trainer.fit(TEN)
    with pytest.raises(ValueError, match="at least one"):
        trainer.fit([])
    with pytest.raises(TypeError, match="Task"):
        trainer.fit(["question"])
    with pytest.raises(TypeError, match="iterable"):
        trainer.fit("question")


# --- the ten-line story, against a local server ---


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    >>> multiply(2, 3)
    6
    """
    return a * b


SQUARE = 'def square(x):\n    """Square.\n\n    >>> square(3)\n    9\n    """\n    return x * x'


def brain(request):
    """Act as a scripted model: it can only square if there is a function for it."""
    tools = {t["function"]["name"] for t in request["tools"]}
    last = request["messages"][-1]
    if "add_function" in tools:
        if "List B" in last["content"] and '"square"' in last["content"].split("List B")[1][:600]:
            return reply("TERMINATE")
        fields = {
            "name": "square",
            "description": "Square a number",
            "packages": "",
            "arguments": '{"x": {"type": "integer"}}',
            "code": SQUARE,
        }
        return reply("", [("add_function", fields)])
    if last["role"] == "tool":
        return reply(f"FINAL ANSWER: {last['content']}")
    numbers = [int(w) for w in last["content"].split() if w.isdigit()]
    if "times" in last["content"]:
        return reply("", [("multiply", {"a": numbers[0], "b": numbers[1]})])
    if "square" in tools:
        return reply("", [("square", {"x": numbers[0]})])
    return reply("FINAL ANSWER: I do not know")


def test_the_practitioners_story(server, tmp_path):
    server.script = [brain] * 500
    tasks = [
        ("What is 3 times 5 ?", "15"),
        ("The square of 7 ?", "49"),
        ("The square of 9 ?", "81"),
    ]

    chat = OpenAIChat("my-model", base_url=server.url, prices=(1.0, 2.0))
    with SandboxExecutor() as sandbox:
        trainer = AgentTrainer(
            ToolCallingAgent(chat, sandbox),
            AgentOptimizer(FunctionSet([Function.from_callable(multiply)]), LLMProposer(chat)),
            random_state=0,
        )
        trainer.fit(tasks)
        assert trainer.score([("The square of 12 ?", "144")]) == 1.0
    trainer.functions_.save_module(tmp_path / "tools.py")

    assert [round(r.loss, 3) for r in trainer.history_] == [0.667, 0]
    spec = importlib.util.spec_from_file_location("tools", tmp_path / "tools.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.multiply(2, 4) == 8 and module.square(5) == 25
    import doctest

    assert doctest.testmod(module) == doctest.TestResults(failed=0, attempted=2)
    calls = len(server.requests) - 2  # the score above took two
    assert trainer.usage_.calls == calls
    assert trainer.usage_.cost == pytest.approx(calls * (10 * 1 + 5 * 2) / 1e6)


def test_training_replays_from_a_cassette(server, tmp_path):
    server.script = [brain] * 500
    tasks = [("The square of 7 ?", "49")]

    def train(chat):
        with SandboxExecutor() as sandbox:
            optimizer = AgentOptimizer(FunctionSet(), LLMProposer(chat))
            return AgentTrainer(ToolCallingAgent(chat, sandbox), optimizer).fit(tasks)

    live = CassetteChat(OpenAIChat("m", server.url), tmp_path / "tape", "record")
    first = train(live)
    asked = len(server.requests)
    second = train(CassetteChat(None, tmp_path / "tape"))
    assert len(server.requests) == asked and first.functions_ == second.functions_
    assert [r.loss for r in first.history_] == [r.loss for r in second.history_] == [1, 0]


def test_a_dead_server_leaves_a_state_to_resume_from(server, tmp_path):
    server.script = [brain, 500]
    chat = OpenAIChat("m", server.url, backoff=0, max_retries=0)
    path = tmp_path / "state.json"
    tasks = [("The square of 7 ?", "49")]
    with SandboxExecutor() as sandbox:

        def trainer():
            optimizer = AgentOptimizer(FunctionSet(), LLMProposer(chat))
            return AgentTrainer(ToolCallingAgent(chat, sandbox), optimizer, checkpoint=path)

        with pytest.raises(ChatError):
            trainer().fit(tasks)
        server.script = [brain] * 100
        assert trainer().fit(tasks).history_[-1].loss == 0


def test_recorded_models_replay_without_them():
    known = recordings()
    assert known, "the package carries at least one recording"
    for name in known:
        with SandboxExecutor() as sandbox:
            alone, equipped = agent_runs(open_recording(name), sandbox)
            step, used = optimizer_run(open_recording(name), sandbox)
        assert alone.correct.shape == equipped.correct.shape == (1, 16)
        assert all(t.calls == () for t in alone.trajectories)
        assert step.n_calls >= 1 and used.correct.shape == (1, 6)
        assert known[name].stat().st_size < 1_000_000
    with pytest.raises(ValueError, match="no recording"):
        open_recording("HAL 9000")

"""Speed: a training without a language model, and a call in the sandbox against its peer."""

import subprocess
import sys

import pytest

from icml24.agent_training import (
    AgentOptimizer,
    AgentTrainer,
    Function,
    FunctionSet,
    InProcessExecutor,
    RetrievalAgent,
    SandboxExecutor,
    SynthesisProposer,
    load_reasoning_gym,
    synthesis,
    synthesize,
)

SQUARE = Function(
    "square",
    "Square of a number.",
    {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    "def square(x):\n    return x * x",
)


@pytest.fixture
def sandbox():
    with SandboxExecutor() as executor:
        executor.run(SQUARE, {"x": 1})
        yield executor


def test_training_of_twenty_tasks_and_ten_evaluations(benchmark):
    tasks = load_reasoning_gym("number_theory", 20, seed=0)
    agent = RetrievalAgent(InProcessExecutor(i_trust_this_code=True))

    def train():
        synthesis._SEARCHES.clear()  # a cold start: every program is searched anew
        optimizer = AgentOptimizer(FunctionSet(), SynthesisProposer(error_rate=0.2))
        return AgentTrainer(agent, optimizer, random_state=0).fit(tasks)

    assert benchmark.pedantic(train, rounds=3).score(tasks) > 0.5


def test_one_search(benchmark):
    tasks = load_reasoning_gym("base_conversion", 6, seed=0)
    assert benchmark(synthesize, tasks, min_support=7) is None


def test_one_call_in_the_sandbox(benchmark, sandbox):
    assert benchmark(sandbox.run, SQUARE, {"x": 3}).value == 9


def test_a_hundred_calls_in_one_child(benchmark, sandbox):
    calls = [{"x": k} for k in range(100)]
    assert benchmark(sandbox.run_many, SQUARE, calls)[-1].value == 99**2


def test_peer_a_fresh_interpreter_for_each_call(benchmark):
    command = [sys.executable, "-I", "-c", f"{SQUARE.code}\nprint(square(3))"]

    def call():
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert benchmark.pedantic(call, rounds=10).strip() == "9"

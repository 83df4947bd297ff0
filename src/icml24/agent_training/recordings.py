"""Real small language models as agent and as optimizer: recorded once, replayed for ever.

Record with a model of your own (a GGUF file, through llama.cpp)::

    python -m icml24.agent_training.recordings model.gguf recording.jsonl

Nothing in a recording is written by hand: it holds what the model said, addressed by what it was
asked. :func:`recordings` lists those that the package carries.
"""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from icml24.agent_training.agent import RetrievalAgent, SchemaAgent
from icml24.agent_training.chat import CassetteChat, ChatModel, LlamaCppChat
from icml24.agent_training.data import load_reasoning_gym
from icml24.agent_training.execution import Executor, InProcessExecutor, SandboxExecutor
from icml24.agent_training.functions import FunctionSet
from icml24.agent_training.optimizer import AgentOptimizer, LLMProposer, StepResult
from icml24.agent_training.synthesis import SynthesisProposer
from icml24.agent_training.tasks import TaskSet
from icml24.agent_training.trainer import AgentTrainer, Evaluation, evaluate

__all__ = [
    "FAMILIES",
    "agent_runs",
    "learnt_functions",
    "open_recording",
    "optimizer_run",
    "recordings",
]

#: Families of the demonstration; each needs something that small models are bad at.
FAMILIES = ("gcd", "lcm", "letter_counting", "spell_backward")


def learnt_functions() -> FunctionSet:
    """Return functions learnt without a language model, on other tasks of the same families.

    Returns
    -------
    FunctionSet
        The result of an agent training with an infallible :class:`SynthesisProposer`.
    """
    agent = RetrievalAgent(InProcessExecutor(i_trust_this_code=True))
    optimizer = AgentOptimizer(FunctionSet(), SynthesisProposer())
    tasks = load_reasoning_gym(FAMILIES, 24, seed=100)
    return AgentTrainer(agent, optimizer, random_state=0).fit(tasks).functions_


def agent_tasks() -> TaskSet:
    """Return the sixteen tasks on which the recorded models are compared."""
    return load_reasoning_gym(FAMILIES, 16, seed=0)


def agent_runs(chat: ChatModel, executor: Executor) -> tuple[Evaluation, Evaluation]:
    """Run a model without functions, thinking aloud, and with the learnt functions.

    Returns
    -------
    (Evaluation, Evaluation)
    """
    agent, tasks = SchemaAgent(chat, executor), agent_tasks()
    return evaluate(agent, FunctionSet(), tasks), evaluate(agent, learnt_functions(), tasks)


def optimizer_run(chat: ChatModel, executor: Executor) -> tuple[StepResult, Evaluation]:
    """Let a model take one step as the optimizer, then use what it wrote.

    It is shown six unsolved tasks and may take two actions; with the resulting functions the same
    model then works on the same tasks.

    Returns
    -------
    (StepResult, Evaluation)
    """
    tasks = load_reasoning_gym(("gcd", "letter_counting"), 6, seed=1)
    novice = RetrievalAgent(InProcessExecutor(i_trust_this_code=True))
    optimizer = AgentOptimizer(FunctionSet(), LLMProposer(chat, max_tokens=400), max_actions=2)
    for trajectory in evaluate(novice, FunctionSet(), tasks).trajectories:
        optimizer.record(trajectory)
    step = optimizer.step(0)
    agent = SchemaAgent(chat, executor) if step.functions else novice
    return step, evaluate(agent, step.functions, tasks)


def recordings() -> dict[str, Path]:
    """Return the recordings that the package carries, by the name of the model."""
    folder = resources.files("icml24.agent_training").joinpath("data")
    paths = sorted(Path(str(f)) for f in folder.iterdir() if f.name.endswith(".jsonl"))
    return {CassetteChat(None, path).model: path for path in paths}


def open_recording(name: str) -> CassetteChat:
    """Open a recording for replay.

    Raises
    ------
    ValueError
        If the package carries none of that name.
    """
    known = recordings()
    if name not in known:
        raise ValueError(f"There is no recording {name!r}; there are {list(known)}.")
    return CassetteChat(None, known[name])


def main() -> None:
    """Record a model, or go on with an unfinished recording."""
    parser = argparse.ArgumentParser(description="Record a GGUF model as agent and optimizer.")
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("cassette", help="file to write")
    parser.add_argument("--stage", choices=["agent", "optimizer", "all"], default="all")
    arguments = parser.parse_args()
    chat = CassetteChat(LlamaCppChat(arguments.model), arguments.cassette, "auto")
    with SandboxExecutor() as executor:
        if arguments.stage != "optimizer":
            before, after = agent_runs(chat, executor)
            print(f"agent: {before.accuracy:.2f} alone, {after.accuracy:.2f} with functions")
        if arguments.stage != "agent":
            step, result = optimizer_run(chat, executor)
            print(f"optimizer: {list(step.functions)}, {result.accuracy:.2f} solved with them")


if __name__ == "__main__":
    main()

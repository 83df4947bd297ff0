"""What one would do instead of agent training, run on the same agent, proposer and tasks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from icml24.agent_training.actions import AddFunction, Terminate
from icml24.agent_training.agent import Agent
from icml24.agent_training.functions import Function, FunctionSet, InvalidFunctionError
from icml24.agent_training.optimizer import AgentOptimizer, Proposer
from icml24.agent_training.synthesis import Program, default_grammar
from icml24.agent_training.tasks import Task
from icml24.agent_training.trainer import evaluate

__all__ = ["one_shot", "oracle_functions", "skill_library"]


def one_shot(
    agent: Agent,
    proposer: Proposer,
    tasks: Iterable[Task | tuple[str, str]],
    *,
    max_actions: int = 12,
    random_state: int = 0,
) -> FunctionSet:
    """Create tools once from the untrained agent's failures, without any feedback.

    This is the pattern of CREATOR and CRAFT: no evaluation of the created tools follows.

    Parameters
    ----------
    agent : Agent
    proposer : Proposer
    tasks : TaskSet or iterable
    max_actions : int, default 12
    random_state : int, default 0

    Returns
    -------
    FunctionSet
    """
    optimizer = AgentOptimizer(FunctionSet(), proposer, max_actions=max_actions)
    for trajectory in evaluate(agent, FunctionSet(), tasks, seed=random_state).trajectories:
        optimizer.record(trajectory)
    return optimizer.step(np.random.default_rng([random_state, 1])).functions


def skill_library(
    agent: Agent,
    proposer: Proposer,
    tasks: Iterable[Task | tuple[str, str]],
    *,
    n_skills: int = 30,
    random_state: int = 0,
) -> FunctionSet:
    """Grow a library of skills, in the manner of Voyager: add only, never revise or remove.

    A proposed function stays if the agent solves, with it, at least one task that it failed before.

    Parameters
    ----------
    agent : Agent
    proposer : Proposer
    tasks : TaskSet or iterable
    n_skills : int, default 30
        Proposals; thirty are as many as ten epochs of three actions.
    random_state : int, default 0

    Returns
    -------
    FunctionSet
    """
    functions = FunctionSet()
    result = evaluate(agent, functions, tasks, seed=[random_state, 0])
    for k in range(1, n_skills + 1):
        rng = np.random.default_rng([random_state, 1, k])
        try:
            action = proposer.propose(functions, functions, result.trajectories, (), 0, rng)
        except InvalidFunctionError:
            continue
        if isinstance(action, Terminate):
            break
        if not isinstance(action, AddFunction):
            continue
        failed = [t.task for t in result.trajectories if not t.correct]
        candidate = functions.add(action.function)
        if not failed or not evaluate(agent, candidate, failed, seed=[random_state, k]).accuracy:
            continue
        functions = candidate
        result = evaluate(agent, functions, tasks, seed=[random_state, k])
    return functions


_ORACLES = {
    "gcd": ("gcd", ("tail_numbers",)),
    "lcm": ("lcm", ("tail_numbers",)),
    "count_bits": ("popcount", ("last", ("numbers",))),
    "power_function": ("power", ("first", ("numbers",)), ("second", ("numbers",))),
    "prime_factorization": ("product_text", ("prime_factors", ("first", ("numbers",)))),
    "count_primes": ("count_primes", ("first", ("numbers",)), ("second", ("numbers",))),
    "fraction_simplification": ("fraction", ("first", ("numbers",)), ("second", ("numbers",))),
    "letter_counting": (
        "count_in_text",
        ("lower", ("last_item", ("quoted",))),
        ("first_item", ("quoted",)),
    ),
    "spell_backward": ("reverse_text", ("tail",)),
    "word_sorting": ("comma_list", ("ascending_items", ("items",))),
    "word_sequence_reversal": ("comma_list", ("reverse_items", ("items",))),
    "sum": ("total", ("column",)),
    "difference": ("change", ("cells",)),
    "mean": ("mean", ("column",)),
    "median": ("median", ("column",)),
    "range": ("spread", ("column",)),
    "most": ("item_of_largest", ("labels",), ("column",)),
    "least": ("item_of_smallest", ("labels",), ("column",)),
    "count_above": ("count_above", ("column",), ("last", ("numbers",))),
    "cost": ("multiply", ("first", ("cells",)), ("last", ("numbers",))),
    "rate": ("divide", ("change", ("cells",)), ("change", ("numbers",))),
}
_ORACLE_WORDS = {
    "gcd": "greatest common divisor gcd",
    "lcm": "least common multiple lcm",
    "count_bits": "bits binary representation",
    "power_function": "compute exponentiation",
    "prime_factorization": "prime factorization",
    "count_primes": "count prime numbers between inclusive",
    "fraction_simplification": "simplify fraction lowest terms",
    "letter_counting": "how many times letter appear text",
    "spell_backward": "spell word backward",
    "word_sorting": "sort words ascending order",
    "word_sequence_reversal": "reverse list words",
    "sum": "total",
    "difference": "difference",
    "mean": "mean",
    "median": "median",
    "range": "range",
    "most": "highest",
    "least": "lowest",
    "count_above": "how many rows above",
    "cost": "unit price",
    "rate": "rate change",
}


def oracle_functions(families: Iterable[str]) -> FunctionSet:
    """Return functions written with the task families in mind: the ceiling of the comparison.

    Parameters
    ----------
    families : iterable of str
        Families and table question types; those that no program of the grammar solves are skipped.

    Returns
    -------
    FunctionSet

    Examples
    --------
    >>> sorted(oracle_functions(["gcd", "spell_backward", "base_conversion"]))
    ['oracle_gcd', 'oracle_spell_backward']
    """
    grammar, made = default_grammar(), []
    for name in dict.fromkeys(families):
        if name in _ORACLES:
            program = Program(_ORACLES[name], grammar)
            made.append(_function(program, name))
    return FunctionSet(made)


def _function(program: Program, name: str) -> Function:
    return program.to_function(f"oracle_{name}", _ORACLE_WORDS[name], None)

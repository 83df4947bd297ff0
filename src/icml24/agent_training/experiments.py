"""The chapter's experiments: pure functions ``(config, seed) -> record``.

Agent and optimizer are free of language models (:class:`RetrievalAgent`,
:class:`SynthesisProposer`); the optimizer's fallibility is simulated by ``error_rate``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from icml24.agent_training.agent import PYTHON_TOOL, RetrievalAgent
from icml24.agent_training.data import DOMAINS, TABLE_TYPES, load_reasoning_gym, make_table_qa
from icml24.agent_training.execution import InProcessExecutor
from icml24.agent_training.functions import FunctionSet
from icml24.agent_training.optimizer import AgentOptimizer
from icml24.agent_training.peers import one_shot, oracle_functions, skill_library
from icml24.agent_training.synthesis import SynthesisProposer
from icml24.agent_training.tasks import TaskSet
from icml24.agent_training.trainer import AgentTrainer, Evaluation, evaluate

__all__ = [
    "EXPERIMENTS",
    "METHODS",
    "Config",
    "early_stop",
    "family_outcomes",
    "training",
    "transfer",
]

#: Trainer settings of each trained method; the peers without training come on top.
METHODS: dict[str, dict[str, Any]] = {
    "paper": {},
    "ties": {"accept": "ties"},
    "no_rollback": {"rollback": False, "patience": None},
    "regenerate": {"progressive": False},
    "validation": {"validation": 1 / 3},
    "validation, ties": {"validation": 1 / 3, "accept": "ties"},
}
_PEERS = ("untrained", "one_shot", "skill_library", "oracle")


@dataclass(frozen=True)
class Config:
    """Settings of an experiment.

    Parameters
    ----------
    domain : str
        A key of :data:`DOMAINS`, or ``"tables"``.
    method : str
        A key of :data:`METHODS`, or "untrained", "one_shot", "skill_library", "oracle".
    error_rate : float
        Fallibility of the simulated optimizer.
    n_train, n_test : int
    max_epochs : int
    patience : int
    batch_size : int or None
    min_support : int
    noise : float
        Noise of the agent's choice of functions.
    budget : int
        Programs searched.
    source : str
        ``"extract"`` or ``"package"``, see :func:`load_reasoning_gym`.
    """

    domain: str = "arithmetic"
    method: str = "paper"
    error_rate: float = 0.2
    n_train: int = 20
    n_test: int = 80
    max_epochs: int = 10
    patience: int = 10
    batch_size: int | None = None
    min_support: int = 2
    noise: float = 0.0
    budget: int = 5000
    source: str = "extract"

    @classmethod
    def laptop(cls) -> Config:
        """Return what the book runs: the paper's sizes, without a language model."""
        return cls()

    @classmethod
    def paper(cls) -> Config:
        """Return the same sizes (20 train, 80 test, E = C = 10) on freshly generated problems.

        The paper's scale is not a matter of sizes but of its language models: for those, build an
        :class:`AgentTrainer` from :class:`ToolCallingAgent` and :class:`LLMProposer` with your
        endpoint, on :func:`load_math`, :func:`load_tabmwp` or :func:`load_gaia`.
        """
        return cls(source="package", budget=15_000)


@lru_cache(maxsize=1)
def _executor() -> InProcessExecutor:
    # All code here is printed by SynthesisProposer from the default grammar.
    return InProcessExecutor(i_trust_this_code=True)


def _tasks(config: Config, seed: int, domain: str | None = None) -> tuple[TaskSet, TaskSet]:
    n = config.n_train + config.n_test
    if (domain or config.domain) == "tables":
        tasks = make_table_qa(n, seed)
    else:
        tasks = load_reasoning_gym(domain or config.domain, n, seed, config.source)  # type: ignore[arg-type]
    return tasks.split(config.n_train, config.n_test, seed)


def _proposer(config: Config) -> SynthesisProposer:
    return SynthesisProposer(
        error_rate=config.error_rate, min_support=config.min_support, budget=config.budget
    )


def _trainer(config: Config, seed: int, **overrides: Any) -> AgentTrainer:
    settings = {
        "max_epochs": config.max_epochs,
        "patience": config.patience,
        "batch_size": config.batch_size,
        "random_state": seed,
        **METHODS[config.method],
        **overrides,
    }
    agent = RetrievalAgent(_executor(), noise=config.noise)
    return AgentTrainer(agent, AgentOptimizer(FunctionSet(), _proposer(config)), **settings)


def _calls(evaluation: Evaluation) -> int:
    """Count successful calls of learnt functions."""
    return sum(t.correct and t.function not in ("", PYTHON_TOOL) for t in evaluation.trajectories)


def training(config: Config, seed: int) -> dict[str, Any]:
    """Train, or apply a peer, and measure on held-out tasks.

    Returns
    -------
    dict
        ``before``, ``test``, ``gain``, ``train`` accuracies; ``evaluations``, ``optimizer_calls``,
        ``functions``, ``complexity`` (mean over the learnt functions); ``calls_first`` and
        ``calls_last`` (successful calls of functions after the first and the last accepted step);
        the curves ``best_curve``, ``tried_curve``, ``test_curve``, ``accepted``.
    """
    train, test = _tasks(config, seed)
    agent = RetrievalAgent(_executor(), noise=config.noise)
    before = evaluate(agent, FunctionSet(), test, seed=seed).accuracy
    record: dict[str, Any] = {"before": before}
    if config.method in _PEERS:
        functions = FunctionSet()
        if config.method == "one_shot":
            functions = one_shot(agent, _proposer(config), train, random_state=seed)
        elif config.method == "skill_library":
            functions = skill_library(agent, _proposer(config), train, random_state=seed)
        elif config.method == "oracle":
            functions = oracle_functions(DOMAINS.get(config.domain, tuple(TABLE_TYPES)))
    elif config.method in METHODS:
        trainer = _trainer(config, seed).fit(train)
        functions = trainer.functions_
        record |= _curves(trainer, agent, test, seed)
    else:
        raise ValueError(f"method must be one of {[*METHODS, *_PEERS]}, got {config.method!r}.")
    after = evaluate(agent, functions, test, seed=seed).accuracy
    sizes = [function.complexity for function in functions.values()]
    return record | {
        "test": after,
        "gain": after - before,
        "train": evaluate(agent, functions, train, seed=seed).accuracy,
        "functions": len(functions),
        "complexity": float(np.mean(sizes)) if sizes else float("nan"),
    }


def _curves(
    trainer: AgentTrainer, agent: RetrievalAgent, test: TaskSet, seed: int
) -> dict[str, Any]:
    history = trainer.history_
    test_curve, kept, results = [], [], {}
    for record in history:
        if record.accepted or not trainer.rollback:
            kept.append(record.functions)
        if kept[-1].digest not in results:
            results[kept[-1].digest] = evaluate(agent, kept[-1], test, seed=seed)
        test_curve.append(results[kept[-1].digest].accuracy)
    first = kept[1] if len(kept) > 1 else kept[0]
    return {
        "evaluations": len(history),
        "optimizer_calls": sum(r.n_calls for r in history),
        "calls_first": _calls(results[first.digest]),
        "calls_last": _calls(results[kept[-1].digest]),
        "best_curve": [1 - r.best_loss for r in history],
        "tried_curve": [1 - r.loss for r in history],
        "test_curve": test_curve,
        "accepted": [r.accepted for r in history],
    }


def transfer(config: Config, seed: int) -> dict[str, Any]:
    """Train on ``config.domain`` and test on each of the three domains.

    Returns
    -------
    dict
        ``<domain>`` (test accuracy) and ``<domain>_untrained`` for each domain.
    """
    train, _ = _tasks(config, seed)
    trainer = _trainer(config, seed, accept="ties").fit(train)
    record = {}
    for domain in ("arithmetic", "number_theory", "strings"):
        _, test = _tasks(config, seed, domain)
        record[domain] = trainer.score(test)
        record[f"{domain}_untrained"] = evaluate(trainer.agent, FunctionSet(), test).accuracy
    return record


def early_stop(config: Config, seed: int) -> dict[str, Any]:
    """Train without early stop and read off what each patience C would have given.

    Early stop only cuts a run short, so one run tells the results for every C.

    Returns
    -------
    dict
        For C in 2, 3, 5, 10 and none: ``evaluations_C``, ``calls_C``, ``test_C``.
    """
    train, test = _tasks(config, seed)
    trainer = _trainer(config, seed, patience=None).fit(train)
    curves = _curves(trainer, trainer.agent, test, seed)  # type: ignore[arg-type]
    accepted = curves["accepted"]
    record: dict[str, Any] = {}
    for patience in (2, 3, 5, 10, None):
        last, failures = len(accepted) - 1, 0
        for epoch, good in enumerate(accepted[1:], 1):
            failures = 0 if good else failures + 1
            if patience is not None and failures >= patience:
                last = epoch
                break
        name = "none" if patience is None else patience
        record[f"evaluations_{name}"] = last
        record[f"calls_{name}"] = sum(r.n_calls for r in trainer.history_[: last + 1])
        record[f"test_{name}"] = curves["test_curve"][last]
    return record


def family_outcomes(evaluation: Evaluation) -> pd.DataFrame:
    """Count what became of the tasks of each family.

    Parameters
    ----------
    evaluation : Evaluation

    Returns
    -------
    pandas.DataFrame
        Index: the family. Columns ``solved``, ``wrong answer`` and ``no answer``, as shares.
    """
    rows = [
        (t.task.domain, "solved" if t.correct else "no answer" if t.answer is None else "wrong")
        for t in evaluation.trajectories
    ]
    frame = pd.DataFrame(rows, columns=["family", "outcome"])
    shares = pd.crosstab(frame["family"], frame["outcome"], normalize="index")
    names = {"wrong": "wrong answer"}
    order = ["solved", "wrong answer", "no answer"]
    return shares.rename(columns=names).reindex(columns=order, fill_value=0.0)


#: What ``icml24 run agent_training`` runs.
EXPERIMENTS: dict[str, Callable[[Config, int], dict[str, Any]]] = {
    "training": training,
    "transfer": transfer,
    "early_stop": early_stop,
}

"""Agent training (Algorithm 2), with every ambiguity of the paper as a constructor argument."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tqdm import tqdm

from icml24.agent_training.actions import Action, action_from_state_dict
from icml24.agent_training.agent import Agent, Trajectory
from icml24.agent_training.chat import Usage
from icml24.agent_training.functions import FunctionSet
from icml24.agent_training.optimizer import AgentOptimizer
from icml24.agent_training.tasks import Task, TaskSet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["AgentTrainer", "EpochRecord", "Evaluation", "NotFittedError", "evaluate"]


class NotFittedError(RuntimeError):
    """The trainer was asked for results before ``fit``."""


class _BudgetExceeded(Exception):
    pass


@dataclass(frozen=True)
class Evaluation:
    """An agent with a function set on a task set.

    Parameters
    ----------
    correct : numpy.ndarray, shape (n_repeats, n_tasks)
        Which answers were right.
    trajectories : tuple of Trajectory
        In the same order, repeats one after another.
    """

    correct: np.ndarray
    trajectories: tuple[Trajectory, ...]

    @property
    def loss(self) -> float:
        """Share of the tasks not solved (eq. 1 of the paper, on these tasks)."""
        return 1.0 - self.accuracy

    @property
    def accuracy(self) -> float:
        """Share of the tasks solved."""
        return float(self.correct.mean())

    @property
    def usage(self) -> Usage:
        """What the agent spent."""
        return sum((t.usage for t in self.trajectories), Usage())


@dataclass(frozen=True)
class EpochRecord:
    """One evaluation during training; ``epoch`` 0 is the initial set.

    Parameters
    ----------
    epoch : int
    loss : float
        Selection loss of the set tried (validation loss, if there is validation).
    train_loss : float
        Loss of the set tried on the training tasks of this epoch.
    best_loss : float
        Smallest selection loss among the accepted sets so far.
    accepted : bool
    functions : FunctionSet
        The set tried.
    actions : tuple of Action
        How it was made.
    n_calls, invalid : int
        Calls of the proposer, and unusable answers among them.
    usage : Usage
        What agent and proposer spent in this epoch.
    seconds : float
    """

    epoch: int
    loss: float
    train_loss: float
    best_loss: float
    accepted: bool
    functions: FunctionSet
    actions: tuple[Action, ...] = ()
    n_calls: int = 0
    invalid: int = 0
    usage: Usage = field(default_factory=Usage)
    seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can store."""
        return {
            "epoch": self.epoch,
            "loss": self.loss,
            "train_loss": self.train_loss,
            "best_loss": self.best_loss,
            "accepted": self.accepted,
            "functions": self.functions.state_dict(),
            "actions": [action.state_dict() for action in self.actions],
            "n_calls": self.n_calls,
            "invalid": self.invalid,
            "usage": asdict(self.usage),
            "seconds": self.seconds,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> EpochRecord:
        """Inverse of :meth:`state_dict`."""
        return cls(
            **{
                **state,
                "functions": FunctionSet.from_state_dict(state["functions"]),
                "actions": tuple(map(action_from_state_dict, state["actions"])),
                "usage": Usage(**state["usage"]),
            }
        )


def _as_tasks(tasks: Iterable[Any], what: str = "tasks") -> TaskSet:
    if isinstance(tasks, str | bytes) or not isinstance(tasks, Iterable):
        raise TypeError(f"{what} must be a TaskSet or an iterable of Task objects.")
    result = tasks if isinstance(tasks, TaskSet) else TaskSet(tasks)
    if not len(result):
        raise ValueError(f"{what} must hold at least one task.")
    return result


def evaluate(
    agent: Agent,
    functions: FunctionSet,
    tasks: Iterable[Task | tuple[str, str]],
    *,
    n_repeats: int = 1,
    seed: Sequence[int] | int = 0,
    spend: Callable[[Usage], None] | None = None,
) -> Evaluation:
    """Run an agent with a function set on tasks.

    Parameters
    ----------
    agent : Agent
    functions : FunctionSet
    tasks : TaskSet or iterable
    n_repeats : int, default 1
        Runs of every task; more than one for agents that sample.
    seed : int or sequence of int, default 0
        Every run of every task gets a stream of its own.
    spend : callable, optional
        Called with the usage of each run as it happens.

    Returns
    -------
    Evaluation

    Examples
    --------
    >>> from icml24.agent_training import InProcessExecutor, RetrievalAgent
    >>> agent = RetrievalAgent(InProcessExecutor(i_trust_this_code=True))
    >>> evaluate(agent, FunctionSet(), [("2 + 2 = ?", "4"), ("The GCD of 4, 6", "2")]).accuracy
    0.5
    """
    tasks = _as_tasks(tasks)
    base = [seed] if isinstance(seed, int) else list(seed)
    trajectories = []
    for repeat in range(n_repeats):
        for i, task in enumerate(tasks):
            trajectory = agent.run(task, functions, rng=np.random.default_rng([*base, repeat, i]))
            trajectories.append(trajectory)
            if spend is not None:
                spend(trajectory.usage)
    correct = np.array([t.correct for t in trajectories]).reshape(n_repeats, len(tasks))
    return Evaluation(correct, tuple(trajectories))


class AgentTrainer:
    """Train the functions of an agent (Algorithm 2), with the manners of scikit-learn.

    The defaults are the paper's settings: ten epochs, patience ten, three actions a step, strict
    improvement, roll-back.

    Parameters
    ----------
    agent : Agent
    optimizer : AgentOptimizer
    max_epochs : int, default 10
        The paper's E.
    patience : int or None, default 10
        The paper's C; None never stops early.
    count : {"evaluations", "accepted"}, default "evaluations"
        What E counts: optimizer steps (appendix G of the paper), or accepted updates only
        (Algorithm 2 read literally, up to ``E * (C + 1)`` evaluations).
    patience_rule : {"text", "literal"}, default "text"
        Stop after C failures in a row (the paper's text), or after C + 1 (``r > C``).
    accept : {"strict", "ties"} or callable, default "strict"
        Accept a smaller loss only, an equal one too, or ``accept(new, best)`` of two
        :class:`Evaluation` objects.
    rollback : bool, default True
        Without it every step is kept, and the last set is the result.
    progressive : bool, default True
        Without it the whole set is proposed anew at each step.
    regenerate_actions : int, default 12
        Most functions of a regenerated set.
    batch_size : int, optional
        Training tasks drawn afresh for each epoch.
    batch_baseline : {"recorded", "reevaluated"}, default "recorded"
        With batches, compare the new loss with the best set's loss on *its* batch, as Algorithm 2
        reads, or evaluate the best set again on the new batch.
    validation : TaskSet or float, optional
        Tasks (or a share of the training tasks) on which sets are selected.
    n_repeats : int, default 1
        Runs of each task in an evaluation.
    target_loss : float, default 0
        Stop when the selection loss is no larger.
    max_cost, max_tokens : float, int, optional
        Budget of agent and proposer together; an evaluation that exceeds it is broken off.
    checkpoint : path-like, optional
        File for the state, written after every epoch; :meth:`fit` resumes from it.
    callbacks : sequence of callable
        Each is called ``callback(trainer, record)`` after an epoch.
    random_state : int, optional
        One seed for everything random.

    Attributes
    ----------
    functions_ : FunctionSet
        The learnt functions.
    history_ : list of EpochRecord
    best_epoch_ : int
    n_evaluations_ : int
        Sets evaluated, the initial one included.
    stopped_by_ : {"epochs", "patience", "target", "budget"}
    usage_ : Usage

    Examples
    --------
    >>> from icml24.agent_training import InProcessExecutor, RetrievalAgent, SynthesisProposer
    >>> tasks = [(f"The GCD of: {6 * i}, {9 * i}", str(3 * i)) for i in range(1, 5)]
    >>> trainer = AgentTrainer(
    ...     RetrievalAgent(InProcessExecutor(i_trust_this_code=True)),
    ...     AgentOptimizer(FunctionSet(), SynthesisProposer()),
    ...     random_state=0)
    >>> trainer.fit(tasks).score(tasks), list(trainer.functions_), trainer.stopped_by_
    (1.0, ['gcd'], 'target')
    """

    def __init__(
        self,
        agent: Agent,
        optimizer: AgentOptimizer,
        *,
        max_epochs: int = 10,
        patience: int | None = 10,
        count: Literal["evaluations", "accepted"] = "evaluations",
        patience_rule: Literal["text", "literal"] = "text",
        accept: Literal["strict", "ties"] | Callable[[Evaluation, Evaluation], bool] = "strict",
        rollback: bool = True,
        progressive: bool = True,
        regenerate_actions: int = 12,
        batch_size: int | None = None,
        batch_baseline: Literal["recorded", "reevaluated"] = "recorded",
        validation: TaskSet | float | None = None,
        n_repeats: int = 1,
        target_loss: float = 0.0,
        max_cost: float | None = None,
        max_tokens: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        callbacks: Sequence[Callable[[AgentTrainer, EpochRecord], None]] = (),
        random_state: int | None = None,
    ) -> None:
        if max_epochs < 0:
            raise ValueError(f"max_epochs must be at least 0, got {max_epochs}.")
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be at least 1 or None, got {patience}.")
        choices: dict[str, tuple[str, tuple[str, ...]]] = {
            "count": (count, ("evaluations", "accepted")),
            "patience_rule": (patience_rule, ("text", "literal")),
            "batch_baseline": (batch_baseline, ("recorded", "reevaluated")),
        }
        if not callable(accept):
            choices["accept"] = (accept, ("strict", "ties"))
        for name, (value, known) in choices.items():
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}.")
        if n_repeats < 1 or regenerate_actions < 1:
            raise ValueError("n_repeats and regenerate_actions must be at least 1.")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        if isinstance(validation, float) and not 0 < validation < 1:
            raise ValueError(f"validation as a share must lie in (0, 1), got {validation}.")
        self.agent, self.optimizer = agent, optimizer
        self.max_epochs, self.patience = max_epochs, patience
        self.count, self.patience_rule, self.accept = count, patience_rule, accept
        self.rollback, self.progressive = rollback, progressive
        self.regenerate_actions = regenerate_actions
        self.batch_size, self.batch_baseline = batch_size, batch_baseline
        self.validation, self.n_repeats, self.target_loss = validation, n_repeats, target_loss
        self.max_cost, self.max_tokens = max_cost, max_tokens
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.callbacks, self.random_state = tuple(callbacks), random_state
        self._initial = optimizer.state_dict()["functions"]
        self._state: dict[str, Any] | None = None

    # --- training ---

    def fit(self, tasks: Iterable[Task | tuple[str, str]], *, resume: bool = True) -> AgentTrainer:
        """Train on tasks.

        Parameters
        ----------
        tasks : TaskSet or iterable of Task or (question, answer)
        resume : bool, default True
            Go on from a loaded state or from the checkpoint, if there is one.

        Returns
        -------
        AgentTrainer
            Itself.

        Raises
        ------
        ValueError
            If there are no tasks, ``batch_size`` exceeds them, validation overlaps training, or a
            state belongs to other tasks.
        TypeError
            If an entry is not a task.
        """
        tasks = _as_tasks(tasks)
        train, validation = self._splits(tasks)
        if self.batch_size is not None and self.batch_size > len(train):
            raise ValueError(
                f"batch_size must be at most the {len(train)} training tasks, "
                f"got {self.batch_size}."
            )
        state = self._state if resume else None
        if state is None and resume and self.checkpoint is not None and self.checkpoint.is_file():
            state = json.loads(self.checkpoint.read_text(encoding="utf-8"))
        self._state = None
        self._train, self._validation, self._digest = train, validation, tasks.digest
        if state is None:
            self._begin()
        else:
            self._restore(state)
        bar = tqdm(total=self.max_epochs, desc="training", disable=None, file=sys.stderr)
        with bar:
            try:
                if not self.history_:
                    self._initial_epoch()
                while not (reason := self._finished()):
                    bar.n = min(self._counted(), self.max_epochs)
                    bar.set_postfix(loss=f"{self.history_[-1].best_loss:.3f}")
                    self._epoch()
                self.stopped_by_ = reason
            except _BudgetExceeded:
                self.optimizer.functions = self._current
                self.stopped_by_ = "budget"
        self.functions_ = self._current
        return self

    def _splits(self, tasks: TaskSet) -> tuple[TaskSet, TaskSet | None]:
        if self.validation is None:
            return tasks, None
        if isinstance(self.validation, float):
            n = round(self.validation * len(tasks))
            if not 0 < n < len(tasks):
                raise ValueError(
                    f"validation={self.validation} of {len(tasks)} tasks leaves one side empty."
                )
            train, validation = tasks.split(len(tasks) - n, n, seed=self.random_state or 0)
            return train, validation
        validation = _as_tasks(self.validation, "validation")
        if shared := {t.key for t in tasks} & {t.key for t in validation}:
            raise ValueError(f"{len(shared)} validation tasks are training tasks too.")
        return tasks, validation

    def _begin(self) -> None:
        self._entropy = (
            int(np.random.SeedSequence().entropy) % 2**63  # type: ignore[arg-type]
            if self.random_state is None
            else int(self.random_state)
        )
        self.history_: list[EpochRecord] = []
        self.usage_ = Usage()
        self.stopped_by_ = ""
        self._failures_in_a_row = 0
        self.optimizer.functions = FunctionSet.from_state_dict(self._initial)
        self.optimizer.zero_history()
        self.optimizer.clear_failures()
        self._current = self.optimizer.functions
        self._baseline: Evaluation | None = None

    def _spend(self, usage: Usage) -> None:
        self.usage_ += usage
        tokens = self.usage_.prompt_tokens + self.usage_.completion_tokens
        if (self.max_cost is not None and self.usage_.cost > self.max_cost) or (
            self.max_tokens is not None and tokens > self.max_tokens
        ):
            raise _BudgetExceeded

    def _rng(self, stream: int) -> np.random.Generator:
        return np.random.default_rng([self._entropy, stream, len(self.history_)])

    def _batch(self) -> TaskSet:
        if self.batch_size is None:
            return self._train
        order = self._rng(2).choice(len(self._train), self.batch_size, replace=False)
        return TaskSet(self._train[int(i)] for i in order)

    def _evaluate(self, functions: FunctionSet, tasks: TaskSet, stream: int = 0) -> Evaluation:
        seed = (self._entropy, stream, len(self.history_))
        return evaluate(
            self.agent, functions, tasks, n_repeats=self.n_repeats, seed=seed, spend=self._spend
        )

    def _trial(self, functions: FunctionSet, batch: TaskSet) -> tuple[Evaluation, Evaluation]:
        trained = self._evaluate(functions, batch)
        if self._validation is None:
            return trained, trained
        return trained, self._evaluate(functions, self._validation, stream=3)

    def _learn_from(self, trained: Evaluation, selected: Evaluation) -> None:
        self.optimizer.zero_history()
        for trajectory in trained.trajectories:
            self.optimizer.record(trajectory)
        self._baseline = selected

    def _initial_epoch(self) -> None:
        start, spent = time.perf_counter(), self.usage_
        trained, selected = self._trial(self._current, self._batch())
        self._learn_from(trained, selected)
        self._log(
            EpochRecord(
                0,
                selected.loss,
                trained.loss,
                selected.loss,
                True,
                self._current,
                usage=self.usage_ - spent,
                seconds=time.perf_counter() - start,
            )
        )

    def _epoch(self) -> None:
        start, spent = time.perf_counter(), self.usage_
        step = self.optimizer.step(
            self._rng(1),
            regenerate=not self.progressive,
            max_actions=None if self.progressive else self.regenerate_actions,
        )
        self._spend(step.usage)
        batch = self._batch()
        trained, selected = self._trial(step.functions, batch)
        baseline = self._baseline
        if self.batch_size is not None and self.batch_baseline == "reevaluated":
            baseline = self._trial(self._current, batch)[1]
        assert baseline is not None
        accepted = self._accepts(selected, baseline)
        if accepted or not self.rollback:
            self._current = step.functions
            self._learn_from(trained, selected)
        if accepted:
            self.optimizer.clear_failures()
            self._failures_in_a_row = 0
        else:
            self._failures_in_a_row += 1
            if self.rollback:
                self.optimizer.rollback(performance=selected.accuracy)
        best = min(self.history_[-1].best_loss, selected.loss) if accepted else None
        self._log(
            EpochRecord(
                len(self.history_),
                selected.loss,
                trained.loss,
                self.history_[-1].best_loss if best is None else best,
                accepted,
                step.functions,
                step.actions,
                step.n_calls,
                step.invalid,
                self.usage_ - spent,
                time.perf_counter() - start,
            )
        )

    def _accepts(self, new: Evaluation, best: Evaluation) -> bool:
        if callable(self.accept):
            return bool(self.accept(new, best))
        # losses are means of zeros and ones: compare them free of rounding
        difference = new.loss - best.loss
        return difference < -1e-12 or (self.accept == "ties" and difference <= 1e-12)

    def _log(self, record: EpochRecord) -> None:
        self.history_.append(record)
        if self.checkpoint is not None:
            _write_atomically(self.checkpoint, json.dumps(self.state_dict()))
        for callback in self.callbacks:
            callback(self, record)

    def _counted(self) -> int:
        steps = self.history_[1:]
        return sum(r.accepted for r in steps) if self.count == "accepted" else len(steps)

    def _finished(self) -> str:
        if self._baseline is not None and self._baseline.loss <= self.target_loss + 1e-12:
            return "target"
        if self._counted() >= self.max_epochs:
            return "epochs"
        if self.patience is not None:
            limit = self.patience + (self.patience_rule == "literal")
            if self._failures_in_a_row >= limit:
                return "patience"
        return ""

    # --- results ---

    @property
    def n_evaluations_(self) -> int:
        """Sets evaluated, the initial one included."""
        self._check_fitted()
        return len(self.history_)

    @property
    def best_epoch_(self) -> int:
        """Epoch of the learnt set."""
        self._check_fitted()
        if not self.rollback and self.history_:
            return self.history_[-1].epoch
        return max((r.epoch for r in self.history_ if r.accepted), default=0)

    def _check_fitted(self) -> None:
        if not hasattr(self, "functions_") and not getattr(self, "history_", None):
            raise NotFittedError("Call fit(tasks) first.")

    def predict(self, tasks: Iterable[Task | tuple[str, str]]) -> list[str | None]:
        """Return the trained agent's answers."""
        return [t.answer for t in self.evaluate(tasks).trajectories]

    def score(self, tasks: Iterable[Task | tuple[str, str]]) -> float:
        """Return the share of tasks that the trained agent solves."""
        return self.evaluate(tasks).accuracy

    def evaluate(self, tasks: Iterable[Task | tuple[str, str]], n_repeats: int = 1) -> Evaluation:
        """Run the trained agent on tasks."""
        self._check_fitted()
        seed = (self._entropy, 4)
        return evaluate(self.agent, self.functions_, tasks, n_repeats=n_repeats, seed=seed)

    def plot_learning_curve(self, ax: Axes | None = None) -> Axes:
        """Draw the accuracy of the best and of the tried sets; crosses are rejected ones."""
        import matplotlib.pyplot as plt

        self._check_fitted()
        axes = plt.gca() if ax is None else ax
        epochs = [r.epoch for r in self.history_]
        axes.step(epochs, [1 - r.best_loss for r in self.history_], where="post", label="best")
        for accepted, marker, label in ((True, "o", "accepted"), (False, "x", "rejected")):
            points = [(r.epoch, 1 - r.loss) for r in self.history_ if r.accepted is accepted]
            if points:
                axes.plot(*zip(*points, strict=True), marker, label=label)
        axes.set(xlabel="Evaluation", ylabel="Share of tasks solved", ylim=(-0.02, 1.02))
        axes.legend()
        return axes

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training needs to go on, as data that JSON can store."""
        self._check_fitted()
        assert self._baseline is not None
        return {
            "version": 1,
            "tasks": self._digest,
            "entropy": self._entropy,
            "failures_in_a_row": self._failures_in_a_row,
            "usage": asdict(self.usage_),
            "current": self._current.state_dict(),
            "baseline": self._baseline.correct.astype(int).tolist(),
            "history": [record.state_dict() for record in self.history_],
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; the next :meth:`fit` goes on from there."""
        if state.get("version") != 1:
            raise ValueError("This is not a state of an AgentTrainer of this version.")
        self._state = dict(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state["tasks"] != self._digest:
            raise ValueError("The saved state belongs to other training tasks.")
        self._entropy = state["entropy"]
        self._failures_in_a_row = state["failures_in_a_row"]
        self.usage_ = Usage(**state["usage"])
        self.stopped_by_ = ""
        self._current = FunctionSet.from_state_dict(state["current"])
        self._baseline = Evaluation(np.array(state["baseline"], bool), ())
        self.history_ = [EpochRecord.from_state_dict(entry) for entry in state["history"]]
        self.optimizer.load_state_dict(state["optimizer"], list(self._train))


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

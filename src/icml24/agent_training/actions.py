"""The four actions of the optimizer: add, revise, remove, terminate (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from icml24.agent_training.functions import Function, FunctionSet, InvalidFunctionError

__all__ = [
    "Action",
    "AddFunction",
    "RemoveFunction",
    "ReviseFunction",
    "Terminate",
    "action_from_state_dict",
]


class Action(Protocol):
    """What the optimizer may do to a function set."""

    kind: ClassVar[str]

    def apply(self, functions: FunctionSet) -> FunctionSet:
        """Return the set after the action."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can store."""
        ...


@dataclass(frozen=True)
class AddFunction:
    """``add_function``: put a new function into the set; its name must be new."""

    function: Function
    kind: ClassVar[str] = "add_function"

    def apply(self, functions: FunctionSet) -> FunctionSet:
        """Return the set with the function added."""
        return functions.add(self.function)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can store."""
        return {"kind": self.kind, "function": self.function.state_dict()}


@dataclass(frozen=True)
class ReviseFunction:
    """``revise_function``: replace the function of the same name; it must exist."""

    function: Function
    kind: ClassVar[str] = "revise_function"

    def apply(self, functions: FunctionSet) -> FunctionSet:
        """Return the set with the function replaced."""
        return functions.revise(self.function)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can store."""
        return {"kind": self.kind, "function": self.function.state_dict()}


@dataclass(frozen=True)
class RemoveFunction:
    """``remove_function``: take a function out of the set; it must exist."""

    name: str
    kind: ClassVar[str] = "remove_function"

    def apply(self, functions: FunctionSet) -> FunctionSet:
        """Return the set without the function."""
        return functions.remove(self.name)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can store."""
        return {"kind": self.kind, "name": self.name}


@dataclass(frozen=True)
class Terminate:
    """``TERMINATE``: the set is good as it is; the step ends here."""

    kind: ClassVar[str] = "terminate"

    def apply(self, functions: FunctionSet) -> FunctionSet:
        """Return the set itself."""
        return functions

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can store."""
        return {"kind": self.kind}


def action_from_state_dict(state: Mapping[str, Any]) -> Action:
    """Make an action of its plain data.

    Examples
    --------
    >>> action_from_state_dict({"kind": "remove_function", "name": "old"})
    RemoveFunction(name='old')
    """
    kind = state.get("kind")
    if kind == "terminate":
        return Terminate()
    if kind == "remove_function":
        return RemoveFunction(state["name"])
    if kind == "add_function":
        return AddFunction(Function.from_state_dict(state["function"]))
    if kind == "revise_function":
        return ReviseFunction(Function.from_state_dict(state["function"]))
    raise InvalidFunctionError(f"There is no action {kind!r}.")

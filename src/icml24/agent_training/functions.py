"""Functions as weights: an immutable set of Python functions that an agent may call.

The paper treats the set ``F = {f_1, ..., f_n}`` as the parameters of an agent system ``S_F`` and
looks for the set with the smallest expected loss (eq. 1). Here that set is a value: every change
makes a new one, so an earlier set can always be restored exactly.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import json
import keyword
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from icml24.agent_training.actions import Action

__all__ = ["Function", "FunctionSet", "InvalidFunctionError"]

MAX_CODE = 20_000
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}
_ANNOTATIONS = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "dict": "object",
}


class InvalidFunctionError(ValueError):
    """A function, or a change of a function set, breaks a rule; the message says which."""


def _parse(code: str) -> ast.Module:
    if len(code) > MAX_CODE:
        raise InvalidFunctionError(
            f"The code has {len(code):,} characters; a function may have at most {MAX_CODE:,}."
        )
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidFunctionError(f"The code is not valid Python: {error}.") from None


@dataclass(frozen=True)
class Function:
    r"""One tool of an agent: a name, a description, a signature and Python source.

    Parameters
    ----------
    name : str
        A Python identifier, equal to the name of the ``def`` in ``code``.
    description : str
        What the agent reads when it chooses among its functions.
    parameters : dict
        JSON Schema of the arguments: ``{"type": "object", "properties": ..., "required": ...}``.
    code : str
        Python source that defines the function.
    packages : tuple of str, optional
        Packages that the code imports beyond the standard library. They are recorded, never
        installed.

    Examples
    --------
    >>> f = Function(
    ...     "add", "Sum of two integers.",
    ...     {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    ...      "required": ["a", "b"]},
    ...     "def add(a, b):\n    return a + b")
    >>> f.complexity, f.check_arguments({"a": 1, "b": 2})
    (1, {'a': 1, 'b': 2})
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    code: str
    packages: tuple[str, ...] = ()
    digest: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", json.loads(json.dumps(dict(self.parameters))))
        object.__setattr__(self, "packages", tuple(self.packages))
        content = json.dumps(self.state_dict(), sort_keys=True)
        object.__setattr__(self, "digest", hashlib.sha256(content.encode()).hexdigest()[:16])

    def __hash__(self) -> int:
        return hash(self.digest)

    @classmethod
    def from_callable(cls, function: Callable[..., Any]) -> Function:
        """Make a function of your own ``def``: source, docstring and annotations are read.

        Parameters
        ----------
        function : callable
            A plain Python function whose source is available; it must not use names from outside
            its body other than builtins, since only its own source is kept.

        Returns
        -------
        Function

        Raises
        ------
        InvalidFunctionError
            If it is a lambda, has no readable source, or takes ``*args`` or ``**kwargs``.
        """
        name = getattr(function, "__name__", "<lambda>")
        if name == "<lambda>":
            raise InvalidFunctionError("A lambda has no name; write it as a def.")
        try:
            code = textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError):
            raise InvalidFunctionError(f"The source of {name!r} cannot be read.") from None
        properties, required = {}, []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise InvalidFunctionError(f"{name!r} must have named arguments only.")
            annotation = parameter.annotation
            label = getattr(annotation, "__name__", str(annotation)).split("[")[0]
            json_type = _ANNOTATIONS.get(label)
            properties[parameter.name] = {"type": json_type} if json_type else {}
            if parameter.default is parameter.empty:
                required.append(parameter.name)
        description = (inspect.getdoc(function) or name.replace("_", " ")).split("\n\n")[0]
        schema = {"type": "object", "properties": properties, "required": required}
        result = cls(name, " ".join(description.split()), schema, code)
        result.validate()
        return result

    def to_tool(self) -> dict[str, Any]:
        """Return the tool definition that chat APIs expect."""
        parameters = dict(self.parameters)
        parameters.setdefault("type", "object")
        parameters.setdefault("required", list(parameters.get("properties", {})))
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": parameters,
            },
        }

    def validate(self) -> None:
        """Check name, schema and code.

        Raises
        ------
        InvalidFunctionError
            One sentence on the first thing that is wrong.
        """
        if not self.name.isidentifier() or keyword.iskeyword(self.name):
            raise InvalidFunctionError(f"The name {self.name!r} is not a Python identifier.")
        if not self.description.strip():
            raise InvalidFunctionError(f"The function {self.name!r} needs a description.")
        properties = self.parameters.get("properties", {})
        if not isinstance(properties, dict):
            raise InvalidFunctionError("parameters['properties'] must map names to JSON Schemas.")
        for key, schema in properties.items():
            json_type = schema.get("type") if isinstance(schema, dict) else schema
            known = json_type is None or (isinstance(json_type, str) and json_type in _JSON_TYPES)
            if not isinstance(schema, dict) or not known:
                raise InvalidFunctionError(
                    f"The argument {key!r} has the type {json_type!r}; "
                    f"use one of {', '.join(_JSON_TYPES)}."
                )
        unknown = set(self.parameters.get("required", [])) - set(properties)
        if unknown:
            raise InvalidFunctionError(f"required names unknown arguments: {sorted(unknown)}.")
        definitions = [n for n in _parse(self.code).body if isinstance(n, ast.FunctionDef)]
        own = [node for node in definitions if node.name == self.name]
        if not own:
            found = ", ".join(node.name for node in definitions) or "none"
            raise InvalidFunctionError(
                f"The code must define a function named {self.name!r}; it defines {found}."
            )
        arguments = own[-1].args
        names = {a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs}
        if arguments.kwarg is None and not set(properties) <= names:
            raise InvalidFunctionError(
                f"The schema names {sorted(set(properties) - names)}, "
                f"which are no arguments of {self.name!r}."
            )

    def check_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments if they fit the schema.

        Raises
        ------
        InvalidFunctionError
            If one is missing, unknown or of the wrong JSON type.
        """
        if not isinstance(arguments, Mapping):
            raise InvalidFunctionError(f"The arguments of {self.name!r} must be a JSON object.")
        properties = self.parameters.get("properties", {})
        required = self.parameters.get("required", list(properties))
        if missing := [name for name in required if name not in arguments]:
            raise InvalidFunctionError(f"{self.name!r} lacks the arguments {missing}.")
        if unknown := [name for name in arguments if name not in properties]:
            raise InvalidFunctionError(f"{self.name!r} has no arguments {unknown}.")
        for name, value in arguments.items():
            json_type = properties[name].get("type")
            if json_type is None:
                continue
            fits = isinstance(value, _JSON_TYPES[json_type])
            if isinstance(value, bool) and json_type in ("integer", "number"):
                fits = False
            if not fits:
                raise InvalidFunctionError(
                    f"{self.name}({name}=...) must be a {json_type}, got {type(value).__name__}."
                )
        return dict(arguments)

    @property
    def complexity(self) -> int:
        """Cyclomatic complexity (McCabe): one plus the number of decisions in the code."""
        total = 1
        for node in ast.walk(_parse(self.code)):
            if isinstance(
                node, ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler | ast.Assert
            ):
                total += 1
            elif isinstance(node, ast.BoolOp):
                total += len(node.values) - 1
            elif isinstance(node, ast.comprehension):
                total += 1 + len(node.ifs)
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can store."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "code": self.code,
            "packages": list(self.packages),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Function:
        """Inverse of :meth:`state_dict`."""
        return cls(**{**state, "packages": tuple(state.get("packages", ()))})


class FunctionSet(Mapping[str, Function]):
    r"""An immutable, ordered set of functions; every change returns a new set.

    Parameters
    ----------
    functions : iterable of Function, optional
        Names must differ.

    Examples
    --------
    >>> def double(x: int):
    ...     "Twice the number."
    ...     return 2 * x
    >>> schema = {"properties": {"x": {"type": "integer"}}, "required": ["x"]}
    >>> f = Function("double", "Twice the number.", schema, "def double(x):\n    return 2 * x")
    >>> empty = FunctionSet()
    >>> one = empty.add(f)
    >>> len(empty), list(one), one.remove("double") == empty
    (0, ['double'], True)
    """

    def __init__(self, functions: Iterable[Function] = ()) -> None:
        content: dict[str, Function] = {}
        for function in functions:
            if not isinstance(function, Function):
                raise TypeError(
                    f"A FunctionSet holds Function objects, got {type(function).__name__}; "
                    "Function.from_callable(f) makes one of a def."
                )
            if function.name in content:
                raise InvalidFunctionError(f"There are two functions named {function.name!r}.")
            content[function.name] = function
        self._functions = content

    def __getitem__(self, name: str) -> Function:
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionSet) and self._functions == other._functions

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"FunctionSet({', '.join(self) or 'empty'})"

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that identify the content."""
        joined = "".join(sorted(function.digest for function in self.values()))
        return hashlib.sha256(joined.encode()).hexdigest()[:16]

    def add(self, function: Function) -> FunctionSet:
        """Return the set with one more function; its name must be new."""
        function.validate()
        if function.name in self:
            raise InvalidFunctionError(
                f"add_function: {function.name!r} exists already; use revise_function."
            )
        return FunctionSet([*self.values(), function])

    def revise(self, function: Function) -> FunctionSet:
        """Return the set with the function of the same name replaced."""
        function.validate()
        if function.name not in self:
            raise InvalidFunctionError(f"revise_function: there is no {function.name!r}.")
        return FunctionSet(function if f.name == function.name else f for f in self.values())

    def remove(self, name: str) -> FunctionSet:
        """Return the set without the named function."""
        if name not in self:
            raise InvalidFunctionError(f"remove_function: there is no {name!r}.")
        return FunctionSet(f for f in self.values() if f.name != name)

    def apply(self, action: Action) -> FunctionSet:
        """Return the set after an action (see :mod:`icml24.agent_training.actions`)."""
        return action.apply(self)

    def tools(self) -> list[dict[str, Any]]:
        """Return the tool definitions for a chat API."""
        return [function.to_tool() for function in self.values()]

    def diff(self, other: FunctionSet) -> str:
        """Return the unified diff of the sources, from this set to ``other``."""
        old, new = (
            "\n\n".join(f"# {f.description}\n{f.code.rstrip()}" for f in functions.values())
            for functions in (self, other)
        )
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), "before", "after", "", "")
        return "\n".join(line.rstrip() for line in lines)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can store."""
        return {"functions": [function.state_dict() for function in self.values()]}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> FunctionSet:
        """Inverse of :meth:`state_dict`."""
        return cls(Function.from_state_dict(entry) for entry in state["functions"])

    def save(self, path: str | Path) -> None:
        """Write the set as JSON."""
        Path(path).write_text(json.dumps(self.state_dict(), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> FunctionSet:
        """Read what :meth:`save` wrote."""
        return cls.from_state_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    def source(self) -> str:
        """Return the set as the source of one Python module, with ``__all__``."""
        extras: dict[str, str] = {}
        blocks = []
        for function in self.values():
            tree = _parse(function.code)
            own = {
                node.name: ast.dump(node)
                for node in tree.body
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
            }
            clash = any(
                name != function.name and (name in self or extras.get(name, dump) != dump)
                for name, dump in own.items()
            )
            extras.update(own)
            code = function.code.strip()
            if clash:  # a helper shares its name with another function's: keep it in a closure
                body = textwrap.indent(code, "    ")
                maker = f"_make_{function.name}"
                code = f"def {maker}():\n{body}\n    return {function.name}\n\n\n"
                code += f"{function.name} = {maker}()"
            comment = "\n".join(
                textwrap.wrap(function.description, 96, initial_indent="# ", subsequent_indent="# ")
            )
            blocks.append(f"{comment}\n{code}\n")
        head = '"""Functions learnt by agent training; each one stands alone."""\n'
        names = ", ".join(f'"{name}"' for name in self)
        return head + f"\n__all__ = [{names}]\n" + "".join(f"\n\n{block}" for block in blocks)

    def save_module(self, path: str | Path) -> None:
        """Write the set as an importable Python module.

        The doctests that the functions carry in their docstrings travel along:
        ``python -m doctest tools.py`` checks them.
        """
        Path(path).write_text(self.source(), encoding="utf-8")

"""Running code that a model wrote: in a sandbox by default.

The code is untrusted, and so are its *arguments*: a function that hands a string to
``sympy.sympify`` evaluates that string. A check of the source is therefore a courtesy; the boundary
is the operating system. Each job runs in a fresh child of a small fork server: its own session, an
empty environment, limits on memory, time, files and processes, and a seccomp filter under which
only computation is possible.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from icml24.agent_training.functions import Function, InvalidFunctionError

__all__ = [
    "DEFAULT_MODULES",
    "LEVELS",
    "DockerExecutor",
    "ExecutionResult",
    "Executor",
    "InProcessExecutor",
    "PolicyError",
    "SandboxExecutor",
    "SandboxUnavailableError",
    "check_policy",
]

#: Levels of isolation, weakest first.
LEVELS = ("ast", "rlimit", "namespaces", "seccomp")
# fmt: off
#: Modules that a function may import.
DEFAULT_MODULES = (
    "bisect", "collections", "datetime", "decimal", "fractions", "functools", "heapq",
    "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "typing",
    "unicodedata",
)
# fmt: on
_WORKER = Path(__file__).with_name("_worker.py")
# fmt: off
_FORBIDDEN_NAMES = frozenset({
    "eval", "exec", "compile", "open", "input", "__import__", "globals", "locals", "vars",
    "getattr", "setattr", "delattr", "dir", "breakpoint", "exit", "quit", "help", "memoryview",
    "__builtins__", "__loader__", "__spec__",
})
# fmt: on

# fmt: off
_FORBIDDEN_ATTRIBUTES = frozenset({
    "gi_frame", "gi_code", "cr_frame", "cr_code", "ag_frame", "ag_code", "f_back", "f_globals",
    "f_locals", "f_builtins", "tb_frame", "tb_next", "mro", "sys", "os", "builtins", "modules",
    "environ",
})
# fmt: on

# Lazy imports would need open(), which the filter refuses; these are done before the fork.
_WARM = {
    "sympy": "import sympy\nsympy.solve(sympy.sympify('x**2 - 2'))\nsympy.factorint(12)\n"
    "sympy.simplify('x/x')\nstr(sympy.N('1/3'))",
    "numpy": "import numpy\nnumpy.random.default_rng(0)\nnumpy.linalg.norm(numpy.ones(2))",
}


class PolicyError(InvalidFunctionError):
    """The code uses something that functions must not use."""


class SandboxUnavailableError(RuntimeError):
    """Raised if this machine cannot isolate code as strictly as was asked for."""


@dataclass(frozen=True)
class ExecutionResult:
    """What came of one call.

    Parameters
    ----------
    ok : bool
        Whether the call returned a value that JSON can hold.
    value : object
        The value, None if not ``ok``.
    error : str
        ``"Type: message"`` if not ``ok``.
    seconds : float
        Time spent in the call.
    output : str
        What it printed, up to 2,000 characters.
    """

    ok: bool
    value: Any = None
    error: str = ""
    seconds: float = 0.0
    output: str = ""


class Executor(Protocol):
    """Anything that can call a :class:`Function`."""

    def run(self, function: Function, arguments: Mapping[str, Any]) -> ExecutionResult:
        """Make one call; an error of the code is a result, never an exception."""
        ...

    def run_many(
        self, function: Function, calls: Sequence[Mapping[str, Any]]
    ) -> list[ExecutionResult]:
        """Make several calls of one function."""
        ...


def check_policy(code: str, allowed_modules: Iterable[str] = DEFAULT_MODULES) -> None:
    """Refuse source that reaches for files, the interpreter or other modules.

    It gives a model a clear message early. It is **not** the security boundary.

    Raises
    ------
    PolicyError
        One sentence on the first offence.

    Examples
    --------
    >>> check_policy("import os")
    Traceback (most recent call last):
    ...
    icml24.agent_training.execution.PolicyError: Line 1: the module 'os' is not allowed.
    """
    allowed = set(allowed_modules)
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PolicyError(f"The code is not valid Python: {error}.") from None
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "." * node.level]
        for module in modules:
            if module.split(".")[0] not in allowed:
                raise PolicyError(f"Line {line}: the module {module!r} is not allowed.")
        if isinstance(node, ast.Name) and node.id in _FORBIDDEN_NAMES:
            raise PolicyError(f"Line {line}: {node.id!r} is not allowed.")
        if isinstance(node, ast.Attribute) and (
            node.attr.startswith("__") or node.attr in _FORBIDDEN_ATTRIBUTES
        ):
            raise PolicyError(f"Line {line}: the attribute {node.attr!r} is not allowed.")
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "{" in node.value
            and "__" in node.value
        ):
            raise PolicyError(f"Line {line}: a format string must not name double underscores.")


class InProcessExecutor:
    r"""Call functions in this very process: fast, and without any protection.

    Parameters
    ----------
    i_trust_this_code : bool
        Must be True. It is meant for functions that you wrote, or that a
        :class:`SynthesisProposer` printed from a grammar you know.
    memoize : bool, default True
        Remember results by function and arguments; right for pure functions.

    Examples
    --------
    >>> f = Function("double", "Twice.", {"properties": {"x": {"type": "integer"}}},
    ...              "def double(x):\n    return 2 * x")
    >>> InProcessExecutor(i_trust_this_code=True).run(f, {"x": 4}).value
    8
    """

    level = "none"

    def __init__(self, *, i_trust_this_code: bool = False, memoize: bool = True) -> None:
        if i_trust_this_code is not True:
            raise ValueError(
                "InProcessExecutor runs code without protection: pass i_trust_this_code=True, or "
                "use SandboxExecutor()."
            )
        self._functions: dict[str, Any] = {}
        self._results: dict[Any, ExecutionResult] | None = {} if memoize else None

    def __getstate__(self) -> dict[str, Any]:
        return {"_functions": {}, "_results": None if self._results is None else {}}

    def run(self, function: Function, arguments: Mapping[str, Any]) -> ExecutionResult:
        """Make one call; see :class:`Executor`."""
        try:
            checked = function.check_arguments(arguments)
        except InvalidFunctionError as error:
            return ExecutionResult(False, error=f"TypeError: {error}")
        if self._results is None:
            return self._call(function, checked)
        key = (function.digest, repr(checked))
        result = self._results.get(key)
        if result is None:
            if len(self._results) > 100_000:
                self._results.clear()
            result = self._results[key] = self._call(function, checked)
        return result

    def _call(self, function: Function, arguments: dict[str, Any]) -> ExecutionResult:
        start = time.perf_counter()
        try:
            if function.digest not in self._functions:
                scope: dict[str, Any] = {"__name__": "tool"}
                exec(compile(function.code, f"<{function.name}>", "exec"), scope)
                self._functions[function.digest] = scope[function.name]
            value = self._functions[function.digest](**arguments)
            if not isinstance(value, str | int | float | bool | None):
                value = json.loads(json.dumps(value))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:500]
            return ExecutionResult(False, error=message, seconds=time.perf_counter() - start)
        return ExecutionResult(True, value, seconds=time.perf_counter() - start)

    def run_many(
        self, function: Function, calls: Sequence[Mapping[str, Any]]
    ) -> list[ExecutionResult]:
        """Make several calls; see :class:`Executor`."""
        return [self.run(function, arguments) for arguments in calls]


class SandboxExecutor:
    r"""Call functions in a confined child process.

    Parameters
    ----------
    timeout : float, default 2
        Seconds for one call; then the child is killed.
    memory_mb : int, default 512
        Address space of the child.
    allowed_modules : sequence of str, optional
        Modules that functions may import; they are imported before the fork.
    isolation : {"auto", "required"} or a level, default "auto"
        ``"auto"`` takes the best level of this machine, one of ``LEVELS``; ``"required"`` demands
        ``"seccomp"``; a level's name demands at least that level.
    max_output : int, default 65536
        Characters of a result written as JSON.
    restricted : bool, default True
        Check the source with :func:`check_policy` and offer harmless builtins only. With False the
        operating system alone is the boundary: for tests of that boundary.

    Attributes
    ----------
    level : str
        The level reached. ``"seccomp"``: only computation is possible, no file can be opened, no
        process started, no socket made. ``"namespaces"``: no network. ``"rlimit"``: bounded
        memory, time and output; files can be read.

    Raises
    ------
    SandboxUnavailableError
        If the level asked for cannot be reached.

    Examples
    --------
    >>> f = Function("double", "Twice.", {"properties": {"x": {"type": "integer"}}},
    ...              "def double(x):\n    return 2 * x")
    >>> with SandboxExecutor() as sandbox:
    ...     sandbox.run(f, {"x": 4}).value
    8
    """

    def __init__(
        self,
        timeout: float = 2.0,
        memory_mb: int = 512,
        allowed_modules: Sequence[str] = DEFAULT_MODULES,
        isolation: str = "auto",
        max_output: int = 65536,
        restricted: bool = True,
    ) -> None:
        if isolation not in ("auto", "required", *LEVELS):
            raise ValueError(
                f"isolation must be 'auto', 'required' or one of {LEVELS}, got {isolation!r}."
            )
        if timeout <= 0 or memory_mb < 16 or max_output < 1:
            raise ValueError("timeout and max_output must be positive, memory_mb at least 16.")
        if not hasattr(os, "fork"):
            raise SandboxUnavailableError("The sandbox needs a system with fork (Linux, macOS).")
        self.timeout, self.memory_mb, self.max_output = float(timeout), memory_mb, max_output
        self.allowed_modules, self.restricted = tuple(allowed_modules), restricted
        self.isolation = isolation
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        self._buffer, self._level, self._owner = b"", "", 0
        if isolation != "auto":
            self._demand(self.level)

    def _demand(self, level: str) -> None:
        wanted = {"auto": "ast", "required": "seccomp"}.get(self.isolation, self.isolation)
        if LEVELS.index(level) < LEVELS.index(wanted):
            self.close()
            raise SandboxUnavailableError(
                f"This machine isolates at the level {level!r}, below the {wanted!r} asked for."
            )

    def __getstate__(self) -> dict[str, Any]:
        names = ("timeout", "memory_mb", "allowed_modules", "isolation", "max_output", "restricted")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __enter__(self) -> SandboxExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def level(self) -> str:
        """The level of isolation reached on this machine."""
        with self._lock:
            self._start()
        return self._level

    def close(self) -> None:
        """End the worker; it starts anew at the next call."""
        if self._finalizer is not None:
            self._finalizer()
        self._process, self._finalizer, self._buffer = None, None, b""

    def _command(self) -> list[str]:
        return [sys.executable, "-s", "-P", "-B", str(_WORKER)]

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            if self._owner == os.getpid():
                return
            self._process, self._finalizer, self._buffer = None, None, b""
        self.close()
        folder = tempfile.gettempdir()
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=self._environment(),
            start_new_session=True,
            close_fds=True,
        )
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._process, self._owner)
        hello = self._read(30.0)
        if hello is None:
            self.close()
            raise SandboxUnavailableError("The sandbox's worker did not start.")
        reached = hello["level"]
        self._level = reached
        if self.isolation in LEVELS and LEVELS.index(self.isolation) < LEVELS.index(reached):
            self._level = self.isolation

    def _environment(self) -> dict[str, str]:
        return {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}

    def _read(self, seconds: float) -> dict[str, Any] | None:
        assert self._process is not None and self._process.stdout is not None
        fd = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                return None
            chunk = os.read(fd, 65536)
            if not chunk:
                return None
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def run(self, function: Function, arguments: Mapping[str, Any]) -> ExecutionResult:
        """Make one call in a fresh child; see :class:`Executor`."""
        return self.run_many(function, [arguments])[0]

    def run_many(
        self, function: Function, calls: Sequence[Mapping[str, Any]]
    ) -> list[ExecutionResult]:
        """Make several calls in one child; after a crash the rest goes on in a new one."""
        results: dict[int, ExecutionResult] = {}
        todo: list[tuple[int, dict[str, Any]]] = []
        try:
            if self.restricted:
                check_policy(function.code, self.allowed_modules)
        except PolicyError as error:
            return [ExecutionResult(False, error=f"PolicyError: {error}") for _ in calls]
        for i, arguments in enumerate(calls):
            try:
                todo.append((i, function.check_arguments(arguments)))
            except InvalidFunctionError as error:
                results[i] = ExecutionResult(False, error=f"TypeError: {error}")
        job = {
            "code": function.code,
            "name": function.name,
            "timeout": self.timeout,
            "memory_mb": self.memory_mb,
            "max_output": self.max_output,
            "modules": list(self.allowed_modules),
            "restricted": self.restricted,
        }
        with self._lock:
            for (i, _), result in zip(todo, self._submit(job, [a for _, a in todo]), strict=True):
                results[i] = result
        return [results[i] for i in range(len(calls))]

    def _submit(
        self, job: dict[str, Any], calls: list[dict[str, Any]]
    ) -> Iterable[ExecutionResult]:
        if not calls:
            return
        self._start()
        assert self._process is not None and self._process.stdin is not None
        warm = [] if getattr(self._process, "warm", False) else list(self._warm())
        self._process.warm = True  # type: ignore[attr-defined]
        request = {**job, "calls": calls, "level": self._level, "warm": warm}
        try:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()
        except OSError:
            self.close()
        grace = 30.0 if warm else 5.0
        for i in range(len(calls)):
            reply = None if self._process is None else self._read(self.timeout + grace)
            if reply is None:
                self.close()
                for _ in calls[i:]:
                    yield ExecutionResult(False, error="RuntimeError: the sandbox's worker stopped")
                return
            yield ExecutionResult(**reply)

    def _warm(self) -> Iterable[str]:
        return (_WARM[name] for name in self.allowed_modules if name in _WARM)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class DockerExecutor(SandboxExecutor):
    """The same worker inside a container without network and with a read-only file system.

    Parameters
    ----------
    image : str
        An image with Python 3.11 or newer.
    docker : str, default "docker"
        The command; ``"podman"`` works alike.
    **settings
        As for :class:`SandboxExecutor`.
    """

    def __init__(
        self, image: str = "python:3.11-slim", docker: str = "docker", **settings: Any
    ) -> None:
        self.image, self.docker = image, docker
        super().__init__(**settings)

    def __getstate__(self) -> dict[str, Any]:
        return {"image": self.image, "docker": self.docker, **super().__getstate__()}

    def _command(self) -> list[str]:
        source = _WORKER.read_text(encoding="utf-8")
        options = "run --interactive --rm --network=none --read-only --pids-limit=32 "
        options += f"--memory={self.memory_mb + 256}m "
        options += "--cap-drop=ALL --security-opt=no-new-privileges"
        return [self.docker, *options.split(), self.image, "python", "-s", "-B", "-c", source]

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "PATH": os.environ.get("PATH", "")}

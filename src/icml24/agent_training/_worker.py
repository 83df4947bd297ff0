"""The sandbox's worker: a fork server that runs untrusted functions, one child for each job.

This file is run as a program of its own by :class:`icml24.agent_training.SandboxExecutor`, also
inside a container, so it imports the standard library alone. One request is one JSON line on
standard input; the answers are JSON lines on standard output, one for each call.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import io
import json
import math
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

LEVELS = ("ast", "rlimit", "namespaces", "seccomp")
EPERM = 1
# System calls that pure computation needs. Everything else (open, socket, fork, exec, kill, ptrace,
# prlimit, ...) fails with EPERM. Columns: x86-64, AArch64.
ALLOWED_CALLS = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "set_robust_list": (273, 99),
    "getrandom": (318, 278),
    "membarrier": (324, 283),
    "rseq": (334, 293),
}
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# fmt: off
SAFE_BUILTINS = (
    "abs", "all", "any", "ascii", "bin", "bool", "bytearray", "bytes", "callable", "chr",
    "complex", "dict", "divmod", "enumerate", "filter", "float", "format", "frozenset", "hash",
    "hex", "int", "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min",
    "next", "object", "oct", "ord", "pow", "property", "range", "repr", "reversed", "round",
    "set", "slice", "sorted", "staticmethod", "str", "sum", "super", "tuple", "type", "zip",
    "__build_class__", "None", "True", "False", "Ellipsis", "NotImplemented",
)
# fmt: on


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def seccomp_program() -> bytes:
    """Return a BPF program that allows ``ALLOWED_CALLS`` and refuses the rest."""
    column, arch = ARCHITECTURES[platform.machine()]
    numbers = [pair[column] for pair in ALLOWED_CALLS.values()]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    n = len(numbers)
    program = [
        (load, 0, 0, 4),  # architecture
        (equal, 1, 0, arch),
        (give, 0, 0, 0x80000000),  # another architecture: kill
        (load, 0, 0, 0),  # number of the call
        (at_least, n, 0, 0x40000000),  # the x32 variants of x86-64: refuse
    ]
    program += [(equal, n - i, 0, number) for i, number in enumerate(numbers)]
    program += [(give, 0, 0, 0x00050000 | EPERM), (give, 0, 0, 0x7FFF0000)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _prctl(libc: Any, *arguments: Any) -> None:
    if libc.prctl(*arguments) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def install_seccomp(libc: Any, program: bytes) -> None:
    """Bind this process, for ever, to the filter."""
    buffer = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    zero = ctypes.c_ulong(0)
    _prctl(libc, 38, ctypes.c_ulong(1), zero, zero, zero)  # PR_SET_NO_NEW_PRIVS
    _prctl(libc, 22, ctypes.c_ulong(2), ctypes.c_char_p(head), zero, zero)  # PR_SET_SECCOMP


def unshare(libc: Any) -> None:
    """Leave the network, and where allowed the users, of the parent."""
    if libc.unshare(0x10000000 | 0x40000000 | 0x08000000) != 0:  # user, network, ipc
        raise OSError(ctypes.get_errno(), "unshare")


def set_limits(memory: int, seconds: float) -> None:
    """Bound memory, processor time, files, processes and core dumps."""
    cpu = math.ceil(seconds) + 1
    limits = {
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 16,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: memory,
    }
    if hasattr(resource, "RLIMIT_NPROC"):
        limits[resource.RLIMIT_NPROC] = 0
    for name, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # macOS refuses RLIMIT_AS
            resource.setrlimit(name, (value, value))


def confine(level: str, memory: int, seconds: float) -> None:
    """Apply a level of isolation to this process."""
    rank = LEVELS.index(level)
    libc = _libc() if rank >= 2 else None
    program = seccomp_program() if rank >= 3 else b""
    if rank == 2:
        unshare(libc)
    if rank >= 1:
        set_limits(memory, seconds)
    if rank >= 3:
        install_seccomp(libc, program)


def probe() -> str:
    """Return the best level that works here, tried out in a child."""
    for level in reversed(LEVELS[1:]):
        pid = os.fork()
        if pid == 0:
            try:
                confine(level, 1 << 30, 1)
                if level == "seccomp":
                    try:
                        socket.socket()
                    except PermissionError:
                        os._exit(0)
                    os._exit(1)
                os._exit(0)
            except BaseException:
                os._exit(1)
        if os.waitpid(pid, 0)[1] == 0:
            return level
    return "ast"


def _safe_builtins(modules: list[str], printed: io.StringIO) -> dict[str, Any]:
    scope = {name: getattr(builtins, name) for name in SAFE_BUILTINS}
    scope |= {
        name: value
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }

    def guarded_import(name: str, *rest: Any) -> Any:
        if name.split(".")[0] not in modules:
            raise ImportError(f"{name} is not among the allowed modules")
        return builtins.__import__(name, *rest)

    scope["__import__"] = guarded_import
    scope["print"] = _printer(printed)
    return scope


def _printer(printed: io.StringIO) -> Any:
    def write(*values: Any, sep: str = " ", end: str = "\n", **_: Any) -> None:
        if printed.tell() < 2000:
            text = (" " if sep is None else sep).join(map(str, values))
            printed.write((text + ("\n" if end is None else end))[:2000])

    return write


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:
        text = "?"
    return f"{type(error).__name__}: {text}"[:500]


def run_calls(job: dict[str, Any], write: Any) -> None:
    """Define the function and make its calls; ``write`` gets one line for each."""
    printed = io.StringIO()
    if job["restricted"]:
        scope: dict[str, Any] = {"__builtins__": _safe_builtins(job["modules"], printed)}
    else:
        scope = {"__builtins__": {**vars(builtins), "print": _printer(printed)}}
    scope["__name__"] = "tool"
    function, failure = None, ""
    try:
        exec(compile(job["code"], "<function>", "exec"), scope)
        function = scope[job["name"]]
    except BaseException as error:
        failure = _describe(error)
    for arguments in job["calls"]:
        printed.seek(0)
        printed.truncate()
        start = time.perf_counter()
        reply: dict[str, Any] = {"ok": False, "value": None, "error": failure}
        try:
            if function is not None:
                text = json.dumps(function(**arguments))
                if len(text) > job["max_output"]:
                    raise ValueError(f"the result is longer than {job['max_output']} characters")
                reply = {"ok": True, "value": json.loads(text), "error": ""}
        except BaseException as error:
            reply["error"] = _describe(error)
        reply["seconds"] = time.perf_counter() - start
        reply["output"] = printed.getvalue()[:2000]
        write((json.dumps(reply) + "\n").encode())


def _child(job: dict[str, Any], pipe: int) -> None:
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.dup2(pipe, 3)
        os.closerange(4, 1024)
        if sys.platform == "linux":
            _prctl(_libc(), 1, ctypes.c_ulong(signal.SIGKILL), *[ctypes.c_ulong(0)] * 3)
        confine(job["level"], job["memory_mb"] << 20, job["timeout"] * len(job["calls"]))

        def write(data: bytes) -> None:
            while data:
                data = data[os.write(3, data) :]

        run_calls(job, write)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(3, (json.dumps({"fatal": _describe(error)}) + "\n").encode())
    finally:
        os._exit(0)


def _failed(error: str, seconds: float) -> dict[str, Any]:
    return {"ok": False, "value": None, "error": error, "seconds": seconds, "output": ""}


def run_job(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run calls in one child until it fails; the last reply may be the failure."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _child(job, write_end)
    os.close(write_end)
    replies: list[dict[str, Any]] = []
    buffer, start, failure = b"", time.monotonic(), ""
    largest = job["max_output"] * 2 + 20_000
    while len(replies) < len(job["calls"]):
        left = start + job["timeout"] - time.monotonic()
        if left <= 0 or not select.select([read_end], [], [], left)[0]:
            failure = f"TimeoutError: no result within {job['timeout']:g} s"
            break
        chunk = os.read(read_end, 65536)
        if not chunk:
            failure = "ended"
            break
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            try:
                reply = json.loads(line)
                if "fatal" in reply:
                    failure = reply["fatal"]
                    break
                keep = {k: reply[k] for k in ("ok", "value", "error", "seconds", "output")}
                replies.append(keep)
                start = time.monotonic()
            except (ValueError, TypeError, KeyError, RecursionError):
                failure = "ValueError: the function wrote into the result channel"
                break
        if failure or len(buffer) > largest:
            failure = failure or "ValueError: the result is too long"
            break
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    os.close(read_end)
    status = os.waitpid(pid, 0)[1]
    if failure == "ended":
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        name = signal.Signals(number).name if number else ""
        failure = f"RuntimeError: the process ended {'by ' + name if name else 'without a result'}"
    replies = replies[: len(job["calls"])]
    if failure and len(replies) < len(job["calls"]):
        replies.append(_failed(failure, time.monotonic() - start))
    return replies


def main() -> None:
    """Serve requests until standard input closes."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    level = probe()
    os.write(answers, (json.dumps({"level": level}) + "\n").encode())
    for line in requests:
        job = json.loads(line)
        for name in job["modules"]:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        for statement in job.get("warm", ()):
            exec(statement, {})
        calls = job["calls"]
        while calls:
            replies = run_job({**job, "calls": calls})
            calls = calls[len(replies) :]
            for reply in replies:
                os.write(answers, (json.dumps(reply) + "\n").encode())


if __name__ == "__main__":
    main()

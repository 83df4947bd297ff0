"""Attacks on the sandbox, all bounded: what model-written code could try, and what comes of it."""

from __future__ import annotations

import pandas as pd

from icml24.agent_training.execution import SandboxExecutor
from icml24.agent_training.functions import Function

__all__ = ["ATTACKS", "run_attacks"]

_BODIES = {
    "endless loop": "while True: pass",
    "huge power": "return 9**9**9",
    "10 billion items": "return len([0] * 10**10)",
    "endless recursion": "def g(): return g()\nreturn g()",
    "10 MB answer": 'return "x" * 10**7',
    "leave the process": "import os; os._exit(0)",
    "read a file": "return open('/etc/passwd').read()",
    "write a file": "open('trace', 'w'); return 1",
    "start a process": "import os; return os.posix_spawn('/bin/sh', ['sh'], {})",
    "fork": "import os; return os.fork()",
    "open a socket": "import socket; return str(socket.socket())",
    "kill the parent": "import os; return os.kill(os.getppid(), 9)",
    "read address zero": "import ctypes; return ctypes.string_at(0)",
}


def _function(body: str) -> Function:
    lines = "\n".join("    " + line for line in body.splitlines())
    schema = {"type": "object", "properties": {}}
    return Function("attack", "An attack.", schema, f"def attack():\n{lines}\n")


#: Functions that misbehave, by what they try.
ATTACKS: dict[str, Function] = {name: _function(body) for name, body in _BODIES.items()}


def run_attacks(executor: SandboxExecutor) -> pd.DataFrame:
    """Run every attack, and an honest call after each.

    Parameters
    ----------
    executor : SandboxExecutor
        With ``restricted=False`` the operating system alone has to stop them.

    Returns
    -------
    pandas.DataFrame
        Index: the attack. ``stopped``: no value came out; ``by``: the kind of error;
        ``next call right``: an honest call afterwards gave the right value.
    """
    honest = _function("return 6 * 7")
    rows = {}
    for name, function in ATTACKS.items():
        result = executor.run(function, {})
        rows[name] = {
            "stopped": not result.ok,
            "by": result.error.split(":")[0],
            "next call right": executor.run(honest, {}).value == 42,
        }
    return pd.DataFrame.from_dict(rows, orient="index")

"""The sandbox: every attack of the specification ends in an error, in time, parent unharmed."""

import os
import pickle
import platform
import socket
import stat
import struct
import sys
import time
from pathlib import Path

import pytest

from icml24.agent_training import (
    DockerExecutor,
    ExecutionResult,
    InProcessExecutor,
    PolicyError,
    SandboxExecutor,
    SandboxUnavailableError,
    execution,
)
from icml24.agent_training.execution import DEFAULT_MODULES, LEVELS, check_policy

from .conftest import make

TIMEOUT = 1.0
GOOD = make("good", "def good(x):\n    import math\n    return math.pi * x", x="number")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def body(source, name="f", **types):
    lines = "\n".join("    " + line for line in source.splitlines())
    return make(name, f"def {name}({', '.join(types)}):\n{lines}", **types)


@pytest.fixture(scope="module")
def strict():
    with SandboxExecutor(timeout=TIMEOUT, memory_mb=256) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def bare():
    """No policy and all builtins: the operating system alone is the boundary."""
    with SandboxExecutor(timeout=TIMEOUT, memory_mb=256, restricted=False) as sandbox:
        yield sandbox


def check(sandbox, function, arguments=None):
    start = time.monotonic()
    result = sandbox.run(function, arguments or {})
    assert time.monotonic() - start < TIMEOUT + 1.5  # .5 s, and patience for a loaded machine
    after = sandbox.run(GOOD, {"x": 2})
    assert after.ok and after.value == pytest.approx(6.283185307)
    return result


RESOURCES = {
    "endless loop": "while True:\n    pass",
    "huge power": "return 9**9**9",
    "catastrophic regex": 'import re\nreturn bool(re.match("(a+)+$", "a" * 40 + "b"))',
    "huge list": "return len([0] * 10**10)",
    "doubling string": 's = "x"\nwhile True:\n    s += s',
    "recursion": "def g():\n    return g()\nreturn g()",
    "10 MB result": 'return "x" * 10**7',
    "not JSON": "return {1, 2}",
    "an object": "return object()",
    "system exit": "raise SystemExit",
}


@pytest.mark.parametrize("attack", RESOURCES)
def test_resource_attacks_end_in_an_error(strict, bare, attack):
    for sandbox in (strict, bare):
        result = check(sandbox, body(RESOURCES[attack]))
        assert not result.ok and result.error and result.value is None


def test_a_top_level_loop_and_a_missing_def_are_errors(strict):
    loop = make("f", "while True:\n    pass\ndef f():\n    return 1")
    assert "TimeoutError" in check(strict, loop).error
    assert not check(strict, make("f", "def g():\n    return 1")).ok
    assert not check(strict, make("f", "def f(:")).ok


def test_a_print_flood_is_cut_and_harmless(strict):
    result = check(strict, body("for i in range(20000):\n    print('x' * 100)\nreturn 1"))
    assert result.ok and result.value == 1 and len(result.output) <= 2000


SYSTEM = {
    "exit": "import os\nos._exit(0)",
    "read a file": "return open('/etc/passwd').read()",
    "list a folder": "import os\nreturn os.listdir('/')",
    "parent environment": "import os\nreturn open(f'/proc/{os.getppid()}/environ').read()",
    "fork": "import os\nreturn os.fork()",
    "kill the parent": "import os\nreturn os.kill(os.getppid(), 9)",
    "raise the limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (999, 999))\nreturn 1"
    ),
    "null pointer": "import ctypes\nreturn ctypes.string_at(0)",
    "subprocess": "import subprocess\nreturn subprocess.run(['id']).returncode",
    "result channel": "import os\nos.write(3, b'{\"ok\": true}\\n')\nos._exit(0)",
}


@pytest.mark.parametrize("attack", SYSTEM)
def test_the_operating_system_stops_what_the_policy_would_let_through(bare, attack):
    if bare.level != "seccomp":
        pytest.skip(f"this machine reaches the level {bare.level} only")
    result = check(bare, body(SYSTEM[attack]))
    assert not result.ok, result


def test_shell_commands_and_writes_leave_no_trace(bare, tmp_path):
    if bare.level != "seccomp":
        pytest.skip(f"this machine reaches the level {bare.level} only")
    target = tmp_path / "trace"
    check(bare, body(f"import os\nreturn os.system('touch {target}')"))
    assert not check(bare, body(f"open({str(target)!r}, 'w')\nreturn 1")).ok
    assert not target.exists()


def test_no_socket_reaches_a_listening_port(bare):
    if bare.level not in ("seccomp", "namespaces"):
        pytest.skip(f"this machine reaches the level {bare.level} only")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        result = check(
            bare, body(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)")
        )
        assert not result.ok
        with pytest.raises(TimeoutError):
            listener.accept()


def test_no_variable_of_the_parent_is_visible(bare, monkeypatch):
    monkeypatch.setenv("VERY_SECRET", "hunter2")
    with SandboxExecutor(restricted=False) as fresh:
        result = fresh.run(body("import os\nreturn dict(os.environ)"), {})
    assert result.ok and "hunter2" not in str(result.value) and "PATH" not in result.value


def test_output_on_stdout_cannot_fake_an_answer(bare):
    fake = 'import os\nos.write(1, b\'{"ok": true, "value": 666}\\n\')\nreturn 1'
    assert check(bare, body(fake)).value == 1


POLICY = {
    "import os": "import os\nreturn 1",
    "import from": "from subprocess import run\nreturn 1",
    "class walk": "return ().__class__.__base__.__subclasses__()",
    "format walk": "return '{0.__class__}'.format(1)",
    "module walk": "import statistics\nreturn statistics.sys.modules",
    "frame walk": "g = (i for i in [1])\nreturn g.gi_frame.f_back.f_globals",
    "traceback walk": "try:\n    1 / 0\nexcept Exception as e:\n    return str(e.__traceback__)",
    "getattr": "return getattr(1, 'real')",
    "open": "return open('x')",
    "import function": "return __import__('os').getcwd()",
    "eval": "return eval('1')",
}


@pytest.mark.parametrize("attack", POLICY)
def test_the_policy_refuses_with_a_line_number(strict, attack):
    function = body(POLICY[attack])
    with pytest.raises(PolicyError, match="Line"):
        check_policy(function.code)
    assert "PolicyError" in check(strict, function).error


def test_the_policy_lets_ordinary_code_through():
    check_policy(body("import math\nfrom collections import Counter\nreturn 'a{b'.upper()").code)


def test_a_patched_module_does_not_survive_the_call(strict):
    patch = "import math\nmath.pi = 3\nreturn math.pi"
    assert check(strict, body(patch)).value == 3  # check() calls GOOD, which needs the true pi


def test_hostile_data_cannot_get_out_through_sympify(tmp_path):
    pytest.importorskip("sympy")
    target = tmp_path / "owned"
    code = "import sympy\nreturn str(sympy.sympify(text))"
    hostile = f"__import__('os').system('touch {target}')"
    modules = (*DEFAULT_MODULES, "sympy")
    with SandboxExecutor(timeout=3, memory_mb=1024, allowed_modules=modules) as sandbox:
        if sandbox.level != "seccomp":
            pytest.skip(f"this machine reaches the level {sandbox.level} only")
        assert sandbox.run(body(code, text="string"), {"text": "2 + 3*x - x"}).value == "2*x + 2"
        sandbox.run(body(code, text="string"), {"text": hostile})
        assert not target.exists()
        # the same call without the sandbox does run the command: the attack is real
        InProcessExecutor(i_trust_this_code=True).run(body(code, text="string"), {"text": hostile})
        assert target.exists()


def test_each_function_runs_its_own_code(strict):
    functions = [body(f"return {k}", name=f"f{k}") for k in range(3)]
    assert [strict.run(f, {}).value for f in functions] == [0, 1, 2]


def test_run_many_keeps_the_order_and_survives_a_crash_in_the_middle(strict, bare):
    f = body("if x == 2:\n    while True:\n        pass\nreturn 10 * x", x="integer")
    results = strict.run_many(f, [{"x": 0}, {"x": "bad"}, {"x": 2}, {"x": 3}])
    assert [r.ok for r in results] == [True, False, False, True]
    assert [r.value for r in results] == [0, None, None, 30]
    assert "integer" in results[1].error and "TimeoutError" in results[2].error
    crash = body("import os\nif x == 1:\n    os._exit(3)\nreturn x", x="integer")
    assert [r.value for r in bare.run_many(crash, [{"x": k} for k in range(3)])] == [0, None, 2]
    assert strict.run_many(f, []) == []


@pytest.mark.parametrize("level", LEVELS[1:])
def test_levels_can_be_asked_for(level):
    try:
        sandbox = SandboxExecutor(timeout=TIMEOUT, isolation=level)
    except SandboxUnavailableError:
        pytest.skip(f"this machine does not reach {level}")
    with sandbox:
        assert sandbox.level == level
        assert sandbox.run(GOOD, {"x": 1}).ok
        assert not sandbox.run(body("while True:\n    pass"), {}).ok
        if level != "rlimit":
            probe = SandboxExecutor(isolation=level, restricted=False)
            code = "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)\nreturn 1"
            with probe:
                assert not probe.run(body(code), {}).ok


def test_linux_reaches_the_strictest_level(strict):
    from icml24.agent_training import _worker

    status = Path("/proc/self/status")
    if platform.machine() not in _worker.ARCHITECTURES or not status.is_file():
        pytest.skip("no seccomp filter for this system")
    if "Seccomp:" not in status.read_text():
        pytest.skip("this kernel has no seccomp")
    assert strict.level == "seccomp"


def test_required_isolation_raises_below_it(monkeypatch):
    monkeypatch.setattr(SandboxExecutor, "_read", lambda self, seconds: {"level": "rlimit"})
    with pytest.raises(SandboxUnavailableError, match="rlimit"):
        SandboxExecutor(isolation="required")
    with SandboxExecutor() as sandbox:
        assert sandbox.level == "rlimit"


def test_a_killed_worker_is_replaced(strict):
    strict.run(GOOD, {"x": 1})
    os.kill(strict._process.pid, 9)
    strict._process.wait()
    assert strict.run(GOOD, {"x": 1}).ok


def test_a_pickled_sandbox_starts_a_worker_of_its_own(strict):
    copy = pickle.loads(pickle.dumps(strict))
    with copy:
        assert copy.run(GOOD, {"x": 1}).ok and copy.timeout == strict.timeout


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="isolation"):
        SandboxExecutor(isolation="maximum")
    with pytest.raises(ValueError, match="timeout"):
        SandboxExecutor(timeout=0)
    with pytest.raises(ValueError, match="i_trust_this_code"):
        InProcessExecutor()


def test_in_process_results_equal_the_sandbox(strict, trusted):
    f = body("return {'a': [x, 1.5, None], 'b': 'é'}", x="integer")
    assert trusted.run(f, {"x": 2}).value == strict.run(f, {"x": 2}).value
    bad = body("return 1 / x", x="integer")
    assert trusted.run(bad, {"x": 0}).error == strict.run(bad, {"x": 0}).error
    assert trusted.run(bad, {}).error == strict.run(bad, {}).error
    assert not trusted.run(body("return {1}"), {}).ok
    assert isinstance(trusted.run_many(bad, [{"x": 1}])[0], ExecutionResult)


def test_docker_runs_the_same_worker_behind_a_closed_command_line(tmp_path, monkeypatch):
    log = tmp_path / "log"
    fake = tmp_path / "docker"
    fake.write_text(
        f'#!/bin/sh\necho "$@" > {log}\n'
        f'while [ "$1" != python ]; do shift; done\nshift\nexec {sys.executable} "$@"\n'
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    with DockerExecutor("img", docker=str(fake), timeout=TIMEOUT) as docker:
        assert docker.run(GOOD, {"x": 1}).ok
    line = log.read_text()
    for option in ("--network=none", "--read-only", "--cap-drop=ALL", "--pids-limit", " img "):
        assert option in line


def test_seccomp_program_allows_exactly_the_listed_calls():
    """Interpret the filter: every number outside the list must end at EPERM."""
    from icml24.agent_training import _worker

    if platform.machine() not in _worker.ARCHITECTURES:
        pytest.skip("no filter for this architecture")
    column, arch = _worker.ARCHITECTURES[platform.machine()]
    raw = _worker.seccomp_program()
    program = [struct.unpack("HBBI", raw[i : i + 8]) for i in range(0, len(raw), 8)]

    def verdict(number, architecture=arch):
        register, i = 0, 0
        while True:
            code, yes, no, k = program[i]
            if code == 0x06:
                return k
            if code == 0x20:
                register = {0: number, 4: architecture}[k]
                i += 1
            else:
                hit = register == k if code == 0x15 else register >= k
                i += 1 + (yes if hit else no)

    allowed = {pair[column] for pair in _worker.ALLOWED_CALLS.values()}
    for number in range(600):
        assert verdict(number) == (0x7FFF0000 if number in allowed else 0x00050001)
        assert verdict(number | 0x40000000) == 0x00050001
    assert verdict(0, architecture=1) == 0x80000000
    assert execution.LEVELS == _worker.LEVELS

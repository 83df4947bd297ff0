"""Helpers: scripted agents and proposers, and a scripted server of the OpenAI protocol."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from icml24.agent_training import (
    AddFunction,
    Call,
    Function,
    InProcessExecutor,
    Terminate,
    Trajectory,
    Usage,
)


def make(name, code, description="A function.", **types):
    """Write a function with JSON types of its arguments."""
    schema = {
        "type": "object",
        "properties": {argument: {"type": kind} for argument, kind in types.items()},
        "required": list(types),
    }
    return Function(name, description, schema, code)


class ScriptedAgent:
    """Solves a share of the tasks that the newest function, ``v0``, ``v1``, ..., decides."""

    def __init__(self, losses, usage=None):
        self.losses, self.seen, self.usage = losses, [], usage or Usage()

    def run(self, task, functions, *, rng=None):
        self.seen.append(functions)
        version = max((int(name[1:]) for name in functions), default=0)
        index = int(task.question.split()[-1])
        correct = index >= round(10 * self.losses[version])
        answer = task.answer if correct else None
        calls = tuple(Call(name, {}) for name in functions)
        messages = ({"role": "user", "content": task.question},)
        return Trajectory(task, messages, calls, answer, correct, "", self.usage)


class ScriptedProposer:
    """Adds ``v1``, ``v2``, ... one at each step; remembers what it was shown."""

    def __init__(self):
        self.usage, self.version, self.shown = Usage(), 0, []

    def propose(self, best, incumbent, history, failures, n_taken, rng, feedback=None):
        self.usage += Usage(1)
        if n_taken:
            return Terminate()
        self.version += 1
        self.shown.append((best, incumbent, list(history), list(failures)))
        name = f"v{self.version}"
        return AddFunction(make(name, f"def {name}():\n    return {self.version}"))


@pytest.fixture
def trusted():
    return InProcessExecutor(i_trust_this_code=True)


class Server:
    """Answers requests from a script: dicts are bodies, ints status codes, floats delays."""

    def __init__(self):
        self.script, self.requests, self.keys = [], [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append(json.loads(body))
                outer.keys.append(self.headers.get("Authorization"))
                reply = outer.script.pop(0) if outer.script else 500
                if callable(reply):
                    reply = reply(outer.requests[-1])
                if isinstance(reply, float):
                    time.sleep(reply)
                    reply = 500
                status, payload = 200, reply
                if isinstance(reply, int):
                    key = self.headers.get("Authorization") or ""
                    status, payload = reply, {"error": {"message": f"scripted, you sent {key}"}}
                data = (
                    payload.encode() if isinstance(payload, str) else json.dumps(payload).encode()
                )
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    if status == 429:
                        self.send_header("Retry-After", "0")
                    self.end_headers()
                    self.wfile.write(data)
                except (BrokenPipeError, ConnectionResetError):
                    pass

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def reply(content="", calls=(), prompt=10, completion=5):
    """Write an answer in the OpenAI format; calls are (name, arguments) pairs."""
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"c{i}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": a if isinstance(a, str) else json.dumps(a),
                },
            }
            for i, (name, a) in enumerate(calls)
        ]
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}

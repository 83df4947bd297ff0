"""Language models behind one protocol: remote, local, scripted, or replayed from a cassette."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

__all__ = [
    "CassetteChat",
    "CassetteMissError",
    "ChatError",
    "ChatModel",
    "ChatResult",
    "LlamaCppChat",
    "OpenAIChat",
    "ScriptedChat",
    "ToolCall",
    "TransformersChat",
    "Usage",
    "parse_tool_calls",
]

Message = dict[str, Any]


class ChatError(RuntimeError):
    """The model could not be reached or answered with an error; never shows a key."""


class CassetteMissError(ChatError):
    """A replayed conversation asked something that was never recorded."""


@dataclass(frozen=True)
class Usage:
    """What was spent: calls, tokens, and money if prices are known.

    Examples
    --------
    >>> Usage(1, 100, 20) + Usage(1, 50, 5, 0.01)
    Usage(calls=2, prompt_tokens=150, completion_tokens=25, cost=0.01)
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cost + other.cost,
        )

    def __sub__(self, other: Usage) -> Usage:
        return Usage(
            self.calls - other.calls,
            self.prompt_tokens - other.prompt_tokens,
            self.completion_tokens - other.completion_tokens,
            self.cost - other.cost,
        )


@dataclass(frozen=True)
class ToolCall:
    """A call that a model asks for; ``arguments`` is None when it was not a JSON object."""

    name: str
    arguments: dict[str, Any] | None
    raw: str = ""
    id: str = ""


@dataclass(frozen=True)
class ChatResult:
    """One answer of a model."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = field(default_factory=Usage)
    finish_reason: str = "stop"


class ChatModel(Protocol):
    """Anything that continues a conversation."""

    def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        response_schema: Mapping[str, Any] | None = None,
        temperature: float = 0.0,
        max_tokens: int = 512,
        seed: int | None = None,
    ) -> ChatResult:
        """Return the next message of the assistant.

        Parameters
        ----------
        messages : sequence of dict
            ``{"role": ..., "content": ...}``, oldest first.
        tools : sequence of dict, optional
            Tool definitions as of :meth:`FunctionSet.tools`.
        tool_choice : {"auto", "none", "required"}
        response_schema : dict, optional
            JSON Schema that the answer must follow, where the backend can enforce it.
        temperature : float, default 0
        max_tokens : int, default 512
        seed : int, optional
        """
        ...


def _tool_call(name: Any, arguments: Any, call_id: str = "") -> ToolCall:
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (json.JSONDecodeError, RecursionError):
            arguments = None
    return ToolCall(str(name), arguments if isinstance(arguments, dict) else None, raw, call_id)


def parse_tool_calls(content: str) -> tuple[ToolCall, ...]:
    """Find tool calls that a model wrote into its text instead of returning them.

    Small models often print ``{"name": ..., "arguments": {...}}`` in a Markdown block; every JSON
    object of that form is taken.

    Examples
    --------
    >>> parse_tool_calls('Sure: ```json {"name": "gcd", "arguments": {"a": 4}} ```')[0].arguments
    {'a': 4}
    """
    decoder, calls, position = json.JSONDecoder(), [], 0
    while (start := content.find("{", position)) >= 0:
        try:
            value, position = decoder.raw_decode(content, start)
        except (json.JSONDecodeError, RecursionError):
            position = start + 1
            continue
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            arguments = value.get("arguments", value.get("parameters"))
            if arguments is not None:
                calls.append(_tool_call(value["name"], arguments))
    return tuple(calls)


def _result(payload: Mapping[str, Any], prices: tuple[float, float]) -> ChatResult:
    """Read an answer in the OpenAI format."""
    try:
        choice = payload["choices"][0]
        message = choice["message"]
    except (KeyError, IndexError, TypeError):
        raise ChatError("The server's answer holds no choices[0].message.") from None
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    calls = tuple(
        _tool_call(
            call.get("function", {}).get("name"),
            call.get("function", {}).get("arguments"),
            call.get("id") or "",
        )
        for call in message.get("tool_calls") or ()
    )
    counts = payload.get("usage") or {}
    prompt, completion = counts.get("prompt_tokens") or 0, counts.get("completion_tokens") or 0
    cost = (prompt * prices[0] + completion * prices[1]) / 1e6
    usage = Usage(1, prompt, completion, cost)
    return ChatResult(content, calls, usage, choice.get("finish_reason") or "stop")


def _body(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str,
    response_schema: Mapping[str, Any] | None,
    temperature: float,
    max_tokens: int,
    seed: int | None,
) -> dict[str, Any]:
    """Write a request in the OpenAI format."""
    if not messages:
        raise ValueError("messages must hold at least one message.")
    body: dict[str, Any] = {
        "messages": list(messages),
        "temperature": temperature,
        "max_tokens": max_tokens,
    }
    if tools:
        body |= {"tools": list(tools), "tool_choice": tool_choice}
    if response_schema is not None:
        schema = {"name": "answer", "schema": response_schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if seed is not None:
        body["seed"] = seed
    return body


class OpenAIChat:
    """Any server that speaks the OpenAI chat protocol: vendors, vLLM, Ollama, llama.cpp, ...

    Parameters
    ----------
    model : str
        Model name that the server knows.
    base_url : str
        Up to and including the version, for example ``"http://localhost:8000/v1"``.
    api_key_env : str, default "OPENAI_API_KEY"
        *Name* of the environment variable with the key. The key is read at each call and never
        stored, logged or shown.
    timeout : float, default 60
        Seconds for one request.
    max_retries : int, default 3
        Tries after the first on time-out, 408, 409, 429 and 5xx.
    prices : (float, float), optional
        Price of a million prompt and completion tokens, for the cost account.
    backoff : float, default 0.5
        Seconds before the first retry, doubled each time; a ``Retry-After`` header takes precedence
        (up to 30 s).

    Raises
    ------
    ChatError
        If the server cannot be reached or keeps answering with an error.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key_env: str = "OPENAI_API_KEY",
        timeout: float = 60.0,
        max_retries: int = 3,
        prices: tuple[float, float] = (0.0, 0.0),
        backoff: float = 0.5,
    ) -> None:
        scheme = urllib.parse.urlsplit(base_url).scheme
        if scheme not in ("http", "https"):
            raise ValueError(f"base_url must start with http:// or https://, got {base_url!r}.")
        self.model, self.base_url, self.api_key_env = model, base_url.rstrip("/"), api_key_env
        self.timeout, self.max_retries = timeout, max_retries
        self.prices, self.backoff = prices, backoff

    def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        response_schema: Mapping[str, Any] | None = None,
        temperature: float = 0.0,
        max_tokens: int = 512,
        seed: int | None = None,
    ) -> ChatResult:
        """Return the next message of the assistant; see :class:`ChatModel`."""
        body = _body(messages, tools, tool_choice, response_schema, temperature, max_tokens, seed)
        body["model"] = self.model
        error = "no answer"
        for attempt in range(self.max_retries + 1):
            try:
                return _result(self._post(json.dumps(body).encode()), self.prices)
            except urllib.error.HTTPError as caught:
                error = f"HTTP {caught.code}: {_provider_message(caught)}"
                if caught.code not in (408, 409, 429) and caught.code < 500:
                    break
                wait = _retry_after(caught.headers.get("Retry-After"))
            except (urllib.error.URLError, TimeoutError, ConnectionError) as caught:
                error, wait = str(getattr(caught, "reason", caught)), None
            except json.JSONDecodeError:
                error, wait = "the answer is not JSON", None
            if attempt < self.max_retries:
                time.sleep(self.backoff * 2**attempt if wait is None else wait)
        raise ChatError(self._redact(f"{self.base_url} failed: {error}"))

    def _post(self, body: bytes) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.api_key_env):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.base_url}/chat/completions", body, headers)
        handlers: list[Any] = [_NoRedirect()]  # a redirect would carry the key to another host
        if urllib.parse.urlsplit(self.base_url).hostname in ("localhost", "127.0.0.1", "::1"):
            handlers.append(urllib.request.ProxyHandler({}))
        with urllib.request.build_opener(*handlers).open(request, timeout=self.timeout) as answer:
            return json.loads(answer.read())

    def _redact(self, text: str) -> str:
        key = os.environ.get(self.api_key_env)
        return text.replace(key, "***") if key else text


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _provider_message(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(4096).decode(errors="replace")
    except OSError:
        return str(error.reason)
    finally:
        error.close()
    try:
        message = json.loads(text)["error"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (json.JSONDecodeError, KeyError, TypeError):
        return text[:200] or str(error.reason)


def _retry_after(value: str | None) -> float | None:
    try:
        return min(float(value), 30.0) if value is not None else None
    except ValueError:
        return None


class LlamaCppChat:
    """A GGUF model in this process through llama.cpp (package ``xllamacpp``).

    Parameters
    ----------
    gguf : path-like
        Model file.
    n_ctx : int, default 4096
        Context length in tokens.
    n_threads : int, default 1
        One thread is the safe choice on a busy machine: llama.cpp's threads wait in busy loops.
    """

    def __init__(self, gguf: str | os.PathLike[str], n_ctx: int = 4096, n_threads: int = 1) -> None:
        try:
            import xllamacpp
        except ImportError as error:
            raise ImportError("LlamaCppChat needs: pip install xllamacpp") from error
        path = Path(gguf)
        if not path.is_file():
            raise FileNotFoundError(f"There is no model file {path}.")
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = n_ctx
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = n_threads
        parameters.cpuparams_batch.n_threads = n_threads
        self.model = path.stem
        self._server = xllamacpp.Server(parameters)

    def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        response_schema: Mapping[str, Any] | None = None,
        temperature: float = 0.0,
        max_tokens: int = 512,
        seed: int | None = None,
    ) -> ChatResult:
        """Return the next message of the assistant; see :class:`ChatModel`."""
        body = _body(messages, tools, tool_choice, response_schema, temperature, max_tokens, seed)
        answer = self._server.handle_chat_completions(body)
        payload = json.loads(answer) if isinstance(answer, str | bytes) else answer
        if "error" in payload:
            raise ChatError(str(payload["error"].get("message", payload["error"])))
        return _result(payload, (0.0, 0.0))


class TransformersChat:
    """A Hugging Face causal model with its tokenizer's chat template.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase
        Must have a chat template.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("The tokenizer has no chat template; set tokenizer.chat_template.")
        self.transformer, self.tokenizer = model, tokenizer
        self.model = str(getattr(model.config, "name_or_path", "") or type(model).__name__)

    def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        response_schema: Mapping[str, Any] | None = None,
        temperature: float = 0.0,
        max_tokens: int = 512,
        seed: int | None = None,
    ) -> ChatResult:
        """Return the next message; ``response_schema`` is not enforced by this backend."""
        import torch

        inputs = self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools and tool_choice != "none" else None,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        ).to(self.transformer.device)
        sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            sampling["temperature"] = temperature
        with torch.no_grad(), torch.random.fork_rng():
            if seed is not None:
                torch.manual_seed(seed)
            output = self.transformer.generate(**inputs, max_new_tokens=max_tokens, **sampling)
        n_prompt = inputs["input_ids"].shape[1]
        new = output[0, n_prompt:]
        content = self.tokenizer.decode(new, skip_special_tokens=True)
        reason = "length" if len(new) >= max_tokens else "stop"
        return ChatResult(content, (), Usage(1, n_prompt, len(new)), reason)


Reply = str | ChatResult | Exception | Callable[[Sequence[Message]], "str | ChatResult"]


class ScriptedChat:
    """A stand-in that says what it was told to say: for tests and demonstrations.

    Parameters
    ----------
    replies : iterable
        Each a string, a :class:`ChatResult`, an exception to raise, or a function of the messages.
        A single function answers for ever.

    Examples
    --------
    >>> chat = ScriptedChat(["Hello."])
    >>> chat.complete([{"role": "user", "content": "Hi"}]).content
    'Hello.'
    >>> len(chat.requests)
    1
    """

    model = "scripted"

    def __init__(self, replies: Iterable[Reply] | Callable[[Sequence[Message]], Any]) -> None:
        self._endless = replies if callable(replies) else None
        self._replies = iter(()) if callable(replies) else iter(replies)
        self.requests: list[dict[str, Any]] = []

    def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        response_schema: Mapping[str, Any] | None = None,
        temperature: float = 0.0,
        max_tokens: int = 512,
        seed: int | None = None,
    ) -> ChatResult:
        """Return the next scripted reply; see :class:`ChatModel`."""
        self.requests.append({"messages": json.loads(json.dumps(list(messages))), "tools": tools})
        try:
            reply = self._endless or next(self._replies)
        except StopIteration:
            raise ChatError("The script has no reply left.") from None
        if isinstance(reply, Exception):
            raise reply
        if callable(reply):
            reply = reply(messages)
        if isinstance(reply, ChatResult):
            return reply if reply.usage.calls else _with_usage(reply, Usage(1))
        return ChatResult(reply, (), Usage(1))


def _with_usage(result: ChatResult, usage: Usage) -> ChatResult:
    return ChatResult(result.content, result.tool_calls, usage, result.finish_reason)


class CassetteChat:
    """Record a real model once, replay it for ever.

    A cassette is a file of JSON lines, addressed by content: the key is a digest of the request,
    independent of the order of dictionary entries. It holds what the model said and nothing of the
    connection: no address, no header, no key.

    Parameters
    ----------
    inner : ChatModel or None
        The model to record; None in replay.
    path : path-like
        The cassette.
    mode : {"replay", "record", "auto"}
        ``replay`` never calls the model; ``record`` always does; ``auto`` does on a miss.

    Raises
    ------
    CassetteMissError
        In replay, if the request was never recorded: the message names the nearest one.
    """

    def __init__(
        self,
        inner: ChatModel | None,
        path: str | os.PathLike[str],
        mode: Literal["replay", "record", "auto"] = "replay",
    ) -> None:
        if mode not in ("replay", "record", "auto"):
            raise ValueError(f"mode must be 'replay', 'record' or 'auto', got {mode!r}.")
        if inner is None and mode != "replay":
            raise ValueError(f"mode {mode!r} needs a model to record.")
        self.inner, self.path, self.mode = inner, Path(path), mode
        self.model = str(getattr(inner, "model", ""))
        self._entries: dict[str, dict[str, Any]] = {}
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._entries[entry["key"]] = entry
                self.model = self.model or entry.get("model", "")
        elif mode == "replay":
            raise FileNotFoundError(f"There is no cassette {self.path}; record one first.")

    def __len__(self) -> int:
        return len(self._entries)

    @staticmethod
    def key(request: Mapping[str, Any]) -> str:
        """Digest of a request."""
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:24]

    def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        response_schema: Mapping[str, Any] | None = None,
        temperature: float = 0.0,
        max_tokens: int = 512,
        seed: int | None = None,
    ) -> ChatResult:
        """Return the recorded answer, or record one; see :class:`ChatModel`."""
        request = _body(
            messages, tools, tool_choice, response_schema, temperature, max_tokens, seed
        )
        key = self.key(request)
        entry = self._entries.get(key)
        hint = re.sub(r"\s+", " ", str(messages[-1].get("content", "")))[-160:]
        if self.mode != "record" and entry is not None:
            return _from_entry(entry)
        if self.mode == "replay" or self.inner is None:
            raise CassetteMissError(self._miss(key, hint))
        result = self.inner.complete(
            messages,
            tools=tools,
            tool_choice=tool_choice,
            response_schema=response_schema,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
        )
        entry = {"key": key, "model": self.model, "hint": hint, "result": asdict(result)}
        self._entries[key] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry, sort_keys=True) + "\n")
        return result

    def _miss(self, key: str, hint: str) -> str:
        def likeness(entry: Mapping[str, Any]) -> float:
            return difflib.SequenceMatcher(None, entry["hint"], hint, autojunk=False).ratio()

        nearest = max(self._entries.values(), key=likeness, default=None)
        where = "The cassette is empty."
        if nearest is not None:
            where = f"The nearest is {nearest['key']} ({nearest['hint'][-60:]!r})."
        return f"{self.path.name} holds no answer for {key}: a prompt changed, re-record. {where}"


def _from_entry(entry: Mapping[str, Any]) -> ChatResult:
    stored = entry["result"]
    return ChatResult(
        stored["content"],
        tuple(ToolCall(**call) for call in stored["tool_calls"]),
        Usage(**stored["usage"]),
        stored["finish_reason"],
    )

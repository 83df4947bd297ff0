"""Variance, penalty, layer weights and head importance against hand-computed cases."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from icml24.backdoor_defense.attention import (
    attention_norm_penalty,
    cls_attention_variance,
    head_gradient_scores,
    layer_weights,
    row_variance,
)
from icml24.backdoor_defense.heads import attention_layers, prune_heads
from icml24.backdoor_defense.models import batches, classifier
from icml24.backdoor_defense.toy import made_up_reviews, tiny_encoder, word_tokenizer

DATA = made_up_reviews(20)


def rows(values):
    return torch.tensor(values, dtype=torch.float64)[None, None]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12))
def test_variance_of_a_row_is_the_unbiased_variance(logits):
    a = torch.tensor(logits, dtype=torch.float64).softmax(0)
    assert torch.isclose(row_variance(a[None, None])[0, 0], a.var(), atol=1e-12)
    padded = torch.cat([a, torch.zeros(20 - len(a), dtype=torch.float64)])
    found = row_variance(a[None, None], padded_to=20)[0, 0]
    assert torch.isclose(found, padded.var(), atol=1e-12)


def test_variance_of_uniform_and_one_hot_rows():
    assert row_variance(rows([0.2] * 5)).abs().max() < 1e-15
    assert torch.isclose(row_variance(rows([0.0, 1.0, 0, 0, 0]))[0, 0], torch.tensor(0.2).double())


def test_padding_does_not_count():
    mask = torch.tensor([[1, 1, 0, 0]])
    assert torch.equal(row_variance(rows([0.5, 0.5, 0, 0]), mask), torch.zeros(1, 1).double())
    with pytest.raises(ValueError, match="does not fit into 3"):
        row_variance(rows([0.25] * 4), padded_to=3)
    with pytest.raises(ValueError, match="at least two tokens"):
        row_variance(rows([1.0, 0.0]), torch.tensor([[1, 0]]))


def test_model_variance_is_that_of_its_rows_and_ignores_batching():
    model, tokenizer = tiny_encoder(), word_tokenizer()
    one, many = (cls_attention_variance(model, batches(DATA, tokenizer, n)) for n in (1, 20))
    assert one.shape == (2, 4) and torch.allclose(one, many, atol=1e-9)
    ids = tokenizer(DATA[0][0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        a = model(input_ids=ids, output_attentions=True).attentions
    alone = cls_attention_variance(model, batches(DATA[:1], tokenizer))
    for layer in range(2):
        assert torch.allclose(alone[layer].float(), a[layer][0, :, 0].var(1), atol=1e-8)


def test_variance_of_pruned_heads_is_missing():
    model = prune_heads(tiny_encoder(), {0: [1], 1: [3]})
    found = cls_attention_variance(model.train(), batches(DATA, word_tokenizer()))
    assert found.isnan().nonzero().tolist() == [[0, 1], [1, 3]] and model.training


def test_variance_needs_attention_and_texts():
    model = tiny_encoder()
    with pytest.raises(ValueError, match="at least one batch"):
        cls_attention_variance(model, [])
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="eager"):
        cls_attention_variance(model, batches(DATA, word_tokenizer()))


def cls_rows(*pairs):
    """Attention of one layer and one head whose first row is given for each text."""
    a = torch.tensor(pairs, dtype=torch.float64)
    return a[:, None, None].expand(len(pairs), 1, a.shape[1], a.shape[1])


def test_penalty_by_hand():
    a = cls_rows((1.0, 0.0), (0.5, 0.5))
    assert math.isclose(attention_norm_penalty([a], [1.0]).item(), math.sqrt(1.5))
    mean = attention_norm_penalty([a], [1.0], "mean").item()
    assert math.isclose(mean, (1 + math.sqrt(0.5)) / 2)
    two = attention_norm_penalty([a, a], [2.0, 0.5])
    assert math.isclose(two.item(), 2.5 * math.sqrt(1.5))


def test_penalty_reads_the_first_row_and_sums_over_heads():
    a = torch.eye(3).expand(2, 4, 3, 3).clone()
    a[:, :, 0] = 1 / 3
    assert math.isclose(
        attention_norm_penalty([a], [1.0]).item(), 4 * math.sqrt(2 / 3), rel_tol=1e-6
    )


def test_penalty_is_least_and_flat_at_uniform_rows():
    z = torch.zeros(3, 1, 1, 5, dtype=torch.float64, requires_grad=True)
    attention_norm_penalty([z.softmax(-1)], [1.0]).backward()
    assert z.grad.abs().max() < 1e-12
    least = attention_norm_penalty([z.softmax(-1)], [1.0]).item()
    other = torch.randn(z.shape, generator=torch.Generator().manual_seed(0)).double()
    assert math.isclose(least, math.sqrt(3 / 5))
    assert attention_norm_penalty([other.softmax(-1)], [1.0]) > least


def test_conversion_of_the_two_reductions():
    a = cls_rows(*[(0.7, 0.3)] * 16)
    paper, mean = (attention_norm_penalty([a], [1.0], r) for r in ("paper", "mean"))
    assert math.isclose(paper.item(), math.sqrt(16) * mean.item())


def test_penalty_refuses():
    with pytest.raises(ValueError, match="eager"):
        attention_norm_penalty([], [])
    with pytest.raises(ValueError, match="1 layers and 2"):
        attention_norm_penalty([cls_rows((1.0, 0.0))], [1, 1])
    with pytest.raises(ValueError, match="reduction"):
        attention_norm_penalty([cls_rows((1.0, 0.0))], [1], "sum")


def test_layer_weights_by_hand():
    assert torch.allclose(layer_weights(torch.tensor([1.0, 2.0, 4.0])), torch.tensor([1, 1 / 3, 0]))
    table = torch.tensor([[1.0, torch.nan], [3.0, 1.0], [4.0, 4.0]])
    assert torch.allclose(layer_weights(table), torch.tensor([1, 1 / 3, 0]))
    assert torch.equal(layer_weights(torch.full((4,), 0.3)), torch.ones(4))
    assert torch.equal(layer_weights(torch.tensor([0.0, 1.0])), torch.tensor([1.0, 0.0]))


def test_gradient_scores_against_finite_differences():
    model, tokenizer = classifier(tiny_encoder()).double(), word_tokenizer()
    data, eps = batches(DATA, tokenizer, 20), 1e-5
    found = head_gradient_scores(model.train(), data)
    assert model.training
    model.eval()
    for index, layer in enumerate(attention_layers(model)):
        for head in range(4):
            losses = []
            for factor in (1 + eps, 1 - eps):

                def hook(_, args, h=head, f=factor, d=layer.size):
                    x = args[0].clone()
                    x[..., h * d : (h + 1) * d] *= f
                    return (x, *args[1:])

                handle = layer.output.register_forward_pre_hook(hook)
                out = model(**{k: data[0][k] for k in ("input_ids", "attention_mask", "labels")})
                losses.append(out.loss.item())
                handle.remove()
            slope = abs(losses[0] - losses[1]) / (2 * eps)
            assert math.isclose(found[index, head].item(), slope, rel_tol=1e-4, abs_tol=1e-9)


def test_gradient_scores_by_masking():
    """To first order, the score is the change of the loss when the head is masked."""
    model, tokenizer = classifier(tiny_encoder()).double(), word_tokenizer()
    for attention in attention_layers(model):  # weak heads, so that the first order suffices
        attention.output.weight.data.mul_(0.02)
    data = batches(DATA, tokenizer, 20)
    scores = head_gradient_scores(model, data)
    keys = ("input_ids", "attention_mask", "labels")
    with torch.no_grad():
        base = model(**{k: data[0][k] for k in keys}).loss
        for layer in range(2):
            for head in range(4):
                cut = prune_heads(model, {layer: [head]})
                change = (cut(**{k: data[0][k] for k in keys}).loss - base).abs()
                assert torch.isclose(change, scores[layer, head], rtol=0.05, atol=1e-6)


def test_gradient_scores_of_pruned_models():
    model = prune_heads(classifier(tiny_encoder()), {1: [2]})
    scores = head_gradient_scores(model, batches(DATA, word_tokenizer()))
    assert scores.isnan().nonzero().tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="at least one batch"):
        head_gradient_scores(model, [])

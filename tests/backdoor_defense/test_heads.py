"""Pruned models against masked ones, expansion, saving and loading."""

import copy

import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2Model

from icml24.backdoor_defense.heads import (
    attention_layers,
    expand_heads,
    kept_heads,
    prune_heads,
    silent_heads,
)
from icml24.backdoor_defense.models import classifier, encoder_of
from icml24.backdoor_defense.toy import tiny_encoder

KINDS = ("bert", "roberta", "distilbert")
PLAN = {0: [1, 2], 1: [0]}
each_kind = pytest.mark.parametrize("kind", KINDS)


def inputs():
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 60, (5, 9), generator=g)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def masked_logits(model, plan):
    """Set the context of heads to zero just before the output projection: an independent route."""
    hooks = []
    for index, layer in enumerate(attention_layers(model)):

        def hook(_, args, index=index, size=layer.size):
            context = args[0].clone()
            for head in plan.get(index, ()):
                context[..., head * size : (head + 1) * size] = 0
            return (context, *args[1:])

        hooks.append(layer.output.register_forward_pre_hook(hook))
    with torch.no_grad():
        logits = model(**inputs()).logits
    for handle in hooks:
        handle.remove()
    return logits


def logits(model):
    with torch.no_grad():
        return model(**inputs()).logits


@each_kind
def test_pruned_equals_masked(kind):
    model = classifier(tiny_encoder(kind))
    wanted = masked_logits(model, PLAN)
    pruned = prune_heads(model, PLAN)
    assert torch.allclose(logits(pruned), wanted, atol=1e-6)
    assert not torch.allclose(logits(model), wanted, atol=1e-5)
    assert kept_heads(pruned) == [[0, 3], [1, 2, 3]] and kept_heads(model) == [[0, 1, 2, 3]] * 2


@each_kind
def test_order_does_not_matter_and_numbers_stay_original(kind):
    model = classifier(tiny_encoder(kind))
    at_once = prune_heads(model, {0: [0, 2], 1: [3]})
    by_steps = prune_heads(prune_heads(prune_heads(model, {0: [0]}), {1: [3]}), {0: [2]})
    assert kept_heads(by_steps) == kept_heads(at_once) == [[1, 3], [0, 1, 2]]
    assert torch.equal(logits(by_steps), logits(at_once))


@each_kind
def test_parameters_fall_by_the_size_of_a_head(kind):
    model, d, d_h = tiny_encoder(kind), 32, 8
    before = sum(p.numel() for p in model.parameters())
    after = sum(p.numel() for p in prune_heads(model, PLAN).parameters())
    assert before - after == 3 * (3 * d_h * (d + 1) + d_h * d)


def test_nothing_pruned_is_the_identity():
    model = classifier(tiny_encoder())
    same = prune_heads(model, {})
    assert same is not model and torch.equal(logits(same), logits(model))
    assert prune_heads(model, {0: [1]}, inplace=True) is model
    assert kept_heads(model)[0] == [0, 2, 3]


def test_mode_gradients_and_source_are_kept():
    model = classifier(tiny_encoder()).train()
    model.bert.encoder.layer[0].attention.self.query.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    pruned = prune_heads(model, PLAN)
    layer = attention_layers(pruned)[0]
    assert layer.inputs[0].training and not layer.inputs[0].weight.requires_grad
    assert layer.inputs[1].weight.requires_grad
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({0: [0, 1, 2, 3]}, "All heads of layer 0"),
        ({5: [0]}, "no layer 5"),
        ({0: [9]}, r"no heads \[9\]"),
        ({-1: [0]}, "no layer -1"),
    ],
)
def test_impossible_plans(plan, message):
    with pytest.raises(ValueError, match=message):
        prune_heads(tiny_encoder(), plan)


def test_a_pruned_head_cannot_go_again():
    pruned = prune_heads(tiny_encoder(), {0: [1]})
    with pytest.raises(ValueError, match=r"has no heads \[1\]; it has \[0, 2, 3\]"):
        prune_heads(pruned, {0: [1]})


def test_no_heads_to_prune():
    with pytest.raises(ValueError, match="no attention heads that can be pruned"):
        attention_layers(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    gpt = GPT2Model(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20))
    with pytest.raises(ValueError, match="GPT2Model has no attention heads"):
        prune_heads(gpt, {0: [0]})


@each_kind
def test_expanded_model_saves_and_loads(kind, tmp_path):
    small = prune_heads(classifier(tiny_encoder(kind)), PLAN)
    full = expand_heads(small)
    assert torch.allclose(logits(full), logits(small), atol=1e-6)
    assert silent_heads(full) == PLAN and silent_heads(small) == {}
    full.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    assert torch.allclose(logits(loaded), logits(small), atol=1e-6)
    again = prune_heads(loaded, silent_heads(loaded))
    assert kept_heads(again) == kept_heads(small)
    assert torch.allclose(logits(again), logits(small), atol=1e-6)


def test_empty_heads_stay_empty_in_training():
    full = expand_heads(prune_heads(classifier(tiny_encoder()), PLAN))
    optimizer = torch.optim.AdamW(full.parameters(), lr=1e-2)
    for _ in range(3):
        loss = full(**inputs(), labels=torch.tensor([0, 1, 0, 1, 1])).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert silent_heads(full) == PLAN


@each_kind
def test_classifier_keeps_pruned_heads_and_copies(kind):
    encoder = prune_heads(tiny_encoder(kind), PLAN)
    model = classifier(encoder, random_state=1)
    assert kept_heads(model) == kept_heads(encoder)
    assert encoder_of(model) is not encoder
    with torch.no_grad():
        for p in encoder_of(model).parameters():
            p.zero_()
    assert any(p.abs().sum() > 0 for p in encoder.parameters())

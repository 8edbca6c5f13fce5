"""The decoder equals Hugging Face's, sees no future, and starts the same on every layout."""

import json
from dataclasses import replace

import pytest
import torch
from hugging_face import compute_in_float64, transformers_names, with_our_weights

from curry_train.config import Config, ModelConfig
from curry_train.loss import mean_loss, token_sums
from curry_train.models.protocol import (
    build_model,
    count_parameters,
    generator_for,
    named_state,
    saved_views,
)
from curry_train.testing import assert_same

DENSE = ModelConfig(num_hidden_layers=2)
MOE = ModelConfig(num_hidden_layers=4, num_experts=4)


def batch_of(vocab=257, batch=2, length=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (batch, length + 1), generator=generator)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:].clone()}


# The published families in tiny shapes; yarn and llama3 are set so that a head holds pairs that are
# left alone, blended and scaled.
YARN = {
    "rope_type": "yarn", "rope_factor": 4.0, "original_max_position_embeddings": 64,
    "rope_beta_fast": 8.0, "rope_beta_slow": 1.0,
}  # fmt: skip
LATENT = replace(
    MOE, num_hidden_layers=2, qk_norm=False, kv_lora_rank=24, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=12, num_key_value_heads=4, first_k_dense_replace=1,
    shared_expert_intermediate_size=64, moe_intermediate_size=32, rope_interleave=True,
    rope_mscale=0.707, rope_mscale_all_dim=0.5, **YARN,
)  # fmt: skip
GROUPED = {"num_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
FAMILIES = {
    "Llama llama3": replace(
        DENSE, qk_norm=False, rope_type="llama3", rope_factor=8.0, attention_bias=True,
        original_max_position_embeddings=64, rope_low_freq_factor=1.0, rope_high_freq_factor=4.0,
    ),
    "Llama tied linear": replace(
        DENSE, qk_norm=False, rope_type="linear", rope_factor=2.0, tie_word_embeddings=True
    ),
    "Qwen3": DENSE,
    "Qwen3 yarn": replace(DENSE, attention_bias=True, **YARN),
    "Mixtral": replace(MOE, num_hidden_layers=2, qk_norm=False, sliding_window=5),
    "Qwen3Moe": MOE,
    "Olmoe": replace(
        MOE, num_hidden_layers=2, qk_norm_width="projection", clip_qkv=1.5, norm_topk_prob=False
    ),
    "DeepseekV2 lite": replace(LATENT, norm_topk_prob=False),
    "DeepseekV2 groups": replace(
        LATENT, norm_topk_prob=False, q_lora_rank=20, group_score="max", attention_bias=True,
        **GROUPED,
    ),
    "DeepseekV3": replace(
        LATENT, q_lora_rank=20, scoring_func="sigmoid", correction_bias=True, **GROUPED
    ),
    "DeepseekV3 halves": replace(
        LATENT, q_lora_rank=20, scoring_func="sigmoid", correction_bias=True,
        rope_interleave=False, v_head_dim=24, **GROUPED,
    ),
    "GptOss": replace(
        MOE, num_hidden_layers=3, qk_norm=False, attention_bias=True, attention_sinks=True,
        sliding_window=6, sliding_window_pattern=2, expert_bias=True, router_bias=True,
        swiglu_limit=0.7, rope_truncate=False, **YARN,
    ),
}  # fmt: skip


@torch.no_grad()
def shake(model, seed=1):
    """Move every parameter and buffer away from its start, so that every path matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("norm.weight", "bias", "sinks")):
            noise = torch.empty(tensor.shape, dtype=torch.float64).normal_(generator=generator)
            tensor.add_(0.5 * noise)
        else:
            tensor.mul_(8.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_equal_hugging_face(name, monkeypatch):
    config = FAMILIES[name]
    compute_in_float64(monkeypatch, config)
    ours = build_model(Config(model=config, precision="fp64"), "cpu")
    shake(ours)
    theirs = with_our_weights(config, dict(named_state(ours)))
    assert type(theirs).__name__ == f"{name.split()[0]}ForCausalLM"
    batch = batch_of()
    out = ours(batch["input_ids"])
    reference = theirs(batch["input_ids"]).logits
    assert_same(
        {"logits": out.logits[..., : config.vocab_size]},
        {"logits": reference},
        tolerance=1e-11,
    )
    upstream = torch.randn_like(reference)
    (reference * upstream).sum().backward()
    (out.logits[..., : config.vocab_size] * upstream).sum().backward()
    wanted = {n: p.grad for n, p in theirs.named_parameters()}
    found = {}
    for name, parameter in ours.named_parameters():
        found |= saved_views(ours, name, parameter.grad)
    assert_same(transformers_names(config, found), wanted, tolerance=1e-11)


KINDS = {
    "tiny_dense": DENSE,
    "tiny_moe": MOE,
    "latent": FAMILIES["DeepseekV3"],
    "sinks": FAMILIES["GptOss"],
}


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("window", [None, 3])
def test_no_logit_depends_on_a_later_token(config, window):
    settings = Config(model=replace(config, sliding_window=window), precision="fp64")
    model = build_model(settings, "cpu")
    ids = batch_of(batch=1, length=12)["input_ids"]
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 257
    moved = (model(ids).logits - model(changed).logits)[0, :, :257].abs().amax(-1)
    # Not bitwise: an expert's matrix product rounds by the number of its rows.
    assert moved[:7].max() < 1e-14 and moved[7] > 1e-4


def test_a_planted_look_ahead_is_seen():
    model = build_model(Config(model=DENSE), "cpu")
    ids = batch_of(batch=1, length=12)["input_ids"]
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 257
    original = torch.nn.functional.scaled_dot_product_attention

    def sees_all(q, k, v, **kwargs):
        return original(q, k, v, **{**kwargs, "is_causal": False})

    torch.nn.functional.scaled_dot_product_attention = sees_all
    try:
        assert not torch.equal(model(ids).logits[0, :7], model(changed).logits[0, :7])
    finally:
        torch.nn.functional.scaled_dot_product_attention = original


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_a_masked_document_is_as_if_it_stood_alone(config):
    model = build_model(Config(model=config, precision="fp64"), "cpu")
    shake(model)
    ids = batch_of(batch=1, length=12)["input_ids"]
    doc_ids = torch.tensor([[0] * 5 + [1] * 7])
    position_ids = torch.tensor([[*range(5), *range(7)]])
    packed = model(ids, position_ids, doc_ids).logits
    alone = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], 1)
    assert_same({"x": packed[..., :257]}, {"x": alone[..., :257]}, tolerance=1e-12)


def test_padded_logits_are_minus_infinity_and_count_nowhere():
    model = build_model(Config(model=DENSE, precision="fp64"), "cpu")
    batch = batch_of()
    logits = model(batch["input_ids"]).logits
    assert logits.shape[-1] == 320 and (logits[..., 257:] == -torch.inf).all()
    sums = token_sums(model, batch)
    reference = torch.nn.functional.cross_entropy(
        logits[..., :257].flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    )
    assert sums.nll.item() == pytest.approx(reference.item(), rel=1e-13)
    sums.total.backward()
    assert all((model.get_parameter(n).grad[257:] == 0).all() for n in model.vocab_parameters)


def test_the_start_depends_on_seed_and_name_alone():
    small = build_model(Config(model=DENSE), "cpu")
    deeper = build_model(Config(model=replace(DENSE, num_hidden_layers=4)), "cpu")
    wanted = dict(named_state(small))
    found = {name: tensor for name, tensor in named_state(deeper) if name in wanted}
    assert_same(found, wanted, tolerance=0)
    other = dict(named_state(build_model(Config(model=DENSE, seed=1), "cpu")))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(other[name], wanted[name])


def test_every_expert_has_its_own_generator():
    state = dict(named_state(build_model(Config(model=MOE), "cpu")))
    name = "model.layers.1.mlp.experts.up_proj.weight"
    third = torch.empty(176, 128).normal_(0, 0.02, generator=generator_for(0, f"{name}#3"))
    assert torch.equal(state[name][3], third)
    wider = build_model(Config(model=replace(MOE, num_experts=8)), "cpu")
    assert torch.equal(dict(named_state(wider))[name][:4], state[name])


def test_tied_weights_are_one_parameter():
    model = build_model(Config(model=replace(DENSE, tie_word_embeddings=True)), "cpu")
    names = [name for name, _ in named_state(model)]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied, _ = count_parameters(build_model(Config(model=DENSE), "cpu"))
    assert count_parameters(model)[0] == untied - 257 * 128


def test_ignored_labels_count_nowhere_and_all_ignored_is_zero():
    model = build_model(Config(model=MOE, precision="fp64"), "cpu")
    batch = batch_of()
    batch["labels"][:, 10:] = -100
    sums = token_sums(model, batch)
    assert sums.count.item() == 20
    logits = model(batch["input_ids"]).logits[:, :10, :257]
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, :10].flatten(), reduction="sum"
    )
    assert sums.nll.item() == pytest.approx(wanted.item(), rel=1e-13)
    batch["labels"][:] = -100
    assert token_sums(model, batch).total.item() == 0.0 and mean_loss(model, batch).item() == 0.0


def test_the_first_loss_is_near_log_vocabulary():
    model = build_model(Config(model=MOE), "cpu")
    assert abs(mean_loss(model, batch_of()).item() - 0.04 - 5.549) < 0.1


def test_a_shared_expert_is_added_to_every_token():
    config = replace(MOE, shared_expert_intermediate_size=32, num_hidden_layers=1)
    with_shared = build_model(Config(model=config, precision="fp64"), "cpu")
    ids = batch_of()["input_ids"]
    before = with_shared(ids).logits
    with torch.no_grad():
        with_shared.model.layers["0"].mlp.shared_experts.down_proj.weight.zero_()
    without = build_model(
        Config(model=replace(config, shared_expert_intermediate_size=0), precision="fp64"), "cpu"
    )
    assert_same(
        {"x": with_shared(ids).logits[..., :257]}, {"x": without(ids).logits[..., :257]},
        tolerance=1e-13,
    )  # fmt: skip
    assert not torch.equal(before, with_shared(ids).logits)


def test_leading_blocks_can_stay_dense():
    model = build_model(Config(model=replace(MOE, first_k_dense_replace=1)), "cpu")
    kinds = [hasattr(block.mlp, "experts") for block in model.layers.values()]
    assert kinds == [False, True, True, True]


def test_the_config_survives_a_checkpoint_manifest():
    from dataclasses import asdict

    assert ModelConfig(**json.loads(json.dumps(asdict(MOE)))) == MOE


def test_auxiliary_losses_are_summed_over_blocks_with_their_coefficients():
    config = ModelConfig(
        num_hidden_layers=3, num_experts=4, router_aux_loss_coef=0.5, router_z_loss_coef=0.25
    )
    model = build_model(Config(model=config, precision="fp64"), "cpu")
    seen = []
    for block in model.layers.values():
        block.mlp.gate.register_forward_hook(lambda module, args, out: seen.append(out))
    out = model(batch_of()["input_ids"])
    assert len(seen) == 3
    torch.testing.assert_close(out.aux_loss, 0.5 * sum(one.aux_loss for one in seen))
    torch.testing.assert_close(out.z_loss, 0.25 * sum(one.z_loss for one in seen))


def test_the_shared_expert_reads_what_the_router_reads():
    config = ModelConfig(num_experts=4, shared_expert_intermediate_size=16)
    model = build_model(Config(model=config), "cpu")
    read = {}
    mlp = model.layers["0"].mlp
    for name, module in (("gate", mlp.gate), ("shared", mlp.shared_experts)):
        module.register_forward_hook(
            lambda module, args, out, name=name: read.__setitem__(name, args[0])
        )
    model(batch_of()["input_ids"])
    assert torch.equal(read["gate"], read["shared"])

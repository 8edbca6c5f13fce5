"""The closed forms against the model itself and against the tensors that autograd really keeps."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from curry_train import plan, sizes
from curry_train.config import Config, DataConfig, ModelConfig, ParallelConfig
from curry_train.loss import token_sums
from curry_train.models.protocol import build_model, count_parameters

DENSE = ModelConfig()
MOE = ModelConfig(num_hidden_layers=4, num_experts=4)
LATENT = replace(
    DENSE, qk_norm=False, num_key_value_heads=4, kv_lora_rank=24, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=12,
)  # fmt: skip
SINKS = replace(
    MOE, qk_norm=False, attention_sinks=True, attention_bias=True, expert_bias=True,
    router_bias=True, swiglu_limit=7.0, sliding_window=16, sliding_window_pattern=2,
)  # fmt: skip
OLMOE = replace(MOE, qk_norm_width="projection", clip_qkv=0.5)
VARIANTS = {
    "dense": DENSE,
    "moe": MOE,
    "tied": replace(DENSE, tie_word_embeddings=True),
    "shared expert": replace(MOE, shared_expert_intermediate_size=64),
    "first dense": replace(MOE, first_k_dense_replace=2),
    "no qk norm": replace(DENSE, qk_norm=False),
    "norms of whole projections": replace(DENSE, qk_norm_width="projection"),
    "olmoe": OLMOE,
    "biases": replace(DENSE, attention_bias=True),
    "window": replace(DENSE, sliding_window=32),
    "sinks": SINKS,
    "latent": LATENT,
    "latent, wide values": replace(LATENT, v_head_dim=24),
    "latent, compressed queries": replace(
        LATENT,
        q_lora_rank=20,
        attention_bias=True,
        num_experts=4,
        first_k_dense_replace=1,
        scoring_func="sigmoid",
        correction_bias=True,
        n_group=2,
    ),
    "expert choice": replace(MOE, routing="expert_choice"),
}


@pytest.mark.filterwarnings("ignore:model.routing=expert_choice")
@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_parameter_counts_equal_the_built_model(model):
    built = build_model(Config(model=model), "meta")
    assert sizes.parameter_counts(model) == count_parameters(built)


def saved_bytes(config):
    """Bytes of every distinct storage that backward keeps, parameters excluded."""
    model = build_model(config, "cpu")
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.randint(0, 257, (config.data.global_batch_size, config.data.seq_len))
    batch = {"input_ids": ids, "labels": ids}
    if config.data.document_mask:
        batch["position_ids"] = torch.arange(config.data.seq_len).expand_as(ids)
        batch["doc_ids"] = torch.zeros_like(ids)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_sums(model, batch)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.filterwarnings("ignore:model.routing=expert_choice")
def test_activations_are_within_two_percent_of_what_autograd_keeps(model, precision):
    config = Config(model=model, precision=precision)
    estimate = plan.estimate(config, 1)["activations"]
    assert estimate == pytest.approx(saved_bytes(config), rel=0.02)


@pytest.mark.parametrize("model", [DENSE, SINKS], ids=["dense", "sinks"])
def test_masks_of_documents_are_counted_once_for_all_blocks(model):
    config = Config(model=model, data=DataConfig(seq_len=256, document_mask=True))
    found, plain = saved_bytes(config), replace(config.data, document_mask=False)
    estimate = plan.estimate(config, 1)["activations"]
    assert estimate == pytest.approx(found, rel=0.02)
    assert estimate - plan.estimate(replace(config, data=plain), 1)["activations"] > 0.03 * found


def test_estimate_of_the_other_parts_is_exact():
    config = Config(model=MOE)
    padded = sizes.parameter_counts(MOE)[0] + 2 * 63 * 128
    parts = plan.estimate(config, 1)
    assert list(parts) == ["parameters", "gradients", "optimizer", "activations", "buffers"]
    assert parts["parameters"] == parts["gradients"] == 4 * padded
    assert parts["optimizer"] == 8 * padded and parts["buffers"] == 0
    half = plan.estimate(config, 2)
    assert half["activations"] == parts["activations"] / 2 and half["buffers"] == 4 * padded


def test_estimate_refuses_axes_that_do_not_make_the_world():
    config = Config(parallel=ParallelConfig(dp_shard=3))
    with pytest.raises(ValueError, match="make 3 ranks, but 2 were started"):
        plan.estimate(config, 2)


@pytest.mark.parametrize("name", ["dense", "biases", "latent", "latent, compressed queries"])
def test_flops_count_the_matrices_of_the_model(name):
    model = replace(VARIANTS[name], num_experts=0)  # the counter does not look into the bank
    config = Config(model=model, data=DataConfig(seq_len=64, global_batch_size=1))
    built = build_model(config, "cpu")
    ids = torch.zeros(1, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        token_sums(built, {"input_ids": ids, "labels": ids}).total.backward()
    scores = model.num_hidden_layers * model.num_attention_heads * model.query_dim
    # The counter counts the padded vocabulary and the whole score matrix, and no norm weights. A
    # narrower value is padded to the query's width: that is work, but none that the model needs.
    padding = 6 * (320 - 257) * 128
    padding += (
        6
        * 64
        * model.num_hidden_layers
        * model.num_attention_heads
        * (model.query_dim - model.value_dim)
        / 2
    )
    full_scores = sizes.flops_per_token(model, 64) + 6 * scores * 64 + padding
    assert counter.get_total_flops() / 64 == pytest.approx(full_scores, rel=0.03)


def test_flops_of_attention_follow_the_keys_that_are_seen():
    def attention(model):
        bare = sizes.flops_per_token(model, 1)
        return (sizes.flops_per_token(model, 64) - bare) / (6 * 2 * 4 * 64)  # blocks, heads, A + A

    seen = {
        window: sum(min(window, t + 1) for t in range(64)) / 64 - 1 for window in (1, 8, 32, 64)
    }
    for window, keys in seen.items():
        assert attention(replace(DENSE, sliding_window=window)) == pytest.approx(keys, abs=0.51)
    half = replace(DENSE, sliding_window=8, sliding_window_pattern=2)
    assert attention(half) == pytest.approx((seen[8] + seen[64]) / 2, abs=0.51)


def test_a_model_without_closed_forms_is_planned_as_far_as_it_is_known(monkeypatch, capsys):
    from curry_train import models

    monkeypatch.setitem(models.MODELS, "bigram", f"{__name__}:Bigram")
    config = Config(model=BigramConfig(), devices=1)
    parts = plan.estimate(config, 1)
    assert parts["parameters"] == 4 * 257 * 257 and parts["activations"] is None
    assert sizes.flops_per_token(config.model, 128) is None
    assert plan.print_plan(config) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"parameters: {257 * 257} (active {257 * 257})"
    assert "without activations" in out and "unknown for architecture bigram" in out


@dataclass(frozen=True)
class BigramConfig:
    """A model of another family, as a user would add one."""

    architecture: str = "bigram"
    """Key of MODELS."""
    vocab_size: int = 257
    """Token ids."""


class Bigram(torch.nn.Module):
    Config = BigramConfig
    vocab_parameters, active_share = (), 1.0

    def __init__(self, config, *, compute_dtype):
        super().__init__()
        self.vocab_size, self.compute_dtype = config.vocab_size, compute_dtype
        self.layers = torch.nn.ModuleDict()
        self.table = torch.nn.Parameter(torch.empty(config.vocab_size, config.vocab_size))

    def init_constant(self, name):
        return None

    def init_std(self, name):
        return 0.02

    def tie_weights(self):
        pass

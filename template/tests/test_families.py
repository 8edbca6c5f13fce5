"""config.json of every age becomes our model or is refused with every reason, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from test_decoder import FAMILIES as DECODERS

from curry_train.checkpoint import CheckpointError
from curry_train.checkpoint.families import FAMILIES, differences, live, read_config, write_config
from curry_train.checkpoint.tensor_names import Source, sources
from curry_train.compose import PROJECT, load_config
from curry_train.config import ModelConfig

QWEN = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "initializer_range": 0.02, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "hidden_act": "silu",
    "bos_token_id": 100000,
    "eos_token_id": 100001, "ep_size": 1, "initializer_range": 0.02, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_layer_freq": 1, "pretraining_tp": 1,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "seq_aux": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "transformers_version": "4.33.1", "v_head_dim": 128,
}  # fmt: skip
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "qwen3_8b": QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_theta": 1000000,
        "vocab_size": 151936,
    },
    "qwen3_30b_a3b": QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "num_key_value_heads": 4,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "output_router_logits": False, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "vocab_size": 151936,
    },
    "mixtral_8x7b": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "deepseek_v2_lite": DEEPSEEK | {
        "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1,
        "hidden_size": 2048, "intermediate_size": 10944, "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
        "rope_scaling": {"type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707, **YARN},
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
        "topk_method": "greedy", "vocab_size": 102400,
    },
    "deepseek_v3": DEEPSEEK | {
        "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3,
        "hidden_size": 7168, "intermediate_size": 18432, "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "rope_scaling": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **YARN},
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
        "topk_method": "noaux_tc", "vocab_size": 129280,
    },
    "olmoe_1b_7b": {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096,
        "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304,
    },
    "gpt_oss_20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
        "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                         "original_max_position_embeddings": 4096, "truncate": False},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True,
        "transformers_version": "4.55.0.dev0", "vocab_size": 201088,
    },
}  # fmt: skip
"""As their authors publish them, in the keys of the version of transformers of that time."""
QWEN2 = QWEN | {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "use_mrope": False, "vocab_size": 151936,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset(name):
    preset = load_config([f"model={name}"]).model
    assert live(read_config(PUBLISHED[name])) == live(preset)
    written = write_config(preset, "bfloat16")
    assert written["architectures"] == PUBLISHED[name]["architectures"]
    assert live(read_config(json.loads(json.dumps(written)))) == live(preset)


def test_qwen2_has_biases_but_one_and_its_own_width_of_heads():
    model = read_config(QWEN2)
    assert model.attention_bias and not model.attention_out_bias and not model.qk_norm
    assert model.head_dim == 64 and model.tie_word_embeddings and model.sliding_window is None
    assert write_config(model, "float32")["architectures"] == ["Qwen2ForCausalLM"]


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_written_is_read_as_the_same_model(name):
    model = DECODERS[name]
    raw = write_config(model, "float16")
    assert live(read_config(raw)) == live(model)
    assert raw["architectures"] == [f"{name.split()[0]}ForCausalLM"]
    assert raw["dtype"] == raw["torch_dtype"] == "float16"


def test_gpt_oss_without_windows_is_written_with_the_size_that_transformers_needs():
    model = replace(DECODERS["GptOss"], sliding_window=None, sliding_window_pattern=0)
    raw = write_config(model, "float32")
    assert raw["sliding_window"] == 128 and {*raw["layer_types"]} == {"full_attention"}
    assert live(read_config(raw)) == live(model)


LLAMA = PUBLISHED["llama3_8b"]


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama3_8b", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {}),
    ("llama3_8b", {"rope_theta": None, "rope_parameters": {"rope_theta": 500000}}, {}),
    ("llama3_8b", {"dtype": "bfloat16", "torch_dtype": None}, {}),
    ("llama3_8b", {"architectures": None}, {}),
    ("llama3_8b", {"unknown": None, "_name_or_path": "x", "bad_words_ids": None}, {}),
    ("llama3_8b", {"num_key_value_heads": None}, {"num_key_value_heads": 32}),
    ("llama3_8b", {"head_dim": 64}, {"head_dim": 64}),
    ("llama3_8b", {"rope_scaling": {"type": "linear", "factor": 2}},
     {"rope_type": "linear", "rope_factor": 2.0}),
    ("llama3_8b", {"rope_scaling": {"rope_type": "yarn", "type": "yarn", "factor": 4.0}},
     {"rope_type": "yarn", "rope_factor": 4.0, "original_max_position_embeddings": 8192}),
    ("llama3_8b", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                    "attention_factor": 1.1386294361119891}},
     {"rope_type": "yarn", "rope_factor": 4.0, "original_max_position_embeddings": 8192}),
    ("qwen3_8b", {"head_dim": None, "hidden_size": 2048}, {"head_dim": 128, "hidden_size": 2048}),
    ("qwen3_8b", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
     {"sliding_window": 9}),
    ("qwen3_8b", {"use_sliding_window": True, "max_window_layers": 0}, {"sliding_window": 4096}),
    ("qwen3_8b", {"use_sliding_window": True, "sliding_window": 9}, {}),
    ("qwen3_30b_a3b", {"num_experts": None, "num_local_experts": 128}, {}),
    ("qwen3_30b_a3b", {"num_local_experts": 128}, {}),
    ("qwen3_30b_a3b", {"norm_topk_prob": None}, {"norm_topk_prob": False}),
    ("qwen3_30b_a3b", {"mlp_only_layers": [0, 1]}, {"first_k_dense_replace": 2}),
    ("qwen3_30b_a3b", {"num_hidden_layers": 2, "decoder_sparse_step": 2},
     {"num_hidden_layers": 2, "first_k_dense_replace": 1}),
    ("mixtral_8x7b", {"head_dim": None, "sliding_window": 4096}, {"sliding_window": 4096}),
    ("deepseek_v2_lite", {"n_group": 8, "topk_group": 3}, {}),
    ("deepseek_v2_lite", {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
     {"n_group": 8, "topk_group": 3, "group_score": "max"}),
    ("deepseek_v3", {"rope_interleave": False, "head_dim": 64, "num_mtp_layers": 0},
     {"rope_interleave": False}),
    ("gpt_oss_20b", {"rope_scaling": None, "layer_types": None, "swiglu_limit": None}, {}),
    ("gpt_oss_20b", {"num_experts_per_tok": None}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "fields"), SAME)
def test_spellings_and_absent_keys_mean_what_transformers_means(name, keys, fields):
    plain = read_config(PUBLISHED[name])
    found = read_config({**PUBLISHED[name], **keys})
    assert live(found) == live(replace(plain, **fields))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama3_8b", {"hidden_act": "gelu"}, "hidden_act=gelu is nothing that a model here computes"),
    ("llama3_8b", {"mlp_bias": True}, "mlp_bias=True"),
    ("llama3_8b", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ("llama3_8b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama3_8b", {"residual_multiplier": 0.22}, "residual_multiplier=0.22 is unknown and may"),
    ("llama3_8b", {"sliding_window": 4096}, "sliding_window=4096 is unknown"),
    ("llama3_8b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
    ("llama3_8b", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type=longrope is unknown"),
    ("llama3_8b", {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 2}}, "mscale=2"),
    ("llama3_8b", {"rope_scaling": [2]}, "rope_scaling=[2]: must be a value of type dict"),
    ("llama3_8b", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one dictionary"),
    ("llama3_8b", {"rope_parameters": {"rope_theta": 1e4}}, "elsewhere 500000.0"),
    ("llama3_8b", {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.0}},
     "attention_factor=1.0: the formula gives 1.13863"),
    ("llama3_8b", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7}},
     "model.rope_mscale=0.7"),
    ("llama3_8b", {"hidden_size": None}, "key hidden_size is missing"),
    ("llama3_8b", {"hidden_size": "4096"}, "hidden_size='4096': must be an integer"),
    ("llama3_8b", {"num_hidden_layers": True}, "num_hidden_layers=True: must be an integer"),
    ("llama3_8b", {"num_key_value_heads": 5}, "model.num_key_value_heads=5: does not divide"),
    ("llama3_8b", {"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
    ("qwen3_8b", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 20},
     "sliding_window=9 holds in the blocks [20, 21"),
    ("qwen3_8b", {"layer_types": ["full_attention"]}, "for each of 36 blocks"),
    ("qwen3_8b", {"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}, "layer_types=["),
    ("qwen3_8b", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
     "use_sliding_window is false"),
    ("qwen3_30b_a3b", {"use_sliding_window": True, "sliding_window": 9}, "max_window_layers=48"),
    ("qwen3_30b_a3b", {"decoder_sparse_step": 2}, "here the first blocks can be dense"),
    ("qwen3_30b_a3b", {"mlp_only_layers": [48]}, "each a different one of 48 blocks"),
    ("qwen3_30b_a3b", {"mlp_only_layers": [3]}, "leave the blocks [3] without experts"),
    ("qwen3_30b_a3b", {"num_local_experts": 64}, "contradict each other"),
    ("mixtral_8x7b", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ("deepseek_v2_lite", {"topk_method": "noaux_tc"}, "topk_method=noaux_tc"),
    ("deepseek_v2_lite", {"scoring_func": "sigmoid"}, "scoring_func=sigmoid"),
    ("deepseek_v2_lite", {"norm_topk_prob": True}, "norm_topk_prob=True"),
    ("deepseek_v2_lite", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}, "the norms of the latents have 1e-6"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func=softmax"),
    ("deepseek_v3", {"n_group": 7}, "model.n_group=7: does not divide"),
    ("gpt_oss_20b", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
    ("olmoe_1b_7b", {"head_dim": 64}, "head_dim=64: 16 heads must be as wide as hidden_size=2048"),
    ("gpt_oss_20b", {"experts_per_token": 2}, "contradict each other"),
    ("gpt_oss_20b", {"architectures": ["GptOssModel"]}, "known are LlamaForCausalLM"),
    ("gpt_oss_20b", {"architectures": None, "model_type": "mistral"}, "model_type=mistral"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "words"), REFUSED)
def test_what_the_decoder_does_not_compute_is_refused(name, keys, words):
    with pytest.raises(CheckpointError) as refused:
        read_config({**PUBLISHED[name], **keys})
    assert words in str(refused.value)


JUNK: list[Any] = [
    "x", "7", [], {}, [1], [None], {"a": 1}, -1, 0, True, 1.5, float("nan"), float("inf"), 10**12,
    {"rope_type": ["x"]}, {"type": 3}, {"rope_type": "yarn", "factor": "a"},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": "x", "mscale": "z"},
]  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.sampled(3)
def test_no_value_of_any_key_ends_otherwise_than_by_a_model_or_a_refusal(name):
    refused = 0
    for key in [*PUBLISHED[name], "rope_parameters", "layer_types", "n_shared_experts"]:
        for value in JUNK:
            try:
                assert isinstance(read_config({**PUBLISHED[name], key: value}), ModelConfig)
            except CheckpointError:
                refused += 1
    assert refused > 200


def test_every_reason_is_told_at_once():
    wrong = {"hidden_act": "gelu", "mlp_bias": True, "logit_scale": 2, "vocab_size": None}
    with pytest.raises(CheckpointError) as refused:
        read_config({**LLAMA, **wrong, "rope_scaling": {"type": "ntk"}})
    told = [
        line.removeprefix("config.json of LlamaForCausalLM: ") for line in refused.value.problems
    ]
    for key in ("key vocab_size", "rope_type=ntk", "hidden_act=gelu", "mlp_bias=", "logit_scale=2"):
        assert sum(line.startswith(key) for line in told) == 1, told


UNWRITTEN: list[tuple[str, dict[str, Any], list[str]]] = [
    ("qwen3_8b", {"sliding_window": 9, "attention_sinks": True}, ["attention_sinks=true: Qwen3"]),
    ("llama3_8b", {"sliding_window": 9}, ["model.sliding_window=9: LlamaForCausalLM, the nearest"]),
    ("qwen3_30b_a3b", {"capacity_factor": 1.25}, ["model.capacity_factor=1.25: Qwen3Moe"]),
    ("qwen3_30b_a3b", {"routing": "expert_choice"}, ["model.routing=expert_choice: Qwen3Moe"]),
    ("qwen3_30b_a3b", {"shared_expert_intermediate_size": 64, "scoring_func": "sigmoid"},
     ["model.shared_expert_intermediate_size=64", "model.scoring_func=sigmoid: Qwen3MoeFor"]),
    ("mixtral_8x7b", {"first_k_dense_replace": 1}, ["model.first_k_dense_replace=1: Mixtral"]),
    ("mixtral_8x7b", {"sliding_window": 9, "sliding_window_pattern": 2},
     ["model.sliding_window_pattern=2: Mixtral"]),
    ("mixtral_8x7b", {"norm_topk_prob": False}, ["model.norm_topk_prob=false: Mixtral"]),
    ("deepseek_v3", {"shared_expert_intermediate_size": 0},
     ["model.shared_expert_intermediate_size=0: DeepseekV3ForCausalLM, the nearest", "has 2048"]),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}, ["rms_norm_eps=1e-05: the norms of the latents"]),
    ("gpt_oss_20b", {"router_bias": False}, ["model.router_bias=false: GptOss"]),
    ("olmoe_1b_7b", {"head_dim": 64}, ["qk_norm_width=projection: Qwen3MoeForCausalLM, the near"]),
    ("qwen3_30b_a3b", {"clip_qkv": 8.0}, ["model.clip_qkv=8.0: Qwen3MoeForCausalLM"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "words"), UNWRITTEN)
def test_what_no_architecture_has_is_not_written(name, fields, words):
    model = replace(load_config([f"model={name}"]).model, **fields)
    with pytest.raises(CheckpointError) as refused:
        write_config(model, "float32")
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_model_that_is_no_decoder_is_not_written():
    with pytest.raises(CheckpointError, match="model.architecture=spiking: no architecture"):
        write_config(load_config(["model=tiny_spiking"]).model, "float32")


def test_what_training_alone_reads_is_no_difference():
    model = load_config(["model=qwen3_30b_a3b"]).model
    other = replace(
        model, router_aux_loss_coef=0.5, router_z_loss_coef=0.1, moe_backend="sorted",
        capacity_factor=1.5, max_position_embeddings=64,
    )  # fmt: skip
    assert differences(PROJECT, model, other) == []
    [told] = differences(PROJECT, model, replace(other, rope_theta=1e4))
    assert (
        told.startswith("model.rope_theta=10000.0: ") and "set model.rope_theta=1000000.0" in told
    )


def test_names_and_layouts_in_files():
    bank, shape = "model.layers.3.mlp.experts", (2, 5, 7)
    mixtral, gpt = FAMILIES["MixtralForCausalLM"], FAMILIES["GptOssForCausalLM"]
    assert sources(mixtral, f"{bank}.up_proj.weight", shape) == [
        Source("model.layers.3.block_sparse_moe.experts.0.w3.weight", (5, 7), 0),
        Source("model.layers.3.block_sparse_moe.experts.1.w3.weight", (5, 7), 1),
    ]
    assert sources(gpt, f"{bank}.up_proj.weight", shape) == [
        Source(f"{bank}.gate_up_proj", (2, 7, 10), None, 1, True)
    ]
    assert sources(gpt, f"{bank}.gate_proj.bias", (2, 5)) == [
        Source(f"{bank}.gate_up_proj_bias", (2, 10), None, 0, False)
    ]
    assert sources(gpt, f"{bank}.down_proj.weight", shape) == [
        Source(f"{bank}.down_proj", (2, 7, 5), None, None, True)
    ]
    router = sources(gpt, "model.layers.3.mlp.gate.bias", (2,))
    assert [source.key for source in router] == ["model.layers.3.mlp.router.bias"]


def test_reading_a_config_needs_no_torch():
    code = (
        "import json, sys\nfrom curry_train.checkpoint.families import read_config, write_config\n"
        f"model = read_config(json.loads({json.dumps(json.dumps(LLAMA))}))\n"
        "write_config(model, 'float32')\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_defaults_of_fields_are_those_that_a_family_relies_on():
    """A field that a family does not name keeps our default, so a changed default must show."""
    plain = ModelConfig()
    assert not plain.attention_sinks and plain.attention_out_bias and plain.sliding_window is None
    assert plain.scoring_func == "softmax" and not plain.router_bias and not plain.expert_bias

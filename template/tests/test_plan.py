"""The closed forms against the model itself and against the tensors that autograd really keeps."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from curry_train import plan
from curry_train.config import Config, DataConfig, ModelConfig, ParallelConfig
from curry_train.loss import token_sums
from curry_train.models.protocol import build_model, count_parameters

DENSE = ModelConfig()
MOE = ModelConfig(num_hidden_layers=4, num_experts=4)
# The shape of a published model: its parameter count is known to the last digit.
LLAMA3_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, qk_norm=False,
)  # fmt: skip
VARIANTS = {
    "dense": DENSE,
    "moe": MOE,
    "tied": replace(DENSE, tie_word_embeddings=True),
    "shared expert": replace(MOE, shared_expert_intermediate_size=64),
    "first dense": replace(MOE, first_k_dense_replace=2),
    "no qk norm": replace(DENSE, qk_norm=False),
}


@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_parameter_counts_equal_the_built_model(model):
    built = build_model(Config(model=model), "meta")
    assert plan.parameter_counts(model) == count_parameters(built)


def test_a_published_model_has_its_published_count(capsys):
    assert plan.parameter_counts(LLAMA3_8B) == (8030261248, 8030261248)
    config = Config(model=LLAMA3_8B, dry_run=True, devices=1)
    assert plan.print_plan(config) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "parameters: 8030261248 (active 8030261248)"


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
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_sums(model, {"input_ids": ids, "labels": ids})
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_activations_are_within_seven_percent_of_what_autograd_keeps(model, precision):
    config = Config(model=model, precision=precision)
    estimate = plan.estimate(config, 1)["activations"]
    assert estimate == pytest.approx(saved_bytes(config), rel=0.07)


def test_estimate_of_the_other_parts_is_exact():
    config = Config(model=MOE)
    padded = plan.parameter_counts(MOE)[0] + 2 * 63 * 128
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


def test_flops_count_the_matrices_of_the_model():
    config = Config(model=DENSE, data=DataConfig(seq_len=64, global_batch_size=1))
    model = build_model(config, "cpu")
    ids = torch.zeros(1, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        token_sums(model, {"input_ids": ids, "labels": ids}).total.backward()
    heads = DENSE.num_hidden_layers * DENSE.num_attention_heads * DENSE.head_dim
    # The counter counts the padded vocabulary and the whole score matrix, and no norm weights.
    padding = 6 * (320 - 257) * 128
    full_scores = plan.flops_per_token(DENSE, 64) + 6 * heads * 64 + padding
    assert counter.get_total_flops() / 64 == pytest.approx(full_scores, rel=0.03)


def test_a_model_without_closed_forms_is_planned_as_far_as_it_is_known(monkeypatch, capsys):
    from curry_train import models

    monkeypatch.setitem(models.MODELS, "bigram", f"{__name__}:Bigram")
    config = Config(model=BigramConfig(), devices=1)
    parts = plan.estimate(config, 1)
    assert parts["parameters"] == 4 * 257 * 257 and parts["activations"] is None
    assert plan.flops_per_token(config.model, 128) is None
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

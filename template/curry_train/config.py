"""Every setting of a run: dataclasses with a sentence under each field.

rules says what must hold for the values, compose makes a Config from a command line, command_line
talks to people (`python -m curry_train.config check`, `--help`). Each imports those before it, this
file none of them. None imports torch, so they answer at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import typing
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

from curry_train.bounds import BpeSize, Count, Decay, Natural, NonNegative, Positive, Seed, Share
from curry_train.models import MODELS

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class ModelConfig:
    """The decoder family. Field names are Hugging Face's."""

    architecture: str = "decoder"
    """Key of curry_train.models.MODELS."""
    vocab_size: Count = 257
    """Token ids the model can predict, the tokenizer's or more; inside a multiple of 64."""
    hidden_size: Count = 128
    """Width of the residual stream."""
    intermediate_size: Count = 352
    """Hidden width of a dense SwiGLU feed-forward."""
    num_hidden_layers: Count = 2
    """Decoder blocks."""
    num_attention_heads: Count = 4
    """Query heads."""
    num_key_value_heads: Count = 2
    """Key/value heads; divides num_attention_heads."""
    head_dim: Count = 32
    """Width of one head."""
    max_position_embeddings: Count = 4096
    """Longest sequence the model is meant for; data.seq_len may not exceed it."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: Positive = 1e-6
    """Added to the mean square inside RMSNorm."""
    qk_norm: bool = True
    """RMSNorm on queries and keys."""
    qk_norm_width: Literal["head", "projection"] = "head"
    """What qk_norm takes the mean square of: each head, as Qwen3, or all heads, as OLMoE."""
    clip_qkv: Positive | None = None
    """Queries, keys and values are clipped to this size before rotation, as OLMoE; null: not."""
    attention_bias: bool = False
    """Biases in the query, key, value and output projections."""
    attention_out_bias: bool = True
    """attention_bias holds for the output projection too; false as Qwen2."""
    attention_sinks: bool = False
    """One learned logit a head that takes attention and gives no value, as gpt-oss."""
    sliding_window: Count | None = None
    """Keys each query sees, itself included; null sees all earlier ones."""
    sliding_window_pattern: Natural = 0
    """Every n-th block sees all keys in spite of sliding_window; 0: none does."""
    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    """How rotary frequencies are scaled beyond original_max_position_embeddings."""
    rope_factor: Positive = 1.0
    """How many times longer the context became; read by linear, llama3 and yarn."""
    original_max_position_embeddings: Count | None = None
    """Context before scaling; needed by llama3 and yarn."""
    rope_low_freq_factor: Positive = 1.0
    """llama3: wavelengths above original context / this are scaled in full."""
    rope_high_freq_factor: Positive = 4.0
    """llama3: wavelengths below original context / this are left alone."""
    rope_beta_fast: Positive = 32.0
    """yarn: dimensions that turn more often than this in the original context are left alone."""
    rope_beta_slow: Positive = 1.0
    """yarn: dimensions that turn less often than this are scaled in full."""
    rope_mscale: NonNegative = 0.0
    """yarn as DeepSeek: attention temperature of the rotation; 0 takes the paper's."""
    rope_mscale_all_dim: NonNegative = 0.0
    """yarn as DeepSeek: attention temperature of the whole softmax; 0 means none."""
    rope_truncate: bool = True
    """yarn: round the correction range to whole dimensions."""
    rope_interleave: bool = False
    """Rotate neighbours (2i, 2i+1), as DeepSeek, instead of halves."""
    kv_lora_rank: Natural = 0
    """Width of the compressed keys and values of multi-head latent attention; 0: grouped-query."""
    q_lora_rank: Natural = 0
    """Width of the compressed queries of latent attention; 0 does not compress them."""
    qk_nope_head_dim: Natural = 0
    """Latent attention: width of a query/key head without rotation."""
    qk_rope_head_dim: Natural = 0
    """Latent attention: width of a query/key head with rotation; all heads share that key."""
    v_head_dim: Natural = 0
    """Latent attention: width of a value head."""
    tie_word_embeddings: bool = False
    """Use the embedding matrix as output head."""
    initializer_range: Positive = 0.02
    """Standard deviation of every normal-initialised matrix."""
    num_experts: Natural = 0
    """Routed experts per MoE block; 0 makes every feed-forward dense."""
    num_experts_per_tok: Count = 2
    """Experts that each token visits."""
    moe_intermediate_size: Count = 176
    """Hidden width of one routed expert."""
    shared_expert_intermediate_size: Natural = 0
    """Hidden width of the expert that every token visits; 0 means none."""
    first_k_dense_replace: Natural = 0
    """Leading blocks that stay dense in a MoE model."""
    expert_bias: bool = False
    """Biases in the projections of the experts, as gpt-oss."""
    swiglu_limit: Positive | None = None
    """Clamp of gate and up in the experts' SwiGLU of gpt-oss; null is the plain SwiGLU."""
    routing: Literal["top_k", "expert_choice", "round_robin"] = "top_k"
    """Who chooses: tokens, experts (they look at later tokens), or nobody (for benchmarks)."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """Scores from router logits."""
    norm_topk_prob: bool = True
    """Divide the chosen router weights by their sum."""
    routed_scaling_factor: Positive = 1.0
    """Factor on the chosen router weights."""
    router_bias: bool = False
    """A learned bias in the router's projection, as gpt-oss."""
    n_group: Count = 1
    """Groups of experts; a token chooses experts of topk_group groups only."""
    topk_group: Count = 1
    """Groups that a token may choose from."""
    group_score: Literal["top2", "max"] = "top2"
    """Score of a group: the sum of its two best experts (DeepSeek-V3) or its best (V2)."""
    correction_bias: bool = False
    """Balance without loss: a bias on scores, for the choice only, moved once a step."""
    correction_bias_update_rate: NonNegative = 0.001
    """How far the correction bias moves in one optimizer step."""
    capacity_factor: NonNegative = 0.0
    """An expert takes this times its even share of a sequence's choices; 0 drops nothing."""
    drop_policy: Literal["weight", "position"] = "weight"
    """Who keeps a place when an expert is full: the largest weights or the earliest tokens."""
    router_aux_loss_coef: NonNegative = 0.01
    """Weight of the load-balance loss."""
    router_z_loss_coef: NonNegative = 0.0
    """Weight of the router z-loss."""
    router_aux_loss_scope: str = "sequence"
    """Tokens one balance loss looks at: sequence or micro_batch."""
    attention: str = "standard"
    """standard, or NAME of `attention.NAME` in curry_train.layers.VARIANTS; so the next three."""
    mlp: str = "standard"
    """Dense feed-forward and shared expert: standard (SwiGLU) or a variant."""
    router: str = "standard"
    """standard (TopKRouter) or a variant."""
    norm: str = "standard"
    """Norms of the residual stream: standard (RMSNorm) or a variant."""
    moe_backend: Literal["auto", "triton", "grouped_mm", "sorted", "reference"] = "auto"
    """What multiplies the experts; `python -m curry_train.kernels.report` says what auto takes."""

    @property
    def rotary_dim(self) -> int:
        """Entries of a query or key head that are turned."""
        return self.qk_rope_head_dim if self.kv_lora_rank else self.head_dim

    @property
    def query_dim(self) -> int:
        """Width of a query or key head."""
        latent = self.qk_nope_head_dim + self.qk_rope_head_dim
        return latent if self.kv_lora_rank else self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.v_head_dim if self.kv_lora_rank else self.head_dim

    def window_of(self, layer: int) -> int | None:
        """Return the keys that a query of block `layer` sees, None for all earlier ones."""
        every = self.sliding_window_pattern
        return None if every and (layer + 1) % every == 0 else self.sliding_window


@dataclass(frozen=True)
class DataConfig:
    """What is read, how it becomes tokens, how tokens become batches."""

    dataset: str = "embedded"
    """Key of curry_train.data.DATASETS, text or samples; ignored when input is given."""
    input: str | None = None
    """A text file, a folder of them, or one made by curry_train.data.prepare; null: see dataset."""
    tokenizer: str = "auto"
    """auto (a prepared corpus's own, else byte), byte, bpe trained here, or a tokenizer.json."""
    bpe_vocab_size: BpeSize = 1024
    """Vocabulary of a bpe tokenizer trained here, the end-of-document token included."""
    cache_dir: str = ".cache/data"
    """Where prepared corpora are kept."""
    val_fraction: Share = 0.06
    """Share held out: of documents, by their hash; of samples, as the dataset's function does."""
    seq_len: Count = 128
    """Tokens in one sample."""
    global_batch_size: Count = 8
    """Samples in one optimizer step over all ranks."""
    micro_batch_size: Literal["auto"] | Count = "auto"
    """Samples in one forward pass of one rank; auto: all it has, or 2*pp parts with a pipeline."""
    document_mask: bool = False
    """Attention stays inside a document; position ids restart with it."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: Positive = 2e-3
    """Peak learning rate."""
    min_lr: NonNegative | None = None
    """Learning rate at run.max_steps; null is a tenth of lr."""
    warmup_steps: Natural = 50
    """Steps of linear warm-up; may exceed run.max_steps."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """cosine, wsd (warm-up, stable, decay) or constant."""
    decay_steps: Natural = 0
    """Length of the linear decay of wsd, ending at run.max_steps; 0 takes a fifth of the run."""
    weight_decay: NonNegative = 0.1
    """Decoupled decay, on matrices only; vectors, norms and embeddings never decay."""
    beta1: Decay = 0.9
    """Decay of the first moment."""
    beta2: Decay = 0.99
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: NonNegative = 1.0
    """Global norm that gradients are clipped to; 0 clips nothing."""


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the mesh axes."""

    pp: Count = 1
    """Pipeline stages."""
    dp_replicate: Count = 1
    """Replicas of the whole model."""
    dp_shard: Literal[-1] | Count = -1
    """Ranks that share the batch inside one replica; -1 fills the world."""
    cp: Count = 1
    """Ranks that share one sequence."""
    tp: Count = 1
    """Ranks that share each matrix."""
    ep: Count = 1
    """Ranks that share the experts; divides dp_shard*cp*tp and is no factor of the world."""
    zero: Literal[0, 1, 2, 3] = 0
    """What dp_shard*cp ranks divide: 0 nothing, 1 moments, 2 also gradients, 3 also parameters."""
    reshard: Literal["auto"] | bool = "auto"
    """Drop gathered parameters after each forward; auto: zero=3 does, split-backward never."""
    schedule: Literal["gpipe", "1f1b", "interleaved1f1b", "interleaved_zb", "zbv", "dualpipev"] = (
        "1f1b"
    )
    """gpipe, 1f1b, interleaved1f1b, interleaved_zb, zbv or dualpipev; read when pp > 1."""
    pp_split: Literal["auto"] | list[Count] = "auto"
    """Blocks of each pipeline stage in model order; auto: even by the cost of blocks and ends."""
    overlap: bool = False
    """Run dualpipev so that experts' messages travel while another micro-batch computes."""
    cp_kind: Literal["ring", "all_gather"] = "ring"
    """How cp ranks see each other's keys: passed round, or gathered at once."""
    recompute: Literal["none", "full", "selective"] | Count = "none"
    """Activations made again in backward: none, full, selective (cheap ops) or every n-th block."""


@dataclass(frozen=True)
class RunConfig:
    """How long, how often, where to."""

    dir: str = "runs"
    """Folder that holds the run folders."""
    name: str = "quickstart"
    """First part of the run folder's name."""
    max_steps: Count = 1000
    """Optimizer steps of the whole run."""
    resume: str = "never"
    """never, auto, a run folder or a checkpoint folder."""
    init_from: str | None = None
    """A checkpoint or a folder of Hugging Face whose weights start the run (weights only)."""
    log_every: Count = 10
    """Steps between logged rows; the first and last step are always logged."""
    eval_every: Natural = 250
    """Steps between validations; 0 validates at the end only."""
    save_every: Natural = 250
    """Steps between checkpoints; 0 saves at the end only."""
    async_save: bool = False
    """Write checkpoints beside the training steps; a step only waits for the copy of its state."""
    keep: Natural = 3
    """Newest checkpoints kept; 0 keeps all."""
    keep_every: Natural = 0
    """Checkpoints of steps that it divides are kept for ever; 0 means none."""
    keep_best: Natural = 0
    """Checkpoints of lowest val/loss kept, if saved in a step that validates; 0 means none."""
    stop_grace: Positive = 25.0
    """Seconds from a stop signal to the end of the process; a longer stop is told."""
    comm_timeout: Positive = 600.0
    """Seconds after which a rank that waits for a silent peer has told it and ended."""
    max_nonfinite: Natural = 3
    """Steps in a row with a non-finite loss or gradient that abort the run; 0 never aborts."""
    sample_tokens: Natural = 200
    """Tokens of sampled text at the end; 0 samples none."""
    sample_prompt: str = ""
    """What the sample continues."""


@dataclass(frozen=True)
class TrackingConfig:
    """Mirrors of the journal and metrics."""

    tensorboard: bool = True
    """Write TensorBoard events to the run folder's tb/."""


@dataclass(frozen=True)
class Config:
    """The whole run."""

    seed: Seed = 0
    """Seed of every source of randomness."""
    devices: Literal["auto"] | Count = "auto"
    """Processes when train.py starts them itself; auto: one for each GPU, else one."""
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto (cuda when there is one, else cpu), cpu, cuda or mps."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """fp32, bf16, fp16 or fp64; parameters, moments and reductions stay fp32 (fp64 for fp64)."""
    compile: bool = False
    """torch.compile each block."""
    dry_run: bool = False
    """Build on the meta device, print the plan, train nothing."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig = field(default_factory=RunConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


class ConfigError(ValueError):
    """The configuration cannot be used; `problems` says why, one sentence each."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        many = [f"{len(problems)} problems", *(f"  {problem}" for problem in problems)]
        super().__init__("configuration: " + "\n".join(problems if len(problems) == 1 else many))


class Setting(NamedTuple):
    """What a value of one key must be; the default `???` says that it must be given."""

    kind: Any
    default: Any


def sections(model: type) -> dict[str, type]:
    """Return group -> dataclass; `model` is that of the architecture, see model_schema."""
    hints = typing.get_type_hints(Config)
    groups = [name for name, hint in hints.items() if is_dataclass(hint)]
    return {name: hints[name] for name in groups} | {"model": model}


def known_settings(model: type) -> dict[str, Setting]:
    """Return every key that a command line can set, those of the root first."""
    groups, found = sections(model), {}
    for group, cls in {"": Config, **groups}.items():
        hints = typing.get_type_hints(cls, include_extras=True)
        for f in fields(cls):
            if group or f.name not in groups:
                default = f.default if f.default_factory is MISSING else f.default_factory()
                default = "???" if default is MISSING else default
                found[f"{group}.{f.name}".lstrip(".")] = Setting(hints[f.name], default)
    return found


def build_config(model: type, values: dict[str, Any]) -> Config:
    """Make a Config of a value for each of known_settings; none is looked at."""
    groups = {
        group: cls(**{f.name: values[f"{group}.{f.name}"] for f in fields(cls)})
        for group, cls in sections(model).items()
    }
    return Config(**{key: value for key, value in values.items() if "." not in key}, **groups)


def model_schema(architecture: str) -> type:
    """Return the dataclass of the `model` group: ModelConfig, or the Config of another model class.

    Raises: KeyError for a name that curry_train.models.MODELS lacks.
    """
    if architecture == "decoder":
        return ModelConfig  # without loading torch for the Decoder itself
    return model_class(architecture).Config


def model_class(architecture: str) -> type:
    """Return the class behind model.architecture, which loads torch. Raises: as model_schema."""
    module, _, name = MODELS[architecture].partition(":")
    return getattr(import_module(module), name)


def to_dict(config: Config) -> dict[str, Any]:
    """Return nested plain values, as config.yaml of a run folder holds them."""
    return asdict(config)


def config_hash(config: Config) -> str:
    """Return the sha256 of what decides the numbers of a run: not where, how long or on what."""
    tree = to_dict(config)
    for name in ("run", "tracking", "devices", "dry_run"):
        del tree[name]
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def planned_world(config: Config) -> int | None:
    """Count the processes of the run; None where only the launch can tell (GPUs, srun)."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if "SLURM_NTASKS" in os.environ:
        return None
    if isinstance(config.devices, int) and config.devices >= 1:
        return config.devices
    return 1 if config.accelerator == "cpu" else None


def resolve_micro_batch(config: Config, batch_world: int) -> int:
    """Return the samples of one forward pass when batch_world ranks share each global batch.

    auto: the whole local batch; with pp stages the largest size that makes 2*pp micro-batches.
    """
    size = config.data.micro_batch_size
    if isinstance(size, int):
        return size
    local = config.data.global_batch_size // batch_world
    wanted = 2 * config.parallel.pp if config.parallel.pp > 1 else 1
    fitting = (n for n in range(local, 1, -1) if local % n == 0 and local // n >= wanted)
    return next(fitting, 1)


if __name__ == "__main__":
    from curry_train.command_line import main

    sys.exit(main(sys.argv[1:]))

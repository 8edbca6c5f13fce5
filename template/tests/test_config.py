"""A command line becomes exactly the Config it says, or every mistake in it is told at once."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import pytest
import yaml

from curry_train import command_line, models
from curry_train.compose import GROUPS, load_config, options
from curry_train.config import (
    Config,
    ConfigError,
    ModelConfig,
    Share,
    config_hash,
    model_schema,
    resolve_micro_batch,
    to_dict,
)
from curry_train.data import DATASETS
from curry_train.rules import problems

PROJECT = Path(__file__).resolve().parents[1]
MODEL_FILES = ", ".join(options(PROJECT, "model"))
CHOICES = [(group, option) for group in GROUPS for option in options(PROJECT, group)]


@pytest.fixture(autouse=True)
def unlaunched(monkeypatch):
    """Hide a launcher that the tests themselves run under."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def project(tmp_path):
    """A copy of the configuration files, to be spoilt."""
    shutil.copytree(PROJECT / "configs", tmp_path / "configs")
    return tmp_path


def told(*argv: str, project: Path = PROJECT) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv, project=project)
    return caught.value.problems


def set_to(config: Config, key: str, value) -> Config:
    group, _, name = key.rpartition(".")
    if not group:
        return replace(config, **{name: value})
    return replace(config, **{group: replace(getattr(config, group), **{name: value})})


# What the files say


def test_the_default_is_the_quickstart():
    config = load_config([])
    assert config.model == ModelConfig(num_hidden_layers=4, num_experts=4)
    model = config.model
    assert (model.hidden_size, model.num_attention_heads, model.num_key_value_heads) == (128, 4, 2)
    assert (model.num_experts_per_tok, model.moe_intermediate_size) == (2, 176)
    assert (config.data.seq_len, config.data.global_batch_size) == (128, 8)
    assert (config.optim.lr, config.optim.min_lr, config.optim.warmup_steps) == (2e-3, None, 50)
    assert (config.run.max_steps, config.run.name) == (1000, "quickstart")
    assert load_config(["experiment=quickstart"]) == config == load_config(["experiment=null"])


@pytest.mark.parametrize("model", ["tiny_dense", "tiny_moe"])
def test_presets_are_plain_hugging_face_models(model):
    config = load_config([f"model={model}"]).model
    assert config.architecture == "decoder" and config.qk_norm and config.norm_topk_prob
    assert not config.tie_word_embeddings and config.shared_expert_intermediate_size == 0


@pytest.mark.parametrize("experiment", options(PROJECT, "experiment"))
@pytest.mark.parametrize("model", options(PROJECT, "model"))
def test_a_model_on_the_command_line_is_exactly_that_model(experiment, model):
    written = yaml.safe_load((PROJECT / f"configs/model/{model}.yaml").read_text())
    config = load_config([f"experiment={experiment}", f"model={model}"])
    composed = to_dict(config)["model"]
    for name, field in model_schema(config.model.architecture).__dataclass_fields__.items():
        wanted = written.get(name, field.default)
        assert composed[name] == (float(wanted) if isinstance(composed[name], float) else wanted)


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_every_file_composes(group, option):
    config = load_config([f"{group}={option}"])
    assert isinstance(config, Config)
    if group != "experiment":
        tree = yaml.safe_load((PROJECT / f"configs/{group}/{option}.yaml").read_text()) or {}
        values = {key: value for key, value in tree.items() if key != "defaults"}
        composed = to_dict(config)[group]
        for key, value in values.items():
            same_type = type(composed[key])
            assert composed[key] == (same_type(value) if value is not None else None)


def test_smoke_is_fifty_steps_with_a_checkpoint_on_the_way():
    config = load_config(["experiment=smoke"])
    assert (config.run.max_steps, config.run.save_every, config.run.name) == (50, 25, "smoke")
    assert config.optim.warmup_steps < 50


def test_wsd_keeps_the_rest_of_adamw():
    base, wsd = load_config([]).optim, load_config(["optim=adamw_wsd"]).optim
    assert wsd == replace(base, schedule="wsd")


# What the command line says


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("optim.lr=1e-3", "optim.lr", 0.001),
        ("optim.lr=1", "optim.lr", 1.0),
        ("seed=1_000", "seed", 1000),
        ("compile=True", "compile", True),
        ("compile=off", "compile", False),
        ("model.sliding_window=64", "model.sliding_window", 64),
        ("model.sliding_window=null", "model.sliding_window", None),
        ("data.input=null", "data.input", None),
        ("data.micro_batch_size=4", "data.micro_batch_size", 4),
        ("data.micro_batch_size=auto", "data.micro_batch_size", "auto"),
        ("devices=1", "devices", 1),
        ("run.dir=/data/a b=c, d", "run.dir", "/data/a b=c, d"),
        ("run.dir='/data/x'", "run.dir", "/data/x"),
        ('run.sample_prompt="To be, or"', "run.sample_prompt", "To be, or"),
        (r"run.sample_prompt='it\'s'", "run.sample_prompt", "it's"),
        ("run.sample_prompt='null'", "run.sample_prompt", "null"),
        ("run.sample_prompt=", "run.sample_prompt", ""),
        ("run.sample_prompt=a: [b {c} #d $5", "run.sample_prompt", "a: [b {c} #d $5"),
        (r"run.sample_prompt=\${x}", "run.sample_prompt", "${x}"),
        ("run.sample_prompt=Grüße 🙂", "run.sample_prompt", "Grüße 🙂"),
        ("run.name=2024", "run.name", "2024"),
        ("optim.min_lr=${optim.lr}", "optim.min_lr", 0.002),
        ("run.name=${experiment_name}", "run.name", None),
    ],
)
def test_a_value_is_read_by_the_type_of_its_field(word, key, value):
    if key == "run.name" and value is None:
        assert "Interpolation key 'experiment_name' not found" in told(word)[0]
        return
    tree = to_dict(load_config([word]))
    for part in key.split("."):
        tree = tree[part]
    assert tree == value and type(tree) is type(value)


def test_the_last_of_two_values_holds():
    assert load_config(["optim.lr=1", "model=tiny_moe", "optim.lr=2", "model=tiny_dense"]) == (
        load_config(["optim.lr=2", "model=tiny_dense"])
    )


def test_environment_variables_can_be_named(monkeypatch):
    monkeypatch.setenv("SCRATCH_FOLDER", "/scratch/x")
    assert load_config(["run.dir=${oc.env:SCRATCH_FOLDER}/runs"]).run.dir == "/scratch/x/runs"
    monkeypatch.delenv("SCRATCH_FOLDER")
    (problem,) = told("run.dir=${oc.env:SCRATCH_FOLDER}")
    assert "Environment variable 'SCRATCH_FOLDER' not found" in problem


# Mistakes


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["optim.lrr=1"], "optim.lrr=1: no such setting; did you mean optim.lr=1?"),
        (["lr=1"], "did you mean optim.lr=1?"),
        (["train.max_steps=9"], "did you mean run.max_steps=9?"),
        (["run.checkpoint_every=9"], "did you mean run.save_every=9?"),
        (["optim.max_step=9"], "did you mean run.max_steps=9?"),
        (["batch_size=4"], "data.global_batch_size=4"),
        (["modle=tiny_moe"], "did you mean model=tiny_moe?"),
        (["optim.lr.peak=1"], "no such setting"),
        (["tracking.zzzzzz=1"], "settings of tracking are tensorboard"),
        (["qqqqqqqq=1"], "python train.py --help"),
        (["hydra.run.dir=x"], "did you mean run.dir=x?"),
        (["model=smal"], f"options are {MODEL_FILES}"),
        (["model=tiny_dense,tiny_moe"], f"options are {MODEL_FILES}"),
        (["model=null"], f"options are {MODEL_FILES}"),
        (["model="], f"options are {MODEL_FILES}"),
        (["optim=../optim/adamw"], "options are adamw, adamw_wsd"),
        (["experiment=nope"], "quickstart, smoke"),
        (["optim.lr=abc"], "optim.lr=abc: must be a finite number above 0, such as optim.lr=0.002"),
        (["optim.lr=nan"], "must be a finite number"),
        (["optim.lr=1e999"], "must be a finite number"),
        (["optim.lr=1e-3,2e-3"], "must be a finite number"),
        (["optim.lr="], "optim.lr=: must be a finite number"),
        (["optim.lr=null"], "optim.lr=null: must be a finite number"),
        (["run.max_steps=1.5"], "must be an integer of at least 1, such as run.max_steps=1000"),
        (["run.max_steps=1e3"], "must be an integer"),
        (["compile=2"], "compile=2: must be true or false, such as compile=false"),
        (["run.name=null"], "run.name=null: must be text"),
        (
            ["model.sliding_window=x"],
            "must be an integer of at least 1 or null, such as model.sliding_window=null",
        ),
        (
            ["precision=fp8"],
            "precision=fp8: must be fp32, bf16, fp16 or fp64, such as precision=fp32",
        ),
        (["accelerator=gpu"], "must be auto, cpu, cuda or mps, such as accelerator=auto"),
        (
            ["optim.schedule=linear"],
            "must be cosine, wsd or constant, such as optim.schedule=cosine",
        ),
        (["model.router_aux_loss_scope=batch"], "allowed are sequence, micro_batch, global"),
        (
            ["model.router_aux_loss_scope=global", "data.micro_batch_size=2"],
            "needs the whole batch in one pass, and a step has 4 micro-batches",
        ),
        (
            ["model.vocab_size=???"],
            "model.vocab_size=???: has no value yet; set model.vocab_size to",
        ),
        (
            ["model.architecture=llama9"],
            "model.architecture=llama9: no such model; known are decoder",
        ),
        (["+foo=1"], "+foo=1: no such setting"),
        (["++foo.bar=1"], "++foo.bar=1: no such setting"),
        (["~foo"], "~foo: no such setting"),
        (["+optim.lrr=1"], "did you mean optim.lr=1?"),
        (["--lr", "0.1"], "--lr 0.1: no such setting; did you mean optim.lr=0.1?"),
        (["--max-steps=5"], "did you mean run.max_steps=5?"),
        (["seed"], "seed: has no value; write seed=VALUE"),
        (["~optim.eps"], "~optim.eps: has no value; write optim.eps=VALUE"),
        (["model"], "write model=VALUE"),
        (["--dry_run"], "--dry_run: has no value; write dry_run=VALUE"),
        (["--cfg", "job"], "--cfg job: no such setting"),
        (["-m"], "-m: one command is one run"),
        (["--multirun"], "--multirun: one command is one run"),
        ([""], ": no such setting"),
        (["=5"], "no such setting"),
        (["optim.min_lr=${optim.lr"], "what stands in ${ } cannot be read; write ${KEY}"),
    ],
)
def test_one_mistake_is_one_plain_sentence(argv, said):
    (problem,) = told(*argv)
    assert said in problem
    # Words of Hydra, of its parser and of Python have no place before a user.
    assert not re.search(
        r"EOF|EQUAL|viable|append to your config|\+\w+=\w+ to|Traceback|Error", problem
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--optim.lr=1"],
        ["--optim.lr", "1"],
        ["-optim.lr=1"],
        ["optim.lr", "1"],
        ["optim.lr", "=", "1"],
        ["optim.lr", "=1"],
        ["optim.lr=", "1"],
        ["+optim.lr=1"],
        ["++optim.lr=1"],
    ],
)
def test_a_setting_spelt_differently_is_answered_with_the_right_spelling(words):
    (problem,) = told(*words, "optim.min_lr=0")
    assert problem.startswith(" ".join(words) + ":") and problem.endswith("write optim.lr=1")


def test_values_with_dashes_or_equals_signs_stay_with_their_key():
    assert told("--optim.min_lr", "-1", "model=tiny_dense")[0].endswith("write optim.min_lr=-1")
    assert told("--run.dir", "/a=b")[0].endswith("write run.dir=/a=b")
    assert told("model", "tiny_dense")[0].endswith("write model=tiny_dense")


def test_all_mistakes_of_a_command_line_are_told_at_once():
    argv = [
        "optim.lrr=1", "model=smal", "run.max_steps=abc", "data.seq_len=-5", "--optim.lr=3",
        "+foo=1", "-m", "optim.beta1", "0.5", "optim.eps=", "precision=fp23", "optim.beta2=7",
        "data.tokenizer=bpe", "seed", "run.resume=atuo", "model.vocab_size=???",
    ]  # fmt: skip
    found = told(*argv)
    for said in (
        "optim.lrr=1:", "model=smal:", "run.max_steps=abc:", "data.seq_len=-5:", "--optim.lr=3:",
        "+foo=1:", "-m:", "optim.beta1 0.5:", "optim.eps=:", "precision=fp23:", "optim.beta2=7:",
        "seed:", "run.resume=atuo:", "model.vocab_size=???:",
    ):  # fmt: skip
        assert sum(problem.startswith(said) for problem in found) == 1, said
    assert len(found) == 14  # the too small vocabulary is not judged: its value is unknown


def test_a_badly_typed_value_spares_sentences_about_its_default():
    assert len(told("optim.lr=x", "optim.min_lr=1")) == 1


def test_one_problem_is_one_line_and_several_are_a_list():
    with pytest.raises(ConfigError) as one:
        load_config(["compile=x"])
    assert (
        str(one.value) == "configuration: compile=x: must be true or false, such as compile=false"
    )
    with pytest.raises(ConfigError) as two:
        load_config(["seed=x", "compile=x"])
    assert str(two.value).splitlines()[0] == "configuration: 2 problems"
    assert len(str(two.value).splitlines()) == 3


# Mistakes in files


def test_unknown_missing_and_wrong_keys_of_files_are_told_together(project):
    path = project / "configs/model/mine.yaml"
    path.write_text("hiden_size: 64\nvocab_size: ???\nnum_experts: no\nhead_dim: ${optim.nope}\n")
    found = told("model=mine", "sed=1", project=project)
    assert len(found) == 5
    for said in (
        "sed=1: no such setting; did you mean seed=1?",
        "model.hiden_size=64 in a file of configs: no such setting; did you mean model.hidden_",
        "model.vocab_size=???: has no value yet",
        "model.num_experts=false: must be an integer",
        "model.head_dim=${optim.nope}: Interpolation key 'optim.nope' not found",
    ):
        assert any(problem.startswith(said) for problem in found), said


def test_a_missing_value_may_be_given_on_the_command_line(project):
    (project / "configs/model/mine.yaml").write_text("vocab_size: ???\n")
    assert load_config(["model=mine", "model.vocab_size=300"], project=project).model == (
        ModelConfig(vocab_size=300)
    )


def test_a_file_that_is_no_yaml_is_named_with_its_line(project):
    (project / "configs/model/mine.yaml").write_text("hidden_size: [1\n")
    (problem,) = told("model=mine", project=project)
    assert "configs/model/mine.yaml" in problem and "line 2" in problem and "\n" not in problem


def test_unusable_values_are_told_beside_a_broken_file(project):
    (project / "configs/model/mine.yaml").write_text("hidden_size: [1\n")
    found = told("model=mine", "optim.lr=x", "data.seq_len=9999", "nope=1", project=project)
    assert len(found) == 3  # how long a sequence the model takes is not known
    for said in ("optim.lr=x: must be", "nope=1: no such", "a file of configs cannot be read"):
        assert any(problem.startswith(said) for problem in found), said


def test_an_unknown_option_in_an_experiment_lists_the_options(project):
    experiment = project / "configs/experiment/mine.yaml"
    experiment.write_text("# @package _global_\ndefaults:\n  - override /model: nope\n")
    (problem,) = told("experiment=mine", project=project)
    assert problem.startswith("model=nope in a file of configs: no such option")
    assert MODEL_FILES in problem


@pytest.mark.parametrize(
    "text", ["run: {max_steps: 5}\n", "defaults: [override /model: tiny_moe]\n"]
)
def test_an_experiment_without_its_package_line_says_so(project, text):
    (project / "configs/experiment/mine.yaml").write_text(text)
    (problem,) = told("experiment=mine", project=project)
    assert "starts with `# @package _global_`" in problem


def test_an_experiment_may_change_root_settings(project):
    experiment = project / "configs/experiment/mine.yaml"
    experiment.write_text("# @package _global_\nprecision: bf16\noptim: {lr: 1e-2}\n")
    config = load_config(["experiment=mine"], project=project)
    assert (config.precision, config.optim.lr) == ("bf16", 0.01)
    assert load_config(["experiment=mine", "precision=fp32"], project=project).precision == "fp32"


def test_a_folder_without_configuration_is_named(tmp_path):
    assert "has no configs/config.yaml" in told(project=tmp_path)[0]


def test_a_project_in_a_folder_with_an_odd_name_composes(tmp_path):
    shutil.copytree(PROJECT / "configs", tmp_path / "a b=c, %d 'é" / "configs")
    assert load_config([], project=tmp_path / "a b=c, %d 'é") == load_config([])


# Rules


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        *((key, 0, "must be an integer of at least 1") for key in (
            "model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads",
            "model.num_key_value_heads", "model.head_dim", "model.intermediate_size",
            "model.vocab_size", "model.num_experts_per_tok", "model.moe_intermediate_size",
            "model.sliding_window", "data.seq_len", "data.global_batch_size", "run.max_steps",
            "run.log_every", "parallel.pp", "parallel.dp_replicate",
        )),
        *((key, -1, " of at least 0") for key in (
            "seed", "run.keep", "run.eval_every", "run.save_every", "run.sample_tokens",
            "run.max_nonfinite", "optim.warmup_steps", "optim.weight_decay", "optim.max_grad_norm",
            "model.num_experts", "model.shared_expert_intermediate_size",
        )),
        *((key, 0.0, "must be a finite number above 0") for key in (
            "optim.lr", "optim.eps", "run.stop_grace", "run.comm_timeout", "data.val_fraction",
            "model.rope_theta", "model.rms_norm_eps", "model.initializer_range",
        )),
        *((key, 1.0, "below 1, such as") for key in (
            "optim.beta1", "optim.beta2", "data.val_fraction",
        )),
        ("seed", 2**32, "below 2**32, such as seed=0"),
        ("data.bpe_vocab_size", 256, "must be an integer of at least 257"),
        ("devices", 0, "must be auto or an integer of at least 1"),
        ("devices", "all", "must be auto or an integer of at least 1"),
        ("data.micro_batch_size", 0, "must be auto or an integer of at least 1"),
        ("data.micro_batch_size", "3.5", "must be auto or an integer of at least 1"),
        ("parallel.dp_shard", 0, "must be -1 or an integer of at least 1"),
        ("model.num_key_value_heads", 3, "set it to one of 1, 2, 4"),
        ("model.head_dim", 31, "must be even; set model.head_dim=32"),
        ("model.num_experts_per_tok", 5, "at most 4"),
        ("model.first_k_dense_replace", 5, "model.num_hidden_layers=4"),
        ("data.seq_len", 4097, "longer than model.max_position_embeddings=4096"),
        ("optim.min_lr", 0.01, "above the peak optim.lr=0.002"),
        ("data.micro_batch_size", 3, "set it to auto or one of 1, 2, 4, 8"),
        ("model.vocab_size", 256, "set model.vocab_size=257 or more"),
        ("data.tokenizer", "bpe", "set model.vocab_size=1024 or more"),
        ("data.tokenizer", "no/such.json", "must be auto, byte, bpe or a tokenizer.json that"),
        ("data.dataset", "wiki", f"known are {', '.join(DATASETS)}"),
        ("data.input", "no/such.txt", "data.input=no/such.txt: no such file or folder"),
        ("run.resume", "runs/none", "must be never, auto or a folder that exists"),
        ("run.init_from", "runs/none", "runs/none: is no folder; give a folder step-XXXXXXXX"),
        ("run.name", "../up", "allowed are letters, digits"),
        ("run.name", "", "allowed are letters, digits"),
        ("run.name", "\u00fcben", "allowed are letters, digits"),
        ("parallel.zero", 4, "must be 0, 1, 2 or 3, such as parallel.zero=0"),
        ("parallel.tp", 3, "does not divide model.num_attention_heads=4; set it to one of 1, 2, 4"),
        ("parallel.cp", 3, "set data.seq_len to a multiple of 6"),
        ("parallel.ep", 3, "does not divide model.num_experts=4; set it to one of 1, 2, 4"),
        ("parallel.pp", 5, "makes 5 stages, more than model.num_hidden_layers=4"),
        ("parallel.schedule", "pipedream", "must be gpipe, 1f1b, interleaved1f1b, interleaved_zb"),
        ("parallel.reshard", 2, "must be auto or true or false"),
        ("parallel.recompute", 0, "parallel.recompute=0: must be"),
        ("parallel.overlap", True, "set parallel.schedule=dualpipev, or parallel.overlap=false"),
        ("parallel.cp_kind", "flash", "must be ring or all_gather"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_work_is_named_with_what_can(key, value, said):
    found = problems(set_to(load_config([]), key, value))
    assert any(said in problem and f"{key}=" in problem for problem in found), found


LATENT = (
    "model.kv_lora_rank=16 model.qk_nope_head_dim=16 model.qk_rope_head_dim=8 model.v_head_dim=16"
    " model.num_key_value_heads=4 model.qk_norm=false"
)
YARN = "model.rope_type=yarn model.rope_factor=4 model.original_max_position_embeddings=64"
LLAMA3 = YARN.replace("yarn", "llama3")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("model.sliding_window_pattern=2", "model.sliding_window_pattern=2: names the blocks"),
        (
            "model.sliding_window=8 model.sliding_window_pattern=1",
            "model.sliding_window_pattern=1: every block would see all keys",
        ),
        *(
            (f"model.{name}=8", f"model.{name}=8: read by latent attention only, and")
            for name in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        ),
        *(
            (f"{LATENT} model.{name}=0", f"model.{name}=0: latent attention (model.kv_lora_rank")
            for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        ),
        (f"{LATENT} model.qk_rope_head_dim=7", "set model.qk_rope_head_dim=8"),
        (f"{LATENT} model.v_head_dim=25", "model.v_head_dim=25: fused attention takes values no"),
        (f"{LATENT} model.num_key_value_heads=2", "set model.num_key_value_heads=4"),
        (f"{LATENT} model.qk_norm=true", "set model.qk_norm=false"),
        (f"{LATENT} model.attention_sinks=true", "set model.attention_sinks=false"),
        (f"{LATENT} model.clip_qkv=8", "set model.clip_qkv=null"),
        (
            "model.qk_norm=false model.qk_norm_width=projection",
            "model.qk_norm_width=projection: read with model.qk_norm=true only",
        ),
        ("model.rope_factor=2", "model.rope_factor=2.0: model.rope_type=default scales nothing"),
        ("model.rope_type=linear model.rope_factor=0.5", "set it to at least 1"),
        ("model.rope_type=yarn", "model.rope_type=yarn scales from the context before it"),
        ("model.rope_type=llama3", "model.rope_type=llama3 scales from the context before it"),
        (
            "model.rope_type=linear model.original_max_position_embeddings=64",
            "model.rope_type=linear does not read it; set it to null",
        ),
        (f"{LLAMA3} model.rope_low_freq_factor=4", "must be below model.rope_high_freq_factor=4,"),
        (f"{YARN} model.rope_beta_slow=33", "must be at least model.rope_beta_slow=33:"),
        (f"{YARN} model.rope_theta=1", "model.rope_theta=1.0: yarn needs frequencies that fall"),
        (f"{YARN} model.rope_mscale=1", "set model.rope_mscale=0"),
        (f"{LATENT} model.rope_mscale_all_dim=1", "set model.rope_mscale_all_dim=0"),
        (f"{LATENT} {YARN} model.rope_mscale=1", "without model.rope_mscale_all_dim; set both"),
        (f"{LATENT} {YARN} model.rope_mscale_all_dim=1", "without model.rope_mscale; set both"),
    ],
)
def test_attention_that_cannot_work_is_one_sentence(argv, said):
    with pytest.raises(ConfigError) as refused:
        load_config(argv.split())
    [problem] = refused.value.problems
    assert said in problem and "; " in problem


@pytest.mark.parametrize(
    ("setting", "default"),
    [
        ("expert_bias=true", "false"),
        ("swiglu_limit=7.0", "null"),
        ("routing=round_robin", "top_k"),
        ("router_bias=true", "false"),
        ("correction_bias=true", "false"),
        ("capacity_factor=1.25", "0.0"),
        ("shared_expert_intermediate_size=64", "0"),
        ("first_k_dense_replace=1", "0"),
    ],
)
def test_a_setting_of_experts_without_experts_is_one_sentence(setting, default):
    load_config([f"model.{setting}"])
    with pytest.raises(ConfigError) as refused:
        load_config(["model=tiny_dense", f"model.{setting}"])
    [problem] = refused.value.problems
    assert problem.startswith(f"model.{setting}: read by blocks with experts only")
    assert problem.endswith(f"or model.{setting.partition('=')[0]}={default}")


@pytest.mark.parametrize(
    "argv",
    [["model.architecture=spiking"], ["model=tiny_spiking", "model.architecture=decoder"]],
)
def test_an_architecture_that_the_chosen_file_does_not_fit_is_one_sentence(argv):
    with pytest.raises(ConfigError) as refused:
        load_config(argv)
    [problem] = refused.value.problems
    assert problem.startswith(f"{argv[-1]}: the chosen file of configs/model holds settings")


@pytest.mark.parametrize(
    "argv",
    [
        LATENT,
        f"{LATENT} model.head_dim=31 model.q_lora_rank=8 model.attention_bias=true",
        f"{LATENT} model.v_head_dim=24",
        f"{LATENT} {YARN} model.rope_mscale=1 model.rope_mscale_all_dim=0.5",
        "model.sliding_window=8 model.sliding_window_pattern=2 model.attention_sinks=true",
        "model.sliding_window=8 model.sliding_window_pattern=100",
        "model.rope_type=linear model.rope_factor=2",
        f"{YARN} model.rope_beta_fast=1 model.rope_truncate=false",
        LLAMA3,
    ],
)
def test_attention_that_works_is_accepted(argv):
    assert load_config(argv.split()).model.num_hidden_layers == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optim.warmup_steps", 10**6),
        ("model.vocab_size", 50000),
        ("optim.min_lr", 0.0),
        ("optim.min_lr", 0.002),
        ("optim.max_grad_norm", 0.0),
        ("run.keep", 0),
        ("run.eval_every", 0),
        ("run.save_every", 0),
        ("run.sample_tokens", 0),
        ("parallel.dp_replicate", 2),
        ("data.seq_len", 4096),
    ],
)
def test_a_value_at_the_edge_is_accepted(key, value):
    assert problems(set_to(load_config([]), key, value)) == []


def test_the_defaults_can_be_used():
    assert problems(Config(), 1) == []


def test_a_constant_learning_rate_has_no_use_for_min_lr():
    assert load_config(["optim.schedule=constant", "optim.lr=1e-5"]).optim.lr == 1e-5


@pytest.mark.parametrize(
    ("argv", "world", "said"),
    [
        ([], 1, None),
        ([], 8, None),
        (["parallel.dp_replicate=2"], 4, None),
        (["parallel.dp_replicate=2", "parallel.dp_shard=2"], 4, None),
        ([], 3, "set data.global_batch_size to 6 or 9"),
        ([], 16, "set data.global_batch_size to 16"),
        (["parallel.dp_replicate=2"], 3, "parallel.dp_replicate=2"),
        (["parallel=single"], 2, "parallel.dp_shard=1"),
        (["data.micro_batch_size=8"], 2, "does not divide the 4 samples of one rank"),
        (["data.micro_batch_size=4"], 2, None),
    ],
)
def test_the_mesh_and_the_batch_fit_the_world(argv, world, said):
    found = problems(load_config(argv), world)
    assert (found == []) if said is None else (len(found) == 1 and said in found[0])


def test_the_world_of_the_launcher_or_of_devices_is_judged(monkeypatch):
    assert "3 ranks cannot share it" in told("devices=3")[0]
    assert "3 ranks cannot share it" in told("devices=3", "accelerator=cpu")[0]
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert "5 ranks cannot share it" in told()[0]


@pytest.mark.parametrize(
    ("batch", "micro", "pp", "ranks", "size"),
    [
        (8, "auto", 1, 1, 8),
        (8, "auto", 1, 2, 4),
        (8, "auto", 2, 1, 2),
        (8, "auto", 2, 2, 1),
        (24, "auto", 2, 1, 6),
        (12, "auto", 4, 1, 1),
        (2, "auto", 2, 1, 1),
        (8, 4, 1, 1, 4),
    ],
)
def test_auto_takes_the_largest_micro_batch_that_fills(batch, micro, pp, ranks, size):
    config = set_to(Config(), "data.global_batch_size", batch)
    config = set_to(set_to(config, "data.micro_batch_size", micro), "parallel.pp", pp)
    assert resolve_micro_batch(config, ranks) == size


# Identity


def test_the_hash_is_the_sha256_of_sorted_json_without_where_and_how_long():
    config = load_config([])
    tree = json.loads(json.dumps(to_dict(config)))
    for name in ("run", "tracking", "devices", "dry_run"):
        del tree[name]
    expected = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    assert config_hash(config) == expected
    unchanged = ["run.max_steps=7", "tracking=none", "devices=2", "dry_run=true", "optim.lr=0.0020"]
    assert config_hash(load_config(unchanged)) == expected
    for word in ("seed=1", "optim.lr=1", "precision=bf16", "data.seq_len=64", "accelerator=cpu"):
        assert config_hash(load_config([word])) != expected


# Models outside the decoder family


@dataclass(frozen=True)
class LadderConfig:
    rungs: int
    """Steps of the ladder."""
    lean: Share | Literal["none"] = "none"
    """How far from upright."""
    architecture: str = "ladder"
    """Key of MODELS."""
    widths: tuple[int, ...] = (1, 2)
    """Width of each rung."""

    def problems(self) -> list[str]:
        return [f"model.rungs={self.rungs}: a ladder has at least 2"] if self.rungs < 2 else []


class Ladder:
    Config = LadderConfig


@pytest.fixture
def ladder(monkeypatch, project):
    monkeypatch.setitem(models.MODELS, "ladder", f"{__name__}:Ladder")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[LadderConfig.__module__])
    (project / "configs/model/ladder.yaml").write_text("architecture: ladder\nrungs: ???\n")
    return project


def test_another_model_brings_its_own_settings_and_rules(ladder):
    config = load_config(
        ["model=ladder", "model.rungs=3", "model.widths=[3, 4]", "model.lean=.5"], project=ladder
    )
    assert config.model == LadderConfig(rungs=3, lean=0.5, widths=(3, 4))
    assert told("model=ladder", "model.rungs=1", project=ladder) == [
        "model.rungs=1: a ladder has at least 2"
    ]
    found = told("model=ladder", "model.hidden_size=4", "model.widths=5", project=ladder)
    assert any("model.rungs=???" in problem for problem in found)
    assert any(problem.startswith("model.hidden_size=4: no such setting") for problem in found)
    assert any("model.widths=5: must be a list like [1, 2]" in problem for problem in found)
    # Its rules wait until each value can be used.
    assert told("model=ladder", "model.rungs=1", "model.lean=1", project=ladder) == [
        "model.lean=1: must be a finite number above 0 and below 1 or none, such as model.lean=none"
    ]


def test_a_model_that_does_not_load_is_told(monkeypatch, ladder):
    monkeypatch.setitem(models.MODELS, "ladder", "curry_train.models.nowhere:Ladder")
    assert (
        "curry_train.models.nowhere:Ladder does not load" in told("model=ladder", project=ladder)[0]
    )


# Help, check and show


def run_python(*words: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *words], cwd=PROJECT, env={**os.environ, **env},
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip


def test_help_shows_every_setting_with_its_value_and_meaning():
    lines = command_line.help_text().splitlines()
    for section in fields(Config):
        names = [section.name]
        if section.name in GROUPS:
            group = getattr(Config(), section.name)
            names = [f"{section.name}.{field.name}" for field in fields(group)]
        for name in names:
            (place,) = [i for i, line in enumerate(lines) if line.startswith(f"  {name}=")]
            meaning = lines[place + 1] if place + 1 < len(lines) else ""
            assert re.match(r"      \S", meaning), f"{name} has no sentence"
    for group, option in CHOICES:
        row = rf"^  {group} (?:.*\n {{14}})*.*\b{option}\b"  # many options take more lines
        assert re.search(row, "\n".join(lines), re.MULTILINE), (group, option)
    assert "  model.num_experts=4" in lines, "the value of a plain `python train.py`"
    assert all(len(line) <= 100 for line in lines)


def test_help_and_checks_need_no_torch_and_little_time():
    program = (
        "import sys, time; from curry_train.command_line import load_or_exit, main\n"
        "assert main(['check']) == 0 and main(['show']) == 0\n"
        "try: load_or_exit(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "loaded = {'torch', 'lightning_fabric', 'tensorboard', 'tokenizers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "assert time.process_time() < 1.5, time.process_time()\n"
    )
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr


def test_the_files_of_the_configuration_import_each_other_one_way():
    files = ["config", "rules", "compose", "command_line"]
    for name in files[:-1]:
        text = (PROJECT / f"curry_train/{name}.py").read_text().split("if __name__")[0]
        later = files[files.index(name) + 1 :]
        assert not re.search(rf"(from|import) curry_train\.({'|'.join(later)})\b", text), name


def test_help_answers_although_a_file_is_broken(project):
    (project / "configs/config.yaml").write_text("defaults: [")
    assert "  optim.lr=0.002" in command_line.help_text(project)


def test_check_tells_all_problems_and_ends_with_2(tmp_path):
    result = run_python("-m", "curry_train.config", "check", "optim.lrr=1", "--seed", "x", "-m")
    assert result.returncode == 2 and result.stdout == ""
    assert "optim.lr=1?" in result.stderr and "--seed x: " in result.stderr
    assert "-m: one command" in result.stderr and "Traceback" not in result.stderr
    good = run_python("-m", "curry_train.config", "check", "accelerator=cpu", "devices=2")
    assert (good.returncode, good.stderr) == (0, "")
    assert "1024 tokens a step, 2 processes with micro-batches of 4, config_hash" in good.stdout


def test_show_prints_the_resolved_values(capsys):
    assert command_line.main(["show", "optim.lr=1", "run.dir=a: b"]) == 0
    config = load_config(["optim.lr=1", "run.dir=a: b"])
    assert yaml.safe_load(capsys.readouterr().out) == to_dict(config)
    assert command_line.main(["show", "--json", "optim.lr=1"]) == 0
    assert json.loads(capsys.readouterr().out)["optim"]["lr"] == 1.0


@pytest.mark.parametrize(
    ("env", "prints"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "1", "LOCAL_RANK": "1"}, False),
        ({"RANK": "2", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"SLURM_PROCID": "3"}, False),
    ],
)
def test_one_rank_speaks_and_all_end_with_2(env, prints, monkeypatch, capsys):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command_line, "RANK_PATIENCE", 0.0)
    monkeypatch.setattr(command_line.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        command_line.load_or_exit(["optim.lrr=1"])
    assert end.value.code == 2
    assert ("optim.lr=1?" in capsys.readouterr().err) == prints


@pytest.mark.dist
def test_the_first_rank_is_heard_although_another_ends_first(tmp_path):
    program = tmp_path / "late.py"
    program.write_text(
        "import os, time\n"
        "from curry_train import command_line\n"
        "time.sleep(1.0 if os.environ['RANK'] == '0' else 0.0)\n"
        "command_line.load_or_exit(['seed=x'])\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    result = run_python(*launcher, str(program), PYTHONPATH=str(PROJECT))
    assert result.returncode != 0
    assert result.stderr.count("seed=x: must be an integer") == 1
    assert "(exitcode: 2)" in result.stderr and "exitcode: -15" not in result.stderr


def test_help_ends_with_0(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.load_or_exit(["optim.lr=1", "--help"])
    assert not end.value.code and "optim.lr" in capsys.readouterr().out

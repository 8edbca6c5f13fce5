"""What each launcher's environment means, before any process is started."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from curry_train import launch
from curry_train.compose import load_config
from curry_train.config import Config, ConfigError, ModelConfig
from curry_train.data import open_corpus
from curry_train.parallel.mesh import Mesh
from curry_train.runtime import assemble

PROJECT = Path(__file__).resolve().parents[1]
TORCHRUN = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5", "LOCAL_RANK": "1"}
FABRIC = {"LT_CLI_USED": "1", "LT_DEVICES": "2", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}


def test_torchrun_is_told_its_local_world_or_every_rank_would_train_alone():
    arguments = launch.fabric_arguments(Config(), TORCHRUN)
    assert arguments == {"accelerator": "auto", "devices": 4, "num_nodes": 2}


def test_fabric_run_has_decided_devices_and_maybe_the_accelerator():
    assert launch.fabric_arguments(Config(), FABRIC) == {"accelerator": "auto"}
    chosen = {**FABRIC, "LT_ACCELERATOR": "cpu"}
    assert launch.fabric_arguments(Config(accelerator="cpu"), chosen) == {}


def test_one_task_per_rank_under_srun():
    env = {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2"}
    arguments = launch.fabric_arguments(Config(accelerator="cuda"), env)
    assert arguments == {"accelerator": "cuda", "devices": 4, "num_nodes": 2}
    assert launch.is_launched(env) and not launch.is_launched({"SLURM_NTASKS": "1"})


def test_plain_python_starts_what_devices_says():
    assert launch.fabric_arguments(Config(devices=2, accelerator="cpu"), {})["devices"] == 2
    assert launch.fabric_arguments(Config(accelerator="cpu"), {})["devices"] == 1


@pytest.mark.parametrize("env, command", [(TORCHRUN, "torchrun"), (FABRIC, "fabric run")])
def test_devices_that_contradict_the_launcher_are_refused(env, command):
    with pytest.raises(ConfigError, match=f"devices=3, but {command}"):
        launch.fabric_arguments(Config(devices=3), env)


def test_flags_of_fabric_run_that_contradict_the_configuration_are_refused_at_once():
    flags = {"LT_ACCELERATOR": "gpu", "LT_PRECISION": "bf16-mixed", "LT_STRATEGY": "fsdp"}
    with pytest.raises(ConfigError) as refused:
        launch.fabric_arguments(Config(accelerator="cpu"), {**FABRIC, **flags})
    told = str(refused.value)
    for words in ("--accelerator=cuda", "--precision=bf16-mixed", "--strategy=fsdp"):
        assert words in told
    same = Config(accelerator="cuda", precision="bf16")
    launch.fabric_arguments(same, {**FABRIC, **flags, "LT_STRATEGY": "ddp"})
    launch.fabric_arguments(Config(), {**FABRIC, "LT_PRECISION": "32-true"})


def test_an_absent_accelerator_is_named():
    with pytest.raises(ConfigError, match="accelerator=mps, but torch sees none"):
        launch.pick_device("mps")


def test_a_backend_that_was_named_and_cannot_run_is_refused_before_a_run_folder(monkeypatch):
    mixture = Config(model=ModelConfig(num_experts=4, moe_backend="grouped_mm"), precision="fp64")
    with pytest.raises(ConfigError, match="'grouped_mm' cannot run here: found float64"):
        launch.join_processes(mixture, spawn=False)
    dense = Config(model=ModelConfig(moe_backend="grouped_mm"), precision="fp64")
    launch.join_processes(dense, spawn=False)
    monkeypatch.setenv("CURRY_MOE_BACKEND", "sorted")
    launch.join_processes(mixture, spawn=False)


def test_a_warning_about_the_model_is_told_by_one_rank():
    config = load_config(["model.routing=expert_choice"])
    corpus = open_corpus(config.data, cache_dir=None)
    for rank in (0, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            assemble(config, corpus, replace(Mesh.single(), rank=rank))
        assert len(caught) == 1 - rank


TWO = {"LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "env, width, wanted",
    [
        (TWO, 4096, "1"),
        ({**TWO, "OMP_NUM_THREADS": "7"}, 4096, "7"),
        ({**TWO, "LT_CLI_USED": "1", "OMP_NUM_THREADS": "cores"}, 4096, "1"),
        ({"LOCAL_WORLD_SIZE": "1"}, 4096, None),
        ({}, 4096, None),
        ({}, 128, "1"),
        ({"OMP_NUM_THREADS": "2"}, 128, "2"),
        ({"LT_CLI_USED": "1", "OMP_NUM_THREADS": "cores", "LOCAL_WORLD_SIZE": "1"}, 128, "1"),
    ],
)
def test_many_ranks_and_narrow_models_get_one_thread_unless_the_user_says_otherwise(
    monkeypatch, env, width, wanted
):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "LT_CLI_USED"):
        monkeypatch.delenv(name, raising=False)
    cores = str(len(os.sched_getaffinity(0)))
    for name, value in env.items():
        monkeypatch.setenv(name, value.replace("cores", cores))
    launch.prepare_environment(Config(model=ModelConfig(hidden_size=width)))
    assert os.environ.get("OMP_NUM_THREADS") == wanted


@pytest.mark.parametrize("given, wanted", [(None, "20000"), ("5", "5")])
def test_spinning_is_bounded_before_torch_is_imported(given, wanted):
    code = (
        "import sys, os, train; from curry_train.config import Config;"
        "train.prepare_environment(Config());"
        "print('torch' in sys.modules, os.environ['GOMP_SPINCOUNT'])"
    )
    env = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    if given:
        env["GOMP_SPINCOUNT"] = given
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, env=env, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert out.stdout.split() == ["False", wanted]

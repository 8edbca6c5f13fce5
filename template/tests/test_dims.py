"""Axes become ranks and groups as counting by hand says, and a layout that cannot run says why."""

import ast
import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from projects import SOURCE, exit_code, fork_ranks, fork_train, import_everything, run

from curry_train import launch
from curry_train.compose import load_config
from curry_train.config import Config, ConfigError, DataConfig, ModelConfig, ParallelConfig
from curry_train.parallel import dims as layout
from curry_train.parallel.dims import (
    AXES,
    DENSE_GROUPS,
    PURPOSE,
    SPARSE_GROUPS,
    ParallelDims,
    refusals,
    stages_of,
)
from curry_train.rules import problems


def everything(world: int) -> list[ParallelDims]:
    """Every layout of `world` ranks, with every ep."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    found = []
    for combination in itertools.product(sizes, repeat=5):
        dims = ParallelDims(*combination)
        if dims.world == world:
            inner = dims.dp_shard * dims.cp * dims.tp
            found += [replace(dims, ep=ep) for ep in range(1, inner + 1) if inner % ep == 0]
    return found


def places(dims: ParallelDims, rank: int) -> dict[str, int]:
    """Where a rank stands on every axis of both views, by dividing from the innermost outwards."""
    at, left = {}, rank
    for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        left, at[axis] = divmod(left, getattr(dims, axis))
    inner = rank % (dims.dp_shard * dims.cp * dims.tp)
    at["efsdp"], at["ep"] = divmod(inner, dims.ep)
    return at


DENSE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SPARSE = ("pp", "dp_replicate", "efsdp", "ep")
SHARED = {
    "world": set(),
    "pp": {"dp_replicate", "dp_shard", "cp", "tp"},
    "dp_replicate": {"pp", "dp_shard", "cp", "tp"},
    "dp_shard": {"pp", "dp_replicate", "cp", "tp"},
    "cp": {"pp", "dp_replicate", "dp_shard", "tp"},
    "tp": {"pp", "dp_replicate", "dp_shard", "cp"},
    "fsdp": {"pp", "dp_replicate", "tp"},
    "batch": {"pp", "cp", "tp"},
    "data": {"pp", "tp"},
    "sequence": {"pp", "dp_replicate", "dp_shard"},
    "stage": {"pp"},
    "ep": {"pp", "dp_replicate", "efsdp"},
    "efsdp": {"pp", "dp_replicate", "ep"},
    "expert_data": {"pp", "ep"},
}
"""Group -> the places that its members have in common: all that is not in the group's name."""


@pytest.mark.parametrize("world", [1, 2, 4, 6, 8])
def test_groups_are_the_ranks_with_the_same_place_on_every_other_axis(world):
    assert SHARED.keys() == DENSE_GROUPS.keys() | SPARSE_GROUPS.keys()
    for dims in everything(world):
        where = [places(dims, rank) for rank in range(world)]
        for name, same in SHARED.items():
            wanted: dict[tuple, list[int]] = {}
            for rank, at in enumerate(where):
                wanted.setdefault(tuple(at[axis] for axis in sorted(same)), []).append(rank)
            assert dims.groups(name) == sorted(wanted.values()), (dims, name)
            for rank in range(world):
                (own,) = (group for group in wanted.values() if rank in group)
                assert dims.members(name, rank) == own, (dims, name, rank)


@pytest.mark.parametrize("world", [2, 8])
def test_both_views_hold_the_same_ranks_and_the_sizes_multiply(world):
    for dims in everything(world):
        assert list(dims.dense) == list(DENSE) == list(AXES)
        assert list(dims.sparse) == list(SPARSE)
        for view in (dims.dense, dims.sparse):
            product = 1
            for size in view.values():
                product *= size
            assert product == dims.world == world
        assert dims.efsdp * dims.ep == dims.dp_shard * dims.cp * dims.tp
        assert dims.batch == len(dims.members("batch", 0))
        assert dims.sizes == {**dims.dense, "ep": dims.ep}


@pytest.mark.parametrize(
    ("axes", "world", "filled"),
    [
        ({}, 1, 1),
        ({}, 6, 6),
        ({"tp": 2}, 8, 4),
        ({"pp": 2, "dp_replicate": 2, "cp": 2, "tp": 2}, 16, 1),
        ({"tp": 2, "ep": 4}, 8, 4),
        ({"dp_shard": 3}, 3, 3),
    ],
)
def test_resolve_returns_integers_and_fills_dp_shard(axes, world, filled):
    resolved = ParallelDims(**axes).resolve(world)
    assert resolved.dp_shard == filled and resolved.world == world
    assert all(type(size) is int and size >= 1 for size in resolved.sizes.values())
    assert resolved.resolve(world) == resolved
    assert resolved == layout.resolve(ParallelConfig(**axes), world)


@pytest.mark.parametrize(
    ("axes", "world", "numbers", "way"),
    [
        ({"tp": 3}, 4, "parallel.tp=3 make 3 ranks, but 4", "product divides 4"),
        ({"tp": 2}, 1, "make 2 ranks, but 1 was started", "such as devices=2"),
        ({"pp": 4, "tp": 4}, 8, "parallel.tp=4 make 16 ranks, but 8", "product divides 8"),
        ({"dp_shard": 2}, 4, "parallel.dp_shard=2", "leave parallel.dp_shard at -1"),
        ({"dp_shard": 4}, 2, "make 4 ranks, but 2 were started", "leave parallel.dp_shard at -1"),
    ],
)
def test_resolve_names_the_numbers_that_do_not_multiply(axes, world, numbers, way):
    with pytest.raises(ValueError) as caught:
        ParallelDims(**axes).resolve(world)
    assert numbers in str(caught.value) and way in str(caught.value)


@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(dp_shard=4, ep=3)])
def test_groups_of_axes_that_lay_out_no_ranks_are_refused(dims):
    for ask in (dims.explain, lambda: dims.groups("tp"), lambda: dims.members("ep", 0)):
        with pytest.raises(ValueError, match=r"call resolve\(world\) first"):
            ask()


EXPLAINED = """\
8 ranks: pp 1  dp_replicate 2  dp_shard 2  cp 1  tp 2  ep 2
  dp_replicate hold equal shards of replicas; sum gradients: [0 4] [1 5] [2 6] [3 7]
  batch        hold different samples: [0 2 4 6] [1 3 5 7]
  fsdp         share dense parameters, gradients or moments (parallel.zero): \
[0 2] [1 3] [4 6] [5 7]
  tp           share every dense matrix; gather and scatter the sequence in each block: \
[0 1] [2 3] [4 5] [6 7]
  sequence     hold slices of the same sequences; sum what the routers count: \
[0 1] [2 3] [4 5] [6 7]
  stage        hold the same blocks; sum gradients of what is not split: [0 1 2 3 4 5 6 7]
  ep           share the experts; send tokens to them: [0 1] [2 3] [4 5] [6 7]
  efsdp        share the experts' parameters, gradients or moments (parallel.zero): \
[0 2] [1 3] [4 6] [5 7]
  expert_data  hold the same experts; sum their gradients: [0 2 4 6] [1 3 5 7]"""


def test_explain_says_who_talks_to_whom():
    assert ParallelDims(dp_replicate=2, tp=2, ep=2).resolve(8).explain() == EXPLAINED
    assert ParallelDims().resolve(1).explain() == (
        "1 rank: pp 1  dp_replicate 1  dp_shard 1  cp 1  tp 1  ep 1"
    )
    long = ParallelDims(tp=2).resolve(16).explain()
    assert "[0 1] [2 3] [4 5] [6 7] and 4 more" in long and "efsdp" not in long
    assert PURPOSE.keys() <= DENSE_GROUPS.keys() | SPARSE_GROUPS.keys()


def test_problems_come_all_at_once_with_their_numbers():
    model = ModelConfig(
        num_experts=8, first_k_dense_replace=1, intermediate_size=100, vocab_size=257,
        shared_expert_intermediate_size=10, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    data = DataConfig(seq_len=130, global_batch_size=7)
    found = ParallelDims(dp_replicate=2, dp_shard=1, cp=2, tp=3, ep=5).problems(model, data)
    assert found == [
        "parallel.tp=3: does not divide model.num_attention_heads=4; set it to one of 1, 2, 4",
        "parallel.tp=3: does not divide model.num_key_value_heads=2; set it to one of 1, 2",
        "parallel.tp=3: does not divide model.intermediate_size=100; set it to one of 1, 2, 4, 5,"
        " 10, 20, 25, 50, 100",
        "parallel.tp=3: does not divide model.shared_expert_intermediate_size=10; set it to one of"
        " 1, 2, 5, 10",
        "parallel.tp=3: does not divide the vocabulary in memory, 320 (model.vocab_size=257 up to a"
        " multiple of 64); set it to a power of 2 up to 64",
        "parallel.cp=2: data.seq_len=130 does not divide into the slices of parallel.cp=2 and"
        " parallel.tp=3 ranks; set data.seq_len to a multiple of 12",
        "parallel.ep=5: does not divide parallel.dp_shard * parallel.cp * parallel.tp = 6, the"
        " ranks it is carved out of; set it to one of 1, 2, 3, 6",
        "parallel.ep=5: does not divide model.num_experts=8; set it to one of 1, 2, 4, 8",
        "data.global_batch_size=7: 2 ranks cannot share it evenly; set data.global_batch_size to 6"
        " or 8",
    ]


@pytest.mark.parametrize(
    ("axes", "fields", "data", "said"),
    [
        ({"tp": 4}, {"num_key_value_heads": 4}, {}, None),
        ({"tp": 4}, {}, {}, "num_key_value_heads=2"),
        ({"tp": 2}, {"num_experts": 0, "intermediate_size": 7}, {}, "intermediate_size=7"),
        ({"tp": 2}, {"num_experts": 4, "intermediate_size": 7}, {}, None),
        ({"cp": 2}, {}, {"seq_len": 6}, "set data.seq_len to a multiple of 4"),
        ({"cp": 2, "tp": 2}, {}, {"seq_len": 8}, None),
        ({"cp": 3}, {}, {"seq_len": 12}, None),
        ({"cp": 3}, {}, {"seq_len": 9}, "set data.seq_len to a multiple of 6"),
        ({"tp": 2}, {}, {"seq_len": 7}, "parallel.tp=2: data.seq_len=7"),
        ({"dp_shard": 4}, {"num_experts": 0}, {}, None),
        ({"dp_shard": 4, "ep": 2}, {"num_experts": 0}, {}, None),
        ({"dp_shard": 4, "ep": 4}, {"num_experts": 6}, {}, "num_experts=6; set it to one of 1, 2"),
        ({"dp_shard": -1, "ep": 4}, {"num_experts": 4}, {"global_batch_size": 3}, None),
        ({"dp_shard": 2}, {}, {"micro_batch_size": 3}, "the 4 samples of one rank"),
        ({"dp_shard": 16}, {}, {}, "set data.global_batch_size to 16"),
    ],
)
def test_each_size_that_does_not_divide_is_said_and_no_other(axes, fields, data, said):
    given = {"num_experts": 4, **fields}
    dims = replace(ParallelDims(dp_shard=1), **axes)
    found = dims.problems(ModelConfig(**given), DataConfig(**data))
    assert (found == []) if said is None else (len(found) == 1 and said in found[0]), found


def told(world: int | None, *argv: str) -> list[str]:
    config = Config()
    for word in ("model.num_hidden_layers=4", *argv):
        key, _, value = word.partition("=")
        group, _, name = key.rpartition(".")
        values = {"true": True, "false": False}
        value = values.get(value, int(value) if value.lstrip("-").isdigit() else value)
        if not group:
            config = replace(config, **{name: value})
        else:
            section = replace(getattr(config, group), **{name: value})
            config = replace(config, **{group: section})
    return problems(config, world)


@pytest.mark.parametrize(
    ("world", "argv", "said"),
    [
        (2, ["pp=2", "schedule=interleaved1f1b"], []),
        (2, ["pp=2", "schedule=zbv", "reshard=true"], ["parallel.reshard=true: parallel.schedule"]),
        (2, ["pp=2", "schedule=zbv", "zero=3"], []),
        (1, ["schedule=zbv", "reshard=true"], []),
        (2, ["pp=2", "schedule=gpipe", "overlap=true"], ["parallel.overlap=true: parallel.sched"]),
        (1, ["overlap=true"], ["parallel.overlap=true: parallel.schedule=1f1b has no pairs"]),
        (1, ["overlap=true", "schedule=dualpipev"], []),
        (4, ["pp=4", "schedule=zbv"], ["makes 8 stages, more than model.num_hidden_layers=4"]),
        (2, ["pp=2", "pp_split=3"], ["parallel.pp_split=3"]),
        (4, ["tp=3"], ["make 3 ranks, but 4 were started", "num_attention_heads", "num_key_value",
                       "the vocabulary", "multiple of 3"]),
        (None, ["tp=2", "cp=2", "ep=4"], []),
        (None, ["tp=2", "ep=8"], ["does not divide model.num_experts=4"]),
        (None, ["dp_shard=3"], ["3 ranks cannot share it evenly"]),
    ],
)  # fmt: skip
def test_schedules_worlds_and_batches_are_judged_together(world, argv, said):
    found = told(world, *(f"parallel.{word}" for word in argv), "model.num_experts=4")
    assert len(found) == len(said), found
    assert all(any(words in text for text in found) for words in said), found


def test_one_problem_hides_no_other():
    """A world that does not fit, a batch that cannot be shared: what else is wrong is said too."""
    wrong = (
        "parallel.pp=2", "parallel.tp=3", "parallel.schedule=zbv", "parallel.reshard=true",
        "compile=true", "parallel.overlap=true", "model.router_aux_loss_scope=global",
        "model.num_experts=4",
    )  # fmt: skip
    found = told(8, *wrong)
    for words in (
        "make 6 ranks, but 8 were started", "num_attention_heads=4", "num_key_value_heads=2",
        "the vocabulary in memory, 320", "multiple of 3", "compile=true:",
        "parallel.reshard=true:", "parallel.overlap=true:", "router_aux_loss_scope=global:",
    ):  # fmt: skip
        assert sum(words in text for text in found) == 1, (words, found)
    assert len(found) == 9
    shared = told(6, "parallel.pp=2", "data.global_batch_size=7", "model.tie_word_embeddings=true")
    assert len(shared) == 2 and "embedding and head are on different ranks" in shared[1]


def test_a_model_that_is_no_decoder_shares_samples_and_parameters_only():
    with pytest.raises(ConfigError) as caught:
        load_config(["model=tiny_spiking", "devices=16", "accelerator=cpu",
                     *(f"parallel.{axis}=2" for axis in ("pp", "cp", "tp", "ep"))])  # fmt: skip
    found = caught.value.problems
    assert len(found) == 4, found
    for axis, text in zip(("pp", "cp", "tp", "ep"), found, strict=True):
        assert text.startswith(f"parallel.{axis}=2: not proved equal to one process")
        assert "model.architecture=spiking" in text and text.endswith(f"set parallel.{axis}=1")
    for zero in range(4):
        config = load_config(["model=tiny_spiking", f"parallel.zero={zero}"])
        assert problems(config, 4) == []
    words = ["model=tiny_spiking", "parallel.overlap=true", "parallel.schedule=1f1b"]
    with pytest.raises(ConfigError, match="has no pairs of forward and backward"):
        load_config(words)


def test_stages_of_every_schedule_are_shared_out_once():
    for schedule, each in (("gpipe", 1), ("1f1b", 1), ("interleaved1f1b", 2), ("zbv", 2)):
        parallel = ParallelConfig(pp=4, schedule=schedule)
        held = [stages_of(parallel, index) for index in range(4)]
        assert sorted(stage for stages in held for stage in stages) == list(range(4 * each)), (
            schedule
        )
    assert stages_of(ParallelConfig(pp=4, schedule="dualpipev"), 1) == [1, 6]
    assert stages_of(ParallelConfig(pp=4, schedule="interleaved_zb"), 1) == [1, 5]
    assert stages_of(ParallelConfig(schedule="zbv"), 0) == [0]


def test_the_layout_is_judged_without_torch():
    code = (
        "import sys; from curry_train.parallel.dims import ParallelDims, refusals;"
        "from curry_train.config import Config;"
        "ParallelDims(tp=2).resolve(8).explain(); list(refusals(Config(), 4));"
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, capture_output=True, text=True)
    assert out.stdout.strip() == "False", out.stderr
    tree = ast.parse(Path(layout.__file__).read_text())
    imported = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not [name for name in imported if name and name.startswith("torch")]


WRONG = ("parallel.tp=3", "parallel.cp=2", "parallel.ep=8", "parallel.overlap=true", "compile=true",
         "parallel.schedule=gpipe", "accelerator=cpu")  # fmt: skip
SAID = ("num_attention_heads=4", "num_key_value_heads=2", "the vocabulary in memory, 320",
        "data.seq_len=128", "make 6 ranks", "num_experts=4", "parallel.overlap=true")  # fmt: skip


def one_message(text: str) -> None:
    assert text.count("configuration: ") == 1 and "Traceback" not in text, text
    for words in SAID:
        assert text.count(words) == 1, (words, text)


@pytest.mark.parametrize("world", [1, 2])
def test_a_wrong_combination_ends_with_one_message_before_any_process_group(
    world, tmp_path, monkeypatch
):
    """The ways of `python train.py devices=N` and torchrun, in forks that must not come further."""
    import_everything()
    monkeypatch.chdir(tmp_path)
    reached = tmp_path / "reached"
    for owner, name in ((dist, "init_process_group"), (launch, "join_processes")):
        monkeypatch.setattr(owner, name, lambda *a, **k: reached.write_text("a process group"))
    if world == 1:
        for devices in (1, 2):
            log = tmp_path / f"devices-{devices}.txt"
            assert exit_code(fork_train(*WRONG, f"devices={devices}", log=log)) == 2
            one_message(log.read_text())
    else:
        pids = fork_ranks(world, *WRONG, folder=tmp_path)
        assert [exit_code(pid) for pid in pids] == [2] * world
        one_message("".join((tmp_path / f"rank-{r}.txt").read_text() for r in range(world)))
    assert not reached.exists() and not (tmp_path / "runs").exists()


def test_a_real_launch_of_a_wrong_combination_is_one_message():
    code, out, err = run(SOURCE, "python2", *WRONG)
    assert code == 2 and out == ""
    one_message(err)


def test_refusals_name_only_keys_that_can_be_set():
    model = ModelConfig(num_experts=4)
    keys = {
        key
        for key, _ in refusals(Config(model=model, parallel=ParallelConfig(tp=3, cp=5, ep=7)), 8)
    }
    assert keys == {"parallel.tp", "parallel.cp", "parallel.ep", "parallel.dp_shard"}

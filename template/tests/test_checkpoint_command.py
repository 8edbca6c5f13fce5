"""`python -m curry_train.checkpoint`: every fault is named, nothing is lost, layouts compare."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint import edit_manifest, load, meta, problems_of, save
from test_reshard import on_ranks, save_layout, whole

from curry_train.checkpoint import contents, dcp, read_manifest, storage, tables
from curry_train.checkpoint.__main__ import main
from curry_train.checkpoint.audit import audit, stored_bytes
from curry_train.checkpoint.boxes import Box, cover_problem
from curry_train.checkpoint.huggingface import is_hugging_face
from curry_train.config import Config, ModelConfig
from curry_train.models.protocol import build_model, named_state
from curry_train.tracking.lease import Lease

WEIGHTS = {"model.layers.0.mlp.experts.up_proj.weight": (4, 6, 3), "model.norm.weight": (7,)}
EXPERTS, NORM = WEIGHTS
SHARD = "tensors-00000.safetensors"
RUN = "run:\n  keep: 2\n  keep_every: 0\n  keep_best: 1\n"


def training_state(step: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    state = {}
    for name, shape in WEIGHTS.items():
        for prefix in ("", "optim.exp_avg.", "optim.exp_avg_sq."):
            state[prefix + name] = torch.randn(shape, generator=generator)
    return state | {"optim.step": torch.tensor(float(step)), "bias": torch.arange(3)}


def store(root: Path, step: int = 1, state: Any = None, **more: Any) -> Path:
    described = meta(8 * step) | {"model": {"architecture": "decoder", "num_experts": 4}, **more}
    return save(root, step, training_state(step) if state is None else state, meta=described)


def ask(capsys: Any, *words: Any) -> tuple[int, Any]:
    """Return exit code and JSON of a call."""
    code = main([*map(str, words), "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


def refused(capsys: Any, *words: Any) -> str:
    assert main([*map(str, words)]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def reseal(checkpoint: Path, state: dict[str, torch.Tensor]) -> None:
    """Replace the file of tensors and tell the manifest its hash, as another writer would."""
    save_file(state, checkpoint / SHARD)
    entry = storage.write_file(checkpoint / "copy", [(checkpoint / SHARD).read_bytes()])
    (checkpoint / "copy").unlink()
    files = [e for e in read_manifest(checkpoint)["files"] if e["name"] != SHARD]
    edit_manifest(checkpoint, files=[*files, entry | {"name": SHARD}])


def test_help_list_and_verify_import_no_torch(tmp_path):
    store(tmp_path / "checkpoints")
    code = (
        "import sys\nfrom curry_train.checkpoint.__main__ import main\n"
        f"assert main(['list', {str(tmp_path)!r}]) == main(['verify', {str(tmp_path)!r}]) == 0\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for verb in ("list", "verify", "inspect", "diff", "convert", "prune"):
        assert f"\n    {verb} " in done.stdout


LONG = "optim.exp_avg_sq.model.layers.11.mlp.shared_expert.experts.up_proj.weight"


@pytest.mark.parametrize(("columns", "shown"), [
    (None, LONG),
    (200, LONG),
    (84, "optim.exp_avg_sq.model.laye..11.mlp.shared_expert.experts.up_proj.weight"),
    (40, "opti..11..experts.up_proj.weight"),
])  # fmt: skip
def test_only_a_terminal_cuts_names_and_never_the_number_of_a_layer(columns, shown, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns or 40))
    head, row = tables.table(("tensor", "shape"), [(LONG, "4x176x1000")])
    assert row.split() == [shown, "4x176x1000"] and len(row) <= max(columns or 100, 44)
    (short,) = tables.table(("mesh",), [])
    assert short == "mesh" and tables._shorten("a" * 40, 24) == "a" * 11 + ".." + "a" * 11


@pytest.mark.parametrize("live", [False, True])
def test_progress_of_short_work_says_nothing_and_an_error_starts_a_line(live, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: live, raising=False)
    with tables.Meter("read", 2_000_000) as meter:
        meter(1_000_000)
        assert capsys.readouterr().err == ""
        meter.next = 0.0
        meter(500_000)
        told = capsys.readouterr().err
        assert told.strip("\r\n\033[K") == "read: 1.5 MB of 2 MB" and told.endswith("\n") != live
        meter.next = 0.0
        meter(700_000)
        assert " of " not in capsys.readouterr().err  # more than was foreseen
    assert capsys.readouterr().err == ("\r\033[K" if live else "")


# list


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder: four checkpoints, the second the best, and what two kills left."""
    folder = tmp_path / "run"
    losses = {10: 3.0, 20: 1.5, 30: math.inf, 40: 2.5}
    for step, value in losses.items():
        more = {"metrics": {"val/loss": value}} if math.isfinite(value) else {}
        more["mesh"] = {"pp": 2, "tp": 2, "dp_shard": 1}
        store(folder / "checkpoints", step, **more)
    (folder / "config.yaml").write_text(RUN)
    left = folder / "checkpoints" / "step-00000050.tmp-a1b2c3"
    left.mkdir()
    (left / SHARD).write_bytes(b"x" * 1000)
    (folder / "checkpoints" / "step-00000045").mkdir()
    return folder


def test_list_shows_state_loss_mesh_and_what_the_rules_keep(run, capsys):
    for path in (run, run / "checkpoints"):
        code, data = ask(capsys, "list", path)
        assert code == 0 and data["rules"] == {"keep": 2, "keep_every": 0, "keep_best": 1}
        rows = {row["step"]: row for row in data["checkpoints"]}
        assert [*rows] == [10, 20, 30, 40, 45, 50]
        states = ["complete"] * 4 + ["incomplete", "temporary"]
        assert [row["state"] for row in rows.values()] == states
        stays = [row["stays"] for row in rows.values()]
        assert stays == [False, True, True, True, None, None]
        assert [s for s, r in rows.items() if r["best"]] == [20]
        assert [s for s, r in rows.items() if r["latest"]] == [40]
        assert rows[10]["val/loss"] == 3.0 and rows[30]["val/loss"] is None
        assert rows[50]["bytes"] == 1000 and rows[10]["holds"] == "full"
    _, data = ask(capsys, "list", run, "--keep", 1, "--keep-best", 0, "--keep-every", 20)
    assert [r["step"] for r in data["checkpoints"] if r["stays"]] == [20, 40]
    assert main(["list", str(run)]) == 0
    text = capsys.readouterr().out
    assert "pp2 tp2" in text and "keep 2, keep_every 0, keep_best 1 (config.yaml)" in text
    assert max(map(len, text.splitlines()[1:])) <= 100
    assert "best stays" in next(line for line in text.splitlines() if "step-00000020" in line)


# verify: every fault with file and key


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def digit(path: Path) -> None:
    path.write_text(path.read_text().replace('"samples_consumed": 8', '"samples_consumed": 9'))


def other_keys(path: Path) -> None:
    state = training_state(1)
    state["new"] = state.pop(NORM)
    reseal(path.parent, state)


def other_kinds(path: Path) -> None:
    state = training_state(1)
    reseal(path.parent, state | {NORM: state[NORM].double(), EXPERTS: state[EXPERTS][:2].clone()})


def broken_header(path: Path) -> None:
    storage_bytes = bytearray(path.read_bytes())
    storage_bytes[20] = 0
    entry = {"name": SHARD, "bytes": len(storage_bytes)}
    path.unlink()
    entry |= storage.write_file(path, [bytes(storage_bytes)])
    files = [e for e in read_manifest(path.parent)["files"] if e["name"] != SHARD]
    edit_manifest(path.parent, files=[*files, entry])


def tensors(path: Path) -> dict[str, Any]:
    return read_manifest(path.parent)["tensors"]


def no_moment(path: Path) -> None:
    kept = {n: e for n, e in tensors(path).items() if n != f"optim.exp_avg_sq.{NORM}"}
    edit_manifest(path.parent, tensors=kept)


def few_experts(path: Path) -> None:
    edit_manifest(path.parent, model={"architecture": "decoder", "num_experts": 8})


def twice(path: Path) -> None:
    changed = tensors(path)
    changed[NORM]["chunks"][0]["key"] = f"optim.exp_avg.{NORM}"
    edit_manifest(path.parent, tensors=changed)


def hole(path: Path) -> None:
    changed = tensors(path)
    changed[NORM]["chunks"][0]["shape"] = [5]
    edit_manifest(path.parent, tensors=changed)


def moved(path: Path) -> None:
    path.parent.rename(path.parent.with_name("step-00000009"))
    path.parent.with_name("step-00000009").joinpath("marker").touch()


def stray(path: Path) -> None:
    path.with_name("tensors-00007.safetensors").touch()


FAULTS = {
    "flipped byte": (flip, [SHARD, "does not have the sha256 of the manifest"]),
    "truncated": (cut, [SHARD, "bytes, the manifest says"]),
    "missing file": (Path.unlink, [f"{SHARD} is missing"]),
    "missing manifest": (lambda p: p.with_name("manifest.json").unlink(), ["json does not exist"]),
    "flipped digit": (lambda p: digit(p.with_name("manifest.json")), ["manifest.json: key sha256"]),
    "renamed key": (other_keys, [f"{SHARD} key {NORM} is missing", f"{SHARD} key new is in no"]),
    "other kinds": (other_kinds, [f"key {NORM} is F64 [7], the manifest says F32 [7]",
                                  f"key {EXPERTS} is F32 [2, 6, 3], the manifest says"]),
    "broken header": (broken_header, [f"{SHARD} is no valid safetensors file"]),
    "dropped moment": (no_moment, [f"tensor optim.exp_avg_sq.{NORM} is missing",
                                   f"key optim.exp_avg_sq.{NORM} is in no tensor"]),
    "expert count": (few_experts, [f"tensor {EXPERTS} has shape [4, 6, 3], but model.num_experts"]),
    "one key twice": (twice, [f"key tensors, {NORM}: chunk at [0] has key"]),
    "hole": (hole, [f"key tensors, {NORM}: boxes hold 5 of its 7 elements"]),
    "another step": (moved, ["key step is 1, the folder's another", "marker is not in the"]),
    "stray file": (stray, ["tensors-00007.safetensors is not in the manifest"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_names_the_file_and_key_of_a_fault(fault, tmp_path, capsys):
    path = store(tmp_path / "checkpoints")
    assert ask(capsys, "verify", path)[0] == 0
    plant, words = FAULTS[fault]
    plant(path / SHARD)
    code, data = ask(capsys, "verify", tmp_path / "checkpoints")
    assert code == 1 and data["verdict"] == "fail"
    told = "\n".join(data["checkpoints"][0]["problems"])
    assert all(word in told for word in words), told


def test_verify_tells_all_problems_of_all_checkpoints(run, capsys):
    root = run / "checkpoints"
    shutil.rmtree(root / "step-00000045")
    flip(root / "step-00000010" / SHARD)
    (root / "step-00000010" / "rank-00000.safetensors").unlink()
    digit(root / "step-00000010" / "manifest.json")
    (root / "step-00000010" / "manifest.json").write_text(
        (root / "step-00000010" / "manifest.json").read_text().replace('"step": 10', '"step": 11')
    )
    cut(root / "step-00000030" / "tokenizer.json")
    code, data = ask(capsys, "verify", run)
    found = {Path(row["path"]).name: row["problems"] for row in data["checkpoints"]}
    assert code == 1 and [len(problems) for problems in found.values()] == [3, 0, 1, 0]
    assert main(["verify", str(run)]) == 1
    assert "verify: 2 of 4 damaged" in capsys.readouterr().out


def test_folders_that_a_run_renames_or_prunes_meanwhile_are_no_damage(run, capsys, monkeypatch):
    root = run / "checkpoints"
    shutil.rmtree(root / "step-00000045")

    def vanish(path: Path) -> None:
        if path.name == "step-00000010" or path.name.endswith(".tmp-a1b2c3"):
            shutil.rmtree(path, ignore_errors=True)

    def late(real: Any) -> Any:
        return lambda path, *more: (vanish(path), real(path, *more))[1]

    monkeypatch.setattr("curry_train.checkpoint.views.stored_bytes", late(stored_bytes))
    monkeypatch.setattr("curry_train.checkpoint.__main__.audit", late(audit))
    code, data = ask(capsys, "list", run)
    assert code == 0 and [row["step"] for row in data["checkpoints"]] == [20, 30, 40]
    store(root, 10)
    code, data = ask(capsys, "verify", run)
    assert code == 0 and len(data["checkpoints"]) == 3
    assert main(["verify", str(store(root, 10))]) == 2
    assert "removed meanwhile" in capsys.readouterr().err


def test_the_folder_one_stands_in_has_a_name(run, capsys, monkeypatch):
    monkeypatch.chdir(run / "checkpoints" / "step-00000040")
    for path, steps in ((".", [40]), ("..", [10, 20, 30, 40, 45, 50])):
        code, data = ask(capsys, "list", path)
        assert code == 0 and [row["step"] for row in data["checkpoints"]] == steps
        assert data["checkpoints"][steps.index(40)]["latest"]
    assert data["rules"] == {"keep": 2, "keep_every": 0, "keep_best": 1}


def test_what_goes_while_it_is_read_is_a_sentence(run, capsys, monkeypatch):
    manifest = run / "checkpoints" / "step-00000040" / "manifest.json"

    def late(checkpoint: Path) -> dict[str, Any]:
        found = read_manifest(checkpoint)
        manifest.unlink(missing_ok=True)
        return found

    monkeypatch.setattr("curry_train.checkpoint.views.read_manifest", late)
    assert f"No such file or directory: '{manifest}'" in refused(capsys, "inspect", run)


def test_a_refusal_is_json_too(tmp_path, capsys):
    code, data = ask(capsys, "list", tmp_path / "none")
    assert code == 2 and data["verdict"] == "refused" and "is no folder" in data["problems"][0]


def test_values_names_tensors_that_are_not_finite(tmp_path, capsys):
    state = training_state()
    state[NORM][2:4] = torch.tensor([math.nan, -math.inf])
    path = store(tmp_path, 1, state)
    assert ask(capsys, "verify", path)[0] == 0
    code, data = ask(capsys, "verify", path, "--values")
    (problem,) = data["checkpoints"][0]["problems"]
    assert code == 1 and f"tensor {NORM}: 2 of its 7 values are not finite" in problem


# inspect


@pytest.fixture
def small_pieces(monkeypatch) -> list[int]:
    """Read tensors in pieces of 40 bytes; the list says how much was held together."""
    held: list[int] = []
    real = contents._read

    def read(*args: Any) -> list[torch.Tensor]:
        found = real(*args)
        held.append(sum(tensor.nbytes for tensor in found))
        return found

    monkeypatch.setattr(contents, "_read", read)
    for function in (contents.statistics, contents.differences):
        defaults = function.__defaults__
        monkeypatch.setattr(function, "__defaults__", (*defaults[:-1], 40))
    return held


def test_inspect_gives_statistics_of_pieces_as_of_the_whole(tmp_path, capsys, small_pieces):
    state = training_state()
    state[EXPERTS] += 1e6  # a sum of squares would lose the spread
    state[NORM][1] = math.nan
    path = store(tmp_path, 1, state)
    code, data = ask(capsys, "inspect", path, "--stats")
    rows = {row["name"]: row for row in data["tensors"]}
    assert code == 0 and rows.keys() == state.keys() and max(small_pieces) <= 40
    for name, row in rows.items():
        values = state[name].double()[state[name].double().isfinite()]
        wanted = [values.mean(), values.std(correction=0), values.min(), values.max()]
        found = [row[key] for key in ("mean", "std", "smallest", "largest")]
        assert found == pytest.approx([float(value) for value in wanted], rel=1e-9)
        assert row["nonfinite"] == int(name == NORM)
    sizes = [row["bytes"] for row in data["tensors"]]
    assert sizes == sorted(sizes, reverse=True) and data["totals"]["weights"]["tensors"] == 3
    assert data["totals"]["moments"]["elements"] == 2 * (72 + 7) + 1
    _, data = ask(capsys, "inspect", tmp_path, "--filter", "*.norm.*", "--sort", "name")
    names = [row["name"] for row in data["tensors"]]
    assert len(names) == 3 and names == sorted(names)
    assert main(["inspect", str(path), "--stats", "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert "6 more tensors" in text and max(map(len, text.splitlines()[1:])) <= 100


def test_pieces_cover_a_shape_once():
    for shape in ((), (0, 3), (7,), (4, 6, 3), (1, 1, 50), (3, 1, 2)):
        boxes = [*contents.pieces(shape, 4, 24)]
        assert cover_problem(shape, boxes) is None, shape
        assert all(box.elements * 4 <= 24 for box in boxes)
    assert next(contents.pieces((2, 3), 8, 1)) == Box((0, 0), (1, 1))


# diff


def test_checkpoints_of_two_layouts_are_the_same_until_one_element_moves(
    tmp_path, capsys, small_pieces
):
    one = on_ranks(save_layout, "one process", tmp_path / "one", "one process", False)[0]
    two = on_ranks(save_layout, "rows of 2", tmp_path / "two", "rows of 2", False)[0]
    code, data = ask(capsys, "diff", one, two)
    assert code == 0 and data["verdict"] == "same", data
    assert data["compared"] == len(whole()) and not data["values"]
    assert max(small_pieces) <= 40
    files = [*Path(two).glob("tensors-*")]
    assert len(files) == 2
    name = "model.layers.0.self_attn.q_proj.weight"
    state = load_file(files[0]) | load_file(files[1])
    (key,) = (key for key in state if key == f"{name}@4,0")
    file = next(f for f in files if key in load_file(f))
    stored = load_file(file)
    stored[key][1, 2] += 5.0
    stored[key][3, 11] += 1.0  # in a later piece
    save_file(stored, file)
    code, data = ask(capsys, "diff", one, two, "--tolerance", 1e-12)
    (value,) = data["values"]
    assert code == 1 and value["name"] == name and value["place"] == [5, 2]
    assert value["elements"] == 2 and value["largest"] == pytest.approx(5.0)
    scale = float(whole()[name].double().abs().max())
    assert value["relative"] == pytest.approx(5.0 / scale)
    assert ask(capsys, "diff", one, two, "--tolerance", 1.0)[0] == 0
    assert ask(capsys, "diff", one, two, "--filter", "optim.*")[0] == 0
    assert main(["diff", one, two]) == 1
    text = capsys.readouterr().out
    assert name in text and "5,2" in text and max(map(len, text.splitlines()[2:])) <= 100


def test_diff_tells_fields_names_kinds_bits_and_the_worst_first(tmp_path, capsys):
    first, state = store(tmp_path / "a"), training_state(1)
    state[EXPERTS][0, 0, 0] += 1e-3
    state[f"optim.exp_avg.{EXPERTS}"][3, 5, 2] = math.nan
    state[f"optim.exp_avg.{NORM}"] = state[f"optim.exp_avg.{NORM}"].double()
    state[f"optim.exp_avg_sq.{NORM}"] = torch.zeros(3)
    state["new"] = state.pop("bias")
    second = store(tmp_path / "b", 1, state, seed=7, mesh={"tp": 2}, metrics={"val/loss": 1.0})
    code, data = ask(capsys, "diff", first, second)
    assert code == 1 and data["missing"] == {"second": ["bias"], "first": ["new"]}
    assert {key for key, field in data["fields"].items() if field["counts"]} == {"seed"}
    assert {"mesh.tp", "metrics.val/loss"} < data["fields"].keys()
    assert data["kinds"] == {
        f"optim.exp_avg.{NORM}": ["float32 [7]", "float64 [7]"],
        f"optim.exp_avg_sq.{NORM}": ["float32 [7]", "float32 [3]"],
    }
    worst, second_worst = data["values"]  # the widened moment has equal values
    assert worst["name"] == f"optim.exp_avg.{EXPERTS}" and worst["largest"] == "inf"
    assert second_worst["name"] == EXPERTS and second_worst["largest"] == pytest.approx(1e-3, 1e-3)


def test_a_setting_younger_than_one_checkpoint_is_a_difference_unless_it_is_the_default(
    tmp_path, capsys
):
    first = store(tmp_path / "old")
    for value, verdict in ((None, "same"), (1.0, "different")):
        model = {"architecture": "decoder", "num_experts": 4, "clip_qkv": value}
        second = store(tmp_path / verdict, 1, model=model)
        assert ask(capsys, "diff", first, second)[1]["verdict"] == verdict


def test_one_bit_is_a_difference_and_equal_nans_are_none(tmp_path, capsys):
    here, there = training_state(), training_state()
    here[NORM][:2], there[NORM][:2] = torch.tensor([0.0, math.nan]), torch.tensor([-0.0, math.nan])
    paths = store(tmp_path / "a", 1, here), store(tmp_path / "b", 1, there)
    code, data = ask(capsys, "diff", *paths)
    (value,) = data["values"]
    assert code == 1 and (value["elements"], value["largest"]) == (1, 0.0)
    assert ask(capsys, "diff", *paths, "--tolerance", 1e-9)[0] == 0


# convert


@pytest.mark.parametrize("limit", [None, 100, 40])
def test_a_rewritten_checkpoint_is_whole_and_the_same(limit, tmp_path, capsys):
    source, out = store(tmp_path / "run"), tmp_path / "out"
    flags = [] if limit is None else ["--max-shard-size", limit]
    code, _ = ask(capsys, "convert", source, out, *flags)
    assert code == 0 and not audit(out)
    state = training_state(1)
    found = load(out, state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert torch.equal(
        dcp.load_rank_tensors(out, 0)["rng.torch"], dcp.load_rank_tensors(source, 0)["rng.torch"]
    )
    held = [sum(t.nbytes for t in load_file(f).values()) for f in sorted(out.glob("tensors-*"))]
    assert len(held) == 1 if limit is None else max(held) <= limit
    assert ask(capsys, "diff", source, out)[0] == 0
    assert f"{out} exists" in refused(capsys, "convert", source, out)


def test_weights_alone_in_another_dtype(tmp_path, capsys):
    source, out = store(tmp_path / "run"), tmp_path / "out"
    assert "set --weights-only" in refused(capsys, "convert", source, out, "--dtype", "bfloat16")
    assert ask(capsys, "convert", source, out, "--dtype", "bfloat16", "--weights-only")[0] == 0
    assert not audit(out) and not [*out.glob("rank-*")] and (out / "tokenizer.json").is_file()
    state = load_file(out / SHARD)
    assert state.keys() == {*WEIGHTS, "bias"} and state["bias"].dtype == torch.int64
    assert torch.equal(state[NORM], training_state(1)[NORM].bfloat16())
    assert main(["diff", str(source), str(out)]) == 1
    said = capsys.readouterr().out
    assert "tensors missing in B; --weights-only leaves them out" in said and "exp_avg" not in said
    _, rows = ask(capsys, "list", out)
    assert [(r["state"], r["holds"]) for r in rows["checkpoints"]] == [("complete", "weights")]
    model = {name: torch.zeros(shape) for name, shape in WEIGHTS.items()}
    model["bias"] = torch.zeros(3, dtype=torch.int64)
    dcp.load(out, model, cast=True)
    assert torch.equal(model[NORM], training_state(1)[NORM].bfloat16().float())
    model["bias"] = torch.zeros(3)
    assert "bias is int64 in the checkpoint" in problems_of(dcp.load, out, model, cast=True)
    wide = tmp_path / "wide"
    assert ask(capsys, "convert", source, wide, "--dtype", "float64")[0] == 0
    assert read_manifest(wide)["tensors"]["optim.step"]["dtype"] == "float32"
    assert ask(capsys, "diff", source, wide)[1]["values"] == []


def test_damage_is_never_given_new_hashes_and_a_full_disk_leaves_nothing(
    tmp_path, capsys, monkeypatch
):
    source, out = store(tmp_path / "run"), tmp_path / "out"

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full)
        assert "No space left on device" in refused(capsys, "convert", source, out)
    flip(source / SHARD)
    code, data = ask(capsys, "convert", source, out)
    assert code == 1 and SHARD in data["problems"][0]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_weights_go_to_hugging_face_and_back(tmp_path, capsys):
    model = ModelConfig(
        vocab_size=65, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=24, qk_norm=False,
    )  # fmt: skip
    state = dict(named_state(build_model(Config(model=model), "cpu")))
    described = meta() | {"model": asdict(model), "seq_len": 16, "seed": 0}
    source = save(tmp_path, 3, state, meta=described, rank_tensors={}, files={})
    folder, back = tmp_path / "hf", tmp_path / "back"
    assert ask(capsys, "convert", source, folder, "--to", "huggingface")[0] == 0
    assert is_hugging_face(folder) and json.loads((folder / "config.json").read_text())
    assert ask(capsys, "convert", folder, back)[0] == 0
    assert ask(capsys, "verify", back)[0] == 0
    code, data = ask(capsys, "diff", source, back, "--weights-only")
    assert code == 0 and data["compared"] == len(state) and not data["fields"]["step"]["counts"]
    for words in (["--max-shard-size", 9], ["--to", "huggingface"]):
        assert "is of Hugging Face" in refused(capsys, "convert", folder, tmp_path / "new", *words)
    assert f"{back} exists" in refused(capsys, "convert", folder, back)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "latest", source.name]


# prune


def names(root: Path) -> list[str]:
    return sorted(path.name.removeprefix("step-000000") for path in root.glob("step-*"))


def test_prune_is_a_dry_run_until_yes_and_keeps_what_the_rules_keep(run, capsys):
    root = run / "checkpoints"
    before = names(root)
    code, data = ask(capsys, "prune", run)
    assert code == 0 and not data["done"] and names(root) == before
    assert [Path(path).name for path in data["removed"]] == ["step-00000010"]
    assert data["bytes"] == sum(f.stat().st_size for f in (root / "step-00000010").iterdir())
    assert len(data["leftovers"]) == 2
    ask(capsys, "prune", root, "--keep", 1, "--keep-best", 0, "--keep-every", 10, "--yes")
    assert names(root) == before
    ask(capsys, "prune", root, "--keep", 1, "--keep-best", 1, "--yes")
    assert names(root) == ["20", "40", "45", "50.tmp-a1b2c3"]
    code, data = ask(capsys, "prune", run, "--keep", 1, "--keep-best", 0, "--leftovers", "--yes")
    assert code == 0 and names(root) == ["40"] and len(data["removed"]) == 3
    assert ask(capsys, "prune", run, "--keep", 0, "--yes")[1]["removed"] == []
    assert names(root) == ["40"] and not audit(root / "step-00000040")


def test_prune_removes_nothing_while_the_newest_is_damaged(run, capsys):
    before = names(run / "checkpoints")
    flip(run / "checkpoints" / "step-00000040" / SHARD)
    code, data = ask(capsys, "prune", run, "--keep", 1, "--leftovers", "--yes")
    assert code == 1 and SHARD in data["problems"][0] and names(run / "checkpoints") == before


def test_prune_refuses_a_folder_that_a_run_writes(run, capsys):
    lease = Lease(run)
    for words in (["--yes"], []):
        assert "is being written by process" in refused(capsys, "prune", run, "--keep", 1, *words)
    assert len(names(run / "checkpoints")) == 6
    lease.close()
    assert ask(capsys, "prune", run, "--keep", 1, "--yes")[0] == 0


# bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "nowhere"], "nowhere is no folder; give a run folder"),
        (["verify", "empty"], "empty holds no checkpoints"),
        (["inspect", "bare"], "holds no complete checkpoint"),
        (["verify", "bare"], "holds no checkpoint to verify"),
        (["diff", "bare", "bare"], "holds no complete checkpoint"),
        (["prune", "bare"], "set --keep N"),
        (["prune", "bare/checkpoints/step-00000001", "--keep", "1"], "nowhere"),
    ],
)
def test_bad_input_is_told_with_what_is_allowed(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare" / "checkpoints").mkdir(parents=True)
    if message == "nowhere":
        store(tmp_path / "bare" / "checkpoints")
        message = "is one checkpoint; prune takes a run"
    assert message in refused(capsys, *words)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("step-00000001/new", "step-00000001 is a checkpoint; name a folder outside of it"),
        ("step-00000002", "names another step than"),
    ],
)
def test_a_conversion_goes_beside_checkpoints_and_under_its_own_step(out, message, run, capsys):
    source = store(run / "checkpoints", 1)
    assert message in refused(capsys, "convert", source, source.parent / out)
    assert main(["verify", str(source)]) == 0
    assert not (source.parent / out).exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert", "a", "b", "--max-shard-size", "0"], "allowed: 5GB, 200MB"),
        (["diff", "a", "b", "--tolerance", "nan"], "allowed: 0 or more"),
        (["prune", "a", "--keep", "-1"], "keep"),
        (["erase", "a"], "invalid choice"),
    ],
)
def test_bad_flags_end_with_code_2(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2 and message in capsys.readouterr().err

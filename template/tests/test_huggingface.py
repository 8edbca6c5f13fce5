"""Weights of transformers come in and go out exactly, on any mesh, and what is wrong is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hugging_face import compute_in_float64
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_checkpoint import problems_of
from weight_folders import MODELS, as_version_4, edit_config, save

from curry_train.checkpoint import CheckpointError, dcp, huggingface, weight_files
from curry_train.checkpoint.families import read_model
from curry_train.checkpoint.storage import as_part
from curry_train.checkpoint.training_state import (
    begin,
    fill_tied,
    load_for_inference,
    weight_tensors,
)
from curry_train.compose import load_config
from curry_train.config import Config, ConfigError, ParallelConfig
from curry_train.models.protocol import build_model, named_state
from curry_train.optim import build_optimizer
from curry_train.parallel.mesh import build_mesh
from curry_train.parallel.parallelize import build_chunks
from curry_train.runtime import build_runtime
from curry_train.testing import run_ranks

transformers = pytest.importorskip("transformers")
LIMIT = 20_000
"""Bytes of a shard: every folder but one has several."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Any:
    """Return name -> folder as transformers saved it, made when first asked for."""
    root, made = tmp_path_factory.mktemp("folders"), {}

    def folder(name: str) -> Path:
        if name not in made:
            options = {} if name == "Llama" else {"max_shard_size": LIMIT}
            made[name] = save(name, root / name, **options)
        return made[name]

    return folder


@pytest.fixture
def copy(folders, tmp_path) -> Any:
    """Return a function that copies the folder of a model, to be spoilt."""
    return lambda name: Path(shutil.copytree(folders(name), tmp_path / "copy"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a folder, whatever the index says."""
    files = sorted(folder.glob("*.safetensors"))
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def ours(folder: Path, precision: str = "fp64") -> torch.nn.Module:
    model = build_model(Config(model=read_model(folder)[0], precision=precision), "cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    huggingface.load(folder, dict(named_state(model)), model.config)
    return model


def theirs(folder: Path) -> Any:
    found, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True,
        experts_implementation="eager",
    )  # fmt: skip
    assert not any(report.values()), report
    return found


def gap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the largest difference of logits in float64; both sides read the same files."""
    model = ours(folder)
    ids = torch.randint(0, model.config.vocab_size, (2, 20))
    found = model(ids).logits[..., : model.config.vocab_size]
    with monkeypatch.context() as patched, torch.no_grad():
        compute_in_float64(patched, model.config)
        wanted = theirs(folder)(ids).logits
    assert wanted.std() > 0.1
    return float((found.detach() - wanted).abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name, folders, monkeypatch):
    assert gap(folders(name), monkeypatch) < 1e-9


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe", "DeepseekV3", "GptOss"])
def test_older_keys_of_config_describe_the_same_model(name, folders, copy):
    folder = copy(name)
    edit_config(folder, as_version_4)
    assert read_model(folder)[0] == read_model(folders(name))[0]


@pytest.mark.parametrize("name", MODELS)
def test_an_export_of_an_import_is_the_folder_again(name, folders, tmp_path):
    folder = folders(name)
    checkpoint = huggingface.import_weights(folder, tmp_path / "in")
    assert checkpoint == tmp_path / "in" / "step-00000000"
    out = huggingface.export(checkpoint, tmp_path / "out", max_shard_bytes=LIMIT)
    wanted, found = tensors_of(folder), tensors_of(out)
    assert wanted.keys() == found.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    index = json.loads((out / weight_files.INDEX).read_text())
    size = sum(tensor.nbytes for tensor in found.values())
    assert index["metadata"]["total_size"] == size and index["weight_map"].keys() == found.keys()
    assert huggingface.verify(folder, checkpoint) == huggingface.verify(out, checkpoint) == []
    ids = torch.randint(0, 99, (1, 12))
    with torch.no_grad():
        assert torch.equal(theirs(out)(ids).logits, theirs(folder)(ids).logits)


def test_dtypes_are_those_of_the_source_or_those_asked_for(tmp_path):
    folder = save("DeepseekV3", tmp_path / "hf", dtype=torch.bfloat16)
    file = folder / "model.safetensors"
    tensors, bias = load_file(file), "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[bias] = tensors[bias].float() + 2**-12
    save_file(tensors, file, {"format": "pt"})
    checkpoint = huggingface.import_weights(folder, tmp_path / "in")
    manifest = dcp.read_manifest(checkpoint)
    assert {entry["dtype"] for entry in manifest["tensors"].values()} == {"float32"}
    assert manifest["weights_dtype"] == "bfloat16"
    assert manifest["weights_dtypes"] == {bias: "float32"}
    again = tensors_of(huggingface.export(checkpoint, tmp_path / "auto"))
    assert all(again[k].dtype == t.dtype and torch.equal(again[k], t) for k, t in tensors.items())
    half = huggingface.export(checkpoint, tmp_path / "half", "float16")
    kinds = {key: tensor.dtype for key, tensor in tensors_of(half).items()}
    assert kinds.pop(bias) == torch.float32 and set(kinds.values()) == {torch.float16}
    config = json.loads((half / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "float16"


LAYOUTS = {
    "tp2": ("Qwen2", ParallelConfig(tp=2), 2),
    "pp2": ("Mixtral", ParallelConfig(pp=2), 2),
    "pp2 tied": ("Llama tied", ParallelConfig(pp=2, schedule="zbv"), 2),
    "ep2": ("GptOss", ParallelConfig(dp_shard=2, ep=2), 2),
    "zero 3": ("DeepseekV3", ParallelConfig(dp_shard=2, zero=3), 2),
    "tp2 ep2 zero 1": ("DeepseekV3", ParallelConfig(tp=2, dp_shard=2, ep=2, zero=1), 4),
    "tp2 ep2 zero 3": ("GptOss", ParallelConfig(tp=2, dp_shard=2, ep=2, zero=3), 4),
    "pp2 cp2": ("Qwen3Moe", ParallelConfig(pp=2, cp=2), 4),
}


def load_layout(rank: int, world: int, folder: Path, parallel: ParallelConfig) -> int:
    config = Config(model=read_model(folder)[0], parallel=parallel)
    device = torch.device("cpu")
    mesh = build_mesh(parallel, device=device, local_rank=rank, comm_timeout=60.0)
    chunks, shards = build_chunks(config, mesh)
    state = build_optimizer([(s.name, s.owned) for s in shards], config.optim)
    runtime: Any = SimpleNamespace(chunks=chunks, shards=shards, optimizer=state)
    tensors = weight_tensors(runtime)
    huggingface.load(folder, tensors, config.model, mesh)
    fill_tied(runtime)
    whole, compared = dict(named_state(ours(folder, "fp32"))), 0
    for name, part in {n: as_part(t) for n, t in tensors.items()}.items():
        box = tuple(slice(at, at + n) for at, n in zip(part.offset, part.tensor.shape, strict=True))
        assert torch.equal(part.tensor.detach(), whole[name][box]), name
        compared += part.tensor.numel()
    for shard in shards:
        if shard.tied:
            first = whole["model.embed_tokens.weight"]
            rows = shard.local.tensor.detach()[: len(first)]
            assert torch.equal(rows, first), shard.name
    return compared


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(2)
def test_every_layout_gets_the_bits_of_one_process(layout, folders):
    name, parallel, world = LAYOUTS[layout]
    folder = folders(name)
    total = sum(tensor.numel() for _, tensor in named_state(ours(folder, "fp32")))
    assert sum(run_ranks(load_layout, world, folder, parallel)) >= total


# What is wrong with a folder.


def shard(folder: Path, key: str) -> Path:
    """Return the file that holds a key."""
    index = json.loads((folder / weight_files.INDEX).read_text())
    return folder / index["weight_map"][key]


def change(folder: Path, key: str, **new: torch.Tensor | None) -> None:
    """Rewrite the shard of `key` with other tensors; None takes one out."""
    path = shard(folder, key)
    tensors = {**load_file(path), **new}
    save_file({k: t for k, t in tensors.items() if t is not None}, path, {"format": "pt"})


def change_index(folder: Path, **new: str | None) -> None:
    path = folder / weight_files.INDEX
    content = json.loads(path.read_text())
    content["weight_map"].update(new)
    content["weight_map"] = {k: f for k, f in content["weight_map"].items() if f is not None}
    path.write_text(json.dumps(content))


def several(folder: Path) -> None:
    """Take two out, add two, give one another shape and one a dtype of quantized weights."""
    change(folder, DOWN, **{DOWN: None, "foreign.weight": torch.ones(2)})
    change(folder, NORM, **{NORM: torch.ones(31), EXTRA: torch.ones(3)})
    change(folder, QUERY, **{QUERY: torch.ones(64, 32, dtype=torch.int8)})
    change_index(folder, **{DOWN: None, "foreign.weight": shard(folder, DOWN).name,
                            EXTRA: shard(folder, NORM).name})  # fmt: skip


def cut_off(folder: Path) -> None:
    path = shard(folder, NORM)
    path.write_bytes(path.read_bytes()[:-9])


def doubled(folder: Path) -> None:
    change(folder, NORM, **{QUERY: torch.ones(64, 32)})


def pickled(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80")


def quantized(method: str) -> Any:
    return lambda folder: edit_config(
        folder, lambda raw: raw.update(quantization_config={"quant_method": method})
    )


LAYER = "model.layers.1"
DOWN = f"{LAYER}.mlp.experts.3.down_proj.weight"
NORM, QUERY = f"{LAYER}.input_layernorm.weight", f"{LAYER}.self_attn.q_proj.weight"
EXTRA = f"{LAYER}.mlp.experts.4.down_proj.weight"
WRONG: dict[str, tuple[Any, list[str]]] = {
    "several at once": (several, [
        f"1 tensors are missing in the files: {DOWN}",
        f"2 tensors are in the files and unknown to this model: foreign.weight, {EXTRA}",
        f"1 tensors have another shape: {NORM} (file [31], model [32])",
        f"1 tensors are none of F64, F32, F16, BF16: quantized weights: {QUERY} (I8)",
    ]),
    "a shard is absent": (lambda f: shard(f, NORM).unlink(), ["is absent, and model.safe", "-of-"]),
    "a file is cut off": (cut_off, ["is no whole safetensors file", "-of-"]),
    "a key in two shards": (doubled, ["1 tensors are in both model-000", f": {QUERY}"]),
    "index names a key too many": (
        lambda f: change_index(f, **{"more.weight": shard(f, NORM).name}),
        ["1 tensors of ", "are not in its files: more.weight"],
    ),
    "index names another file": (
        lambda f: change_index(f, **{NORM: shard(f, "lm_head.weight").name}),
        ["1 tensors are in another file than ", NORM],
    ),
    "index lacks a key": (
        lambda f: change_index(f, **{NORM: None}), ["are in files and not in", NORM],
    ),
    "a path outside": (
        lambda f: change_index(f, **{NORM: "../x.safetensors"}),
        ["names ../x.safetensors: weights are read from *.safetensors beside it only"],
    ),
    "an absolute path": (lambda f: change_index(f, **{NORM: "/x.safetensors"}), ["/x.safetensors"]),
    "a folder below": (lambda f: change_index(f, **{NORM: "a/x.safetensors"}), ["a/x.safetensors"]),
    "an index without a map": (
        lambda f: (f / weight_files.INDEX).write_text("{}"), ["has no weight_map"],
    ),
    "an index that is none": (
        lambda f: (f / weight_files.INDEX).write_text("{"), ["cannot be read as JSON"],
    ),
    "a pickle alone": (pickled, ["only pytorch_model.bin: a pickle", "save_pretrained('NEW')"]),
    "nothing": (lambda f: [p.unlink() for p in f.glob("model*")], ["no model.safetensors"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json does not exist"]),
    "fp8": (quantized("fp8"), ["weights quantized by fp8"]),
    "gptq": (quantized("gptq"), ["weights quantized by gptq"]),
    "awq": (quantized("awq"), ["weights quantized by awq"]),
    "bitsandbytes": (quantized("bitsandbytes"), ["weights quantized by bitsandbytes"]),
    "mxfp4 of another family": (quantized("mxfp4"), ["weights quantized by mxfp4"]),
    "another architecture": (
        lambda f: edit_config(f, lambda raw: raw.update(architectures=["GPT2LMHeadModel"])),
        ["architectures=['GPT2LMHeadModel']", "known are LlamaForCausalLM, "],
    ),
    "another size": (
        lambda f: edit_config(f, lambda raw: raw.update(hidden_size=64, num_key_value_heads=4)),
        ["model.hidden_size=32: ", "has 64; set model.hidden_size=64", "num_key_value_heads=2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_told_and_nothing_is_written(kind, folders, copy, tmp_path):
    spoil, words = WRONG[kind]
    model = read_model(folders("Qwen3Moe"))[0]
    state = dict(named_state(build_model(Config(model=model), "cpu")))
    before = {name: tensor.clone() for name, tensor in state.items()}
    folder = copy("Qwen3Moe")
    spoil(folder)
    message = problems_of(huggingface.load, folder, state, model)
    assert all(word in message for word in words), message
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    if kind != "another size":  # which is fine by itself, and lacks tensors of that size
        message = problems_of(huggingface.import_weights, folder, tmp_path / "in")
        assert all(word in message for word in words), message
    assert not list(tmp_path.glob("in/*"))


def test_a_long_list_is_cut_and_counted(folders, copy):
    folder, model = copy("Qwen3Moe"), read_model(folders("Qwen3Moe"))[0]
    gone = {f"{LAYER}.mlp.experts.{e}.{m}_proj.weight" for e in range(4) for m in ("gate", "up")}
    for path in folder.glob("*.safetensors"):
        kept = {key: tensor for key, tensor in load_file(path).items() if key not in gone}
        save_file(kept, path)
    change_index(folder, **dict.fromkeys(gone))
    extra = dict.fromkeys(f"{LAYER}.mlp.experts.{e}.gate_proj.bias" for e in range(11))
    change(folder, NORM, **{key: torch.ones(1) for key in extra})
    change_index(folder, **dict.fromkeys(extra, shard(folder, NORM).name))
    state = dict(named_state(build_model(Config(model=model), "cpu")))
    message = problems_of(huggingface.load, folder, state, model)
    assert "8 tensors are missing in the files: " in message
    assert "11 tensors are in the files and unknown" in message and "and 3 more" in message


def test_a_tied_head_may_be_there_when_it_is_the_embedding(folders, copy):
    folder = copy("Llama tied")
    key, name = "lm_head.weight", "model.embed_tokens.weight"
    path = shard(folder, name)
    tensors = load_file(path)
    for head, fits in ((tensors[name].clone(), True), (tensors[name] + 1, False)):
        save_file({**tensors, key: head}, path)
        change_index(folder, **{key: path.name})
        if fits:
            ours(folder)
        else:
            with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed"):
                ours(folder)


def test_buffers_of_older_files_and_further_predictions_are_left_out(folders, copy):
    folder = copy("DeepseekV3")
    more = {"model.layers.2.eh_proj.weight": torch.ones(2),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}  # fmt: skip
    change(folder, "model.norm.weight", **more)
    change_index(folder, **dict.fromkeys(more, shard(folder, "model.norm.weight").name))
    model = read_model(folder)[0]
    state = dict(named_state(build_model(Config(model=model), "cpu")))
    edit_config(folder, lambda raw: raw.update(auto_map={"AutoModel": "x.y"}))
    (folder / "x.py").write_text("raise SystemExit('was run')")
    report = huggingface.load(folder, state, model)
    assert "multi-token prediction, model.layers.2.*" in str(report)
    assert "auto_map names code in the folder, which was not run" in report.notes
    edit_config(folder, lambda raw: raw.update(num_nextn_predict_layers=0))
    assert "model.layers.2.eh_proj.weight" in problems_of(huggingface.load, folder, state, model)


def test_a_head_of_its_own_must_be_there(folders, copy):
    folder = copy("Llama tied")
    edit_config(folder, lambda raw: raw.update(tie_word_embeddings=False))
    with pytest.raises(CheckpointError, match="missing in the files: lm_head.weight"):
        ours(folder)


def test_numbered_files_need_no_index(folders, copy):
    folder = copy("Mixtral")
    (folder / weight_files.INDEX).unlink()
    wanted = dict(named_state(ours(folders("Mixtral"))))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in named_state(ours(folder)))


@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3"])
def test_experts_stacked_as_transformers_5_has_them_are_read_too(name, folders, tmp_path):
    folder = save(name, tmp_path / "hf", save_original_format=False)
    assert any(key.endswith(".mlp.experts.gate_up_proj") for key in tensors_of(folder))
    wanted = dict(named_state(ours(folders(name))))
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in named_state(ours(folder)))
    checkpoint = huggingface.import_weights(folder, tmp_path / "in")
    assert huggingface.verify(folder, checkpoint) == []
    assert huggingface.verify(folders(name), checkpoint) == []


# Faults that must show.


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = weight_files.sources

    def exchanged(family: Any, name: str, shape: Any) -> Any:
        words = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        leaf = next((word for word in words if f".{word}." in name), "")
        return plain(family, name.replace(leaf, words.get(leaf, "")), shape)

    monkeypatch.setattr(weight_files, "sources", exchanged)


def untransposed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = weight_files.sources
    monkeypatch.setattr(
        weight_files, "sources", lambda *of: [s._replace(transposed=False) for s in plain(*of)]
    )


def unturned(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = read_model

    def read(folder: Path) -> Any:
        model, *rest = plain(folder)
        return (replace(model, rope_interleave=False), *rest)

    monkeypatch.setattr(weight_files, "read_model", read)
    monkeypatch.setitem(globals(), "read_model", read)


def in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = weight_files.as_ours

    def first_half(tensor: torch.Tensor, source: Any) -> torch.Tensor:
        if source.half is not None:
            tensor = tensor.chunk(2, -1)[source.half]
        return plain(tensor, source._replace(half=None))

    monkeypatch.setattr(weight_files, "as_ours", first_half)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("Mixtral", swapped),
        ("GptOss", swapped),
        ("GptOss", untransposed),
        ("GptOss", in_halves),
        ("DeepseekV3", unturned),
    ],
)
def test_a_fault_of_the_mapping_shows_in_the_logits(name, fault, folders, monkeypatch):
    fault(monkeypatch)
    assert gap(folders(name), monkeypatch) > 1e-3


# Export and verify.


def trained(tmp_path: Path, *settings: str) -> Path:
    """Save the weights of a fresh model as a checkpoint of a run does."""
    config = load_config([*settings, "model=tiny_moe"])
    runtime = build_runtime([*settings, "model=tiny_moe", "data.seq_len=32", "accelerator=cpu"])
    from curry_train.checkpoint.training_state import checkpoint_of
    from curry_train.optim import materialise_state

    materialise_state(runtime.optimizer)
    assert runtime.config.model == config.model
    return dcp.save(tmp_path / "run", **checkpoint_of(runtime, {}), mesh=runtime.mesh)


def test_a_run_is_exported_with_a_tokenizer_that_transformers_reads(tmp_path):
    checkpoint = trained(tmp_path)
    (tmp_path / "out").mkdir()
    out = huggingface.export(checkpoint, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["eos_token_id"] == 256
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 256
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "def f(x):\n\treturn 'é ü 漢'  # \x00\x7f\u00ad"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text and tokenizer.eos_token_id == 256
    assert huggingface.verify(out, checkpoint) == []
    with pytest.raises(CheckpointError, match="exists, and nothing is overwritten"):
        huggingface.export(checkpoint, out)


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("fp64", 1e-9)])
def test_an_exported_run_gives_the_logits_of_the_run(precision, bound, tmp_path, monkeypatch):
    checkpoint = trained(tmp_path, f"precision={precision}", "model.qk_norm=false")
    out = huggingface.export(checkpoint, tmp_path / "out")
    model, *_ = load_for_inference(checkpoint)
    ids = torch.randint(0, 257, (2, 32))
    with monkeypatch.context() as patched, torch.no_grad():
        if precision == "fp64":
            compute_in_float64(patched, model.config)
        found = transformers.AutoModelForCausalLM.from_pretrained(
            out, dtype="auto", attn_implementation="eager", experts_implementation="eager"
        )
        assert found.dtype == next(model.parameters()).dtype
        gap = (model(ids).logits[..., :257] - found(ids).logits).abs().max()
    assert gap < bound


def test_a_damaged_checkpoint_is_not_exported(folders, tmp_path):
    checkpoint = huggingface.import_weights(folders("Llama"), tmp_path / "in")
    tensors = checkpoint / "tensors-00000.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-5] ^= 1
    tensors.write_bytes(data)
    message = problems_of(huggingface.export, checkpoint, tmp_path / "out")
    assert f"{tensors} does not have the sha256 of the manifest" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["[]", "{", "[1]", "null"])
def test_settings_of_a_tokenizer_that_nobody_can_read_are_written_anew(text, copy, tmp_path):
    folder = copy("Llama")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(text)
    out = huggingface.export(huggingface.import_weights(folder, tmp_path / "in"), tmp_path / "out")
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_what_no_architecture_expresses_is_not_exported(tmp_path):
    checkpoint = trained(
        tmp_path, "model.capacity_factor=1.25", "model.sliding_window=8",
        "model.sliding_window_pattern=2", "model.scoring_func=sigmoid",
    )  # fmt: skip
    message = problems_of(huggingface.export, checkpoint, tmp_path / "out")
    for key in ("capacity_factor=1.25", "sliding_window_pattern=2", "scoring_func=sigmoid"):
        assert f"model.{key}: " in message
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_leaves_nothing(folders, tmp_path, monkeypatch):
    checkpoint = huggingface.import_weights(folders("Qwen2"), tmp_path / "in")
    calls = []

    def full(*args: Any) -> Any:
        calls.append(args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("curry_train.checkpoint.storage.os.fsync", full)
    message = problems_of(huggingface.export, checkpoint, tmp_path / "out")
    assert "No space left on device" in message and calls
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_verify_names_the_tensor_and_the_first_value_that_differs(folders, copy, tmp_path):
    checkpoint = huggingface.import_weights(folders("Mixtral"), tmp_path / "in")
    folder = copy("Mixtral")
    key = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    tensor = load_file(shard(folder, key))[key]
    tensor[5, 7] = -0.0
    change(folder, key, **{key: tensor})
    [problem] = huggingface.verify(folder, checkpoint)
    assert "model.layers.1.mlp.experts.up_proj.weight: 1 of 1536 values differ" in problem
    assert f"{key} in " in problem and "first at [0, 5, 7]" in problem
    change(folder, key, **{key: tensor[:40]})
    assert "have another shape" in "".join(huggingface.verify(folder, checkpoint))


def test_verify_sees_bits_that_an_import_rounded_away(tmp_path):
    folder = save("Qwen2", tmp_path / "hf", dtype=torch.float64)
    file = folder / "model.safetensors"
    save_file({key: tensor + 1e-12 for key, tensor in load_file(file).items()}, file)
    checkpoint = huggingface.import_weights(folder, tmp_path / "in")
    assert len(huggingface.verify(folder, checkpoint)) > 20
    whole = huggingface.import_weights(folder, tmp_path / "wide", "fp64")
    assert huggingface.verify(folder, whole) == []
    half = huggingface.export(whole, tmp_path / "half", "bfloat16")
    problems = huggingface.verify(half, whole)
    assert problems and all(", once rounded to bfloat16, are those of" in p for p in problems)
    tensors = load_file(half / "model.safetensors")
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, half / "model.safetensors")
    changed = [problem for problem in huggingface.verify(half, whole) if "lm_head" in problem]
    assert "values differ from" in changed[0]


# The command and runs.


def command(capsys: pytest.CaptureFixture, *argv: Any) -> tuple[int, str]:
    code = huggingface.main([*map(str, argv)])
    return code, capsys.readouterr().out


def test_the_command_imports_exports_and_verifies(folders, copy, tmp_path, capsys):
    folder = folders("Qwen3Moe")
    project = tmp_path / "project"
    (project / "configs" / "model").mkdir(parents=True)
    argv = ["import", folder, "--out", tmp_path / "in", "--project", project]
    code, out = command(capsys, *argv, "--write-config", "mine", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["verdict"] == "pass"
    assert answer["sanity"]["verdict"] == "unclear"  # there is no tokenizer
    text = (project / "configs/model/mine.yaml").read_text()
    assert "first_k_dense_replace: 1" in text and answer["config"].endswith("mine.yaml")
    code, out = command(capsys, *argv[:3], tmp_path / "other", *argv[4:], "--write-config", "mine")
    assert code == 2 and not (tmp_path / "other").exists()
    assert (project / "configs/model/mine.yaml").read_text() == text
    step = Path(answer["path"])
    code, out = command(
        capsys, "export", step, "--out", tmp_path / "out", "--max-shard-size", "0.02MB"
    )
    assert code == 0 and weight_files.INDEX in out
    code, out = command(capsys, "verify", tmp_path / "out", step)
    assert code == 0 and "tensors are equal, bit by bit" in out
    spoilt = copy("Qwen3Moe")
    change(spoilt, NORM, **{NORM: torch.zeros(32)})
    code, out = command(capsys, "verify", spoilt, step, "--json")
    assert code == 1 and NORM in json.loads(out)["problems"][0]
    code, out = command(capsys, *argv, "--json")  # the checkpoint is there already
    assert code == 2 and json.loads(out)["verdict"] == "refused"


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom curry_train.checkpoint.huggingface import main\n"
        "try:\n    main(['import', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--write-config NAME" in done.stdout, done.stderr


def test_a_run_starts_from_a_folder(tmp_path):
    checkpoint = trained(tmp_path)
    folder = huggingface.export(checkpoint, tmp_path / "hf")
    words = ["model=tiny_moe", "data.seq_len=32", "accelerator=cpu", "seed=5"]
    runtime = build_runtime([*words, f"run.init_from={folder}"])
    told: list[dict] = []
    run: Any = SimpleNamespace(
        checkpoint=None, event=lambda ev, **of: told.append({"ev": ev, **of})
    )
    begin(runtime, run)
    saved = {name: as_part(part).tensor for name, part in weight_tensors(runtime).items()}
    wanted = dict(named_state(ours(folder, "fp32")))
    assert all(torch.equal(tensor.detach(), wanted[name]) for name, tensor in saved.items())
    [note] = told  # the folder has the bytes' tokenizer in the library's words
    assert "Qwen3MoeForCausalLM: 51 tensors of float32" in note["weights"]
    (folder / "tokenizer.json").write_text("{}")
    told.clear()
    begin(runtime, run)
    assert f"set data.tokenizer={folder / 'tokenizer.json'}" in told[1]["weights"]
    made = huggingface.import_weights(folder, tmp_path / "in")
    runtime.config = replace(runtime.config, run=replace(runtime.config.run, init_from=str(made)))
    told.clear()
    begin(runtime, run)
    assert f"set data.tokenizer={made / 'tokenizer.json'}" in told[0]["weights"]
    chosen = replace(runtime.config.run, init_from=str(checkpoint))
    runtime.config = replace(runtime.config, run=chosen)
    told.clear()
    begin(runtime, run)
    assert not told
    [problem] = huggingface.initial_problems(tmp_path / "in", runtime.config.model)
    assert problem == f"is no checkpoint; set run.init_from={made}"


def test_a_run_of_another_model_is_refused_with_every_difference(folders):
    folder = folders("Qwen3Moe")
    with pytest.raises(ConfigError) as refused:
        load_config(["model=tiny_moe", "data.seq_len=32", f"run.init_from={folder}"])
    told = "\n".join(refused.value.problems)
    for key, value in {"hidden_size": 32, "vocab_size": 99, "num_hidden_layers": 3}.items():
        assert f"set model.{key}={value}" in told
    assert "moe_backend" not in told and "router_aux_loss_coef" not in told
    assert "safetensors" not in told


def test_a_folder_without_weights_is_refused_before_a_run(folders, tmp_path):
    shutil.copy(folders("Qwen3Moe") / "config.json", tmp_path)
    model, _, _ = read_model(tmp_path)
    assert huggingface.initial_problems(tmp_path, model) == [
        "has no *.safetensors beside config.json; give weights"
    ]

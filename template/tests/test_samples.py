"""Samples that are no text: drawn once an epoch, held out once, trained by a model's own loss."""

import collections
import json
import shutil
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from projects import exit_code, fork_train, import_everything, losses, rows, run_folders
from torch import nn

from curry_train import compose
from curry_train.checkpoint.dcp import CheckpointError
from curry_train.checkpoint.training_state import load_for_inference
from curry_train.compose import load_config
from curry_train.config import Config, ConfigError, Count, DataConfig
from curry_train.data import DATASETS, DataError, holds_samples, open_corpus, vocab_size_of
from curry_train.data.loader import IGNORED, Loader, validation_batches
from curry_train.data.samples import Samples
from curry_train.equality import prove
from curry_train.evaluate import evaluate
from curry_train.layers.linear import Linear
from curry_train.loss import class_sums, mean_loss, value_sums
from curry_train.models import MODELS
from curry_train.parallel.mesh import Mesh
from curry_train.plan import print_plan
from curry_train.rules import problems
from curry_train.runtime import assemble
from curry_train.step import train_step

FEATURES, CLASSES, LENGTH = 6, 4, 5


@dataclass(frozen=True)
class RowsConfig:
    """A model as a user would add one."""

    architecture: str = "rows"
    """Key of curry_train.models.MODELS."""
    hidden_size: Count = 8
    """Width."""


class RowClassifier(nn.Module):
    Config = RowsConfig
    vocab_size, vocab_parameters, active_share = 0, (), 1.0
    outputs = CLASSES

    def __init__(self, config, *, compute_dtype):
        super().__init__()
        width = config.hidden_size
        self.config, self.compute_dtype = config, compute_dtype
        self.embed = Linear(FEATURES, width, bias=True)
        self.layers = nn.ModuleDict({str(i): Linear(width, width, bias=True) for i in range(2)})
        self.head = Linear(width, self.outputs)

    def tie_weights(self):
        """Share nothing."""

    def init_constant(self, name):
        return 0.0 if name.endswith("bias") else None

    def init_std(self, name):
        return self.get_parameter(name).shape[-1] ** -0.5

    def forward(self, inputs):
        x = self.embed(inputs.to(self.compute_dtype))
        for block in self.layers.values():
            x = x + block(x).tanh()
        return self.head(x)

    def loss_sums(self, batch):
        return class_sums(self(batch["inputs"]), batch["labels"])


class SeriesRegressor(RowClassifier):
    outputs = 1

    def loss_sums(self, batch):
        return value_sums(self(batch["inputs"]).squeeze(-1), batch["labels"])


def make(count, shape, seed=0):
    """Inputs that number their samples, so that a batch says which it drew."""
    inputs = np.random.default_rng(seed).normal(size=(count, *shape, FEATURES))
    inputs[..., 0] = np.arange(count).reshape(-1, *[1] * len(shape)) / count
    return inputs


def drawn_rows(data: DataConfig) -> Samples:
    inputs = make(50, ())
    labels = np.abs(inputs[:, 1:].argmax(1) - 1)
    labels[7], held = IGNORED, 11
    return Samples(
        train={"inputs": inputs[held:], "labels": labels[held:]},
        val={"inputs": inputs[:held], "labels": labels[:held]},
    )


def drawn_series(data: DataConfig) -> "Samples":
    inputs = make(50, (LENGTH,))
    labels, held = inputs.sum(-1), 11
    labels[20, 2:] = labels[3, 0] = np.nan
    return Samples(
        train={"inputs": inputs[held:], "labels": labels[held:]},
        val={"inputs": inputs[:held], "labels": labels[:held]},
    )


def unannotated(data: DataConfig):
    return drawn_rows(data)


def no_samples(data: DataConfig) -> Samples:
    return {}


KINDS = ("rows", "series")
DATA = DataConfig(dataset="rows", global_batch_size=12)


@pytest.fixture(scope="module", autouse=True)
def registered(tmp_path_factory):
    """Two models and two datasets in a project of their own, registered as users do."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(Path(__file__).parents[1] / "configs", project / "configs")
    for name in KINDS:
        (project / f"configs/model/{name}.yaml").write_text(f"architecture: {name}\n")
    for name in (*KINDS, "unannotated", "no_samples", "absent"):
        (project / f"configs/data/{name}.yaml").write_text(f"dataset: {name}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "PROJECT", project)
        patch.setitem(MODELS, "rows", "test_samples:RowClassifier")
        patch.setitem(MODELS, "series", "test_samples:SeriesRegressor")
        patch.setitem(DATASETS, "rows", "test_samples:drawn_rows")
        patch.setitem(DATASETS, "series", "test_samples:drawn_series")
        patch.setitem(DATASETS, "unannotated", "test_samples:unannotated")
        patch.setitem(DATASETS, "no_samples", "test_samples:no_samples")
        patch.setitem(DATASETS, "absent", "test_samples:nowhere")
        yield project


@cache
def config_of(*words):
    return load_config(["accelerator=cpu", *words])


def words_of(kind, *more):
    return (f"model={kind}", f"data={kind}", "data.global_batch_size=8", *more)


def runtime_of(kind, *more):
    config = config_of(*words_of(kind, *more))
    return assemble(config, open_corpus(config.data, cache_dir=None), Mesh.single())


def numbers(batches):
    return [round(float(x) * 50) for batch in batches for x in batch["inputs"][..., 0].view(-1)]


def take(steps, *, world=1, size=12, micro=1, start=0):
    data, samples = replace(DATA, global_batch_size=size), drawn_rows(DATA)
    loaders = [
        Loader(samples, data, seed=3, micro_batch_size=micro, batch_rank=rank, batch_world=world)
        for rank in range(world)
    ]
    for loader in loaders:
        loader.samples_consumed = start
    return [n for _ in range(steps) for loader in loaders for n in numbers(loader.next_step())]


def test_each_epoch_draws_each_sample_once_and_ranks_and_resumes_change_nothing():
    straight, count = take(13), 39
    for epoch in range(4):
        part = straight[epoch * count : (epoch + 1) * count]
        assert sorted(part) == list(range(11, 50))
    assert straight[:count] != straight[count : 2 * count]
    for world, size, micro in ((2, 12, 3), (3, 6, 1), (1, 4, 2)):
        assert take(48 // size, world=world, size=size, micro=micro) == straight[:48]
    assert take(3) + take(4, world=2, size=10, micro=5, start=36) == straight[:76]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_the_promised_form(kind):
    samples = open_corpus(DataConfig(dataset=kind), cache_dir=None)
    loader = Loader(samples, DATA, seed=0, micro_batch_size=4)
    shape, labels = ((4, LENGTH), torch.float32) if kind == "series" else ((4,), torch.int64)
    for batch in loader.next_step():
        assert {name: (t.shape, t.dtype) for name, t in batch.items()} == {
            "inputs": ((*shape, FEATURES), torch.float32),
            "labels": (shape, labels),
        }
    assert (samples.tokenizer, holds_samples(DATA), vocab_size_of(DATA)) == (None, True, None)
    assert not holds_samples(replace(DATA, input="a text")) and not holds_samples(DataConfig())


def test_further_keys_keep_their_kind_and_mapped_files_are_read(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.uint8).reshape(4, 3))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    split = {"inputs": mapped, "input_ids": np.arange(4, dtype=np.uint16), "labels": np.ones(4),
             "mask": np.eye(4, dtype=bool), "weight": np.ones((4, 2))}  # fmt: skip
    samples = Samples(train=split, val=split)
    (batch,) = Loader(
        samples, replace(DATA, global_batch_size=4), seed=0, micro_batch_size=4
    ).next_step()
    found = {name: tensor.dtype for name, tensor in batch.items()}
    whole, real = torch.int64, torch.float32
    assert found == dict(zip(split, (real, whole, real, torch.bool, real), strict=True))
    assert sorted(batch["inputs"][:, 0].tolist()) == [0, 3, 6, 9]
    copied = {**split, "inputs": np.array(mapped)}
    assert Samples(train=copied, val=split).hash == samples.hash


def test_the_hash_tells_every_change_of_the_data():
    plain = {"inputs": np.ones((2, 4)), "labels": np.ones(2)}

    def of(train=None, val=None, **more):
        return Samples(
            train={**plain, **more, **(train or {})}, val={**plain, **more, **(val or {})}
        ).hash

    zeros, extra = {"labels": np.zeros(2)}, np.ones((2, 3))
    found = [of(), of(zeros), of(val=zeros), of(zeros, zeros), of(a=extra), of(b=extra)]
    found += [of(inputs=np.ones((2, 2, 2))), of(inputs=np.ones((2, 4), np.float32))]
    assert len(set(found)) == len(found) and of() == found[0]


def split_with(**changes):
    split = {"inputs": np.ones((4, 2)), "labels": np.arange(4)}
    return {**split, **changes}


BAD = {
    "other keys": ({}, {"extra": np.ones(4)}, r"both need the same keys"),
    "no array": ({"inputs": [1, 2]}, {}, r"train\['inputs'\] is list; give a NumPy array"),
    "text": ({"inputs": np.array(["a"] * 4)}, {}, r"is <U1; give a NumPy array of numbers"),
    "shape": ({}, {"inputs": np.ones((4, 3))}, r"val\['inputs'\] holds float64 \(3,\) and train"),
    "kind": ({}, {"labels": np.ones(4)}, r"both splits need one shape and kind"),
    "lengths": ({"labels": np.arange(3)}, {}, r"train has .*; every key needs the same number"),
    "empty": ({}, {"inputs": np.ones((0, 2)), "labels": np.arange(0)}, "val has .* at least 1"),
    "no target": ({}, {"labels": np.full(4, IGNORED)}, "val has no target: all labels are -100"),
    "nan": ({"inputs": np.array([[0, 0], [0, np.nan]] * 2)}, {}, "holds nan in sample 1; allowed"),
    "inf label": ({"labels": np.array([1, 2, 3, np.inf])}, {"labels": np.ones(4)}, "inf in sample"),
    "too large": ({"inputs": np.full((4, 2), 1e39)}, {}, r"holds 1e\+39 in .* of float32"),
    "negative": ({"labels": np.array([0, 1, -1, 2])}, {}, "holds -1 in sample 2; .* at least 0; a"),
    "ids": ({"input_ids": np.ones(4)}, {"input_ids": np.ones(4)}, "ids are integers"),
    "no inputs": ({"input": np.ones(4)}, {"inpt": np.ones(4)}, "labels and inputs or input_ids"),
    "bool": ({"labels": np.ones(4, bool)}, {"labels": np.ones(4, bool)}, "classes and ids are"),
}


@pytest.mark.parametrize("case", BAD)
def test_arrays_that_cannot_be_trained_on_are_refused(case):
    train, val, said = BAD[case]
    with pytest.raises(DataError, match=said):
        Samples(train=split_with(**train), val=split_with(**val))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "micro"), [(1, 4), (2, 3), (3, 64), (7, 1)])
def test_every_held_out_sample_counts_once_on_any_layout(kind, world, micro):
    samples = open_corpus(DataConfig(dataset=kind), cache_dir=None)
    found, counts = [], set()
    for rank in range(world):
        shares = {"batch_rank": rank, "batch_world": world}
        batches = list(validation_batches(samples, DATA, micro_batch_size=micro, **shares))
        counts.add(len(batches))
        for batch in batches:
            assert len(batch["labels"]) == micro and batch["inputs"].isfinite().all()
            labels = batch["labels"]
            there = ~labels.isnan() if kind == "series" else labels != IGNORED
            found += (batch["inputs"][..., 0][there] * 50).round().int().tolist()
    assert len(counts) == 1, "collectives would hang"
    expected = collections.Counter(dict.fromkeys(range(11), LENGTH if kind == "series" else 1))
    expected[3 if kind == "series" else 7] -= 1
    assert collections.Counter(found) == +expected


def test_the_sums_equal_the_formulas_and_missing_targets_give_no_gradient():
    scores = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(7, (3, 4))
    labels[0, 1] = labels[2] = IGNORED
    sums, there = class_sums(scores, labels), labels != IGNORED
    wanted = -scores.log_softmax(-1)[there].gather(1, labels[there][:, None]).sum()
    assert sums.total.item() == pytest.approx(wanted.item(), rel=1e-12)
    assert sums.count == there.sum() == 7
    sums.total.backward()
    assert (scores.grad.flatten(0, 1).abs().sum(1) > 0).equal(there.flatten())

    values = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.randn(3, 4, dtype=torch.float64)
    labels[1, 2] = labels[0] = float("nan")
    there = ~labels.isnan()
    for loss in (F.mse_loss, F.l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits):
        targets = labels.sigmoid() if loss is F.binary_cross_entropy_with_logits else labels
        sums, values.grad = value_sums(values, targets, loss), None
        wanted = loss(values[there], targets[there], reduction="sum")
        assert sums.total.item() == pytest.approx(wanted.item(), rel=1e-12) and sums.count == 7
        sums.total.backward()
        assert (values.grad != 0).equal(there), "and no NaN"
    assert value_sums(values.bfloat16(), labels).nll.dtype == torch.float64


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"values have shape \[4, 1\], labels \[4\]: both must be"):
        value_sums(torch.ones(4, 1), torch.ones(4))
    for logits in (torch.ones(4, 3, 5), torch.ones(3, 5)):
        with pytest.raises(ValueError, match=r"labels \[4\]: logits must have the shape of the"):
            class_sums(logits, torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_equals_its_micro_batches_and_validation_the_formula(kind):
    whole, parts = (runtime_of(kind, "precision=fp64", *more) for more in ((), MICRO))
    for _ in range(6):  # past the end of an epoch, over samples without targets
        one, other = train_step(whole), train_step(parts)
        assert one.loss == pytest.approx(other.loss, rel=1e-13) and one.tokens == other.tokens
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-12)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    samples, scores = whole.corpus, evaluate(whole)
    out = whole.model(torch.from_numpy(samples.val["inputs"].astype(np.float32)))
    labels = torch.from_numpy(samples.val["labels"])
    if kind == "rows":
        wanted = F.cross_entropy(out, labels)
    else:
        there = ~labels.isnan()
        wanted = F.mse_loss(out.squeeze(-1)[there], labels[there].float().double())
    assert scores == {"val/loss": pytest.approx(wanted.item(), rel=1e-12)}
    assert evaluate(parts)["val/loss"] == pytest.approx(wanted.item(), rel=1e-10)
    batch = whole.batches.next_step()[0]
    sums = whole.model.loss_sums(batch)
    assert mean_loss(whole.model, batch) == sums.total / sums.count


MICRO = ("data.micro_batch_size=2",)


def averaged(runtime):
    """A loss that divides by itself: the mean of a micro-batch, as if it had one target."""
    kept = runtime.model.loss_sums

    def mean_of_batch(batch):
        sums = kept(batch)
        return sums._replace(nll=sums.nll / sums.count.clamp(min=1), count=sums.count.clamp(max=1))

    runtime.model.loss_sums = mean_of_batch


LAYOUTS = {
    "ddp": (),
    "zero1": ("parallel.zero=1",),
    "zero2": ("parallel.zero=2", "data.micro_batch_size=2"),
    "zero3": ("parallel.zero=3", "parallel.recompute=full"),
    "replicas": ("parallel.dp_replicate=2", "parallel.recompute=selective"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_as_one_process_does(layout):
    for kind in KINDS if layout in ("ddp", "zero3") else KINDS[:1]:
        proof = prove(words_of(kind, *LAYOUTS[layout]), 2)
        assert proof.equal, proof
        assert proof.tensors == 14


def test_a_model_that_averages_by_itself_is_not_equal():
    assert not prove(words_of("series"), 2, prepare=averaged).equal


REFUSED = {
    "text": (("model=rows",), "model.architecture=rows: learns from samples, and data.dataset=emb"),
    "language model": (("data=rows",), "data.dataset=rows: holds samples, and model.architecture="),
    "tp": (words_of("rows", "parallel.tp=2", "devices=2"), "parallel.tp=2: not proved equal to"),
    "pp": (words_of("rows", "parallel.pp=2", "devices=2"), "parallel.pp=2: not proved equal to"),
    "cp": (words_of("rows", "parallel.cp=2", "devices=2"), "parallel.cp=2: not proved equal to"),
    "ep": (words_of("rows", "parallel.ep=2", "devices=2"), "parallel.ep=2: not proved equal to"),
    "mask": (words_of("rows", "data.document_mask=true"), "data.document_mask=true: read of text"),
    "bpe": (words_of("rows", "data.tokenizer=bpe"), "data.tokenizer=bpe: read of text only, and"),
    "absent": (("model=rows", "data=absent"), "data.dataset=absent: test_samples:nowhere does not"),
    "unannotated": (("model=rows", "data=unannotated"), "data.dataset=unannotated: test_samples:u"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_a_problem_of_the_configuration(case):
    words, said = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        config_of(*words)
    (problem,) = caught.value.problems
    assert problem.startswith(said) and ("set" in problem or "write" in problem or case == "absent")


def test_what_a_function_returns_is_looked_at_once_more():
    with pytest.raises(DataError, match="data.dataset=no_samples returned dict; return Samples"):
        open_corpus(DataConfig(dataset="no_samples"), cache_dir=None)
    with pytest.raises(DataError, match="annotated to return None; write `-> Source` of text"):
        open_corpus(DataConfig(dataset="unannotated"), cache_dir=None)
    assert problems(Config(model=RowsConfig(), data=DataConfig(dataset="rows"))) == []


def test_the_plan_counts_samples(capsys):
    assert print_plan(config_of(*words_of("rows", "devices=2"))) == 0
    out = capsys.readouterr().out
    assert "samples per step: 8 (1 micro-batches of 4 on each rank)" in out and "token" not in out


def test_train_py_trains_it_resumes_exactly_and_writes_no_text(tmp_path, monkeypatch):
    import_everything()
    monkeypatch.chdir(tmp_path)
    settings = [*words_of("series"), "accelerator=cpu", "run.log_every=1", "run.save_every=3",
                "run.eval_every=3", "optim.warmup_steps=0"]  # fmt: skip

    def train(*more):
        pid = fork_train(*settings, "run.max_steps=6", *more, log=tmp_path / "log.txt")
        assert exit_code(pid) == 0, (tmp_path / "log.txt").read_text()

    train("run.name=whole")
    (whole,) = run_folders(tmp_path)
    train("run.name=second", f"run.resume={whole}/checkpoints/step-00000003")
    second = next(folder for folder in run_folders(tmp_path) if folder != whole)
    expected, found = losses(whole), losses(second)
    assert len(expected) == 6 and found == {step: expected[step] for step in (4, 5, 6)}
    (row,) = [row for row in rows(whole) if row["step"] == 6]
    assert "val/loss" in row and "val/bpb" not in row
    events = [event["ev"] for event in rows(whole, "journal.jsonl")]
    assert "eval" in events and not any("sample" in e for e in rows(whole, "journal.jsonl"))
    manifest = json.loads((whole / "checkpoints/step-00000006/manifest.json").read_text())
    assert manifest["data_hash"] == drawn_series(DATA).hash
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json: it holds no language model"):
        load_for_inference(whole)

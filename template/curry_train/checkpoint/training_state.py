"""What a checkpoint of this trainer holds: weights, moments, randomness, position.

`dcp` knows tensors and files; this module knows which of them make a training run.
"""

from __future__ import annotations

import functools
import math
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curry_train.checkpoint import MANIFEST, dcp, folder_name, offer_older, weights_only
from curry_train.checkpoint.async_save import AsyncSave
from curry_train.checkpoint.huggingface import is_hugging_face
from curry_train.checkpoint.huggingface import load as load_files
from curry_train.config import Config, config_hash, model_schema
from curry_train.data.tokenizer import ByteTokenizer, Tokenizer, library_json, load_tokenizer
from curry_train.launch import wait_limit
from curry_train.models.protocol import build_model, named_state, saved_parts
from curry_train.optim import materialise_state
from curry_train.parallel.shards import Part, Shard
from curry_train.rules import unusable
from curry_train.runtime import Runtime
from curry_train.tracking.progress import tell
from curry_train.tracking.run_folder import Run

MOMENTS = ("exp_avg", "exp_avg_sq")
TOKENIZER = "tokenizer.json"
INACTIVE = [1.0, 0]


def weight_tensors(runtime: Runtime) -> dict[str, Tensor | Part]:
    """Return what this rank holds of every weight and buffer under its topology-free name.

    Parts are views that load fills. Every copy of a weight is there (at parallel.zero=1 each rank
    has all rows), so a save compares them; the second copy of a tied weight is not.
    """
    tensors: dict[str, Tensor | Part] = {}
    for shard, chunk in _saved_shards(runtime):
        tensors |= saved_parts(chunk, shard.name, shard.local)
    for chunk in runtime.chunks:
        tensors |= dict(chunk.named_buffers())
    return tensors


def training_tensors(runtime: Runtime) -> dict[str, Tensor | Part]:
    """Return what this rank holds of every tensor of the run, as views that load fills.

    Weights carry their own names, moments "optim.exp_avg.<name>"; "optim.step" is the number of
    updates AdamW made (skipped steps do not count), a float32 scalar.
    """
    tensors, states = weight_tensors(runtime), runtime.optimizer.state
    for shard, chunk in _saved_shards(runtime):
        for moment in MOMENTS:
            own = shard.own._replace(tensor=states[shard.owned][moment])
            parts = saved_parts(chunk, shard.name, own)
            tensors |= {f"optim.{moment}.{saved}": part for saved, part in parts.items()}
    tensors["optim.step"] = next(iter(states.values()))["step"]
    return tensors


def _saved_shards(runtime: Runtime) -> list[tuple[Shard, nn.Module]]:
    """Return every shard but second copies of tied weights, with the chunk that it is of."""
    chunks = {name: chunk for chunk in runtime.chunks for name, _ in chunk.named_parameters()}
    return [(shard, chunks[shard.name]) for shard in runtime.shards if not shard.tied]


def fill_tied(runtime: Runtime) -> None:
    """Give second copies of tied weights, and their moments if any, the values of the first."""
    first = {shard.name: shard for shard in runtime.shards if not shard.tied}
    for shard in runtime.shards:
        if shard.tied:
            source = first[shard.name]
            shard.local.tensor.copy_(source.local.tensor)
            for key, value in runtime.optimizer.state[source.owned].items():
                runtime.optimizer.state[shard.owned][key].copy_(value)


def rng_tensors() -> dict[str, Tensor]:
    """Return the state of every random generator of this process."""
    _, keys, position, _, _ = np.random.get_state(legacy=True)
    tensors = {
        "rng.torch": torch.get_rng_state(),
        "rng.python": torch.tensor(random.getstate()[1], dtype=torch.int64),
        "rng.numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "rng.numpy_position": torch.tensor(position, dtype=torch.int64),
    }
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    return tensors


def set_rng(tensors: dict[str, Tensor]) -> None:
    """Put the generators back to the states of `rng_tensors`."""
    torch.set_rng_state(tensors["rng.torch"])
    random.setstate((3, tuple(tensors["rng.python"].tolist()), None))
    keys = tensors["rng.numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(tensors["rng.numpy_position"]), 0, 0.0))
    if "rng.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng.cuda"])


@functools.lru_cache(maxsize=1)
def tokenizer_files(tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Return the files from which `load_tokenizer` makes the tokenizer again; none without one."""
    with tempfile.TemporaryDirectory() as folder:
        if tokenizer is not None:
            tokenizer.save(Path(folder) / TOKENIZER)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


class Saver:
    """Writes the checkpoints of a run: in the loop, or with run.async_save beside it.

    Collective: all ranks make it and call its methods together.
    """

    def __init__(self, runtime: Runtime, run: Run) -> None:
        self.runtime, self.run = runtime, run
        config = runtime.config.run
        limit = wait_limit(config.comm_timeout)
        self._beside = AsyncSave(runtime.mesh, limit) if config.async_save else None

    def save(self, row: Mapping[str, float], *, last: bool) -> None:
        """Save the current step; last: the run ends here, so return when the checkpoint stands.

        row: the step's metrics, of which those of a validation go into the manifest. Waits for the
        save before this one and says so. Raises: CheckpointError on every rank, also for the save
        before; then this step is saved all the same, in the loop, for it is the run's last.
        """
        beside, waited, failed = self._beside, 0.0, None
        if beside is not None:
            previous, busy = beside.step, beside.busy
            try:
                waited = beside.wait()
            except dcp.CheckpointError as error:
                failed = error
            if busy and self.runtime.mesh.rank == 0:
                step = self.runtime.step
                tell(f"step {step} waited {waited:.1f} s for the checkpoint of step {previous}")
        try:
            save(self.runtime, self.run, row, None if last or failed else beside, waited)
        except dcp.CheckpointError as error:
            problems = failed.problems if failed else []
            raise dcp.CheckpointError([*problems, *error.problems]) from None
        if failed:
            raise failed

    def close(self) -> str:
        """Wait for the save that is under way; return why it failed, on every rank, or nothing."""
        try:
            if self._beside is not None:
                self._beside.wait()
        except dcp.CheckpointError as error:
            return str(error)
        return ""


def save(
    runtime: Runtime,
    run: Run,
    row: Mapping[str, float] = MappingProxyType({}),
    beside: AsyncSave | None = None,
    waited: float = 0.0,
) -> Path:
    """Write a checkpoint of the current step, tell the journal and return its path; collective.

    row: metrics of the step. beside: what writes while the caller goes on; None writes here.
    waited: seconds that the loop has waited already, for an earlier save.
    """
    start, step, tokens = time.monotonic(), runtime.step, runtime.tokens
    run.event("ckpt_begin", step=step, tokens=tokens, waited=waited)
    materialise_state(runtime.optimizer)
    root, arguments = run.dir / "checkpoints", checkpoint_of(runtime, row)

    def committed(path: Path, copied: float | None = None) -> None:
        if runtime.mesh.rank:
            return
        manifest, now = dcp.read_manifest(path), time.monotonic()
        run.event(
            "ckpt_commit",
            step=step,
            tokens=tokens,
            path=str(path.relative_to(run.dir)),
            bytes=sum(entry["bytes"] for entry in manifest["files"]),
            manifest_sha256=manifest["sha256"],
            seconds=now - start,
            blocked=waited + (copied or now) - start,
        )

    def failed(error: Exception) -> None:
        if runtime.mesh.rank == 0:
            run.event("anomaly", step=step, what="checkpoint failed", error=str(error))
            tell(f"the checkpoint of step {step} failed, the run ends at its next save: {error}")

    if beside is not None:
        beside.start(root, **arguments, committed=committed, failed=failed)
    else:
        committed(dcp.save(root, **arguments, mesh=runtime.mesh))
    return root / folder_name(step)


def checkpoint_of(runtime: Runtime, row: Mapping[str, float]) -> dict[str, Any]:
    """Return the arguments of dcp.save for the current step, all but root and mesh."""
    config = runtime.config
    scores = {name: row[name] for name in row if name.startswith("val/")}
    return {
        "step": runtime.step,
        "tensors": training_tensors(runtime),
        "rank_tensors": rng_tensors(),
        "meta": {
            "samples_consumed": runtime.batches.samples_consumed,
            "tokens": runtime.tokens,
            "data_hash": runtime.corpus.hash,
            "seed": config.seed,
            "config_hash": config_hash(config),
            "seq_len": config.data.seq_len,
            "model": asdict(config.model),
            "mesh": runtime.mesh.sizes,
            "loss_scale": [runtime.loss_scale.value, runtime.loss_scale.good_steps],
            "metrics": {name: value for name, value in scores.items() if math.isfinite(value)},
        },
        "files": tokenizer_files(runtime.corpus.tokenizer),
        "keep": config.run.keep,
        "keep_every": config.run.keep_every,
        "keep_best": config.run.keep_best,
    }


def restore(runtime: Runtime, checkpoint: Path) -> dict[str, Any]:
    """Load weights, moments, randomness and position in place; returns the manifest."""
    if weights_only(dcp.read_manifest(checkpoint)):
        raise dcp.CheckpointError(
            f"{checkpoint} holds weights only, from which no run can go on; start one with "
            f"run.init_from={checkpoint}"
        )
    materialise_state(runtime.optimizer)
    tensors = training_tensors(runtime)
    manifest = dcp.load(checkpoint, tensors, mesh=runtime.mesh)
    for state in runtime.optimizer.state.values():
        state["step"].copy_(tensors["optim.step"])
    fill_tied(runtime)
    rank_tensors = dcp.load_rank_tensors(checkpoint, runtime.mesh.rank)
    if rank_tensors is not None:
        set_rng(rank_tensors)
    runtime.step = manifest["step"]
    runtime.tokens = manifest["tokens"]
    runtime.batches.samples_consumed = manifest["samples_consumed"]
    if manifest["loss_scale"] != INACTIVE:  # written under fp16
        runtime.loss_scale.value, runtime.loss_scale.good_steps = manifest["loss_scale"]
    return manifest


def begin(runtime: Runtime, run: Run) -> None:
    """Bring a fresh runtime to where `run` starts: its checkpoint, run.init_from, or nothing."""
    init_from = runtime.config.run.init_from
    if run.checkpoint is not None:
        try:
            restore(runtime, run.checkpoint)
        except dcp.CheckpointError as error:
            raise dcp.CheckpointError([*error.problems, *offer_older(run.checkpoint)]) from None
    elif init_from is not None:
        path, weights, told = Path(init_from), weight_tensors(runtime), []
        try:
            if is_hugging_face(path):
                read = load_files(path, weights, runtime.config.model, runtime.mesh)
                told.append(f"weights of {path}: {read}")
            else:
                dcp.load(path, weights, mesh=runtime.mesh, ignore=("optim.",), cast=True)
        except dcp.CheckpointError as error:
            offer = offer_older(path, "run.init_from")
            raise dcp.CheckpointError([*error.problems, *offer]) from None
        fill_tied(runtime)
        if (ours := runtime.corpus.tokenizer) is not None:
            told += _other_tokenizer(path / TOKENIZER, ours)
        for text in told if runtime.mesh.rank == 0 else ():
            run.event("note", weights=text)
            tell(text)


def _other_tokenizer(beside: Path, ours: Tokenizer) -> list[str]:
    """Return a sentence where the tokenizer of the weights is not that of the data."""
    same = {ours.text} | ({library_json()} if isinstance(ours, ByteTokenizer) else set())
    if not beside.is_file() or beside.read_text(encoding="utf-8", errors="replace") in same:
        return []
    return [f"the data has another tokenizer than these weights; set data.tokenizer={beside}"]


def load_weights(model: nn.Module, checkpoint: Path) -> dict[str, Any]:
    """Load the weights of a whole model in this process, in place; returns the manifest.

    Every parameter must be there, beside it the optimizer's tensors alone; values are cast.
    """
    return dcp.load(checkpoint, dict(named_state(model)), ignore=("optim.",), cast=True)


def load_for_inference(path: Path) -> tuple[nn.Module, Tokenizer, int]:
    """Return (model, tokenizer, seq_len) of a checkpoint folder or a run folder, on the CPU.

    Raises CheckpointError when there is no complete checkpoint.
    """
    checkpoint = path if (path / MANIFEST).exists() else dcp.latest(path / "checkpoints")
    if checkpoint is None:
        raise dcp.CheckpointError(
            f"{path} holds no complete checkpoint; give a run folder or a checkpoints/step-* folder"
        )
    manifest = dcp.read_manifest(checkpoint)
    try:
        schema = model_schema(manifest["model"]["architecture"])
        weights = [e for n, e in manifest["tensors"].items() if not n.startswith("optim.")]
        double = any(entry["dtype"] == "float64" for entry in weights)
        config = Config(model=schema(**manifest["model"]), precision="fp64" if double else "fp32")
        seq_len, wrong = int(manifest["seq_len"]), [*unusable(config).values()]
    except (KeyError, TypeError, ValueError) as error:
        wrong = [f"{type(error).__name__}: {error}"]
    if wrong:
        where = f"{checkpoint / MANIFEST} describes no model that this project knows"
        raise dcp.CheckpointError([f"{where}: {problem}" for problem in wrong])
    if not (checkpoint / TOKENIZER).is_file():
        raise dcp.CheckpointError(f"{checkpoint} has no {TOKENIZER}: it holds no language model")
    model = build_model(config, "cpu")
    load_weights(model, checkpoint)
    tokenizer = load_tokenizer(checkpoint / TOKENIZER)
    return model, tokenizer, seq_len

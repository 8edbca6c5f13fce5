"""Which run folder and checkpoint a run continues from; decided before anything is written.

`run.resume` is never, auto, a run folder or a checkpoint folder. A resumed run may change its
global batch size and its mesh. Model, sequence length, tokenizer and data never change (refused).
`auto` decides alone, so it asks for more: precision and optimizer must be the same too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from curry_train.checkpoint import (
    MANIFEST,
    CheckpointError,
    is_step_folder,
    latest,
    offer_older,
    read_manifest,
    weights_only,
)
from curry_train.config import Config, ConfigError, model_schema, to_dict
from curry_train.tracking.journal import read_journal
from curry_train.tracking.lease import live_writer

FIXED_FOLDER = "CURRY_RUN_DIR"
"""Environment variable by which a launcher chooses the run folder."""
JOURNAL = "journal.jsonl"
CHECKPOINTS = "checkpoints"
STAMP = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True)
class Resume:
    """The decision. No folder: make a new one. A checkpoint: load it. `message` is for people."""

    folder: Path | None = None
    checkpoint: Path | None = None
    parent: str | None = None
    message: str = ""


def resume_hash(config: Config, data_hash: str) -> str:
    """Hash what `run.resume=auto` asks to be the same. data_hash covers text and tokenizer."""
    same = {**_decisive(to_dict(config)), "data_hash": data_hash}
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()


def _decisive(tree: Mapping[str, Any]) -> dict[str, Any]:
    data = tree.get("data")
    data = data if isinstance(data, Mapping) else {}  # somebody edited config.yaml
    same = {key: tree.get(key) for key in ("seed", "precision", "model", "optim")}
    return {**same, "data": {key: data.get(key) for key in ("seq_len", "document_mask")}}


def run_status(folder: Path) -> str:
    """Return done, preempted, aborted, crashed, running, killed, or unknown without a journal.

    killed: the last attempt wrote no end and its writer is dead.
    """
    events = [e for e in read_journal(folder / JOURNAL) if e["ev"] in ("start", "end")]
    if not events:
        return "unknown"
    if events[-1]["ev"] == "end":
        return str(events[-1].get("status"))
    return "running" if live_writer(folder) else "killed"


def find_resume(config: Config, data_hash: str, *, env: Mapping[str, str] | None = None) -> Resume:
    """Decide where this run continues; reads only. data_hash: the hash of the opened corpus.

    Raises: ConfigError when run.resume asks for what is not there or does not fit.
    """
    env = os.environ if env is None else env
    fixed = Path(env[FIXED_FOLDER]) if env.get(FIXED_FOLDER) else None
    if config.run.resume == "auto":
        return _auto(config, data_hash, fixed)
    path, never = Path(config.run.resume), config.run.resume == "never"
    if not never and not (path / MANIFEST).exists() and not is_step_folder(path):
        return _folder(config, data_hash, path, fixed)
    if fixed is not None and (fixed / JOURNAL).exists():
        raise ConfigError(
            [
                f"{FIXED_FOLDER}={fixed} already holds a run; set run.resume=auto to continue "
                "it, or choose a new folder"
            ]
        )
    if never:
        return Resume(fixed)
    _refuse_misfits(config, data_hash, path)
    parent = "/".join(path.resolve().parts[-3:])
    return Resume(fixed, path, parent, f"new run from {parent}")


def _auto(config: Config, data_hash: str, fixed: Path | None) -> Resume:
    """Continue the newest folder that fits; a folder that a launcher fixed, or none at all."""
    reasons = []
    for folder in [fixed] if fixed else _folders(config):
        checkpoint, reason = latest(folder / CHECKPOINTS), _misfit(config, data_hash, folder)
        if reason is None and (checkpoint or fixed):
            return _continue(folder, checkpoint)
        reasons.append(f"{folder} {reason or 'has no complete checkpoint'}")
    if fixed is not None and _starts(fixed):
        raise ConfigError(
            [f"{FIXED_FOLDER}={reasons[0]}; choose a new folder, or set run.resume={fixed}"]
        )
    why = reasons[0] if reasons else f"no folder of {config.run.name} in {config.run.dir}"
    return Resume(fixed, message=f"run.resume=auto: starting fresh ({why})")


def _folder(config: Config, data_hash: str, path: Path, fixed: Path | None) -> Resume:
    """Continue a run folder that run.resume names, even one that is done."""
    checkpoint, problem = latest(path / CHECKPOINTS), None
    if not (path / JOURNAL).exists():
        problem = (
            "is neither a run folder nor a checkpoint; allowed: never, auto, a folder with "
            "journal.jsonl, or a folder checkpoints/step-XXXXXXXX"
        )
    elif fixed is not None and fixed.resolve() != path.resolve():
        problem = f"differs from {FIXED_FOLDER}={fixed}; set one of them only"
    elif checkpoint is None:
        problem = "holds no complete checkpoint; start with never"
    if problem or checkpoint is None:
        raise ConfigError([f"run.resume={path} {problem}"])
    _refuse_misfits(config, data_hash, checkpoint)
    return _continue(path, checkpoint)


def _continue(folder: Path, checkpoint: Path | None) -> Resume:
    """Go on in a folder; whether somebody still writes it shows when its lease is taken."""
    parent = next((start.get("parent") for start in _starts(folder)), None)
    where = checkpoint.name if checkpoint else "step 0: no complete checkpoint yet"
    return Resume(folder, checkpoint, parent, f"continuing {folder.name} from {where}")


def _folders(config: Config) -> Iterator[Path]:
    """Yield the folders of this run.name, newest stamp first; a stamp counts whole seconds."""
    pattern = re.compile(re.escape(config.run.name) + r"-(\d{8}T\d{6}Z)-[0-9a-f]{6}")
    root = Path(config.run.dir)
    entries = list(root.iterdir()) if root.is_dir() else []
    matches = [(pattern.fullmatch(entry.name), entry) for entry in entries]
    found = [(match[1], entry.stat().st_mtime_ns, entry) for match, entry in matches if match]
    for _, _, folder in sorted(found, reverse=True):
        yield folder


def _starts(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_journal(folder / JOURNAL) if event["ev"] == "start"]


def _misfit(config: Config, data_hash: str, folder: Path) -> str | None:
    """Say why `auto` cannot continue a folder, or None."""
    starts = _starts(folder)
    if not starts:
        return "has no start in its journal"
    if starts[-1].get("data_hash") != data_hash:
        return f"was trained on other data (data_hash {str(starts[-1].get('data_hash'))[:12]})"
    if starts[-1].get("resume_hash") != resume_hash(config, data_hash):
        changes = changed_keys(_decisive(read_config(folder)), _decisive(to_dict(config)))
        return f"differs in {', '.join(changes) or 'its settings'}"
    return "is done" if run_status(folder) == "done" else None


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.yaml of a run folder as nested dictionaries; empty when it cannot be read."""
    import yaml

    try:
        tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return {dotted key: [old, new]} for every setting that differs."""
    before, after = dict(_flat(old)), dict(_flat(new))
    keys = sorted(before.keys() | after.keys())
    pairs = {key: [before.get(key), after.get(key)] for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def whole_model(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model of a manifest with the defaults of settings that are younger than it."""
    try:
        known = fields(model_schema(saved["architecture"]))
    except (KeyError, TypeError):  # of a model that this project lacks
        return dict(saved)
    return {field.name: field.default for field in known} | dict(saved)


def _refuse_misfits(config: Config, data_hash: str, checkpoint: Path) -> None:
    """Raise ConfigError with every way in which the checkpoint cannot be continued exactly."""
    try:
        saved = read_manifest(checkpoint)
    except CheckpointError as error:
        told = [*error.problems, *offer_older(checkpoint)]
        raise ConfigError([f"run.resume={checkpoint}: {p}" for p in told]) from None
    if weights_only(saved):
        raise ConfigError(
            [
                f"run.resume={checkpoint} holds weights only, from which no run can go on; start "
                f"one with run.init_from={checkpoint}"
            ]
        )
    here = {"seed": config.seed, "data.seq_len": config.data.seq_len, "data_hash": data_hash}
    there = {key: saved.get(key.removeprefix("data."), value) for key, value in here.items()}
    kinds = {entry["dtype"] for entry in saved["tensors"].values()}
    if ("float64" in kinds) != (config.precision == "fp64"):
        here["precision"] = config.precision
        there["precision"] = "fp64" if "float64" in kinds else "fp32, bf16 or fp16"
    model, saved_model = to_dict(config)["model"], whole_model(saved["model"])
    here |= {f"model.{key}": model.get(key) for key in saved_model}
    there |= {f"model.{key}": value for key, value in saved_model.items()}
    problems = [
        f"run.resume={checkpoint}: the checkpoint has {key}={there[key]}, this run has {value}; "
        "a resumed run never changes it, start a new one with run.init_from"
        for key, value in here.items()
        if there[key] != value
    ]
    if problems:
        raise ConfigError(problems)

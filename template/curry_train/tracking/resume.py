"""Which run folder and checkpoint a run continues from; decided before anything is written.

`run.resume` is never, auto, a run folder or a checkpoint folder. A resumed run may change its
global batch size and its mesh. Model, sequence length, tokenizer and data never change (refused).
`auto` decides alone, so it asks for more: seed, precision and optimizer must be the same too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curry_train.checkpoint import MANIFEST, CheckpointError, latest, read_manifest
from curry_train.config import Config, ConfigError, to_dict
from curry_train.tracking.journal import last_attempt, read_journal
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
    attempt: int = 1
    parent: str | None = None
    message: str = ""


def resume_hash(config: Config, data_hash: str) -> str:
    """Hash what `run.resume=auto` asks to be the same. data_hash covers text and tokenizer."""
    tree = to_dict(config)
    same = {key: tree[key] for key in ("seed", "precision", "model", "optim")}
    same |= {key: tree["data"][key] for key in ("seq_len", "document_mask")}
    same["data_hash"] = data_hash
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()


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

    Raises: ConfigError when run.resume asks for what is not there, does not fit, or is alive.
    """
    env = os.environ if env is None else env
    fixed = Path(env[FIXED_FOLDER]) if env.get(FIXED_FOLDER) else None
    wanted = config.run.resume
    if wanted == "never":
        if fixed is not None and (fixed / JOURNAL).exists():
            raise ConfigError(
                [
                    f"{FIXED_FOLDER}={fixed} already holds a run; set run.resume=auto to continue "
                    "it, or choose a new folder"
                ]
            )
        return Resume(folder=fixed)
    if wanted == "auto":
        return _fixed(config, data_hash, fixed) if fixed else _newest(config, data_hash)
    return _named(config, data_hash, Path(wanted), fixed)


def _newest(config: Config, data_hash: str) -> Resume:
    wanted, reasons = resume_hash(config, data_hash), []
    for folder in _folders(config):
        start = _last_start(folder)
        status = run_status(folder)
        checkpoint = latest(folder / CHECKPOINTS)
        if start is None:
            reasons.append(f"{folder.name} has no start in its journal")
        elif start.get("resume_hash") != wanted:
            reasons.append(f"{folder.name} {_what_differs(config, data_hash, folder, start)}")
        elif status == "running":
            raise ConfigError(
                [
                    f"run.resume=auto found {folder}, which is being written by "
                    f"{live_writer(folder)}; wait for it, stop it, or set run.resume=never"
                ]
            )
        elif status == "done":
            reasons.append(f"{folder.name} is done")
        elif checkpoint is None:
            reasons.append(f"{folder.name} has no complete checkpoint")
        else:
            return _continue(folder, checkpoint)
    why = reasons[0] if reasons else f"no folder of {config.run.name} in {config.run.dir}"
    return Resume(message=f"run.resume=auto: starting fresh ({why})")


def _fixed(config: Config, data_hash: str, folder: Path) -> Resume:
    """Continue in the folder a launcher chose, even before its first checkpoint."""
    start = _last_start(folder)
    if start is None:
        return Resume(folder=folder, message=f"run.resume=auto: starting fresh in {folder}")
    problem = None
    if start.get("resume_hash") != resume_hash(config, data_hash):
        problem = _what_differs(config, data_hash, folder, start)
    elif run_status(folder) == "done":
        problem = "is done"
    if problem is not None:
        raise ConfigError(
            [f"{FIXED_FOLDER}={folder} {problem}; choose a new folder, or set run.resume={folder}"]
        )
    return _continue(folder, latest(folder / CHECKPOINTS))


def _named(config: Config, data_hash: str, path: Path, fixed: Path | None) -> Resume:
    if (path / MANIFEST).exists():
        _refuse_misfits(config, data_hash, path)
        parts = path.resolve().parts
        in_run = len(parts) > 2 and parts[-2] == CHECKPOINTS
        parent = "/".join(parts[-3:]) if in_run else str(path)
        if fixed is not None and (fixed / JOURNAL).exists():
            raise ConfigError(
                [f"{FIXED_FOLDER}={fixed} already holds a run; choose a new folder for run.resume"]
            )
        return Resume(fixed, path, parent=parent, message=f"new run from {parent}")
    if not (path / JOURNAL).exists():
        raise ConfigError(
            [
                f"run.resume={path} is neither a run folder nor a checkpoint; allowed: never, "
                "auto, a folder with journal.jsonl, or a folder checkpoints/step-XXXXXXXX"
            ]
        )
    if fixed is not None and fixed.resolve() != path.resolve():
        raise ConfigError(
            [f"run.resume={path} differs from {FIXED_FOLDER}={fixed}; set one of them only"]
        )
    checkpoint = latest(path / CHECKPOINTS)
    if checkpoint is None:
        raise ConfigError([f"run.resume={path} holds no complete checkpoint; start with never"])
    writer = live_writer(path)
    if writer is not None:
        raise ConfigError([f"run.resume={path} is being written by {writer}; stop it first"])
    _refuse_misfits(config, data_hash, checkpoint)
    return _continue(path, checkpoint)


def _continue(folder: Path, checkpoint: Path | None) -> Resume:
    events = read_journal(folder / JOURNAL)
    attempt = last_attempt(events) + 1
    parent = next((e.get("parent") for e in events if e["ev"] == "start"), None)
    where = checkpoint.name if checkpoint else "step 0: no complete checkpoint yet"
    message = f"continuing {folder.name} from {where} (attempt {attempt})"
    return Resume(folder, checkpoint, attempt, parent, message)


def _folders(config: Config) -> Iterator[Path]:
    """Yield the folders of this run.name, newest stamp first; a stamp counts whole seconds."""
    pattern = re.compile(re.escape(config.run.name) + r"-(\d{8}T\d{6}Z)-[0-9a-f]{6}")
    root = Path(config.run.dir)
    try:
        found = [
            (match[1], entry.stat().st_mtime_ns, entry)
            for entry in root.iterdir()
            if (match := pattern.fullmatch(entry.name))
        ]
    except OSError:
        return
    for _, _, folder in sorted(found, reverse=True):
        yield folder


def _last_start(folder: Path) -> dict[str, Any] | None:
    starts = [event for event in read_journal(folder / JOURNAL) if event["ev"] == "start"]
    return starts[-1] if starts else None


def _what_differs(config: Config, data_hash: str, folder: Path, start: dict[str, Any]) -> str:
    if start.get("data_hash") != data_hash:
        return f"was trained on other data (data_hash {str(start.get('data_hash'))[:12]})"
    keys = sorted(changed_keys(read_config(folder), to_dict(config)))
    decides = re.compile(r"seed$|precision$|model\.|optim\.|data\.(seq_len|document_mask)$")
    return f"differs in {', '.join(key for key in keys if decides.match(key)) or 'its settings'}"


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
    keys = before.keys() | after.keys()
    pairs = {key: [before.get(key), after.get(key)] for key in sorted(keys)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _refuse_misfits(config: Config, data_hash: str, checkpoint: Path) -> None:
    """Raise ConfigError with every way in which the checkpoint cannot be continued exactly."""
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        raise ConfigError([f"run.resume={checkpoint}: {p}" for p in error.problems]) from None
    tree = to_dict(config)
    here = {"seed": config.seed, "seq_len": config.data.seq_len, "data_hash": data_hash}
    set_by = {"seed": "seed", "seq_len": "data.seq_len", "data_hash": "data.*"}
    problems = [
        f"{set_by[key]}: the checkpoint has {key} {str(manifest[key])[:12]}, this run has "
        f"{str(value)[:12]}; a resumed run never changes it"
        for key, value in here.items()
        if key in manifest and manifest[key] != value
    ]
    problems += [
        f"model.{key}={tree['model'].get(key)}, but the checkpoint has {value}; set it to that, or "
        "start a new run with run.init_from"
        for key, value in manifest["model"].items()
        if tree["model"].get(key) != value
    ]
    if problems:
        raise ConfigError([f"run.resume={checkpoint}: {problem}" for problem in problems])

"""Where checkpoints lie and what they hold, as data and as lines: list, inspect, diff.

Imports no torch until values are asked for.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from curry_train.checkpoint import (
    MANIFEST,
    CheckpointError,
    file_problem,
    folder_name,
    latest,
    read_manifest,
)
from curry_train.checkpoint.audit import stored_bytes
from curry_train.checkpoint.retention import SCORE, kept, score
from curry_train.checkpoint.tables import Meter, mesh_words, number, saved_at, size_words, table
from curry_train.tracking.resume import changed_keys, read_config, whole_model

DONE, FINDING = 0, 1
FOLDER = re.compile(r"step-(\d{8,})(\.tmp-\w+|\.incomplete-\w+)?")
ALLOWED = "give a run folder, its checkpoints/ folder or one folder step-XXXXXXXX"
LAYOUT_FIELDS = {"format", "mesh", "config_hash", "metrics"}
"""Keys of a manifest that two checkpoints of one state may differ in."""
OPTIMIZER = "optim."


class Answer(NamedTuple):
    """Exit code, what --json prints, what people read."""

    code: int
    data: dict[str, Any]
    lines: list[str]


class Place(NamedTuple):
    """Where checkpoints lie. run: the folder of their run; single: one checkpoint was named."""

    root: Path
    run: Path
    folders: list[Path]
    single: bool


def locate(path: Path) -> Place:
    """Find the checkpoints of a run folder, a checkpoints/ folder or one checkpoint, oldest first.

    Raises: CheckpointError when the path is none of them.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; {ALLOWED}")
    if path.name in ("", ".."):  # the folder that one stands in tells by its name what it is
        path = path.resolve()
    if (path / MANIFEST).is_file() or FOLDER.fullmatch(path.name):
        return Place(path.parent, path.absolute().parents[1], [path], True)
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = [(match, entry) for entry in root.iterdir() if (match := FOLDER.fullmatch(entry.name))]
    if not found and root is path and path.name != "checkpoints":
        raise CheckpointError(f"{path} holds no checkpoints; {ALLOWED}")
    found.sort(key=lambda pair: (int(pair[0][1]), pair[1].name))
    return Place(root, root.absolute().parent, [entry for _, entry in found], False)


def one(path: Path) -> Path:
    """Return the checkpoint that a path names, of a run the newest complete one."""
    place = locate(path)
    found = place.folders[0] if place.single else latest(place.root)
    if found is None:
        raise CheckpointError(f"{path} holds no complete checkpoint; {ALLOWED}")
    return found


def state_of(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Return complete, incomplete, temporary (of a save that was killed) or set aside."""
    match = FOLDER.fullmatch(folder.name)
    if match and match[2]:
        return "temporary" if match[2].startswith(".tmp") else "set aside"
    if not manifest or (match and folder.name != folder_name(manifest["step"])):
        return "incomplete"
    found = (file_problem(folder, entry, verify=False) for entry in manifest["files"])
    return "incomplete" if any(found) else "complete"


def describe(folder: Path) -> dict[str, Any]:
    """Say what `list` shows of one folder; reads its manifest only."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        manifest = {}
    match = FOLDER.fullmatch(folder.name)
    moments = any(name.startswith(OPTIMIZER) for name in manifest.get("tensors", {}))
    when = folder / MANIFEST if manifest else folder
    return {
        "name": folder.name,
        "path": str(folder),
        "step": manifest.get("step", int(match[1]) if match else None),
        "time": when.stat().st_mtime,
        "bytes": stored_bytes(folder),
        "mesh": manifest.get("mesh"),
        SCORE: score(folder) if manifest else None,
        "holds": ("full" if moments else "weights") if manifest else None,
        "state": state_of(folder, manifest),
    }


def rules_of(args: argparse.Namespace, run: Path) -> tuple[dict[str, int], str]:
    """Return the retention rules of the flags, else of the run's config.yaml, and whose they are.

    Empty when nobody says any.
    """
    flags = {"keep": args.keep, "keep_every": args.keep_every, "keep_best": args.keep_best}
    given = {key: value for key, value in flags.items() if value is not None}
    saved = read_config(run).get("run") or {}
    rules = {key: saved[key] for key in flags if type(saved.get(key)) is int} | given
    whose = "flags" if given.keys() == flags.keys() or not saved else "config.yaml"
    whose = "flags and config.yaml" if given and whose == "config.yaml" else whose
    return (rules if "keep" in rules else {}), whose


def list_checkpoints(args: argparse.Namespace) -> Answer:
    """Show one row a folder, oldest first."""
    place = locate(args.path)
    described = {}
    for folder in place.folders:
        with suppress(FileNotFoundError):  # a run that goes on has renamed or pruned it
            row = describe(folder)
            described |= {folder: row} if folder.is_dir() else {}
    rows = [*described.values()]
    complete = [folder for folder, row in described.items() if row["state"] == "complete"]
    rules, whose = ({}, "") if place.single else rules_of(args, place.run)
    stay = kept(complete, **rules) if rules else set()
    best = min((row for row in rows if row[SCORE] is not None), key=_by_score, default=None)
    newest = latest(place.root)
    cells = []
    for folder, row in described.items():
        row |= {"latest": newest is not None and folder.name == newest.name, "best": row is best}
        row["stays"] = folder in stay if rules and row["state"] == "complete" else None
        notes = [word for word in ("latest", "best") if row[word]]
        notes += [] if row["stays"] is None else ["stays" if row["stays"] else "goes"]
        mesh = "-" if row["mesh"] is None else mesh_words(row["mesh"])
        cells.append(
            (
                row["name"], saved_at(row["time"]), size_words(row["bytes"]), mesh,
                number(row[SCORE]), row["holds"] or "-", row["state"], " ".join(notes),
            )
        )  # fmt: skip
    told = "".join(f", {key} {value}" for key, value in rules.items())
    head = f"{place.root}: {len(complete)} complete" + (f"{told} ({whose})" if rules else "")
    heads = ("checkpoint", "saved", "size", "mesh", SCORE, "holds", "state", "notes")
    data = {"root": str(place.root), "rules": rules or None, "checkpoints": rows}
    return Answer(DONE, data, [head, *(table(heads, cells, give=3) if cells else [])])


def _by_score(row: dict[str, Any]) -> tuple[float, int]:
    return row[SCORE], -row["step"]


def inspect(args: argparse.Namespace) -> Answer:
    """Show what one checkpoint holds."""
    checkpoint = one(args.path)
    manifest = read_manifest(checkpoint)
    saved, rows = manifest["tensors"], []
    for name, entry in saved.items():
        if fnmatch.fnmatchcase(name, args.filter):
            row = {"name": name, "dtype": entry["dtype"], "shape": entry["shape"]}
            row |= {"bytes": bytes_of(entry), "chunks": len(entry["chunks"])}
            rows.append(row | {"files": sorted({chunk["file"] for chunk in entry["chunks"]})})
    if args.sort == "size":
        rows.sort(key=lambda row: -row["bytes"])
    if args.stats:
        from curry_train.checkpoint.contents import statistics

        with Meter("inspect", sum(row["bytes"] for row in rows)) as meter:
            found = statistics(checkpoint, saved, [row["name"] for row in rows], meter)
            rows = [row | stats._asdict() for row, stats in zip(rows, found, strict=True)]
    totals = {kind: _total(saved, kind == "moments") for kind in ("weights", "moments")}
    fields = {key: value for key, value in manifest.items() if key != "tensors"}
    data = {"path": str(checkpoint), **fields, "totals": totals, "tensors": rows}
    lines = [*_facts(checkpoint, manifest, totals), *_tensor_lines(rows, args.top, args.stats)]
    return Answer(DONE, data, lines)


def bytes_of(entry: Mapping[str, Any]) -> int:
    """Return the bytes of a tensor of a manifest."""
    bits = re.match(r"[a-z]+(\d+)", entry["dtype"])
    return math.prod(entry["shape"]) * (int(bits[1]) // 8 if bits else 1)


def _total(saved: dict[str, Any], moments: bool) -> dict[str, int]:
    mine = [entry for name, entry in saved.items() if name.startswith(OPTIMIZER) == moments]
    elements = sum(math.prod(entry["shape"]) for entry in mine)
    return {"tensors": len(mine), "elements": elements, "bytes": sum(map(bytes_of, mine))}


def _facts(checkpoint: Path, manifest: dict[str, Any], totals: dict[str, Any]) -> list[str]:
    model = manifest["model"]
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_experts")
    shown = ", ".join(f"{key} {model[key]}" for key in sizes if model.get(key))
    names = [entry["name"] for entry in manifest["files"]]
    ranks = sum(name.startswith("rank-") for name in names)
    tokenizer = [name for name in names if not name.endswith(".safetensors")]
    tokens = f", {manifest['tokens']:,} tokens" if "tokens" in manifest else ""
    value = score(checkpoint)
    loss = "" if value is None else f", {SCORE} {value:.4f}"
    lines = [
        str(checkpoint),
        f"  step     {manifest['step']}{tokens}, {manifest['samples_consumed']:,} samples{loss}",
        f"  model    {model.get('architecture', 'unknown')}: {shown}",
        f"  saved    {saved_at((checkpoint / MANIFEST).stat().st_mtime)} on "
        f"{mesh_words(manifest['mesh'])}, random states of {ranks} ranks",
        f"  data     {manifest['data_hash'][:16]}, tokenizer {', '.join(tokenizer) or 'none'}",
    ]
    for kind, total in totals.items():
        held = f"{total['elements']:,} numbers in {total['tensors']} tensors"
        lines.append(f"  {kind}  {held}, {size_words(total['bytes'])}")
    return lines


def _tensor_lines(rows: list[dict[str, Any]], top: int, stats: bool) -> list[str]:
    heads, cells = ["tensor", "shape"], []
    heads += ["mean", "std", "min", "max", "bad"] if stats else ["dtype", "size", "chunks", "files"]
    for row in rows[: top or None]:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        cell = [row["name"], shape]
        if stats:
            cell += [number(row[key]) for key in ("mean", "std", "smallest", "largest")]
            cell.append(row["nonfinite"])
        else:
            files = row["files"]
            cell += [row["dtype"], size_words(row["bytes"]), row["chunks"]]
            cell.append(Path(files[0]).stem if len(files) == 1 else f"{len(files)} files")
        cells.append(cell)
    hidden = len(rows) - len(cells)
    more = [f"{hidden} more tensors; --top 0 shows all"] if hidden else []
    return [*(table(heads, cells) if cells else ["no tensor has such a name"]), *more]


def diff(args: argparse.Namespace) -> Answer:
    """Compare two checkpoints of any layouts; says the worst tensor first."""
    paths = [one(args.path), one(args.other)]
    manifests = [read_manifest(path) for path in paths]
    fields = changed_keys(*map(_fields, manifests))
    counts = {key for key in fields if key.partition(".")[0] not in LAYOUT_FIELDS}
    other_ranks = manifests[0]["mesh"] != manifests[1]["mesh"]
    for key, pair in fields.items():
        if key.startswith("file rank-") and (other_ranks or None in pair):
            counts.discard(key)
    if args.weights_only:
        counts = {key for key in counts if key.startswith("model.")}
    ours, theirs = ({n: e for n, e in m["tensors"].items() if _chosen(args, n)} for m in manifests)
    both = sorted(ours.keys() & theirs.keys())
    kinds = {n: [f"{e[n]['dtype']} {e[n]['shape']}" for e in (ours, theirs)] for n in both}
    comparable = [name for name in both if ours[name]["shape"] == theirs[name]["shape"]]
    values = _values(paths, ours, theirs, comparable)
    for value in values:
        value["differs"] = value["relative"] > args.tolerance or not args.tolerance
    data = {
        "paths": [*map(str, paths)],
        "fields": {key: {"values": pair, "counts": key in counts} for key, pair in fields.items()},
        "missing": {"second": sorted(ours.keys() - both), "first": sorted(theirs.keys() - both)},
        "kinds": {name: pair for name, pair in kinds.items() if pair[0] != pair[1]},
        "values": values,
        "compared": len(comparable),
    }
    differs = bool(counts or data["kinds"] or any(data["missing"].values()))
    differs = differs or any(value["differs"] for value in values)
    data = {"verdict": "different" if differs else "same", **data}
    return Answer(FINDING if differs else DONE, data, _diff_lines(data, args.top))


def _fields(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what a manifest says beside its tensors, and hashes of files that hold none."""
    fields = {k: v for k, v in manifest.items() if k not in ("files", "tensors", "sha256")}
    fields["model"] = whole_model(manifest["model"])
    others = [e for e in manifest["files"] if not e["name"].startswith("tensors-")]
    return fields | {f"file {entry['name']}": entry["sha256"][:16] for entry in others}


def _chosen(args: argparse.Namespace, name: str) -> bool:
    wanted = not (args.weights_only and name.startswith(OPTIMIZER))
    return wanted and fnmatch.fnmatchcase(name, args.filter)


def _values(
    paths: list[Path], ours: dict[str, Any], theirs: dict[str, Any], names: list[str]
) -> list[dict[str, Any]]:
    from curry_train.checkpoint.contents import differences

    size = sum(bytes_of(of[name]) for of in (ours, theirs) for name in names)
    with Meter("diff", size) as meter:
        found = differences((paths[0], ours), (paths[1], theirs), names, meter)
    return [one._asdict() for one in found]


def _diff_lines(data: dict[str, Any], top: int) -> list[str]:
    lines = [f"A {data['paths'][0]}", f"B {data['paths'][1]}"]
    for key, field in data["fields"].items():
        first, second = (f"{value!s:.30}" for value in field["values"])
        layout = "" if field["counts"] else "  (of the layout)"
        lines.append(f"  {key}: A {first}, B {second}{layout}")
    for where, names in data["missing"].items():
        side = "A" if where == "first" else "B"
        moments = sum(name.startswith(OPTIMIZER) for name in names)
        lines += (f"  {n}: missing in {side}" for n in names if not n.startswith(OPTIMIZER))
        if moments:
            hint = f"{moments} tensors missing in {side}; --weights-only leaves them out"
            lines.append(f"  {OPTIMIZER}*: {hint}")
    lines += (f"  {name}: A {a}, B {b}" for name, (a, b) in data["kinds"].items())
    cells = [
        (
            v["name"], number(v["largest"]), number(v["relative"]), f"{v['elements']} of {v['of']}",
            ",".join(map(str, v["place"])) or "-", "" if v["differs"] else "tolerated",
        )
        for v in data["values"][: top or None]
    ]  # fmt: skip
    heads = ("tensor", "largest |A-B|", "relative", "elements", "worst at", "")
    lines += table(heads, cells) if cells else []
    hidden = len(data["values"]) - len(cells)
    lines += [f"{hidden} more tensors differ; --top 0 shows all"] if hidden else []
    equal = data["compared"] - len(data["values"])
    end = f"{data['verdict']}: {equal} of {data['compared']} tensors are equal bit for bit"
    return [*lines, end]

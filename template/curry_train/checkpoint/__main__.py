"""`python -m curry_train.checkpoint`: list, verify, inspect, diff, convert, prune checkpoints."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from curry_train.checkpoint import DTYPES, MANIFEST, CheckpointError, latest, read_manifest
from curry_train.checkpoint.audit import audit, stored_bytes
from curry_train.checkpoint.huggingface import export, import_weights, is_hugging_face
from curry_train.checkpoint.tables import Meter, parse_size, size_words
from curry_train.checkpoint.views import (
    ALLOWED,
    DONE,
    FINDING,
    Answer,
    bytes_of,
    describe,
    diff,
    inspect,
    list_checkpoints,
    locate,
    one,
    rules_of,
)
from curry_train.config import ConfigError
from curry_train.tracking.progress import tell

BAD_INPUT = 2
EPILOG = """PATH is a run folder, its checkpoints/ folder or one checkpoint.
Exit codes: 0 done, 1 a finding (damaged, different), 2 bad usage or input."""
FLOATS = [name for name in DTYPES if name.startswith(("float", "bfloat")) and "8_" not in name]


def verify(args: argparse.Namespace) -> Answer:
    """Read every byte and say every problem."""
    place = locate(args.path)
    folders = [folder for folder in place.folders if place.single or "." not in folder.name]
    if not folders:
        raise CheckpointError(f"{place.root} holds no checkpoint to verify; {ALLOWED}")
    began, rows, lines = time.monotonic(), [], []
    total = sum(map(stored_bytes, folders)) * (2 if args.values else 1)
    with Meter("verify", total) as meter:
        audits = [(folder, _audited(folder, meter, args.values)) for folder in folders]
    for folder, problems in audits:
        if problems is None:
            lines.append(f"{folder}: its run has removed it meanwhile")
            continue
        size = stored_bytes(folder)
        rows.append({"path": str(folder), "bytes": size, "problems": problems})
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        verdict = f"DAMAGED, {count}" if problems else "whole"
        lines.append(f"{folder}: {verdict}, {size_words(size)}")
        lines += (f"  {problem}" for problem in problems)
    if not rows:
        raise CheckpointError(f"{place.root}: all checkpoints were removed meanwhile; ask again")
    seconds, wrong = time.monotonic() - began, sum(bool(row["problems"]) for row in rows)
    lines.append(f"verify: {wrong} of {len(rows)} damaged, {seconds:.1f} s")
    data = {"verdict": "fail" if wrong else "pass", "checkpoints": rows, "seconds": seconds}
    return Answer(FINDING if wrong else DONE, data, lines)


def _audited(folder: Path, meter: Meter, values: bool) -> list[str] | None:
    """Return every problem of a checkpoint; None when a run that goes on has pruned it."""
    try:
        problems = audit(folder, meter)
        if values and not problems:
            problems = _nonfinite(folder, meter)
    except (CheckpointError, OSError):
        if folder.is_dir():
            raise
        return None
    return problems if folder.is_dir() else None


def _nonfinite(checkpoint: Path, meter: Meter) -> list[str]:
    """Name every tensor that holds a NaN or an infinity."""
    from curry_train.checkpoint.contents import statistics

    saved = read_manifest(checkpoint)["tensors"]
    floats = [name for name, entry in saved.items() if "float" in entry["dtype"]]
    return [
        f"{checkpoint / MANIFEST}: tensor {found.name}: {found.nonfinite} of its "
        f"{math.prod(saved[found.name]['shape'])} values are not finite"
        for found in statistics(checkpoint, saved, floats, meter)
        if found.nonfinite
    ]


def convert(args: argparse.Namespace) -> Answer:
    """Write a checkpoint, or a folder of Hugging Face, to a new folder."""
    out, limit = args.out, args.max_shard_size
    if out.exists():
        raise CheckpointError(f"{out} exists, and nothing is overwritten; name a new folder")
    if is_hugging_face(args.path):
        return _import(args)
    source = one(args.path)
    total = sum(map(bytes_of, read_manifest(source)["tensors"].values()))
    with Meter("convert", stored_bytes(source) + total) as meter:
        if problems := audit(source, meter):
            lines = [*problems, f"{source} is damaged; nothing was written"]
            return Answer(FINDING, {"verdict": "fail", "path": None, "problems": problems}, lines)
        if args.to == "huggingface":
            shards = {} if limit is None else {"max_shard_bytes": limit}
            export(source, out, dtype=args.dtype or "auto", told=meter, **shards)
        else:
            from curry_train.checkpoint.convert import convert as rewrite

            only = args.weights_only
            rewrite(source, out, weights_only=only, dtype=args.dtype, limit=limit, told=meter)
    return _written(out)


def _import(args: argparse.Namespace) -> Answer:
    if args.to == "huggingface" or args.max_shard_size is not None:
        raise CheckpointError(
            f"{args.path} is of Hugging Face; it becomes a checkpoint of one file: leave out --to "
            "and --max-shard-size"
        )
    precisions = {None: "fp32", "float32": "fp32", "float64": "fp64"}
    if args.dtype not in precisions:
        raise CheckpointError(f"--dtype {args.dtype}: an import takes float32 or float64")
    from curry_train.checkpoint.convert import fresh_folder

    with fresh_folder(args.out) as folder:
        step = import_weights(args.path, folder / "import", precisions[args.dtype])
        for file in step.iterdir():
            file.rename(folder / file.name)
        shutil.rmtree(folder / "import")
    return _written(args.out)


def _written(out: Path) -> Answer:
    size = stored_bytes(out)
    data = {"verdict": "pass", "path": str(out), "bytes": size, "problems": []}
    return Answer(DONE, data, [f"wrote {out}, {size_words(size)}"])


def prune(args: argparse.Namespace) -> Answer:
    """Remove what the rules of retention let go; a dry run unless --yes."""
    from curry_train.checkpoint import retention
    from curry_train.tracking.lease import LEASE, Lease, live_writer

    place = locate(args.path)
    if place.single:
        raise CheckpointError(f"{args.path} is one checkpoint; prune takes a run or checkpoints/")
    rules, whose = rules_of(args, place.run)
    if not rules and not args.leftovers:
        raise CheckpointError(f"{place.run} says no run.keep; set --keep N (0 keeps all)")
    writer = live_writer(place.run)
    if writer is not None:
        raise CheckpointError(
            f"{place.run} is being written by {writer}; wait for its end, it prunes by run.keep"
        )
    # A run that started in between would find its newest checkpoint gone.
    held = args.yes and (place.run / LEASE).is_file()
    lease = Lease(place.run) if held else None
    try:
        if args.yes and (problems := _newest_problems(place.root)):
            lines = [*problems, "the newest checkpoint is damaged; nothing was removed"]
            return Answer(FINDING, {"done": False, "removed": [], "problems": problems}, lines)
        rows = {folder: describe(folder) for folder in place.folders}
        keep, every, best = (rules.get(key, 0) for key in ("keep", "keep_every", "keep_best"))
        gone = retention.prune(
            place.root, keep=keep, keep_every=every, keep_best=best, dry_run=not args.yes
        )
        left = [f for f, row in rows.items() if row["state"] != "complete"]
        left += [path for path in place.root.glob("latest.tmp-*") if path.is_file()]
        for path in left if args.yes and args.leftovers else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        if lease is not None:
            lease.close()
    return _pruned(args, rules, rows, gone, left)


def _newest_problems(root: Path) -> list[str]:
    """Read all of the newest checkpoint: the older ones may be what is left of the run."""
    newest = latest(root)
    if newest is None:
        return []
    with Meter("verify", stored_bytes(newest)) as meter:
        return audit(newest, meter)


def _pruned(
    args: argparse.Namespace,
    rules: dict[str, int],
    rows: dict[Path, dict[str, Any]],
    gone: list[Path],
    left: list[Path],
) -> Answer:
    """Say what was removed, or would be, and what stays."""
    removed = [*gone, *(left if args.leftovers else [])]
    sizes = {path: rows[path]["bytes"] if path in rows else 0 for path in [*gone, *left]}
    stays = [folder for folder in rows if folder not in removed]
    freed = sum(sizes[path] for path in removed)
    data = {
        "done": args.yes,
        "rules": rules or None,
        "removed": [*map(str, removed)],
        "stays": [*map(str, stays)],
        "leftovers": [*map(str, left)],
        "bytes": freed,
    }
    word, lines = ("removed" if args.yes else "would remove"), []
    for path in removed:
        kind = rows[path]["state"] if path in rows else "temporary"
        lines.append(f"{word}  {path.name}  {size_words(sizes[path])}, {kind}")
    lines += (f"stays  {folder.name}  {rows[folder]['state']}" for folder in stays)
    if left and not args.leftovers:
        size = size_words(sum(sizes[path] for path in left))
        lines.append(f"{len(left)} left by kills or damaged, {size}; --leftovers removes them too")
    told = " ".join(f"{key} {value}" for key, value in rules.items())
    end = "freed" if args.yes else "would be freed; --yes removes"
    lines.append(f"{told or 'no rules'}: {size_words(freed)} {end}")
    return Answer(DONE, data, lines)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no count; allowed: 0, 1, 2 ...")
    return int(text)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no tolerance; allowed: 0 or more, as 1e-6")
    return value


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="python -m curry_train.checkpoint",
        description="Look at checkpoints, prove them whole, compare, rewrite and prune them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(function=function)
        sub.add_argument("path", metavar="PATH", type=Path)
        sub.add_argument("--json", action="store_true", help="JSON alone on stdout")
        return sub

    def rules(sub: argparse.ArgumentParser) -> None:
        note = "default: run.{} of the run's config.yaml"
        for flag in ("keep", "keep-every", "keep-best"):
            key = flag.replace("-", "_")
            sub.add_argument(f"--{flag}", type=_count, metavar="N", help=note.format(key))

    rules(verb("list", list_checkpoints, "step, age, size, mesh, val/loss and state of each"))
    sub = verb("verify", verify, "read every byte and tell every problem with file and key")
    sub.add_argument("--values", action="store_true", help="find NaN and infinities as well")
    sub = verb("inspect", inspect, "what one checkpoint holds, down to its tensors")
    sub.add_argument("--filter", default="*", metavar="GLOB", help="tensors by name")
    sub.add_argument("--sort", choices=("size", "name"), default="size")
    sub.add_argument("--stats", action="store_true", help="mean, std, min, max, non-finite")
    _add_top(sub)
    sub = verb("diff", diff, "how two checkpoints of any layouts differ, the worst tensor first")
    sub.add_argument("other", metavar="PATH", type=Path)
    sub.add_argument("--filter", default="*", metavar="GLOB", help="tensors by name")
    sub.add_argument("--weights-only", action="store_true", help="no moments, no progress")
    sub.add_argument(
        "--tolerance", type=_tolerance, default=0.0, metavar="X",
        help="of |A-B| over the tensor's largest |A|; default 0, bit for bit",
    )  # fmt: skip
    _add_top(sub)
    sub = verb("convert", convert, "write a checkpoint or a Hugging Face folder anew, to OUT")
    sub.add_argument("out", metavar="OUT", type=Path, help="a folder that is not there yet")
    sub.add_argument("--to", choices=("checkpoint", "huggingface"), default="checkpoint")
    sub.add_argument("--weights-only", action="store_true", help="no moments, no random states")
    sub.add_argument("--dtype", choices=FLOATS, help="of all floating-point tensors")
    sub.add_argument(
        "--max-shard-size", type=parse_size, metavar="SIZE", help="such as 5GB; default: one file"
    )
    sub = verb("prune", prune, "remove what the rules of retention let go")
    rules(sub)
    sub.add_argument("--leftovers", action="store_true", help="also what kills left behind")
    sub.add_argument("--yes", action="store_true", help="remove; without it, only say what")
    usages = (verb.format_usage().partition(": ")[2] for verb in verbs.choices.values())
    parser.epilog = f"{EPILOG}\n\n{''.join(usages)}"
    return parser


def _add_top(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--top", type=_count, default=40, metavar="N", help="rows; 0 shows all")


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        answer = args.function(args)
    except CheckpointError as error:
        # A folder with a manifest is a checkpoint: what is wrong with it is a finding.
        damaged = args.verb in ("inspect", "diff", "convert") and _is_damaged(args)
        return _refuse(args, error, FINDING if damaged else BAD_INPUT)
    except ConfigError as error:
        return _refuse(args, error, BAD_INPUT)
    except OSError as error:  # not readable, or its run has pruned it meanwhile
        return _refuse(args, CheckpointError(str(error)), BAD_INPUT)
    if args.json:
        tell(json.dumps(_plain({"verb": args.verb, **answer.data}), allow_nan=False))
    else:
        tell("\n".join(answer.lines))
    return answer.code


def _refuse(args: argparse.Namespace, error: CheckpointError | ConfigError, code: int) -> int:
    """Say why there is no answer, and with --json say it as JSON too."""
    if args.json:
        verdict = "fail" if code == FINDING else "refused"
        tell(json.dumps({"verb": args.verb, "verdict": verdict, "problems": error.problems}))
    tell(str(error), sys.stderr)
    return code


def _is_damaged(args: argparse.Namespace) -> bool:
    paths = [path for path in (args.path, getattr(args, "other", None)) if path is not None]
    return any((path / MANIFEST).is_file() and audit(path) for path in paths)


def _plain(value: Any) -> Any:
    """Turn floats that JSON has no word for into strings, as metrics.jsonl does."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())

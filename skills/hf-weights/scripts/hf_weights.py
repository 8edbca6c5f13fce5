#!/usr/bin/env python3
"""Take published weights into a project, write trained ones for transformers, or compare both.

  hf_weights.py import WEIGHTS [TO]    a folder, or OWNER/NAME of the hub, becomes a checkpoint
  hf_weights.py export CHECKPOINT TO   a checkpoint or run becomes a folder of Hugging Face
  hf_weights.py verify WEIGHTS CHECKPOINT   are they the same, bit by bit

The work is that of `python -m curry_train.checkpoint.huggingface` in the project; here it is
followed by proofs: bits, the loss of a known text, and the logits of transformers where installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: hf-weights needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from logits import compare_logits  # noqa: E402

from kit import cli, layouts  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.user_code import user_code  # noqa: E402

SKILL = "hf-weights"
THRESHOLDS = {
    "logits-differ": 1e-4,  # of the largest logit, float32
    "logits-differ-fp64": 1e-9,  # of the largest logit, float64
    "sanity-loss": 0.95,  # loss over the unigram entropy of the text; trained weights stay below
}
VERBS = {"import": 1, "export": 2, "verify": 2}
"""Verb -> places that it needs; import may be told a second."""
KINDS = {
    "weights-missing": ("are missing in the files", "are absent", "is absent", "are not in its"),
    "weights-unused": ("unknown to this model", "are in files and not in"),
    "weights-misshaped": ("have another shape",),
}
"""Check -> what the package's sentences about it contain; all others are weights-unreadable."""
HINTS = {
    "weights-missing": "copy the absent files; absent tensors: config.json is another's",
    "weights-unused": "config.json is of another model, or the model has parts of its own",
    "weights-misshaped": "compare the sizes in config.json with the shapes that are told",
    "weights-unreadable": "read the sentence: it names the file or key",
    "hub-unreachable": "one of the three ways out above",
}


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument("verb", choices=VERBS, help="what to do")
    parser.add_argument("places", nargs="+", metavar="PLACE", help="see above")
    parser.add_argument("--revision", help="of a name of the hub (default main)")
    parser.add_argument("--name", help="import: configs/model/NAME.yaml (default: of the weights)")
    parser.add_argument("--precision", choices=("fp32", "fp64"), default="fp32", help="of import")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16", "float64"),
        default="auto",
        help="of the files of export (default: that of the import, else of the checkpoint)",
    )
    parser.add_argument("--text", metavar="FILE", help="text of the sanity number (default: ours)")
    parser.add_argument("--no-logits", action="store_true", help="do not compare with transformers")


def check_flags(args: Any) -> None:
    """Refuse what has no sense before torch is needed."""
    few = VERBS[args.verb]
    if not few <= len(args.places) <= 2:
        raise UsageError(
            f"{args.verb} with {len(args.places)} places", f"it takes {few}", "see --help"
        )
    if args.target is not None or args.set:
        raise UsageError("--target or --set", "weights belong to a project", "set --project")
    if args.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", args.name):
        raise UsageError(f"--name {args.name}", "it takes letters, digits, _ and -")
    if args.text is not None and not Path(args.text).exists():
        raise UsageError(f"--text {args.text} does not exist", "it takes a text file or a folder")
    args.places = [
        os.path.abspath(os.path.expanduser(place)) if number or Path(place).exists() else place
        for number, place in enumerate(args.places)
    ]


def work(call: cli.Invocation) -> Report:
    """Run one verb."""
    layouts.load(call, [])  # the project's own package, and no other, answers
    from curry_train.checkpoint import CheckpointError

    report = Report(SKILL)
    report.numbers["verb"] = call.args.verb
    try:
        {"import": take, "export": give, "verify": compare}[call.args.verb](call, report)
    except CheckpointError as error:
        blame(report, error)
    return report


def blame(report: Report, error: Any) -> None:
    """Turn the package's refusal into checks, each sentence under its id."""
    from curry_train.checkpoint.hub import HubUnreachable

    told: dict[str, list[str]] = {}
    for problem in error.problems:
        kinds = [k for k, words in KINDS.items() if any(word in problem for word in words)]
        kind = (
            "hub-unreachable"
            if isinstance(error, HubUnreachable)
            else (kinds or ["weights-unreadable"])[0]
        )
        told.setdefault(kind, []).append(problem)
    print(error, file=sys.stderr)
    for id, problems in told.items():
        first = problems[0].partition(". Three ways out")[0]
        report.check(id, "fail", value=len(problems), message=first.replace("\n", " "))
        report.next.append(HINTS[id])
    report.numbers["problems"] = error.problems
    report.summary = f"{report.numbers['verb']} refused, nothing was written"


def folder_of(call: cli.Invocation, place: str) -> Path:
    """Return the folder of weights that lie there or have this name."""
    from curry_train.checkpoint import CheckpointError
    from curry_train.checkpoint.hub import HubUnreachable, find_weights

    try:
        return find_weights(place, revision=call.args.revision)
    except CheckpointError as error:
        if isinstance(error, HubUnreachable) or any("absent" in p for p in error.problems):
            raise
        raise UsageError(str(error)) from None  # no such folder or name, or not for this user


def checkpoint_of(place: Any) -> Path:
    """Return a checkpoint itself, or the newest of a run."""
    from curry_train.checkpoint import MANIFEST, latest

    place = Path(place)
    found = place if (place / MANIFEST).is_file() else latest(place / "checkpoints")
    if found is None:
        raise UsageError(
            f"{place} holds no complete checkpoint", "it takes a run or a step-* folder"
        )
    return found


def take(call: cli.Invocation, report: Report) -> None:
    """import: a checkpoint, its model YAML, and the proofs that it is the same model."""
    from curry_train.checkpoint import families, folder_name, huggingface

    args = call.args
    folder = folder_of(call, args.places[0])
    model = families.read_model(folder)[0]
    name = args.name or slug(args.places[0])
    out = (
        Path(args.places[1])
        if len(args.places) > 1
        else (call.project / "workspace" / "checkpoints" / name / "torch-dcp")
    )
    yaml = yaml_path(call, name, model)
    call.expect(None, f"then the files of {folder} twice, to write and to compare")
    path = out / folder_name(0)
    there = path.exists()
    if not there:
        huggingface.import_weights(folder, out, args.precision)
    if not yaml.exists():
        yaml.parent.mkdir(parents=True, exist_ok=True)
        yaml.write_text(huggingface.model_yaml(model, name, folder.name), encoding="utf-8")
    same_bits(report, folder, path)
    # An import compares all names; one that was there may be of other files by now.
    verdict = "skipped" if there and report.numbers["differing"] else "pass"
    report.check("weights-missing", verdict, message="every tensor of the model is in the files")
    report.check("weights-unused", verdict, message="every tensor of the files is in the model")
    report.check("weights-misshaped", verdict, message="all shapes are those of config.json")
    sanity(call, report, path)
    if not args.no_logits:
        compare_logits(report, folder, THRESHOLDS, checkpoint=path)
    facts(report, path)
    report.artifacts += [str(path), str(yaml)]
    report.summary = f"{folder.name} {'is' if there else 'is now'} {cli.shown(path)}"
    report.numbers["words"] = words_for(name, path, args.precision)
    print(f"python train.py {' '.join(words_for(name, cli.shown(path), args.precision))}")


def words_for(name: str, path: Path, precision: str) -> list[str]:
    """Return the settings that train from a checkpoint, with the tokenizer that lies in it."""
    words = [f"model={name}", f"run.init_from={path}"]
    own = path / "tokenizer.json"
    words += [f"data.tokenizer={own}"] if own.is_file() else []
    return words + (["precision=fp64"] if precision == "fp64" else [])


def slug(place: Any) -> str:
    """Name a model's YAML after its weights."""
    return re.sub(r"[^a-z0-9]+", "_", Path(place).name.lower()).strip("_") or "weights"


def yaml_path(call: cli.Invocation, name: str, model: Any) -> Path:
    """Return configs/model/NAME.yaml; one that says another model is refused, never touched."""
    path = call.project / "configs" / "model" / f"{name}.yaml"
    if path.exists():
        config, _ = layouts.load(call, [f"model={name}"])
        if config is None or config.model != model:
            raise UsageError(
                f"{path} describes another model", "it is never overwritten", "set --name NAME"
            )
    return path


def same_bits(report: Report, folder: Path, checkpoint: Path, *, rounded: str = "") -> None:
    """Compare every tensor, both ways. rounded: the dtype that was asked for, if any."""
    from curry_train.checkpoint import huggingface

    problems = huggingface.verify(folder, checkpoint)
    report.numbers["differing"] = problems
    if problems and rounded:
        report.check("roundtrip-differs", "skipped", message=f"the files are rounded to {rounded}")
    elif problems:
        first = problems[0].removeprefix(f"{checkpoint}: ")
        report.check("roundtrip-differs", "fail", value=len(problems), message=first)
        report.next.append("both sides stand; write again what was changed or damaged")
    else:
        report.check("roundtrip-differs", "pass", value=0, message="all tensors, bit by bit")


def sanity(call: cli.Invocation, report: Report, checkpoint: Path) -> None:
    """Judge the loss of a known text; untrained weights and folders without tokenizer are not."""
    from curry_train.checkpoint import CheckpointError, known_text
    from curry_train.data import DataError

    text = None if call.args.text is None else Path(call.args.text)
    try:
        found = known_text.check_weights(checkpoint, text=text)
    except (CheckpointError, DataError) as error:
        report.check("sanity-loss", "skipped", message=str(error).partition("\n")[0])
        return
    report.numbers["sanity"] = found._asdict()
    untrained = found.verdict == "unclear" and "untrained" in found.reason
    report.check(
        "sanity-loss",
        "skipped" if untrained else found.verdict,
        value=round(found.loss / found.unigram, 4),
        threshold=THRESHOLDS["sanity-loss"],
        message=f"{found.reason}; {found.bpb:.3f} bits a byte",
    )


def give(call: cli.Invocation, report: Report) -> None:
    """export: a folder of Hugging Face, and the proof that transformers computes the same."""
    from curry_train.checkpoint import huggingface

    args = call.args
    checkpoint, out = checkpoint_of(args.places[0]), Path(args.places[1])
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} exists", "nothing is overwritten", "name a new folder")
    call.expect(None, f"then {checkpoint} twice, to write and to compare")
    huggingface.export(checkpoint, out, args.dtype)
    same_bits(report, out, checkpoint, rounded="" if args.dtype == "auto" else args.dtype)
    if not args.no_logits:
        compare_logits(report, out, THRESHOLDS)
    facts(report, checkpoint)
    report.artifacts.append(str(out))
    report.summary = f"{cli.shown(checkpoint)} is now {cli.shown(out)}"
    if importlib.util.find_spec("transformers") is None:
        report.next.append("pip install transformers, then verify compares logits too")


def compare(call: cli.Invocation, report: Report) -> None:
    """verify: bit by bit."""
    folder, checkpoint = folder_of(call, call.args.places[0]), checkpoint_of(call.args.places[1])
    same_bits(report, folder, checkpoint)
    facts(report, checkpoint)
    differ = report.verdict == "fail"
    report.summary = f"{folder} and {checkpoint} are {'NOT ' if differ else ''}the same weights"


def facts(report: Report, checkpoint: Path) -> None:
    """Add sizes to the numbers."""
    from math import prod

    from curry_train.checkpoint import read_manifest

    tensors = read_manifest(checkpoint)["tensors"]
    shapes = [entry["shape"] for n, entry in tensors.items() if not n.startswith("optim.")]
    report.numbers |= {"tensors": len(shapes), "parameters": sum(map(prod, shapes))}
    report.evidence.append(f"{len(shapes)} tensors, {sum(map(prod, shapes)):,} parameters")


def guarded(call: cli.Invocation) -> Report:
    """Run the verb; what the project's code raises is told in a line."""
    with user_code("the project's checkpoint code"):
        return work(call)


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, guarded, doc=__doc__, add_flags=add_flags, check_flags=check_flags))

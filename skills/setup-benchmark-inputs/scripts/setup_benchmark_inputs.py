#!/usr/bin/env python3
"""Put a model's checkpoint and tokenised text where benchmarks and other skills look for them.

  setup_benchmark_inputs.py status  --model NAME   exit 0: both are there and whole, 1: not
  setup_benchmark_inputs.py prepare --model NAME   make what is missing, repair what is damaged

NAME is a file of configs/model. Sources, in this order: what --weights and --text name; the
released checkpoint and a shard of DCLM-baseline, from the cache or the hub; random weights of a
small model of the same family and the embedded text, which every report then calls STAND-IN.
"""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: setup-benchmark-inputs needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

import input_sources as sources  # noqa: E402
from input_places import RECORD, TOKENIZER, Part, install, listed, locked, look, parts_of  # noqa: E402

from kit import cli, layouts  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.user_code import put_first_on_path, user_code  # noqa: E402

SKILL = "setup-benchmark-inputs"
NAMES = {"inputs-checkpoint": "checkpoint", "inputs-corpus": "corpus"}


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument("verb", choices=("status", "prepare"), help="look, or make")
    parser.add_argument("--model", metavar="NAME", required=True, help="a file of configs/model")
    parser.add_argument("--weights", metavar="DIR", help="Hugging Face folder, or OWNER/NAME")
    parser.add_argument("--text", metavar="PATH", help="text, .jsonl, .jsonl.zst or a folder")
    parser.add_argument("--stand-in", action="store_true", help="random weights, embedded text")
    parser.add_argument("--replace", action="store_true", help="make anew what is there and whole")
    parser.add_argument("--verify", action="store_true", help="hash large files too")
    parser.add_argument(
        "--yes", action="store_true", help=f"fetch or write above {sources.ASK_BYTES / 1e9:.0f} GB"
    )


def check_flags(args: Any) -> None:
    """Refuse what has no sense before torch is needed."""
    if args.target is not None or args.set:
        raise UsageError("--target or --set", "inputs belong to a preset", "set --model NAME")
    given = [f for f in ("weights", "text", "stand_in", "replace", "yes") if getattr(args, f)]
    if args.verb == "status" and given:
        flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in given)
        raise UsageError(f"status with {flags}", "status only looks", "use prepare")
    if args.stand_in and (args.weights or args.text):
        raise UsageError("--stand-in with --weights or --text", "set one of them")
    if args.text is not None and not Path(args.text).exists():
        raise UsageError(f"--text {args.text} does not exist", "it takes a text file or a folder")


def work(call: cli.Invocation) -> Report:
    """Look, make what is asked for, and say what is there."""
    config = preset(call)
    from curry_train.checkpoint import CheckpointError
    from curry_train.data import DataError

    report, args = Report(SKILL), call.args
    checkpoint, corpus = parts_of(call.project, args.model)
    try:
        if args.verb == "prepare":
            with locked(call.project):
                prepare(call, report, config, checkpoint, corpus)
        examine(checkpoint, corpus, verify=args.verify)
    except (CheckpointError, DataError) as error:
        raise UsageError(
            str(error), "what was begun is kept", "set --weights DIR, --text PATH or --stand-in"
        ) from None
    tell(call, report, config, checkpoint, corpus)
    return report


def preset(call: cli.Invocation) -> Any:
    """Return the project's Config of the preset; an unknown name is answered by near ones."""
    layouts.load(call, [])
    put_first_on_path(call.project)
    from curry_train.compose import options

    known, name = options(call.project, "model"), call.args.model
    if name not in known:
        near = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
        raise UsageError(f"--model {name} is no file of configs/model", hint)
    config, problems = layouts.load(call, [f"model={name}", "parallel=single"])
    if config is None:
        raise UsageError(f"model={name} is refused: {'; '.join(problems)}")
    return config


def examine(checkpoint: Part, corpus: Part, *, verify: bool) -> None:
    """Look at both, and whether they are made for each other."""
    from curry_train.data.tokenizer import load_tokenizer

    look(checkpoint, verify=verify)
    look(corpus, verify=verify)
    own = checkpoint.folder / TOKENIZER
    if not (corpus.ready and checkpoint.ready and own.is_file()):
        return
    if load_tokenizer(own).sha256 != corpus.manifest["tokenizer"]["sha256"]:
        corpus.problems.append(f"{corpus.folder} was made by another tokenizer than {own}")


def prepare(
    call: cli.Invocation, report: Report, config: Any, checkpoint: Part, corpus: Part
) -> None:
    """Make what is missing, damaged or asked for anew; leave alone what is whole."""
    args = call.args
    examine(checkpoint, corpus, verify=args.verify)
    for part, asked in ((checkpoint, args.weights), (corpus, args.text)):
        refuse_other(part, asked, args.replace)
        if part.problems:
            print(f"damaged, repaired now: {'; '.join(part.problems)}", file=sys.stderr)
    report.numbers["made"] = done = []
    if args.replace or not checkpoint.ready:
        weights = choose(checkpoint, args, sources.choose_weights, args.weights)
        ask_first(call, config, weights, checkpoint)
        make_checkpoint(call, config, weights, checkpoint)
        done.append("checkpoint")
        examine(checkpoint, corpus, verify=False)
    if args.replace or not corpus.ready:
        own = sources.RELEASED_TEXT if checkpoint.origin == "released" else None
        text = choose(corpus, args, sources.choose_text, args.text, usual=own)
        ask_first(call, config, text, corpus)
        make_corpus(call, config, text, checkpoint, corpus)
        done.append("corpus")


def refuse_other(part: Part, asked: str | None, replace: bool) -> None:
    """Refuse to pass over a whole part of another source without a word."""
    if asked is None or replace or not part.ready:
        return
    here = str(Path(asked).resolve()) if Path(asked).exists() else asked
    if part.record.get("source") != here:
        raise UsageError(
            f"{part.folder} is there and whole, from {part.record.get('source', 'elsewhere')}",
            f"it is not made of {asked} unless it is to be replaced",
            "set --replace",
        )


def choose(
    part: Part, args: Any, from_where: Any, asked: str | None, usual: str | None = None
) -> sources.Choice:
    """Choose a source; what is repaired comes from where it came, never from a stand-in instead.

    asked: by the user. usual: where a new part comes from otherwise.
    """
    origin, source = part.origin, part.record.get("source")
    if args.replace or asked or args.stand_in or origin not in ("released", "local"):
        return from_where(args.model, asked or (None if args.stand_in else usual), args.stand_in)
    if origin == "local" and not Path(str(source)).exists():
        raise UsageError(
            f"{part.folder} was made of {source}, which is gone",
            "a repair takes the same source",
            "set --weights DIR or --text PATH, or --replace",
        )
    choice = from_where(args.model, source, False)
    if choice.origin == "stand-in":
        raise UsageError(
            f"{part.folder} was made of {source}, which cannot be had now",
            "a repair takes the same source",
            "try again with network, or set --stand-in --replace",
        )
    return choice


def ask_first(call: cli.Invocation, config: Any, choice: sources.Choice, part: Part) -> None:
    """Say sizes, and refuse what is large without --yes or does not fit on the disk."""
    from curry_train.models.protocol import count_parameters, meta_model

    fetch, write = sources.size_of(choice), 0
    if choice.origin == "released" and choice.source.count("/") == 1:  # weights, as float32
        write = 4 * count_parameters(meta_model(config))[0]
    free = shutil.disk_usage(call.project).free
    sizes = f"{fetch / 1e9:.1f} GB to fetch, {write / 1e9:.1f} GB to write"
    if write > free:
        raise UsageError(f"{sizes}, {free / 1e9:.1f} GB are free here", "", "free some space")
    if max(fetch, write) > sources.ASK_BYTES and not call.args.yes:
        raise UsageError(
            f"{call.args.model}: {sizes}", "so much takes your word", "set --yes or --stand-in"
        )
    large = max(fetch, write) > 5e7
    call.expect(None, f"then the {NAMES[part.id]}{f', {sizes}' if large else ''}")


def make_checkpoint(call: cli.Invocation, config: Any, choice: sources.Choice, part: Part) -> None:
    """Build the checkpoint beside its place and move it there."""
    from curry_train.models.protocol import count_parameters, meta_model

    total, done = 4 * count_parameters(meta_model(config))[0], [0]

    def told(count: int) -> None:
        done[0] += count
        call.progress(min(done[0], total), total, "bytes of the checkpoint")

    root = part.folder.parent / ".new"
    new = sources.write_checkpoint(choice, config, root, told)
    (root / "latest").unlink(missing_ok=True)
    install(new, part, choice.origin, choice.source, model=call.args.model)
    shutil.rmtree(root, ignore_errors=True)


def make_corpus(
    call: cli.Invocation, config: Any, choice: sources.Choice, checkpoint: Part, part: Part
) -> None:
    """Build the corpus by the checkpoint's tokenizer beside its place and move it there."""
    own = checkpoint.folder / TOKENIZER
    vocab = checkpoint.manifest["model"]["vocab_size"]
    if not own.is_file() and vocab < 257:
        raise UsageError(
            f"{checkpoint.record.get('source')} has no tokenizer.json, and {vocab} ids are too few "
            "for bytes",
            fix="copy the model's tokenizer.json into the --weights folder and set --replace",
        )
    new = part.folder.with_name(f".{part.folder.name}.new")
    sources.write_corpus(choice, str(own) if own.is_file() else "byte", new)
    manifest, _ = listed(Part(part.id, new, part.record_path))
    tokens, window = manifest["splits"]["train"]["tokens"], config.data.seq_len
    if tokens <= window:
        shutil.rmtree(new)
        raise UsageError(
            f"{choice.source} gives {tokens} tokens to train on, fewer than one sample",
            f"a sample is data.seq_len={window}",
            "give more by --text PATH",
        )
    install(new, part, choice.origin, choice.source, model=call.args.model)
    shutil.rmtree(new.with_name(f".{new.name}.partial"), ignore_errors=True)  # of a killed call
    new.with_name(f".{new.name}.lock").unlink(missing_ok=True)


def tell(call: cli.Invocation, report: Report, config: Any, checkpoint: Part, corpus: Part) -> None:
    """Turn what is there into checks, numbers and the command that uses it."""
    name, stands, unknown = call.args.model, [], []
    for part in (checkpoint, corpus):
        what = NAMES[part.id]
        message = f"{cli.shown(part.folder)}: "
        if part.ready:
            message += f"{part.origin}, {part.record.get('source', 'source unknown')}"
        else:
            message += "missing" if part.missing else f"damaged: {part.problems[0]}"
        report.check(part.id, "pass" if part.ready else "fail", message=message)
        report.numbers[what] = {
            "path": str(part.folder),
            "ready": part.ready,
            "origin": part.origin if part.ready else None,
            "source": part.record.get("source"),
            "problems": ["missing"] if part.missing else part.problems,
        }
        stands += [what] if part.ready and part.origin == "stand-in" else []
        unknown += [what] if part.ready and part.origin == "unknown" else []
        report.artifacts += [str(part.folder)] if part.ready else []
    ready = checkpoint.ready and corpus.ready
    words = overrides(config, checkpoint.manifest["model"]) if checkpoint.ready else []
    labels = [f"STAND-IN {' and '.join(stands)}"] if stands else []
    labels += [f"{' and '.join(unknown)} of unknown origin"] if unknown else []
    why = {"checkpoint": "values are random", "corpus": "the text is ours"}
    what = ", ".join(why[name] for name in stands) or f"no {RECORD} describes it"
    what = f"sizes are not those of {name}" if words else what
    if labels:
        report.check("inputs-origin", "skipped", message=f"{', '.join(labels)}: {what}")
    elif ready:
        origins = " and ".join(f"{NAMES[part.id]} {part.origin}" for part in (checkpoint, corpus))
        message = f"{origins}: {what}" if words else origins
        report.check("inputs-origin", "skipped" if words else "pass", message=message)
    state = "ready" if ready else "NOT ready"
    report.summary = ", ".join([f"inputs of {name} are {state}", *labels])
    if not ready:
        report.next.append(f"setup_benchmark_inputs.py prepare --model {name}")
        return
    places = {"run.init_from": checkpoint.folder, "data.input": corpus.folder}
    absolute = [f"{key}={path}" for key, path in places.items()]
    report.numbers["words"] = [f"model={name}", *words, *absolute]
    report.numbers["tokens"] = corpus.manifest["splits"]["train"]["tokens"]
    near = [f"{key}={path.relative_to(call.project)}" for key, path in places.items()]
    print(f"python train.py model={name} {' '.join([*near, *words])}")  # as long as it has to be


def overrides(config: Any, saved: dict[str, Any]) -> list[str]:
    """Return what makes the preset the model of the checkpoint, as words."""
    own = vars(config.model)
    return layouts.written(
        {f"model.{key}": value for key, value in saved.items() if own.get(key, value) != value}
    )


def guarded(call: cli.Invocation) -> Report:
    """Run the verb; what the project's code raises is told in a line."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with user_code("the project's code"):
        return work(call)


def main() -> int:
    """Run; `status --out DIR` without --model asks how far a detached call is."""
    words = sys.argv[1:]
    follows = "--out" in words and not any(word.startswith("--model") for word in words)
    return cli.run(
        SKILL,
        guarded,
        doc=__doc__,
        add_flags=add_flags,
        check_flags=check_flags,
        job_verbs=cli.VERBS if follows else ("wait",),
    )


if __name__ == "__main__":
    sys.exit(main())

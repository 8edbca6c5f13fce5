"""The order of every run: flags, interpreter, folder, work, report, exit code.

Exit codes: 0 pass or done, 1 a finding, 2 bad usage or input, 3 cannot tell from this evidence.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import interpreter, job, report, target
from .errors import UsageError
from .report import EXIT_CODES, Report
from .user_code import keep_bundle_clean, parse_spec

OK, FINDING, BAD_USAGE, CANNOT_TELL = 0, 1, 2, 3
INTERRUPTED = 130
VERBS = ("status", "wait")
STDOUT = "-"


@dataclass
class Invocation:
    """What a skill's work function gets: flags, folder, progress, and the target on demand."""

    skill: str
    args: argparse.Namespace
    project: Path
    out: Path
    job: job.Job
    target: target.Target | None = None

    def load_target(self, probe: bool = True) -> target.Target:
        """Build the target that the flags name; without `probe` its loss may raise, see there."""
        a = self.args
        keep_bundle_clean()
        sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
        self.target = target.load_target(
            self.project, a.target, overrides=a.set, seed=a.seed, device=a.device, probe=probe
        )
        torch = sys.modules["torch"]
        job.say(f"python: {sys.executable}, torch {torch.__version__}, device {self.target.device}")
        return self.target

    def expect(self, seconds: float | None, what: str) -> None:
        """Say how long it will take, first with None before anything is known."""
        self.job.expect(seconds, what)

    def progress(self, done: int, total: int, note: str = "") -> None:
        """Say how far it is."""
        self.job.progress(done, total, note)


if TYPE_CHECKING:  # an older python3 only has to get as far as the one with torch
    Work = Callable[[Invocation], Report]


def run(
    skill: str,
    work: Work,
    *,
    doc: str | None,
    add_flags: Callable[[Any], None] | None = None,
    check_flags: Callable[[argparse.Namespace], int | None] | None = None,
    modules: Callable[[argparse.Namespace], Sequence[str]] | None = None,
    job_verbs: Sequence[str] = VERBS,
    argv: Sequence[str] | None = None,
) -> int:
    """Run a skill's script and return its exit code.

    `check_flags` sees the flags before torch is needed: it raises UsageError, or returns an exit
    code when it has already done what was asked. Work that loads no target says by `modules` what
    it imports instead; then neither a project nor --target has to be there. `job_verbs` are those
    of VERBS that follow a run; a skill with a verb of its own of such a name leaves it out.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv and argv[0] in job_verbs:
            return _follow(skill, argv)
        args = build_parser(skill, doc, add_flags).parse_args(argv)
        early = check_flags(args) if check_flags else None
        needed = None if modules is None else list(modules(args))
        return early if early is not None else _start(skill, work, args, argv, needed)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def build_parser(
    skill: str, doc: str | None, add_flags: Callable[[Any], None] | None = None
) -> argparse.ArgumentParser:
    """Make the parser: the skill's own flags, then the common ones."""
    parser = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="verbs: `status [--out DIR]` says how far a run is,\n"
        "`wait [--out DIR] [--timeout S]` blocks until it ends and exits with its code;\n"
        "both look at the newest run by default.\n"
        "exit codes: 0 pass, 1 a finding, 2 bad usage or input, 3 cannot tell.",
        allow_abbrev=False,
    )
    if add_flags is not None:
        add_flags(parser.add_argument_group(skill))
    common = parser.add_argument_group("common")
    _add_place(common)
    common.add_argument(
        "--target",
        metavar="FILE.py:FUNCTION",
        help="check other code: the function returns (model, batches, loss_fn[, optimizer]), a "
        "dict of such parts, a transformers Trainer or (LightningModule, dataloader)",
    )
    common.add_argument(
        "--set",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="overrides of the project's configuration",
    )
    common.add_argument("--seed", type=int, help="default: the project's; 0 for --target")
    common.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default auto)")
    common.add_argument(
        "--python",
        metavar="PY",
        help="interpreter that has torch (default: this one, "
        "the project's .venv, the active environment)",
    )
    common.add_argument(
        "--detach", action="store_true", help="run in the background; see the verbs"
    )
    return parser


def _add_place(parser: Any) -> None:
    parser.add_argument("--project", metavar="DIR", default=".", help="default: the current folder")
    parser.add_argument("--out", metavar="DIR", help="default: DIR/runs/checks/<skill>/<stamp>")
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const=STDOUT, help="JSON alone on stdout, or into FILE"
    )


def _start(
    skill: str,
    work: Work,
    args: argparse.Namespace,
    argv: Sequence[str],
    needed: Sequence[str] | None,
) -> int:
    detached = os.environ.pop(job.DETACHED, None) is not None
    project = _absolute(args.project)
    if not project.is_dir():
        raise UsageError(f"--project {args.project} is no folder", fix="set --project to a folder")
    if needed is None:
        target.check_request(project, args.target, args.set, args.device)
    args.json = _json_place(args.json)
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # waiting threads starve a busy machine
    folders, modules = [project], target.PROJECT_MODULES if needed is None else needed
    if args.target is not None:
        path, function = parse_spec(args.target, flag="--target")
        args.target = f"{path}:{function}"  # checked code may change the current folder
        folders.append(path.parent)
        modules = target.FOREIGN_MODULES
    interpreter.ensure_modules(modules, folders=folders, python=args.python)
    out = _make_out(skill, project, args.out)
    if args.detach and not detached:
        return _detach(skill, args, argv, out)
    with job.locked(out):
        code = _run_here(Invocation(skill, args, project, out, job.Job(out, skill)), work)
    if code == BAD_USAGE and args.out is None:
        job.discard(out)
    return code


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _json_place(asked: str | None) -> str | None:
    """Return where --json goes, as an absolute path; refuse what cannot be written."""
    if asked in (None, STDOUT):
        return asked
    path = _absolute(asked)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(
            f"--json {asked} cannot be written",
            "it takes a file in a folder that exists",
            "set --json FILE, or --json alone for stdout",
        )
    return str(path)


def _make_out(skill: str, project: Path, asked: str | None) -> Path:
    out = None if asked is None else _absolute(asked)
    inside = [place for place in (project, out) if place and _in_bundle(place)]
    if inside:
        raise UsageError(
            f"{inside[0]} lies inside the bundle, which is replaced on update",
            "reports belong to your project",
            "set --project and --out to folders of your own",
        )
    try:
        if out is None:
            return job.new_folder(project, skill)
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(13, "no write permission")
    except OSError as error:
        raise UsageError(
            f"cannot write into {out or project}: {error.strerror}", fix="set --out or --project"
        ) from None
    return out


def _in_bundle(place: Path) -> bool:
    manifest = (report.BUNDLE / "plugin.json").is_file()
    return manifest and report.BUNDLE in [place.resolve(), *place.resolve().parents]


def _run_here(call: Invocation, work: Work) -> int:
    code, error = CANNOT_TELL, None
    try:
        with _stdout_for_json(call.args.json == STDOUT) as stdout:
            found = work(call)
            code = _deliver(call, found, stdout)
    except UsageError as caught:
        code, error = BAD_USAGE, str(caught)
        print(f"error: {caught}", file=sys.stderr)
    except KeyboardInterrupt:
        code, error = INTERRUPTED, "interrupted"
        raise
    except SystemExit as caught:
        code, error = INTERRUPTED, f"ended by sys.exit({caught.code})"
        raise
    except BaseException as caught:
        error = f"internal error: {type(caught).__name__}: {caught}"
        traceback.print_exc()
        print(f"error: {call.skill} itself failed, so there is no verdict", file=sys.stderr)
    finally:
        call.job.finish(code, error)
    return code


def _deliver(call: Invocation, found: Report, stdout: Any) -> int:
    """Write report.json, the ledger and what was asked for on stdout."""
    known = call.target
    spec = call.args.target
    home = call.project if spec is None else parse_spec(spec, flag="--target")[0].parent
    written = found.to_dict(
        config_hash=known.config_hash if known else None,
        git_sha=report.git_sha(home),
        env=report.environment(known.device if known else None, call.args.seed),
    )
    report.write_json(call.out / "report.json", written)
    try:
        report.append_ledger(call.project, written)
    except OSError as error:  # the report stands, wherever --out put it
        job.say(f"no line in the ledger of {call.project}: {error.strerror}")
    if call.args.json == STDOUT:
        print(json.dumps(written, indent=2, allow_nan=False), file=stdout, flush=True)
    else:
        if call.args.json is not None:
            report.write_json(Path(call.args.json), written)
        place = shown(call.out / "report.json")
        print(report.render(written, place, found.exit_code), file=stdout, flush=True)
    return EXIT_CODES[written["verdict"]] if found.exit_code is None else found.exit_code


def shown(path: Path) -> Path:
    """Name a path from the current folder when it lies below it."""
    with contextlib.suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path


@contextlib.contextmanager
def _stdout_for_json(wanted: bool) -> Iterator[Any]:
    """Keep stdout for the JSON: what checked code and its processes print goes to stderr."""
    if not wanted:
        yield sys.stdout
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(saved, "w", encoding="utf-8", closefd=False) as stdout:
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def _detach(skill: str, args: argparse.Namespace, argv: Sequence[str], out: Path) -> int:
    script = os.path.abspath(sys.argv[0])
    code, pid = job.detach([script, *argv], out)
    if code is not None:
        sys.stderr.write((out / job.LOG).read_text(encoding="utf-8", errors="replace"))
        return code
    if args.json == STDOUT:
        print(json.dumps({"skill": skill, "status": "running", "pid": pid, "out": str(out)}))
        return OK
    print(f"started: {skill}, process {pid}, log {shown(out / job.LOG)}")
    for verb in VERBS:
        print(f'{verb}: python3 "{script}" {verb} --out "{out}"')
    return OK


def _follow(skill: str, argv: Sequence[str]) -> int:
    """Answer `status` and `wait`."""
    verb = argv[0]
    parser = argparse.ArgumentParser(prog=f"{Path(sys.argv[0]).name} {verb}", allow_abbrev=False)
    _add_place(parser)
    if verb == "wait":
        parser.add_argument("--timeout", type=float, metavar="S", help="seconds; then exit 3")
    args = parser.parse_args(argv[1:])
    args.json = _json_place(args.json)
    project = _absolute(args.project)
    out = _absolute(args.out) if args.out else job.newest_folder(project, skill)
    state = job.wait_for(out, timeout=args.timeout) if verb == "wait" else job.read_status(out)
    written = out / "report.json"
    found = _read_report(written) if verb == "wait" and state["status"] == "done" else None
    if args.json == STDOUT:
        print(json.dumps(found or state, indent=2))
    elif args.json is not None:
        report.write_json(Path(args.json), found or state)
    elif found:
        print(report.render(found, shown(written)))
    else:
        print(job.describe_status(state, shown(out)))
    if verb == "status":
        return OK
    return CANNOT_TELL if state["exit_code"] is None else state["exit_code"]


def _read_report(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(f"{path} is missing or damaged", fix="run the check again") from None

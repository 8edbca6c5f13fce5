#!/usr/bin/env python3
"""Compare training of two states of a project, step by step: base against a feature branch.

Both are checked out into git worktrees and train --steps steps by their own train.py, on the same
model, mesh, seeds and data: base, head, base. How far head may lie from base follows from how far
the two base runs lie apart; where they agree bitwise, any difference is a finding. A second gate of
its own compares step time, tokens a second and peak memory.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: validate-correctness needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from comparison_report import Gates, report_on  # noqa: E402
from ref_worktrees import WORKTREE, Repository, State, checked_out, remove_stale  # noqa: E402
from run_folders import FinishedRun  # noqa: E402
from run_words import AXES, EXAMPLES, check_words, mesh_of, tolerances_of, words_of  # noqa: E402
from speed_gate import THRESHOLDS as SPEED  # noqa: E402
from speed_gate import looks_slower  # noqa: E402
from step_comparison import Group, compare, repeats_bitwise  # noqa: E402
from train_runs import Request, find_finished, probe_once, train  # noqa: E402

from kit import cli, job  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.target import PROJECT_MODULES, is_project  # noqa: E402

SKILL = "validate-correctness"
STEPS, LEAST_STEPS = 25, 2
BASE_RUNS = 4
PATIENCE = 1800.0


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument("--base", metavar="REF", help="what is known to train well")
    parser.add_argument(
        "--head",
        metavar="REF",
        default="HEAD",
        help=f"what is to be judged (default HEAD); {WORKTREE}: the files as they lie there",
    )
    parser.add_argument("--model", metavar="NAME", help="a file of configs/model; never guessed")
    parser.add_argument(
        "--mesh", metavar="SPEC", help=f"single, or sizes of {', '.join(AXES)}: {EXAMPLES}"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="default: 0")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16", "fp64"))
    parser.add_argument(
        "--tolerance",
        nargs="+",
        default=[],
        metavar="REL",
        help="relative, for an intended change of numbers: 1e-4, or loss=1e-5 grad_norm=1e-3",
    )
    parser.add_argument(
        "--base-runs",
        type=int,
        default=BASE_RUNS,
        help=f"runs of the base where two of them differ (default {BASE_RUNS})",
    )
    limit = SPEED["validate-step-time"]
    parser.add_argument("--max-slowdown", type=float, default=limit, help=f"default {limit}")
    limit = SPEED["validate-peak-memory"]
    parser.add_argument("--max-memory", type=float, default=limit, help=f"default {limit}")
    parser.add_argument("--no-performance", action="store_true", help="correctness alone")
    parser.add_argument("--fresh", action="store_true", help="use no run of an earlier call")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        metavar="S",
        help=f"seconds without a new step after which a run is ended (default {PATIENCE:g})",
    )


def check_flags(args: Any) -> None:
    """Find what is missing or wrong before anything is checked out."""
    project = Path(args.project).expanduser()
    if args.target is not None:
        raise UsageError("--target", "two commits of a project are compared", "set --project DIR")
    if not is_project(project):
        raise UsageError(
            f"{project} is no curry-train project (it has no curry_train/runtime.py)",
            fix="set --project DIR",
        )
    asked = {"--base": args.base, "--model": args.model, "--mesh": args.mesh}
    missing = [flag for flag, value in asked.items() if value is None]
    if missing:
        presets = sorted(path.stem for path in (project / "configs" / "model").glob("*.yaml"))
        raise UsageError(
            f"{', '.join(missing)} missing",
            "what to train is never guessed from a diff; --base takes a branch, tag or commit, "
            f"--model one of {', '.join(presets)}, --mesh {EXAMPLES}",
            "set them",
        )
    if args.seeds is not None and args.seed is not None:
        raise UsageError("--seed and --seeds", "one of them")
    args.seeds = list(dict.fromkeys(args.seeds or [args.seed or 0]))
    args.axes = mesh_of(args.mesh)
    args.given = tolerances_of(args.tolerance)
    check_words(args.set)
    least = {"--steps": (args.steps, LEAST_STEPS), "--base-runs": (args.base_runs, 3)}
    for flag, (value, limit) in least.items():
        if value < limit:
            raise UsageError(f"{flag} {value}", f"it takes at least {limit}")
    if min(args.seeds) < 0:
        raise UsageError(f"--seeds {min(args.seeds)}", "a seed is at least 0")
    for flag in ("max_slowdown", "max_memory"):
        if not 1 <= getattr(args, flag) < math.inf:
            raise UsageError(f"--{flag.replace('_', '-')}", "it takes a factor of at least 1")
    if not args.patience > 0:
        raise UsageError(f"--patience {args.patience}", "it takes seconds above 0")


def validate(call: cli.Invocation) -> Gates:
    """Check out, ask both states what they would train, train, compare."""
    args, repository = call.args, Repository.of(call.project)
    call.expect(None, f"then {3 * len(args.seeds)} runs of {args.steps} steps or more")
    with orderly_end():
        for folder in remove_stale(repository):
            job.say(f"removed {folder}, which a killed run had left")
        states = {role: repository.state(role, getattr(args, role)) for role in ("base", "head")}
        refuse_unknown_model(repository, states, args.model)
        notes = notes_on(repository, states)
        with checked_out(repository, list(states.values())) as folders:
            told = {role: ask(call, states[role], folders[role]) for role in states}
            runs = Runs(call, states, folders, told)
            groups = [] if isinstance(told["head"], str) else runs.groups()
    report = Gates(SKILL, evidence=notes)
    if isinstance(told["head"], str):
        report.refused(told["head"])
        return report
    precision = told["head"]["config"]["precision"]
    comparison = compare(groups, args.given, precision)
    changed = repository.changed_files(states["base"], states["head"])
    report_on(call, report, groups, comparison, told, changed)
    return report


@contextmanager
def orderly_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a run as Ctrl-C does, with nothing left behind."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    names = (signal.SIGTERM, signal.SIGHUP)
    before = {name: signal.signal(name, stop) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def refuse_unknown_model(repository: Repository, states: dict[str, State], model: str) -> None:
    """Refuse a model that one of the states has no file for."""
    for role, state in states.items():
        presets = repository.presets(state)
        if model not in presets:
            raise UsageError(
                f"--model {model}: {role} ({state.ref}) has no configs/model/{model}.yaml",
                f"it has {', '.join(presets)}",
                "name a model that base and head both have",
            )


def notes_on(repository: Repository, states: dict[str, State]) -> list[str]:
    """Tell which commits are compared, and what of the working tree is not."""
    base, head = states["base"], states["head"]
    notes = [f"base {base.ref} ({base.commit[:10]}), head {head.ref} ({head.commit[:10]})"]
    if base.tree == head.tree:
        notes[0] += ": the same files"
    empty = sorted({name for state in states.values() for name in repository.submodules(state)})
    if empty:
        notes.append(f"submodules are empty in worktrees: {', '.join(empty[:3])}")
    changed = repository.uncommitted()
    if changed and head.ref != WORKTREE:
        some = f"{len(changed)} uncommitted files ({', '.join(changed[:3])})"
        notes.append(f"{some} are in neither; --head {WORKTREE} takes them")
    for note in notes:
        job.say(note)
    return notes


def ask(call: cli.Invocation, state: State, folder: Path) -> dict[str, Any] | str:
    """Let a state resolve its configuration and prepare its data; a base must be able to."""
    words = [str(call.args.steps), *common_words(call, state), f"seed={call.args.seeds[0]}"]
    told = probe_once(earlier(call), call.out, state, folder, call.project, *words)
    if isinstance(told, str) and state.role == "base":
        raise UsageError(
            f"the base ({state.ref}) does not take these settings: {told}",
            "nothing was trained",
            "set --model, --mesh and --set to what the base can train",
        )
    return told


def common_words(call: cli.Invocation, state: State) -> list[str]:
    """Write the settings of all runs of a state.

    Text is prepared once for all states whose code and text for that are the same.
    """
    args = call.args
    cache = call.project / "runs" / "checks" / SKILL / "data" / state.data_tree
    words = words_of(args.model, args.axes, args.steps, args.precision, args.device)
    return [*words, f"data.cache_dir={cache}", *args.set]


class Runs:
    """Makes or finds the runs of one call, and says how far they are."""

    def __init__(
        self,
        call: cli.Invocation,
        states: dict[str, State],
        folders: dict[str, Path],
        told: dict[str, Any],
    ) -> None:
        self.call, self.states, self.folders = call, states, folders
        self.words = {
            role: [*common_words(call, state), *told[role]["moved"]]
            for role, state in states.items()
            if not isinstance(told[role], str)
        }
        self.planned, self.done = 3 * len(call.args.seeds), 0
        self.explained = told_apart(told)

    def groups(self) -> list[Group]:
        """Run base, head, base for each seed; more of them where that does not say enough."""
        return [self.group(seed) for seed in self.call.args.seeds]

    def group(self, seed: int) -> Group:
        """Run one seed. A base that crashes ends it: there is nothing to compare with."""
        group = Group(seed, [self.run("base", seed, 1)], [])
        if group.base[0].crash():
            return group
        group.head.append(self.run("head", seed, 1))
        group.base.append(self.run("base", seed, 2))
        if not repeats_bitwise(group.base):
            self.planned += self.call.args.base_runs - 2
            for number in range(3, self.call.args.base_runs + 1):
                group.base.append(self.run("base", seed, number))
        elif not self.explained and self.differs_early(group):
            self.planned += 1
            group.head.append(self.run("head", seed, 2))
        if self.needs_witness(group):
            self.planned += 1
            number = len(group.base) + 1
            group.base.append(self.run("base", seed, number, fresh=True))
        return group

    def needs_witness(self, group: Group) -> bool:
        """Tell whether the head looks slower than runs of the base that were all made before it.

        Then the machine may only be busier than it was for an earlier call.
        """
        args, head = self.call.args, group.head[0]
        seen = any(run.started > head.started for run in group.base)
        judged = not (args.no_performance or seen or head.crash())
        return judged and looks_slower(group.base, head, args.max_slowdown)

    def differs_early(self, group: Group) -> bool:
        """Tell whether the losses differ though nothing yet says why."""
        base, head = (side[0].rows for side in (group.base, group.head))
        same_lr = all(row.get("lr") == base[s].get("lr") for s, row in head.items() if s in base)
        both = set(base) & set(head)
        losses = any(base[s].get("loss") != head[s].get("loss") for s in both)
        return losses and same_lr and not group.head[0].crash()

    def run(self, role: str, seed: int, number: int, fresh: bool = False) -> FinishedRun:
        """Return a run of a state: an earlier one of the same code and settings, or a new one."""
        call, state = self.call, self.states[role]
        words = (*self.words[role], f"seed={seed}")
        request = Request(state, seed, number, words)
        run = None if fresh else find_finished(earlier(call), request)
        if run is not None:
            job.say(f"{request.name}: taken from {cli.shown(run.folder)}")
        else:
            steps, before = call.args.steps, self.done * call.args.steps
            run = train(
                request,
                self.folders[role],
                call.out,
                lambda rows: call.progress(
                    before + min(rows, steps), self.planned * steps, f"steps, {request.name}"
                ),
                call.args.patience,
            )
            self.check_code(run, state)
        self.done += 1
        rest = (run.ended - run.started) * (self.planned - self.done)
        if rest and self.done == 1:
            call.expect(rest, f"{self.planned - 1} more runs of {call.args.steps} steps")
        return run

    def check_code(self, run: FinishedRun, state: State) -> None:
        """Refuse a run whose journal names another commit: then another package was imported."""
        ran = run.start.get("git_sha")
        if ran not in (None, state.commit):
            raise UsageError(
                f"{run.name} trained commit {ran[:10]}, not {state.commit[:10]}",
                "train.py must import curry_train from its own folder",
                "look for PYTHONPATH or a .pth file that names another one",
            )


def earlier(call: cli.Invocation) -> list[Path]:
    """List the folders in which earlier calls left their runs, this one's own first."""
    if call.args.fresh:
        return []
    folders = (call.project / "runs" / "checks" / SKILL).glob("*/")
    return [call.out, *sorted(folders, reverse=True)]


def told_apart(told: dict[str, Any]) -> bool:
    """Tell whether configuration and data alone show that head trains something else."""
    base, head = told["base"], told["head"]
    if isinstance(head, str):
        return True
    return base["batches"] != head["batches"] or base["data_hash"] != head["data_hash"]


if __name__ == "__main__":
    sys.exit(
        cli.run(
            SKILL,
            validate,
            doc=__doc__,
            add_flags=add_flags,
            check_flags=check_flags,
            modules=lambda args: PROJECT_MODULES,
        )
    )

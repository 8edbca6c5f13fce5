"""Two states of a project in git worktrees of their own, and nothing left behind.

The user's branch, index and working tree are only read. Worktrees lie in a temporary folder whose
lock dies with its process; what a killed run left is removed at the next start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kit import job
from kit.errors import UsageError

WORKTREE = "WORKTREE"
PREFIX = "curry-validate-"
NO_HOOKS = ("-c", f"core.hooksPath={os.devnull}", "-c", "gc.auto=0", "-c", "core.quotepath=false")
OURS = "runs/checks"
"""Below the project; reports and run folders are no part of its code."""
NAME = {
    "GIT_AUTHOR_NAME": "validate-correctness",
    "GIT_AUTHOR_EMAIL": "none@localhost",
    "GIT_COMMITTER_NAME": "validate-correctness",
    "GIT_COMMITTER_EMAIL": "none@localhost",
}


@dataclass(frozen=True)
class State:
    """One of the two things compared: a commit, or the working tree as a commit of its own."""

    role: str
    ref: str
    commit: str
    tree: str
    """Object id of the whole tree; equal trees hold equal code."""
    data_tree: str
    """Object ids of what decides how text becomes batches."""


@dataclass(frozen=True)
class Repository:
    """The git repository that a project lies in."""

    project: Path
    prefix: str
    """From the repository's root to the project, empty or with a slash at its end."""

    @staticmethod
    def of(project: Path) -> Repository:
        """Find the repository; raises UsageError where there is none."""
        done = git(project, "rev-parse", "--show-prefix", check=False)
        if done.returncode:
            raise UsageError(
                f"{project} lies in no git repository",
                "base and head are commits of the project's repository",
                "run git init, git add and git commit there first",
            )
        return Repository(project, done.stdout.rstrip("\n"))

    def state(self, role: str, ref: str) -> State:
        """Resolve a ref, or snapshot the working tree; raises UsageError for what is no project."""
        commit = self.snapshot() if ref == WORKTREE else self._commit(role, ref)
        parts = [self._object(commit, path) for path in ("curry_train/data", "corpus")]
        if not self._object(commit, "train.py"):
            raise UsageError(
                f"--{role} {ref} has no {self.prefix}train.py",
                "both states must hold the project that --project names",
            )
        tree = git(self.project, "rev-parse", f"{commit}^{{tree}}").stdout.strip()
        return State(role, ref, commit, tree, "-".join(part[:8] or "none" for part in parts))

    def _commit(self, role: str, ref: str) -> str:
        done = git(
            self.project, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}", check=False
        )
        if done.returncode or ref.startswith("-"):
            form = "--format=%(refname:short)"
            branches = git(self.project, "branch", "--all", form).stdout.split("\n")[:10]
            names = ", ".join(filter(None, branches)) or "there is none yet: commit first"
            raise UsageError(
                f"--{role} {ref} is no commit of this repository",
                f"it takes a branch ({names}), "
                f"tag or commit{', or WORKTREE' if role == 'head' else ''}",
            )
        return done.stdout.strip()

    def _object(self, commit: str, path: str) -> str:
        """Return the object id of a path of the project, empty where it is not there."""
        name = f"{commit}:{self.prefix}{path}"
        return git(
            self.project, "rev-parse", "--verify", "--quiet", name, check=False
        ).stdout.strip()

    def presets(self, state: State) -> list[str]:
        """List the models that a state has files for."""
        folder = f"{self.prefix}configs/model/"
        names = git(
            self.project, "ls-tree", "-r", "--full-tree", "--name-only", state.commit, folder
        ).stdout.splitlines()
        cut = len(folder)
        return [name[cut:].removesuffix(".yaml") for name in names if name.endswith(".yaml")]

    def submodules(self, state: State) -> list[str]:
        """List the submodules of a state, whose folders are empty in a worktree."""
        listed = git(self.project, "ls-tree", "-r", "--full-tree", state.commit).stdout.splitlines()
        return [line.partition("\t")[2] for line in listed if line.startswith("160000 ")]

    def uncommitted(self) -> list[str]:
        """List the changed and new files of the project, without those of checks."""
        paths = ("--", ".", f":(exclude){OURS}")
        asked = ("status", "--porcelain", "--untracked-files=all", *paths)
        return [line[3:] for line in git(self.project, *asked).stdout.splitlines()]

    def snapshot(self) -> str:
        """Return a commit with the working tree as it is, made beside the user's index.

        Changed files of the whole repository and new ones of the project; ignored files are not in
        it. The commit belongs to no branch, and git removes it some day.
        """
        with tempfile.TemporaryDirectory() as folder:
            index = {"GIT_INDEX_FILE": str(Path(folder) / "index"), **NAME}
            head = git(self.project, "rev-parse", "--verify", "--quiet", "HEAD", check=False)
            parent = head.stdout.strip()
            if parent:
                git(self.project, "read-tree", parent, extra=index)
                git(self.project, "add", "--update", ":/", extra=index)
            ignored = git(self.project, "check-ignore", "--quiet", OURS, check=False)
            # git add takes it as an error when an exclusion names what is ignored anyway.
            paths = (".",) if ignored.returncode == 0 else (".", f":(exclude){OURS}")
            git(self.project, "add", "--all", "--", *paths, extra=index)
            tree = git(self.project, "write-tree", extra=index).stdout.strip()
            onto = ("-p", parent) if parent else ()
            words = ("commit-tree", tree, *onto, "-m", "working tree")
            return git(self.project, *words, extra=index).stdout.strip()

    def changed_files(self, base: State, head: State) -> list[str]:
        """List the files of the project that differ."""
        asked = ("diff", "--name-only", "--relative", base.commit, head.commit, "--", ".")
        return git(self.project, *asked).stdout.splitlines()


@contextlib.contextmanager
def checked_out(repository: Repository, states: Sequence[State]) -> Iterator[dict[str, Path]]:
    """Check out states into a temporary folder; give role -> folder of the project there.

    Removed at the end, however it ends; only a SIGKILL leaves it, to be removed by remove_stale.
    """
    home = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    folders = {state.role: home / state.role for state in states}
    try:
        with job.locked(home):
            try:
                for state in states:
                    where = str(folders[state.role])
                    add = ("worktree", "add", "--quiet", "--detach", where, state.commit)
                    git(repository.project, *add)
                yield {role: folder / repository.prefix for role, folder in folders.items()}
            finally:
                for folder in folders.values():
                    forget(repository, folder)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def forget(repository: Repository, folder: Path) -> None:
    """Remove one worktree and git's note of it; other worktrees are not looked at."""
    git(repository.project, "worktree", "remove", "--force", "--force", str(folder), check=False)


def remove_stale(repository: Repository) -> list[Path]:
    """Remove the worktrees whose process is gone; return them."""
    listed = git(repository.project, "worktree", "list", "--porcelain").stdout.splitlines()
    folders = [Path(line.removeprefix("worktree ")) for line in listed if line[:9] == "worktree "]
    stale = [
        folder
        for folder in folders
        if folder.parent.name.startswith(PREFIX) and not job.is_locked(folder.parent)
    ]
    for folder in stale:
        forget(repository, folder)
        shutil.rmtree(folder.parent, ignore_errors=True)
    return stale


def git(
    folder: Path, *words: str, check: bool = True, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run git in a folder, without hooks and without what a hook of git would set for us."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith("GIT_CONFIG")
    }
    try:
        done = subprocess.run(
            ["git", *NO_HOOKS, "-C", str(folder), *words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**kept, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", **(extra or {})},
            check=False,
        )
    except FileNotFoundError:
        raise UsageError("there is no git on this machine", fix="install git") from None
    if check and done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"git {' '.join(words[:2])} failed: {said}")
    return done

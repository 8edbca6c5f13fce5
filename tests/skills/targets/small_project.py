"""A project with the seam's files and a train.py of plain Python that takes milliseconds.

It fits one weight to noisy samples by gradient descent, so that a planted fault shows in the rows
as it would in a real run: a changed learning rate one step later, a changed order at once.
`curry_train/physics.py` holds what a branch changes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PHYSICS = {
    "LR": 0.1,
    "APPLIED": 1.0,
    "ORDER": 0,
    "NORM": 1.0,
    "AUX": 0.01,
    "LOAD": 1.5,
    "VAL": 1.0,
    "TOKENS": 8,
    "SLEEP": 0.0,
    "MEMORY": 1000,
    "SEEDED": True,
    "JITTER": 0.0,
    "NAN_FROM": 10**9,
    "CRASH_AFTER": 10**9,
    "FIRST_STEP": 1,
    "REFUSE": "",
    "TEXT_FILE": "text.txt",
}
CONFIG = """
import json
class ConfigError(ValueError):
    pass
class Section(dict):
    __getattr__ = dict.__getitem__
def to_dict(config):
    return config
def config_hash(config):
    return "0" * 64
"""
COMPOSE = """
from pathlib import Path
from curry_train import physics
from curry_train.config import ConfigError, Section
def load_config(words):
    values = dict(word.split("=", 1) for word in words)
    if physics.REFUSE:
        raise ConfigError(physics.REFUSE)
    if int(values["parallel.tp"]) == 3:
        raise ConfigError("parallel.tp=3: does not divide 4 heads")
    text = values.get("data.input", physics.TEXT_FILE)
    if not Path(text).exists():
        raise ConfigError(f"data.input={text}: no such file or folder")
    data = Section(input=text, tokenizer="byte", global_batch_size=4, seq_len=2,
                   cache_dir=values["data.cache_dir"])
    run = Section(init_from=None)
    precision = values.get("precision", "fp32")
    return Section(seed=int(values["seed"]), precision=precision, data=data, run=run,
                   optim=Section(lr=physics.LR))
"""
DATA = """
import hashlib
from pathlib import Path
class DataError(Exception):
    pass
class Corpus:
    def __init__(self, text):
        self.values = [float(word) for word in text.split()]
        self.hash = hashlib.sha256(text.encode()).hexdigest()
def open_corpus(data, cache_dir):
    cache_dir.mkdir(parents=True, exist_ok=True)
    return Corpus(Path(data.input).read_text())
"""
LOADER = """
import random
from curry_train import physics
class Ids(list):
    def numpy(self):
        return self
    def tobytes(self):
        return repr(list(self)).encode()
class Loader:
    def __init__(self, corpus, data, *, seed, micro_batch_size):
        self.values = random.Random(seed + physics.ORDER).sample(corpus.values, len(corpus.values))
    def next_step(self):
        batch, self.values = self.values[:4], self.values[4:] + self.values[:4]
        return [{"input_ids": Ids(batch)}]
"""
TRAIN = """
import json, math, os, random, signal, subprocess, sys, time, traceback
from pathlib import Path
from curry_train import physics as p
from curry_train.compose import load_config
from curry_train.data import open_corpus
from curry_train.data.loader import Loader
words = sys.argv[1:]
values = dict(word.split("=", 1) for word in words)
config = load_config(words)
corpus = open_corpus(config.data, Path(config.data.cache_dir))
loader = Loader(corpus, config.data, seed=config.seed, micro_batch_size=4)
run = Path(values["run.dir"]) / f"{values['run.name']}-{os.getpid()}"
run.mkdir(parents=True)
(run / "checkpoints").mkdir()
files = (open(run / f"{name}.jsonl", "w", buffering=1) for name in ("journal", "metrics"))
journal, metrics = files
def event(ev, **fields):
    journal.write(json.dumps({"ev": ev, "attempt": 1, **fields}) + chr(10))
git = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "rev-parse", "HEAD"]
event("start", git_sha=subprocess.run(git, capture_output=True, text=True).stdout.strip())
noise = random.Random(config.seed) if p.SEEDED else random.SystemRandom()
jitter = random.SystemRandom()
w, steps = 0.0, int(values["run.max_steps"])
try:
    for step in range(1, steps + 1):
        (batch,) = loader.next_step()
        dropped = [x * (noise.random() > 0.1) for x in batch["input_ids"]]
        time.sleep(p.SLEEP)
        w *= 1 + p.JITTER * jitter.gauss(0, 1)
        loss = sum((w - x) ** 2 for x in dropped) / 4 * (1 + p.JITTER * jitter.gauss(0, 1))
        gradient = sum(2 * (w - x) for x in dropped) / 4
        if step >= p.NAN_FROM:
            loss = math.nan
        row = {
            "step": step + p.FIRST_STEP - 1, "attempt": 1, "tokens": p.TOKENS * step, "loss": loss,
            "aux_loss": p.AUX * abs(gradient), "z_loss": 0.0, "lr": p.LR,
            "grad_norm": abs(gradient) * p.NORM, "step_time": 0.01 + p.SLEEP,
            "tokens_per_s": p.TOKENS / (0.01 + p.SLEEP), "moe/load_max_over_mean": p.LOAD,
            "memory_bytes": p.MEMORY,
        }
        w -= p.LR * p.APPLIED * gradient
        if step == steps:
            row["val/loss"] = sum((w - x) ** 2 for x in corpus.values) * p.VAL
        text = json.dumps({k: "NaN" if v != v else v for k, v in row.items()})
        metrics.write(text + chr(10))
        if step >= p.CRASH_AFTER:
            raise ValueError("the expert bank is empty")
except ValueError as error:
    told = {"rank": 0, "type": "ValueError", "message": str(error),
            "traceback": traceback.format_exc()}
    (run / "failure.json").write_text(json.dumps(told))
    event("end", status="crashed", reason=str(error))
    sys.exit(1)
event("end", status="done", reason=None)
"""
TEXT = " ".join(str(round(1 + 0.37 * (i * 7919 % 101) / 101, 4)) for i in range(64))


def make(folder: Path) -> Path:
    """Write the project into a folder and commit it to a repository there, on branch main."""
    files = {
        "train.py": TRAIN,
        "text.txt": TEXT,
        "configs/model/small.yaml": "architecture: small\n",
        "configs/model/wide.yaml": "architecture: small\n",
        "curry_train/__init__.py": "",
        "curry_train/runtime.py": "",
        "curry_train/config.py": CONFIG,
        "curry_train/compose.py": COMPOSE,
        "curry_train/data/__init__.py": DATA,
        "curry_train/data/loader.py": LOADER,
        ".gitignore": "__pycache__/\nruns/\nprivate*\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    physics(folder)
    return folder


def physics(folder: Path, **changes: object) -> None:
    """Write what a branch changes."""
    lines = [f"{name} = {value!r}\n" for name, value in {**PHYSICS, **changes}.items()]
    (folder / "curry_train" / "physics.py").write_text("".join(lines))


def commit(repository: Path, branch: str, start: str = "main") -> None:
    """Commit everything to a branch (made from `start` when it is new), and go back to main."""
    if branch != start:
        git(repository, "checkout", "-q", "-B", branch)
    git(repository, "add", "--all")
    git(repository, "commit", "-q", "--allow-empty", "-m", branch)
    if branch != start:
        git(repository, "checkout", "-q", start)


def git(repository: Path, *words: str) -> str:
    """Run git with a name and return what it says."""
    name = {
        f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    done = subprocess.run(
        ["git", "-C", str(repository), *words],
        env={**os.environ, **name},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout

"""The first command of the README, whole, in an environment that is already there."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INIT = ROOT / "skills" / "start-project" / "scripts" / "init.py"
pytestmark = pytest.mark.slow
CPU_SECONDS = 240
VAL_LOSS = 1.75
LIMITED_ABOVE = 1.9  # as in template/tests/test_quickstart.py
EPOCHS = 3


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """(project, result, process CPU seconds) of `init.py PROJECT --train`."""
    project = tmp_path_factory.mktemp("first steps") / "demo"
    before = children_seconds()
    command = [sys.executable, str(INIT), str(project), "--no-install", "--python", sys.executable]
    done = subprocess.run([*command, "--train", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return project, json.loads(done.stdout), children_seconds() - before, done.stderr


def test_the_quickstart_learns_within_its_budget(quickstart):
    project, result, seconds, told = quickstart
    assert result["val_loss"] < VAL_LOSS < result["loss_first"]
    assert result["loss_last"] < 2.0 and result["tokens_per_s"] > 0
    assert seconds < CPU_SECONDS, f"{seconds:.0f} CPU seconds"
    run = project / result["run"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (prepared,) = (project / ".cache" / "data").glob("*/manifest.json")
    tokens = json.loads(prepared.read_text())["splits"]["train"]["tokens"]
    assert rows[-1]["tokens"] <= EPOCHS * tokens
    halfway = next(row["val/loss"] for row in rows if row["step"] == 500)
    assert halfway < LIMITED_ABOVE, "the model limited to two tokens does not get there"
    assert rows[-1]["val/loss"] == result["val_loss"] and rows[-1]["val/bpb"] == result["val_bpb"]
    print(f"val/loss {result['val_loss']:.4f}, {seconds:.0f} CPU seconds")


def test_the_end_of_the_quickstart_says_what_a_newcomer_needs(quickstart):
    _, result, _, told = quickstart
    for words in ("GPU", "val/loss", "val/bpb", "tokens/s", "tensorboard --logdir", result["run"]):
        assert words in told, words

"""`make smoke` of a fresh project: text, training, resume, sample."""

import json
import subprocess
import sys
from pathlib import Path

INIT = Path(__file__).resolve().parents[2] / "skills" / "start-project" / "scripts" / "init.py"


def test_the_smoke_run_of_a_new_project_resumes_and_samples(tmp_path):
    project = tmp_path / "demo"
    command = [sys.executable, str(INIT), str(project), "--no-install"]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run(
        ["make", "smoke", f"PYTHON={sys.executable}"], cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "smoke: ok" in done.stdout
    (run,) = (project / "runs").glob("smoke-*")
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 50

"""What a check says: verdict, numbers, report.json (schema 1), at most 15 lines, the ledger."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .check_ids import CHECK_IDS, is_check_id

SCHEMA = 1
VERDICTS = ("pass", "fail", "unclear", "skipped")
EXIT_CODES = {"pass": 0, "fail": 1, "unclear": 3}
FIX_KEYS = {"file", "line", "text"}
MAX_LINES = 15
MAX_WIDTH = 160
FAILED_WIDTH = 320  # of what is to be done: a failed check with the line to change, and next
NOT_FINITE = ("nan", "inf", "-inf")  # numbers that plain() writes as words
BUNDLE = Path(__file__).resolve().parents[4]


@dataclass
class Report:
    """Checks and numbers of one run; the verdict follows from the checks."""

    skill: str
    summary: str = ""
    checks: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    evidence: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    artifacts: list[str] = field(default_factory=list)
    exit_code: int | None = None
    """Instead of the verdict's own, for a report on runs of which some could not start."""

    def check(
        self,
        id: str,
        verdict: str,
        *,
        value: Any = None,
        threshold: Any = None,
        unit: str | None = None,
        message: str = "",
        fix: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one finding. `fix` is {file, line, text}: where to change what."""
        if not is_check_id(id):
            raise ValueError(f"check id {id!r}; it must be a kebab-case word")
        if self.skill != "custom-check" and id not in CHECK_IDS:
            raise ValueError(f"check id {id!r} is not in kit/check_ids.py; add it with its meaning")
        if verdict not in VERDICTS:
            raise ValueError(f"verdict {verdict!r} of {id}; allowed: {', '.join(VERDICTS)}")
        if fix is not None and not (isinstance(fix, Mapping) and set(fix) == FIX_KEYS):
            raise ValueError(f"fix {fix!r} of {id}; allowed: file, line, text, as a dict")
        self.checks.append(
            {
                "id": id,
                "verdict": verdict,
                "value": value,
                "threshold": threshold,
                "unit": unit,
                "message": message,
                "fix": None if fix is None else dict(fix),
            }
        )

    @property
    def verdict(self) -> str:
        """fail if any check failed, unclear if any is or none was made, else pass."""
        found = {check["verdict"] for check in self.checks}
        if "fail" in found:
            return "fail"
        return "pass" if found - {"skipped"} == {"pass"} else "unclear"

    def to_dict(self, *, config_hash: str | None, git_sha: str | None, env: dict) -> dict[str, Any]:
        """Give the JSON object of schema 1."""
        return plain(
            {
                "schema": SCHEMA,
                "skill": self.skill,
                "version": bundle_version(),
                "verdict": self.verdict,
                "summary": self.summary,
                "checks": self.checks,
                "numbers": self.numbers,
                "evidence": self.evidence,
                "next": self.next,
                "artifacts": self.artifacts,
                "target": {"config_hash": config_hash, "git_sha": git_sha},
                "env": env,
            }
        )


def plain(value: Any) -> Any:
    """Turn a value into strict JSON; non-finite numbers become strings, tensors lists."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8", newline="\n") as file:
        json.dump(value, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def append_ledger(project: Path, report: Mapping[str, Any]) -> None:
    """Add one line to runs/checks/ledger.jsonl: which configuration has passed which skill."""
    entry = {
        "skill": report["skill"],
        "verdict": report["verdict"],
        "config_hash": report["target"]["config_hash"],
        "time": time.time(),
    }
    path = project / "runs" / "checks" / "ledger.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(entry) + "\n").encode())  # one write a line
    finally:
        os.close(descriptor)


def render(report: Mapping[str, Any], path: Path, code: int | None = None) -> str:
    """Give the text: at most MAX_LINES lines, every failed id among them, verdict and path last."""
    order = {"fail": 0, "unclear": 1, "pass": 2, "skipped": 3}
    checks = sorted(report["checks"], key=lambda check: order[check["verdict"]])
    extra = [_one_line(f"  {line}") for line in report["evidence"][:3]]
    extra += [_one_line(f"  next: {line}", FAILED_WIDTH) for line in report["next"][:2]]
    lines = [_one_line(f"{report['skill']}: {report['summary']}")]
    room = MAX_LINES - len(lines) - len(extra) - 1
    if len(checks) > room:
        shown, hidden = checks[: room - 2], checks[room - 2 :]
        failed = [check["id"] for check in hidden if check["verdict"] == "fail"]
        lines += [_check_line(check) for check in shown]
        lines += [f"  also fail: {', '.join(failed)}"] if failed else []
        lines += [f"  {len(hidden)} more checks in the report"]
    else:
        lines += [_check_line(check) for check in checks]
    verdict = report["verdict"]
    code = EXIT_CODES[verdict] if code is None else code
    return "\n".join([*lines, *extra, f"verdict: {verdict} (exit {code}), report {path}"])


def _one_line(text: str, width: int = MAX_WIDTH) -> str:
    flat = text[:1] + " ".join(text[1:].split("\n"))
    return flat if len(flat) <= width else flat[: width - 3] + "..."


def _check_line(check: Mapping[str, Any]) -> str:
    value, unit, threshold, fix = (check[key] for key in ("value", "unit", "threshold", "fix"))
    line = f"  {check['verdict']:<8} {check['id']}"
    line += "" if value is None else f" {_short(value)}"
    line += f" {unit}" if unit and value is not None else ""
    compared = threshold is not None and (not isinstance(value, str) or value in NOT_FINITE)
    line += f" (threshold {_short(threshold)})" if compared and value is not None else ""
    line += f": {check['message']}" if check["message"] else ""
    place = f" -> {fix['file']}:{fix['line']}: {fix['text']}" if fix else ""
    width = FAILED_WIDTH if check["verdict"] == "fail" else MAX_WIDTH
    return _one_line(line, max(width - len(place), MAX_WIDTH // 2)) + " ".join(place.split("\n"))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def bundle_version() -> str:
    """Read the bundle's one version; a skill folder that was copied alone has none."""
    try:
        return json.loads((BUNDLE / "plugin.json").read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError):
        return "unknown"


def git_sha(folder: Path) -> str | None:
    """Name the commit that a folder stands on; None outside git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def environment(device: Any, seed: int | None) -> dict[str, Any]:
    """Say what the numbers were measured on."""
    torch = sys.modules.get("torch")
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "torch": str(torch.__version__) if torch else None,
        "threads": torch.get_num_threads() if torch else None,
        "device": str(device) if device is not None else None,
        "device_name": device_name(device),
        "seed": seed,
    }


def device_name(device: Any) -> str | None:
    """Name the hardware: the GPU's name, or the CPU's model."""
    if device is None:
        return None
    if device.type == "cuda":
        return sys.modules["torch"].cuda.get_device_name(device)
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = ""
    models = [
        line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")
    ]
    return models[0] if models else platform.processor() or platform.machine()

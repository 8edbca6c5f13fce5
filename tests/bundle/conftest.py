"""A small bundle in which every lint finds nothing; tests break it on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bundle.lint_skills import PLACEHOLDER_SENTENCE

BODY = "\n".join(f"Line {number} of the explanation." for number in range(40))
SKILL = f"""---
name: measure-step
description: Measure one step. Use when training feels slow.
license: Apache-2.0
---
# Measure step

Times one step of `train.py`. Not for finding the cause, see the skill `measure-step`.

## Run

```
python3 "${{CLAUDE_SKILL_DIR}}/scripts/measure_step.py" --steps 10 --project DIR
```

{PLACEHOLDER_SENTENCE}

## Read the result

| number | pass | meaning |
|---|---|---|
| `spread` | below 0.25 | steps take the same time |

It writes `runs/measure/report.json` and calls `build_runtime()` of `curry_train.runtime`.

{BODY}

## If it fails

Set `run.max_steps=20` or `model=tiny`; see `references/timing.md`.

## Traps

- A busy machine: the spread grows.

## References

- `references/timing.md`: how time is taken.
"""
SCRIPT = '''"""Measure one step."""

import argparse

THRESHOLDS = {"spread": 0.25}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--project")
    parser.parse_args()
    print("runs/measure/report.json")


if __name__ == "__main__":
    main()
'''
CONFIG = '''"""Settings."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelConfig:
    hidden_size: int = 8


@dataclass(frozen=True)
class RunConfig:
    max_steps: int = 10


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    run: RunConfig = field(default_factory=RunConfig)
'''
TRAIN = '''"""Train."""

import argparse

from curry_train.runtime import build_runtime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("overrides", nargs="*")
    build_runtime(parser.parse_args().overrides)


if __name__ == "__main__":
    main()
'''
NORM = '''"""Normalisation."""

from torch import Tensor, nn


class Norm(nn.Module):
    """Scale to unit mean square: [..., D] in, the same out."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def scale(x: Tensor, *, factor: float) -> Tensor:
    """Multiply by a factor; x is [B, S, D]."""
    return x * factor
'''
README = """# Bundle

Run `python3 skills/measure-step/scripts/measure_step.py --steps 3` or `/curry-train:measure`.

```
fabric run --devices=2 train.py run.max_steps=3 model=tiny
python -m curry_train.config --check
make smoke
```

```python
from curry_train.runtime import build_runtime
```
"""
FILES = {
    "skills/measure-step/SKILL.md": SKILL,
    "skills/measure-step/scripts/measure_step.py": SCRIPT,
    "skills/measure-step/references/timing.md": "# Timing\n\nSee `train.py`.\n",
    "commands/measure.md": (
        "---\ndescription: Measure one step\nargument-hint: N\n"
        "disable-model-invocation: true\n---\n"
        'Run `python3 "${CLAUDE_PLUGIN_ROOT}/skills/measure-step/scripts/measure_step.py"`, '
        "then follow the skill `measure-step`.\n"
    ),
    ".claude-plugin/plugin.json": json.dumps({"name": "curry-train", "version": "1.2.3"}) + "\n",
    "plugin.json": json.dumps({"name": "curry-train", "version": "1.2.3"}) + "\n",
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3\n\n- First.\n",
    "README.md": README,
    "template/pyproject.toml": '[project]\nname = "x"\nversion = "1.2.3"\n',
    "template/Makefile": "smoke:\n\tpython train.py\n",
    "template/train.py": TRAIN,
    "template/configs/model/tiny.yaml": "hidden_size: 8\n",
    "template/curry_train/__init__.py": '"""Package."""\n\n__version__ = "1.2.3"\n',
    "template/curry_train/config.py": CONFIG
    + '\n\nif __name__ == "__main__":\n'
    + "    import argparse\n\n    parser = argparse.ArgumentParser()\n"
    + '    parser.add_argument("--check", action="store_true")\n    parser.parse_args()\n',
    "template/curry_train/runtime.py": (
        '"""The seam."""\n\nMODELS = {"norm": "curry_train.layers.norm:Norm"}\n\n\n'
        'def build_runtime(overrides: list[str]) -> None:\n    """Build."""\n'
    ),
    "template/curry_train/layers/__init__.py": '"""Layers."""\n',
    "template/curry_train/layers/norm.py": NORM,
    "template/curry_train/parallel/__init__.py": '"""Parallel."""\n',
    "template/curry_train/parallel/dims.py": '"""Sizes."""\n\nimport math\n\nmath.inf\n',
}


class Planted:
    """A tree in which files can be written and edited."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, name: str, text: str | bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert old in text, f"{name} does not contain {old!r}"
        self.write(name, text.replace(old, new))

    def append(self, name: str, text: str) -> None:
        self.write(name, (self.root / name).read_text() + text)


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return Planted(tmp_path / "bundle")

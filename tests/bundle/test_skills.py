"""The lints of skills and commands: silent on this bundle, loud on a planted fault."""

from __future__ import annotations

import pytest
from bundle import lint_skills, references
from bundle.tree import ROOT

LINTS = [*lint_skills.LINTS, *references.LINTS]
SKILL = "skills/measure-step/SKILL.md"
SCRIPT = "skills/measure-step/scripts/measure_step.py"
COMMAND = "commands/measure.md"


@pytest.mark.parametrize("lint", LINTS, ids=lambda lint: lint.__name__)
def test_the_bundle_has_no_problem(lint):
    problems = lint(ROOT)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("lint", LINTS, ids=lambda lint: lint.__name__)
def test_the_planted_bundle_has_no_problem(lint, planted):
    problems = lint(planted.root)
    assert not problems, "\n".join(problems)


def edit(name, old, new):
    return lambda planted: planted.edit(name, old, new)


def write(name, text=""):
    return lambda planted: planted.write(name, text)


def append(name, text):
    return lambda planted: planted.append(name, text)


def many_skills(planted):
    for number in range(80):
        planted.write(
            f"skills/skill-{number}/SKILL.md",
            f"---\nname: skill-{number}\ndescription: {'Do a thing of this kind. ' * 3}\n---\n",
        )


DESCRIPTION = "Measure one step. Use when training feels slow."
FAULTS = [
    ("listing", many_skills, "at most 7000"),
    ("layout", write("skills/measure-step/deep/SKILL.md"), "immediate folder"),
    ("layout", write("template/.claude/skills/x/SKILL.md"), "immediate folder"),
    ("layout", write("skills/other/skill.md"), "exact name SKILL.md"),
    ("layout", write("skills/other/skill.md"), "has no SKILL.md"),
    ("layout", write("skills/flat.md"), "folders only"),
    ("layout", write("skills/other/SKILL.md"), "no main script scripts/other.py"),
    ("frontmatter", edit(SKILL, "license:", "argument-hint:"), "argument-hint is not portable"),
    ("frontmatter", edit(SKILL, "license: Apache-2.0", "license: MIT\nlicense: MIT"), "twice"),
    ("frontmatter", edit(SKILL, "license: Apache-2.0", "- a list"), "not 'key: value'"),
    ("frontmatter", edit(SKILL, "---\nname", "name"), "no frontmatter"),
    ("frontmatter", edit(SKILL, "name: measure-step", "name: other"), "must equal the folder"),
    ("frontmatter", edit(SKILL, "slow.", "slow " + "x" * 60 + "."), "at most 100"),
    ("frontmatter", edit(SKILL, "one step. Use", "one: step. Use"), "colon with a space"),
    ("frontmatter", edit(SKILL, "feels slow", "feels <slow>"), "angle bracket"),
    ("frontmatter", edit(SKILL, "Use when", "Helpful if"), "Use when"),
    ("frontmatter", edit(SKILL, DESCRIPTION, ""), "is not '<Verb phrase>"),
    ("names", write("commands/measure-step.md", "---\n---\n"), "same name"),
    ("names", write("skills/review/SKILL.md", "---\nname: review\n---\n"), "built-in name"),
    ("bodies", edit(SKILL, "## Traps", "## Pitfalls"), "sections are"),
    ("bodies", edit(SKILL, "## Traps", "## Notes\n\n## Traps"), "sections are"),
    ("bodies", edit(SKILL, "Not for finding", "Not finding"), "not for"),
    ("bodies", edit(SKILL, "- A busy", "- a\n- b\n- c\n- d\n- A busy"), "has 5 items"),
    ("bodies", edit(SKILL, "Line 7 ", "\n" * 200 + "Line 7 "), "60 to 200"),
    ("bodies", edit(SKILL, "of the explanation.\n", ""), "60 to 200"),
    ("bodies", edit(SKILL, "is not expanded", "stays"), "lacks the sentence"),
    ("bodies", edit(SKILL, 'python3 "${CLAUDE', 'python3 "${CODEX'), "has no block"),
    ("bodies", edit(SKILL, "# Measure step\n", "\n"), "one title"),
    ("bodies", edit(SKILL, "| number |", "```\nOUTPUT\n```\n\n| number |"), "real output"),
    ("thresholds", edit(SKILL, "below 0.25", "below 0.5"), "is 0.25"),
    ("thresholds", edit(SCRIPT, '"spread": 0.25', '"spread": 0.3'), "is 0.3"),
    ("thresholds", edit(SCRIPT, '"spread"', '"width"'), "`width`"),
    ("command_pages", edit(COMMAND, "true", "false"), "disable-model-invocation"),
    ("command_pages", edit(COMMAND, "argument-hint: N\n", ""), "argument-hint"),
    ("command_pages", edit(COMMAND, ": N\n", ": [--steps N] [N]\n"), "no plain text to YAML"),
    ("command_pages", edit(COMMAND, ": N\n", ": N: steps\n"), "no plain text to YAML"),
    ("command_pages", edit(COMMAND, "disable-", "model: opus\ndisable-"), "key model"),
    ("command_pages", edit(COMMAND, "measure-step", "other"), "names no skill"),
    ("command_pages", append(COMMAND, "\n\n" + "text\n" * 15), "15 lines"),
    ("command_pages", edit(COMMAND, "one step", "one step" + " or more" * 20), "1 to 80"),
    ("cross_references", edit(SKILL, "the skill `measure-step`", "the skill `tune`"), "tune"),
    ("cross_references", append("README.md", "\nsee curry-train:tune\n"), "tune"),
    ("versions", edit("plugin.json", "1.2.3", "1.2.4"), "versions differ"),
    ("versions", edit(".claude-plugin/plugin.json", "1.2.3", "1.2.4"), "versions differ"),
    ("versions", edit("CHANGELOG.md", "## 1.2.3", "## 1.3.0\n\n## 1.2.3"), "versions differ"),
    ("versions", edit("template/pyproject.toml", "1.2.3", "1"), "versions differ"),
    ("versions", edit("template/curry_train/__init__.py", "1.2.3", "1"), "versions differ"),
    ("versions", write("pyproject.toml", '[project]\nversion = "1"\n'), "versions differ"),
    ("text_files", write("a.md", b"\xef\xbb\xbfa\n"), "byte order mark"),
    ("text_files", write("a.md", b"a\r\nb\n"), "carriage return"),
    ("text_files", write("a.md", b"a"), "does not end"),
    ("references", edit(SKILL, "--steps 10", "--stepz 10"), "--stepz"),
    ("references", edit(SKILL, "scripts/measure_step.py", "scripts/gone.py"), "gone.py"),
    ("references", edit(SKILL, "Times one step of `train.py`", "See `trane.py`"), "trane.py"),
    ("references", edit(SKILL, "`references/timing.md`: how", "`references/no.md`: how"), "no.md"),
    ("references", edit(SKILL, "run.max_steps=20", "run.max_stepz=20"), "run.max_stepz"),
    ("references", edit(SKILL, "run.max_steps=20", "run.max_steps=soon"), "is int"),
    ("references", edit(SKILL, "model=tiny", "model=huge"), "configs/model/huge.yaml"),
    ("references", edit(SKILL, "runs/measure/report", "runs/measure/raport"), "raport"),
    ("references", edit(SKILL, "`build_runtime()`", "`bild_runtime()`"), "bild_runtime"),
    ("references", edit(SKILL, "curry_train.runtime", "curry_train.runtim"), "runtim"),
    ("references", edit(COMMAND, "measure_step.py", "other.py"), "other.py"),
    ("references", edit("README.md", "--devices=2", "--devicez=2"), "--devicez"),
    ("references", edit("README.md", "run.max_steps=3", "run.maxsteps=3"), "run.maxsteps"),
    ("references", edit("README.md", "make smoke", "make smok"), "make target smok"),
    ("references", edit("README.md", "-m curry_train.config", "-m curry_train.conf"), "conf"),
    ("references", edit("README.md", "--check", "--chek"), "--chek"),
    ("references", edit("README.md", "import build_runtime", "import bild"), "has no bild"),
    ("references", append("README.md", "\nSet `CURRY_TRAIN_X=1`.\n"), "CURRY_TRAIN_X"),
    ("references", append("README.md", "\nSee [it](docs/gone.md).\n"), "docs/gone.md"),
    ("references", append("README.md", "\nPass `--fast`.\n"), "--fast"),
    ("references", append("README.md", "\nSee `model.hiden_size`.\n"), "model.hiden_size"),
    ("references", append("README.md", "\nSee `NormLayer`.\n"), "NormLayer"),
    ("references", append("README.md", "\nSee `skills/*/gone.py`.\n"), "gone.py"),
    ("references", append("README.md", "\nSee `skills/FILE/gone.py`.\n"), "gone.py"),
    ("references", append("README.md", "\nSee `references/train.py`.\n"), "references"),
    ("references", append(SKILL, "\n`measure_step.py --fast`\n"), "--fast"),
    ("references", edit(SCRIPT, "parser.parse_args()", "raise SystemExit(3)"), "--help does not"),
    ("helps", edit(SCRIPT, "import argparse", "import argparse\nimport numpy"), "standard library"),
    ("helps", edit(SCRIPT, "parser.parse_args()", "raise SystemExit(3)"), "standard library"),
]


@pytest.mark.parametrize(("name", "fault", "words"), FAULTS, ids=[f"{n}-{w}" for n, _, w in FAULTS])
def test_a_planted_fault_is_named(name, fault, words, planted):
    lint = next(lint for lint in LINTS if lint.__name__ == name)
    fault(planted)
    problems = lint(planted.root)
    assert any(words in problem for problem in problems), problems

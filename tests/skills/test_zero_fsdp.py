"""Levels of a project are measured and proved, planted faults are named; own fully_shard models."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from skills.targets import processes
from skills.targets.processes import LANGUAGE_MODEL, ROOT, TARGETS

SCRIPT = ROOT / "skills" / "zero-fsdp" / "scripts" / "zero_fsdp.py"
SHARDED = f"{TARGETS / 'sharded.py'}:"
sys.path.insert(0, str(SCRIPT.parent))
import sharded_ranks  # noqa: E402
import target_rules  # noqa: E402
import zero_fsdp  # noqa: E402

from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402

sys.dont_write_bytecode = False  # the script sets it for itself
SMALL = ["--world", 2, "--ranks", 2, "--set", "model.num_hidden_layers=8"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


def measure(project, *words, cwd):
    done = processes.run(SCRIPT, "--project", project, *SMALL, *words, "--json", cwd=cwd)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == {"pass": 0, "fail": 1}[report["verdict"]]
    return report, {check["id"]: check for check in report["checks"]}


def failed(checks):
    return {id for id, check in checks.items() if check["verdict"] == "fail"}


def test_levels_are_measured_equal_and_as_planned(project, tmp_path):
    report, checks = measure(project, "--memory", 80, cwd=tmp_path)
    assert report["verdict"] == "pass", report["checks"]
    assert checks["zero-bytes"]["value"] == 0.0 and checks["zero-gradients"]["value"] < 1e-12
    levels = report["numbers"]["levels"]
    whole = levels[0]["measured"][0]
    assert whole["optimizer"] == 2 * whole["parameters"] == 2 * whole["gradients"]
    # Between steps fully_shard keeps rows of parameters at zero 2 too.
    everything = {"optimizer", "gradients", "parameters"}
    divided = [set(), {"optimizer"}, everything, everything]
    for level, parts in zip(levels, divided, strict=True):
        assert len(level["measured"]) == 2
        for rank in level["measured"]:
            for part in ("parameters", "gradients", "optimizer"):
                even = whole[part] / 2 if part in parts else whole[part]
                assert rank[part] == level["ideal"][part] == level["plan"][part] == even
            assert rank["between_steps"] == rank["parameters"]
    gathered = [level["measured"][0]["gathered"] for level in levels]
    assert gathered[:2] == [0, 0] and gathered[2] == whole["parameters"] > gathered[3] > 0
    assert report["numbers"]["recommended"] == 0 and report["next"] == []
    plan = report["numbers"]["plan"]
    assert plan["3"]["parameters"] * 2 == plan["0"]["parameters"]
    assert report["target"]["config_hash"]
    (picture,) = report["artifacts"]
    with open(picture, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


PLANTED = {
    "zero-averaging zero-gradients": [
        ("parallel/data_parallel.py", "    module.set_gradient_divide_factor(1.0)\n", ""),
    ],
    "zero-bytes zero-gradients zero-memory zero-resharding": [
        ("plan.py", "(total.shard if zero else total.local)", "total.local"),
        ("parallel/data_parallel.py", "mesh.size(holders) // (ranks if zero else 1)",
         "mesh.size(holders)"),
        ("parallel/data_parallel.py", "drop = reshards(config)", "drop = False"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("ids", PLANTED)
def test_faults_planted_in_a_project_are_named(ids, project, tmp_path):
    faulty = tmp_path / "faulty"
    shutil.copytree(project, faulty, ignore=shutil.ignore_patterns("runs"))
    for name, sound, planted in PLANTED[ids]:
        path = faulty / "curry_train" / name
        text = path.read_text(encoding="utf-8")
        assert text.count(sound) == 1, "the code was rewritten: plant the fault anew"
        path.write_text(text.replace(sound, planted), encoding="utf-8")
    words = ["--memory", "20MiB"] if "memory" in ids else []
    report, checks = measure(faulty, *words, cwd=tmp_path)
    assert failed(checks) == set(ids.split()), checks
    if "averaging" in ids:
        assert "zero 2 divides by 2; zero 3 divides by 2" in checks["zero-averaging"]["message"]
    else:
        assert "norm grad_norm" in checks["zero-gradients"]["message"]
        assert "zero 1 optimizer" in checks["zero-bytes"]["message"]
        assert "zero 0" not in checks["zero-gradients"]["message"]


@pytest.mark.parametrize(
    ("found", "wanted", "ranks", "factor"),
    [(1.0, 4.0, 4, 4), (1.0, 2.0, 4, 2), (1.0, 1.0, 4, None), (1.0, 2.5, 4, None),
     (0.0, 1.0, 4, None), (1.0, 3.0, 4, None)],
)  # fmt: skip
def test_a_whole_factor_of_the_ranks_is_averaging(found, wanted, ranks, factor):
    gap = type("Gap", (), {"found": found, "wanted": wanted})()
    assert zero_fsdp.averaging({"ranks": ranks}, gap) == factor


def judged(name, loop=None, ranks=2, max_norm=None):
    spec = SHARDED + loop if loop else None
    found = sharded_ranks.look(SHARDED + name, spec, TARGETS, ranks, 0)
    report = Report("zero-fsdp")
    target_rules.judge(report, found, zero_fsdp.THRESHOLDS, max_norm)
    return found, {check["id"]: check for check in report.checks}


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("build", ""),
        ("reduces_in_float32", ""),
        ("reduces_in_bf16", "zero-reduce-dtype"),
        ("without_root", "zero-root"),
        ("blocks_alone", "zero-root zero-unsharded"),
        ("nothing_sharded", "zero-root zero-unsharded"),
        ("one_group", "zero-giant-group"),
        ("every_layer", "zero-small-groups"),
        ("optimizer_first", "zero-optimizer-before"),
    ],
)
def test_a_fault_of_a_sharded_model_is_named_and_nothing_else(name, ids):
    found, checks = judged(name)
    assert failed(checks) == set(ids.split())
    assert found[0]["total"] == 5472 and found[0]["held"] == 27
    if name == "blocks_alone":
        left = 32 * 16 + 32 * 16 + 32  # embedding, head and its bias
        assert checks["zero-unsharded"]["value"] == left / 5472
        assert "embedding.weight" in checks["zero-unsharded"]["message"]


@pytest.mark.parametrize(
    ("name", "loop", "ranks", "max_norm", "wrong"),
    [
        ("build", "sound_clip", 2, None, None),
        ("build", "no_clip", 2, None, None),
        ("build", "clips_own_part", 2, None, "each its own norm"),
        ("build", "counts_replicas", 2, 1.0, None),
        ("replicated", "sound_clip", 4, None, None),
        ("replicated", "counts_replicas", 4, 1.0, "copies are counted twice"),
    ],
)
def test_a_clip_is_by_the_norm_of_the_whole_gradient(name, loop, ranks, max_norm, wrong):
    found, checks = judged(name, loop, ranks, max_norm)
    assert failed(checks) == ({"zero-clip"} if wrong else set()), checks["zero-clip"]
    if wrong:
        assert wrong in checks["zero-clip"]["message"]
    if "counts" in loop and wrong:
        assert found[0]["clip"]["after"] == pytest.approx(0.5**0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "loop", "message"),
    [
        ("no_tuple", None, "returned Model; it must return"),
        ("build", "never_steps", "took no optimizer step over 2 batches"),
        ("missing", None, "has no function missing"),
    ],
)
def test_functions_that_cannot_be_used_are_told(name, loop, message):
    with pytest.raises(UsageError, match=message):
        judged(name, loop)


def test_a_target_end_to_end(tmp_path):
    words = ["--target", SHARDED + "one_group", "--ranks", 2]
    done = processes.run(SCRIPT, *words, cwd=tmp_path)
    assert done.returncode == 1 and "fail     zero-giant-group 1 of the" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", 1], "it takes 2 to 16"),
        (["--world", 0], "it takes at least 1"),
        (["--memory", "much"], "it takes bytes"),
        (["--device", "cuda"], "ranks are forked on the CPU"),
        (["--loop", SHARDED + "no_clip"], "it has its own step"),
        (["--target", LANGUAGE_MODEL, "--memory", 80], "plans belong to a project"),
        (["--target", LANGUAGE_MODEL, "--max-norm", 0], "it takes a number above 0"),
        (["--world", 3, "--set", "parallel.dp_shard=2"], "make 2 ranks, but 3 were started"),
    ],
)
def test_bad_flags_exit_with_2(words, message, project, tmp_path):
    place = [] if "--target" in words else ["--project", project]
    done = processes.run(SCRIPT, *place, *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr

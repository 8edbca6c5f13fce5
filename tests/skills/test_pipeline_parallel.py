"""Schedules on the clock against hand and formula; planted faults of a pipeline are named."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from skills.targets import processes
from skills.targets.processes import LANGUAGE_MODEL, ROOT

SCRIPT = ROOT / "skills" / "pipeline-parallel" / "scripts" / "pipeline_parallel.py"
sys.path.insert(0, str(SCRIPT.parent))
import schedule_clock as clock  # noqa: E402
import stage_times  # noqa: E402

from kit.fewer_ranks import fewer_axes  # noqa: E402

SMALL = ["--set", "model.num_hidden_layers=8", "data.seq_len=32", "parallel.pp=2"]
EVEN = clock.Times(1.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline") / "project"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "runs", ".cache")
    shutil.copytree(ROOT / "template", folder, ignore=ignored)
    return folder


def look(project, *words, cwd):
    done = processes.run(SCRIPT, "--project", project, *SMALL, *words, "--json", cwd=cwd)
    assert done.returncode in (0, 1, 3), done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == {"pass": 0, "fail": 1, "unclear": 3}[report["verdict"]]
    return report, {check["id"]: check for check in report["checks"]}, done.stderr


def failed(checks):
    return {id for id, check in checks.items() if check["verdict"] == "fail"}


@pytest.mark.parametrize(("ranks", "many"), [(2, 8), (4, 8), (4, 16)])
def test_bubbles_of_even_stages_are_those_of_the_papers(ranks, many):
    way = ranks - 1
    idle = {"gpipe": 3 * way, "1f1b": 3 * way, "interleaved1f1b": 3 * way}
    idle |= dict.fromkeys(("interleaved_zb", "zbv", "dualpipev"), way)
    for schedule in clock.SCHEDULES:
        order = clock.order_of(schedule, ranks, many)
        each = 1 if schedule in ("gpipe", "1f1b") else 2
        run = clock.run(order, dict.fromkeys(range(ranks * each), EVEN))
        work = 3 * many * each
        assert run.work == [work] * ranks and run.step == work + idle[schedule]
        assert run.idle == pytest.approx(idle[schedule] / run.step)
        passes = [one for rank in order for one in rank]
        assert len(passes) == len(set(passes)), "no pass twice"


def test_a_step_of_uneven_stages_by_hand():
    times = {0: clock.Times(1, 1, 1), 1: clock.Times(2, 2, 2)}
    run = clock.run(clock.order_of("gpipe", 2, 2), times)
    ends = {(one.kind, one.stage, one.micro_batch): end for _, one, _, end in run.spans}
    assert [ends[key] for key in (("F", 1, 1), ("B", 1, 0), ("B", 0, 0), ("B", 0, 1))] == [
        5, 9, 11, 15,
    ]  # fmt: skip
    assert (run.step, run.work) == (15, [6, 12]) and run.idle == pytest.approx(0.4)


def test_weights_come_after_inputs_and_a_circle_is_told():
    order = clock.order_of("zbv", 2, 4)
    assert {one.kind for rank in order for one in rank} >= {"F", "I", "W"}
    run = clock.run(order, dict.fromkeys(range(4), EVEN))
    ends = {one: end for _, one, _, end in run.spans}
    for one, end in ends.items():
        if one.kind == "W":
            assert end > ends[one._replace(kind="I")]
    for kinds in ("BF", "FWI"):
        with pytest.raises(ValueError, match="does not come to an end"):
            clock.run([[clock.Pass(0, kind, 0) for kind in kinds]], {0: EVEN})


def test_own_orders_are_torchs():
    from torch.distributed.pipelining import schedules

    stage = clock._Stage(0, 4, 4)
    made = schedules.ScheduleGPipe(stage, 6, loss_fn=lambda a, b: 0)._get_pipeline_order()
    for rank, own in enumerate(clock.order_of("gpipe", 4, 6)):
        assert own == list(clock._flat(made[rank]))
    assert clock.order_of("1f1b", 4, 3) == clock.order_of("gpipe", 4, 3)
    first = [one.kind for one in clock.order_of("1f1b", 4, 6)[0]]
    assert "".join(first) == "FFFFBFBFBBBB"


def test_what_is_made_again_is_added_to_backward():
    class Layout:
        split = (range(2), range(2, 3))
        parallel = type("Parallel", (), {"overlap": False})()

        def parts_of(self, stage):
            return [["embedding", 0, 1], [2, "head"]][stage]

        def again(self, layer):
            return ("none", "full", "selective")[layer]

    parts = {layer: clock.Times(10.0, 10.0, 10.0) for layer in range(3)}
    parts |= {"embedding": clock.Times(0, 0, 0), "head": clock.Times(5, 5, 5)}
    found = stage_times.of_stages(Layout(), parts)
    assert found == {0: (20, 30, 20), 1: (15, 16, 15)}
    Layout.parallel.overlap = True
    assert stage_times.of_stages(Layout(), parts)[0] == (20, 50, 0)


@pytest.mark.parametrize(
    ("sizes", "most", "wanted"),
    [
        ("4 1 2 1 1 1", 8, "4 1 2 1 1 1"),
        ("4 2 8 2 2 4", 8, "4 1 1 1 2 2"),
        ("16 1 4 1 1 1", 4, "4 1 1 1 1 1"),
    ],
)
def test_small_layouts_keep_the_pipeline(sizes, most, wanted):
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    full, small = (dict(zip(names, map(int, s.split()), strict=True)) for s in (sizes, wanted))
    assert fewer_axes(full, most, ("pp",)) == small


def test_a_sound_pipeline_passes_and_its_numbers_are_right(project, tmp_path):
    words = ["parallel.schedule=zbv", "data.global_batch_size=16", "data.micro_batch_size=2"]
    report, checks, table = look(project, *words, "--proof-ranks", 2, cwd=tmp_path)
    assert report["verdict"] == "pass", report["checks"]
    assert set(checks) == {f"pipeline-{n}" for n in
                           ("refused", "bubble", "imbalance", "gradients", "losses")}  # fmt: skip
    assert checks["pipeline-gradients"]["value"] < 1e-12
    numbers = report["numbers"]
    rows = {row["schedule"]: row for row in numbers["schedules"]}
    assert list(rows) == list(clock.SCHEDULES) and numbers["micro_batches"] == 8
    for row in rows.values():
        assert row["bubble_clock_even"] == pytest.approx(row["bubble_formula"]), row
        assert row["bubble_clock"] >= row["bubble_clock_even"] - 0.02
        assert row["activation_bytes"][0] > 0
    assert rows["1f1b"]["in_flight"] == [2, 1] and rows["gpipe"]["in_flight"] == [8, 8]
    assert rows["1f1b"]["bubble_formula"] == pytest.approx(1 / 9)
    # Stages 0 and 3 are on rank 0, 1 and 2 on rank 1: a rank sends 2 x 8 states of 2 x 32 x 128.
    assert numbers["messages"] == [{"bytes": 16 * 2 * 32 * 128 * 4, "calls": 16}] * 2
    assert [s["stage"] for s in numbers["stages"]] == [0, 3, 1, 2]
    (picture,) = report["artifacts"]
    with open(picture, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    assert "* " in table and numbers["recommended"] in clock.SCHEDULES
    assert report["target"]["config_hash"]


PLANTED = {
    "pipeline-gradients": ("scale_grads=False", "scale_grads=True"),
    "pipeline-losses": (
        'self.loss(output, batch["labels"])', 'self.loss(output, batch["input_ids"])',
    ),
}  # fmt: skip


@pytest.mark.parametrize("id", PLANTED)
def test_a_fault_planted_in_the_pipeline_is_named(id, project, tmp_path):
    faulty = tmp_path / "faulty"
    shutil.copytree(project, faulty, ignore=shutil.ignore_patterns("runs"))
    path = faulty / "curry_train" / "parallel" / "pipeline_parallel.py"
    text, (sound, planted) = path.read_text(encoding="utf-8"), PLANTED[id]
    assert text.count(sound) == 1, "the pipeline was rewritten: plant the fault anew"
    path.write_text(text.replace(sound, planted), encoding="utf-8")
    words = ["data.global_batch_size=16", "data.micro_batch_size=2", "--proof-ranks", 2]
    _, checks, _ = look(faulty, *words, cwd=tmp_path)
    # Clipped updates and later losses follow wrong gradients.
    assert id in failed(checks) <= {id, "pipeline-losses"}, checks
    assert ("val/" in checks["pipeline-losses"]["message"]) == (id == "pipeline-losses")


def test_a_crash_of_the_ranks_is_a_finding(project, tmp_path):
    faulty = tmp_path / "faulty"
    shutil.copytree(project, faulty, ignore=shutil.ignore_patterns("runs"))
    path = faulty / "curry_train" / "parallel" / "pipeline_parallel.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("self.begin_step(runtime)", "raise KeyError('planted')"))
    _, checks, _ = look(faulty, "data.global_batch_size=32", "--proof-ranks", 2, cwd=tmp_path)
    assert "planted" in checks["pipeline-gradients"]["message"]
    assert "pipeline-gradients" in failed(checks)


def test_uneven_stages_and_few_micro_batches_are_told_apart(project, tmp_path):
    words = ["parallel.pp_split=[6,2]", "data.global_batch_size=32", "data.micro_batch_size=1"]
    report, checks, _ = look(project, *words, "--proof-ranks", 0, cwd=tmp_path)
    assert failed(checks) == {"pipeline-bubble", "pipeline-imbalance"}
    assert 1.4 < checks["pipeline-imbalance"]["value"] < 1.5
    assert "parallel.pp_split=auto" in checks["pipeline-imbalance"]["message"]
    rows = {row["schedule"]: row for row in report["numbers"]["schedules"]}
    assert rows["1f1b"]["bubble_clock_even"] < 0.04, "even stages would not stand idle"
    assert "names 2 stages" in rows["zbv"]["refused"][0]
    words = ["data.global_batch_size=8", "data.micro_batch_size=4"]
    report, checks, _ = look(project, *words, "--proof-ranks", 0, cwd=tmp_path)
    assert failed(checks) == {"pipeline-bubble"} and report["next"][0].startswith("parallel.sch")
    assert report["numbers"]["refused"]["dualpipev"][0].startswith("parallel.schedule: needs at")


@pytest.mark.parametrize(
    ("words", "message", "accepted"),
    [
        (["parallel.schedule=zbv", "parallel.reshard=true", "parallel.zero=3"],
         "computes weight gradients after", {"gpipe", "1f1b", "interleaved1f1b"}),
        (["parallel.schedule=dualpipev", "compile=true"], "one node to autograd",
         {"gpipe", "1f1b", "interleaved1f1b"}),
        (["model.tie_word_embeddings=true"], "different ranks", {"zbv", "dualpipev"}),
        (["model.tie_word_embeddings=true", "compile=true"], "different ranks", set()),
    ],
)  # fmt: skip
def test_a_refused_schedule_is_named_with_the_reason(words, message, accepted, project, tmp_path):
    report, checks, _ = look(project, *words, "--proof-ranks", 0, cwd=tmp_path)
    assert failed(checks) == {"pipeline-refused"}
    assert message in checks["pipeline-refused"]["message"] and "set " in report["next"][0]
    rows = {row["schedule"]: row for row in report["numbers"].get("schedules", [])}
    assert {name for name, row in rows.items() if not row["refused"]} == accepted


def test_overlap_is_not_judged_by_a_clock_without_messages(project, tmp_path):
    words = ["parallel.schedule=dualpipev", "parallel.overlap=true", "data.global_batch_size=32"]
    words += ["data.micro_batch_size=1", "--proof-ranks", 0]
    report, _, _ = look(project, *words, cwd=tmp_path)
    assert report["next"][0].startswith("overlap hides the messages of experts")
    rows = {row["schedule"]: row for row in report["numbers"]["schedules"]}
    assert rows["dualpipev"]["bubble_clock"] > 1.5 * rows["dualpipev"]["bubble_clock_even"]


def test_measured_times_and_a_larger_world(project, tmp_path):
    words = ["--measure", "--world", 4, "--proof-ranks", 0]
    words = ["data.global_batch_size=16", "data.micro_batch_size=1", *words]
    report, _, _ = look(project, *words, cwd=tmp_path)
    numbers = report["numbers"]
    assert numbers["unit"] == "seconds" and numbers["world"] == 4
    assert numbers["micro_batches"] == 8, "16 samples on 2 ranks of dp_shard"
    assert all(0 < work < 60 for work in numbers["work"])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--target", LANGUAGE_MODEL], 2, "a pipeline belongs to a project"),
        (["--world", 1], 2, "a pipeline has at least 2 ranks"),
        (["--proof-ranks", 1], 2, "it takes 0, or 2 and more"),
        (["--world", 3, "--set", "parallel.pp=2"], 2, "make 2 ranks, but 3 were started"),
        (["--set", "parallel.pp=2", "parallel.schdule=zbv"], 2, "did you mean"),
        (["--set", "parallel.pp=1"], 3, "add --set parallel.pp=N"),
    ],
)
def test_bad_words_and_no_pipeline(words, code, message, project, tmp_path):
    done = processes.run(SCRIPT, "--project", project, *words, cwd=tmp_path)
    assert done.returncode == code and message in done.stdout + done.stderr, done.stderr

"""The queue of jobs: kept and run again, one on a device at a time, ended with their runner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest
from skills.targets.processes import TARGETS, environment

from kit import runner
from kit.errors import UsageError

SCRIPT = TARGETS / "queue_of_jobs.py"
EVENTS = 'echo "start NAME $OMP_NUM_THREADS" >> EVENTS; BODY; echo "end NAME" >> EVENTS'


class Folder:
    """A project's folder, its jobs and what they wrote."""

    def __init__(self, path):
        self.path = path
        self.events = path / "events.txt"
        self.home = path / "runs" / "checks" / "jobs"

    def write(self, bodies, **settings):
        """Give each name a shell script as its job."""
        jobs = []
        for name, body in bodies.items():
            text = EVENTS.replace("BODY", body).replace("NAME", name)
            text = text.replace("EVENTS", str(self.events))
            command = ["/bin/sh", "-c", text]
            jobs.append({"name": name, "command": command, "config_hash": f"hash of {name}"})
        text = json.dumps({"jobs": jobs, **settings})
        (self.path / "jobs.json").write_text(text, encoding="utf-8")

    def start(self, *words):
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), "--jobs", "jobs.json", "--out", "out", *words],
            cwd=self.path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words):
        process = self.start(*words)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def lines(self):
        return self.events.read_text(encoding="utf-8").splitlines() if self.events.exists() else []

    def wait_for(self, *lines):
        deadline = time.monotonic() + 30
        while not set(lines) <= {" ".join(line.split()[:2]) for line in self.lines()}:
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.02)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def children(process):
    return psutil.Process(process.pid).children(recursive=True)


def gone(processes, within=0.5):
    """Tell whether none lives; one that nobody has waited for yet does not."""
    deadline = time.monotonic() + within
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_jobs_run_in_order_on_their_slots_and_a_second_call_does_nothing(folder):
    folder.write(dict.fromkeys("abcd", "sleep 0.2"), slots=2, guess_s=7.0)
    first = folder.run("--json")
    assert first.returncode == 0
    assert first.stderr.splitlines()[0] == "expected: about 14 s (4 jobs on CPU 0, CPU 1)"
    report = json.loads(first.stdout)
    assert [check["id"] for check in report["checks"]] == list("abcd")
    started = [line.split()[1] for line in folder.lines() if line.startswith("start")]
    assert set(started[:2]) == {"a", "b"} and started != [] and len(started) == 4
    second = folder.run("--json")
    assert "all 4 jobs were done before, nothing is run" in second.stderr
    assert {check["message"][:4] for check in json.loads(second.stdout)["checks"]} == {"kept"}
    assert len(folder.lines()) == 8


def test_another_configuration_or_other_code_is_run(folder):
    folder.write({"a": "true"})
    folder.run()
    folder.write({"a": "true", "b": "true"})
    again = folder.run()
    assert "expected: about 1 s (1 jobs on CPU 0, CPU 1; 1 were done before)" in again.stderr
    folder.write({"a": "true"}, tree_hash="other")
    folder.run()
    assert Counter(line.split()[1] for line in folder.lines()) == {"a": 4, "b": 2}


def test_no_device_has_two_jobs_at_once(folder):
    """Each job takes its slot by making a folder, which fails when another holds it."""
    body = "mkdir held-$CUDA_SLOT && sleep 0.15 && rmdir held-$CUDA_SLOT"
    folder.write({str(number): "sleep 0.1" for number in range(9)}, slots=3)
    jobs = json.loads((folder.path / "jobs.json").read_text())
    for number, job in enumerate(jobs["jobs"]):
        job["command"] = ["/bin/sh", "-c", f"exit {number % 2}" if number > 6 else body]
    places = [runner.Slot(f"GPU {n}", {"CUDA_SLOT": str(n)}) for n in range(3)]
    call = type("Call", (), {"expect": lambda *_: None, "progress": lambda *_: None})()
    before = os.getcwd()
    os.chdir(folder.path)
    try:
        work = [runner.Work(**job) for job in jobs["jobs"]]
        found = runner.run_all(call, folder.home, work, tree_hash="t", places=places)
    finally:
        os.chdir(before)
    assert [outcome.exit_code for outcome in found] == [0] * 7 + [1, 0]
    assert {outcome.slot for outcome in found} == {"GPU 0", "GPU 1", "GPU 2"}
    assert sum(outcome.seconds for outcome in found[:7]) > 1.0


def test_a_failing_job_stops_no_other_and_is_told_with_its_last_lines(folder):
    say = "for i in 1 2 3 4 5 6 7; do echo line $i; done; exit 3"
    folder.write({"bad": say, "good": "true", "lost": "exec /no/such/file"}, slots=1)
    done = folder.run()
    assert done.returncode == 1
    assert "failed: bad, exit 3," in done.stderr and "log.txt" in done.stderr
    tail = [line.strip() for line in done.stderr.splitlines() if line.startswith("  line")]
    assert tail == [f"line {number}" for number in range(3, 8)]
    assert "end good" in folder.lines() and "failed: lost, exit 127" in done.stderr
    folder.write({"bad": "true", "good": "true"}, slots=1)
    again = folder.run()
    assert again.returncode == 0 and "1 were done before" in again.stderr
    assert Counter(line.split()[1] for line in folder.lines())["good"] == 2


def test_a_command_that_is_not_there_is_a_failed_job(folder):
    folder.write({"a": "true"})
    jobs = json.loads((folder.path / "jobs.json").read_text())
    jobs["jobs"][0]["command"] = ["no-such-program"]
    (folder.path / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    done = folder.run()
    assert done.returncode == 1 and "cannot start no-such-program: No such file" in done.stderr


def test_a_killed_runner_takes_its_jobs_along_and_resumes(folder):
    """The half job hears no SIGTERM, so that its end takes seconds; the next runner waits."""
    half = "test -e {folder}/half && exit 9; touch {folder}/half; test -e AGAIN && exit 0"
    half = half.replace("AGAIN", str(folder.path / "again"))
    half += '; trap "" TERM; sleep 60 & sleep 60; sleep 60'
    folder.write({"done": "true", "half": half, "later": "true"}, slots=1)
    process = folder.start()
    folder.wait_for("end done", "start half")
    while len([p for p in children(process) if p.name() == "sleep"]) < 2:
        time.sleep(0.02)
    jobs = children(process)
    process.kill()
    process.communicate()
    (folder.path / "again").touch()
    again = folder.start("--json")
    while len([line for line in folder.lines() if line.startswith("start half")]) < 2:
        assert again.poll() is None
        time.sleep(0.02)
    assert gone(jobs, within=0)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0 and "1 were done before" in err
    counts = Counter(line for line in folder.lines() if line.startswith("start"))
    assert {key.split()[1]: n for key, n in counts.items()} == {"done": 1, "half": 2, "later": 1}


def test_a_killed_job_is_a_failure_and_runs_again(folder):
    folder.write({"victim": "test -e ../../../again || sleep 60", "other": "true"}, slots=2)
    process = folder.start()
    folder.wait_for("start victim", "end other")
    sleeper = [p for p in children(process) if p.name() == "sleep"]
    os.killpg(os.getpgid(sleeper[0].pid), signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "failed: victim, exit 137" in err
    folder.write({"victim": "true", "other": "true"}, slots=2)
    assert folder.run().returncode == 0
    starts = Counter(line.split()[1] for line in folder.lines() if line.startswith("start"))
    assert starts == {"victim": 2, "other": 1}


def test_what_a_finished_job_leaves_behind_is_ended(folder):
    folder.write({"a": "sleep 60 & echo $! > left"})
    assert folder.run().returncode == 0
    left = int((folder.path / "left").read_text())
    assert not psutil.pid_exists(left) or gone([psutil.Process(left)])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give no orphans to the leash")
def test_what_went_into_a_session_of_its_own_is_ended_too(folder):
    away = "import os, time; os.setsid(); open('left', 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"import os, time\nif not os.fork():\n {away}\ntime.sleep(60)"
    job = {"name": "a", "command": [sys.executable, "-I", "-S", "-c", code], "config_hash": "a"}
    text = json.dumps({"jobs": [job]})
    (folder.path / "jobs.json").write_text(text, encoding="utf-8")
    process = folder.start()
    while not (folder.path / "left").exists() or not (folder.path / "left").read_text():
        assert process.poll() is None
        time.sleep(0.02)
    left = psutil.Process(int((folder.path / "left").read_text()))
    process.kill()
    process.communicate()
    assert gone([left], within=5)


def test_a_job_that_clears_its_folder_is_done_and_a_moved_folder_stays_done(folder):
    folder.write({"a": "true", "bad": "true"})
    jobs = json.loads((folder.path / "jobs.json").read_text())
    for job, code in zip(jobs["jobs"], (0, 3), strict=True):
        job["command"] = ["/bin/sh", "-c", f"rm -r {{folder}}; exit {code}"]
    (folder.path / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    done = folder.run()
    assert done.returncode == 1 and "failed: bad, exit 3" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    (record,) = [r for r in folder.home.glob("*/record.json") if '"a"' in r.read_text()]
    moved = record.parent.rename(folder.path / "moved")
    kept = runner._kept(moved)
    assert kept is not None and kept.folder == str(moved)


def test_a_torn_record_counts_as_none(folder):
    folder.write({"a": "true"})
    folder.run()
    (record,) = folder.home.glob("*/record.json")
    record.write_text(record.read_text()[:40], encoding="utf-8")
    assert folder.run().returncode == 0
    assert folder.lines().count("end a") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_the_jobs_and_what_they_started(number, folder):
    folder.write({"one": "sleep 60 & sleep 60", "other": "sleep 60"})
    process = folder.start()
    folder.wait_for("start one", "start other")
    time.sleep(0.1)
    jobs = children(process)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err
    assert gone(jobs)
    assert not list(folder.home.glob("*/record.json"))


def test_two_runners_in_one_folder_are_refused(folder):
    folder.write({"a": "sleep 60"})
    process = folder.start()
    folder.wait_for("start a")
    other = subprocess.run(
        [sys.executable, str(SCRIPT), "--jobs", "jobs.json", "--out", "other"],
        cwd=folder.path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    process.terminate()
    process.communicate(timeout=30)
    assert other.returncode == 2 and "another run works on the jobs in" in other.stderr


def test_a_detached_queue_is_followed(folder):
    folder.write(dict.fromkeys("abc", "sleep 0.3"), slots=1)
    started = folder.run("--detach")
    assert started.returncode == 0 and "started: custom-check" in started.stdout
    words = [sys.executable, str(SCRIPT)]
    place = ["--out", "out"]
    status = subprocess.run(
        [*words, "status", *place], cwd=folder.path, capture_output=True, text=True, check=False
    )
    assert "custom-check" in status.stdout
    ended = subprocess.run(
        [*words, "wait", *place], cwd=folder.path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0 and "pass     c 0" in ended.stdout


def test_the_same_job_twice_is_refused(tmp_path):
    job = runner.Work("a", ["true"], "one")
    for other in (runner.Work("a", ["true"], "two"), runner.Work("b", ["true"], "one")):
        with pytest.raises(UsageError, match="are the same; each needs a name and a config"):
            runner._folders(tmp_path, [job, other], "tree")


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,1", ["GPU 0", "GPU 1"]),
        ("GPU-3f, MIG-7", ["GPU GPU-3f", "GPU MIG-7"]),
        ("2,-1,3", ["GPU 2"]),
        ("1,1", ["GPU 1"]),
        ("", ["CPU 0", "CPU 1"]),
    ],
)
def test_the_slots_are_the_visible_gpus_or_share_the_cores(visible, names, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    found = runner.slots()
    assert [slot.name for slot in found] == names
    if names[0].startswith("GPU"):
        assert [slot.env["CUDA_VISIBLE_DEVICES"] for slot in found] == [n[4:] for n in names]
    else:
        assert found[0].env == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
    assert [slot.env["OMP_NUM_THREADS"] for slot in runner.slots(1)] == ["4"]


def test_without_the_variable_torch_counts_the_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [slot.name for slot in runner.slots()] == ["GPU 0", "GPU 1"]

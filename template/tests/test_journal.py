"""The journal reads whatever killed its writer, and no planted secret reaches it."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from curry_train.tracking import scrub
from curry_train.tracking.journal import (
    EVENTS,
    Journal,
    JsonLines,
    read_journal,
    read_lines,
    read_metrics,
)

TEMPLATE = Path(__file__).resolve().parents[1]


def test_every_event_carries_the_common_fields_in_order(tmp_path):
    path = tmp_path / "journal.jsonl"
    before = time.time_ns()
    journal = Journal(path, run="name-stamp")
    for number, ev in enumerate(EVENTS):
        journal.event(ev, step=number, tokens=10 * number, extra=[ev])
    lines = path.read_text().splitlines()
    assert len(lines) == len(EVENTS) == 13
    for number, (line, ev) in enumerate(zip(lines, EVENTS, strict=True)):
        event = json.loads(line)
        common = ["v", "seq", "ts", "mono", "run", "attempt", "ev", "step", "tokens"]
        assert list(event) == [*common, "extra"]
        assert (event["v"], event["seq"], event["run"], event["attempt"]) == (
            1,
            number,
            "name-stamp",
            1,
        )
        assert (event["ev"], event["step"], event["tokens"]) == (ev, number, 10 * number)
        assert before <= event["ts"] <= time.time_ns() and event["mono"] > 0
    assert read_journal(path) == [json.loads(line) for line in lines]


def test_unknown_events_and_reserved_fields_are_refused(tmp_path):
    journal = Journal(tmp_path / "j", run="r")
    with pytest.raises(ValueError, match="event 'begin' is unknown; allowed: start, eval"):
        journal.event("begin")
    with pytest.raises(ValueError, match="event note: seq is set by the journal"):
        journal.event("note", seq=3)
    assert read_journal(tmp_path / "j") == []


def test_floats_are_written_by_repr_and_non_finite_ones_as_strings(tmp_path):
    path = tmp_path / "m"
    values = {
        "third": 1 / 3,
        "tiny": 5e-324,
        "nan": math.nan,
        "up": math.inf,
        "down": -math.inf,
        "numpy": np.float32(0.1),
        "numpy_nan": np.float64("nan"),
        "array": np.array([1, 2]),
        "nested": {"x": [math.nan, True, None]},
        "path": Path("a/b"),
    }
    JsonLines(path).append(values)
    text = path.read_text()
    assert f'"third": {1 / 3!r}' in text and '"tiny": 5e-324' in text
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (row["nan"], row["up"], row["down"]) == ("NaN", "Infinity", "-Infinity")
    assert row["numpy"] == float(np.float32(0.1)) and row["numpy_nan"] == "NaN"
    assert row["array"] == [1, 2] and row["nested"] == {"x": ["NaN", True, None]}
    assert row["path"] == "a/b"


@pytest.mark.parametrize("tail", [b'{"v": 1, "seq"', b"\x00\x00", b'{"ev": "end"}', b"x" * 200_000])
def test_a_torn_last_line_is_dropped_by_readers_and_cut_off_by_the_next_writer(tmp_path, tail):
    path = tmp_path / "journal.jsonl"
    first = Journal(path, run="r")
    first.event("start")
    first.event("note")
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert [event["seq"] for event in read_journal(path)] == [0, 1]
    second = Journal(path, run="r")
    assert second.torn_tail == len(tail) and second.attempt == 2
    assert path.read_bytes() == whole
    second.event("start")
    assert [(e["seq"], e["attempt"]) for e in read_journal(path)] == [(0, 1), (1, 1), (2, 2)]
    assert Journal(path, run="r").torn_tail == 0


def test_a_file_of_one_torn_line_becomes_empty(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b'{"ev": "sta')
    assert read_journal(path) == []
    assert Journal(path, run="r").torn_tail == 11
    assert path.read_bytes() == b""
    assert read_journal(tmp_path / "absent") == []


def test_foreign_lines_in_the_middle_do_not_hide_the_rest(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b'{"ev": "start"}\nnot json\n\xff\xfe\n[1]\n\n{"no": "ev"}\n{"ev": "end"}\n')
    assert [event["ev"] for event in read_journal(path)] == ["start", "end"]
    assert len(read_lines(path)) == 3


def test_metrics_keep_the_highest_attempt_of_a_step_and_join_its_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for row in [
        {"step": 0, "attempt": 1, "val/loss": 5.0},
        {"step": 1, "attempt": 1, "loss": 3.0},
        {"step": 2, "attempt": 1, "loss": 2.0, "lr": 0.1},
        {"step": 2, "attempt": 1, "val/loss": 9.0},
        {"step": 2, "attempt": 2, "loss": math.nan},
        {"step": 3, "attempt": 1, "loss": 1.0},
        {"step": 2, "attempt": 2, "val/loss": math.inf},
        {"step": 2, "attempt": 1, "loss": 7.0},
        {"attempt": 1, "loss": 7.0},
    ]:
        lines.append(row)
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert math.isnan(rows[2].pop("loss"))
    assert rows[2] == {"step": 2, "attempt": 2, "val/loss": math.inf}
    assert rows[3] == {"step": 3, "attempt": 1, "loss": 1.0}


WRITER = """
    import sys
    from pathlib import Path
    from curry_train.tracking.journal import Journal
    journal = Journal(Path(sys.argv[1]), run="r")
    print("ready", flush=True)
    while True:
        journal.event("note", step=1, text="x" * 2000)
        print(journal._next - 1, flush=True)
"""


def test_the_journal_reads_after_sigkill_and_no_acknowledged_event_is_lost(tmp_path):
    path, seen = tmp_path / "journal.jsonl", -1
    environment = {**os.environ, "PYTHONPATH": str(TEMPLATE)}
    kills = 20 if os.environ.get("CURRY_TRAIN_FULL") else 5
    for attempt in range(1, kills + 1):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        seen = int(process.stdout.readline())
        time.sleep(0.013 * attempt)
        process.send_signal(signal.SIGKILL)
        seen = max([seen, *(int(line) for line in process.stdout if line.endswith("\n"))])
        process.wait()
        events = read_journal(path)
        assert [event["seq"] for event in events] == list(range(len(events)))
        assert len(events) > seen and events[-1]["attempt"] == attempt


def test_a_full_disk_leaves_no_torn_line_behind(tmp_path):
    path = tmp_path / "j"
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        journal = Journal(path, run="r")
        try:
            for _ in range(100):
                journal.event("note")
        except OSError:
            os._exit(0)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    content = path.read_bytes()
    assert content.endswith(b"\n") and 2 < len(read_journal(path)) < 10


# Secrets.

PLANTED = "pl4nted-S3cret"


@pytest.mark.parametrize(
    "text",
    [
        f"wandb.api_key={PLANTED}",
        f"+tracking={{password: {PLANTED}, a: 1}}",
        f"x={{'token':'{PLANTED}','b':2}}",
        f"HF_TOKEN={PLANTED}",
        f"AWS_SECRET_ACCESS_KEY={PLANTED}",
        f"dbPassword={PLANTED}",
        f"password='{PLANTED} {PLANTED}'",
        f'{{"secret": "{PLANTED}"}}',
        f"Authorization: Bearer {PLANTED}",
        f"key={PLANTED}",
        f"--token={PLANTED}",
        f"https://user:{PLANTED}@host/path",
        f"s3://id:a@{PLANTED}@bucket/x",
        f"https://{PLANTED}@host/path",
        f"https://host/p?x=1&token={PLANTED}&y=2",
        f"https://host/p?X-Amz-Signature={PLANTED}",
        f"data.input=https://host/p?sig={PLANTED}#frag",
    ],
)
def test_a_planted_secret_is_masked(text):
    clean = scrub.scrub(text)
    assert PLANTED not in clean and scrub.MASK in clean
    if "://" in text:
        assert PLANTED not in scrub.scrub_urls(text)


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "a1B2" * 8,
        "sk-" + "a1B2" * 8,
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "a1B2" * 9,
        "AKIA" + "A1B2" * 4,
        "xoxb-" + "1234-" * 4,
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
    ],
)
def test_a_secret_of_a_known_shape_is_masked_wherever_it_stands(secret):
    assert scrub.scrub_urls(f"+login({secret!r})") == f"+login('{scrub.MASK}')"


@pytest.mark.parametrize(
    "text",
    [
        "data.tokenizer=byte",
        "run.sample_tokens=200",
        "model.num_key_value_heads=2",
        "optim.lr=1e-3",
        "monkey=1",
        "keys=[1,2]",
        "data.input=https://host/corpus.txt?version=3",
        "git@github.com:owner/project",
        "run.resume=runs/quickstart-20250101T000000Z-abcdef",
    ],
)
def test_ordinary_settings_stay_as_they_are(text):
    assert scrub.scrub(text) == text


def test_the_word_after_a_secret_flag_is_masked():
    argv = ["train.py", "--token", PLANTED, "optim.lr=1", "--api-key", PLANTED, "--devices", "2"]
    clean = ["train.py", "--token", "***", "optim.lr=1", "--api-key", "***", "--devices", "2"]
    assert scrub.scrub_argv(argv) == clean


def test_the_environment_passes_by_allow_list_only():
    env = {
        "OMP_NUM_THREADS": "2",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "SLURM_JOB_ID": "77",
        "CURRY_RUN_DIR": f"https://u:{PLANTED}@host/x",
        "HARMLESS": PLANTED,
        "MY_RANK": PLANTED,
        "RANK_TOKEN": PLANTED,
        "AWS_SECRET_ACCESS_KEY": PLANTED,
        "HF_TOKEN": PLANTED,
        "PATH": PLANTED,
        "HOME": PLANTED,
    }
    kept = scrub.environment(env)
    assert set(kept) == {"OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "SLURM_JOB_ID", "CURRY_RUN_DIR"}
    assert PLANTED not in str(kept)


@pytest.mark.parametrize(
    "piece", ["a", "a-", "a.b-", "x=1&", "://", "?", "key", "eyJ-", "key= ", " "]
)
def test_scrubbing_takes_linear_time_on_long_lines(piece):
    text = piece * (400_000 // len(piece))
    start = time.process_time()
    scrub.scrub(text)
    assert time.process_time() - start < 5.0

"""Preparation: one result whatever the workers, kills and order; one clear line for bad input."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from curry_train.data import DataError, prepare, sources, splits, workers
from curry_train.data.sources import cut_text, find_source, plan_parts, read_documents
from curry_train.data.token_file import read_corpus
from curry_train.data.workers import WorkerDied, map_jobs, show_progress

PROJECT = Path(__file__).resolve().parents[1]


def run_cli(*arguments, **options):
    command = [sys.executable, "-m", "curry_train.data.prepare", *map(str, arguments)]
    return subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False, **options
    )


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path


def make(path, out, *, weight=1.0, workers=1, **settings):
    found = [find_source(p, weight=weight) for p in (path if isinstance(path, list) else [path])]
    return read_corpus(prepare.prepare(found, out, prepare.Settings(**settings), workers=workers))


def documents(stream, coder):
    """Texts of a split, read back from its tokens."""
    ids = stream.window(1, stream.tokens)
    ends = np.flatnonzero(ids == stream.eos_id)
    return [coder.decode(part) for part in np.split(ids, ends + 1)[:-1]]


def shas(corpus):
    splits = corpus.manifest["splits"].values()
    return [file["sha256"] for split in splits for file in (*split["shards"], split["ends"])]


def compressed(data):
    import pyarrow

    return pyarrow.compress(data, codec="zstd", asbytes=True)


def no_leftovers(folder):
    return [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


TEXTS = [f"document {n} " + "word " * (n % 11) + "\U0001f600\n" for n in range(300)]


# What a document is


@pytest.mark.parametrize("size", [1, 5, 40, 1000])
def test_pieces_joined_give_the_text_back(size):
    draw = random.Random(size)
    for _ in range(100):
        text = "".join(draw.choice("ab \n\n\t\u00e9\U0001f600") for _ in range(draw.randrange(400)))
        pieces = list(cut_text(text, size))
        assert "".join(pieces) == text
        assert all(0 < len(piece) <= 3 * size + 400 * (size < 2) for piece in pieces)


def test_pieces_end_at_blank_lines_or_words_where_there_are_any():
    paragraphs = [f"{'word ' * 30}{n}\n\n" for n in range(40)]
    pieces = list(cut_text("".join(paragraphs), 400))
    assert len(pieces) > 5
    assert all(piece.endswith("\n\n") for piece in pieces)
    pieces = list(cut_text("word " * 1000, 400))
    assert all(piece.endswith(" ") and len(piece) <= 400 for piece in pieces[:-2])
    assert [len(p) for p in cut_text("x" * 1000, 100)][:8] == [100] * 8


def test_plain_text_loses_only_its_bom_and_carriage_returns(tmp_path):
    line = "\u2014 \U0001f468\u200d\U0001f469\u200d\U0001f467\n"
    book = "".join(f"Line {n} {line}" + "\n" * (n % 4 == 0) for n in range(900))
    path = tmp_path / "book.TXT"
    path.write_bytes(b"\xef\xbb\xbf" + book.replace("\n", "\r\n").encode())
    corpus = make(path, tmp_path / "out")
    found = documents(corpus.train, corpus.tokenizer) + documents(corpus.val, corpus.tokenizer)
    assert sorted(found) == sorted(cut_text(book, 1024))
    assert corpus.train.bytes + corpus.val.bytes == len(book.encode())
    assert 0.01 < corpus.val.bytes / len(book.encode()) < 0.4


def test_old_line_ends_become_newlines_and_a_second_bom_stays(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeff\ufeffone\rtwo\r\nthree".encode())
    (part,) = plan_parts([find_source(tmp_path / "a.txt")])
    assert list(read_documents(part, "text")) == ["\ufeffone\ntwo\nthree"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_ranges_of_a_large_file_neither_lose_nor_repeat_text(tmp_path, monkeypatch, end):
    monkeypatch.setattr(sources, "RANGE_BYTES", 1000)
    text = "".join(f"paragraph {n} of some length\n{'x' * (n % 70)}\n\n" for n in range(500))
    (tmp_path / "a.txt").write_text(text, newline=end)
    parts = plan_parts([find_source(tmp_path / "a.txt")])
    assert len(parts) > 20
    assert "".join(t for part in parts for t in read_documents(part, "text")) == text
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    parts = plan_parts([find_source(path)])
    assert len(parts) > 10
    assert [t for part in parts for t in read_documents(part, "text")] == TEXTS
    path.write_text(path.read_text() + '{"body": 1}\n')
    with pytest.raises(DataError, match=rf"a.jsonl:{len(TEXTS) + 1} has no text under 'text'"):
        [t for part in plan_parts([find_source(path)]) for t in read_documents(part, "text")]


def test_a_line_longer_than_a_range_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "RANGE_BYTES", 10)
    text = "a" * 99 + "\n" + "b" * 10 + "\n" + "c" * 9 + "\n"
    (tmp_path / "a.txt").write_text(text)
    parts = plan_parts([find_source(tmp_path / "a.txt")])
    found = [list(read_documents(part, "text")) for part in parts]
    assert found[:2] == [["a" * 99 + "\n"], []]
    assert len(parts) == 13
    assert "".join(text for texts in found for text in texts) == text


def test_every_format_gives_the_same_corpus(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    frames = [compressed(part) for part in (plain.read_bytes()[:999], plain.read_bytes()[999:])]
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(frames))
    table = pa.table({"id": list(range(300)), "text": TEXTS})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=70)
    paths = [path for path in tmp_path.glob("?.*") if path.is_file()]
    hashes = {make(path, tmp_path / path.name.replace(".", "_")).hash for path in paths}
    assert (len(paths), len(hashes)) == (3, 1)


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    write_jsonl(tmp_path / "in" / "b.jsonl", ["two"])
    write_jsonl(tmp_path / "in" / "a.jsonl", ["one"])
    write_jsonl(tmp_path / "in" / "sub" / "c.jsonl", ["three"])
    write_jsonl(tmp_path / "in" / ".hidden.jsonl", ["no"])
    (tmp_path / "in" / "picture.png").write_bytes(b"\0")
    (tmp_path / "in" / "empty.txt").write_bytes(b"")
    found = find_source(tmp_path / "in")
    assert [path.name for path, _ in found.files] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert [t for p in plan_parts([found]) for t in read_documents(p, "text")] == [
        "one",
        "two",
        "three",
    ]


def test_a_hundred_text_files_are_a_hundred_documents(tmp_path):
    for n in range(sources.MANY_TEXT_FILES):
        (tmp_path / f"{n:03}.txt").write_text(f"{n}\n\n" * 2000)
    assert (
        sum(1 for p in plan_parts([find_source(tmp_path)]) for _ in read_documents(p, "t")) == 100
    )
    (tmp_path / "000.txt").unlink()
    assert sum(1 for p in plan_parts([find_source(tmp_path)]) for _ in read_documents(p, "t")) > 400


# Split, duplicates, weights


def test_duplicates_go_before_the_split_and_never_straddle_it(tmp_path):
    texts = TEXTS + TEXTS[::-1] + TEXTS
    corpus = make(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out", val_fraction=0.3)
    train = documents(corpus.train, corpus.tokenizer)
    val = documents(corpus.val, corpus.tokenizer)
    assert not set(train) & set(val)
    assert sorted(train + val) == sorted(TEXTS)
    assert corpus.manifest["duplicates_removed"] == 2 * len(TEXTS)
    assert 0.2 < len(val) / len(TEXTS) < 0.4


def test_the_split_depends_on_the_document_alone(tmp_path):
    shuffled = TEXTS[:]
    random.Random(1).shuffle(shuffled)
    first = make(write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "one")
    second = make(write_jsonl(tmp_path / "b.jsonl", shuffled[:200]), tmp_path / "two")
    val = set(documents(first.val, first.tokenizer))
    assert set(documents(second.val, second.tokenizer)) == val & set(shuffled[:200])


def test_two_documents_always_leave_one_to_validate_on(tmp_path):
    corpus = make(write_jsonl(tmp_path / "a.jsonl", ["one", "two"]), tmp_path / "out",
                  val_fraction=1e-9)  # fmt: skip
    assert (corpus.train.documents, corpus.val.documents) == (1, 1)


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0, 2.25])
def test_a_weight_counts_how_often_training_documents_appear(tmp_path, weight):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    plain = make(path, tmp_path / "plain")
    corpus = make(path, tmp_path / "out", weight=weight)
    assert documents(corpus.val, corpus.tokenizer) == documents(plain.val, plain.tokenizer)
    train = documents(corpus.train, corpus.tokenizer)
    counts = {text: train.count(text) for text in documents(plain.train, plain.tokenizer)}
    assert set(counts.values()) <= {int(weight), int(weight) + (weight % 1 > 0)}
    assert len(train) == corpus.train.documents == sum(counts.values())
    assert abs(len(train) / len(counts) - weight) < 0.1
    assert corpus.train.bytes == sum(len(text.encode()) for text in train)


def test_a_shared_document_belongs_to_the_first_input(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", TEXTS[:100])
    second = write_jsonl(tmp_path / "b.jsonl", TEXTS)
    found = [find_source(first, weight=3.0), find_source(second)]
    corpus = read_corpus(prepare.prepare(found, tmp_path / "out", prepare.Settings()))
    train = documents(corpus.train, corpus.tokenizer)
    assert {train.count(text) for text in TEXTS[:100]} == {0, 3}
    assert {train.count(text) for text in TEXTS[100:]} == {0, 1}


def test_the_first_of_equal_documents_counts():
    hashes = np.array([splits.document_hash(text) for text in "abacabad"], dtype=np.uint64)
    times = splits.assign(hashes, np.ones(8), 0.5)
    assert (times["train"] + times["val"]).tolist() == [1, 1, 0, 1, 0, 0, 0, 1]


# One result


@pytest.fixture(scope="module")
def many_parts(tmp_path_factory):
    """An input of enough parts to interrupt, about 10 MB."""
    folder = tmp_path_factory.mktemp("many")
    for name in ("a", "b", "c"):
        texts = [f"{name}{n} " + "some words to be read " * 50 for n in range(4000)]
        write_jsonl(folder / f"{name}.jsonl", texts)
    return folder


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_workers_do_not_change_the_result(tmp_path, monkeypatch, many_parts, kind):
    if kind == "bpe":  # slower, so on less text
        monkeypatch.setattr(sources, "RANGE_BYTES", 2**17)
        many_parts = write_jsonl(
            tmp_path / "a.jsonl", [f"{n} words to read " * 9 for n in range(3000)]
        )
    one = make(many_parts, tmp_path / "one", tokenizer=kind, bpe_vocab_size=300)
    three = make(many_parts, tmp_path / "three", workers=3, tokenizer=kind, bpe_vocab_size=300)
    assert one.manifest == three.manifest
    assert one.hash == three.hash
    for file in one.folder.iterdir():
        assert file.read_bytes() == (three.folder / file.name).read_bytes(), file.name
    assert no_leftovers(tmp_path)


def test_bpe_is_trained_on_the_training_split_alone(tmp_path):
    texts = [f"plain words again and again {n}" for n in range(50)]
    secret = next(
        t for n in range(999)
        if splits.document_hash(t := f"zzqqzzqq {n} " * 40) < 2**58
    )  # fmt: skip
    corpus = make(write_jsonl(tmp_path / "a.jsonl", [*texts, secret]), tmp_path / "out",
                  tokenizer="bpe", bpe_vocab_size=400)  # fmt: skip
    assert secret in documents(corpus.val, corpus.tokenizer)
    assert "qq" not in (tmp_path / "out" / "tokenizer.json").read_text()


def test_a_killed_run_continues_and_leaves_nothing_half_made(tmp_path, many_parts):
    straight = make(many_parts, tmp_path / "straight")
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    command = [sys.executable, "-m", "curry_train.data.prepare", str(many_parts), "--out", str(out)]
    draw = random.Random(int(os.environ.get("CURRY_TEST_SEED", "0")))

    def finished():
        return sum((partial / f"part-{n:05d}.table").exists() for n in range(6))

    for _ in range(3):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([*command, "--workers", "2"], cwd=PROJECT, **quiet)
        wanted = finished() + 1
        while process.poll() is None and finished() < wanted:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not out.exists() or read_corpus(out, verify=True).hash == straight.hash
    assert run_cli(many_parts, "--out", out).returncode == 0
    assert read_corpus(out, verify=True).manifest == straight.manifest
    names = [sorted(path.name for path in folder.iterdir()) for folder in (out, straight.folder)]
    assert names[0] == names[1]
    assert no_leftovers(tmp_path)


def test_ctrl_c_is_one_line_and_the_run_can_go_on(tmp_path, many_parts):
    command = [sys.executable, "-m", "curry_train.data.prepare", str(many_parts)]
    command += ["--out", str(tmp_path / "out"), "--workers", "2"]
    process = subprocess.Popen(
        command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    while not (tmp_path / ".out.partial" / "tokenizer.json").exists():
        time.sleep(0.002)
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    out, err = process.communicate(timeout=60)
    lines = [line for line in err.splitlines() if "MB/s" not in line]
    assert lines == ["prepare: interrupted; run the same command again to continue"]
    assert (process.returncode, out) == (130, "")
    assert not (tmp_path / "out").exists()
    assert run_cli(many_parts, "--out", tmp_path / "out").returncode == 0
    assert no_leftovers(tmp_path)


def test_finished_parts_are_kept_and_torn_ones_made_again(tmp_path, many_parts, monkeypatch):
    def dying(*job):
        if job[1] == 2:
            raise KeyboardInterrupt
        return original(*job)

    original = prepare.tokenize_part
    monkeypatch.setattr(prepare, "tokenize_part", dying)
    with pytest.raises(KeyboardInterrupt):
        make(many_parts, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    first, second = (tmp_path / ".out.partial" / f"part-0000{n}.ids" for n in (0, 1))
    first.write_bytes(b"torn")
    before = second.stat().st_mtime_ns
    monkeypatch.setattr(prepare, "tokenize_part", original)
    modified = []

    def looking(*arguments):
        modified.append(second.stat().st_mtime_ns)
        return copying(*arguments)

    copying = prepare._copy_documents
    monkeypatch.setattr(prepare, "_copy_documents", looking)
    corpus = make(many_parts, tmp_path / "out")
    monkeypatch.undo()
    assert modified == [before], "kept"
    assert corpus.hash == make(many_parts, tmp_path / "new").hash


def test_a_changed_input_discards_what_was_finished(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(prepare, "_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        make(path, tmp_path / "out")
    assert (tmp_path / ".out.partial" / "part-00000.table").exists()
    monkeypatch.undo()
    write_jsonl(path, TEXTS[:50])
    corpus = make(path, tmp_path / "out")
    assert corpus.train.documents + corpus.val.documents == 50


def test_several_processes_at_once_make_one_corpus(tmp_path, many_parts):
    command = [sys.executable, "-m", "curry_train.data.prepare", str(many_parts),
               "--out", str(tmp_path / "out"), "--workers", "1", "--json"]  # fmt: skip
    running = [
        subprocess.Popen(
            command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    ends = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * 4, ends
    assert len({json.loads(out)["hash"] for out, _ in ends}) == 1
    assert sum("write tokens" in err for _, err in ends) == 1, "one prepares, the others wait"
    assert no_leftovers(tmp_path)


def test_a_lock_on_a_file_that_vanished_is_no_lock(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    original = prepare.fcntl.flock
    calls = []

    def late(*arguments):
        """The owner finishes between this process's open and its lock."""
        if not calls:
            path.unlink()
        calls.append(arguments)
        original(*arguments)

    monkeypatch.setattr(prepare.fcntl, "flock", late)
    with prepare._locked(path):
        assert len(calls) == 2
        with path.open("w") as other, pytest.raises(BlockingIOError):
            original(other, prepare.fcntl.LOCK_EX | prepare.fcntl.LOCK_NB)
    assert not path.exists()


def test_a_killed_worker_is_named():
    with pytest.raises(WorkerDied, match="a worker was killed.*fewer workers"):
        list(map_jobs(os._exit, [(9,), (9,)], workers=2, size=1))


def test_the_first_error_by_order_ends_the_others():
    started = time.monotonic()
    with pytest.raises(ValueError, match="invalid literal"):
        list(map_jobs(int, [("1",), ("x",), ("y",)], workers=2, size=1))
    with pytest.raises(TypeError):
        list(map_jobs(time.sleep, [("x",), (60,)], workers=2, size=1))
    assert time.monotonic() - started < 30


# The command line


def test_the_command_says_what_it_made_and_repeats_as_a_no_op(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = run_cli(path, "--out", tmp_path / "out")
    assert first.returncode == 0, first.stderr
    assert f"data.input={tmp_path / 'out'}" in first.stdout
    assert "MB/s" in first.stderr
    assert len(first.stderr.splitlines()) <= 4, "few plain lines where there is no terminal"
    before = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    second = run_cli(path, "--out", tmp_path / "out", "--json")
    summary = json.loads(second.stdout)
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == before
    assert summary["train"]["documents"] + summary["val"]["documents"] == len(TEXTS)
    assert summary["tokenizer"]["vocab_size"] == 257
    other = run_cli(path, "--out", tmp_path / "out", "--val-fraction", "0.5")
    assert other.returncode == 2
    assert "exists and holds something else; choose another" in other.stderr


def test_the_source_hash_of_a_file_is_its_sha256(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (source,) = make(path, tmp_path / "out").manifest["sources"]
    assert source["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert source["name"] == "a.jsonl"
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()


def test_an_own_tokenizer_is_used_and_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert run_cli(path, "--out", tmp_path / "one", "--tokenizer", "bpe", "--bpe-vocab-size", "300",
                   "--val-fraction", "0.2").returncode == 0  # fmt: skip
    own = tmp_path / "one" / "tokenizer.json"
    assert run_cli(path, "--out", tmp_path / "two", "--tokenizer", own, "--val-fraction", "0.2"
                   ).returncode == 0  # fmt: skip
    one, two = read_corpus(tmp_path / "one"), read_corpus(tmp_path / "two")
    assert shas(one) == shas(two)
    assert two.manifest["tokenizer"]["kind"] == "file"


def test_progress_shows_rate_and_time_left_on_long_work(capsys, monkeypatch):
    def slowly():
        for n in range(4):
            time.sleep(0.01)
            yield n

    monkeypatch.setattr(workers, "PATIENCE", 0.0)
    monkeypatch.setattr(workers, "SECONDS_BETWEEN", {True: 0.0, False: 0.0})
    sizes = [500_000] * 4
    assert show_progress("count", sizes, slowly(), quiet=True) == [0, 1, 2, 3]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("count: 0.5 of 2.0 MB, ")
    assert lines[0].endswith(" s left")
    assert lines[-1].startswith("count: 2.0 of 2.0 MB, ")
    assert lines[-1].endswith(" s")
    monkeypatch.undo()
    show_progress("count", sizes, slowly(), quiet=True)
    assert capsys.readouterr().err == "", "short work in the background says nothing"


def test_help_needs_no_torch():
    started = time.monotonic()
    found = run_cli("--help")
    assert found.returncode == 0
    assert "--val-fraction" in found.stdout
    code = "import sys, curry_train.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=False).returncode == 0
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.txt"], "missing.txt does not exist"),
        (["empty.txt"], "empty.txt is empty; give it text"),
        (["blank.txt"], "blank.txt: no text in it"),
        (["nul.txt"], "nul.txt is not UTF-8 text: byte 0x00 at offset 1034"),
        (["latin.txt"], "latin.txt is not UTF-8 text: byte 0xe9 at offset 4"),
        (["utf16.txt"], "utf16.txt is not UTF-8 text: byte 0xff at offset 0"),
        (["a.pdf"], "a.pdf: no file that ends in .txt, .jsonl, .jsonl.zst, .parquet"),
        (["empties"], "empties is empty; give it text"),
        (["nothing"], "nothing: no file that ends in"),
        (["nokey.jsonl"], "nokey.jsonl:2 has no text under 'text' (found: ['body', 'id'])"),
        (["number.jsonl"], "number.jsonl:1 has no text under 'text' (found: ['text'])"),
        (["array.jsonl"], "array.jsonl:1 has no text under 'text' (found: list)"),
        (["torn.jsonl"], "torn.jsonl:3 is no JSON"),
        (["deep.jsonl"], "deep.jsonl:1 is no JSON"),
        (["half.jsonl"], "half.jsonl:1 holds half a surrogate pair, '\\ud83d'"),
        (["latin.jsonl"], "latin.jsonl:2 is not UTF-8 text: byte 0xe9 at offset 24"),
        (["torn.jsonl.zst"], "torn.jsonl.zst cannot be read: Truncated compressed stream"),
        (["bad.jsonl.zst"], "bad.jsonl.zst cannot be read: ZSTD decompress failed"),
        (["bad.parquet"], "bad.parquet is no intact parquet file"),
        (["other.parquet"], "other.parquet has no column 'text' (found: ['body'])"),
        (["null.parquet"], "null.parquet row 1: 'text' holds no text, but NoneType"),
        (
            ["good.jsonl", "--text-key", "body"],
            "good.jsonl:1 has no text under 'body' (found: ['text'])",
        ),
        (["good.jsonl", "--weights", "1", "2"], "--weights [1.0, 2.0]: give each INPUT a number"),
        (["good.jsonl", "--weights", "0"], "--weights [0.0]: give each INPUT a number above 0"),
        (["good.jsonl", "--weights", "nan"], "--weights [nan]: give each INPUT a number above 0"),
        (["good.jsonl", "--val-fraction", "0"], "val_fraction=0.0 is not between 0 and 1"),
        (["good.jsonl", "--workers", "0"], "--workers 0 is not 1 or more"),
        (["good.jsonl", "--tokenizer", "gpt"], "tokenizer gpt does not exist"),
        (["good.jsonl", "--tokenizer", "bpe", "--bpe-vocab-size", "9"], "257 or more"),
        ([], "no INPUT"),
    ],
)
def test_bad_input_is_one_clear_line(bad_inputs, capsys, arguments, says):
    argv = [str(bad_inputs / a) if (bad_inputs / a).exists() else a for a in arguments]
    assert prepare.main([*argv, "--out", str(bad_inputs / "out")]) == 2
    found = capsys.readouterr()
    lines = [line for line in found.err.splitlines() if "MB/s" not in line]
    assert len(lines) == 1, found.err
    assert says in lines[0]
    assert found.out == ""
    assert not (bad_inputs / "out").exists()
    assert no_leftovers(bad_inputs)


@pytest.fixture
def bad_inputs(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    contents = {
        "empty.txt": b"",
        "blank.txt": b" \r\n\t\n",
        "nul.txt": b"x" * 1034 + b"\0" + b"x" * 50,
        "latin.txt": b"\xef\xbb\xbfx\xe9",
        "utf16.txt": "text".encode("utf-16"),
        "a.pdf": b"%PDF",
        "empties/a.txt": b"",
        "nothing/a.md": b"text",
        "nokey.jsonl": b'{"text": "a"}\n{"body": "b", "id": 1}\n',
        "number.jsonl": b'{"text": 7}\n',
        "array.jsonl": b'["text"]\n',
        "torn.jsonl": b'{"text": "a"}\n\n{"text": "b',
        "deep.jsonl": b"[" * 100_000,
        "half.jsonl": b'{"text": "\\ud83d"}\n',
        "latin.jsonl": b'{"text": "a"}\n{"text": "\xe9"}\n',
        "torn.jsonl.zst": compressed(os.urandom(5000).hex().encode())[:2000],
        "bad.jsonl.zst": b"not zstd at all",
        "bad.parquet": b"PAR1 no parquet",
        "good.jsonl": b'{"text": "a"}\n{"text": "b"}\n',
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "other.parquet")
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "null.parquet")
    return tmp_path


@pytest.mark.parametrize("ending", sources.NEED_PYARROW)
def test_a_missing_reader_is_named_with_its_command(tmp_path, monkeypatch, capsys, ending):
    path = tmp_path / f"a{ending}"
    path.write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert prepare.main([str(path), "--out", str(tmp_path / "out")]) == 2
    says = f"prepare: {path} needs pyarrow; install it with: pip install pyarrow\n"
    assert capsys.readouterr().err == says


def test_an_unwritable_place_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert prepare.main([str(path), "--out", str(tmp_path / "file" / "out")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert prepare.main([str(path), "--out", str(tmp_path / "file")]) == 2
    assert "exists and holds something else" in capsys.readouterr().err


def test_verify_finds_one_changed_byte(tmp_path, capsys):
    make(write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out")
    assert prepare.main(["--verify", "--out", str(tmp_path / "out")]) == 0
    shard = tmp_path / "out" / "train-00000.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    capsys.readouterr()
    assert prepare.main(["--verify", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        f"prepare: {shard} was changed: its sha256 differs; prepare the corpus again\n"
    )

"""From the config's data group to an open corpus; what the template ships; bad input."""

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from curry_train.config import DataConfig
from curry_train.data import DATASETS, DataError, open_corpus, prepare, sources, vocab_size_of
from curry_train.data.token_file import dtype_for, read_corpus

PROJECT = Path(__file__).resolve().parents[1]
BOOK = "".join(
    f"Chapter {n}. \u201cWhat now?\u201d \U0001f9d9\u200d\u2642\ufe0f\r\n"
    f"She left, {n} times.\r\n\r\n"
    for n in range(400)
)


def config(**changes):
    return dataclasses.replace(DataConfig(), **changes)


def run_python(code, *arguments, cwd=PROJECT, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=cwd, capture_output=True, text=True,
        timeout=120, check=False, env={**os.environ, "PYTHONPATH": str(PROJECT), **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    return open_corpus(DataConfig(), cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbf" + BOOK.encode())
    return path


# The embedded text


def test_the_shipped_text_is_what_the_notice_says():
    notice = (PROJECT / "NOTICE").read_text(encoding="utf-8")
    data = sources.EMBEDDED.read_bytes()
    assert hashlib.sha256(data).hexdigest() in notice
    assert len(data) < 1_000_000
    data.decode("ascii")
    for words in ("Ambrose Bierce", "1911", "dict-devil 1.0-13.1", "Public domain",
                  "Internet Wiretap 1st Online Edition", "A Public Domain Text, Copyright Expired",
                  "Entered by Aloysius of &tSftDotIotE", "Released April 15 1993"):  # fmt: skip
        assert words in notice


def test_the_shipped_text_has_no_headers_and_none_of_the_dropped_entries():
    notice = (PROJECT / "NOTICE").read_text(encoding="utf-8")
    texts = [json.loads(line)["text"] for line in sources.EMBEDDED.open(encoding="utf-8")]
    heads = {re.split(r"[,.\n]", text)[0] for text in texts}
    listed = re.search(r"religious group:\s+(.*?)\.\n", notice, re.DOTALL)[1]
    dropped = set(re.split(r",\s+", listed))
    assert len(dropped) == 999 - len(texts) == 22
    assert {"AFRICAN", "MINSTREL", "NEGRO", "HEBREW"} < dropped
    assert not heads & dropped
    joined = "".join(texts)
    assert not re.search(
        r"nigger|pickaninn|mulatto|wiretap|copyright 1911|00-database", joined, re.I
    )
    assert all(text.strip() and text.endswith("\n") and not text.endswith("\n\n") for text in texts)


def test_the_embedded_corpus_holds_every_entry_once(embedded):
    assert embedded.manifest["duplicates_removed"] == 2
    splits = embedded.manifest["splits"]
    assert splits["train"]["documents"] + splits["val"]["documents"] == 977 - 2
    assert 0.04 < splits["val"]["documents"] / 975 < 0.08
    texts = {json.loads(line)["text"] for line in sources.EMBEDDED.open(encoding="utf-8")}
    assert embedded.train.bytes + embedded.val.bytes == sum(len(text) for text in texts)


def test_opening_the_embedded_text_takes_well_under_a_second(tmp_path):
    start, busy = time.perf_counter(), time.process_time()
    open_corpus(DataConfig(), cache_dir=tmp_path)
    assert time.process_time() - busy < 0.7
    assert time.perf_counter() - start < 5, "even on a very busy machine"
    busy = time.process_time()
    open_corpus(DataConfig(), cache_dir=tmp_path)
    assert time.process_time() - busy < 0.1


def test_the_embedded_split_is_pinned(embedded):
    """A change here changes every published loss: the thresholds then have to be measured again."""
    assert (embedded.train.tokens, embedded.val.tokens) == (351254, 22708)


def test_no_data_module_but_the_loader_imports_torch():
    code = (
        "import sys; from pathlib import Path; from curry_train.config import DataConfig\n"
        "from curry_train.data import open_corpus, vocab_size_of\n"
        "open_corpus(DataConfig(), cache_dir=Path(sys.argv[1])); vocab_size_of(DataConfig())\n"
        "print('torch' in sys.modules)\n"
    )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = run_python(code, folder)
    assert found.stdout == "False\n", found.stderr


# The user's own text


def test_a_book_with_crlf_bom_and_emoji_opens(book, tmp_path):
    for kind, size in (("byte", 257), ("bpe", 300)):
        data = config(input=str(book), tokenizer=kind, bpe_vocab_size=300)
        corpus = open_corpus(data, cache_dir=tmp_path / "cache")
        text = "".join(
            corpus.tokenizer.decode(stream.window(1, stream.tokens))
            for stream in (corpus.train, corpus.val)
        )
        normal = BOOK.replace("\r\n", "\n")
        assert sorted(text) == sorted(normal)
        assert "\U0001f9d9\u200d\u2642\ufe0f\nShe left, 17 times.\n\n" in text
        assert corpus.train.bytes + corpus.val.bytes == len(normal.encode())
        assert corpus.val.bytes > 500
        assert corpus.tokenizer.vocab_size <= size == vocab_size_of(data)


def test_the_same_text_gives_the_same_hash_wherever_it_lies(book, tmp_path):
    one = open_corpus(config(input=str(book)), cache_dir=tmp_path / "one")
    moved = tmp_path / "elsewhere" / "renamed.txt"
    moved.parent.mkdir()
    moved.write_bytes(book.read_bytes())
    two = open_corpus(config(input=str(moved)), cache_dir=tmp_path / "two")
    assert one.hash == two.hash
    assert re.fullmatch("[0-9a-f]{64}", one.hash)
    for changes in ({"val_fraction": 0.2}, {"tokenizer": "bpe"}):
        other = open_corpus(config(input=str(book), **changes), cache_dir=tmp_path / "one")
        assert other.hash != one.hash
    book.write_bytes(book.read_bytes() + b"More.\n")
    assert open_corpus(config(input=str(book)), cache_dir=tmp_path / "one").hash != one.hash


def test_what_does_not_change_the_tokens_does_not_change_the_hash(book, tmp_path):
    one = open_corpus(config(input=str(book)), cache_dir=tmp_path)
    two = open_corpus(config(input=str(book), seq_len=64, bpe_vocab_size=999), cache_dir=tmp_path)
    assert one.hash == two.hash
    assert len(list(tmp_path.glob("*/manifest.json"))) == 1, "one cache entry"


def test_without_a_cache_nothing_is_left_behind(book, tmp_path):
    code = (
        "import sys; from curry_train.config import DataConfig\n"
        "from curry_train.data import open_corpus\n"
        "print(open_corpus(DataConfig(input=sys.argv[1]), cache_dir=None).folder)\n"
    )
    (tmp_path / "temp").mkdir()
    (tmp_path / "cwd").mkdir()
    found = run_python(code, book, cwd=tmp_path / "cwd", TMPDIR=str(tmp_path / "temp"))
    assert found.stdout.startswith(str(tmp_path / "temp")), found.stderr
    assert list((tmp_path / "temp").iterdir()) == list((tmp_path / "cwd").iterdir()) == []
    data = config(input=str(book), cache_dir=str(tmp_path / "cache"))
    cached = open_corpus(data, cache_dir=tmp_path / "cache")
    assert open_corpus(data, cache_dir=None).folder == cached.folder


def test_ranks_that_start_together_share_one_preparation(book, tmp_path):
    code = (
        "import sys; from pathlib import Path; from curry_train.config import DataConfig\n"
        "from curry_train.data import open_corpus\n"
        "data = DataConfig(input=sys.argv[1], tokenizer='bpe')\n"
        "print(open_corpus(data, cache_dir=Path(sys.argv[2])).hash)\n"
    )
    command = [sys.executable, "-c", code, str(book), str(tmp_path / "cache")]
    running = [
        subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(5)
    ]
    ends = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * 5, ends
    assert len({out for out, _ in ends}) == 1
    assert all(err == b"" for _, err in ends), "quick work prints nothing"
    assert len(list((tmp_path / "cache").iterdir())) == 1, "no work folder stays"


# python_stdlib


def test_python_stdlib_is_the_interpreters_own_library(tmp_path):
    source = sources.python_stdlib()
    root = Path(sources.sysconfig.get_paths()["stdlib"])
    names = {path.relative_to(root).as_posix() for path, _ in source.files}
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} < names
    assert not [n for n in names if re.search(r"(^|/)(tests?|(site|dist)-packages)/", n)]
    corpus = open_corpus(config(dataset="python_stdlib"), cache_dir=tmp_path)
    assert corpus.manifest["sources"][0]["sha256"] == source.sha256
    documents = sum(s["documents"] for s in corpus.manifest["splits"].values())
    assert documents + corpus.manifest["duplicates_removed"] <= len(source.files)
    assert documents > 400, "a file is a document"


@pytest.mark.parametrize("content", [None, "print()\n"])
def test_a_python_without_its_library_is_one_line(tmp_path, monkeypatch, content):
    root = tmp_path / "lib"
    if content:
        root.mkdir()
        (root / "os.py").write_text(content)
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    with pytest.raises(
        DataError, match=r"library holds \d+ bytes of source.*set data.input"
    ) as caught:
        open_corpus(config(dataset="python_stdlib"), cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_every_dataset_has_its_yaml():
    assert {path.stem for path in (PROJECT / "configs" / "data").glob("*.yaml")} >= set(DATASETS)


# Bad input


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"does not exist"),
        (b"", r"is empty"),
        (b"\n \n", r"no text in it"),
        (b"ok\0no", r"not UTF-8 text: byte 0x00 at offset 2"),
        (b"ok\xff\xfe", r"not UTF-8 text: byte 0xff at offset 2"),
        (b"one line", r"the training split holds 9 tokens, fewer than one window of data.seq_len"),
        (b"long line " * 90, r"the validation split holds 0 tokens, fewer than one window of"),
        (b"first words\n\n" * 90, r"the validation split holds 144 tokens, fewer than one window"),
    ],
)  # fmt: skip
def test_bad_text_is_one_clear_line(tmp_path, content, says):
    path = tmp_path / "in.txt"
    if content is not None:
        path.write_bytes(content)
    seq_len = 128 if content is None or len(content) < 1000 else 600
    with pytest.raises(DataError, match=says) as caught:
        open_corpus(config(input=str(path), seq_len=seq_len), cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    if content is None or len(content) < 7:
        assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_an_unknown_dataset_is_told_with_the_list(tmp_path):
    with pytest.raises(DataError, match=f"data.dataset=wiki is unknown.*{', '.join(DATASETS)}"):
        open_corpus(config(dataset="wiki"), cache_dir=tmp_path)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, float("nan")])
def test_a_val_fraction_outside_of_zero_to_one_is_refused(book, tmp_path, fraction):
    with pytest.raises(DataError, match="is not between 0 and 1"):
        open_corpus(config(input=str(book), val_fraction=fraction), cache_dir=tmp_path)


def _prepared(book, out, **settings):
    return prepare.prepare([sources.find_source(book)], out, prepare.Settings(**settings))


def test_a_prepared_folder_opens_and_keeps_its_split(book, tmp_path):
    out = _prepared(book, tmp_path / "out", val_fraction=0.3)
    corpus = open_corpus(config(input=str(out)), cache_dir=None)
    assert corpus.folder == out
    assert corpus.manifest["val_fraction"] == 0.3
    assert vocab_size_of(config(input=str(out))) == 257


def test_a_foreign_tokenizer_is_refused_with_the_right_setting(book, tmp_path):
    out = _prepared(book, tmp_path / "out", tokenizer="bpe", bpe_vocab_size=300)
    own = out / "tokenizer.json"
    for right in ({}, {"tokenizer": str(own)}, {"tokenizer": "bpe", "bpe_vocab_size": 300}):
        open_corpus(config(input=str(out), **right), cache_dir=None)
        assert vocab_size_of(config(input=str(out), **right)) == 300
    other = _prepared(book, tmp_path / "other", tokenizer="bpe", bpe_vocab_size=290)
    foreign = ("byte", "bpe", str(other / "tokenizer.json"))
    for wrong in ({"tokenizer": name} for name in foreign):
        with pytest.raises(DataError, match="was made with a bpe tokenizer of 300 ids") as caught:
            open_corpus(config(input=str(out), **wrong), cache_dir=None)
        assert "set data.tokenizer=auto" in str(caught.value)
        assert "\n" not in str(caught.value)


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda out: _flip(out / "train-00000.bin"), "train-00000.bin was changed: its sha256"),
        (lambda out: _flip(out / "train.ends.bin"), "ends.bin was changed: its sha256"),
        (lambda out: os.truncate(out / "train-00000.bin", 100), "has 100 bytes, not"),
        (lambda out: (out / "train-00000.bin").unlink(), "train-00000.bin is missing"),
        (lambda out: (out / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
        (lambda out: (out / "tokenizer.json").write_text('{"type": "byte"}'), None),
        (lambda out: (out / "manifest.json").write_text("{torn"), "manifest.json cannot be read"),
        (lambda out: (out / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
        (lambda out: (out / "manifest.json").write_text('{"format": 9}'), "has format 9"),
        (
            lambda out: (out / "manifest.json").write_text('{"format": 2}'),
            "is damaged .KeyError 'splits'",
        ),
    ],
)
def test_a_damaged_corpus_is_one_clear_line(book, tmp_path, damage, says):
    out = _prepared(book, tmp_path / "out")
    damage(out)
    if says is None:  # our own JSON in another spelling is the same tokenizer
        assert read_corpus(out).tokenizer.vocab_size == 257
        return
    with pytest.raises(DataError, match=says) as caught:
        open_corpus(config(input=str(out)), cache_dir=None)
    assert "\n" not in str(caught.value)


def test_a_swapped_tokenizer_file_is_refused(book, tmp_path):
    out = _prepared(book, tmp_path / "out")
    bpe = _prepared(book, tmp_path / "bpe", tokenizer="bpe", bpe_vocab_size=300)
    (out / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="is not the tokenizer that made this corpus"):
        read_corpus(out)


@pytest.mark.parametrize(
    ("key", "value"),
    [("dtype", "no"), ("dtype", None), ("splits", 3), ("splits", {}), ("tokenizer", []),
     ("splits", {"train": {}, "val": {}}), ("splits", {"train": {"shards": [{}]}, "val": {}})],
)  # fmt: skip
def test_a_manifest_with_wrong_values_is_one_clear_line(book, tmp_path, key, value):
    out = _prepared(book, tmp_path / "out")
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, key: value}))
    with pytest.raises(DataError, match="manifest.json"):
        open_corpus(config(input=str(out)), cache_dir=None)


# Sizes


def test_ids_take_the_smallest_type_that_holds_them():
    assert [dtype_for(n).itemsize for n in (1, 257, 2**16, 2**16 + 1, 2**32)] == [2, 2, 2, 4, 4]


def test_a_vocabulary_beyond_two_bytes_is_stored_in_four(book, tmp_path):
    from tokenizers import Tokenizer

    bpe = _prepared(book, tmp_path / "bpe", tokenizer="bpe", bpe_vocab_size=300)
    wide = json.loads((bpe / "tokenizer.json").read_text())
    merged = Tokenizer.from_str(json.dumps(wide)).get_vocab_size()
    for n in range(70_000):
        wide["model"]["vocab"][f"<{n}>"] = merged + n
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(wide))
    corpus = read_corpus(_prepared(book, tmp_path / "wide", tokenizer=str(path)))
    assert corpus.manifest["dtype"] == "uint32"
    assert vocab_size_of(config(tokenizer=str(path))) == corpus.tokenizer.vocab_size == 70_300
    text = corpus.tokenizer.decode(corpus.val.window(1, corpus.val.tokens))
    assert text.startswith(("Chapter", "She"))


def test_vocab_size_is_none_where_it_cannot_be_told(tmp_path):
    assert vocab_size_of(config(tokenizer=str(tmp_path / "none.json"))) is None
    assert vocab_size_of(config(tokenizer="bpe", bpe_vocab_size=512)) == 512
    assert vocab_size_of(config()) == 257
    (tmp_path / "manifest.json").write_text("torn")
    assert vocab_size_of(config(input=str(tmp_path))) is None

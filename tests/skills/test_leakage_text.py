"""Leaks between texts: copies, near copies, parts, packed documents; clean text is left alone."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import os
import resource
import sys

import numpy as np
import pytest
from skills.targets import processes
from skills.targets.processes import MLP, ROOT

SCRIPT = ROOT / "skills" / "leakage-safe-data" / "scripts" / "leakage_safe_data.py"
sys.path.insert(0, str(SCRIPT.parent))
leakage = importlib.import_module("leakage_safe_data")
sys.dont_write_bytecode = False  # the script sets it for itself
hashing = importlib.import_module("text_hashing")
overlap = importlib.import_module("text_overlap")
documents = importlib.import_module("text_documents")
checks = importlib.import_module("text_checks")
corpora = importlib.import_module("corpus_checks")

WORDS = np.array([f"w{n}" for n in range(5000)])


def text(draw, count=80):
    return " ".join(WORDS[np.minimum(draw.zipf(1.3, count), 4999)])


def texts(draw, count, words=80):
    return [text(draw, words) for _ in range(count)]


def changed(draw, value, count):
    own = value.split()
    for place in draw.choice(len(own), count, replace=False):
        own[place] = f"new{place}"
    return " ".join(own)


def as_documents(values, name):
    return [documents.Document(value, f"{name}:{n}") for n, value in enumerate(values)]


def compared(train, *held, batch=50):
    """Compare lists of texts; returns ({id: finding}, the held-out sets)."""
    sets = [overlap.hold_out(f"set{n}", as_documents(h, f"h{n}")) for n, h in enumerate(held)]
    made = as_documents(train, "t")
    batches = [made[at : at + batch] for at in range(0, len(made), batch)]
    found = checks.judge(sets, overlap.compare(batches, sets))
    return {f.id: f for f in found}, sets


def verdicts(found):
    return {id for id, finding in found.items() if finding.verdict == "fail"}


# Hashes


def test_words_are_told_apart_and_signs_case_and_width_are_not():
    values = [
        "Hello, World!",
        "hello  world",
        "“HELLO” — ｗｏｒｌｄ",
        "hello wor ld",
        "你好",
        "你 好",
        "?!",
    ]
    words = hashing.words_of(values)
    assert words.keys[0] == words.keys[1] == words.keys[2] != words.keys[3]
    assert words.keys[4] == words.keys[5] and words.counts.tolist() == [2, 2, 2, 3, 2, 2, 0]
    assert len(set(hashing.words_of(["?!", "...", ""]).keys.tolist())) == 3


def test_ngrams_equal_exactly_where_words_do_and_end_with_their_text():
    draw = np.random.default_rng(0)
    values = [*texts(draw, 30, 20), "", "one", "one two"]
    words = hashing.words_of(values)
    for size in (1, 2, 5, 13):
        found, owners = hashing.grams(words, size)
        wanted = [
            (n, tuple(v.split()[at : at + size]))
            for n, v in enumerate(values)
            for at in range(len(v.split()) - size + 1)
        ]
        assert owners.tolist() == [n for n, _ in wanted]
        names = {}
        for (_, gram), value in zip(wanted, found.tolist(), strict=True):
            assert names.setdefault(gram, value) == value
        assert len(set(names.values())) == len(names)
    some, owners = hashing.grams(words, 5, np.array([3, 7]))
    assert set(owners.tolist()) == {3, 7} and len(some) == 32


def test_minhash_bands_meet_as_often_as_the_formula_says():
    draw = np.random.default_rng(1)
    for jaccard in (0.5, 0.8):
        met, pairs = 0, 300
        for _ in range(pairs):
            size = 90
            shared = round(2 * size * jaccard / (1 + jaccard))
            all_grams = draw.integers(2**63, size=2 * size - shared, dtype=np.uint64)
            one, other = all_grams[:size], all_grams[size - shared :]
            values = np.concatenate([one, other])
            _, keys = hashing.band_keys(values, np.repeat([0, 1], size))
            met += bool((keys[0] == keys[1]).any())
        expected = 1 - (1 - jaccard**4) ** 16
        assert met / pairs == pytest.approx(expected, abs=0.08)


# Findings


@pytest.mark.parametrize("words", [12, 25, 45, 100, 400])
def test_copies_and_near_copies_of_any_length_are_found(words):
    draw = np.random.default_rng(words)
    train, held = texts(draw, 200, words), texts(draw, 60, words)
    held[3] = train[17].upper().replace(" ", ", ")
    held[9] = " ".join(train[150].split()[1:]) if words < 20 else changed(draw, train[150], 1)
    found, (known,) = compared(train, held)
    assert known.copied.tolist() == [n == 3 for n in range(60)]
    assert known.near.tolist() == [n == 9 for n in range(60)]
    assert known.source[3] == "t:17" and known.source[9] == "t:150"
    assert verdicts(found) == {"leak-duplicates", "leak-near-duplicates"}
    assert "h0:3 = t:17" in found["leak-duplicates"].message


def test_near_copies_are_those_of_comparing_all_with_all():
    draw = np.random.default_rng(4)
    train = texts(draw, 60, 200)
    held = [changed(draw, value, int(draw.integers(0, 4))) for value in train]
    _, (known,) = compared(train, held)

    def grams(value):
        own = value.split()
        return {tuple(own[at : at + 13]) for at in range(len(own) - 12)}

    for n, value in enumerate(held):
        best = max(len(grams(value) & grams(t)) / len(grams(value) | grams(t)) for t in train)
        exact = known.copied[n] or known.near[n]
        assert exact == (best >= 0.8), (n, best, known.jaccard[n])


def test_a_part_of_a_longer_training_text_is_found_and_its_form_is_not():
    draw = np.random.default_rng(5)
    form = (
        "Answer the following question about the passage above as shortly as you can please now: "
        "use only what the text says, name no source and give a reason for each of your words "
    )
    train, held = texts(draw, 100, 300), [form + t for t in texts(draw, 40, 20)]
    train[:8] = [form + t for t in train[:8]]
    assert verdicts(compared(train, held)[0]) == set()
    train[50] += " " + held[7].removeprefix(form) + " " + text(draw, 100)
    found, (known,) = compared(train, held)
    assert np.flatnonzero(known.partly).tolist() == [7] and verdicts(found) == {"leak-evaluation"}


def test_a_benchmark_that_is_in_train_many_times_is_found_though_its_ngrams_are_common():
    draw = np.random.default_rng(6)
    train, held = texts(draw, 100, 150), texts(draw, 50, 40)
    for at in range(30):
        train[at] += " " + held[5]
    assert compared(train, held)[1][0].partly[5]
    phrase = text(draw, 14)
    spread = [t + " " + phrase for t in train]
    quoted = [*held[6:], text(draw, 8) + " " + phrase]
    assert not compared(spread[30:], quoted)[1][0].partly.any()


def test_short_questions_are_matched_whole_and_shorter_texts_by_how_often():
    draw = np.random.default_rng(7)
    train, held = texts(draw, 100, 60), texts(draw, 40, 9)
    train[3] += " " + held[2] + " and so on"
    assert np.flatnonzero(compared(train, held)[1][0].partly).tolist() == [2]
    chat = draw.choice(["yes", "no", "ok", "thank you", "see you"], 300).tolist()
    found, _ = compared([*chat, *texts(draw, 50)], draw.choice(chat, 60).tolist())
    assert (
        found["leak-duplicates"].verdict == "pass"
        and "repeat by themselves" in found["leak-duplicates"].message
    )
    assert found["leak-evaluation"].verdict == "skipped"
    names = [f"item {n}" for n in range(300)]
    found, _ = compared(names[:200], names[190:])
    assert found["leak-duplicates"].verdict == "fail"
    assert found["leak-duplicates"].value == pytest.approx(10 / 110)


def test_many_near_copies_of_one_text_in_both_sides_are_all_found():
    draw = np.random.default_rng(8)
    base = text(draw, 200)
    train = [*texts(draw, 50, 200), *(changed(draw, base, 1) for _ in range(40)), base]
    held = [*texts(draw, 30, 200), *(changed(draw, base, 1) for _ in range(60))]
    _, (known,) = compared(train, held, batch=17)
    assert (known.near | known.copied).tolist() == [False] * 30 + [True] * 60


def test_clean_text_has_no_finding_at_twenty_seeds():
    for seed in range(20):
        draw = np.random.default_rng(100 + seed)
        size = [9, 20, 60, 200][seed % 4]
        assert verdicts(compared(texts(draw, 80, size), texts(draw, 30, size))[0]) == set(), seed


def test_sums_and_permutations_of_few_words_are_no_near_copies():
    draw = np.random.default_rng(9)
    pairs = list(itertools.product(range(10, 40), repeat=2))
    draw.shuffle(pairs)
    sums = [f"what is {a} plus {b} ? the answer is {a + b}" for a, b in pairs]
    found, _ = compared(sums[:700], sums[700:])
    assert "leak-near-duplicates" not in verdicts(found) and "leak-duplicates" not in verdicts(
        found
    )
    letters = [" ".join(draw.permutation(list("abcdefghijklmn"))) for _ in range(300)]
    assert verdicts(compared(letters[:200], letters[200:])[0]) == set()


# Files


def write_jsonl(path, values, **more):
    lines = [
        json.dumps({"text": v, **{k: m[n] for k, m in more.items()}}) for n, v in enumerate(values)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(monkeypatch, capfd, folder, *words):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
    code = leakage.main()
    told = capfd.readouterr()
    return code, told.out, told.err


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "parquet", "txt", "folder", "lines"])
def test_every_format_gives_the_same_finding(monkeypatch, capfd, tmp_path, form):
    draw = np.random.default_rng(10)
    sides = {"train": texts(draw, 30), "test": texts(draw, 10)}
    sides["test"][4] = sides["train"][8]
    for name, values in sides.items():
        path = tmp_path / f"{name}.{form}"
        if form == "folder":
            path.mkdir()
            for n, value in enumerate(values):
                (path / f"{n:02d}.txt").write_text(value)
            (path / ".hidden.txt").write_text("never read")
        elif form == "txt":
            path.write_text("\n\n".join(values))
        elif form == "lines":
            path = tmp_path / f"{name}.lines.txt"
            path.write_text("\n".join(values))
        elif form == "parquet":
            pyarrow = pytest.importorskip("pyarrow")
            parquet = importlib.import_module("pyarrow.parquet")
            parquet.write_table(pyarrow.table({"text": values}), path)
        else:
            plain = write_jsonl(tmp_path / f"{name}.jsonl", values)
            if form == "jsonl.gz":
                path.write_bytes(gzip.compress(plain.read_bytes()))
    end = "lines.txt" if form == "lines" else form
    words = ["--train", f"train.{end}", "--test", f"test.{end}", "--json"]
    code, out, err = run(monkeypatch, capfd, tmp_path, *words)
    assert code == 1, err
    report = json.loads(out)
    (fail,) = [check for check in report["checks"] if check["verdict"] == "fail"]
    assert fail["id"] == "leak-duplicates" and fail["value"] == pytest.approx(0.1)
    assert report["numbers"]["test"]["copies"] == 1
    (example,) = report["numbers"]["test"]["examples"]
    wanted = {"txt": ("test.txt:9", "train.txt:17"), "folder": ("04.txt", "08.txt")}
    place, twin = wanted.get(form, (":5", ":9") if form != "parquet" else ("row 4", "row 8"))
    assert example["place"].endswith(place) and example["twin"].endswith(twin)
    assert os.path.getsize(report["artifacts"][0]) > 1000


def test_several_evaluations_are_judged_by_the_worst(monkeypatch, capfd, tmp_path):
    draw = np.random.default_rng(11)
    train, clean, known = texts(draw, 40), texts(draw, 20), texts(draw, 20, 30)
    train[6] = text(draw) + " " + known[3] + " " + text(draw)
    for name, values in (("train", train), ("clean", clean), ("known", known)):
        write_jsonl(tmp_path / f"{name}.jsonl", values)
    words = ["--train", "train.jsonl", "--eval", "clean.jsonl", "--eval", "known.jsonl"]
    code, out, err = run(monkeypatch, capfd, tmp_path, *words)
    assert code == 1 and "1 of 20 documents of eval known.jsonl are partly in train" in out, err
    assert out.startswith("leakage-safe-data: 40 training documents against 20 of eval clean.jsonl")
    assert "known.jsonl:4" in out and len(out.splitlines()) <= 15


@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_one_document_on_both_sides_are_found(monkeypatch, capfd, tmp_path, packed):
    draw = np.random.default_rng(12)
    for shift, code in ((20, 0), (19, 1)):
        groups = [list(range(20)), list(range(shift, shift + 10))]
        for name, own in zip(("train", "test"), groups, strict=True):
            keys = [[n, 1000 + n + 500 * (name == "test")] for n in own] if packed else own
            write_jsonl(tmp_path / f"{name}.jsonl", texts(draw, len(own)), doc=keys)
        words = ["--train", "train.jsonl", "--test", "test.jsonl", "--group", "doc", "--json"]
        found, out, err = run(monkeypatch, capfd, tmp_path, *words)
        check = {c["id"]: c for c in json.loads(out)["checks"]}["leak-packed-documents"]
        assert (found, check["verdict"]) == ((code, "fail" if code else "pass")), err
        assert check["value"] == (0.1 if code else 0.0)


BAD = {
    "no file": (None, ["--train", "gone.jsonl", "--test", "b.jsonl"], "no such file"),
    "empty": ({"a.jsonl": b""}, [], "is empty"),
    "blank": ({"a.jsonl": b"\n\n"}, [], "--train holds no document"),
    "no text": ({"b.jsonl": b'{"text": "  "}\n'}, [], "--test holds no document"),
    "no JSON": ({"a.jsonl": b'{"text": "x"\n'}, [], "a.jsonl:1 is no JSON"),
    "no object": ({"a.jsonl": b"[1]\n"}, [], "a.jsonl:1 is a list"),
    "no key": ({"a.jsonl": b'{"body": "x"}\n'}, [], "no 'text' (it has body)"),
    "number": ({"a.jsonl": b'{"text": 3}\n'}, [], "'text' is int"),
    "no group": (None, ["--group", "doc"], "no 'doc'"),
    "latin": ({"a.jsonl": b'{"text": "caf\xe9"}\n'}, [], "no UTF-8: byte 0xe9"),
    "gz": ({"a.jsonl.gz": b"plain"}, ["--train", "a.jsonl.gz"], "broken gzip"),
    "torn gz": (
        {"a.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 99)[:-9]},
        ["--train", "a.jsonl.gz"],
        "broken gzip",
    ),
    "parquet": ({"a.parquet": b"PAR1"}, ["--train", "a.parquet"], "no whole parquet"),
    "wrong end": ({"a.docx": b"x"}, ["--train", "a.docx"], "no text file"),
    "no test": (None, ["--test", ""], "--train and what it is compared with"),
    "column": (None, ["--time", "day"], "--time without a table"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_plain_words(monkeypatch, capfd, tmp_path, name):
    files, words, says = BAD[name]
    for file, content in {
        "a.jsonl": b'{"text": "x"}\n',
        "b.jsonl": b'{"text": "y"}\n',
        **(files or {}),
    }.items():
        (tmp_path / file).write_bytes(content)
    code, out, err = run(
        monkeypatch, capfd, tmp_path, "--train", "a.jsonl", "--test", "b.jsonl", *words
    )
    assert code == 2 and says in err and "Traceback" not in err and out == ""


@pytest.mark.skipif(not os.environ.get("CURRY_TRAIN_FULL"), reason="100 MB of text (--full)")
def test_a_hundred_megabytes_are_read_in_little_memory(tmp_path):
    draw = np.random.default_rng(13)
    pool = [text(draw, 400) for _ in range(400)]
    with open(tmp_path / "train.jsonl", "w") as file:
        for number in range(66_000):
            one, other = draw.integers(0, 400, 2)
            value = f"{number} " + pool[one][:900] + f" {number} " + pool[other][900:1900]
            file.write(json.dumps({"text": value}) + "\n")
    assert (tmp_path / "train.jsonl").stat().st_size > 98e6
    write_jsonl(tmp_path / "test.jsonl", texts(draw, 1000, 300))
    done = processes.run_fresh(
        SCRIPT, "--train", "train.jsonl", "--test", "test.jsonl", "--json", cwd=tmp_path
    )
    assert done.returncode in (0, 1), done.stderr
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # kilobytes on Linux
    assert peak < 2_000_000
    assert "expected: about" in done.stderr


# A project's own data


def test_a_project_is_clean_and_its_order_is_exact(tmp_path, fresh_project):
    code, report = of_project(fresh_project)
    assert code == 0 and {c["verdict"] for c in report["checks"]} == {"pass"}
    assert report["numbers"]["val"]["documents"] > 50
    crossing = report["numbers"]["packing"]["windows_of_several_documents"]
    assert 0.1 < crossing < 0.9


def test_near_copies_in_a_projects_text_and_the_mask_are_told(fresh_project, tmp_path):
    draw = np.random.default_rng(14)
    values = texts(draw, 120, 120)
    values += [changed(draw, value, 1) for value in values[:60]]
    write_jsonl(tmp_path / "own.jsonl", values)
    words = ["--set", f"data.input={tmp_path / 'own.jsonl'}", "data.val_fraction=0.3"]
    code, report = of_project(fresh_project, *words, "data.document_mask=false")
    assert code == 1
    (fail,) = [c for c in report["checks"] if c["verdict"] == "fail"]
    assert fail["id"] == "leak-near-duplicates" and fail["value"] > 0.1
    packed = {c["id"]: c for c in report["checks"]}["leak-packed-documents"]
    assert "data.document_mask off" in packed["message"]
    assert report["numbers"]["packing"]["attended_pairs_across_documents"] > 0.01


@pytest.fixture(scope="module")
def fresh_project(tmp_path_factory):
    """A copy of the template as init makes it."""
    folder = tmp_path_factory.mktemp("leak") / "project"
    init = ROOT / "skills" / "start-project" / "scripts" / "init.py"
    done = processes.run_fresh(init, folder, "--no-install", cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return folder


def of_project(project, *words):
    done = processes.run(SCRIPT, "--project", project, *words, "--json", cwd=project)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


class Stream:
    """A stream of tokens as the project's."""

    eos_id = 0

    def __init__(self, documents):
        ids = [0]
        for document in documents:
            ids += [*document, 0]
        self.ids = np.array(ids)
        self.tokens = len(ids) - 1
        self.document_ends = np.flatnonzero(self.ids == 0)[1:]

    def window(self, start, length):
        return self.ids[start : start + length]


def test_pairs_across_documents_are_counted_as_by_hand():
    draw = np.random.default_rng(15)
    stream = Stream([draw.integers(1, 9, draw.integers(1, 30)) for _ in range(80)])
    length = 16
    windows = stream.tokens // length
    crossing = pairs = several = 0
    for at in range(windows):
        owner = np.cumsum(stream.ids[at * length : (at + 1) * length] == 0)
        several += owner[0] != owner[-1] if stream.ids[at * length] else owner[-1] > 1
        for query in range(length):
            pairs += query + 1
            crossing += int((owner[: query + 1] != owner[query]).sum())
    share, across = corpora.packing(stream, length)
    assert share == pytest.approx(several / windows) and across == pytest.approx(crossing / pairs)
    assert corpora._whole(stream)
    stream.tokens -= 1
    assert not corpora._whole(stream)


class Counting:
    """A loader whose order can be broken."""

    samples_per_epoch, global_batch_size = 64, 8

    def __init__(self, fault=None):
        self.samples_consumed, self.fault, self.reads = 0, fault, 0

    def next_step(self):
        import torch

        at = np.arange(self.samples_consumed, self.samples_consumed + 8)
        self.samples_consumed += 8
        self.reads += 1
        epoch, place = at // 64, at % 64
        if self.fault == "repeats":
            place = place // 2
        if self.fault == "not resumed" and self.reads > 9:
            place = (place + 1) % 64
        order = np.stack([np.random.default_rng(e).permutation(64) for e in range(4)])
        return [{"inputs": torch.tensor(order[epoch, place])[:, None]}]


@pytest.mark.parametrize("fault", [None, "repeats", "not resumed"])
def test_an_order_that_repeats_or_cannot_be_resumed_is_found(fault):
    from types import SimpleNamespace as Space

    samples = {"inputs": np.arange(64)[:, None]}
    config = Space(run=Space(max_steps=16), data=Space(seq_len=1))
    runtime = Space(corpus=Space(train=samples), config=config)
    target = Space(batches=Counting(fault), runtime=runtime)
    found = corpora.check_order(target)
    assert found.verdict == ("fail" if fault else "pass"), found.message
    assert ("twice" in found.message) == (fault == "repeats")


def test_foreign_batches_are_built_twice_and_compared(tmp_path):
    done = processes.run(SCRIPT, "--target", MLP, "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    verdicts = {check["id"]: check["verdict"] for check in report["checks"]}
    assert done.returncode == 0, done.stderr
    assert verdicts == {"leak-order": "pass", "leak-shuffled-labels": "skipped"}
    (tmp_path / "unseeded.py").write_text(
        "import os, torch\n\n\ndef build():\n    g = torch.Generator()\n    g.seed()\n"
        "    data = [torch.randn(4, 3, generator=g) for _ in range(3)]\n"
        "    model = torch.nn.Linear(3, 1)\n    return model, data, lambda m, b: m(b).mean()\n"
    )
    done = processes.run(SCRIPT, "--target", "unseeded.py:build", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    order = {check["id"]: check for check in report["checks"]}["leak-order"]
    assert done.returncode == 1 and order["value"] == 12, done.stderr


LABELS = """
import torch

LEAK = {leak}


def build():
    g = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(600, 24, generator=g), torch.randint(3, (600,), generator=g)

    def transform(inputs, labels):
        if LEAK:
            inputs = torch.cat([inputs, torch.nn.functional.one_hot(labels, 3).float()], 1)
        else:
            inputs = torch.cat([inputs, inputs[:, :3]], 1)
        return [{{"x": x, "y": y}} for x, y in zip(inputs.split(20), labels.split(20))]

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(27, 128), torch.nn.ReLU(), torch.nn.Linear(128, 3))
    loss = lambda m, b: torch.nn.functional.cross_entropy(m(b["x"]), b["y"])
    return dict(model=model, batches=transform(inputs, labels), loss_fn=loss,
                optimizer=torch.optim.AdamW(model.parameters(), 1e-2),
                data=(inputs, labels, transform))
"""


@pytest.mark.parametrize("leak", [False, True])
def test_a_targets_model_cannot_learn_shuffled_labels(tmp_path, leak):
    (tmp_path / "labels.py").write_text(LABELS.format(leak=leak))
    done = processes.run(SCRIPT, "--target", "labels.py:build", "--json", cwd=tmp_path)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    check = {c["id"]: c for c in report["checks"]}["leak-shuffled-labels"]
    assert check["verdict"] == ("fail" if leak else "pass"), check
    assert done.returncode == int(leak)
    if leak:
        assert report["numbers"]["inflation"]["leak-shuffled-labels"] > 0.5


def test_pieces_of_one_file_on_both_sides_are_told():
    from types import SimpleNamespace as Space

    sources = [{"name": "book.txt", "files": 1}, {"name": "many", "files": 300}]
    assert corpora._pieces_note(Space(manifest={"sources": sources[1:]})) == []
    assert corpora._pieces_note(Space(manifest={"sources": sources})) == [
        "pieces of one file are in both splits: book.txt (val is no new book)"
    ]

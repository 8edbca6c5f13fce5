#!/usr/bin/env python3
"""Run the equality matrix: `python tests/equality/matrix.py [--full] [--only NAME] [--write-docs]`.

Every layout that is accepted trains as one process does. The proofs go to runs/checks/equality/ as
table.json and table.txt; --write-docs puts the table into docs/equality.md as well. `make test`
runs the same cells. --full takes every cell of 8 ranks, cells of 32 and compiled ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from curry_train.equality import Proof

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs" / "equality.md"


class Refusal(NamedTuple):
    """A layout that is refused. words, more: of the case; says: part of the message; accepted: a
    setting of which any makes it run."""

    name: str
    world: int
    words: str
    says: str
    reason: str
    accepted: tuple[str, ...]
    more: tuple[str, ...] = ()


SPLIT = "`interleaved_zb`, `zbv` and `dualpipev` compute weight gradients after a block's"
REFUSALS = (
    Refusal(
        "split-backward-reshard", 4, "pp=2 dp_shard=2 zero=3 schedule=zbv reshard=true",
        "weight gradients after a block's parameters would be gone",
        f"{SPLIT} activations' ones; parameters dropped in between give wrong gradients",
        ("parallel.reshard=auto", "parallel.schedule=1f1b"),
    ),
    Refusal(
        "split-backward-compile", 4, "pp=2 dp_shard=2 schedule=interleaved_zb compile=true",
        "a compiled block is one node to autograd",
        "a compiled block is one node to autograd, whose backward cannot be split",
        ("compile=false", "parallel.schedule=1f1b"),
    ),
    Refusal(
        "dualpipev-micro-batches", 2, "pp=2 schedule=dualpipev",
        "at least 2 * parallel.pp = 4 micro-batches, and a step has 2",
        "the two directions of `dualpipev` need 2*pp micro-batches to meet",
        ("data.micro_batch_size=2", "parallel.schedule=1f1b"), ("data.micro_batch_size=4",),
    ),
    Refusal(
        "tp-divides-heads", 2, "tp=2 model.num_key_value_heads=1",
        "does not divide model.num_key_value_heads=1", "whole heads go to a rank",
        ("model.num_key_value_heads=2",),
    ),
    Refusal(
        "ep-divides-experts", 3, "dp_shard=3 ep=3 data.global_batch_size=12",
        "does not divide model.num_experts=8", "whole experts go to a rank, as many to each",
        ("parallel.ep=1", "model.num_experts=6"),
    ),
    Refusal(
        "ep-divides-its-ranks", 4, "pp=2 dp_shard=2 ep=4",
        "does not divide parallel.dp_shard * parallel.cp * parallel.tp = 2",
        "the ranks of ep are those of dp_shard, cp and tp", ("parallel.ep=2",),
    ),
    Refusal(
        "sequence-divides", 4, "cp=2 tp=2 data.seq_len=14",
        "set data.seq_len to a multiple of 8",
        "every rank has two equal chunks of a sequence, and tp ranks equal slices of them",
        ("data.seq_len=16",),
    ),
    Refusal(
        "batch-divides", 2, "dp_shard=2", "set data.global_batch_size to 6 or 8",
        "ranks take as many samples each", ("data.global_batch_size=8",),
        ("data.global_batch_size=7",),
    ),
    Refusal(
        "layers-fill-stages", 4, "pp=4 schedule=zbv", "makes 8 stages",
        "a stage has at least one block", ("model.num_hidden_layers=8", "parallel.schedule=1f1b"),
    ),
    Refusal(
        "tied-ends-apart", 2, "pp=2 model.tie_word_embeddings=true schedule=1f1b",
        "embedding and head are on different ranks",
        "one matrix would be on two ranks; a V schedule has both ends on one",
        ("parallel.schedule=zbv", "parallel.schedule=dualpipev", "model.tie_word_embeddings=false"),
    ),
    Refusal(
        "global-scope-accumulation", 2, "dp_shard=2 model.router_aux_loss_scope=global",
        "needs the whole batch in one pass", "the balance of a batch is not the sum of its parts'",
        ("data.micro_batch_size=auto", "model.router_aux_loss_scope=sequence"),
        ("data.micro_batch_size=2",),
    ),
    Refusal(
        "global-scope-pipeline", 2, "pp=2 model.router_aux_loss_scope=global",
        "needs the whole batch in one pass", "a pipeline takes a batch in parts",
        ("model.router_aux_loss_scope=sequence",),
    ),
    Refusal(
        "overlap-without-pairs", 2, "pp=2 schedule=1f1b overlap=true",
        "has no pairs of forward and backward", "only `dualpipev` pairs forward with backward",
        ("parallel.schedule=dualpipev", "parallel.overlap=false"),
    ),
)  # fmt: skip
KINDS = ("gradient", "norm", "update", "loss")
INTRODUCTION = """# Equality matrix

Every layout below took three optimizer steps in float64 and was compared with one process that took
the same steps on the same samples: every gradient of the first step, the gradient norm and losses
of all steps, every weight after the last, and the loss of the held-out text.

- gradient, norm, loss: largest difference over the largest element of the tensor (or a millionth of
  the global gradient norm, if that is more); within 1e-12, after the first update within 1e-8
- update: largest difference of a weight over the learning rate; within 1e-8, where AdamW has a
  gradient above 1e-8 to go by, else 1e-5

The matrix model has 8 heads, 8 key/value heads, 8 experts and 16 blocks; without --full it has one
block for each stage, at least 4 on two ranks and in pipelines of four ranks, else at least 2, and
on 8 or 16 ranks as many micro-batches as stages, for `dualpipev` twice as many. Labels are dropped
unevenly, 0 to all of a sample's, clipping is active, and balance and z losses are on. Parts held by
all ranks make every tensor exactly once. A name tells the ranks (w8: eight), dense or MoE, every
axis above 1 and every option that is no default. Written by
`python tests/equality/matrix.py --write-docs`.
"""


def folder() -> Path:
    """Return where proofs are kept: below runs/, or where that cannot be written a temporary."""
    wanted = PROJECT / "runs" / "checks" / "equality"
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK):
            return wanted
    except OSError:
        pass
    fallback = Path(tempfile.gettempdir()) / f"curry-train-equality-{os.getuid()}"
    fallback.mkdir(exist_ok=True)
    return fallback


def keep(name: str, proof: Proof) -> None:
    """Leave the proof of a cell for the table; a later one of the same name replaces it."""
    row = proof.row(name) | {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    rows = folder() / "cells"
    rows.mkdir(exist_ok=True)
    replace_file(rows / f"{name}.json", json.dumps(row, indent=1))


def kept() -> list[dict[str, Any]]:
    """Return the proofs that were left, by ranks and name."""
    rows = [json.loads(path.read_text()) for path in (folder() / "cells").glob("*.json")]
    return sorted(rows, key=lambda row: (row["world"], row["cell"]))


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table as Markdown."""
    equal = sum(row["equal"] for row in rows)
    cpu = sum(row["cpu"] for row in rows)
    yield f"{len(rows)} cells, {equal} equal to one process; {cpu:.0f} CPU seconds.\n"
    yield "| cell | equal | " + " | ".join(KINDS) + " | worst gradient | CPU s |"
    yield "|---" * (len(KINDS) + 4) + "|"
    for row in rows:
        errors = [f"{row['gaps'][kind]['error']:.1e}" for kind in KINDS]
        worst = row["gaps"]["gradient"]
        where = f"`{worst['name']}`, rank {worst['rank']}"
        verdict = "yes" if row["equal"] else "NO"
        cells = [row["cell"], verdict, *errors, where, f"{row['cpu']:.1f}"]
        yield "| " + " | ".join(cells) + " |"


def write_table() -> None:
    """Write table.json and table.txt of all proofs that were left."""
    if rows := kept():
        replace_file(folder() / "table.json", json.dumps(rows, indent=1))
        replace_file(folder() / "table.txt", "\n".join(lines(rows)))


def replace_file(path: Path, text: str) -> None:
    """Write a file at once, since workers of the tests write it side by side."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text + "\n")
    part.replace(path)


def refused() -> Iterator[str]:
    """Yield the table of what is refused as Markdown."""
    yield "\n## Refused\n\nNothing else is; `tests/equality/test_refusals.py` tries every layout.\n"
    yield "| case | refused | reason |\n|---|---|---|"
    for case in REFUSALS:
        words = " ".join([case.words, *case.more])
        yield f"| {case.name} | `{words}` on {case.world} ranks | {case.reason} |"


def write_docs() -> None:
    """Put both tables into the documentation."""
    text = [INTRODUCTION, *lines(kept()), *refused()]
    DOCS.write_text("\n".join(text) + "\n")


def main(argv: list[str]) -> int:
    """Run the cells, then write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0].split(":")[0])
    parser.add_argument("--full", action="store_true", help="every cell of 8 ranks, and of 32")
    parser.add_argument("--only", metavar="NAME", help="cells whose name holds this")
    parser.add_argument("--write-docs", action="store_true", help="refresh docs/equality.md")
    parser.add_argument("--no-run", action="store_true", help="of the proofs that are there")
    options = parser.parse_args(argv)
    code = 0
    if not options.no_run:
        for path in (folder() / "cells").glob("*.json") if not options.only else ():
            path.unlink()
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        if options.full:
            env["CURRY_TRAIN_FULL"] = "1"
        tests = Path(__file__).parent.relative_to(PROJECT)
        command = [sys.executable, "-m", "pytest", str(tests), "-q", "-n", "2"]
        command += ["--dist", "worksteal", *(["-k", options.only] if options.only else [])]
        code = subprocess.run(command, cwd=PROJECT, env=env).returncode
    if options.write_docs:
        write_docs()
    print(f"{len(kept())} cells: {folder() / 'table.txt'}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measure the loader against the plain habit of nanoGPT, one thread, file in the page cache.

    python benchmarks/bench_loader.py [--tokens N] [--seq-len S] [--batch B] [--seconds T] [--json]

The habit reads inputs and labels as two slices a sample and stacks them; ours reads one window a
sample and draws no random numbers. Both give int64 [B, S]. The two are timed in turn; the figures
are medians over rounds. On a busy machine only the time of the thread itself means something.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from curry_train.config import DataConfig
from curry_train.data import token_file, tokenizer
from curry_train.data.loader import Loader

DOCUMENT = 1000
ROUNDS = 5


def write_corpus(folder: Path, tokens: int) -> None:
    """Write random ids as a corpus of one shard that is training and validation alike."""
    coder = tokenizer.ByteTokenizer()
    coder.save(folder / token_file.TOKENIZER)
    dtype = token_file.dtype_for(coder.vocab_size)
    writer = token_file.SplitWriter(folder, "train", dtype=dtype, eos_id=coder.eos_id)
    draw = np.random.default_rng(0)
    for _ in range(tokens // DOCUMENT):
        ids = draw.integers(0, 256, DOCUMENT, dtype=dtype)
        ids[-1] = coder.eos_id
        writer.write(ids, DOCUMENT - 1)
    split = writer.finish()
    manifest = {
        "format": token_file.FORMAT,
        "dtype": dtype.name,
        "tokenizer": {"kind": "byte", "sha256": coder.sha256, "eos_id": coder.eos_id},
        "splits": {"train": split, "val": split},
    }
    (folder / token_file.MANIFEST).write_text(json.dumps(manifest))


def habit(path: Path, batch: int, seq_len: int) -> Callable[[], object]:
    """The reader that most small trainers copy."""
    ids = np.memmap(path, dtype=np.uint16, mode="r")

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(ids) - seq_len, (batch,))
        inputs = [torch.from_numpy(ids[i : i + seq_len].astype(np.int64)) for i in starts]
        labels = [torch.from_numpy(ids[i + 1 : i + 1 + seq_len].astype(np.int64)) for i in starts]
        return torch.stack(inputs), torch.stack(labels)

    return read


def rate(read: Callable[[], object], tokens: int, seconds: float) -> dict[str, float]:
    """Million tokens a second of `read`: by the time of this thread and by the wall clock."""
    calls = 0
    wall, cpu = time.perf_counter(), time.thread_time()
    while time.perf_counter() - wall < seconds:
        read()
        calls += 1
    return {
        "cpu": calls * tokens / (time.thread_time() - cpu) / 1e6,
        "wall": calls * tokens / (time.perf_counter() - wall) / 1e6,
    }


def main() -> None:
    """Print both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.0, help="per reader and round")
    parser.add_argument("--document-mask", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = arguments.batch * arguments.seq_len
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder), arguments.tokens)
        corpus = token_file.read_corpus(Path(folder), verify=False)
        data = DataConfig(
            seq_len=arguments.seq_len,
            global_batch_size=arguments.batch,
            document_mask=arguments.document_mask,
        )
        ours = Loader(corpus, data, seed=0, micro_batch_size=arguments.batch).next_step
        plain = habit(Path(folder) / "train-00000.bin", arguments.batch, arguments.seq_len)
        pairs = [
            (rate(ours, size, arguments.seconds), rate(plain, size, arguments.seconds))
            for _ in range(ROUNDS)
        ]
    found: dict[str, float] = {"batch": arguments.batch, "seq_len": arguments.seq_len}
    for clock in ("cpu", "wall"):
        found[f"loader_mtok_per_{clock}_s"] = statistics.median(a[clock] for a, _ in pairs)
        found[f"habit_mtok_per_{clock}_s"] = statistics.median(b[clock] for _, b in pairs)
        found[f"ratio_{clock}"] = statistics.median(a[clock] / b[clock] for a, b in pairs)
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"batch {arguments.batch} x {arguments.seq_len}, million tokens a second of one thread")
    for clock in ("cpu", "wall"):
        print(
            f"{clock:4} time: loader {found[f'loader_mtok_per_{clock}_s']:.0f}, "
            f"habit {found[f'habit_mtok_per_{clock}_s']:.0f}, ratio {found[f'ratio_{clock}']:.1f}"
        )


if __name__ == "__main__":
    main()

"""Told by one state of a project: its configuration, its data, and which batches it reads.

Runs in the project's environment with the state's folder as the current one and prints one line of
JSON. Exit code 2, and the sentences on stderr, when the configuration or the data is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

MOST_TOKENS = 2**24
"""What is hashed; a difference that begins later shows in the losses."""
PATHS = ("data.input", "data.tokenizer", "run.init_from")


def main(argv: list[str]) -> int:
    """Print what the state's own code makes of the words."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("project", type=Path, help="the user's own folder, for ignored data")
    parser.add_argument("steps", type=int, help="batches to hash")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="settings")
    args = parser.parse_args(argv)
    sys.path[0] = os.getcwd()
    from curry_train.config import ConfigError, config_hash, to_dict
    from curry_train.data import DataError, open_corpus

    try:
        config, moved = load(args.words, args.project)
        corpus = open_corpus(config.data, cache_dir=Path(config.data.cache_dir))
    except (ConfigError, DataError) as error:
        print(error, file=sys.stderr)
        return 2
    batches, later, why = [], None, ""
    try:
        batches, later = hashes(config, corpus, args.steps)
    except Exception as error:  # the loader of another version: the losses still tell
        why = f"{type(error).__name__}: {error}"
    told = {
        "config": to_dict(config),
        "config_hash": config_hash(config),
        "data_hash": corpus.hash,
        "moved": moved,
        "batches": batches,
        "second_epoch": later,
        "why": why,
    }
    print(json.dumps(told, default=str))
    return 0


def load(words: list[str], project: Path) -> tuple[Any, list[str]]:
    """Return the Config, and as words the paths that only the user's own folder has.

    Data that git does not keep is not in a worktree: a relative path then means the user's folder.
    """
    from curry_train.compose import load_config
    from curry_train.config import ConfigError

    here = Path.cwd()
    try:
        return load_config(words), []
    except ConfigError as refused:
        os.chdir(project)
        try:
            config = load_config(words)
        except ConfigError:
            raise refused from None
        finally:
            os.chdir(here)
    moved = []
    for key in PATHS:
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and not Path(value).exists() and (project / value).exists():
            moved.append(f"{key}={project / value}")
    return load_config([*words, *moved]), moved


def hashes(config: Any, corpus: Any, steps: int) -> tuple[list[str], str | None]:
    """Hash the global batch of each step, and the first one of the second epoch.

    As the state's own loader makes them for one process. Few runs come to the second epoch, whose
    order is another; None where the loader cannot be set there.
    """
    from curry_train.data.loader import Loader

    data = config.data
    loader = Loader(corpus, data, seed=config.seed, micro_batch_size=data.global_batch_size)
    count = max(1, min(steps, MOST_TOKENS // (data.global_batch_size * data.seq_len)))
    found = [hash_of(loader.next_step()) for _ in range(count)]
    # Earlier states of the project call it windows.
    epoch = getattr(loader, "samples_per_epoch", getattr(loader, "windows_per_epoch", None))
    if epoch is None:
        return found, None
    loader.samples_consumed = epoch
    return found, hash_of(loader.next_step())


def hash_of(batches: list[Any]) -> str:
    """Hash names and values of the batches of a step."""
    digest = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            digest.update(name.encode())
            digest.update(batch[name].numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

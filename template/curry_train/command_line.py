"""What the configuration says to people: help, check, show, and the end of a bad command line."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from curry_train.compose import GROUPS, PROJECT, load_config, options
from curry_train.config import (
    Config,
    ConfigError,
    config_hash,
    known_settings,
    planned_world,
    resolve_micro_batch,
    sections,
    to_dict,
)
from curry_train.parallel.dims import resolve
from curry_train.rules import shown, value_of

RANK_PATIENCE = 3.0
"""Seconds; the ranks of a busy machine start apart."""

USAGE = """\
usage: python train.py [GROUP=OPTION ...] [KEY=VALUE ...]

Start training
  python train.py                                        one process
  python train.py devices=2                              two processes on this machine
  fabric run --devices=2 train.py KEY=VALUE ...          the same; a second one at the same time
                                                         needs --main-port=29401, say
  torchrun --standalone --nproc_per_node=2 train.py ...  the same

Look before training
  python -m curry_train.config check KEY=VALUE ...       every mistake at once; exit code 0 or 2
  python -m curry_train.config show KEY=VALUE ...        all values as YAML (--json: as JSON)
  python train.py dry_run=true KEY=VALUE ...             size, memory and mesh of the run
"""


def load_or_exit(argv: Sequence[str], *, project: Path | None = None) -> Config:
    """Return the Config of a command line, or end the process: 0 after --help, 2 after problems.

    Of several ranks only the first prints.
    """
    try:
        if {"-h", "--help"} & set(argv):
            if _is_first_rank():
                print(help_text(project, [word for word in argv if word not in ("-h", "--help")]))
            sys.exit(0)
        return load_config(argv, project=project)
    except ConfigError as error:
        sys.exit(refuse(error))


def refuse(error: Exception) -> int:
    """Print on the first rank why nothing can run; returns the exit code of every rank, 2.

    Launchers end all ranks as soon as one has ended: so the others wait until the first has spoken.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if _is_first_rank():
        print(error, file=sys.stderr, flush=True)
    else:
        time.sleep(RANK_PATIENCE)
    return 2


def help_text(project: Path | None = None, argv: Sequence[str] = ()) -> str:
    """Write the launch ways, the groups with their options, and every key with its meaning.

    The values shown are those that `argv` gives, so `model=NAME --help` shows that model.
    """
    project = project or PROJECT
    try:
        config = load_config(argv, project=project)
    except ConfigError:
        config = Config()  # help is for those whose files are broken, too
    lines = [USAGE, "Groups (GROUP=OPTION takes configs/GROUP/OPTION.yaml)"]
    for group in GROUPS:
        names = ", ".join(options(project, group))
        group = f"  {group:<12}"
        lines += textwrap.wrap(names, 100, initial_indent=group, subsequent_indent=" " * 14)
    lines += [
        "",
        "Settings (KEY=VALUE; null means none), each with the value it has now",
    ]
    model = type(config.model)
    sentences = _sentences(model)
    for key in known_settings(model):
        lines.append(f"  {key}={shown(value_of(config, key))}")
        lines += textwrap.indent(textwrap.fill(sentences.get(key, ""), 86), " " * 6).splitlines()
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run `check` or `show`."""
    parser = argparse.ArgumentParser(
        prog="python -m curry_train.config",
        usage="python -m curry_train.config {check,show} [--json] [KEY=VALUE ...]",
        description="Look at a configuration without training.",
        epilog="`python train.py --help` lists every setting.",
        allow_abbrev=False,
    )
    parser.add_argument("verb", choices=("check", "show"), help="tell mistakes, or print values")
    parser.add_argument("--json", action="store_true", help="show: JSON instead of YAML")
    args, settings = parser.parse_known_args(argv)
    config = load_or_exit(settings)
    if args.verb == "check":
        print(f"ok: {_summary(config)}, config_hash {config_hash(config)}")
    elif args.json:
        print(json.dumps(to_dict(config), indent=2))
    else:
        print(yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True), end="")
    return 0


def _summary(config: Config) -> str:
    data = config.data
    tokens = f"{data.global_batch_size * data.seq_len} tokens a step"
    world = planned_world(config)
    if world is None:
        return tokens
    size = resolve_micro_batch(config, resolve(config.parallel, world).batch)
    return f"{tokens}, {world} process{'es' * (world > 1)} with micro-batches of {size}"


def _sentences(model: type) -> dict[str, str]:
    """Return dotted key -> the sentence under the field in the source."""
    found = {}
    for group, cls in {"": Config, **sections(model)}.items():
        for source in reversed([base for base in cls.__mro__ if is_dataclass(base)]):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(source))).body
            assert isinstance(definition, ast.ClassDef)
            for pair in pairwise(definition.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        found[f"{group}.{name}".lstrip(".")] = " ".join(text.split())
    return found


def _is_first_rank() -> bool:
    # Before any process group exists to ask.
    ranks = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
    return next((rank for rank in ranks if rank is not None), "0") == "0"

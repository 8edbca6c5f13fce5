"""Weights to and from Hugging Face: `python -m curry_train.checkpoint.huggingface --help`.

import writes a folder of transformers as a checkpoint of format 1, export the other way, verify
compares both bit by bit. A run can also start from such a folder at once, on any mesh:
run.init_from=FOLDER. Nothing of transformers is used. Imports no torch until weights are read.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curry_train.checkpoint import MANIFEST, CheckpointError, latest, read_manifest
from curry_train.checkpoint.families import CONFIG, differences, live, read_model
from curry_train.checkpoint.tables import Meter, parse_size, size_words
from curry_train.checkpoint.views import bytes_of
from curry_train.config import ModelConfig
from curry_train.data import DataError
from curry_train.sizes import parameter_counts

if TYPE_CHECKING:
    from torch import Tensor

    from curry_train.checkpoint.weight_files import Report
    from curry_train.parallel.mesh import Mesh
    from curry_train.parallel.shards import Part

SHARD_BYTES = 5 * 10**9
DONE, FINDING, BAD_INPUT = 0, 1, 2
SHOWN = frozenset(
    """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rope_theta rms_norm_eps qk_norm
    tie_word_embeddings num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    """.split()
)
"""Fields that a model's file in configs/model/ names even where they are defaults."""
Told = Callable[[int], None]


def is_hugging_face(folder: Path) -> bool:
    """Say whether a folder is one of Hugging Face and no checkpoint of format 1."""
    return (Path(folder) / CONFIG).is_file() and not (Path(folder) / MANIFEST).exists()


def initial_problems(folder: Path, model: Any) -> list[str]:
    """Say why a run with this `model` group cannot start from the weights of a folder.

    Opens config.json, or the manifest of a checkpoint, alone; whether all weights are there and
    fit is told when they are read.
    """
    try:
        if is_hugging_face(folder):
            weights = any(folder.glob("*.safetensors"))
            absent = [] if weights else ["has no *.safetensors beside config.json; give weights"]
            return [*absent, *differences(folder, read_model(folder)[0], model)]
        if not (folder / MANIFEST).is_file():
            found = latest(folder / "checkpoints") or latest(folder)
            known = "give a folder step-XXXXXXXX, or one of Hugging Face with its config.json"
            what = "is no checkpoint" if folder.is_dir() else "is no folder"
            return [f"{what}; {f'set run.init_from={found}' if found else known}"]
        read_manifest(folder)
    except CheckpointError as error:
        return error.problems
    return []


def load(
    folder: Path,
    tensors: Mapping[str, Tensor | Part],
    model: ModelConfig,
    mesh: Mesh | None = None,
) -> Report:
    """Fill tensors in place from a folder of Hugging Face; see weight_files.load."""
    from curry_train.checkpoint import weight_files

    return weight_files.load(folder, tensors, model, mesh)


def import_weights(
    folder: Path, out: Path, precision: str = "fp32", told: Told = lambda _: None
) -> Path:
    """Write the weights of a folder as checkpoint out/step-00000000 and return that.

    Tensor by tensor; they become float32, float64 at precision fp64. told: called with the bytes
    that were written. Raises: CheckpointError; nothing new is left in `out` then.
    """
    from curry_train.checkpoint import exchange

    return exchange.import_weights(Path(folder), Path(out), precision, told)[0]


def export(
    checkpoint: Path,
    out: Path,
    dtype: str = "auto",
    max_shard_bytes: int = SHARD_BYTES,
    told: Told = lambda _: None,
) -> Path:
    """Write the weights of a checkpoint as a folder that transformers loads, and return it.

    dtype: of the weights; auto is that of the import they come from, else that of the checkpoint.
    max_shard_bytes: above it the weights are several files with an index. Moments stay behind.
    Raises: CheckpointError with everything that no architecture of transformers expresses; `out`
    must be absent or empty, and nothing is left there after an error.
    """
    from curry_train.checkpoint import exchange

    return exchange.export(Path(checkpoint), Path(out), dtype, max_shard_bytes, told)


def verify(folder: Path, checkpoint: Path, told: Told = lambda _: None) -> list[str]:
    """Compare a folder of Hugging Face with a checkpoint bit by bit, both ways; return problems.

    A tensor is equal when the values of the files, cast as an import casts them, are the stored
    ones, and the stored ones cast back are those of the files.
    """
    from curry_train.checkpoint import exchange

    return exchange.verify(Path(folder), Path(checkpoint), told)


def model_yaml(model: ModelConfig, name: str, source: str) -> str:
    """Return the text of configs/model/NAME.yaml: sizes, and what is no default."""
    import yaml

    default, shown = ModelConfig(), SHOWN & live(model).keys()
    values = {
        f.name: getattr(model, f.name)
        for f in fields(model)
        if f.name in shown or getattr(model, f.name) != getattr(default, f.name)
    }
    text = yaml.safe_dump({"architecture": "decoder", **values}, sort_keys=False)
    return f"# {name}: what config.json of {source} says.\n{text}"


def _yaml_path(project: Path, name: str) -> Path:
    """Return where a new model's configuration goes. Raises: CheckpointError: one is there."""
    path = project / "configs" / "model" / f"{name}.yaml"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise CheckpointError(f"--write-config {name}: allowed are letters, digits, _ and -")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent} does not exist; set --project to a project's folder")
    if path.exists():
        raise CheckpointError(f"{path} exists and is never overwritten; choose another name")
    return path


def _save_yaml(project: Path, name: str, text: str) -> Path:
    path = _yaml_path(project, name)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m curry_train.checkpoint.huggingface",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Weights to and from Hugging Face. run.init_from=FOLDER reads one at once.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    made = verbs.add_parser("import", help="folder of Hugging Face -> checkpoint")
    made.add_argument("weights", help="folder, or OWNER/NAME in the cache or on the hub")
    made.add_argument("--out", type=Path, required=True, help="step-00000000 is written below it")
    made.add_argument("--precision", choices=("fp32", "fp64"), default="fp32")
    made.add_argument("--write-config", metavar="NAME", help="write configs/model/NAME.yaml")
    made.add_argument("--project", type=Path, default=Path("."), help="folder of configs/")
    made.add_argument("--no-sanity", action="store_true", help="do not read a known text")
    out = verbs.add_parser("export", help="checkpoint -> folder of Hugging Face")
    out.add_argument("checkpoint", type=Path, help="step folder, or a run folder")
    out.add_argument("--out", type=Path, required=True, help="new or empty folder")
    out.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16", "float64"), default="auto"
    )
    out.add_argument("--max-shard-size", type=parse_size, default=SHARD_BYTES, metavar="5GB")
    same = verbs.add_parser("verify", help="compare both, bit by bit")
    same.add_argument("weights", help="folder of Hugging Face, or OWNER/NAME")
    same.add_argument("checkpoint", type=Path, help="step folder, or a run folder")
    for verb in (made, out, same):
        verb.add_argument("--json", action="store_true", help="print one JSON object")
    usages = (verb.format_usage().partition(": ")[2] for verb in (made, out, same))
    parser.epilog = "".join(usages)
    return parser


def _weights(text: str) -> Path:
    """Return the folder of weights that are named or lie there."""
    from curry_train.checkpoint.hub import find_weights

    return Path(text) if Path(text).is_dir() else find_weights(text)


def _checkpoint(path: Path) -> Path:
    """Return a checkpoint itself, or the newest of a run."""
    found = path if (path / MANIFEST).is_file() else latest(path / "checkpoints") or latest(path)
    if found is None:
        raise CheckpointError(f"{path} holds no complete checkpoint; give a run or a step-* folder")
    return found


def _import(args: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    folder = _weights(args.weights)
    model = read_model(folder)[0]
    name, text = args.write_config, ""
    text = model_yaml(model, name or "NAME", folder.name)
    if name:
        _yaml_path(args.project, name)
    from curry_train.checkpoint import exchange

    size = parameter_counts(model)[0] * (8 if args.precision == "fp64" else 4)
    with Meter("import", size) as meter:
        path, report = exchange.import_weights(folder, args.out, args.precision, meter)
    data: dict[str, Any] = {"path": str(path), "architecture": report.architecture}
    data |= {"tensors": report.tensors, "dtypes": report.dtypes, "notes": report.notes}
    lines = [str(report), f"wrote {path}, {size_words(_size(path))}"]
    if name:
        data["config"] = str(_save_yaml(args.project, name, text))
        words = f"model={name} run.init_from={path}"
        if (tokenizer := path / "tokenizer.json").is_file():
            words += f" data.tokenizer={tokenizer}"
        lines.append(f"wrote {data['config']}; train with {words}")
    else:
        data["model_yaml"] = text
        lines += ["", *text.splitlines()]
    sanity = None if args.no_sanity else _sanity(path)
    data["sanity"] = sanity
    if sanity:
        lines.append(f"sanity {sanity['verdict']}: {sanity['reason']}")
    return (FINDING if sanity and sanity["verdict"] == "fail" else DONE), data, lines


def _sanity(checkpoint: Path) -> dict[str, Any]:
    """Return the loss of the weights on a known text; unclear where it cannot be read."""
    from curry_train.checkpoint.known_text import check_weights

    try:
        return check_weights(checkpoint)._asdict()
    except (CheckpointError, DataError) as error:
        return {"verdict": "unclear", "reason": str(error), "loss": None}


def _export(args: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    checkpoint = _checkpoint(args.checkpoint)
    with Meter("export", sum(_weights_in(checkpoint).values())) as meter:
        path = export(checkpoint, args.out, args.dtype, args.max_shard_size, meter)
    files = sorted(file.name for file in path.iterdir())
    lines = [f"wrote {path}, {size_words(_size(path))}: {', '.join(files)}"]
    return DONE, {"path": str(path), "files": files}, lines


def _verify(args: argparse.Namespace) -> tuple[int, dict[str, Any], list[str]]:
    folder, checkpoint = _weights(args.weights), _checkpoint(args.checkpoint)
    weights = _weights_in(checkpoint)
    with Meter("verify", sum(weights.values())) as meter:
        problems = verify(folder, checkpoint, meter)
    count = len(weights)
    end = f"{len(problems)} problems" if problems else f"{count} tensors are equal, bit by bit"
    data = {"problems": problems, "tensors": count}
    return (FINDING if problems else DONE), data, [*problems, f"{folder} and {checkpoint}: {end}"]


def _weights_in(checkpoint: Path) -> dict[str, int]:
    """Return the bytes of each weight of a checkpoint; moments are none."""
    tensors = read_manifest(checkpoint)["tensors"]
    return {n: bytes_of(entry) for n, entry in tensors.items() if not n.startswith("optim.")}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def main(argv: list[str]) -> int:
    """Run one verb; 0 done, 1 weights differ or look wrong, 2 bad input and nothing was written."""
    args = _parser().parse_args(argv)
    began = time.monotonic()
    try:
        verbs = {"import": _import, "export": _export, "verify": _verify}
        code, data, lines = verbs[args.verb](args)
    except (CheckpointError, DataError) as error:
        if args.json:
            problems = getattr(error, "problems", [str(error)])
            print(json.dumps({"verb": args.verb, "verdict": "refused", "problems": problems}))
        print(error, file=sys.stderr)
        return BAD_INPUT
    data["seconds"] = round(time.monotonic() - began, 2)
    verdict = "fail" if code else "pass"
    if args.json:
        print(json.dumps({"verb": args.verb, "verdict": verdict, **data}))
    else:
        print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

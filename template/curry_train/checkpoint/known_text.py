"""The sanity number: what weights make of a text that everybody knows how to read.

`python -m curry_train.checkpoint.known_text FOLDER` takes a checkpoint, a run or a Hugging Face
folder. Weights that were mixed up on their way, or a tokenizer that is not theirs, still give
logits of the right shape; the loss of a text tells at once. It is held against two guesses that
know nothing of context: the same chance for every id, ln(vocabulary), and each id by its frequency
in this very text, the unigram entropy. Trained weights beat the second. Two mistakes are tried out
besides, since a shallow model survives them: gate and up of its feed-forwards exchanged, and norms
that never left their first value.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curry_train.checkpoint import (
    MANIFEST,
    CheckpointError,
    families,
    huggingface,
    latest,
    read_manifest,
)
from curry_train.checkpoint.training_state import load_for_inference
from curry_train.config import Config
from curry_train.data import DataError
from curry_train.data.sources import embedded, find_source, plan_parts, read_documents
from curry_train.data.tokenizer import Tokenizer, load_tokenizer
from curry_train.models.protocol import build_model, count_parameters, named_state

TOKENS, CONTEXT = 4096, 512
FLOPS = 2e13
"""About a minute of a few cores; a large model reads fewer tokens for it, but LEAST_TOKENS."""
LEAST_TOKENS = 512
BELOW, BETTER = 0.95, 0.997
"""Trained weights stay below this share of the unigram entropy; a loss below this share of the
weights' own, after an exchange, says that they were exchanged before."""
NEAR, FLAT = 0.15, 0.85
"""Untrained weights: a loss within this share of ln(vocabulary), and predictions whose own entropy
is above this share of it."""


class Sanity(NamedTuple):
    """What a text showed. loss, uniform, unigram, entropy in nats a token, bpb in bits a byte.

    entropy is that of the model's predictions. verdict: pass, fail or unclear.
    """

    verdict: str
    reason: str
    loss: float
    bpb: float
    uniform: float
    unigram: float
    entropy: float
    tokens: int


def judge(loss: float, *, uniform: float, unigram: float, entropy: float) -> tuple[str, str]:
    """Return (verdict, reason) of a loss on a known text; all arguments in nats a token."""
    told = f"loss {loss:.3f} nats a token"
    if not math.isfinite(loss):
        return "fail", f"{told}: the weights hold values that are no numbers, or too large ones"
    if abs(loss - uniform) <= NEAR * uniform and entropy >= FLAT * uniform:
        return "unclear", (
            f"{told} is near ln(vocabulary) = {uniform:.3f}: the weights look untrained"
        )
    if loss <= BELOW * unigram:
        return "pass", f"{told} is below the unigram entropy {unigram:.3f}"
    if loss <= unigram:
        return "unclear", f"{told} is hardly below the unigram entropy {unigram:.3f}"
    return "fail", (
        f"{told} is above the unigram entropy {unigram:.3f}: another tokenizer, tensors that were "
        "swapped, dropped or turned, or rotary settings that are not the model's"
    )


def documents(text: Path | None = None) -> Iterator[str]:
    """Yield the documents of a text, by default those of the embedded corpus."""
    source = embedded() if text is None else find_source(text)
    for part in plan_parts([source]):
        yield from read_documents(part, "text")


@torch.no_grad()
def measure(
    model: Any,
    tokenizer: Tokenizer,
    *,
    text: Path | None = None,
    tokens: int = TOKENS,
    context: int = CONTEXT,
) -> Sanity:
    """Read at most `tokens` tokens of a text with a whole module, in pieces of `context`.

    Raises: CheckpointError when the tokenizer makes ids that the model has no row for.
    """
    ids, size = _known_ids(tokenizer, tokens, text)
    if int(ids.max()) >= model.vocab_size:
        raise CheckpointError(
            f"the tokenizer makes id {int(ids.max())}, the model knows {model.vocab_size}: it is "
            "the tokenizer of another model"
        )
    was_training = model.training
    model.eval()
    loss, entropy = _sums(model, ids, context)
    count = len(ids) - 1
    shares = ids[1:].bincount().double() / count
    found = {
        "loss": loss / count,
        "uniform": math.log(model.vocab_size),
        "unigram": -float(torch.xlogy(shares, shares).sum()),
        "entropy": entropy / count,
    }
    verdict, reason = judge(**found)
    if verdict == "pass":
        verdict, reason = _tried_out(model, ids, context, found["loss"]) or (verdict, reason)
    model.train(was_training)
    return Sanity(verdict, reason, bpb=loss / math.log(2) / size, tokens=count, **found)


def _sums(model: Any, ids: Tensor, context: int) -> tuple[float, float]:
    """Return the negative log likelihood of ids[1:] and the entropy of its predictions, summed."""
    device, loss, entropy = next(model.parameters()).device, 0.0, 0.0
    for begin in range(0, len(ids) - 1, context):
        window = ids[begin : begin + context + 1].to(device)
        logits_SV = model(window[None, :-1]).logits[0, :, : model.vocab_size].float()
        logs_SV = logits_SV.log_softmax(-1)
        loss += float(F.nll_loss(logs_SV, window[1:], reduction="sum"))
        entropy -= float((logs_SV.exp() * logs_SV).sum())
    return loss, entropy


def _tried_out(model: nn.Module, ids: Tensor, context: int, loss: float) -> tuple[str, str] | None:
    """Return a verdict on weights that pass and still look wrong."""
    tensors = dict(named_state(model))
    gates = {name: name.replace(".gate_proj.", ".up_proj.") for name in tensors}
    pairs = [(tensors[n], tensors[up]) for n, up in gates.items() if n != up and up in tensors]
    _exchange(pairs)
    other = _sums(model, ids, context)[0] / (len(ids) - 1)
    _exchange(pairs)
    if pairs and other < BETTER * loss:
        return "fail", (
            f"loss {loss:.3f} nats a token falls to {other:.3f} with gate_proj and up_proj "
            "exchanged: the feed-forwards have one in the place of the other"
        )
    still = [n for n, t in tensors.items() if n.endswith("norm.weight") and bool((t == t[0]).all())]
    if still:
        return "unclear", (
            f"loss {loss:.3f} nats a token, but {still[0]} holds one value only ({len(still)} such "
            "norms): never trained, or lost on the way"
        )
    return None


def _exchange(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for one, other in pairs:
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def _known_ids(tokenizer: Tokenizer, tokens: int, text: Path | None) -> tuple[Tensor, int]:
    """Return the ids of the text, int64 [S], an end of document in front, and its UTF-8 bytes."""
    ids, size = [tokenizer.eos_id], 0
    for document in documents(text):
        own = tokenizer.encode(document)
        room = tokens + 1 - len(ids)
        if len(own) >= room:  # the last document is cut where a token ends
            own = own[:room]
            document = tokenizer.decode(own)
        ids += own
        size += len(document.encode("utf-8", errors="replace"))
        if len(ids) > tokens:
            break
        ids.append(tokenizer.eos_id)
    if len(ids) <= LEAST_TOKENS // 4:
        raise CheckpointError(f"the text has {len(ids)} tokens; give a longer one with --text")
    return torch.tensor(ids), max(size, 1)


def check_weights(
    folder: Path, *, text: Path | None = None, tokens: int = TOKENS, device: str = "cpu"
) -> Sanity:
    """Load weights whole into this process and measure them; see the module's head.

    folder: a Hugging Face folder, a checkpoint, or a run. tokens: the most that are read; a large
    model reads fewer.
    Raises: CheckpointError: no weights or tokenizer, or more bytes than the memory has.
    """
    folder = Path(folder)
    try:
        model, tokenizer, context = _load(folder)
    except DataError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    _, active = count_parameters(model)
    affordable = max(int(FLOPS / (2 * active)), LEAST_TOKENS)
    return measure(
        model.to(device),
        tokenizer,
        text=text,
        tokens=min(tokens, affordable),
        context=min(CONTEXT, context),
    )


def _load(folder: Path) -> tuple[nn.Module, Tokenizer, int]:
    """Return (model, tokenizer, longest sample) of a checkpoint, a run or a Hugging Face folder."""
    if not huggingface.is_hugging_face(folder):
        checkpoint = folder if (folder / MANIFEST).is_file() else latest(folder / "checkpoints")
        tensors = read_manifest(checkpoint)["tensors"] if checkpoint else {}
        if checkpoint:
            _tokenizer_path(checkpoint)
        shapes = [e["shape"] for name, e in tensors.items() if not name.startswith("optim.")]
        _check_memory(folder, 4 * sum(map(math.prod, shapes)))
        return load_for_inference(folder)
    model = families.read_model(folder)[0]
    config, tokenizer = Config(model=model), tokenizer_of(folder)
    _check_memory(folder, 4 * count_parameters(build_model(config, "meta"))[0])
    whole = build_model(config, "cpu")
    huggingface.load(folder, dict(named_state(whole)), model)
    return whole, tokenizer, model.max_position_embeddings


def tokenizer_of(folder: Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder or checkpoint.

    Raises: CheckpointError without one that we read.
    """
    return load_tokenizer(_tokenizer_path(folder))


def _tokenizer_path(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json, so no text can be read; copy the model's own there"
        )
    return path


def _check_memory(folder: Path, wanted: int) -> None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return  # not Linux: the system says it in its own way
    free = next((1024 * int(n.split()[1]) for n in lines if n.startswith("MemAvailable:")), wanted)
    if wanted > free:
        raise CheckpointError(
            f"{folder} needs {wanted / 1e9:.1f} GB as fp32, {free / 1e9:.1f} GB are free; measure "
            "it on a larger machine, or after run.init_from by val/loss"
        )


def main(argv: list[str]) -> int:
    """Print the number; 0 pass, 1 fail, 2 nothing was measured, 3 unclear."""
    parser = argparse.ArgumentParser(
        prog="python -m curry_train.checkpoint.known_text",
        description="Loss of weights on a known text, against guessing without context.",
    )
    parser.add_argument("folder", type=Path, help="Hugging Face folder, checkpoint or run folder")
    parser.add_argument("--text", type=Path, help="text file or folder (default: embedded corpus)")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="tokens to read at most (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        if args.tokens < LEAST_TOKENS:
            raise CheckpointError(f"--tokens {args.tokens}: it takes at least {LEAST_TOKENS}")
        found = check_weights(args.folder, text=args.text, tokens=args.tokens)
    except (CheckpointError, DataError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found._asdict()) if args.json else told(found))
    return {"pass": 0, "fail": 1, "unclear": 3}[found.verdict]


def told(found: Sanity) -> str:
    """Write a result in two lines."""
    return (
        f"{found.verdict}: {found.reason}\n{found.tokens} tokens, {found.bpb:.3f} bits a byte; "
        f"uniform {found.uniform:.3f}, unigram {found.unigram:.3f} nats"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

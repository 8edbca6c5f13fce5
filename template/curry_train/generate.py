"""Text from a checkpoint: greedy or sampled.

`python -m curry_train.generate RUN_OR_CHECKPOINT --prompt "..." --max-tokens 200`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curry_train.data.tokenizer import Tokenizer
from curry_train.parallel.collectives import stack_ranks, sum_forward
from curry_train.parallel.context_parallel import take
from curry_train.parallel.mesh import Mesh, agreed
from curry_train.runtime import Runtime
from curry_train.tracking.progress import tell
from curry_train.tracking.run_folder import Run

if TYPE_CHECKING:
    from curry_train.parallel.pipeline_parallel import Pipeline


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: list[int],
    *,
    max_tokens: int,
    context: int,
    temperature: float = 0.8,
    seed: int = 0,
    stop_id: int | None = None,
    mesh: Mesh | None = None,
    pipeline: Pipeline | None = None,
) -> list[int]:
    """Return up to `max_tokens` token ids that continue `prompt_ids` (at least one id).

    Each token reads the last `context` ids. temperature 0 takes the most likely token; above 0
    the softmax of logits / temperature is sampled by a generator of its own, so the training
    randomness is untouched. Ends before `stop_id` when given. All ranks of a mesh call this
    together, also those with a whole model, which would else wait without a sign; rank 0 decides.
    With a `pipeline` its chunks are the model, and each token passes its stages one after the
    other. Group: world.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    chunks = [model] if pipeline is None else [*pipeline.chunks.values()]
    was_training = model.training
    for chunk in chunks:
        chunk.eval()
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        window = torch.tensor([ids[-context:]], dtype=torch.int64, device=device)
        if mesh is None or mesh.world == 1:
            logits = model(window).logits[0, -1]
        else:
            logits = shared_logits(model, window, mesh, pipeline)
        token = choose(logits.float().cpu(), temperature, generator)
        token = token if mesh is None else agreed(token if mesh.rank == 0 else -1, mesh)
        if token == stop_id:
            break
        ids.append(token)
    for chunk in chunks:
        chunk.train(was_training)
    return ids[len(prompt_ids) :]


def shared_logits(
    model: nn.Module, window: Tensor, mesh: Mesh, pipeline: Pipeline | None = None
) -> Tensor:
    """Return the logits [V] after the last token of `window`, int64 [1, S], on every rank.

    The window is padded to what the ranks can divide; padding has the document -1, so that no
    expert takes it. Groups: those of the model; cp, tp and pp, one collective each.
    """
    cp, last = mesh.group("cp"), window.shape[1] - 1
    unit = mesh.size("tp") * (1 if cp is None else 2 * mesh.size("cp"))
    missing = -window.shape[1] % unit
    batch = {
        "input_ids": F.pad(window, (0, missing)),
        "position_ids": torch.arange(window.shape[1] + missing, device=window.device)[None],
        "doc_ids": F.pad(torch.zeros_like(window), (0, missing), value=-1),
    }
    batch = take(batch, cp)
    if pipeline is not None:
        output = pipeline.output(batch)
        if output is None:
            return pipeline.from_last(
                torch.empty(model.padded_vocab, dtype=model.compute_dtype, device=window.device)
            )
        return pipeline.from_last(last_logits(output[0][0], batch["position_ids"][0], last, mesh))
    logits_SV = model(batch["input_ids"], batch["position_ids"], batch["doc_ids"]).logits[0]
    return last_logits(logits_SV, batch["position_ids"][0], last, mesh)


def last_logits(logits_SV: Tensor, places_S: Tensor, last: int, mesh: Mesh) -> Tensor:
    """Return the logits [V] of the token at place `last`, of logits [S, V / tp] of own tokens.

    Shapes: places int64 [S]. Groups: cp and tp, one collective each.
    """
    cp, tp = mesh.group("cp"), mesh.group("tp")
    here = (places_S == last).nonzero()
    own = logits_SV[here[0, 0]] if len(here) else torch.zeros_like(logits_SV[0])
    own = sum_forward(own, cp)
    return own if tp is None else stack_ranks(own, tp).flatten()


def choose(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Return one token id from float32 logits [V]."""
    if temperature == 0:
        return int(logits_V.argmax())
    probs = (logits_V / temperature).softmax(-1)
    return int(torch.multinomial(probs, 1, generator=generator))


def sample_text(model: nn.Module, tokenizer: Tokenizer, prompt: str, **settings: Any) -> str:
    """Return `prompt` and its continuation; an empty prompt starts a new document.

    `settings` are those of `generate`.
    """
    prompt_ids = [tokenizer.eos_id, *tokenizer.encode(prompt)]
    ids = generate(model, prompt_ids, stop_id=tokenizer.eos_id, **settings)
    return tokenizer.decode(prompt_ids[1:] + ids)


def write_sample(runtime: Runtime, run: Run) -> None:
    """Sample text from the model as it is now, print it and keep it in the journal; collective.

    Nothing happens without a tokenizer: the data is no text.
    """
    config, mesh, tokenizer = runtime.config, runtime.mesh, runtime.corpus.tokenizer
    if config.run.sample_tokens == 0 or tokenizer is None:
        return
    text = sample_text(
        runtime.model,
        tokenizer,
        config.run.sample_prompt,
        max_tokens=config.run.sample_tokens,
        context=config.data.seq_len,
        seed=config.seed,
        mesh=mesh,
        pipeline=runtime.pipeline,
    )
    if mesh.rank == 0:
        run.sample(runtime.step, text)
        tell(f"sample: {text}")


def main(argv: list[str]) -> int:
    from curry_train.checkpoint.dcp import CheckpointError
    from curry_train.checkpoint.training_state import load_for_inference

    parser = argparse.ArgumentParser(prog="python -m curry_train.generate", description=__doc__)
    parser.add_argument("path", type=Path, help="a checkpoint folder, or a run folder (its newest)")
    parser.add_argument("--prompt", default="", help="text to continue; empty starts a document")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens to add (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    args = parser.parse_args(argv)
    if args.max_tokens < 1 or args.temperature < 0:
        print(
            f"--max-tokens={args.max_tokens} must be at least 1 and "
            f"--temperature={args.temperature} at least 0",
            file=sys.stderr,
        )
        return 2
    try:
        model, tokenizer, seq_len = load_for_inference(args.path)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    text = sample_text(
        model,
        tokenizer,
        args.prompt,
        max_tokens=args.max_tokens,
        context=seq_len,
        temperature=args.temperature,
        seed=args.seed,
    )
    tell(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Text from a checkpoint: greedy or sampled.

`python -m curry_train.generate RUN_OR_CHECKPOINT --prompt "..." --max-tokens 200`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curry_train.data.tokenizer import Tokenizer
from curry_train.runtime import Runtime
from curry_train.tracking.progress import tell
from curry_train.tracking.run_folder import Run


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
) -> list[int]:
    """Return up to `max_tokens` token ids that continue `prompt_ids` (at least one id).

    Each token reads the last `context` ids. temperature 0 takes the most likely token; above 0
    the softmax of logits / temperature is sampled by a generator of its own, so the training
    randomness is untouched. Ends before `stop_id` when given.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        window = torch.tensor([ids[-context:]], dtype=torch.int64, device=device)
        logits = model(window).logits[0, -1].float().cpu()
        token = choose(logits, temperature, generator)
        if token == stop_id:
            break
        ids.append(token)
    model.train(was_training)
    return ids[len(prompt_ids) :]


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
    """Sample text from the model as it is now, print it and keep it in the journal; rank 0 only."""
    config = runtime.config
    if runtime.mesh.rank != 0 or config.run.sample_tokens == 0:
        return
    text = sample_text(
        runtime.model,
        runtime.corpus.tokenizer,
        config.run.sample_prompt,
        max_tokens=config.run.sample_tokens,
        context=config.data.seq_len,
        seed=config.seed,
    )
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

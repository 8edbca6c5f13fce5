"""Measure a whole training step of a small MoE model on a CPU against other libraries' models.

    python benchmarks/bench_step.py [--json out.json] [--pairs 30] [--baseline hf,litgpt]

A step is forward, loss, backward, clipping and fused AdamW in float32, one thread, on 4 sequences
of 256 tokens. All models have the same number of parameters: 6 blocks, width 256, 8 query and 2
key/value heads with normalised queries and keys, 8 experts of width 512 of which 2 are visited,
4096 words; ours also computes its balance loss, the others have none. hf is Qwen3MoE of
transformers with its defaults, litgpt its LLaMAMoE. Process CPU time, interleaved pairs, the ratio
is theirs / ours with its 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from pairs import WARMUP, measure_pairs, ratio_interval
from torch import Tensor, nn

from curry_train.config import ModelConfig
from curry_train.loss import mean_loss
from curry_train.models.decoder import Decoder

VOCAB, WIDTH, BLOCKS, HEADS, KEY_HEADS, EXPERTS, CHOSEN, HIDDEN = 4096, 256, 6, 8, 2, 8, 2, 512
BATCH, LENGTH = 4, 256
PACKAGES = {"hf": "transformers", "litgpt": "litgpt"}
SAME_LOSS = 1e-4
"""Nats by which our loss and transformers' may differ on the same weights."""

Model = tuple[nn.Module, Callable[[Tensor], Tensor]]


def ours() -> Model:
    """Return our model and its loss of ids [B, S]."""
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=WIDTH // HEADS,
        qk_norm=True,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=HIDDEN,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    model = Decoder(config, compute_dtype=torch.float32)

    def loss(ids: Tensor) -> Tensor:
        # The label of the last token is unknown, as for the others.
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        return mean_loss(model, {"input_ids": ids, "labels": labels})

    return model, loss


def hf() -> Model:
    """Return Qwen3MoE of transformers and its loss of ids [B, S]."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=WIDTH // HEADS,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=HIDDEN,
        norm_topk_prob=True,
        rms_norm_eps=ModelConfig().rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ModelConfig().rope_theta},
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config)
    return model, lambda ids: model(input_ids=ids, labels=ids).loss


def litgpt() -> Model:
    """Return litgpt's model with LLaMAMoE and its loss of ids [B, S], as in its pretraining."""
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        name="moe",
        block_size=LENGTH,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        n_layer=BLOCKS,
        n_head=HEADS,
        n_embd=WIDTH,
        n_query_groups=KEY_HEADS,
        head_size=WIDTH // HEADS,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_qk=True,
        mlp_class_name="LLaMAMoE",
        intermediate_size=HIDDEN,
        moe_intermediate_size=HIDDEN,
        n_expert=EXPERTS,
        n_expert_per_token=CHOSEN,
    )
    model = GPT(config)

    def loss(ids: Tensor) -> Tensor:
        logits = model(ids)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return model, loss


MODELS = {"hf": hf, "litgpt": litgpt}


def trained_by(model: nn.Module, loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], float]:
    """Return a function that takes ids [B, S], does one whole step and returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)

    def step(ids: Tensor) -> float:
        value = loss(ids)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(value.detach())

    return step


def fill(model: nn.Module) -> int:
    """Fill the matrices as all of them start, vectors with ones; return the number of values."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.ones_(parameter)
    return sum(parameter.numel() for parameter in model.parameters())


def copy_from_hf(model: nn.Module, theirs: nn.Module) -> None:
    """Give our model the weights of transformers'; names differ for the stacked experts only."""
    state = {
        f"{name}.weight" if name.endswith(("gate_up_proj", "down_proj")) else name: tensor
        for name, tensor in theirs.state_dict().items()
    }
    own = dict(model.named_parameters())
    assert own.keys() == state.keys(), own.keys() ^ state.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])


def check(name: str, mine: Model, theirs: Model, ids: Tensor) -> None:
    """Stop when sizes differ, or losses: of the same weights (hf), else of fresh ones."""
    sizes = fill(mine[0]), fill(theirs[0])
    if sizes[0] != sizes[1]:
        raise SystemExit(
            f"bench_step: {name} has {sizes[1]:,} parameters and ours {sizes[0]:,}; they have to "
            "be equal; nothing was measured"
        )
    allowed, wanted = 0.1, math.log(VOCAB)
    if name == "hf":
        copy_from_hf(mine[0], theirs[0])
        allowed, wanted = SAME_LOSS, float(theirs[1](ids).detach())
    aux = mine[0](ids).aux_loss.mean()
    losses = {"ours": float((mine[1](ids) - aux).detach())}
    losses[name] = float(theirs[1](ids).detach())
    for whose, value in losses.items():
        if not abs(value - wanted) <= allowed:
            raise SystemExit(
                f"bench_step: the loss of {whose} is {value:.5f}, {wanted:.5f} is expected; "
                "nothing was measured"
            )


def measure(baselines: list[str], pairs: int) -> dict:
    """Return a row with the ratio for each baseline that is installed."""
    found = {"rows": [], "parameters": None, "left_out": []}
    for name in baselines:
        package = PACKAGES[name]
        try:
            version = importlib.metadata.version(package)
            theirs = MODELS[name]()
        except ImportError as error:
            print(f"{name}: left out: {error}; pip install {package}")
            found["left_out"].append(name)
            continue
        torch.manual_seed(0)
        mine = ours()
        inputs = [torch.randint(0, VOCAB, (BATCH, LENGTH)) for _ in range(pairs + WARMUP)]
        check(name, mine, theirs, inputs[0])
        found["parameters"] = sum(parameter.numel() for parameter in mine[0].parameters())
        a, b = measure_pairs(trained_by(*mine), trained_by(*theirs), inputs)
        row = {"baseline": name, "version": version, **ratio_interval(a, b)}
        row |= {"ours_ms": 1e3 * float(sorted(a)[len(a) // 2])}
        row |= {"theirs_ms": 1e3 * float(sorted(b)[len(b) // 2])}
        found["rows"].append(row)
        print(
            f"against {name} {version}: {row['ratio']:.3f}x [{row['low']:.3f}, {row['high']:.3f}], "
            f"ours {row['ours_ms']:.0f} ms, theirs {row['theirs_ms']:.0f} ms"
        )
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure and print; with --json write {rows, parameters, left_out}."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--baseline", default="hf,litgpt", help="hf, litgpt or both")
    options = parser.parse_args(argv)
    baselines = options.baseline.split(",")
    if set(baselines) - set(MODELS):
        parser.error(f"--baseline: found {options.baseline!r}; allowed are {', '.join(MODELS)}")
    if options.pairs < 2:
        parser.error(f"--pairs: found {options.pairs}; at least 2 are allowed")
    torch.set_num_threads(1)
    found = measure(baselines, options.pairs)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["rows"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""Measure the MoE block against other ways to compute it; correctness comes first.

    python benchmarks/bench_moe.py --device cpu [--json out.json] [--pairs 30]
        [--shape 512,256,128,32,4] [--dtype fp32] [--baseline hf_grouped_mm,hf_eager]
    python benchmarks/bench_moe.py --device cuda [--json out.json] [--tokens 8192,32768]
        [--shape qwen3_30b,dsv2_lite,mixtral] [--impl ours,torch_grouped]
        [--routing uniform,zipf,one_hot] [--pass fwd,bwd,full]

On a CPU: the whole block with its router, forward and backward, against Qwen3-MoE's block of
transformers with its experts by `grouped_mm` (its default) and `eager`. Process CPU time of one
thread, interleaved pairs, every pair on inputs of its own; the ratio is theirs / ours, the median
over the pairs with its 95 % bootstrap interval. On a GPU: moe_gpu.py, the bank alone against three
styles of computing it and against the roofline.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from pairs import WARMUP, geometric_mean, measure_pairs, ratio_interval
from torch import Tensor, nn

from curry_train.config import ModelConfig
from curry_train.kernels.experts import experts
from curry_train.layers.moe import MoE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU_ROWS = (
    ("fp32", (512, 256, 128, 32, 4)),
    ("fp32", (512, 256, 96, 128, 8)),
    ("fp32", (1024, 256, 512, 8, 2)),
    ("fp32", (2048, 256, 128, 64, 8)),
    ("bf16", (512, 256, 128, 32, 4)),
    ("bf16", (512, 256, 96, 128, 8)),
    ("bf16", (2048, 256, 128, 64, 8)),
)
"""Dtype and T, D, F, E, K."""
HF = {"hf_grouped_mm": "grouped_mm", "hf_eager": "eager"}
SAME_BLOCK = 1e-5
"""Largest relative difference (norms) of two float32 blocks, output and every gradient."""
TWICE = 2.0
"""Our error to float64 may be this times that of transformers, in the same dtype."""


class Sizes(NamedTuple):
    """Tokens, width, hidden width, experts, experts per token."""

    T: int
    D: int
    F: int
    E: int
    K: int


class Block(nn.Module):
    """Our router and bank with transformers' sum and order: x [1, T, D] -> [1, T, D]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        config = ModelConfig(
            hidden_size=sizes.D,
            num_experts=sizes.E,
            num_experts_per_tok=sizes.K,
            moe_intermediate_size=sizes.F,
            norm_topk_prob=True,
        )
        self.moe = MoE(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe.experts(x.flatten(0, 1), self.moe.gate(x)).view(x.shape)


def hf_block(sizes: Sizes, dtype: torch.dtype, implementation: str) -> nn.Module:
    """Return Qwen3-MoE's sparse block of transformers, randomly filled."""
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    except ImportError:
        raise SystemExit(
            "bench_moe: transformers was not found, and on a CPU it is what we measure against; "
            "install it with: pip install transformers==5.24.0"
        ) from None
    config = Qwen3MoeConfig(
        hidden_size=sizes.D,
        moe_intermediate_size=sizes.F,
        num_experts=sizes.E,
        num_experts_per_tok=sizes.K,
        norm_topk_prob=True,
        hidden_act="silu",
    )
    config._experts_implementation = implementation
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.05)
    return block.to(dtype)


def our_block(theirs: nn.Module, sizes: Sizes) -> Block:
    """Return our block with the weights of theirs."""
    block = Block(sizes).to(theirs.gate.weight.dtype)
    with torch.no_grad():
        block.moe.gate.weight.copy_(theirs.gate.weight)
        block.moe.experts.gate_up_proj.weight.copy_(theirs.experts.gate_up_proj)
        block.moe.experts.down_proj.weight.copy_(theirs.experts.down_proj)
    return block


def step(block: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Run forward and backward; return the output and the gradients, x's first."""
    block.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    out = block(x)
    out.backward(upstream)
    return [out.detach(), x.grad, *(p.grad for p in block.parameters())]


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the relative difference of two tensors, in norms."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-300))


def bank_errors(ours: Block, theirs: nn.Module, sizes: Sizes, dtype: torch.dtype):
    """Return for output and gradients at fixed ids the errors to float64, ours and theirs."""
    from moe_baselines import float64_loop

    x, upstream = (torch.randn(sizes.T, sizes.D).to(dtype) for _ in range(2))
    ids = torch.rand(sizes.T, sizes.E).topk(sizes.K).indices
    weights = torch.rand(sizes.T, sizes.K).to(dtype)
    bank = (ours.moe.experts.gate_up_proj.weight, ours.moe.experts.down_proj.weight)

    def hf(x, ids, weights, w13, w2):
        return theirs.experts(x, ids, weights)

    found = {}
    for name, function, leaves in (
        ("ours", experts, (x, weights, *bank)),
        ("theirs", hf, (x, weights, theirs.experts.gate_up_proj, theirs.experts.down_proj)),
        ("exact", float64_loop, tuple(t.detach().double() for t in (x, weights, *bank))),
    ):
        x_, weights_, *rest = (
            t if isinstance(t, nn.Parameter) else t.clone().requires_grad_() for t in leaves
        )
        out = function(x_, ids, weights_, *rest)
        grads = torch.autograd.grad(out, (x_, weights_, *rest), upstream.to(out.dtype))
        found[name] = (out, *grads)
    names = ("output", "dx", "dweights", "dw13", "dw2")
    return {
        name: (distance(mine, exact), distance(other, exact))
        for name, mine, other, exact in zip(
            names, found["ours"], found["theirs"], found["exact"], strict=True
        )
    }


def check(ours: Block, theirs: nn.Module, sizes: Sizes, dtype: torch.dtype) -> None:
    """Stop when the two do not compute the same: by float64 at fixed ids, in fp32 the block too."""
    for name, (mine, other) in bank_errors(ours, theirs, sizes, dtype).items():
        if not mine <= TWICE * other + torch.finfo(dtype).eps:
            raise SystemExit(
                f"bench_moe: {list(sizes)} {dtype}: {name} is off by {mine:.1e} from float64, "
                f"transformers' by {other:.1e}; twice that is allowed; nothing was measured"
            )
    if dtype != torch.float32:
        return
    x, upstream = torch.randn(1, sizes.T, sizes.D), torch.randn(1, sizes.T, sizes.D)
    gate, first, second = (ours.moe.gate, *ours.moe.experts.children())
    mine = step(ours, x, upstream)[:2] + [p.weight.grad for p in (gate, first, second)]
    other = step(theirs, x, upstream)[:2]
    other += [theirs.gate.weight.grad, theirs.experts.gate_up_proj.grad]
    other += [theirs.experts.down_proj.grad]
    worst = max(distance(a, b) for a, b in zip(mine, other, strict=True))
    if not worst <= SAME_BLOCK:
        raise SystemExit(
            f"bench_moe: {list(sizes)}: the blocks differ by {worst:.1e}, {SAME_BLOCK:.0e} is "
            "allowed; nothing was measured"
        )


def measure_cpu(rows, baselines: list[str], pairs: int) -> dict[str, Any]:
    """Return rows with ratios, and the geometric mean over those against hf_grouped_mm."""
    found = []
    for name, shape in rows:
        sizes, dtype = Sizes(*shape), DTYPES[name]
        torch.manual_seed(0)
        theirs = hf_block(sizes, dtype, "grouped_mm")
        ours = our_block(theirs, sizes)
        check(ours, theirs, sizes, dtype)
        inputs = [torch.randn(1, sizes.T, sizes.D).to(dtype) for _ in range(pairs + WARMUP)]
        upstream = torch.randn(1, sizes.T, sizes.D).to(dtype)
        for baseline in baselines:
            theirs.experts.config._experts_implementation = HF[baseline]
            a, b = measure_pairs(
                lambda x: step(ours, x, upstream),  # noqa: B023
                lambda x: step(theirs, x, upstream),  # noqa: B023
                inputs,
            )
            row = {"shape": list(shape), "dtype": name, "baseline": baseline}
            found.append(
                {**row, **ratio_interval(a, b), "ours_ms": float(1e3 * sorted(a)[pairs // 2])}
            )
            print(line(found[-1]), flush=True)
    ratios = [row["ratio"] for row in found if row["baseline"] == "hf_grouped_mm"]
    return {"rows": found, "geomean": geometric_mean(ratios)}


def line(row: dict[str, Any]) -> str:
    """Return a row for a person to read."""
    shape = ",".join(map(str, row["shape"]))
    return (
        f"{row['dtype']} T,D,F,E,K={shape:<20} against {row['baseline']:<14} "
        f"{row['ratio']:6.2f}x [{row['low']:.2f}, {row['high']:.2f}]  ours {row['ours_ms']:.1f} ms"
    )


def _cpu_rows(options: argparse.Namespace) -> list[tuple[str, tuple[int, ...]]]:
    rows = CPU_ROWS
    if options.shape:
        rows = [(dtype, tuple(map(int, options.shape.split(",")))) for dtype in DTYPES]
        if any(len(shape) != len(Sizes._fields) for _, shape in rows):
            raise SystemExit(
                f"bench_moe: --shape: found {options.shape!r}; on a CPU five numbers T,D,F,E,K are "
                "allowed, 512,256,128,32,4 for one"
            )
    return [row for row in rows if not options.dtype or row[0] == options.dtype]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--shape", help="cpu: T,D,F,E,K; cuda: names of shapes")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="cpu: only these rows")
    cpu = parser.add_argument_group("cpu")
    cpu.add_argument("--pairs", type=int, default=30)
    cpu.add_argument("--baseline", default=",".join(HF), help="hf_grouped_mm, hf_eager or both")
    gpu = parser.add_argument_group("cuda")
    gpu.add_argument("--impl", default="ours,torch_grouped,scatter_style,megablocks_style")
    gpu.add_argument("--tokens", default="4096,8192,16384,32768")
    gpu.add_argument("--routing", default="uniform")
    gpu.add_argument("--pass", dest="passes", default="fwd,bwd,full")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure and print; with --json write {rows, geomean} (cpu) or {rows} (cuda)."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.device == "cuda":
        import moe_gpu

        found = moe_gpu.measure_gpu(options)
    else:
        wanted = options.baseline.split(",")
        if set(wanted) - set(HF):
            parser.error(f"--baseline: found {options.baseline!r}; allowed are {', '.join(HF)}")
        if options.pairs < 2:
            parser.error(f"--pairs: found {options.pairs}; at least 2 are allowed")
        torch.set_num_threads(1)
        found = measure_cpu(_cpu_rows(options), wanted, options.pairs)
        print(f"geometric mean against hf_grouped_mm: {found['geomean']:.3f}x")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

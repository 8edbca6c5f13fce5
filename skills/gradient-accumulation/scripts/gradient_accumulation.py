#!/usr/bin/env python3
"""Find the micro-batch that fits and the accumulation factor, and prove that 1 x k equals k x 1.

The largest micro-batch is measured: on a GPU by trying, on a CPU under --memory. The proof runs one
optimizer step with a batch and one with its k micro-batches of unequal target counts, in float64,
through the project's own train_step or, for other code, through the loop that --loop names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: gradient-accumulation needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from accumulation_proof import (  # noqa: E402
    added,
    error_of,
    judge,
    judge_additive,
    observe,
    sum_gradients,
)
from micro_batches import (  # noqa: E402
    Samples,
    Trials,
    largest_divisor,
    length,
    mapped,
    parts_of,
    unequal,
)

from kit import cli  # noqa: E402
from kit.batches import count_targets, tensors  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.memory import read_bytes, show_bytes  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.state import preserved  # noqa: E402
from kit.target import Target  # noqa: E402
from kit.user_code import load_function, parse_spec, user_code  # noqa: E402

SKILL = "gradient-accumulation"
THRESHOLDS = {
    "accumulation-equal": 1e-12,  # error of gradients, norm and loss in float64
    "accumulation-additive": 1e-12,  # error of the sum over micro-batches against the batch
}
FOREIGN_LIMIT = 1e-6
"""Other code may round to float32 inside, as the norms of transformers do."""
MICRO_BATCHES, LEAST_MICRO_BATCHES = 4, 2
NO_CLIP = 1e30
SMALL, LARGE = 1e-6, 1e6
"""Factors on the loss that take a loop out of, and into, any sensible clipping."""


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument("--memory", metavar="SIZE", help="bytes that one rank has, as 24GiB")
    parser.add_argument(
        "--tokens-per-step", type=int, metavar="N", help="tokens (or samples) of one optimizer step"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="R",
        help="ranks with different samples, dp_replicate * dp_shard (default 1)",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=MICRO_BATCHES,
        metavar="K",
        help=f"micro-batches of the proof (default {MICRO_BATCHES})",
    )
    parser.add_argument(
        "--loop",
        metavar="FILE.py:FUNCTION",
        help="with --target: function(model, micro_batches, loss_fn, optimizer) that takes one "
        "optimizer step over a list of micro-batches, and may return the loss",
    )


def check_flags(args: Any) -> None:
    """Refuse flags that cannot work."""
    if args.micro_batches < LEAST_MICRO_BATCHES:
        raise UsageError(f"--micro-batches {args.micro_batches}", "it takes at least 2")
    if args.ranks < 1:
        raise UsageError(f"--ranks {args.ranks}", "it takes at least 1")
    if args.tokens_per_step is not None and args.tokens_per_step < 1:
        raise UsageError(f"--tokens-per-step {args.tokens_per_step}", "it takes at least 1")
    if args.loop is not None:
        if args.target is None:
            raise UsageError(
                "--loop with a project",
                "a project is judged by its own train_step",
                "leave it out, or set --target",
            )
        path, function = parse_spec(args.loop, flag="--loop")
        args.loop = f"{path}:{function}"
    args.budget = None if args.memory is None else read_bytes(args.memory, flag="--memory")


def measure(call: cli.Invocation) -> Report:
    """Search, plan, prove."""
    args, report = call.args, Report(SKILL)
    call.expect(None, "then a search over micro-batch sizes and a few steps in float64")
    asked = list(args.set)
    of_project = args.target is None
    if of_project:
        args.set = [*asked, "compile=false"]
    target = call.load_target()
    digest = target.config_hash
    search(call, report, target)
    if of_project:
        args.set = [*asked, "compile=false", "precision=fp64", "data.micro_batch_size=auto"]
        target = call.load_target()
        args.set, target.config_hash = asked, digest
        with preserved(target):
            prove_project(report, target, args.micro_batches)
    elif args.loop is None:
        with preserved(target):
            prove_loss(report, target, args.micro_batches)
        report.next.append("set --loop FILE.py:FUNCTION to have your own accumulation judged")
    else:
        loop = load_function(args.loop, flag="--loop", project=call.project)
        with preserved(target):
            prove_loop(report, target, args.micro_batches, loop)
    return report


def search(call: cli.Invocation, report: Report, target: Target) -> None:
    """Find the largest micro-batch that fits, and say how a step is made of it."""
    args = call.args
    first = next(iter_once(target))
    per_sample = max(round(total_targets(first) / length(first)), 1)
    if target.kind == "project":
        config = target.runtime.config
        local = config.data.global_batch_size // args.ranks or 1
    else:
        local = Samples(target, 1 << 62).count
    if args.tokens_per_step is not None:
        local = max(round(args.tokens_per_step / (per_sample * args.ranks)), 1)
    total = local * args.ranks
    fitting = local
    budget = args.budget
    on_gpu = target.device.type == "cuda"
    if on_gpu and budget is None:
        budget = sys.modules["torch"].cuda.mem_get_info(target.device)[1]
    if budget is None:
        report.check(
            "accumulation-fits", "skipped", message="set --memory SIZE to have a size searched"
        )
        if target.kind == "project":
            fitting = target.batches.micro_batch_size
    else:
        with preserved(target):
            trials = Trials(target, Samples(target, local), budget)
            fitting = trials.largest(local, lambda size: call.progress(size, local, "samples"))
        report.numbers["needs_bytes"] = {str(size): need for size, need in trials.needs.items()}
        report.numbers["state_bytes"] = trials.state
        judge_fit(report, trials, fitting, budget)
    if not fitting:
        report.summary = f"not one sample fits into {show_bytes(budget or 0)}"
        return
    micro = largest_divisor(local, fitting)
    tell(report, target, local=local, total=total, micro=micro, fitting=fitting,
         per_sample=per_sample, ranks=args.ranks)  # fmt: skip


def iter_once(target: Target) -> Any:
    """Yield the first batch and leave the loader where it was."""
    with preserved(target):
        batch = next(iter(target.batches))
    yield batch


def total_targets(batch: Any) -> int:
    """Count positions that can be targets, ignored ones too: the size of labels, else samples."""
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if labels is not None and labels.dim() >= 2 and not labels.is_floating_point():
        return labels.numel()
    return length(batch)


def judge_fit(report: Report, trials: Trials, fitting: int, budget: int) -> None:
    """Say what the largest size needs, and the next larger one that was tried."""
    least = trials.needs.get(max(fitting, 1))
    larger = sorted(size for size in trials.needs if size > fitting)
    after = ""
    if larger:
        need = trials.needs[larger[0]]
        after = f"; {larger[0]} " + ("run out of memory" if need is None else "need "
                                     + show_bytes(need))  # fmt: skip
    report.check(
        "accumulation-fits",
        "pass" if fitting else "fail",
        value=least,
        threshold=budget,
        unit="bytes",
        message=f"{fitting} sample{'s' * (fitting != 1)} fit{'s' * (fitting == 1)}{after}",
    )
    if not fitting:
        report.next.append("recompute activations (activation-checkpointing), or shorten samples")


def tell(report: Report, target: Target, *, local: int, total: int, micro: int, fitting: int,
         per_sample: int, ranks: int) -> None:  # fmt: skip
    """Give the factor and the exact overrides."""
    factor = local // micro
    overrides = f"data.global_batch_size={total} data.micro_batch_size={micro}"
    report.numbers |= {
        "largest_micro_batch": fitting,
        "micro_batch": micro,
        "factor": factor,
        "samples_per_step": total,
        "tokens_per_step": total * per_sample,
        "ranks": ranks,
    }
    report.summary = (
        f"{factor} micro-batch{'es' * (factor > 1)} of {micro} on {ranks} "
        f"rank{'s' * (ranks > 1)}: {total * per_sample:,} targets a step"
    )
    if target.kind == "project":
        report.numbers["overrides"] = overrides.split()
        report.evidence.append(f"set {overrides}")
    if micro * 2 <= fitting:
        report.next.append(
            f"{local} samples a rank have no divisor from {micro + 1} to {fitting}; "
            "another --tokens-per-step would fill the memory better"
        )


def proof_batch(target: Target, count: int) -> tuple[Any, list[Any], list[int]]:
    """Return a batch of unequal samples, its micro-batches, and their target counts."""
    batch = unequal(Samples(target, 3 * count).take(0, 3 * count))
    parts = parts_of(batch, count)
    return batch, parts, [count_targets(part)[0] for part in parts]


def prove_project(report: Report, target: Target, count: int) -> None:
    """Run the project's own train_step on one batch, whole and in parts, clipped and not."""
    runtime, loader = target.runtime, target.runtime.batches
    batch, parts, counts = proof_batch(target, count)
    limit = THRESHOLDS["accumulation-equal"]
    names = {id(p): name for name, p in target.model.named_parameters()}
    config = runtime.config

    def loop(max_norm: float) -> Callable[[list[Any]], Any]:
        from curry_train.step import train_step

        def run(micro_batches: list[Any]) -> Any:
            with preserved(target):
                runtime.batches = Given(micro_batches, loader)
                optim = replace(config.optim, max_grad_norm=max_norm)
                runtime.config = replace(config, optim=optim)
                try:
                    return train_step(runtime)
                finally:
                    runtime.batches, runtime.config = loader, config

        return run

    with user_code("a step in float64"):
        sums = gradients_of(target, target.loss_fn, batch, parts, counts)
        whole_sum = sums.pop()
        judge_additive(report, error_of(added(sums), whole_sum), limit)
        whole = observe(loop(NO_CLIP), [batch], runtime.optimizer, names)
        split = observe(loop(NO_CLIP), parts, runtime.optimizer, names)
        clipped = observe(loop(0.1 * max(split.norm, 1e-12)), parts, runtime.optimizer, names)
    judge(report, sums, counts, whole, split, clipped, limit)


class Given:
    """Micro-batches that a project's step takes in the place of its loader's."""

    def __init__(self, micro_batches: list[Any], loader: Any) -> None:
        self.micro_batches, self.loader = micro_batches, loader

    def next_step(self) -> list[Any]:
        return list(self.micro_batches)

    def __iter__(self) -> Any:
        return iter(self.micro_batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def prove_loss(report: Report, target: Target, count: int) -> None:
    """Without a loop: see whether the loss of other code can be accumulated at all."""
    batch, parts, counts = in_float64(report, target, count)
    loss_fn = target.loss_fn
    with user_code("a step in float64"):
        sums = gradients_of(target, loss_fn, batch, parts, counts)
        whole = sums.pop()
    judge_additive(report, error_of(added(sums), whole), FOREIGN_LIMIT)


def prove_loop(report: Report, target: Target, count: int, loop: Callable[..., Any]) -> None:
    """Run a user's loop with a loss so small that nothing clips, and so large that it does."""
    torch = sys.modules["torch"]
    batch, parts, counts = in_float64(report, target, count)
    loss_fn = target.loss_fn
    optimizer = target.optimizer or torch.optim.SGD(target.model.parameters(), lr=0.0)
    by_id = {id(p): name for name, p in target.model.named_parameters()}

    def scaled(factor: float) -> Callable[[list[Any]], Any]:
        def run(micro_batches: list[Any]) -> Any:
            with preserved(target):
                target.model.zero_grad(set_to_none=True)
                optimizer.zero_grad(set_to_none=True)
                return loop(
                    target.model, micro_batches, lambda m, b: loss_fn(m, b) * factor, optimizer
                )

        return run

    with user_code("--loop", "it takes (model, micro_batches, loss_fn, optimizer)"):
        sums = gradients_of(target, loss_fn, batch, parts, counts)
        whole_sum = sums.pop()
        fine = judge_additive(report, error_of(added(sums), whole_sum), FOREIGN_LIMIT)
        whole = observe(scaled(SMALL), [batch], optimizer, by_id)
        split = observe(scaled(SMALL), parts, optimizer, by_id)
        clipped = observe(scaled(LARGE), parts, optimizer, by_id)
    small = [{name: g * SMALL for name, g in s.items()} for s in sums]
    judge(report, small, counts, whole, split, clipped, FOREIGN_LIMIT, additive=fine)


def in_float64(report: Report, target: Target, count: int) -> tuple[Any, Any, Any]:
    """Turn other code into float64 without random numbers; returns what a proof needs."""
    torch = sys.modules["torch"]
    batch, parts, counts = proof_batch(target, count)
    if not all(counts):
        raise UsageError(
            "a micro-batch of the proof has no target", "each needs one", "set --micro-batches 2"
        )
    before = torch.get_rng_state()
    target.loss_fn(target.model, parts[0])
    if not torch.equal(before, torch.get_rng_state()):
        target.model.eval()
        report.evidence.append("the model draws random numbers, so it was judged in eval mode")
    target.model.double()
    batch, *parts = (doubled(part) for part in (batch, *parts))
    return batch, parts, counts


def doubled(batch: Any) -> Any:
    """Return a batch with its floating-point tensors in float64."""
    if not any(t.is_floating_point() for t in tensors(batch)):
        return batch
    return mapped([batch], lambda found: found[0].double() if found[0].is_floating_point()
                  else found[0])  # fmt: skip


def gradients_of(
    target: Target, loss_fn: Any, batch: Any, parts: list[Any], counts: list[int]
) -> list[dict[str, Any]]:
    """Return the summed gradient of each micro-batch and, last, of the whole batch."""
    names = [name for name, p in target.model.named_parameters() if p.requires_grad]
    return sum_gradients(target.model, loss_fn, [*parts, batch], [*counts, sum(counts)], names)


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, measure, doc=__doc__, add_flags=add_flags, check_flags=check_flags))

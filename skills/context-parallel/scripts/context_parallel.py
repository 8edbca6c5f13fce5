#!/usr/bin/env python3
"""Check attention over ranks that share a sequence: bytes, equality, balance, positions.

Bytes of attention at --length tokens are measured for 1, 2, 4 and 8 ranks in the project's own head
sizes, without allocating them. Forked ranks hold the project's attention against one process in
float64. Bytes on the link say whether ring or all_gather fits this model.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: context-parallel needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from kit import cli, layouts  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.memory import show_bytes  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.user_code import user_code  # noqa: E402

SKILL = "context-parallel"
THRESHOLDS = {
    "cp-parity": 1e-12,  # error of attention's outputs and gradients, over the largest
    "cp-bytes": 1.05,  # bytes of a rank times cp, over those of one process
    "cp-balance": 1.3,  # pairs of the busiest rank over the mean; windows cost up to 1.28
    "cp-local-positions": 1e-12,  # error of the rotation
}
RANKS, LENGTH, LONGEST = (1, 2, 4, 8), 32768, 1 << 20
TIMEOUT = 300.0


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--world", type=int, metavar="N", help="ranks of the equality test (default 2 and 4)"
    )
    parser.add_argument(
        "--length",
        type=int,
        default=LENGTH,
        metavar="S",
        help=f"tokens of a sequence for bytes and balance (default {LENGTH})",
    )
    parser.add_argument(
        "--link-gbps", type=float, default=50.0, metavar="X", help="GB/s of a rank (default 50)"
    )
    parser.add_argument(
        "--tflops", type=float, default=400.0, metavar="X", help="of a rank, reached (default 400)"
    )


def check_flags(args: Any) -> None:
    """Refuse flags that cannot work."""
    layouts.check_layout_flags(args)
    if args.world is not None and args.world < 2:
        raise UsageError(f"--world {args.world}", "a sequence is shared by at least 2 ranks")
    unit = 2 * max(RANKS)
    if args.length % unit or not unit <= args.length <= LONGEST:
        raise UsageError(f"--length {args.length}", f"a multiple of {unit}, at most {LONGEST}")
    for name in ("link_gbps", "tflops"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}", "above 0")


def check(call: cli.Invocation) -> Report:
    """Measure, compare, count, recommend."""
    report, words = Report(SKILL), layouts.words_of(call)
    config, sentences = layouts.load(call, words)
    if config is None:
        raise layouts.refuse("the configuration", sentences)
    from curry_train.config import ModelConfig

    if not isinstance(config.model, ModelConfig):
        raise UsageError(
            f"model.architecture={config.model.architecture} cannot share a sequence",
            "context parallelism is for the decoder family",
        )
    call.expect(None, "then attention on 2 and 4 forked ranks")
    judge_bytes(report, config, call.args.length)
    judge_balance(report, config.model, call.args.length)
    with tempfile.TemporaryDirectory() as folder:
        judge_parity(call, report, config, words, Path(folder))
    recommend(report, config, call.args)
    picture = draw(report.numbers["bytes"], call.args.length, call.out / "bytes.png")
    report.artifacts += [str(picture)] if picture else []
    return report


def judge_bytes(report: Report, config: Any, length: int) -> None:
    """Hold the bytes that each rank keeps against 1 / cp of those of one process."""
    import context_meter

    torch = sys.modules["torch"]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    dtype = dtype.get(config.precision, torch.float32)
    with user_code("attention"):
        kept = {n: context_meter.kept_bytes(config.model, length, n, dtype) for n in RANKS}
    share = {n: kept[n] * n / kept[1] for n in RANKS}
    worst = max(RANKS, key=lambda n: share[n])
    limit = THRESHOLDS["cp-bytes"]
    table = ", ".join(f"cp {n} {show_bytes(kept[n])}" for n in RANKS)
    report.numbers["bytes"] = kept
    report.summary = f"attention of a block at {length:,} tokens keeps a rank: {table}"
    report.check(
        "cp-bytes",
        "pass" if share[worst] <= limit else "fail",
        value=share[worst],
        threshold=limit,
        unit="x of 1 / cp",
        message=f"cp {worst}: {show_bytes(kept[worst])} of {show_bytes(kept[1])}",
    )


def judge_balance(report: Report, model: Any, length: int) -> None:
    """Count the pairs of query and key that each rank computes."""
    import context_meter

    worst, found = (0.0, 2, None), {}
    for window in {model.window_of(layer) for layer in range(model.num_hidden_layers)}:
        for ranks in RANKS[1:]:
            with user_code("blocks"):
                pairs = context_meter.pairs(length, ranks, window)
            ratio = max(pairs) / (sum(pairs) / ranks)
            found[f"cp {ranks}, window {window}"] = pairs
            worst = max(worst, (ratio, ranks, window), key=lambda row: row[0])
    ratio, ranks, window = worst
    seen = "causal" if window is None else f"window {window}"
    report.numbers["pairs"] = found
    report.check(
        "cp-balance",
        "pass" if ratio <= THRESHOLDS["cp-balance"] else "fail",
        value=ratio,
        threshold=THRESHOLDS["cp-balance"],
        unit="x the mean",
        message=f"busiest of {ranks} ranks, {seen}",
    )


def judge_parity(
    call: cli.Invocation, report: Report, config: Any, words: list[str], folder: Path
) -> None:
    """Hold attention and positions of forked ranks against one process."""
    import context_meter

    from curry_train.testing import run_ranks

    rows = []
    for ranks in [call.args.world] if call.args.world else [2, 4]:
        layout = replace(type(config.parallel)(), cp=ranks, dp_shard=1)
        shared = replace(config, parallel=layout, data=replace(config.data, global_batch_size=1))
        shared = replace(shared, data=replace(shared.data, micro_batch_size="auto"))
        values = layouts.small(shared, ranks, folder)
        values |= {f"parallel.{axis}": 1 for axis in ("pp", "dp_replicate", "tp", "ep")}
        values["parallel.cp"] = ranks
        tiny, sentences = layouts.load(call, [*words, *layouts.written(values)])
        if tiny is None:
            raise layouts.refuse("the small model", sentences)
        tiny = replace(tiny, parallel=layout)
        with user_code(f"attention on {ranks} ranks"):
            every = run_ranks(context_meter.attention_on_rank, ranks, tiny, timeout=TIMEOUT)
        rows += [(*row, rank, ranks) for rank, found in enumerate(every) for row in found]
    at_places = [row for row in rows if row[0].startswith(context_meter.POSITIONS)]
    others = [row for row in rows if not row[0].startswith(context_meter.POSITIONS)]
    local = any(row[3] for row in at_places)
    for id, some in (("cp-local-positions", at_places), ("cp-parity", others)):
        name, what, value, _, rank, ranks = max(some, key=lambda row: row[2])
        fails = not value <= THRESHOLDS[id]
        message = f"worst {what} of {name}, rank {rank} of cp {ranks}"
        if id == "cp-local-positions":
            message = "places in the whole sequence" if not fails else message
            message += "; they count from each rank's own start" if local else ""
        verdict = "fail" if fails else "pass"
        report.check(id, verdict, value=value, threshold=THRESHOLDS[id], message=message)
    failed = {check["id"] for check in report.checks if check["verdict"] == "fail"}
    if "cp-local-positions" in failed:
        report.next.append("read take() in parallel/context_parallel.py and who calls it")
    elif "cp-parity" in failed:
        report.next.append("read ring_attend in parallel/context_parallel.py, block by block")


def recommend(report: Report, config: Any, args: Any) -> None:
    """Weigh bytes on the link that nothing hides against memory, for the largest cp."""
    from curry_train.communication import Links, communication, step_time
    from curry_train.parallel.dims import ParallelDims
    from curry_train.plan import estimate

    ranks = config.parallel.cp if config.parallel.cp > 1 else max(RANKS)
    links = Links(
        inside=args.link_gbps * 1e9, between=args.link_gbps * 1e9, per_node=ranks,
        peak=args.tflops * 1e12, memory=3e12, efficiency=1.0,
    )  # fmt: skip
    data = replace(config.data, seq_len=args.length, global_batch_size=1, micro_batch_size=1)
    found = {}
    for kind in ("ring", "all_gather"):
        layout = replace(type(config.parallel)(), cp=ranks, dp_shard=1, cp_kind=kind)
        one = replace(config, parallel=layout, data=data)
        world = ParallelDims.of(layout).world
        sent = sum(size for group, _, size, _ in communication(one, world) if group == "cp")
        times: dict[str, Any] = step_time(one, world, links)
        cp = times["communication"].get("cp", {})
        memory = estimate(one, world)
        found[kind] = {
            "link_bytes": sent,
            "seconds": cp.get("seconds", 0.0),
            "exposed_seconds": cp.get("exposed", 0.0),
            "activation_bytes": memory["activations"],
        }
    ring, gathered = found["ring"], found["all_gather"]
    better = "ring"
    if gathered["exposed_seconds"] < ring["exposed_seconds"]:
        better = "all_gather"
    report.numbers["link"] = {"cp": ranks, "length": args.length, **found}
    for kind, row in found.items():
        report.evidence.append(
            f"{kind}: {show_bytes(round(row['link_bytes']))} on the link a step and sample, "
            f"{1e3 * row['exposed_seconds']:.2f} ms of {1e3 * row['seconds']:.2f} not hidden, "
            f"activations {show_bytes(row['activation_bytes'])}"
        )
    less = gathered["activation_bytes"] - ring["activation_bytes"]
    report.evidence.append(
        f"parallel.cp={ranks} at {args.length:,} tokens: take {better}, less time is not hidden; "
        f"ring keeps {show_bytes(less)} less"
    )
    report.next.append(f"set parallel.cp_kind={better} parallel.cp={ranks}")


def draw(kept: dict[int, int], length: int, path: Path) -> Path | None:
    """Draw bytes over ranks beside the line of 1 / cp; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = sorted(kept)
    figure, axes = pyplot.subplots(figsize=(5, 3.4))
    axes.loglog(ranks, [kept[n] / 2**20 for n in ranks], "o-", label="measured")
    axes.loglog(ranks, [kept[1] / n / 2**20 for n in ranks], "k--", linewidth=1, label="1 / cp")
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.set(xlabel="parallel.cp", ylabel="MiB a rank", title=f"Attention at {length:,} tokens")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, check, doc=__doc__, add_flags=add_flags, check_flags=check_flags))

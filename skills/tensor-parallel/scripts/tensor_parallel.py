#!/usr/bin/env python3
"""Hold the layers that tensor parallelism splits against whole ones, and count what ranks send.

Ranks are forked on this machine's CPU and run the project's own layers in float64 on a small model
of its kind. Bytes are counted at the collectives during one optimizer step of the whole layout.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: tensor-parallel needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from kit import cli, layouts  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.user_code import user_code  # noqa: E402

SKILL = "tensor-parallel"
THRESHOLDS = {
    "tp-parity": 1e-12,  # error of outputs and gradients of a split layer, over the largest
    "tp-volume": 0.05,  # bytes sent against the closed form, relative
    "tp-full-logits": 1.0,  # largest tensor over the full logits; the own columns are 1 / tp
}
SIZES = (2, 4, 8, 16, 32, 64)
WIDTH, LENGTH, VOCAB = 128, 64, 4096
"""Of the small model: wide enough that a few numbers a token are few, logits above all else."""
TIMEOUT = 300.0


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--world",
        type=int,
        metavar="N",
        help="ranks to fork (default: the product of the axes; parallel.tp=1 is taken as 2 and 4, "
        "or as N)",
    )


def asked(call: cli.Invocation) -> tuple[list[int], list[str]]:
    """Return the sizes of tp to try, and the overrides without any."""
    words, tp = layouts.words_of(call), None
    for word in words:
        key, _, value = word.partition("=")
        tp = value if key == "parallel.tp" else tp
    if tp is None:
        config, sentences = layouts.load(call, words)
        if config is None:
            raise layouts.refuse("the configuration", sentences)
        tp = config.parallel.tp
    if str(tp).isdigit() and int(tp) > 1:
        return [int(tp)], words
    return [call.args.world] if (call.args.world or 1) > 1 else [2, 4], words


def check(call: cli.Invocation) -> Report:
    """Try each size, then count the bytes of the layout with the first that is accepted."""
    report, accepted = Report(SKILL), []
    sizes, words = asked(call)
    refusals: list[str] = []
    for tp in sizes:
        config, sentences = layouts.load(call, [*words, f"parallel.tp={tp}"])
        if config is not None:
            world = layouts.ranks_of(config, call.args.world)
            sentences = layouts.refused(config, world)
        sizes_of = [t for t in sentences if f"parallel.tp={tp}: " in t and "not divide" in t]
        if len(sizes_of) < len(sentences):
            raise layouts.refuse("the layout", sentences)
        refusals += sentences
        accepted += [] if sentences else [(tp, config, world)]
    indivisible = bool(refusals) and not accepted
    fits = fitting(accepted[0][1]) if accepted else []
    message = refusals[0] if indivisible else f"sizes that divide: {', '.join(map(str, fits))}"
    report.check("tp-indivisible", "fail" if indivisible else "pass", message=message)
    report.numbers |= {"refused": refusals, "sizes_that_divide": fits}
    if indivisible:
        report.summary = f"parallel.tp={sizes[0]} does not divide the model; nothing was run"
        report.evidence += refusals[1:]
        return report
    call.expect(None, f"then layers on {' and '.join(str(tp) for tp, _, _ in accepted)} ranks")
    with tempfile.TemporaryDirectory() as folder:
        tried = []
        for tp, config, world in accepted:
            values = layouts.small(
                config, world, Path(folder), width=WIDTH, length=LENGTH, vocab=VOCAB
            )
            tiny, sentences = layouts.load(
                call, [*words, f"parallel.tp={tp}", *layouts.written(values)]
            )
            if tiny is None:
                raise layouts.refuse("the small model of this layout", sentences)
            tried.append((tp, config, tiny, world))
        judge_layers(report, [(tp, tiny) for tp, _, tiny, _ in tried])
        _, config, tiny, world = tried[0]
        judge_volume(report, config, tiny, world)
    changed = layouts.changes(config, tiny)
    report.numbers["changed"] = {k: v for k, v in changed.items() if k != "data.input"}
    return report


def fitting(config: Any) -> list[int]:
    """Return the sizes of tp that divide everything they split."""
    from curry_train.parallel.dims import ParallelDims

    dims = ParallelDims.of(config.parallel)
    dims = replace(dims, dp_shard=max(dims.dp_shard, 1), ep=1)
    return [t for t in SIZES if not replace(dims, tp=t).problems(config.model, config.data)]


def judge_layers(report: Report, tried: list[tuple[int, Any]]) -> None:
    """Parity, the largest tensor and CPU time of every size."""
    import split_layers

    from curry_train.config import ParallelConfig
    from curry_train.testing import run_ranks

    worst, share, count, times = (0.0, "", "", 0, 0), (0.0, 0, ""), 0, []
    for tp, tiny in tried:
        alone = replace(tiny, parallel=ParallelConfig(tp=tp, dp_shard=1))
        with user_code(f"a layer on {tp} ranks"):
            ranks = run_ranks(split_layers.split_on_rank, tp, alone, timeout=TIMEOUT)
        for rank, found in enumerate(ranks):
            count = len({name for name, _, _ in found["rows"]})
            rows = [(value, name, what, rank, tp) for name, what, value in found["rows"]]
            worst = max([worst, *rows], key=lambda row: row[0])
            share = max(share, (found["share"], tp, found["made_by"]))
        split, whole = (max(f[k] for f in ranks) for k in ("cpu_split", "cpu_whole"))
        times.append({"tp": tp, "cpu_split": split, "cpu_whole": whole})
        report.evidence.append(
            f"tp {tp}: a feed-forward of width 512 takes {1e3 * split:.1f} ms CPU a rank, "
            f"{1e3 * whole / tp:.1f} ms were its share of {1e3 * whole:.1f} ms unsplit"
        )
    value, name, what, rank, tp = worst
    limit = THRESHOLDS["tp-parity"]
    report.numbers |= {"layers": count, "cpu": times}
    report.check(
        "tp-parity",
        "pass" if value <= limit and count > 1 else "fail",
        value=value,
        threshold=limit,
        message=f"{count} layers, worst {name or 'none'}: {what}, rank {rank} of tp {tp}",
    )
    full = share[0] >= THRESHOLDS["tp-full-logits"]
    report.check(
        "tp-full-logits",
        "fail" if full else "pass",
        value=share[0],
        threshold=THRESHOLDS["tp-full-logits"],
        unit="of the full logits",
        message=f"largest tensor of a forward pass, tp {share[1]}, made by {share[2]}",
    )
    if full:
        report.next.append("something gathers logits: read loss.py and models/decoder.py (logits)")
    if value > limit:
        report.next.append(f"{name} differs from the whole layer: read parallel/tensor_parallel.py")


def judge_volume(report: Report, config: Any, tiny: Any, world: int) -> None:
    """Hold the bytes of one step against the closed form, group by group."""
    import split_layers

    from curry_train.communication import communication, messages
    from curry_train.data import open_corpus
    from curry_train.layout import Layout
    from curry_train.testing import run_ranks

    with user_code(f"a step on {world} ranks"):
        corpus = open_corpus(tiny.data, cache_dir=None)
        ranks = run_ranks(split_layers.sent_on_rank, world, tiny, corpus, timeout=TIMEOUT)
    layout, groups = Layout(tiny, world), {}
    for rank, sent in enumerate(ranks):
        planned: dict[tuple, float] = defaultdict(float)
        names: dict[tuple, list[str]] = defaultdict(list)
        for row in messages(layout, rank // (world // layout.dims.pp)):
            key = (tuple(layout.dims.members(row.group, rank)), row.group == "ep")
            planned[key] += row.bytes
            names[key] += [] if row.group in names[key] else [row.group]
        for key, size in planned.items():
            found = sent.get(key, 0.0)
            gap, label = abs(found - size) / size, "+".join(names[key])
            if label not in groups or gap > groups[label]["gap"]:
                groups[label] = {"planned": size, "sent": found, "gap": gap}
        other = sum(size for key, size in sent.items() if key not in planned)
        gap = other / max(sum(sent.values()), 1.0)
        if gap > groups.get("others", {"gap": 0.0})["gap"]:
            groups["others"] = {"planned": 0.0, "sent": other, "gap": gap}
    # Which experts tokens visit is chance, so their rows are told and not judged.
    judged = {name: g for name, g in groups.items() if name != "ep"}
    name = max(judged, key=lambda name: judged[name]["gap"])
    gap, limit = judged[name]["gap"], THRESHOLDS["tp-volume"]
    report.check(
        "tp-volume",
        "pass" if gap <= limit else "fail",
        value=gap,
        threshold=limit,
        unit="relative",
        message=f"group {name}: sent {judged[name]['sent']:,.0f} bytes a step, "
        f"closed form {judged[name]['planned']:,.0f}",
    )
    real = communication(config, world)
    for group, what, size, calls in real:
        print(f"{group:<12} {size:>18,.0f} bytes a step of a rank in {calls:>6} calls  {what}")
    sys.stdout.flush()
    report.numbers |= {"groups": groups, "world": world, "bytes_of_the_project": real}
    total = sum(size for group, _, size, _ in real if group == "tp")
    report.summary = (
        f"{report.numbers['layers']} layers of tp {layout.dims.tp} checked; in the project's own "
        f"sizes a rank sends {total / 2**20:,.1f} MiB a step over tp"
    )


if __name__ == "__main__":
    sys.exit(
        cli.run(
            SKILL, check, doc=__doc__, add_flags=add_flags, check_flags=layouts.check_layout_flags
        )
    )

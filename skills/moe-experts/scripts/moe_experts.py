#!/usr/bin/env python3
"""Measure the expert banks of a mixture of experts on a real batch: backend, rows, time, bytes.

Each bank runs forward and backward on what it got from its router, and a few of its tokens are
held against a float64 loop. Of other code every module counts that holds stacked experts [E, ., .]
and is called with tokens, expert ids and weights, as the experts of transformers are.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: moe-experts needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from expert_banks import Bank, foreign_banks, loop, project_banks  # noqa: E402

from kit import cli  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.state import preserved  # noqa: E402
from kit.user_code import user_code  # noqa: E402

SKILL = "moe-experts"
THRESHOLDS = {
    "experts-parity": 4.0,  # error over that of a plain loop in the same dtype
    "experts-weights": 10.0,  # an expert's size over the median expert's, or one over it
    "experts-bytes": 1.25,  # bytes kept for backward over tokens, weights, h and the order of rows
}
REPEATS, SAMPLE = 5, 16


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help=f"timed passes of a bank (default {REPEATS})"
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=SAMPLE,
        help=f"tokens that are held against the loop (default {SAMPLE})",
    )


def check_flags(args: Any) -> None:
    """Refuse flags that cannot work."""
    for name in ("repeats", "sample"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}", "it takes at least 1")


def measure(call: cli.Invocation) -> Report:
    """Catch what the banks get, run them on it, judge."""
    args, report = call.args, Report(SKILL)
    call.expect(None, "then 2 passes of each bank and its timed ones")
    target = call.load_target()
    of_project = target.kind == "project"
    rows = []
    with preserved(target):
        find = project_banks if of_project else foreign_banks
        banks = find(target)
        for number, bank in enumerate(banks):
            with user_code(f"running {bank.name}"):
                rows.append(measure_bank(bank, args.repeats, args.sample))
            call.progress(number + 1, len(banks), "banks")
        if of_project and banks:
            with user_code("curry_train.kernels"):
                judge_backend(report, banks)
    if not banks:
        report.summary = (
            "this model is dense (model.num_experts=0 or every block dense), so there are no "
            "experts to measure; choose a mixture, such as --set model=tiny_moe"
            if of_project
            else "no bank of experts found: a module must hold stacked experts [E, rows, columns] "
            "and be called with tokens [T, D], integer expert ids [T, K] and weights [T, K]"
        )
        return report
    report.numbers["banks"] = rows
    judge(report, rows)
    return report


def measure_bank(bank: Bank, repeats: int, sample: int) -> dict[str, Any]:
    """Time one bank, count what it keeps, and compare a few tokens with a loop."""
    torch = sys.modules["torch"]
    ids = bank.ids.flatten()
    loads = ids[ids >= 0].bincount(minlength=bank.experts).double()
    forward, backward = time_passes(bank, repeats)
    kept, needed = kept_bytes(bank)
    rows = int(loads.sum())
    return {
        "bank": bank.name,
        "experts": bank.experts,
        "tokens": len(bank.x),
        "dtype": str(bank.x.dtype).removeprefix("torch."),
        "backend": bank.backend,
        "rows": rows,
        "rows_per_expert": {
            "mean": rows / bank.experts,
            "least": int(loads.min()),
            "median": float(torch.quantile(loads, 0.5)),
            "most": int(loads.max()),
        },
        "forward": forward,
        "backward": backward,
        "flops_per_s": 18 * rows * bank.width * bank.hidden / (forward + backward),
        "kept_bytes": kept,
        "kept_over_needed": kept / needed,
        "parity": parity(bank, sample) if bank.layout else None,
        "weights": weight_sizes(bank),
    }


def weight_sizes(bank: Bank) -> dict[str, list[float]]:
    """Give the root mean square of each expert's weights, by matrix."""
    matrices = {n: p.detach() for n, p in bank.module.named_parameters() if p.dim() == 3}
    if bank.layout:
        matrices = bank.split(matrices)
    return {name: root_mean_squares(w).tolist() for name, w in matrices.items()}


def root_mean_squares(w: Any) -> Any:
    """Give that of each matrix of a stack [E, rows, columns]: [E], in float32 or wider."""
    torch = sys.modules["torch"]
    wide = torch.promote_types(w.dtype, torch.float32)
    return torch.linalg.vector_norm(w, dim=(1, 2), dtype=wide) / w[0].numel() ** 0.5


def time_passes(bank: Bank, repeats: int) -> tuple[float, float]:
    """Give the median seconds of a forward and of a backward pass, after one untimed."""
    torch = sys.modules["torch"]
    times: list[tuple[float, float]] = []
    upstream = torch.ones_like(bank.x)
    for _ in range(repeats + 1):
        x, weights = (t.detach().requires_grad_() for t in (bank.x, bank.weights))
        marks = [now(bank.x.device)]
        out = bank.run(x, bank.ids, weights)
        marks.append(now(bank.x.device))
        out.backward(upstream)
        marks.append(now(bank.x.device))
        times.append((marks[1] - marks[0], marks[2] - marks[1]))
        bank.module.zero_grad(set_to_none=True)
    forward, backward = (statistics.median(part) for part in zip(*times[1:], strict=True))
    return forward, backward


def now(device: Any) -> float:
    """Read the clock after the device has done what it was given."""
    if device.type != "cpu":
        sys.modules["torch"].accelerator.synchronize()
    return time.perf_counter()


def kept_bytes(bank: Bank) -> tuple[int, int]:
    """Give the bytes of all storages kept for backward, and those that no bank can do without.

    Needed: tokens, router weights, h [rows, 2F], the order of the rows and where each came from,
    and the experts in the compute dtype where that is not the parameters' own.
    """
    torch = sys.modules["torch"]
    own = {p.untyped_storage().data_ptr() for p in bank.module.parameters()}
    kept: dict[int, tuple[int, Any]] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    x, weights = (t.detach().clone().requires_grad_() for t in (bank.x, bank.weights))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = bank.run(x, bank.ids, weights)
    size, rows = bank.x.element_size(), bank.ids.numel()
    needed = (bank.x.numel() + rows + rows * 2 * bank.hidden) * size + 8 * rows
    parameters = list(bank.module.parameters())
    if parameters[0].dtype != bank.x.dtype:
        needed += sum(p.numel() for p in parameters) * size
    del out
    return sum(amount for amount, _ in kept.values()), needed


def parity(bank: Bank, sample: int) -> dict[str, float]:
    """Give the error of output and gradients over that of a plain loop in the same dtype.

    Both are measured against the loop in float64; a gradient of an expert without tokens must be 0.
    """
    torch = sys.modules["torch"]
    ids, some = bank.ids[:sample], slice(0, sample)
    x, weights = (t[some].detach().clone().requires_grad_() for t in (bank.x, bank.weights))
    upstream = torch.randn_like(x)
    bank.module.zero_grad(set_to_none=True)
    out = bank.run(x, ids, weights)
    out.backward(upstream)
    found = {"output": out.detach(), "x": x.grad, "weights": weights.grad}
    visited = sorted(set(ids[ids >= 0].tolist()))
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in bank.module.named_parameters()
    }
    unvisited = [e for e in range(bank.experts) if e not in visited]
    stray = [float(g[unvisited].abs().max()) for g in gradients.values() if unvisited]
    found |= {n: g[visited] for n, g in bank.split(gradients).items()}
    bank.module.zero_grad(set_to_none=True)
    exact = loop(bank, x, ids, weights, upstream, torch.float64)
    plain = loop(bank, x, ids, weights, upstream, bank.x.dtype)
    floor = torch.finfo(bank.x.dtype).eps
    ratios = {
        name: distance(value, exact[name]) / max(distance(plain[name], exact[name]), floor)
        for name, value in found.items()
    }
    if any(value != 0 for value in stray):
        ratios["experts without tokens"] = float("inf")
    return ratios


def distance(found: Any, exact: Any) -> float:
    """Give the relative error in the norm."""
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def judge_backend(report: Report, banks: list[Bank]) -> None:
    """Compare the backend that runs with the fastest of the device and dtype."""
    from curry_train.kernels import dispatch
    from curry_train.kernels.report import describe

    bank = banks[0]
    device, dtype = bank.x.device, bank.x.dtype
    shape = (len(bank.x), bank.width, bank.hidden, bank.experts, bank.ids.shape[1])
    told = describe(device, dtype, shape)
    best = "triton" if device.type == "cuda" else "grouped_mm"
    if str(dtype) == "torch.float64":
        best = "sorted"
    rejected = {row["name"]: row["reason"] for row in told["backends"] if row["reason"]}
    report.numbers["backends"] = told["backends"]
    chosen = dispatch.choose(
        device, dtype, width=bank.width, hidden=bank.hidden, backend=bank.asked
    )
    for each in banks:
        each.backend = chosen
    why = rejected.get(best) or f"{bank.asked} was asked for, or {dispatch.VARIABLE} is set"
    report.check(
        "experts-backend",
        "pass" if chosen == best else "fail",
        value=chosen,
        message="the fastest of this device" if chosen == best else f"not {best}: {why}",
    )
    others = [f"{name}: {reason}" for name, reason in rejected.items()]
    report.evidence.append("rejected " + "; ".join(others) if others else "no backend was rejected")


def judge(report: Report, rows: list[dict[str, Any]]) -> None:
    """Parity and bytes of the worst bank; the slowest one in the summary."""
    slowest = max(rows, key=lambda row: row["forward"] + row["backward"])
    spread = slowest["rows_per_expert"]
    report.summary = (
        f"{len(rows)} bank{'s' * (len(rows) > 1)} of {slowest['experts']} experts, "
        f"{slowest['dtype']}; slowest: forward {1000 * slowest['forward']:.3g} ms, "
        f"backward {1000 * slowest['backward']:.3g} ms"
    )
    report.evidence.insert(
        0,
        f"rows an expert of it: {spread['mean']:.0f} on average, {spread['least']} to "
        f"{spread['most']}; kept for backward {slowest['kept_bytes'] / 2**20:.2f} MiB",
    )
    judged = [row for row in rows if row["parity"]]
    if judged:
        ratios = [(value, f"{row['bank']} {name}") for row in judged
                  for name, value in row["parity"].items()]  # fmt: skip
        # NaN is the worst of all and no number for max.
        ratio, where = max(ratios, key=lambda pair: (math.isnan(pair[0]), pair[0]))
        limit = THRESHOLDS["experts-parity"]
        report.check(
            "experts-parity",
            "pass" if ratio <= limit else "fail",
            value=ratio,
            threshold=limit,
            unit="x the error of a plain loop",
            message=f"worst: {where}",
        )
    else:
        report.check("experts-parity", "skipped", message="the layout of these experts is unknown")
    judge_weights(report, rows)
    judge_bytes(report, rows)


def judge_weights(report: Report, rows: list[dict[str, Any]]) -> None:
    """Name the expert whose weights are farthest from the others' in size: zero, huge, NaN."""
    worst, where = 1.0, ""
    for row in rows:
        for name, sizes in row["weights"].items():
            middle = statistics.median([size for size in sizes if math.isfinite(size)] or [0.0])
            for expert, size in enumerate(sizes):
                low, high = sorted((size, middle))
                sound = math.isfinite(size + middle) and low > 0
                far = high / low if sound else math.inf
                if far > worst:
                    worst, where = far, f"{row['bank']} {name}, expert {expert}: {size:.2g}"
    limit = THRESHOLDS["experts-weights"]
    report.check(
        "experts-weights",
        "pass" if worst <= limit else "fail",
        value=worst,
        threshold=limit,
        unit="x the median expert",
        message=f"worst: {where}" if where else "all alike",
    )


def judge_bytes(report: Report, rows: list[dict[str, Any]]) -> None:
    """Compare what the worst bank keeps for backward with what it needs."""
    worst = max(rows, key=lambda row: row["kept_over_needed"])
    limit = THRESHOLDS["experts-bytes"]
    lean = worst["kept_over_needed"] <= limit
    report.check(
        "experts-bytes",
        "pass" if lean else "fail",
        value=worst["kept_over_needed"],
        threshold=limit,
        unit="x what is needed",
        message="" if lean else f"{worst['bank']} keeps gathered tokens or outputs of experts",
    )
    if not lean:
        report.next.append(
            "model.moe_backend=auto keeps the least; transformers' models can run on it, see "
            "curry_train/kernels/transformers_experts.py"
        )


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, measure, doc=__doc__, add_flags=add_flags, check_flags=check_flags))

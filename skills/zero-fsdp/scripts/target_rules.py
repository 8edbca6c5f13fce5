"""Judgement of a user's own fully_shard model from what its ranks found."""

from __future__ import annotations

from typing import Any

from kit.report import Report

NARROW = ("torch.bfloat16", "torch.float16")


def judge(report: Report, ranks: list[dict], limits: dict[str, float], max_norm: Any) -> None:
    """Judge what is left whole, the groups, the reduction, the optimizer and the clip."""
    found = ranks[0]
    report.numbers |= {"ranks": ranks}
    judge_unsharded(report, found, limits["zero-unsharded"])
    if found["groups"]:
        judge_groups(report, found, limits)
        judge_reduction(report, found)
    judge_optimizer(report, found)
    if "clip" in found:
        judge_clip(report, [one["clip"] for one in ranks], limits["zero-clip"], max_norm)
    sizes = sorted(found["groups"].values(), reverse=True)
    report.summary = (
        f"{found['total']:,} parameters in {len(sizes)} groups on {len(ranks)} ranks"
        + (f", the largest of {sizes[0]:,}" if sizes else "")
    )


def judge_unsharded(report: Report, found: dict, limit: float) -> None:
    """Trainable parameters outside of fully_shard are whole everywhere and never reduced."""
    left = sum(size for _, size in found["unsharded"])
    share = left / max(found["total"], 1)
    names = ", ".join(name for name, _ in found["unsharded"][:3])
    report.check(
        "zero-unsharded",
        "fail" if share > limit else "pass",
        value=share,
        threshold=limit,
        unit="of the parameters",
        message=f"whole on every rank, and their gradients are never summed: {names}"
        if share > limit
        else "",
    )
    if not found["root"]:
        report.check(
            "zero-root",
            "fail",
            message="call fully_shard(model) last: "
            + ("nothing is prefetched between blocks" if found["groups"] else "nothing is sharded"),
        )
    else:
        report.check("zero-root", "pass")


def judge_groups(report: Report, found: dict, limits: dict[str, float]) -> None:
    """One group for all blocks gathers the whole model; many in a block send small messages."""
    name = max(found["groups"], key=lambda group: found["groups"][group])
    share, limit = found["groups"][name] / found["total"], limits["zero-giant-group"]
    giant = share > limit and found["blocks_of_group"][name] > 1
    report.check(
        "zero-giant-group",
        "fail" if giant else "pass",
        value=share if giant else None,
        threshold=limit,
        unit="of the parameters in one group",
        message=f"{name or 'the root'} gathers {found['blocks_of_group'][name]} blocks at once; "
        "call fully_shard on each block first"
        if giant
        else "",
    )
    inside, limit = found["groups_of_block"], limits["zero-small-groups"]
    block = max(inside, key=lambda b: inside[b], default=None)
    if block is None:
        report.check("zero-small-groups", "skipped", message="the model has no list of blocks")
        return
    many = inside[block] > limit
    report.check(
        "zero-small-groups",
        "fail" if many else "pass",
        value=inside[block],
        threshold=limit,
        unit=f"groups in {block}",
        message="each is an all-gather of its own; shard blocks, not layers" if many else "",
    )


def judge_reduction(report: Report, found: dict) -> None:
    """Sums of gradients in half a precision lose small ones, more of them with more ranks."""
    narrow = {name: kind for name, kind in found["reduce"].items() if kind in NARROW}
    hidden = None in found["reduce"].values()
    name = next(iter(narrow), "")
    report.check(
        "zero-reduce-dtype",
        "fail" if narrow else "unclear" if hidden else "pass",
        message=f"{name or 'the root'} reduces in {narrow[name]}: "
        "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        if narrow
        else "this torch does not show the policy"
        if hidden
        else ", ".join(sorted(set(found["reduce"].values()))),
    )


def judge_optimizer(report: Report, found: dict) -> None:
    """fully_shard makes new parameters; an older optimizer updates what nobody reads."""
    if not found["has_optimizer"]:
        report.check("zero-optimizer-before", "skipped", message="no optimizer was returned")
        return
    strays = found["strays"]
    report.check(
        "zero-optimizer-before",
        "fail" if strays else "pass",
        value=strays,
        unit=f"of {found['held']} parameters",
        message="the optimizer holds the ones from before; build it after fully_shard"
        if strays
        else "",
    )


def judge_clip(report: Report, clips: list[dict], limit: float, max_norm: Any) -> None:
    """All ranks shrink by one factor, and to the norm that was asked for."""
    factors = [clip["factor"] for clip in clips if clip["factor"] is not None]
    spread = (max(factors) - min(factors)) / max(max(factors), 1e-300) if factors else 0.0
    known = clips[0]["max_norm"] if max_norm is None else max_norm
    before, after = clips[0]["before"], clips[0]["after"]
    off, wanted = 0.0, None
    if known is not None:
        wanted = min(known, before)
        off = abs(after - wanted) / max(wanted, 1e-300)
    message = f"norm {before:.4g} became {after:.4g} on every rank"
    if spread > limit:
        message = f"ranks shrink by {min(factors):.3g} to {max(factors):.3g}: each its own norm"
    elif off > limit:
        message = f"norm is {after:.4g} after the clip, not {wanted:.4g}: copies are counted twice"
    elif known is None and after == before:
        message = "the loop clips nothing"
    report.check(
        "zero-clip",
        "fail" if max(spread, off) > limit else "pass",
        value=max(spread, off),
        threshold=limit,
        message=message,
    )

"""Auxiliary terms of a mixture of experts at the start: balance loss and z-loss by formula."""

from __future__ import annotations

import math
from typing import Any

from kit.report import Report
from kit.state import preserved
from kit.target import Target
from kit.user_code import user_code


def judge_auxiliary(
    report: Report, target: Target, first: Any, limit: float
) -> dict[str, Any] | None:
    """Judge what the loss holds beside its main terms; `first` is what was measured.

    A balanced router has coefficient * 1.0 a block, its z-loss coefficient * (ln E)^2. Of other
    code the sum of all further terms is told and not judged, unless transformers' configuration
    says what it is made of.
    """
    found = (
        _of_project(target, first) if target.kind == "project" else _of_transformers(target, first)
    )
    if found is None:
        told = abs(first.rest) > 1e-3 * abs(sum(first.losses) / len(first.losses))
        report.check(
            "initial-aux-loss",
            "skipped",
            value=first.rest if told else None,
            message="further terms of the loss, without a formula known here"
            if told
            else "the loss has no further terms",
        )
        return None
    ratios = [found[name] / found[f"{name}_balanced"] for name in ("aux", "z") if name in found]
    ratio = max(ratios)
    shown = ", ".join(
        f"{name} {found[name]:.4g} of {found[f'{name}_balanced']:.4g}"
        for name in ("aux", "z")
        if name in found
    )
    report.check(
        "initial-aux-loss",
        "fail" if not ratio <= limit else "pass",
        value=ratio,
        threshold=limit,
        message=f"of a balanced router's: {shown}"
        + ("" if ratio <= limit else "; the routers send most tokens to few experts"),
    )
    return found


def _of_project(target: Target, first: Any) -> dict[str, float] | None:
    model = getattr(target.runtime.config, "model", None)
    experts = getattr(model, "num_experts", 0)
    if not experts or first.batch is None:
        return None
    from curry_train.loss import token_sums

    with preserved(target), user_code("token_sums of the project"):
        sums = token_sums(target.model, first.batch)
    if sums.tokens_per_expert is None:
        return None
    blocks, count = len(sums.tokens_per_expert), max(float(sums.count), 1.0)
    aux = getattr(model, "router_aux_loss_coef", 0.0) * blocks
    z = getattr(model, "router_z_loss_coef", 0.0) * blocks * math.log(experts) ** 2
    found = {}
    if aux:
        found |= {"aux": float(sums.aux.detach()) / count, "aux_balanced": aux}
    if z:
        found |= {"z": float(sums.z.detach()) / count, "z_balanced": z}
    return found or None


def _of_transformers(target: Target, first: Any) -> dict[str, float] | None:
    config = getattr(target.model, "config", None)
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if not coefficient or not getattr(config, "output_router_logits", False):
        return None
    # transformers sums the share of each of the K choices, so a balanced router has K
    chosen = getattr(config, "num_experts_per_tok", 1)
    return {"aux": first.rest, "aux_balanced": coefficient * chosen}

"""Checks of language models: labels are the next tokens, and no score sees later ones."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import sight as seeing
from batch_checks import Lookups
from evidence import IGNORED, CannotJudge, Evidence, Finding, at, failed, passed, skipped

from kit.batch_tree import leaves
from kit.fix import fix_in

POSITIONS = (0.0, 0.25, 0.5, 0.75)
OFFSETS = (-2, -1, 0, 1, 2, 3)
MATCH = 0.8
"""Share of labels that are the token at an offset, above which they are said to be it."""
LEAST_LABELS = 8


@dataclass
class Shift:
    """How the labels of a loss lie against the ids that the model looked up."""

    path: str
    ids: Any
    """[B, L], batch first."""
    labels: Any
    """[B, L'], batch first, ignored ones in it."""
    turned: bool
    """The code has [time, batch]."""
    shares: dict[int, float]
    """Share of the labels that are the token at an offset."""
    counts: dict[int, int]

    @property
    def best(self) -> int | None:
        """The offset at which the labels are tokens, None when they are none; 1 is preferred."""
        if self.shares.get(1, 0.0) >= MATCH:
            return 1
        good = [e for e in OFFSETS if self.shares.get(e, 0.0) >= MATCH]
        return max(good, key=lambda e: self.shares[e]) if good else None


def time_first(evidence: Evidence) -> bool:
    """Tell whether the ids of a language model come as [time, batch]."""
    found = shift_of(evidence)
    return found is not None and found.turned


def shift_of(evidence: Evidence) -> Shift | None:
    """Compare the labels of the loss with the ids that the model sees; None where neither is.

    Measured once, on all first batches together.
    """
    found = evidence.once("shifts", lambda: _shifts(evidence))
    return found[0] if found and found[0].best is not None else None


def _shifts(evidence: Evidence) -> list[Shift]:
    """Every way to lay labels against ids, the likeliest first."""
    candidates: dict[tuple[str, bool], list[Shift]] = {}
    for batch, seen in zip(evidence.batches, evidence.all_observed, strict=True):
        main: Any = seen.main
        if main is None or main.kind != "classes" or main.raw_labels.is_floating_point():
            continue
        ids_seen = _ids_seen(evidence, batch)
        for turned in (False, True):
            for path, ids in ids_seen:
                found = _compared(path, ids, main.raw_labels, turned)
                if found is not None:
                    candidates.setdefault((path, turned), []).append(found)
    pooled = [_pooled(found) for found in candidates.values()]
    return sorted(pooled, key=lambda s: (s.best is None, s.best != 1, s.turned, s.path))


def _ids_seen(evidence: Evidence, batch: Any) -> list[tuple[str, Any]]:
    """Ids of two dims that the model looks up, else those among its inputs."""
    lookups = Lookups()
    with evidence.mode(True), evidence.user(), lookups.recorded():
        evidence.target.loss_fn(evidence.target.model, batch)
    found = [
        (f"lookup {number}", ids)
        for number, (ids, _) in enumerate(lookups.looked_up)
        if ids.dim() == 2
    ]
    inputs = [
        (path, t) for path, t in leaves(batch) if evidence.roles.get(path) in ("input", "both")
    ]
    return found or [(p, t) for p, t in inputs if t.dim() == 2 and not t.is_floating_point()]


def _compared(path: str, ids: Any, labels: Any, turned: bool) -> Shift | None:
    if turned:
        if labels.dim() != 2:
            length = labels.numel() // max(ids.shape[1], 1)
            if length * ids.shape[1] != labels.numel():
                return None
            labels = labels.reshape(length, ids.shape[1])
        ids, labels = ids.t(), labels.t()
    rows = len(ids)
    if labels.numel() == 0 or labels.numel() % rows:
        return None
    labels = labels.reshape(rows, -1)
    if labels.shape[1] < 2 or labels.shape[1] > ids.shape[1]:
        return None
    shares, counts = {}, {}
    for offset in OFFSETS:
        first, last = max(0, -offset), min(labels.shape[1], ids.shape[1] - offset)
        kept = labels[:, first:last] if last > first else labels[:, :0]
        there = ids[:, first + offset : last + offset] if last > first else ids[:, :0]
        judged = kept != IGNORED
        counts[offset] = int(judged.sum())
        shares[offset] = float((kept == there)[judged].double().sum())
    return Shift(path, ids, labels, turned, shares, counts)


def _pooled(found: list[Shift]) -> Shift:
    counts = {e: sum(shift.counts[e] for shift in found) for e in OFFSETS}
    shares = {
        e: sum(shift.shares[e] for shift in found) / counts[e] if counts[e] >= LEAST_LABELS else 0.0
        for e in OFFSETS
    }
    first = found[0]
    return Shift(first.path, first.ids, first.labels, first.turned, shares, counts)


def check_future_leakage(evidence: Evidence, limit: float) -> Finding:
    """Where labels are the next tokens, no score sees a token after its own."""
    shift = shift_of(evidence)
    if shift is None or shift.best is None or shift.best < 1:
        return skipped("the labels are not the next tokens of the inputs; nothing has to be hidden")
    sights = _sights(evidence, limit)
    beyond = {t: s for t, s in sights.items() if s["furthest"] > t}
    if not beyond:
        return passed(f"scores of positions {sorted(sights)} see no later token",
                      max(s["later"] for s in sights.values()))  # fmt: skip
    t, worst = max(beyond.items(), key=lambda item: item[1]["later"])
    pattern = r"is_causal|attention_mask|attn_mask|mask|tril|triu|bidirectional"
    text = "mask later positions: is_causal=True, or a lower triangular mask"
    return failed(
        f"the score of position {t} depends on token {worst['furthest']} ({worst['later']:.2g} of "
        "its largest gradient)",
        worst["later"],
        attention_place(evidence, text, pattern),
    )


def attention_place(evidence: Evidence, text: str, pattern: str) -> Any:
    """Name the line of an attention's mask, of the model itself where there is none."""
    for name, module in evidence.target.model.named_modules():
        if "attn" in name.lower() or "attention" in type(module).__name__.lower():
            found = fix_in(module, text, pattern)
            home = sys.modules.get(type(module).__module__)
            found = found or fix_in(home, text, r"is_causal *=|\btri[lu]\b|causal_mask")
            if found is not None:
                return found
    model = evidence.target.model
    return (
        fix_in(model, text, pattern)
        or fix_in(type(model), text, r"bidirectional=True")
        or fix_in(model, text, r"softmax|scaled_dot|\bpad\(|view|reshape")
        or fix_in(model, text)
    )


def _sights(evidence: Evidence, limit: float) -> dict[int, dict[str, float]]:
    """For some positions: the furthest token that their score sees, and how strongly."""
    training = seeing.normalises_over_the_batch(evidence) is None

    def measure() -> dict[int, dict[str, float]]:
        return _measured_sights(evidence, limit, training)

    def measured() -> dict[int, dict[str, float]]:
        found = measure() or evidence.warmed(measure)  # a layer before the scores begins at 0
        if not found:
            raise CannotJudge("the scores do not depend on the embedded ids")
        return found

    return evidence.once("sights", measured)


def _measured_sights(evidence: Evidence, limit: float, training: bool) -> dict[int, Any]:
    shift = shift_of(evidence)
    assert shift is not None
    found = seeing.look(evidence, training=training)
    turned = shift.turned
    shape = shift.ids.t().shape if turned else shift.ids.shape
    inputs = [
        number for number, (_, tensor, ids) in enumerate(found.inputs)
        if ids is not None and tuple(ids.shape) == tuple(shape)
        and bool((ids == (shift.ids.t() if turned else shift.ids)).all())
    ]  # fmt: skip
    if not inputs:
        raise CannotJudge("the ids are not looked up in an embedding, so no gradient begins there")
    main: Any = found.seen.main
    rows = seeing.score_rows(main)
    count, length = shift.labels.shape
    if len(rows) != count * length:
        raise CannotJudge(f"{len(rows)} scores for {count} x {length} labels")
    rows = (
        rows.reshape(length, count, -1).transpose(0, 1)
        if turned
        else rows.reshape(count, length, -1)
    )
    example = int((shift.labels != IGNORED).sum(1).argmax())
    kept = [t for t in range(length) if int(shift.labels[example, t]) != IGNORED]
    wanted = sorted({kept[int(share * (len(kept) - 1))] for share in POSITIONS})
    sights = {}
    for t in wanted:
        gradients = found.of(seeing.projected(rows[example, t]))
        strength: Any = sum(
            (g.transpose(0, 1) if turned else g)[example].abs().flatten(1).amax(1)
            for g in (gradients[n] for n in inputs)
        )
        largest = float(strength.max())
        if largest == 0:
            continue
        visible = (strength > limit * largest).nonzero().flatten()
        later = strength[t + 1 :]
        sights[t] = {
            "furthest": int(visible.max()),
            "later": float(later.max()) / largest if later.numel() else 0.0,
        }
    return sights


def check_label_shift(evidence: Evidence, limit: float) -> Finding:
    """Labels of a language model are the next tokens: not the present ones, not the one after."""
    shift = shift_of(evidence)
    if shift is None:
        return _foreign_labels(evidence, limit)
    main: Any = evidence.observed.main
    text = "labels[t] must be input_ids[t+1], shifted once, in the data or in the loss"
    fix = _loader_place(evidence, text) or at(main.where, text)
    best: Any = shift.best
    if best == 1:
        return _shifted_once(evidence, shift, fix)
    share = shift.shares[best]
    if best == 0:
        if not _causal(evidence):
            return skipped("labels are the inputs, and every position sees all: an autoencoder")
        return failed(
            f"labels are the tokens of their own position ({share:.0%}): not shifted, the model "
            "learns to copy",
            share,
            fix,
        )
    if best > 1:
        twice = "shifted twice, in the data and in the loss (transformers models do it themselves)"
        return failed(f"labels are {best} tokens ahead ({share:.0%}): {twice}", share, fix)
    return failed(f"labels are earlier tokens ({share:.0%}): shifted the wrong way", share, fix)


def _loader_place(evidence: Evidence, text: str) -> Any:
    """Name a project's loader where its labels are not the next tokens already."""
    batch = evidence.batches[0]
    if evidence.target.runtime is None or not {"input_ids", "labels"} <= set(batch):
        return None
    kept, there = batch["labels"][:, :-1], batch["input_ids"][:, 1:]
    if float((kept == there)[kept != IGNORED].double().mean()) >= MATCH:
        return None
    return fix_in(sys.modules.get("curry_train.data.loader"), text, r"labels = ")


def _causal(evidence: Evidence) -> bool:
    try:
        sights = _sights(evidence, 1e-4)
    except CannotJudge:
        return False
    return all(s["furthest"] <= t for t, s in sights.items())


def _shifted_once(evidence: Evidence, shift: Shift, fix: Any) -> Finding:
    """Labels fit; still the last one may wrap around, or the scores see what they predict."""
    last, first = shift.labels[:, -1], shift.ids[:, 0]
    same_length = shift.labels.shape[1] == shift.ids.shape[1]
    if (
        same_length
        and len(last) >= 2
        and bool((last == first).all())
        and len(set(first.tolist())) > 1
    ):
        return failed("the last label is the first token: torch.roll wraps around", 1.0, fix)
    with contextlib.suppress(CannotJudge):
        ahead = {s["furthest"] - t for t, s in _sights(evidence, 1e-4).items()}
        if ahead == {1}:
            return failed(
                "every score sees exactly the token that it has to predict: scores and labels are "
                "cut one place apart",
                1.0,
                fix,
            )
    return passed(f"{shift.shares[1]:.1%} of the labels are the next token", shift.shares[1])


def _foreign_labels(evidence: Evidence, limit: float) -> Finding:
    """Labels that are no tokens of their own example: perhaps those of another one."""
    found = evidence.once("shifts", lambda: _shifts(evidence))
    none = next((shift for shift in found if not shift.turned), None)
    if none is not None and len(none.ids) > 1 and none.labels.shape[1] >= LEAST_LABELS:
        length = min(none.labels.shape[1], none.ids.shape[1] - 1)
        wanted, there = none.labels[:, :length], none.ids[:, 1 : length + 1]
        kept = wanted != IGNORED
        for i in range(len(wanted)):
            for j in range(len(there)):
                if i != j and int(kept[i].sum()) >= LEAST_LABELS:
                    share = float((wanted[i] == there[j])[kept[i]].double().mean())
                    if share > 0.95:
                        return failed(
                            f"labels of example {i} are the next tokens of example {j}: inputs "
                            "and labels are paired wrongly",
                            share,
                        )
    return skipped("the labels are no tokens of the inputs")

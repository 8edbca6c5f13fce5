"""Pictures: what of each held-out set is in train; scores of columns and the ROC of the split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from column_checks import Scored
from severities import THRESHOLDS
from text_overlap import HeldOut

from kit import plots

SHOWN = 12


def draw_sets(sets: list[HeldOut], path: Path) -> list[str]:
    """Draw for each held-out set the share of copies, near copies and partly known documents."""
    if not plots.available():
        return []
    figure, (axes,) = plots.figure("Held-out documents that are in the training text")
    left = np.zeros(len(sets))
    parts = {"copies": "copied", "near copies": "near", "partly": "partly"}
    for label, attribute in parts.items():
        share = np.array([100 * float(getattr(held, attribute).mean()) for held in sets])
        axes.barh([held.name for held in sets], share, left=left, label=label)
        left += share
    for place, whole in enumerate(left):
        axes.text(whole, place, f" {whole:.3g} %", va="center")
    axes.set_xlim(0, max(5.0, float(left.max()) * 1.1))
    axes.set_xlabel("share of documents, %")
    axes.set_ylabel("held-out set")
    axes.legend()
    return plots.save(figure, path)


def draw_table(scored: list[Scored], told: Any, path: Path) -> list[str]:
    """Draw the best columns' scores, and how well held-out rows are told from training rows."""
    if not plots.available():
        return []
    figure, panels = plots.figure("What the columns know", columns=1 if told is None else 2)
    best = scored[:SHOWN][::-1]
    panels[0].barh([s.name[:24] for s in best], [s.score for s in best])
    panels[0].axvline(THRESHOLDS["leak-single-feature"], **plots.LIMIT)
    panels[0].set_xlim(0, 1)
    panels[0].set_xlabel("AUC, |Spearman| or R2 with the target")
    panels[0].set_ylabel("column alone")
    if told is not None:
        scores, is_test = told
        order = np.argsort(-scores, kind="stable")
        hits = np.cumsum(is_test[order]) / max(is_test.sum(), 1)
        alarms = np.cumsum(~is_test[order]) / max((~is_test).sum(), 1)
        panels[1].plot([0, *alarms], [0, *hits])
        panels[1].plot([0, 1], [0, 1], **plots.LIMIT)
        panels[1].set_xlabel("share of training rows")
        panels[1].set_ylabel("share of held-out rows")
        panels[1].set_title("told apart (adversarial validation)")
    return plots.save(figure, path)

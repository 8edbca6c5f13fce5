"""Verdicts on the numbers of a look, each with the place to change where one can be named."""

from __future__ import annotations

import math
import statistics
import sys
from typing import Any

from flow_numbers import Flow, Stack
from flow_time import over_time

from kit.fix import fix_in
from kit.report import Report
from kit.target import Target

SHORT = 10
"""Blocks under which a slope alone says little."""
FEW_ROWS = 64
"""Rows of an activation under which a unit may be off by chance."""
CUTS = r"detach\(|no_grad|\.data\b|\.item\(|\.numpy\("
LOSS_ROSE = 0.05
"""Share of the first loss by which the last must exceed it to count as risen."""


class Judge:
    """Adds every check of the skill to a report."""

    def __init__(self, report: Report, target: Target, seen: Any, limits: dict[str, float]) -> None:
        self.report, self.target, self.seen, self.limits = report, target, seen, limits
        broken = seen.flow.bad_output or seen.flow.bad_gradient or not _finite(seen.flow.losses)
        self.finite = not broken
        self.flow: Flow = seen.flow if self.finite else seen.cold
        """Numbers to judge: those before any step where training itself broke."""
        cold_broken = seen.cold.bad_output or seen.cold.bad_gradient
        self.judgable = self.finite or not (cold_broken or not _finite(seen.cold.losses))

    def all(self) -> None:
        """Judge everything; the summary and the numbers too."""
        self.non_finite()
        if self.judgable:
            self.gradients()
            self.dead_units()
            self.saturation()
            self.residual()
            self.attention()
        else:
            for name in ("vanishing-gradient", "exploding-gradient", "dead-units"):
                self.report.check(name, "skipped", message="the numbers are not finite")
        if self.judgable:
            self.updates()
        self.describe()

    def add(self, id: str, verdict: str, **fields: Any) -> None:
        """Add a check."""
        self.report.check(id, verdict, **fields)

    def place(self, name: str, text: str, pattern: str | None = None) -> dict[str, Any] | None:
        """Name the line of the class of a module, or of the one around it, that is the user's."""
        parts = name.partition(" ")[0].split(".") if name else []
        for end in range(len(parts), -1, -1):
            try:
                module = self.target.model.get_submodule(".".join(parts[:end]))
            except AttributeError:
                continue
            if not type(module).__module__.startswith(("torch.", "transformers.")):
                found = fix_in(type(module), text, pattern) if pattern else None
                return found or fix_in(module, text)
        return self.in_file(text, pattern or r"init\b|init\.|nn\.\w+\(")

    def in_file(self, text: str, pattern: str) -> dict[str, Any] | None:
        """Name the first line that matches in the file that holds the target's loss function."""
        module = sys.modules.get(getattr(self.target.loss_fn, "__module__", ""))
        return None if module is None else fix_in(module, text, pattern)

    def non_finite(self) -> None:
        """Name the module in which NaN or infinity appears first."""
        if self.finite:
            self.add("non-finite", "pass", message="outputs, gradients and losses are finite")
            return
        seen = self.seen
        flow = seen.cold if not self.judgable else seen.flow
        where, what = flow.bad_output, "output"
        if where is None:
            where, what = flow.bad_gradient, "gradient"
        done = len(seen.steps.seconds)
        when = f"within {done} optimizer steps" if self.judgable else "at the first batch"
        name = where if where is not None else "the loss function"
        self.add(
            "non-finite",
            "fail",
            message=f"{name} is the first whose {what if where else 'value'} is not finite, {when}",
            fix=self.place(where, "what this module computes is not finite") if where else None,
        )

    def gradients(self) -> None:
        """Judge gradients that do not arrive, and their trend over depth."""
        if not any(row["gradient_norm"] is not None for row in self.flow.parameters):
            frozen = not self.flow.parameters
            message = "no parameter can be trained" if frozen else "the loss reaches no parameter"
            fix = fix_in(self.target.loss_fn, "keep the loss attached: no detach, item or no_grad")
            verdict = "skipped" if frozen else "fail"
            self.add("vanishing-gradient", verdict, value=0.0, message=message, fix=fix)
            self.add("exploding-gradient", "skipped", message="there are no gradients")
            return
        if self.cut():
            return
        silent = self.silent()
        judged = [s for s in self.flow.stacks if len(s.gradients) >= 4]
        worst = max(judged, key=_slope_size, default=None)
        if silent:
            more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
            self.add(
                "vanishing-gradient",
                "fail",
                value=0.0,
                message=f"no gradient at all arrives at {silent[0]}{more}",
                fix=self.place(silent[0].rpartition(".")[0], "nothing here reaches the loss"),
            )
        if worst is None:
            message = "no stack of at least 4 repeated blocks: there is no depth to follow"
            if not silent:
                self.add("vanishing-gradient", "pass", message=f"all arrive; {message}")
            if not over_time(self):
                self.add("exploding-gradient", "skipped", message=message)
            return
        self.trend(worst, silent=bool(silent))

    def silent(self) -> list[str]:
        """Name matrices whose gradient is exactly zero though their module ran."""
        if not self.seen.steps.moved and not self.seen.steps.own:
            return []  # nothing moved: what starts at zero still sends nothing on
        quiet = [
            row["name"]
            for row in self.flow.parameters
            if row["largest_gradient"] == 0.0 and self.is_matrix(row["name"])
        ]
        return [n for n in quiet if n.rpartition(".")[0] not in self.flow.not_called]

    def cut(self) -> bool:
        """Fail where most matrices that took part in the forward pass get no gradient at all."""
        ran = [
            row
            for row in self.flow.parameters
            if self.is_matrix(row["name"])
            and row["name"].rpartition(".")[0] not in self.flow.not_called
        ]
        without = [row["name"] for row in ran if row["gradient_norm"] is None]
        if without:
            self.report.evidence.append(f"without any gradient: {', '.join(without[:3])}")
        if len(without) <= len(ran) / 2:
            return False
        self.add(
            "vanishing-gradient",
            "fail",
            value=0.0,
            message=f"{len(without)} of {len(ran)} matrices are cut off from the loss, "
            f"the last one {without[-1]}",
            fix=self.place("", "no detach, no_grad, item or numpy on the way", CUTS),
        )
        self.add("exploding-gradient", "skipped", message="most gradients are missing")
        return True

    def is_matrix(self, name: str) -> bool:
        """Tell whether a parameter has two dims or more."""
        return self.target.model.get_parameter(name).dim() >= 2

    def trend(self, stack: Stack, *, silent: bool) -> None:
        """Judge the slope of one stack, both ways."""
        count = len(stack.gradients)
        where = f"{stack.with_gradient[0]} to {stack.with_gradient[-1]}"
        if stack.slope is None:
            pairs = zip(stack.with_gradient, stack.gradients, strict=True)
            zero = [n for n, g in pairs if not g > 0]
            message = f"the gradient has become 0 at {zero[-1]}" if zero else f"unknown in {where}"
            if not silent:
                fix = self.place(stack.names[0], "scale the initial weights to their width")
                self.add("vanishing-gradient", "fail", value=0.0, message=message, fix=fix)
            self.add("exploding-gradient", "pass", message=f"not growing in {where}")
            return
        slope, limit = stack.slope, self.limits["vanishing-gradient"]
        change = math.exp(abs(slope) * (count - 1))
        short = "short-stack-vanishing" if slope > 0 else "short-stack-exploding"
        least = self.limits["decade" if count >= SHORT else short]
        steep = abs(slope) > limit and change >= least
        deep = self.limits["deep-stack"]
        if slope < 0 and self.is_plain_tanh(stack):
            deep = self.limits["tanh-stack"]
        bad = steep or (count >= SHORT and change >= deep)
        told = f"{change:.3g}x over {count} blocks, {where}"
        if stack.interval is not None:
            told += f"; 95 % [{stack.interval[0]:.3f}, {stack.interval[1]:.3f}]"
        for id, hit in (("vanishing-gradient", slope > 0), ("exploding-gradient", slope < 0)):
            if silent and id == "vanishing-gradient":
                continue
            fail = bad and hit
            text = "scale the initial weights to their width, or add a norm and a residual path"
            self.add(
                id,
                "fail" if fail else "pass",
                value=slope,
                threshold=limit if id == "vanishing-gradient" else -limit,
                unit="per block",
                message=told,
                fix=self.place(stack.names[0], text) if fail else None,
            )

    def is_plain_tanh(self, stack: Stack) -> bool:
        """Tell whether a stack is tanh after tanh, without a norm or a residual path: its own
        saturation holds the growth of a gain far too large down to a few times."""
        tanh = sum(s["kind"] == "tanh" for s in self.flow.squashes)
        norms = any("norm" in type(m).__name__.lower() for m in self.target.model.modules())
        return tanh >= len(stack.names) - 1 and not stack.residual and not norms

    def dead_units(self) -> None:
        """Judge units of ReLU and its kin that are off for every input."""
        limit = self.limits["dead-units"]
        known = [u for u in self.flow.units if u["dead"] is not None and u["rows"] >= FEW_ROWS]
        if self.seen.recorder.spiking:
            message = "spikes are zero most of the time by design: see the lif-neuron skill"
            self.add("dead-units", "skipped", message=message)
            return
        if not known:
            message = "no ReLU, GELU or SiLU was called"
            if self.flow.units:
                message = f"fewer than {FEW_ROWS} rows a unit: raise --batches"
            self.add("dead-units", "skipped", message=message)
            return
        worst = max(known, key=lambda u: u["dead"])
        failed = [u for u in known if u["dead"] > limit]
        told = f"of {worst['units']} units are off on all {worst['rows']:,} rows in {worst['name']}"
        if len(failed) > 1:
            told += f", and {len(failed) - 1} more layers fail"
        self.add(
            "dead-units",
            "fail" if failed else "pass",
            value=worst["dead"],
            threshold=limit,
            message=told if worst["dead"] else "every unit fires",
            fix=self.place(worst["name"], "look at the bias and scale before this activation")
            if failed
            else None,
        )

    def saturation(self) -> None:
        """Judge tanh and sigmoid whose inputs lie where they are flat."""
        limit = self.limits["saturated-units"]
        # A gate that is open all the time has one end only; what squashes weights has both.
        known = [s for s in self.flow.squashes if s["kind"] == "tanh" or s["lesser_end"] > 0.05]
        if not self.flow.squashes:
            self.add("saturated-units", "skipped", message="no tanh or sigmoid was called")
            return
        worst = max(known or self.flow.squashes, key=lambda s: s["saturated"])
        fail = bool(known) and worst["saturated"] > limit
        self.add(
            "saturated-units",
            "fail" if fail else "pass",
            value=worst["saturated"],
            threshold=limit,
            message=f"of the inputs of {worst['name']} ({worst['kind']}) lie on its flat ends",
            fix=self.place(worst["name"], "scale the inputs or the initial weights down")
            if fail
            else None,
        )

    def residual(self) -> None:
        """Judge how the residual stream grows over depth."""
        streams = [s for s in self.flow.stacks if s.residual and len(s.rms) >= 4 and s.rms[0] > 0]
        if not streams:
            message = "no stack of at least 4 residual blocks"
            self.add("residual-growth", "skipped", message=message)
            return
        limit, slope = self.limits["residual-growth"], self.limits["exploding-gradient"]
        worst = max(streams, key=_growth)
        value = _growth(worst)
        logs = [math.log(max(r, 1e-300)) for r in worst.rms]
        steep = (logs[-1] - logs[0]) / (len(logs) - 1) > slope
        fail = value > limit and steep and logs[-1] - logs[0] > math.log(self.limits["decade"])
        told = f"{worst.rms[-1] / worst.rms[0]:.3g}x over {len(logs)} blocks"
        text = "normalise what a block adds, or scale it by 1/sqrt(2 * blocks)"
        self.add(
            "residual-growth",
            "fail" if fail else "pass",
            value=value,
            threshold=limit,
            unit="x sqrt(depth)",
            message=f"{told}, {worst.names[0]} to {worst.names[-1]}",
            fix=self.place(worst.names[0], text) if fail else None,
        )

    def attention(self) -> None:
        """Judge entropy and logits of every attention call that was seen."""
        rows = [a for a in self.flow.attention if a["entropy"] is not None]
        if not rows:
            for name in ("attention-entropy", "attention-logits"):
                message = "no softmax attention was called (linear or fused attention is not seen)"
                self.add(name, "skipped", message=message)
            return
        limit = self.limits["attention-entropy"]
        worst = min(rows, key=lambda a: a["entropy"])
        heads = [(h, a) for a in rows for h in a["heads"] if h["entropy"] is not None]
        sharp = sum(h["entropy"] < limit for h, _ in heads)
        fail = worst["entropy"] < limit
        scale = "look at the scale of queries and keys: 1/sqrt(width of a head), a norm of both"
        self.add(
            "attention-entropy",
            "fail" if fail else "pass",
            value=worst["entropy"],
            threshold=limit,
            unit="of ln(keys)",
            message=f"least in {worst['name']}; {sharp} of {len(heads)} heads below",
            fix=self.place(worst["name"], scale, r"scale|sqrt|\*\*\s*-?0?\.5") if fail else None,
        )
        limit, most = self.limits["attention-logits"], self.limits["attention-logits-any"]
        collapsed = [
            (h, a)
            for h, a in heads
            if h["largest_logit"] > most
            or (h["largest_logit"] > limit and h["entropy"] < self.limits["attention-entropy"])
        ]
        head, row = max(collapsed or heads, key=lambda pair: pair[0]["largest_logit"])
        note = "" if head["largest_logit"] <= limit else "; its entropy still is healthy"
        self.add(
            "attention-logits",
            "fail" if collapsed else "pass",
            value=head["largest_logit"],
            threshold=limit,
            unit="largest |logit|",
            message=f"in {row['name']}{'' if collapsed else note}",
            fix=self.place(row["name"], scale, r"scale|sqrt|\*\*\s*-?0?\.5") if collapsed else None,
        )

    def updates(self) -> None:
        """Judge how far a step moves the matrices, at the peak learning rate."""
        steps = self.seen.steps
        cut = {row["name"] for row in self.flow.parameters if row["gradient_norm"] is None}
        measured = {n: rs for n, rs in steps.ratios.items() if rs and n not in cut}
        known = {n: [r for r in rs if r > 0] for n, rs in measured.items()}
        if steps.own or not known:
            message = "the target returned no optimizer" if steps.own else self.why_no_ratio()
            self.add("update-ratio", "skipped", message=message)
            return
        by_matrix = {
            n: math.exp(statistics.fmean(map(math.log, rs))) if rs else 0.0
            for n, rs in known.items()
        }
        middle = statistics.median(by_matrix.values())
        least, most = (pick(by_matrix, key=by_matrix.__getitem__) for pick in (min, max))
        rose = not self.seen.loss_after <= self.seen.loss_before + LOSS_ROSE * abs(
            self.seen.loss_before
        )
        lost = [statistics.fmean(shares) for shares in steps.unmoved.values()]
        limits = self.limits
        high, low = limits["update-ratio-high"], limits["update-ratio-low"]
        message, fail = f"{by_matrix[least]:.1e} ({least}) to {by_matrix[most]:.1e} ({most})", True
        if lost and statistics.median(lost) > limits["update-lost"]:
            message = (
                f"{statistics.median(lost):.0%} of the 16-bit weights do not move: rounded away"
            )
        elif middle > limits["update-ratio-broken"] or (middle > high and rose):
            message = f"too large: the loss went from {self.seen.loss_before:.3g} to " + (
                f"{self.seen.loss_after:.3g}; {message}"
            )
        elif middle < limits["update-ratio-still"]:
            message = f"nothing moves: {message}"
        else:
            fail = False
            if not low <= middle <= high:
                message = f"{'large' if middle > high else 'small'}, but it works; {message}"
        if steps.scaled_by > 1.01:
            message += f"; scaled x{steps.scaled_by:.3g} from warm-up to the peak rate"
        self.add(
            "update-ratio",
            "fail" if fail else "pass",
            value=middle,
            threshold=high if middle > low else low,
            unit="median |dW|/|W|",
            message=message,
            fix=self.optimizer_line() if fail else None,
        )

    def why_no_ratio(self) -> str:
        """Say why no ratio is known."""
        if not self.seen.steps.matrices:
            return "no matrix can be trained"
        return "the learning rate is 0 in these steps"

    def optimizer_line(self) -> dict[str, Any] | None:
        """Name where a foreign target makes its optimizer, or the project's setting."""
        if self.target.kind == "project":
            return None
        text = "the learning rate and the parameters given to the optimizer"
        return self.in_file(text, r"optim\.\w+\(|\blr\s*=")

    def describe(self) -> None:
        """Fill numbers, evidence and summary."""
        flow, report, seen = self.flow, self.report, self.seen
        slowest = None if seen.overhead is None else round(seen.overhead, 3)
        report.numbers = {
            "overhead": slowest,
            "loss_first": seen.loss_before,
            "loss_last": seen.loss_after,
            "modules": flow.modules,
            "parameters": [
                {**row, "update_ratio": _mean(seen.steps.ratios.get(row["name"], []))}
                for row in flow.parameters
            ],
            "stacks": [vars(stack) for stack in flow.stacks],
            "units": flow.units,
            "squashes": flow.squashes,
            "attention": flow.attention,
            "not_called": flow.not_called,
            "scaled_by": seen.steps.scaled_by,
        }
        trained = sum(row["gradient_norm"] is not None for row in flow.parameters)
        report.summary = (
            f"{len(flow.modules)} modules, {trained} parameters with gradients, "
            f"{len(flow.stacks)} stack{'s' * (len(flow.stacks) != 1)} of blocks; "
            f"loss {seen.loss_before:.4g} to {seen.loss_after:.4g}"
        )
        if slowest is not None:
            report.evidence.append(f"a step with hooks took {slowest:.2f} x the plain one")
        if flow.not_called:
            shown = f"{len(flow.not_called)} modules: {', '.join(flow.not_called[:3])}"
            report.evidence.append(f"not run, as experts without tokens are: {shown}")


def _finite(values: list[float]) -> bool:
    return all(map(math.isfinite, values))


def _slope_size(stack: Stack) -> float:
    return math.inf if stack.slope is None else abs(stack.slope) * (len(stack.gradients) - 1)


def _growth(stack: Stack) -> float:
    return stack.rms[-1] / stack.rms[0] / math.sqrt(len(stack.rms))


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None

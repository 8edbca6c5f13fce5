"""Checks of data order, of labels that enter the inputs, and of the learning rate's schedule."""

from __future__ import annotations

import itertools
import math
import sys
import time
import warnings
from typing import Any

from evidence import SEED, CannotJudge, Evidence, Finding, failed, passed, same_tensor, skipped
from repeat_checks import built
from step_run import cycled, drive, kept

from kit import observation
from kit.batch_tree import leaves
from kit.batches import OnDevice
from kit.fix import fix_in
from kit.state import preserved
from kit.target import seed_everything

COMPARED = 3
MOST_STEPS = 50_000
NOTHING = 1e-6
RETURNED = 0.25  # of its range that a cosine may have risen again at the last step
"""Share of the highest learning rate up to which one counts as 0."""
SIMULATED_SECONDS = 5.0


def check_order(evidence: Evidence, limit: Any) -> Finding:
    """One seed gives one order; the next epoch and another seed give another."""
    if evidence.target.runtime is not None:
        return _project_order(evidence)
    first, again = _drawn(evidence, SEED), _drawn(evidence, SEED)
    if not _equal(first, again):
        return failed(
            f"the first {len(first)} batches differ between two passes from the same seed",
            0,
            _data_place(evidence, "draw the order from seeded generators only"),
        )
    if not _equal(*_twice_built(evidence)):
        return failed(
            "the data of two targets built from the same seed differ",
            0,
            _data_place(evidence, "draw data and order from seeded generators only"),
        )
    loader = evidence.target.batches
    loader = loader.inner if isinstance(loader, OnDevice) else loader
    sampler: Any = getattr(loader, "sampler", None)
    kind = type(sampler).__name__
    if "Random" not in kind and "Shuffle" not in kind:
        note = "the order is the same every time (no random sampler)"
        return passed(f"{len(first)} batches repeat; note: {note}", len(first))
    if len(sampler) < 4:
        return passed(f"{len(first)} batches repeat", len(first))
    with preserved(evidence.target):
        seed_everything(SEED)
        orders = [list(itertools.islice(iter(sampler), 1000)) for _ in range(2)]
    if orders[0] == orders[1]:
        return failed("two epochs have the same order", 0,
                      _data_place(evidence, "draw a new order in every epoch"))  # fmt: skip
    return passed(f"{len(first)} batches repeat, the next epoch has another order", len(first))


def _twice_built(evidence: Evidence) -> list[list[Any]]:
    """The first batches of two targets built from one seed; nothing where none can be built."""
    found = []
    with kept(evidence.target), evidence.user():
        for _ in range(2):
            try:
                target = built(evidence, SEED)
            except CannotJudge:
                return [[], []]
            seed_everything(SEED)
            found.append(list(itertools.islice(iter(target.batches), COMPARED)))
    return found


def _drawn(evidence: Evidence, seed: int) -> list[Any]:
    with preserved(evidence.target), evidence.user():
        seed_everything(seed)
        return list(itertools.islice(iter(evidence.target.batches), COMPARED))


def _equal(a: list[Any], b: list[Any]) -> bool:
    if len(a) != len(b):
        return False
    return all(same_batch(x, y) for x, y in zip(a, b, strict=True))


def same_batch(a: Any, b: Any) -> bool:
    """Tell whether two batches hold the same tensors bit for bit."""
    ours, theirs = leaves(a), leaves(b)
    return len(ours) == len(theirs) and all(
        p == q and same_tensor(s, t) for (p, s), (q, t) in zip(ours, theirs, strict=True)
    )


def _data_place(evidence: Evidence, text: str) -> Any:
    loader = evidence.target.batches
    loader = loader.inner if isinstance(loader, OnDevice) else loader
    for place in (getattr(loader, "sampler", None), getattr(loader, "dataset", None), loader):
        if place is not None:
            found = fix_in(type(place), text, r"rand|perm|shuffle|sample")
            if found is not None and "site-packages" not in found["file"]:
                return found
    return None


def _project_order(evidence: Evidence) -> Finding:
    loader = evidence.target.runtime.batches
    place = fix_in(type(loader), "draw the order from (seed, epoch)", r"permute|epoch|seed")

    def taken(of: Any, position: int) -> list[Any]:
        before, of.samples_consumed = of.samples_consumed, position
        try:
            return of.next_step()
        finally:
            of.samples_consumed = before

    with kept(evidence.target), evidence.user():
        first = taken(loader, 0)
        if not _equal(first, taken(loader, 0)):
            return failed("the first step's batch is another one when it is read again", 0, place)
        seed = evidence.target.runtime.config.seed
        twin = evidence.target.rebuild(seed).runtime.batches
        if not _equal(first, taken(twin, 0)):
            return failed(f"two loaders of seed {seed} give other batches", 0, place)
        other = evidence.target.rebuild(seed + 1).runtime.batches
        if _equal(first, taken(other, 0)):
            return failed("another seed gives the same order", 0, place)
        epoch = getattr(loader, "samples_per_epoch", None)
        if isinstance(epoch, int) and _equal(first, taken(loader, epoch)):
            return failed("the second epoch has the order of the first", 0, place)
    return passed("repeats with its seed, differs with another seed and in the second epoch", 1)


def check_label_in_inputs(evidence: Evidence, limit: float) -> Finding:
    """Labels exchanged before the transforms leave the inputs as they are, bit for bit."""
    column = _label_column(evidence)
    if column is not None:
        return failed(f"{column} of the inputs is the label itself", 1.0,
                      _data_place(evidence, "leave the label out of the inputs"))  # fmt: skip
    if evidence.target.data is not None:
        return _transformed(evidence)
    labelled = _dataset_labels(evidence)
    if labelled is None:
        return skipped("no labels to exchange before the transforms: return data=(inputs, labels, "
                       "transform)")  # fmt: skip
    return labelled


def _label_column(evidence: Evidence) -> str | None:
    """Find a column of a table that equals the label in every example."""
    torch, roles = evidence.torch, evidence.roles
    many = [dict(leaves(batch)) for batch in evidence.batches]
    for path, role in roles.items():
        if role != "input" or many[0][path].dim() != 2 or many[0][path].shape[1] < 2:
            continue
        for label in (p for p, r in roles.items() if r == "label"):
            y = torch.cat([batch[label].flatten().double() for batch in many])
            if not many[0][path].is_floating_point() or len(set(y.tolist())) < 2:
                continue
            x = torch.cat([batch[path] for batch in many]).double()
            if len(y) != len(x):
                continue
            same = (x == y[:, None]).all(0).nonzero().flatten()
            if len(same):
                return f"column {int(same[0])} of {path}"
    return None


def _transformed(evidence: Evidence) -> Finding:
    raw: Any = evidence.target.data
    inputs, labels, transform = raw
    if evidence.changed_in_place:
        raise CannotJudge("loss_fn writes into the batch; see not-repeatable")

    def batches(of_labels: Any) -> list[Any]:
        with preserved(evidence.target), evidence.user():
            seed_everything(SEED)
            return list(transform(inputs, of_labels))

    plain = batches(labels)
    if not _equal(plain, batches(labels)):
        raise CannotJudge("the transform gives other batches when it is called again")
    wanted = _input_paths(evidence, plain[0])
    exchanged = batches(_permuted(evidence, labels))
    changed, rows = 0, 0
    for a, b in zip(plain, exchanged, strict=True):
        for path in wanted:
            s, t = dict(leaves(a))[path], dict(leaves(b))[path]
            if s.shape != t.shape:
                return failed("the inputs have another shape with exchanged labels", 1.0,
                              fix_in(transform, "make inputs without the labels"))  # fmt: skip
            rows += len(s)
            changed += int((s != t).flatten(1).any(1).sum()) if s.dim() > 1 else int((s != t).sum())
    if not changed:
        return passed(f"{rows} inputs are the same with exchanged labels", 0)
    if _same_rows(plain, exchanged, wanted):
        return passed("note: the order of the examples depends on the labels, the inputs do not", 0)
    return failed(
        f"{changed} of {rows} inputs change when labels are exchanged before the transform: they "
        "carry the labels",
        changed,
        fix_in(transform, "fit encodings on other rows than they encode", r"label|target|\by\b"),
    )


def _same_rows(a: list[Any], b: list[Any], paths: list[str]) -> bool:
    def rows(batches: list[Any]) -> list[Any]:
        found = []
        for batch in batches:
            parts = [dict(leaves(batch))[path] for path in paths]
            found += [str([p[i].tolist() for p in parts]) for i in range(len(parts[0]))]
        return sorted(found)

    return rows(a) == rows(b)


def _input_paths(evidence: Evidence, batch: Any) -> list[str]:
    with preserved(evidence.target), evidence.user():
        roles = observation.roles(evidence.target, batch)
    wanted = [path for path, role in roles.items() if role in ("input", "both", "unused")]
    if not wanted:
        raise CannotJudge("no tensor of the transformed batches is an input")
    return wanted


def _permuted(evidence: Evidence, labels: Any) -> Any:
    """The labels in another order, of the type that they have."""
    generator = evidence.torch.Generator().manual_seed(SEED)
    order = evidence.torch.randperm(len(labels), generator=generator)
    if isinstance(labels, (list, tuple)):
        return type(labels)([labels[i] for i in order.tolist()])
    if hasattr(labels, "iloc"):
        moved = labels.copy()
        moved[:] = labels.to_numpy()[order.numpy()]
        return moved
    if hasattr(labels, "detach"):
        return labels[order.to(labels.device)]
    return labels[order.numpy()]


def _dataset_labels(evidence: Evidence) -> Finding | None:
    """Exchange dataset.targets or dataset.labels for a moment and read the examples again."""
    loader = evidence.target.batches
    loader = loader.inner if isinstance(loader, OnDevice) else loader
    dataset: Any = getattr(loader, "dataset", None)
    name = next((n for n in ("targets", "labels", "y") if hasattr(dataset, n)), None)
    if name is None or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    labels = getattr(dataset, name)
    count = min(len(dataset), 64)
    if not hasattr(labels, "__len__") or len(labels) != len(dataset):
        return None

    def examples() -> list[Any]:
        with preserved(evidence.target), evidence.user():
            seed_everything(SEED)
            return [dataset[i] for i in range(count)]

    plain = examples()
    if not _equal(plain, examples()):
        return None
    setattr(dataset, name, _permuted(evidence, labels))
    try:
        exchanged = examples()
    finally:
        setattr(dataset, name, labels)
    inputs = evidence.paths("input")
    changed = sum(
        not bool((dict(leaves(a))[p] == dict(leaves(b))[p]).all())
        for a, b in zip(plain, exchanged, strict=True)
        for p in inputs
        if p in dict(leaves(a)) and p in dict(leaves(b))
    )
    if not inputs or changed == 0:
        return passed(f"{count} examples have the same inputs with exchanged labels", 0)
    return failed(
        f"{changed} of {count} inputs change when {name} of the dataset are exchanged",
        changed,
        _data_place(evidence, "make inputs without the labels"),
    )


# The schedule ------------------------------------------------------------------------------------


def check_schedule_values(evidence: Evidence, limit: float) -> Finding:
    """The learning rate at 0, 1, warm-up end, middle and last; 0 at the end for `limit` at most."""
    target = evidence.target
    if target.runtime is not None:
        return _project_schedule(evidence, limit)
    if target.scheduler is None:
        return skipped("no scheduler was given")
    if getattr(target.scheduler, "optimizer", target.optimizer) is not target.optimizer:
        text = "make it with the optimizer that steps"
        return failed("the scheduler changes the learning rate of another optimizer",
                      fix=_schedule_place(evidence, text))  # fmt: skip
    of_step = _scheduled_by_step(evidence)
    if of_step is not None:
        return of_step
    total = target.total_steps or getattr(target.scheduler, "total_steps", None)
    if total is None:
        return skipped("total_steps is not known: return it beside the scheduler")
    values, error = _simulated(evidence, int(total))
    if error is not None:
        fix = _schedule_place(evidence, "give it the run's steps")
        return failed(f"scheduler.step() raises at step {len(values)} of {total}: {error}",
                      len(values), fix)  # fmt: skip
    found = _cosine_that_returns(target.scheduler, values)
    found = found or judge_values(values, limit, warmup_may_exceed=False)
    if found["verdict"] == "fail":
        found["fix"] = _schedule_place(evidence, "give the schedule the run's optimizer steps")
    return found


def _cosine_that_returns(scheduler: Any, values: list[float]) -> Finding | None:
    """A CosineAnnealingLR goes up again after T_max; meant cycles have classes of their own."""
    last = (getattr(scheduler, "_schedulers", None) or [scheduler])[-1]
    top = next(i for i, v in enumerate(values) if v >= 0.999 * max(values))
    least = min(values[top:])
    if type(last).__name__ != "CosineAnnealingLR" or least == values[top]:
        return None
    back = (values[-1] - least) / (values[top] - least)
    text = f"T_max={last.T_max} is less than the run's steps: the rate rises again, and ends at"
    text = f"{text} {back:.0%} of its range ({shown_values(values)})"
    return failed(text, back) if back > RETURNED else None


def _schedule_place(evidence: Evidence, text: str) -> Any:
    return evidence.in_builder(text, r"lr_scheduler|LambdaLR|LR\(|schedule")


def _project_schedule(evidence: Evidence, limit: float) -> Finding:
    from curry_train import optim

    runtime = evidence.target.runtime
    config = runtime.config
    total = config.run.max_steps
    stride = max(1, total // MOST_STEPS)
    steps = sorted({*range(1, total + 1, stride), total})
    values = [float(optim.lr_at(step, config.optim, total)) for step in steps]
    found = judge_values(values, limit, warmup_may_exceed=True)
    still = _still_at_end(values) if config.optim.schedule in ("cosine", "wsd") else 0.0
    if found["verdict"] != "fail" and still > limit and total > 1 / limit:
        found = failed(f"the learning rate stays where it is in the last {still:.0%} of the steps "
                       f"({shown_values(values)})", still)  # fmt: skip
    if found["verdict"] == "fail":
        text = "let the schedule end at max_steps, above 0 until then"
        found["fix"] = fix_in(optim.lr_at, text, r"return")
        return found
    with kept(evidence.target):
        drive(evidence, itertools.repeat(None))
        used = {float(group["lr"]) for group in runtime.optimizer.param_groups}
        wanted = float(optim.lr_at(runtime.step, config.optim, total))
    if any(abs(lr - wanted) > 1e-9 + 1e-6 * abs(wanted) for lr in used):
        step = sys.modules["curry_train.step"].train_step
        fix = fix_in(step, "set the rate before the step", r"lr_at")
        return failed(f"the first step used {sorted(used)}, the schedule says {wanted:.3g}",
                      max(used), fix)  # fmt: skip
    return found


def _still_at_end(values: list[float]) -> float:
    above = [number for number, value in enumerate(values) if value > values[-1] * (1 + NOTHING)]
    return 1 - (above[-1] + 2) / len(values) if above else 0.0


def judge_values(values: list[float], limit: float, *, warmup_may_exceed: bool) -> Finding:
    """Judge the learning rates of all steps, the first being step 1."""
    total, peak = len(values), max(values, default=0.0)
    shown = shown_values(values)
    if not all(math.isfinite(v) for v in values):
        at = next(i for i, v in enumerate(values) if not math.isfinite(v))
        return failed(f"the learning rate of step {at + 1} is {values[at]} ({shown})", values[at])
    if min(values) < 0:
        at = values.index(min(values))
        return failed(
            f"the learning rate of step {at + 1} is {values[at]:.3g} ({shown})", values[at]
        )
    if peak == 0:
        return failed(f"the learning rate is 0 in every step ({shown})", 1.0)
    least = NOTHING * peak
    idle = next(i for i, v in enumerate(reversed(values)) if v > least) / total
    if idle > limit and total > 1:
        return failed(f"the learning rate is 0, or next to it, in the last {idle:.0%} of the "
                      f"steps: the schedule is too short or steps too often ({shown})",
                      idle)  # fmt: skip
    rises = total > 2 and all(b > a for a, b in itertools.pairwise(values))
    if rises and not warmup_may_exceed:
        return failed(f"the learning rate still rises at the last step: warm-up is as long as the "
                      f"run ({shown})", idle)  # fmt: skip
    note = "; note: warm-up is as long as the run" if rises else ""
    return passed(shown + note, idle)


def shown_values(values: list[float]) -> str:
    """Write the rates of the steps worth looking at."""
    if not values:
        return "no steps"
    top = values.index(max(values))
    places = {0: "first", min(1, len(values) - 1): "second", top: "highest",
              len(values) // 2: "middle", len(values) - 1: "last"}  # fmt: skip
    return "lr " + ", ".join(f"{word} {values[at]:.3g}" for at, word in places.items())


def _simulated(evidence: Evidence, total: int) -> tuple[list[float], str | None]:
    """Step the scheduler through the run without the optimizer; it is put back."""
    target, values, error = evidence.target, [], None
    start = time.perf_counter()
    with kept(target), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(min(total, MOST_STEPS)):
            values.append(max(float(group["lr"]) for group in target.optimizer.param_groups))
            if len(values) == total:
                break
            try:
                target.scheduler.step()
            except Exception as raised:
                error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
                break
            if time.perf_counter() - start > SIMULATED_SECONDS:
                raise CannotJudge(f"{total} steps of the scheduler take too long to look at")
    if error is None and len(values) < total:
        raise CannotJudge(f"only {len(values)} of {total} steps of the scheduler were looked at")
    return values, error


def _scheduled_by_step(evidence: Evidence) -> Finding | None:
    """Look at how the loop's own step moves the scheduler."""
    target = evidence.target
    if evidence.step is None or target.optimizer is None:
        return None
    with kept(target):
        seen = drive(evidence, cycled(evidence), steps=2)
    place = fix_in(target.train_step, "step the scheduler once, after the optimizer",
                   r"sched")  # fmt: skip
    if seen.ticks > seen.steps:
        return failed(f"the scheduler steps {seen.ticks} times in {seen.steps} optimizer steps",
                      seen.ticks / seen.steps, place)  # fmt: skip
    if seen.ticked_first:
        return failed("the scheduler steps before the optimizer: the first rate is never used",
                      seen.ticks, place)  # fmt: skip
    return None

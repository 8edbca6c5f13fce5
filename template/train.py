"""Train a model; every setting is `key=value`.

`fabric run train.py`, `torchrun train.py` and `python train.py` all work; `--help` shows how.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from curry_train.command_line import load_or_exit, refuse
from curry_train.config import Config, ConfigError
from curry_train.data import DataError
from curry_train.launch import launch, prepare_environment, signal_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from curry_train.runtime import Runtime
    from curry_train.tracking.progress import Progress
    from curry_train.tracking.run_folder import Run


def train(config: Config, argv: list[str]) -> int:
    """Run the training loop; returns the exit code of this rank."""
    # torch is first imported here, after prepare_environment has set what it reads.
    from curry_train.checkpoint.training_state import Saver, begin
    from curry_train.data import open_corpus
    from curry_train.generate import write_sample
    from curry_train.parallel.mesh import agreed
    from curry_train.profiling import peak_memory
    from curry_train.runtime import assemble
    from curry_train.step import train_step
    from curry_train.tracking.abort import AbortRules
    from curry_train.tracking.progress import Progress

    corpus = open_corpus(config.data, cache_dir=Path(config.data.cache_dir))
    with launch(config, corpus, argv) as (mesh, run, signals):
        runtime = assemble(config, corpus, mesh)
        begin(runtime, run)
        abort, max_steps = AbortRules(config.run), config.run.max_steps
        progress = Progress(first_step=runtime.step, max_steps=max_steps, enabled=mesh.rank == 0)
        progress.say(f"run folder: {run.dir}")
        saver = Saver(runtime, run)
        status, reason = "done", None

        while runtime.step < max_steps:
            out = train_step(runtime)
            step, last = runtime.step, runtime.step == max_steps
            row = {**out.row(), "tokens": runtime.tokens}
            progress.update(step, loss=out.loss, tokens_per_s=out.tokens_per_s)

            broken = None if out.rescaled else abort.check(step, out.loss, out.grad_norm)
            stop = agreed(signals.code, mesh)
            if not out.finite:
                run.event("anomaly", step=step, what="update skipped", **out.row())
            if last or (due(step, config.run.eval_every) and not stop):
                give_up = None if last else lambda: agreed(signals.code, mesh)
                row |= validate(runtime, run, progress, give_up)
            if last or step == 1 or "val/loss" in row or due(step, config.run.log_every):
                run.log(step, {**row, "memory_bytes": agreed(peak_memory(mesh.device), mesh)})
            if broken:
                status, reason = "aborted", broken
                break
            if stop:
                tell_stop(run, progress, step, signal_name(stop))
            if stop or last or due(step, config.run.save_every):
                saver.save(row, last=bool(stop) or last)
            if stop and not last:
                status, reason = "preempted", signal_name(stop)
                break

        progress.close()
        if unsaved := saver.close():  # only what aborts leaves a save to wait for
            reason = f"{reason}; {unsaved}"
        if status == "done":
            write_sample(runtime, run)
        code = 4 if status == "aborted" else 0
        run.finish(status, reason, code)
        progress.say(f"{status} at step {runtime.step}" + (f": {reason}" if reason else ""))
    return code


def validate(
    runtime: Runtime, run: Run, progress: Progress, give_up: Callable[[], int] | None
) -> dict[str, float]:
    """Score the held-out text and tell it; empty when all ranks gave up for a signal."""
    from curry_train.evaluate import evaluate

    scores = evaluate(runtime, give_up)
    if scores:
        run.event("eval", step=runtime.step, tokens=runtime.tokens, **scores)
        progress.say(f"step {runtime.step}  val/loss {scores['val/loss']:.4f}")
    return scores


def tell_stop(run: Run, progress: Progress, step: int, name: str) -> None:
    """Tell the person and the journal that a signal ends the run after this step."""
    progress.say(f"{name}: stopping after step {step}")
    run.event("signal", step=step, name=name)
    run.event("stop_requested", step=step, by=name)


def due(step: int, every: int) -> bool:
    """Tell whether something that happens every `every` steps happens now; 0 means never."""
    return every > 0 and step % every == 0


def main(argv: list[str]) -> int:
    config = load_or_exit(argv)
    prepare_environment(config)
    try:
        if config.dry_run:
            from curry_train.plan import print_plan

            return print_plan(config)
        return train(config, argv)
    except (ConfigError, DataError) as error:
        return refuse(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

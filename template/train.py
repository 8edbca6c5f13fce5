"""Train a model; every setting is `key=value` (see --help).

    python train.py                                     one process
    fabric run train.py optim.lr=1e-3                   Lightning's launcher
    fabric run --devices=2 train.py                     two ranks
    torchrun --standalone --nproc_per_node=2 train.py   two ranks, torch's launcher
"""

from __future__ import annotations

import sys
from pathlib import Path

from curry_train.command_line import load_or_exit, refuse
from curry_train.config import Config, ConfigError
from curry_train.data import DataError
from curry_train.launch import launch, prepare_environment, signal_name


def train(config: Config, argv: list[str]) -> int:
    """Run the training loop; returns the exit code of this rank."""
    # torch is first imported here, after prepare_environment has set what it reads.
    from curry_train.checkpoint.training_state import load_weights, restore, save
    from curry_train.data import open_corpus
    from curry_train.evaluate import evaluate
    from curry_train.generate import sample_text
    from curry_train.parallel.mesh import agreed
    from curry_train.profiling import peak_memory
    from curry_train.runtime import assemble
    from curry_train.step import train_step
    from curry_train.tracking.abort import AbortRules
    from curry_train.tracking.progress import Progress

    corpus = open_corpus(config.data, cache_dir=Path(config.data.cache_dir))
    with launch(config, corpus, argv) as (mesh, run, signals):
        runtime = assemble(config, corpus, mesh)
        if run.checkpoint is not None:
            restore(runtime, run.checkpoint)
        elif config.run.init_from is not None:
            load_weights(runtime.model, config.run.init_from, mesh=mesh)
        abort, last_step = AbortRules(config.run), config.run.max_steps
        progress = Progress(first_step=runtime.step, max_steps=last_step, enabled=mesh.rank == 0)
        progress.say(f"run folder: {run.dir}")
        status, reason = "done", None

        while runtime.step < last_step:
            out = train_step(runtime)
            step, last = runtime.step, runtime.step == last_step
            speed = out.tokens / out.step_time
            row = {**out.row(), "tokens": runtime.tokens, "tokens_per_s": speed}
            progress.update(step, loss=out.loss, tokens_per_s=speed)

            broken = abort.check(step, out.loss, out.grad_norm)
            stop = agreed(signals.code, mesh)
            if not out.finite:
                run.event("anomaly", step=step, what="update skipped", **out.row())
            if last or due(step, config.run.eval_every):
                scores = evaluate(runtime)
                row |= scores
                run.event("eval", step=step, tokens=runtime.tokens, **scores)
                progress.say(f"step {step}  val/loss {scores['val/loss']:.4f}")
            if last or step == 1 or "val/loss" in row or due(step, config.run.log_every):
                run.log(step, {**row, "memory_bytes": peak_memory(mesh.device)})
            if broken:
                status, reason = "aborted", broken
                break
            if stop:
                progress.say(f"{signal_name(stop)}: stopping after step {step}")
                run.event("signal", step=step, name=signal_name(stop))
                run.event("stop_requested", step=step, by=signal_name(stop))
            if stop or last or due(step, config.run.save_every):
                save(runtime, run)
            if stop and not last:
                status, reason = "preempted", signal_name(stop)
                break

        progress.close()
        if status == "done" and config.run.sample_tokens and mesh.rank == 0:
            text = sample_text(
                runtime.model,
                corpus.tokenizer,
                config.run.sample_prompt,
                max_tokens=config.run.sample_tokens,
                context=config.data.seq_len,
                seed=config.seed,
            )
            run.sample(runtime.step, text)
            print(f"sample: {text}")
        code = 4 if status == "aborted" else 0
        run.finish(status, reason, code)
        progress.say(f"{status} at step {runtime.step}" + (f": {reason}" if reason else ""))
    return code


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

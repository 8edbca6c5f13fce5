"""What every model must keep, whatever it computes; the tests of a new model call these.

`words` are those of a command line that choose a small one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from curry_train.checkpoint import dcp
from curry_train.checkpoint.training_state import checkpoint_of, restore
from curry_train.compose import load_config
from curry_train.config import ConfigError
from curry_train.data import open_corpus
from curry_train.equality import prove
from curry_train.models.protocol import build_model
from curry_train.optim import materialise_state
from curry_train.parallel.mesh import Mesh
from curry_train.runtime import Runtime, assemble
from curry_train.step import train_step

CPU = ("accelerator=cpu",)
SEEN, UNSEEN = 1e-9, 1e-12
"""Changes of an output in float64: of one that depends on what was changed, and rounding, since the
rows that experts work on together are others."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def start(*words: str) -> Runtime:
    """Return a Runtime of one process, in training mode."""
    config = load_config([*words, *CPU])
    return assemble(config, open_corpus(config.data, cache_dir=None), Mesh.single())


def build(*words: str) -> nn.Module:
    """Return a model with its first values."""
    return build_model(load_config([*words, *CPU]), "cpu")


def losses(*words: str, steps: int = 3) -> list[float]:
    """Return the losses of the first steps of training, bit for bit."""
    runtime = start(*words)
    return [train_step(runtime).loss for _ in range(steps)]


def gradient_reaches(runtime: Runtime, modules: Iterable[nn.Module]) -> None:
    """After one backward every parameter of the modules has a finite gradient, not zero."""
    batch = next(iter(runtime.batches))
    runtime.loss_fn(runtime.model, batch).backward()
    names = {id(p): full for full, p in runtime.model.named_parameters()}
    for parameter in (p for module in modules for p in module.parameters()):
        grad, full = parameter.grad, names[id(parameter)]
        assert grad is not None, f"{full} gets no gradient"
        assert grad.isfinite().all(), f"the gradient of {full} is not finite"
        assert grad.count_nonzero(), f"the gradient of {full} is zero"


def goes_on_from_a_checkpoint(folder: Path, *words: str) -> None:
    """Steps are finite, and a checkpoint of the third goes on bit for bit."""
    runtime, again = start(*words), start(*words)
    assert all(train_step(runtime).finite for _ in range(3))
    materialise_state(runtime.optimizer)
    restore(again, dcp.save(folder, mesh=runtime.mesh, **checkpoint_of(runtime, {})))
    assert train_step(again).loss == train_step(runtime).loss


def samples_do_not_meet(*words: str) -> None:
    """What the model makes of one sample does not change with another of its batch."""
    runtime = start(*words, "precision=fp64")
    batch = next(iter(runtime.batches))
    name = "inputs" if "inputs" in batch else "input_ids"
    value = batch[name]
    assert len(value) > 1, "a batch of one sample; set data.global_batch_size to 2 or more"
    other = value.clone()
    other[0] = other[0] + 1 if value.dtype in FLOATS else other[0].roll(1)
    plain, moved = (_output(runtime.model, each) for each in (value, other))
    assert (moved[0] - plain[0]).abs().max() > SEEN, "the model does not look at its input"
    assert (moved[1:] - plain[1:]).abs().max() < UNSEEN, "a sample sees another"


def sees_no_later_place(*words: str) -> None:
    """Outputs [B, S, ...] do not change with what stands later in the sequence."""
    runtime = start(*words, "precision=fp64")
    batch = next(iter(runtime.batches))
    value = batch["inputs"] if "inputs" in batch else batch["input_ids"]
    for place in (value.shape[1] // 2, value.shape[1] - 1):
        later = value.clone()
        later[:, place:] = later[:, place:] + 1 if value.dtype in FLOATS else 0
        plain, moved = (_output(runtime.model, each) for each in (value, later))
        assert (moved[:, place] - plain[:, place]).abs().max() > SEEN
        assert (moved[:, :place] - plain[:, :place]).abs().max() < UNSEEN, "the future is seen"


def _output(model: nn.Module, value: Tensor) -> Tensor:
    out = model(value)
    out = out if isinstance(out, Tensor) else out.logits[..., : model.vocab_size]
    return out.detach()


def ranks_train_as_one_process(*words: str) -> None:
    """Two ranks that share samples and parameters train as one process does, in float64."""
    proof = prove([*words, *CPU, "parallel.zero=3"], 2)
    assert proof.equal, str(proof)


def other_layouts_are_refused(*words: str) -> None:
    """What is not proved ends with a sentence, not with numbers."""
    for axis in ("tp", "cp", "pp", "ep"):
        with expects_refusal(f"parallel.{axis}=2"):
            load_config([*words, *CPU, f"parallel.{axis}=2", "devices=2"])


@contextlib.contextmanager
def expects_refusal(text: str) -> Iterator[None]:
    """Fail unless the configuration is refused with a sentence that has `text`."""
    try:
        yield
    except ConfigError as error:
        assert any(text in problem for problem in error.problems), error
        return
    raise AssertionError(f"not refused: {text}")

"""model=skeleton_name: what every model keeps, and that it learns."""

from __future__ import annotations

import model_checks as checks
import pytest
import torch

from curry_train.step import train_step

SMALL = (
    "experiment=skeleton_name",
    "data.seq_len=16",
    "data.global_batch_size=4",
)


def test_no_place_sees_a_later_one():
    checks.sees_no_later_place(*SMALL)


def test_samples_do_not_meet():
    checks.samples_do_not_meet(*SMALL)


def test_gradient_reaches_every_parameter():
    runtime = checks.start(*SMALL, "precision=fp64")
    checks.gradient_reaches(runtime, [runtime.model])


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    checks.goes_on_from_a_checkpoint(tmp_path, *SMALL)


@pytest.mark.dist
def test_two_ranks_train_as_one_process():
    checks.ranks_train_as_one_process(*SMALL)


def test_other_layouts_are_refused():
    checks.other_layouts_are_refused(*SMALL)


def test_a_missing_value_counts_nowhere():
    model = checks.build(*SMALL, "precision=fp64")
    batch = {"inputs": torch.randn(2, 16, 1), "labels": torch.randn(2, 16)}
    errors = (model(batch["inputs"]) - batch["labels"]).square()
    batch["labels"][0, 3] = torch.nan
    sums = model.loss_sums(batch)
    assert sums.count == 31
    torch.testing.assert_close(sums.nll, (errors.sum() - errors[0, 3]).to(sums.nll.dtype))


def test_it_starts_at_predicting_zero_and_learns():
    runtime = checks.start("experiment=skeleton_name", "optim.warmup_steps=0")
    losses = [train_step(runtime).loss for _ in range(60)]
    # The mean square of a sine is 1/2.
    assert losses[0] == pytest.approx(0.5, abs=0.1)
    assert sum(losses[-10:]) / 10 < losses[0] / 4

"""The command that proves a layout, as a user gives it."""

import pytest

from curry_train import equality
from curry_train.config import Config, ParallelConfig

SMALL = (
    "model.hidden_size=16", "model.num_hidden_layers=2", "model.head_dim=4",
    "model.moe_intermediate_size=8", "data.seq_len=16", "data.val_fraction=0.001",
)  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "world"),
    [
        ({}, 1),
        ({"tp": 2}, 2),
        ({"ep": 4}, 4),
        ({"ep": 4, "tp": 2}, 4),
        ({"pp": 2, "dp_shard": 3}, 6),
        ({"cp": 2, "tp": 2, "ep": 4, "dp_replicate": 2}, 8),
    ],
)
def test_the_ranks_are_the_fewest_that_hold_the_axes(axes, world):
    assert equality.ranks_named(Config(parallel=ParallelConfig(**axes))) == world
    assert equality.ranks_named(Config(parallel=ParallelConfig(**axes), devices=16)) == 16


@pytest.mark.dist
def test_a_command_says_equal(capsys):
    assert equality.main([*SMALL, "parallel.tp=2", "accelerator=cpu", "precision=bf16"]) == 0
    text = capsys.readouterr().out
    assert "equal to one process on 2 ranks" in text and "parallel.tp=2" in text
    assert all(kind in text for kind in ("gradient", "norm", "update", "loss", "layer", "rank"))
    assert "NOT" not in text


@pytest.mark.dist
def test_a_command_says_what_is_not_equal(capsys, monkeypatch):
    monkeypatch.setattr(equality, "_gap", _off(equality._gap))
    assert equality.main([*SMALL, "parallel.dp_shard=2", "devices=2"]) == 1
    assert "NOT equal to one process on 2 ranks" in capsys.readouterr().out


def _off(real):
    def gap(kind, name, part, whole, *rest):
        yield from real(kind, name, part._replace(tensor=part.tensor + 1), whole, *rest)

    return gap


def test_a_command_refuses_what_train_refuses(capsys):
    with pytest.raises(SystemExit) as ended:
        equality.main([*SMALL, "parallel.tp=2", "devices=2", "data.seq_len=15"])
    assert ended.value.code == 2
    assert "parallel.tp=2" in capsys.readouterr().err


def test_one_rank_is_nothing_to_compare(capsys):
    assert equality.main([*SMALL, "parallel.zero=3"]) == 2
    assert "such as parallel.tp=2, or devices=2" in capsys.readouterr().err


def test_help_is_of_this_command(capsys):
    assert equality.main(["--help"]) == 0
    assert "python -m curry_train.equality KEY=VALUE" in capsys.readouterr().out


@pytest.mark.dist
def test_a_rank_that_fails_is_told(capsys, monkeypatch):
    def broken(*_):
        raise ValueError("planted")

    monkeypatch.setattr(equality, "compare", broken)
    assert equality.main([*SMALL, "parallel.dp_shard=2"]) == 1
    assert "ValueError('planted')" in capsys.readouterr().err

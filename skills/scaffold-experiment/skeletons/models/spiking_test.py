"""model=skeleton_name: what every model keeps, and that it starts as the spiking transformer."""

from __future__ import annotations

import model_checks as checks
import pytest
import torch

from curry_train.models.spiking import SpikingConfig, SpikingTransformer

SMALL = (
    "experiment=skeleton_name",
    "model.num_hidden_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.num_attention_heads=4",
    "data.seq_len=32",
    "data.global_batch_size=4",
)


def test_no_token_sees_a_later_one():
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


def test_it_is_the_spiking_transformer():
    """Until you change the mathematics: then put an independent formula of it here."""
    model = checks.build(*SMALL, "precision=fp64")
    settings = {name: getattr(model.config, name) for name in SpikingConfig.__dataclass_fields__}
    standard = SpikingTransformer(SpikingConfig(**settings), compute_dtype=torch.float64).double()
    standard.load_state_dict(model.state_dict())
    ids = torch.randint(0, 256, (2, 24))
    torch.testing.assert_close(model(ids).logits, standard(ids).logits)


def test_only_spikes_meet_the_matrices_of_a_block():
    model, met = checks.build(*SMALL), []
    for block in model.layers.values():
        for matrix in (block.self_attn.q_proj, block.mlp.up_proj, block.mlp.down_proj):
            matrix.register_forward_pre_hook(lambda module, args: met.append(args[0]))
    model(torch.randint(0, 256, (2, 24)))
    assert len(met) == 6
    assert {value for spikes in met for value in spikes.unique().tolist()} <= {0.0, 1.0}

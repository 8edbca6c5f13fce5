"""The net under the other tests is there."""

import os

import torch


def test_fresh_memory_is_nan_and_never_accidentally_right():
    for fresh in (torch.empty(3), torch.empty_like(torch.zeros(2, 2)), torch.zeros(2).new_empty(2)):
        assert fresh.isnan().all()
    assert torch.empty(3, dtype=torch.int64).shape == (3,)


def test_every_test_starts_from_the_same_random_numbers():
    first = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(1))


def test_openmp_has_one_thread_unless_the_user_says_otherwise():
    assert os.environ["OMP_NUM_THREADS"] != ""

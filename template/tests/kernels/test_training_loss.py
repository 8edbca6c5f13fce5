"""The loss that a GPU computes by a kernel is the one that a CPU computes by torch."""

import pytest
import torch

from curry_train.kernels.routing_ops import cross_entropy_rows, kernels_run
from curry_train.loss import IGNORED, token_nll


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_loss_and_gradient_of_torch(dtype):
    torch.manual_seed(0)
    logits = (4 * torch.randn(9, 320)).to(dtype)
    logits[:, 257:] = -torch.inf  # the padded vocabulary
    labels = torch.randint(0, 257, (9,))
    labels[[2, 5]] = IGNORED
    by_torch, by_kernel = (logits.clone().requires_grad_() for _ in range(2))
    assert kernels_run(by_kernel)
    wanted, found = token_nll(by_torch, labels), cross_entropy_rows(by_kernel, labels)[0]
    assert (found - wanted).abs().max() < 2e-6 and (found[[2, 5]] == 0).all()
    upstream = torch.rand(9)
    (wanted @ upstream).backward()
    (found @ upstream).backward()
    worst = (by_kernel.grad.float() - by_torch.grad.float()).abs().max()
    assert worst < (1e-6 if dtype == torch.float32 else 4e-3)
    assert (by_kernel.grad[:, 257:] == 0).all()

"""Our expert bank inside the models of transformers.

    from curry_train.kernels import transformers_experts

    transformers_experts.register()
    model.set_experts_implementation("curry")

Weights stay where and as transformers keeps them; only what multiplies them changes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curry_train.kernels.backends import activate
from curry_train.kernels.experts import experts

NAME = "curry"


def register() -> str:
    """Add the bank to transformers' ExpertsInterface; return the name to set, "curry".

    Shapes: none. Raises: ImportError when transformers is missing or older than its interface.
    """
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise ImportError(
            "transformers: found none with transformers.integrations.moe.ExpertsInterface; allowed "
            "is 5.24 or later; pip install 'transformers>=5.24'"
        ) from error
    ExpertsInterface.register(NAME, curry_experts_forward)
    return NAME


def curry_experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute an experts module of transformers with `experts`.

    Shapes: hidden_states [T, D]; top_k_index [T, K], ids of E and more belong to another rank and
    are left out; top_k_weights [T, K]; returns [T, D] in the dtype of hidden_states.
    Raises: ValueError for a module without gate, with a norm after the experts, or with an
    activation that is neither silu(gate) * up nor gpt-oss's clamped one.
    """
    limit = _limit(module)
    w13, w2 = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    x = hidden_states.to(w13.dtype)
    ids = top_k_index.masked_fill(top_k_index >= w13.shape[0], -1)
    weights = top_k_weights
    if weights.dtype not in (x.dtype, torch.float32):
        weights = weights.to(x.dtype)
    out = experts(
        x,
        ids,
        weights,
        w13,
        w2,
        bias13=module.gate_up_proj_bias if module.has_bias else None,
        limit=limit,
        interleaved=not module.is_concatenated,
    )
    if module.has_bias:
        share_TE = weights.new_zeros(x.shape[0], w13.shape[0])
        share_TE = share_TE.scatter_add(1, ids.clamp(min=0), weights.masked_fill(ids < 0, 0))
        out = out + share_TE.to(x.dtype) @ module.down_proj_bias
    return out.to(hidden_states.dtype)


# What a module's activation computes does not change: the compiler may ask once.
@torch.compiler.assume_constant_result
def _limit(module: nn.Module) -> float | None:
    """Return the limit of the module's activation, None for silu(gate) * up.

    The activation is known by what it computes on a few numbers [4, 16], not by its name: models
    write the same one in many ways, and two that differ under one name.
    """
    found = getattr(module, "_curry_limit", ())
    if found != ():
        return found
    if not module.has_gate or module.has_post_expert_norm:
        what = "no gate" if not module.has_gate else "a norm after the experts"
        raise ValueError(
            f"experts implementation {NAME!r}: found {what} in {type(module).__name__}; allowed "
            "are experts with gate and up; set experts_implementation to grouped_mm"
        )
    candidates = (None, getattr(module, "limit", None))
    reach = 2.0 * max(4.0, candidates[1] or 0.0)
    with torch.no_grad(), torch.device("cpu"):
        sample = torch.linspace(-reach, reach, 64).view(16, 4).t().contiguous()
        wanted = module._apply_gate(sample)
        for limit in candidates:
            if torch.allclose(activate(sample, limit, not module.is_concatenated), wanted):
                module._curry_limit = limit
                return limit
    raise ValueError(
        f"experts implementation {NAME!r}: found another activation in {type(module).__name__}; "
        "allowed are silu(gate) * up and gpt-oss's clamped one; set experts_implementation to "
        "grouped_mm"
    )

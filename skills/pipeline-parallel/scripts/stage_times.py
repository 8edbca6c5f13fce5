"""How long the passes of each stage take: by FLOP, or measured on this machine's own blocks."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from schedule_clock import Times

SELECTIVE = 0.1
"""Share of a forward pass that is no product: what `recompute=selective` makes again."""
REPEATS = 3


def by_flop(layout: Any) -> dict[str | int, Times]:
    """Return the FLOP of every part of the model for a micro-batch on one rank.

    A product costs the same forward, for its input and for its weights; attention's scores have no
    weights, and twice as much work backward. Looking up embeddings counts nothing.
    """
    from curry_train.sizes import score_flops

    model, length = layout.model, layout.config.data.seq_len
    tokens = layout.tokens / layout.dims.tp
    found: dict[str | int, Times] = {"embedding": Times(0.0, 0.0, 0.0)}
    head = 2.0 * model.vocab_size * model.hidden_size * tokens
    found["head"] = Times(head, head, head)
    for layer, cost in enumerate(layout.costs):
        scores = score_flops(model, layer, length)
        products = (cost - scores) / 3
        forward, backward = products + scores / 3, products + 2 * scores / 3
        found[layer] = Times(*(x * tokens for x in (forward, backward, products)))
    return found


def measured(layout: Any, device: str, progress: Callable[[str], None]) -> dict[str | int, Times]:
    """Return the seconds of every part, of real blocks with random weights, one of each kind.

    Under tp they are those of the whole block over tp; under ep all experts are on this device.
    """
    from curry_train.sizes import is_dense

    kinds: dict[Any, Any] = {}
    found: dict[str | int, Times] = {}
    for layer in range(layout.model.num_hidden_layers):
        kind = is_dense(layout.model, layer), layout.model.window_of(layer)
        if kind not in kinds:
            progress(f"block {layer}")
            kinds[kind] = _block(layout, layer, device)
        found[layer] = kinds[kind]
    progress("embedding and head")
    found |= _ends(layout, device)
    return {part: Times(*(x / layout.dims.tp for x in times)) for part, times in found.items()}


def _chunk(layout: Any, layer: int, device: str) -> tuple[Any, Any]:
    """Return a model of one block with both ends, and token ids of a micro-batch."""
    from curry_train.models.protocol import give_memory, meta_model

    torch = sys.modules["torch"]
    chunk: Any = meta_model(layout.config)
    chunk.keep_stage([layer], first=True, last=True)
    give_memory(chunk, device)
    for name, parameter in chunk.named_parameters():
        constant = chunk.init_constant(name)
        if constant is None:
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            torch.nn.init.constant_(parameter, constant)
    shape = (layout.samples, layout.tokens // layout.samples)
    return chunk, torch.randint(0, layout.model.vocab_size, shape, device=device)


def _block(layout: Any, layer: int, device: str) -> Times:
    torch = sys.modules["torch"]
    chunk, ids = _chunk(layout, layer, device)
    with torch.no_grad():
        x = chunk.embed(ids)
    x.requires_grad_()
    positions = chunk.positions(x, None, None)
    weights = [p for p in chunk.layers.parameters() if p.requires_grad]
    return _passes(lambda: chunk.run_blocks(x, positions)[0], [x], weights)


def _ends(layout: Any, device: str) -> dict[str | int, Times]:
    torch = sys.modules["torch"]
    chunk, ids = _chunk(layout, layout.model.num_hidden_layers - 1, device)
    table = [chunk.model.embed_tokens.weight]
    embedding = _passes(lambda: chunk.embed(ids), [], table)
    with torch.no_grad():
        x = chunk.embed(ids)
    x.requires_grad_()
    weights = [*chunk.model.norm.parameters(), chunk.lm_head.weight]

    def loss() -> Any:
        logits = chunk.logits(x).float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, ids.flatten())

    return {"embedding": embedding, "head": _passes(loss, [x], weights)}


def _passes(forward: Callable[[], Any], inputs: list[Any], weights: list[Any]) -> Times:
    """Time forward, backward for the inputs alone, and for all; the rest is that of the weights."""
    torch = sys.modules["torch"]
    rows = []
    for _ in range(REPEATS + 1):
        start = _now(weights[0].device)
        out = forward()
        middle = _now(weights[0].device)
        ones, spent = torch.ones_like(out), []
        for wanted in (inputs, inputs + weights):
            began = _now(out.device)
            if wanted:
                torch.autograd.grad(out, wanted, ones, retain_graph=True, allow_unused=True)
            spent.append(_now(out.device) - began)
        rows.append((middle - start, spent[0], max(spent[1] - spent[0], 0.0)))
    return Times(*(statistics.median(column) for column in zip(*rows[1:], strict=True)))


def _now(device: Any) -> float:
    torch = sys.modules["torch"]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def of_stages(layout: Any, parts: dict[str | int, Times]) -> dict[int, Times]:
    """Add the parts of every stage up, with what is made again in backward."""
    found = {}
    for stage in range(len(layout.split)):
        rows = []
        for part in layout.parts_of(stage):
            forward, backward, weights = parts[part]
            again = layout.again(part) if isinstance(part, int) else "none"
            backward += {"none": 0.0, "selective": SELECTIVE, "full": 1.0}[again] * forward
            rows.append((forward, backward, weights))
        total = Times(*map(sum, zip(*rows, strict=True)))
        if layout.parallel.overlap:
            # The project's own executor computes weight gradients with those of the input.
            total = Times(total.forward, total.backward + total.weights, 0.0)
        found[stage] = total
    return found

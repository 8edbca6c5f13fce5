"""The same failures in other code: written after the checks, to see whether they know the bug
or only the way it was first written."""

from __future__ import annotations

from planted.row import FLOW, INIT, ONE_BATCH, PREFLIGHT, Row

UNREACHED = ("parameters-still", "unused-parameters", "no-gradient")


def variant(name, on, *edits, fails, says, may=(), stage=PREFLIGHT) -> Row:
    """Make a row of one's own."""
    return Row(name, on, edits, fails, says, may=may, stage=stage)


VARIANTS = [
    variant(
        "fused-attention-not-causal",
        "tokens.py:fused",
        (", is_causal=True", ""),
        fails=("future-leakage",),
        says="scaled_dot_product_attention without is_causal sees all tokens.",
    ),
    variant(
        "ids-not-shifted-in-the-loss",
        "tokens.py:fused",
        ("ids[:, 1:].reshape(-1)", "ids[:, :-1].reshape(-1)"),
        fails=("label-shift",),
        says="Inputs and labels are cut at the same end.",
    ),
    variant(
        "running-mean-of-all-positions",
        "tokens.py:fused",
        ("self.norm(x + ", "self.norm(x.mean(1, keepdim=True) + x + "),
        fails=("future-leakage",),
        says="A summary of the sentence is added at every position, its end included.",
    ),
    variant(
        "cleared-nowhere",
        "loops.py:linear_to_zero",
        ("    optimizer.zero_grad()\n", ""),
        fails=("missing-zero-grad",),
        says="The line that clears gradients after the step is gone.",
    ),
    variant(
        "half-of-the-model-given",
        "partial.py:shared_layers",
        (
            "    model = Shared()\n"
            "    return model, rows(), loss_fn, torch.optim.AdamW(model.parameters(), 1e-3)",
            "    model = Shared()\n"
            "    return model, rows(), loss_fn, torch.optim.AdamW(model.layer.parameters(), 1e-3)",
        ),
        fails=("optimizer-parameters",),
        may=("parameters-still",),
        says="The optimizer is given one part of the model; first and last layer stay random.",
    ),
    variant(
        "adapters-forgotten",
        "partial.py:low_rank",
        (
            "trained = [p for p in model.parameters() if p.requires_grad]",
            "trained = [p for p in model.parameters() if not p.requires_grad]",
        ),
        fails=("optimizer-parameters",),
        may=("parameters-still",),
        says="The filter is turned round: the optimizer holds the frozen matrices.",
    ),
    variant(
        "head-frozen-as-well",
        "partial.py:frozen_backbone",
        (
            "        self.head = nn.Linear(WIDTH, CLASSES)\n\n    def train(",
            "        self.head = nn.Linear(WIDTH, CLASSES)\n"
            "        self.requires_grad_(False)\n\n    def train(",
        ),
        fails=("no-gradient",),
        may=UNREACHED,
        says="The head is frozen together with its body.",
    ),
    variant(
        "sigmoid-before-logits-loss",
        "tabular.py:binary",
        ("loss_fn = nn.BCELoss()", "loss_fn = nn.BCEWithLogitsLoss()"),
        fails=("double-softmax",),
        says="The model ends in a sigmoid and the loss was exchanged for the one with logits.",
    ),
    variant(
        "softmax-before-focal-loss",
        "loops.py:focal",
        ("model(batch[0]).log_softmax(-1)", "model(batch[0]).softmax(-1).log_softmax(-1)"),
        fails=("double-softmax",),
        says="A loss of one's own takes log_softmax of probabilities.",
    ),
    variant(
        "row-against-column",
        "tabular.py:regression",
        ("pairs(x, y[:, 0])", "pairs(x, y)"),
        fails=("batch-mismatch",),
        may=("example-leakage",),
        says="Labels [N, 1] against predictions [N]: broadcast to [N, N].",
    ),
    variant(
        "double-inputs-for-single-weights",
        "mlp.py:build",
        (
            "x = torch.randn(96, FEATURES, generator=generator)\n    y = (x",
            "x = torch.randn(96, FEATURES, generator=generator).double()\n    y = (x.float()",
        ),
        fails=("batch-mismatch",),
        says="Inputs come as float64 from NumPy, and the weights are float32.",
    ),
    variant(
        "evaluation-collects-gradients",
        "mlp.py:build",
        (
            "    with torch.no_grad():\n"
            "        losses = [loss_fn(model, batch).item() for batch in batches]\n",
            "    losses = []\n"
            "    for batch in batches:\n"
            "        loss = loss_fn(model, batch)\n"
            "        loss.backward()\n"
            "        losses.append(loss.item())\n",
        ),
        fails=("evaluation-gradients",),
        says="Validation calls backward; its gradients are part of the next step.",
    ),
    variant(
        "teacher-in-a-list",
        "partial.py:averaged_teacher",
        (
            "self.teacher = copy.deepcopy(self.student).requires_grad_(False)",
            "self.hidden = [copy.deepcopy(self.student).requires_grad_(False)]",
        ),
        ("self.teacher.parameters(), self", "self.hidden[0].parameters(), self"),
        ("self.teacher(x)", "self.hidden[0](x)"),
        fails=("checkpoint-round-trip",),
        says="The averaged teacher is hidden in a list and is in no checkpoint.",
    ),
    variant(
        "examples-in-one-row",
        "vision.py:build",
        (
            "return self.head(x.mean((2, 3)))",
            "return self.head(x.reshape(16, len(x), -1).mean(-1).T)",
        ),
        fails=("example-leakage",),
        may=("batch-size-dependence", "accumulation-mean-of-means"),
        says="reshape exchanges examples and channels, and every shape fits.",
    ),
    variant(
        "order-by-system-entropy",
        "vision.py:build",
        (
            "generator = torch.Generator().manual_seed(7)\n    loader",
            "import secrets\n\n"
            "    generator = torch.Generator().manual_seed(secrets.randbelow(10**9))\n    loader",
        ),
        fails=("order-not-repeatable",),
        may=("not-repeatable",),
        says="The loader's generator is seeded by the system's entropy.",
    ),
    variant(
        "inputs-overwritten",
        "mlp.py:build",
        ("    x, y = batch\n", "    x, y = batch\n    x = torch.zeros_like(x)\n"),
        fails=("input-independent",),
        may=("one-batch-floor",),
        stage=ONE_BATCH,
        says="A line from debugging overwrites the inputs with zeros.",
    ),
    variant(
        "last-block-left-out",
        "deep.py:residual",
        ("for block in self.blocks:", "for block in self.blocks[:-1]:"),
        fails=("unused-parameters",),
        may=UNREACHED,
        says="The loop stops one block early.",
    ),
    variant(
        "class-missing-from-the-head",
        "tokens.py:tagger",
        ("self.head = nn.Linear(2 * WIDTH, TAGS)", "self.head = nn.Linear(2 * WIDTH, TAGS - 1)"),
        fails=("labels-out-of-range",),
        says="The head has one output fewer than there are tags.",
    ),
    variant(
        "sum-over-tokens",
        "tokens.py:fused",
        ("ids[:, 1:].reshape(-1))", 'ids[:, 1:].reshape(-1), reduction="sum")'),
        fails=("initial-loss",),
        may=("loss-scale",),
        stage=INIT,
        says="The loss is a sum over tokens; at the start it is hundreds of times ln C.",
    ),
    variant(
        "steps-lost-in-rounding",
        "forms.py:bfloat16",
        ("torch.optim.SGD(model.parameters(), 0.1)", "torch.optim.AdamW(model.parameters(), 1e-5)"),
        fails=("update-ratio",),
        stage=FLOW,
        says="Steps of 1e-5 on weights in bfloat16 are rounded away.",
    ),
    variant(
        "warm-up-from-the-wrong-unit",
        "loops.py:linear_to_zero",
        (
            "return step / 20 if step < 20 else max(0.0, (200 - step) / 180)",
            "return step / 20000 if step < 20000 else 1.0",
        ),
        fails=("schedule-values",),
        says="Warm-up is given in samples and counted in steps: it never ends.",
    ),
    variant(
        "rate-zero-for-the-second-half",
        "loops.py:linear_to_zero",
        ("max(0.0, (200 - step) / 180)", "max(0.0, (100 - step) / 80)"),
        fails=("schedule-values",),
        says="The schedule was made for half as many steps as are run.",
    ),
]

"""Bugs written from descriptions of failures, before there was a check to find them."""

from __future__ import annotations

from planted.row import FLOW, INIT, ONE_BATCH, PREFLIGHT, Row

STILL = ("parameters-still",)
UNREACHED = ("parameters-still", "unused-parameters", "no-gradient")


def told(name, on, *edits, fails, says, may=(), stage=PREFLIGHT, before=True) -> Row:
    """Make a row whose bug was told in words; `before` means before its check existed."""
    return Row(name, on, edits, fails, says, may=may, stage=stage, before_check=before)


LOOP = [
    told(
        "zero-grad-forgotten",
        "mlp.py:build",
        ("    optimizer.zero_grad()\n", ""),
        fails=("missing-zero-grad",),
        says="Nobody clears the gradients: they add up over the whole run.",
    ),
    told(
        "zero-grad-before-step",
        "mlp.py:build",
        ("    loss.backward()\n", "    loss.backward()\n    optimizer.zero_grad()\n"),
        fails=STILL,
        says="The gradients are cleared between backward and step; the loss never moves.",
    ),
    told(
        "model-made-again",
        "mlp.py:build",
        ("    scheduler = ", "    model = Classifier()\n    scheduler = "),
        fails=("optimizer-parameters",),
        may=STILL,
        says="The optimizer still trains the model from before; the loss is flat for 300 steps.",
    ),
    told(
        "learning-rate-zero",
        "tabular.py:several_outputs",
        (
            "torch.optim.RMSprop(model.parameters(), 1e-3)",
            "torch.optim.RMSprop(model.parameters(), 0.0)",
        ),
        fails=STILL,
        may=("schedule-values",),
        says="The learning rate came out as 0.",
    ),
    told(
        "warm-up-beyond-the-end",
        "mlp.py:build",
        ("STEPS, WARMUP = 12, 5, 100, 10", "STEPS, WARMUP = 12, 5, 100, 1000"),
        fails=("schedule-values",),
        says="The run ends while the learning rate is still warming up.",
    ),
    told(
        "decayed-once-a-step",
        "vision.py:build",
        ("step_size=30", "step_size=3"),
        fails=("schedule-values",),
        says="A decay meant for epochs is applied to steps: soon nothing is learnt.",
    ),
    told(
        "evaluation-leaves-eval",
        "mlp.py:build",
        ("    model.train()\n", ""),
        fails=("train-eval-mode",),
        may=("evaluation-gradients",),
        says="After the first validation the model trains on in eval mode.",
    ),
    told(
        "evaluation-in-train-mode",
        "vision.py:build",
        ("    model.eval()\n", ""),
        fails=("train-eval-mode",),
        may=("evaluation-gradients",),
        says="Validation runs in train mode: BatchNorm learns from the validation set.",
    ),
    told(
        "evaluation-trains",
        "mlp.py:build",
        (
            "    with torch.no_grad():\n"
            "        losses = [loss_fn(model, batch).item() for batch in batches]\n",
            "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
            "    losses = [train_step(model, batch, optimizer) for batch in batches]\n",
        ),
        fails=("evaluation-gradients",),
        says="The validation loop is a copy of the training loop, step included.",
    ),
    told(
        "halves-not-divided",
        "lm.py:build",
        ("loss_fn(model, half) * count(half) / count(batch)", "loss_fn(model, half)"),
        fails=("loss-scale",),
        may=("accumulation-mean-of-means", "accumulation-not-divided"),
        says="Micro-batches are added without dividing, so more of them is a larger step.",
    ),
    told(
        "decay-groups-swapped",
        "lm.py:build",
        ("if p.dim() > 1]", "if p.dim() < 2]"),
        (
            "for p in model.parameters() if p.dim() < 2]\n    groups",
            "for p in model.parameters() if p.dim() > 1]\n    groups",
        ),
        fails=("weight-decay-groups",),
        says="Norms and biases are decayed, and the matrices are not.",
    ),
]

GRAPH = [
    told(
        "features-detached",
        "mlp.py:build",
        ("return self.head(x)", "return self.head(x.detach())"),
        fails=("no-gradient",),
        may=UNREACHED,
        says="A detach() from debugging was left in: only the head learns.",
    ),
    told(
        "numpy-in-between",
        "mlp.py:build",
        (
            "x = torch.relu(self.first(x))",
            "x = torch.from_numpy(torch.relu(self.first(x)).detach().numpy())",
        ),
        fails=("no-gradient",),
        may=UNREACHED,
        says="The first layer goes through NumPy and back.",
    ),
    told(
        "loss-made-new",
        "mlp.py:build",
        (
            "    return F.cross_entropy(model(x), y)",
            "    return torch.tensor(F.cross_entropy(model(x), y).item(), requires_grad=True)",
        ),
        fails=("no-gradient",),
        may=UNREACHED,
        says="The loss is made anew from a number so that backward() stops complaining.",
    ),
    told(
        "embedding-under-no-grad",
        "sequence.py:packed",
        (
            "        packed = pack",
            "        with torch.no_grad():\n"
            "            embedded = self.words(words)\n"
            "        packed = pack",
        ),
        ("(self.words(words), lengths, True", "(embedded, lengths, True"),
        fails=("no-gradient",),
        may=UNREACHED,
        says="A no_grad() block takes in one line too many.",
    ),
    told(
        "everything-frozen",
        "mlp.py:build",
        ("    optimizer = ", "    model.requires_grad_(False)\n    optimizer = "),
        fails=("no-gradient",),
        may=UNREACHED,
        says="The line that freezes the backbone freezes the whole model.",
    ),
    told(
        "all-zero",
        "mlp.py:build",
        (
            "        self.head = nn.Linear(32, CLASSES)\n",
            "        self.head = nn.Linear(32, CLASSES)\n"
            "        for parameter in self.parameters():\n"
            "            nn.init.zeros_(parameter)\n",
        ),
        fails=("no-gradient",),
        may=(*UNREACHED, "dead-outputs"),
        says="All weights begin at zero, and but for the last bias they stay there.",
    ),
    told(
        "branch-never-taken",
        "mlp.py:build",
        (
            "        self.dropout = ",
            "        self.skip = nn.Linear(FEATURES, 32)\n        self.dropout = ",
        ),
        fails=("unused-parameters",),
        may=UNREACHED,
        says="A layer is made and never called; under DDP the second step raises.",
    ),
    told(
        "branch-by-batch",
        "mlp.py:build",
        (
            "        self.dropout = ",
            "        self.skip = nn.Linear(FEATURES, 32)\n        self.dropout = ",
        ),
        (
            "        x = torch.relu(self.first(x))\n",
            "        first = self.first if x[0, 0] > 0 else self.skip\n"
            "        x = torch.relu(first(x))\n",
        ),
        fails=("unused-parameters",),
        may=(*UNREACHED, "example-leakage", "batch-size-dependence"),
        says="Which layer is used hangs on the batch; the ranks of DDP wait for each other.",
    ),
    told(
        "relu-dead",
        "mlp.py:build",
        (
            "        self.dropout = ",
            "        nn.init.constant_(self.first.bias, -10.0)\n        self.dropout = ",
        ),
        fails=("dead-outputs",),
        may=UNREACHED,
        says="Biases of -10 before a ReLU: no unit ever fires.",
    ),
    told(
        "state-not-registered",
        "mlp.py:build",
        (
            "        self.dropout = ",
            "        self.mix = torch.randn(32, 32) / 32**0.5\n        self.dropout = ",
        ),
        ("self.second(x)", "self.second(x @ self.mix)"),
        fails=("checkpoint-round-trip",),
        says="A random projection is a plain attribute; after a restart it is another one.",
    ),
    told(
        "state-not-saved",
        "mlp.py:build",
        (
            "        self.dropout = ",
            "        mix = torch.randn(32, 32) / 32**0.5\n"
            '        self.register_buffer("mix", mix, persistent=False)\n'
            "        self.dropout = ",
        ),
        ("self.second(x)", "self.second(x @ self.mix)"),
        fails=("checkpoint-round-trip",),
        says="A buffer is marked as not persistent though nothing can make it again.",
    ),
    told(
        "noise-without-seed",
        "mlp.py:build",
        ("import math\n", "import math\n\nimport numpy\n"),
        (
            "        x = torch.relu(self.first(x))\n",
            "        noise = numpy.random.default_rng().normal(size=x.shape)\n"
            "        x = torch.relu(self.first(x + 0.1 * torch.from_numpy(noise).float()))\n",
        ),
        fails=("not-repeatable",),
        may=("train-eval-mode", "checkpoint-round-trip"),
        says="The model draws noise from a generator that no seed reaches; no run can be repeated.",
    ),
]

DATA = [
    told(
        "classes-from-one",
        "mlp.py:build",
        (".argmax(-1)\n    return x, y", ".argmax(-1) + 1\n    return x, y"),
        fails=("labels-out-of-range",),
        says="Classes are counted from 1; on a GPU the assert names neither label nor line.",
    ),
    told(
        "missing-label-minus-one",
        "vision.py:build",
        (
            "images[torch.arange(number), 0, labels] += 1.5\n",
            "images[torch.arange(number), 0, labels] += 1.5\n    labels[::5] = -1\n",
        ),
        fails=("labels-out-of-range",),
        says="Missing labels are -1, and the loss ignores -100.",
    ),
    told(
        "word-beyond-the-table",
        "sequence.py:packed",
        (
            "self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)",
            "self.words = nn.Embedding(WORDS - 2, WIDTH, padding_idx=PAD)",
        ),
        fails=("tokens-out-of-range",),
        says="The embedding has fewer rows than the vocabulary has words.",
    ),
    told(
        "label-among-features",
        "mlp.py:build",
        (
            "    x = (x - x.mean(0)) / x.std(0)\n",
            "    x = (x - x.mean(0)) / x.std(0)\n    x[:, 3] = y\n",
        ),
        fails=("label-in-inputs",),
        says="A column made from the label stayed among the features; validation is perfect.",
    ),
    told(
        "class-mean-as-feature",
        "mlp.py:build",
        (
            "    x = (x - x.mean(0)) / x.std(0)\n",
            "    x = (x - x.mean(0)) / x.std(0)\n"
            "    x[:, 3] = torch.stack([x[y == label, 3].mean() for label in y])\n",
        ),
        fails=("label-in-inputs",),
        says="A feature is replaced by its mean per class, computed on the rows it is given to.",
    ),
    told(
        "order-by-the-clock",
        "vision.py:build",
        (
            "generator = torch.Generator().manual_seed(7)\n    loader",
            "generator = torch.Generator()\n    generator.seed()\n    loader",
        ),
        fails=("order-not-repeatable",),
        may=("not-repeatable",),
        says="Every start shuffles the data in another way, whatever the seed.",
    ),
    told(
        "constant-column",
        "mlp.py:build",
        (
            "    y = (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(-1)\n",
            "    y = (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(-1)\n"
            "    x[:, 3] = 1.0\n",
        ),
        fails=("non-finite",),
        says="A constant column is divided by its standard deviation of 0.",
    ),
    told(
        "labels-of-another-type",
        "mlp.py:build",
        (".argmax(-1)\n    return x, y", ".argmax(-1).to(torch.int32)\n    return x, y"),
        fails=("batch-mismatch",),
        says="Labels come as int32, which cross_entropy refuses.",
    ),
]

LOSS = [
    told(
        "softmax-in-the-loss",
        "mlp.py:build",
        ("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x).softmax(-1), y)"),
        fails=("double-softmax",),
        says="The scores are made probabilities before cross_entropy; the loss stops at a floor.",
    ),
    told(
        "softmax-by-hand",
        "mlp.py:build",
        (
            "return self.head(x)",
            "x = self.head(x).exp()\n        return x / x.sum(-1, keepdim=True)",
        ),
        fails=("double-softmax",),
        says="The model ends in a softmax that is written out, and the loss has its own.",
    ),
    told(
        "sum-for-mean",
        "mlp.py:build",
        ("F.cross_entropy(model(x), y)", 'F.cross_entropy(model(x), y, reduction="sum")'),
        fails=("loss-scale",),
        says="The loss is a sum: the step grows with the batch.",
    ),
    told(
        "difference-by-hand",
        "tabular.py:regression",
        ("F.mse_loss(model(x).squeeze(-1), y)", "((model(x) - y) ** 2).mean()"),
        fails=("batch-mismatch",),
        may=("example-leakage",),
        says="[N, 1] minus [N] is [N, N]: every prediction is drawn to the mean of all labels.",
    ),
    told(
        "normalized-over-the-batch",
        "mlp.py:build",
        (
            "        x = torch.relu(self.first(x))\n",
            "        x = torch.relu(self.first(x))\n"
            "        x = (x - x.mean(0)) / (x.std(0) + 1e-5)\n",
        ),
        fails=("example-leakage",),
        may=("batch-size-dependence", "non-finite"),
        says="A home-made norm takes mean and deviation over the batch, in eval mode too.",
    ),
    told(
        "recurrence-over-the-batch",
        "sequence.py:forecast",
        ("nn.LSTM(3, WIDTH, batch_first=True)", "nn.LSTM(3, WIDTH)"),
        fails=("example-leakage",),
        may=("batch-size-dependence",),
        says="batch_first was forgotten: the LSTM runs from example to example.",
    ),
    told(
        "statistics-not-kept",
        "vision.py:build",
        ("nn.BatchNorm2d(8)", "nn.BatchNorm2d(8, track_running_stats=False)"),
        fails=("batch-size-dependence",),
        may=("example-leakage", "train-eval-mode"),
        says="In eval mode BatchNorm still uses the batch: predictions hang on who else is in it.",
    ),
]

LANGUAGE = [
    told(
        "no-causal-mask",
        "lm.py:build",
        (
            "seen = self.causal[:length, :length] & ~padding[:, None, None, :]",
            "seen = ~padding[:, None, None, :]",
        ),
        fails=("future-leakage",),
        says="Every position sees the whole line; the loss is too good at once.",
    ),
    told(
        "mask-upside-down",
        "lm.py:build",
        (".tril()", ".triu()"),
        fails=("future-leakage",),
        says="The triangle of the mask is the wrong one.",
    ),
    told(
        "mask-one-too-wide",
        "lm.py:build",
        (".tril()", ".tril(1)"),
        fails=("future-leakage",),
        says="The mask lets through one position too many: the next token, which is the label.",
    ),
    told(
        "mask-after-softmax",
        "lm.py:build",
        (
            "weights = scores.masked_fill(~seen, -1e9).softmax(-1)",
            "weights = scores.softmax(-1).masked_fill(~seen, 0.0)",
        ),
        fails=("future-leakage",),
        says="Masked after the softmax, whose sum has seen the future already.",
    ),
    told(
        "heads-mixed-by-view",
        "lm.py:build",
        (
            ".view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)",
            ".view(3, batch, HEADS, length, -1)",
        ),
        fails=("example-leakage", "future-leakage"),
        may=("batch-size-dependence", "accumulation-mean-of-means"),
        says="view() was taken for permute(): examples, heads and positions are mixed.",
    ),
    told(
        "labels-not-shifted",
        "lm.py:build",
        (
            "labels = ids[:, 1:].masked_fill(ids[:, 1:] == PAD, -100)",
            "labels = ids[:, :-1].masked_fill(ids[:, :-1] == PAD, -100)",
        ),
        fails=("label-shift",),
        says="The model is asked for the token that it is given.",
    ),
    told(
        "masked-row-of-minus-infinity",
        "lm.py:build",
        ("-1e9", "-torch.inf"),
        ("ids[1::8, 9:] = PAD", "ids[1::8, :3] = PAD"),
        fails=("non-finite",),
        may=UNREACHED,
        says="Padding on the left: the first rows of the scores are -inf throughout.",
    ),
]

START = [
    told(
        "head-ten-times-too-large",
        "mlp.py:build",
        (
            "        self.head = nn.Linear(32, CLASSES)\n",
            "        self.head = nn.Linear(32, CLASSES)\n"
            "        nn.init.normal_(self.head.weight, std=10.0)\n",
        ),
        fails=("initial-loss",),
        may=("logit-scale",),
        stage=INIT,
        says="The last layer begins so large that the first loss is far above ln C.",
    ),
    told(
        "embedding-tied-and-large",
        "lm.py:build",
        ("nn.init.normal_(self.tokens.weight, std=0.05)", "nn.init.normal_(self.tokens.weight)"),
        fails=("initial-loss", "logit-scale"),
        stage=INIT,
        says="A tied embedding with std 1 is fine as an input and far too large as a head.",
    ),
    told(
        "divided-twice",
        "mlp.py:build",
        ("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y) / len(x)"),
        fails=("initial-loss",),
        may=("loss-scale",),
        stage=INIT,
        says="The mean is divided by the batch size once more.",
    ),
    told(
        "labels-drawn-each-step",
        "mlp.py:build",
        ("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y[torch.randperm(len(y))])"),
        fails=("labels-reshuffled",),
        may=("one-batch-floor", "not-repeatable", "example-leakage"),
        stage=ONE_BATCH,
        says="The labels are shuffled at every step and not with their inputs.",
    ),
    told(
        "inputs-scaled-away",
        "mlp.py:build",
        ("    x = (x - x.mean(0)) / x.std(0)\n", "    x = (x - x.mean(0)) / x.std(0) / 1e6\n"),
        fails=("input-independent",),
        may=("one-batch-floor",),
        stage=ONE_BATCH,
        says="The inputs are divided by a constant of the wrong unit, and nothing is seen of them.",
    ),
    told(
        "gradient-vanishes",
        "deep.py:stack",
        ("GAIN = 1.1", "GAIN = 0.1"),
        fails=("vanishing-gradient",),
        may=("update-ratio",),
        stage=FLOW,
        says="Weights too small for the depth: the first layers get no gradient.",
    ),
    told(
        "gradient-explodes",
        "deep.py:stack",
        ("GAIN = 1.1", "GAIN = 3.0"),
        ("x = torch.tanh(layer(x))", "x = layer(x)"),
        fails=("exploding-gradient",),
        may=("update-ratio", "residual-growth"),
        stage=FLOW,
        says="Weights too large for the depth: every layer makes the gradient larger.",
    ),
    told(
        "tanh-saturated",
        "deep.py:stack",
        ("GAIN = 1.1", "GAIN = 300.0"),
        fails=("saturated-units",),
        may=("vanishing-gradient", "exploding-gradient", "update-ratio"),
        stage=FLOW,
        says="All units of a tanh stand at +1 or -1.",
        before=False,
    ),
    told(
        "units-dead",
        "deep.py:residual",
        (
            "        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))\n",
            "        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))\n"
            "        for block in self.blocks[4:6]:\n"
            "            nn.init.constant_(block.up.bias, -10.0)\n",
        ),
        fails=("dead-units",),
        may=("update-ratio", "vanishing-gradient"),
        stage=FLOW,
        says="Two of the layers have biases under which no ReLU fires.",
    ),
    told(
        "residual-stream-grows",
        "deep.py:residual",
        ("self.down(torch.relu(self.up(self.norm(x))))", "8.0 * self.down(torch.relu(self.up(x)))"),
        fails=("residual-growth",),
        may=("exploding-gradient", "vanishing-gradient", "update-ratio"),
        stage=FLOW,
        says="A factor in the place of a norm: the stream grows with a power of the depth.",
        before=False,
    ),
    told(
        "scores-not-scaled",
        "lm.py:build",
        (" / math.sqrt(WIDTH // HEADS)", " * 40"),
        (
            "        self.out = ",
            "        nn.init.normal_(self.qkv.weight, std=1.0)\n        self.out = ",
        ),
        fails=("attention-logits", "attention-entropy"),
        may=("update-ratio", "exploding-gradient", "vanishing-gradient"),
        stage=FLOW,
        says="Scores are multiplied where they should be divided: attention picks one token.",
    ),
    told(
        "step-as-large-as-the-weights",
        "deep.py:residual",
        (
            "torch.optim.AdamW(model.parameters(), 1e-3)",
            "torch.optim.AdamW(model.parameters(), 1.0)",
        ),
        fails=("update-ratio",),
        may=("residual-growth", "dead-units", "exploding-gradient", "vanishing-gradient"),
        stage=FLOW,
        says="A step of AdamW changes the weights by more than they are.",
    ),
]

MEMORY = [
    told(
        "tanh-after-the-last-layer",
        "mlp.py:build",
        ("return self.head(x)", "return torch.tanh(self.head(x))"),
        fails=("one-batch-floor",),
        stage=ONE_BATCH,
        says="Scores end in a tanh: even one batch cannot be learnt by heart.",
    ),
    told(
        "nothing-to-learn",
        "mlp.py:build",
        (
            "    return F.cross_entropy(model(x), y)",
            "    loss = F.cross_entropy(model(x), y)\n    return loss.detach().requires_grad_()",
        ),
        fails=("no-learning",),
        may=("one-batch-floor",),
        stage=ONE_BATCH,
        says="The loss is cut from the model; 300 steps leave it where it was.",
    ),
    told(
        "optimizer-of-another-model",
        "mlp.py:build",
        ("    scheduler = ", "    model = Classifier()\n    scheduler = "),
        fails=("optimizer-parameters",),
        may=("no-learning", "one-batch-floor"),
        stage=ONE_BATCH,
        says="The loss stays the same to four digits for 300 steps: another model is trained.",
    ),
    told(
        "bias-of-other-data",
        "mlp.py:build",
        (
            "        self.head = nn.Linear(32, CLASSES)\n",
            "        self.head = nn.Linear(32, CLASSES)\n        self.head.bias.data[0] = 5.0\n",
        ),
        fails=("head-prior-bias",),
        may=("initial-loss", "logit-scale"),
        stage=INIT,
        says="The last bias was set to the class frequencies of another data set.",
        before=False,
    ),
    told(
        "overflow-in-half-precision",
        "forms.py:bfloat16",
        ("network().bfloat16()", "network().half()"),
        (
            "    batches = rows(torch.bfloat16)",
            "    batches = [(1e5 * x, y) for x, y in rows(torch.float16)]",
        ),
        fails=("non-finite",),
        stage=FLOW,
        may=("update-ratio",),
        says="Inputs beyond 65504 are infinite in float16.",
        before=False,
    ),
    told(
        "features-masked-away",
        "mlp.py:build",
        (
            "x = self.dropout(torch.relu(self.second(x)))",
            "x = self.dropout(torch.relu(self.second(x))) * 0",
        ),
        fails=("dead-outputs",),
        may=UNREACHED,
        says="A mask that is always 0 stands before the head; only its bias learns.",
        before=False,
    ),
]

DESCRIBED = [*LOOP, *GRAPH, *DATA, *LOSS, *LANGUAGE, *START, *MEMORY]

"""Bugs adapted from public reports: the failure is theirs, the code is this bank's own."""

from __future__ import annotations

from planted.row import INIT, ONE_BATCH, PREFLIGHT, Row

UNREACHED = ("parameters-still", "unused-parameters", "no-gradient")
HUB = "https://github.com/"


def reported(name, link, on, *edits, fails, says, may=(), stage=PREFLIGHT) -> Row:
    """Make a row whose bug was reported at github.com/LINK."""
    return Row(name, on, edits, fails, says, HUB + link, may, stage)


LOOP = [
    reported(
        "zero-grad-in-one-branch",
        "facebookresearch/nwm/issues/16",
        "tabular.py:regression",
        (
            "    optimizer.zero_grad()\n",
            "    if loss.dtype == torch.float64:\n        optimizer.zero_grad()\n",
        ),
        fails=("missing-zero-grad",),
        says="Gradients are cleared in one precision only; in the other they add up.",
    ),
    reported(
        "mean-of-means",
        "meta-pytorch/torchtune/pull/1875",
        "lm.py:build",
        ("loss_fn(model, half) * count(half) / count(batch)", "loss_fn(model, half) / 2"),
        fails=("accumulation-mean-of-means",),
        may=("loss-scale",),
        says="Means over unequal numbers of tokens are averaged: x1/n1 + x2/n2 is no mean.",
    ),
    reported(
        "layers-replaced-after-optimizer",
        "hustzxd/EfficientPyTorch/issues/1",
        "mlp.py:build",
        ("    scheduler = ", "    model.second = nn.Linear(32, 32)\n    scheduler = "),
        fails=("optimizer-parameters",),
        may=("parameters-still",),
        says="Layers are replaced after the optimizer was made; the new ones never learn.",
    ),
    reported(
        "group-not-given",
        "zjunlp/HVPNeT/issues/5",
        "lm.py:build",
        (', {"params": others, "weight_decay": 0.0}]', "]"),
        fails=("optimizer-parameters",),
        may=("parameters-still", "weight-decay-groups"),
        says="A group of parameters is put together and never appended.",
    ),
    reported(
        "layers-in-a-list",
        "pytorch/pytorch/issues/59925",
        "deep.py:residual",
        ("nn.ModuleList(Block() for _ in range(DEPTH))", "[Block() for _ in range(DEPTH)]"),
        fails=("optimizer-parameters",),
        may=("parameters-still", "checkpoint-round-trip"),
        says="Layers in a Python list are no part of the model; the optimizer misses them.",
    ),
    reported(
        "dropout-always-on",
        "rixwew/pytorch-fm/issues/21",
        "mlp.py:build",
        (
            "self.dropout(torch.relu(self.second(x)))",
            "F.dropout(torch.relu(self.second(x)), p=0.1)",
        ),
        fails=("train-eval-mode",),
        says="F.dropout without training=self.training drops in eval mode too.",
    ),
    reported(
        "dropout-made-in-forward",
        "yangze0930/NTS-Net/issues/14",
        "mlp.py:build",
        (
            "self.dropout(torch.relu(self.second(x)))",
            "nn.Dropout(p=0.5)(torch.relu(self.second(x)))",
        ),
        fails=("train-eval-mode",),
        says="A Dropout that is made in forward never hears of eval().",
    ),
    reported(
        "validation-with-dropout",
        "ipolharvard/ethos-ares/issues/20",
        "mlp.py:build",
        ("    model.eval()\n", ""),
        fails=("evaluation-gradients",),
        may=("train-eval-mode",),
        says="no_grad() without eval(): dropout is active while the validation loss is measured.",
    ),
    reported(
        "validation-keeps-the-graph",
        "OpenNMT/OpenNMT-py/issues/1141",
        "lm.py:build",
        ("@torch.no_grad()\n", ""),
        fails=("evaluation-gradients",),
        says="Validation builds graphs that nobody needs and runs out of memory.",
    ),
    reported(
        "not-back-to-training",
        "ThilinaRajapakse/simpletransformers/issues/941",
        "lm.py:build",
        ("    model.train(was_training)\n", ""),
        fails=("train-eval-mode",),
        may=("evaluation-gradients",),
        says="After an evaluation during training the model stays in eval mode.",
    ),
    reported(
        "loss-puts-into-eval",
        "ServiceNow/LCFCN/issues/20",
        "mlp.py:build",
        ("    x, y = batch\n", "    x, y = batch\n    model.eval()\n"),
        fails=("train-eval-mode",),
        says="A function called by the loss puts the model into eval mode and leaves it there.",
    ),
    reported(
        "scheduler-once-a-process",
        "huggingface/accelerate/issues/2926",
        "mlp.py:build",
        ("LambdaLR(optimizer, schedule)", "LambdaLR(optimizer, lambda step: schedule(4 * step))"),
        ("return 0.1 + 0.45 * ", "return 0.5 * "),
        fails=("schedule-values",),
        says="The scheduler steps once for each of four processes: after a quarter the rate is 0.",
    ),
]

MODEL = [
    reported(
        "softmax-of-softmax",
        "Lightning-Universe/lightning-bolts/issues/654",
        "mlp.py:build",
        (
            "F.cross_entropy(model(x), y)",
            "F.nll_loss(F.log_softmax(F.softmax(model(x), -1), -1), y)",
        ),
        fails=("double-softmax",),
        says="nll_loss of log_softmax of softmax.",
    ),
    reported(
        "language-model-of-probabilities",
        "bkitano/llama-from-scratch/issues/5",
        "lm.py:build",
        ("return self.head(self.norm(x))", "return F.softmax(self.head(self.norm(x)), dim=-1)"),
        fails=("double-softmax",),
        says="The model returns probabilities under the name of logits.",
    ),
    reported(
        "floor-of-four-classes",
        "ariecattan/SciCo/issues/2",
        "vision.py:group_norm",
        (
            "        nn.Linear(8, CLASSES),\n",
            "        nn.Linear(8, CLASSES),\n        nn.Softmax(-1),\n",
        ),
        fails=("double-softmax",),
        may=("one-batch-floor",),
        stage=ONE_BATCH,
        says="Softmaxed scores of four classes: no loss is below 0.74.",
    ),
    reported(
        "sigmoid-twice",
        "cvg/glue-factory/issues/89",
        "tabular.py:multi_label",
        ("(model(x), y, pos_weight=weight)", "(model(x).sigmoid(), y, pos_weight=weight)"),
        fails=("double-softmax",),
        says="The head ends in a sigmoid, and BCEWithLogitsLoss has its own.",
    ),
    reported(
        "likelihood-of-raw-scores",
        "yanx27/Pointnet_Pointnet2_pytorch/issues/30",
        "mlp.py:build",
        ("F.cross_entropy(model(x), y)", "F.nll_loss(model(x), y)"),
        fails=("missing-log-softmax",),
        says="nll_loss of raw scores: the loss begins near 0 and goes below it.",
    ),
    reported(
        "likelihood-of-probabilities",
        "AnubhavGupta3377/Text-Classification-Models-Pytorch/issues/9",
        "mlp.py:build",
        ("F.cross_entropy(model(x), y)", "F.nll_loss(model(x).softmax(-1), y)"),
        fails=("initial-loss",),
        stage=INIT,
        says="nll_loss of probabilities: the loss is always negative.",
    ),
    reported(
        "column-against-row",
        "pytorch/pytorch/issues/16045",
        "tabular.py:regression",
        ("F.mse_loss(model(x).squeeze(-1), y)", "F.mse_loss(model(x), y)"),
        fails=("batch-mismatch",),
        may=("example-leakage",),
        says="Predictions [N, 1] against labels [N] are broadcast to [N, N].",
    ),
    reported(
        "heads-joined-by-view",
        "zhouhaoyi/Informer2020/issues/59",
        "lm.py:build",
        ("(weights @ v).transpose(1, 2).reshape(", "(weights @ v).reshape("),
        fails=("future-leakage",),
        says="view() in the place of permute() mixes heads with positions.",
    ),
    reported(
        "softmax-over-the-batch",
        "PetrochukM/PyTorch-NLP/issues/2",
        "lm.py:build",
        (".softmax(-1)", ".softmax(0)"),
        fails=("example-leakage",),
        may=("future-leakage", "batch-size-dependence", "accumulation-mean-of-means"),
        says="The softmax of attention goes over the examples.",
    ),
    reported(
        "mask-inverted",
        "rasbt/LLMs-from-scratch/pull/1062",
        "lm.py:build",
        ("masked_fill(~seen, -1e9)", "masked_fill(seen, -1e9)"),
        fails=("future-leakage",),
        says="True means masked here and seen there: attention sees the future only.",
    ),
    reported(
        "norm-over-positions",
        "jadore801120/attention-is-all-you-need-pytorch/pull/17",
        "lm.py:build",
        (
            "return self.head(self.norm(x))",
            "x = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)\n"
            "        return self.head(self.norm(x))",
        ),
        fails=("future-leakage",),
        says="A layer norm takes its mean along the sequence, and so from the future.",
    ),
    reported(
        "targets-shifted-twice",
        "huggingface/transformers/issues/47394",
        "lm.py:build",
        (
            "labels = ids[:, 1:].masked_fill(ids[:, 1:] == PAD, -100)",
            "ids, labels = ids[:, :-1], ids[:, 2:].masked_fill(ids[:, 2:] == PAD, -100)",
        ),
        fails=("label-shift",),
        says="Data and model both shift: position t is trained on token t + 2.",
    ),
    reported(
        "labels-shifted-for-a-model-that-shifts",
        "huggingface/transformers/pull/44642",
        "huggingface.py:llama",
        (
            '"labels": i.masked_fill(m == 0, -100)}',
            '"labels": i.roll(-1).masked_fill(m.roll(-1) * m == 0, -100)}',
        ),
        fails=("label-shift",),
        says="Users shift the labels before they give them to a model that shifts them itself.",
    ),
    reported(
        "padding-token-beyond-the-table",
        "meta-llama/llama-cookbook/issues/189",
        "huggingface.py:llama",
        (
            "return LlamaForCausalLM(config), DataLoader(rows(pad=0)",
            "return LlamaForCausalLM(config), DataLoader(rows(pad=40)",
        ),
        fails=("tokens-out-of-range",),
        says="A padding token is added to the tokenizer and the embedding is not resized.",
    ),
    reported(
        "input-detached",
        "lucidrains/CoCa-pytorch/issues/6",
        "sequence.py:masked_words",
        (
            "self.core(self.words(words) + self.places)",
            "self.core(self.words(words).detach() + self.places)",
        ),
        fails=("no-gradient",),
        may=UNREACHED,
        says="A feature extractor detaches what it hands on: the encoder gets no gradient.",
    ),
    reported(
        "root-of-zero",
        "keras-team/keras/issues/9097",
        "contrast.py:siamese",
        (".sum(-1).add(1e-6).sqrt()", ".sum(-1).sqrt()"),
        (
            "torch.where(same[:, None] > 0, other, other.roll(1, 0))",
            "torch.where(same[:, None] > 0, one, other.roll(1, 0))",
        ),
        fails=("non-finite",),
        may=UNREACHED,
        says="The distance of two equal inputs has the derivative of a root at 0.",
    ),
    reported(
        "made-anew-after-loading",
        "david-knigge/ccnn/issues/14",
        "mlp.py:build",
        (
            "        self.dropout = ",
            "        ready = torch.zeros((), dtype=torch.bool)\n"
            '        self.register_buffer("ready", ready, persistent=False)\n'
            "        self.dropout = ",
        ),
        (
            "        x = torch.relu(self.first(x))\n",
            "        if not self.ready:\n"
            "            nn.init.orthogonal_(self.second.weight)\n"
            "            self.ready.fill_(True)\n"
            "        x = torch.relu(self.first(x))\n",
        ),
        fails=("checkpoint-round-trip",),
        may=("not-repeatable", "optimizer-parameters"),
        says="A flag is not saved, so a loaded model initializes its weights once more.",
    ),
    reported(
        "tied-on-loading-only",
        "NVIDIA-NeMo/Automodel/issues/2571",
        "lm.py:build",
        (
            "        self.head.weight = self.tokens.weight\n\n    def forward(self, input_ids):\n",
            "\n"
            "    def state_dict(self, *args, **kwargs):\n"
            "        state = super().state_dict(*args, **kwargs)\n"
            '        state["head.weight"] = state["tokens.weight"]\n'
            "        return state\n"
            "\n"
            "    def forward(self, input_ids):\n",
        ),
        fails=("checkpoint-round-trip",),
        says="Head and embedding are apart while training and one in the checkpoint.",
    ),
    reported(
        "batch-changed-in-place",
        "facebookresearch/pycls/pull/21",
        "mlp.py:build",
        ("    x, y = batch\n", "    x, y = batch\n    x += 0.1 * torch.randn_like(x)\n"),
        fails=("not-repeatable",),
        may=("order-not-repeatable", "train-eval-mode", "checkpoint-round-trip"),
        says="Augmentation works in place and changes the data for good, more with every epoch.",
    ),
    reported(
        "ignored-class-not-ignored",
        "yiskw713/boundary_loss_for_remote_sensing/issues/6",
        "vision.py:segmentation",
        (
            "F.cross_entropy(model(batch[0]), batch[1], ignore_index=255)",
            "F.cross_entropy(model(batch[0]), batch[1])",
        ),
        fails=("labels-out-of-range",),
        says="Masks mark what does not count by 255, and the loss has not been told.",
    ),
]

REPORTED = [*LOOP, *MODEL]

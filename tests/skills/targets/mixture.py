"""A small mixture of experts with routers of three kinds, sound and broken in one way each."""

import torch
from torch import nn

WIDTH, VOCABULARY, LENGTH, EXPERTS, CHOSEN = 16, 32, 24, 8, 2


class Router(nn.Module):
    """As transformers writes it: logits, weights, ids."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(EXPERTS))

    def scores(self, logits):
        return logits.softmax(-1)

    def forward(self, hidden):
        logits = nn.functional.linear(hidden, self.weight, self.bias)
        weights, ids = self.scores(logits).topk(CHOSEN, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), ids


class DoubleSoftmax(Router):
    def scores(self, logits):
        return logits.softmax(-1).softmax(-1)


class Probabilities(Router):
    """Calls probabilities logits, and takes their softmax."""

    def forward(self, hidden):
        logits, _, _ = super().forward(hidden)
        logits = logits.softmax(-1)
        weights, ids = logits.softmax(-1).topk(CHOSEN, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), ids


class LogitsAlone(nn.Linear):
    """As older code writes it."""

    def __init__(self):
        super().__init__(WIDTH, EXPERTS, bias=False)


class Mixture(nn.Module):
    def __init__(self, router):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.gate = router
        self.gate_proj = nn.Linear(WIDTH, WIDTH)  # no router, in spite of its name
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids):
        hidden = self.gate_proj(self.embedding(input_ids).flatten(0, 1))
        routed = self.gate(hidden)
        if isinstance(routed, torch.Tensor):
            weights, ids = routed.softmax(-1).topk(CHOSEN, dim=-1)
        else:
            _, weights, ids = routed
        every = torch.stack([expert(hidden) for expert in self.experts], 1)
        chosen = every.gather(1, ids[..., None].expand(-1, -1, WIDTH))
        return self.head(hidden + (chosen * weights[..., None]).sum(1)).view(*input_ids.shape, -1)


def loss_fn(model, batch):
    logits = model(batch["input_ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def parts(router):
    ids = torch.randint(0, VOCABULARY, (8, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    return Mixture(router), [batch] * 3, loss_fn


def build():
    return parts(Router())


def logits_alone():
    return parts(LogitsAlone())


def double_softmax():
    return parts(DoubleSoftmax())


def probabilities():
    return parts(Probabilities())


def dead_expert():
    router = Router()
    router.bias.data[5] = -20.0
    return parts(router)


def collapsed():
    router = Router()
    router.bias.data[:CHOSEN] = 20.0
    return parts(router)


def large_logits():
    router = Router()
    router.weight.data *= 200
    return parts(router)


def hugging_face(name, **fields):
    """A tiny causal model of transformers."""
    import transformers

    settings = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts_per_tok=2, **fields,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(settings)
    _, batches, _ = build()

    def loss(model, batch):
        return model(**batch).loss

    return model, batches, loss


def mixtral():
    return hugging_face("Mixtral", num_local_experts=4)


def qwen3_moe():
    return hugging_face("Qwen3Moe", num_experts=6, moe_intermediate_size=16, norm_topk_prob=True)

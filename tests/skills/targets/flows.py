"""Small models for the measure of gradient flow: sound ones, and each fault by one argument."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, WIDTH = 64, 32, 32


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parts(model, batches, loss_fn, lr=1e-3):
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, batches, loss_fn, torch.optim.AdamW(trained, lr=lr)


def squared_error(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def classes(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def tower(depth=20, act=nn.Tanh, std=None, bias=0.0, lr=1e-3):
    """A plain stack of layers."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layer = nn.Linear(64, 64)
        if std is not None:
            nn.init.normal_(layer.weight, 0.0, std)
            nn.init.constant_(layer.bias, bias)
        layers += [layer, act()]
    batches = [(random(64, 64, seed=i), random(64, 1, seed=9 + i)) for i in range(4)]
    return parts(nn.Sequential(*layers, nn.Linear(64, 1)), batches, squared_error, lr)


class Attention(nn.Module):
    def __init__(self, kind, q_scale):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind, self.q_scale = kind, q_scale

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        q = q * self.q_scale
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -1e9)
            y = torch.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, kind, q_scale, stream):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention(kind, q_scale)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
        self.stream = stream

    def forward(self, x):
        x = self.stream * x + self.attention(self.norms[0](x))
        return self.stream * x + self.mlp(self.norms[1](x)), None


class GPT(nn.Module):
    def __init__(self, depth=6, kind="sdpa", q_scale=1.0, stream=1.0, again=None, cut=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, q_scale, stream) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.again, self.cut = again, cut

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            if self.again is None:
                x, _ = block(x)
            else:
                x, _ = checkpoint(block, x, use_reentrant=self.again)
        return self.head(self.norm(x.detach() if self.cut else x))


def next_token(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def token_batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator) for _ in range(count)
    ]


def gpt(lr=1e-3, dtype=torch.float32, **fields):
    torch.manual_seed(0)
    return parts(GPT(**fields).to(dtype), token_batches(), next_token, lr)


def sound_gpt():
    return gpt()


def scaled_queries():
    return gpt(q_scale=100.0)


class Encoder(nn.Module):
    """nn.TransformerEncoder hides its attention in one call of torch."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            for block in self.layers.layers:
                block.self_attn.in_proj_weight[:WIDTH] *= scale

    def forward(self, ids):
        return self.head(self.layers(self.tokens(ids)))


def encoder(scale=1.0):
    torch.manual_seed(0)
    return parts(Encoder(scale), token_batches(), next_token)


class Adapter(nn.Module):
    """A frozen layer and a low-rank one that begins at zero."""

    def __init__(self):
        super().__init__()
        self.whole = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.whole(x) + self.up(self.down(x))


def adapter():
    torch.manual_seed(0)
    batches = [(random(64, 16, seed=i), random(64, 16, seed=9 + i)) for i in range(4)]
    return parts(Adapter(), batches, squared_error)


class Images(nn.Module):
    """Convolutions with ReLU in place."""

    def __init__(self, bias=0.0):
        super().__init__()
        layers, channels = [], 3
        for out in (8, 8, 16, 16, 16):
            norm = nn.BatchNorm2d(out)
            nn.init.constant_(norm.bias, bias)
            layers += [nn.Conv2d(channels, out, 3, padding=1), norm, nn.ReLU(inplace=True)]
            channels = out
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))


def images(bias=0.0):
    torch.manual_seed(0)
    labels = torch.arange(16) % 10
    return parts(Images(bias), [(random(16, 3, 8, 8, seed=i), labels) for i in range(4)], classes)


class Mixture(nn.Module):
    """Experts in a list; the router never chooses number 3."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 8)
        nn.init.zeros_(self.router.bias)
        self.router.bias.data[3] = -50.0
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(8)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        rows = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (ids == number).any(-1)
            if chosen.any():
                weight = (weights * (ids == number)).sum(-1)[chosen, None]
                rows = rows.index_add(0, chosen.nonzero()[:, 0], expert(x[chosen]) * weight)
        return self.head(x + rows)


def mixture():
    torch.manual_seed(0)
    labels = torch.arange(64) % 4
    return parts(Mixture(), [(random(64, 16, seed=i), labels) for i in range(4)], classes)


class Gates(nn.Module):
    """Residual branches behind gates that begin at zero, and one block that is called twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU()) for _ in range(6)
        )
        self.gates, self.head = nn.Parameter(torch.zeros(7)), nn.Linear(16, 4)

    def forward(self, x):
        for gate, block in zip(self.gates, [*self.blocks, self.blocks[0]], strict=True):
            x = x + gate * block(x)
        return self.head(x)


def gates():
    torch.manual_seed(0)
    labels = torch.arange(64) % 4
    return parts(Gates(), [(random(64, 16, seed=i), labels) for i in range(4)], classes)


def hugging_face(kind, attention, **fields):
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, attn_implementation=attention,
        **fields,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(settings)
    batches = [{"input_ids": ids, "labels": ids} for ids in token_batches()]
    return parts(model, batches, lambda model, batch: model(**batch).loss)


class Functions(nn.Module):
    """Activations as functions in the forward of the whole model; one layer's are off."""

    def __init__(self, act, weight, bias):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)
        self.head, self.act = nn.Linear(32, 4), act
        with torch.no_grad():
            self.second.weight.mul_(weight)
            self.second.bias.add_(bias)

    def forward(self, x):
        return self.head(self.act(self.second(self.act(self.first(x)))))


def functions(act=F.relu, weight=1.0, bias=0.0):
    torch.manual_seed(0)
    labels = torch.arange(64) % 4
    batches = [(random(64, 16, seed=i), labels) for i in range(4)]
    return parts(Functions(act, weight, bias), batches, classes)


class Recurrent(nn.Module):
    def __init__(self, recurrent):
        super().__init__()
        self.tokens, self.recurrent = nn.Embedding(VOCABULARY, WIDTH), recurrent
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.recurrent(self.tokens(ids))[0])


def recurrent(kind=nn.LSTM, scale=1.0, **fields):
    """A recurrent language model; `scale` multiplies the weights that act from step to step."""
    torch.manual_seed(0)
    layer = kind(WIDTH, WIDTH, batch_first=True, **fields)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(scale)
    return parts(Recurrent(layer), token_batches(), next_token)

"""Tokens in, tokens or tags out, and yet no plain language models."""

import torch
from torch import nn
from torch.nn import functional as F

WORDS, TAGS, WIDTH, LENGTH = 26, 5, 16, 10


def sentences(number=32):
    """Every other word follows from the one before."""
    ids = torch.randint(2, WORDS, (number, LENGTH), generator=torch.Generator().manual_seed(18))
    ids[:, 1::2] = (ids[:, 0::2] * 3) % (WORDS - 2) + 2
    return ids


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-3)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, TAGS)

    def forward(self, words):
        return self.head(self.lstm(self.words(words))[0])


def tagger():
    """A tag for every word, seen from both sides; the last words of some sentences have none."""
    model = Tagger()
    words = sentences()
    tags = (words + words.roll(-1, 1)) % TAGS
    tags[::3, 8:] = -100
    batches = [{"words": w, "tags": t} for w, t in zip(words.split(8), tags.split(8), strict=True)]

    def loss(model, batch):
        return F.cross_entropy(model(batch["words"]).transpose(1, 2), batch["tags"])

    return model, batches, loss, adamw(model)


class Encoder(nn.Module):
    """A transformer whose mask is given with every call, [T, T], True where nothing is seen."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.core = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words, mask=None):
        places = self.places[: words.shape[1]]
        return self.head(self.core(self.words(words) + places, mask=mask))


def denoising():
    """Some words are exchanged; all are asked for, those that stayed as well."""
    model = Encoder()
    words = sentences()
    generator = torch.Generator().manual_seed(19)
    wrong = torch.rand(words.shape, generator=generator) < 0.3
    given = torch.where(wrong, torch.randint(2, WORDS, words.shape, generator=generator), words)
    batches = list(zip(given.split(8), words.split(8), strict=True))

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return model, batches, loss, adamw(model)


def prefix():
    """A question of four words, seen from both sides; only the answer after it counts."""
    model = Encoder()
    mask = torch.ones(LENGTH - 1, LENGTH - 1, dtype=torch.bool).triu(1)
    mask[:4, :4] = False
    words = sentences()
    labels = words[:, 1:].clone()
    labels[:, :3] = -100
    parts = zip(words[:, :-1].split(8), labels.split(8), strict=True)
    batches = [{"input_ids": x, "labels": y} for x, y in parts]

    def loss(model, batch):
        logits = model(batch["input_ids"], mask)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return model, batches, loss, adamw(model)


class Fused(nn.Module):
    """Attention by the fused function of torch."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.words(words) + self.places[: words.shape[1]]
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.norm(x + self.out(mixed.transpose(1, 2).flatten(2))))


def fused():
    """The batch is one tensor of ids; the loss shifts them itself."""
    model = Fused()

    def loss(model, ids):
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.reshape(-1, WORDS), ids[:, 1:].reshape(-1))

    return model, list(sentences().split(8)), loss, adamw(model)


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.EmbeddingBag(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.kind, self.size = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)

    def forward(self, words):
        features = self.body(words)
        return {"kind": self.kind(features), "size": self.size(features).squeeze(-1)}


def two_tasks():
    """Two heads and the weighted sum of two losses; a batch also has names, a number and None."""
    model = Tasks()
    words = sentences()
    kind, size = words[:, 0] % 3, words.float().mean(1) / 5 - 3
    batches = [
        {
            "words": words[i : i + 8],
            "kind": kind[i : i + 8],
            "size": size[i : i + 8],
            "names": [f"row {row}" for row in range(i, i + 8)],
            "start": i,
            "note": None,
        }
        for i in range(0, 32, 8)
    ]

    def loss(model, batch):
        found = model(batch["words"])
        return F.cross_entropy(found["kind"], batch["kind"]) + 0.5 * F.mse_loss(
            found["size"], batch["size"]
        )

    return model, batches, loss, adamw(model)

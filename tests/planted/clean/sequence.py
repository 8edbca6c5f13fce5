"""Sequences other than texts to go on with: LSTM, packed GRU, a translator, masked words."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

WORDS, WIDTH, PAD, START, MASK = 24, 16, 0, 1, 2


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, series):
        hidden, _ = self.lstm(series)
        return self.head(hidden[:, -1]).squeeze(-1)


def forecast():
    """The next value of a series, of series that end before it."""
    model = Lstm()
    generator = torch.Generator().manual_seed(6)
    series = torch.randn(32, 9, 3, generator=generator).cumsum(1) / 3
    batches = list(zip(series[:, :8].split(8), series[:, 8, 0].split(8), strict=True))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    return model, batches, lambda m, b: F.mse_loss(m(b[0]), b[1]), optimizer


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.words(words), lengths, True, enforce_sorted=False)
        _, last = self.gru(packed)
        return self.head(torch.cat([last[0], last[1]], -1))


def packed():
    """Sentences of different lengths in one batch, given as a dict with a list of lengths."""
    model = Packed()
    generator = torch.Generator().manual_seed(7)
    words = torch.randint(3, WORDS, (24, 7), generator=generator)
    lengths = torch.randint(3, 8, (24,), generator=generator)
    words[torch.arange(7) >= lengths[:, None]] = PAD
    kinds = words[:, 0] % 3
    batches = [
        {"words": words[i : i + 8], "lengths": lengths[i : i + 8], "kind": kinds[i : i + 8]}
        for i in (0, 8, 16)
    ]

    def loss(model, batch):
        return F.cross_entropy(model(batch["words"], batch["lengths"]), batch["kind"])

    return model, batches, loss, torch.optim.Adam(model.parameters(), 3e-3)


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(8, WIDTH) * 0.1)
        self.core = nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source, target):
        empty, length = source == PAD, target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = self.core(
            self.source(source) + self.places[: source.shape[1]],
            self.target(target) + self.places[:length],
            tgt_mask=later,
            src_key_padding_mask=empty,
            memory_key_padding_mask=empty,
            tgt_key_padding_mask=target == PAD,
        )
        return self.head(hidden)


def translator():
    """Sources with padding; targets begin with START and are shifted by one."""
    model = Translator()
    generator = torch.Generator().manual_seed(8)
    source = torch.randint(3, WORDS, (24, 6), generator=generator)
    source[::4, 4:] = PAD
    turned = source.flip(1).roll(1, 1)
    turned = torch.where(turned == PAD, PAD, (turned + 5) % (WORDS - 3) + 3)
    turned = turned.sort(1, descending=True).values
    given = torch.cat([torch.full((24, 1), START), turned[:, :-1]], 1)
    parts = zip(source.split(8), given.split(8), turned.split(8), strict=True)

    def loss(model, batch):
        source, given, wanted = batch
        return F.cross_entropy(model(source, given).transpose(1, 2), wanted, ignore_index=PAD)

    return model, list(parts), loss, torch.optim.Adam(model.parameters(), 1e-3)


class MaskedWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(8, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1, batch_first=True, norm_first=True)
        self.core = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        return self.head(self.core(self.words(words) + self.places) * math.sqrt(WIDTH) / 4)


def masked_words():
    """Both sides are seen, as a masked language model may; only masked places count."""
    model = MaskedWords()
    generator = torch.Generator().manual_seed(9)
    words = torch.randint(3, WORDS, (24, 8), generator=generator)
    hidden = torch.rand(24, 8, generator=generator) < 0.25
    hidden[:, 3] = True
    labels = words.masked_fill(~hidden, -100)
    batches = [
        {"input_ids": x, "labels": y}
        for x, y in zip(words.masked_fill(hidden, MASK).split(8), labels.split(8), strict=True)
    ]

    def loss(model, batch):
        logits = model(batch["input_ids"])
        return F.cross_entropy(logits.view(-1, WORDS), batch["labels"].view(-1))

    return model, batches, loss, torch.optim.AdamW(model.parameters(), 1e-3)

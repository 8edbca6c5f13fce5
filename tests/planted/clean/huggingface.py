"""Models of transformers from a configuration, with the loss that they compute themselves."""

import torch
from torch.utils.data import DataLoader

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}


def rows(pad=None):
    ids = torch.randint(3, 40, (16, 10), generator=torch.Generator().manual_seed(14))
    ids[:, 1::2] = (ids[:, 0::2] + 11) % 37 + 3
    mask = torch.ones_like(ids)
    if pad is not None:
        mask[::4, 7:] = 0
        ids[::4, 7:] = pad
    return [
        {"input_ids": i, "attention_mask": m, "labels": i.masked_fill(m == 0, -100)}
        for i, m in zip(ids, mask, strict=True)
    ]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SMALL, intermediate_size=64, max_position_embeddings=16)
    return LlamaForCausalLM(config), DataLoader(rows(pad=0), batch_size=8)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=40,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=1,
    )
    return GPT2LMHeadModel(config), DataLoader(rows(), batch_size=8)


def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=16)
    examples = rows(pad=0)
    for number, example in enumerate(examples):
        hidden = torch.arange(10) % 4 == number % 4
        hidden &= example["attention_mask"] > 0
        example["labels"] = example["input_ids"].masked_fill(~hidden, -100)
        example["input_ids"] = example["input_ids"].masked_fill(hidden, 2)
    return BertForMaskedLM(config), DataLoader(examples, batch_size=8)

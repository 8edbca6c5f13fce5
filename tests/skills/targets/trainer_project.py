"""Models of transformers with its Trainer as people write it: a small Llama on a made-up text."""

from __future__ import annotations

import os
import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

VOCABULARY, LENGTH = 40, 12


class Counting(torch.utils.data.Dataset):
    """Rows that count upwards from a random start; the labels are the inputs, not yet shifted."""

    def __init__(self, rows: int = 24) -> None:
        start = torch.randint(0, VOCABULARY, (rows, 1))
        self.rows = (start + torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def arguments(**settings) -> TrainingArguments:
    """What a user sets, on the CPU, without reports."""
    common = {
        "output_dir": os.path.join(tempfile.gettempdir(), "trainer_project"),
        "per_device_train_batch_size": 6,
        "num_train_epochs": 3,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "warmup_steps": 2,
        "report_to": [],
        "use_cpu": True,
    }
    return TrainingArguments(**common, **settings)


def language_model():
    """A decoder of two layers with its Trainer."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    data = Counting()
    return Trainer(LlamaForCausalLM(config), arguments(), train_dataset=data, eval_dataset=data)


def smoothed_classifier():
    """A classifier of rows by their first token, with label smoothing."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    rows = Counting().rows
    data = [{"input_ids": row, "labels": int(row[0]) % 4} for row in rows]
    return Trainer(
        BertForSequenceClassification(config),
        arguments(label_smoothing_factor=0.1),
        train_dataset=data,
    )


def model_and_loader():
    """The model with a plain DataLoader, for those who have their own loop."""
    trainer = language_model()
    return trainer.model, torch.utils.data.DataLoader(trainer.train_dataset, batch_size=6)


if __name__ == "__main__":
    print(language_model().train())

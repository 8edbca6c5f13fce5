"""Training loops as text, sound ones and one still to be moved; nothing here is run."""

CLASS = """
import os
import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.layer(self.drop(x))

    def penalty(self):
        return sum(p.square().sum() for p in self.parameters())

    def features(self, x):
        return self.layer(x)


class Trainer:
    def __init__(self, lr):
        self.fabric = Fabric()
        if "LT_CLI_USED" not in os.environ:
            self.fabric.launch()
        self.fabric.seed_everything(1)
        self.model = self.fabric.setup_module(Net())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.optimizer = self.fabric.setup_optimizers(self.optimizer)
        torch.manual_seed(2 + self.fabric.global_rank)
        data = TensorDataset(torch.randn(32, 4), torch.zeros(32, dtype=torch.long))
        self.loader = self.fabric.setup_dataloaders(DataLoader(data, 4, shuffle=True))

    def fit(self, epochs):
        self.model.train()
        for epoch in range(epochs):
            for number, (x, y) in enumerate(self.loader):
                loss = self.step(x, y)
                if number % 10 == 0:
                    self.fabric.print(epoch, loss.item())
            self.validate()
            self.fabric.save("model.ckpt", {"model": self.model, "epoch": epoch})

    def step(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y) + 0.1 * self.model.penalty()
        self.fabric.backward(loss)
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        correct, seen = torch.zeros((), device=self.fabric.device), 0
        for x, y in self.loader:
            correct += (self.model(x).argmax(-1) == y).sum()
            seen += len(y)
        correct = self.fabric.all_reduce(correct, reduce_op="sum")
        seen = self.fabric.all_reduce(torch.tensor(seen), reduce_op="sum")
        if self.fabric.is_global_zero:
            print("accuracy", float(correct / seen))
        self.model.train()


if __name__ == "__main__":
    Trainer(1e-3).fit(2)
"""

FUNCTIONAL = """
import argparse
import os
import torch
import lightning as L
import torch.nn.functional as F
from torch.utils.data import DataLoader
from my_data import make_dataset
from my_models import build


def make_loaders(batch_size):
    train = DataLoader(make_dataset("train"), batch_size=batch_size, shuffle=True)
    return train, DataLoader(make_dataset("test"), batch_size=batch_size)


def compute_loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def train_epoch(fabric, model, loader, optimizer, scheduler, every):
    model.train()
    optimizer.zero_grad(set_to_none=True)
    for i, batch in enumerate(loader):
        is_accumulating = (i + 1) % every != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = compute_loss(model, batch)
            fabric.backward(loss / every)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, clip_val=0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def test(fabric, model, loader):
    model.eval()
    total_loss = torch.zeros((), device=fabric.device)
    total = torch.zeros((), device=fabric.device)
    for x, y in loader:
        total_loss += F.cross_entropy(model(x), y, reduction="sum")
        total += y.numel()
    total_loss = fabric.all_reduce(total_loss, reduce_op="sum")
    return total_loss / fabric.all_reduce(total, reduce_op="sum")


def save_weights(fabric, model):
    torch.save(model.state_dict(), "weights.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    print("arguments", args)
    fabric = L.Fabric(precision="bf16-mixed")
    if "LT_CLI_USED" not in os.environ:
        fabric.launch()
    L.seed_everything(7)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    model, optimizer = fabric.setup(model, optimizer)
    train_loader, test_loader = make_loaders(args.batch_size)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
    for epoch in range(3):
        train_epoch(fabric, model, train_loader, optimizer, scheduler, 4)
        loss = test(fabric, model, test_loader)
        fabric.print(f"epoch {epoch} loss {loss:.3f}")
    if fabric.global_rank == 0:
        save_weights(fabric, model)


if __name__ == "__main__":
    main()
"""

GAN = """
import os
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from my_data import Faces


def main():
    fabric = Fabric()
    if "LT_CLI_USED" not in os.environ:
        fabric.launch()
    fabric.seed_everything(3)
    critic, generator = nn.Linear(8, 1), nn.Linear(4, 8)
    opt_c = torch.optim.Adam(critic.parameters())
    opt_g = torch.optim.Adam(generator.parameters())
    critic, opt_c = fabric.setup(critic, opt_c)
    generator, opt_g = fabric.setup(generator, opt_g)
    torch.manual_seed(4 + fabric.global_rank)
    faces = Faces()
    sampler = DistributedSampler(faces, fabric.world_size, fabric.global_rank)
    loader = DataLoader(faces, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, real in enumerate(loader):
            real = real.to(fabric.device)
            fake = generator(torch.randn(16, 4, device=real.device))
            opt_c.zero_grad()
            fabric.backward(critic(fake.detach()).mean() - critic(real).mean())
            opt_c.step()
            if i % 5 == 0:
                opt_g.zero_grad()
                fabric.backward(-critic(generator(torch.randn(16, 4, device=fabric.device))).mean())
                opt_g.step()
            with torch.autocast("cpu", enabled=False):
                score = fabric.all_reduce(fake.mean())
    if not fabric.is_global_zero:
        return
    torch.save(generator.state_dict(), "generator.pt")


main()
"""

MNIST = """
import argparse
import os
from os import path
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torchvision.transforms as T
from lightning.fabric import Fabric, seed_everything
from torch.optim.lr_scheduler import StepLR
from torchmetrics.classification import Accuracy
from torchvision.datasets import MNIST

DATASETS_PATH = path.join(path.dirname(__file__), "Datasets")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.fc1 = nn.Linear(9216, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        return F.log_softmax(self.fc1(x), dim=1)


def run(hparams):
    fabric = Fabric()
    if "LT_CLI_USED" not in os.environ:
        fabric.launch()
    seed_everything(hparams.seed)
    transform = T.Compose([T.ToTensor(), T.Normalize((0.1307,), (0.3081,))])
    with fabric.rank_zero_first(local=False):
        common = {"download": fabric.is_global_zero, "transform": transform}
        train_dataset = MNIST(DATASETS_PATH, train=True, **common)
        test_dataset = MNIST(DATASETS_PATH, train=False, **common)
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=hparams.batch_size, shuffle=True
    )
    test_loader = torch.utils.data.DataLoader(test_dataset, batch_size=hparams.batch_size)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=hparams.lr)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=hparams.gamma)
    test_acc = Accuracy(task="multiclass", num_classes=10).to(fabric.device)
    for epoch in range(1, hparams.epochs + 1):
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            fabric.backward(loss)
            optimizer.step()
            if (batch_idx == 0) or ((batch_idx + 1) % hparams.log_interval == 0):
                fabric.print("Train Epoch: {}".format(epoch), loss.item())
                if hparams.dry_run:
                    break
        scheduler.step()
        model.eval()
        test_loss = 0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                test_acc(output, target)
                if hparams.dry_run:
                    break
        test_loss = fabric.all_reduce(torch.tensor(test_loss), reduce_op="sum")
        test_loss = test_loss / len(test_loader.dataset)
        fabric.print(f"Average loss: {test_loss:.4f}, Accuracy: ({100 * test_acc.compute():.0f}%)")
        test_acc.reset()
        if hparams.dry_run:
            break
    if hparams.save_model:
        fabric.save("mnist_cnn.pt", model.state_dict())


def main():
    parser = argparse.ArgumentParser(description="Fabric MNIST Example")
    parser.add_argument("--batch-size", type=int, default=64)
    hparams = parser.parse_args()
    run(hparams)


if __name__ == "__main__":
    main()
"""

PRETRAIN = """
import math, time, os
from pathlib import Path
from dataclasses import dataclass, asdict
import lightning as L
import torch
from lightning.fabric.strategies import FSDPStrategy
from torch.utils.data import DataLoader, IterableDataset
from model import GPT, Config, Block

@dataclass
class TrainArgs:
    lr: float = 3e-4
    max_iters: int = 100
    micro_batch_size: int = 4
    global_batch_size: int = 128
    seed: int = 1337

class Packed(IterableDataset):
    def __init__(self, path, block_size, rank, world):
        self.path, self.block_size, self.rank, self.world = path, block_size, rank, world
    def __iter__(self):
        ...

def main(args=TrainArgs()):
    precision = os.environ.get("PRECISION", "bf16-mixed")
    strategy = FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="full")
    fabric = L.Fabric(strategy=strategy, precision=precision)
    if "LT_CLI_USED" not in os.environ:
        fabric.launch(setup_and_train, args)
    else:
        setup_and_train(fabric, args)

def setup_and_train(fabric, args):
    fabric.seed_everything(args.seed)
    config = Config.from_name("pythia")
    with fabric.init_module(empty_init=False):
        model = GPT(config)
    model.apply(model._init_weights)
    model = torch.compile(model)
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    optimizer = fabric.setup_optimizers(optimizer)
    packed = Packed("x", 128, fabric.global_rank, fabric.world_size)
    loader = DataLoader(packed, batch_size=args.micro_batch_size, pin_memory=True)
    loader = fabric.setup_dataloaders(loader)
    state = {"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0}
    train(fabric, state, loader, args)
    if fabric.global_rank == 0:
        print(f"Memory used: {torch.cuda.max_memory_allocated() / 1e9:.02f} GB")

def train(fabric, state, loader, args):
    model = state["model"]
    optimizer = state["optimizer"]
    accumulate = args.global_batch_size // args.micro_batch_size // fabric.world_size
    it = iter(loader)
    t0 = time.perf_counter()
    while state["iter_num"] < args.max_iters:
        state["iter_num"] += 1
        lr = get_lr(args, state["iter_num"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        data = next(it)
        inputs, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        is_accumulating = state["iter_num"] % accumulate != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            logits = model(inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            fabric.backward(loss / accumulate)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            state["step_count"] += 1
        if state["iter_num"] % 10 == 0:
            fabric.log_dict({"loss": loss.item()}, step=state["iter_num"])
            seconds = time.perf_counter() - t0
            fabric.print(f"iter {state['iter_num']}: {loss.item():.4f}, time {seconds:.2f}")
        if state["iter_num"] % 100 == 0:
            val = validate(fabric, model, loader)
            fabric.barrier()
            fabric.save(Path("out") / f"iter-{state['iter_num']:06d}.pth", state)

@torch.no_grad()
def validate(fabric, model, loader, n=10):
    model.eval()
    losses = torch.zeros(n, device=fabric.device)
    for k, data in enumerate(loader):
        if k >= n:
            break
        logits = model(data[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
        losses[k] = loss
    out = losses.mean()
    model.train()
    return fabric.all_reduce(out, reduce_op="mean")

def get_lr(args, it):
    return args.lr * min(1, it / 10)

if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
"""

FINETUNE = """
import os
import torch
from lightning_fabric import Fabric
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler
from datasets import load_dataset

def main():
    fabric = Fabric(accelerator="auto", devices="auto", precision="bf16-mixed")
    if os.environ.get("LT_CLI_USED") is None:
        fabric.launch()
    fabric.seed_everything(42)
    tokenizer = AutoTokenizer.from_pretrained("gpt2")
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    model.gradient_checkpointing_enable()
    optimizer = AdamW(model.parameters(), lr=5e-5)
    scheduler = get_scheduler("linear", optimizer, 10, 100)
    model, optimizer = fabric.setup(model, optimizer)
    def collate(rows):
        return tokenizer([r["text"] for r in rows], return_tensors="pt", padding=True)
    dataset = load_dataset("wikitext", "wikitext-2-raw-v1")
    dl = DataLoader(dataset["train"], batch_size=4, shuffle=True, collate_fn=collate)
    dl = fabric.setup_dataloaders(dl)
    step = 0
    for epoch in range(3):
        for batch in dl:
            step += 1
            out = model(**batch, labels=batch["input_ids"])
            loss = out.loss
            with torch.no_grad():
                token_count = batch["attention_mask"].sum()
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 50 == 0:
                tokens = fabric.all_reduce(token_count, reduce_op="sum")
                mean_loss = fabric.all_reduce(loss.detach(), reduce_op="mean")
                if fabric.is_global_zero:
                    print(epoch, step, mean_loss.item(), tokens.item())
    fabric.barrier()
    if fabric.is_global_zero:
        model.module.save_pretrained("out")
        tokenizer.save_pretrained("out")

if __name__ == "__main__":
    main()
"""

INHERITED = """
import os
import torch
import torch.nn as nn
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, random_split, TensorDataset

class MLP(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 1))
    def forward(self, x):
        return self.net(x)
    def num_params(self):
        return sum(p.numel() for p in self.parameters())
    @torch.no_grad()
    def predict(self, x):
        return self(x)

class Base:
    def __init__(self, cfg):
        self.cfg = cfg
        self.fabric = self._make_fabric()
        self.model, self.optimizer = self._build()
    def _make_fabric(self):
        fabric = Fabric(accelerator=self.cfg["accelerator"], loggers=None)
        if "LT_CLI_USED" not in os.environ:
            fabric.launch()
        fabric.seed_everything(self.cfg["seed"])
        return fabric
    def _build(self):
        model = MLP(self.cfg["d"])
        opt = torch.optim.Adam(model.parameters(), lr=1e-3)
        return self.fabric.setup(model, opt)

class Runner(Base):
    def loaders(self):
        ds = TensorDataset(torch.randn(100, 8), torch.randn(100, 1))
        tr, va = random_split(ds, [80, 20])
        dls = self.fabric.setup_dataloaders(DataLoader(tr, 8, shuffle=True), DataLoader(va, 8))
        return dls
    def run(self):
        self.model.mark_forward_method("predict")
        train_dl, val_dl = self.loaders()
        for epoch in range(self.cfg["epochs"]):
            self.train_epoch(train_dl, epoch)
            score = self.evaluate(val_dl)
            self.fabric.print("val", score, "params", self.model.num_params())
            self.checkpoint(epoch)
    def train_epoch(self, dl, epoch):
        self.model.train()
        for i, (x, y) in enumerate(dl):
            def closure():
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(x), y)
                self.fabric.backward(loss)
                return loss
            self.optimizer.step(closure)
    def evaluate(self, dl):
        self.model.eval()
        se, n = 0.0, 0
        for x, y in dl:
            se += (self.model.predict(x) - y).square().sum().item()
            n += x.shape[0]
        se, n = self.fabric.all_reduce((torch.tensor(se), torch.tensor(n)), reduce_op="sum")
        return (se / n).item()
    def checkpoint(self, epoch):
        self.fabric.save(f"ck-{epoch}.pt", {"model": self.model, "optimizer": self.optimizer})

Runner({"accelerator": "auto", "seed": 1, "d": 8, "epochs": 2}).run()
"""

BY_HAND = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import models, datasets

def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.manual_seed(0)
    model = models.resnet18().to(local)
    model = DDP(model, device_ids=[local])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    ds = datasets.FakeData()
    sampler = DistributedSampler(ds)
    dl = DataLoader(ds, sampler=sampler, batch_size=32)
    scaler = torch.amp.GradScaler()
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in dl:
            x, y = x.to(local), y.to(local)
            with torch.autocast("cuda"):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        if rank == 0:
            torch.save(model.module.state_dict(), "m.pt")
main()
"""

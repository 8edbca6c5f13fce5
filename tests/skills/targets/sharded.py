"""Models under fully_shard, right and wrong in one way each; ranks are started by the check."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, VOCABULARY = 16, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parts(model, optimizer=None):
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(0, VOCABULARY, (2, 9), generator=generator) for _ in range(2)]
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, batches, loss_fn, optimizer


def loss_fn(model, batch):
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def mesh(replicas=1):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    if replicas == 1:
        return init_device_mesh("cpu", (world,))
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=names)


def build(replicas=1, **options):
    own, model = mesh(replicas), Model()
    for block in model.blocks:
        fully_shard(block, mesh=own, **options)
    fully_shard(model, mesh=own, **options)
    for module in (*model.blocks, model):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(dist.get_world_size())
    return parts(model)


def replicated():
    return build(replicas=2)


def reduces_in_bf16():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return build(mp_policy=policy)


def reduces_in_float32():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return build(mp_policy=policy)


def without_root():
    own, model = mesh(), Model()
    for module in (model.embedding, *model.blocks, model.head):
        fully_shard(module, mesh=own)
    return parts(model)


def blocks_alone():
    own, model = mesh(), Model()
    for block in model.blocks:
        fully_shard(block, mesh=own)
    return parts(model)


def one_group():
    own, model = mesh(), Model()
    fully_shard(model, mesh=own)
    return parts(model)


def every_layer():
    own, model = mesh(), Model()
    for block in model.blocks:
        for layer in (block.norm, block.up, block.down, block):
            fully_shard(layer, mesh=own)
    fully_shard(model, mesh=own)
    return parts(model)


def optimizer_first():
    own, model = mesh(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for block in model.blocks:
        fully_shard(block, mesh=own)
    fully_shard(model, mesh=own)
    return parts(model, optimizer)


def nothing_sharded():
    return parts(Model())


def no_tuple():
    return Model()


def sound_clip(model, batches, loss_fn, optimizer):
    loss_fn(model, batches[0]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def no_clip(model, batches, loss_fn, optimizer):
    loss_fn(model, batches[0]).backward()
    optimizer.step()


def clip_by(norm, model):
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, 1.0 / norm))


def squares(model):
    return sum(p.grad.to_local().square().sum() for p in model.parameters())


def clips_own_part(model, batches, loss_fn, optimizer):
    loss_fn(model, batches[0]).backward()
    clip_by(float(squares(model).sqrt()), model)
    optimizer.step()


def counts_replicas(model, batches, loss_fn, optimizer):
    loss_fn(model, batches[0]).backward()
    total = squares(model)
    dist.all_reduce(total)
    clip_by(float(total.sqrt()), model)
    optimizer.step()


def never_steps(model, batches, loss_fn, optimizer):
    loss_fn(model, batches[0]).backward()

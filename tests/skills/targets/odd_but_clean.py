"""Clean code that does what faults do, on purpose: pairs, stop-gradients, minus infinity, views."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS, FEATURES, WIDTH = 9, 5, 8


class Net(nn.Module):
    """Two layers; `run` is the forward."""

    def __init__(self, run, **more):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3)
        self.run = run
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, *inputs):
        return self.run(self, *inputs)


def rows():
    return torch.randn(ROWS, FEATURES)


def kinds():
    return torch.randint(3, (ROWS,))


def classes(model, batch):
    return F.cross_entropy(model(*batch[:-1]), batch[-1])


def pairs_of_views():
    def run(net, x, y):
        return F.normalize(net.last(net.first(x)), dim=-1) @ F.normalize(net.other(y), dim=-1).T

    def loss(model, batch):
        return F.cross_entropy(model(*batch), torch.arange(len(batch[0])))

    return Net(run, other=nn.Linear(FEATURES, 3)), [(rows(), rows())], loss


def ranked():
    def loss(model, batch):
        scores = model(batch[0])[:, 0]
        wins = (batch[1][:, None] > batch[1]).float()
        return F.softplus(-(scores[:, None] - scores) * wins).mean()

    return Net(lambda net, x: net.last(net.first(x))), [(rows(), torch.randn(ROWS))], loss


def graph():
    def run(net, x, edges):
        hidden = net.first(x)
        return net.last(torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]]))

    return Net(run), [(rows(), torch.randint(ROWS, (2, 30)), kinds())], classes


def stop_gradient():
    def run(net, x, y):
        return F.cosine_similarity(net.last(net.first(x)), net.last(net.first(y)).detach(), dim=-1)

    return Net(run), [(rows(), rows())], lambda model, batch: -model(*batch).mean()


def codebook():
    def run(net, x):
        z = net.first(x)
        near = net.codes(torch.cdist(z, net.codes.weight).argmin(-1))
        net.pull = F.mse_loss(near, z.detach()) + F.mse_loss(z, near.detach())
        return net.last(z + (near - z).detach())

    def loss(model, batch):
        return classes(model, batch) + model.pull

    return Net(run, codes=nn.Embedding(16, WIDTH)), [(rows(), kinds())], loss


def critic():
    """The optimizer holds the judge alone; what makes its input is trained by another step."""

    def run(net, x):
        return net.last(net.first(x).detach())

    model = Net(run)
    return model, [(rows(), kinds())], classes, torch.optim.Adam(model.last.parameters())


def time_first():
    def run(net, ids):
        return net.head(net.cells(net.table(ids))[0])

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    model = Net(run, table=nn.Embedding(30, 8), cells=nn.LSTM(8, 8), head=nn.Linear(8, 30))
    model.first = model.last = nn.Identity()
    return model, [(torch.randint(30, (7, 6)), torch.randint(30, (7, 6)))], loss


def windows():
    def run(net, x):
        count = len(x)
        tall = net.first(x).view(count, 2, 4, 2, 4, WIDTH).permute(0, 1, 3, 2, 4, 5)
        seen = tall.reshape(-1, 16, WIDTH)
        seen = net.look(seen, seen, seen)[0].view(count, 2, 2, 4, 4, WIDTH)
        wide = seen.permute(0, 1, 3, 2, 4, 5).reshape(count, 8, 8, WIDTH)
        return net.last(wide.mean((1, 2)))

    look = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    return Net(run, look=look), [(torch.randn(6, 8, 8, FEATURES), torch.randint(3, (6,)))], classes


def policy():
    def loss(model, batch):
        logits, values = model(batch[0])
        gain = (batch[2] - values).detach()
        chosen = torch.distributions.Categorical(logits=logits).log_prob(batch[1])
        return F.mse_loss(values, batch[2]) - (chosen * gain).mean()

    def run(net, x):
        hidden = net.first(x)
        return net.last(hidden), net.value(hidden).squeeze(-1)

    batch = (rows(), kinds(), torch.randn(ROWS))
    return Net(run, value=nn.Linear(WIDTH, 1)), [batch], loss


def recomputed():
    def run(net, x):
        kept = x.clone().requires_grad_()
        return net.last(checkpoint(lambda t: net.first(t).relu(), kept, use_reentrant=True))

    return Net(run), [(rows(), kinds())], classes


def rows_left_out():
    def run(net, x):
        return torch.where(x[..., :1] > 0, net.last(net.first(x)), float("-inf")).logsumexp(1)

    return Net(run), [(torch.randn(ROWS, 7, FEATURES), kinds())], classes


def logged():
    def run(net, x):
        hidden = net.first(x)
        net.spread, net.all = float(hidden.detach().std()), hidden.detach().cpu().numpy().mean()
        return net.last(hidden)

    return Net(run), [(rows(), kinds())], classes

"""What the kit sees of a loss: which scores met which labels, how they were made, and by whom."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from skills.targets import processes
from torch import nn

from kit.batch_tree import batch_size, leaves, replaced
from kit.fix import caller_line, fix_at, fix_in, source_line
from kit.observation import observe, roles
from kit.target import Target

assert processes.KIT_HOME.is_dir()  # its import puts the kit on the path
HERE = __file__


class Head(nn.Module):
    """One linear layer, and dropout that no role may be confused by."""

    def __init__(self, classes=5, after=None):
        super().__init__()
        self.layer, self.drop, self.after = nn.Linear(4, classes), nn.Dropout(0.5), after

    def forward(self, x):
        scores = self.layer(self.drop(x))
        return scores if self.after is None else self.after(scores)


def target_of(model, loss_fn):
    return Target(model, [], loss_fn, None, torch.device("cpu"), "", "foreign")


def batch(rows=6, classes=5):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator)
    return {"x": x, "y": torch.randint(classes, (rows,), generator=generator)}


def main_of(loss_fn, after=None, given=None):
    torch.manual_seed(0)
    found = observe(target_of(Head(after=after), loss_fn), given or batch())
    assert found.main is not None
    return found, found.main


def log_softmax_gather(m, b):
    return -m(b["x"]).log_softmax(-1).gather(1, b["y"][:, None]).mean()


def log_softmax_range(m, b):
    return -torch.log_softmax(m(b["x"]), -1)[range(6), b["y"]].mean()


def log_softmax_index(m, b):
    return -torch.log_softmax(m(b["x"]), -1)[torch.arange(6), b["y"]].mean()


def nll(m, b):
    return F.nll_loss(F.log_softmax(m(b["x"]), dim=1), b["y"])


def cross_entropy(m, b):
    return F.cross_entropy(m(b["x"]), b["y"])


def module(m, b):
    return nn.CrossEntropyLoss()(m(b["x"]).float().view(-1, 5), b["y"].view(-1))


def log_of_softmax(m, b):
    return -torch.log(F.softmax(m(b["x"]), -1) + 1e-9).gather(-1, b["y"][:, None]).mean()


@pytest.mark.parametrize(
    "loss_fn",
    [
        *(cross_entropy, module, nll, log_softmax_gather, log_softmax_index, log_softmax_range),
        log_of_softmax,
    ],
)
@pytest.mark.parametrize("after", [None, nn.Softmax(-1), nn.LogSoftmax(-1)])
def test_classes_are_seen_however_they_are_written(loss_fn, after):
    found, call = main_of(loss_fn, after)
    assert call.kind == "classes" and call.scores.shape == (6, 5)
    assert torch.equal(call.labels, batch()["y"])
    assert call.share == pytest.approx(float(found.loss.detach()), rel=1e-5)
    again = F.cross_entropy(call.scores, call.labels)
    assert float(again) == pytest.approx(float(found.loss), rel=1e-4)
    assert call.is_double_softmax == isinstance(after, nn.Softmax)
    assert call.where[0] == HERE
    lines, start = inspect.getsourcelines(loss_fn)
    assert start <= call.where[1] < start + len(lines)


def test_a_softmax_by_hand_is_seen_by_its_rows():
    def by_hand(scores):
        weights = scores.exp()
        return weights / weights.sum(-1, keepdim=True)

    _, call = main_of(cross_entropy, by_hand)
    assert call.origin == "raw" and call.on_simplex and call.is_double_softmax


def test_raw_scores_into_nll_are_no_log_probabilities():
    _, call = main_of(lambda m, b: F.nll_loss(m(b["x"]), b["y"]))
    assert not call.options["log_probabilities"] and not call.is_double_softmax


def test_ignored_rows_and_padded_classes_count_nowhere():
    given = batch()
    given["y"][2] = -100

    def padded(m, b):
        scores = F.pad(m(b["x"]), (0, 3), value=-math.inf)
        return F.cross_entropy(scores, b["y"], reduction="sum") / 5

    found, call = main_of(padded, given=given)
    assert call.scores.shape == (5, 5) and len(call.labels) == 5
    assert call.share == pytest.approx(float(found.loss.detach()), rel=1e-5)


def test_classes_in_dim_1_come_last():
    scores = torch.randn(2, 3, 4, 4, requires_grad=True)
    labels = torch.randint(3, (2, 4, 4))
    found = observe(target_of(Head(), lambda m, b: F.cross_entropy(scores, labels)), [])
    assert found.main.scores.shape == (32, 3)
    again = F.cross_entropy(found.main.scores, found.main.labels)
    assert torch.allclose(again, found.loss)


def test_the_largest_share_is_the_main_call():
    def two(m, b):
        scores = m(b["x"])
        return F.cross_entropy(scores, b["y"]) + 1e-3 * F.mse_loss(scores, torch.zeros(6, 5))

    found, call = main_of(two)
    assert call.function == "cross_entropy" and len(found.calls) == 2
    assert sum(c.share for c in found.calls) == pytest.approx(float(found.loss), rel=1e-5)


@pytest.mark.parametrize("function", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_values(function):
    given = {"x": torch.randn(6, 4), "y": torch.randn(6, 5)}
    found, call = main_of(lambda m, b: function(m(b["x"]), b["y"]), given=given)
    assert call.kind == "values" and call.function == function.__name__
    assert call.share == pytest.approx(float(found.loss.detach()), rel=1e-5)


def test_a_difference_to_the_batch_is_a_regression():
    given = {"x": torch.randn(6, 4), "y": torch.randn(6, 5)}
    _, call = main_of(lambda m, b: ((b["y"] - m(b["x"])) ** 2).mean(), given=given)
    assert (call.kind, call.function) == ("values", "sub")
    assert call.labels is given["y"]


def test_a_scaled_label_is_a_label_and_a_missing_one_no_input():
    given = {"x": torch.randn(6, 4), "y": torch.arange(30).view(6, 5)}
    _, call = main_of(lambda m, b: ((m(b["x"]) - b["y"].float() / 10) ** 2).mean(), given=given)
    assert (call.kind, call.function) == ("values", "sub")
    assert call.labels.max() == pytest.approx(2.9)

    def masked(m, b):
        error = (m(b["x"]) - b["y"]) ** 2
        return error[~b["y"].isnan()].mean()

    given = {"x": torch.randn(6, 4), "y": torch.randn(6, 5)}
    given["y"][0, 0] = math.nan
    assert roles(target_of(Head(), masked), given) == {"x": "input", "y": "label"}


def test_binary_and_sigmoid():
    given = {"x": torch.randn(6, 4), "y": torch.rand(6, 5).round()}
    loss = F.binary_cross_entropy_with_logits
    _, call = main_of(lambda m, b: loss(m(b["x"]), b["y"]), nn.Sigmoid(), given)
    assert (call.kind, call.origin) == ("binary", "sigmoid")
    _, call = main_of(lambda m, b: loss(m(b["x"]), b["y"]), None, given)
    assert call.origin == "raw"


def test_a_loss_of_each_example_under_vmap_is_left_alone():
    def loss_fn(m, b):
        given = dict(m.named_parameters())

        def one(x, y):
            return F.cross_entropy(torch.func.functional_call(m, given, (x[None],)), y[None])

        return torch.vmap(one)(b["x"], b["y"]).mean()

    model = Head().eval()
    found = observe(target_of(model, loss_fn), batch())
    assert found.main is None
    torch.testing.assert_close(found.loss, cross_entropy(model, batch()))
    assert roles(target_of(model, loss_fn), batch()) == {"x": "input", "y": "label"}


def test_a_raising_loss_is_raised_or_kept():
    given = batch()
    given["y"][0] = 99
    target = target_of(Head(), cross_entropy)
    with pytest.raises(IndexError):
        observe(target, given)
    found = observe(target, given, catch=True)
    assert isinstance(found.error, IndexError) and found.loss is None
    assert found.calls[0].labels[0] == 99 and found.main is None


def test_roles():
    given = batch() | {"mask": torch.ones(6), "unused": torch.arange(6)}

    def loss(m, b):
        return F.cross_entropy(m(b["x"] * b["mask"][:, None]), b["y"])

    model = Head()
    found = roles(target_of(model, loss), given)
    assert found == {"x": "input", "y": "label", "mask": "unused", "unused": "unused"}
    assert model.training and model.drop.training

    class Next(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 9)

        def forward(self, ids):
            return self.table(ids)

    ids = torch.randint(9, (3, 7))

    def shifted(m, b):
        return F.cross_entropy(m(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten())

    assert roles(target_of(Next(), shifted), ids) == {"batch": "both"}


def test_roles_of_a_model_that_is_called_twice():
    def contrast(m, b):
        apart = (m(b[0]) - m(b[1])).square().sum(-1)
        return (b[2] * apart + (1 - b[2]) * (1 - apart).clamp(min=0)).mean()

    given = [torch.randn(6, 4), torch.randn(6, 4), torch.arange(6) % 2]
    found = roles(target_of(Head(), contrast), given)
    assert found == {"0": "input", "1": "input", "2": "label"}


Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Item:
    x: torch.Tensor
    name: str = "kept"


def test_batches_as_trees():
    one, two = torch.zeros(3, 2), torch.ones(3)
    nested = {"a": Pair(one, [two, "text"]), "b": Item(one)}
    assert [path for path, _ in leaves(nested)] == ["a.x", "a.y.0", "b.x"]
    changed = replaced(nested, {"a.y.0": two + 1, "b.x": one - 1})
    assert changed["a"].x is one and changed["a"].y[1] == "text"
    assert changed["a"].y[0].sum() == 6 and changed["b"].x.sum() == -6
    assert nested["a"].y[0] is two and nested["b"].x is one
    assert changed["b"].name == "kept" and batch_size(nested) == 3
    assert replaced(one, {"batch": two}) is two and batch_size([]) == 1


def test_fix_names_a_line():
    place = fix_in(cross_entropy, "change it", r"F\.cross_entropy")
    assert place["file"] == HERE and "F.cross_entropy" in source_line(place)
    assert fix_in(Head(), "forward", "self.drop")["line"] > fix_in(Head, "class")["line"]
    assert fix_in(cross_entropy, "x", "no such line") is None and fix_in(3, "x") is None
    assert fix_at(HERE, 3, "y") == {"file": HERE, "line": 3, "text": "y"}
    assert caller_line()[0] == HERE

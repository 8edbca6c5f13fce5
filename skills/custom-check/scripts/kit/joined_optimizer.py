"""Several optimizers of one model, as one torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class JoinedOptimizer(Optimizer):
    """Steps its members in order; their groups and their state are its own, not copies.

    No parameter may be in two of them, since there is one state for each.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = list(members)
        super().__init__([torch.empty(0)], {})  # replaced by the members' groups
        self._share({p: kept for member in members for p, kept in member.state.items()})

    def _share(self, state: Any) -> None:
        self.param_groups = [group for member in self.members for group in member.param_groups]
        self.state.clear()
        self.state.update(state)
        for member in self.members:
            member.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every member; a closure is called by the first."""
        first, *others = self.members
        loss = first.step(closure)
        for member in others:
            member.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Hand loaded groups and state to the members, which load_state_dict does not know."""
        members = state.get("members", self.members)
        groups = list(state["param_groups"])
        kept = dict(state["state"])
        for member in members:
            count = len(member.param_groups)
            member.__setstate__({"state": {}, "param_groups": groups[:count]})
            groups = groups[count:]
        super().__setstate__(state)
        self._share(kept)

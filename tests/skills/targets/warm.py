"""What the server of `processes` does once, so that its forks need not: imports, first uses.

Nothing of the bundle is imported, and nothing here starts a thread.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import io
import os

MODULES = (
    "torch.utils.flop_counter",
    "torch._dynamo",  # what torch.optim imports when the first optimizer is made
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "scipy.stats",
    "hydra",
    "lightning_fabric",
    "tokenizers",
    "pytest",  # the __main__ that multiprocessing imports anew in a child
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("deepseek_v3", "gpt_oss", "llama", "mixtral", "qwen3", "qwen3_moe")
    ),
)


def import_all() -> None:
    """Import MODULES; what is not installed is left to the fork that needs it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue


def draw_once() -> None:
    """Read the fonts and build the grammar of matplotlib's labels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.loglog([1, 10, 100], [1, 10, 100], label="x")
    axes.legend()
    figure.tight_layout()
    figure.savefig(io.BytesIO(), format="png")


def find_plugins() -> None:
    """Let hydra look for its plugins, and inspect for the files of all modules."""
    from hydra.core.plugins import Plugins

    Plugins.instance()
    inspect.getmodule(inspect.currentframe())


import_all()
draw_once()
find_plugins()
gc.collect()
gc.freeze()  # a fork's collector leaves all this alone

"""Named kinds of nodes with the figures of their data sheets; flags change single figures."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from kit.errors import UsageError


@dataclass(frozen=True)
class Machine:
    """What one GPU has, and what joins it to the others; per direction, dense, without sparsity."""

    memory_gb: float | None = None
    """Memory of a GPU in GiB."""
    peak_tflops: float | None = None
    """Dense bf16 peak."""
    memory_gbps: float | None = None
    """Bandwidth of the GPU's memory in GB/s."""
    inside_gbps: float | None = None
    """What a GPU sends to others of its node, GB/s."""
    between_gbps: float | None = None
    """What a GPU sends to another node, GB/s."""
    gpus_per_node: int | None = None
    """GPUs of a node."""
    source: str = "flags"
    """Where the figures are from."""

    @property
    def missing(self) -> list[str]:
        """Flags of the figures that an estimate of time lacks."""
        return [flag(f.name) for f in fields(self) if getattr(self, f.name) is None]


NODES = {
    "h100": Machine(80, 989, 3350, 450, 50, 8, "NVIDIA H100 SXM and DGX H100 data sheets"),
    "h200": Machine(141, 989, 4800, 450, 50, 8, "NVIDIA H200 SXM and DGX H200 data sheets"),
    "a100": Machine(80, 312, 2039, 300, 25, 8, "NVIDIA A100 SXM 80GB and DGX A100 data sheets"),
    "l40s": Machine(
        48, 362, 864, 32, 12.5, 8, "NVIDIA L40S data sheet (PCIe 4.0 x16); 100 Gb/s a GPU assumed"
    ),
    "laptop": Machine(4, 0.2, 20, 2, 0.1, 8, "assumed: a process on one core, gloo, 1 Gb/s"),
}


def flag(name: str) -> str:
    """Write the name of a field as its flag."""
    return "--" + name.replace("_", "-")


def add_flags(parser: Any) -> None:
    """Add --node and a flag for each figure."""
    parser.add_argument(
        "--node", choices=sorted(NODES), help="kind of node; each figure below may change it"
    )
    numbers = [f.name for f in fields(Machine) if f.name != "source"]
    for name in numbers:
        kind = int if name == "gpus_per_node" else float
        parser.add_argument(flag(name), type=kind, metavar="N", help=FIGURES[name])


FIGURES = {
    "memory_gb": "memory of a GPU in GiB",
    "peak_tflops": "dense bf16 peak of a GPU",
    "memory_gbps": "bandwidth of a GPU's memory, GB/s",
    "inside_gbps": "GB/s that a GPU sends inside its node",
    "between_gbps": "GB/s that a GPU sends to another node",
    "gpus_per_node": "GPUs of a node",
}


def machine_of(args: Any) -> Machine:
    """Return the node that the flags describe."""
    given = {name: getattr(args, name) for name in FIGURES if getattr(args, name) is not None}
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise UsageError(f"{flag(name)} {value}", "it must be a number above 0")
    found = NODES.get(args.node, Machine())
    source = f"{found.source}, changed by flags" if args.node and given else found.source
    return replace(found, **given, source=source)

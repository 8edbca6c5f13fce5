"""Two nodes on one machine: network namespaces with a virtual cable, and torchrun in each."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from projects import SOURCE, environment


class NoNodes(Exception):
    """This machine does not allow two network namespaces."""


class Nodes:
    """Namespaces that live as long as this object, and the processes that were started in them.

    Without root the namespaces belong to a user namespace, where the kernel allows that.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.tag, self.starts = folder, uuid.uuid4().hex, 0
        self.holders: list[subprocess.Popen] = []
        self.agents: list[subprocess.Popen] = []
        if missing := [name for name in ("ip", "unshare", "nsenter") if not shutil.which(name)]:
            raise NoNodes(f"no {', '.join(missing)} here")
        owner = [] if os.geteuid() == 0 else ["-Ur"]
        self.user = [] if os.geteuid() == 0 else ["-U", "--preserve-credentials"]
        try:
            self._hold("unshare", *owner, "-n")
            into = ["nsenter", "-t", str(self.holders[0].pid), *self.user] if owner else []
            self._hold(*into, "unshare", "-n")
            there = str(self.holders[1].pid)
            names = ["name", "ct0", "type", "veth", "peer", "name", "ct1", "netns", there]
            self.ip(0, "link", "add", *names)
            for node in (0, 1):
                self.ip(node, "link", "set", "lo", "up")
                self.ip(node, "addr", "add", f"10.77.0.{node + 1}/24", "dev", f"ct{node}")
                self.ip(node, "link", "set", f"ct{node}", "up")
        except NoNodes:
            self.close()
            raise

    def _hold(self, *command: str) -> None:
        """Keep a namespace by a process that waits until its input closes."""
        holder = subprocess.Popen(
            [*command, "sh", "-c", "echo ready; read line"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.holders.append(holder)
        assert holder.stdout and holder.stderr
        if holder.stdout.readline() != "ready\n":
            raise NoNodes(f"{' '.join(command)}: {holder.stderr.read().strip()}")

    def inside(self, node: int) -> list[str]:
        return ["nsenter", "-t", str(self.holders[node].pid), *self.user, "-n", "--"]

    def ip(self, node: int, *words: str) -> None:
        done = subprocess.run([*self.inside(node), "ip", *words], capture_output=True, text=True)
        if done.returncode:
            raise NoNodes(f"ip {' '.join(words)}: {done.stderr.strip()}")

    def cut(self) -> None:
        self.ip(0, "link", "set", "ct0", "down")

    def heal(self) -> None:
        self.ip(0, "link", "set", "ct0", "up")

    def torchrun(self, per_node: int, *settings: str) -> None:
        """Start torchrun on both nodes; what node N prints is in node-N.<start>.txt."""
        self.starts += 1
        for node in (0, 1):
            env = environment(CT_TAG=self.tag, GLOO_SOCKET_IFNAME=f"ct{node}", OMP_NUM_THREADS="1")
            command = [
                *self.inside(node), sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                f"--nproc_per_node={per_node}", "--rdzv_backend=c10d", f"--rdzv_id={self.starts}",
                f"--rdzv_endpoint=10.77.0.1:{29500 + self.starts}",
                f"--rdzv_conf=is_host={1 - node}", f"--local_addr=10.77.0.{node + 1}",
                str(SOURCE / "train.py"), *settings,
            ]  # fmt: skip
            with self.output(node).open("w") as output:
                self.agents.append(subprocess.Popen(
                    command, cwd=self.folder, env=env, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                ))  # fmt: skip

    def output(self, node: int) -> Path:
        return self.folder / f"node-{node}.{self.starts}.txt"

    def text(self) -> str:
        return "".join(self.output(node).read_text() for node in (0, 1))

    def wait(self, timeout: float = 120) -> list[int]:
        """Wait for both torchruns; returns their exit codes."""
        codes = [agent.wait(timeout=timeout) for agent in self.agents]
        self.agents.clear()
        return codes

    def processes(self) -> dict[int, int | None]:
        """Every live process that torchrun or its ranks left anywhere: pid -> rank, None: agent."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                env = (folder / "environ").read_bytes() if folder.name.isdigit() else b""
            except OSError:
                continue
            if self.tag.encode() in env:
                rank = re.search(rb"\0RANK=(\d+)", env)
                found[int(folder.name)] = int(rank[1]) if rank else None
        return found

    def pid_of(self, rank: int) -> int:
        return next(pid for pid, found in self.processes().items() if found == rank)

    def ends(self, within: float) -> dict[str, float]:
        """Wait until nothing lives; seconds until the last rank and the last process ended."""
        began, ranks_end = time.monotonic(), 0.0
        while left := self.processes():
            seconds = time.monotonic() - began
            assert seconds < within, f"after {seconds:.1f} s still there: {left}\n{self.text()}"
            if any(rank is not None for rank in left.values()):
                ranks_end = seconds
            for agent in self.agents:
                agent.poll()
            time.sleep(0.05)
        return {"ranks": ranks_end, "all": time.monotonic() - began}

    def close(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        for process in [*self.agents, *self.holders]:
            process.kill()
            process.communicate()

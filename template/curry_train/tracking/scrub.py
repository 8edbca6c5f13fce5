"""Keep secrets out of files: environment by allow-list, URLs and command lines scrubbed.

The environment is never filtered by what a secret looks like, only by names known to be harmless.
Text that must be written (a command line, a diff, a traceback) is scrubbed by what secrets are
called (`api_key=`, `--token`), by where they stand (user:password@host) and by their known shapes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

MASK = "***"

ENVIRONMENT = re.compile(
    r"CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING)|CUBLAS_WORKSPACE_CONFIG"
    r"|NVIDIA_(VISIBLE_DEVICES|TF32_OVERRIDE)|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|PYTORCH_ENABLE_MPS_FALLBACK|TORCH_NCCL_(ASYNC_ERROR_HANDLING|BLOCKING_WAIT)"
    r"|NCCL_(DEBUG|SOCKET_IFNAME|IB_DISABLE|P2P_DISABLE|ALGO|PROTO)|GLOO_SOCKET_IFNAME"
    r"|OMP_(NUM_THREADS|WAIT_POLICY|PROC_BIND)|MKL_NUM_THREADS|GOMP_SPINCOUNT|KMP_BLOCKTIME"
    r"|PYTHON(HASHSEED|OPTIMIZE)|(LOCAL_|NODE_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE"
    r"|MASTER_(ADDR|PORT)|TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS|RUN_ID)"
    r"|LT_(CLI_USED|ACCELERATOR|DEVICES|NUM_NODES)|CURRY_RUN_DIR"
    r"|SLURM_(JOB_ID|JOB_PARTITION|JOB_NUM_NODES|NODELIST|NTASKS|NTASKS_PER_NODE|PROCID"
    r"|RESTART_COUNT|ARRAY_JOB_ID|ARRAY_TASK_ID|CPUS_PER_TASK|GPUS_ON_NODE)"
)
"""The whole names of environment variables that a journal may hold."""

_SECRET = (
    r"(?:[A-Za-z0-9]*[_-]?)(?:api[_-]?key|access[_-]?key|token|secret|password|passwd|passphrase)"
    r"|(?:private|secret|session|signing)?[_-]?key(?:[_-]?id)?"
    r"|pwd|credentials?|signature|sig|auth|authorization|cookie"
)
_NAME = rf"(?<![A-Za-z0-9])(?:[A-Za-z0-9.+-]*[._-])*?(?:{_SECRET})(?![A-Za-z0-9_.-])"
_PAIR = re.compile(
    rf"(?P<name>{_NAME})(?P<quote>[\"']?)(?P<is>\s*[=:]\s*)(?!//)"
    r"(?P<value>\"[^\"]*\"|'[^']*'|(?:(?:Bearer|Basic|Token)\s+)?[^\s,;&}\])\"']+)",
    re.IGNORECASE,
)
_FLAG = re.compile(rf"--?{_NAME}", re.IGNORECASE)
_USER_INFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#]*@")
_QUERY = re.compile(
    rf"(?P<name>[?&#](?:[A-Za-z0-9]*[._-])*(?:{_SECRET}))=[^\s&#\"']+", re.IGNORECASE
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
)


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the allow-listed part of the environment."""
    env = os.environ if env is None else env
    return {name: scrub(env[name]) for name in sorted(env) if ENVIRONMENT.fullmatch(name)}


def scrub_urls(text: str) -> str:
    """Mask user info and secret parameters of URLs, and secrets of well-known shapes."""
    text = _USER_INFO.sub(rf"\g<scheme>{MASK}@", text)
    text = _QUERY.sub(rf"\g<name>={MASK}", text)
    return _SHAPES.sub(MASK, text)


def scrub(text: str) -> str:
    """Mask also the value of everything that is called key, token, password and the like."""
    return _PAIR.sub(rf"\g<name>\g<quote>\g<is>{MASK}", scrub_urls(text))


def scrub_argv(argv: Sequence[str]) -> list[str]:
    """Scrub a command line; the word after `--token` goes too."""
    clean, masked = [], False
    for word in argv:
        clean.append(MASK if masked and not word.startswith("-") else scrub(word))
        masked = _FLAG.fullmatch(word) is not None
    return clean

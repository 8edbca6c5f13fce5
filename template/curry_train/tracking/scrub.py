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

# Possessive quantifiers (++) keep every pattern linear: a diff may hold a megabyte on one line.
_NAMED = re.compile(r"(?<![\w.+-])(?P<name>[\w.+-]++)[\"']?\s*+[=:]\s*+(?!//)")
_VALUE = re.compile(
    r"\"[^\"]*\"|'[^']*'|(?:(?:Bearer|Basic|Token)\s+)?[^\s,;&}\])\"']+", re.IGNORECASE
)
_QUERY = re.compile(r"(?P<name>[?&#][\w.+-]++)=[^\s&#\"']++")
_USER_INFO = re.compile(r"(?<=[A-Za-z0-9])://[^\s/?#]*@")
_SECRET_NAME = re.compile(
    r"(?:token|secret|password|passwd|passphrase|(?:api|access)[_-]?key|key[_-]?id"
    r"|(?:^|[._+?&#-])(?:private|secret|session|signing)?[_-]?"
    r"(?:key|pwd|credentials?|signature|sig|auth|authorization|cookie))$",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{8,4096}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
)


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the allow-listed part of the environment."""
    env = os.environ if env is None else env
    return {name: scrub(env[name]) for name in sorted(env) if ENVIRONMENT.fullmatch(name)}


def scrub_urls(text: str) -> str:
    """Mask user info and secret parameters of URLs, and secrets of well-known shapes."""
    text = _USER_INFO.sub(f"://{MASK}@", text)
    text = _QUERY.sub(lambda m: f"{m['name']}={MASK}" if _is_secret(m["name"]) else m[0], text)
    return _SHAPES.sub(MASK, text)


def scrub(text: str) -> str:
    """Mask also the value of everything that is called key, token, password and the like."""
    text = scrub_urls(text)
    clean, end = [], 0
    for name in _NAMED.finditer(text):
        value = _VALUE.match(text, name.end()) if _is_secret(name["name"]) else None
        if value is not None and name.start() >= end:
            clean += [text[end : name.end()], MASK]
            end = value.end()
    return "".join([*clean, text[end:]])


def scrub_argv(argv: Sequence[str]) -> list[str]:
    """Scrub a command line; the word after `--token` goes too."""
    clean, masked = [], False
    for word in argv:
        clean.append(MASK if masked and not word.startswith("-") else scrub(word))
        masked = word.startswith("-") and _is_secret(word)
    return clean


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name[-64:]) is not None

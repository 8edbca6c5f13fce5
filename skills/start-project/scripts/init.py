#!/usr/bin/env python3
"""Copy the template into a project, make its environment, train the quickstart: see --help.

This file keeps to syntax that any Python reads, so that an old one gets a clear line and not a
SyntaxError. The work is in init_cli.py and its neighbours.
"""

import os
import sys

OLDEST = (3, 11)


def unsupported(platform, release, version, path):
    """Return the line that says why this machine cannot run init, or None."""
    if platform in ("win32", "cygwin", "msys"):
        return "found Windows; Linux and macOS are supported; run this inside WSL2 (wsl --install)"
    if release.endswith("-Microsoft"):
        return (
            "found WSL1; Linux, macOS and WSL2 are supported; "
            "convert it with: wsl --set-version DISTRIBUTION 2"
        )
    if version < OLDEST:
        found = [name for name in ("python3.13", "python3.12", "python3.11") if on_path(name, path)]
        return "found Python {} at {}; 3.11, 3.12 or 3.13 is needed; run this with {}".format(
            ".".join(str(part) for part in version[:3]),
            sys.executable,
            found[0] if found else "one of them (none is on PATH)",
        )
    return None


def on_path(name, path):
    return any(os.access(os.path.join(folder, name), os.X_OK) for folder in path.split(os.pathsep))


if __name__ == "__main__":
    release = os.uname()[2] if hasattr(os, "uname") else ""
    line = unsupported(sys.platform, release, sys.version_info[:3], os.environ.get("PATH", ""))
    if line:
        sys.stderr.write("init.py: " + line + "\n")
        sys.exit(2)
    # The bundle may lie in a read-only or shared folder: nothing is ever written there.
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # python -I and -P leave it out
    from init_cli import main

    sys.exit(main(sys.argv[1:]))

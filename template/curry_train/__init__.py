"""A training system that its user owns. Importing this package imports nothing else."""

import os

__version__ = "0.1.0"

# Idle OpenMP threads spin and, on a busy machine, burn the cores they wait for (150 times slower
# steps were measured). libgomp reads the bound once, when torch is imported, which is later.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

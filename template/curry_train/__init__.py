"""A training system that its user owns. Importing this package imports nothing else."""

__version__ = "0.1.0"

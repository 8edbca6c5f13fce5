"""Mesh, placement and gradient arithmetic. `dims` imports no torch, so nothing is imported here."""

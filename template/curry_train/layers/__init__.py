"""Layers that know nothing of ranks beyond the process group they are handed (None means off).

Shape letters used as suffixes (`x_BSD`, `weights_TK`):
B batch, S sequence, T flat tokens (B*S), D width, H query heads, G key/value heads, A head width,
F hidden width of a feed-forward, E experts, K experts per token, R routed rows (T*K), V vocabulary;
[time, ...] has the time steps of spiking neurons outermost.

Parameters keep the dtype they were built in; every layer casts its weight to the dtype of its
input, so the compute dtype is decided once, where the embedding hands out the residual stream.
"""

VARIANTS = {}
"""PART.NAME -> the class that model.PART=NAME builds in the place of the standard one, as
"attention.gated": "curry_train.layers.gated_attention:GatedAttention"; see variants.py."""

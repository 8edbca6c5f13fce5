"""Kernels of the expert bank and of the loss, each with a twin in plain torch.

Shape letters are those of `curry_train.layers`: T tokens, D width, F expert hidden width, E
experts, K experts per token, R = T*K routed rows, V vocabulary; a grouped product is [N, M] wide.
"""

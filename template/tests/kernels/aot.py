"""Compile every kernel ahead of time, for GPUs that are not here, and look at what came out.

    python template/tests/kernels/aot.py --target sm_90 --triton DIR

Each file of curry_train/kernels that holds kernels has a function `aot_cases()`. It returns what
the launchers of that file really launch, as plain data: a list of dictionaries with these keys.

    name        str, unique in its file: "gmm-gather-bf16"
    kernel      str, the name of the @triton.jit function in that file
    targets     tuple of "sm_80", "sm_90", "sm_100", "gfx942": where this case is launched.
                Tiles that differ between targets are cases of their own (same name, disjoint
                targets), so read them from the same table that the launcher reads.
    signature   dict, parameter -> type, every parameter in the order of the kernel:
                "*bf16" "*fp16" "*fp32" "*i32" "*i64" "i32" "i64" "fp32" "i1" "constexpr",
                "tensordesc<bf16[1,128,64]>" for a descriptor
    constexprs  dict, parameter -> value, for each "constexpr" of the signature. An int that the
                launch passes as 1 (the stride of a last dimension) and an argument passed as None
                are constants to Triton: give them the type "constexpr" and their value here too.
    divisible   tuple of the pointers and ints that a launch finds divisible by 16. Pointers of
                torch tensors are; D, F, 2F and strides of real models are; token counts, R, E are
                not. Without this another, slower kernel is compiled and the check proves nothing.
    num_warps   int
    num_stages  int
    options     dict, optional: further options of the launch, {"maxnreg": 128}
    dot         bool: holds a tl.dot, so matrix instructions are expected
    copies      bool: has a pipelined loop, so asynchronous copies are expected (NVIDIA)

A case is what a real model launches (bf16, D=2048, F=768, E=128, K=8 as the anchor; fp16 and fp32
where the launcher has other tiles for them), not a tile that only tests use.
"""

from __future__ import annotations

"""What every skill script shares. Nothing here imports torch at import time.

cli          flags, the order of a run, exit codes
interpreter  re-execution under a python that has torch
target       a project through its seam, or FILE.py:FUNCTION, as one small object
foreign      builds the target of FILE.py:FUNCTION; adapters, hf_trainer, lightning_module and
             lightning_trainer (with joined_optimizer) turn what it returns into one form
user_code    imports and calls code that is not ours; errors name its last frame
batches      move a batch of any shape, count its targets
state        everything a check may change is put back, bit for bit
report       checks, verdict, report.json, the short text, the ledger
tree_hash    one hash of the code and configuration of a project, for hooks too
layouts      a project's configuration for some ranks, and a small model of its kind
memory       bytes alive, highest, of the training state
fewer_ranks  a layout cut down to the ranks that a CPU can fork
progress     a bar on a terminal, a few lines elsewhere
statistics   tests and intervals of few runs (scipy)
plots        pictures of one look (matplotlib)
runner       many processes, one on a device at a time, kept and resumed; leash ends them
job          the run's folder: lock, state.json, progress, detach, status, wait
check_ids    the table of check ids
errors       the one exception for bad input
"""

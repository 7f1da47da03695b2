"""A GPU's rules without a GPU: a fake "cuda" device, and a process group that keeps NCCL's rules.

Kernels are the CPU's, messages are gloo's; what is checked is what CPU tests can't see: tensors on two devices, waits
of the host, operations that NCCL would run in another order, deadlocks. See `docs/contributing/gpu_rules.md`.

Use:

- `tests.gpu_rules.cuda` installs both when imported, before Lightning; `tests.gpu_rules.cpu` the group alone.
- `tests.gpu_rules.ranks.StrictPool` is a pool of ranks that have imported one of them, and keeps a `Report` of each.
- ``python -m tests.gpu_rules`` trains a small GPT under the strategies, and prints what was broken.
"""

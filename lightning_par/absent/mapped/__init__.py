"""Tensors whose memory is a mapped file, as safetensors and ``torch.load(mmap=True)`` make them.

Nothing of torch's says so, but their addresses. `mappings` tells from these which file a tensor lies in, `region` is
the place in it, and `file` reads there: only what is asked for, by the system's own calls, since reading through the
mapping would read whole pages, and those around them.
"""

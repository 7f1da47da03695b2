"""Checkpoints whose tensors lie in parts on many ranks, or in parts on a disk.

`unread` is the tensor that stands in a checkpoint for values that are elsewhere; `parts` says who holds what of it,
`inventory` what the ranks hold of a checkpoint, and `courier` brings it. `save` writes the single file.
"""

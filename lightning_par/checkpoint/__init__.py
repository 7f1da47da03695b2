"""Checkpoints whose tensors lie in parts on many ranks, or in parts on a disk.

`lightning_par.absent.unread` is the tensor that stands in a checkpoint for values that are elsewhere; `owners` says who
holds what of it, `inventory` what the ranks hold of a checkpoint, and `courier` brings it to the rank that writes a
single file. Of a directory, to which each rank writes, `folder` knows the files, `outline` is what is left without
tensors, `chunks` who writes what, `directory` and `dcp_writer` write, `background` while training goes on, `reading`
reads, and `consolidate` makes one file of it; `export` makes safetensors of either kind. `rename` gives what is
finished its name; `disk_space` says that a disk is full. `checksums` finds what has changed in a file,
`checked_together` when all ranks load it, `verify` when a command asks. What is read may come from anyone: `safe_load`
says what a file may hold, `metadata` makes a directory's description of what `pickles` reads.
"""

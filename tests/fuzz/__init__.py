"""A differential fuzzer: random LightningModules under random layouts, compared with one device.

`grammar` draws a `program` of `pieces`, which `running` trains on this rank; `judging` compares a layout with one
device, `shrinking` takes away what a finding does not need. `__main__` is the command line::

    python -m tests.fuzz --seed 1 --count 200 --strategies pipeline tensor
    python -m tests.fuzz --seed 17 --show                 # the program of a seed, as a script
    python -m tests.fuzz --script found.py --layouts pipeline-2   # a script again, as it was found
"""

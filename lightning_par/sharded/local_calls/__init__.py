"""What functions of sharded tensors come to on this rank: calls of plain functions on its parts, and verbs.

tape: notes them while rules run
program: what was noted, as Python that runs without a rule
repeated_calls: the calls of a run that were noted once
"""

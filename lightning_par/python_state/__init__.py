"""What a run of the user's step may change in Python: found, undone, and told.

`reachable` finds the mutable objects, each a cell of `mutable_objects`, `contents` or `iterators`; `snapshot` keeps
what they hold.
"""

"""What a run of the user's step may change in Python: found, undone, and told.

`reachable` finds the mutable objects, each a cell of `cells`, `contents` or `iterators`; `snapshot` keeps
what they hold.
"""

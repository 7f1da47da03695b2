"""Mutable objects that a step reaches: what they held before a run, what the run changed, and how to change it again.

A `Cell` is one such object (attributes of a module or a plain object, a class body, a module's globals, a closure's
variable, list, dict, set). It is copied shallowly; the tensors in it are stood in for by spare copies during the run,
so that a run may change them in place and keep them for its backward, while the originals stay as they are.
"""

"""Deferred initialisation: a module is built without its weights, which are then made one at a time, where needed.

While a module is built, functions of torch run on ``meta`` tensors and are kept, with the state of the generator where
they draw. Later each parameter is computed from the functions it depends on, bitwise as if they had run at once.

`build` runs the user's code, `deferred_tensor` is what it gets for tensors, `op_recorder` keeps what it does in the
terms of `history`, `generator_draws` sees to generators, `replay` computes, and `materialise` gives a module its
weights. Tensors in mapped files are deferred by `adoption`; `cuts` finds out which parts of files and checkpoints one
is made of, as a `recipe`; `fetches` reads each tensor of a checkpoint once for it.
"""

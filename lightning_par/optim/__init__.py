"""Steps of optimizers whose parameters lie on several ranks, in parts or in stages.

Torch's own that treat every element by itself step on the parts (`torch_optimizers`); any other optimizer is followed,
function by function, and sees the tensors of one device (`following`). `optimizers` puts them to work.
"""

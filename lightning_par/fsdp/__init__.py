"""The data axis where replicas share out what they store: weights, gradients and the optimizer's state.

(Replicas that store everything need no more than `lightning_par.optim.gradient_sync`.)
"""

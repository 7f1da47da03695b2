"""The user's step, recorded without memory, and what is known of it: units, functions, parameters, optimizers."""

"""The verdict on a user's own module: whether layouts leave its results as they are."""

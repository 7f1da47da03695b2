"""Bytes of live tensors through a step, and each rank's peak."""

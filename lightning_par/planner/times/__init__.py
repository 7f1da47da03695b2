"""Seconds of a step, of what ranks compute and send."""

"""Campaigns: what a cluster does to a job, at many random moments. ``python -m tests.endurance.NOUN --help``."""

"""Layouts, and the search for those that are worth a look."""

"""Who holds up a run that stands still: a report that ranks make by a thread each, whatever their own code does."""

"""Whether what a step does to a batch it does to each sample: trials of single modules, sums over samples."""

"""What really happened in a step, on all ranks: recorded, brought to one clock, taken apart, shown.

`lightning_par.callbacks.parallel_trace` records. `spans` is what a rank has recorded and `breakdown` where a step's
time went, both pure; `clock` how far two hosts' clocks are apart, `collector` how the ranks' traces come together,
`predicted` what the planner said, `chrome` the file, `report` the table, `picture` the SVG, `command` the command line.
"""

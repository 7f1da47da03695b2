"""Machines: devices, links and kernels of data sheets, or of the machine at hand."""

"""Imported, gives a CPU process the strict group."""

from tests.gpu_rules.install import install_for_cpu

install_for_cpu()

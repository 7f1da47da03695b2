"""Imported before Lightning, gives CPU processes the strict group."""

from tests.gpu_rules.install import install_for_cpu

install_for_cpu()

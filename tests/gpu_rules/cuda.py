"""Imported before torch, gives processes fake CUDA devices and the strict group in the place of NCCL."""

import os

from tests.gpu_rules.build import extension

extension()

from tests.gpu_rules import device  # noqa: E402
from tests.gpu_rules.install import install_for_cuda  # noqa: E402

device.install()
install_for_cuda()
os.environ["TEST_ACCELERATOR"] = "gpu"

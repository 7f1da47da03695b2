"""Imported before Lightning, lets several ranks share one real CUDA device, which NCCL refuses.

What they send goes over the host, in the strict group's queues. Kernels, streams and memory are the device's own.
"""

import os

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other way to ask for a device spoils what is forked later
os.environ["TEST_ACCELERATOR"] = "gpu"
os.environ["TEST_SHARED_DEVICE"] = "1"

import torch

from tests.gpu_rules.install import install_for_cuda
from tests.gpu_rules.shared_group import SharedGroup

install_for_cuda(SharedGroup)
# One device would evaluate nn.TransformerEncoder by kernels that are off by 1e-5 in float64.
torch.backends.mha.set_fastpath_enabled(False)

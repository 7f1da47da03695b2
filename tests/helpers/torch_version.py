"""Which torch the tests run with: what a test compares with may have been otherwise in the oldest that is allowed."""

from __future__ import annotations

import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

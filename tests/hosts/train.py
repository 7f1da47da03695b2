"""What ranks on hosts run: rows of a case and a layout, one after another.

torchrun ... -m tests.hosts.train FOLDER '[["gpt", {"tensor_parallel_size": 2}]]'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from tests.helpers import equality


def main(folder: Path, rows: str) -> None:
    for index, (case, layout) in enumerate(json.loads(rows)):
        shared = folder / f"{index}"
        shared.mkdir(exist_ok=True)
        data_size = layout.get("data_parallel_size", 1)
        result = equality.run(case, layout, str(shared), data_size=data_size)
        rank = torch.distributed.get_rank()
        torch.save(result, shared / f"result-{rank}.pt")
        print(f"row {index} of {case} done on rank {rank} in {os.getpid()}", flush=True)
        torch.distributed.destroy_process_group()  # the next row's ranks meet anew


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

#!/usr/bin/env python3
"""How fast the links sum: NCCL's all-reduce of 1 GB of float32 (gloo and 8 MB without a GPU). Started by torchrun; the first process prints one JSON line."""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch
from aerie.distributed import start_group

cuda = torch.cuda.is_available()
group = start_group(cuda)
tensor = torch.ones((1 << 28) if cuda else (1 << 21), device="cuda" if cuda else "cpu")
seconds = []
for _ in range(8):
    group.barrier()
    start = time.perf_counter()
    group.sum_(tensor)
    if cuda:
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)
    tensor.fill_(1.0)
group.sum_(tensor)
right = bool((tensor == group.world).all())
best = min(seconds)
group.leave()
if not group.rank:
    print(json.dumps({"bytes": tensor.nbytes, "ms": 1e3 * best, "gb_s": tensor.nbytes / best / 1e9, "right": right, "processes": group.world}), flush=True)

"""What two processes of this computer reach in an all-reduce over gloo.

python -m bessemer.runtime.exchange STORE RANK SECONDS      # one of the two; rank 0 prints bytes/s
"""

from __future__ import annotations

import datetime
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bessemer.core.errors import BessemerError

__all__ = ["measure_all_reduce"]

ELEMENTS = 1 << 22
TIMEOUT_S = 60.0


def measure_all_reduce(seconds: float) -> float:
    """Bus bandwidth in bytes/s (for two ranks: buffer / time). BessemerError where the processes fail."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [sys.executable, "-m", "bessemer.runtime.exchange", store]
        both = [
            subprocess.Popen(
                [*command, str(rank), str(seconds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in (0, 1)
        ]
        try:
            said = [process.communicate(timeout=seconds + TIMEOUT_S) for process in both]
        finally:
            for process in both:
                process.kill()
                process.wait()
    if any(process.returncode for process in both):
        raise BessemerError(f"measuring an all-reduce failed: {said[0][1] or said[1][1]}", code="exchange-failed")
    return float(said[0][0])


def _main(store: str, rank: int, seconds: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timeout)
    buffer, times = torch.ones(ELEMENTS), []
    count = torch.tensor([8.0])
    for turn in range(2):  # the first turn finds out how many fit into the time
        for _ in range(int(count)):
            start = time.perf_counter()
            dist.all_reduce(buffer)
            times.append(time.perf_counter() - start)
        if turn == 0:
            count.fill_(max(seconds / statistics.median(times), 8.0))
            dist.broadcast(count, 0)
    if rank == 0:
        print(4.0 * ELEMENTS / statistics.median(times[len(times) // 2 :]))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))

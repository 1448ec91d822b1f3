"""A process that trains one point of the grid after another: `python -m bessemer.lab.scaling_worker CACHE`.

Each line of standard input is a point as JSON; for each it writes the point's record as one line. It ends with the
input, and before the next step if the process that started it is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from bessemer.core.errors import Stopped
from bessemer.lab.scaling_grid import GridPoint, train_point

__all__ = ["main"]


def main() -> int:
    """Exit code 0 once there is nothing more to do."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver decides what it means
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed must not look like an answer
    parent = os.getppid()

    def alive() -> None:
        if os.getppid() != parent:
            raise Stopped("the grid's driver is gone")

    for line in sys.stdin:
        record = train_point(GridPoint(**json.loads(line)), sys.argv[1], alive)
        print(json.dumps(dict(record)), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What torchrun restarts: a plain script with the benches' model in torch's DDP, saved by `torch.save` every 20 steps.

    torchrun --standalone --nproc-per-node 4 --max-restarts 99 _keep_ddp.py FOLDER

Tokens are random, so that no time goes into reading. Each rank leaves its process number in `pid-RANK`, rank 0 a line
"step unix-seconds" in `steps` for each step done. The store's keys are led by the number of the attempt: with a plain
`init_process_group("gloo")` the ranks of a second attempt find the addresses of dead ones, and no restart succeeds.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _keep_runs import GLOBAL_BATCH, MEMBERS, SAVE_EVERY, SEQ, job_of
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from bessemer.core.resolve import resolve_model
from bessemer.models.build import build


class Loss(nn.Module):
    """The mean loss over a batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        total, weight = self.model(tokens_BS, labels_BS)
        loss: Tensor = total / weight
        return loss


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), MEMBERS
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
    dist.init_process_group("gloo", store=PrefixStore(attempt, store), rank=rank, world_size=world)
    spec = resolve_model(job_of(folder, "ddp").model)
    model = DistributedDataParallel(Loss(build(spec, seed=0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step, newest = 0, folder / "newest.pt"
    if newest.exists():
        found = torch.load(newest, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step = int(found["step"])
    shape = (GLOBAL_BATCH // world, SEQ)
    while True:
        tokens_BS, labels_BS = (torch.randint(spec.vocab_size, shape) for _ in range(2))
        model(tokens_BS, labels_BS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{step} {time.time()}\n")
        if rank == 0 and step % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "aside.pt")
            (folder / "aside.pt").rename(newest)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Several processes under torchrun: copies of the model (DDP), or one spread over them (FSDP2).

    torchrun --nproc-per-node 2 -m langevin train --parallel fsdp ...

Every process takes its share of each batch, whose order does not depend on how many there are, and losses
are divided by the tokens of the whole batch: the run is the same run. Checkpoints hold whole tensors in
safetensors files, written by the first process, and so go on with any number of processes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from langevin.errors import UsageError

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, rows: Any) -> Any:
        """This process's part of the rows of a batch."""
        each = len(rows) // self.size
        return rows[self.rank * each : (self.rank + 1) * each]

    def agree(self, number: float, how: str = "first") -> float:
        """One number for all processes: the first one's, or the largest or the sum of all."""
        if self.size == 1:
            return number
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        x = torch.tensor(number, dtype=torch.float64, device=device)
        if how == "first":
            dist.broadcast(x, 0)
        else:
            dist.all_reduce(x, dist.ReduceOp.MAX if how == "largest" else dist.ReduceOp.SUM)
        return float(x)

    def summed(self, count: Tensor | int) -> Tensor | int:
        """What all processes count together; a plain number is the same in each."""
        if self.size == 1 or isinstance(count, int):
            return count * self.size
        every = count.clone()
        dist.all_reduce(every)
        return every

    def ask_first(self, question: Callable[[], Answer]) -> Answer:
        """The first process's answer, for all; where it refuses, all refuse."""
        if self.size == 1:
            return question()
        said: list[Any] = [None]
        if self.first:
            try:
                said = [question()]
            except UsageError as error:
                said = [error]
        dist.broadcast_object_list(said, 0)
        if isinstance(said[0], UsageError):
            raise said[0]
        return said[0]

    def every(self, answer: Answer) -> list[Answer]:
        """What every process has to say, in their order; all must ask."""
        if self.size == 1:
            return [answer]
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, answer)
        return said

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined(device: str) -> Iterator[tuple[World, str]]:
    """The world torchrun describes, and the device of this process in it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(), device
        return
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    if device.startswith("cuda"):
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"process {local} of this machine has no GPU: there are {torch.cuda.device_count()}",
                "Start torchrun with as many processes as GPUs, or use --device cpu.",
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield World(rank, size), device
    finally:
        gc.collect()  # what holds the group keeps its threads, and with them Python may abort at its end
        dist.destroy_process_group()


def spread(model: Any, kind: str, world: World) -> nn.Module:
    """The model as it is called in training; with fsdp its parameters become shards, in place."""
    if world.size == 1:
        return model
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (world.size,))
    for block in model.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextmanager
def gradients(called: nn.Module, last: bool) -> Iterator[None]:
    """Exchange gradients with the last part of a batch only."""
    if isinstance(called, nn.parallel.DistributedDataParallel) and not last:
        with called.no_sync():
            yield
        return
    sharded: Any = called
    if hasattr(sharded, "set_requires_gradient_sync"):
        sharded.set_requires_gradient_sync(last)
    yield


def whole(x: Tensor) -> Tensor:
    """A tensor that may be spread over processes, in one piece (all processes must ask)."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def like(x: Tensor, model: Tensor) -> Tensor:
    """A whole tensor, spread as `model` is."""
    if not hasattr(model, "full_tensor"):
        return x
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = model.device_mesh, model.placements  # type: ignore[attr-defined]
    return distribute_tensor(x.to(mesh.device_type), mesh, placements)

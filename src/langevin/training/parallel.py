"""Several processes under torchrun: copies of the model (DDP), or one spread over them (FSDP2).

    torchrun --nproc-per-node 2 -m langevin train --parallel fsdp ...

Every process takes its share of each batch, whose order does not depend on how many there are, and losses
are divided by the tokens of the whole batch: the run is the same run. Checkpoints hold whole tensors in
safetensors files, written by the first process, and so go on with any number of processes.
"""

import gc
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from langevin.errors import UsageError, WorkError

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
            except (UsageError, WorkError) as error:
                said = [error]
        dist.broadcast_object_list(said, 0)
        if isinstance(said[0], UsageError | WorkError):
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


def built(make: Callable[[], Any], kind: str, world: World, device: str, files: Sequence[Path] = ()) -> Any:
    """The model that `make` makes, on the device.

    With fsdp its parameters are shards from the start: no process ever holds more than its own rows and one
    whole tensor. They have the values that one process would draw, or those in safetensors `files`.
    """
    if world.size == 1 or kind == "ddp":
        return make().to(device)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with Promised(world) as promised:
        model = make()
    rows = {name: promised.rows_of(p) for name, p in model.named_parameters() if p.is_meta}
    mesh = init_device_mesh(torch.device(device).type, (world.size,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fresh: dict[Tensor, nn.Parameter] = {}
    bare: dict[Tensor, str] = {}
    for name, p in model.named_parameters():
        if name in rows:
            drawn = rows.pop(name)
            held = torch.empty(own(p).shape, dtype=p.dtype) if drawn is None else drawn
            fresh[p] = nn.Parameter(like(held.to(device), p), requires_grad=p.requires_grad)
            if drawn is None:
                bare[fresh[p]] = name
    for module in model.modules():
        for key, old in list(module._parameters.items()):
            if old in fresh:
                setattr(module, key, fresh[old])
    model.to(device)  # fully_shard takes note, and makes the shards of uneven tensors of one size
    for p in bare.keys() - read_weights(model, files):
        raise UsageError(f"nothing says what {bare[p]} of the model starts from", "Use --parallel ddp.")
    return model


class Promised(TorchDispatchMode):
    """While a model is made, this process's rows are all that is kept of its tensors.

    A matrix that torch.empty gives has a shape and no memory. What fills it draws all its numbers, in the
    order of a process that is alone, and keeps the rows.
    """

    FILLS = (
        *(torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default, torch.ops.aten.zero_.default),
        *(torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.copy_.default),
    )

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.kept: dict[int, tuple[Any, Tensor]] = {}  # by the address of a storage, which is kept too

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function is torch.ops.aten.empty.memory_format and len(given[0]) > 1:
            return function(*given, **{**options, "device": "meta"})
        target = given[0] if given else None
        if not (isinstance(target, Tensor) and target.is_meta and function._schema.is_mutable):
            return function(*given, **options)
        storage = target.untyped_storage()
        self.kept.pop(storage._cdata, None)
        if function in self.FILLS and target.nbytes == storage.nbytes():
            full = torch.empty(target.shape, dtype=target.dtype)
            function(full, *given[1:], **options)
            rows = full[share_of(len(full), self.world.rank, self.world.size)].clone()
            self.kept[storage._cdata] = storage, rows
        return target

    def rows_of(self, x: Tensor) -> Tensor | None:
        """This process's rows of a tensor; None where nothing filled it as a whole."""
        return self.kept.pop(x.untyped_storage()._cdata, (None, None))[1]


def blocks(model: Any) -> list[nn.Module]:
    """The parts of a model that are gathered one after the other: those that transformers does not split,
    or the members of its outermost lists."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if found:
        return found
    if isinstance(model, nn.ModuleList):
        return list(model)
    return [block for child in model.children() for block in blocks(child)]


def read_weights(model: Any, files: Sequence[Path]) -> set[Tensor]:
    """Read a model's tensors from safetensors files, each process its own rows; those that were there.

    Names are the model's, or those of what it is built on (GPT-2 without its head).
    """
    targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    prefix, known = f"{model.base_model_prefix}.", model._keys_to_ignore_on_load_unexpected or ()
    read: set[Tensor] = set()
    for file in files:
        with safe_open(file, "pt") as source:
            for key in source.keys():  # noqa: SIM118  (no dict)
                x, stored = targets.get(key, targets.get(prefix + key)), source.get_slice(key)
                if x is not None and list(x.shape) == stored.get_shape():
                    fill(x, stored)
                    read.add(x)
                elif x is not None or not any(re.search(pattern, key) for pattern in known):
                    what = "not in the model" if x is None else f"{tuple(x.shape)} in the model"
                    raise UsageError(f"{file} holds {key} of shape {stored.get_shape()}, {what}")
    return read


def gradients(called: Any, last: bool) -> AbstractContextManager[None]:
    """Exchange gradients with the last part of a batch only."""
    if isinstance(called, nn.parallel.DistributedDataParallel) and not last:
        return called.no_sync()
    if hasattr(called, "set_requires_gradient_sync"):
        called.set_requires_gradient_sync(last)
    return nullcontext()


def whole(x: Tensor) -> Tensor:
    """A tensor that may be spread over processes, in one piece (all processes must ask)."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def own(x: Tensor) -> Tensor:
    """What this process holds of a tensor, in place."""
    return x._local_tensor if hasattr(x, "_local_tensor") else x


def like(x: Tensor, other: Tensor) -> Tensor:
    """What this process holds of a tensor that is spread as another is, as that whole tensor."""
    if x.shape != own(other).shape or own(other) is other:
        return x
    from torch.distributed.tensor import DTensor

    shape: Any = {"shape": other.shape, "stride": other.stride(), "run_check": False}
    return DTensor.from_local(x, other.device_mesh, other.placements, **shape)  # type: ignore[attr-defined]


def share_of(rows: int, rank: int, size: int) -> slice:
    """The rows of a tensor that fully_shard gives to a process."""
    each = -(-rows // size)
    return slice(min(rows, rank * each), min(rows, (rank + 1) * each))


@torch.no_grad()
def fill(x: Tensor, stored: Any) -> None:
    """Read what this process holds of a tensor from a slice of a safetensors file."""
    held = own(x)
    rows: Any = ...
    if held is not x:
        mesh: Any = x.device_mesh  # type: ignore[attr-defined]
        rows = share_of(len(x), mesh.get_local_rank(), mesh.size())
    held.copy_(stored[rows])

"""The one place that knows names which differ between versions of torch from 2.11 on."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store as Store
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, share_comm_ctx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

FAKE_TENSOR_LOG = logging.getLogger(FakeTensorMode.__module__)
"""Where torch says what fails on fake tensors."""
ASKS_FOR_VALUES = (GuardOnDataDependentSymNode, DataDependentOutputException)
"""What it raises where a forward branches on the values of a tensor, which fake ones lack."""


def reduces_unused_parameters(module: FSDPModule) -> bool:
    """Makes FSDP reduce zeros for parameters without a gradient; False where torch cannot (2.11)."""
    setter = getattr(module, "set_reduce_scatter_unused_params", None)
    if setter is None:
        return False
    setter(True)
    return True


def reset_after_failure(root: FSDPModule) -> bool:
    """Makes an FSDP root forget a forward or backward that raised; False where torch cannot (2.11)."""
    reset = getattr(root, "reset_iter_state", None)
    if reset is None:
        return False
    reset()
    return True


def unreduced_gradients(module: FSDPModule) -> list[Tensor]:
    """The whole gradients that backwards have left for the reduction of an FSDP module's own parameters."""
    found = [held for parameter in _own_parameters(module) for held in _held_gradients(parameter)]
    return [gradient for gradient in found if gradient is not None]


def give_zero_gradients(module: FSDPModule) -> None:
    """To the whole trainable parameters of an FSDP module's own for which backwards have left none, in the
    dtype of those beside them: what backwards have added up may be in that of reductions."""
    for parameter in _own_parameters(module):
        whole = parameter.unsharded_param
        if whole.requires_grad and not any(map(torch.is_tensor, _held_gradients(parameter))):
            whole.grad = torch.zeros_like(whole)
            parameter.to_accumulated_grad_if_needed()


def _own_parameters(module: FSDPModule) -> list[Any]:
    """As FSDP has them, those that were ever gathered."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    parameters = [parameter for group in groups if group is not None for parameter in group.fsdp_params]
    return [parameter for parameter in parameters if hasattr(parameter, "_unsharded_param")]


def _held_gradients(parameter: Any) -> tuple[Tensor | None, Tensor | None]:
    """What it has accumulated in the dtype of reductions, and in its own."""
    return parameter.unsharded_accumulated_grad, parameter.unsharded_param.grad


def all_gather_whole(
    whole: Tensor, own: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """All ranks' `own`, one after the other, in `whole`; 2.13 gave it another name. With `async_op` what to
    wait for."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(whole, own, group=group, async_op=async_op)
    return work


def reduce_scatter_whole(own: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """This rank's part of the sum of all ranks' `whole`; 2.13 gave it another name."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(own, whole, group=group)


def default_store() -> Store:
    """The store through which the processes of the default group found each other."""
    store: Store = distributed_c10d._get_default_store()
    return store


def make_fake_tensor_mode() -> FakeTensorMode:
    """As `make_fx` makes one for fixed shapes, which has a graph traced besides."""
    with torch._functorch.config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def settle_device_guard() -> None:
    """To be called by a thread that lives as long as the process, before others trace.

    Where torch is built for CUDA and there is no device, the first thread that enters a `FakeTensorMode`
    makes all others use an object of its own, which 2.11 frees with that thread: the next one to look ends
    the process by SIGSEGV (pytorch/pytorch#178950)."""
    with FakeTensorMode():
        pass


def forget_unmade_world() -> None:
    """After `init_process_group` has failed half-way: torch names the default group by a count that such a
    failure leaves higher than in other processes, and processes would wait for each other by different names.
    """
    if not dist.is_initialized():
        distributed_c10d._world.group_count = 0


def make_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Gloo between processes that need have no default group, with `send`, `recv` and `allgather` of lists of
    tensors; collective."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


_UNCOUNTED = itertools.count(1 << 32)
"""What groups of one process are named by, which no count of common ones reaches."""


class _OneByOne(dist.ProcessGroupGloo):
    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, *, enable_reconfigure: bool = False
    ) -> None:
        """`enable_reconfigure`: from torch 2.14 on `new_group` says whether."""
        gloo: Any = dist.ProcessGroupGloo
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        options = gloo._Options()
        options._timeout = timeout
        options._threads = 1
        if enable_reconfigure:
            options.enable_reconfigure = True
        options._devices = [gloo.create_device(interface=name) for name in interfaces]
        options._devices = options._devices or [gloo.create_default_device()]
        super().__init__(store, rank, size, options)


@contextmanager
def one_collective_at_a_time() -> Iterator[None]:
    """Inside, `new_group` gives Gloo's groups one thread in place of two, for which it has no option.

    Where two collectives run beside each other in a group of three or more, one may end with the connection
    to a lost rank and the other wait for good: what third ranks still send to the first one is never read,
    and so neither is the end of their connections (torch 2.13).
    """
    usual = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = _OneByOne  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = usual  # type: ignore[misc]


@contextmanager
def uncounted_groups() -> Iterator[None]:
    """Inside, `new_group(use_local_synchronization=True)` makes groups that other processes do not know of.

    From torch 2.14 on these count as others do, and all processes name those after them by the count: where
    some have made one more, they would wait for each other by different names.
    """
    world = distributed_c10d._world
    usual, world.group_count = world.group_count, next(_UNCOUNTED)
    try:
        yield
    finally:
        world.group_count = usual


@contextmanager
def unbound_default_group() -> Iterator[None]:
    """Inside, groups get communicators of their own even where `init_process_group` was given a `device_id`.

    Else torch splits each from the default group's, which all ranks must do together; but it lets none of
    the members split where a group is Gloo's, and no others where it synchronises locally.
    """
    default = distributed_c10d._get_default_group()
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def let_wait(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Operations of the group may take so long. A new group's limit is torch's constant, not that of the
    default group, and counts from when an operation is issued."""
    distributed_c10d._set_pg_timeout(limit, group)


def release_groups(mesh: DeviceMesh) -> None:
    """Makes a mesh let go of its process groups: torch's caches of sharding decisions keep meshes
    for good, and with them sockets and threads of pipelines that are closed."""
    getattr(mesh, "_pg_registry", {}).clear()


def abort_groups(groups: Sequence[dist.ProcessGroup], device: int, *, deadline_s: float) -> bool:
    """Ends what these groups, which have NCCL on that device, still run; whether all of it ended in time.
    (What Gloo runs ends with its connections.) From any thread.

    Not seen on a GPU yet. Each from a thread of its own, because aborting one after the other can hang
    (pytorch#119797, nccl#1013); by torch's documentation only with `TORCH_NCCL_ASYNC_ERROR_HANDLING=0` set
    before the first group is made, lest its watchdog ends the process.
    """

    def abort(group: dist.ProcessGroup) -> None:
        torch.cuda.set_device(device)  # Or this thread would open a context on the first card.
        group.abort()

    aborting = [
        threading.Thread(target=abort, args=(group,), name="zorselike-abort", daemon=True) for group in groups
    ]
    for thread in aborting:
        thread.start()
    until_s = time.monotonic() + deadline_s
    for thread in aborting:
        thread.join(max(0.0, until_s - time.monotonic()))
    return not any(thread.is_alive() for thread in aborting)


def has_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in dist.get_backend_config(group) and torch.cuda.is_available()


def nccl_record() -> Callable[[], list[str]]:
    """Tells, from any thread, what this rank's groups of NCCL were given and have not done: operation, size,
    group; oldest first. Nothing where torch has no NCCL or no record (`TORCH_NCCL_TRACE_BUFFER_SIZE=0`)."""
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if is_on_gpu else None
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)

    def tell() -> list[str]:
        if dump is None or device is None:
            return []
        torch.cuda.set_device(device)
        found = json.loads(dump(includeCollectives=True, onlyActive=True))
        return [
            f"{entry['profiling_name'].removeprefix('nccl:')} of {entry['output_sizes']} "
            f"({entry['process_group'][1]})"
            for entry in found.get("entries", [])
        ]

    return tell


def nccl_options(*, max_blocks: int) -> Any:
    """Options of an NCCL group whose kernels occupy at most so many multiprocessors; None where torch has no
    NCCL."""
    if not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_blocks
    return options


def share_streams(roots: Sequence[FSDPModule]) -> None:
    """Makes the last of several FSDP roots use the streams of the others, which are warm already.

    Without it each has streams, and so pools of memory, of its own. Torch would give all of them new streams
    when the last one warms up.
    """
    share_comm_ctx(list(roots))
    context = roots[-1]._get_fsdp_state()._comm_ctx
    if len(roots) > 1:
        context.lazy_init = lambda device: None  # type: ignore[method-assign]


def gather_stream(root: FSDPModule) -> Any:
    """The stream of the device on which gathers that FSDP starts by itself read the shards."""
    return root._get_fsdp_state()._comm_ctx.all_gather_copy_in_stream


def grow_storage(storage: torch.UntypedStorage, num_bytes: int) -> None:
    """`storage.resize_`, which on a GPU may wait until that has computed, without Python's lock meanwhile (as
    `resize_` would keep it, and with it the alarm's heartbeats and the threads that feed the GPU)."""
    if storage.device.type == "cpu" or torch.version.hip is not None:  # Builds for ROCm lack it.
        storage.resize_(num_bytes)
    else:
        resize_unlocked(storage, num_bytes)


def resize_unlocked(storage: torch.UntypedStorage, num_bytes: int) -> None:
    """`storage.resize_` as an operator, which gives Python's lock up as all operators do."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    torch.ops.inductor.resize_storage_bytes_.default(whole, num_bytes)


def hold_stream(cycles: int) -> None:
    """The current stream of the current GPU waits for so many of its cycles, in one thread."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def version_of(tensor: Tensor) -> int:
    """How often a tensor, or what it is a view of, has been changed in place."""
    return tensor._version


def cpu_attention() -> tuple[Any, ...]:
    """The operators by which torch computes attention on a CPU, as those that count operations see them."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    return (getattr(torch.ops.aten, name),) if hasattr(torch.ops.aten, name) else ()


def grouped_products() -> tuple[Any, ...]:
    """Products of rows by one of several matrices, as experts have them."""
    names = ("_grouped_mm",)
    return tuple(getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name))


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something is called before or after its steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def counting_on_host(optimizer: torch.optim.Optimizer) -> AbstractContextManager[object]:
    """Inside, torch's optimizers make their counts of steps on the host, whatever the caller's default device
    is: those of 2.11 make them there, and wait for it in every step."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    return torch.device("cpu") if is_torchs and torch.get_default_device().type != "cpu" else nullcontext()

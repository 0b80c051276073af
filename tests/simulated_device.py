"""A simulated GPU in pure Python: PyTorch's PrivateUse1 backend, named `sim`.

Its tensors lie in host memory, and the CPU computes every operation. As on a GPU, operations on
tensors of two devices are refused.

    python simulated_device.py SCRIPT.py [flags]    runs a script on it
"""

import runpy
import sys
from functools import partial

import torch
from accelerate.state import PartialState
from torch.utils import backend_registration

aten = torch.ops.aten
CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

# Beside device tensors, most operations take a CPU tensor without axes as a number. These do not.
NEEDS_ONE_DEVICE = (
    "cat stack gather scatter index_add index_select mm bmm addmm embedding searchsorted isin"
).split()
IN_BFLOAT16 = "matmul bmm linear mm addmm scaled_dot_product_attention".split()  # under autocast


def is_on_device(x):
    return isinstance(x, torch.Tensor) and x.device.type == "sim"


def for_each(function, x):
    """The function of x, or of everything in it, where x is a list or tuple."""
    if isinstance(x, (list, tuple)):
        return tuple(for_each(function, entry) for entry in x)
    return function(x)


def shape_of(tensor):
    """Where a tensor lies in its storage."""
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def to_device_tensor(tensor):
    """A device tensor over the memory of a CPU tensor."""
    memory = tensor.untyped_storage()
    device = torch.device("sim", 0)
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), device, memory.nbytes()
    )
    storage.memory = memory  # So the memory lives as long as the storage.
    empty = torch._C._acc.create_empty_tensor([0], tensor.dtype)
    return set_storage(empty, storage, tensor)


def set_storage(tensor, storage, like=None):
    """Give a device tensor a storage, and the shape of another tensor. Without one it has the whole
    storage."""
    if like is None:
        count = storage.nbytes() // tensor.element_size()
        like = torch.empty(count, device="meta")
    op = aten.set_.source_Storage_storage_offset
    return op.redispatch(CPU_KERNELS, tensor, storage, *shape_of(like))


def to_cpu_tensor(tensor):
    """A CPU tensor over the memory of a device tensor."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage.memory, *shape_of(tensor))


def run_on_cpu(op, *args, **kwargs):
    """The kernel of every operation: check the devices, let the CPU compute, make device tensors of
    the results."""
    name = op._schema.name.removeprefix("aten::")
    check_devices(name, args, kwargs)
    originals = {}  # device tensors and their CPU tensors, by the id of the CPU tensor

    def lower(x):
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not is_on_device(x):
            return x
        lowered = to_cpu_tensor(x)
        originals[id(lowered)] = x, lowered
        return lowered

    def lift(x):
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in originals:
            return to_device_tensor(x)
        # The operation works in place, or writes into its argument `out`.
        original, _ = originals[id(x)]
        if original.shape != x.shape:  # `out` was too small.
            set_storage(original, to_device_tensor(x).untyped_storage(), x)
        return original

    args = for_each(lower, args)
    kwargs = {key: for_each(lower, x) for key, x in kwargs.items() if key != "pin_memory"}
    with torch._C._AutoDispatchBelowAutograd():
        return for_each(lift, op(*args, **kwargs))


def check_devices(name, args, kwargs):
    """Refuse tensors of two devices, as CUDA does, and indices on the CPU, which CUDA takes."""
    tensors = []
    for_each(lambda x: isinstance(x, torch.Tensor) and tensors.append(x), [*args, *kwargs.values()])
    base = name.removesuffix("_")
    bad = []
    for x in tensors:
        is_changed = base != name and x is args[0]  # Operations that work in place end with _.
        if not is_on_device(x) and (x.dim() > 0 or base in NEEDS_ONE_DEVICE or is_changed):
            bad.append(tuple(x.shape))
    if bad and len(bad) < len(tensors):
        message = "Expected all tensors to be on the same device, but found at least two devices"
        raise RuntimeError(f"{message} ({name}, shapes on the CPU: {bad})")


def copy_from(source, target, non_blocking=False):
    """A copy within the device, or from or to the host."""
    to = to_cpu_tensor(target) if is_on_device(target) else target
    if is_on_device(source):
        source = to_cpu_tensor(source)
    with torch._C._AutoDispatchBelowAutograd():
        to.copy_(source)
    return target


def attention(query, key, value, attn_mask=None, *args, **kwargs):
    """Attention as matrix products and a softmax. The mask is added, so where it is False it
    becomes minus infinity."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zeros.masked_fill(~attn_mask, -torch.inf)
    return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, *args, **kwargs)[0]


def in_bfloat16(op, *args, **kwargs):
    """An operation under autocast."""

    def lower(x):
        return x.bfloat16() if is_on_device(x) and x.is_floating_point() else x

    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        return op(*for_each(lower, args), **kwargs)


def install():
    """Register the device, and make it accelerate's. It lasts as long as what is returned."""
    backend_registration._setup_privateuseone_for_python_backend("sim")
    torch.sim.get_amp_supported_dtype = lambda: [torch.bfloat16]
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run_on_cpu, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    operations = torch.library.Library("aten", "IMPL")
    for op in (aten.as_strided.default, aten.view.default, aten._reshape_alias.default):
        # Views read no memory, so the CPU's kernels make them for any device.
        operations.impl(op, partial(op.redispatch, CPU_KERNELS), "PrivateUse1")
    operations.impl("_copy_from", copy_from, "PrivateUse1")
    operations.impl("set_.source_Storage", set_storage, "PrivateUse1")  # for torch.save
    operations.impl("scaled_dot_product_attention", attention, "PrivateUse1")
    for name in IN_BFLOAT16:
        op = getattr(aten, name).default
        operations.impl(op, partial(in_bfloat16, op), "AutocastPrivateUse1")
    PartialState.default_device = property(lambda self: torch.device("sim", 0))
    return everything, operations


if __name__ == "__main__":
    registrations = install()
    sys.argv.pop(0)
    runpy.run_path(sys.argv[0], run_name="__main__")

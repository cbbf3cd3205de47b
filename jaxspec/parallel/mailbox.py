"""Mailboxes: memory through which two GPUs of one process exchange partial sums (`pallas_kernels._peer_sum`)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxspec.parallel.placement import Placement
from pallas_kernels.device import Device

SWITCH = "JAXSPEC_PEER_SUMS"  # environment variable; 0 leaves all sums to the compiler
# Names under which the two arrays stand among a model's parameters: each GPU's own mailbox, and the other's address.
NAMES = ("mailbox", "mailbox_address")
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"  # environment variable that chooses the allocator of JAX
CLIENT_OPTIONS = "jax_pjrt_client_create_options"  # setting of JAX that can choose it, too
MAPPED = ("", "default", "bfc")  # allocators whose memory the other GPU can reach
LOST = f"partial sums of two GPUs were lost twice in a row: set {SWITCH}=0, with which the compiler computes the sums"
ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED


def mailboxes(placement: Placement, device: Device, dtype: Any, *, width: int, vocab_size: int) -> dict[str, jax.Array]:
    """Return new mailboxes for the sums of a model by their NAMES; none where the kernel cannot be used.

    dtype, width, vocab_size: those of the model.
    """
    devices = list(placement.mesh.devices.flat)
    usable = placement.degree == len(devices) == 2 and jnp.dtype(dtype) == jnp.bfloat16
    usable = usable and allowed(os.environ, getattr(jax.config, CLIENT_OPTIONS, None))
    # XLA waits until both GPUs have loaded a program if the program has a sum of XLA's. The lookup in a sharded table
    # is one. Otherwise one GPU's kernel could wait for the other while the other loads.
    if not (usable and device.platform == "gpu" and placement.divides(vocab_size)):
        return {}
    from pallas_kernels._peer_sum import empty_mailbox, supported

    if not supported(device) or not connected(devices):
        return {}
    sharding = placement.sharding(P(placement.axes))
    places = jax.block_until_ready(jax.device_put(np.tile(empty_mailbox(width), 2), sharding))
    address = {shard.device: shard.data.unsafe_buffer_pointer() for shard in places.addressable_shards}
    others = [address[device] for device in reversed(devices)]
    return dict(zip(NAMES, (places, jax.device_put(np.array(others, np.int64).view(np.int32), sharding)), strict=True))


def out_of_step(params: Mapping[str, Any]) -> bool:
    """Return whether a mailbox among a model's parameters is useless, because a GPU has waited for sums in vain."""
    if NAMES[0] not in params:
        return False
    from pallas_kernels._peer_sum import waited_in_vain

    return any(waited_in_vain(shard.data) for shard in params[NAMES[0]].addressable_shards)


def attached(model: Any, params: Mapping[str, Any]) -> Any:
    """Return an nnx module of a model, with the mailboxes among its parameters as attributes of its layers."""
    for name in NAMES:
        if name in params:
            for layer in getattr(model, "layers", ()):
                setattr(layer, name, params[name])
    return model


def mailbox_of(layer: Any) -> tuple[jax.Array, jax.Array] | None:
    """Return the mailboxes of a layer, and the addresses; None if it has none."""
    return tuple(getattr(layer, name) for name in NAMES) if hasattr(layer, NAMES[0]) else None


def allowed(environment: Mapping[str, str], client_options: Any) -> bool:
    """Return whether the settings allow the kernel: it is not switched off, and the allocator is JAX's own.

    environment: environment variables. client_options: value of JAX's setting CLIENT_OPTIONS, a str or dict or None.
    """
    if environment.get(SWITCH, "1") == "0" or "allocator" in (client_options or ()):
        return False
    return environment.get(ALLOCATOR, "").lower() in MAPPED


def connected(devices: list[Any]) -> bool:
    """Return whether two GPUs of this process can write to each other's memory, and enable it."""
    if any(device.process_index != jax.process_index() for device in devices):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return enabled(driver, [device.local_hardware_id for device in devices])
    except (OSError, AttributeError):  # no driver, or one that lacks a function
        return False


def enabled(driver: Any, ordinals: list[int]) -> bool:
    """Enable access to each other's memory for two GPUs, in the contexts that JAX uses. Return False if any call fails.

    driver: CUDA's driver library.
    ordinals: the GPUs' numbers.
    """
    handles = [ctypes.c_int() for _ in ordinals]
    contexts: list[Any] = []
    try:
        for handle, ordinal in zip(handles, ordinals, strict=True):
            context = ctypes.c_void_p()
            if driver.cuDeviceGet(ctypes.byref(handle), ordinal):
                return False
            if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle):
                return False
            contexts.append(context)
        return all(opened(driver, handles[i], contexts[i], handles[1 - i], contexts[1 - i]) for i in range(2))
    finally:
        for handle, _ in zip(handles, contexts, strict=False):
            driver.cuDevicePrimaryCtxRelease_v2(handle)


def opened(driver: Any, handle: Any, context: Any, other: Any, other_context: Any) -> bool:
    """Enable access of one GPU to the other's memory. Return whether it is enabled."""
    able = ctypes.c_int()
    if driver.cuDeviceCanAccessPeer(ctypes.byref(able), handle, other) or not able.value:
        return False
    if driver.cuCtxPushCurrent_v2(context):
        return False
    result = driver.cuCtxEnablePeerAccess(other_context, 0)
    driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return result in (0, ALREADY_ENABLED)

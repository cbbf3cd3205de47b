"""Which form of an op runs where."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import _device

# op -> platform -> the form that `implementation=None` means.
# On TPU the two integer ops are a few vector operations that XLA fuses with their neighbours; a kernel of their own
# only adds a launch. On GPU it is the same (H200: merge and slots 4 us fused, 6 to 7 as kernels; kv_write 5 us for up
# to 80 tokens, 4 to 15 as a kernel). On CPU a layer's products and its scores are all there is to choose.
DEFAULTS = {
    "merge_tokens": {"cpu": "reference", "gpu": "reference", "tpu": "reference"},
    "slot_mapping": {"cpu": "reference", "gpu": "reference", "tpu": "reference"},
    "kv_write": {"cpu": "reference", "gpu": "reference", "tpu": "pallas"},
    "paged_attention": {"cpu": "streamed", "gpu": "pallas", "tpu": "pallas"},
    "feed_forward": {"cpu": "streamed", "gpu": "pallas", "tpu": "reference"},
    "self_attention": {"cpu": "streamed", "gpu": "pallas", "tpu": "reference"},
    "likeliest_token": {"cpu": "reference", "gpu": "pallas", "tpu": "reference"},
}
GPU_ONLY = ("feed_forward", "self_attention", "likeliest_token")  # and on CPU interpreted
COMPOSED = ("feed_forward", "self_attention")  # whose plain form has parts, and wants the platform for them
PLATFORMS = ("cpu", "gpu", "tpu")
IMPLEMENTATIONS = ("reference", "pallas")


def run(op: str, implementation: str | None, platform: str | None, *args: Any, **options: Any) -> Any:
    """Calls the form of `op` that the options ask for. Flavours are imported only when they are used.

    The option `fits` says of the kernel's module whether it is meant for these arguments. Where nobody asked for the
    kernel by name, the plain form takes those it is not meant for.
    """
    fits = options.pop("fits", None)
    platform = normalized(op, platform)
    chosen = form(op, implementation, platform)
    composed = {"platform": platform} if op in COMPOSED else {}
    plain = functools.partial(call, op, "cpu" if chosen == "streamed" else "reference", **composed)
    if chosen != "pallas":
        return plain(*args, **options)
    if op in GPU_ONLY and platform == "tpu":
        raise NotImplementedError(f"{op} has no TPU kernel: pass implementation='reference'")
    name = "gpu" if op in GPU_ONLY else "tpu" if platform == "cpu" else platform
    if implementation is None and fits is not None and not fits(module(op, name)):
        return plain(*args, **options)
    # No Pallas compiler for CPU: interpret.
    return call(op, name, *args, **options, **({"interpret": True} if platform == "cpu" else {}))


def normalized(op: str, platform: str | None) -> str:
    platform = jax.default_backend() if platform is None else platform
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    if platform not in PLATFORMS:
        raise ValueError(f"{op}: platform {platform!r} is not one of {PLATFORMS}; pass platform= to choose one")
    return platform


def form(op: str, implementation: str | None, platform: str) -> str:
    """ "reference", "streamed" or "pallas": what the options ask for there. Where the GPU has no Triton, the plain form
    is the best known."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"{op}: implementation {implementation!r} is not one of {(None, *IMPLEMENTATIONS)}")
    old = platform == "gpu" and _device.before_ampere()
    if implementation == "pallas" and old:
        raise NotImplementedError(f"{op}: {_device.no_triton()}: pass implementation=None or 'reference'")
    if implementation is None:
        return "reference" if old else DEFAULTS[op][platform]
    return implementation


def call(op: str, name: str, *args: Any, **options: Any) -> Any:
    """That form of `op`. All layers of a program that call it alike share what is traced and lowered: for a kernel on
    GPU that takes longer than compiling it."""
    return shared(op, name, tuple(options))(*args, **options)


@functools.cache
def shared(op: str, name: str, options: tuple[str, ...]) -> Callable:
    return jax.jit(flavour(op, name), static_argnames=options)


def module(op: str, name: str) -> Any:
    """pallas_kernels/<op>/<name>.py."""
    return importlib.import_module(f"{__package__}.{op}.{name}")


def flavour(op: str, name: str) -> Callable:
    """The function `op` of pallas_kernels/<op>/<name>.py."""
    return getattr(module(op, name), op)


def check_shape(op: str, name: str, array: jax.Array, *shape: int) -> None:
    """Raises ValueError unless `array` has this shape."""
    if array.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {shape} to fit the other arguments, not {array.shape}")

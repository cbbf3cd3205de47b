"""Which form of an op runs where."""

import importlib
from collections.abc import Callable

import jax

# op -> platform -> the form that `implementation=None` means.
# On TPU the two integer ops are a few vector operations that XLA fuses with their neighbours; a kernel of their own
# only adds a launch. On GPU it is the same (H200: merge and slots 4 us fused, 6 to 7 as kernels; kv_write 5 us for up
# to 80 tokens, 4 to 15 as a kernel).
DEFAULTS = {
    "merge_tokens": {"cpu": "reference", "gpu": "reference", "tpu": "reference"},
    "slot_mapping": {"cpu": "reference", "gpu": "reference", "tpu": "reference"},
    "kv_write": {"cpu": "reference", "gpu": "reference", "tpu": "pallas"},
    "paged_attention": {"cpu": "reference", "gpu": "pallas", "tpu": "pallas"},
}
PLATFORMS = ("cpu", "gpu", "tpu")
IMPLEMENTATIONS = ("reference", "pallas")


def run(op: str, implementation: str | None, platform: str | None, *args, **options):
    """Calls the form of `op` that the options ask for. Flavours are imported only when they are used."""
    platform = jax.default_backend() if platform is None else platform
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    if platform not in PLATFORMS:
        raise ValueError(f"{op}: platform {platform!r} is not one of {PLATFORMS}; pass platform= to choose one")
    implementation = DEFAULTS[op][platform] if implementation is None else implementation
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation {implementation!r} is not one of {(None, *IMPLEMENTATIONS)}")
    if implementation == "reference":
        return flavour(op, "reference")(*args, **options)
    if platform == "cpu":  # no Pallas compiler for CPU: interpret the TPU kernel
        return flavour(op, "tpu")(*args, **options, interpret=True)
    return flavour(op, platform)(*args, **options)


def flavour(op: str, name: str) -> Callable:
    """The function `op` of pallas_kernels/<op>/<name>.py."""
    return getattr(importlib.import_module(f"{__package__}.{op}.{name}"), op)


def check_shape(op: str, name: str, array: jax.Array, *shape: int) -> None:
    """Raises ValueError unless `array` has this shape."""
    if array.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {shape} to fit the other arguments, not {array.shape}")

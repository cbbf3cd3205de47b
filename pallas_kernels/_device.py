"""What the GPUs of this machine can do. A program for one that is not here does without."""

import jax

AMPERE = (8, 0)  # what a GPU that is not here is taken for


def first() -> jax.Device:
    return jax.devices()[0]


def capability() -> tuple[int, int] | None:
    """Of CUDA, (major, minor); None for other devices."""
    major, _, minor = str(getattr(first(), "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def before_ampere() -> bool:
    """Whether the GPU has neither Triton, which the kernels are written in, nor bfloat16: below (8, 0), a T4 is one."""
    return (capability() or AMPERE) < AMPERE


def no_triton() -> str:
    """Why there are no kernels `before_ampere`, for an error."""
    needed, found = (".".join(map(str, version)) for version in (AMPERE, capability() or AMPERE))
    return f"kernels need a GPU of compute capability {needed}, {first().device_kind} has {found}"


def starts_early() -> bool:
    """Whether a kernel can ask for the next one: from Hopper on."""
    return (capability() or AMPERE) >= (9, 0)


def shares_much() -> bool:
    """Whether a program can have 227 KB of shared memory, and matrix units that read from it: Hopper and Blackwell, but
    for Blackwell's smaller ones, which have 99 KB."""
    return (capability() or AMPERE)[0] in (9, 10)

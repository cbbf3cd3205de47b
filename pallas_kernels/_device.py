"""What the GPUs of this machine can do. A program for one that is not here does without."""

import jax


def capability() -> int:
    """Of CUDA, its major number; 0 for other devices."""
    major, _, _ = str(getattr(jax.devices()[0], "compute_capability", "")).partition(".")
    return int(major) if major.isdigit() else 0


def starts_early() -> bool:
    """Whether a kernel can ask for the next one: from Hopper on."""
    return capability() >= 9


def shares_much() -> bool:
    """Whether a program can have 227 KB of shared memory, and matrix units that read from it: Hopper and Blackwell, but
    for Blackwell's smaller ones, which have 99 KB."""
    return capability() in (9, 10)

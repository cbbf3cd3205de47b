"""Any model -> an orbax folder of its own: weights, configuration and tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

import checkpoints
from checkpoints import orbax
from jaxspec.models.decoder import parameters


def convert(src: str, dst: str | Path, *, dtype: str | None = None, progress: bool = True) -> Path:
    """Writes any model as a self-contained orbax folder.

    dtype: of the weights (norms stay float32); None keeps the one that they are stored in, and takes bfloat16 where
    they are quantised. Returns the folder.
    Raises: FileExistsError where `dst` exists and is not empty; else as loading does.
    """
    dst = Path(dst).expanduser().absolute()
    orbax.check_free(dst)  # before anything is fetched
    source = checkpoints.resolve(src)
    config, tokenizer = checkpoints.load_config(source), checkpoints.load_tokenizer(source)
    known, here = parameters(config, dtype or checkpoints.stored_dtype(source)), SingleDeviceSharding(host_device())
    own = {name: dataclasses.replace(p, sharding=here) for name, p in known.items() if not p.borrowed}
    params = checkpoints.load_params(source, config, own, progress=progress)
    config = dataclasses.replace(config, eos_ids=checkpoints.load_stop_ids(source, tokenizer))
    checkpoints.save(dst, params, config, tokenizer)
    return dst


def host_device() -> jax.Device:
    """A CPU device where there is one: converting needs no accelerator's memory."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]

"""Any model -> an orbax folder of its own: weights, configuration and tokenizer. A head -> a folder of safetensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

import checkpoints
from checkpoints import heads, orbax
from jaxspec.drafters import methods
from jaxspec.models.decoder import parameters


def convert(src: str, dst: str | Path, *, dtype: str | None = None, progress: bool = True) -> Path:
    """Writes any model as a self-contained orbax folder, and a head that drafts for one in safetensors, which need no
    torch.

    dtype: of the weights (norms stay float32); None keeps the one that they are stored in, and takes bfloat16 where
    they are quantised. Returns the folder.
    Raises: FileExistsError where `dst` exists and is not empty; else as loading does.
    """
    dst = Path(dst).expanduser().absolute()
    orbax.check_free(dst)  # before anything is fetched
    source = checkpoints.resolve(src)
    if (
        source.kind == "hf"
        and methods.METHODS[methods.of_checkpoint(*heads.contents(source.path))].parameters == "head"
    ):
        heads.convert(source.path, dst, dtype)
        return dst
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

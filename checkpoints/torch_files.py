"""Files written by torch.save, such as pytorch_model.bin, read by torch's loader in its weights_only mode.

Such a file is a pickle, and unpickling can run code from the file. So jaxspec never unpickles one itself: without torch
it refuses the file.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.reading import naming_file
from jaxspec.common.errors import UnsupportedError, UserError, quoted

# The notation of safetensors for each dtype, by torch's name.
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "bool": "BOOL"}
SAFE = (2, 6)  # lowest safe version of torch; in older ones even weights_only=True can run code (CVE-2025-32434)
WITHIN = ("state_dict", "model", "module")  # keys at a file's top level under which training programs store the weights


def loader(what: str) -> Any:
    """Import and return torch.

    what: the thing that needs torch, for the message.
    Raises: UnsupportedError where torch is missing, or is older than version SAFE.
    """
    install = "install torch, or convert it once with `jaxspec convert` where torch is"
    try:
        import torch
    except ImportError:
        raise UnsupportedError(f"{what} is read with torch only, which is not installed: {install}") from None
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < SAFE:
        least = ".".join(map(str, SAFE))
        raise UnsupportedError(f"{what} is read with torch {least} or later only, found {torch.__version__}: {install}")
    return torch


class TorchFile:
    """A torch file, with the methods of an open safetensors file.

    A file in torch's present format, a zip archive, is mapped into memory. A file in an older format is loaded.
    """

    def __init__(self, path: Path) -> None:
        torch = loader(str(path))
        with naming_file(path):
            with path.open("rb") as file:
                zipped = file.read(4) == b"PK\x03\x04"
            try:
                found = torch.load(path, weights_only=True, map_location="cpu", mmap=zipped)
            except (pickle.UnpicklingError, OSError) as error:  # torch reports a truncated file as OSError
                raise UserError(
                    f"{path} is damaged, or holds more than tensors, and nothing else is unpickled: fetch it again, or "
                    "take a checkpoint in safetensors"
                ) from error
        self.tensors = state_dict(path, found, torch.Tensor)

    def keys(self) -> Iterable[str]:
        return self.tensors

    def get_slice(self, name: str) -> Slice:
        return Slice(self.tensors[name])


def state_dict(path: Path, found: Any, kind: Any) -> Mapping[str, Any]:
    """Return a torch file's tensors by name, from the file's top level or from one of the keys WITHIN.

    path: path of the file, for messages.
    found: content of the file, as torch returns it.
    kind: torch's class of tensors.
    Raises: UserError where there are no tensors, or values that are not tensors; UnsupportedError for a tensor that is
      sparse, quantised or without data.
    """
    if isinstance(found, Mapping):
        found = next((found[key] for key in WITHIN if isinstance(found.get(key), Mapping)), found)
    if not isinstance(found, Mapping) or not found:
        raise UserError(f"{path} holds no tensors by name: give the file of a model's weights")
    for name, x in found.items():
        if not isinstance(name, str) or not isinstance(x, kind):
            raise UserError(
                f"{path}: {quoted(name)} is not a tensor, but {type(x).__name__}: give a file of weights only"
            )
        if "strided" not in str(x.layout) or x.is_quantized or x.is_meta:
            raise UnsupportedError(f"{path}: tensor {name} is sparse, quantised or empty: only dense tensors are read")
    return found


@dataclasses.dataclass(frozen=True)
class Slice:
    """A torch tensor, with the methods of a slice object of the safetensors library."""

    tensor: Any

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        name = str(self.tensor.dtype).removeprefix("torch.")
        return DTYPES.get(name, name)

    def __getitem__(self, index: Any) -> np.ndarray:
        part = self.tensor.detach()[index]
        if self.get_dtype() == "BF16":  # numpy has no bfloat16
            import torch

            part = part.view(torch.int16)
            bits: np.ndarray = part.numpy()
            return bits.view(jnp.bfloat16)
        values: np.ndarray = part.numpy()
        return values

"""GGUF files: metadata, configuration and weights, dequantised while they are read or kept in their blocks.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here because gguf.GGUFReader
makes several numpy views per vocabulary entry, which takes seconds for a large vocabulary. The gguf package's `quants`
dequantises the weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from checkpoints import edits, gemma4_gguf, gguf_config, muse_glimmer_gguf, names
from checkpoints.assemble import Keep, assemble, unchanged
from checkpoints.gguf_blocks import FIELDS, Blocks
from checkpoints.published_forms import held
from checkpoints.reading import naming_file
from checkpoints.tensor_file import Index
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models import families
from jaxspec.models.config import ModelConfig
from jaxspec.models.limits import short
from jaxspec.models.parameters import Parameter
from jaxspec.options.quantization import Quantization

QuantType = gguf.GGMLQuantizationType
FLOATS = {QuantType.F32: "float32", QuantType.F16: "float16", QuantType.BF16: "bfloat16"}
# The format code of Python's struct module for each of GGUF's scalar value types.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9  # numbers of the GGUF value types that are not scalars
MAGIC = b"GGUF"  # the first bytes of a GGUF file
# Limits on a GGUF file's header. A header that exceeds one of them is damaged.
MOST_VALUES = 2**25  # largest number of values in all arrays together; large vocabularies have a few million
DEEPEST = 4  # largest number of levels of arrays within arrays
MOST_DIMS = 4  # largest number of dimensions of a tensor
MOST_ALIGNMENT = 2**20  # largest alignment of the tensors in the file, in bytes


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """The shape, storage type and position of a tensor in a GGUF file."""

    shape: tuple[int, ...]  # dimensions in numpy's order, [O, I] for a matrix
    kind: QuantType
    offset: int  # position of the tensor's first byte, in bytes from the start of the file

    @property
    def row_bytes(self) -> int:
        """Size of a row along the last axis, in bytes."""
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def end(self) -> int:
        """Position of the first byte after the tensor, in bytes from the start of the file."""
        return self.offset + math.prod(self.shape[:-1]) * self.row_bytes


class Cursor:
    """A reader of consecutive little-endian values of a GGUF file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0  # position of the next byte to read
        self.values = 0  # number of array values read so far

    def take(self, code: str, count: int = 1) -> tuple[Any, ...]:
        """Read `count` scalars. code: their format code in Python's struct module."""
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{code}")
        return values

    def string(self) -> str:
        """Read a string. Raises: struct.error where the string runs past the end of the file."""
        (size,) = self.take("Q")
        if self.at + size > len(self.data):
            raise struct.error("a string runs past the end of the file")
        start = self.at
        self.at += size
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a value of any GGUF type.

        kind: number of the GGUF value type.
        depth: number of arrays that contain the value.
        Raises: struct.error for an unknown type, for arrays with more values or levels than the limits allow, or where
          the value runs past the end of the file.
        """
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            (inner,) = self.take("I")
            (size,) = self.take("Q")
            self.values += size
            if self.values > MOST_VALUES:
                raise struct.error(f"its arrays hold more than {MOST_VALUES} values")
            if depth == DEEPEST:
                raise struct.error(f"arrays in arrays, more than {DEEPEST} deep")
            if inner in (STRING, ARRAY):
                return [self.value(inner, depth + 1) for _ in range(size)]
            return list(self.take(scalar(inner), size))
        return self.take(scalar(kind))[0]


def scalar(kind: int) -> str:
    """Return the struct format code of a GGUF scalar type. Raises: struct.error for any other type."""
    if kind not in SCALARS:
        raise struct.error(f"a value has the unknown type {kind}")
    return SCALARS[kind]


@dataclasses.dataclass(frozen=True)
class Header:
    """The part of a GGUF file before the weights: metadata, and the table of tensors by name."""

    meta: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Return the header of a GGUF file.

    The header is cached, so that it is parsed once for configuration, tokenizer and weights.
    Raises: UserError, naming the file, where it is truncated or damaged, or is not a GGUF file of version 2 or 3.
    """
    stat = path.stat()
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_header(path: Path, size: int, _mtime: int) -> Header:
    """Parse a GGUF file's header. The result is cached.

    size, _mtime: the file's size in bytes and time of modification. They are part of the cache's key, so a file that
      changes is parsed again.
    """
    with naming_file(path), path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise UserError(f"{path} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                header = _parse(Cursor(data))
            except (struct.error, OverflowError) as error:
                raise UserError(f"{path} is truncated or damaged (header: {error}): fetch it again") from None
    missing = max((tensor.end for tensor in header.tensors.values()), default=0) - size
    if missing > 0:
        raise UserError(f"{path} is truncated ({missing} bytes of weights are missing): fetch it again")
    return header


def _parse(cursor: Cursor) -> Header:
    """Parse a GGUF header. Raises: UserError for an unsupported version; struct.error where the header is damaged."""
    cursor.at = len(MAGIC)
    (version,) = cursor.take("I")
    tensors, keys = cursor.take("Q", 2)
    if version not in (2, 3):
        raise UserError(f"GGUF version {version} is not supported: little-endian files of versions 2 and 3 are")
    meta: dict[str, Any] = {}
    for _ in range(keys):
        name = cursor.string()
        if name in meta:
            raise struct.error(f"the key {short(name)} occurs twice")
        (kind,) = cursor.take("I")
        meta[name] = cursor.value(kind)
    found: dict[str, TensorInfo] = {}
    for _ in range(tensors):
        name = cursor.string()
        (dims,) = cursor.take("I")
        if name in found or not 1 <= dims <= MOST_DIMS:
            raise struct.error(f"tensor {short(name)} occurs twice, or has {dims} dimensions")
        shape = cursor.take("Q", dims)[::-1]
        (kind,) = cursor.take("I")
        (offset,) = cursor.take("Q")  # position of the tensor, in bytes from the start of the weights
        found[name] = TensorInfo(shape, quant_type(name, kind, shape), offset)
    align = meta.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if type(align) is not int or not 1 <= align <= MOST_ALIGNMENT or align & (align - 1):
        raise struct.error(f"general.alignment={short(align)} is not a power of two up to {MOST_ALIGNMENT}")
    start = -(-cursor.at // align) * align
    return Header(meta, {n: dataclasses.replace(tensor, offset=start + tensor.offset) for n, tensor in found.items()})


def quant_type(name: str, kind: int, shape: tuple[int, ...]) -> QuantType:
    """Return the storage type of a tensor.

    name, shape: the tensor's name and shape.
    kind: number of the type in the GGUF file.
    Raises: struct.error for an unknown number, an empty tensor, or a type whose blocks do not divide the tensor's rows.
    """
    try:
        found = QuantType(kind)
        block, _ = gguf.GGML_QUANT_SIZES[found]
    except (ValueError, KeyError):
        raise struct.error(f"tensor {short(name)} has the unknown type {kind}") from None
    if 0 in shape or shape[-1] % block:
        raise struct.error(
            f"tensor {short(name)} of {found.name} has shape {shape}: each row must consist of whole blocks"
        )
    return found


def load_config(path: Path) -> ModelConfig:
    """Return the ModelConfig of a GGUF file.

    Raises as `gguf_config.model_config` does; UserError for a damaged file.
    """
    header = read_header(path)
    weights = Weights(path)
    with naming_file(path):
        if (parts := header.meta.get("split.count", 1)) not in (0, 1):
            raise UnsupportedError(
                f"the model is split into {short(parts)} files, only a single file is read: join them with "
                "llama-gguf-split --merge"
            )
        if "token_embd.weight" not in header.tensors:
            raise UserError("tensor token_embd.weight is missing")

        def factors(name: str) -> Any:
            """Return the factors that a tensor holds, () if there is no such tensor."""
            if name not in header.tensors:
                return ()
            shape = header.tensors[name].shape
            if len(shape) > 1:
                raise UserError(f"tensor {name} has shape {shape}: a list of factors is needed")
            return weights.read(name, (slice(None),))

        vocab_size = header.tensors["token_embd.weight"].shape[0]
        family = families.ARCHITECTURES.get(str(header.meta.get("general.architecture")))
        if family == gemma4_gguf.FAMILY:
            rope = factors("rope_freqs.weight")
            return gemma4_gguf.model_config(
                header.meta, tensors=header.tensors, vocab_size=vocab_size, rope_factors=rope
            )
        if family == muse_glimmer_gguf.FAMILY:
            return muse_glimmer_gguf.model_config(
                header.meta, tensors=header.tensors, vocab_size=vocab_size, factors=factors
            )
        short_factors = factors("rope_factors_short.weight")  # LongRoPE's
        return gguf_config.model_config(
            header.meta,
            vocab_size=vocab_size,
            tied="output.weight" not in header.tensors,
            rope_factors=short_factors if len(short_factors) else factors("rope_freqs.weight"),  # Llama 3.1's
            long_factors=factors("rope_factors_long.weight"),
        )


def load_params(
    path: Path,
    config: ModelConfig,
    abstract: Mapping[str, Parameter],
    *,
    keep: Keep = unchanged,
    progress: bool = True,
    blocks: bool = False,
) -> dict[str, Any]:
    """Load the parameters of a GGUF file with the shapes, dtypes and shardings of `abstract`.

    keep, progress, blocks: as in `checkpoints.load_params`.
    Raises: UserError for a missing, extra or misshapen tensor or a truncated file; UnsupportedError for a
      quantisation that gguf.quants does not know.
    """
    interleaved = families.GGUF[config.family].interleaved
    reordered = edits.edit(False, edits.rotary_order(config))

    def edit(parameter: Parameter, part: str, x: np.ndarray) -> np.ndarray:
        if interleaved and part in ("q", "k"):
            return halves(x, config.head_dim)
        return reordered(parameter, part, x)

    table = names.gguf_of(config)
    return assemble(config, abstract, table, Weights(path, blocks), edit=edit, keep=keep, progress=progress)


def halves(x: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder the rows of whole query or key heads for the decoder's rotary embedding.

    A rotary embedding rotates pairs of rows. In the file the two rows of a pair are neighbours: order (pair, half). In
    the result they are half a head apart: order (half, pair).
    """
    rest = x.shape[1:]
    return x.reshape(-1, head_dim // 2, 2, *rest).swapaxes(1, 2).reshape(-1, *rest)


def stored_quantization(path: Path) -> None:
    """Return None, because weights are dequantised when they are loaded, unless an option keeps their blocks."""


def stored_forms(
    path: Path, config: ModelConfig, known: Mapping[str, Parameter], *, blocks: bool = False
) -> dict[str, Quantization]:
    """Return the form of each parameter that stays in its blocks, as `checkpoints.stored_forms` does."""
    weights = Weights(path, blocks)
    found: dict[str, Quantization] = {}
    for where, parameter in known.items():
        tensors = [weights.grouped(name) for name in names.gguf_of(config).sources(where).values()]
        if form := held(where, parameter, [tensor.form if tensor else None for tensor in tensors]):
            found[where] = form
    return found


def stored_dtype(path: Path) -> str:
    """Return the float dtype of a GGUF file's largest tensor, "bfloat16" if that tensor is quantised."""
    largest = max(read_header(path).tensors.values(), key=lambda tensor: math.prod(tensor.shape), default=None)
    if largest is None:
        raise UserError(f"{path} holds no tensors: fetch it again")
    return FLOATS.get(largest.kind, "bfloat16")


class Weights:
    """The tensors of a GGUF file, read as float arrays.

    blocks: whether matrices of the kinds of `gguf_blocks.FIELDS` stay in their blocks. Raises: UserError if there are
      none.
    """

    def __init__(self, path: Path, blocks: bool = False) -> None:
        self._blocks = blocks
        self.where = str(path)
        self._tensors = read_header(path).tensors
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        if blocks and not any(map(self.grouped, self._tensors)):
            kinds = ", ".join(map(str.upper, FIELDS))
            raise UserError(f"{path} holds no matrix in blocks of {kinds}: leave out quantization='gguf'")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def eight_bits(self, name: str) -> None:
        """Return None, because all tensors are dequantised."""

    def grouped(self, name: str) -> Blocks | None:
        """Return a matrix that stays in its blocks, None for any other tensor."""
        tensor = self._tensors.get(name)
        if not self._blocks or tensor is None or len(tensor.shape) != 2 or tensor.kind.name.lower() not in FIELDS:
            return None
        stored = self._bytes[tensor.offset : tensor.end].reshape(tensor.shape[0], tensor.row_bytes)
        return Blocks(tensor.kind.name.lower(), stored)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return the slice `index` of a tensor as float32, or as float16 if it is stored as float16."""
        tensor = self._tensors[name]
        block, size = gguf.GGML_QUANT_SIZES[tensor.kind]
        rows = self._bytes[tensor.offset : tensor.end].reshape(*tensor.shape[:-1], tensor.row_bytes)[index[:-1]]
        # Each row is stored as blocks of columns. All blocks that the slice touches are dequantised, then the slice is
        # cut out.
        start, stop, _ = index[-1].indices(tensor.shape[-1])
        first, last = start // block, -(-stop // block)
        packed = np.ascontiguousarray(rows[..., first * size : last * size])
        if tensor.kind == QuantType.F16:
            x = packed.view(np.float16)  # float16 halves the bytes to move to the device, which converts the values
        else:
            try:
                x = gguf.quants.dequantize(packed, tensor.kind)
            except NotImplementedError as error:
                raise UnsupportedError(f"{self.where}: tensor {name}: {error}") from None
        x = x[..., start - first * block : stop - first * block]
        return np.array(x) if np.may_share_memory(x, self._bytes) else x  # a copy, because the file may change

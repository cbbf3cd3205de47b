"""Self-contained orbax folders, the checkpoint format that jaxspec writes for decoders.

folder/jaxspec.json      ModelConfig as JSON, stop ids included; the key quantization lists forms of matrices in 8 bits
folder/params/           the flat dict of parameters, written by orbax (8-bit matrices: see orbax_eight_bits.py)
folder/tokenizer*.json   the tokenizer, written by transformers' save_pretrained
folder/tokenizer.sha256  only in a draft's folder, in place of a tokenizer: digest of its target's tokenizer
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import jax

from checkpoints.assemble import Keep, unchanged
from checkpoints.orbax_eight_bits import SCALE, ZEROS, declared, flat, form, weight
from checkpoints.published import Published
from checkpoints.reading import is_regular_file, naming_file, read_json
from jaxspec.common.errors import UserError
from jaxspec.common.progress import working
from jaxspec.common.writing import disk_errors
from jaxspec.models.config import ModelConfig
from jaxspec.models.parameters import Parameter
from jaxspec.options.quantization import Quantization
from pallas_kernels.weights import AnyWeight

CONFIG_FILE = "jaxspec.json"
PARAMS = "params"
FINGERPRINT = "tokenizer.sha256"
UNFINISHED = "*.orbax-checkpoint-tmp"  # pattern of the folders that orbax has not finished writing
LAST_WRITER = "serialize_shardings"  # name of the orbax thread that may go on after another orbax thread has failed
PATIENCE = 10  # largest number of seconds to wait for a thread that writes with orbax
FORMS = "quantization"  # key of jaxspec.json
BATCH = 1 << 30  # bytes of the parameters that are loaded before they are quantised
CHUNK = 1 << 22  # size in bytes of an array's stored chunks; to read a part of an array, orbax reads only some chunks


def save(
    folder: str | Path,
    params: Mapping[str, AnyWeight],
    config: ModelConfig,
    tokenizer: Any = None,
    *,
    fingerprint: str | None = None,
    forms: Sequence[Quantization] = (),
    replace: bool = False,
) -> None:
    """Write a checkpoint folder. The folder gets its name only when it is complete.

    tokenizer: the model's tokenizer; None for a draft, which uses its target's.
    fingerprint: digest of the target's tokenizer, for a draft.
    forms: the forms of the parameters in 8 bits.
    replace: whether to replace an earlier checkpoint in the folder. Other files in the folder stay.
    Raises: FileExistsError where the folder exists and is not empty, unless `replace` is True.
    """
    folder = Path(folder).expanduser().absolute()
    if not replace:
        check_free(folder)
    with appearing(folder, replaced=(PARAMS,) if replace else ()) as partial:
        save_arrays(partial / PARAMS, flat(params))
        raw = config.to_json() | ({FORMS: [dataclasses.asdict(form) for form in forms]} if forms else {})
        (partial / CONFIG_FILE).write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        if fingerprint is not None:
            (partial / FINGERPRINT).write_text(fingerprint + "\n", encoding="utf-8")


@contextlib.contextmanager
def appearing(folder: Path, replaced: Collection[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder to fill. At the end move it, or its entries, to `folder`, unless there was an error.

    replaced: names of entries that are deleted from an existing `folder` before the new entries are moved there. Other
      entries stay, unless a new one has the same name. If `replaced` is empty, `folder` must be missing or empty.
    Raises: DiskError where the folder cannot be written.
    """
    partial = folder.parent / f".{folder.name}.partial"
    try:
        with disk_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            remove(partial)
            partial.mkdir()
            yield partial
            if replaced and folder.is_dir():
                for name in replaced:
                    shutil.rmtree(folder / name, ignore_errors=True)
                for part in partial.iterdir():
                    part.replace(folder / part.name)
            else:
                partial.replace(folder)
    finally:
        remove(partial)


def remove(partial: Path) -> None:
    """Delete a temporary folder, or the file that blocks its name after an interrupt (`end_writing`)."""
    shutil.rmtree(partial, ignore_errors=True)
    with contextlib.suppress(OSError):
        partial.unlink()


def check_free(folder: Path) -> None:
    """Raise FileExistsError unless the folder is missing or empty."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: choose another folder, or remove this one first")


def load_config(folder: Path) -> ModelConfig:
    """Return the ModelConfig of a checkpoint folder.

    Raises: FileNotFoundError or UserError, naming jaxspec.json, where that file is missing or damaged.
    """
    raw = read_json(folder / CONFIG_FILE)
    with naming_file(folder / CONFIG_FILE):
        return ModelConfig.from_json({key: value for key, value in raw.items() if key != FORMS})


def stored_quantization(folder: Path) -> Published | None:
    """Return the 8-bit forms that jaxspec.json lists, None if it lists none.

    Raises: FileNotFoundError or UserError, naming jaxspec.json, where that file is missing or damaged.
    """
    raw = read_json(folder / CONFIG_FILE)
    if FORMS not in raw:
        return None
    with naming_file(folder / CONFIG_FILE):
        return Published("jaxspec", tuple((Quantization(**form), ()) for form in raw[FORMS]))


def stored_forms(folder: Path, config: ModelConfig, known: Mapping[str, Parameter]) -> dict[str, Quantization]:
    """Return the form of each parameter in 8 bits, as `checkpoints.stored_forms` does."""
    if stored_quantization(folder) is None:
        return {}
    stored = stored_arrays(folder / PARAMS)
    with naming_file(folder / PARAMS):
        return {name: form(name, parameter, stored) for name, parameter in known.items() if name + SCALE in stored}


def load_params(
    folder: Path,
    config: ModelConfig,
    abstract: Mapping[str, Parameter],
    *,
    keep: Keep = unchanged,
    progress: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint folder's parameters with the shapes, dtypes and shardings of `abstract`.

    keep, progress: as in `checkpoints.load_params`.
    Raises: UserError where tensor parallelism needs copies of key-value heads, which this format cannot make; else as
      `load_arrays` does.
    """
    layer = config.layers[0]
    if layer.kv_copies > 1:
        own = layer.num_kv_heads // layer.kv_copies
        raise UserError(
            f"{folder} has {own} key-value heads, and heads of an orbax checkpoint are not copied: use a "
            f"tensor_parallel_size of at most {own}, or the model's safetensors or GGUF file"
        )
    path = folder / PARAMS
    stored = stored_arrays(path)
    weights = {name: declared(path, name, parameter, stored) for name, parameter in abstract.items()}
    check_arrays(path, flat(weights), stored)
    params: dict[str, Any] = {}
    with working("loading weights", enabled=progress):
        for names in batches(abstract, math.inf if keep is unchanged else BATCH):
            arrays = load_arrays(path, flat({name: weights[name] for name in names}), stored)
            for name in names:
                x: Any = weight(path, name, weights[name], arrays)
                params[name] = keep(name, abstract[name], x)
                del x  # else memory would hold this array while the next one is quantised
    return params


def batches(abstract: Mapping[str, Parameter], most: float) -> Iterator[list[str]]:
    """Yield the names of the parameters in batches of at most `most` bytes, or of a single parameter."""
    batch: list[str] = []
    size = 0
    for name, parameter in abstract.items():
        if batch and size + parameter.nbytes > most:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += parameter.nbytes
    yield batch


def stored_dtype(folder: Path) -> str:
    """Return the dtype, by name, of the largest array in a checkpoint folder that is not a matrix in 8 bits."""
    with naming_file(folder / PARAMS):
        stored = stored_arrays(folder / PARAMS)
        floats = [x for name, x in stored.items() if name + SCALE not in stored and not name.endswith((SCALE, ZEROS))]
        result: str = max(floats, key=lambda array: math.prod(array.shape)).dtype.name
        return result


# Only the code below this line calls orbax.


def save_arrays(path: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Write a flat dict of arrays with orbax.

    Orbax runs in its own thread here. A keyboard interrupt can then stop orbax's writers, which would otherwise create
    the folder again after it was deleted.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    saved: Future[None] = Future()

    def save() -> None:
        try:
            how = ocp.Context()
            how.array.saving.storage_options.chunk_byte_size = CHUNK
            quiet()
            with how, last_writer():
                ocp.save(path, dict(arrays))
            saved.set_result(None)
        except BaseException as error:
            saved.set_exception(error)

    try:
        threading.Thread(target=save, daemon=True).start()
        saved.result()
    except KeyboardInterrupt:
        end_writing(path.parent)
        wait([saved], PATIENCE)
        raise


def end_writing(folder: Path) -> None:
    """Replace a folder by an empty file, so that orbax's threads that still write to the folder fail."""
    while not folder.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.open("x").close()


@contextlib.contextmanager
def last_writer() -> Iterator[None]:
    """At the end of the block, wait for the orbax thread LAST_WRITER, which may go on after another thread failed."""
    try:
        yield
    finally:
        for thread in threading.enumerate():
            if thread.name == LAST_WRITER:
                thread.join(PATIENCE)


@functools.cache
def quiet() -> None:
    """Stop orbax's threads from logging errors with tracebacks, because the errors are also raised to the caller.

    The log filter is never removed, because some threads log after another thread's error was raised.
    """

    def is_news(record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in record.pathname)

    logging.getLogger("absl").addFilter(is_news)


def stored_arrays(path: Path) -> dict[str, Any]:
    """Return orbax's metadata of the stored arrays, by name: each array's shape and dtype.

    Raises: FileNotFoundError where there is no complete checkpoint; UserError where the checkpoint is damaged.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    with naming_file(path):
        if not path.is_dir() or not ocp.is_orbax_checkpoint(path):
            raise FileNotFoundError(f"{path} is missing or incomplete: it is not an orbax checkpoint")
        for file in path.rglob("*"):
            is_regular_file(file)
        return dict(ocp.metadata(path).metadata)


def check_arrays(path: Path, abstract: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Compare the names and shapes of the stored arrays with those of `abstract`.

    Orbax would fail halfway and leave coroutines behind.

    Raises: UserError for an array that is missing, has a wrong shape or is not in `abstract`.
    """
    for name, leaf in abstract.items():
        if name not in stored:
            raise UserError(f"{path}: array {name} is missing")
        if (found := tuple(stored[name].shape)) != leaf.shape:
            raise UserError(f"{path}: array {name} has shape {found}, expected {leaf.shape}")
    if extra := sorted(set(stored) - set(abstract)):
        raise UserError(f"{path}: array {extra[0]} is not part of the model ({len(extra)} such)")


def load_arrays(path: Path, abstract: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Load some arrays of a checkpoint, with the shapes, dtypes and shardings of `abstract`.

    stored: result of `stored_arrays`. The arrays that are not in `abstract` are not loaded.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    with naming_file(path):
        found = ocp.load(path.expanduser().absolute(), {name: abstract.get(name, ...) for name in stored})
        return {name: found[name] for name in abstract}


class History:
    """The checkpoints of a training run, written in the background.

    Two are kept: the last checkpoint, and the one with the highest metric.

    folder: folder of the checkpoints.
    metric: name of the metric.
    """

    def __init__(self, folder: str | Path, metric: str) -> None:
        import orbax.checkpoint.experimental.v1 as ocp

        quiet()
        self.folder = Path(folder).expanduser().absolute()
        self.metric = metric
        policies = ocp.training.preservation_policies
        # A checkpoint without metrics is the remainder of one that a killed run was deleting.
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics[metric], n=1, keep_checkpoints_without_metrics=False
        )
        keep = policies.AnyPreservationPolicy([policies.LatestN(1), best])
        self.checkpointer = ocp.training.Checkpointer(
            self.folder, preservation_policy=keep, cleanup_tmp_directories=True
        )

    @property
    def last(self) -> int | None:
        """The training step of the last checkpoint, None if there is no checkpoint."""
        latest = self.checkpointer.latest
        return None if latest is None else latest.step

    @property
    def best(self) -> float | None:
        """The highest value of the metric among the checkpoints, None if there is no checkpoint."""
        known = (c.metrics for c in self.checkpointer.checkpoints)
        return max((metrics[self.metric] for metrics in known if metrics), default=None)

    def save(self, step: int, state: Any, metrics: Mapping[str, float]) -> None:
        """Start to save the state that training has after step number `step`.

        Raises: DiskError where this checkpoint, or the one before it, cannot be written.
        """
        with disk_errors(self.folder):
            self.checkpointer.save_async(step, state, metrics=dict(metrics), force=True)

    def load(self, step: int, like: Any) -> Any:
        """Return the saved state of a training step, with the shapes, dtypes and shardings of `like`."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        return self.checkpointer.load(step, abstract)

    def close(self) -> None:
        """Wait until all checkpoints are written, and delete incomplete ones. Raises: DiskError if writing failed."""
        try:
            with disk_errors(self.folder), last_writer():
                self.checkpointer.close()
        finally:
            for unfinished in self.folder.glob(UNFINISHED):
                shutil.rmtree(unfinished, ignore_errors=True)

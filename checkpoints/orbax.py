"""Self-contained folders: parameters as orbax wrote them, the ModelConfig as JSON, the tokenizer's own files.

folder/jaxspec.json      ModelConfig, stop ids included
folder/params/           the flat dict of parameters
folder/tokenizer*.json   as transformers' save_pretrained writes them; or, of a draft, which uses its target's,
folder/tokenizer.sha256  only that tokenizer's fingerprint
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from checkpoints.reading import read_json, there, told
from jaxspec.common.errors import UserError
from jaxspec.common.progress import working
from jaxspec.common.writing import disk_errors
from jaxspec.models.config import ModelConfig
from jaxspec.models.parameters import Parameter

CONFIG_FILE = "jaxspec.json"
PARAMS = "params"
FINGERPRINT = "tokenizer.sha256"
UNFINISHED, LAST_WRITER = "*.orbax-checkpoint-tmp", "serialize_shardings"  # orbax's folders; one of its threads
PATIENCE = 10  # seconds, for orbax to notice that its folder is gone
CHUNK = 1 << 22  # bytes that are read at a time: a device that needs a part of an array reads no more than that


def save(
    folder: str | Path,
    params: Mapping[str, jax.Array],
    config: ModelConfig,
    tokenizer: Any = None,
    *,
    fingerprint: str | None = None,
    replace: bool = False,
) -> None:
    """Writes a checkpoint folder; it appears under its name only when it is complete.

    fingerprint: of the tokenizer, in its place; replace: an earlier checkpoint in the folder, whose other files stay.
    Raises: FileExistsError where the folder exists and is not empty, unless it is to be replaced.
    """
    folder = Path(folder).expanduser().absolute()
    if not replace:
        check_free(folder)
    with appearing(folder, replaced=(PARAMS,) if replace else ()) as partial:
        save_arrays(partial / PARAMS, params)
        (partial / CONFIG_FILE).write_text(json.dumps(config.to_json(), indent=1) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        if fingerprint is not None:
            (partial / FINGERPRINT).write_text(fingerprint + "\n", encoding="utf-8")


@contextlib.contextmanager
def appearing(folder: Path, replaced: Collection[str] = ()) -> Iterator[Path]:
    """A folder to fill, which has the name `folder` afterwards, unless there was an error. replaced: where that one is
    there already, what is deleted of it; what else it holds stays. Raises DiskError where it cannot be written."""
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
    shutil.rmtree(partial, ignore_errors=True)
    with contextlib.suppress(OSError):
        partial.unlink()  # what `end_writing` left in its place


def check_free(folder: Path) -> None:
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: choose another place, or remove it first")


def load_config(folder: Path) -> ModelConfig:
    raw = read_json(folder / CONFIG_FILE)
    with told(folder / CONFIG_FILE):
        return ModelConfig.from_json(raw)


def load_params(
    folder: Path, config: ModelConfig, abstract: Mapping[str, Parameter], *, progress: bool = True
) -> dict[str, jax.Array]:
    """Parameters with the shapes, dtypes and shardings of `abstract`.

    Raises: UserError where key-value heads were to be copied, else as `load_arrays` does.
    """
    layer = config.layers[0]
    if layer.kv_copies > 1:
        own = layer.num_kv_heads // layer.kv_copies
        raise UserError(
            f"{folder} has {own} key-value heads, and none is copied from there: use a tensor_parallel_size of at most "
            f"{own}, or the model's safetensors or GGUF file"
        )
    with working("loading weights", enabled=progress):
        return load_arrays(folder / PARAMS, abstract)


def stored_dtype(folder: Path) -> str:
    """That of the largest array."""
    with told(folder / PARAMS):
        return max(stored_arrays(folder / PARAMS).values(), key=lambda array: math.prod(array.shape)).dtype.name


# The only place that knows orbax's API.


def save_arrays(path: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Write a flat dict of arrays. Orbax does so in a thread, so that an interrupt does not leave its writers at work:
    they would make the folder again."""
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
    """Put a file in the folder's place: whoever still writes there fails."""
    while not folder.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.open("x").close()


@contextlib.contextmanager
def last_writer() -> Iterator[None]:
    """Wait for the thread of orbax that goes on after another has failed."""
    try:
        yield
    finally:
        for thread in threading.enumerate():
            if thread.name == LAST_WRITER:
                thread.join(PATIENCE)


@functools.cache
def quiet() -> None:
    """Keep orbax's threads from logging the tracebacks of errors, which are raised here. Some log theirs after another
    has failed and its error was raised, so that this is for good."""

    def is_news(record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in record.pathname)

    logging.getLogger("absl").addFilter(is_news)


def stored_arrays(path: Path) -> dict[str, Any]:
    """Name -> shape and dtype of what is stored."""
    import orbax.checkpoint.experimental.v1 as ocp

    with told(path):
        if not path.is_dir() or not ocp.is_orbax_checkpoint(path):
            raise FileNotFoundError(f"{path} is missing or incomplete: it is no orbax checkpoint")
        for file in path.rglob("*"):
            there(file)
        return dict(ocp.metadata(path).metadata)


def load_arrays(path: str | Path, abstract: Mapping[str, Any]) -> dict[str, jax.Array]:
    """A flat dict of arrays, restored onto the shapes, dtypes and shardings of `abstract`.

    Raises: UserError for an array that is missing, of a wrong shape or not asked for; FileNotFoundError without a
      checkpoint.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    path = Path(path).expanduser().absolute()
    stored = stored_arrays(path)
    # Compared here: orbax itself would fail halfway, with coroutines left behind.
    for name, leaf in abstract.items():
        if name not in stored:
            raise UserError(f"{path}: array {name} is missing")
        if (found := tuple(stored[name].shape)) != leaf.shape:
            raise UserError(f"{path}: array {name} has shape {found}, expected {leaf.shape}")
    if extra := sorted(set(stored) - set(abstract)):
        raise UserError(f"{path}: array {extra[0]} is not part of the model ({len(extra)} such)")
    here = SingleDeviceSharding(jax.devices()[0])
    with told(path):
        return ocp.load(path, {name: sharded(leaf, here) for name, leaf in abstract.items()})


def sharded(leaf: Any, default: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or default)


class History:
    """The checkpoints of a training run, written in the background: the last one and the one whose `metric` is best."""

    def __init__(self, folder: str | Path, metric: str) -> None:
        import orbax.checkpoint.experimental.v1 as ocp

        quiet()
        self.folder, self.metric = Path(folder).expanduser().absolute(), metric
        policies = ocp.training.preservation_policies
        # What has no metrics is a checkpoint that a killed run was removing.
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics[metric], n=1, keep_checkpoints_without_metrics=False
        )
        keep = policies.AnyPreservationPolicy([policies.LatestN(1), best])
        self.checkpointer = ocp.training.Checkpointer(
            self.folder, preservation_policy=keep, cleanup_tmp_directories=True
        )

    @property
    def last(self) -> int | None:
        """The step of the last checkpoint."""
        latest = self.checkpointer.latest
        return None if latest is None else latest.step

    @property
    def best(self) -> float | None:
        """The best metric so far."""
        known = (c.metrics for c in self.checkpointer.checkpoints)
        return max((metrics[self.metric] for metrics in known if metrics), default=None)

    def save(self, step: int, state: Any, metrics: Mapping[str, float]) -> None:
        """Raises DiskError where this step, or the one before, cannot be written."""
        with disk_errors(self.folder):
            self.checkpointer.save_async(step, state, metrics=dict(metrics), force=True)

    def load(self, step: int, like: Any) -> Any:
        """The state of a step, with the shapes, dtypes and shardings of `like`."""
        abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        return self.checkpointer.load(step, jax.tree.map(abstract, like))

    def close(self) -> None:
        """Wait for what is being written. Raises DiskError where it cannot be; nothing half is left."""
        try:
            with disk_errors(self.folder), last_writer():
                self.checkpointer.close()
        finally:
            for unfinished in self.folder.glob(UNFINISHED):
                shutil.rmtree(unfinished, ignore_errors=True)

"""What the target says of all the data: its likeliest ids, found once and kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.engine.setup import Model
from jaxspec.errors import UserError
from jaxspec.models.decoder import bind, whole
from jaxspec.models.layers import Backend
from jaxspec.parallel.placement import Placement
from jaxspec.progress import say, token_progress
from jaxspec.shapes import Array, Float, Int
from jaxspec.train.ahead import ahead
from jaxspec.train.data import Rows, id_dtype
from jaxspec.train.loss import cut, num_pieces
from jaxspec.train.step import place_rows


def kept(
    folder: Path,
    target: Model,
    rows: Rows,
    count: int,
    n: int,
    *,
    batch_size: int,
    backend: Backend,
    devices: Placement,
) -> np.ndarray:
    """The target's n likeliest ids at every position of the first `count` rows, as records [count] that are read from
    disk when they are indexed: ids [T, n], likeliest first, and log_p f16[T, n], of the softmax over all ids.

    They lie in a file in the folder, whose name tells the target, the rows and n. It grows a batch at a time: a run
    that was ended, or that needed fewer rows, has done its part of the work for the next one.

    Args:
      batch_size: rows of a pass, which the devices share.

    Raises: UserError where the disk has no room for them.
    """
    vocab_size, length = target.config.vocab_size, rows.tokens.shape[1]
    record = np.dtype([("ids", id_dtype(vocab_size), (length, n)), ("log_p", np.float16, (length, n))])
    path = folder / f"top-{n}-{digest(target, rows)}.bin"
    done = path.stat().st_size // record.itemsize if path.is_file() else 0
    size, free = (count - done) * record.itemsize, shutil.disk_usage(folder).free
    if size > free:
        raise UserError(f"{path} needs {size / 1e9:.1f} GB more, {free / 1e9:.1f} are free: lower --top-n or --steps")
    what = f"the target's {n} likeliest ids of {count * length:,} tokens"
    say(f"{what}: {count * record.itemsize / 1e9:.2f} GB in {path}" + " (found there)" * (done >= count))

    params, place = jax.device_put(target.params, devices.sharding()), place_rows(devices)

    @jax.jit
    def find(params, tokens):
        hidden = whole(target.config, params, tokens, backend)[1]
        says = lambda hidden: top(bind(target.config, params).logits(hidden, backend), n)
        ids, log_p = lax.map(says, cut(hidden, num_pieces(batch_size, length, vocab_size)))
        joined = lambda x, dtype: x.swapaxes(0, 1).reshape(batch_size, length, n).astype(dtype)
        return joined(ids, record["ids"].base), joined(log_p, jnp.float16)

    def ask(start: int) -> tuple[jax.Array, jax.Array]:
        part = rows.tokens[np.arange(start, start + batch_size).clip(max=count - 1)]
        return find(params, place(part.astype(np.int32)))

    starts = range(done, count, batch_size)
    if starts:
        path.touch()
        with (
            path.open("r+b") as file,
            contextlib.closing(ahead(ask, starts)) as answers,
            token_progress(count * length, done * length, enabled=True) as report,
        ):
            file.seek(done * record.itemsize)
            for start, answer in zip(starts, answers, strict=True):
                records = np.empty(batch_size, record)
                records["ids"], records["log_p"] = jax.device_get(answer)
                now = min(start + batch_size, count)
                file.write(records[: now - start].tobytes())
                report(now * length)
    return np.memmap(path, record, "r", shape=(count,))


def top(logits: Float[Array, "*rest V"], n: int) -> tuple[Int[Array, "*rest n"], Float[Array, "*rest n"]]:
    """The n likeliest ids, likeliest first, and their log-probabilities.

    GPUs sort all that lax.top_k is given (https://github.com/openxla/xla/issues/25487). The n largest numbers lie in
    the n groups with the largest maxima: of SmolLM2's 49,152 ids 1,536 maxima and 2,048 members are left to sort.
    """
    vocab_size = logits.shape[-1]
    members = 1 << (vocab_size // n).bit_length() // 2
    groups = -(-vocab_size // members)
    lacking = [(0, 0)] * (logits.ndim - 1) + [(0, members * groups - vocab_size)]
    table = jnp.pad(logits, lacking, constant_values=-jnp.inf).reshape(*logits.shape[:-1], members, groups)
    best = lax.top_k(jnp.max(table, axis=-2), n)[1]
    table = jnp.take_along_axis(table, best[..., None, :], axis=-1)
    found, at = lax.top_k(table.reshape(*logits.shape[:-1], members * n), n)
    ids = at // n * groups + jnp.take_along_axis(best, at % n, axis=-1)
    return ids, found - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def digest(target: Model, rows: Rows) -> str:
    """Of the rows and of the first row of each of the target's parameters."""
    found = hashlib.sha256(f"{rows.tokens.dtype}{rows.tokens.shape}".encode())
    found.update(np.ascontiguousarray(rows.tokens).data)
    for name in sorted(target.params):
        found.update(np.asarray(target.params[name][:1]).tobytes())
    return found.hexdigest()[:12]

"""Setting up a training run: loading target, draft and data, checking that they fit, and the target as teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import checkpoints
from jaxspec.common.errors import UserError
from jaxspec.common.progress import write_line
from jaxspec.loading.drafts import check_same_tokenizer, load_draft
from jaxspec.loading.resolved import resolved, resolved_draft
from jaxspec.loading.weights import compute_dtype, load
from jaxspec.models.decoder import parameters
from jaxspec.models.model import Model
from jaxspec.parallel.placement import make_placement
from jaxspec.runtime.compilation_cache import enable_compilation_cache
from jaxspec.train import build, data, features, further, methods, top_tokens
from jaxspec.train.kept import Records
from jaxspec.train.loss import computed, own_ids_first
from jaxspec.train.measure import make_measure
from jaxspec.train.step import dense_backend
from jaxspec.train.train_options import TrainOptions
from pallas_kernels.device import Device, here

TOP_N = 64  # default number of the target's most probable next tokens to learn from
LONGEST_PROMPT = 128  # largest number of tokens of a prompt in a measurement


@dataclasses.dataclass
class Setup:
    """The models, the data and the devices of a training run.

    target: the target, placed for the engine that measures the draft.
    draft: the initial draft. Its parameters are float32, except an embedding table that it shares with the target.
    ids: the maps d2t and t2d between the ids of a reduced vocabulary and the target's; else empty.
    shards: sequences of the training data.
    rows: training rows made of these sequences.
    stop_ids: token ids that end an answer.
    fingerprint: fingerprint of the target's tokenizer.
    dtype: dtype of the computation.
    placement: placement of the engine that measures the draft.
    devices: placement over all devices, over which a step's rows are sharded.
    """

    options: TrainOptions
    target: Model
    draft: Model
    ids: dict[str, jax.Array]
    shards: data.Shards
    rows: data.Rows
    stop_ids: tuple[int, ...]
    fingerprint: str
    device: Device
    dtype: Any
    placement: Any
    devices: Any

    @property
    def frozen(self) -> dict[str, jax.Array]:
        """Parameters of the draft that are not trained: maps of ids, and an embedding table shared with the target."""
        known = parameters(self.draft.config).items()
        return self.ids | {name: self.target.params[name] for name, p in known if p.from_target}


def prepare(options: TrainOptions) -> Setup:
    """Load the target and the data, check that they fit, and make the initial draft.

    Raises: UserError if options, target and data do not fit together; FileNotFoundError if there is no data.
    """
    enable_compilation_cache()
    device = here()
    count = len(jax.devices())
    method = methods.implementation(options.method)
    build.check_taken(options, method.TAKES)
    if options.keep_features and not method.READS:
        raise UserError(f"--keep-features, but --method {options.method} reads no features: leave it out")
    if options.batch_size // options.accumulate % count:
        raise UserError(
            f"--batch-size {options.batch_size} in {options.accumulate} parts does not divide over {count} devices: "
            f"give a multiple of {options.accumulate * count}"
        )
    shards = data.load(options.data)
    rows = data.packed(data.training(shards), options.seed, options.length)
    data.chosen(len(rows), options.seed, 0, options.batch_size)  # raises UserError if there are too few rows
    source = checkpoints.resolve(options.target)
    tokenizer = checkpoints.load_tokenizer(source)
    placement = make_placement()
    dtype = compute_dtype(options.dtype, device)
    write_line(f"loading {options.target} ...")
    found = resolved(source)
    target = load(found, dtype, placement)
    fingerprint = checkpoints.fingerprint(tokenizer)
    check_data(options, target, fingerprint, shards)
    counts = data.frequencies(shards, target.config.vocab_size)
    if options.init_from:
        begun = checkpoints.resolve(options.init_from)
        draft = load_draft(resolved_draft(begun, found), jnp.float32, placement, target)
        draft = further.begun(draft, target, options, counts, placement)
        check_same_tokenizer(source, tokenizer, begun)
    else:
        draft = method.new(options, target, counts, placement)
    ids = {name: draft.params[name] for name, p in parameters(draft.config).items() if p.kind == "ids"}
    stop_ids = checkpoints.load_stop_ids(source, tokenizer, found.config)
    everywhere = make_placement(count)
    return Setup(options, target, draft, ids, shards, rows, stop_ids, fingerprint, device, dtype, placement, everywhere)


def check_data(options: TrainOptions, target: Model, fingerprint: str, shards: data.Shards) -> None:
    """Raise UserError if the data has other ids or another tokenizer than the target, or an option exceeds its limits.

    fingerprint: fingerprint of the target's tokenizer.
    """
    c = target.config
    largest = int(shards.tokens.max())
    if largest >= c.vocab_size:
        raise UserError(
            f"{options.data} holds the id {largest}, {options.target} has {c.vocab_size} ids: "
            "generate the data with this target"
        )
    if shards.manifest.get("tokenizer", fingerprint) != fingerprint:
        raise UserError(
            f"{options.data} was written by {shards.manifest.get('target')}, which has another tokenizer than "
            f"{options.target}: generate the data with this target"
        )
    longest = min(int(data.heldout(shards).prompt_length.max()), LONGEST_PROMPT) + options.eval_tokens
    measured = f"--eval-tokens {options.eval_tokens}, with prompts {longest} tokens,"
    for value, given in ((options.length, f"--length {options.length}"), (longest, measured)):
        if value > c.max_model_len:
            raise UserError(f"{given} exceeds the maximum length of {options.target}, {c.max_model_len}: lower it")
    if (options.top_n or 0) > c.vocab_size:
        raise UserError(f"--top-n {options.top_n} exceeds the target's {c.vocab_size} ids: lower it, or give 0 for all")


@dataclasses.dataclass
class Teacher:
    """The target in the form in which the training steps use it.

    target: the model that the steps take. It has no parameters if the batches hold all that a step needs of it.
    records: the target's results for the training rows, on disk.
    """

    setup: Setup
    target: Model
    records: list[Records]

    def ask(self, step: int, steps: int, over: Callable[[float], bool]) -> bool:
        """Compute the target's records that the next steps need. Return False if the time is up before.

        step, steps: the first of these steps, and their number. over: function over(seconds) that returns whether the
        run's time will be up after so many seconds.
        """
        if not self.records:
            return True
        o = self.setup.options
        chosen = (data.chosen(len(self.setup.rows), o.seed, at, o.batch_size) for at in range(step, step + steps))
        needed = 1 + max(rows.max() for rows in chosen)
        return all(len(records.up_to(needed, over)) >= min(needed, records.count) for records in self.records)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """Return the batch of a training step for `loss_sums`. Before, `ask` must have computed the step's records."""
        o, rows = self.setup.options, self.setup.rows
        at = data.chosen(len(rows), o.seed, step, o.batch_size)
        draw = np.random.default_rng([o.seed, step]).integers(2**32, size=len(at), dtype=np.uint32)
        found = {"tokens": rows.tokens[at].astype(np.int32), "mask": rows.mask[at], "draw": draw}
        for records in self.records:
            found |= {name: records.known[name][at] for name in records.dtype.names or ()}
        return found


def teacher(setup: Setup) -> Teacher:
    """Return the target in the form that the training steps use.

    Raises: UserError if the disk has no room for the target's results.
    """
    o, rows, target = setup.options, setup.rows, setup.target
    reads = methods.implementation(o.method).READS
    count = min(len(rows), o.steps * o.batch_size)
    records = []
    how: dict[str, Any] = {
        "batch_size": o.batch_size // o.accumulate,
        "backend": dense_backend(target.config, setup.device, setup.dtype),
        "devices": setup.devices,
    }
    if o.keep_features:
        records.append(features.kept(o.data, target, rows, count, getattr(setup.draft.config, "taps", ()), **how))
    top_n = TOP_N if o.top_n is None else o.top_n
    if top_n:
        records.append(top_tokens.kept(o.data, target, rows, count, top_n, **how))
        target = target if reads else Model(target.config, {})
    else:
        target = own_ids_first(target, np.asarray(setup.ids["d2t"]) if setup.ids else None)
    return Teacher(setup, target, records)


def measurer(setup: Setup) -> Any:
    """Return the function that measures the draft on prompts of held-out sequences, evenly spaced among these."""
    o, held = setup.options, data.heldout(setup.shards)
    chosen = np.linspace(0, len(held) - 1, min(o.eval_prompts, len(held))).astype(int)
    prompts = [held.tokens[i, : max(1, min(held.prompt_length[i], LONGEST_PROMPT))].tolist() for i in chosen]
    return make_measure(
        setup.target,
        Model(setup.draft.config, dict(computed(setup.draft.params, setup.dtype))),
        prompts,
        num_speculative_tokens=o.num_speculative_tokens,
        max_tokens=o.eval_tokens,
        stop_ids=setup.stop_ids,
        placement=setup.placement,
        device=setup.device,
    )

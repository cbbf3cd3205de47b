"""What a training run begins with: target, draft and data, checked against one another, and what the target teaches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import checkpoints
from jaxspec.common.errors import UserError
from jaxspec.common.progress import say
from jaxspec.loading.drafts import check_same_tokenizer, load_draft
from jaxspec.loading.resolved import resolved, resolved_draft
from jaxspec.loading.weights import compute_dtype, load
from jaxspec.models.decoder import parameters
from jaxspec.models.model import Model
from jaxspec.parallel.placement import make_placement
from jaxspec.runtime.compilation_cache import enable_compilation_cache
from jaxspec.train import build, data, features, further, likeliest, methods
from jaxspec.train.kept import Records
from jaxspec.train.loss import computed, own_ids_first
from jaxspec.train.measure import make_measure
from jaxspec.train.options import TrainOptions
from jaxspec.train.step import dense_backend
from pallas_kernels.device import Device, here

TOP_N = 64  # ids that the target teaches, unless told otherwise
LONGEST_PROMPT = 128  # of measurements, in tokens


@dataclasses.dataclass
class Setup:
    """What a run works with.

    target: on one device, as the engine takes it.
    draft: float32, as it begins, all but a table that it reads in the target.
    ids: its vocabulary, if reduced.
    rows: of the sequences that are trained on.
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
    placement: Any  # of the engine
    devices: Any  # placement over all devices, which share a step's rows

    @property
    def frozen(self) -> dict[str, jax.Array]:
        """The draft's parameters that are not trained."""
        known = parameters(self.draft.config).items()
        return self.ids | {name: self.target.params[name] for name, p in known if p.borrowed}


def prepare(options: TrainOptions) -> Setup:
    """Loads the target and the data, and checks that they fit."""
    enable_compilation_cache()
    device, count, method = here(), len(jax.devices()), methods.implementation(options.method)
    build.check_taken(options, method.TAKES)
    if options.keep_features and not method.READS:
        raise UserError(f"--keep-features, but --method {options.method} reads none: leave it out")
    if options.batch_size // options.accumulate % count:
        raise UserError(
            f"--batch-size {options.batch_size} in {options.accumulate} parts does not divide over {count} devices"
        )
    shards = data.load(options.data)
    rows = data.packed(data.training(shards), options.seed, options.length)
    data.chosen(len(rows), options.seed, 0, options.batch_size)  # refuses too few
    source = checkpoints.resolve(options.target)
    tokenizer, placement = checkpoints.load_tokenizer(source), make_placement()
    dtype = compute_dtype(options.dtype, device)
    say(f"loading {options.target} ...")
    found = resolved(source)
    target = load(found, dtype, placement)
    if (most := int(shards.tokens.max())) >= target.config.vocab_size:
        raise UserError(
            f"{options.data} holds the id {most}, {options.target} has {target.config.vocab_size} ids: "
            "generate the data with this target"
        )
    digest = checkpoints.fingerprint(tokenizer)
    if shards.manifest.get("tokenizer", digest) != digest:
        raise UserError(
            f"{options.data} was written by {shards.manifest.get('target')}, which has another tokenizer than "
            f"{options.target}: generate the data with this target"
        )
    longest = min(int(data.heldout(shards).prompt_length.max()), LONGEST_PROMPT) + options.eval_tokens
    measured = f"--eval-tokens {options.eval_tokens}, with prompts {longest} tokens,"
    for value, given in ((options.length, f"--length {options.length}"), (longest, measured)):
        if value > (most := target.config.max_model_len):
            raise UserError(f"{given} exceeds the {most} that {options.target} reads: lower it")
    if (options.top_n or 0) > target.config.vocab_size:
        raise UserError(
            f"--top-n {options.top_n} exceeds the target's {target.config.vocab_size} ids: lower it, or give 0 for all"
        )
    counts = data.frequencies(shards, target.config.vocab_size)
    if options.init_from:
        begun = checkpoints.resolve(options.init_from)
        draft = load_draft(resolved_draft(begun, found), jnp.float32, placement, target)
        draft = further.begun(draft, target, options, counts, placement)
        check_same_tokenizer(source, tokenizer, begun)
    else:
        draft = method.new(options, target, counts, placement)
    ids = {name: draft.params[name] for name, p in parameters(draft.config).items() if p.kind == "ids"}
    stop_ids = checkpoints.load_stop_ids(source, tokenizer)
    everywhere = make_placement(count)
    return Setup(options, target, draft, ids, shards, rows, stop_ids, digest, device, dtype, placement, everywhere)


@dataclasses.dataclass
class Teacher:
    """The target as it teaches.

    target: as the steps take it; it has no parameters where the batches hold all that it says.
    records: what it says and computes of the rows, on disk.
    """

    setup: Setup
    target: Model
    records: list[Records]

    def ask(self, step: int, steps: int, over: Callable[[float], bool]) -> bool:
        """Have the target say what these steps learn, from `step` on. Return False where it is over before."""
        o = self.setup.options
        chosen = (data.chosen(len(self.setup.rows), o.seed, at, o.batch_size) for at in range(step, step + steps))
        needed = 1 + max(rows.max() for rows in chosen) if self.records else 0
        return all(len(records.upto(needed, over)) >= min(needed, records.count) for records in self.records)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step that was asked for, as `loss_sums` takes it."""
        o, rows = self.setup.options, self.setup.rows
        at = data.chosen(len(rows), o.seed, step, o.batch_size)
        draw = np.random.default_rng([o.seed, step]).integers(2**32, size=len(at), dtype=np.uint32)
        found = {"tokens": rows.tokens[at].astype(np.int32), "mask": rows.mask[at], "draw": draw}
        return found | {name: each.known[name][at] for each in self.records for name in each.dtype.names or ()}


def teacher(setup: Setup) -> Teacher:
    """The target as a run learns from it."""
    o, rows, target = setup.options, setup.rows, setup.target
    reads = methods.implementation(o.method).READS
    count, records = min(len(rows), o.steps * o.batch_size), []
    how: dict[str, Any] = {
        "batch_size": o.batch_size // o.accumulate,
        "backend": dense_backend(target.config, setup.device, setup.dtype),
        "devices": setup.devices,
    }
    if o.keep_features:
        records.append(features.kept(o.data, target, rows, count, getattr(setup.draft.config, "taps", ()), **how))
    if top_n := TOP_N if o.top_n is None else o.top_n:
        records.append(likeliest.kept(o.data, target, rows, count, top_n, **how))
        target = target if reads else Model(target.config, {})
    else:
        target = own_ids_first(target, np.asarray(setup.ids["d2t"]) if setup.ids else None)
    return Teacher(setup, target, records)


def measurer(setup: Setup) -> Any:
    """The measurement of acceptance on prompts of the held-out sequences, evenly spaced among them."""
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

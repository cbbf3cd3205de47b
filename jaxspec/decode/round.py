"""One round: propose, one target pass, verify, commit. Plain decoding is the same round with K = 0."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.pages import PagedKVCache
from jaxspec.decode.state import LENGTH, NO_ID, NO_LAW, RUNNING, STOP, DecodeConfig, DecodeState, LaunchInput
from jaxspec.drafters.base import History, Proposal
from jaxspec.models.decoder import Decoder, Vocabulary
from jaxspec.sampling import rng
from jaxspec.sampling.distribution import process
from jaxspec.sampling.logprobs import logprobs as logprobs_of
from jaxspec.sampling.logprobs import record
from jaxspec.sampling.processors import Adjust, Tables, adjuster, count
from jaxspec.shapes import Array, Bool, Float, Int
from jaxspec.verify import coupled, rejection, synthetic
from jaxspec.verify.base import Verdict, leading
from pallas_kernels.plain import likeliest

Params = dict[str, Any]  # {"target": ..., "draft": ...}
# Of the target at each of T places: its logits, or the ids of the largest where that is all that is asked for.
Scores = Float[Array, "B T V"] | Int[Array, "B T"]


def num_wanted(config: DecodeConfig, batch: LaunchInput, state: DecodeState) -> Int[Array, " B"]:
    """K_b: drafts the row may have this round. Near a full context it proposes less, and stays correct."""
    room = config.position_limit - state.num_tokens - 1
    wanted = jnp.where(state.spoilt, 0, jnp.minimum(batch.limits.num_speculative_tokens, room))
    return jnp.clip(wanted, 0, config.num_speculative_tokens)


def capacity(config: DecodeConfig, batch: LaunchInput) -> Int[Array, " B"]:
    """Positions that the row has pages for, throughout a launch."""
    layout = config.target.layout
    return jnp.sum(batch.block_table < layout.num_pages, axis=1) * layout.page_size


def runnable(config: DecodeConfig, batch: LaunchInput, state: DecodeState, room: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Live, unfinished, and its next K_b + 1 positions have pages (room: its `capacity`). A row without them waits for
    the host."""
    covered = state.num_tokens + num_wanted(config, batch, state) <= room
    return batch.live & (state.finish == RUNNING) & covered


def round(
    config: DecodeConfig,
    params: Params,
    cache: PagedKVCache,
    batch: LaunchInput,
    tables: Tables | None,
    state: DecodeState,
    live: Bool[Array, " B"],
) -> tuple[PagedKVCache, DecodeState]:
    """The caches and the state after every live row, of those that are runnable, has gained 1..K_b+1 tokens.

    tables: of batch.processors.
    """
    wanted = num_wanted(config, batch, state)
    adjust = None
    if batch.processors is not None and tables is not None and state.output_counts is not None:
        history = state.tokens, state.num_tokens, batch.limits.stop_ids
        adjust = adjuster(batch.processors, tables, state.output_counts, *history)
    with jax.named_scope("propose"):
        proposal, draft_pages = propose(config, params, cache.draft, batch, state, wanted, live, adjust)
    with jax.named_scope("target"):
        scores, lawful, target_pages = score(config, params["target"], cache.target, batch, state, proposal, live)
    with jax.named_scope("verify"):
        verdict, ending = verify(config, scores, lawful, proposal, batch, state, adjust)
    with jax.named_scope("commit"):
        state = commit(config, batch, state, proposal, verdict, ending, wanted, live, scores)
    return PagedKVCache(target_pages, draft_pages), state


def propose(
    config: DecodeConfig,
    params: Params,
    pages: Any,
    batch: LaunchInput,
    state: DecodeState,
    wanted: Int[Array, " B"],
    live: Bool[Array, " B"],
    adjust: Adjust | None = None,
) -> tuple[Proposal, Any]:
    """-> (Proposal, draft pages). A proposal ends before a draft that q gives nothing: where the draft has none of a
    row's allowed ids, or its logits are no numbers, what was drawn is no proposal, under any rule."""
    if config.drafter is None:
        num_rows = state.num_tokens.shape[0]
        return Proposal(jnp.zeros((num_rows, 0), jnp.int32), None, jnp.zeros(num_rows, jnp.int32)), pages
    rows, vocab_size, backend = batch.sampling, config.target.config.vocab_size, config.target.backend

    def choose(
        decoder: Decoder, hidden: Float[Array, "B _"], drafts: Int[Array, "B K"], i: jax.Array | int
    ) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None]:
        greedy = config.greedy_draft or not (config.variant.standard or config.variant.coupled)
        if greedy and adjust is None:
            return decoder.likeliest(hidden, backend, vocab_size), None
        logits = fit_vocabulary(decoder.logits(hidden, backend), vocab_size, decoder.vocabulary)
        if adjust is not None:
            logits = adjust(logits, drafts, i)
        if greedy:
            return likeliest(logits), None
        z = process(logits[:, None], rows, filters=config.variant.filters)[:, 0]
        keys = rng.keys(rows.seed, state.num_tokens, "draft", i)
        if config.variant.coupled:
            # The coupled rule's noise belongs to the absolute position, the standard rule's to the round's start.
            keys = jnp.where(rows.coupled, rng.keys(rows.seed, state.num_tokens + i, "shared"), keys)
        noise = jnp.where(rows.greedy[:, None], 0.0, rng.gumbel(keys, vocab_size))
        token = likeliest(z + noise)
        if not config.variant.standard:
            return token, None
        # Zeros, not NaN, where the draft has none of the allowed ids.
        return token, jax.nn.softmax(z, axis=-1, where=z > -jnp.inf)

    history = History(state.tokens, state.num_tokens, state.draft_len, batch.block_table, wanted, live)
    proposal, pages = config.drafter.propose(params.get("draft"), pages, history, choose)
    if proposal.probs is not None:
        possible = rejection.at_tokens(proposal.probs, proposal.tokens) > 0.0
        proposal = dataclasses.replace(proposal, num_proposed=leading(possible, proposal.num_proposed))
    return proposal, pages


def fit_vocabulary(
    logits: Float[Array, "B _"], vocab_size: int, vocabulary: Vocabulary | None = None
) -> Float[Array, "B {vocab_size}"]:
    """Over the target's ids, -inf for those that a reduced vocabulary lacks. A draft padded differently never proposes
    ids that the target lacks."""
    if vocabulary is not None:
        logits = jnp.take(logits, vocabulary.t2d, axis=-1, mode="fill", fill_value=-jnp.inf)
    missing = vocab_size - logits.shape[-1]
    return jnp.pad(logits, ((0, 0), (0, max(missing, 0))), constant_values=-jnp.inf)[:, :vocab_size]


def only_likeliest(config: DecodeConfig, batch: LaunchInput) -> bool:
    """Whether nobody asks for more of the target's logits than which is the largest."""
    own_token = batch.synthetic_rates is not None or not (config.variant.standard or config.variant.coupled)
    return own_token and batch.processors is None and config.variant.logprobs is None


def score(
    config: DecodeConfig,
    params: Any,
    pages: Any,
    batch: LaunchInput,
    state: DecodeState,
    proposal: Proposal,
    live: Bool[Array, " B"],
) -> tuple[Scores, Bool[Array, "B T"], Any]:
    """One target pass over the T = K + 1 tokens, the pending one and the drafts -> (scores, where they are numbers,
    target pages)."""
    pending = rng.take_row(state.tokens, state.num_tokens - 1)
    tokens = jnp.concatenate([pending[:, None], proposal.tokens], axis=1)
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    positions = state.num_tokens[:, None] - 1 + offset
    masked = (offset > proposal.num_proposed[:, None]) | ~live[:, None]
    tokens = jnp.where(masked, pending[:, None], tokens)  # what nobody reads: no less a number than what is
    decoder, hidden, pages = config.target.forward(params, pages, tokens, positions, masked, batch.block_table)
    if only_likeliest(config, batch):  # no logits are left to look at, but what they are made of
        lawful = jnp.all(jnp.isfinite(hidden), axis=-1)
        return decoder.likeliest(hidden, config.target.backend), lawful, pages
    logits = decoder.logits(hidden, config.target.backend)
    return logits, jnp.isfinite(jnp.max(logits, axis=-1)), pages


def verify(
    config: DecodeConfig,
    scores: Scores,
    lawful: Bool[Array, "B T"],
    proposal: Proposal,
    batch: LaunchInput,
    state: DecodeState,
    adjust: Adjust | None = None,
) -> tuple[Verdict, Int[Array, " B"]]:
    """The verdict on a proposal, and RUNNING, or why there is no extra token: NO_ID, NO_LAW. Drafts are judged as far
    as there is a law to judge them by."""
    variant = config.variant
    if adjust is not None:
        scores = jnp.stack([adjust(scores[:, i], proposal.tokens, i) for i in range(scores.shape[1])], axis=1)
    if variant.standard or variant.coupled:
        scores = process(scores, batch.sampling, filters=variant.filters)
    ending = jnp.where(lawful, RUNNING, NO_LAW)
    if scores.ndim == 3:
        largest = jnp.max(scores, axis=-1)
        ending = jnp.where(lawful & (largest == -jnp.inf), NO_ID, jnp.where(jnp.isfinite(largest), ending, NO_LAW))
    judged = leading(ending[:, :-1] == RUNNING, proposal.num_proposed)
    verdict = judge(config, scores, dataclasses.replace(proposal, num_proposed=judged), batch, state)
    return verdict, rng.take_row(ending, verdict.num_accepted)


def own_tokens(scores: Scores) -> Int[Array, "B T"]:
    return scores if scores.ndim == 2 else likeliest(scores)


def judge(config: DecodeConfig, scores: Scores, proposal: Proposal, batch: LaunchInput, state: DecodeState) -> Verdict:
    """Each row's rule: greedy and coupled rows accept what equals the target's own choice, the others by rejection.
    scores: as processed."""
    rows, variant = batch.sampling, config.variant
    if batch.synthetic_rates is not None:
        return synthetic.verify(own_tokens(scores), proposal, batch.synthetic_rates, rows.seed, state.num_tokens)
    if not (variant.standard or variant.coupled):
        return coupled.verify(own_tokens(scores), proposal)
    perturbed = scores  # of a greedy row: filters never touch the largest logit
    if variant.coupled:
        at = lambda i: coupled.shared_noise(rows.seed, state.num_tokens + i, scores.shape[-1])
        noise = jnp.stack([at(i) for i in range(scores.shape[1])], axis=1)
        perturbed = scores + jnp.where((rows.coupled & ~rows.greedy)[:, None, None], noise, 0.0)
    verdict = coupled.verify(likeliest(perturbed), proposal)
    if not variant.standard:
        return verdict
    standard = rejection.verify(scores, proposal, rows.seed, state.num_tokens)
    return jax.tree.map(lambda a, b: jnp.where(rows.coupled | rows.greedy, a, b), verdict, standard)


def commit(
    config: DecodeConfig,
    batch: LaunchInput,
    state: DecodeState,
    proposal: Proposal,
    verdict: Verdict,
    ending: Int[Array, " B"],
    wanted: Int[Array, " B"],
    live: Bool[Array, " B"],
    scores: Scores | None = None,
) -> DecodeState:
    """Appends the accepted drafts and, unless the row is `ending`, the extra token, cut at the first stop id and at the
    row's length limit.

    Lowering nothing but lengths is the rollback: what the caches hold beyond them is never read.
    """
    limits, num_drafts = batch.limits, proposal.tokens.shape[1]
    offset = jnp.arange(num_drafts + 1, dtype=jnp.int32)[None, :]
    drafts = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    emitted = jnp.where(offset < verdict.num_accepted[:, None], drafts, verdict.next_token[:, None])
    num_emitted = verdict.num_accepted + (ending == RUNNING)
    # A draft whose own keys and values are no numbers spoils those of its row that stand before it.
    spoilt = live & (ending == NO_LAW) & (proposal.num_proposed > 0)
    ending = jnp.where(spoilt, RUNNING, ending)
    room = jnp.minimum(num_emitted, limits.max_len - state.num_tokens)
    is_stop = (emitted[:, :, None] == limits.stop_ids[:, None, :]) & (offset < room[:, None])[:, :, None]
    first_stop = jnp.min(jnp.where(is_stop, offset[:, :, None], num_drafts + 1), axis=(1, 2))  # one small reduction
    stopped = first_stop <= num_drafts
    num_kept = jnp.where(live, jnp.minimum(first_stop + 1, room), 0).astype(jnp.int32)

    keep = offset < num_kept[:, None]
    target_at = jnp.where(keep, state.num_tokens[:, None] + offset, state.tokens.shape[1])
    tokens = state.tokens.at[jnp.arange(keep.shape[0])[:, None], target_at].set(emitted, mode="drop")
    num_tokens = state.num_tokens + num_kept
    finish = jnp.where(stopped, STOP, jnp.where(num_tokens >= limits.max_len, LENGTH, ending))
    drafted = jnp.minimum(num_tokens - 1, state.num_tokens + jnp.maximum(wanted, 1) - 1)
    # The first draft pass covers a lag of one token; a draft further behind keeps its length until it is caught up.
    in_step = live & (num_drafts > 0) & (state.draft_len >= state.num_tokens - 2)
    kept_drafts = jnp.minimum(verdict.num_accepted, num_kept)
    entry = jnp.where(live, jnp.stack([proposal.num_proposed, kept_drafts, num_kept]), 0)
    counts, logprobs = state.output_counts, state.logprobs
    if counts is not None:
        counts = count(counts, jnp.where(keep, emitted, -1))
    if logprobs is not None:
        assert scores is not None
        new_at = (state.num_tokens - batch.num_tokens)[:, None] + offset
        new_at = jnp.where(keep, new_at, logprobs.chosen.shape[1])
        logprobs = record(logprobs, new_at, logprobs_of(scores, emitted, config.variant.logprobs or 0))
    return DecodeState(
        tokens=tokens,
        num_tokens=num_tokens,
        draft_len=jnp.where(in_step, jnp.minimum(drafted, config.position_limit), state.draft_len),
        finish=jnp.where(live, finish, state.finish),
        spoilt=spoilt,
        round=state.round + 1,
        rounds_of=state.rounds_of + (num_kept > 0),
        log=lax.dynamic_update_index_in_dim(state.log, entry, state.round, axis=2),
        output_counts=counts,
        logprobs=logprobs,
    )

"""One round: propose, one target pass, verify, commit. Plain decoding is the same round with K = 0.

A `Context` is what stays as it is throughout a launch, the state what a round leaves to the next, and the history how
far the rows have come when a round begins.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache import features
from jaxspec.cache.layer import Kept
from jaxspec.cache.pages import PagedKVCache
from jaxspec.common.shapes import Array, Bool, Float, Int
from jaxspec.decode import branches
from jaxspec.decode.prefill import remember
from jaxspec.decode.state import LENGTH, NO_ID, NO_LAW, RUNNING, STOP, Context, DecodeConfig, DecodeState, LaunchInput
from jaxspec.drafters.base import History, Proposal
from jaxspec.drafters.trees.topology import Topology, take
from jaxspec.models.head import fit_vocabulary
from jaxspec.sampling import processors, rng
from jaxspec.sampling.distribution import DRAFT_BITS, process
from jaxspec.sampling.logprobs import logprobs as logprobs_of
from jaxspec.sampling.logprobs import record
from jaxspec.sampling.processors import Adjust, Text
from jaxspec.verify import greedy, rules
from jaxspec.verify import tree as tree_rule
from jaxspec.verify.base import Case, Verdict, leading
from jaxspec.verify.coupled import shared_noise
from jaxspec.verify.standard import at_tokens
from pallas_kernels.plain import likeliest

# Of the target at each of T places: its logits, or the ids of the largest where that is all that is asked for.
Values = Float[Array, "B T V"] | Int[Array, "B T"]


class Scores(NamedTuple):
    """What the target says of T places.

    lawful: where that is numbers.
    """

    values: Values
    lawful: Bool[Array, "B T"]


def round(context: Context, cache: PagedKVCache, state: DecodeState) -> tuple[PagedKVCache, DecodeState]:
    """The caches and the state after every row that is runnable has gained 1..K_b+1 tokens."""
    history, adjust = history_of(context, state), adjust_of(context, state)
    with jax.named_scope("propose"):
        proposal, cache = propose(context, cache, history, adjust)
    with jax.named_scope("target"):
        scores, cache = score(context, cache, history, proposal)
    with jax.named_scope("verify"):
        verdict, ending = verify(context, history, proposal, scores, adjust)
    moves = None
    if proposal.tree is not None:
        with jax.named_scope("straighten"):
            proposal, scores, moves = branches.straightened(context, history, proposal, scores, verdict)
    with jax.named_scope("commit"):
        state = commit(context, state, history, proposal, scores, verdict, ending)
        cache = keep(context, cache, Kept(state.num_tokens - history.num_tokens, history.block_table, moves))
    return cache, state


def num_wanted(context: Context, state: DecodeState) -> Int[Array, " B"]:
    """K_b: drafts the row may have this round. Near a full context it proposes less, and stays correct."""
    room = context.config.position_limit - state.num_tokens - 1
    wanted = jnp.where(state.spoilt, 0, jnp.minimum(context.batch.limits.num_speculative_tokens, room))
    return jnp.clip(wanted, 0, context.config.num_speculative_tokens)


def runnable(context: Context, state: DecodeState) -> Bool[Array, " B"]:
    """Live, unfinished, and the positions that its next round writes have pages. A row without them waits for the
    host."""
    wanted, drafter = num_wanted(context, state), context.config.drafter
    needed = state.num_tokens + wanted
    if drafter and drafter.reach > drafter.num_speculative_tokens:
        whole = jnp.minimum(state.num_tokens + drafter.reach, context.config.position_limit)
        needed = jnp.where(wanted > 0, jnp.maximum(needed, whole), needed)
    covered = needed <= context.capacity
    return context.batch.live & (state.finish == RUNNING) & covered


def history_of(context: Context, state: DecodeState) -> History:
    live, wanted = runnable(context, state), num_wanted(context, state)
    return History(state.tokens, state.num_tokens, state.draft_len, context.batch.block_table, wanted, live)


def adjust_of(context: Context, state: DecodeState) -> Adjust | None:
    """Return the changes to a round's logits that some rows ask for; None where none does."""
    text = text_of(context.config, context.batch, state.tokens, state.num_tokens)
    return processors.adjuster(context.batch.processors, context.tables, state.processing, text)


def text_of(config: DecodeConfig, batch: LaunchInput, tokens: jax.Array, num_tokens: jax.Array) -> Text:
    """Return the committed text, as processors read it."""
    return Text(tokens, num_tokens, batch.prompt_len, batch.limits.stop_ids, config.target.config.vocab_size)


def propose(
    context: Context, cache: PagedKVCache, history: History, adjust: Adjust | None = None
) -> tuple[Proposal, PagedKVCache]:
    """-> (Proposal, the caches, the draft's written). A proposal ends before a draft that q gives nothing: where the
    draft has none of a row's allowed ids, or its logits are no numbers, what was drawn is no proposal, under any
    rule."""
    drafter = context.config.drafter
    if drafter is None:
        num_rows = history.num_tokens.shape[0]
        return Proposal(jnp.zeros((num_rows, 0), jnp.int32), None, jnp.zeros(num_rows, jnp.int32)), cache
    chooser: Any = functools.partial(choose if drafter.tree_width is None else branches.rank, context, history, adjust)
    proposal, pages = drafter.propose(context.params, cache, history, chooser)
    if proposal.probs is not None:
        possible = at_tokens(proposal.probs, proposal.tokens) > 0.0
        proposal = dataclasses.replace(proposal, num_proposed=leading(possible, proposal.num_proposed))
    return proposal, dataclasses.replace(cache, draft=pages)


def choose(
    context: Context,
    history: History,
    adjust: Adjust | None,
    head: Any,  # a Head, or what has its methods
    hidden: Float[Array, "B _"],
    drafts: Int[Array, "B K"],
    i: jax.Array | int,
) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None]:
    """A drafter's `Choose`: the draft behind the first i of `drafts`, and its distribution where a rule needs that."""
    config, rows = context.config, context.batch.sampling
    variant, vocab_size, backend = config.variant, config.target.config.vocab_size, config.drafting
    certain = config.greedy_draft or not variant.noises
    if certain and adjust is None:
        return head.likeliest(hidden, backend, vocab_size), None
    logits = fit_vocabulary(head.logits(hidden, backend), vocab_size, head.vocabulary)
    if adjust is not None:
        logits = adjust(logits, drafts, i)
    if certain:
        return likeliest(logits), None
    z = process(logits[:, None], rows, filters=variant.filters, bits=DRAFT_BITS)[:, 0]
    keys = rng.keys(rows.seed, history.num_tokens, "draft", i)
    if "shared" in variant.noises:
        keys = jnp.where(shares_noise(context), rng.keys(rows.seed, history.num_tokens + i, "shared"), keys)
    noise = jnp.where(rows.greedy[:, None], 0.0, rng.gumbel(keys, vocab_size))
    token = likeliest(z + noise)
    if not variant.needs_q:
        return token, None
    # Zeros, not NaN, where the draft has none of the allowed ids.
    return token, jax.nn.softmax(z, axis=-1, where=z > -jnp.inf)


def shares_noise(context: Context) -> Bool[Array, " B"]:
    """Rows whose noise belongs to the absolute position, and is the draft's and the target's."""
    shared = [rules.number(name) for name, rule in rules.RULES.items() if rule.noise == "shared"]
    return jnp.isin(context.batch.sampling.rule, jnp.array(shared, jnp.int32))


def only_likeliest(context: Context) -> bool:
    """Whether nobody asks for more of the target's logits than which is the largest."""
    variant, batch = context.config.variant, context.batch
    return not variant.noises and not batch.processors and variant.logprobs is None


def score(context: Context, cache: PagedKVCache, history: History, proposal: Proposal) -> tuple[Scores, PagedKVCache]:
    """One target pass over the T = K + 1 tokens, the pending one and the drafts -> (scores, the caches, the target's
    written)."""
    target = context.config.target
    pending = rng.take_row(history.tokens, history.num_tokens - 1)
    tokens = jnp.concatenate([pending[:, None], proposal.tokens], axis=1)
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    positions = history.num_tokens[:, None] - 1 + offset
    masked = (offset > proposal.num_proposed[:, None]) | ~history.live[:, None]
    tokens = jnp.where(masked, pending[:, None], tokens)  # what nobody reads: no less a number than what is
    reader, params = context.config.reader, context.params
    taps = reader.taps if reader else ()
    where = positions, masked, history.block_table
    of_tree = branches.of_tree(history, proposal.tree)
    done = target.forward(params["target"], cache.target, tokens, *where, taps, of_tree)
    cache = remember(context.config, params, cache, done)
    if only_likeliest(context):  # no logits are left to look at, but what they are made of
        lawful = jnp.all(jnp.isfinite(done.hidden), axis=-1)
        return Scores(done.decoder.likeliest(done.hidden, target.backend), lawful), cache
    logits = done.decoder.logits(done.hidden, target.backend)
    return Scores(logits, jnp.isfinite(jnp.max(logits, axis=-1))), cache


def verify(
    context: Context, history: History, proposal: Proposal, scores: Scores, adjust: Adjust | None = None
) -> tuple[Verdict, Int[Array, " B"]]:
    """The verdict on a proposal, and RUNNING, or why there is no extra token: NO_ID, NO_LAW. Drafts are judged as far
    as there is a law to judge them by."""
    variant, values = context.config.variant, scores.values
    if adjust is not None and proposal.tree is not None:
        values = branches.adjusted(adjust, values, proposal, proposal.tree)
    elif adjust is not None:
        values = jnp.stack([adjust(values[:, i], proposal.tokens, i) for i in range(values.shape[1])], axis=1)
    if values.ndim == 3 and variant.noises:
        values = process(values, context.batch.sampling, filters=variant.filters)
    ending = jnp.where(scores.lawful, RUNNING, NO_LAW)
    if values.ndim == 3:
        largest = jnp.max(values, axis=-1)
        no_id = scores.lawful & (largest == -jnp.inf)
        ending = jnp.where(no_id, NO_ID, jnp.where(jnp.isfinite(largest), ending, NO_LAW))
    if proposal.tree is not None:
        own = own_tokens(context, history, values, proposal.tree)
        verdict = tree_rule.verify(own, proposal, ending == RUNNING)
        assert verdict.last is not None
        return verdict, rng.take_row(ending, verdict.last)
    judged = leading(ending[:, :-1] == RUNNING, proposal.num_proposed)
    verdict = judge(context, history, dataclasses.replace(proposal, num_proposed=judged), values)
    return verdict, rng.take_row(ending, verdict.num_accepted)


def own_tokens(context: Context, history: History, values: Values, tree: Topology | None = None) -> Int[Array, "B T"]:
    """The target's: the largest of its logits as processed, after the noise of rows that share it with their drafts,
    which belongs to the position where a token would come to stand. tree: of places that are no chain."""
    rows = context.batch.sampling
    if values.ndim == 2:
        return values
    if "shared" in context.config.variant.noises:
        depth = values.shape[1] if tree is None else tree.paths.shape[2]
        positions = history.num_tokens[:, None] + jnp.arange(depth, dtype=jnp.int32)
        noise = shared_noise(rows.seed, positions, values.shape[-1])
        noise = noise if tree is None else take(noise, tree.depth)
        values = values + jnp.where((shares_noise(context) & ~rows.greedy)[:, None, None], noise, 0.0)
    return likeliest(values)  # of a greedy row: filters never touch the largest logit


def judge(context: Context, history: History, proposal: Proposal, values: Values) -> Verdict:
    """Each row by its rule. values: as processed."""
    rows, own = context.batch.sampling, own_tokens(context, history, values)
    case = Case(values, own, proposal, rows.seed, history.num_tokens, context.batch.rule_options)
    verdict = greedy.verify(case)
    for name in rules.ordered(context.config.variant.rules):
        under = rows.rule == rules.number(name)
        by_rule = rules.implementation(name).verify(case)
        verdict = jax.tree.map(lambda a, b, under=under: jnp.where(under, a, b), by_rule, verdict)
    return verdict


def commit(
    context: Context,
    state: DecodeState,
    history: History,
    proposal: Proposal,
    scores: Scores,
    verdict: Verdict,
    ending: Int[Array, " B"],
) -> DecodeState:
    """Appends the accepted drafts and, unless the row is `ending`, the extra token, cut at the first stop id and at the
    row's length limit.

    Lowering the lengths is the rollback of pages: what they hold beyond is never read.
    """
    limits, live, num_drafts = context.batch.limits, history.live, proposal.tokens.shape[1]
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
    draft_len = state.draft_len
    if proposal.draft_len is not None:
        held = jnp.minimum(jnp.minimum(proposal.draft_len, num_tokens - 1), context.config.position_limit)
        draft_len = jnp.where(live, held, draft_len)
    kept_drafts = jnp.minimum(verdict.num_accepted, num_kept)
    entry = jnp.where(live, jnp.stack([proposal.num_proposed, kept_drafts, num_kept]), 0)
    logprobs = state.logprobs
    if logprobs is not None:
        new_at = (state.num_tokens - context.batch.num_tokens)[:, None] + offset
        new_at = jnp.where(keep, new_at, logprobs.chosen.shape[1])
        logprobs = record(logprobs, new_at, logprobs_of(scores.values, emitted, context.config.variant.logprobs or 0))
    return DecodeState(
        tokens=tokens,
        num_tokens=num_tokens,
        draft_len=draft_len,
        finish=jnp.where(live, finish, state.finish),
        spoilt=spoilt,
        round=state.round + 1,
        rounds_of=state.rounds_of + (num_kept > 0),
        log=lax.dynamic_update_index_in_dim(state.log, entry, state.round, axis=2),
        processing=processors.advance(context.batch.processors, state.processing, jnp.where(keep, emitted, -1)),
        logprobs=logprobs,
    )


def keep(context: Context, cache: PagedKVCache, kept: Kept) -> PagedKVCache:
    """Return the caches without what the target's pass has written of rejected drafts."""
    found = dataclasses.replace(cache, target=context.config.target.keep(cache.target, kept))
    if kept.moves is None or not cache.features:
        return found
    values = features.read(cache, kept.moves.source, kept.block_table)
    return dataclasses.replace(found, features=features.write(cache, kept.moves.slots, values))

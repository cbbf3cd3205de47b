"""One round: propose, one target pass, verify, commit. Plain decoding is the same round with K = 0.

A `Context` is constant throughout a launch (one run of many rounds). A `DecodeState` passes from one round to the next.
A `History` holds the committed text of all rows at the start of a round.
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
from jaxspec.decode.state import LENGTH, NO_ID, NOT_FINITE, RUNNING, STOP, Context, DecodeState, text_of
from jaxspec.drafters.base import History, Proposal
from jaxspec.drafters.trees.topology import Topology, take
from jaxspec.models.head import fit_vocabulary
from jaxspec.sampling import processors, rng
from jaxspec.sampling.distribution import DRAFT_BITS, process
from jaxspec.sampling.logprobs import logprobs as logprobs_of
from jaxspec.sampling.logprobs import record
from jaxspec.sampling.processors.base import Adjust
from jaxspec.verify import greedy, rules
from jaxspec.verify import tree as tree_rule
from jaxspec.verify.base import Case, Verdict, leading
from jaxspec.verify.coupled import shared_noise
from jaxspec.verify.standard import at_tokens
from pallas_kernels.plain import argmax

# The target's output at each of T positions: logits, or argmax ids if no row needs more.
Values = Float[Array, "B T V"] | Int[Array, "B T"]


class Scores(NamedTuple):
    """The target's output for the T = K + 1 tokens of a pass.

    values: logits or argmax ids.
    finite: whether the target's logits at each token are finite; with argmax ids, whether the hidden states are.
    """

    values: Values
    finite: Bool[Array, "B T"]


def run_round(context: Context, cache: PagedKVCache, state: DecodeState) -> tuple[PagedKVCache, DecodeState]:
    """Run one round for all runnable rows. Return the caches and the state.

    Such a row b gains 1 to K_b + 1 tokens, or fewer if no id is allowed or the target's output is not finite.
    """
    history = history_of(context, state)
    adjust = adjust_of(context, state)
    with jax.named_scope("propose"):
        proposal, cache = propose(context, cache, history, adjust)
    with jax.named_scope("target"):
        scores, cache = score(context, cache, history, proposal)
    with jax.named_scope("verify"):
        verdict, ending = verify(context, history, proposal, scores, adjust)
    moves = None
    if proposal.tree is not None:
        with jax.named_scope("straighten"):
            proposal, scores, moves = branches.path_as_chain(context, history, proposal, scores, verdict)
    with jax.named_scope("commit"):
        state = commit(context, state, history, proposal, scores, verdict, ending)
        cache = keep(context, cache, history.kept(state.num_tokens, moves))
    return cache, state


def num_wanted(context: Context, state: DecodeState) -> Int[Array, " B"]:
    """Return K_b, each row's maximum of draft tokens in this round: fewer near the context limit, 0 without_drafts."""
    room = context.config.position_limit - state.num_tokens - 1
    wanted = jnp.where(state.without_drafts, 0, jnp.minimum(context.batch.limits.num_speculative_tokens, room))
    return jnp.clip(wanted, 0, context.config.num_speculative_tokens)


def runnable(context: Context, state: DecodeState) -> Bool[Array, " B"]:
    """Return whether each row is live, unfinished, and has pages for all positions that its next round may write.

    A row that lacks pages waits until the host gives it more.
    """
    wanted = num_wanted(context, state)
    drafter = context.config.drafter
    needed = state.num_tokens + wanted
    if drafter and drafter.reach > drafter.num_speculative_tokens:
        whole = jnp.minimum(state.num_tokens + drafter.reach, context.config.position_limit)
        needed = jnp.where(wanted > 0, jnp.maximum(needed, whole), needed)
    covered = needed <= context.capacity
    return context.batch.live & (state.finish == RUNNING) & covered


def history_of(context: Context, state: DecodeState) -> History:
    """Return the committed text of all rows, in the form that drafters read."""
    live, wanted, batch = runnable(context, state), num_wanted(context, state), context.batch
    text = state.tokens, state.num_tokens, state.draft_len
    return History(*text, batch.block_table, wanted, live, batch.window_table)


def adjust_of(context: Context, state: DecodeState) -> Adjust | None:
    """Return the function that applies penalties, bias and forbidden ids to logits; None if no row requests any."""
    text = text_of(context.config, context.batch, state.tokens, state.num_tokens)
    return processors.adjuster(context.batch.processors, context.tables, state.processing, text)


def propose(
    context: Context, cache: PagedKVCache, history: History, adjust: Adjust | None = None
) -> tuple[Proposal, PagedKVCache]:
    """Run the drafter. Return its proposal and the caches with the draft's pages.

    A proposal with distributions q is truncated before the first draft token whose q is 0. There the draft has none of
    the row's allowed ids, or its logits are not finite.
    """
    drafter = context.config.drafter
    if drafter is None:
        num_rows = history.num_tokens.shape[0]
        return Proposal(jnp.zeros((num_rows, 0), jnp.int32), None, jnp.zeros(num_rows, jnp.int32)), cache
    chooser: Any = choose if drafter.tree_width is None else branches.rank
    chooser = functools.partial(chooser, context, history, adjust)
    proposal, pages = drafter.propose(context.params, cache, history, chooser)
    if proposal.probs is not None:
        possible = at_tokens(proposal.probs, proposal.tokens) > 0.0
        proposal = dataclasses.replace(proposal, num_proposed=leading(possible, proposal.num_proposed))
    return proposal, dataclasses.replace(cache, draft=pages)


def choose(
    context: Context,
    history: History,
    adjust: Adjust | None,
    head: Any,  # the draft's Head, or an object with the same methods
    hidden: Float[Array, "B _"],
    drafts: Int[Array, "B K"],
    i: jax.Array | int,
) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None]:
    """Choose the draft token after the first i of `drafts`. Implements `Choose`, for drafters that propose chains."""
    config, rows = context.config, context.batch.sampling
    variant, vocab_size, backend = config.variant, config.target.config.vocab_size, config.drafting
    deterministic = config.greedy_draft or not variant.noises
    if deterministic and adjust is None:
        return head.argmax_token(hidden, backend, vocab_size), None
    logits = fit_vocabulary(head.logits(hidden, backend), vocab_size, head.vocabulary)
    if adjust is not None:
        logits = adjust(logits, drafts, i)
    if deterministic:
        return argmax(logits), None
    z = process(logits[:, None], rows, filters=variant.filters, bits=DRAFT_BITS)[:, 0]
    keys = rng.keys(rows.seed, history.num_tokens, "draft", i)
    if "shared" in variant.noises:
        keys = jnp.where(shares_noise(context), rng.keys(rows.seed, history.num_tokens + i, "shared"), keys)
    noise = jnp.where(rows.greedy[:, None], 0.0, rng.gumbel(keys, vocab_size))
    token = argmax(z + noise)
    if not variant.needs_q:
        return token, None
    # With `where` the probabilities are 0, not NaN, if the draft has none of the allowed ids.
    return token, jax.nn.softmax(z, axis=-1, where=z > -jnp.inf)


def shares_noise(context: Context) -> Bool[Array, " B"]:
    """Return whether each row's rule shares noise: draft and target sample a position with the same noise."""
    shared = [rules.number(name) for name, rule in rules.RULES.items() if rule.noise == "shared"]
    return jnp.isin(context.batch.sampling.rule, jnp.array(shared, jnp.int32))


def score(context: Context, cache: PagedKVCache, history: History, proposal: Proposal) -> tuple[Scores, PagedKVCache]:
    """Run the target once over T = K + 1 tokens: the pending token (the text's last one) and the K draft tokens.

    Return its scores, and the caches with the target's pages.
    """
    target = context.config.target
    pending = rng.take_row(history.tokens, history.num_tokens - 1)
    tokens = jnp.concatenate([pending[:, None], proposal.tokens], axis=1)
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    positions = history.num_tokens[:, None] - 1 + offset
    masked = (offset > proposal.num_proposed[:, None]) | ~history.live[:, None]
    tokens = jnp.where(masked, pending[:, None], tokens)  # so a masked token's output is finite if the first is
    reader, params = context.config.reader, context.params
    taps = reader.taps if reader else ()
    how = taps, branches.target_branches(history, proposal.tree), history.window_table
    done = target.forward(params["target"], cache.target, tokens, positions, masked, history.block_table, *how)
    cache = remember(context.config, params, cache, done)
    if context.only_argmax:  # without logits, check the hidden states
        finite = jnp.all(jnp.isfinite(done.hidden), axis=-1)
        return Scores(done.decoder.argmax_token(done.hidden, target.backend), finite), cache
    logits = done.decoder.logits(done.hidden, target.backend)
    return Scores(logits, jnp.isfinite(jnp.max(logits, axis=-1))), cache


def verify(
    context: Context, history: History, proposal: Proposal, scores: Scores, adjust: Adjust | None = None
) -> tuple[Verdict, Int[Array, " B"]]:
    """Verify a proposal. Return the verdict, and RUNNING or the reason why a row has no token from the target.

    Draft tokens after the first position without a target distribution are rejected.
    """
    variant, values = context.config.variant, scores.values
    if adjust is not None and proposal.tree is not None:
        values = branches.adjust_tree(adjust, values, proposal, proposal.tree)
    elif adjust is not None:
        values = jnp.stack([adjust(values[:, i], proposal.tokens, i) for i in range(values.shape[1])], axis=1)
    if values.ndim == 3 and variant.noises:
        values = process(values, context.batch.sampling, filters=variant.filters)
    ending = jnp.where(scores.finite, RUNNING, NOT_FINITE)
    if values.ndim == 3:
        largest = jnp.max(values, axis=-1)
        no_id = scores.finite & (largest == -jnp.inf)
        ending = jnp.where(no_id, NO_ID, jnp.where(jnp.isfinite(largest), ending, NOT_FINITE))
    if proposal.tree is not None:
        own = own_tokens(context, history, values, proposal.tree)
        verdict = tree_rule.verify(own, proposal, ending == RUNNING)
        assert verdict.last is not None
        return verdict, rng.take_row(ending, verdict.last)
    judged = leading(ending[:, :-1] == RUNNING, proposal.num_proposed)
    verdict = judge(context, history, dataclasses.replace(proposal, num_proposed=judged), values)
    return verdict, rng.take_row(ending, verdict.num_accepted)


def own_tokens(context: Context, history: History, values: Values, tree: Topology | None = None) -> Int[Array, "B T"]:
    """Return the target's own token at each position: the argmax of its processed logits.

    If a row's rule shares noise, the noise of the token's position in the text is added to the logits first. tree: None
    for a chain.
    """
    rows = context.batch.sampling
    if values.ndim == 2:
        return values
    if "shared" in context.config.variant.noises:
        depth = values.shape[1] if tree is None else tree.paths.shape[2]
        positions = history.num_tokens[:, None] + jnp.arange(depth, dtype=jnp.int32)
        noise = shared_noise(rows.seed, positions, values.shape[-1])
        if tree is not None:
            noise = take(noise, tree.depth)
        values = values + jnp.where((shares_noise(context) & ~rows.greedy)[:, None, None], noise, 0.0)
    return argmax(values)  # right for greedy rows too: filters keep the largest logit


def judge(context: Context, history: History, proposal: Proposal, values: Values) -> Verdict:
    """Verify each row's draft tokens by the row's own acceptance rule. values: processed logits, or argmax ids."""
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
    """Append the accepted draft tokens and, where `ending` is RUNNING, the target's next token. Return the new state.

    The new tokens are cut after the first stop id and at the row's length limit. Keys and values need no rollback,
    because entries beyond a row's length are never read.
    """
    limits, live = context.batch.limits, history.live
    num_drafts = proposal.tokens.shape[1]
    offset = jnp.arange(num_drafts + 1, dtype=jnp.int32)[None, :]
    drafts = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    emitted = jnp.where(offset < verdict.num_accepted[:, None], drafts, verdict.next_token[:, None])
    num_emitted = verdict.num_accepted + (ending == RUNNING)
    # NaN in a draft token's keys and values also reaches earlier tokens of the row, so retry without draft tokens.
    without_drafts = live & (ending == NOT_FINITE) & (proposal.num_proposed > 0)
    ending = jnp.where(without_drafts, RUNNING, ending)
    room = jnp.minimum(num_emitted, limits.max_len - state.num_tokens)
    is_stop = (emitted[:, :, None] == limits.stop_ids[:, None, :]) & (offset < room[:, None])[:, :, None]
    first_stop = jnp.min(jnp.where(is_stop, offset[:, :, None], num_drafts + 1), axis=(1, 2))  # one small reduction
    num_kept = jnp.where(live, jnp.minimum(first_stop + 1, room), 0).astype(jnp.int32)

    keep = offset < num_kept[:, None]
    kept_tokens = jnp.where(keep, emitted, -1)
    target_at = jnp.where(keep, state.num_tokens[:, None] + offset, state.tokens.shape[1])
    tokens = state.tokens.at[jnp.arange(keep.shape[0])[:, None], target_at].set(emitted, mode="drop")
    num_tokens = state.num_tokens + num_kept
    finish = jnp.where(first_stop <= num_drafts, STOP, jnp.where(num_tokens >= limits.max_len, LENGTH, ending))
    draft_len = state.draft_len
    if proposal.draft_len is not None:
        held = jnp.minimum(jnp.minimum(proposal.draft_len, num_tokens - 1), context.config.position_limit)
        draft_len = jnp.where(live, held, draft_len)
    kept_drafts = jnp.minimum(verdict.num_accepted, num_kept)
    entry = jnp.stack([proposal.num_proposed, kept_drafts, num_kept, proposal.num_looked_up], axis=1)
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
        without_drafts=without_drafts,
        round=state.round + 1,
        rounds_of=state.rounds_of + (num_kept > 0),
        log=lax.dynamic_update_index_in_dim(state.log, jnp.where(live[:, None], entry, 0), state.round, axis=2),
        processing=processors.advance(context.batch.processors, context.tables, state.processing, kept_tokens),
        logprobs=logprobs,
    )


def keep(context: Context, cache: PagedKVCache, kept: Kept) -> PagedKVCache:
    """Return the caches after the target's pass, with the kept tokens' entries valid and, for a tree, moved."""
    found = dataclasses.replace(cache, target=context.config.target.keep(cache.target, kept))
    if kept.moves is None or not cache.features:
        return found
    values = features.read(cache, kept.moves.source, kept.block_table)
    return dataclasses.replace(found, features=features.write(cache, kept.moves.slots, values))

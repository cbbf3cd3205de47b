"""Faults to plant, and the tests that have to see them.

    python -m tests.support.planted             # each in turn: a quarter of an hour
    python -m tests.support.planted 3 7         # some, by number

A fault is one place of one file, changed while its tests run, in a copy of the tree. Of these tests those count that
`make test` runs. Exit status 1 where they pass with a fault in place.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.root import ROOT

PATIENCE = 600  # seconds; a fault by which nothing ends is seen, too
QUICK = '-m "not thorough"'  # as the Makefile has it
HEADS = "tests/drafters/test_heads.py"


@dataclasses.dataclass(frozen=True)
class Fault:
    """In file, `right` becomes `wrong`.

    tests: pytest's arguments.
    """

    file: str
    right: str
    wrong: str
    tests: str


FAULTS = (
    Fault(  # the last places of a block make the drafts, not the first
        "jaxspec/drafters/dflash.py",
        "hidden[:, : num_skipped + count]",
        "hidden[:, -(num_skipped + count) :]",
        HEADS + " -k 'end_of_the_context and dflash'",
    ),
    Fault(  # of two tensors that should be the same, the first rows are compared
        "checkpoints/copies.py",
        "return all(x.dtype",
        "return next(x.dtype",
        "tests/checkpoints/test_safetensors.py -k not_the_table",
    ),
    Fault(  # a head's own table is not used, though it is another than the target's
        "jaxspec/drafters/heads.py",
        "if self.own(TABLE) else {}",
        "if False else {}",
        "tests/drafters/test_copies.py -k used_or_refused",
    ),
    Fault(  # what a chat template writes after an answer does not end one
        "checkpoints/ends.py",
        'add(found, turn_ends(tokenizer), "chat template")',
        "pass",
        "tests/checkpoints/test_ends.py",
    ),
    Fault(  # a key that is null is not one that is absent
        "checkpoints/reading.py",
        "if x is not None or key in kept",
        "if True",
        "tests/checkpoints/test_nulls.py -k heads_config",
    ),
    Fault(  # one disturbed measurement keeps a number of drafts from being chosen
        "jaxspec/engine/adaptive.py",
        "self.costs[which] = min(new, self.once[which])",
        "self.costs[which] = self.once[which]",
        "tests/engine/test_adaptive.py -k disturbed",
    ),
    Fault(  # a program ends a block's keys at its own last query
        "pallas_kernels/paged_attention/gpu.py",
        "        last_query = kv_len[b] - 1\n",
        "        pass\n",
        "tests/pallas_kernels/test_paged_attention.py -k 'see_each_other and gpu'",
    ),
    Fault(  # what one row's kernel leaves of a norm is asked for where there is none
        "pallas_kernels/self_attention/one_token.py",
        'split.get("squares")',
        'split["squares"]',
        "tests/drafters/test_kernels.py -k 'real_widths and eagle3'",
    ),
    Fault(  # an id that was fed before an interrupt counts as heard of
        "jaxspec/api/detokenizer.py",
        "        self.num_fed = -1  # invalid until all ids are fed, in case of an interrupt\n",
        "",
        "tests/api/test_detokenizer.py -k interrupt_after",
    ),
    Fault(  # a seeded row's run hangs on its neighbours' drafts
        "jaxspec/drafters/suffix.py",
        "kept &= (jnp.arange(count)",
        "kept | (jnp.arange(count)",
        "tests/drafters/test_suffix.py -k seeded_row",
    ),
    Fault(  # a copy that fails ends everybody who came with it
        "jaxspec/engine/engine.py",
        "with self.roster.blame(owners):",
        "with self.roster.blame(admitted):",
        "tests/engine/test_faults.py -k it_was_for",
    ),
    Fault(  # a stream that the garbage collector ends changes queues that somebody is changing
        "jaxspec/engine/roster.py",
        "not in self.open or self.inside:",
        "not in self.open:",
        "tests/api/llm/test_neighbours.py -k collector",
    ),
    Fault(  # an interrupt between two requests leaves the first behind
        "jaxspec/api/llm.py",
        "for request in [r for i, r in self.engine.roster.open.items() if i not in known]:",
        "for request in ():",
        "tests/api/llm/test_neighbours.py -k queued",
    ),
    Fault(  # a part that begins within a group takes the scales of its beginning
        "checkpoints/safetensors.py",
        "[..., first % size :]",
        "",
        "tests/checkpoints/test_eight_bits.py -k any_part",
    ),
    Fault(  # numbers are rounded to one bit less than there is room for
        "checkpoints/eight_bits.py",
        "exponent - (mantissa == 0.5)",
        "exponent",
        "tests/checkpoints/test_eight_bits.py -k nearest",
    ),
    Fault(  # numbers are rounded on the way to memory
        "jaxspec/models/storage.py",
        "mantissa_bits=7) == x",
        "mantissa_bits=7) < jnp.inf",
        "tests/models/test_storage.py -k lacks",
    ),
    Fault(  # the compiler widens all matrices before the first product
        "pallas_kernels/streamed.py",
        "once(by_library, x, matrix) if",
        "by_library(x, matrix) if",
        "tests/pallas_kernels/test_streamed.py -k one_at_a_time",
    ),
    Fault(  # ... and the whole table for one of its rows
        "jaxspec/models/table.py",
        "if backend.alone and ",
        "if False and ",
        "tests/pallas_kernels/test_streamed.py -k by_themselves",
    ),
    Fault(  # a copy begins at a page that is itself still to be copied to
        "jaxspec/engine/scheduler.py", "source.get(page, page)", "page", "tests/engine/test_sharing.py -k copy_of"
    ),
    Fault(  # every waiting sample looks at all others
        "jaxspec/engine/scheduler.py",
        "[s for s in self.running if s.samples is request.samples]",
        "[s for s in request.samples if s is not request and s.pages]",
        "tests/engine/test_sharing.py -k cost",
    ),
    Fault(  # a seeded request's tokens hang on how many run
        "jaxspec/engine/engine.py", " and not pinned:", ":", "tests/engine/test_seeds.py -k how_many"
    ),
    Fault(  # an interrupted step is taken for a whole one
        "jaxspec/engine/roster.py",
        "if self.midway or self.runner.lost:",
        "if self.runner.lost:",
        "tests/engine/test_faults.py -k between_any_two_lines",
    ),
    Fault(  # a top_p that float32 has no number for forbids every id
        "jaxspec/sampling/distribution.py", " | (z >= largest)", "", "tests/sampling/test_distribution.py -k largest"
    ),
    Fault(  # a stop string before half a character
        "jaxspec/api/tokens.py",
        "new = text[self.certain : len(text) - unfinished]",
        'new = "" if unfinished else text[self.certain :]',
        "tests/api/test_detokenizer.py -k another_character",
    ),
    Fault(  # ids that were fed and not kept stay in the text
        "jaxspec/api/detokenizer.py",
        "if start != self.num_fed:",
        "if False:",
        "tests/api/test_detokenizer.py -k before_an_interrupt",
    ),
    Fault(  # what a draft gives nothing is proposed
        "jaxspec/decode/round.py",
        "num_proposed=leading(possible, proposal.num_proposed))",
        "num_proposed=proposal.num_proposed)",
        "tests/engine/test_no_law.py -k standard",
    ),
    Fault(  # a draft that spoils its round is tried for ever
        "jaxspec/decode/round.py",
        "jnp.where(state.without_drafts, 0, ",
        "jnp.where(state.without_drafts & False, 0, ",
        "tests/engine/test_no_law.py -k spoils",
    ),
    Fault(  # attention reads slots that nobody wrote
        "jaxspec/models/paged.py",
        "num_keys = end(jnp.sum(~masked, axis=1, dtype=jnp.int32))",
        "num_keys = kv_len",
        "tests/engine/test_no_law.py -k 'spoils or alone'",
    ),
    Fault(  # a second failure leaves callers waiting
        "jaxspec/api/async_llm.py",
        "with contextlib.suppress(BaseException):\n                self.inbox.get_nowait()()",
        "with contextlib.suppress(queue.Empty):\n                self.inbox.get_nowait()()",
        "tests/api/async_llm/test_thread.py -k second_failure",
    ),
    Fault(  # a draft is accepted with p in place of p / q
        "jaxspec/verify/standard.py",
        "case.uniforms() * q_of_drafts(proposal) < ",
        "case.uniforms() < ",
        "tests/verify/test_law.py -k 'draws_from_its_law and standard'",
    ),
    Fault(  # a rejected draft is made up for from p, not from what q lacks
        "jaxspec/verify/standard.py",
        "residual = jnp.maximum(jnp.reshape(weight, (-1, 1)) * p_at - q_at, 0.0)",
        "residual = p_at",
        "tests/verify/test_law.py -k 'emitted_tokens and standard'",
    ),
    Fault(  # of a block each length is judged as if no draft followed
        "jaxspec/verify/block.py",
        "return weights, jnp.where(last, weights[:, 1:], chances)",
        "return weights, weights[:, 1:]",
        "tests/verify/test_law.py -k 'emitted_tokens and block'",
    ),
    Fault(  # a proposal that ends early is judged as if it went on
        "jaxspec/verify/block.py",
        "== proposal.num_proposed[:, None]",
        "== num_drafts",
        "tests/verify/test_law.py -k 'draws_from_its_law and block'",
    ),
    Fault(  # the token behind a block is made up for as behind a draft that was judged alone
        "jaxspec/verify/block.py",
        "extra_law(p, proposal, jnp.full(count, i), weights[:, i])",
        "extra_law(p, proposal, jnp.full(count, i))",
        "tests/verify/test_law.py -k 'emitted_tokens and block'",
    ),
    Fault(  # and where it is drawn
        "jaxspec/verify/block.py",
        "extra_law(p, proposal, num_accepted, rng.take_row(weights, num_accepted))",
        "extra_law(p, proposal, num_accepted)",
        "tests/verify/test_law.py -k 'draws_from_its_law and block'",
    ),
    Fault(  # the first draft of a block that fails ends it
        "jaxspec/verify/block.py",
        "kept = (case.uniforms() < chances)",
        "kept = (case.uniforms() < jnp.cumprod(chances, axis=1))",
        "tests/verify/test_law.py -k 'draws_from_its_law and block'",
    ),
    Fault(  # what a draft hardly ever proposes is no number
        "jaxspec/verify/block.py",
        "jnp.where(path > 0.0, jnp.minimum(path / q_x[:, i], 1.0), 0.0)",
        "jnp.minimum(w[-1] * (p_x[:, i] / q_x[:, i]), 1.0)",
        "tests/verify/test_rules.py -k 'extremes and block'",
    ),
    Fault(  # where the target is unsure, more is asked for
        "jaxspec/verify/typical.py",
        "jnp.exp(-entropy)",
        "jnp.exp(entropy)",
        "tests/verify/test_typical.py -k numpy",
    ),
    Fault(  # behind a failure chance decides
        "jaxspec/verify/typical.py",
        "jnp.where(failed, rng.take_row(case.own, num_accepted), drawn)",
        "drawn",
        "tests/verify/test_typical.py -k numpy",
    ),
    Fault(  # greedy requests are under the rule that the others are under
        "jaxspec/verify/rules.py",
        "return GREEDY\n",
        "return asked or UNSEEDED\n",
        "tests/verify/test_typical.py -k greedy",
    ),
    Fault(  # what decides about a draft is what it was drawn with
        "jaxspec/sampling/rng.py",
        '"accept": 1',
        '"accept": 0',
        "tests/decode/test_statistics.py -k 'numbers_of_the_round and standard-1-5'",
    ),
    Fault(  # half of a seed is not looked at
        "jaxspec/sampling/rng.py",
        "(seed[:, 0], seed[:, 1])",
        "(seed[:, 1],)",
        "tests/decode/test_seeded.py -k every_bit",
    ),
    Fault(  # one id more than top_k asks for
        "jaxspec/sampling/distribution.py",
        "jnp.where(rows.top_k > 0, rows.top_k, z.shape[-1])",
        "jnp.where(rows.top_k > 0, rows.top_k + 1, z.shape[-1])",
        "tests/sampling/test_distribution.py -k top_k_top_p",
    ),
    Fault(  # min_p is measured from 1, not from the likeliest
        "jaxspec/sampling/distribution.py",
        "floor = largest + jnp.log(per_row(rows.min_p))",
        "floor = jnp.log(per_row(rows.min_p))",
        "tests/sampling/test_distribution.py -k top_k_top_p",
    ),
    Fault(  # a repetition penalty that rewards ids below zero
        "jaxspec/sampling/processors/penalties.py",
        "jnp.where(logits > 0, logits / repetition, logits * repetition)",
        "logits / repetition",
        "tests/sampling/test_processors.py -k numpy",
    ),
    Fault(  # penalties that know nothing of the round's own drafts
        "jaxspec/sampling/processors/penalties.py",
        "now = count(state, jnp.where(drafted, place.drafts, -1))",
        "now = state",
        "tests/decode/test_processed_statistics.py -k 'law and model'",
    ),
    Fault(  # an id that is as likely as the chosen one lowers its rank
        "jaxspec/sampling/logprobs.py",
        "logits > value",
        "logits >= value",
        "tests/api/llm/test_logprobs.py -k raw_logits",
    ),
    Fault(  # prompt lookup finds the end of the text itself
        "jaxspec/drafters/ngram.py",
        "unbroken = position < length - 1",
        "unbroken = position < length",
        "tests/drafters/test_ngram.py -k test_cases",
    ),
    Fault(  # the draft's cache is taken to hold the last accepted token, which it never read
        "jaxspec/drafters/draft_model.py",
        "history.num_tokens + jnp.maximum(history.num_wanted, 1) - 1",
        "history.num_tokens + history.num_wanted",
        "tests/decode/test_round.py -k keeps_up",
    ),
    Fault(  # what comes after a stop id stays
        "jaxspec/decode/round.py",
        "jnp.minimum(first_stop + 1, room)",
        "room",
        "tests/decode/test_greedy_ends.py -k stop_id_cuts",
    ),
    Fault(  # the caches are copied, not updated in place
        "jaxspec/runtime/programs.py",
        '"donate_argnums": (1,)',
        '"donate_argnums": ()',
        "tests/decode/test_tpu.py -k draft_model",
    ),
    Fault(  # a program holds the lines of source that it comes from
        "jaxspec/runtime/programs.py",
        "jax.config.update(name, 0)",
        "jax.config.update(name, 1)",
        "tests/decode/test_program.py -k lines_of_source",
    ),
    Fault(  # a drafter reads the target's features of the position before
        "jaxspec/cache/features.py",
        "page_size, width = pages.shape[1:]\n",
        "positions, (page_size, width) = positions - 1, pages.shape[1:]\n",
        f"{HEADS} -k 'accepted and eagle3'",
    ),
    Fault(  # it reads one layer below those that it was trained for
        "jaxspec/models/decoder.py",
        "tuple(inputs[i] for i in taps)",
        "tuple(inputs[max(i - 1, 0)] for i in taps)",
        f"{HEADS} -k 'every_round and eagle3'",
    ),
    Fault(  # a layer whose output is meant is read before it
        "jaxspec/drafters/heads.py",
        '"target_layer_ids": 1}',
        '"target_layer_ids": 0}',
        f"{HEADS} -k 'every_round and dflash'",
    ),
    Fault(  # a head's unsaid rotary base is taken from its target
        "jaxspec/drafters/heads.py",
        '"rope_theta": 1e4, ',
        '"rope_theta": self.target.rope.theta, ',
        "tests/drafters/test_formats.py -k what_is_understood",
    ),
    Fault(  # a place of a block knows the token after the one before it
        "jaxspec/drafters/dspark.py",
        "step(state, block.pending, 0), step, choose)",
        "step(state, block.pending, 0), lambda s, t, i: step(s, block.pending, i), choose)",
        f"{HEADS} -k 'every_round and dspark'",
    ),
    Fault(  # occurrences that went on otherwise are counted on
        "jaxspec/drafters/suffix.py",
        "counted &= after[:, None, :, i] == token[:, :, None]",
        "counted &= True",
        "tests/drafters/test_suffix.py",
    ),
    Fault(  # entries made of the head's own output stay when the target has said more
        "jaxspec/drafters/feature_chain.py",
        "jnp.where(in_step, history.num_tokens - 1, history.draft_len)",
        "jnp.where(in_step, history.num_tokens - 1 + wanted, history.draft_len)",
        f"{HEADS} -k 'accepted and eagle3'",
    ),
    Fault(  # the last entry of a prompt's chunk takes the chunk's first token for the next
        "jaxspec/drafters/feature_chain.py",
        "first = (chunk.start == 0).astype(jnp.int32)\n",
        "first, chunk = jnp.ones_like(chunk.start), dataclasses.replace(chunk, length=chunk.length + 1)\n",
        f"{HEADS} -k 'every_round and eagle3'",
    ),
    Fault(  # a draft that catches up leaves a position out
        "jaxspec/engine/prefilling.py",
        "[r.draft_len + self.lag.lookahead for r in behind]",
        "[r.draft_len + self.lag.lookahead + 1 for r in behind]",
        f"{HEADS} -k 'every_round and eagle3'",
    ),
    Fault(  # a page whose last entry another token follows is taken for the same
        "jaxspec/engine/scheduler.py",
        "(i + 1) * self.page_size + self.lookahead]",
        "(i + 1) * self.page_size]",
        "tests/engine/test_sharing.py -k entries_see",
    ),
    Fault(  # rounds without drafts keep nothing of the target's features
        "jaxspec/engine/runner.py",
        "variant=plan.variant, drafter=drafter)",
        "variant=plan.variant, drafter=drafter, reader=drafter)",
        f"{HEADS} -k 'every_round and dflash'",
    ),
    Fault(  # a copied page has no features
        "jaxspec/cache/pages.py",
        """return jax.tree.map(lambda pages: pages.at[target].set(pages[source], mode="drop"), cache), None""",
        """copied = jax.tree.map(lambda pages: pages.at[target].set(pages[source], mode="drop"), cache)
    return dataclasses.replace(copied, features=cache.features), None""",
        f"{HEADS} -k 'every_round and medusa'",
    ),
    Fault(  # the oldest gives way
        "jaxspec/engine/scheduler.py",
        "self.preempt(self.running[-1])",
        "self.preempt(self.running[0])",
        "tests/engine/test_scheduler.py -k youngest",
    ),
    Fault(  # a page is known by its own tokens, whatever stands before it
        "jaxspec/cache/allocator.py",
        "hashlib.blake2b(before + ",
        'hashlib.blake2b(b"" + ',
        "tests/engine/test_sharing.py -k other_beginnings",
    ),
    Fault(  # a shared page is free when its first holder lets go
        "jaxspec/cache/allocator.py",
        "self.references[page] += 1",
        "self.references[page] = 1",
        "tests/cache/test_allocator.py",
    ),
    Fault(  # noise changes the number of drafts
        "jaxspec/engine/adaptive.py",
        "if value[best] < MARGIN * value[held]:",
        "if value[best] < value[held]:",
        "tests/engine/test_adaptive.py -k most_tokens",
    ),
    Fault(  # looks at drafts that lose stay as frequent as at first
        "jaxspec/engine/adaptive.py",
        "self.rounds, self.pause = 0, min(2 * self.pause, LONGEST_PAUSE)",
        "self.rounds = 0",
        "tests/engine/test_adaptive.py -k double",
    ),
    Fault(  # a stop string that began in the piece before is not found
        "jaxspec/api/detokenizer.py",
        "max(0, known - len(string) + 1)",
        "known",
        "tests/api/test_detokenizer.py -k cut_text",
    ),
    Fault(  # a text is decoded again and again
        "jaxspec/api/tokens.py",
        "if len(self.ids) > 2 * self.span:",
        "if False:",
        "tests/api/test_detokenizer.py -k cost",
    ),
    Fault(  # bytes that can be characters no more are held back
        "jaxspec/api/tokens.py",
        "SURROGATE.match(utf8.getstate()[0])",
        "False",
        "tests/api/test_tokens.py -k as_soon_as",
    ),
    Fault(  # a hidden special token stops nothing
        "jaxspec/api/detokenizer.py",
        "if text in stop} if stop else {}",
        "if not stop}",
        "tests/api/llm/test_stops.py -k hides",
    ),
    Fault(  # of two alternatives with one text the first is lost
        "jaxspec/server/logprobs.py",
        'f"token_id:{i}" if name in found.values() else name',
        "name",
        "tests/server/test_logprobs.py -k lost",
    ),
    Fault(  # a stream shows the beginning of a stop string
        "jaxspec/api/detokenizer.py",
        "return len(self.text) - max((overlap(self.text, string) for string in self.stop), default=0)",
        "return len(self.text)",
        "tests/api/llm/test_streams.py -k never_shows",
    ),
    Fault(  # pages beyond the pool are written
        "pallas_kernels/slot_mapping/tpu.py",
        "live &= page < pad_slot // page_size",
        "live &= page <= pad_slot // page_size",
        "tests/pallas_kernels/test_slot_mapping.py -k 'oracle and tpu'",
    ),
    Fault(  # a row's next token is flagged as rejected
        "pallas_kernels/merge_tokens/gpu.py",
        "is_rejected = ~live | (i > last)",
        "is_rejected = ~live | (i >= last)",
        "tests/pallas_kernels/test_merge_tokens.py -k 'oracle and gpu'",
    ),
    Fault(  # a window is wider by one
        "pallas_kernels/paged_attention/reference.py",
        "visible &= key_at > query_at - window",
        "visible &= key_at >= query_at - window",
        "tests/pallas_kernels/test_paged_attention.py -k 'oracle and reference'",
    ),
    Fault(  # long waves of the rotary embedding are shortened
        "checkpoints/hf_config.py",
        "1.0 / ((1 - smooth) / factor + smooth)",
        "(1 - smooth) / factor + smooth",
        "tests/models/test_oracle.py -k 'golden and llama3'",
    ),
    Fault(  # heads of GGUF files stay in the order of neighbours
        "checkpoints/gguf.py",
        ".swapaxes(1, 2).reshape(-1, *rest)",
        ".reshape(-1, *rest)",
        "tests/checkpoints/test_gguf.py -k 'float32_files and llama'",
    ),
    Fault(  # of several shards the last counts
        "checkpoints/safetensors.py",
        "self._home |= dict.fromkeys(file.keys(), file)",
        "self._home = dict.fromkeys(file.keys(), file)",
        "tests/checkpoints/test_safetensors.py -k 'two_devices and qwen3'",
    ),
    Fault(  # every device reads the first one's columns
        "checkpoints/assemble.py",
        "slice(first * size, last * size)",
        "slice(0, (last - first) * size)",
        "tests/checkpoints/test_safetensors.py -k 'two_devices and qwen3'",
    ),
    Fault(  # numbers are cut into digits
        "checkpoints/gguf_tokenizer.py",
        r"\p{N}{1,3}",
        r"\p{N}",
        "tests/checkpoints/test_gguf_tokenizer.py -k 'cuts_numbers and llama'",
    ),
    Fault(  # a reduced vocabulary's ids as they are, where their differences are wanted
        "checkpoints/speculators.py",
        '"d2t": ids - np.arange(len(ids))',
        '"d2t": ids',
        "tests/checkpoints/test_speculators.py -k 'read_back'",
    ),
    Fault(  # one divergence is the other
        "jaxspec/train/loss.py",
        "jnp.exp(log_q) * (log_q - log_p)",
        "jnp.exp(log_p) * (log_p - log_q)",
        "tests/train/test_loss.py -k 'numpy and full'",
    ),
    Fault(  # a pass sees what the first one made of all positions, where a round has its own of the last ones
        "jaxspec/train/chain.py",
        "place[None, :] <= place[:, None] - lag",
        "place[None, :] <= place[:, None]",
        "tests/train/test_heads.py -k 'a_round and eagle3 and 11'",
    ),
    Fault(  # a head learns what the one before it says
        "jaxspec/train/medusa.py",
        "backend), i, axis=1)",
        "backend), 0, axis=1)",
        "tests/train/test_heads.py -k 'a_round and medusa and 11'",
    ),
    Fault(  # a block sees what the target makes of its own first token
        "jaxspec/train/dflash.py",
        "before.positions[:, None] < block[:, :, :1]",
        "before.positions[:, None] <= block[:, :, :1]",
        "tests/train/test_heads.py -k 'a_round and dflash and 11'",
    ),
    Fault(  # a place is told the token that it is to predict
        "jaxspec/train/dspark.py",
        "outputs.predicts - 1",
        "outputs.predicts",
        "tests/train/test_heads.py -k 'a_round and dspark and 11'",
    ),
    Fault(  # an id beyond a table has no row on any device
        "jaxspec/models/table.py",
        "jnp.clip(ids, 0, rows - 1)",
        "ids",
        "tests/parallel/test_parts.py -k rows_of",
    ),
    Fault(  # of equal logits the last device's counts
        "jaxspec/models/head.py",
        "jnp.where(found > value,",
        "jnp.where(found >= value,",
        "tests/parallel/test_parts.py -k largest",
    ),
    Fault(  # a run that goes on begins its data again
        "jaxspec/train/loop.py", "range(at, o.steps)", "range(o.steps)", "tests/train/test_train.py -k killed"
    ),
    Fault(  # bad input is a failure nobody foresaw
        "jaxspec/cli/exits.py",
        "        return 2, text\n",
        "        return 1, text\n",
        "tests/cli/test_exits.py -k one_line",
    ),
    Fault(  # the notebook and its text form differ
        "colab/quickstart.py", "max_tokens = 64", "max_tokens = 65", "tests/colab/test_forms.py -k two_forms"
    ),
    Fault(  # a notebook installs another project's package
        "colab/quickstart.py", 'f"jaxspec-decoding[', 'f"jaxspec[', "tests/colab/test_install.py -k from_a_folder"
    ),
    Fault(  # an example names what there is not
        "README.md", "in llm.stream(", "in llm.streams(", "tests/test_docs.py -k 'examples_run and README'"
    ),
    Fault(  # who has gone away is decoded to the end
        "jaxspec/server/generation.py",
        "for task in (doing, leaving):",
        "for task in (leaving,):",
        "tests/server/test_load.py -k goes_away",
    ),
    Fault(  # a body that does not say its length has none
        "jaxspec/server/body.py", "if len(body) > most:", "if not body:", "tests/server/test_bodies.py -k too_long"
    ),
    Fault(  # a compressed body is decoded however long it becomes
        "jaxspec/server/body.py",
        "decoder.decompress(body, most + 1)",
        "decoder.decompress(body)",
        "tests/server/test_bodies.py -k limit_of_a_plain_one",
    ),
    Fault(  # nobody has a time limit
        "jaxspec/server/connections.py",
        'LIMITS.get(awaited or "")',
        'LIMITS.get("")',
        "tests/server/test_connections.py -k time_limit",
    ),
    Fault(  # pages of any site may use the server
        "jaxspec/server/guard.py",
        "origin in self.origins",
        "True",
        "tests/server/test_guard.py -k others_may_not",
    ),
    Fault(  # large answers are written in the event loop
        "jaxspec/server/offload.py",
        "if not large:",
        "if True:",
        "tests/server/test_turns.py -k 'turns_are_short and prompt_logprobs'",
    ),
    Fault(  # what the server does not know is ignored
        "jaxspec/server/fields.py",
        "elif name not in known and name not in HARMLESS:",
        "elif not name:",
        "tests/server/test_fields.py -k told_by_field",
    ),
    Fault(  # a request that fits only in part is let in
        "jaxspec/server/gate.py",
        "if self.inside + samples > self.most:",
        "if self.inside > self.most:",
        "tests/server/test_load.py -k does_not_fit",
    ),
    Fault(  # a drain waits for ever
        "jaxspec/server/gate.py",
        "limit.reschedule(asyncio.get_running_loop().time())",
        "limit.when()",
        "tests/server/test_ends.py -k cuts_off",
    ),
    Fault(  # an event is cut where its text has a line end of Unicode
        "jaxspec/server/lines.py",
        "json.replace(character, escape)",
        "json",
        "tests/server/test_answers.py -k line_ends",
    ),
    Fault(  # a message's control tokens are not looked for
        "jaxspec/server/control_tokens.py",
        "for i, message in enumerate(request.messages):",
        "for i, message in enumerate(request.messages[:0]):",
        "tests/server/test_control_tokens.py -k texts",
    ),
    Fault(  # pieces repeat the log-probabilities of the first
        "jaxspec/api/completions.py",
        "request.logprobs[start:]",
        "request.logprobs",
        "tests/server/test_answers.py -k streamed",
    ),
    Fault(  # a cached file that others can write is read back
        "jaxspec/common/trust.py",
        "if known.st_mode & WRITABLE_BY_OTHERS:",
        "if False:",
        "tests/loading/test_widened.py -k another_user",
    ),
    Fault(  # a damaged entry reaches JAX
        "jaxspec/runtime/checked_cache.py",
        "if hashlib.sha256(value).digest() != seal:",
        "if False:",
        "tests/runtime/test_checked_cache.py -k damaged",
    ),
    Fault(  # a round is timed at the real acceptance, whatever was asked for
        "jaxspec/bench/raw.py",
        '"synthetic" if rates else None',
        "None",
        "tests/bench/test_bench.py -k every_stage_that_accepts",
    ),
)


def seen(fault: Fault) -> bool:
    """Whether the fault's tests fail, or do not end, with it in place."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "*_cache", ".hypothesis"))
        path = tree / fault.file
        path.write_text(path.read_text(encoding="utf-8").replace(fault.right, fault.wrong), encoding="utf-8")
        command = f"{sys.executable} -m pytest -q -x -n0 -p no:cacheprovider {QUICK} {fault.tests}"
        try:
            done = subprocess.run(
                ["timeout", str(PATIENCE), "sh", "-c", f"exec {command}"],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},
                capture_output=True,
                text=True,
            )
        except FileNotFoundError:
            raise SystemExit("this needs the `timeout` command") from None
    if done.returncode not in (0, 1, 124):
        raise RuntimeError(f"{fault.tests}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode != 0


def main(arguments: Sequence[str] = ()) -> int:
    missed = 0
    for number, fault in enumerate(FAULTS):
        if arguments and str(number) not in arguments:
            continue
        found = seen(fault)
        missed += not found
        print(f"{number:3} {'seen' if found else 'NOT SEEN'}  {fault.file}: {fault.wrong or 'left out'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

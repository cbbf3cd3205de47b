"""The table of faults to plant, and of the tests that have to see them (`tests.support.planted`)."""

from __future__ import annotations

import dataclasses

HEADS = "tests/drafters/test_heads.py"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A text that occurs once in all SOURCES of `tests.support.planted`, and the text that replaces it.

    In `right`, `$x` matches any name, dotted or not, and the same one wherever it occurs. It is replaced in `wrong`.

    tests: pytest's arguments.
    """

    right: str
    wrong: str
    tests: str


WINDOWS = "tests/engine/test_window_pages.py -k computed_for_its_text"

FAULTS = (
    Fault(  # a window page is left one page too early
        "return max(length - self.reach, 0) // self.page_size",
        "return max(length - self.reach, 0) // self.page_size + 1",
        "tests/engine/test_windows.py -k 'equals_plain and noisy'",
    ),
    Fault(  # the pages of all other layers limit the pool of layers with a window, too
        "$layout.most_pages($degree, $platform, in_window=True)",
        "$layout.most_pages($degree, $platform)",
        "tests/cache/test_budget.py -k index",
    ),
    Fault(  # ... or one position too early for an assistant
        "return $window - 1 + 2",
        "return $window - 1 + 1",
        WINDOWS,
    ),
    Fault(  # what a row passes counts as left last
        "                self.idle.move_to_end(passed, last=False)",
        "                self.idle.move_to_end(passed)",
        "tests/engine/test_window_pages.py -k conversations",
    ),
    Fault(  # the last page that a row passed goes, too
        "passed = $row.pages[$i - 1]",
        "passed = $row.pages[$i]",
        "tests/engine/test_window_pages.py -k conversations",
    ),
    Fault(  # a beginning that layers with a window lost never comes back
        "$request.beginnings = len(usable), len(pages)",
        "$request.beginnings = (len(usable),)",
        "tests/engine/test_window_pages.py -k in_common",
    ),
    Fault(  # a beginning is reused although layers with a window no longer hold its end
        "self.windows.usable($pages) if self.windows else $pages",
        "$pages",
        "tests/engine/test_windows.py -k beginning",
    ),
    Fault(  # layers with a window copy the pages of all other layers
        "copy($own, *$windows) if",
        "copy($own, source, target) if",
        "tests/engine/test_windows.py -k samples",
    ),
    Fault(  # a tree's path stays where it was in layers with a window
        "Moves(self.moves.source, self.moves.window_slots)",
        "Moves(self.moves.source, self.moves.slots)",
        "tests/models/test_layers.py -k path",
    ),
    Fault(  # another page takes the window page of a page that is to be copied
        "            self.windows.hold(copy[0])",
        "            self.windows.hold(copy[1])",
        WINDOWS,
    ),
    Fault(  # a sample shares pages that layers with a window no longer hold
        "if not $s.prefilled or $windows.complete($s.pages, $end)",
        "",
        WINDOWS,
    ),
    Fault(  # rows that take others' places bring no text of their own
        "x[rows] if x.ndim else x",
        "x[: rows.size] if x.ndim else x",
        "tests/engine/test_spare_rows.py -k same",
    ),
    Fault(  # what rows gained goes to the first rows
        "x.at[rows].set(own) if x.ndim else own",
        "x.at[: rows.size].set(own) if x.ndim else own",
        "tests/engine/test_spare_rows.py -k same",
    ),
    Fault(  # the draft token after what was looked up counts as looked up
        "position < min(accepted, looked_up)",
        "position <= min(accepted, looked_up)",
        "tests/drafters/test_combined.py -k what_was_looked_up",
    ),
    Fault(  # each launch numbers its rounds from 0
        "places[-1].round + 1 if places else 0",
        "0",
        "tests/api/llm/test_origins.py -k add_up",
    ),
    Fault(  # a token counts the legal tokens of the place after it
        "for state in self.states[start : len(output)]",
        "for state in self.states[start + 1 :]",
        "tests/api/llm/test_origins.py -k legal",
    ),
    Fault(  # a row's grammar is a draft token behind
        "jnp.where(offsets($place) < $place.i[:, None], $place.drafts, -1)",
        "jnp.where(offsets($place) < $place.i[:, None] - 1, $place.drafts, -1)",
        "tests/sampling/test_grammar.py -k equals",
    ),
    Fault(  # ... and on the paths of a tree
        "return jax.vmap($adjust, in_axes=1, out_axes=1)($logits, $leading, $tree.depth)",
        "return jax.vmap($adjust, in_axes=1, out_axes=1)($logits, $leading, jnp.maximum($tree.depth - 1, 0))",
        "tests/engine/test_grammars.py -k 'every_drafter and tree'",
    ),
    Fault(  # a round's last token leaves a grammar's state as it was
        "state_after($tables, $width, $state, $emitted)",
        "state_after($tables, $width, $state, $emitted[:, :-1])",
        "tests/sampling/test_grammar.py -k advances",
    ),
    Fault(  # drafts are drawn under the mask, and q is reported without it
        "return $token, jax.nn.softmax($z, axis=-1, where=$z > -jnp.inf)",
        "return $token, jax.nn.softmax(fit_vocabulary(head.logits(hidden, backend), vocab_size, head.vocabulary))",
        "tests/decode/test_processed_statistics.py -k 'law and model'",
    ),
    Fault(  # drafts are drawn without the mask
        "        $logits = adjust($logits, $drafts, $i)\n    if deterministic",
        "        pass\n    if deterministic",
        "tests/engine/test_grammars.py -k 'every_drafter and noisy'",
    ),
    Fault(  # a table in use is given away
        "if not $table.users), None)",
        "if $table), None)",
        "tests/engine/test_grammar_pool.py -k another_stays",
    ),
    Fault(  # what goes on after the end of a grammar
        "if automaton else ()\n",
        "if False else ()\n",
        "tests/engine/test_grammars.py -k ends_where",
    ),
    Fault(  # the last places of a block make the drafts, not the first
        "$hidden[:, : $num_skipped + $count]",
        "$hidden[:, -($num_skipped + $count) :]",
        HEADS + " -k 'end_of_the_context and dflash'",
    ),
    Fault(  # of two tensors that should be the same, the first rows are compared
        "return all($x.dtype",
        "return next($x.dtype",
        "tests/checkpoints/test_safetensors.py -k not_the_table",
    ),
    Fault(  # a head's own table is not used, though it is another than the target's
        "if self.own(TABLE) else {}",
        "if False else {}",
        "tests/drafters/test_copies.py -k used_or_refused",
    ),
    Fault(  # what a chat template writes after an answer does not end one
        'add($found, turn_ends($tokenizer), "chat template")',
        "pass",
        "tests/checkpoints/test_ends.py",
    ),
    Fault(  # a key that is null is not one that is absent
        "if $x is not None or $key in $kept",
        "if True",
        "tests/checkpoints/test_nulls.py -k heads_config",
    ),
    Fault(  # one disturbed measurement keeps a number of drafts from being chosen
        "$costs[$which] = min($new, $once[$which])",
        "$costs[$which] = $once[$which]",
        "tests/engine/test_adaptive.py -k disturbed",
    ),
    Fault(  # a program ends a block's keys at its own last query
        "        $last_query = $kv_len[$b] - 1\n",
        "        pass\n",
        "tests/pallas_kernels/test_paged_attention.py -k 'see_each_other and gpu'",
    ),
    Fault(  # what one row's kernel leaves of a norm is asked for where there is none
        '"squares": $split.get("squares")',
        '"squares": $split["squares"]',
        "tests/drafters/test_kernels.py -k 'real_widths and eagle3'",
    ),
    Fault(  # an id that was fed before an interrupt counts as heard of
        "$start = $num_fed\n        $end = len($ids) if $end is None else $end\n        $num_fed = -1",
        "$start = $num_fed\n        $end = len($ids) if $end is None else $end\n        pass",
        "tests/api/test_detokenizer.py -k interrupt_after",
    ),
    Fault(  # a seeded row's run hangs on its neighbours' drafts
        "$kept &= (jnp.arange($count)",
        "$kept | (jnp.arange($count)",
        "tests/drafters/test_suffix.py -k seeded_row",
    ),
    Fault(  # a copy that fails ends everybody who came with it
        "zip(*$copies[$at : $at + batch.COPIES], strict=True)\n            with $open.blame($owners):",
        "zip(*$copies[$at : $at + batch.COPIES], strict=True)\n            with $open.blame($open.scheduler.running):",
        "tests/engine/test_faults.py -k it_was_for",
    ),
    Fault(  # a stream that the garbage collector ends changes queues that somebody is changing
        "if $request.id not in $open or $inside:",
        "if $request.id not in $open:",
        "tests/api/llm/test_neighbours.py -k collector",
    ),
    Fault(  # an interrupt between two requests leaves the first behind
        "for $request in [$r for $i, $r in $open.items() if $i not in $known]:",
        "for $request in ():",
        "tests/api/llm/test_neighbours.py -k queued",
    ),
    Fault(  # a part that begins within a group takes the scales of its beginning
        "np.asarray($r, int) // $block for",
        "np.asarray($r, int) // $block - $r.start // $block for",
        "tests/checkpoints/test_eight_bits.py -k any_part",
    ),
    Fault(  # numbers are rounded to one bit less than there is room for
        "$exponent - ($mantissa == 0.5)",
        "$exponent",
        "tests/checkpoints/test_eight_bits.py -k nearest",
    ),
    Fault(  # numbers are rounded on the way to memory
        "mantissa_bits=7) == $x",
        "mantissa_bits=7) < jnp.inf",
        "tests/models/test_storage.py -k lacks",
    ),
    Fault(  # the compiler converts all matrices before the first product
        "else once(by_library, $x, $matrix)",
        "else by_library($x, $matrix)",
        "tests/pallas_kernels/test_streamed.py -k one_at_a_time",
    ),
    Fault(  # ... and the whole table for one of its rows
        "if $backend.alone and ",
        "if False and ",
        "tests/pallas_kernels/test_streamed.py -k by_themselves",
    ),
    Fault(  # a copy begins at a page that is itself still to be copied to
        "$source.get($page, $page), $pages[", "$page, $pages[", "tests/engine/test_sharing.py -k copy_of"
    ),
    Fault(  # every waiting sample looks at all others
        "[$s for $s in self.running if $s.samples is $request.samples]",
        "[$s for $s in $request.samples if $s is not $request and $s.pages]",
        "tests/engine/test_sharing.py -k cost",
    ),
    Fault(  # a seeded request's tokens hang on how many run
        "len($running) >= $limit and not $pinned:", "len($running) >= $limit:", "tests/engine/test_seeds.py -k how_many"
    ),
    Fault(  # an interrupted step is taken for a whole one
        "if self.midway or self.runner.lost:",
        "if self.runner.lost:",
        "tests/engine/test_faults.py -k between_any_two_lines",
    ),
    Fault(  # a top_p that float32 has no number for forbids every id
        " | ($z >= $largest)", "", "tests/sampling/test_distribution.py -k largest"
    ),
    Fault(  # a stop string before half a character
        "$new = $text[$certain : len($text) - $unfinished]",
        '$new = "" if $unfinished else $text[$certain :]',
        "tests/api/test_detokenizer.py -k another_character",
    ),
    Fault(  # ids that were fed and not kept stay in the text
        "if $start != self.num_fed:",
        "if False:",
        "tests/api/test_detokenizer.py -k before_an_interrupt",
    ),
    Fault(  # what a draft gives nothing is proposed
        "num_proposed=leading($possible, $num_proposed))",
        "num_proposed=$num_proposed)",
        "tests/engine/test_not_finite.py -k standard",
    ),
    Fault(  # a draft that spoils its round is tried for ever
        "jnp.where($state.without_drafts, 0, ",
        "jnp.where($state.without_drafts & False, 0, ",
        "tests/engine/test_not_finite.py -k spoils",
    ),
    Fault(  # attention reads slots that nobody wrote
        "$num_keys = end(jnp.sum(~$masked, axis=1, dtype=jnp.int32))",
        "$num_keys = kv_len",
        "tests/engine/test_not_finite.py -k 'spoils or alone'",
    ),
    Fault(  # a second failure leaves callers waiting
        "with contextlib.suppress(BaseException):\n                $inbox.get_nowait()()",
        "with contextlib.suppress(queue.Empty):\n                $inbox.get_nowait()()",
        "tests/api/async_llm/test_thread.py -k second_failure",
    ),
    Fault(  # a draft is accepted with p in place of p / q
        "$case.uniforms() * q_of_drafts($proposal) < ",
        "$case.uniforms() < ",
        "tests/verify/test_law.py -k 'draws_from_its_law and standard'",
    ),
    Fault(  # a rejected draft is made up for from p, not from what q lacks
        "jnp.maximum(jnp.reshape($weight, (-1, 1)) * $p_at - $q_at, 0.0)",
        "$p_at",
        "tests/verify/test_law.py -k 'emitted_tokens and standard'",
    ),
    Fault(  # of a block each length is judged as if no draft followed
        "return $weights, jnp.where($last, $weights[:, 1:], $chances)",
        "return $weights, $weights[:, 1:]",
        "tests/verify/test_law.py -k 'emitted_tokens and block'",
    ),
    Fault(  # a proposal that ends early is judged as if it went on
        "== $proposal.num_proposed[:, None]",
        "== num_drafts",
        "tests/verify/test_law.py -k 'draws_from_its_law and block'",
    ),
    Fault(  # the token behind a block is made up for as behind a draft that was judged alone
        "residual_distribution($p, $proposal, jnp.full($count, $i), $weights[:, $i])",
        "residual_distribution($p, $proposal, jnp.full($count, $i))",
        "tests/verify/test_law.py -k 'emitted_tokens and block'",
    ),
    Fault(  # and where it is drawn
        "residual_distribution($p, $proposal, $num_accepted, rng.take_row($weights, $num_accepted))",
        "residual_distribution($p, $proposal, $num_accepted)",
        "tests/verify/test_law.py -k 'draws_from_its_law and block'",
    ),
    Fault(  # the first draft of a block that fails ends it
        "$kept = ($case.uniforms() < $chances)",
        "$kept = ($case.uniforms() < jnp.cumprod($chances, axis=1))",
        "tests/verify/test_law.py -k 'draws_from_its_law and block'",
    ),
    Fault(  # what a draft hardly ever proposes is no number
        "jnp.where($path > 0.0, jnp.minimum($path / $q_x[:, $i], 1.0), 0.0)",
        "jnp.minimum(w[-1] * (p_x[:, $i] / $q_x[:, $i]), 1.0)",
        "tests/verify/test_rules.py -k 'extremes and block'",
    ),
    Fault(  # where the target is unsure, more is asked for
        "$alpha * jnp.exp(-$entropy)",
        "$alpha * jnp.exp($entropy)",
        "tests/verify/test_typical.py -k numpy",
    ),
    Fault(  # behind a failure chance decides
        "jnp.where($failed, rng.take_row($own, $num_accepted), $drawn)",
        "$drawn",
        "tests/verify/test_typical.py -k numpy",
    ),
    Fault(  # greedy requests are under the rule that the others are under
        "return GREEDY\n",
        "return asked or UNSEEDED\n",
        "tests/verify/test_typical.py -k greedy",
    ),
    Fault(  # what decides about a draft is what it was drawn with
        '"accept": 1',
        '"accept": 0',
        "tests/decode/test_statistics.py -k 'numbers_of_the_round and standard-1-5'",
    ),
    Fault(  # half of a seed is not looked at
        "($seed[:, 0], $seed[:, 1])",
        "($seed[:, 1],)",
        "tests/decode/test_seeded.py -k every_bit",
    ),
    Fault(  # one id more than top_k asks for
        "jnp.where($top_k > 0, $top_k, $z.shape[-1])",
        "jnp.where($top_k > 0, $top_k + 1, $z.shape[-1])",
        "tests/sampling/test_distribution.py -k top_k_top_p",
    ),
    Fault(  # min_p is measured from 1, not from the likeliest
        "$floor = $largest + jnp.log(per_row($min_p))",
        "$floor = jnp.log(per_row($min_p))",
        "tests/sampling/test_distribution.py -k top_k_top_p",
    ),
    Fault(  # a repetition penalty that rewards ids below zero
        "jnp.where($logits > 0, $logits / $repetition, $logits * $repetition)",
        "$logits / $repetition",
        "tests/sampling/test_processors.py -k numpy",
    ),
    Fault(  # penalties that know nothing of the round's own drafts
        "$now = count($state, jnp.where($drafted, $drafts, -1))",
        "$now = $state",
        "tests/decode/test_processed_statistics.py -k 'law and model'",
    ),
    Fault(  # an id that is as likely as the chosen one lowers its rank
        "1 + jnp.sum($logits > $value,",
        "1 + jnp.sum($logits >= $value,",
        "tests/api/llm/test_logprobs.py -k raw_logits",
    ),
    Fault(  # prompt lookup finds the end of the text itself
        "$unbroken = $position < $length - 1",
        "$unbroken = $position < $length",
        "tests/drafters/test_ngram.py -k test_cases",
    ),
    Fault(  # the draft's cache is taken to hold the last accepted token, which it never read
        "$history.num_tokens + jnp.maximum($history.num_wanted, 1) - 1",
        "$history.num_tokens + $history.num_wanted",
        "tests/decode/test_round.py -k keeps_up",
    ),
    Fault(  # what comes after a stop id stays
        "jnp.minimum($first_stop + 1, $room)",
        "$room",
        "tests/decode/test_greedy_ends.py -k stop_id_cuts",
    ),
    Fault(  # the caches are copied, not updated in place
        '"donate_argnums": (1,)',
        '"donate_argnums": ()',
        "tests/decode/test_tpu.py -k draft_model",
    ),
    Fault(  # a program holds the lines of source that it comes from
        "jax.config.update($name, 0)",
        "jax.config.update($name, 1)",
        "tests/decode/test_program.py -k lines_of_source",
    ),
    Fault(  # a drafter reads the target's features of the position before
        "$size, $width = $pages.shape[1:]\n    $page = jnp.take_along_axis($table, jnp.clip($at, 0)",
        "$size, $width = $pages.shape[1:]\n    $page = jnp.take_along_axis($table, jnp.clip($at := $at - 1, 0)",
        f"{HEADS} -k 'accepted and eagle3'",
    ),
    Fault(  # it reads one layer below those that it was trained for
        "tuple($inputs[$i] if $scale == 1.0 else $inputs[$i] * $scale for $i in $taps)",
        "tuple($inputs[max($i - 1, 0)] for $i in $taps)",
        f"{HEADS} -k 'every_round and eagle3'",
    ),
    Fault(  # a layer whose output is meant is read before it
        '"target_layer_ids": 1}',
        '"target_layer_ids": 0}',
        f"{HEADS} -k 'every_round and dflash'",
    ),
    Fault(  # a head's unsaid rotary base is taken from its target
        '"rope_theta": 1e4, ',
        '"rope_theta": self.target.rope.theta, ',
        "tests/drafters/test_formats.py -k what_is_understood",
    ),
    Fault(  # a place of a block knows the token after the one before it
        "step($state, $pending, 0), $step, $choose)",
        "$step($state, $pending, 0), lambda s, t, i: $step(s, $pending, i), $choose)",
        f"{HEADS} -k 'every_round and dspark'",
    ),
    Fault(  # occurrences that went on otherwise are counted on
        "$counted &= $after[:, None, :, $i] == $token[:, :, None]",
        "$counted &= True",
        "tests/drafters/test_suffix.py",
    ),
    Fault(  # entries made of the head's own output stay when the target has said more
        "jnp.where($in_step, $num_tokens - 1, $draft_len)",
        "jnp.where($in_step, $num_tokens - 1 + wanted, $draft_len)",
        f"{HEADS} -k 'accepted and eagle3'",
    ),
    Fault(  # the last entry of a prompt's chunk takes the chunk's first token for the next
        "$first = ($chunk.start == 0).astype(jnp.int32)\n",
        "$first, $chunk = jnp.ones_like($chunk.start), dataclasses.replace($chunk, length=$chunk.length + 1)\n",
        f"{HEADS} -k 'every_round and eagle3'",
    ),
    Fault(  # a draft that catches up leaves a position out
        "[$r.draft_len + self.lag.lookahead for $r in $behind]",
        "[$r.draft_len + self.lag.lookahead + 1 for $r in $behind]",
        f"{HEADS} -k 'every_round and eagle3'",
    ),
    Fault(  # a page whose last entry another token follows is taken for the same
        "($i + 1) * $page_size + $lookahead]",
        "($i + 1) * $page_size]",
        "tests/engine/test_sharing.py -k entries_see",
    ),
    Fault(  # rounds without drafts keep nothing of the target's features
        "variant=$variant, drafter=$drafter, grammar_words=$words)",
        "variant=$variant, drafter=$drafter, grammar_words=$words, reader=$drafter)",
        f"{HEADS} -k 'every_round and dflash'",
    ),
    Fault(  # a copied page has no features
        "    copied = copy($cache, $source, $target)",
        "    copied = dataclasses.replace(copy($cache, $source, $target), features=$cache.features)",
        f"{HEADS} -k 'every_round and medusa'",
    ),
    Fault(  # the oldest gives way
        "self.preempt($running[-1])",
        "self.preempt($running[0])",
        "tests/engine/test_scheduler.py -k youngest",
    ),
    Fault(  # a page is known by its own tokens, whatever stands before it
        "hashlib.blake2b($before + ",
        'hashlib.blake2b(b"" + ',
        "tests/engine/test_sharing.py -k other_beginnings",
    ),
    Fault(  # a shared page is free when its first holder lets go
        "self.references[$page] += 1",
        "self.references[$page] = 1",
        "tests/cache/test_allocator.py",
    ),
    Fault(  # noise changes the number of drafts
        "if $value[$best] < MARGIN * $value[$held]:",
        "if $value[$best] < $value[$held]:",
        "tests/engine/test_adaptive.py -k most_tokens",
    ),
    Fault(  # looks at drafts that lose stay as frequent as at first
        "$rounds, $pause = 0, min(2 * $pause, LONGEST_PAUSE)",
        "$rounds = 0",
        "tests/engine/test_adaptive.py -k double",
    ),
    Fault(  # a stop string that began in the piece before is not found
        "max(0, $known - len($string) + 1)",
        "$known",
        "tests/api/test_detokenizer.py -k cut_text",
    ),
    Fault(  # a text is decoded again and again
        "if len($ids) > 2 * $span:",
        "if False:",
        "tests/api/test_detokenizer.py -k cost",
    ),
    Fault(  # bytes that can be characters no more are held back
        "SURROGATE.match($utf8.getstate()[0])",
        "False",
        "tests/api/test_tokens.py -k as_soon_as",
    ),
    Fault(  # a hidden special token stops nothing
        "if $text in $stop} if $stop else {}",
        "if not $stop}",
        "tests/api/llm/test_stops.py -k hides",
    ),
    Fault(  # of two alternatives with one text the first is lost
        'f"token_id:{$i}" if $name in $found.values() else $name',
        "$name",
        "tests/server/test_logprobs.py -k lost",
    ),
    Fault(  # a stream shows the beginning of a stop string
        "return len($text) - max((overlap($text, $string) for $string in $stop), default=0)",
        "return len($text)",
        "tests/api/llm/test_streams.py -k never_shows",
    ),
    Fault(  # pages beyond the pool are written
        "            $live &= $page < $pad_slot // $page_size\n            $slots[$i] =",
        "            $live &= $page <= $pad_slot // $page_size\n            $slots[$i] =",
        "tests/pallas_kernels/test_slot_mapping.py -k 'oracle and tpu'",
    ),
    Fault(  # a row's next token is flagged as rejected
        "$is_rejected = ~$live | ($i > $last)",
        "$is_rejected = ~$live | ($i >= $last)",
        "tests/pallas_kernels/test_merge_tokens.py -k 'oracle and gpu'",
    ),
    Fault(  # a window is wider by one
        "$visible &= $key_at > $query_at - $window\n        $value = jnp.where(",
        "$visible &= $key_at >= $query_at - $window\n        $value = jnp.where(",
        "tests/pallas_kernels/test_paged_attention.py -k 'oracle and reference'",
    ),
    Fault(  # long waves of the rotary embedding are shortened
        "1.0 / ((1 - $smooth) / $factor + $smooth)",
        "(1 - $smooth) / $factor + $smooth",
        "tests/models/test_oracle.py -k 'golden and llama3'",
    ),
    Fault(  # heads of GGUF files stay in the order of neighbours
        ".swapaxes(1, 2).reshape(-1, *$rest)",
        ".reshape(-1, *$rest)",
        "tests/checkpoints/test_gguf.py -k 'float32_files and llama'",
    ),
    Fault(  # of several shards the last counts
        "$_home |= dict.fromkeys($file.keys(), $file)",
        "$_home = dict.fromkeys($file.keys(), $file)",
        "tests/checkpoints/test_safetensors.py -k 'two_devices and qwen3'",
    ),
    Fault(  # every device reads the first one's columns
        "slice($first * $size, $last * $size)",
        "slice(0, ($last - $first) * $size)",
        "tests/checkpoints/test_safetensors.py -k 'two_devices and qwen3'",
    ),
    Fault(  # numbers are cut into digits
        r"\p{N}{1,3}",
        r"\p{N}",
        "tests/checkpoints/test_gguf_tokenizer.py -k 'cuts_numbers and llama'",
    ),
    Fault(  # a reduced vocabulary's ids as they are, where their differences are wanted
        '"d2t": $ids - np.arange(len($ids))',
        '"d2t": $ids',
        "tests/checkpoints/test_speculators.py -k 'read_back'",
    ),
    Fault(  # one divergence is the other
        '"rkl": lambda $p, $q: jnp.exp($q) * ($q - $p)',
        '"rkl": lambda $p, $q: jnp.exp($p) * ($p - $q)',
        "tests/train/test_loss.py -k 'numpy and full'",
    ),
    Fault(  # a pass sees what the first one made of all positions, where a round has its own of the last ones
        "$place[None, :] <= $place[:, None] - $lag",
        "$place[None, :] <= $place[:, None]",
        "tests/train/test_heads.py -k 'a_round and eagle3 and 11'",
    ),
    Fault(  # a head learns what the one before it says
        "$backend), $i, axis=1)",
        "$backend), 0, axis=1)",
        "tests/train/test_heads.py -k 'a_round and medusa and 11'",
    ),
    Fault(  # a block sees what the target makes of its own first token
        "$positions[:, None] < $block[:, :, :1]",
        "$positions[:, None] <= $block[:, :, :1]",
        "tests/train/test_heads.py -k 'a_round and dflash and 11'",
    ),
    Fault(  # a place is told the token that it is to predict
        'jnp.take_along_axis($batch["tokens"], $predicts - 1,',
        'jnp.take_along_axis($batch["tokens"], $predicts,',
        "tests/train/test_heads.py -k 'a_round and dspark and 11'",
    ),
    Fault(  # an id beyond a table has no row on any device
        "jnp.clip($ids, 0, $rows - 1) - lax",
        "$ids - lax",
        "tests/parallel/test_parts.py -k rows_of",
    ),
    Fault(  # of equal logits the last device's counts
        "jnp.where($found > $value,",
        "jnp.where($found >= $value,",
        "tests/parallel/test_parts.py -k largest",
    ),
    Fault(  # a run that goes on begins its data again
        "range($at, $o.steps)", "range($o.steps)", "tests/train/test_train.py -k killed"
    ),
    Fault(  # bad input is a failure nobody foresaw
        "return 2, $text\n    $line = other_platforms(",
        "return 1, $text\n    $line = other_platforms(",
        "tests/cli/test_exits.py -k one_line",
    ),
    Fault(  # the notebook and its text form differ
        "max_tokens = 64", "max_tokens = 65", "tests/colab/test_forms.py -k two_forms"
    ),
    Fault(  # an example names what there is not
        'llm.stream("Once upon a time", greedy)',
        'llm.streams("Once upon a time", greedy)',
        "tests/test_docs.py -k 'examples_run and README'",
    ),
    Fault(  # who has gone away is decoded to the end
        "for $task in ($doing, $leaving):\n            $task.cancel()",
        "for $task in ($leaving,):\n            $task.cancel()",
        "tests/server/test_load.py -k goes_away",
    ),
    Fault(  # a body that does not say its length has none
        "len($body) > $most:\n                    raise",
        "not $body:\n                    raise",
        "tests/server/test_bodies.py -k too_long",
    ),
    Fault(  # a compressed body is decoded however long it becomes
        "$decoder.decompress($body, $most + 1)",
        "$decoder.decompress($body)",
        "tests/server/test_bodies.py -k limit_of_a_plain_one",
    ),
    Fault(  # nobody has a time limit
        'LIMITS.get($awaited or "")',
        'LIMITS.get("")',
        "tests/server/test_connections.py -k time_limit",
    ),
    Fault(  # pages of any site may use the server
        "ANY in $origins or $origin in $origins",
        "True",
        "tests/server/test_guard.py -k others_may_not",
    ),
    Fault(  # large answers are written in the event loop
        "if not $large:\n        return $function(*$args)\n    return await",
        "if True:\n        return $function(*$args)\n    return await",
        "tests/server/test_turns.py -k 'turns_are_short and prompt_logprobs'",
    ),
    Fault(  # what the server does not know is ignored
        "elif $name not in $known and $name not in HARMLESS:",
        "elif not $name:",
        "tests/server/test_fields.py -k told_by_field",
    ),
    Fault(  # a request that fits only in part is let in
        "if self.inside + $samples > self.most:",
        "if self.inside > self.most:",
        "tests/server/test_load.py -k does_not_fit",
    ),
    Fault(  # a drain waits for ever
        "$limit.reschedule(asyncio.get_running_loop().time())",
        "$limit.when()",
        "tests/server/test_ends.py -k cuts_off",
    ),
    Fault(  # an event is cut where its text has a line end of Unicode
        "$json.replace($character, $escape)",
        "$json",
        "tests/server/test_answers.py -k line_ends",
    ),
    Fault(  # a message's control tokens are not looked for
        "for $i, $message in enumerate($request.messages):",
        "for $i, $message in enumerate($request.messages[:0]):",
        "tests/server/test_control_tokens.py -k texts",
    ),
    Fault(  # a model that may reason before a form has to
        "with_optional_reasoning($found, $opening, $mark)",
        "with_reasoning($found, $mark)",
        "tests/grammars/test_build.py -k may_come",
    ),
    Fault(  # a mark that comes in two pieces is taken for reasoning
        "len(self.text) - possible_start(self.text, self.marks.close)",
        "len(self.text)",
        "tests/server/test_reasoning.py -k parted",
    ),
    Fault(  # a brace inside of a string of Gemma's notation ends a call
        "elif text.startswith(MARK, self.at):",
        "elif False:",
        "tests/server/test_gemma_calls.py -k transformers",
    ),
    Fault(  # special tokens inside of calls are not legal in the grammar
        "vocabulary = vocabulary.spelling(grammar.spelled)",
        "vocabulary = vocabulary.spelling(())",
        "tests/server/test_gemma_calls.py -k allows",
    ),
    Fault(  # the label of Gemma's reasoning is part of it
        "self.text.removeprefix(self.label)",
        "self.text",
        "tests/server/test_reasoning.py -k parted",
    ),
    Fault(  # YaRN of OLMo 3's GGUF files is also in layers with a window
        "if files.local_theta is not None and any(windows):",
        "if files.local_theta and any(windows):",
        "tests/checkpoints/test_gguf.py -k 'equal_the_folder and olmo3'",
    ),
    Fault(  # an item of a streamed response is never done
        'yield self.named("response.output_item.done", output_index=len(self.output) - 1, item=item)',
        "pass",
        "tests/server/test_responses.py -k build",
    ),
    Fault(  # pieces repeat the log-probabilities of the first
        "$request.logprobs[$start:]",
        "$request.logprobs",
        "tests/server/test_answers.py -k streamed",
    ),
    Fault(  # a cached file that others can write is read back
        "if $st_mode & WRITABLE_BY_OTHERS:",
        "if False:",
        "tests/loading/test_dequantised.py -k another_user",
    ),
    Fault(  # a damaged entry reaches JAX
        "if hashlib.sha256($value).digest() != $seal:",
        "if False:",
        "tests/runtime/test_checked_cache.py -k damaged",
    ),
    Fault(  # pieces of a prompt that need each other's state are in one pass
        "-(-$count // $chunk.width) if $chunk.several else min($count, 1)",
        "-(-$count // $chunk.width)",
        "tests/models/test_state_mixer.py -k 'whole_pass and mixed'",
    ),
    Fault(  # a sample starts with a state that its sibling has gone on with
        " or not self.copies:",
        ":",
        "tests/models/test_state_mixer.py -k samples_share",
    ),
    Fault(  # a prompt's padding changes a state
        "self.keep($pages, Kept($length, $block_table,",
        "self.keep($pages, Kept($length + 1, $block_table,",
        "tests/models/test_state_mixer.py -k 'whole_pass and mixed'",
    ),
    Fault(  # a round is timed at the real acceptance, whatever was asked for
        '"synthetic" if $rates else None',
        "None",
        "tests/bench/test_bench.py -k every_stage_that_accepts",
    ),
    Fault(  # packed integers are read without their offset
        '$offset = np.ascontiguousarray($words, "<i4").view(np.uint8) ^ np.uint8(128)',
        '$offset = np.ascontiguousarray($words, "<i4").view(np.uint8)',
        "tests/checkpoints/test_published.py -k any_part",
    ),
    Fault(  # parts of a merged matrix share a scale, though each has its own
        "None if $single else 1)",
        "None)",
        "tests/checkpoints/test_published.py -k 'values_and_scales and FP8-1'",
    ),
    Fault(  # a block in memory is larger than in the file
        "$rows = [$form.outputs for $form in $known if $form.outputs]",
        "$rows = []",
        "tests/checkpoints/test_published.py -k 'values_and_scales and BLOCK-1'",
    ),
    Fault(  # scales that are not positive are read
        "$right = np.isfinite($scale) & ($scale > 0)",
        "$right = np.isfinite($scale)",
        "tests/checkpoints/test_published.py -k belong_together",
    ),
    Fault(  # all arrays of an orbax folder are in memory before the first is quantised
        "math.inf if $keep is unchanged else BATCH",
        "math.inf",
        "tests/loading/test_convert_eight_bits.py -k while_they_are_loaded",
    ),
    Fault(  # a split counts as much as its own largest score says
        "factors = [jnp.exp2(x - $highest) for x in $tops]",
        "factors = [jnp.exp2(x - x) for x in $tops]",
        "tests/pallas_kernels/test_combine_splits.py",
    ),
    Fault(  # one row's product in 8 bits lacks the scales of its outputs
        "return jnp.sum(added($products), axis=1) * $scale",
        "return jnp.sum(added($products), axis=1)",
        "tests/pallas_kernels/test_feed_forward.py -k 'one_row_of_matrices_in_8_bits and gpu'",
    ),
    Fault(  # the head of a checkpoint in 8 bits keeps its dtype
        "return $quantise_head($where, $parameter, x) if $parameter.head else x",
        "return x",
        "tests/api/llm/test_quantization.py -k checkpoint",
    ),
    Fault(  # layers do not get the mailboxes, and the compiler sums
        "setattr($layer, $name, params[$name])",
        "pass",
        "tests/parallel/test_mailbox.py -k reach_the_layers",
    ),
    Fault(  # one GPU of two may write to the other's memory
        "for i in range(2))\n    finally",
        "for i in range(1))\n    finally",
        "tests/parallel/test_mailbox.py -k both_directions",
    ),
    Fault(  # each GPU has its own address
        "[$address[$device] for $device in reversed($devices)]",
        "[$address[$device] for $device in $devices]",
        "tests/parallel/test_mailbox.py -k where_there_are",
    ),
    Fault(  # mailboxes go on where a program failed
        "self.params[$name] = {**$others, **self.mailboxes($name, $others)}",
        "pass",
        "tests/parallel/test_mailbox.py -k reach_the_layers",
    ),
    Fault(  # lost sums end requests as damaged weights do
        "bool($damaged) and self.runner.out_of_step()",
        "False",
        "tests/parallel/test_mailbox.py -k computed_again",
    ),
    Fault(  # ... or the first time that they are lost
        "with self.blame($damaged if $again else ()):",
        "with self.blame($damaged):",
        "tests/parallel/test_mailbox.py -k computed_again",
    ),
    Fault(  # copies of a quantised output head count as other heads
        "$form and same(forms.rounded(x.astype($values.dtype), $form), $values)",
        "False",
        "tests/drafters/test_copies.py -k 'quantised_head and medusa'",
    ),
    Fault(  # what rounding takes from sums of x over the groups of Q4_K is lost, as XLA does with conversions
        "jnp.concatenate([$high, $sums - $high], axis=-1)",
        "jnp.concatenate([$high, 0 * $sums], axis=-1)",
        "tests/pallas_kernels/test_few_rows.py -k leave_sums",
    ),
    Fault(  # integers of a chunk's first four groups are taken for those of the last four, too
        "$places < 1 << 16",
        "$places < 0",
        "tests/pallas_kernels/test_few_rows.py -k of_gguf",
    ),
    Fault(  # pieces of a row leave sums of squares, not parts of their mean
        "jnp.sum($y * $y) / $width + $eps / $pieces",
        "jnp.sum($y * $y)",
        "tests/pallas_kernels/test_feed_forward.py -k a_few_rows",
    ),
    Fault(  # two steps keep their reads one after the other
        "min($stages, 1 + max(1, $ahead))",
        "min($stages, max(1, $ahead))",
        "tests/pallas_kernels/test_tiling.py -k 4_bits_with_few_rows",
    ),
)

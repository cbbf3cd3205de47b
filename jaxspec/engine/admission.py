"""Admission: a prompt and its sampling parameters are checked, and become one engine `Request` for each sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxspec.common.errors import CONTEXT_LENGTH_EXCEEDED, UserError
from jaxspec.common.values import ids as checked_ids
from jaxspec.engine.adaptive import Acceptance
from jaxspec.engine.grammar_pool import end_ids
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.engine.request import Request
from jaxspec.grammars.automaton import Automaton
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.verify import rules

MAX_STOP_IDS = 1024  # maximum number of token ids that end a request, the model's own end ids included
MAX_BAD_WORDS = 256, 32  # maximum number of forbidden words of a request, and of token ids of each word


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits that an engine sets to requests.

    max_model_len: maximum number of tokens of prompt and output together.
    num_drafts: K, the maximum number of draft tokens of a round.
    rule: name of the acceptance rule in the engine's options; None if the options name none.
    """

    max_model_len: int
    vocab_size: int
    num_drafts: int
    rule: str | None = None

    def no_counts(self) -> SpecDecodeMetrics:
        """Return metrics that are all zero."""
        return SpecDecodeMetrics(num_accepted_tokens_per_pos=[0] * self.num_drafts)

    def max_len(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Return the maximum number of tokens of prompt and output together."""
        return min(len(prompt) + params.max_tokens, self.max_model_len)


def check(
    limits: Limits,
    prompt: Sequence[int],
    params: SamplingParams,
    bad_words: Sequence[Sequence[int]] = (),
    stop_ids: Sequence[int] = (),
) -> tuple[list[int], SamplingParams]:
    """Check a request, and return copies of its prompt and its parameters. The caller may then change its own objects.

    bad_words: token ids of each of params.bad_words. stop_ids: the model's own end ids.

    Raises UserError for a request that cannot be served.
    """
    prompt = list(checked_ids("token id", prompt))
    params = dataclasses.replace(params)  # runs the checks of SamplingParams again
    checked_ids("the model's own stop id", stop_ids)
    if not prompt:
        raise UserError("the prompt is empty: give at least one token")
    if len(prompt) + min(params.max_tokens, 1) > limits.max_model_len:
        raise UserError(
            f"the prompt has {len(prompt)} tokens, and this model's maximum context length is {limits.max_model_len} "
            "tokens, output included: shorten it or raise max_model_len",
            param="prompt",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    kinds: dict[str, Sequence[int]] = {
        "token id": prompt,
        "stop token id": params.stop_token_ids,
        "allowed token id": params.allowed_token_ids or (),
        "logit_bias id": [i for i, _ in params.logit_bias],
        "bad word's token id": [i for word in bad_words for i in checked_ids("bad word's token id", word)],
    }
    for kind, ids in kinds.items():
        bad = next((i for i in ids if not 0 <= i < limits.vocab_size), None)
        if bad is not None:
            raise UserError(f"{kind} {bad} is outside the vocabulary 0..{limits.vocab_size - 1}")
    count = len({*params.stop_token_ids, *stop_ids})
    if count > MAX_STOP_IDS:
        raise UserError(f"stop_token_ids: {count} ids end the text, at most {MAX_STOP_IDS} may: list fewer")
    count = len(bad_words)
    longest = max(map(len, bad_words), default=0)
    if count > MAX_BAD_WORDS[0] or longest > MAX_BAD_WORDS[1]:
        raise UserError(
            f"bad_words: {count} words of up to {longest} tokens, at most {MAX_BAD_WORDS[0]} of {MAX_BAD_WORDS[1]} may "
            "be listed: list fewer, or shorter ones"
        )
    wanted = params.num_speculative_tokens
    most = limits.num_drafts
    if wanted is not None and wanted > most and most:
        raise UserError(f"num_speculative_tokens={wanted} of a request exceeds the engine's {most}: lower it")
    return prompt, params


def samples(
    limits: Limits,
    ids: Iterator[int],
    prompt: list[int],
    params: SamplingParams,
    bad_words: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    automaton: Automaton | None = None,
) -> list[Request]:
    """Return n = params.n requests, one for each sample of a checked prompt. Each lists all n as its `samples`.

    ids: iterator of unused request ids. bad_words, stop_ids: as in `check`. automaton: as in `Request`.

    Raises: UserError for structured outputs without their automaton.
    """
    if params.structured_outputs is not None and automaton is None:
        raise UserError("structured_outputs need an automaton: LLM and AsyncLLM build it, the engine takes it")
    num_drafts = limits.num_drafts
    if params.num_speculative_tokens is not None:
        num_drafts = min(num_drafts, params.num_speculative_tokens)
    seed = params.seed
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
    own_stop_ids = () if params.ignore_eos else stop_ids
    # A grammar has nothing to say after its end, so its end tokens end the text even with ignore_eos.
    ends = end_ids(automaton) if automaton else ()
    found = [
        Request(
            id=next(ids),
            prompt=prompt,
            params=params,
            seed=sample_seed(seed, index),
            rule=rules.of_request(limits.rule, greedy=params.greedy, seeded=params.seed is not None),
            stop_ids=tuple(dict.fromkeys([*params.stop_token_ids, *own_stop_ids, *ends])),
            max_len=limits.max_len(prompt, params),
            num_speculative_tokens=num_drafts,
            bad_words=tuple(tuple(word) for word in bad_words),
            automaton=automaton,
            index=index,
            metrics=limits.no_counts(),
            acceptance=Acceptance(limits.num_drafts),
        )
        for index in range(params.n)
    ]
    for sample in found:
        sample.samples = found
    return found


def sample_seed(seed: int, index: int) -> int:
    """Return the random seed of the index-th sample of a request. The sample at index 0 has the request's own seed."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence([seed % (1 << 64), index]).generate_state(1, np.uint64)[0])

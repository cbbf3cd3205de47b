"""Options of speculation. Their names follow vLLM's where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.common.errors import UserError, quoted
from jaxspec.common.values import LARGEST, check_counts, flag, number, one_of, options, refuse_unsupported, whole
from jaxspec.drafters import methods
from jaxspec.options import trees
from jaxspec.options.engine import DTYPES
from jaxspec.verify import rules

# The (shortest, longest) n-gram that is looked up: alone, and before another method. A short match is a better guess
# than none, but not than a draft model's: on the held-out prompts SmolLM2's draft alone has an acceptance length of
# 2.65, after a look for 2 to 4 tokens 2.57, for 4 to 6 tokens 2.65.
LOOKUP_ALONE, LOOKUP_FIRST = (2, 4), (4, 6)
MAX_LOOKUP = 64  # tokens of an n-gram that is looked up: each is a comparison with all of the row
MAX_DRAFTS = 256  # of a round; the best is below 20, and a program for 1,000 is not compiled in minutes


@options
class SpeculativeConfig:
    """How tokens are proposed and accepted.

    Args:
      method: "ngram" (prompt lookup; where no `model` is given), "suffix" (what most often followed the last tokens),
        or what `model` is a checkpoint for (docs/drafters.md), which is found out where it is not said; with "ngram+"
        before it prompt lookup where that finds something, and it elsewhere.
      drafter: a `Drafter` of your own instead (docs/extending.md), whose num_speculative_tokens is K.
      model, revision: the draft: a hub id, a local folder or a .gguf file.
      num_speculative_tokens: Drafts a round. K, at least 1.
      draft_tensor_parallel_size: into how many parts the draft is cut, a divisor of tensor_parallel_size; 1: each
        device has all of it. Default: the one that is expected to be fastest.
      max_model_len: longest context of the draft; rows beyond it decode plainly. Default: the draft's own.
      dtype: the draft's; default the target's.
      parallel_drafting: the draft fills all K places in one pass (PARD, P-EAGLE). None: where it was trained to.
      tree_width, tree_depth, tree_nodes: verify a tree of drafts: after each node the tree_width likeliest, tree_depth
        levels, and of all these candidates the likeliest, so that with the pending token there are tree_nodes (then
        num_speculative_tokens is tree_nodes - 1). Any of them given, the others default to 4, 4 and
        tree_width * tree_depth + 1. Sampling requests follow the coupled rule.
      tree_choices: a fixed tree instead, of a drafter that says all places at once (Medusa, DFlash, P-EAGLE, PARD): for
        each draft the ranks that lead to it, as [[0], [0, 0], [1]].
      draft_sample_method: "probabilistic" (q takes part in acceptance) or "greedy" (propose the draft's argmax).
      rejection_sample_method: "standard", "block", "coupled" or "typical" for every sampling request. None: coupled for
        requests with an explicit seed (their tokens then equal plain decoding's), block for the others. Typical
        acceptance is lossy: what comes out no longer has the target's law. "synthetic", for benchmarks: drafts are
        accepted at given rates whatever they are, and the text means nothing. Requests of temperature 0 are greedy, and
        exact, under all of them but "synthetic".
      posterior_threshold, posterior_alpha: under "typical" a draft is accepted where its probability is more than
        min(posterior_threshold, posterior_alpha * exp(-entropy of the target)); both in (0, 1]. Default: 0.09, 0.3.
      synthetic_acceptance_length: mean tokens a round under "synthetic", 1 to K + 1; or synthetic_acceptance_rates: for
        each of the K positions the probability that it and all before it are accepted.
      adaptive: choose the drafts of each launch among 0, K/2 and K by what they cost and how many of them are accepted,
        so that speculation is not slower than plain decoding. False: always K.
      disable_by_batch_size: no speculation while at least this many requests are running.
      prompt_lookup_min, prompt_lookup_max: lengths of the n-gram that is looked up. Default: 2 and 4, beside a
        draft model 4 and 6.
      suffix_decoding_max_tree_depth: under "suffix", most tokens of a match and of the drafts after it together, 2 to
        64; suffix_decoding_max_spec_factor: most drafts for each token of the match; suffix_decoding_min_token_prob:
        drafts end where they are estimated to be less likely than this. vLLM's suffix_decoding_max_cached_requests is
        0: what other requests said is not kept.

    Raises: UserError for a value out of its range, UnsupportedError for what is not supported yet.
    """

    method: str | None = None
    drafter: Any = None
    model: str | None = None
    revision: str | None = None
    num_speculative_tokens: int = 4
    draft_tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    parallel_drafting: bool | None = None
    tree_width: int | None = None
    tree_depth: int | None = None
    tree_nodes: int | None = None
    tree_choices: tuple[tuple[int, ...], ...] | None = None
    draft_sample_method: str = "probabilistic"
    rejection_sample_method: str | None = None
    posterior_threshold: float | None = None
    posterior_alpha: float | None = None
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    adaptive: bool = True
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_cached_requests: int = 0
    disable_by_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.drafter is not None:
            self.check_drafter()
        elif self.method is None and not self.model:
            object.__setattr__(self, "method", "ngram")
        if self.method is not None:
            one_of("method", self.method, methods.NAMES)
            parameters = methods.METHODS[methods.split(self.method)[1]].parameters
            if parameters in ("model", "head") and not self.model:
                raise UserError(f"method={self.method!r} needs model=: the draft's hub id, folder or .gguf file")
            if not parameters and self.model:
                raise UserError(
                    f"method={self.method!r} uses no draft model, but model={self.model!r} is given: drop one of them"
                )
        if self.tree:
            for name, value in trees.checked(self).items():
                object.__setattr__(self, name, value)
        counts = {"num_speculative_tokens": MAX_DRAFTS, "prompt_lookup_min": LARGEST, "prompt_lookup_max": MAX_LOOKUP}
        check_counts(self, counts | dict.fromkeys(("max_model_len", "disable_by_batch_size"), LARGEST))
        flag("adaptive", self.adaptive)
        if self.parallel_drafting is not None:
            flag("parallel_drafting", self.parallel_drafting)
        shortest, longest = self.lookup
        if longest < shortest:
            raise UserError(f"prompt_lookup_max={longest} is below prompt_lookup_min={shortest}: give both")
        object.__setattr__(
            self,
            "suffix_decoding_max_tree_depth",
            whole("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 2, MAX_LOOKUP),
        )
        for name, most in (("suffix_decoding_max_spec_factor", MAX_LOOKUP), ("suffix_decoding_min_token_prob", 1)):
            if not 0.0 <= number(name, getattr(self, name)) <= most:
                raise UserError(f"{name}={getattr(self, name)} must lie in [0, {most}]")
        one_of("draft_sample_method", self.draft_sample_method, ("probabilistic", "greedy"))
        if self.rejection_sample_method is not None:
            one_of("rejection_sample_method", self.rejection_sample_method, rules.NAMES)
        if self.dtype is not None:
            one_of("dtype", self.dtype, DTYPES)
        if self.draft_tensor_parallel_size is not None:
            whole("draft_tensor_parallel_size", self.draft_tensor_parallel_size, 1)
            if not self.has_parameters:
                raise UserError(f"draft_tensor_parallel_size: method={self.method!r} has no draft that could be cut")
        for name, value in rules.checked(self).items():
            object.__setattr__(self, name, value)
        refuse_unsupported(
            self,
            {
                "quantization": "leave it out",
                "suffix_decoding_max_cached_requests": "what other requests said is not kept",
            },
        )

    def check_drafter(self) -> None:
        """Take K from the drafter given as an object. Raise UserError for what has no place beside it."""
        count = whole("num_speculative_tokens of the drafter", getattr(self.drafter, "num_speculative_tokens", None), 1)
        beside = ("method", "model", "tree_width", "tree_depth", "tree_nodes", "tree_choices", "parallel_drafting")
        for name in beside:
            if (value := getattr(self, name)) is not None:
                raise UserError(f"drafter is given, and {name}={quoted(value)}: drop one of them")
        if self.num_speculative_tokens not in (type(self).num_speculative_tokens, count):
            raise UserError(
                f"num_speculative_tokens={self.num_speculative_tokens}, but the drafter has {count}: leave "
                "num_speculative_tokens out"
            )
        object.__setattr__(self, "num_speculative_tokens", count)

    @property
    def tree(self) -> bool:
        """Whether drafts are a tree."""
        return any(x is not None for x in (self.tree_width, self.tree_depth, self.tree_nodes, self.tree_choices))

    @property
    def has_parameters(self) -> bool:
        """Whether the drafter has any, be they within the target's checkpoint."""
        if self.drafter is not None:
            return False
        return self.method is None or methods.METHODS[methods.split(self.method)[1]].parameters is not None

    @property
    def lookup(self) -> tuple[int, int]:
        """(shortest, longest) n-gram that is looked up."""
        shortest, longest = LOOKUP_FIRST if methods.split(str(self.method))[0] else LOOKUP_ALONE
        given = lambda value, default: default if value is None else value
        return given(self.prompt_lookup_min, shortest), given(self.prompt_lookup_max, longest)

    @property
    def rule_options(self) -> tuple[float, ...]:
        """The numbers of the options that belong to the rule asked for."""
        names = rules.RULES[self.rejection_sample_method].options if self.rejection_sample_method else ()
        values = [getattr(self, name) for name in names]
        return tuple(number for value in values for number in (value if isinstance(value, tuple) else (value,)))

    @classmethod
    def of(cls, value: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """Accepts a dict in its place."""
        if isinstance(value, Mapping):
            return cls(**value)
        if value is not None and not isinstance(value, cls):
            raise UserError(f"speculative_config={quoted(value)}: give a SpeculativeConfig or a dict of its options")
        return value

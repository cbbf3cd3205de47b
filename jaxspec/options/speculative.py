"""SpeculativeConfig: the options of speculation. They have the names of vLLM's options where vLLM has such options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.common.errors import UserError, quoted
from jaxspec.common.values import (
    LARGEST,
    check_counts,
    flag,
    number,
    one_of,
    option,
    options,
    refuse_unsupported,
    whole,
)
from jaxspec.drafters import methods
from jaxspec.options import trees
from jaxspec.options.engine import DTYPES
from jaxspec.options.kv_cache import check_kv_cache_dtype
from jaxspec.options.quantization import check_quantization
from jaxspec.verify import rules

# Lengths in tokens (shortest, longest) of n-grams that prompt lookup compares: as the only method, and before another
# method. A proposal from a short match is better than none, but worse than a draft model's. On the held-out prompts
# SmolLM2's draft has an acceptance length of 2.65 tokens a round alone, 2.57 after lookup of 2 to 4 tokens, and 2.65
# after lookup of 4 to 6.
LOOKUP_ALONE = (2, 4)
LOOKUP_FIRST = (4, 6)
MAX_LOOKUP = 64  # maximum number of tokens of an n-gram; each token costs a comparison with the whole row
MAX_DRAFTS = 256  # maximum draft tokens a round; the best number is below 20; a program for 1,000 compiles for minutes


@options
class SpeculativeConfig:
    """Options of speculation: how tokens are proposed and accepted.

    Raises: UserError for a value out of its range, UnsupportedError for an option that is not supported yet.
    """

    method: str | None = option(
        "Drafting method: ngram (prompt lookup, the default where no model is given), suffix (continuations of "
        "the longest earlier match), or the method that the checkpoint of model is for (docs/drafters.md), which "
        "is detected where none is named. With ngram+ before it, prompt lookup proposes where it finds a match, "
        "and the other method elsewhere.",
        default=None,
    )
    drafter: Any = option(
        "Drafter object to use instead of a method (docs/extending.md). Its num_speculative_tokens is K.",
        default=None,
    )
    model: str | None = option("Draft model or head: a hub id, a local folder or a .gguf file.", default=None)
    revision: str | None = option("Revision of the draft at the hub.", default=None)
    num_speculative_tokens: int = option("Drafts a round. K, at least 1.", default=4)
    draft_tensor_parallel_size: int | None = option(
        "Devices that the draft is sharded over, a divisor of tensor_parallel_size. 1 replicates it on each. "
        "Default: the size that is expected to be fastest.",
        default=None,
    )
    max_model_len: int | None = option(
        "Longest context of the draft, in tokens; rows beyond it decode without drafts. Default: the draft's own.",
        default=None,
    )
    dtype: str | None = option("Compute dtype of the draft. Default: the target's.", default=None)
    quantization: str | None = option(
        "Form of the draft's weights in memory, as the engine's option of this name. Default: in the compute dtype.",
        default=None,
    )
    kv_cache_dtype: str = option(
        "Form of the draft's keys and values in its pages, as the engine's option of this name.",
        default="auto",
    )
    parallel_drafting: bool | None = option(
        "Fill all K places in one pass of the draft (PARD, P-EAGLE). None: if the draft was trained to.",
        default=None,
    )
    tree_width: int | None = option(
        "Candidates after each node of a tree of drafts: the most probable tokens. Any of the first three tree "
        "options turns trees on; the others default to a width of 4, a depth of 4, and tree_width * tree_depth + "
        "1 nodes. Requests that sample follow the coupled rule.",
        default=None,
    )
    tree_depth: int | None = option("Levels of a tree of drafts.", default=None)
    tree_nodes: int | None = option(
        "Nodes of a tree of drafts, the pending token included: the most probable candidates. "
        "num_speculative_tokens is then tree_nodes - 1.",
        default=None,
    )
    tree_choices: tuple[tuple[int, ...], ...] | None = option(
        "Fixed tree, for a drafter that proposes all places at once (Medusa, DFlash, P-EAGLE, PARD): for each "
        "draft the ranks on the path to it, as [[0], [0, 0], [1]].",
        default=None,
    )
    draft_sample_method: str = option(
        "probabilistic samples drafts from q, which takes part in acceptance; greedy proposes the argmax token of"
        " the draft.",
        default="probabilistic",
    )
    rejection_sample_method: str | None = option(
        "Acceptance rule of all sampling requests: standard, block, coupled or typical. None takes coupled for "
        "requests with a seed, whose tokens then equal plain decoding's, and block for the others. typical is "
        "lossy: the output no longer has the target's distribution. synthetic, for benchmarks, accepts drafts at "
        "given rates whatever they are, and the text means nothing. Requests of temperature 0 are greedy, and "
        "exact, under every rule but synthetic.",
        default=None,
    )
    posterior_threshold: float | None = option(
        "Under typical, a draft is accepted if its probability exceeds min(posterior_threshold, posterior_alpha *"
        " exp(-entropy of the target)). In (0, 1]; default 0.09.",
        default=None,
    )
    posterior_alpha: float | None = option(
        "Factor of the entropy's term in that minimum. In (0, 1]; default 0.3.",
        default=None,
    )
    synthetic_acceptance_length: float | None = option(
        "Mean number of tokens a round under synthetic, from 1 to K + 1.",
        default=None,
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = option(
        "Under synthetic, for each of the K positions the probability that its draft and all before it are accepted.",
        default=None,
    )
    adaptive: bool = option(
        "Choose the number of drafts of each launch among 0, K/2 and K by their cost and by how many are "
        "accepted, so that speculation is not slower than plain decoding. False: always K.",
        default=True,
    )
    prompt_lookup_min: int | None = option(
        "Shortest n-gram that is looked up. Default: 2, beside a draft model 4.",
        default=None,
    )
    prompt_lookup_max: int | None = option(
        "Longest n-gram that is looked up. Default: 4, beside a draft model 6.",
        default=None,
    )
    suffix_decoding_max_tree_depth: int = option(
        "Under suffix, the most tokens of a match and its drafts together, 2 to 64.",
        default=24,
    )
    suffix_decoding_max_spec_factor: float = option(
        "Under suffix, the most drafts for each token of the match.",
        default=1.0,
    )
    suffix_decoding_min_token_prob: float = option(
        "Under suffix, the estimated probability below which drafts end.",
        default=0.1,
    )
    suffix_decoding_max_cached_requests: int = option("Only 0: the texts of other requests are not kept.", default=0)
    disable_by_batch_size: int | None = option(
        "Number of running requests from which on nothing is drafted.",
        default=None,
    )

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
        check_quantization("quantization", self.quantization)
        check_kv_cache_dtype("kv_cache_dtype", self.kv_cache_dtype)
        if self.draft_tensor_parallel_size is not None:
            whole("draft_tensor_parallel_size", self.draft_tensor_parallel_size, 1)
            if not self.has_parameters:
                raise UserError(
                    f"draft_tensor_parallel_size: method={self.method!r} has no draft to shard: leave it out"
                )
        for name, value in rules.checked(self).items():
            object.__setattr__(self, name, value)
        refuse_unsupported(
            self,
            {
                "suffix_decoding_max_cached_requests": "texts of other requests are not kept",
            },
        )

    def check_drafter(self) -> None:
        """Take num_speculative_tokens from the option `drafter`, an object.

        Raise UserError for options that a drafter given as an object excludes.
        """
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
        """Return whether the draft tokens of a round form a tree, not a chain."""
        return any(x is not None for x in (self.tree_width, self.tree_depth, self.tree_nodes, self.tree_choices))

    @property
    def has_parameters(self) -> bool:
        """Return whether the drafting method has parameters, in a checkpoint of its own or in the target's."""
        if self.drafter is not None:
            return False
        return self.method is None or methods.METHODS[methods.split(self.method)[1]].parameters is not None

    @property
    def lookup(self) -> tuple[int, int]:
        """The lengths (shortest, longest) of n-grams that prompt lookup compares, in tokens."""
        shortest, longest = LOOKUP_FIRST if methods.split(str(self.method))[0] else LOOKUP_ALONE
        if self.prompt_lookup_min is not None:
            shortest = self.prompt_lookup_min
        if self.prompt_lookup_max is not None:
            longest = self.prompt_lookup_max
        return shortest, longest

    @property
    def rule_options(self) -> tuple[float, ...]:
        """The values of the options that the acceptance rule in `rejection_sample_method` reads, in one tuple."""
        names = rules.RULES[self.rejection_sample_method].options if self.rejection_sample_method else ()
        values = [getattr(self, name) for name in names]
        return tuple(number for value in values for number in (value if isinstance(value, tuple) else (value,)))

    @classmethod
    def of(cls, value: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """Return the value as a SpeculativeConfig. A dict gives the options by name; None stays None.

        Raises: UserError for any other value.
        """
        if isinstance(value, Mapping):
            return cls(**value)
        if value is not None and not isinstance(value, cls):
            raise UserError(f"speculative_config={quoted(value)}: give a SpeculativeConfig or a dict of its options")
        return value

"""Options of `jaxspec bench`, checked before anything is loaded or measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxspec.bench.load_options import Load
from jaxspec.common.errors import UserError
from jaxspec.common.values import documented, flag_of, one_of, option
from jaxspec.options.engine import DTYPES, KERNELS, MAX_ROUNDS, EngineConfig
from jaxspec.options.kv_cache import check_kv_cache_dtype
from jaxspec.options.quantization import check_quantization
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig

if TYPE_CHECKING:
    from jaxspec.models.config import ModelConfig

MODEL_STAGES = ("target", "draft", "round", "propose", "score", "verify", "prefill", "attention")
ENGINE_STAGES = ("plain", "speculative", "adaptive", "load")
STAGES = (*MODEL_STAGES, *ENGINE_STAGES)
ACCEPTING = ("round", "speculative", "adaptive", "load")
DRAFTING = ("propose", "score", "verify", *ACCEPTING)
# For each of these options, the stages (kinds of measurement) that use it. It is refused if none of them is measured.
USED = {
    "contexts": tuple(stage for stage in STAGES if stage != "load"),
    "launches": tuple(stage for stage in STAGES if stage != "load"),
    "draft": ("draft", *DRAFTING),
    "draft_tensor_parallel_size": ("draft", *DRAFTING),
    "ks": ("attention", *DRAFTING),
    "tree": DRAFTING,
    "lengths": ACCEPTING,
    "rates": ACCEPTING,
    "temperature": ("target", "draft", "propose", "verify", "plain", *ACCEPTING),
}
# Flags of the options whose flag is not made from the option's name.
FLAGS = {
    "contexts": "--context",
    "ks": "-k",
    "lengths": "--synthetic-acceptance-length",
    "rates": "--synthetic-acceptance-rates",
    "texts": "--prompts",
}
ADAPTIVE_LENGTHS = (1.2, 2.0, 3.0, 4.0)
ROUNDS = MAX_ROUNDS  # number of rounds of a launch (one run of the device program), the same as in `LLM.generate`
FIRST_ROUNDS = 4  # number of rounds in the untimed engine step before each timed one


def launch_tokens(k: int) -> int:
    """Return the most positions after the context that a launch (one run of a program, ROUNDS rounds) may write.

    k: number of draft tokens per round.
    """
    return ROUNDS * (k + 1) + k + 1


def engine_tokens(k: int) -> int:
    """Return one more than the most tokens that a timed engine step and the untimed one before it may emit for a row.

    Each request allows that many tokens, so that no row ends while it is timed.

    k: number of draft tokens per round.
    """
    return (FIRST_ROUNDS + ROUNDS) * (k + 1) + 1


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of `jaxspec bench`. The first sentence of each entry is its --help text."""

    preset: str | None = option(
        "Random weights in the shapes of public models, such as qwen3-8b+qwen3-0.6b or qwen3-8b+eagle3.",
        default=None,
    )
    model: str | None = option("Model with real weights.", default=None)
    draft: str | None = option("Draft of --model; without it n-gram drafting.", default=None)
    batch_sizes: tuple[int, ...] = option("Batch sizes, one or several: 1,16.", default=(1,))
    contexts: tuple[int, ...] = option("Tokens in the caches, one or several.", default=(512,))
    ks: tuple[int, ...] = option("Draft tokens a round (K), one or several: 2,4,6.", default=(4,))
    tree: tuple[int, ...] = option("Width, depth and nodes of a draft tree, in place of K: 4,4,17.", default=())
    lengths: tuple[float, ...] = option(
        "Synthetic tokens a round, one or several; without it real acceptance. See `whole_rates`, and for the "
        "stages adaptive and load `fading_rates`.",
        default=(),
    )
    rates: tuple[float, ...] = option(
        "Synthetic acceptance rate of each draft token, in place of a length: 0.74,0.55.", default=()
    )
    dtype: str = option("Compute dtype: auto, float32, bfloat16 or float16.", default=EngineConfig.dtype)
    quantization: str | None = option("Form of the target's weights, such as int8 or fp8; default: none.", default=None)
    draft_quantization: str | None = option("Form of the draft's weights; default: none.", default=None)
    kv_cache_dtype: str = option("Form of the target's keys and values: auto, int8 or fp8.", default="auto")
    stages: tuple[str, ...] = option(
        "Stages to measure, such as target,draft,round; default: all but adaptive and load.",
    )
    temperature: float = option("Sampling temperature; 0 is greedy.", default=0.0)
    kernels: str | None = option("Kernels, reference or pallas; default: the platform's best.", default=None)
    launches: int = option("Timed launches per figure.", default=12)
    tensor_parallel_size: int = option("Devices that the target is sharded over.", default=1)
    draft_tensor_parallel_size: int | None = option(
        "Shards of the draft; default: the fastest number by estimate.",
        default=None,
    )
    load: Load = dataclasses.field(default_factory=Load)

    def __post_init__(self) -> None:
        self.check_models()
        for stage in self.stages:
            one_of("--stages", stage, STAGES)
        self.check_used()
        if self.tree:
            self.check_tree()
            object.__setattr__(self, "ks", (self.tree[2] - 1,))
        one_of("--dtype", self.dtype, DTYPES)
        check_quantization("--quantization", self.quantization)
        check_quantization("--draft-quantization", self.draft_quantization)
        check_kv_cache_dtype("--kv-cache-dtype", self.kv_cache_dtype)
        if self.kernels is not None:
            one_of("--kernels", self.kernels, KERNELS)
        SamplingParams(temperature=self.temperature)  # raises UserError for an invalid value
        if self.launches < 1:
            raise UserError(f"--launches {self.launches} is below 1")
        if "draft" in self.stages and self.draft_name is None:
            raise UserError("--stages draft needs a draft model: give --preset target+draft, or --model and --draft")
        if "draft" in self.stages and self.head:
            raise UserError(f"--stages draft: {self.head} is not a model that decodes by itself: use the stage propose")
        self.check_acceptance()

    def check_models(self) -> None:
        """Raise UserError unless a model is given, or a preset with sufficient context length and without --draft."""
        if (self.preset is None) == (self.model is None):
            raise UserError("give one of --preset (random weights) and --model (a real model)")
        if self.preset is None:
            return
        from jaxspec.bench import presets

        if self.draft is not None:
            raise UserError(f"--draft {self.draft} needs --model: give a preset's draft as target+draft")
        target, draft = presets.split(self.preset)
        self.check_context(target, presets.preset(target))
        if draft and draft not in presets.HEADS:
            self.check_context(draft, presets.preset(draft))

    def check_tree(self) -> None:
        """Raise UserError for a tree beside another K, without a draft, or not given as width, depth and nodes."""
        if self.ks not in (BenchOptions.ks, (self.tree[-1] - 1,)):
            raise UserError(f"--tree replaces -k {','.join(map(str, self.ks))}: leave -k out")
        if len(self.tree) != 3 or self.draft_name is None:
            tree = ",".join(map(str, self.tree))
            raise UserError(f"--tree {tree}: give width,depth,nodes, and a draft that grows it")

    def check_acceptance(self) -> None:
        """Raise UserError for a synthetic acceptance (one simulated at given rates) that some K cannot have."""
        for k in self.ks:
            for length in self.lengths:
                if length > k + 1:
                    raise UserError(
                        f"--synthetic-acceptance-length {length:g} is out of reach with K = {k}, a round yields at "
                        f"most {k + 1} tokens: lower it or leave that K out"
                    )
            if self.rates and len(self.rates) != k:
                raise UserError(
                    f"--synthetic-acceptance-rates gives {len(self.rates)} rates, K = {k} needs {k}: give as many, or "
                    "leave that K out"
                )
            for acceptance in self.acceptances("speculative", k):
                self.speculation(k, *acceptance, adaptive=False)  # raises UserError for invalid rates

    def check_used(self) -> None:
        """Raise UserError for options that exclude each other or lack another, or that no chosen stage would use."""
        if self.rates and self.lengths:
            raise UserError("--synthetic-acceptance-rates and --synthetic-acceptance-length are both given: drop one")
        if self.draft_tensor_parallel_size is not None and self.draft_name is None:
            raise UserError("--draft-tensor-parallel-size needs a draft: give --preset target+draft, or --draft")
        if self.load.texts and self.preset is not None:
            raise UserError("--prompts needs a real model: give --model in place of --preset")

        def changed(options: Any, name: str) -> bool:
            return bool(getattr(options, name) != getattr(type(options), name))

        given = {name: stages for name, stages in USED.items() if changed(self, name)}
        given |= {name: ("load",) for name in vars(self.load) if changed(self.load, name)}
        for name, stages in given.items():
            if name in USED and name != "temperature" and self.draft_name is None:
                stages = tuple(stage for stage in stages if stage != "load")  # without a draft, `load` decodes plainly
            if not set(stages) & set(self.stages):
                flag = FLAGS.get(name, flag_of(name))
                if len(stages) == 1:
                    raise UserError(
                        f"{flag} belongs to the stage {stages[0]}, which is not asked for: add --stages {stages[0]}"
                    )
                raise UserError(
                    f"{flag} belongs to the stages {', '.join(stages)}, none of which is asked for: add one to "
                    "--stages, or leave it out"
                )

    @property
    def draft_name(self) -> str | None:
        """Name of the draft, None for n-gram drafting."""
        return self.draft if self.preset is None else self.pair[1]

    @property
    def head(self) -> str | None:
        """Method of the preset's draft if that is a head, which reads the target's hidden states; else None."""
        from jaxspec.bench import presets

        return self.draft_name if self.preset and self.draft_name in presets.HEADS else None

    @property
    def name(self) -> str:
        """Names of target and draft, joined by "+"."""
        return "+".join(part for part in (self.model or self.pair[0], self.draft_name) if part)

    @property
    def pair(self) -> tuple[str, str | None]:
        """Names of the preset's target and draft."""
        from jaxspec.bench import presets  # imported here because it imports jax, which is too slow for --help

        return presets.split(self.preset or "")

    def check_context(self, name: str, config: ModelConfig) -> None:
        """Raise UserError if the model's maximum length is too short for context and output. name: the model's name."""
        context = max(self.contexts)
        k = max(self.ks)
        need = context + max(launch_tokens(k), engine_tokens(k))
        if need > config.max_model_len:
            raise UserError(
                f"--context {context} is too long for {name}: with the output that is timed {need} positions are "
                f"needed, it has {config.max_model_len}: lower --context or -k"
            )

    def acceptances(self, stage: str, k: int) -> tuple[tuple[float | None, tuple[float, ...]], ...]:
        """Return the acceptances at which a stage is measured, each as (tokens per round, rate of each draft token).

        (None, ()) is real acceptance, by the target's verification. All others are simulated.
        """
        if self.rates:
            return ((1 + sum(self.rates), self.rates),)
        lengths = self.lengths
        if stage == "adaptive":
            lengths = lengths or tuple(a for a in ADAPTIVE_LENGTHS if a <= k + 1)
        rates = fading_rates if stage in ("adaptive", "load") else whole_rates
        return tuple((length, rates(k, length)) for length in lengths) or ((None, ()),)

    def speculation(
        self, k: int, length: float | None = None, rates: tuple[float, ...] = (), *, adaptive: bool
    ) -> SpeculativeConfig:
        """Return the speculative config with k draft tokens per round.

        length, rates: an entry of `acceptances`. adaptive: whether the engine may draft fewer tokens if that is faster.
        """
        synthetic: dict[str, Any] = {}
        if length is not None:
            synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        draft = {"model": self.draft_name} if self.head is None else {"method": self.head, "model": self.head}
        tree: dict[str, Any] = dict(zip(("tree_width", "tree_depth", "tree_nodes"), self.tree, strict=False))
        return SpeculativeConfig(**draft, **tree, num_speculative_tokens=k, adaptive=adaptive, **synthetic)


def whole_rates(k: int, length: float) -> tuple[float, ...]:
    """Return acceptance rates of k draft tokens for a round of `length` tokens: first 1, then a fraction, then 0."""
    return tuple(min(max(length - 1 - i, 0.0), 1.0) for i in range(k))


def fading_rates(k: int, length: float) -> tuple[float, ...]:
    """Return acceptance rates of k draft tokens that fall geometrically, for a round of `length` tokens on average.

    If all draft tokens before it are accepted, each one is accepted with the same probability, much as in real
    decoding. The rates of `whole_rates` would suit adaptive K too well: it would soon propose just the tokens that are
    always accepted.
    """
    low = 0.0
    high = 1.0
    for _ in range(60):  # bisection to find the first rate
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, k + 1)) < length - 1:
            low = middle
        else:
            high = middle
    return tuple(high**i for i in range(1, k + 1))


def listed(
    option: str, text: str, kind: Callable[[str], Any] = int, least: float = 1, *, repeats: bool = False
) -> tuple[Any, ...]:
    """Parse the text of an option, numbers separated by commas.

    option: name of the option, for the error message. kind, least: type and smallest value of a number. repeats:
    whether to keep a number that comes twice.

    Raises: UserError if the text is not such a list.
    """
    try:
        values = tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = ()
    if not values or not all(least <= v < float("inf") for v in values):
        what = "whole numbers" if kind is int else "numbers"
        raise UserError(f"{option} {text!r}: give {what} of at least {least}, with commas between them")
    return values if repeats else tuple(dict.fromkeys(values))


def stages(text: str | None, *, never_slower: bool, draft: bool) -> tuple[str, ...]:
    """Return the names of the stages to measure, in the order of the results.

    Unknown names come last, for `BenchOptions` to refuse. Raise UserError if `text` has no name.

    text: value of the option --stages, None for the default.
    never_slower: whether to add the stage `adaptive`.
    draft: whether a draft model is given.
    """
    default = [s for s in STAGES if s not in ("adaptive", "load") and (draft or s != "draft")]
    asked = default if text is None else [s.strip() for s in text.split(",") if s.strip()]
    if not asked:
        raise UserError(f"--stages {text!r} names no stage: use some of {', '.join(STAGES)}")
    wanted = dict.fromkeys([*asked, *(["adaptive"] if never_slower else [])])
    return tuple(s for s in STAGES if s in wanted) + tuple(s for s in wanted if s not in STAGES)

"""EngineConfig: the options of an engine. They have the names of vLLM's options where vLLM has such options."""

from __future__ import annotations

from jaxspec.common.errors import UserError
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
from jaxspec.options.kv_cache import check_kv_cache_dtype
from jaxspec.options.quantization import check_quantization

DTYPES = ("auto", "float32", "bfloat16", "float16")
KERNELS = ("reference", "pallas")  # repeated from pallas_kernels.forms, whose import imports jax
MAX_ROUNDS = 64  # maximum rounds of one launch (run of the device program); static, because it sizes result arrays

MAX_GRAMMAR_MIB = 2048  # tables of grammars are indexed by int32


@options
class EngineConfig:
    """Options of an engine.

    Raises: UserError for a value out of its range, UnsupportedError for an option that is not supported yet.
    """

    tokenizer: str | None = option("Model or folder that holds the tokenizer. Default: the model's own.", default=None)
    revision: str | None = option("Revision of the model at the hub.", default=None)
    tensor_parallel_size: int = option("Devices that the model is sharded over.", default=1)
    dtype: str = option(
        "float32 or bfloat16; auto is what the device does best. That is float32 on CPU and bfloat16 elsewhere; "
        "GPUs below compute capability 8.0, which have no bfloat16, get float32, because float16 overflows in "
        "some models. float32 also means full-precision products everywhere.",
        default="auto",
    )
    quantization: str | None = option(
        "Form of the weights in memory: int8 or fp8 with a scale for each output, int8_block with one for each 128 "
        "inputs of an output, fp8_block with one for each block of 128 x 128, fp8_tensor with one for each matrix; "
        "int4 in groups of 128 inputs (int4_64, int4_32; int4_asym with zero points); int8_dynamic and fp8_dynamic "
        "round activations, too; with +head (int8+head, fp8_dynamic+head) the output head is in int8; gguf keeps the "
        "blocks of a GGUF file. Default: in the compute dtype.",
        default=None,
    )
    kv_cache_dtype: str = option(
        "Form of the target's keys and values in its pages: int8 or fp8 (fp8_e4m3, fp8_e5m2) with a scale for each "
        "head of each token, which doubles the tokens of a pool in bfloat16; auto is the compute dtype.",
        default="auto",
    )
    max_model_len: int | None = option(
        "Longest prompt and output together, in tokens. Default: the model's own.",
        default=None,
    )
    max_num_seqs: int = option("Requests that are decoded together.", default=16)
    page_size: int | None = option("Tokens that a cache page holds. Default 16, on TPU 32.", default=None)
    num_pages: int | None = option(
        "Pages in the pool. Default: as many as memory_utilization of the device's memory holds beside weights "
        "and temporary memory; on a CPU as many as 1 GiB holds.",
        default=None,
    )
    memory_utilization: float = option(
        "Share of the device's memory that weights, pages and temporary memory may take.",
        default=0.9,
    )
    enable_prefix_caching: bool = option(
        "Keep the pages of finished requests and share them with requests that begin alike.",
        default=True,
    )
    rounds_per_launch: int | None = option(
        "Rounds that one launch of the device program runs, 1 to 64. Default: 64, and 16 where the host may have "
        "to act in between, for a stop string or, in AsyncLLM, for another request.",
        default=None,
    )
    prefill_chunk: int | None = option(
        "Tokens of prompts in one pass, counted over all requests in it. Default: 2048, on CPU 256.",
        default=None,
    )
    max_gap_ms: float | None = option(
        "Milliseconds that a client who streams should wait at most for further tokens while other prompts are read. "
        "A pass over prompts is made so small that it and a launch fit, by the measured cost of earlier passes. "
        "inf: no limit. Default: 60; inf on CPU.",
        default=None,
    )
    grammar_pool_mib: int = option(
        "MiB of device memory for the tables of grammars (structured outputs), allocated when the first request has "
        "one. 0 turns grammars off.",
        default=64,
    )
    kernels: str | None = option(
        "None takes the fastest forms; reference takes plain jnp and no kernel, pallas a kernel wherever device "
        "and arrays have one. GPUs below compute capability 8.0 have no kernels, and pallas is refused.",
        default=None,
    )
    compilation_cache: bool = option(
        "Keep compiled programs on disk, so that a second start takes seconds.",
        default=True,
    )
    warm_up: bool = option(
        "Compile in advance all programs that a request may need, so that none waits for the compiler. The "
        "programs are then few, and of few sizes.",
        default=False,
    )
    wait_for_warm_up: bool = option(
        "Take no request before all programs are compiled. Otherwise they are compiled beside requests, and what "
        "a request needs comes first. Several processes always wait.",
        default=True,
    )
    enable_lora: bool = option("Not supported yet.", default=False)
    pipeline_parallel_size: int = option("Not supported yet: only 1.", default=1)

    @property
    def most_rounds(self) -> int:
        """The largest number of rounds of a launch."""
        return self.rounds_per_launch or MAX_ROUNDS

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        check_quantization("quantization", self.quantization)
        check_kv_cache_dtype("kv_cache_dtype", self.kv_cache_dtype)
        counts = ("tensor_parallel_size", "max_num_seqs", "max_model_len", "page_size", "num_pages", "prefill_chunk")
        check_counts(self, dict.fromkeys(counts, LARGEST) | {"rounds_per_launch": MAX_ROUNDS})
        for name in ("enable_prefix_caching", "compilation_cache", "warm_up", "wait_for_warm_up"):
            flag(name, getattr(self, name))
        object.__setattr__(
            self, "grammar_pool_mib", whole("grammar_pool_mib", self.grammar_pool_mib, 0, MAX_GRAMMAR_MIB)
        )
        if not 0.0 < number("memory_utilization", self.memory_utilization) <= 1.0:
            raise UserError(f"memory_utilization={self.memory_utilization} must lie in (0, 1]")
        if self.max_gap_ms is not None and not number("max_gap_ms", self.max_gap_ms) > 0.0:
            raise UserError(f"max_gap_ms={self.max_gap_ms} must be more than 0, or inf for no limit")
        if (self.page_size or 1) * (self.num_pages or 1) > LARGEST:
            raise UserError(
                f"num_pages={self.num_pages} of page_size={self.page_size} are more than {LARGEST} tokens: lower one"
            )
        chunk = self.prefill_chunk
        if chunk is not None and (chunk < 16 or chunk & (chunk - 1)):
            raise UserError(f"prefill_chunk={self.prefill_chunk} must be a power of two, at least 16")
        if self.kernels is not None:
            one_of("kernels", self.kernels, KERNELS)
        refuse_unsupported(
            self,
            {
                "enable_lora": "merge the adapter into the weights and load the result",
                "pipeline_parallel_size": "shard the model with tensor_parallel_size",
            },
        )

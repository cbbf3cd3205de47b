"""Options of an engine. Their names follow vLLM's where it has them."""

from __future__ import annotations

from jaxspec.common.errors import UserError
from jaxspec.common.values import LARGEST, check_counts, flag, number, one_of, options, refuse_unsupported

DTYPES = ("auto", "float32", "bfloat16", "float16")
KERNELS = ("reference", "pallas")  # what pallas_kernels.forms calls them, which needs jax
MAX_ROUNDS = 64  # of a launch; static: sizes its result, while the number of rounds itself is dynamic


@options
class EngineConfig:
    """How the engine is set up.

    Args:
      tensor_parallel_size: Devices the model is sharded over.
      dtype: float32 or bfloat16; auto is what the device does best. That is float32 on CPU, else bfloat16; float32 too
        on GPUs below compute capability 8.0, which have no bfloat16, and whose float16 overflows in some models.
        "float32" also means full-precision products everywhere.
      max_model_len: Longest prompt + output, in tokens. Default: the model's own.
      max_num_seqs: Requests decoded together.
      page_size: Tokens a cache page holds. Default 16, on TPU 32.
      num_pages: Pages in the pool. Default: what memory_utilization of the device's memory holds beside weights and
        temporary memory; on a CPU what 1 GiB holds.
      enable_prefix_caching: Keep the pages of ended requests and share them with requests that begin alike.
      rounds_per_launch: Rounds that one launch of the device program runs, 1 to 64. Default: 64, and 16 where something
        may happen on the host in the meantime: a stop string found, or, in AsyncLLM, another request.
      prefill_chunk: Tokens of prompts in one pass, those of several requests together. Default: 2048, on CPU 256.
      kernels: None (the fastest that is known), "reference" (plain jnp, no kernel in any program) or "pallas" (a kernel
        wherever device and arrays have one). GPUs below compute capability 8.0 have none, and "pallas" is refused.
      compilation_cache: Keep compiled programs on disk, so that a second start takes seconds.
      warm_up: Compile at the start all programs that any request may need, so that none waits for the compiler later;
        few and so of few sizes.
      wait_for_warm_up: Take no request before all of these are compiled. False: they are compiled beside requests, and
        what a request needs comes first. Several processes always wait.
    """

    tokenizer: str | None = None
    revision: str | None = None
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    page_size: int | None = None
    num_pages: int | None = None
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    rounds_per_launch: int | None = None
    prefill_chunk: int | None = None
    kernels: str | None = None
    compilation_cache: bool = True
    warm_up: bool = False
    wait_for_warm_up: bool = True
    enable_lora: bool = False
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        counts = ("tensor_parallel_size", "max_num_seqs", "max_model_len", "page_size", "num_pages", "prefill_chunk")
        check_counts(self, dict.fromkeys(counts, LARGEST) | {"rounds_per_launch": MAX_ROUNDS})
        for name in ("enable_prefix_caching", "compilation_cache", "warm_up", "wait_for_warm_up"):
            flag(name, getattr(self, name))
        if not 0.0 < number("memory_utilization", self.memory_utilization) <= 1.0:
            raise UserError(f"memory_utilization={self.memory_utilization} must lie in (0, 1]")
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

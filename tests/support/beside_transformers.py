"""Plain decoding and n-gram speculation beside transformers' plain decoding, in one run on this machine.

    python -m tests.support.beside_transformers            # needs the oracle extra (torch)

SmolLM2-135M-Instruct from its GGUF, float32, greedy, one prompt at a time. Prints milliseconds a token (the median
over the prompts), the ratio, and whether the token ids are the same.
"""

from __future__ import annotations

import statistics
import time

import checkpoints
from jaxspec import LLM, SamplingParams

TOKENS = 64
PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a fox and a river.",
    "Repeat this list five times: red, green, blue, yellow, purple, orange.",
    "Copy this code, then add a docstring:\ndef add(first, second):\n    return first + second",
)


def main() -> None:
    import torch

    from tests.golden import make

    source = checkpoints.resolve("smollm2-135m-instruct")
    llm = LLM(source.name, speculative_config={"method": "ngram"}, enable_prefix_caching=False)
    prompts = [llm.render_chat([{"role": "user", "content": p}])["prompt_token_ids"] for p in PROMPTS]
    torch_model = make.smollm2(source.path)
    torch_model.generation_config.eos_token_id = None  # both go on to the last token

    def ours(drafts: int | None):
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, num_speculative_tokens=drafts)

        def one(prompt: list[int]) -> list[int]:
            return llm.generate(prompt, params, progress=False)[0].outputs[0].token_ids

        return one

    def theirs(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = torch_model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS)
        return out[0, len(prompt) :].tolist()

    ways = {"transformers float32": theirs, "jaxspec plain": ours(0), "jaxspec n-gram": ours(None)}
    expected: list[list[int]] = []
    baseline = 0.0
    for name, generate in ways.items():
        generate(prompts[0])  # compiles
        spent, found = [], []
        for prompt in prompts:
            started = time.perf_counter()
            found.append(generate(prompt))
            spent.append((time.perf_counter() - started) / TOKENS * 1e3)
        expected, middle = expected or found, statistics.median(spent)
        baseline = baseline or middle
        same = sum(a == b for a, b in zip(found, expected, strict=True))
        each = " ".join(f"{s:.1f}" for s in spent)
        print(
            f"{name:22} {middle:6.1f} ms/token ({each}), {1e3 / middle:5.1f} tokens/s, "
            f"{baseline / middle:4.2f}x, same ids {same}/{len(prompts)}"
        )


if __name__ == "__main__":
    main()

"""The model class `jaxspec` of lm-eval, the evaluation harness, in this process.

`python -m jaxspec.bench.harness` is lm-eval's own command line with this class. lm-eval finds no classes of other
packages by itself, so a program of your own imports this module first.

Source: https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError("the model class of lm-eval needs lm-eval: pip install 'lm-eval>=0.4.9'") from error

from jaxspec.api.llm import LLM
from jaxspec.common.errors import UserError, quoted
from jaxspec.options.sampling_params import SamplingParams

# Keywords of generate_until besides until, do_sample and LENGTHS, which are sampling parameters of the same name.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # lm-eval's names, first one first
Request = tuple[Any, list[int], list[int]]  # (texts, token ids of the context, token ids of the continuation)


@register_model("jaxspec")
class HarnessLM(TemplateLM):  # type: ignore[misc]
    """A model that lm-eval scores. Generation speculates; its greedy outputs are those of plain decoding.

    pretrained: model, as LLM takes it.
    max_gen_toks: number of new tokens where a task gives none.
    add_bos_token: whether prompts begin with the tokenizer's BOS; None leaves it to the tokenizer.
    batch_size, max_batch_size, device: lm-eval's own options, which change nothing: the engine batches by itself.
    options: options of LLM, such as speculative_config.
    """

    def __init__(
        self,
        pretrained: str,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.llm = LLM(pretrained, **options)
        self.tokenizer = self.llm.tokenizer
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = add_bos_token
        engine = self.llm.engine
        self.max_length = min(engine.limits.max_model_len, engine.scheduler.longest_request)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text, which gets no second BOS."""
        added = self.add_bos_token if add_special_tokens is None else add_special_tokens
        bos = self.tokenizer.bos_token
        if add_special_tokens is None and bos and string.startswith(bos):
            added = False
        options = {} if added is None else {"add_special_tokens": added}
        return [*self.tokenizer.encode(string, **options)]

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-probability, whether it is greedy) of each continuation. Long contexts lose their beginning."""
        prompts: list[Any] = [(context + continuation)[-self.max_length :] for _, context, continuation in requests]
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        outputs = self.llm.generate(prompts, params, progress=not disable_tqdm) if prompts else []
        found = []
        for (_, _, continuation), output in zip(requests, outputs, strict=True):
            completion = output.outputs[0]
            if completion.finish_reason == "error":
                raise RuntimeError(f"a continuation could not be scored: {completion.error}")
            scored = list(zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True))[-len(continuation) :]
            entries = [row[i] for i, row in scored if row is not None]
            found.append((sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, whose windows are scored one by one if it is long."""
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length - 1,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scores = iter(self._loglikelihood_tokens([*itertools.chain(*windows)], disable_tqdm=disable_tqdm))
        return [sum(score for score, _ in itertools.islice(scores, len(own))) for own in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the output of each prompt up to the first of its stop strings."""
        prompts: list[Any] = []
        params: list[SamplingParams] = []
        for request in requests:
            context, given = request.args
            asked = sampling_params(given, self.max_gen_toks)
            room = self.max_length - asked.max_tokens
            if room < 1:
                message = f"max_gen_toks={asked.max_tokens} leaves no room for a prompt in {self.max_length} tokens"
                raise UserError(f"{message}: give a smaller one, or raise max_model_len")
            prompts.append(self.tok_encode(context)[-room:])
            params.append(asked)
        outputs = self.llm.generate(prompts, params, progress=not disable_tqdm) if prompts else []
        found = []
        for output in outputs:
            completion = output.outputs[0]
            if completion.finish_reason == "error":
                raise RuntimeError(f"an output failed: {completion.error}")
            found.append(completion.text)
        return found


def sampling_params(given: Mapping[str, Any], max_gen_toks: int) -> SamplingParams:
    """Return the sampling parameters of generate_until's keywords. Raise UserError for an unknown one.

    max_gen_toks: number of new tokens if the keywords have none.
    """
    left = dict(given)
    lengths = [left.pop(name) for name in LENGTHS if name in left]
    until = left.pop("until", None) or ()
    sampled = left.pop("do_sample", bool(left.get("temperature")))
    unknown = left.keys() - {*SAMPLING}
    if unknown:
        known = ", ".join(["until", "do_sample", *LENGTHS, *SAMPLING])
        raise UserError(f"generation keyword {quoted(min(unknown))} is not supported: use {known}")
    asked = {name: value for name, value in left.items() if value is not None}
    if not sampled:
        asked["temperature"] = 0.0
    return SamplingParams(max_tokens=lengths[0] if lengths else max_gen_toks, stop=until, **asked)


if __name__ == "__main__":
    cli_evaluate()

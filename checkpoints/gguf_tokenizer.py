"""The tokenizer that a GGUF file describes, built without torch.

The supported architectures use three kinds of tokenizer (key `tokenizer.ggml.model`). "gpt2" is a byte-level BPE: its
merges are in the file, and the key `tokenizer.ggml.pre` names its pre-tokenizer. "llama" is a SentencePiece BPE: its
merges follow from the vocabulary. "gemma4" is one whose merges are in the file. Each is rebuilt to equal the
tokenizer.json that the model's makers distribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from checkpoints.library import transformers
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.families import ARCHITECTURES, GGUF
from jaxspec.models.limits import short

KINDS = ("gpt2", "llama", "gemma4")  # values of tokenizer.ggml.model that are read
CONTROL, USER_DEFINED = 3, 4  # token types, as in the metadata's list tokenizer.ggml.token_type
ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding")
LONGEST_PIECE = 1024  # largest number of characters of a SentencePiece token, as all ways to split it in two are tried
SPACE = "▁"  # the character that represents a space in SentencePiece tokens

# Regular expressions of pre-tokenizers, put together from expressions for words, numbers and the rest of a text.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = r"|\p{N}{1,3}"
_LLAMA3 = _WORDS + _THREE_DIGITS + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST_WITH_SLASHES = _REST.replace(r"[\r\n]*|", r"[\r\n/]*|", 1)


def _cased(ending: str) -> str:
    """Return the expression for words whose upper-case letters stand first. ending: expression for their endings."""
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"


_TEKKEN = _cased("") + r"|\p{N}" + _REST_WITH_SLASHES
_GPT_4O = _cased(_ENDINGS) + _THREE_DIGITS + _REST_WITH_SLASHES
# For each value of tokenizer.ggml.pre, how a text is split before tokens are merged: by a regular expression, or by a
# list of pre-tokenizers that run before GPT-2's.
PRE_TOKENIZERS: dict[str, Any] = {
    "default": [],
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "refact": [pre_tokenizers.Digits(individual_digits=True)],
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT_4O,
    "llama4": _GPT_4O,
}
# Those that do not split a word that is itself a token. By default llama.cpp adds a BOS for them.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
# For each metadata key (after "tokenizer."), the types that its value may have. A list holds the types of list entries.
TYPES: dict[str, Any] = {
    "ggml.model": (str,),
    "ggml.pre": (str,),
    "ggml.tokens": [(str,)],
    "ggml.merges": [(str,)],
    "ggml.scores": [(float, int)],
    "ggml.token_type": [(int,)],
    "ggml.add_space_prefix": (bool,),
    "ggml.add_bos_token": (bool,),
    "ggml.add_eos_token": (bool,),
    "chat_template": (str,),
}


def build_tokenizer(meta: Mapping[str, Any]) -> Any:
    """Build a transformers.PreTrainedTokenizerFast from GGUF metadata.

    The tokenizer adds BOS and EOS tokens as the metadata say, and has the file's chat template.
    Raises: UnsupportedError for a kind of tokenizer or pre-tokenizer that is not supported; UserError where the
      metadata describe no tokenizer, or contradict themselves.
    """
    check(meta)
    kind = meta.get("tokenizer.ggml.model")
    pre = meta.get("tokenizer.ggml.pre", "default")
    if kind is None or "tokenizer.ggml.tokens" not in meta:
        raise UserError("the GGUF file holds no tokenizer")
    if kind not in KINDS:
        raise UnsupportedError(f"GGUF tokenizer {kind!r}: {', '.join(KINDS)} are supported")
    tokens = list(meta["tokenizer.ggml.tokens"])
    family = ARCHITECTURES.get(str(meta["general.architecture"]))
    gemma = family is not None and GGUF[family].gemma_tokens
    # Gemma's files write tokens of spaces with plain spaces. They get SPACE, which the normalizer also writes in texts.
    if gemma and kind != "gpt2":
        tokens = [t.replace(" ", SPACE) if not t.strip(" ") else t for t in tokens]
    vocab = vocabulary(tokens, meta)
    unknown = token_of(tokens, meta, "unknown")
    if kind != "llama" and "tokenizer.ggml.merges" not in meta:
        raise UserError(f"the GGUF file holds no tokenizer.ggml.merges, which a tokenizer of kind {kind!r} needs")
    if kind == "gpt2":
        tokenizer = byte_level(vocab, pairs(meta["tokenizer.ggml.merges"]), pre)
    elif kind == "gemma4":
        tokenizer = sentence_piece(vocab, pairs(meta["tokenizer.ggml.merges"]), unknown, prefix=False)
    else:
        scores = range(0, -len(tokens), -1) if gemma else meta["tokenizer.ggml.scores"]
        if len(scores) != len(tokens):
            raise UserError(f"{len(scores)} scores for {len(tokens)} tokens: one for each token is needed")
        prefix = not gemma and meta.get("tokenizer.ggml.add_space_prefix", True)
        tokenizer = sentence_piece(vocab, implied_merges(vocab, scores), unknown, prefix)
    add_special_tokens(tokenizer, vocab, meta.get("tokenizer.ggml.token_type", ()))
    bos = token_of(tokens, meta, "bos")
    eos = token_of(tokens, meta, "eos")
    adds_bos = kind != "gpt2" or pre in WHOLE_WORDS
    add_bos = meta.get("tokenizer.ggml.add_bos_token", adds_bos)
    add_eos = meta.get("tokenizer.ggml.add_eos_token", False)
    around = [(bos, bool(add_bos)), ("$A", True), (eos, bool(add_eos))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(piece for piece, wanted in around if wanted and piece is not None),
        special_tokens=[(t, tokens.index(t)) for t in {bos, eos} if t is not None],
    )
    return transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        pad_token=token_of(tokens, meta, "padding"),
        chat_template=meta.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def check(meta: Mapping[str, Any]) -> None:
    """Check the type of each value in the metadata (TYPES). Raises: UserError for a value of a wrong type."""
    for key, kind in TYPES.items():
        value = meta.get(f"tokenizer.{key}")
        if value is None:
            continue
        if isinstance(kind, list):
            wanted, of = kind[0], "a list, each "
            right = isinstance(value, list) and all(type(v) in wanted for v in value)
        else:
            wanted, of = kind, ""
            right = type(value) in wanted
        if not right:
            raise UserError(f"tokenizer.{key}={short(value)} must be {of}{' or '.join(t.__name__ for t in wanted)}")


def token_of(tokens: list[str], meta: Mapping[str, Any], role: str) -> str | None:
    """Return the special token of a role such as "bos", None if the metadata name none.

    Raises: UserError for an id outside the vocabulary.
    """
    index = meta.get(f"tokenizer.ggml.{role}_token_id")
    if index is not None and (type(index) is not int or not 0 <= index < len(tokens)):
        raise UserError(f"tokenizer.ggml.{role}_token_id={short(index)} must be an id in 0..{len(tokens) - 1}")
    return None if index is None else tokens[index]


def vocabulary(tokens: list[str], meta: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of each token, without the tokens that only pad the embedding table.

    Converters name a padding token after its id, for example [PAD7], and no role of ROLES refers to it. The number of
    padding tokens depends on the size of the model, so they would make the tokenizers of target and draft differ.
    """
    wanted = [meta.get(f"tokenizer.ggml.{role}_token_id") for role in ROLES]
    return {token: i for i, token in enumerate(tokens) if token != f"[PAD{i}]" or i in wanted}


def pairs(merges: list[str]) -> list[tuple[str, str]]:
    """Return the pairs of tokens to merge, which the metadata write as "first second"."""
    return [(a, b) for a, _, b in (merge.partition(" ") for merge in merges)]


def byte_level(vocab: Mapping[str, int], merges: list[tuple[str, str]], pre: str) -> Tokenizer:
    """Build GPT-2's BPE over bytes, in which printable characters represent the bytes.

    merges: pairs of tokens to merge, best first.
    pre: name of the pre-tokenizer, a key of PRE_TOKENIZERS.
    Raises: UnsupportedError for another name.
    """
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedError(f"GGUF pre-tokenizer {pre!r}: {', '.join(PRE_TOKENIZERS)} are supported")
    cut = PRE_TOKENIZERS[pre]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=dict(vocab),
            merges=merges,
            ignore_merges=pre in WHOLE_WORDS,
        )
    )
    if cut is _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    if isinstance(cut, str):
        first, use_regex = [pre_tokenizers.Split(Regex(cut), behavior="isolated")], False
    else:
        first, use_regex = cut, True
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(
    vocab: Mapping[str, int], merges: list[tuple[str, str]], unknown: str | None, prefix: bool
) -> Tokenizer:
    """Build a SentencePiece BPE, in which ▁ represents a space and unknown characters become tokens of their bytes.

    merges: pairs of tokens to merge, best first.
    unknown: the token for unknown text; None if there is none.
    prefix: whether a space is put before each text.
    """
    tokenizer = Tokenizer(
        models.BPE(
            vocab=dict(vocab),
            merges=merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spell = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spell]) if prefix else spell
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def implied_merges(vocab: Mapping[str, int], scores: Any) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece BPE: all pairs of tokens that join into a third token.

    The merge whose third token has the highest score is first.
    Raises: UserError for a token of more than LONGEST_PIECE characters.
    """
    ranked = []
    for token, index in vocab.items():
        if len(token) > LONGEST_PIECE:
            raise UserError(
                f"the token {short(token)} has {len(token)} characters: at most {LONGEST_PIECE} are supported"
            )
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        ranked += [(-scores[index], vocab[a], vocab[b], a, b) for a, b in pairs if a in vocab and b in vocab]
    return [(a, b) for *_, a, b in sorted(ranked)]


def add_special_tokens(tokenizer: Tokenizer, vocab: Mapping[str, int], types: Any) -> None:
    """Make the tokenizer match control and user-defined tokens as a whole, never in pieces.

    types: type number of each token, by id, from the GGUF file.
    """
    marked = [
        AddedToken(token, normalized=False, special=types[i] == CONTROL)
        for token, i in vocab.items()
        if i < len(types) and types[i] in (CONTROL, USER_DEFINED)
    ]
    if marked:
        tokenizer.add_tokens(marked)

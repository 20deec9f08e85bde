"""Tiny models with tokenizers of their own, made on the spot: for tests and the demo.

`python -m rlrun.testing.tiny OUT --task spell_backward` writes a model folder for a reasoning-gym task.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A small chat template, for tests of chat models."""

_PIECE = re.compile(r" ?[A-Za-z]+| ?[^A-Za-z\s]+")


def build_tokenizer(words: Sequence[str] = (), chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer with `words` (with their leading space, if any) as single tokens and everything else byte by byte.

    Every text survives encoding and decoding. Special tokens: <pad> (0) and <eos> (1); none is added by encoding.
    """
    from transformers import PreTrainedTokenizerFast

    def in_bytes(word: str) -> str:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)[0][0]

    longest_first = sorted(dict.fromkeys(words), key=lambda w: (-len(w), w))
    tokens = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map(in_bytes, longest_first)]
    model = models.BPE({token: i for i, token in enumerate(dict.fromkeys(tokens))}, [], ignore_merges=True)
    tokenizer = Tokenizer(model)
    pattern = "|".join([*map(_whole, longest_first), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def _whole(word: str) -> str:
    """A pattern for `word` that does not match inside a longer word."""
    before = "(?<![A-Za-z])" if word[0].isalpha() else ""
    return before + re.escape(word) + ("(?![A-Za-z])" if word[-1].isalpha() else "")


def common_words(texts: Sequence[str], share: float = 0.9) -> list[str]:
    """Words and signs (with their leading space) that stand in this share of the texts or more: those of a template."""
    counts = Counter(piece for text in texts for piece in dict.fromkeys(_PIECE.findall(text)))
    return [piece for piece, count in counts.items() if count >= share * len(texts) and len(piece) > 1]


def tiny_config(kind: str = "llama", vocab_size: int = 258, **sizes: Any) -> PretrainedConfig:
    """A config of architecture `kind` as transformers names it (llama, qwen2, qwen3, gpt2, ...): the demo's sizes, no
    dropout. `sizes` are further or other keys of that config."""
    from transformers import AutoConfig

    keys: dict[str, Any] = {
        "vocab_size": vocab_size, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False,
    } | sizes
    if kind == "gpt2":
        keys |= {"n_inner": keys.pop("intermediate_size"), "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        keys.pop("num_key_value_heads")
    else:
        keys.setdefault("head_dim", keys["hidden_size"] // keys["num_attention_heads"])
    return AutoConfig.for_model(kind, **keys)


def save_tiny(
    directory: str | Path,
    kind: str = "llama",
    seed: int = 0,
    words: Sequence[str] = (),
    chat_template: str | None = None,
    **sizes: Any,
) -> PreTrainedModel:
    """Write a tiny random causal model (config, safetensors, tokenizer) to `directory`; returns the float32 model."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = build_tokenizer(words, chat_template)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            tiny_config(kind, len(tokenizer), **sizes), dtype=torch.float32, attn_implementation="sdpa"
        )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a tiny model whose tokenizer knows the words of a reasoning-gym task's question template."""
    parser = argparse.ArgumentParser(prog="python -m rlrun.testing.tiny", description=main.__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--task", default="spell_backward", help="reasoning-gym dataset whose questions give the words")
    parser.add_argument("--kind", default="llama", help="architecture, as transformers names it")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    for name, default in (("hidden", 96), ("mlp", 288), ("layers", 3), ("heads", 4), ("kv-heads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(arguments)

    import reasoning_gym

    questions = [entry["question"] for entry in reasoning_gym.create_dataset(args.task, size=200, seed=0)]
    # What every question begins with becomes one token: no time goes into reading it again and again.
    template = os.path.commonprefix(questions).rstrip()  # noqa: RUF071 - letter by letter is what is meant
    words = [template, *common_words(questions)]
    model = save_tiny(
        args.out, args.kind, args.seed, [*words, "<|user|>", "<|assistant|>"], CHATML,
        hidden_size=args.hidden, intermediate_size=args.mlp,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, num_key_value_heads=args.kv_heads,
    )
    print(f"{args.out}: {args.kind}, {model.num_parameters():,} parameters, {model.config.vocab_size} tokens, "
          f"words {' '.join(w.strip() for w in words)}")


if __name__ == "__main__":
    main()

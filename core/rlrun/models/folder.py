"""What a model's folder says besides weights: config, tokenizer, ids that end a sequence. Loads no model's code."""

import logging
import re
from pathlib import Path

import transformers

log = logging.getLogger(__name__)

_NOISE = re.compile(r"drop(out)?(_|$)|pdrop|layerdrop|router_jitter_noise")


def load_config(path: str) -> transformers.PretrainedConfig:
    """A folder's model config, with dropout and router noise set to 0: log-probabilities must not be random in RL."""
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"{path} is not a model folder: it has no config.json")
    config = transformers.AutoConfig.from_pretrained(path)
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        noisy = {k: v for k, v in part.to_dict().items() if _NOISE.search(k) and isinstance(v, float) and v > 0}
        for key in noisy:
            setattr(part, key, 0.0)
        if noisy:
            log.warning("%s: set to 0 for training: %s", path, ", ".join(f"{k}={v}" for k, v in noisy.items()))
    return config


def load_tokenizer(path: str) -> transformers.PreTrainedTokenizerBase:
    """A folder's tokenizer, with its chat template."""
    if not Path(path).is_dir():
        raise ValueError(f"{path} is not a folder with a tokenizer")
    return transformers.AutoTokenizer.from_pretrained(path)


def eos_ids(path: str, tokenizer: transformers.PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All ids that end a sequence: those of generation_config.json, config.json and the tokenizer, each once."""
    sources = [transformers.AutoConfig.from_pretrained(path).get_text_config().eos_token_id, tokenizer.eos_token_id]
    if (Path(path) / "generation_config.json").is_file():
        sources.insert(0, transformers.GenerationConfig.from_pretrained(path).eos_token_id)
    flat = [i for ids in sources if ids is not None for i in (ids if isinstance(ids, list) else [ids])]
    return tuple(dict.fromkeys(flat))

"""Models from folders, and back: the layout of save_pretrained, with a value head beside it."""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from rlrun.models.folder import load_config, load_tokenizer
from rlrun.models.images import reads_images
from rlrun.models.policy import PolicyModel, check_logits

VALUE_HEAD = "value_head.safetensors"
_AUTO: dict[str, Any] = {"lm": transformers.AutoModelForCausalLM, "value": transformers.AutoModel,
                         "score": transformers.AutoModelForSequenceClassification}


def auto_class(head: Literal["lm", "value", "score"], config: transformers.PretrainedConfig) -> Any:
    """transformers' class that makes a model with this head of a config."""
    return transformers.AutoModelForImageTextToText if head == "lm" and reads_images(config) else _AUTO[head]


def empty_policy(path: str, head: Literal["lm", "value", "score"], dtype: torch.dtype) -> PolicyModel:
    """The model of a folder without its weights: on the meta device, tied parameters tied."""
    with torch.device("meta"):
        config = load_config(path)
        model = auto_class(head, config).from_config(config, dtype=dtype)
        model.tie_weights()
        return PolicyModel(model.eval(), head).eval()


def load_policy(path: str, head: Literal["lm", "value", "score"], dtype: torch.dtype, seed: int = 0) -> PolicyModel:
    """The model of a folder on the CPU, its parameters in `dtype`.

    A value model comes from a folder that `export` wrote, or from any causal language model with a fresh head drawn
    from `seed`; "score" is a sequence classifier with one output. Raises ValueError where weights are missing or the
    architecture is not supported."""
    config = load_config(path)
    model, info = auto_class(head, config).from_pretrained(path, config=config, dtype=dtype, output_loading_info=True)
    if info["missing_keys"] or info["mismatched_keys"]:
        raise ValueError(f"{path}: weights missing or of another shape: "
                         f"{sorted([*info['missing_keys'], *map(str, info['mismatched_keys'])])[:5]}")
    policy = PolicyModel(model.eval(), head).eval()
    if head == "score":
        return policy
    if head == "lm":
        check_logits(policy)
    elif (Path(path) / VALUE_HEAD).is_file():
        policy.value_head.load_state_dict(load_file(Path(path) / VALUE_HEAD))
    else:
        policy.init_value_head(seed)
    return policy


def parameter_count(path: str) -> int:
    """Parameters of a folder's causal language model, tied ones once, without loading weights."""
    with torch.device("meta"):
        config = load_config(path)
        model = auto_class("lm", config).from_config(config)
        model.tie_weights()
    return sum(p.numel() for p in model.parameters())


def saved_weights(policy: PolicyModel, whole: Callable[[Sequence[Tensor]], Iterable[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names and shapes that save_pretrained writes, and value_head.*; adapters are left out.

    `whole` makes whole tensors of parameters, in the dtype to write. It is called in the same order on every rank, with all
    of them, or with those of one layer where an architecture's files differ from its modules (fused experts)."""
    model = policy.model
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = [(name.replace(".base_layer.", "."), x) for name, x in model.state_dict(keep_vars=True).items()
             if name not in tied and ".lora_" not in name]
    converted = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    for _, part in groupby(state, key=lambda item: re.split(r"(\.\d+\.)", item[0])[:2] if converted else None):
        names, tensors = zip(*part)
        if converted:
            yield from revert_weight_conversion(model, dict(zip(names, whole(tensors)))).items()
        else:
            yield from zip(names, whole(tensors))
    if policy.head == "value":
        names, tensors = zip(*policy.value_head.named_parameters())
        yield from ((f"value_head.{name}", x) for name, x in zip(names, whole(tensors)))


def export(weights: Iterable[tuple[str, Tensor]], directory: Path, source: str, tokenizer: str) -> None:
    """Write a folder that from_pretrained loads: weights in the dtype they come in, which config.json names, config and
    generation config of folder `source`, the tokenizer of folder `tokenizer` with its chat template.

    Takes all of `weights` into memory first, so that ranks which gather them are not left waiting where writing fails."""
    # each with a storage of its own size: one gathered from uneven shards is a view of a padded buffer
    state = {name: x if x.untyped_storage().nbytes() == x.nbytes else x.clone()
             for name, x in ((name, tensor.cpu()) for name, tensor in weights)}
    head = {name.removeprefix("value_head."): state.pop(name) for name in list(state) if name.startswith("value_head.")}
    directory.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state, directory, filename_pattern="model{suffix}.safetensors")
    if head:
        save_file(head, directory / VALUE_HEAD)
    config = transformers.AutoConfig.from_pretrained(source)
    config.dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    if (Path(source) / "generation_config.json").is_file():
        shutil.copy(Path(source) / "generation_config.json", directory)
    load_tokenizer(tokenizer).save_pretrained(directory)

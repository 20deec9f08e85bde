"""Entry module of the Megatron-core backend: what it offers and its hooks. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from rlrun.config.schema import opt
from rlrun.hookspecs import API_VERSION, PluginInfo, hookimpl
from rlrun.workers.profile import ProfileConfig

if TYPE_CHECKING:
    from rlrun.workers.protocol import Layout, RoleSpec, Worker


@dataclass
class MegatronConfig:
    tensor_model_parallel_size: int = opt(1, "ranks that share each layer's weights; divides the model's key-value heads", gt=0)
    sequence_parallel: bool = opt(False, "these ranks also share the tokens between those layers; needs more than one of them")
    pipeline_model_parallel_size: int = opt(1, "stages that layers are cut into; divides the model's layers", gt=0)
    virtual_pipeline_model_parallel_size: Optional[int] = opt(
        None, "pieces of layers in each stage, which take turns (interleaved schedule); default: one", gt=1)
    context_parallel_size: int = opt(1, "ranks that share each row of tokens, and attention's heads", gt=0)
    expert_model_parallel_size: int = opt(1, "ranks that share the experts of each layer", gt=0)
    expert_tensor_parallel_size: Optional[int] = opt(
        None, "ranks that share each expert's weights; default: tensor_model_parallel_size", gt=0)
    transformer_impl: str = opt("local", "whose linear layers: Megatron's own, or TransformerEngine's", choices=(
        "local", "transformer_engine"))
    use_distributed_optimizer: bool = opt(True, "cut AdamW's state over data-parallel ranks")
    param_offload: bool = opt(False, "move parameters to host memory while another role or the engine works")
    grad_offload: bool = opt(False, "likewise give up the memory of gradients")
    optimizer_offload: bool = opt(False, "likewise move the optimizer's state, and its copy of parameters")
    use_dist_checkpointing: bool = opt(
        False, "take model.path's weights from a checkpoint of Megatron's, and only configuration and tokenizer from that folder")
    dist_checkpointing_path: Optional[str] = opt(None, "folder of that checkpoint, of format torch_dist")
    seed: Optional[int] = opt(None, "of Megatron's own random states; default: run.seed", ge=0)
    override_transformer_config: dict[str, Any] = opt(
        {}, "further fields of Megatron's TransformerConfig, such as recompute_granularity")
    override_ddp_config: dict[str, Any] = opt({}, "further fields of Megatron's DistributedDataParallelConfig")
    profile: ProfileConfig = field(default_factory=ProfileConfig)


@hookimpl
def plugin_info() -> PluginInfo:
    provides = {"backend": {"megatron": "rlrun_megatron.backend:Megatron"}}
    return PluginInfo(name="megatron", api_version=API_VERSION, config=MegatronConfig, provides=provides)


@hookimpl
def make_worker(spec: RoleSpec, layout: Layout) -> Worker:
    import warnings

    # What is not installed and not needed, and what torch will call otherwise one day: said by Megatron on every rank.
    for module in (r"megatron\.", r"torch\.distributed\.c10d_logger", r"rlrun_megatron\.cpu"):
        warnings.filterwarnings("ignore", module=module)
    from rlrun_megatron.worker import MegatronWorker

    return MegatronWorker(spec, layout)


@hookimpl
def save_checkpoint(worker: Worker, directory: Path, contents: Sequence[str]) -> Callable[[], None]:
    from rlrun_megatron import checkpoint
    from rlrun_megatron.worker import MegatronWorker

    assert isinstance(worker, MegatronWorker)
    return checkpoint.save(worker, directory, contents)


@hookimpl
def load_checkpoint(worker: Worker, directory: Path, contents: Sequence[str]) -> None:
    from rlrun_megatron import checkpoint
    from rlrun_megatron.worker import MegatronWorker

    assert isinstance(worker, MegatronWorker)
    checkpoint.load(worker, directory, contents)

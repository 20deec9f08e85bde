"""Models that are none of ours, through a stand-in for Megatron-Bridge that builds and converts as the real one's API says.

The real one needs GPUs and TransformerEngine."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager
from unittest import mock

import pytest
import torch


def auto_bridge():
    """A class with the methods of megatron.bridge.AutoBridge that are used, for llama models."""
    from dataclasses import replace

    import torch.nn.functional as F
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from rlrun.models.attention import Packed, attend
    from rlrun.models.folder import load_config
    from rlrun_megatron import layers, weights
    from rlrun_megatron.families import Family

    class Attention(layers.PackedAttention):
        """Takes a row like TransformerEngine's: [T, H, D], turned already, and boundaries by Megatron's names."""

        def forward(self, query, key, value, attention_mask, *, packed_seq_params, **_):
            row = packed_seq_params
            assert row.qkv_format == "thd"
            assert row.cu_seqlens_q is row.cu_seqlens_kv
            assert row.max_seqlen_q == row.max_seqlen_kv == int(row.cu_seqlens_q.diff().max())
            return attend(query, key, value, Packed.of(row.cu_seqlens_q), self.scale).flatten(1)

    class Provider(TransformerConfig):
        def __init__(self, hf, **fields):
            self.hf = hf
            super().__init__(**fields)

        def finalize(self):
            self.__post_init__()

        def provide(self, pre_process=None, post_process=None, vp_stage=None):
            spec = layers.layer_spec(self)
            inner = spec.submodules.self_attention
            inner.submodules = replace(inner.submodules, core_attention=Attention)
            block = TransformerBlockSubmodules([spec] * get_num_layers_to_build(self, vp_stage), layers.RMSNorm)
            return GPTModel(self, block, self.hf.vocab_size, 64, pre_process, post_process, position_embedding_type="rope",
                            rotary_base=self.hf.rope_parameters["rope_theta"], vp_stage=vp_stage,
                            share_embeddings_and_output_weights=self.hf.tie_word_embeddings)

    class AutoBridge:
        def __init__(self, path):
            self.path, self.hf = path, load_config(path)

        from_hf_pretrained = classmethod(lambda cls, path: cls(path))

        def to_megatron_provider(self, load_weights=True):
            hf = self.hf
            return Provider(
                hf=hf, num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size, ffn_hidden_size=hf.intermediate_size,
                num_attention_heads=hf.num_attention_heads, num_query_groups=hf.num_key_value_heads, normalization="RMSNorm",
                layernorm_epsilon=hf.rms_norm_eps, add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu,
                transformer_impl="local", gradient_accumulation_fusion=False, masked_softmax_fusion=False)

        def load_hf_weights(self, model):
            with mock.patch.dict("rlrun_megatron.families.FAMILIES", {"llama": Family()}):
                weights.load(model, self.hf, "lm", self.path, torch.float32)

        def export_hf_weights(self, model, cpu=False, show_progress=True):
            with mock.patch.dict("rlrun_megatron.families.FAMILIES", {"llama": Family()}):
                stream = weights.Stream(model, self.hf, "lm", torch.float32, torch.device("cpu"))
            yield from stream()

    return AutoBridge


@contextmanager
def bridge_alone(found=True):
    """Without llama among our own families."""
    import importlib.util

    import rlrun_megatron.worker  # noqa: F401 - before sys.modules changes
    from rlrun_megatron.families import FAMILIES, check_folder

    module, find = types.ModuleType("megatron.bridge"), importlib.util.find_spec
    module.AutoBridge = auto_bridge()
    check_folder.cache_clear()
    rest = {name: family for name, family in FAMILIES.items() if name != "llama"}

    def find_spec(name, *args):
        return (module if found else None) if name == "megatron.bridge" else find(name, *args)

    with mock.patch.dict(FAMILIES, rest, clear=True), mock.patch.object(importlib.util, "find_spec", find_spec):
        sys.modules["megatron.bridge"] = module
        try:
            yield
        finally:
            del sys.modules["megatron.bridge"]
            check_folder.cache_clear()


LAYOUTS = [{"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2}]


@pytest.mark.parametrize("layout", [LAYOUTS[0], pytest.param(LAYOUTS[1], marks=pytest.mark.slow)], ids=str)
def test_bridged_models(models, ranks2, tools, layout):
    """Columns, metrics and the weights after an update are those of our own build of the same model, and so is the stream."""
    batch = tools.make_batch(5, 9, 3, 7)

    def run():
        def one():
            worker = tools.make_worker(tools.make_config(models["llama tied"], micro=12, **layout))
            columns = worker.forward(batch, {"log_probs", "entropy"}, 0.7)
            metrics = worker.update(batch, tools.TokenLoss(), batch.denominators(), 0.7)
            return columns, metrics, {name: x.clone() for name, x in worker.weights()}

        own = one()
        with bridge_alone():
            return own, one()

    for (columns, metrics, weights), (got, theirs, streamed) in ranks2.run(run):
        assert streamed.keys() == weights.keys()
        for name, column in columns.items():
            torch.testing.assert_close(got[name], column, rtol=1e-5, atol=1e-5)
        for name, value in metrics.items():
            assert theirs[name].result == pytest.approx(value.result, rel=1e-5, abs=1e-5)
        assert all((streamed[name] - x).norm() <= 1e-5 * x.norm() for name, x in weights.items())


def test_what_is_refused(models, ranks1, tools):
    """Without Megatron-Bridge the model's type and what to install are named; with it, what it cannot be used for."""
    def run(found, head="lm", **changes):
        config = tools.make_config(models["llama"], **changes)
        with bridge_alone(found):
            tools.make_worker(config, True, head)

    with pytest.raises(ValueError, match="no 'llama' models; it has mistral.*or pip install megatron-bridge"):
        ranks1.run(run, False)
    with pytest.raises(ValueError, match="llama models as language models alone"):
        ranks1.run(run, True, "value")
    with pytest.raises(ValueError, match="no_such_field is no field of Provider"):
        ranks1.run(lambda: run(True, override_transformer_config={"no_such_field": 1}))

"""The suites that every plugin and backend passes, in float64, also with each option that must change no number."""

from __future__ import annotations

import pytest

from rlrun.testing.contracts.backend import BackendContract
from rlrun.testing.contracts.base import PluginContract


class TestPlugin(PluginContract):
    plugins = ["fsdp"]


class TestFsdp(BackendContract):
    """Cases 44, 51, 52, 63, 64, 66, 82, 89, 98, 101."""

    plugins = ["fsdp"]
    backend = "fsdp"
    layouts = {
        "sharded": {}, "gathered": {"fsdp": {"reshard_after_forward": False}}, "replicated": {"fsdp": {"shard_size": 1}},
        "one unit": {"fsdp": {"wrap_policy": {"min_num_params": 10**9}}},
        "small units": {"fsdp": {"wrap_policy": {"layer_classes": ["GPT2MLP", "GPT2Attention"]}}},
        "host": {"fsdp": {"cpu_offload": True}}, "recomputed": {"model": {"gradient_checkpointing": True}},
    }


BROKEN = '''
from rlrun.hookspecs import PluginInfo, hookimpl
from rlrun_fsdp import checkpoint
from rlrun_fsdp.backend import Fsdp as Broken


@hookimpl
def plugin_info():
    return PluginInfo(name="broken", api_version=1, provides={"backend": {"broken": "broken:Broken"}})


@hookimpl
def make_worker(spec, layout):
    import time
    import torch
    from rlrun.metrics import Value
    from rlrun_fsdp.worker import FsdpWorker

    defect = spec.config.run.name

    class Worker(FsdpWorker):
        def update(self, batch, loss, denominators, temperature, *args, **kwargs):
            if defect == "counts locally":
                denominators = {name: count / layout.dp for name, count in denominators.items()}
            if defect == "hides NaN":
                batch.tokens["advantages"] = torch.nan_to_num(batch.tokens["advantages"])
            temperature = 1.0 if defect == "too hot" else temperature
            metrics = super().update(batch, loss, denominators, temperature, *args, **kwargs)
            return {**metrics, "broken/clock": Value(time.monotonic())}

        def forward(self, batch, want, temperature):
            columns = super().forward(batch, want, temperature)
            return {name: x + 1e-6 * (defect == "fills masked slots") for name, x in columns.items()}

        def weights(self):
            for name, x in super().weights():
                yield name, x * (1 + 1e-12) if defect == "rounds weights" else x

    return Worker(spec, layout)


@hookimpl
def save_checkpoint(worker, directory, contents):
    forgets = worker.spec.config.run.name == "forgets moments"
    return checkpoint.save(worker, directory, [c for c in contents if not (forgets and c == "optimizer")])


@hookimpl
def load_checkpoint(worker, directory, contents):
    forgets = worker.spec.config.run.name == "forgets moments"
    checkpoint.load(worker, directory, [c for c in contents if not (forgets and c == "optimizer")])
'''


@pytest.mark.slow
@pytest.mark.parametrize("defect, test", [
    ("counts locally", "test_forward_and_update"), ("too hot", "test_forward_and_update"),
    ("fills masked slots", "test_forward_and_update"), ("rounds weights", "test_forward_and_update"),
    ("hides NaN", "test_non_finite_gradient"), ("forgets moments", "test_resume"),
    *(("none", test) for test in ("test_forward_and_update", "test_resume", "test_saving_beside_training", "test_critic")),
])
def test_the_suite_notices(tmp_path, tmp_path_factory, defect, test):
    """Backends with one defect each fail, and the same one without passes, whatever its own metrics are."""
    (tmp_path / "broken.py").write_text(BROKEN)
    given = {"plugins": ["fsdp", str(tmp_path / "broken.py")], "backend": "broken", "sections": {"run": {"name": defect}}}
    suite = type("Suite", (BackendContract,), {"__module__": __name__, **given})()
    model = suite.make_model(tmp_path_factory)
    more = {"test_forward_and_update": {"layout": "two ranks"}, "test_non_finite_gradient": {}}.get(test, {"tmp_path": tmp_path})
    if defect == "none":
        getattr(suite, test)(model, **more)
        return
    with pytest.raises(AssertionError):
        getattr(suite, test)(model, **more)

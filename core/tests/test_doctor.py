"""What `rl-run doctor` finds missing."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rlrun import doctor
from rlrun.cli import app
from rlrun.config.load import load_config
from rlrun.testing.installed import install

CONFIG = """
run: {name: test}
model: {path: MODEL}
data: {train: [{kind: jsonl, path: train.jsonl}]}
reward: {kind: function}
actor: {backend: needy}
stages: [{steps: 10}]
"""
NEEDY = """
from rlrun.hookspecs import PluginInfo, hookimpl
from rlrun.workers.protocol import Layout

@hookimpl
def plugin_info():
    return PluginInfo("needy", 1, None, {"backend": {"needy": "MODULE:Needy"}})

class Needy:
    @staticmethod
    def layout(config, ranks, sp):
        return Layout(ranks, tuple(range(ranks)), tuple(range(ranks)))
"""


@pytest.fixture
def needy(tmp_path, monkeypatch):
    """A configuration whose backend is an installed plugin that needs what there is not."""
    site = tmp_path / "site"
    install(site, "needy", NEEDY)
    [info] = site.glob("*.dist-info")
    with (info / "METADATA").open("a") as file:
        file.write("Requires-Dist: no-such-library>=2\nRequires-Dist: pluggy>=99\nRequires-Dist: packaging\n"
                   "Requires-Dist: also-absent; extra == 'needy'\nRequires-Dist: never-asked-for; extra == 'other'\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG.replace("MODEL", str(tmp_path)))
    return "run.yaml"


def test_requirements(needy):
    """Those of the plugin, and of its extra of a chosen name; versions count."""
    said = dict(doctor.unmet("rlrun-needy", ["needy"]))
    [version] = doctor.installed("pluggy")
    assert said.keys() == {"rlrun-needy needs no-such-library>=2: not installed", f"rlrun-needy needs pluggy>=99: {version}",
                           "rlrun-needy needs also-absent: not installed"}
    assert "pip install 'pluggy>=99'" in said.values()
    assert "rlrun-needy needs also-absent: not installed" not in dict(doctor.unmet("rlrun-needy", []))


@pytest.mark.parametrize("changes, gpus, said", [
    ((), 0, None), (("resources.device=cuda",), 0, "torch sees no GPU"), (("resources.device=cuda",), 1, None),
    (("resources.train_ranks=2",), 1, "2 ranks need as many GPUs, and there are 1"), (("resources.train_ranks=2",), 2, None),
    (("resources.train_ranks=2", "resources.device=cpu"), 1, None), (("resources.train_ranks=2",), 0, None),
    (("ref.path=nowhere",), 0, "ref.path: no folder nowhere"),
])
def test_machine(needy, changes, gpus, said):
    config, _ = load_config(needy, changes, ["needy"])
    missing = [what for what, _ in doctor.lacking(config, gpus)]
    assert missing == [] if said is None else said in missing[0]


def test_exit_codes(needy):
    """0 where all is there, 4 where something is missing, 2 for a configuration that is wrong."""
    run = CliRunner().invoke
    found = run(app, ["doctor"])
    assert found.exit_code == 0, found.output
    assert "nothing" in found.output
    assert "builtin" in found.output
    assert "needy" in found.output
    found = run(app, ["doctor", needy, "-p", "needy"])
    assert found.exit_code == 4
    assert "no-such-library" in found.output
    found = run(app, ["doctor", needy, "-p", "absent"])
    assert found.exit_code == 4
    assert "rlrun-absent" in found.output.replace("\n", "")
    assert run(app, ["doctor", needy, "-p", "needy", "trainer.nosuch=1"]).exit_code == 2

"""`rl-run report`: the page holds the numbers of the run, nothing of a rollout becomes markup, and any state of a run will do."""

from __future__ import annotations

import json
import re

import pytest
import runs
from locally import train

from rlrun import report
from rlrun.errors import ConfigError

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> & <!-- \u2028 __DATA__ {{x}} \\u003c/script> ]]>'


def embedded(page):
    """The data inside a page, as a browser finds it: the element ends at the first "</script"."""
    text = page.read_text()
    [start] = [m.end() for m in re.finditer(r'<script type="application/json" id="data">', text)]
    return json.loads(text[start:text.index("</script", start)])


def write_run(folder, steps):
    (folder / "rollouts").mkdir(parents=True)
    rows = [{"step": step, "critic/score/mean": step / 7, "timing_s/step": 0.5} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(f"actor: {{optim: {{lr: {steps}e-6}}}}\nrun: {{name: {folder.name}, seed: 0}}\n")
    return folder


def test_numbers_and_advantages_of_a_run(model, tmp_path):
    """All of metrics.jsonl, number for number. A dumped completion has the advantage of each token: GRPO's, of its rewards."""
    train(runs.write_run(tmp_path, model, runs.grpo(3, scale_rewards=False), trainer={"dump_rollouts_every": 2}))
    page = report.write([tmp_path / "run"])
    assert page == tmp_path / "run" / "report.html"
    [run] = embedded(page)["runs"]
    rows = runs.metrics(tmp_path / "run")
    assert run["steps"] == [1, 2, 3]
    assert run["metrics"].keys() == set().union(*rows) - {"step"}
    for name, values in run["metrics"].items():
        assert values == [row.get(name) for row in rows], name
    [dump] = run["dumps"]
    assert (dump["step"], dump["kind"], len(dump["records"])) == (2, "step", report.SAMPLES)
    records = [json.loads(line) for line in (tmp_path / "run/rollouts/step_000002.jsonl").open()]
    assert dump["rewards"] == [record["reward"] for record in records]
    assert dump["lengths"] == [record["tokens"] for record in records]
    groups = {}
    for record in records:
        groups.setdefault(record["group"], []).append(record["reward"])
    for record in records:
        mean = sum(groups[record["group"]]) / 4
        assert record["advantages"] == pytest.approx([record["reward"] - mean] * record["tokens"], abs=1e-6)
        assert len(record["texts"]) == record["tokens"]
        text = "".join(record["texts"])  # a character of several tokens is none of them
        assert "\ufffd" in text or text.replace("<eos>", "") == record["completion"]
    assert any(abs(record["advantages"][0]) > 0.01 for record in records)


def test_hostile_text(tmp_path):
    """Whatever a model writes stays text: the page has its own two script elements, and the record comes back as it was."""
    run = write_run(tmp_path / "run", 2)
    record = {"prompt": HOSTILE, "completion": HOSTILE, "answer": {HOSTILE: [HOSTILE]}, "error": HOSTILE, "texts": [HOSTILE] * 3,
              "advantages": [1.0, float("inf"), -1.0], "reward": float("nan"), "tokens": 3}
    (run / "rollouts" / "step_000002.jsonl").write_text(json.dumps(record) + "\n")
    page = report.write([run])
    text = page.read_text()
    assert len(re.findall(r"<script", text)) == len(re.findall(r"</script>", text)) == 2
    assert "<img" not in text
    assert "<!--" not in text
    [dump] = embedded(page)["runs"][0]["dumps"]
    [got] = dump["records"]
    assert {key: got[key] for key in ("prompt", "completion", "answer", "error", "texts")} == {
        key: record[key] for key in ("prompt", "completion", "answer", "error", "texts")}
    assert got["advantages"] == [1.0, None, -1.0]
    assert dump["rewards"] == [None]


def test_self_contained():
    """The page loads nothing from anywhere, and makes markup of no text."""
    template = report.TEMPLATE.read_text()
    assert template.count("__DATA__") == 1
    assert not re.findall(r"src=|href=|url\(|@import|fetch\(|innerHTML|document\.write|eval\(|insertAdjacent", template)
    assert re.findall(r"https?://[^\"]+", template) == ["http://www.w3.org/2000/svg"]


def test_any_state_of_a_run(tmp_path):
    """In progress, with a line half written; without a step; of different lengths; of one name; of very many steps."""
    going, empty = write_run(tmp_path / "a" / "run", 3), tmp_path / "empty"
    with (going / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "val-core/x/acc/mean@1": 0.5, "critic/score/mean": null}\n{"step": 4, "crit')
    empty.mkdir()
    (empty / "config.yaml").write_text("run: {name: empty}\n")
    other = write_run(tmp_path / "b" / "run", 5000)
    page = report.write([going, empty, other], tmp_path / "out.html")
    found = embedded(page)
    first, second, third = found["runs"]
    assert [run["name"] for run in found["runs"]] == [str(going), str(empty), str(other)]
    assert first["steps"] == [1, 2, 3]
    assert first["metrics"] == {"critic/score/mean": [1 / 7, 2 / 7, None], "timing_s/step": [0.5] * 3,
                                "val-core/x/acc/mean@1": [None, None, 0.5]}
    assert second == {"name": str(empty), "steps": [], "metrics": {}, "dumps": []}
    assert len(third["steps"]) <= report.POINTS + 1
    assert third["steps"][0] == 1
    assert third["steps"][-1] == 5000
    assert third["metrics"]["critic/score/mean"] == [step / 7 for step in third["steps"]]
    assert found["differing"]["actor.optim.lr"] == ["3e-6", None, "5000e-6"]
    assert "run.seed" in found["differing"]  # the empty run has none
    assert "differing" in embedded(report.write([going]))
    assert embedded(report.write([going]))["differing"] == {}
    with pytest.raises(ConfigError, match="holds no run"):
        report.write([tmp_path])

"""Every recipe of examples/ in two steps of a tiny model on CPUs: `rl-run` with the command of the file's first lines.

What differs from the recipe is told to `rl-run` as `key=value`: folders and files, device and dtype, ranks, steps, batch sizes,
lengths, and the engine, which is hf for vLLM. All other keys of the run are the recipe's.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import runs
import yaml
from locally import load, train

from rlrun.config.load import to_yaml
from rlrun.config.schema import SourceConfig
from rlrun.config.validate import validate_resolved
from rlrun.folder import flat
from rlrun.rewards.function import load_file
from rlrun.testing.tiny import CHATML, save_tiny

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SPREAD = '''
import json
from rlrun.hookspecs import PluginInfo, hookimpl

@hookimpl
def plugin_info():
    return PluginInfo("spread", 1)

@hookimpl
def patch_attention(model, spec, mesh):
    with open("SEEN", "a") as file:
        file.write(json.dumps([spec.role, mesh["dp"].size(), mesh["sp"].size()]) + "\\n")
'''
"""A plugin that notes over how many ranks models and sequences are spread."""


@dataclass
class Made:
    """What a run of a recipe left."""

    directory: Path
    rows: list[dict[str, Any]]
    config: Any
    spread: list[list[Any]]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


@dataclass
class Recipe:
    """How a recipe is run here and what must be true of it."""

    loss: str = "actor/pg_loss"
    check: Callable[[Made], None] = lambda made: None
    data: tuple[str, ...] = ()  # files for data.train and data.validation; none: the recipe's own sources, shorter
    model: str = "answering"
    shared: int = 1  # ranks that share each sequence or layer, here and on the recipe's own number of GPUs
    overrides: Mapping[str, Any] = field(default_factory=dict)


def dapo(made: Made) -> None:
    algorithm = made.config.stages[0].algorithm
    assert (algorithm.clip_high, algorithm.filter_groups, algorithm.mask_truncated) == (0.28, True, True)
    assert all(row["critic/score/max"] > row["critic/score/min"] for row in made.rows)


def ppo(made: Made) -> None:
    assert all(math.isfinite(loss) and loss > 0 for loss in made.column("critic/vf_loss"))
    assert len(made.column("critic/vf_loss")) == 2
    assert made.column("critic/lr") == [1e-5] * 2
    assert (made.directory / "checkpoints/step_000002/critic").is_dir()
    assert "actor/reward_kl_penalty" in made.rows[0]


def prime(made: Made) -> None:
    assert {tuple(of) for of in made.spread} == {("actor", 2, 1), ("prm", 2, 1), ("prm_ref", 2, 1)}
    assert made.rows[1]["timing_s/prm"] > 0
    assert (made.directory / "checkpoints/step_000002/prm").is_dir()


def ulysses(made: Made) -> None:
    assert made.spread == [["actor", 1, 2]] * 2


def megatron(made: Made) -> None:
    """Weights that tensor parallelism cuts lie in the checkpoint in two pieces."""
    from torch.distributed.checkpoint import FileSystemReader

    saved = FileSystemReader(made.directory / "checkpoints/step_000002/actor").read_metadata().state_dict_metadata
    pieces = [len(entry.chunks) for name, entry in saved.items() if name.endswith("linear_proj.weight") and "optim" not in name]
    assert pieces
    assert all(n % 2 == 0 for n in pieces)


def ahead(made: Made) -> None:
    assert made.column("rollout/staleness/mean") == [0, 1]
    assert len(made.column("correction/weight")) == 2


def sft(made: Made) -> None:
    losses = made.column("sft/loss")
    assert len(losses) == 2
    assert all(loss > 0 for loss in losses)
    assert "critic/score/mean" not in made.rows[0]


def dpo(made: Made) -> None:
    assert math.isclose(made.rows[0]["dpo/loss"], math.log(2), rel_tol=1e-4)  # the policy is still its reference
    assert made.rows[1]["dpo/loss"] != made.rows[0]["dpo/loss"]


def gsm8k(made: Made) -> None:
    assert any(0 < row["critic/score/mean"] < 1 for row in made.rows)
    assert 0 <= made.rows[1]["val-core/unseen/acc/mean@1"] <= 1


def curriculum(made: Made) -> None:
    """Level after level, each of as many rows as a step takes here."""
    dumps = sorted(made.directory.glob("rollouts/step_*.jsonl"))
    assert [{json.loads(line)["data_source"] for line in dump.open()} for dump in dumps] == [{"sums_level1"}, {"sums_level2"}]


def two_turns(made: Made) -> None:
    assert made.rows[1]["rollout/turns/mean"] >= 1


MATH, QUESTIONS = ("math.jsonl", "math_unseen.jsonl"), ("questions.jsonl", "questions_unseen.jsonl")
RECIPES = {
    "quickstart": Recipe(model="spelling"),
    "calculator": Recipe(check=two_turns, model="calculator", data=("train.jsonl", "unseen.jsonl")),
    "prime_quickstart": Recipe(check=prime, model="spelling", overrides={  # a new model has nothing right, or all
        "prime.accuracy_range": "[0.0, 1.0]", "prime.drop_truncated": "false"}),
    "smollm2": Recipe(),
    "gsm8k": Recipe(check=gsm8k, data=QUESTIONS),
    "dapo": Recipe(check=dapo, data=("math.parquet", "math_unseen.parquet")),
    "ppo": Recipe(check=ppo, data=QUESTIONS),
    "ulysses": Recipe(check=ulysses, data=MATH, shared=2),
    "megatron": Recipe(check=megatron, data=MATH, shared=2),
    "async": Recipe(check=ahead, data=MATH),
    "sft": Recipe(check=sft, loss="sft/loss", data=MATH),
    "dpo": Recipe(check=dpo, loss="dpo/loss", data=("pairs.jsonl",)),
    "curriculum": Recipe(check=curriculum, overrides={"data.train.0.options.size": 8, "trainer.dump_rollouts_every": 1}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and data in the recipes' formats. The model "answering" has learnt to say short numbers: so some are right."""
    made = tmp_path_factory.mktemp("recipes")
    pairs = [(f"{a}+{b}=", str((3 * a + b) % 3), "9") for a in range(8) for b in range(8)]
    formats = {"math": lambda q, a, r: {"prompt": q, "answer": a},
               "pairs": lambda q, a, r: {"prompt": q, "answer": a, "rejected": r},
               "questions": lambda q, a, r: {"question": q, "answer": f"So.\n#### {a}"}}
    for name, form in formats.items():
        for part, some in (("", pairs[8:]), ("_unseen", pairs[:8])):
            (made / f"{name}{part}.jsonl").write_text("".join(json.dumps(form(*pair)) + "\n" for pair in some))
    import pyarrow
    import pyarrow.parquet

    for name, some in (("math", pairs[8:]), ("math_unseen", pairs[:8])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{
            "prompt": [{"role": "user", "content": q}], "reward_model": {"ground_truth": a}, "data_source": "math",
        } for q, a, _ in some]), made / f"{name}.parquet")
    save_tiny(made / "new", words=["<|user|>", "<|assistant|>"], chat_template=CHATML, hidden_size=32, intermediate_size=64,
              num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sums = {"size": 400, "seed": 7, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    warm = runs.write_run(
        made / "warm", made / "new", runs.sft(60, prompts_per_step=32),
        actor={"optim": {"lr": 1e-2}, "tokens_per_micro_batch": 4096},
        data={"train": [{"kind": "jsonl", "path": str(made / "math.jsonl")},
                        {"kind": "reasoning_gym", "path": "chain_sum", "options": sums}], "max_prompt_tokens": 128})
    train(warm)
    (made / "answering").symlink_to(made / "warm/run/checkpoints/step_000060/hf")
    for command in (["-m", "rlrun.testing.tiny", str(made / "spelling")],
                    [str(EXAMPLES / "calculator.py"), str(made / "calculator"), "--train", "64", "--unseen", "8"]):
        subprocess.run([sys.executable, *command], check=True, env=runs.environment())
    for name in ("train.jsonl", "unseen.jsonl"):
        (made / "calculator" / name).rename(made / name)
    (made / "calculator").rename(made / "calculating")
    (made / "calculator").symlink_to(made / "calculating/model")
    return made


def command(name: str) -> tuple[Path, list[str]]:
    """The file, and the plugins that its command lists."""
    path = EXAMPLES / f"{name}.yaml"
    [(named, plugins)] = re.findall(r"^# rl-run (examples/\S+\.yaml) -p (\S+)", path.read_text(), re.MULTILINE)
    assert ROOT / named == path
    return path, [str(ROOT / p) if "/" in p else p for p in plugins.split(",")]


def changed(config: Any, recipe: Recipe, folder: Path, out: Path) -> dict[str, Any]:
    """A recipe's keys made small enough for a tiny model, two ranks and two steps."""
    generates = any(stage.algorithm.name not in ("sft", "dpo") for stage in config.stages)
    new: dict[str, Any] = {"run.dir": out, "model.path": folder / recipe.model, "model.dtype": "float32", "validation.every": 0,
                           "resources.device": "cpu", "actor.optim.warmup_steps": 0, "data.max_prompt_tokens": 128}
    for part, file in zip(("train", "validation"), recipe.data, strict=False):
        if getattr(config.data, part):
            new[f"data.{part}.0.path"] = folder / file
    if not recipe.data:
        new |= {"data.train.0.options.size": 64, "data.validation.0.options.size": 8}
    for i, stage in enumerate(config.stages):
        at = f"stages.{i}"
        new |= {f"{at}.steps": 2 // len(config.stages), f"{at}.epochs": "null", f"{at}.algorithm.prompts_per_step": 8}
        if stage.algorithm.prompts_per_update:
            new[f"{at}.algorithm.prompts_per_update"] = 4
        if stage.optim:
            new[f"{at}.optim.warmup_steps"] = 0
        if stage.algorithm.overlong_buffer:
            new[f"{at}.algorithm.overlong_buffer"] = 2
        if stage.algorithm.critic_warmup_steps:
            new |= {f"{at}.algorithm.critic_warmup_steps": 1, "critic.optim.warmup_steps": 0}
    if generates:
        new |= {"rollout.max_new_tokens": 8, "rollout.samples_per_prompt": min(8, config.rollout.samples_per_prompt)}
    if config.rollout.engine == "vllm":
        new |= {"rollout.engine": "hf", "rollout.engine_args": "{}"}
    if config.resources.rollout_ranks:
        new |= {"resources.train_ranks": 1, "resources.rollout_ranks": 1}
    elif config.resources.train_ranks == 1:
        new["resources.launcher"] = "local"
    else:
        new["resources.train_ranks"] = 2
    return {**new, **recipe.overrides}


def test_each_recipe_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == RECIPES.keys()


def test_each_recipe_is_on_the_page_with_its_command():
    listed = re.findall(r"^\| `(\w+)` \|.*?\| `(rl-run [^`]+)` \|", (ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE)
    assert {name for name, _ in listed} == RECIPES.keys()
    assert not [name for name, line in listed if f"# {line}\n" not in (EXAMPLES / f"{name}.yaml").read_text()]


@pytest.fixture
def source():
    curriculum = load_file("curriculum_example", str(EXAMPLES / "curriculum.py"))
    return lambda **options: curriculum.Curriculum(SourceConfig("curriculum", "chain_sum", "sums", options=options))


def test_levels_of_the_curriculum(source):
    """Level n has sums of 2 to n + 1 numbers with 1 to n digits; every level has `size` rows; an option holds at all levels."""
    rows = list(source(levels=3, size=40, seed=1).rows())
    assert [row.data_source for row in rows] == [f"sums_level{n}" for n in (1, 2, 3) for _ in range(40)]
    assert len({row.uid for row in rows}) == 120
    for level in (1, 2, 3):
        numbers = [re.findall(r"\d+", row.prompt.rpartition(":")[2]) for row in rows if row.data_source == f"sums_level{level}"]
        assert {len(of) for of in numbers} == set(range(2, level + 2))
        assert {len(n) for of in numbers for n in of} == set(range(1, level + 1))
    short = list(source(levels=3, size=20, max_terms=2).rows())
    assert {len(re.findall(r"\d+", row.prompt)) for row in short} == {2}
    with pytest.raises(ValueError, match=r"options.levels is 99; reasoning-gym has 1 to 11 levels"):
        source(levels=99)
    with pytest.raises(ValueError, match="no_such"):
        list(source(no_such=1).rows())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.yaml")))
def test_recipe(name, folder, tmp_path, left):
    recipe = RECIPES[name]
    path, plugins = command(name)
    config, _ = load(path, add=plugins)
    whole, found = load(path, f"model.path={folder / recipe.model}", add=plugins)
    validate_resolved(whole, found)
    assert found.layout(whole).dp * recipe.shared == whole.resources.train_ranks

    new = changed(config, recipe, folder, tmp_path)
    (tmp_path / "spread.py").write_text(SPREAD.replace("SEEN", str(tmp_path / "seen")))
    listed = ",".join([*plugins, str(tmp_path / "spread.py")])
    done = runs.rl_run(path, "-p", listed, *(f"{key}={value}" for key, value in new.items()), env=left.env)
    assert done.returncode == 0, done.stderr
    left.check()

    [directory] = [p for p in tmp_path.iterdir() if p.is_dir()]
    rows = [row for row in runs.metrics(directory) if row["step"]]  # step 0: validation before the first
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, int | float))
    assert recipe.loss in rows[-1]
    assert all(row["actor/skipped"] == 0 for row in rows if "actor/skipped" in row)
    learnt = [row["actor/grad_norm"] > 0 for row in rows if "actor/grad_norm" in row]
    assert all(learnt) if recipe.data and recipe.model == "answering" else any(learnt)  # else a step's samples may all be wrong

    saved, given = (flat(yaml.safe_load(text), "") for text in ((directory / "config.yaml").read_text(), to_yaml(config)))
    assert not [k for k, v in saved.items() if k not in new and k != "plugins" and v != given[k]]
    assert saved["plugins"][:-1] == given["plugins"]
    used = {entry["name"] for entry in json.loads((directory / "plugins.json").read_text())}
    assert used >= {Path(p).stem for p in plugins}
    assert list(directory.glob("tensorboard/*"))
    checkpoint = directory / "checkpoints/step_000002"
    assert {"actor", "hf", "trainer.json"} <= {p.name for p in checkpoint.iterdir()}
    assert moved(checkpoint / "hf", folder / recipe.model)
    seen = tmp_path / "seen"
    spread = [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []
    recipe.check(Made(directory, rows, load(directory / "config.yaml")[0], spread))


def moved(new: Path, old: Path) -> bool:
    """Whether both folders have the same weights by name, and training changed them."""
    from safetensors.torch import load_file

    mine, theirs = load_file(new / "model.safetensors"), load_file(old / "model.safetensors")
    assert mine.keys() == theirs.keys()
    return any(bool((mine[k] != theirs[k]).any()) for k in mine)

"""Configuration: values, overrides, plugin lists and sections, and what is refused."""

import copy
import pickle
import subprocess
import sys
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from typing import get_args

import pytest
import yaml

from rlrun.algorithms.presets import PRESETS
from rlrun.config.load import load_config, to_yaml
from rlrun.config.schema import AlgorithmConfig, Config, OptimConfig
from rlrun.config.values import keys_of
from rlrun.errors import ConfigError, PluginError
from rlrun.testing.installed import install
from rlrun.testing.recording import leaf_keys, recording

BASE = """
run: {name: test}
model: {path: some/model}
data: {train: [{kind: jsonl, path: train.jsonl}, {kind: jsonl, path: more.jsonl}]}
reward: {kind: function, kwargs: {path: "rewards.py:score"}}
stages: [{algorithm: {name: grpo, prompts_per_step: 8}, steps: 10}, {steps: 3}]
"""

TOY = """
from dataclasses import dataclass, field
from typing import Any, Optional
from rlrun.config.schema import opt
from rlrun.hookspecs import PluginInfo, hookimpl

@dataclass
class Inner:
    rate: float = 0.5

@dataclass
class Toy:
    size: int = opt(2, "how many", gt=0)
    name: str = "toy"
    maybe: Optional[str] = None
    flag: bool = False
    inner: Inner = field(default_factory=Inner)
    extra: dict[str, Any] = opt({}, "open")

    def __post_init__(self):
        if self.name == "unlucky":
            raise ValueError("name 'unlucky' is not lucky")

@hookimpl
def plugin_info():
    return PluginInfo("toy", 1, Toy, {"backend": {"fsdp": "MODULE:Toy", "toy": "MODULE:Toy"}})
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder on sys.path with a plugin `toy` that provides a backend."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("site")
        patch.syspath_prepend(str(folder))
        install(folder, "toy", TOY)
        yield folder


@pytest.fixture
def load(site, tmp_path):
    """load(*overrides, text=BASE, add=["toy"], without=[]) -> Config."""

    def load(*overrides, text=BASE, add=("toy",), without=()):
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return load_config(tmp_path / "run.yaml", overrides, add, without)[0]

    return load


def refused(load, *overrides, **kwargs):
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "0.000001", "1.0E-06"])
def test_floats(load, monkeypatch, text):
    """Case 1: a learning rate is a float, whatever way it is written and wherever it comes from."""
    monkeypatch.setenv("LR", text)
    yaml_text = BASE + f"actor: {{optim: {{lr: {text}}}}}\n"
    in_env, quoted = (yaml_text.replace(text, other) for other in ("'${oc.env:LR}'", f"'{text}'"))
    for config in (load(f"actor.optim.lr={text}"), load("actor.optim.lr=${oc.env:LR}"),
                   *(load(text=way) for way in (yaml_text, in_env, quoted))):
        assert type(config.actor.optim.lr) is float
        assert config.actor.optim.lr == 1e-6
    config = load(f"toy.extra.rate={text}", f"toy.inner.rate={text}")
    assert config.toy.extra["rate"] == config.toy.inner.rate == 1e-6
    assert type(config.toy.extra["rate"]) is float
    assert load("actor.optim.eps=1").actor.optim.eps == 1.0
    assert type(load("actor.optim.eps=1").actor.optim.eps) is float


@pytest.mark.parametrize("text", ["5e8", "1.5", "1.0", "four", "true", "0x10", "[1]", "null", "", "{a: 1}", "1:30"])
def test_whole_numbers(load, text):
    """Case 1: what is not a whole number is refused at start, with the key."""
    in_yaml = BASE.replace("name: test", f"name: t, seed: {text}")
    for message in (refused(load, f"run.seed={text}"), refused(load, text=in_yaml)):
        assert message.startswith("run.seed: ")
        assert "whole number" in message
    assert load("run.seed=010").run.seed == 10
    assert load("run.seed=500000000").run.seed == 500_000_000


@pytest.mark.parametrize("text", ["1e-5", "007", "yes", "off", "1_000", "12:30", "2024-01-01", "0x1F", ".5", "true"])
def test_text_stays_text(load, monkeypatch, text):
    """Text keys keep their characters, from YAML, the command line, an interpolation, and after saving."""
    monkeypatch.setenv("TEXT", text)
    configs = [
        load(f"model.path={text}", f"run.name={text}", f"toy.maybe={text}", f"rollout.stop=[{text}]"),
        load("toy.maybe=${oc.env:TEXT}", "model.path=${toy.maybe}", "run.name=${oc.env:TEXT}",
             "rollout.stop=['${toy.maybe}']"),
        load(text=BASE.replace("name: test", f"name: {text}").replace("some/model", text)
             + f"toy: {{maybe: {text}}}\nrollout:\n  stop:\n  - {text}\n"),
    ]
    for config in [*configs, load(text=to_yaml(configs[0]))]:
        assert [config.model.path, config.run.name, config.toy.maybe, *config.rollout.stop] == [text] * 4


@pytest.mark.parametrize("text", [
    "/tmp/a=b@c%d", "epoch=3-step=7.ckpt", " a b ", "a,b", "[a", "{a", "a: b #c", "@x", "%x", "&a", "*a", "!tag",
    "'quoted'", '"q', "größe/数据", "\\", "a\\b", "-", "|", "\\${not}", "$HOME", "~", "a\tb", "a\u00a0b",
])
def test_override_values_are_taken_whole(load, text):
    """Case 6: everything after the first "=" is the value; nothing in it is parsed for text keys."""
    config = load(f"model.path={text}", f"data.train.1.path={text}")
    expected = "${not}" if text == "\\${not}" else text
    assert (config.model.path, config.data.train[1].path) == (expected, expected)
    assert load(text=to_yaml(config)) == config


@pytest.mark.parametrize("text", ["false", "False", "off", "no", "NO", "'false'"])
def test_false_is_false(load, text):
    """Case 4: no truthy strings in boolean keys."""
    for config in (load(f"data.shuffle={text}", f"stages.0.algorithm.scale_rewards={text}"),
                   load(text=BASE.replace("name: grpo", f"name: grpo, scale_rewards: {text}").replace(
                       "data: {", f"data: {{shuffle: {text}, "))):
        assert config.data.shuffle is False
        assert config.stages[0].algorithm.scale_rewards is False
    assert load("toy.flag=on").toy.flag is True


@pytest.mark.parametrize("text", ["none", "0", "null", "", "maybe", "2", "[false]"])
def test_neither_true_nor_false(load, text):
    """Case 4: what is neither true nor false is refused."""
    assert refused(load, f"data.shuffle={text}").startswith("data.shuffle: ")


@pytest.mark.parametrize("key, text", [
    ("stages.0.algorithm.kl_in", "off"), ("stages.0.algorithm.loss_aggregation", "none"), ("reward.on_error", "false"),
    ("data.overlong_prompts", "no"), ("actor.optim.schedule", "Cosine"), ("model.dtype", "null"),
])
def test_choices(load, key, text):
    """Case 4: a key with choices takes no other, and no disguised boolean."""
    message = refused(load, f"{key}={text}")
    assert message.startswith(key)
    if text != "null":
        assert "must be one of" in message
        assert repr(text) in message


@pytest.mark.parametrize("key, nearest", [
    ("trainer.phase_timeuot_s", "trainer.phase_timeout_s"), ("trianer", "trainer"), ("actor.optim.learning_rat", None),
    ("stages.0.algorithm.clip_hihg", "stages.0.algorithm.clip_high"), ("stages.1.setps", "stages.1.steps"),
    ("data.train.0.pth", "data.train.0.path"), ("toy.sizee", "toy.size"), ("toy.inner.raet", "toy.inner.rate"),
    ("reward.parts.0.wieght", "reward.parts.0.weight"),
])
def test_misspelt_keys(load, key, nearest):
    """Case 2: unknown keys at the top, nested, in lists and in plugin sections; the nearest is told."""
    tree = yaml.safe_load(BASE)
    tree["toy"] = {"inner": {}}
    tree["reward"] = {"parts": [{"kind": "function"}]}
    node, *rest = tree, *key.split(".")
    for part in rest[:-1]:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    messages = [refused(load, f"{key}=1", text=yaml.safe_dump(tree))]
    node[rest[-1]] = 1
    messages.append(refused(load, text=yaml.safe_dump(tree)))
    for message in messages:
        assert message.startswith(f"{key}: no such key; ")
        if nearest:
            assert message.endswith(f"did you mean {nearest}?")


def test_all_problems_are_told_at_once(load):
    """Case 2: one message has every wrong key and value."""
    text = BASE + "trainer: {phase_timeout_s: soon, x: 1}\nresources: {train_ranks: many}\n"
    assert len(refused(load, text=text).splitlines()) == 3
    assert len(refused(load, "run.seed=x", "model.y=1", "trainer=5").splitlines()) == 3
    assert len(refused(load, "rollout.temperature=0", "reward.timeout_s=-1", "model.dtype=int8").splitlines()) == 3
    wrong = ["rollout.top_p=0.5", "stages.0.epochs=2", "run.name=a/b", "validation.every=5"]
    assert len(refused(load, *wrong).splitlines()) == 4


def test_structure_is_kept(load):
    """Case 9: a value over a mapping or a list is a type error; lists are replaced, open mappings are merged."""
    assert refused(load, "trainer=5").startswith("trainer: '5', but it needs a mapping with the keys phase_timeout_s")
    assert refused(load, "trainer=null").startswith("trainer: null")
    assert refused(load, text=BASE + "trainer: 5").startswith("trainer: '5', but it needs a mapping")
    assert refused(load, text=BASE + "trainer: [a]").startswith("trainer: a seq, but it needs a mapping")
    assert refused(load, "rollout.stop=x").startswith("rollout.stop: 'x', but it needs a list")
    assert refused(load, "rollout.stop={a: 1}").startswith("rollout.stop: a map, but it needs a list")
    assert refused(load, "model.path.x=1").startswith("model.path.x: model.path has no keys")
    assert refused(load, "data.train.path=1").startswith("data.train.path: data.train is a list")
    assert refused(load, text="- a\n- b").endswith("a configuration is a mapping of keys to values")
    assert "given twice" in refused(load, text=BASE + "run: {name: again}\n")
    assert refused(load, "trainer.max_skipped_updates=four").startswith("trainer.max_skipped_updates: 'four'")
    assert refused(load, "model.path=null").startswith("model.path: null")
    assert load("model.tokenizer=null").model.tokenizer is None
    config = load("rollout.stop=[a, b]", "reward.kwargs={limit: 3}", "reward.kwargs.deep.er=1e-3",
                  "reward.kwargs.off=off")
    assert config.rollout.stop == ["a", "b"]
    assert config.reward.kwargs == {"path": "rewards.py:score", "limit": 3, "deep": {"er": 0.001}, "off": False}
    assert load("reward.kwargs={}").reward.kwargs == {}
    assert load("actor.optim.lr=0.5", "actor.optim={}").actor.optim.lr == 0.5
    assert load("data.train=[{kind: parquet, path: 1e3}]").data.train[0].path == "1e3"


def test_list_items(load):
    """Numbers index the items that are there."""
    config = load("data.train.1.path=x", "stages.0.steps=5", "actor.optim.betas.1=0.95", "stages.1.optim.lr=0.5")
    assert [source.path for source in config.data.train] == ["train.jsonl", "x"]
    assert config.stages[0].steps == 5
    assert config.actor.optim.betas == [0.9, 0.95]
    assert config.stages[1].optim == OptimConfig(lr=0.5)
    assert config.stages[0].optim is None
    for key in ("data.train.2.path", "actor.optim.betas.2", "rollout.stop.0", "stages.7.optim.lr"):
        assert "items, numbered from 0" in refused(load, f"{key}=1")
    assert "data.train is a list" in refused(load, "data.train.-1.path=x")


@pytest.mark.parametrize("text, hint", [
    ("+run.seed=1", "need no +"), ("~run.seed", "--no-plugin"), ("run.seed", ""), ("=1", ""), ("run..seed=1", ""),
    ("run seed=1", ""), (".run=1", ""),
])
def test_tokens_that_are_no_overrides(load, text, hint):
    """Case 9: another tool's grammar is refused and explained."""
    with pytest.raises(ConfigError, match="is not of the form key=value") as caught:
        load(text)
    assert hint in (caught.value.hint or "")


def test_missing_and_unresolvable(load, monkeypatch):
    """Keys without a value are listed; an interpolation that fails names its key."""
    text = BASE.replace("run: {name: test}\n", "").replace("some/model", "'???'").replace("kind: jsonl, ", "", 1)
    assert refused(load, text=text) == "these keys need a value: data.train[0].kind, model.path, run.name"
    monkeypatch.delenv("NO_SUCH", raising=False)
    assert refused(load, "run.name=${oc.env:NO_SUCH}").startswith("run.name: ")
    assert refused(load, "run.name=${no.such}").startswith("run.name: ")
    assert refused(load, "model.path=a${b").startswith("model.path: ")
    monkeypatch.setenv("SEED", "1.5")
    assert refused(load, "run.seed=${oc.env:SEED}").startswith("run.seed: ")
    assert "not valid YAML" in refused(load, "rollout.stop=[")
    assert refused(load, text="").startswith("these keys need a value")
    assert "run.yaml: not valid YAML" in refused(load, text="a: [")


def test_interpolations_and_anchors(load):
    """Values may refer to others; YAML's own anchors and merges work."""
    optims = "actor: {optim: &optim {lr: 0.25, eps: 0.5}}\ncritic: {optim: {<<: *optim, lr: 0.75}}\n"
    config = load("reward.processes=${rollout.samples_per_prompt}", "data.validation=${data.train}",
                  "stages.0.optim=${actor.optim}", text=BASE + optims)
    assert config.reward.processes == 8
    assert config.data.validation == config.data.train
    assert config.stages[0].optim == config.actor.optim == OptimConfig(lr=0.25, eps=0.5)
    assert config.critic.optim == OptimConfig(lr=0.75, eps=0.5)


def test_plugin_list(load, site, capsys):
    """Cases 9, 108: the file's list, then -p, then --no-plugin with the section; each plugin once, in order."""
    install(site, "two", "from rlrun.hookspecs import PluginInfo, hookimpl\n"
            "@hookimpl\ndef plugin_info(): return PluginInfo('two', 1)")
    listed = BASE + "plugins: [two]\n"
    assert load(text=listed).plugins == ["two", "toy"]
    assert load(text=listed, add=["toy", "two"]).plugins == ["two", "toy"]
    assert load("plugins=[toy, two]", text=listed, add=[]).plugins == ["toy", "two"]
    assert load("plugins=[toy]", text=BASE + "toy: {size: 7}\n", add=[]).toy.size == 7
    capsys.readouterr()
    config = load("two.x=1", "toy.size=3", text=listed + "two: {anything: [1]}\n", without=["two"])
    assert config.plugins == ["toy"]
    assert capsys.readouterr().err.splitlines() == ["rl-run: plugin 'two' and its section are left out"]
    assert "--no-plugin gone: it is not in the list: two, toy" in refused(load, text=listed, without=["gone"])
    assert refused(load, "plugins=toy").startswith("plugins: 'toy', but it needs a list")
    assert refused(load, "plugins.0=toy").startswith("plugins.0: give the whole list")
    with pytest.raises(PluginError, match="'nosuch' is not installed"):
        load(text=BASE + "plugins: [nosuch]\n")


def test_section_of_an_unlisted_plugin(load):
    """Case 2: a section that names an installed plugin says how to list it."""
    for message in (refused(load, text=BASE + "toy: {size: 3}\n", add=[]), refused(load, "toy.size=3", add=[])):
        assert "plugin 'toy' is installed but not listed: add -p toy" in message
    assert "no backend 'fsdp'" in refused(load, add=[])


def test_plugin_sections(load):
    """A plugin's section is typed and limited like core's own, and may check itself."""
    assert load("toy.size=3").toy.size == 3
    assert load("toy.size=3").section("toy", type(load().toy)).size == 3
    assert refused(load, "toy.size=0") == "toy.size is 0; it must be greater than 0"
    assert refused(load, "toy.inner.rate=nan") == "toy.inner.rate is nan; it must be finite"
    assert refused(load, "toy.name=unlucky") == "toy: name 'unlucky' is not lucky"
    with pytest.raises(ValueError, match="is plugin 'other' listed"):
        load().section("other", int)


def test_plugin_whose_config_is_unreadable(load, site):
    """A dataclass that OmegaConf cannot read is the plugin's fault, and named."""
    install(site, "odd", "from dataclasses import dataclass\nfrom rlrun.hookspecs import PluginInfo, hookimpl\n"
            "@dataclass\nclass Odd:\n    x: set[int] = None\n"
            "@hookimpl\ndef plugin_info(): return PluginInfo('odd', 1, Odd)")
    with pytest.raises(PluginError, match="plugin 'odd': OmegaConf cannot read Odd"):
        load(add=["toy", "odd"])


def test_saved_configuration_loads_back(load, tmp_path):
    """The resolved configuration is the run's record: it loads to an equal one, odd text included."""
    config = load("toy.extra={a: [1, '1', 1e-5, '1e-5', null, 'null', true, 'true']}",
                  "rollout.stop=['\\???', \"\\n\", '\\${x}', '']", "model.path=a\\${b}", "run.seed=7",
                  "stages.0.optim={lr: 1e-5}", "checkpoint.keep=null")
    assert config.rollout.stop == ["???", "\n", "${x}", ""]
    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    again, plugins = load_config(tmp_path / "saved.yaml")
    assert again == config
    assert asdict(again) == asdict(config)
    assert plugins.names == ["builtin", "toy"]


def test_configuration_travels(load, site, tmp_path):
    """Case 104: a configuration with plugin sections is rebuilt in another process, and copied in this one."""
    config = load("toy.size=5")
    assert isinstance(config, Config)
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert replace(config, plugins=[]).toy.size == 5
    (tmp_path / "pickled").write_bytes(pickle.dumps(config))
    code = "import pickle, sys; c = pickle.load(open(sys.argv[1], 'rb')); print(c.toy.size, type(c.toy), c.run.name)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "pickled")], capture_output=True, text=True,
                          env={"PYTHONPATH": str(site)}, check=True)
    assert done.stdout.split() == ["5", *str(type(config.toy)).split(), "test"]


def test_number_of_keys():
    """The configuration stays small: 100 leaf keys or fewer. Optimizers other than the actor's, and the items of lists other than
    the stages, are empty by default and count nothing."""
    empty = ("stages.optim.", "critic.optim.", "data.train.", "data.validation.", "reward.parts.")
    assert len([key for key in leaf_keys(Config) if not key.startswith(empty)]) <= 100


def test_presets_are_values_that_any_key_overrides(load):
    """Case 4: a name sets fields, which --print-config shows; what file or overrides say wins, wherever the name is from."""
    def shown(*overrides, stage=0, **more):
        return yaml.safe_load(to_yaml(load(*overrides, **more)))["stages"][stage]["algorithm"]

    for name, preset in PRESETS.items():
        default = asdict(AlgorithmConfig(name=name, prompts_per_step=8))
        assert shown(f"stages.0.algorithm.name={name}") == {**default, **preset}
        others = {}
        for field, value in preset.items():
            choices = AlgorithmConfig.__dataclass_fields__[field].metadata["choices"]
            others[field] = next(v for v in choices or (True, False, 0.5) if v != value and type(v) is type(value))
        overrides = [f"stages.0.algorithm.{field}={value}" for field, value in others.items()]
        assert shown(*overrides, f"stages.0.algorithm.name={name}") == {**default, **others}
    text = BASE.replace("name: grpo,", "name: dapo, clip_high: 0.2, filter_groups: false,")
    expected = (0.2, False, True)
    for overrides in ([], ["stages.0.algorithm.name=dapo"], ["stages.0.algorithm={name: dapo}"]):
        got = shown(*overrides, text=text)
        assert (got["clip_high"], got["filter_groups"], got["mask_truncated"]) == expected
    assert shown("stages.0.algorithm.name=grpo", text=text)["mask_truncated"] is False
    assert shown("stages=[{steps: 1, algorithm: {name: dapo, prompts_per_step: 8}}]")["clip_high"] == 0.28
    assert shown("stages.1.algorithm=${stages.0.algorithm}", text=text, stage=1) == shown(text=text)
    again = to_yaml(load(text=text))
    assert to_yaml(load(text=again)) == again


def test_every_key_is_described():
    """Every key has a default or ???, and says what it means."""

    def check(kind):
        for field in fields(kind):
            hint = keys_of(kind)[field.name]
            inner = [k for k in (hint, *get_args(hint)) if is_dataclass(k)]
            assert field.default is not MISSING or field.default_factory is not MISSING, field.name
            if inner:
                check(inner[0])
            else:
                assert field.metadata["help"], field.name

    check(Config)


def test_recording_notes_what_is_read(load):
    """Case 3: keys that nothing reads can be listed; copying, saving and validating are no reading."""
    config = load()
    proxy, read = recording(config)
    to_yaml(proxy)
    copy.deepcopy(proxy)
    replace(proxy, plugins=[])
    assert read == set()
    assert isinstance(proxy, Config)
    assert proxy.actor.optim.lr == config.actor.optim.lr
    assert [source.path for source in proxy.data.train] == ["train.jsonl", "more.jsonl"]
    assert proxy.toy.inner.rate == 0.5
    assert proxy.reward.kwargs["path"]
    assert copy.deepcopy(proxy).run.seed == 0
    assert read == {"actor.optim.lr", "data.train.path", "toy.inner.rate", "reward.kwargs", "run.seed"}
    assert read < leaf_keys(type(config))
    assert {"toy.size", "stages.algorithm.name", "stages.optim.lr", "critic.optim.lr"} <= leaf_keys(type(config)) - read

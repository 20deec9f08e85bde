import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlrun.config.schema import DataConfig, SourceConfig
from rlrun.data import sources
from rlrun.data.prompts import encode_answers, encode_prompts, load_data, shorten
from rlrun.testing.tiny import CHATML, build_tokenizer

KINDS = {"jsonl": sources.Jsonl, "parquet": sources.Parquet, "datasets": sources.Datasets,
         "reasoning_gym": sources.ReasoningGym}


class Plugins:
    def resolve(self, kind, name):
        assert kind == "source"
        return KINDS[name]


def jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return SourceConfig(kind="jsonl", path=str(path))


def load(train, validation=(), tokenizer=None, **config):
    data = DataConfig(train=list(train), validation=list(validation), **config)
    return load_data(data, tokenizer or build_tokenizer(), Plugins())


VERL = [
    {"data_source": "gsm", "prompt": [{"role": "user", "content": f"question {i}"}],
     "reward_model": {"style": "rule", "ground_truth": str(i)}, "ability": None if i == 3 else "maths",
     "extra_info": {"index": i, "tags": [{"a": "x"}, {"a": None}] if i % 2 else None}}
    for i in range(7)
]


def test_verl_schema_is_the_same_from_parquet_jsonl_and_datasets(tmp_path):
    """Case 16: nested columns, several row groups, nulls: rows in == rows out, plain types, equal samples."""
    pq.write_table(pa.Table.from_pylist(VERL), tmp_path / "rows.parquet", row_group_size=2)
    assert pq.ParquetFile(tmp_path / "rows.parquet").num_row_groups == 4
    datasets.Dataset.from_list(VERL).save_to_disk(tmp_path / "disk" / "rows")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(VERL)}).save_to_disk(tmp_path / "dict" / "rows")
    configs = [
        jsonl(tmp_path / "rows.jsonl", VERL),
        SourceConfig(kind="parquet", path=str(tmp_path / "rows.parquet")),
        SourceConfig(kind="datasets", path=str(tmp_path / "disk" / "rows")),
        SourceConfig(kind="datasets", path=str(tmp_path / "dict" / "rows"), options={"split": "train"}),
    ]
    loaded = [load([config], tokenizer=build_tokenizer(chat_template=CHATML)).train[0] for config in configs]
    for samples in loaded:
        assert samples == loaded[0]
    assert [s.answer for s in loaded[0]] == [str(i) for i in range(7)]
    assert loaded[0][3].uid == "rows/4"
    assert loaded[0][3].data_source == "gsm"
    assert loaded[0][3].extra == {k: VERL[3][k] for k in ("reward_model", "ability", "extra_info")}
    assert type(loaded[1][1].extra["extra_info"]["tags"]) is list
    assert type(loaded[1][1].prompt[0]) is dict
    with pytest.raises(ValueError, match=r"splits \['train'\]"):
        load([SourceConfig(kind="datasets", path=str(tmp_path / "dict" / "rows"))])


def test_a_folder_of_parquet_files_is_read_in_order(tmp_path):
    for part in (1, 0):
        pq.write_table(pa.Table.from_pylist([{"prompt": f"p{part}{i}", "answer": i} for i in range(3)]),
                       tmp_path / f"part-{part}.parquet")
    samples = load([SourceConfig(kind="parquet", path=str(tmp_path), name="all")]).train[0]
    assert [s.prompt for s in samples] == ["p00", "p01", "p02", "p10", "p11", "p12"]
    assert samples[-1].uid == "all/6"


def test_columns_by_name(tmp_path):
    config = jsonl(tmp_path / "train.jsonl", [{"question": "q", "out": {"deep": [1, 2]}, "n": 5}, "",
                                              {"question": "r", "out.deep": "plain", "n": 6}])
    config.prompt_key, config.answer_key, config.name = "question", "out.deep", "mine"
    first, second = load([config]).train[0]
    assert (first.prompt, first.answer, first.extra) == ("q", [1, 2], {"out": {"deep": [1, 2]}, "n": 5})
    assert (second.answer, second.extra, second.data_source, second.uid) == ("plain", {"n": 6}, "mine", "mine/3")


GOOD = {"prompt": "fine", "answer": "1", "extra": 1}


@pytest.mark.parametrize("row, message", [
    ({"prompt": [], "answer": "1"}, "not empty; it is []"),
    ({"prompt": "", "answer": "1"}, "not empty; it is ''"),
    ({"prompt": 7, "answer": "1"}, "it is 7"),
    ({"prompt": [{"role": "user", "content": None}], "answer": "1"}, "message 0 (user) has no content"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}], "answer": "1"},
     "message 0 (user) has parts of type image"),
    ({"prompt": "?", "answer": "1", "images": ["a.png"]}, "the row has images, which data and rollout do not support"),
    ({"prompt": [{"role": "user", "content": "a"}, {"content": "b"}], "answer": "1"}, "message 1 has no role"),
    ({"prompt": ["text"], "answer": "1"}, "message 0 has no role"),
    ({"prompt": "a", "answer": None}, "no answer under 'answer'"),
    ({"prompt": "a", "reward_model": {"ground_truth": None}}, "no answer under 'reward_model.ground_truth'"),
    ({"prompt": "a"}, "no answer under 'answer' (data source's answer_key); there is prompt"),
    ({"question": "a", "answer": "1"}, "no column 'prompt'"),
    ('{"prompt": "a", "ans', "not a line of JSON"),
    ("[1, 2]", "not an object"),
])
def test_a_bad_row_is_named_with_file_and_number(tmp_path, row, message):
    """Case 14: before the first step, naming file and row."""
    config = jsonl(tmp_path / "bad.jsonl", [GOOD, {**GOOD, "extra": "mixed types are fine"}, row, GOOD])
    with pytest.raises(ValueError) as caught:
        load([config], tokenizer=build_tokenizer(chat_template=CHATML))
    assert f"{tmp_path}/bad.jsonl, row 3: " in str(caught.value)
    assert message in str(caught.value)
    if isinstance(row, dict) and not any(key == "extra" for key in row):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "bad.parquet")
        with pytest.raises(ValueError, match=r"bad\.parquet, row 1: "):
            load([SourceConfig(kind="parquet", path=str(tmp_path / "bad.parquet"))])


def test_a_template_that_refuses_names_the_row(tmp_path):
    """Case 14: the template's own complaint comes with file and row."""
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"bad\.jsonl, row 1: roles must alternate"):
        load([jsonl(tmp_path / "bad.jsonl", [GOOD])], tokenizer=build_tokenizer(chat_template=template))
    with pytest.raises(ValueError, match=r"row 1: .*no chat template"):
        load([jsonl(tmp_path / "bad.jsonl", VERL[:1])])


def test_nothing_left_is_a_clear_error(tmp_path):
    """Case 14: an empty file, and one of which every row is filtered."""
    with pytest.raises(ValueError, match=r"empty\.jsonl has no row to use: 0 rows"):
        load([jsonl(tmp_path / "empty.jsonl", [])])
    with pytest.raises(ValueError, match=r"1 rows, of which 1 are longer than data\.max_prompt_tokens=3"):
        load([jsonl(tmp_path / "long.jsonl", [GOOD])], max_prompt_tokens=3)
    with pytest.raises(ValueError, match=r"there is no .*absent\.jsonl"):
        load([SourceConfig(kind="jsonl", path=str(tmp_path / "absent.jsonl"))])
    same = jsonl(tmp_path / "same.jsonl", [GOOD])
    with pytest.raises(ValueError, match="and 1 are validation prompts"):
        load([same], [same])


def test_the_chat_template_is_applied_once():
    tokenizer = build_tokenizer(chat_template=CHATML)
    as_text = encode_prompts(tokenizer, ["hi"])[0]
    assert tokenizer.decode(as_text) == "<|user|>hi<eos><|assistant|>"
    assert encode_prompts(tokenizer, [[{"role": "user", "content": "hi"}]])[0] == as_text
    two = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    assert tokenizer.decode(encode_prompts(tokenizer, [two])[0]) == "<|system|>be<eos><|user|>hi<eos><|assistant|>"
    assert build_tokenizer().decode(encode_prompts(build_tokenizer(), ["hi"])[0]) == "hi"


def test_rows_encoded_together_are_as_alone(tmp_path, monkeypatch):
    """Over several chunks, one of which ends the data early; a row that cannot be rendered is named among many."""
    monkeypatch.setattr("rlrun.data.prompts.CHUNK", 4)
    tokenizer = build_tokenizer(chat_template=CHATML.replace("{%", "{% if 'bad' in messages[0]['content'] %}{{ raise_exception"
                                                             "('no') }}{% endif %}{%", 1))
    texts = [f"{i} " * (i % 3 + 1) for i in range(10)]
    rows = [{"prompt": text, "answer": "1"} for text in texts]
    data = load([jsonl(tmp_path / "rows.jsonl", rows)], tokenizer=tokenizer)
    assert [list(s.prompt_ids) for s in data.train[0]] == [encode_prompts(tokenizer, [text])[0] for text in texts]
    rows[6]["prompt"] = "bad"
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 7: no"):
        load([jsonl(tmp_path / "rows.jsonl", rows)], tokenizer=tokenizer)


def test_length_is_that_of_the_ids_in_use(tmp_path):
    """Case 12: a template that adds 50 tokens counts; what passes is what rollout and trainer get."""
    template = "{{ messages[0]['content'] }}" + "x" * 50
    config = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a" * n, "answer": "1"} for n in (5, 10, 11, 40)])
    data = load([config], tokenizer=build_tokenizer(chat_template=template), max_prompt_tokens=60)
    assert [len(s.prompt_ids) for s in data.train[0]] == [55, 60]
    assert data.counts == {"rows": 4, "dropped": 2}
    assert "2 prompts longer than data.max_prompt_tokens, dropped" in data.notices


@pytest.mark.parametrize("how, expected", [
    ("truncate_left", list(range(46, 146))),
    ("truncate_right", list(range(100))),
    ("truncate_middle", [*range(50), *range(96, 146)]),
])
def test_truncation_keeps_the_right_end(how, expected):
    """Case 11: a prompt of max + 46 tokens; left keeps the last max tokens."""
    assert shorten(list(range(146)), 100, how, "") == expected
    assert shorten(list(range(146)), 1, how, "") == ([0] if how == "truncate_right" else [145])


def test_truncated_samples_hold_exactly_the_cut_ids(tmp_path):
    """Case 11: there is one copy of the prompt's ids."""
    tokenizer = build_tokenizer(chat_template=CHATML)
    config = jsonl(tmp_path / "rows.jsonl", [{"prompt": "abcdefgh" * 10, "answer": "1"}])
    whole = encode_prompts(tokenizer, ["abcdefgh" * 10])[0]
    data = load([config], tokenizer=tokenizer, max_prompt_tokens=len(whole) - 46, overlong_prompts="truncate_left")
    assert list(data.train[0][0].prompt_ids) == whole[46:]
    assert data.counts == {"rows": 1, "truncated": 1}
    with pytest.raises(ValueError, match=rf"rows\.jsonl, row 1: the prompt has {len(whole)} tokens"):
        load([config], tokenizer=tokenizer, max_prompt_tokens=len(whole) - 46, overlong_prompts="error")


def test_validation_questions_leave_the_training_data(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", [{"prompt": f"q{i}", "answer": i} for i in range(6)])
    held = jsonl(tmp_path / "held.jsonl", [{"prompt": [{"role": "user", "content": "q4"}], "answer": 4},
                                           {"prompt": "q1 ", "answer": 1}, {"prompt": "new", "answer": 0}])
    data = load([train], [held], tokenizer=build_tokenizer(chat_template=CHATML))
    assert [s.prompt for s in data.train[0]] == ["q0", "q2", "q3", "q5"]
    assert [s.answer for s in data.validation] == [4, 1, 0]
    assert data.counts["in_validation"] == 2


def test_validation_keeps_its_last_rows(tmp_path):
    """Case 10: five validation rows are five, whatever a step's size is."""
    held = jsonl(tmp_path / "held.jsonl", [{"prompt": f"v{i}", "answer": i} for i in range(5)])
    assert [s.uid for s in load([jsonl(tmp_path / "t.jsonl", [GOOD])], [held]).validation] == [
        f"held/{i}" for i in range(1, 6)]


def test_sources_that_share_a_name_are_told_apart(tmp_path):
    config = jsonl(tmp_path / "train.jsonl", [GOOD])
    with pytest.raises(ValueError, match=r"two sources of data\.train both have a row 'train/1'"):
        load([config, config])


def test_reasoning_gym_rows_carry_their_entry():
    config = SourceConfig(kind="reasoning_gym", path="chain_sum", name="sums",
                          options={"size": 5, "seed": 3, "min_terms": 2, "max_terms": 2})
    rows = list(sources.ReasoningGym(config).rows())
    assert [row.uid for row in rows] == [f"sums/{i}" for i in range(1, 6)]
    assert rows == list(sources.ReasoningGym(config).rows())
    seeds = [{}, {}, {"seed": 0}]
    unseeded = [SourceConfig(kind="reasoning_gym", path="chain_sum", options={"size": 20, **seed}) for seed in seeds]
    first, *again = ([row.prompt for row in sources.ReasoningGym(one).rows()] for one in unseeded)
    assert again == [first, first], "the same in every process, without a seed too"
    assert rows[0].extra["reasoning_gym"]["dataset"] == "chain_sum"
    assert rows[0].extra["reasoning_gym"]["entry"]["answer"] == rows[0].answer
    with pytest.raises(ValueError, match="no dataset 'chain_summ'; it has .*chain_sum"):
        list(sources.ReasoningGym(SourceConfig(kind="reasoning_gym", path="chain_summ")).rows())
    config.options = {"nonsense": 1}
    with pytest.raises(ValueError, match="chain_sum.*nonsense"):
        list(sources.ReasoningGym(config).rows())


def test_answers_for_supervised_training_end():
    tokenizer = build_tokenizer()
    assert tokenizer.decode(encode_answers(tokenizer, ["yes"])[0]) == "yes<eos>"
    assert tokenizer.decode(encode_answers(tokenizer, [42])[0]) == "42<eos>"
    with pytest.raises(ValueError, match="answers that are texts"):
        encode_answers(tokenizer, [{"a": 1}])[0]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        encode_answers(tokenizer, ["yes"])[0]

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlrun.testing.tiny import CHATML, build_tokenizer, common_words, main, save_tiny

QUESTION = "Spell this word backward (example: sun -> nus): hay"


def test_words_are_single_tokens_and_every_text_survives():
    words = common_words([QUESTION, QUESTION.replace("hay", "both")])
    assert words[:3] == ["Spell", " this", " word"]
    tokenizer = build_tokenizer(words)
    for text in (QUESTION, "yah", " thistle thIs\n\tü€ sun sunny <->", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    pieces = [tokenizer.decode([i]) for i in tokenizer(QUESTION)["input_ids"]]
    assert pieces == ["Spell", " this", " word", " backward", " (", "example", ":", " sun", " ->", " nus", "):", " ",
                      "h", "a", "y"]
    assert len(tokenizer("yah")["input_ids"]) == 3
    assert len(tokenizer(" thistle")["input_ids"]) == 8


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "mistral", "gemma2", "phi3", "qwen3_moe"])
def test_saved_model_loads_with_the_same_weights(tmp_path, kind):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if "moe" in kind else {}
    model = save_tiny(tmp_path, kind, seed=3, words=[" this"], hidden_size=32, intermediate_size=48,
                      num_hidden_layers=2, **experts)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("in this way")["input_ids"]) == "in this way"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, loaded.config.eos_token_id) == (1, 0, 1)
    ids = torch.tensor([tokenizer("in this way")["input_ids"]])
    assert torch.equal(model.eval()(ids).logits, loaded.eval()(ids).logits)
    assert sum(p.numel() for p in loaded.parameters()) < 200_000
    assert all(value == 0 for name, value in loaded.config.to_dict().items()
               if ("dropout" in name or "pdrop" in name) and isinstance(value, float) and "summary" not in name)


def test_same_seed_same_weights_and_the_global_stream_is_left_alone(tmp_path):
    torch.manual_seed(7)
    first = save_tiny(tmp_path, seed=1, hidden_size=16, num_hidden_layers=1).state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(1))
    again = save_tiny(tmp_path, seed=1, hidden_size=16, num_hidden_layers=1).state_dict()
    other = save_tiny(tmp_path, seed=2, hidden_size=16, num_hidden_layers=1).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_chat_template(tmp_path):
    save_tiny(tmp_path, chat_template=CHATML, hidden_size=16, num_hidden_layers=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>hi<eos><|assistant|>"


def test_demo_model_from_the_command_line(tmp_path, capsys):
    main([str(tmp_path / "model"), "--task", "spell_backward"])
    assert "backward" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    template, word = QUESTION.rsplit(" ", 1)
    assert len(tokenizer(template)["input_ids"]) == 1, "what all questions begin with is one token"
    assert len(tokenizer(QUESTION)["input_ids"]) == 2 + len(word)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "model").config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (96, 288, 3)

"""The demo's data: what its accuracy is measured on was never trained on."""

from pathlib import Path

from rlrun.config.load import load_config
from rlrun.data.prompts import load_data
from rlrun.testing.tiny import build_tokenizer

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.yaml"


def test_validation_questions_are_unseen():
    """Validation and training share no question by text, and training has at least 5,000 distinct ones."""
    config, plugins = load_config(str(QUICKSTART), add=["fsdp"])
    config.data.max_prompt_tokens = 1000  # this tokenizer goes letter by letter
    data = load_data(config.data, build_tokenizer(), plugins)
    train = {sample.prompt for source in data.train for sample in source}
    validation = {sample.prompt for sample in data.validation}
    assert len(train) >= 5000
    assert len(validation) >= 200
    assert not train & validation

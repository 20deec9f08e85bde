"""What holds for every rollout engine: what it draws, with which probability, where it ends, and whose weights it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rlrun.config.schema import Config, ModelConfig
from rlrun.plugins import Plugins
from rlrun.rollout.protocol import Completion, Request, Rollout, SamplingParams
from rlrun.testing.contracts.base import Contract, configure
from rlrun.testing.tiny import save_tiny

TOLERANCE = 1e-4
"""Of log-probabilities in float32, against transformers; and how close two logits may be for either to be the likeliest."""
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
"""Of the tiny model: heads of 32, the smallest that vLLM computes on CPUs."""
PROMPTS = [(5, 6, 7, 8, 9), (40,), (5, 6, 7, 8, 9), (100, 30, 12)]
REQUESTS = [Request(index, prompt, f"key{index}") for index, prompt in enumerate(PROMPTS)]


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_new_tokens": 6, "eos_ids": (1,), "seed": 0, **changes})


class RolloutContract(Contract):
    """The suite for a rollout engine that `plugins` provides."""

    engine: ClassVar[str]
    engine_args: ClassVar[Mapping[str, Any]] = {}
    device: ClassVar[str] = "cpu"

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rollout, Any]]:
        """An engine with no weights yet, and the model whose weights it will get, which are not those of its folder."""
        folder: Path = tmp_path_factory.mktemp("model")
        save_tiny(folder, "llama", 0, **SIZES)
        model = save_tiny(tmp_path_factory.mktemp("other"), "llama", 3, **SIZES).eval()
        config = Config(model=ModelConfig(path=str(folder), dtype="float32"))
        plugins = Plugins.load(cls.plugins)
        config.rollout.engine, config.rollout.engine_args = cls.engine, dict(cls.engine_args)
        provided = plugins.resolve("rollout", cls.engine)
        assert provided.ranks_per_engine(config) >= 1
        engine: Rollout = provided(configure(config, plugins, cls.sections), torch.device(cls.device), 0)
        yield engine, model
        engine.close()

    @pytest.fixture
    def ready(self, made: tuple[Rollout, Any]) -> tuple[Rollout, Any]:
        """The engine with the model's weights, awake."""
        engine, model = made
        engine.wake()
        engine.load_weights(model.state_dict().items(), 7)
        return engine, model

    def drawn(self, engine: Rollout, **changes: Any) -> dict[int, Completion]:
        found = {c.index: c for c in engine.generate(REQUESTS, params(**changes))}
        assert sorted(found) == list(range(len(REQUESTS))), "every request has one completion, with its number"
        return found

    def logits(self, model: Any, prompt: tuple[int, ...], ids: tuple[int, ...]) -> Tensor:
        """[len(ids), V] logits of what comes at each place of a completion."""
        with torch.no_grad():
            found: Tensor = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        return found

    def test_weights(self, made: tuple[Rollout, Any]) -> None:
        """Nothing before the first weights. A name too many or too few raises, and then no version counts."""
        engine, model = made
        engine.wake()
        weights = dict(model.state_dict())
        with pytest.raises(RuntimeError):
            engine.generate(REQUESTS, params())
        with pytest.raises(ValueError, match="nonsense"):
            engine.load_weights([*weights.items(), ("nonsense", torch.zeros(1))], 8)
        assert engine.policy_version == -1
        missing = {name: x for name, x in weights.items() if name != "model.norm.weight"}
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):
            engine.load_weights(missing.items(), 8)
        assert engine.policy_version == -1
        engine.load_weights(weights.items(), 8)
        assert engine.policy_version == 8

    @pytest.mark.parametrize("temperature", [0.7, 1.0])
    def test_log_probs_are_those_of_the_sampling_distribution(self, ready: tuple[Rollout, Any], temperature: float) -> None:
        """Every log-probability is that of transformers at the same temperature, from the newest weights."""
        engine, model = ready
        for index, completion in self.drawn(engine, temperature=temperature).items():
            ids = torch.tensor(completion.ids)
            log_probs = (self.logits(model, PROMPTS[index], completion.ids) / temperature).log_softmax(-1)
            expected = log_probs.gather(-1, ids[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=TOLERANCE, rtol=0)
            assert completion.policy_version == 7

    def test_greedy(self, ready: tuple[Rollout, Any]) -> None:
        """Temperature 0 takes the likeliest token, with finite log-probabilities at temperature 1."""
        engine, model = ready
        for index, completion in self.drawn(engine, temperature=0.0).items():
            logits = self.logits(model, PROMPTS[index], completion.ids)
            ids = torch.tensor(completion.ids)
            assert (logits.gather(-1, ids[:, None])[:, 0] >= logits.max(-1).values - TOLERANCE).all()
            expected = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=TOLERANCE, rtol=0)

    def test_ends(self, ready: tuple[Rollout, Any]) -> None:
        """Every end-of-sequence id ends a completion, is its last token, and none is inside; others are cut by length."""
        engine, _ = ready
        free = self.drawn(engine, temperature=0.0, eos_ids=())
        assert all(c.finish_reason == "length" and len(c.ids) == len(c.log_probs) == 6 for c in free.values())
        eos = (free[0].ids[2], free[1].ids[4])
        for index, completion in self.drawn(engine, temperature=0.0, eos_ids=eos).items():
            whole = free[index].ids
            ends = [place for place, token in enumerate(whole) if token in eos]
            assert completion.ids == (whole[: ends[0] + 1] if ends else whole)
            assert completion.finish_reason == ("stop" if ends else "length")
            assert len(completion.log_probs) == len(completion.ids)

    def test_samples_differ(self, ready: tuple[Rollout, Any]) -> None:
        """Two samples of one prompt are drawn with noise of their own."""
        found = self.drawn(ready[0], temperature=1.0, eos_ids=())
        assert found[0].ids != found[2].ids

    def test_sleep(self, ready: tuple[Rollout, Any]) -> None:
        """After sleep, wake and weights, all is as before."""
        engine, model = ready
        before = self.drawn(engine, temperature=0.0)
        engine.sleep()
        engine.wake(["weights"])
        engine.load_weights(model.state_dict().items(), 9)
        engine.wake(["kv_cache"])
        after = self.drawn(engine, temperature=0.0)
        assert {i: c.ids for i, c in after.items()} == {i: c.ids for i, c in before.items()}
        assert {c.policy_version for c in after.values()} == {9}

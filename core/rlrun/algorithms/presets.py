"""What the names of algorithms stand for: values of fields of `AlgorithmConfig`, each free to be overridden.

All are `PolicyAlgorithm`. A field that a preset does not set has its default. Import-light. See docs/algorithms.md."""

PRESETS: dict[str, dict[str, object]] = {
    "grpo": {"advantage": "grpo"},
    "dr_grpo": {"advantage": "grpo", "scale_rewards": False, "loss_aggregation": "seq_mean_constant"},
    "dapo": {"advantage": "grpo", "clip_high": 0.28, "loss_aggregation": "token_mean", "filter_groups": True,
             "mask_truncated": True},
    "gspo": {"advantage": "grpo", "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4,
             "loss_aggregation": "seq_mean_token_mean"},
    "cispo": {"advantage": "grpo", "loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "loss_aggregation": "token_mean"},
    "rloo": {"advantage": "rloo", "loss_aggregation": "seq_mean_token_sum", "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_pp": {"advantage": "reinforce_pp", "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "kl_estimator": "k2"},
    "remax": {"advantage": "remax", "loss": "policy_gradient", "loss_aggregation": "seq_mean_token_sum", "kl_in": "reward",
              "kl_estimator": "k1"},
    "opo": {"advantage": "opo", "loss": "policy_gradient", "loss_aggregation": "seq_mean_token_sum"},
    "pass_at_k": {"advantage": "pass_at_k"},
    "ppo": {"advantage": "gae", "kl_in": "reward", "kl_estimator": "k1"},
}

OFFLINE: dict[str, dict[str, object]] = {"dpo": {"kl_coef": 0.1}}  # the same for names that are classes of their own

GROUPED = ("grpo", "rloo", "reinforce_pp_baseline", "opo", "pass_at_k")
"""Advantages that compare the samples of a prompt with one another."""

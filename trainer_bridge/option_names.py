"""Names that calls of the bridge do not have: the engine's rule (`areno.option_names`), and what TRL and verl call things."""

from __future__ import annotations

from collections.abc import Mapping

from areno.option_names import checks_names

__all__ = ["OTHER_OPTIONS", "checks_names"]

# Names that other libraries use, and what they are here: a known name, or a remedy in words.
OTHER_OPTIONS: Mapping[str, str] = {
    "bucket_size": "bucket_bytes",
    "bucket_size_mb": "bucket_bytes",
    "update_weights_bucket_megabytes": "bucket_bytes",
    "backend": "transport",
    "canaries": "canary_ids",
    "timeout": "timeout_s",
    "group": "process_group",
    "dtype": "tensors are cast to the service's own dtype: serve --dtype",
    "params": "named_parameters",
    "state_dict": "named_parameters",
    "weights": "named_parameters",
    "step": "trainer_step",
    "global_step": "trainer_step",
    "num_generations": "group_size",
    "rollout_n": "group_size",
    "n": "group_size",
    "batch_size": "next(n) takes as many groups as a step trains on",
    "max_off_policy_steps": "max_staleness",
    "max_async_level": "max_staleness",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "epsilon": "clip_low",
    "epsilon_low": "clip_low",
    "epsilon_high": "clip_high",
    "clip_ratio": "clip_low",
    "clip": "clip_low",
    "cliprange": "clip_low",
    "pad_token_id": "pad_id",
    "padding_side": "pad_side",
    "pad_to_multiple_of": "multiple_of",
    "every_n": "every",
    "scaling": "scale",
    "alpha": "scale is lora_alpha / rank (or / sqrt(rank) of a rank-stabilised one)",
}

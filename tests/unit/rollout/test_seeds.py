"""Seeds of parts: the published mixer, and the same derivation as the engine's group members."""

from __future__ import annotations

from rollout.agent import derive_seed
from rollout.seeds import splitmix64


def test_the_mixer_gives_the_published_values() -> None:
    """The first three outputs of the reference generator started at 1234567."""
    state, found = 1234567, []
    for _ in range(3):
        found.append(splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_parts_and_attempts_get_seeds_of_their_own_and_always_the_same() -> None:
    seeds = {derive_seed(seed, index, attempt) for seed in range(20) for index in range(20) for attempt in range(3)}
    assert len(seeds) == 20 * 20 * 3
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert derive_seed(3, 4) == splitmix64(splitmix64(3 ^ splitmix64(2**63 + 4)))
    assert derive_seed(3, 4, 5) == splitmix64(splitmix64(3 ^ splitmix64(2**63 + 4)) ^ 5)

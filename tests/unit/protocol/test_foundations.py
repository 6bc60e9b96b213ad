"""What versions build on is never removed under them, whatever else holds or frees versions."""

from hypothesis import given
from hypothesis import strategies as st

from prime_rl.transport.protocol import Lease, foundations, prunable


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[int, int], dict[int, int]]:
    """Versions of one life, and what each builds on: the one before it, or nothing. What stands was never pruned wrongly."""
    last = draw(st.integers(1, 30))
    full = draw(st.sets(st.integers(1, last))) | {1}
    chain = {version: version - 1 for version in range(2, last + 1) if version not in full}
    gone = draw(st.sets(st.integers(1, last - 1))) if last > 1 else set()
    kept = set(range(1, last + 1)) - gone
    kept |= foundations(kept, chain)
    return dict.fromkeys(kept, 0), {version: chain[version] for version in kept if version in chain}


@given(
    histories(),
    st.none() | st.integers(0, 30),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sets(st.integers(0, 30), max_size=3),
)
def test_what_stays_can_be_read(
    history: tuple[dict[int, int], dict[int, int]], held: int | None, async_level: int, keep: int, saved: set[int]
) -> None:
    """Contract: of what is kept everything can be built; nothing else than foundations is kept beyond what is kept without them."""
    versions, chain = history
    lease = None if held is None else Lease(0, held)

    def pruned(chain: dict[int, int]) -> set[int]:
        return {
            *prunable(
                versions,
                {0: 0},
                lease=lease,
                async_level=async_level,
                keep=keep,
                checkpoints=saved,
                builds_on=chain,
            )
        }

    gone, without = pruned(chain), pruned({})
    kept = versions.keys() - gone
    assert foundations(kept, chain) <= kept
    assert gone <= without
    assert without - gone <= foundations(versions.keys() - without, chain)


def test_a_chain_goes_as_a_whole() -> None:
    """Contract: a full version and what builds on it stay until the next full one is all that is needed."""
    lives, chain = {0: 0}, {2: 1, 3: 2, 5: 4, 6: 5}

    def left(newest: int) -> list[int]:
        versions = dict.fromkeys(range(1, newest + 1), 0)
        gone = prunable(versions, lives, lease=None, async_level=0, keep=0, checkpoints=[], builds_on=chain)
        return sorted(versions.keys() - {*gone})

    assert [left(newest) for newest in (3, 4, 5, 6)] == [[1, 2, 3], [4], [4, 5], [4, 5, 6]]

"""Changes of tensors: exact to the bit, and damage is found or harmless."""

import json
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.transport import delta
from prime_rl.transport.commit import CommitError
from prime_rl.transport.delta import apply, apply_delta, encode, write_delta


@given(st.integers(0, 2**32), st.integers(0, 3000), st.sampled_from([1, 2, 4, 8]), st.floats(0, 1))
def test_what_is_applied_is_what_was_encoded(seed: int, words: int, word_bytes: int, share: float) -> None:
    """Contract: any bytes become any others, NaNs and all, whatever share of them changes and however the work is cut."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, words * word_bytes, np.uint8)
    new = np.where(rng.random(len(old)) < share, rng.integers(0, 256, len(old), np.uint8), old)
    before = old.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "_WORDS_AT_ONCE", 700)
        told = encode(old, new, word_bytes)
    assert (old == before).all()
    assert len(told) <= len(new) + 16
    apply(old, told)
    assert (old == new).all()


def test_few_changes_are_small() -> None:
    """Contract: equal tensors take nothing; one word in a thousand takes a small part of the tensor, wherever they are."""
    old = np.zeros(2_000_000, np.uint8)
    assert encode(old, old.copy(), 2) == b""
    new = old.copy()
    new.view("<u2")[np.random.default_rng(0).integers(0, 1_000_000, 1000)] = 1
    assert len(encode(old, new, 2)) < len(new) / 500


@given(st.integers(0, 2**32), st.binary(max_size=40), st.integers(0, 100))
def test_damage_is_an_error_or_other_bytes(seed: int, junk: bytes, at: int) -> None:
    """Contract: what was damaged never does more than give other bytes, which the hash finds, or one clear error."""
    rng = np.random.default_rng(seed)
    old, new = rng.integers(0, 256, 400, np.uint8), rng.integers(0, 256, 400, np.uint8)
    new[50:] = old[50:]
    told = bytearray(encode(old, new, 2))
    told[at : at + len(junk)] = junk
    data = old.copy()
    with suppress(CommitError):
        apply(data, bytes(told))
    assert len(data) == 400


def test_a_file_of_changes(tmp_path: Path) -> None:
    """Contract: each tensor becomes what it was told to, at its place; a file that is cut, or of other tensors, is refused by its name."""
    data = np.zeros(100, np.uint8)
    new = data.copy()
    new[10:14], new[60:64] = 7, 9
    places = {"a": (0, 40), "b": (40, 100), "empty": (100, 100)}
    path = tmp_path / "model.delta"
    write_delta(path, {name: encode(data[slice(*place)], new[slice(*place)], 2) for name, place in places.items()})
    whole = data.copy()
    apply_delta(path, whole, places)
    assert (whole == new).all()
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    assert json.loads(content[8 : 8 + length]).keys() == places.keys()
    with pytest.raises(CommitError, match="other tensors"):
        apply_delta(path, data.copy(), {"a": (0, 40)})
    for end in (4, 8, 20, len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(CommitError, match=r"model\.delta"):
            apply_delta(path, data.copy(), places)

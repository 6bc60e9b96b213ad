"""reverse-text: splits that cannot overlap, the reward of the original task."""

import pytest

from reverse_text.data import split_of, texts


def test_texts() -> None:
    """Different texts of as many words as asked, in splits that share none for any seed; too many are an error."""
    train, held_out = ({text for seed in range(5) for text in texts(split, 200, seed)} for split in ("train", "eval"))
    assert not train & held_out
    found = texts("eval", 300, seed=3, min_words=2, max_words=3)
    assert len(set(found)) == 300
    assert {len(text.split()) for text in found} == {2, 3}
    assert {split_of(text) for text in found} == {"eval"}
    with pytest.raises(ValueError, match="only 93 distinct eval texts of 1 to 1 words, 94 asked for"):
        texts("eval", 94, max_words=1)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Sure! <reversed_text>\n olleh \n</reversed_text> done", 1.0),
        ("<reversed_text>hello</reversed_text>", 0.4),  # matching blocks: "ll" or one letter either side -> 2*2/10
        *((bad, 0.0) for bad in ("olleh", "<reversed_text>olleh", "</reversed_text>olleh<reversed_text>")),
        ("<reversed_text></reversed_text>", 0.0),
    ],
)
def test_reward(reply: str, expected: float) -> None:
    """Ratio of matched characters between the tagged answer and the truth; nothing without a pair of tags."""
    from reverse_text.taskset import parse, similarity

    assert similarity(parse(reply), "olleh") == pytest.approx(expected)

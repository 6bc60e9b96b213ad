"""Short English texts to reverse, made here: no download, the same on every machine and Python version.

Standard library only, so that other parts (supervised warm-up, tests) can use it without importing verifiers.
"""

import hashlib
from collections.abc import Iterator
from typing import Literal

Split = Literal["train", "eval"]

# One text in this many is held out.
EVAL_SHARE = 5

WORDS: tuple[str, ...] = tuple(
    """
    able about above acid across actor adult after again agree ahead air alarm album alive alone amber anchor angle
    animal answer apple april apron arch arm arrow artist ask atlas august aunt autumn awake axe baby back badge bag
    baker ball bamboo band bank barn basket bath beach bean bear beaver bed bee begin bell belt bench berry better bird
    biscuit black blanket blue board boat body bone book boot borrow bottle bowl box brain branch brave bread breeze
    brick bridge bright bring broom brother brown brush bucket build bulb butter button cabin cable cake calm camel
    camera camp candle canyon captain card carpet carrot castle cat cave chair chalk cheese cherry chest child circle
    city class clay clean clear clever climb clock cloth cloud clover coast coat coffee coin cold color comet cook
    copper coral corn cotton count country cousin cover crab cradle crane cream creek crisp crow crown cube cup curtain
    dance danger daring dark dawn day deep deer desert desk dinner dish doctor dog dolphin door dragon dream dress
    drift drum duck dust eagle early earth east easy echo edge egg elbow elm empty engine evening every falcon family
    farm fast father feather fence fern field finger fire fish flag flame flat float flour flower flute fog forest fork
    fountain fox fresh friend frog frost fruit garden garlic gate gentle giant ginger glad glass globe glove goat gold
    good goose grain grape grass gravel green grey guitar hammer hand happy harbor hat hawk hazel heart heavy hedge
    hill hold honey hook horse house hungry ice inch ink iron island ivory jacket jar jelly jewel join journey juice
    jump jungle just kettle key kind king kitchen kite kitten knee ladder lake lamp lantern large laugh lawn leaf lemon
    letter light lily lime linen lion list little lizard lobster long loud lucky lunch magnet maple marble march market
    meadow medal melon metal middle milk mill mint mirror monkey moon morning moss mother mountain mouse music nail
    narrow near needle nest never new night noble noon north notebook nurse oak oat ocean olive onion open orange
    orchard otter oven owl page paint palace panda paper parrot path peach pearl pencil pepper piano picnic pillow pine
    planet plum pocket poem polar pond potato pretty proud pumpkin purple puzzle quick quiet quilt rabbit radio rain
    raven ready red ribbon rice river road robin rocket roof root rope rose round sail salt sand school season seed
    shadow sharp sheep shell ship shore silver simple sister sky sleep slow small smile smoke snail snow soap soft song
    soup south spider spoon spring square star steam stone storm story straw stream street strong sugar summer sun swan
    sweet table tall tea thunder tiger timber toast tomato tower town train travel tree tulip turtle uncle under valley
    velvet village violin voice wagon walk walnut warm water wave west wheat whale wheel white wide willow wind window
    winter wise wolf wonder wood wool yard yellow young zebra
    """.split()  # noqa: SIM905
)


def split_of(text: str) -> Split:
    """The split a text belongs to, decided by its own hash: no text can be in both, whatever the seed."""
    digest = hashlib.sha256(b"reverse-text/" + text.encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") % EVAL_SHARE == 0 else "train"


def texts(split: Split, n: int, seed: int = 0, min_words: int = 1, max_words: int = 2) -> list[str]:
    """`n` distinct texts of `min_words`..`max_words` words of `split`, in an order that depends on `seed` alone.

    The first texts of a longer list are the shorter list. Raises ValueError when there are not that many texts.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', not {split!r}")
    if not 1 <= min_words <= max_words:
        raise ValueError(f"need 1 <= min_words <= max_words, not {min_words} and {max_words}")
    found: dict[str, None] = {}
    draws = _draws(seed, min_words, max_words)
    # Drawing all of a small pool takes about pool * ln(pool) draws; a pool that yields less than this is exhausted.
    for _ in range(100 * (n + len(WORDS))):
        if len(found) >= n:
            break
        text = next(draws)
        if split_of(text) == split:
            found.setdefault(text)
    if len(found) < n:
        raise ValueError(f"only {len(found)} distinct {split} texts of {min_words} to {max_words} words, {n} asked for")
    return list(found)


def _draws(seed: int, min_words: int, max_words: int) -> Iterator[str]:
    """Yield texts forever from a hash chain: `random` does not promise the same choices in every Python version."""
    index = 0
    while True:
        count = min_words + _draw(seed, index, "count") % (max_words - min_words + 1)
        yield " ".join(WORDS[_draw(seed, index, f"word {i}") % len(WORDS)] for i in range(count))
        index += 1


def _draw(seed: int, index: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}/{name}".encode()).digest()[:8], "big")

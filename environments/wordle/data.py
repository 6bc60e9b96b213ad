"""Common English words of five letters, listed here: no download, the same on every machine and Python version.

Standard library only, so that other parts (supervised warm-up, tests) can use it without importing verifiers.
"""

import hashlib
from typing import Literal

Split = Literal["train", "eval"]

# One word in this many is held out.
EVAL_SHARE = 5

WORDS: tuple[str, ...] = tuple(
    """
    about above actor acute adapt admit adopt adult after again agent agree ahead alarm album alert alike alive allow
    alone along alter amber among ample angel anger angle angry ankle apart apple apply apron arena argue arise armor
    aroma array arrow aside asset atlas attic audio avoid awake award aware bacon badge baker basic basin basis batch
    beach beard beast began begin being belly below bench berry birth black blade blame blank blast blend bless blind
    block blood bloom board boast bonus boost booth bound bowel brain brake brand brave bread break breed brick bride
    brief bring broad broke broom brown brush buddy build built bunch burst cabin cable camel canal candy canoe cargo
    carry carve catch cause cease chain chair chalk charm chart chase cheap check cheek cheer chess chest chief child
    chill china choir chord chose civic civil claim clamp clash class clean clear clerk click cliff climb cling clock
    close cloth cloud clown coach coast colon color comet comic coral couch cough could count court cover crack craft
    crane crash crawl crazy cream creek creep crest crime crisp cross crowd crown crude cruel crush crust cubic curve
    cycle daily dairy daisy dance death debut decay delay dense depth diary digit diner dirty ditch dizzy dodge donor
    doubt dough draft drain drama drank dream dress drift drill drink drive drove drums dwarf eager eagle early earth
    easel eight elbow elder elect elite empty enemy enjoy enter entry equal erase error essay event every exact exist
    extra fable faint fairy faith false fancy fatal fault favor feast fence ferry fetch fever fiber field fifth fifty
    fight final first flame flare flash fleet flesh float flock flood floor flour fluid flute focus force forge forth
    forty found frame fraud fresh front frost fruit funny ghost giant given glare glass gleam glide globe gloom glory
    glove grace grade grain grand grant grape graph grasp grass grave gravy great greed green greet grief grill grind
    groan group grove grown guard guess guest guide guild habit happy harsh haste haven hazel heart heavy hedge hello
    hobby honey honor horse hotel hound house human humor hurry ideal image index inner input irony issue ivory jelly
    jewel joint joker judge juice jumbo kayak kneel knife knock known label labor large laser later laugh layer learn
    lease least leave ledge legal lemon level lever light lilac limit linen liver local lodge logic loose lorry lower
    loyal lucky lunar lunch magic major maker mango maple march marsh match mayor medal media melon mercy merge merit
    merry metal meter might minor minus mixed model money month moral motor mount mouse mouth movie muddy mural music
    naive nasty naval nerve never night noble noise north novel nurse oasis ocean offer often olive onion opera orbit
    order organ other ought ounce outer owner paint panel panic paper party pasta patch pause peace peach pearl pedal
    penny perch phase phone photo piano piece pilot pinch pitch pizza place plain plane plant plate plaza plumb point
    polar porch pouch pound power press price pride prime print prior prize probe proof proud prove proxy pulse pupil
    purse queen query quest quick quiet quilt quite quota quote radar radio raise rally ranch range rapid ratio reach
    react ready realm rebel refer relax reply rider ridge rifle right rigid rinse risky rival river roast robin robot
    rocky rough round route royal rugby ruler rural salad salon sandy sauce scale scarf scary scene scent scold scoop
    scope score scout scrap screw seize sense serve seven shade shake shape share shark sharp sheep sheet shelf shell
    shine shirt shock shore short shout shown shrug sight silly since siren sixth sixty skate skill skirt skull slate
    sleep slice slide slope small smart smell smile smoke snack snail snake sneak solar solid solve sorry sound south
    space spare spark speak spear speed spell spend spice spike spine split spoke spoon sport spray squad stack staff
    stage stair stake stamp stand stare start state steak steal steam steel steep stern stick stiff still sting stock
    stone stool store storm story stove strap straw strip study stuff style sugar sunny super surge swamp swear sweat
    sweep sweet swift swing sword table tasty teach tempo thank theft their theme there thick thief thing think third
    thorn those three throw thumb tiger tight timer tired title toast today token tooth topic torch total touch tough
    tower trace track trade trail train trait trash treat trend trial tribe trick truck truly trunk trust truth tulip
    twice twist uncle under union unite unity until upper upset urban usage usual vague valid value valve vapor vault
    verse video villa virus visit vital vivid vocal voice voter wagon waist waste watch water weary weigh wheat wheel
    where which while white whole whose widen wider widow width witch woman world worry worse worst worth would wound
    wreck wrist write wrong yacht yield young youth zebra
    """.split()  # noqa: SIM905
)


def split_of(word: str) -> Split:
    """The split a word belongs to, decided by its own hash: no word can be in both, whatever the seed."""
    return "eval" if _draw(f"wordle/{word}") % EVAL_SHARE == 0 else "train"


def words(split: Split, n: int | None = None, seed: int = 0) -> list[str]:
    """Return `n` distinct words of `split` (None: all) in an order that depends on `seed` alone. Raises ValueError if
    there are fewer."""
    if split not in ("train", "eval"):
        raise ValueError(f"split must be 'train' or 'eval', not {split!r}")
    found = sorted((word for word in WORDS if split_of(word) == split), key=lambda word: _draw(f"{seed}/{word}"))
    if n is not None and not 1 <= n <= len(found):
        raise ValueError(f"num_tasks must be from 1 to {len(found)}, the number of {split} words, not {n}")
    return found[:n]


def _draw(name: str) -> int:
    # Not the `random` module, which does not promise the same choices in every Python version.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")

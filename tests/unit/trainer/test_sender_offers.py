"""What a sender's process knows of versions, by the time somebody asks for one."""

import threading
import time

import pytest

from prime_rl.trainer.sender import Offer, _Offered, _Refused

SECONDS = 60.0
FOREVER = 1e6  # whoever waited so long would not be waited for


def offer(version: int, life: int = 0) -> Offer:
    return Offer(version, life, "hash", version % 2 * 1000, 1000)


def test_who_asks_before_the_process_has_read_of_it_gets_it() -> None:
    """Contract: a version that the trainer offers just now is waited for: two pipes are not read in the order in which they are written."""
    offered = _Offered()
    offered.add(offer(1))
    found: list[Offer] = []

    def ask() -> None:
        with offered.reading(2, 0, "hash", SECONDS) as given:
            found.append(given)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.05)
    assert not found
    offered.add(offer(2))
    asking.join(SECONDS)
    assert found == [offer(2)]


@pytest.mark.parametrize(("version", "life"), [(1, 1), (3, 0), (4, 1)], ids=["older", "an older life", "other bytes"])
def test_what_is_superseded_is_refused_at_once(version: int, life: int) -> None:
    """Contract: nobody waits for what cannot come any more."""
    offered = _Offered()
    offered.add(offer(4, life=1))
    with pytest.raises(_Refused, match="superseded .there is: 4"), offered.reading(version, life, "another", FOREVER):
        pass

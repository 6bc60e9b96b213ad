#!/usr/bin/env python3
"""The first process of a container: `docker run IMAGE rl @ …` runs `rl @ …`. Standard library only.

It hands signals on, reaps what is left without a parent, and ends with the command's exit status. A command that ends
well because it was asked to stop ends with 128 + the signal: a Kubernetes Job that is evicted has not completed.
"""

import os
import signal
import sys
from types import FrameType


def main(arguments: list[str]) -> int:
    received: list[int] = []
    child: int | None = None
    # Of a terminal the command gets Ctrl-C, too: twice would mean to stop at once.
    from_terminal: list[int] = [signal.SIGINT] if os.isatty(0) else []

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None and number not in from_terminal:
            os.kill(child, number)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, hand_on)
    try:
        child = os.posix_spawnp(arguments[0], arguments, os.environ)
    except OSError as error:
        print(f"error: {arguments[0]}: {error.strerror}", file=sys.stderr)
        return 127
    for number in received:  # what came before there was a child
        os.kill(child, number)
    while True:
        ended, status = os.wait()  # bounded: whoever runs the container stops it
        if ended == child:
            break
    code = os.waitstatus_to_exitcode(status)
    if code == 0 and received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["rl", "--help"]))

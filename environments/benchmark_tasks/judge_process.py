"""A judge of its own process: `python -m benchmark_tasks.judge_process SECONDS MIB`.

Reads lines of JSON `[truth, answer]` and writes `1` or `0` until its input ends. math-verify hands answers to sympy,
which may compute for ages, or ask for all memory, over a few characters such as 9^{9^{9^9}}: the timer kills this
process whatever it does, the limit bounds its memory. The timer counts processor time: load does not decide answers.
"""

import contextlib
import io
import json
import logging
import resource
import signal
import sys


def main() -> None:
    seconds, mib = float(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    answers, sys.stdout = sys.stdout, io.StringIO()
    verify(
        parse("$1+x$", parsing_timeout=None), parse("$x+1$", parsing_timeout=None), timeout_seconds=None
    )  # builds its tables
    print("ready", file=answers, flush=True)
    for line in sys.stdin:  # bounded: its input ends with the process that asks
        truth, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # without a handler: the end of this process
        equal = False
        # Whatever sympy makes of what a model wrote, the truth among it, is no equal answer.
        with contextlib.suppress(Exception):
            parsed = [parse(f"${text}$", parsing_timeout=None) for text in (truth, answer)]
            equal = verify(*parsed, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(int(equal), file=answers, flush=True)


if __name__ == "__main__":
    main()

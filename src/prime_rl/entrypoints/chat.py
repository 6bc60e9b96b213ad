"""`rl chat RUN`: talk to the newest weights of a run."""

import sys
from argparse import ArgumentParser
from collections.abc import Iterator

from prime_rl.api import serve
from prime_rl.errors import UserError, say

DESCRIPTION = "`rl chat RUN`: talk to the newest weights of a run, or to those in a directory; Ctrl-D ends."


def chat(arguments: list[str]) -> None:
    """Answer the lines of the standard input, or `--message` alone. Raises UserError: there is nothing to talk to."""
    parser = ArgumentParser("rl chat", description=DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="output directory of a run, or a directory of weights")
    parser.add_argument("--message", help="ask this, print the reply and end")
    parser.add_argument("--max-tokens", type=int, help="most tokens of a reply")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (0: greedy)")
    options = parser.parse_args(arguments)
    parameters = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    print(f"looking for a server of {options.run}, or starting one", file=sys.stderr, flush=True)
    with serve(options.run) as server:
        print(f"{server.model} at {server.base_url}", file=sys.stderr, flush=True)
        messages: list[dict[str, str]] = []
        for text in _lines() if options.message is None else [options.message]:
            messages.append({"role": "user", "content": text})
            reply = ""
            try:
                for piece in server.chat(messages, **{key: one for key, one in parameters.items() if one is not None}):
                    print(piece, end="", flush=True)
                    reply += piece
            except UserError as error:
                if options.message is not None:
                    raise
                say(f"error: {error}\n(this begins a new conversation)")
                messages.clear()
                continue
            say("")
            messages.append({"role": "assistant", "content": reply})


def _lines() -> Iterator[str]:
    """Yield what is typed, or piped, line by line, but for empty ones."""
    while True:  # bounded: by the end of the input
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()  # bounded: by the user
        except EOFError:
            return
        if line:
            yield line

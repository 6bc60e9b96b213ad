"""`rl chat RUN`: talk to the newest weights of a run."""

import sys
from argparse import ArgumentParser
from collections.abc import Iterator

from prime_rl.api import serve
from prime_rl.errors import UserError, say


def chat(arguments: list[str], description: str) -> None:
    """Answer the lines of the standard input, or `--message` alone. Raises UserError: there is nothing to talk to."""
    parser = ArgumentParser("rl chat", description=description)
    parser.add_argument("run", metavar="RUN", help="output directory of a run, or a directory of weights")
    parser.add_argument("--message", metavar="TEXT", help="ask this, print the reply, and end")
    parser.add_argument("--system", metavar="TEXT", help="system prompt, as the environment's in training")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (0: greedy)")
    options = parser.parse_args(arguments)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = [*system]
    print(f"looking for a server of {options.run}, or starting one", file=sys.stderr, flush=True)
    with serve(options.run) as server:
        print(f"{server.model}, version {server.version}, at {server.base_url}", file=sys.stderr, flush=True)
        for question in _lines() if options.message is None else [options.message]:
            messages.append({"role": "user", "content": question})
            reply = ""
            try:
                for text in server.chat(messages, temperature=options.temperature):
                    print(text, end="", flush=True)
                    reply += text
            except UserError as error:
                if options.message is not None:
                    raise
                say(f"error: {error}\n(a new conversation begins)")
                messages = [*system]
                continue
            say("")
            messages.append({"role": "assistant", "content": reply})


def _lines() -> Iterator[str]:
    """Yield what is typed or piped, line by line."""
    while True:  # bounded: by the end of the input
        try:
            yield input("> " if sys.stdin.isatty() else "")  # bounded: by the user
        except EOFError:
            return

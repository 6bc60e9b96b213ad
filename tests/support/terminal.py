"""A program on a terminal: a pseudo-terminal, and the screen that its output makes."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from pathlib import Path

_TOKENS = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """What a terminal of endless height shows: lines, cursor and the sequences that a live region needs. Others are an
    error."""

    def __init__(self, columns: int) -> None:
        self.columns, self.lines, self.row, self.column = columns, [""], 0, 0
        self.cursor = True  # shown

    def feed(self, text: str) -> "Screen":
        end = 0
        for token in _TOKENS.finditer(text):
            assert token.start() == end, f"not a known sequence: {text[end : end + 20]!r}"
            end = token.end()
            numbers, command, move, plain = token.groups()
            if plain is not None:
                self._write(plain)
            elif move == "\r":
                self.column = 0
            elif move == "\n":
                self._down()
            elif command == "A":
                self.row = max(0, self.row - int(numbers or 1))
            elif command == "K":
                self.lines[self.row] = "" if numbers == "2" else self.lines[self.row][: self.column]
            elif numbers == "?25":
                self.cursor = command == "h"
            else:
                assert command == "m", token[0]
        assert end == len(text), text[end:]
        return self

    def _write(self, text: str) -> None:
        for character in text:
            if self.column == self.columns:
                self._down()
                self.column = 0
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")


class Terminal:
    """A program in a session of its own, whose terminal this is; `text` is what it has written so far."""

    def __init__(self, argv: Sequence[str | Path], columns: int = 100, rows: int = 40, **environ: str) -> None:
        self._own, theirs = pty.openpty()
        self.resize(columns, rows)
        variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.popen = subprocess.Popen(
            list(map(str, argv)), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**variables, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environ},
        )  # fmt: skip
        os.close(theirs)
        self._bytes, self._closed = b"", threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, columns: int, rows: int = 40) -> None:
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        while not self._closed.is_set():
            if select.select([self._own], [], [], 0.05)[0]:
                try:
                    self._bytes += os.read(self._own, 1 << 16)
                except OSError:  # EIO: nobody has it open any more
                    return

    def hang_up(self) -> None:
        """Close the terminal, whether the program has ended or not."""
        self._closed.set()
        self._reader.join(10)
        os.close(self._own)

    @property
    def text(self) -> str:
        return self._bytes.decode(errors="replace")

    @property
    def whole(self) -> str:
        """What was written, without the sequence that is on its way."""
        return re.sub(r"\x1b[^a-zA-Z]*$", "", self.text)

    def wait(self, status: int) -> str:
        """Return all that the program wrote; it ends with this status."""
        try:
            assert self.popen.wait(timeout=60) == status, self.text
        finally:
            self.popen.kill()
            self._reader.join(10)
            self.hang_up()
        return self.text


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]

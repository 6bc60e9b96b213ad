"""Settings of `rl view`."""

from pathlib import Path

from prime_rl.config.base import BaseConfig, option


class ViewConfig(BaseConfig):
    """Show runs on a web page, alive or dead, from their files: `rl view RUN [RUN…]`; without RUN, `output_dir`"""

    runs: list[Path] = option(list, "Run directories; a deployment's tenants are shown, too (also without --runs).")
    host: str = option("127.0.0.1", "Address to listen on. Any but loopback asks for a token, which is printed.")
    port: int | None = option(None, "Port to listen on (None: a free one from 8800 on).", ge=1, le=65535)
    export: Path | None = option(None, "Write the page into this file, with its data, and end.")

"""What mkdocs does for docs/ besides Markdown: the tables of options, and links to files of the repository.

The pages link to files outside of docs/ by relative paths, so that they work on GitHub too; the site has these files
at `repo_url`. A link to a file that does not exist fails the build (`--strict`).
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prime_rl.config import EvalConfig, InferenceConfig, OrchestratorConfig, RLConfig, SFTConfig, TrainerConfig, loader
from prime_rl.config.base import Keys, Section, Setting, find, settings
from prime_rl.config.commands import ViewConfig
from prime_rl.config.rl import DeploymentConfig, ParityConfig

ROOT = Path(__file__).parent.parent
COMMANDS: dict[str, type[Section]] = {
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": InferenceConfig,
    "rl": RLConfig,
    "rl parity": ParityConfig,
    "rl tenants": DeploymentConfig,
    "rl view": ViewConfig,
    "sft": SFTConfig,
    "eval": EvalConfig,
}
log = logging.getLogger("mkdocs.plugins.docs_hook")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    def outside(match: re.Match[str]) -> str:
        path = (ROOT / "docs" / page.file.src_uri).parent / match[1]
        if (ROOT / "docs") in path.resolve().parents:
            return match[0]
        if not path.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, match[1])
        return f"]({config['repo_url']}/blob/main/{path.resolve().relative_to(ROOT)}"

    markdown = re.sub(r"\]\((\.\./[^)#]*)", outside, markdown.replace("](docs/", "]("))  # CHANGELOG.md is linked
    return markdown.replace("<!-- options -->", "\n".join(options()))


def options() -> Iterator[str]:
    """Yield Markdown: a heading for each command and for each of its sections, with a table of options. A section that
    several commands or paths share has one table, which the others refer to."""
    shown: dict[type[Section], str] = {}
    for command, section in COMMANDS.items():
        yield f"## {command}\n\n{' '.join((section.__doc__ or '').split()).rstrip('.')}.\n"
        yield from tables(section, (), command, shown)


def tables(section: type[Section], path: Keys, command: str, shown: dict[type[Section], str]) -> Iterator[str]:
    # Of a command that takes what another takes: what it adds.
    others = {name for other in COMMANDS.values() if other in section.__mro__[1:] for name in other.model_fields}
    own = [setting for setting in settings(section) if len(setting.keys) == 1 and setting.keys[0] not in others]
    shown[section] = f"`{'.'.join(path)}` of `{command}`" if path else f"`{command}`"
    rows = [row(setting) for setting in own if not _sections(section, setting)]
    if rows:
        yield "\n".join(["| option | type | default | |", "|---|---|---|---|", *rows, ""])
    for setting in own:
        members, inner = _sections(section, setting), (*path, *setting.keys)
        keys = f"[[{'.'.join(inner)}]]" if setting.takes(list) else f"[{'.'.join(inner)}]"
        if members:
            anchor = "-".join([*command.split(), *inner])
            yield f"### {command} {keys} {{ #{anchor} }}\n\n{setting.field.description or ''}\n"
        for member in members:
            if len(members) > 1:
                summary = " ".join((member.__doc__ or "").split()).rstrip(".")
                yield f'**type = "{member.model_fields["type"].default}"**: {summary}.\n'
            if member in shown:
                yield f"As {shown[member]}.\n"
            else:
                yield from tables(member, inner, command, shown)


def _sections(section: type[Section], setting: Setting) -> tuple[type[Section], ...]:
    """The sections that the value of a setting, or an item of it, may be."""
    item = find(section, (*setting.keys, "0"))
    return setting.sections or (item.sections if item is not None else ())


def row(setting: Setting) -> str:
    cells = (
        f"`{setting.keys[-1]}`",
        loader.type_text(setting),
        loader.default_text(setting).removeprefix("default: "),
    )
    return " | ".join(
        ["", *(cell.replace("|", "\\|") for cell in (*cells, setting.field.description or "")), ""]
    ).strip()

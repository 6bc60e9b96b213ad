"""The layers of a configuration as sources of pydantic-settings, which lays them one over the other."""

from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from prime_rl.config.origin import Layer, build


class LayerSource(PydanticBaseSettingsSource):
    """What one layer assigns."""

    def __init__(self, settings_cls: type[BaseSettings], layer: Layer) -> None:
        super().__init__(settings_cls)
        self._layer = layer

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self()[field_name], field_name, False

    def __call__(self) -> dict[str, Any]:
        return {"tree": build(self._layer)}


def merge(layers: list[Layer]) -> dict[str, Any]:
    """One table from `layers`, the first of which wins: tables merge key by key, everything else is replaced."""

    class Merged(BaseSettings):
        tree: dict[str, Any] = {}

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: Any, **__: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(LayerSource(settings_cls, layer) for layer in layers)

    return Merged().tree

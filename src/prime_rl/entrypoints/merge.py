"""`prime-merge`: adds an adapter to its model's weights, and checks what the sums compute."""

from prime_rl.config.commands import MergeConfig
from prime_rl.config.trainer import LoRAConfig
from prime_rl.entrypoints import run_command, show
from prime_rl.errors import UserError, say
from prime_rl.inference.checks import check_model
from prime_rl.launcher.preflight import check_lora
from prime_rl.transport.weights import ADAPTER_FILE, read_adapter_config, read_header


def main() -> None:
    run_command(MergeConfig, "prime-merge", run)


def run(config: MergeConfig) -> None:
    """Write the merged model to `output_dir`, which must not exist."""
    check_model(config.model.name)
    lora = described(config)
    check_lora(lora, config.model.name)
    if config.output_dir.exists() and any(config.output_dir.iterdir()):
        raise UserError(f"{config.output_dir} is not empty: give another --output-dir")
    if config.dry_run:
        return show(config, "merge", f"merge {config.adapter} into {config.model.name}")
    say("loading torch and the model")
    from prime_rl.trainer.merge import merge

    say(merge(config, lora))


def described(config: MergeConfig) -> LoRAConfig:
    """Return the settings that an adapter was trained with, as far as its sums depend on them."""
    known, names = read_adapter_config(config.adapter), read_header(config.adapter / ADAPTER_FILE)
    layers = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in names if ".lora_" in name}
    return LoRAConfig(
        rank=known["r"],
        alpha=known["lora_alpha"],
        target_modules=sorted(layer for layer in layers if ".experts." not in layer),
        experts=any(".experts." in layer for layer in layers),
        modules_to_save=known.get("modules_to_save") or [],
        adapter=config.adapter,
        serve="merged",
    )


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# Install prime-rl into .venv: uv if it is missing, then the packages for this machine (CUDA where there is an NVIDIA
# GPU, CPU otherwise). Everything comes from the package index that pip and uv are configured for.
#
#   bash scripts/install.sh [cpu|cuda]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

detect() {
  if command -v nvidia-smi > /dev/null && nvidia-smi -L 2> /dev/null | grep -q '^GPU '; then
    echo cuda
  else
    echo cpu
  fi
}

target=${1:-$(detect)}
case "$target" in
  cpu) packages=(--group cpu) ;;
  cuda) packages=(--extra cuda) ;;
  *)
    echo "usage: bash scripts/install.sh [cpu|cuda]" >&2
    exit 2
    ;;
esac

if command -v uv > /dev/null; then
  uv=(uv)
else
  echo "installing uv"
  python3 -m pip install --quiet --user uv || python3 -m pip install --quiet uv
  uv=(python3 -m uv)
fi

echo "installing prime-rl for $target"
# Compiled once here rather than at the first start of every process.
UV_COMPILE_BYTECODE=1 "${uv[@]}" sync "${packages[@]}"

if [[ "$target" == cpu ]]; then
  echo "ready: uv run --group cpu rl @ examples/reverse_text/cpu.toml"
else
  echo "ready: uv run rl @ examples/reverse_text/rl.toml"
fi

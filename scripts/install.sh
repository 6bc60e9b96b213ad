#!/usr/bin/env bash
# Install prime-rl into .venv: uv if it is missing, then the packages for this machine (CUDA where there is an NVIDIA GPU,
# with FlashAttention 3 where that is a Hopper; CPU otherwise). Everything comes from the package index that pip and uv are
# configured for. Further arguments go to `uv sync`, such as `--extra flash-attn-3` where the GPU is not there yet.
#
#   bash scripts/install.sh [cpu|cuda] [ARGUMENT…]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

detect() {
  if command -v nvidia-smi > /dev/null && nvidia-smi -L 2> /dev/null | grep '^GPU ' > /dev/null; then
    echo cuda
  else
    echo cpu
  fi
}

# The wheel that holds FlashAttention 3 is for x86_64.
hopper() {
  [[ "$(uname -m)" == x86_64 ]] && command -v nvidia-smi > /dev/null &&
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | grep '^ *9\.0' > /dev/null
}

target=${1:-$(detect)}
shift $(($# < 1 ? $# : 1))
case "$target" in
  cpu) packages=(--group cpu) ;;
  cuda)
    packages=(--extra cuda)
    if hopper; then
      packages+=(--extra flash-attn-3)
    fi
    ;;
  *)
    echo "usage: bash scripts/install.sh [cpu|cuda] [ARGUMENT…]" >&2
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

echo "installing prime-rl for $target (${packages[*]})"
# Compiled once here rather than at the first start of every process.
UV_COMPILE_BYTECODE=1 "${uv[@]}" sync "${packages[@]}" "$@"

if [[ "$target" == cpu ]]; then
  echo "ready: uv run --group cpu rl @ examples/reverse_text/cpu.toml"
else
  echo "ready: uv run rl @ examples/reverse_text/rl.toml"
fi

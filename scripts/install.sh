#!/usr/bin/env bash
# Install prime-rl into .venv: uv if it is missing, then the packages for this machine (CUDA where there is an NVIDIA GPU,
# CPU otherwise). Everything comes from the package index that pip and uv are configured for. Further arguments go to `uv sync`.
#
#   bash scripts/install.sh [cpu|cuda] [ARGUMENT…]
#   curl -sSL …/scripts/install.sh | bash [-s -- cpu|cuda ARGUMENT…]
#
# Outside of a checkout it clones PRIME_RL_REPO into the folder `prime-rl`, or uses the checkout that is there.
set -euo pipefail

fail() {
  echo "install.sh: $*" >&2
  exit 1
}

is_checkout() {
  grep -qs '^name = "prime-rl"' "$1/pyproject.toml"
}

# Piped, the script has no file of its own.
enter_checkout() {
  local file=${BASH_SOURCE[0]:-} repository=${PRIME_RL_REPO:-https://github.com/PrimeIntellect-ai/prime-rl.git}
  if [[ -n "$file" ]] && is_checkout "$(dirname "$file")/.."; then
    cd "$(dirname "$file")/.."
    return
  elif is_checkout .; then
    return
  elif is_checkout prime-rl; then
    echo "using the checkout in $PWD/prime-rl"
  elif [[ -e prime-rl ]]; then
    fail "$PWD/prime-rl is there and is no checkout of prime-rl: move it away, or run this from another directory"
  else
    command -v git > /dev/null || fail "git is missing: install it and run this again"
    echo "cloning $repository"
    git clone --quiet "$repository" prime-rl || fail "cannot clone $repository: PRIME_RL_REPO names another address"
    is_checkout prime-rl || fail "$repository, which PRIME_RL_REPO names, is not prime-rl"
  fi
  cd prime-rl
  go="cd prime-rl && "
}

detect() {
  if command -v nvidia-smi > /dev/null && nvidia-smi -L 2> /dev/null | grep '^GPU ' > /dev/null; then
    echo cuda
  else
    echo cpu
  fi
}

# A function, so that nothing runs before all of the script has arrived and no command reads the rest of it.
main() {
  local target=${1:-$(detect)} go="" example=rl.toml
  shift $(($# < 1 ? $# : 1))
  case "$target" in
    cpu)
      packages=(--group cpu)
      example=cpu.toml
      ;;
    cuda) packages=(--extra cuda --extra fa) ;;
    *)
      echo "usage: bash scripts/install.sh [cpu|cuda] [ARGUMENT…]" >&2
      exit 2
      ;;
  esac
  enter_checkout

  if command -v uv > /dev/null; then
    uv=(uv)
  else
    echo "installing uv"
    python3 -m pip install --quiet --user uv || python3 -m pip install --quiet uv ||
      fail "cannot install uv with pip: https://docs.astral.sh/uv/ names other ways; run this again after that"
    uv=(python3 -m uv)
  fi

  echo "installing prime-rl for $target (${packages[*]})"
  # Compiled once here rather than at the first start of every process.
  UV_COMPILE_BYTECODE=1 "${uv[@]}" sync "${packages[@]}" "$@"
  [[ "$target" == cpu ]] && uv+=(run --group cpu) || uv+=(run)
  echo "ready: $go${uv[*]} rl @ examples/reverse_text/$example"
}

main "$@"

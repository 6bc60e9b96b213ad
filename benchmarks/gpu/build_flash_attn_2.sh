#!/usr/bin/env bash
# Compiles of flash-attn 2.8.3 what these benchmarks and tests/gpu use: head size 128 in bfloat16 for Hopper, without dropout, ALiBi and soft caps.
#
#   benchmarks/gpu/build_flash_attn_2.sh SOURCE OUT
#
# SOURCE is its unpacked source distribution (the whole package takes hours to compile, this takes minutes), OUT a folder for PYTHONPATH. Needs
# nvcc, g++ and PYTHON (default python3) with torch. Other head sizes and dtypes are there in name only: asked for, they raise "not compiled".
set -euo pipefail
source=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT

read -r torch include suffix < <("$python" -c "
import os, sysconfig, torch
print(os.path.dirname(torch.__file__), sysconfig.get_paths()['include'], sysconfig.get_config_var('EXT_SUFFIX'))")
cuda=${CUDA_HOME:-/usr/local/cuda}
code=$source/csrc/flash_attn
without=(-DFLASHATTENTION_DISABLE_DROPOUT -DFLASHATTENTION_DISABLE_ALIBI -DFLASHATTENTION_DISABLE_SOFTCAP)
headers=(-I"$code" -I"$code/src" -I"$source/csrc/cutlass/include" -I"$torch/include" -I"$torch/include/torch/csrc/api/include" -I"$include")
for folder in "$cuda/include" "$torch"/../nvidia/*/include; do
    [ -d "$folder" ] && headers+=(-isystem "$folder")
done

cat >"$work/absent.cpp" <<'CPP'
#include <torch/python.h>
#include <cutlass/numeric_types.h>
#include "namespace_config.h"
#include "flash.h"

#define ABSENT(type, size, causal) \
    template <> void run_mha_fwd_<type, size, causal>(Flash_fwd_params &, cudaStream_t) { TORCH_CHECK(false, "not compiled"); } \
    template <> void run_mha_bwd_<type, size, causal>(Flash_bwd_params &, cudaStream_t) { TORCH_CHECK(false, "not compiled"); }
#define ABSENT_SPLIT(type, size, causal) \
    template <> void run_mha_fwd_splitkv_dispatch<type, size, causal>(Flash_fwd_params &, cudaStream_t) { TORCH_CHECK(false, "not compiled"); }
#define BOTH(what, type, size) what(type, size, true) what(type, size, false)
#define OTHER_SIZES(what, type) BOTH(what, type, 32) BOTH(what, type, 64) BOTH(what, type, 96) BOTH(what, type, 192) BOTH(what, type, 256)

namespace FLASH_NAMESPACE {
OTHER_SIZES(ABSENT, cutlass::bfloat16_t)
OTHER_SIZES(ABSENT, cutlass::half_t) BOTH(ABSENT, cutlass::half_t, 128)
OTHER_SIZES(ABSENT_SPLIT, cutlass::bfloat16_t) BOTH(ABSENT_SPLIT, cutlass::bfloat16_t, 128)
OTHER_SIZES(ABSENT_SPLIT, cutlass::half_t) BOTH(ABSENT_SPLIT, cutlass::half_t, 128)
}
CPP

kernel() {
    nvcc -c -O3 -std=c++17 --expt-relaxed-constexpr --expt-extended-lambda --use_fast_math -w -Xcompiler -fPIC \
        -U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ -U__CUDA_NO_HALF2_OPERATORS__ -U__CUDA_NO_BFLOAT16_CONVERSIONS__ \
        -gencode arch=compute_90,code=sm_90 "${without[@]}" "${headers[@]}" "$code/src/flash_$1_sm80.cu" -o "$work/$1.o"
}
host() {
    g++ -c -O2 -std=c++17 -fPIC -w -DTORCH_EXTENSION_NAME=flash_attn_2_cuda -DTORCH_API_INCLUDE_EXTENSION_H "${without[@]}" "${headers[@]}" \
        "$1" -o "$work/$(basename "$1" .cpp).o"
}

jobs=()
for name in fwd_hdim128_bf16 fwd_hdim128_bf16_causal bwd_hdim128_bf16 bwd_hdim128_bf16_causal; do
    kernel "$name" &
    jobs+=($!)
done
for file in "$code/flash_api.cpp" "$work/absent.cpp"; do
    host "$file" &
    jobs+=($!)
done
for job in "${jobs[@]}"; do
    wait "$job"
done

cp -r "$source/flash_attn" "$out/"
g++ -shared -o "$out/flash_attn_2_cuda$suffix" "$work"/*.o -L"$torch/lib" -lc10 -lc10_cuda -ltorch -ltorch_cpu -ltorch_cuda -ltorch_python \
    -L"$cuda/lib64" -lcudart
PYTHONPATH=$out "$python" -c "import flash_attn; print('flash-attn', flash_attn.__version__)"

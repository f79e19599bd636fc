#!/usr/bin/env bash
# Everything that only a card can tell, in under 8 minutes: builds with CUDA from a bare checkout, runs the GPU tests, and
# compares the graph modes on the shape of an 8B Llama. Fetches nothing.
#
#   bench/gpu_check.sh             on a machine with an NVIDIA GPU
#   bench/gpu_check.sh --dry-run   on one without: builds, compiles for an H100, runs what needs no card
#
# Needs on this machine: g++, a CUDA 13 toolkit (unless the dry run is to do without), and for $PYTHON (python3): jax with
# its CUDA plugin, flax, numpy, pybind11, setuptools, safetensors, tokenizers, jinja2, prometheus-client, pytest.
# Logs and results go to $OUT (build/gpu_check); a short table is printed last. Exit status: 0 if everything passed.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/build/gpu_check}
LIMIT_S=${LIMIT_S:-460}
dry=
case "${1:-}" in
    "") ;;
    --dry-run) dry=1 ;;
    *) echo "usage: bench/gpu_check.sh [--dry-run]"; exit 2 ;;
esac
mkdir -p "$OUT"
results=()
failed=0

left() { echo $((LIMIT_S - SECONDS)); }

# step NAME LOG COMMAND...: runs it for as long as there is time, and notes how it went.
step() {
    local name=$1 log=$OUT/$2 start=$SECONDS rc=0
    shift 2
    if [ "$(left)" -lt 5 ]; then
        results+=("$name|not begun: no time left|")
        failed=1
        return 1
    fi
    echo "== $name"
    timeout --kill-after=5 "$(left)" "$@" >"$log" 2>&1 || rc=$?
    if [ $rc = 0 ]; then
        results+=("$name|ok|$((SECONDS - start)) s; $(tail -n 1 "$log" | cut -c1-60)")
    else
        results+=("$name|FAILED ($rc)|$((SECONDS - start)) s; see ${log##*/}")
        failed=1
        tail -n 15 "$log"
    fi
    return $rc
}

show() {
    echo
    printf '| %-28s | %-12s | %s\n' "what" "outcome" ""
    printf '|-%-28s-|-%-12s-|\n' "----------------------------" "------------"
    local each name outcome more
    for each in "${results[@]}"; do
        IFS='|' read -r name outcome more <<<"$each"
        printf '| %-28s | %-12s | %s\n' "$name" "$outcome" "$more"
    done
    echo "$SECONDS s, everything in $OUT"
}

describe() {
    $PYTHON - <<'PY'
import importlib, importlib.metadata as metadata, sys
missing = []
for name in ("jax", "flax", "numpy", "pybind11", "setuptools", "safetensors", "tokenizers", "jinja2", "prometheus_client", "pytest"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing.append(f"{name} ({error})")
if missing:
    sys.exit("missing: " + ", ".join(missing))
import jax
names = ("jax", "jaxlib", "jax-cuda13-plugin", "flax")
have = {d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
print("python", sys.version.split()[0], *(f"{n} {have[n]}" for n in names if n in have), jax.devices()[0].device_kind)
PY
}

run_jaxserve() { $PYTHON -m jaxserve "$@"; }
export -f describe run_jaxserve
export PYTHON PYTHONUNBUFFERED=1

if [ -n "$dry" ]; then
    export JAX_PLATFORMS=cpu
else
    if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q ^GPU; then
        echo "no NVIDIA GPU here (nvidia-smi -L lists none); --dry-run does what needs none"
        exit 2
    fi
    nvidia-smi >"$OUT/nvidia-smi.txt" 2>&1
    export JAXSERVE_CUDA=1
fi

step "machine" machine.txt bash -c describe || { show; exit 1; }
step "build" build.txt "$PYTHON" -W ignore setup.py -q build_ext --inplace || { show; exit 1; }

if [ -n "$dry" ]; then
    # In a process of its own each: the compiler for the H100 must be set up before anything starts jax.
    if $PYTHON -c "import jax_plugins.xla_cuda13" 2>/dev/null; then
        step "compiled for an H100" deviceless.txt "$PYTHON" -m pytest -q -m h100 tests/cuda
    else
        results+=("compiled for an H100|left out|jax-cuda13-plugin is not installed")
    fi
    step "CUDA side on the CPU" cuda_tests.txt "$PYTHON" -m pytest -q -m "not h100" tests/cuda
    step "bench compare" compare.txt bash -c 'run_jaxserve bench compare --quick --json "$0/compare.json" --table "$0/compare.md"' "$OUT"
    cat "$OUT/compare.txt"
    show
    exit $failed
fi

step "GPU tests: streams" gpu_streams.txt "$PYTHON" -m pytest -q -rf -m gpu tests/cuda/test_gpu_streams.py
step "GPU tests: kernel, engine" gpu_engine.txt timeout 170 "$PYTHON" -m pytest -q -rf -m gpu tests/cuda/test_gpu_engine.py
step "GPU tests: captured steps" gpu_captured.txt timeout 90 "$PYTHON" -m pytest -q -rf -m gpu tests/cuda/test_gpu_captured.py
# One call for each, so that what was measured stays if time runs out. Nothing is begun that could not end.
for way in xla-cmdbuf cuda-graph xla; do
    step "8B, paged-cuda, $way" "compare-$way.txt" bash -c '
        run_jaxserve bench compare --models llama-3.1-8b --batches 1,8,64 --tokens 80 --rounds 2 --attention-backend paged-cuda \
            --ways "$1" --max-seconds "$2" --json "$0/compare-$1.json" --table "$0/compare-$1.md"' "$OUT" "$way" $(($(left) / 2))
    [ -f "$OUT/compare-$way.txt" ] && grep '^|' "$OUT/compare-$way.txt"
done
show
exit $failed

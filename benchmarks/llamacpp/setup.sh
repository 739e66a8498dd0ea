#!/usr/bin/env bash
# Put llama-cpp-python into a folder of its own, $VENV/llamacpp: nothing else in .venv changes.
#
#   benchmarks/llamacpp/setup.sh          compile it once (about 4 minutes on two cores), and keep it
#   benchmarks/llamacpp/setup.sh --kept   take what was kept before, or do nothing
#
# It is published as source only. Only libllama is compiled, not llama.cpp's tools, and kept under
# $XDG_CACHE_HOME/kvstore (~/.cache/kvstore), by version, interpreter's platform and kind of processor.
set -euo pipefail
cd "$(dirname "$0")/../.."

VERSION=0.3.36
VENV=${VENV:-.venv}
PYTHON=$VENV/bin/python
SITE=${KVSTORE_LLAMACPP:-$VENV/llamacpp}
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/kvstore

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2 && exit 1; }
install() { "$PYTHON" -m pip install -qq --no-compile --disable-pip-version-check "$@"; }

# What the library depends on: it is compiled for the processor that is here.
key() {
  { declare -f compile; uname -sm; grep -m1 '^flags' /proc/cpuinfo || true; } | sha256sum | cut -c1-16
}

unpack() {
  rm -rf "$SITE" "$SITE.new"
  mkdir -p "$SITE.new"
  tar -xf "$1" -C "$SITE.new"
  # What it needs and vLLM does not bring; the second is for its server.
  install --no-deps --target "$SITE.new" diskcache 'starlette-context>=0.3.6,<0.4'
  mv "$SITE.new" "$SITE"
}

tool() {
  command -v "$1" || { [ -x "$SCRATCH/tools/bin/$1" ] && echo "$SCRATCH/tools/bin/$1"; }
}

# The package's Python beside a libllama that finds its own libraries.
compile() {
  local source built=$SCRATCH/build flags=
  # GCC 12 drops most of what configures AMX's tiles, because its header hides that it is read: the first product of
  # matrices ends the process. So the tiles are not used.
  if grep -qs -m1 amx_tile /proc/cpuinfo; then flags='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'; fi
  "$PYTHON" -m pip download -qq --disable-pip-version-check --no-deps --no-binary :all: -d "$SCRATCH" "llama-cpp-python==$VERSION"
  tar -xzf "$SCRATCH/llama_cpp_python-$VERSION.tar.gz" -C "$SCRATCH"
  source=$SCRATCH/llama_cpp_python-$VERSION
  command -v c++ >/dev/null || die "a C++ compiler is needed (on Debian: g++)"
  tool cmake >/dev/null && tool ninja >/dev/null || install --no-deps --target "$SCRATCH/tools" cmake ninja
  PYTHONPATH=$SCRATCH/tools "$(tool cmake)" -G Ninja "-DCMAKE_MAKE_PROGRAM=$(tool ninja)" -S "$source/vendor/llama.cpp" -B "$built" \
    "-DCMAKE_C_FLAGS=$flags" "-DCMAKE_CXX_FLAGS=$flags" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON '-DCMAKE_BUILD_RPATH=$ORIGIN' -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON \
    -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF >"$SCRATCH/log" 2>&1 || { cat "$SCRATCH/log" >&2; exit 1; }
  PYTHONPATH=$SCRATCH/tools "$(tool cmake)" --build "$built" --target llama >>"$SCRATCH/log" || { tail -50 "$SCRATCH/log" >&2; exit 1; }
  cp -r "$source/llama_cpp" "$SCRATCH/site/"
  mkdir -p "$SCRATCH/site/llama_cpp/lib"
  cp -a "$built"/bin/lib*.so* "$SCRATCH/site/llama_cpp/lib/"
}

if [ "$(cat "$SITE/key" 2>/dev/null)" = "$(key)" ]; then exit 0; fi
KEPT=$CACHE/llama-cpp-python-$VERSION-$(key).tar
if [ ! -e "$KEPT" ]; then
  [ "${1:-}" != --kept ] || exit 0
  say "compiling llama.cpp of llama-cpp-python $VERSION, once (about 4 minutes on two cores)"
  SCRATCH=$(mktemp -d)
  trap 'rm -rf "$SCRATCH"' EXIT
  mkdir -p "$SCRATCH/site" "$CACHE"
  compile
  tar -cf "$KEPT.$$" -C "$SCRATCH/site" .
  mv "$KEPT.$$" "$KEPT"
fi
unpack "$KEPT"
key >"$SITE/key"
PYTHONPATH=$SITE "$PYTHON" -c 'import llama_cpp; print("setup: llama-cpp-python", llama_cpp.__version__)'

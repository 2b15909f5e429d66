#!/usr/bin/env bash
# What is to be known of one GPU, in under eight minutes and without a network:
#
#   benchmarks/gpu.sh [--wheels FOLDER] [--peer-python PYTHON] [--purejaxrl FOLDER] [--out FOLDER] [--cpu]
#
# The device lane of the tests, speed beside rejax and PureJaxRL, language models, a profile, the most important first:
# benchmarks/device.py says what each part does. Each has its own time, so that a slow one costs no other its turn.
#
# --wheels      what this Python lacks: FOLDER/*.whl for jaxpg, FOLDER/peers/*.whl for rejax and PureJaxRL
#               (benchmarks/README.md says which). They are unpacked beside Python's packages and not into them.
# --peer-python a Python that has rejax, where that is an environment of its own.
# --purejaxrl   a clone of PureJaxRL, which is no package; left out without it.
# --out         where results go (default benchmarks/results).
# --cpu         a rehearsal in small on a CPU.
# PYTHON=...    another Python than python3.
set -euo pipefail

limit=470  # seconds in all
parts=(tests:110 speed:190 language:110 profile:60)  # of each part at most; what one does not need is left to the next

fail() { echo "gpu.sh: $*" >&2; exit 2; }

repository=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3} wheels='' peer_python='' options=() cpu=''
while [ $# -gt 0 ]; do
  case $1 in
    --cpu) cpu=yes options+=(--cpu) && shift && continue ;;
    --wheels | --peer-python | --purejaxrl | --out) [ $# -ge 2 ] || fail "$1 takes a path." ;;
    *) fail "$1 is none of --wheels, --peer-python, --purejaxrl, --out and --cpu." ;;
  esac
  [ "$1" = --out ] || [ -e "$2" ] || fail "there is no $2 ($1)."
  path=$(realpath -ms "$2")
  case $1 in
    --wheels) wheels=$path ;;
    --peer-python) peer_python=$path ;;
    *) options+=("$1" "$path") ;;
  esac
  shift 2
done
command -v "$python" >/dev/null || fail "there is no $python: name a Python with PYTHON=..."

work=$(mktemp -d)
running=''
trap '[ -z "$running" ] || kill "$running" 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM  # timeout puts a part out of reach of Ctrl-C, together with all that it has started
ours=$repository

# Without --no-deps pip would want wheels of all that is installed already.
unpack() { "$python" -m pip install -q --no-index --no-deps --no-compile --target "$1" "${@:2}"; }
if [ -n "$wheels" ]; then
  compgen -G "$wheels/*.whl" >/dev/null || fail "there is no wheel in $wheels."
  unpack "$work/ours" "$wheels"/*.whl
  ours=$ours:$work/ours
  if compgen -G "$wheels/peers/*.whl" >/dev/null; then
    unpack "$work/peers" "$wheels"/peers/*.whl
    peer_python=$work/peer-python  # the peers' gymnax is an older one, so their packages come first
    cat >"$peer_python" <<END
#!/bin/sh
PYTHONPATH="$work/peers:\${PYTHONPATH:+\$PYTHONPATH:}$ours" exec "$(command -v "$python")" "\$@"
END
    chmod +x "$peer_python"
  fi
fi
export PYTHONPATH=$ours${PYTHONPATH:+:$PYTHONPATH}

# Prints why a Python cannot import something, the last line of its error.
lacks() { local said; said=$("$1" -c "import $2" 2>&1) || echo "${said##*$'\n'}"; }
lacking=$(lacks "$python" 'gymnax.environments, jaxpg.training, rich')
[ -z "$lacking" ] || fail "$python cannot run jaxpg ($lacking): bring wheels along with --wheels."
lacking=$([ -z "$peer_python" ] || lacks "$peer_python" rejax)
if [ -n "$lacking" ]; then
  echo "gpu.sh: without the peers, which $peer_python cannot run ($lacking)."
elif [ -n "$peer_python" ]; then
  options+=(--peer-python "$peer_python")
fi

export XLA_PYTHON_CLIENT_PREALLOCATE=false  # several programs are in memory at once, and take turns
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
[ -z "$cpu" ] || JAX_PLATFORMS=cpu
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}  # named, so that nothing runs on a CPU unnoticed
export PYTHONUNBUFFERED=1

device=$repository/benchmarks/device.py
"$python" "$device" check "${options[@]}"
status=0
for part in "${parts[@]}"; do
  left=$((limit - SECONDS)) seconds=${part#*:} name=${part%:*}
  seconds=$((seconds < left ? seconds : left))
  if [ "$seconds" -lt 5 ]; then
    echo "== $name: no time left"
    status=1
    continue
  fi
  # Which of Triton's products is fastest is found by running many of each: a transformer takes minutes to be made.
  [ "$name" != language ] || export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_triton_gemm=false"
  echo "== $name, at most $seconds s"
  timeout --kill-after=5 "$seconds" "$python" "$device" "$name" --seconds "$seconds" "${options[@]}" &
  running=$!
  wait "$running" || {
    echo "gpu.sh: $name has failed or was cut off (status $?); what it had found is written."
    status=1
  }
  running=''
done
"$python" "$device" table "${options[@]}"
echo "All in $SECONDS s"
exit "$status"

#!/bin/bash
# Make an environment with the real SGLang on a CPU build of torch, and print its python: for the suite `sglang`.
#
#   tests/sglang/setup_env.sh
#
# Kept in the cache folder under a name made from requirements.txt, so that it is made once and again when a pin
# changes. caketin is installed as this working tree.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
torch=torch==2.13.0
[ "$("$python" -c 'import sys; print(sys.version_info >= (3, 11))')" = True ] ||
  { echo "SGLang needs Python 3.11 or newer; name one: PYTHON=python3.11 $0" >&2; exit 1; }
tag=$({ "$python" -VV; echo "$torch"; cat "$here/requirements.txt"; } | sha256sum | cut -c1-12)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/caketin
venv=$cache/sglang-$tag
pip() { "$venv/bin/python" -m pip install ${PIP_FLAGS:-} --disable-pip-version-check --quiet "$@" >&2; }

mkdir -p "$cache"
# Two suites of two clones may come at once.
exec 9>"$venv.lock"
flock 9
if [ ! -e "$venv/.done" ]; then
  echo "Making $venv with torch and SGLang (a minute or two, once) ..." >&2
  "$python" -m venv --clear "$venv"
  # torch by itself: its own dependencies are wanted, those of the rest are listed.
  pip "$torch" -c "$here/requirements.txt"
  pip --no-deps -r "$here/requirements.txt"
  touch "$venv/.done"
fi
if [ "$(cat "$venv/.repo" 2>/dev/null)" != "$repo" ]; then
  pip --no-deps -e "$repo"
  echo "$repo" >"$venv/.repo"
fi
echo "$venv/bin/python"

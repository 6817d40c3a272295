#!/usr/bin/env bash
# One GPU, at most 8 minutes: numerics on the device, then the time of one rank's shard of CoLA-7b under each layout.
# Takes the options of gpu.py. PYTHON chooses the interpreter.
set -u
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
[ -x "$python" ] || python=python3
# The script stops by itself after --budget seconds; this is for a step that hangs.
exec timeout --kill-after=5 480 "$python" "$here/gpu.py" "$@"

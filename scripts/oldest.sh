#!/usr/bin/env bash
# The tests on the oldest versions that pyproject.toml allows, in an environment of their own; or those that are given.
# The torch of that age has CUDA's libraries with it: some 7 GB under build/oldest.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${FOLDER:-build/oldest}
[[ $# -gt 0 ]] || set -- tests/{cli,kernels,runtime,quant} tests/integrations --ignore=tests/integrations/vllm \
    tests/test_{layout,bitplane,checkpoint,policy,experts,patching,patching_devices,shared_experts}.py
python3 -m venv "$folder"
bounds=$("$folder"/bin/python - <<'PYTHON'
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"], *extras["hf"], *extras["plots"]]
print("\n".join(re.sub(">=", "==", line.split(";")[0].strip()) for line in wanted))
PYTHON
)
"$folder"/bin/python -m pip install --quiet --constraint <(echo "$bounds") -e '.[hf,plots]' \
    hypothesis psutil pytest pytest-timeout pytest-xdist
"$folder"/bin/python -m pip list | grep -iE "^($(echo "$bounds" | cut -d= -f1 | paste -sd'|'))[[:space:]]"
"$folder"/bin/python -m pytest -q -n 2 "$@"

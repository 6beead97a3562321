#!/usr/bin/env bash
# The Hugging Face tests on the oldest transformers that is supported, in an environment of their own.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv build/transformers-5.9
build/transformers-5.9/bin/python -m pip install --quiet --constraint <(grep -v '^\(transformers\|tokenizers\|huggingface\)' constraints-cpu.txt) \
    -e '.[hf]' hypothesis psutil pytest pytest-timeout pytest-xdist 'transformers==5.9.*'
build/transformers-5.9/bin/python -m pytest -q -n 2 tests/integrations tests/test_patching.py "$@"

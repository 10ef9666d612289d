#!/usr/bin/env bash
# Build dist/: the sdist, and the wheel for manylinux_2_28. `make dist` calls it with the tools of .venv on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf dist build/wheel
python -m build --no-isolation --sdist --outdir dist .
python -m build --no-isolation --wheel --outdir build/wheel \
  -C cmake.define.TILEWRIGHT_MANYLINUX=ON -C build-dir=build/manylinux .
auditwheel show build/wheel/*.whl
# libtorch_cpu.so is loaded by `import torch` before ours; a copy in the wheel would be a second torch.
auditwheel repair --plat manylinux_2_28_x86_64 --only-plat --exclude libtorch_cpu.so --wheel-dir dist build/wheel/*.whl
twine check --strict dist/*
limit=$((2 << 20))
for sdist in dist/*.tar.gz; do
  size=$(stat -c %s "$sdist")
  [ "$size" -lt "$limit" ] || { echo "$sdist: $size bytes, more than $limit" >&2; exit 1; }
done
ls -l dist

"""Which kernels serve a batch on a CUDA device: the one place where the regime is chosen."""

from __future__ import annotations

from pagedweight.kernels.fused_moe import launch_fused_moe

# The grouped kernels serve every batch.
launch = launch_fused_moe

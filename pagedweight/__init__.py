"""pagedweight: MoE expert weights and the KV cache share one GPU memory."""

__version__ = "0.1.0"

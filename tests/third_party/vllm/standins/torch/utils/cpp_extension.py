"""vLLM's setup.py looks for CUDA and ROCm here."""

CUDA_HOME = ROCM_HOME = None

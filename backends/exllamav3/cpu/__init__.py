"""The engine without a GPU: torch functions in place of its compiled CUDA extension.

`install()` runs once, before anything imports `exllamav3`. The kernels are in one file a family; `extension.py` puts
them together, `install.py` lists everything that is replaced in the engine itself.

Arithmetic is fp32 throughout, keys and values are kept in fp32, and a matrix product of one or two rows runs in fp16,
where half the bytes are twice the speed. Not covered: EXL3-quantised weights, a quantised key/value cache, KDA and
Mamba2 layers, vision towers other than Qwen's, n-gram drafts from a corpus.

libgomp keeps a pool of workers for every thread that calls it, and on few cores two pools make decoding two to three
times slower: exactly one thread of the process may call torch. The number of OpenMP threads stays torch's default.
"""

from backends.exllamav3.cpu.install import install

__all__ = ["install"]

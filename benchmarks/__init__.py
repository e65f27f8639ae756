"""Time and memory of rankgrad beside other formulations and libraries; run from a clone, not part of the wheel.

    python -m benchmarks.losses          forward and backward of every loss
    python -m benchmarks.kernels         the fused kernels, on a GPU
    python -m benchmarks.errors_at_size  errors of the kernels among a million candidates
    python -m benchmarks.evaluation      every metric of a test set
    python -m benchmarks.distributed     one batch on several processes
    python -m benchmarks.list_ap         the AP loss of one long list
    python -m benchmarks.plot            a picture of what `kernels` measured

Measured rows are in `benchmarks/results`. `benchmarks.trials` are trials of faults: kills, bad input, leaks.
"""

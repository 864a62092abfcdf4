"""GPU kernels of the executors; see the twin package for the other framework."""

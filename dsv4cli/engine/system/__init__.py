"""The machine: devices, memory, files, threads and signals."""

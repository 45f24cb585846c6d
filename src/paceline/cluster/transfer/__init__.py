"""How blocks of a cache get from one process to another: by shared memory, TCP, CUDA IPC or NIXL."""

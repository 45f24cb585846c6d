"""What the ranks of one model say to each other: threads of a process, or processes by torch.distributed."""

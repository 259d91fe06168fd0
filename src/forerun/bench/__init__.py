"""What speculation is worth on this machine: measured, interleaved, with the ceiling and other engines beside it."""

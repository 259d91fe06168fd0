"""The guessers: one file each. A new one is a file, and a line where `forerun.config` builds them."""

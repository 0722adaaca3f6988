"""Capital letters, rendered from the fonts of this machine, as pictures and as moving clips."""

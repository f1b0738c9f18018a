"""What should come out: parameters, FLOPs, bytes and seconds predicted from specs. Imports no torch."""

"""Hardware statements: the MACHINE level of the IR."""

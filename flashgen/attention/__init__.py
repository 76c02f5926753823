"""The TILE loop nests of attention: mathematics on tiles; no waits, no barriers, no device."""

"""The tiling planner: block sizes, stages, warps and the map of shared memory, from a chip's limits."""

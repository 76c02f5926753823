"""How fast flashgen is beside what a user could pick instead.

`grid` says which attentions are timed and how many FLOPs each has, `peers` who competes, `measure` how the clock is
read, `report` and `plot` what is shown, `run` ties them together and is the command `python -m flashgen bench`.

`tune` is the command `python -m flashgen tune`: it lets the planner's `candidates` compete with each other on the same
grid, and `regret` says from its file how far the planner's choices are behind.

Nothing is imported here: the command line must answer `--help` without torch and without a GPU.
"""

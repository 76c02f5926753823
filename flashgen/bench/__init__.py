"""How fast flashgen is beside what a user could pick instead.

`grid` says which attentions are timed and how many FLOPs each has, `peers` who competes, `measure` how the clock is
read, `report` and `plot` what is shown, `run` ties them together and is the command `python -m flashgen bench`.
Nothing is imported here: the command line must answer `--help` without torch and without a GPU.
"""

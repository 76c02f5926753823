"""The command line, `python -m flashgen`: one module a command, each imported when it is asked for."""

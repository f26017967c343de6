"""What a run needs of a machine that is not there: each program compiled, none of them run."""

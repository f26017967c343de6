"""What a run leaves on disk and reads back: checkpoints, small weight files, its folder."""

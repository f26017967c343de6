"""What a run tells people: the metric log, the live view, the final table and the figure."""

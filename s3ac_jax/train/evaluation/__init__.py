"""Evaluation: suites of questions, answered many times, graded and recorded."""

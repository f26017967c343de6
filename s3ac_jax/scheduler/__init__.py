"""Which prompts are rolled out next: the prompt stream, their history, uniform and DAPS."""

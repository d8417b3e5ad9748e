"""Training of the tokenizer, the target and the drafter, on one skeleton (`run.py`)."""

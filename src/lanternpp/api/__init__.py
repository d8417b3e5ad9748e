"""What a user of the library calls: the pipeline, its options and its results."""

"""The interface of the library: the pipeline, its options and its results."""

"""Pictures over HTTP: orders come and go between the steps of running batches."""

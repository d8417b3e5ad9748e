"""Pictures over HTTP. Pictures of many clients share running batches, which they enter and leave between the steps."""

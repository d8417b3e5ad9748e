"""What a training learns from: computed once, kept on disk in shards, and read back by every later run."""

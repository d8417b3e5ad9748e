"""All that knows of C: the sources, their binding, packed weights, threads."""
